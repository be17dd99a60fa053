"""When a checkpoint is due and how it is taken: copied, written, committed, on all ranks alike.

flags = saving.flags()                      # before each window: what this rank has to say
reason = saving.due(progress, applied=…, agreed=…, last=…)
if reason: saving.save(job, reason)         # returns as soon as training may go on
if agreed.written: saving.settle(job)       # what was written meanwhile is told, or its failure
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes import runfolder
from recipes.checkpoint import commit, rotation, space
from recipes.checkpoint.background import Writer
from recipes.checkpoint.disks import Disks
from recipes.checkpoint.manifest import LAYOUT, STATE, STATE_VERSION
from recipes.checkpoint.pieces import Piece, write_share
from recipes.checkpoint.snapshot import HostCopy, memory_left
from recipes.config import Run
from recipes.engine import state, update
from recipes.engine.build import Engine
from recipes.outcome import PeerError, StopWish, StorageError, exit_code
from recipes.progress import Progress

if TYPE_CHECKING:
    from recipes.job import Job

logger = logging.getLogger(__name__)

ENDING = ("end", "stop", "unreadable")  # reasons after which nothing is trained any more
ENTRY_S = 60.0  # ranks come to a save together, from the same update's reduction
LOOK_S = 0.5  # between two looks for the touch-files


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A committed checkpoint."""

    step: int
    name: str
    reason: str
    bytes: int  # of all ranks
    write_s: float


