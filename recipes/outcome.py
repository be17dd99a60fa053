"""How a rank ends: exit codes, the status file of each rank, and the wish to stop.

with Outcome(rank=3, local_rank=1) as outcome:
    ...  # ValueError -> 2, TopologyError -> 3, NumbersError -> 4, Stopped -> 75
return outcome.code

Under `octet launch` the status also goes to the node-local file that OCTET_STATUS names, whatever
became of the run folder; a result that is put into `outcome.result` travels back with it.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

logger = logging.getLogger(__name__)

# What gloo and NCCL raise on the ranks that are left when one ends.
PEER_LEFT = ("closed by peer", "reset by peer", "Broken pipe", "remote process exited")
# What the machine refuses and a user can mend: rights, room, quota, a disk that fails.
SYSTEMS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO}
# What allocators say: CUDA's and the host's in torch, and a library's below it.
MEMORY = (
    *("out of memory", "_STATUS_ALLOC_FAILED", "DefaultCPUAllocator", "Cannot allocate memory"),
    *("could not create a primitive", "could not create a memory"),  # oneDNN's words for it
)
DONE, USAGE, TOPOLOGY, NUMBERS, STOPPED = 0, 2, 3, 4, 75


class TopologyError(RuntimeError):
    """The processes, devices or strategy found are not those that were asked for."""


class JoiningError(TopologyError):
    """The ranks did not find each other; often because one of them ended at once."""


class NumbersError(RuntimeError):
    """Losses or gradients stayed non-finite."""


class Stopped(RuntimeError):
    """The run stopped on request, with a checkpoint; the same command goes on."""


class StorageError(RuntimeError):
    """A checkpoint could not be written; the older ones are untouched."""


class CollectiveError(RuntimeError):
    """Not all ranks came to a point where all of them must act together."""


class PeerError(RuntimeError):
    """Another rank found the error and reports it; carries that rank's exit code."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


def exit_code(error: BaseException) -> int:
    """The exit code that tells the launcher what kind of end this was; 1 for a fault of our own."""
    if isinstance(error, PeerError):
        return error.code
    kinds = ((ValueError, USAGE), (StorageError, USAGE), (TopologyError, TOPOLOGY))
    for kind, code in (*kinds, (NumbersError, NUMBERS), (Stopped, STOPPED)):
        if isinstance(error, kind):
            return code
    if out_of_memory(error):
        return USAGE  # another start would end alike
    return USAGE if isinstance(error, OSError) and error.errno in SYSTEMS else 1


def out_of_memory(error: BaseException) -> bool:
    """Whether an allocator, of a GPU or of the host, had no room."""
    if isinstance(error, PeerError):  # it only tells of another rank's
        return False
    told = isinstance(error, RuntimeError) and any(text in str(error) for text in MEMORY)
    system = isinstance(error, OSError) and error.errno == errno.ENOMEM
    return told or system or isinstance(error, MemoryError)


class Outcome:
    """Turns the end of a rank into an exit code and `status/rank-N.json` in the run folder.

    Errors that every rank of a node finds alike (a fault in the run file) are printed by its first
    rank only.
    """

    def __init__(self, *, rank: int, local_rank: int) -> None:
        self.rank, self.local_rank = rank, local_rank
        self.folder: Path | None = None  # set as soon as the run folder is known
        self.joined = (
            False  # True once the ranks act together: from then on any rank's error is its own
        )
        self.code = DONE
        self.consequence = False  # True where this rank ended because another one had
        self.result: Any = None  # JSON-able; for `octet launch`, not for the run folder
        self.closing = ExitStack()  # what must be given back however the rank ends
        self.memory_advice: Callable[[], str] = str  # what to do when memory has run out

    def __enter__(self) -> Outcome:
        return self

    def write(self, state: str, reason: str = "", code: int | None = None) -> None:
        """Record this rank's state; `code` is None while it runs."""
        record: dict[str, Any] = {"rank": self.rank, "host": socket.gethostname()}
        record |= {"pid": os.getpid(), "state": state, "job": os.environ.get("OCTET_JOB")}
        record |= {"exit_code": code, "reason": reason, "consequence": self.consequence}
        record |= {"time": time.time()}
        if "OCTET_STATUS" in os.environ:
            beside = Path(os.environ["OCTET_STATUS"] + ".partial")
            beside.write_text(json.dumps(record | {"result": self.result}), encoding="utf-8")
            beside.rename(os.environ["OCTET_STATUS"])  # its reader polls
        if self.folder is not None:
            path = self.folder / "status" / f"rank-{self.rank}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(record) + "\n", encoding="utf-8")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self.closing.close()
        if error is None:
            self._end("done")
            return False
        if isinstance(error, SystemExit):
            return False
        self.code = exit_code(error)
        left = self.code == 1 and self.joined and any(text in str(error) for text in PEER_LEFT)
        self.consequence = left or isinstance(error, (PeerError, JoiningError))
        said = str(error)
        if out_of_memory(error):
            said = said.strip().splitlines()[0] if said.strip() else "no memory"
            said = "\n".join(filter(None, [said, self.memory_advice()]))
        self._end("stopped" if self.code == STOPPED else "failed", said)
        if left:
            sys.stderr.write(f"\nrank {self.rank}: another rank has left; its message says why\n")
        elif isinstance(error, CollectiveError):
            sys.stderr.write(f"\nrank {self.rank}: {error}\n")
        elif self.code == 1:
            logger.error("rank %d failed", self.rank, exc_info=error)
        elif isinstance(error, Stopped):
            if self.rank == 0:  # all ranks stopped at the same update
                sys.stderr.write(f"\n{error}\n")
        elif not isinstance(error, PeerError) and (self.joined or self.local_rank == 0):
            sys.stderr.write(f"\nrank {self.rank}: {said}\n" if self.joined else f"\n{said}\n")
        return True

    def _end(self, state: str, reason: str = "") -> None:
        try:
            self.write(state, reason, self.code)
        except OSError as error:  # a full disk must not hide how the rank ended
            logger.error("rank %d: its status can't be written: %s", self.rank, error)


class StopWish:
    """SIGTERM, SIGINT and SIGUSR1 as a wish that the ranks agree on at the next window.

    Launchers repeat the signal, so a second one must not kill a rank that is saving. SIGUSR1 is
    what schedulers send some minutes before the time is up (Slurm's --signal).
    """

    def __init__(self) -> None:
        self.requested = False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
