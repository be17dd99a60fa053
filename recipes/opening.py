"""What a run stands on, agreed by all ranks: folder and lock, data, length, room."""

from __future__ import annotations

import logging
import math
import os
from pathlib import Path
from typing import Any

from recipes import objective, runfolder
from recipes.checkpoint import commit, space
from recipes.checkpoint.disks import Disks
from recipes.checkpoint.lock import FolderLock
from recipes.config import Run
from recipes.data.feed import Corpus, look
from recipes.engine.peers import Peers
from recipes.outcome import Outcome

logger = logging.getLogger(__name__)


def open_folder(
    run: Run, peers: Peers, disks: Disks, outcome: Outcome, *, fresh: bool
) -> dict[str, Any]:
    """Lock the run folder on every disk; what an earlier start recorded.

    Raises:
        ValueError: another run is training there, or the folder holds another run.
    """
    lead = disks.lead(peers.rank)

    def open_mine() -> dict[str, Any] | None:
        if not lead:
            return None
        lock = FolderLock(run.folder / "lock", {"job": os.environ.get("OCTET_JOB")})
        lock.acquire()
        outcome.closing.callback(lock.release)
        if fresh:
            runfolder.clear(run.folder)
        runfolder.forget_ranks(run.folder, peers.world)
        recorded = runfolder.read_record(run.folder)
        if recorded is not None:
            recorded["finished"] = runfolder.read_summary(run.folder)
        return recorded

    records = [r for r in peers.gather(peers.together(open_mine)) if r is not None]
    if peers.rank == 0 and not disks.shared:
        logger.info("%s", disks.describe())
    if not records:
        return {}
    recorded = max(records, key=lambda r: r["started"])  # a disk may have missed a start
    changes = peers.alike(lambda: runfolder.check_same(recorded, run))
    for change in changes if peers.rank == 0 else ():
        logger.info("changed since the last start: %s", change)
    return recorded


def check_room(run: Run, peers: Peers, disks: Disks, parameters: int, updates: int) -> None:
    """Refuse a run whose checkpoints will not fit (ValueError on every rank)."""
    root, policy = run.folder / "checkpoints", run.checkpoint
    present = min(peers.gather([commit.step_of(path) for path in commit.committed(root)]), key=len)
    milestones = 0
    if policy.milestone_every:
        kept = sum(step % policy.milestone_every == 0 for step in present)
        milestones = max(updates // policy.milestone_every - kept, 0)
    need = space.checkpoint_need(parameters, policy.keep, len(present), milestones)
    # `need` is of all ranks; each disk holds the share of its own.
    faults = space.check_space(root, need // peers.world, peers, disks)
    if faults:
        raise ValueError(
            f"the run's checkpoints do not fit: {'; '.join(faults)}; make room (octet checkpoint "
            "prune), lower checkpoint.keep, or name another output_dir"
        )


def open_corpus(run: Run, peers: Peers, disks: Disks, recorded: dict[str, Any]) -> Corpus:
    """Rank 0 looks at the data; all open what it found."""
    path = run.folder / "tokenizer.json"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octet"
    known = path if recorded and path.is_file() else None
    found = peers.from_first(lambda: look(run, recorded.get("revision"), cache, known))
    lead = disks.lead(peers.rank)
    peers.together(lambda: runfolder.write_text(path, found["tokenizer"]) if lead else None)
    return Corpus.open(run, found, path)


def fixed_length(
    recorded: dict[str, Any], run: Run, corpus: Corpus, peers: Peers
) -> objective.Length:
    """The recorded length, or a new one; it never moves after the first start."""
    if "length" in recorded:
        return objective.Length(**recorded["length"])

    def compute() -> objective.Length:
        schedule = run.schedule
        if schedule.updates is not None:
            return objective.run_length(schedule, run.batch)
        measured = corpus.measure()
        samples = schedule.samples
        if schedule.epochs is not None:
            documents = corpus.count_documents() * measured.samples_per_document
            samples = math.ceil(schedule.epochs * documents)
        return objective.run_length(
            schedule,
            run.batch,
            samples=samples,
            tokens_per_sample=schedule.tokens_per_sample or measured.tokens_per_sample,
            sequences_per_token=measured.sequences_per_sample / measured.tokens_per_sample,
        )

    return peers.from_first(compute)
