"""GPU memory of a candidate, phase by phase, and what would save some.

`phases.py` says what is alive when, `states.py` and `activations.py` how much that is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from recipes.planner.figure import Figure, Source
from recipes.planner.lighter import changes
from recipes.planner.phases import Load, PhaseName, Phases, fullest_phases, most, sum_of
from recipes.planner.shape import Shape
from recipes.planner.traced import Traced
from recipes.planner.workload import Candidate, Cluster, Workload

GIB = float(2**30)
# Reserved over allocated: 1.001 to 1.033 in a simulation of torch's caching allocator over GPT-2
# XL's second micro-batch; 1.040 and 1.047 in two published out-of-memory messages (Megatron-LM
# issue 525, DeepSpeed's ZeRO tutorial).
RESERVED = (1.02, 1.001, 1.047)
# Outside torch's allocator, GiB: value, low, high. One GPU: CUDA context 0.5 to 1.3 (0.55 measured
# in stas00's ml-engineering) and workspaces of cuBLAS and cuDNN 0.1 to 0.3. More: NCCL's buffers
# too; 1.1 left over in llm.c's PR 309 (16,661 MiB shown, 15,527 its own), 2.0 in ml-engineering.
OUTSIDE_ONE = (0.8, 0.6, 1.6)
OUTSIDE_MORE = (1.75, 1.1, 2.25)
# By the share of activations and temporaries. Below: the closed form is within 1 % of the traced
# model. Above: kernels' workspaces, and what other versions keep: measured peaks of old stacks lie
# 3 to 15 % above a traced one.
SOFT_LOW, SOFT_HIGH = 0.01, 0.15
COUNTED = ("activations", "logits")  # kinds that a trace counts
SOFT = (*COUNTED, "workspace")
# Estimates without context and fragmentation below 80 % of a GPU's memory never ran out in 454 runs
# (Fujii 2024, arXiv 2411.06465); both are counted here.
USABLE = 0.92

# Host memory that nothing here has measured on a GPU machine, GiB.
RANK_PROCESS = 3.0  # Python, torch and CUDA's libraries
READER_PROCESS = 0.7  # a data worker with tokenizer and prefetched sequences; one per rank
CHECKPOINT_BYTES = 12  # per parameter: weight and Adam's moments in fp32, recipes/checkpoint

_BASIS = {
    "parameters": "planner/states.py: the strategy's copy",
    "gathered parameters": "those of the layers at work, from all ranks",
    "master weights": "4 B per parameter that this rank updates",
    "moments": "8 B per parameter that this rank updates (Adam, fp32)",
    "gradients": "accumulated over the window",
    "gradients on their way": "layers that backward has not reduced yet",
    "reduction bucket": "alive from the first gradient of a window to its end",
    "temporaries of the reduction": "flattened slices, averaged gradients",
    "temporaries of the update": "fp32 copies of gradients",
    "kept layer inputs": "gradient checkpointing: one tensor a layer",
    "recomputed layer": "gradient checkpointing: one layer at a time in whole",
    "one layer's backward": "gradients of its inner width and its largest matrix",
    "logits": "what the loss keeps of tokens x vocabulary",
    "loss forward": "logits and their fp32 copy",
    "loss backward": "gradients of the loss",
    "gradient of the head": "waits for the embedding's, which a tied matrix adds",
}


@dataclass(frozen=True, kw_only=True)
class Item:
    """One part of a memory, in bytes on one GPU (or one host)."""

    name: str
    kind: str
    bytes: float
    source: Source
    basis: str


@dataclass(frozen=True, kw_only=True)
class Phase:
    """The fullest moment of one phase."""

    name: PhaseName
    items: tuple[Item, ...]

    @property
    def allocated(self) -> float:
        """Bytes."""
        return sum(item.bytes for item in self.items)


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes on the fullest GPU.

    Attributes:
        allocated, reserved: as torch counts them; `device` adds what lies outside torch.
        outside: what it adds, and the allocator's overhead.
        capacity: of the GPU; `usable`: what may be planned with.
        bottleneck: the largest item of the peak.
    """

    phases: tuple[Phase, ...]
    allocated: Figure
    reserved: Figure
    device: Figure
    outside: tuple[Item, ...]
    capacity: float
    usable: float
    fits: bool
    peak: Phase
    bottleneck: str


def plan_memory(
    work: Workload, candidate: Candidate, cluster: Cluster, *, traced: Traced | None = None
) -> MemoryPlan:
    """The memory of the fullest GPU: the only pipeline stage, or the first or the last.

    Args:
        traced: the model's counts, which then replace the closed form of the layers and the head.

    Raises:
        ValueError: the shape's activation function has no closed form, and nothing is traced.
    """
    source: Source = "traced" if traced is not None else "formula"
    fullest = fullest_phases(work, candidate, cluster, traced)
    phases = tuple(
        Phase(name=name, items=tuple(_items(loads, source))) for name, loads in fullest.items()
    )
    peak = max(phases, key=lambda phase: phase.allocated)
    allocated, reserved, device = _levels(fullest, cluster.world, source)
    capacity = cluster.gpu.memory_gib * GIB
    return MemoryPlan(
        phases=phases,
        allocated=allocated,
        reserved=reserved,
        device=device,
        outside=tuple(_outside(allocated.value, cluster.world)),
        capacity=capacity,
        usable=USABLE * capacity,
        fits=_fits(device, capacity),
        peak=peak,
        bottleneck=max(peak.items, key=lambda item: item.bytes).name,
    )


