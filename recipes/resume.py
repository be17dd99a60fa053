"""Going on from a checkpoint: the newest whole one, into whatever strategy and ranks there are."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes import runfolder
from recipes.checkpoint import commit
from recipes.checkpoint.arrays import TogetherReader
from recipes.checkpoint.disks import Disks
from recipes.checkpoint.manifest import LAYOUT, STATE, STATE_VERSION
from recipes.checkpoint.pieces import read_rng, rng_name
from recipes.checkpoint.verify import Found, newest_whole
from recipes.config import Run
from recipes.data.feed import Corpus, resumed_state
from recipes.data.state import DataState
from recipes.engine import state, update
from recipes.engine.build import Engine
from recipes.progress import Progress

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What a checkpoint says besides the arrays."""

    progress: Progress
    data: DataState | None  # None: reading starts at the first sequence (new, or imported)
    held_out: dict[str, Any] | None  # the last evaluation


def restore_newest(engine: Engine, run: Run, corpus: Corpus, disks: Disks) -> Restored:
    """Load the newest whole checkpoint into a fresh engine; every rank must call it.

    Returns:
        Its counters and cursors; those of a beginning if there is no checkpoint.

    Raises:
        ValueError: there are checkpoints and none is whole, or it belongs to another model or
            other data; every difference is named.
    """
    peers = engine.peers
    found = peers.alike(lambda: newest_whole(run.folder / "checkpoints", peers, disks))
    if found is None:
        update.seed_rng(run.seed * 1_000_003 + 1 + peers.rank)  # dropout differs by rank
        return Restored(progress=Progress(), data=None, held_out=None)
    contents = json.loads(found.read_common(STATE, peers))
    shapes = json.loads(found.read_common(LAYOUT, peers))
    data = peers.together(lambda: _checked(engine, run, corpus, contents, shapes))
    scalars = state.Scalars(**contents["scalars"])
    reader = TogetherReader(found, peers)
    if reader.local:  # nothing is exchanged, so that a rank's failure can be told to all
        peers.together(lambda: state.fill(engine, reader.read, scalars))
    else:
        state.fill(engine, reader.read, scalars)
    state.spread(engine)
    _restore_random(engine, found, contents)
    if peers.rank == 0:
        _tell_changes(engine, contents)
    return Restored(
        progress=Progress(**contents["progress"]), data=data, held_out=contents["held_out"]
    )


def _checked(
    engine: Engine, run: Run, corpus: Corpus, contents: dict[str, Any], shapes: dict[str, Any]
) -> DataState | None:
    """The data's state, if the checkpoint is one of this run (ValueError: all that differs)."""
    version = contents.get("version")
    if version != STATE_VERSION:
        raise ValueError(
            f"the checkpoint has state version {version}, expected {STATE_VERSION}; "
            "resume with the version of this package that wrote it"
        )
    faults: list[str] = []
    data: DataState | None = None

    def collect(check: Callable[[], Any]) -> Any:
        try:
            return check()
        except ValueError as error:
            faults.append(str(error))

    collect(lambda: runfolder.check_same(contents, run))
    if contents["data"] is not None:
        data = collect(lambda: resumed_state(corpus, contents["data"]))
    here = state.layout(engine)
    for name in sorted(here.keys() | shapes.keys()):
        if here.get(name) != shapes.get(name):
            was, now = (_shape(tree.get(name)) for tree in (shapes, here))
            faults.append(f"array {name}: {was} in the checkpoint, {now} in this model")
    if faults:
        raise ValueError("\n".join(faults))
    return data


def _shape(about: dict[str, Any] | None) -> str:
    return "absent" if about is None else f"{about['dtype']} {about['shape']}"


def _restore_random(engine: Engine, found: Found, contents: dict[str, Any]) -> None:
    """What dropout draws: as it was where the ranks are as many, else drawn anew."""
    peers = engine.peers
    if contents["world"] != engine.plan.world or contents["data"] is None:
        update.seed_rng(contents["progress"]["windows"] * 1_000_003 + 1 + peers.rank)
        return
    # A rank may have come to another disk than the one it wrote to.
    sent = {}
    for rank in range(peers.world):
        holder = min(r for r, good in enumerate(found.good) if rng_name(rank) in good)
        if holder == peers.rank and rng_name(rank) not in found.good[rank]:
            sent[rank] = read_rng(found.folder, rank)
    received = {rank: states for part in peers.gather(sent) for rank, states in part.items()}
    states = received.get(peers.rank) or read_rng(found.folder, peers.rank)
    assert states is not None, "the manifest lists every rank's"
    update.set_rng_state(engine, states)


def _tell_changes(engine: Engine, contents: dict[str, Any]) -> None:
    strategy, world = engine.strategy.title, engine.plan.world
    if contents["strategy"] != strategy:
        logger.info("strategy: %s -> %s", contents["strategy"], strategy)
        scale = contents["scalars"]["loss_scale"]
        if scale is not None and engine.strategy.precision != "fp16":
            logger.info("loss scale: %.0f -> none", scale)
        elif scale is None and engine.strategy.precision == "fp16":
            logger.info("loss scale: none -> %.0f", update.loss_scale(engine))
    if contents["world"] != world:
        logger.info("ranks: %d -> %d", contents["world"], world)
    if contents["data"] is None:
        logger.info("imported: weights and moments go on; the data is read from its beginning")
    elif contents["world"] != world:
        logger.info("data order, weights and moments go on exactly; dropout draws anew")


def last_checkpoint(folder: Path) -> str | None:
    """The newest committed checkpoint's folder, as text."""
    found = commit.committed(folder / "checkpoints")
    return str(found[0]) if found else None
