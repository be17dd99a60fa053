"""A rank that does what it is told, without torch: for watching how jobs end.

actor.py FOLDER [key=value ...], where `N=act` tells rank N: done, exit0, kill, usage, numbers,
peer, wait (for SIGTERM, then stopped), stay (whatever comes), child (leave one behind, then die).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recipes.outcome import NumbersError, Outcome, PeerError, Stopped, StopWish


def act(what: str, folder: Path, rank: int) -> None:
    if what == "exit0":
        os._exit(0)
    if what == "kill":
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "usage":
        raise ValueError("optim.lr='fast': expected a valid number")
    if what == "numbers":
        raise NumbersError("loss is nan")
    if what == "peer":
        time.sleep(1.0)
        raise PeerError("rank 0: optim.lr='fast'", 2)
    if what == "child":
        words = [sys.executable, "-c", "import time; time.sleep(600)"]
        child = subprocess.Popen(words, start_new_session=True)
        (folder / "child").write_text(str(child.pid))
        os.kill(os.getpid(), signal.SIGKILL)
    if what in ("wait", "stay"):
        wish, signals = StopWish(), 0
        (folder / f"waiting-{rank}").touch()
        for _ in range(6000):
            time.sleep(0.02)
            if wish.requested and what == "wait":
                time.sleep(0.5)  # saving; a second signal would be noted here
                raise Stopped("stopped at update 7 of 9; start it again to go on")
        raise AssertionError(signals)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("rest", nargs="*")
    parser.add_argument("--local_rank")
    args = parser.parse_args()
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    with Outcome(rank=rank, local_rank=local_rank) as outcome:
        outcome.joined = True
        seen = {
            "argv": args.rest,
            "env": dict(os.environ),
            "cwd": str(Path.cwd()),
            "pid": os.getpid(),
        }
        (args.folder / f"seen-{rank}.json").write_text(json.dumps(seen))
        print(f"rank {rank} is here", flush=True)
        plan = dict(word.split("=", 1) for word in args.rest if "=" in word)
        act(plan.get(str(rank), "done"), args.folder, rank)
        outcome.result = {"rank": rank}
    return outcome.code


if __name__ == "__main__":
    sys.exit(main())
