"""One candidate's update: memory, seconds and their parts, tokens per second, MFU."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from recipes.planner import network, traffic
from recipes.planner.compute import MicroTime, micro_step, optimizer_seconds
from recipes.planner.figure import Figure, total
from recipes.planner.memory import MemoryPlan, plan_memory
from recipes.planner.traced import Traced
from recipes.planner.transfer import Transfer
from recipes.planner.workload import Candidate, Cluster, Workload

# A step waits for its slowest rank: share of the arithmetic per doubling of nodes. Chosen on
# llm-foundry's curves from 16 to 128 GPUs, which lose 0.2 to 2 % a doubling and so prove nothing.
SLOWEST_RANK = 0.01
SEEN_DOUBLINGS = 4  # beyond 16 nodes nothing was seen, so the value stays and the band grows
# A hidden transfer takes multiprocessors and memory bandwidth from the arithmetic: share of its
# time that shows after all (assumed).
CONTENTION = 0.15


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What one update of a candidate takes. Times are seconds.

    Attributes:
        communication: all transfers, hidden or not; `exposed`: what compute does not hide.
        bubble: idle time of a pipeline's stages; `slowest`: waiting for the slowest rank.
        parts: seconds by cause, which sum to the update.
        bottleneck: the cause that takes most.
        mfu: model FLOPs by the GPUs' dense peak (6N + 12·L·h·T a token).
    """

    candidate: Candidate
    accumulation: int
    memory: MemoryPlan
    micro: MicroTime
    transfers: tuple[tuple[Transfer, Figure], ...]
    communication: Figure
    exposed: Figure
    optimizer: Figure
    bubble: Figure
    slowest: Figure
    update: Figure
    tokens_per_s: Figure
    mfu: Figure
    parts: dict[str, float]
    bottleneck: str

    @property
    def name(self) -> str:
        """How the plan names the candidate."""
        extras = [f"micro {self.candidate.micro}"]
        if self.candidate.checkpointing:
            extras.append("checkpointing")
        if self.candidate.attention == "eager":
            extras.append("eager attention")
        return f"{self.candidate.strategy.name}, {', '.join(extras)}"


def predict(
    work: Workload,
    candidate: Candidate,
    cluster: Cluster,
    *,
    traced: Traced | None = None,
    memory: MemoryPlan | None = None,
) -> Prediction:
    """Predict one update of `work` as `candidate` on `cluster`.

    Args:
        traced: activations counted on the real model, in place of the closed form.
        memory: already planned for the same candidate.
    """
    accumulation = candidate.accumulation(work, cluster.world)
    micro = micro_step(work, candidate, cluster)
    optimizer = optimizer_seconds(work, candidate, cluster)
    timed = tuple(
        (transfer, network.seconds(transfer, cluster))
        for transfer in traffic.transfers(work, candidate, cluster)
    )
    communication = total([s for _, s in timed], "s", "all transfers of an update")
    exposed = _exposed(timed, micro, accumulation)
    stages = candidate.strategy.pipeline
    arithmetic = micro.figure.times(accumulation, basis="micro-batches of an update")
    within = _exposed([pair for pair in timed if pair[0].when == "micro"], micro, accumulation)
    turn = total([micro.figure, within.times(1 / accumulation)], "s", "a micro-batch")
    bubble = turn.times(
        (stages - 1) / candidate.strategy.chunks,
        basis="(stages - 1)/chunks micro-batches: 1F1B, interleaved",
    )
    slowest = _slowest(arithmetic, cluster.nodes)
    spans = [arithmetic, bubble, slowest, exposed, optimizer]
    update = total(spans, "s", "arithmetic + waiting + exposed communication + optimizer")
    rate = update.inverse(work.global_tokens, "tokens/s", "global tokens by the update time")
    parts = _parts(micro, accumulation) | {
        "network": exposed.value,
        "optimizer": optimizer.value,
        "pipeline bubble": bubble.value,
        "slowest rank": slowest.value,
    }
    return Prediction(
        candidate=candidate,
        accumulation=accumulation,
        memory=memory or plan_memory(work, candidate, cluster, traced=traced),
        micro=micro,
        transfers=timed,
        communication=communication,
        exposed=exposed,
        optimizer=optimizer,
        bubble=bubble,
        slowest=slowest,
        update=update,
        tokens_per_s=rate,
        mfu=_mfu(rate, work, cluster),
        parts=parts,
        bottleneck=max(parts, key=lambda name: parts[name]),
    )


