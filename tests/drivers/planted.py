"""The recipe with planted faults in its checkpoints, for tests; only ranks in FAULTY have them.

KILL_OPERATION=7        SIGKILL at this rank's 7th operation on its checkpoints' folder,
KILL_WHEN=half          before, after or (a write) half-way through it,
KILL_ALL=1              and of every rank of its host at the same instant
KILL_UPDATE=5           SIGKILL when update 5 has been applied, before anything is saved
ABSENT_UPDATE=4         the rank never comes out of update 4
SLOW_FSYNC_MS=300       every fsync below the checkpoints' folder takes so long
SLOW_EVALUATION_S=2     an evaluation takes so much longer
FULL_AT=4:100000,9:-1   at update 4 the disk is filled up to 100,000 bytes, at 9 it is freed
LYING_DISK=1            free space is reported that is not there
RESAVE=1                nothing is trained: what was loaded is saved again at the same update
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recipes import pretrain
from recipes.outcome import Outcome, Stopped

OPERATIONS = "write fsync rename replace mkdir unlink rmdir open link truncate ftruncate pwrite"
SAVES = "checkpoints"
statvfs = os.statvfs


class Operations:
    """Counts this rank's operations on checkpoints, and ends it at one of them."""

    def __init__(self, at: int, when: str, peers: Callable[[], list[int]]) -> None:
        self.at, self.when, self.peers, self.count = at, when, peers, 0

    def die(self, what: str) -> None:
        os.write(2, f"planted: SIGKILL {self.when} operation {self.count}, {what}\n".encode())
        for pid in [*self.peers(), os.getpid()]:
            os.kill(pid, signal.SIGKILL)

    def wrap(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            path = place(args, kwargs.get("dir_fd"))
            if SAVES not in Path(path).parts or (name == "open" and not creates(args, kwargs)):
                return original(*args, **kwargs)
            self.count += 1
            if self.count != self.at:
                return original(*args, **kwargs)
            told = f"{name} {Path(path).name}"
            if self.when == "half" and name in ("write", "pwrite"):
                view = memoryview(args[1]).cast("B")
                original(args[0], view[: len(view) // 2], *args[2:])
                self.die(told)
            try:
                if self.when == "after":
                    original(*args, **kwargs)
            finally:
                self.die(told)
            return None

        return wrapped


def creates(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an os.open may make a file."""
    flags = kwargs.get("flags", args[1] if len(args) > 1 else 0)
    return bool(flags & os.O_CREAT)


def place(args: tuple[Any, ...], folder: int | None = None) -> str:
    """The path that an operation is about; `folder` is an open one that the name is relative to."""
    if not args:
        return ""
    if not isinstance(args[0], int):
        return f"{opened(folder)}/{os.fsdecode(args[0])}" if folder else os.fsdecode(args[0])
    return opened(args[0])


def opened(handle: int) -> str:
    """The path of an open file; empty for what has none."""
    try:
        return str(Path(f"/proc/self/fd/{handle}").readlink())
    except OSError:
        return ""


def number(name: str) -> int:
    """A fault's number; -1 where it is not planted."""
    return int(os.environ.get(name, "-1"))


def plant_kill() -> None:
    """KILL_OPERATION and KILL_UPDATE."""
    outcome: list[Any] = []
    if (at := number("KILL_OPERATION")) > 0:

        def peers() -> list[int]:
            if os.environ.get("KILL_ALL") != "1":
                return []
            import json
            import socket

            folder = outcome[0].folder / "status"
            told = [json.loads(path.read_text()) for path in folder.glob("rank-*.json")]
            here = [t["pid"] for t in told if t["host"] == socket.gethostname()]
            return [pid for pid in here if pid != os.getpid()]

        counter = Operations(at, os.environ.get("KILL_WHEN", "before"), peers)
        write = Outcome.write

        def noting(self: Any, state: str, *args: Any, **kwargs: Any) -> None:
            write(self, state, *args, **kwargs)
            if state == "training" and not outcome:  # loading is over; `begins` counts from here
                outcome.append(self)
                wrap_all()

        def wrap_all() -> None:
            for name in OPERATIONS.split():
                setattr(os, name, counter.wrap(name, getattr(os, name)))

        Outcome.write = noting  # type: ignore[method-assign]


def plant_updates() -> None:
    """What happens when an update has been applied, before anything else is done about it."""
    dies = number("KILL_UPDATE")
    filling = dict(
        tuple(map(int, part.split(":")))
        for part in os.environ.get("FULL_AT", "").split(",")
        if part
    )
    after = pretrain.after_update

    def wrapped(job: Any, *args: Any, **kwargs: Any) -> Any:
        step = job.progress.applied
        if step == dies:
            os.write(2, f"planted: SIGKILL after update {step}\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)
        if step in filling and job.engine.peers.rank == 0:
            time.sleep(0.3 if filling[step] < 0 else 0.0)  # what is being written must fail first
            fill(job.run.folder.parent, filling[step])
        return after(job, *args, **kwargs)

    pretrain.after_update = wrapped


def fill(folder: Path, leave: int) -> None:
    """Fill a disk but for so many bytes; -1 frees what was filled."""
    ballast = folder / "ballast"
    ballast.unlink(missing_ok=True)
    if leave < 0:
        return
    left = statvfs(folder)
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, left.f_bavail * left.f_frsize - leave))


def plant_disk() -> None:
    """SLOW_FSYNC_MS and LYING_DISK."""
    if (slow := number("SLOW_FSYNC_MS")) > 0:
        fsync = os.fsync

        def slowly(handle: int) -> None:
            if SAVES in place((handle,)):
                time.sleep(slow / 1000)
            fsync(handle)

        os.fsync = slowly
    if os.environ.get("LYING_DISK") == "1":
        kind = os.statvfs_result

        def lying(path: Any) -> Any:
            values = list(statvfs(path))
            values[3] = values[4] = values[2]  # all blocks are free
            return kind(values)

        os.statvfs = lying


def plant_evaluation() -> None:
    """SLOW_EVALUATION_S: it says so in the run folder, sleeps, and evaluates."""
    if (slow := number("SLOW_EVALUATION_S")) > 0:
        evaluate = pretrain.evaluate

        def slowly(job: Any) -> Any:
            if job.progress.applied and job.engine.peers.rank == 0:
                (job.run.folder / "logs").mkdir(exist_ok=True)
                (job.run.folder / "logs" / "evaluating").touch()
                time.sleep(slow)
            return evaluate(job)

        pretrain.evaluate = slowly


def plant_absence() -> None:
    """ABSENT_UPDATE."""
    from recipes.saving import Saving

    save, absent = Saving.save, number("ABSENT_UPDATE")

    def wrapped(self: Any, job: Any, reason: str) -> None:
        if job.progress.applied == absent:
            time.sleep(3600)
        save(self, job, reason)

    Saving.save = wrapped  # type: ignore[method-assign]


def plant_resave() -> None:
    """RESAVE."""

    def train(job: Any) -> None:
        job.saving.save(job, "stop")
        job.meter.close()
        raise Stopped("saved again what was loaded")

    if os.environ.get("RESAVE") == "1":
        pretrain.train = train


if __name__ == "__main__":
    if os.environ["RANK"] in os.environ.get("FAULTY", "0,1,2,3,4,5,6,7").split(","):
        plant_kill()
        plant_updates()
        plant_disk()
        plant_evaluation()
        plant_absence()
        plant_resave()
    sys.exit(pretrain.main())