def _items(loads: Iterable[Load], source: Source) -> Iterable[Item]:
    for name, kind, size in loads:
        if size:
            counted = kind in COUNTED
            yield Item(
                name=name,
                kind=kind,
                bytes=size,
                source=source if counted else "formula",
                basis=_BASIS.get(name, "planner/activations.py"),
            )


def _outside(allocated: float, world: int) -> Iterable[Item]:
    outside = (OUTSIDE_MORE if world > 1 else OUTSIDE_ONE)[0] * GIB
    what = "CUDA context, cuBLAS" + (", NCCL" if world > 1 else "")
    yield Item(
        name="caching allocator",
        kind="workspace",
        bytes=allocated * (RESERVED[0] - 1),
        source="table",
        basis="0.1 to 4.7 % above allocated, simulated and published",
    )
    yield Item(
        name=what, kind="context", bytes=outside, source="table", basis="published measurements"
    )


def _levels(phases: Phases, world: int, source: Source) -> tuple[Figure, Figure, Figure]:
    """Allocated, reserved, device."""
    loads = max(phases.values(), key=sum_of)
    value = sum_of(loads)
    soft = sum_of(load for load in loads if load[1] in SOFT)
    allocated = Figure(
        value=value,
        low=value - SOFT_LOW * soft,
        high=value + SOFT_HIGH * soft,
        unit="B",
        source=source,
        basis="states exact; activations and temporaries -1 to +15 %",
    )
    middle, low, high = RESERVED
    reserved = Figure(
        value=value * middle,
        low=allocated.low * low,
        high=allocated.high * high,
        unit="B",
        source="table",
        basis="allocated + 0.1 to 4.7 % of the caching allocator",
    )
    context, least, largest = OUTSIDE_MORE if world > 1 else OUTSIDE_ONE
    device = Figure(
        value=reserved.value + context * GIB,
        low=reserved.low + least * GIB,
        high=reserved.high + largest * GIB,
        unit="B",
        source="table",
        basis=f"reserved + {context} GiB ({least} to {largest}) outside torch",
    )
    return allocated, reserved, device


def _fits(device: Figure, capacity: float) -> bool:
    """The value leaves a margin, and the worst of the band would still run."""
    return device.value <= USABLE * capacity and device.high <= capacity


def largest_micro(
    work: Workload, candidate: Candidate, cluster: Cluster, *, traced: Traced | None = None
) -> int:
    """The largest micro-batch that fits, whether it divides the global batch or not; 0: none."""
    capacity = cluster.gpu.memory_gib * GIB

    def fits(micro: int) -> bool:
        phases = fullest_phases(work, replace(candidate, micro=micro), cluster, traced)
        return _fits(_levels(phases, cluster.world, "formula")[2], capacity)

    share = max(1, work.global_sequences // max(1, candidate.data_ranks(cluster.world)))
    # Above half of a rank's share there is one micro-batch a window, and less memory: the two
    # ranges are searched apart.
    alone = _largest(fits, share // 2 + 1)
    return alone or _largest(fits, 1, share // 2)


def _largest(fits: Callable[[int], bool], first: int, last: int | None = None) -> int:
    """The largest number from `first` to `last` that fits, if smaller ones do; 0: none."""
    if (last is not None and last < first) or not fits(first):
        return 0
    good, bad = first, 2 * first + 1
    while (last is None or bad <= last) and fits(bad):
        good, bad = bad, 2 * bad
    bad = bad if last is None else min(bad, last + 1)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


# ---- less


@dataclass(frozen=True, kw_only=True)
class Saving:
    """A change that lowers the peak.

    Attributes:
        bytes: of the allocated peak.
        how: the run file's key or the strategy that does it.
        cost: what it takes in exchange.
    """

    what: str
    bytes: float
    how: str
    cost: str


def savings(
    work: Workload, candidate: Candidate, cluster: Cluster, *, traced: Traced | None = None
) -> tuple[Saving, ...]:
    """Single changes that lower the peak, the largest saving first."""
    before = most(fullest_phases(work, candidate, cluster, traced))
    found = []
    for what, how, cost, other_work, other in changes(work, candidate):
        saved = before - most(fullest_phases(other_work, other, cluster, traced))
        if saved > 0:
            found.append(Saving(what=what, bytes=saved, how=how, cost=cost))
    return tuple(sorted(found, key=lambda saving: -saving.bytes))


# ---- disk and host


def checkpoint_bytes(shape: Shape) -> float:
    """Bytes of one checkpoint: weight and Adam's two moments in fp32."""
    return float(CHECKPOINT_BYTES * shape.parameters)


def host_memory(work: Workload, cluster: Cluster) -> tuple[Item, ...]:
    """Bytes of one node's memory: processes, readers, model at the start, checkpoint's copy.

    Every strategy shares the checkpoint out evenly among its ranks.
    """
    gpus, number = cluster.gpus, work.shape.parameters
    share = checkpoint_bytes(work.shape) * gpus / cluster.world
    start = "each rank builds it in fp32 before it goes to the GPU; free afterwards"
    written = "checkpoint.write=background: the node's share of the checkpoint"
    found: list[tuple[str, float, Source, str]] = [
        ("rank processes", gpus * RANK_PROCESS * GIB, "assumed", f"{RANK_PROCESS} GiB a rank"),
        ("readers", gpus * READER_PROCESS * GIB, "assumed", f"{READER_PROCESS} GiB, one a rank"),
        ("model at the start", 4.0 * gpus * number, "formula", start),
        ("copy for the background writer", share, "formula", written),
    ]
    return tuple(
        Item(name=name, kind="host", bytes=size, source=source, basis=basis)
        for name, size, source, basis in found
    )
