"""The same work on more GPUs: weak (the batch grows), strong (it stays), where it stops paying."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from recipes.planner.choose import micros
from recipes.planner.memory import largest_micro
from recipes.planner.predict import Prediction, communication_share, predict
from recipes.planner.trace import Traced
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
        note: what to change here; empty while nothing is.
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
) -> tuple[Point, ...]:
    """Predict `candidate` at each of `worlds`, all of whole nodes; the first is the measure."""
    first = _at(cluster, worlds[0])
    base = _strong(work, candidate, first, traced)
    assert base is not None, "the first size is one that the batch divides by"
    per_gpu = base.tokens_per_s.value / worlds[0]
    points = []
    for world in worlds:
        there = _at(cluster, world)
        grown = replace(work, global_sequences=work.global_sequences * world // worlds[0])
        weak = predict(grown, candidate, there, traced=traced)
        strong = _strong(work, candidate, there, traced)
        points.append(
            Point(
                world=world,
                nodes=there.nodes,
                weak=weak,
                strong=strong,
                efficiency_weak=weak.tokens_per_s.value / world / per_gpu,
                efficiency_strong=strong.tokens_per_s.value / world / per_gpu if strong else 0.0,
                note=_note(grown, candidate, weak, strong, there, traced),
            )
        )
    return tuple(points)


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
    strong: Prediction | None,
    cluster: Cluster,
    traced: Traced | None,
) -> str:
    """What to change at this size; `work` is the weak point's."""
    if strong is None:
        return (
            f"the global batch can't be divided among {cluster.world} GPUs: raise "
            "batch.global_sequences"
        )
    if strong.candidate.micro < candidate.micro and strong.accumulation == 1:
        left = strong.candidate.micro
        plural = "s" if left > 1 else ""
        return f"only {left} sequence{plural} left per GPU: raise the global batch"
    if communication_share(strong).value > COSTLY and weak.accumulation > 1:
        return "the network shows: raise accumulation (a larger global batch) or less traffic"
    if not weak.memory.fits:
        return "does not fit here"
    room = largest_micro(work, candidate, cluster, traced=traced)
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
