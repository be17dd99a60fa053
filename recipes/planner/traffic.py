"""What one update sends: every collective with its payload, its group and what can hide it.

Payload S is the whole tensor: the one that is reduced, the gathered one, the one before a scatter.
A ring then sends 2(n-1)/n·S per rank for an all-reduce and (n-1)/n·S for a gather, a scatter and,
on average over the ranks, a reduction to one rank. tests/test_planner_traffic.py holds payloads and
calls to the real engine's, counted call by call and on the wire.

DeepSpeed is 0.19.8: stage 1 all-reduces whole gradients at the boundary although the ZeRO paper
reduce-scatters them (zero/stage_1_and_2.py, `average_tensor`), stage 2 does so in every
micro-batch, stage 3 really scatters (zero/stage3.py, `__avg_scatter_grads`). FSDP2 is as
torchtitan runs it: the head's unit stays gathered between forward and backward, and every
micro-batch reduces, so that gradients stay sharded (Accelerate's `no_sync` would keep them whole).
Gradients travel in the parameters' precision.
"""

from __future__ import annotations

from collections.abc import Callable

from recipes.planner.buckets import bucket_calls, elements, stage3_gathers
from recipes.planner.transfer import Hides, Op, Place, Transfer, group_place, ring_share
from recipes.planner.workload import Candidate, Cluster, Strategy, Workload

# recipes/engine/update.py, `Announcement`: seven counts and flags of int64.
ANNOUNCEMENT_BYTES = 7 * 8
# Groups of parameters: with and without weight decay (recipes/engine/build.py). DeepSpeed reduces a
# norm and gathers the weights of each.
GROUPS = 2


def transfers(work: Workload, candidate: Candidate, cluster: Cluster) -> tuple[Transfer, ...]:
    """All communication of one update; nothing for a group of one rank."""
    strategy, ranks = candidate.strategy, candidate.data_ranks(cluster.world)
    found: list[Transfer] = []
    if ranks > 1:
        place = group_place(strategy, ranks, cluster, "data")
        rounds = candidate.accumulation(work, cluster.world)
        family: dict[str, _Family] = {
            "ddp": _ddp,
            "deepspeed": _deepspeed,
            "fsdp2": _fsdp2,
            "sharded": _sharded,
        }
        found += family[strategy.family](work, strategy, place, rounds)
        found.append(
            place.transfer("counts", "all_reduce", ANNOUNCEMENT_BYTES, 1, "update", "forward")
        )
    if strategy.tensor > 1:
        found += _tensor(work, candidate, cluster)
    if strategy.pipeline > 1:
        found += _pipeline(work, candidate, cluster)
    return tuple(t for t in found if t.calls and t.bytes)


def sent_per_rank(work: Workload, candidate: Candidate, cluster: Cluster) -> float:
    """Bytes that a rank sends in an update."""
    return sum(t.sent for t in transfers(work, candidate, cluster))


def sent_between_nodes(
    work: Workload, candidate: Candidate, cluster: Cluster
) -> tuple[float, float]:
    """Bytes that a node sends to others in an update, one way: flat ring, hierarchical.

    A flat ring crosses from node to node once, with all that a rank sends; a hierarchical algorithm
    reduces within the node first, and only the sum travels: 2(k-1)/k·S for k nodes.
    """
    flat = hierarchical = 0.0
    for t in transfers(work, candidate, cluster):
        if t.place.nodes > 1:
            flat += t.place.beside * t.sent
            hierarchical += t.place.beside * t.calls * t.bytes * ring_share(t.op, t.place.nodes)
    return flat, hierarchical


_Family = Callable[[Workload, Strategy, Place, int], list[Transfer]]


def _width(work: Workload) -> int:
    """Bytes of an element of parameters and activations."""
    return 4 if work.precision == "fp32" else 2


def _table(work: Workload, strategy: Strategy) -> float:
    """Elements of the token table, whose gradient is the last and which is gathered first."""
    return work.shape.vocab * work.shape.width / strategy.tensor


