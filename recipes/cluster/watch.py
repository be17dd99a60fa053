"""What an agent sees of its node's ranks: the notes they leave, their logs, their processes."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from recipes.cluster.jobfile import JobFile

TAIL_BYTES = 4000  # of a log, told with a failure
TEXT_BYTES = 100_000  # of rank 0's log, at once: a flood of it must not hold up the rest


def tail_of(log: Path) -> str:
    """The last lines of a log."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


class Watch:
    """The ranks of this node, by the notes in the job's folder."""

    def __init__(self, job: JobFile, name: str, markers: Path) -> None:
        self.job, self.name, self.markers = job, name, markers
        self.started: dict[int, dict[str, Any]] = {}
        self.ended: dict[int, dict[str, Any]] = {}
        self._signalled: set[int] = set()
        self._read = 0  # bytes of rank 0's log that were sent

    def news(self) -> list[dict[str, Any]]:
        """What happened since the last call, as events; ends in the order in which they came."""
        started, ended = [], []
        for rank in self.job.ranks_of(self.name):
            if rank in self.ended:
                continue
            try:
                record = json.loads((self.markers / f"rank-{rank}.json").read_text())
            except OSError:
                continue
            if rank not in self.started:
                self.started[rank] = record
                started.append({"started": record})
            if record["code"] is not None:
                self.ended[rank] = record
                ended.append(record)
        text = self._text()
        ended.sort(key=lambda record: record["ended"])
        return [*([{"text": text}] if text else []), *started, *map(self._end, ended)]

    def _end(self, record: dict[str, Any]) -> dict[str, Any]:
        try:
            status = json.loads((self.markers / f"rank-{record['rank']}.status").read_text())
        except OSError:
            status = None
        tail = tail_of(Path(record["log"])) if record["code"] or status is None else ""
        # The clocks of two nodes may differ; how long ago it was is true on both.
        ago = time.time() - record["ended"]
        return {"ended": record | {"status": status, "tail": tail, "ago": ago}}

    def _text(self) -> str:
        """What rank 0 wrote to its log since the last call, whole lines."""
        if 0 not in self.started:
            return ""
        path = Path(self.started[0]["log"])
        try:
            with path.open("rb") as log:
                size = os.fstat(log.fileno()).st_size
                skipped = max(0, size - self._read - TEXT_BYTES)
                log.seek(self._read + skipped)
                chunk = log.read(TEXT_BYTES)
        except OSError:  # it was deleted, say; the rank goes on
            return ""
        if 0 not in self.ended and len(chunk) < TEXT_BYTES:
            # A progress bar ends its lines with carriage returns.
            chunk = chunk[: max(chunk.rfind(b"\n"), chunk.rfind(b"\r")) + 1]
        self._read += skipped + len(chunk)
        told = f"\n[{skipped} bytes are left out here; all is in {path}]\n" if skipped else ""
        return told + chunk.decode(errors="replace")

    def signal_ranks(self) -> None:
        """Ask this node's ranks to save and end, each once; those that start later too."""
        for rank in self.started.keys() - self.ended.keys() - self._signalled:
            self._signalled.add(rank)
            with suppress(ProcessLookupError):
                os.kill(self.started[rank]["pid"], signal.SIGTERM)

    def saving(self) -> bool:
        """Whether there are ranks to wait for, and nobody has swept the job from this node."""
        return bool(self.started.keys() - self.ended.keys()) and self.markers.is_dir()

    def processes(self) -> list[psutil.Process]:
        """Every process of this job on this node, whoever started it."""
        mine, found = os.getpid(), []
        for process in psutil.process_iter():
            try:
                if process.pid == mine or process.uids().real != os.getuid():
                    continue
                named = any(str(self.job.folder) in word for word in process.cmdline())
                if named or process.environ().get("OCTET_JOB") == self.job.job:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def kill(self) -> list[str]:
        """End them all; returns what would not end."""
        for wait_s in (1.0, 2.0, 4.0):  # a process may be starting another one meanwhile
            victims = self.processes()
            for process in victims:
                with suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(victims, timeout=wait_s)
        left = []
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                left.append(f"pid {process.pid} {process.name()}")
        return left
