"""Saving and resuming: the engine's arrays, the counters and the cursors, as one checkpoint."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.checkpoint import arrays, commit
from recipes.config import Run
from recipes.data.feed import Corpus, resumed_state
from recipes.data.state import DataState
from recipes.engine import state, update
from recipes.engine.build import Engine

if TYPE_CHECKING:
    from recipes.job import Job

logger = logging.getLogger(__name__)
STATE, VERSION = "state.json", 1


def save(job: Job) -> None:
    """Commit a checkpoint at the current update, delete the oldest; all ranks must call it."""
    engine, folder = job.engine, job.run.folder
    peers, world = engine.peers, engine.plan.world
    job.meter.flush()  # so that the records of every saved update are on the disk
    share = arrays.shares(state.parameter_sizes(engine), world)[peers.rank]
    mine = state.export_arrays(engine, keep=share)
    cursors = peers.gather(job.feed.cursors())
    contents = {
        "version": VERSION,
        "progress": asdict(job.progress),
        "scalars": state.export_scalars(engine),
        "data": job.feed.state(cursors),
        "world": world,
        "strategy": engine.strategy.title,
    }

    def write(beside: Path) -> list[Path]:
        files = [
            arrays.write_arrays(beside, peers.rank, mine),
            arrays.write_rng(beside, peers.rank, update.rng_state(engine)),
        ]
        if peers.rank == 0:
            texts = {
                STATE: json.dumps(contents, indent=1) + "\n",
                "tokenizer.json": job.corpus.tokenizer_path.read_text(encoding="utf-8"),
                "config.json": engine.module.config.to_json_string(),
            }
            for name, text in texts.items():
                (beside / name).write_text(text, encoding="utf-8")
            files += [beside / name for name in texts]
        return files

    facts = {"step": job.progress.applied, "world": world, "strategy": engine.strategy.title}
    path = commit.commit(folder / "checkpoints", job.progress.applied, write, peers, facts)
    if peers.rank == 0:
        commit.rotate(folder / "checkpoints", job.run.checkpoint.keep)
    job.meter.say(f"step {job.progress.applied} | saved {path.name}")


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What a checkpoint says besides the arrays."""

    progress: dict[str, Any]
    data: DataState


def restore_newest(engine: Engine, run: Run, corpus: Corpus) -> Restored | None:
    """Load the newest whole checkpoint into a fresh engine.

    Returns:
        Its counters and cursors; None if there is no checkpoint.

    Raises:
        ValueError: it belongs to another model or other data; every difference is named.
    """
    root = run.folder / "checkpoints"
    folder = engine.peers.from_first(lambda: commit.newest_whole(root))
    if folder is None:
        return None
    return engine.peers.together(lambda: _restore(engine, folder, corpus))


def _restore(engine: Engine, folder: Path, corpus: Corpus) -> Restored:
    contents = json.loads((folder / STATE).read_text(encoding="utf-8"))
    if contents.get("version") != VERSION:
        raise ValueError(
            f"{folder} has state version {contents.get('version')}, expected {VERSION}; "
            "resume with the version of this package that wrote it"
        )
    if contents["strategy"] != engine.strategy.title:
        logger.info("strategy: %s -> %s", contents["strategy"], engine.strategy.title)
    data = resumed_state(corpus, contents["data"])
    reader = arrays.ArrayReader(folder)
    state.import_arrays(engine, reader.read, state.Scalars(**contents["scalars"]))
    random = arrays.read_rng(folder, engine.peers.rank)
    if contents["world"] == engine.plan.world:
        if random is None:
            raise ValueError(f"{folder} lacks the random state of rank {engine.peers.rank}")
        update.set_rng_state(engine, random)
    else:
        logger.warning(
            "saved by %d ranks, resumed by %d: data order, weights and moments go on exactly; "
            "dropout draws anew",
            contents["world"],
            engine.plan.world,
        )
        update.seed_rng(contents["progress"]["windows"] * 1_000_003 + 1 + engine.peers.rank)
    return Restored(progress=contents["progress"], data=data)


def last_checkpoint(folder: Path) -> str | None:
    """The newest committed checkpoint's folder, as text."""
    found = commit.committed(folder / "checkpoints")
    return str(found[0]) if found else None