def _ddp(work: Workload, strategy: Strategy, place: Place, rounds: int) -> list[Transfer]:
    width = 2 if strategy.compress else 4
    size = float(elements(work.shape, strategy))
    calls = bucket_calls(work.shape, strategy, place.ranks)
    hides: Hides = "last backward"
    largest = width * _table(work, strategy)
    found = [
        place.transfer(
            "gradients", "all_reduce", width * size, calls, "boundary", hides, largest=largest
        )
    ]
    if not work.shape.positions:
        # Rotary frequencies are buffers, in fp32 and twice; DDP sends rank 0's in each update's
        # first forward.
        rotary = 4.0 * work.shape.head_dim
        found.append(place.transfer("buffers", "broadcast", rotary, 1, "update"))
    return found


def _deepspeed(work: Workload, strategy: Strategy, place: Place, rounds: int) -> list[Transfer]:
    if strategy.stage == 3:
        return _stage3(work, strategy, place, rounds)
    width, size = _width(work), float(elements(work.shape, strategy))
    calls = bucket_calls(work.shape, strategy, place.ranks)
    if strategy.stage == 0:
        return [place.transfer("gradients", "all_reduce", width * size, calls, "boundary")]
    op: Op = "reduce" if strategy.less_traffic else "all_reduce"
    largest = width * _table(work, strategy)
    if strategy.stage == 1:
        hides: Hides = "last backward" if strategy.overlap else "nothing"
        found = [
            place.transfer("gradients", op, width * size, calls, "boundary", hides, largest=largest)
        ]
    else:
        hides = "backward" if strategy.overlap else "nothing"
        whole = width * size * rounds
        found = [
            place.transfer(
                *("gradients", op, whole, calls * rounds, "micro", hides),
                rounds=rounds,
                largest=largest,
            )
        ]
    # Each group's flat buffer is filled up to a multiple of 2N (`nccl_start_alignment_factor`).
    padded = elements(work.shape, strategy, align=2 * place.ranks)
    found.append(place.transfer("parameters", "all_gather", width * padded, GROUPS, "update"))
    checks = 1 if work.precision != "fp32" else 0  # one byte: overflow
    flags = 4.0 * GROUPS + checks
    found.append(place.transfer("norms", "all_reduce", flags, GROUPS + checks, "update"))
    return found


def _stage3(work: Workload, strategy: Strategy, place: Place, rounds: int) -> list[Transfer]:
    width, ranks = _width(work), place.ranks
    whole = float(width * elements(work.shape, strategy, align=ranks))
    ahead, back, kept = stage3_gathers(work.shape, strategy)
    checks = 1 if work.precision == "fp16" else 0
    flags, small = 8.0 * GROUPS + checks, width * kept.elements
    return [
        *_shards(
            *(place, rounds),
            ahead=(width * ahead.elements, ahead.calls),
            back=(width * back.elements, back.calls),
            scattered=(whole, bucket_calls(work.shape, strategy, ranks)),
            largest=width * _table(work, strategy),
            overlap=strategy.overlap,
        ),
        place.transfer("small parameters", "all_gather", small, kept.calls, "update"),
        place.transfer("norms", "all_reduce", flags, GROUPS + checks, "update"),
    ]


def _fsdp2(work: Workload, strategy: Strategy, place: Place, rounds: int) -> list[Transfer]:
    shape, width = work.shape, _width(work)
    whole = float(width * elements(shape, strategy))
    layers = shape.layers * shape.layer_parameters / strategy.tensor / strategy.pipeline
    embedding = 0 if shape.tied else shape.vocab * shape.width / strategy.tensor
    units = shape.layers // strategy.pipeline + (1 if shape.tied else 2)
    return [
        *_shards(
            *(place, rounds),
            ahead=(whole, units),
            back=(width * (layers + embedding), units - 1),
            scattered=(whole, units),
            largest=width * _table(work, strategy),
            overlap=True,
        ),
        place.transfer("norms", "all_reduce", 4.0, 1, "update"),
    ]


