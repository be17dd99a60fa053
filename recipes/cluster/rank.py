"""One rank under supervision: started by every launcher in place of the script, which it runs.

    python recipes/cluster/rank.py [what the launcher adds] /tmp/octet-…/job.json

It takes arguments and environment from the job file, sends the script's output to the rank's own
log, and notes start, end and exit code in the node's folder of the job, where the agent reads them.
Launchers report a signal's death in their own ways, or as success; the note says what happened.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

STOPPED = 75  # recipes/outcome.py, which this file doesn't import: it starts in milliseconds
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent is gone, however that ended."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before the call
        os.kill(os.getpid(), signal.SIGKILL)


def die_with_lock(folder: Path) -> None:
    """Kill this process when the agent is gone, which locks its folder as long as it lives.

    The kernel's own notice reaches the launcher; DeepSpeed's has children that outlive it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        fcntl.flock(descriptor, fcntl.LOCK_SH)  # waits
        os.kill(os.getpid(), signal.SIGKILL)
    # Else there is no lock: the agent's file system knows none.


def note(path: Path, record: dict[str, Any]) -> None:
    """Write a marker that its reader never sees half of."""
    beside = path.with_suffix(".partial")
    beside.write_text(json.dumps(record), encoding="utf-8")
    beside.rename(path)


def environment(job: dict[str, Any], host: str, slots: int) -> dict[str, str]:
    """The rank's environment: the launcher's variables, then the job's, which win."""
    own = dict(os.environ)
    own.pop("PYTHONPATH", None)  # the launchers add their working directory
    before = own.pop("OCTET_TMPDIR", "")
    if job["job"] in own.get("TMPDIR", ""):  # the launcher's files go into the job's folder
        own |= {"TMPDIR": before or "/tmp"}
    own["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // slots))
    return own | job["env"] | job["node_env"].get(host, {}) | {"OCTET_JOB": job["job"]}


def main(argv: list[str]) -> int:
    """Run the script as this rank; returns its exit code, signals as 128 + n.

    A stop with a checkpoint returns 0: launchers would end its peers, which are about to follow.
    """
    job_file = Path(argv[-1])
    job = json.loads(job_file.read_text(encoding="utf-8"))
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    places = [(name, slots) for name, slots in job["hosts"] for _ in range(slots)]
    host, slots = places[rank]
    marker = job_file.parent / host / f"rank-{rank}.json"
    env = environment(job, host, slots)
    env["OCTET_STATUS"] = str(marker.with_name(f"rank-{rank}.status"))
    log = Path(job["logs"]) / f"rank-{rank}.{host}.log"
    own_pid = os.getpid()
    die_with(os.getppid())
    threading.Thread(target=die_with_lock, args=(marker.parent,), daemon=True).start()
    children: list[subprocess.Popen[bytes]] = []

    def forward(number: int, frame: FrameType | None) -> None:
        for running in children:
            if running.poll() is None:
                running.send_signal(signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, forward)
    with log.open("ab") as out:
        child = subprocess.Popen(
            [sys.executable, "-u", job["script"], *argv[:-1], *job["arguments"]],
            cwd=job["working_dir"],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: die_with(own_pid),
        )
    children.append(child)
    record = {"rank": rank, "local_rank": local_rank, "host": host, "pid": child.pid}
    record |= {"log": str(log), "code": None, "started": time.time()}
    note(marker, record)
    code = child.wait()
    code = 128 - code if code < 0 else code
    note(marker, record | {"code": code, "ended": time.time()})
    return 0 if code == STOPPED else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
