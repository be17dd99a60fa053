"""One run per folder: a lock that a second start finds held, and that a dead run does not hold.

with FolderLock(folder / "lock", {"host": "worker-0", "job": "4711"}):
    ...

The kernel's record lock says at once whether a run on this host, or on any host where the file
system carries locks, is alive. Where it may not, the holder's beat does: the record in the file
changes every few seconds while the holder lives.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import struct
import threading
import time
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any

logger = logging.getLogger(__name__)

BEAT_S = 4.0
WATCH_S = 10.0  # more than two beats
SIZE = 1024  # bytes of the record, padded, so that it is rewritten in place
UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}
HELD = {errno.EAGAIN, errno.EACCES}
_held_here: set[Path] = set()  # closing a second descriptor would drop the first one's lock


class FolderLock:
    """The lock of a run folder; a context manager."""

    def __init__(self, path: Path, who: dict[str, Any]) -> None:
        """Nothing is taken yet.

        Args:
            who: JSON values about the holder; `host` and `job` are told to a second start.
        """
        self._path = path
        self._who = {"host": socket.gethostname(), "pid": os.getpid(), "began": time.time()} | who
        self._who |= {"machine": _machine(), "key": uuid.uuid4().hex}
        self._handle: int | None = None
        self._beats = 0
        self._over = threading.Event()
        self._beating: threading.Thread | None = None

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            ValueError: a living run holds it.
            OSError: the file can't be opened or written.
        """
        place = self._path.resolve()
        if place in _held_here:
            raise ValueError(f"{self._path.parent} is being trained by this very process")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Every beat goes to the disk at once: a network file system's client would keep it.
        how = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_DSYNC
        self._handle = os.open(self._path, how, 0o666)
        try:
            self._take(self._handle)
            self._write("held")
        except (OSError, ValueError):
            os.close(self._handle)
            self._handle = None
            raise
        _held_here.add(place)
        self._over.clear()
        self._beating = threading.Thread(target=self._beat, name="lock", daemon=True)
        self._beating.start()

    def release(self) -> None:
        """Give the lock back and say so in the file, so that a next start need not wait."""
        if self._handle is None:
            return
        self._over.set()
        if self._beating is not None:
            self._beating.join()
        try:
            try:
                self._write("ended")
            finally:
                os.close(self._handle)  # which gives the kernel's lock back
        except OSError as error:
            logger.warning("%s could not be marked as ended: %s", self._path, error)
        self._handle = None
        _held_here.discard(self._path.resolve())

    def __enter__(self) -> FolderLock:
        self.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def _take(self, handle: int) -> None:
        carried = True  # whether the kernel granted the lock
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in HELD:
                raise ValueError(self._refusal(_read(handle))) from error
            if error.errno not in UNSUPPORTED:
                raise
            carried = False
        last = _read(handle)
        if not last or last.get("state") == "ended":
            return
        ours = (last.get("machine"), last.get("host")) == (self._who["machine"], self._who["host"])
        if carried and ours:
            return  # its holder is dead, or the kernel would not have granted it
        self._watch(handle, last)

    def _watch(self, handle: int, last: dict[str, Any]) -> None:
        """See whether the holder's beat goes on."""
        logger.info(
            "%s was last used by pid %s on %s, which did not end in order; watching for %.0f s "
            "whether it is alive",
            self._path.parent,
            last.get("pid"),
            last.get("host"),
            WATCH_S,
        )
        end = time.monotonic() + WATCH_S
        while time.monotonic() < end:
            time.sleep(0.2)
            now = _read(handle)
            if now and now.get("state") == "ended":
                return
            if now and (now.get("key"), now.get("beat")) != (last.get("key"), last.get("beat")):
                raise ValueError(self._refusal(now))

    def _refusal(self, record: dict[str, Any]) -> str:
        since = time.strftime("%H:%M", time.localtime(record.get("began", time.time())))
        job = f" (job {record['job']})" if record.get("job") else ""
        who = f"pid {record.get('pid', '?')} on {record.get('host', '?')} since {since}{job}"
        return (
            f"{self._path.parent} is being trained by {who}; stop that run, or name another "
            "output_dir"
        )

    def _beat(self) -> None:
        told = False
        while not self._over.wait(BEAT_S):
            try:
                self._write("held")
            except OSError as error:  # the kernel's lock is still there
                if not told:
                    logger.warning("%s can't be written: %s", self._path, error)
                told = True

    def _write(self, state: str) -> None:
        assert self._handle is not None
        self._beats += 1
        record = self._who | {"state": state, "beat": self._beats, "time": time.time()}
        os.pwrite(self._handle, json.dumps(record).encode().ljust(SIZE - 1) + b"\n", 0)


def is_held(path: Path) -> bool:
    """Whether the kernel knows a living holder of a lock; asks without taking it for a moment.

    To be called before this process takes it: closing the file would give it back.
    """
    layout = "hhqqi"  # struct flock: type, whence, start, length, pid
    asked = struct.pack(layout, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        with path.open("rb") as file:
            answer = fcntl.fcntl(file, fcntl.F_GETLK, asked)
    except OSError:
        return False
    return bool(struct.unpack(layout, answer)[0] != fcntl.F_UNLCK)


def _read(handle: int) -> dict[str, Any]:
    """The record of the last holder; empty if there is none, or it is half written."""
    try:
        value = json.loads(os.pread(handle, 1 << 16, 0))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _machine() -> str:
    """What tells this start of this machine from all others."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