def _mfu(rate: Figure, work: Workload, cluster: Cluster) -> Figure:
    peak = cluster.gpu.flops_32bit if work.precision == "fp32" else cluster.gpu.flops_16bit
    per_token = work.shape.flops_per_token(work.seq_len)
    return rate.times(per_token / (cluster.world * peak), "", "model FLOPs by the dense peak")


def _slowest(work_time: Figure, nodes: int) -> Figure:
    doublings = math.log2(nodes)
    share = SLOWEST_RANK * work_time.value
    return Figure(
        value=share * min(doublings, SEEN_DOUBLINGS),
        low=0.0,
        high=2 * share * doublings,
        unit="s",
        source="table",
        basis=f"{SLOWEST_RANK:.0%} of the arithmetic per doubling of nodes, up to 16",
    )


def _parts(micro: MicroTime, accumulation: int) -> dict[str, float]:
    kinds = micro.by_kind
    return {
        "arithmetic": accumulation * (kinds["matmul"] + kinds["attention"]),
        "memory bandwidth": accumulation * (kinds["elementwise"] + kinds["gradients"]),
        "logits": accumulation * kinds["logits"],
        "kernel launches": accumulation * kinds["launch"],
    }


Timed = Sequence[tuple[Transfer, Figure]]


def _exposed(timed: Timed, micro: MicroTime, accumulation: int) -> Figure:
    """What arithmetic does not hide of an update's transfers, and what hiding the rest costs."""

    def left(pick: Callable[[Figure], float]) -> float:
        pace = pick(micro.figure) / micro.figure.value
        return _left([(t, pick(s)) for t, s in timed], micro, pace, accumulation)

    figures = [s for _, s in timed]
    value = left(lambda s: s.value)
    return Figure(
        value=value,
        low=min(left(lambda s: s.low), value),
        high=max(left(lambda s: s.high), value),
        unit="s",
        source=total(figures, "s", "").source,
        basis=f"what no arithmetic hides, and {100 * CONTENTION:.0f} % of what it does",
    )


def _left(
    timed: list[tuple[Transfer, float]], micro: MicroTime, pace: float, accumulation: int
) -> float:
    """Seconds that show, of transfers with these seconds beside arithmetic of this pace.

    What hides behind the same arithmetic shares it: together a pool shows at least what is longer
    than that. Of each transfer the largest call that nothing follows shows: the first gather, the
    last reduction (DeepSpeed waits for a bucket before it sends the next, torch's reducer uses one
    stream).
    """
    forward, backward = pace * micro.forward_s, pace * micro.backward_s
    behind = {
        "backward": accumulation * backward,
        "forward": accumulation * forward,
        "forward and backward": accumulation * (forward + backward),
    }
    pools: dict[str, list[tuple[float, float]]] = {}
    shown = whole = 0.0
    for transfer, seconds in timed:
        whole += seconds
        if transfer.hides_behind == "nothing" or not transfer.calls:
            shown += seconds
            continue
        alone = transfer.tail * seconds
        if transfer.hides_behind == "last backward":
            alone = max(alone, seconds - (1 - transfer.tail) * backward)
        pool = "backward" if transfer.hides_behind == "last backward" else transfer.hides_behind
        pools.setdefault(pool, []).append((seconds, alone))
    for name, members in pools.items():
        together = sum(seconds for seconds, _ in members)
        shown += max(sum(alone for _, alone in members), together - behind[name])
    return shown + CONTENTION * (whole - shown)


def communication_share(prediction: Prediction) -> Figure:
    """Exposed communication by the update time, between 0 and 1."""
    exposed, update = prediction.exposed, prediction.update
    return Figure(
        value=exposed.value / update.value,
        low=exposed.low / update.high,
        high=min(1.0, exposed.high / update.low),
        unit="",
        source=exposed.source,
        basis="exposed communication by the update time",
    )