def _shards(
    place: Place,
    rounds: int,
    *,
    ahead: tuple[float, int],
    back: tuple[float, int],
    scattered: tuple[float, int],
    largest: float,
    overlap: bool,
) -> list[Transfer]:
    """What sharded parameters send in each of `rounds` micro-batches: gathers, then a scatter.

    Args:
        ahead, back, scattered: bytes and calls of one micro-batch.
        largest: bytes of the token table, first to be gathered and last to be reduced.
    """
    hides: tuple[Hides, Hides] = ("forward", "backward") if overlap else ("nothing", "nothing")
    parts: tuple[tuple[str, Op, tuple[float, int], Hides, float], ...] = (
        ("parameters, forward", "all_gather", ahead, hides[0], largest),
        ("parameters, backward", "all_gather", back, hides[1], 0.0),
        ("gradients", "reduce_scatter", scattered, hides[1], largest),
    )
    return [
        place.transfer(
            *(what, op, size * rounds, calls * rounds, "micro", hidden),
            rounds=rounds,
            largest=most,
        )
        for what, op, (size, calls), hidden, most in parts
    ]


def _sharded(work: Workload, strategy: Strategy, place: Place, rounds: int) -> list[Transfer]:
    size = float(_width(work) * elements(work.shape, strategy, align=place.ranks))
    calls = bucket_calls(work.shape, strategy, place.ranks)
    hides: Hides = "last backward" if strategy.overlap else "nothing"
    checks = 2.0 if work.precision != "fp32" else 1.0
    return [
        place.transfer(
            *("gradients", "reduce_scatter", size, calls, "boundary", hides),
            largest=_width(work) * _table(work, strategy),
        ),
        place.transfer("parameters", "all_gather", size, calls, "update"),
        place.transfer("norms", "all_reduce", 4.0 * checks, int(checks), "update"),
    ]


def _tensor(work: Workload, candidate: Candidate, cluster: Cluster) -> list[Transfer]:
    """Megatron's: after attention and after the feed-forward part, forward and backward.

    Shoeybi et al. 2019, section 3; with sequence parallelism each becomes a gather and a scatter,
    and the backward gathers the inputs once more (Korthikanti et al. 2022, section 4.2.2). The
    embedding's sum, the head's input gradient and the loss's three rows of sums come on top, and
    checkpointing repeats the forward's.
    """
    shape, strategy = work.shape, candidate.strategy
    place = group_place(strategy, strategy.tensor, cluster, "tensor")
    rounds = candidate.accumulation(work, cluster.world)
    one = float(candidate.micro * work.seq_len * shape.width * _width(work))
    halves = 1 if shape.parallel else 2
    layers = shape.layers // strategy.pipeline
    ahead = rounds * (halves * layers * (2 if candidate.checkpointing else 1) + 1)
    back = rounds * (halves * layers + 1)
    found = []
    ops: tuple[Op, ...] = ("all_gather", "reduce_scatter") if strategy.sequence else ("all_reduce",)
    for op in ops:
        found.append(place.transfer("activations", op, ahead * one, ahead, "micro"))
        found.append(place.transfer("activations' gradients", op, back * one, back, "micro"))
    if strategy.sequence:
        again = rounds * halves * layers
        found.append(
            place.transfer(
                *("inputs again", "all_gather", again * one, again, "micro", "backward"),
                rounds=rounds,
            )
        )
    sums = 4.0 * candidate.micro * work.seq_len
    found.append(place.transfer("loss", "all_reduce", 3 * rounds * sums, 3 * rounds, "micro"))
    return found


def _pipeline(work: Workload, candidate: Candidate, cluster: Cluster) -> list[Transfer]:
    """Activations to the next stage, their gradients back; a tied embedding's gradient once."""
    shape, strategy = work.shape, candidate.strategy
    place = group_place(strategy, 2, cluster, "pipeline")
    rounds = candidate.accumulation(work, cluster.world)
    one = float(candidate.micro * work.seq_len * shape.width * _width(work))
    if strategy.sequence:
        one /= strategy.tensor
    calls = rounds * strategy.chunks
    found = [
        place.transfer("activations onward", "send", calls * one, calls, "micro", "forward"),
        place.transfer("gradients back", "send", calls * one, calls, "micro", "backward"),
    ]
    if shape.tied:
        size = _width(work) * shape.vocab * shape.width / strategy.tensor
        found.append(place.transfer("tied embedding", "all_reduce", size, 1, "boundary"))
    return found
