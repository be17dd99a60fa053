"""What is alive on a GPU at the fullest moment of each phase of an update.

A window's second micro-batch is the peak: accumulated gradients and DeepSpeed's bucket are alive
from the first one's backward to the boundary. Accumulation 1 has neither when backward starts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from recipes.planner.activations import (
    causal_mask,
    head_bytes,
    kept_input,
    layer_bytes,
    layer_transient,
    shares_kept_input,
)
from recipes.planner.states import Part, parts, states_of
from recipes.planner.traced import Traced
from recipes.planner.workload import Candidate, Cluster, Workload

PhaseName = Literal["forward", "backward", "reduction", "update"]
Load = tuple[str, str, float]  # name, kind, bytes
Phases = dict[PhaseName, list[Load]]


def fullest_phases(
    work: Workload, candidate: Candidate, cluster: Cluster, traced: Traced | None
) -> Phases:
    """The loads of the GPU that holds most: the only pipeline stage, or the first or the last."""
    found = [
        _phases(work, candidate, cluster, part, traced)
        for part in parts(work.shape, candidate.strategy)
    ]
    return max(found, key=most)


def sum_of(loads: Iterable[Load]) -> float:
    """Bytes of all loads."""
    return sum(size for _, _, size in loads)


def most(phases: Phases) -> float:
    """Bytes of the fullest phase."""
    return max(sum_of(loads) for loads in phases.values())


def _phases(
    work: Workload, candidate: Candidate, cluster: Cluster, part: Part, traced: Traced | None
) -> Phases:
    """The loads of each phase's fullest moment."""
    strategy = candidate.strategy
    ranks = max(1, candidate.data_ranks(cluster.world))
    turns = max(1, candidate.accumulation(work, ranks * strategy.tensor * strategy.pipeline))
    states = states_of(work, strategy, part, ranks)
    many = turns > 1
    standing: list[Load] = [
        ("parameters", "parameters", states.parameters),
        ("master weights", "master weights", states.masters),
        ("moments", "moments", states.moments),
    ]
    gradients: Load = ("gradients", "gradients", states.gradients)
    bucket: Load = ("reduction bucket", "buckets", states.bucket)
    waiting = [gradients] if many or states.kept else []
    waiting += [bucket] if many or states.bucket_kept else []
    before = [*standing, ("gathered parameters", "parameters", states.gathered)]
    # 1F1B: a pipeline's first stage is as many micro-batches ahead as there are stages.
    flight = min(strategy.pipeline, turns) if part.first else 1
    saved, recomputed, copies = _layers(work, candidate, part, flight, traced)
    head = _head(work, candidate, part, traced)
    embedding = [load for load in head.saved if load[0] == "embedding"]  # the rest is free by then
    alive = [*before, *waiting, *saved]
    mask: list[Load] = [("causal mask", "activations", causal_mask(work, candidate))]
    if candidate.checkpointing:
        alive += mask  # an input of every layer, kept with the others
        mask = []
    forward = [*alive, *mask, *head.saved, *copies, ("loss forward", "logits", head.forward)]
    loss = [*alive, *head.saved, ("loss backward", "logits", head.backward)]
    tied = work.shape.tied and strategy.pipeline == 1
    pending = head.gradient if tied or not many else 0.0
    flying: Load = ("gradients on their way", "gradients", states.flying)
    own_root = 0.0 if states.flying else pending
    held = [("gradient of the head", "gradients", own_root), flying]
    layers = [*alive, *([] if bucket in waiting else [bucket]), *embedding, *recomputed, *held]
    layers.append(("one layer's backward", "workspace", layer_transient(work, candidate)))
    end = [*before, gradients, bucket, *held]
    return {
        "forward": forward,
        "backward": max(loss, layers, end, key=sum_of),
        "reduction": [
            *standing,
            gradients,
            bucket,
            ("temporaries of the reduction", "workspace", states.reduction),
        ],
        "update": [
            *standing,
            ("gradients", "gradients", states.left),
            *([bucket] if states.bucket_kept else []),
            ("temporaries of the update", "workspace", states.update),
        ],
    }


def _layers(
    work: Workload, candidate: Candidate, part: Part, flight: int, traced: Traced | None
) -> tuple[list[Load], list[Load], list[Load]]:
    """What the layers keep; one of them while it is recomputed; casts that forward alone holds."""
    kinds = layer_bytes(work, candidate)
    if traced is not None:
        ratio = traced.layer_ratio(candidate)
        kinds = {kind: size * ratio for kind, size in kinds.items()}
    if candidate.checkpointing:
        kept = kept_input(work, candidate) * part.layers * flight
        whole = sum(kinds.values())
        if shares_kept_input(work, candidate):
            whole -= kept_input(work, candidate)
        # The cache of autocast empties when forward ends; backward casts one layer's weights again.
        copies = kinds["weight copies"] * part.layers
        return (
            [("kept layer inputs", "activations", kept)],
            [("recomputed layer", "activations", whole)],
            [("weight copies", "activations", copies)],
        )
    copies = kinds.pop("weight copies") * part.layers  # one for all micro-batches in flight
    loads = [(kind, "activations", size * part.layers * flight) for kind, size in kinds.items()]
    return [*loads, ("weight copies", "activations", copies)], [], []


@dataclass(frozen=True, kw_only=True)
class _Head:
    saved: list[Load]
    forward: float
    backward: float
    gradient: float


def _head(work: Workload, candidate: Candidate, part: Part, traced: Traced | None) -> _Head:
    found = head_bytes(work, candidate)
    saved: list[Load] = []
    if part.first:
        saved.append(("embedding", "activations", found["embedding"]))
    if not part.last:
        return _Head(saved=saved, forward=0.0, backward=0.0, gradient=0.0)
    names = ("final norm", "weight copies", "logits")
    ratio = traced.head_ratio(candidate) if traced is not None and work.loss == "full" else 1.0
    for name in names:
        kind = "logits" if name == "logits" else "activations"
        saved.append((name if name != "weight copies" else "copy of the head", kind, found[name]))
    return _Head(
        saved=[(name, kind, size * ratio) for name, kind, size in saved],
        forward=found["loss forward"],
        backward=found["loss backward"],
        gradient=found["head gradient"],
    )
