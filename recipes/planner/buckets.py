"""How many calls a bucket size makes of the gradients: the engines' own filling, by parameter.

Sizes come from a `Shape`; each engine's rule is named where it stands. DeepSpeed is 0.19.8, torch
2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from recipes.planner.shape import Shape
from recipes.planner.workload import Strategy

# DeepSpeed's engine.py, MEMORY_OPT_ALLREDUCE_SIZE: elements of a call without ZeRO.
STAGE0_BUCKET = 500_000_000
# torch/nn/parallel/distributed.py: the default bucket and the first, smaller one, bytes.
DDP_BUCKET_BYTES, DDP_FIRST_BYTES = 25 * 2**20, 2**20
# DeepSpeed's zero/config.py for stage 3, elements: a parameter up to `PERSISTENT` stays gathered
# until the update, one that is needed again within `REUSE` elements is kept, a prefetch takes
# `PREFETCH` and goes no further than `LIVE`.
PERSISTENT, REUSE, PREFETCH, LIVE = 100_000, 1_000_000_000, 50_000_000, 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter of a rank, in the order of `named_parameters`."""

    elements: int
    matrix: bool  # has weight decay, and DeepSpeed's first group


Matrix = Callable[[int, int], Parameter]
Vector = Callable[[int], Parameter]