class Saving:
    """One run's checkpoints: when, where to, and the one that is being written."""

    def __init__(self, engine: Engine, run: Run, disks: Disks, progress: Progress) -> None:
        self.stop = StopWish()  # from here on there is something to save
        self._run, self._peers, self._disks = run, engine.peers, disks
        self._lead = disks.lead(engine.peers.rank)
        self._group = engine.peers.another()
        mine = sum(values.numel() * values.element_size() for _, _, values in state.owned(engine))
        shares = self._peers.gather((self._peers.hosts[self._peers.rank], mine, memory_left()))
        background = self._peers.alike(lambda: self._in_background(shares))
        self._writer = Writer(self._group, background)
        self._copy = HostCopy() if background else None
        self._stall_ms, self._last = 0.0, (progress.applied, progress.windows)
        self._saved_at = self._looked_at = time.monotonic()
        self._seen, self._late = update.Flags(), False
        self.last_bytes: int | None = None  # of the newest checkpoint of this start, of all ranks
        self._looked_for = {"SAVE", "STOP"}
        self._remove_touched(("SAVE", "STOP"), "was there before the start")

    def _in_background(self, shares: list[tuple[str, int, int]]) -> bool:
        """Whether the snapshots have room beside what is there (ValueError if they must).

        Args:
            shares: every rank's host, its part of the state in bytes and the memory that is left.
        """
        wish = self._run.checkpoint.write
        if wish == "blocking":
            return False
        crowded = []
        for host in dict.fromkeys(host for host, _, _ in shares):
            need = sum(size for name, size, _ in shares if name == host)
            left = min(left for name, _, left in shares if name == host)
            if need > 0.9 * left:
                crowded.append(f"{host} needs {need / 1e9:.1f} GB and has {left / 1e9:.1f} GB left")
        if crowded and wish == "background":
            raise ValueError(
                f"checkpoint.write=background: no host memory for a copy of the state: "
                f"{'; '.join(crowded)}; set it to blocking or auto"
            )
        if crowded and self._peers.rank == 0:
            logger.info("checkpoints are written in training's way: %s", "; ".join(crowded))
        return not crowded

    # ---- when

    def flags(self, unreadable: bool) -> update.Flags:
        """What this rank has to say before a window."""
        now, run = time.monotonic(), self._run
        if self._lead and now - self._looked_at >= LOOK_S:
            self._looked_at = now
            # Not Path.exists, which raises where a network file system has no answer.
            names = {name for name in self._looked_for if os.access(run.folder / name, os.F_OK)}
            self._seen = update.Flags(save="SAVE" in names, stop="STOP" in names)
        minutes = run.checkpoint.every_minutes
        self._late = minutes is not None and now - self._saved_at >= 60.0 * minutes
        return update.Flags(
            stop=self.stop.requested or self._seen.stop,
            save=self._seen.save or (self._late and self._peers.rank == 0),
            unreadable=unreadable,
            written=self._writer.ended,
        )

    def due(
        self, progress: Progress, *, applied: bool, agreed: update.Agreement, last: bool
    ) -> str | None:
        """Why a checkpoint is due after a window; None if none is. Alike on all ranks."""
        policy, step = self._run.checkpoint, progress.applied
        if not self.unsaved(progress):
            return None
        if last:
            return "end"
        if agreed.stop:
            return "stop"
        if applied and self._milestone(step):
            return "milestone"
        if applied and policy.every_updates and step % policy.every_updates == 0:
            return "updates"
        if not agreed.save:
            return None
        return "minutes" if self._late else "asked"  # rank 0 knows, and its word is written

    def _milestone(self, step: int) -> bool:
        every = self._run.checkpoint.milestone_every
        return every is not None and step % every == 0

    def unsaved(self, progress: Progress) -> bool:
        """Whether anything has moved since the last checkpoint, or the start."""
        return (progress.applied, progress.windows) != self._last

    # ---- how

    def save(self, job: Job, reason: str) -> None:
        """Take a checkpoint of the current update; returns when training may go on.

        Raises:
            CollectiveError: not every rank came here. StorageError: an earlier checkpoint, or this
                one, could not be written and the run file says stop.
        """
        started = time.perf_counter()
        limit_s = float(os.environ.get("OCTET_ENTRY_S", ENTRY_S))
        self._peers.enter(f"the save of update {job.progress.applied}", limit_s)
        if self._writer.pending:  # never two in flight
            self.settle(job)
        job.meter.flush()  # so that every saved update has its record in the file
        pieces = [Piece(*piece) for piece in state.owned(job.engine)]
        if self._copy is not None:
            pieces = self._copy.take(pieces)
        act = self._act(job, pieces, reason)
        self._last = (job.progress.applied, job.progress.windows)
        self._saved_at = time.monotonic()
        self._writer.start(act)
        self._remove_touched(("SAVE",) if reason != "stop" else ("SAVE", "STOP"), "")
        self._seen = update.Flags()
        self._stall_ms = (time.perf_counter() - started) * 1000.0
        if self._copy is None or reason in ENDING:
            self.settle(job, needed=reason in ENDING)

    def _act(self, job: Job, pieces: list[Piece], reason: str) -> Callable[[commit.Group], Saved]:
        """What the writer does, bound to the values of this moment."""
        engine, run, disks = job.engine, self._run, self._disks
        step, rank, root = job.progress.applied, engine.peers.rank, run.folder / "checkpoints"
        random = update.rng_state(engine)
        cursors = engine.peers.gather(job.feed.cursors())
        contents = _contents(job, cursors) if rank == 0 else {}
        milestone = self._milestone(step)
        facts = {"step": step, "world": engine.plan.world, "strategy": engine.strategy.title}
        facts |= {"milestone": milestone, "reason": reason, "time": time.time()}
        mine = sum(piece.values.numel() * piece.values.element_size() for piece in pieces)

        def write(beside: Path) -> dict[str, Any]:
            return dict(write_share(beside, rank, pieces, random))

        def act(group: commit.Group) -> Saved:
            began = time.perf_counter()
            faults = space.check_space(root, mine, group, disks)
            if faults:
                raise OSError(f"no space for the checkpoint of update {step}: {'; '.join(faults)}")
            common = _common(job, contents) if rank == 0 else {}
            path = commit.commit(root, step, write, group, disks, facts, common)
            size = sum(group.gather(mine))
            if self._lead:
                rotation.rotate(root, run.checkpoint.keep, step)
            write_s = time.perf_counter() - began
            return Saved(step=step, name=path.name, reason=reason, bytes=size, write_s=write_s)

        return act

    def settle(self, job: Job, *, needed: bool = False) -> None:
        """Wait for the checkpoint that is being written and tell how it went.

        Args:
            needed: the run ends here, so that going on without it is no choice.

        Raises:
            StorageError: it could not be written and the run file says stop, or it is needed.
        """
        first = self._peers.rank == 0
        try:
            saved = self._writer.collect()
        except OSError as error:
            self._last = (-1, -1)
            if self._run.checkpoint.on_failure == "stop" or needed:
                told = StorageError(f"{error}; the older checkpoints are whole: make room, go on")
                raise told if first else PeerError(str(told), exit_code(told)) from error
            if first:
                logger.warning("%s; going on, as checkpoint.on_failure says", error)
            return
        self.last_bytes = saved.bytes
        how = {"stall_ms": self._stall_ms, "background": self._copy is not None}
        job.meter.saved(asdict(saved) | how | {"time": time.time()})

    def finish(self, job: Job) -> None:
        """Wait for what is being written; call it before the run ends well."""
        if self._writer.pending:
            self.settle(job)

    def _remove_touched(self, names: tuple[str, ...], why: str) -> None:
        for name in self._looked_for.intersection(names if self._lead else ()):
            path = self._run.folder / name
            if not os.access(path, os.F_OK):
                continue
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                self._looked_for.discard(name)  # else it would be a wish for ever
                logger.warning("%s can't be removed and is ignored: %s", path, error.strerror)
                continue
            if why:
                logger.warning("%s %s; removed", path, why)


def _contents(job: Job, cursors: list[Any]) -> dict[str, Any]:
    """`state.json`: all that is not an array, as it is now."""
    return {
        "version": STATE_VERSION,
        "name": job.run.name,
        "config": job.run.model_dump(mode="json"),
        "progress": asdict(job.progress),
        "scalars": state.export_scalars(job.engine),
        "data": job.feed.state(cursors),
        "world": job.engine.plan.world,
        "strategy": job.engine.strategy.title,
        "held_out": job.held_out_result,
        "length": asdict(job.length),
        **runfolder.versions(),
    }


def _common(job: Job, contents: dict[str, Any]) -> dict[str, bytes]:
    """The files that are the same on every disk."""
    texts = {
        STATE: json.dumps(contents, indent=1) + "\n",
        LAYOUT: json.dumps(state.layout(job.engine), indent=1) + "\n",
        "tokenizer.json": job.corpus.tokenizer,
        "config.json": job.engine.module.config.to_json_string(),
    }
    return {name: text.encode() for name, text in texts.items()}
