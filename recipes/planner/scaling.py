"""The same work on more GPUs: weak (the batch grows), strong (it stays), where it stops paying."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from recipes.planner.choose import micros
from recipes.planner.memory import largest_micro
from recipes.planner.predict import Prediction, communication_share, predict
from recipes.planner.traced import Traced
from recipes.planner.workload import Candidate, Cluster, Workload

# Exposed communication above this share is worth a remedy.
COSTLY = 0.10
# A point further from its curve than this many median deviations, and this share, is no noise.
ODD, ODD_SHARE = 5.0, 0.05


@dataclass(frozen=True, kw_only=True)
class Point:
    """One size of cluster.

    Attributes:
        weak: sequences per GPU as at the first size; strong: the global batch as at the first.
            None where it can't be divided.
        efficiency_weak, efficiency_strong: tokens/s per GPU by the first point's, 0 where None.
        note: what to change here; empty where nothing is to change.
    """

    world: int
    nodes: int
    weak: Prediction | None
    strong: Prediction | None
    efficiency_weak: float
    efficiency_strong: float
    note: str


def scale(
    work: Workload,
    candidate: Candidate,
    cluster: Cluster,
    worlds: Sequence[int],
    *,
    traced: Traced | None = None,
    lanes: int = 0,
) -> tuple[Point, ...]:
    """Predict `candidate` at each of `worlds`, all of whole nodes or parts of one.

    The measure of efficiency is the first of them that the global batch divides by.

    Args:
        lanes: `data.lanes` by its readers per rank, which the ranks must share; 0: not known.
    """
    there = {world: _at(cluster, world) for world in worlds}
    strong = {world: _strong(work, candidate, there[world], traced) for world in worlds}
    first = next((world for world in worlds if strong[world] is not None), None)
    if first is None:
        return tuple(_point(world, there[world], None, None, 0.0, "", lanes) for world in worlds)
    base = strong[first]
    assert base is not None
    per_gpu = base.tokens_per_s.value / first
    share = work.global_sequences // base.candidate.data_ranks(first)
    points = []
    for world in worlds:
        ranks = base.candidate.data_ranks(world)
        weak = None
        if ranks:
            grown = replace(work, global_sequences=share * ranks)
            weak = predict(grown, base.candidate, there[world], traced=traced)
        note = ""
        same = strong[world]
        if same is not None and weak is not None and world != cluster.world:
            note = _note(grown, candidate, weak, same, there[world], traced)
        points.append(_point(world, there[world], weak, same, per_gpu, note, lanes))
    return tuple(points)


def _point(
    world: int,
    cluster: Cluster,
    weak: Prediction | None,
    strong: Prediction | None,
    per_gpu: float,
    note: str,
    lanes: int,
) -> Point:
    if strong is None:
        note = "the global batch can't be divided: raise batch.global_sequences"
    elif lanes and lanes % world:
        note = f"{world:,} ranks can't share the lanes: raise data.lanes to a multiple"
    return Point(
        world=world,
        nodes=cluster.nodes,
        weak=weak,
        strong=strong,
        efficiency_weak=weak.tokens_per_s.value / world / per_gpu if weak else 0.0,
        efficiency_strong=strong.tokens_per_s.value / world / per_gpu if strong else 0.0,
        note=note,
    )


def _at(cluster: Cluster, world: int) -> Cluster:
    if world % cluster.gpus == 0:
        return replace(cluster, nodes=world // cluster.gpus)
    return replace(cluster, nodes=1, gpus=world)


def _strong(
    work: Workload, candidate: Candidate, cluster: Cluster, traced: Traced | None
) -> Prediction | None:
    """The same global batch, with the largest legal micro-batch up to the candidate's."""
    legal = [n for n in micros(work, candidate.strategy, cluster.world) if n <= candidate.micro]
    if not legal:
        return None
    return predict(work, replace(candidate, micro=legal[-1]), cluster, traced=traced)


def _note(
    work: Workload,
    candidate: Candidate,
    weak: Prediction,
    strong: Prediction,
    cluster: Cluster,
    traced: Traced | None,
) -> str:
    """What to change at this size; `work` is the weak point's."""
    if strong.candidate.micro < candidate.micro and strong.accumulation == 1:
        left = strong.candidate.micro
        plural = "s" if left > 1 else ""
        return f"only {left} sequence{plural} left per GPU: raise the global batch"
    if not weak.memory.fits:
        return "does not fit"
    if communication_share(strong).value > COSTLY and weak.accumulation > 1:
        return "the network shows: raise accumulation (a larger global batch) or less traffic"
    share = weak.accumulation * weak.candidate.micro
    room = min(largest_micro(work, candidate, cluster, traced=traced), share)
    if room >= 2 * candidate.micro:
        return f"states shrink: micro-batches up to {room} fit"
    return ""


def odd_points(predicted: Sequence[float], measured: Sequence[float]) -> list[int]:
    """Indices of measurements that don't lie on the predicted curve as the others do.

    The ratio of measured to predicted is the same for a whole curve where the plan is off by a
    constant; a point whose ratio is `ODD` median absolute deviations and `ODD_SHARE` away from the
    others' median is one machine's or one run's trouble (a slow node), not the plan's.
    """
    ratios = [m / p for m, p in zip(measured, predicted, strict=True)]
    middle = median(ratios)
    spread = median(abs(r - middle) for r in ratios)
    return [
        i
        for i, r in enumerate(ratios)
        if abs(r - middle) > ODD * spread and abs(r - middle) > ODD_SHARE * middle
    ]