@lru_cache(maxsize=256)
def parameters(shape: Shape, tensor: int = 1, pipeline: int = 1) -> tuple[Parameter, ...]:
    """The parameters of a rank: of the first stage, matrices divided over the tensor ranks.

    A traced model's that the closed form does not know stand last, as one matrix.
    """

    def matrix(rows: int, columns: int) -> Parameter:
        return Parameter(elements=-(-rows * columns // tensor), matrix=True)

    def vector(size: int) -> Parameter:
        return Parameter(elements=size, matrix=False)

    norm = [vector(shape.width)] * (2 if shape.norm == "layer" else 1)
    layer = norm + _attention(shape, matrix, vector) + norm + _mlp(shape, matrix, vector)
    whole = [matrix(shape.vocab, shape.width)]
    whole += [matrix(shape.positions, shape.width)] if shape.positions else []
    whole += layer * -(-shape.layers // pipeline)
    if pipeline == 1:
        whole += norm + ([] if shape.tied else [matrix(shape.vocab, shape.width)])
        if shape.traced_parameters is not None:
            rest = shape.traced_parameters // tensor - sum(p.elements for p in whole)
            whole += [Parameter(elements=rest, matrix=True)] if rest > 0 else []
    return tuple(whole)


def _attention(shape: Shape, matrix: Matrix, vector: Vector) -> list[Parameter]:
    widths = [shape.attention_width, shape.kv_width, shape.kv_width]
    if shape.family in ("gpt2", "gpt_neox"):  # one matrix for queries, keys and values
        widths = [sum(widths)]
    found = []
    for width in widths:
        found.append(matrix(shape.width, width))
        found += [vector(width)] if shape.qkv_bias else []
    found.append(matrix(shape.attention_width, shape.width))
    found += [vector(shape.width)] if shape.out_bias else []
    return found + [vector(shape.head_dim)] * (2 if shape.qk_norm else 0)


def _mlp(shape: Shape, matrix: Matrix, vector: Vector) -> list[Parameter]:
    found = []
    for _ in range(2 if shape.gated else 1):
        found.append(matrix(shape.width, shape.ffn))
        found += [vector(shape.ffn)] if shape.mlp_bias else []
    found.append(matrix(shape.ffn, shape.width))
    return found + ([vector(shape.width)] if shape.mlp_bias else [])


@lru_cache(maxsize=1024)
def elements(shape: Shape, strategy: Strategy, align: int = 1) -> int:
    """Elements of a rank's parameters, each of the two groups filled up to a multiple of `align`.

    DeepSpeed's zero/stage_1_and_2.py fills each group's flat buffer so.
    """
    listed = parameters(shape, strategy.tensor, strategy.pipeline)
    sums = [sum(p.elements for p in listed if p.matrix is kind) for kind in (True, False)]
    return sum(-(-size // align) * align for size in sums)


@lru_cache(maxsize=1024)
def bucket_calls(shape: Shape, strategy: Strategy, ranks: int) -> int:
    """Calls with which all gradients are reduced once."""
    listed = parameters(shape, strategy.tensor, strategy.pipeline)
    back = [p.elements for p in reversed(listed)]
    if strategy.family == "ddp":
        size = strategy.bucket_elements  # in fp32 elements, whatever travels
        first, later = (size, size) if size else (DDP_FIRST_BYTES // 4, DDP_BUCKET_BYTES // 4)
        return _closed_when_full(back, first, later)
    if strategy.family == "sharded":  # a layer at a time, as llm.c does, where no bucket is named
        layers = shape.layers // strategy.pipeline + 1
        return -(-sum(back) // strategy.bucket_elements) if strategy.bucket_elements else layers
    if strategy.stage == 0:
        return _closed_when_full(back, STAGE0_BUCKET, STAGE0_BUCKET)
    if strategy.stage == 3:
        return len(list(_flushed_before(back, strategy.bucket_elements)))
    return _owned(listed, strategy, ranks)


def _closed_when_full(sizes: Sequence[int], first: int, later: int) -> int:
    """Buckets that close once they have reached their size: torch's, and DeepSpeed's stage 0."""
    calls, held = 0, 0
    for size in sizes:
        held += size
        if held >= (first if calls == 0 else later):
            calls, held = calls + 1, 0
    return calls + (held > 0)


def _flushed_before(sizes: Iterable[int], bucket: int) -> Iterable[list[int]]:
    """Positions in each bucket: it is sent before a parameter would overfill it (DeepSpeed)."""
    held = 0
    place: list[int] = []
    for index, size in enumerate(sizes):
        if place and held + size > bucket:
            yield place
            held, place = 0, []
        held += size
        place.append(index)
    if place:
        yield place


def _owned(listed: Sequence[Parameter], strategy: Strategy, ranks: int) -> int:
    """Calls of stages 1 and 2, whose buckets are cut by the owners of what is in them.

    One all-reduce for a bucket; a parameter above the bucket's size is cut at its owners' borders
    (`allreduce_and_scatter`). With less traffic one reduction per owner (`allreduce_no_retain`).
    Stage 1 without overlap goes group by group (`reduce_gradients`), otherwise by the backward.
    """
    owners = _owners(listed, ranks)
    order = list(range(len(listed)))
    if strategy.stage == 1 and not strategy.overlap:
        order.sort(key=lambda index: not listed[index].matrix)
    else:
        order.reverse()
    calls = 0
    for place in _flushed_before((listed[i].elements for i in order), strategy.bucket_elements):
        slices = [piece for i in place for piece in owners[order[i]]]
        if strategy.less_traffic:
            calls += len({owner for owner, _ in slices})
        else:
            held = 0
            for _, size in slices:
                held += size
                if held > strategy.bucket_elements:
                    calls, held = calls + 1, 0
            calls += held > 0
    return calls


def _owners(listed: Sequence[Parameter], ranks: int) -> list[list[tuple[int, int]]]:
    """For each parameter, (owner, elements) of its slices; each group is divided by itself."""
    part: dict[bool, int] = {}
    offset = {True: 0, False: 0}
    for kind in (True, False):
        size = sum(p.elements for p in listed if p.matrix is kind)
        part[kind] = max(1, -(-size // (2 * ranks)) * 2)
    found = []
    for p in listed:
        start, end, slices = offset[p.matrix], offset[p.matrix] + p.elements, []
        while start < end:
            owner = start // part[p.matrix]
            stop = min(end, (owner + 1) * part[p.matrix])
            slices.append((owner, stop - start))
            start = stop
        offset[p.matrix] = end
        found.append(slices)
    return found


@dataclass(frozen=True, kw_only=True)
class Gathers:
    """Elements and calls of one pass."""

    elements: int
    calls: int


@lru_cache(maxsize=256)
def stage3_gathers(shape: Shape, strategy: Strategy) -> tuple[Gathers, Gathers, Gathers]:
    """What ZeRO-3 gathers in a forward, in a backward, and after the update.

    DeepSpeed's zero/partitioned_param_coordinator.py in its steady state: small parameters stay
    gathered and are gathered one by one after the update; a larger one is kept after its use if it
    comes up again within REUSE elements. Forward and backward lie one after the other, so those in
    the last REUSE/2 elements of the forward are not gathered again; a tied embedding comes up
    again at the head.
    """
    listed = parameters(shape, strategy.tensor, strategy.pipeline)
    small = [p.elements for p in listed if p.elements <= PERSISTENT]
    behind = sum(p.elements for p in listed)
    tied = shape.tied and strategy.pipeline == 1 and listed[0].elements > PERSISTENT
    ahead, back = [], []
    for index, p in enumerate(listed):
        behind -= p.elements
        if p.elements <= PERSISTENT:
            continue
        ahead.append(p.elements)
        if tied and index == 0:
            far = behind >= REUSE
            ahead += [p.elements] * far
            back += [p.elements] * (far + (REUSE == 0))
        elif 2 * behind >= REUSE:
            back.append(p.elements)
    return (
        Gathers(elements=sum(ahead), calls=_prefetches(ahead)),
        Gathers(elements=sum(back), calls=_prefetches(back)),
        Gathers(elements=sum(small), calls=len(small)),
    )


def _prefetches(sizes: Sequence[int]) -> int:
    """A prefetch takes PREFETCH elements until LIVE are there, then what another one frees."""
    calls, held, live = 0, 0, 0
    for size in sizes:
        live += size
        held += size
        if live > LIVE or held >= PREFETCH:
            calls, held = calls + 1, 0
    return calls + (held > 0)
