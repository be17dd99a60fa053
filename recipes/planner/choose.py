"""Which strategy: every one at its best settings, ranked at the run's fixed global batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from recipes.metrics import human_seconds
from recipes.objective import divisors
from recipes.planner.memory import largest_micro, plan_memory
from recipes.planner.predict import Prediction, predict
from recipes.planner.strategies import obstacle, strategies
from recipes.planner.traced import Traced
from recipes.planner.workload import Candidate, Cluster, Strategy, Workload

# Predictions that differ by less are called equal: of one strategy's settings the one with more
# memory left is taken, of the strategies that this package runs the one that is listed first.
SAME = 0.01
SAME_STRATEGY = 0.03
# Divisors below the largest micro-batch that fits are worth a look: a smaller one may hide more,
# and a pipeline wants many turns.
TRIED, TRIED_IN_PIPELINES = 3, 8
ATTENTIONS: tuple[Literal["flash", "eager"], ...] = ("flash", "eager")


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A strategy that can't be, and why in one phrase."""

    strategy: Strategy
    reason: str


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Strategies at their best, fastest first.

    Attributes:
        chosen: the fastest that this package can run; None where nothing fits.
        asked: the run file's own settings, which may not fit.
        rows: the best candidate of each strategy that fits.
        rejected: those that can't be, with the reason.
    """

    chosen: Prediction | None
    asked: Prediction
    rows: tuple[Prediction, ...]
    rejected: tuple[Rejected, ...]

    def why_not(self, row: Prediction) -> str:
        """In one sentence, why a row that fits is not the choice; empty for the choice."""
        chosen = self.chosen
        if chosen is None or row is chosen:
            return ""
        ratio = row.update.value / chosen.update.value
        if not row.candidate.strategy.config and ratio < 1 - SAME:
            return f"{1 - ratio:.0%} faster on paper, but this package has no config for it yet"
        more = (row.memory.device.value - chosen.memory.device.value) / 2**30
        side = f", with {abs(more):.1f} GiB {'more' if more > 0 else 'less'} memory"
        side = side if abs(more) >= 0.05 else ""
        if abs(ratio - 1) <= SAME:
            return f"as fast{side}"
        if ratio < 1:
            return f"{1 - ratio:.1%} faster, less than the plan can tell apart{side}"
        return f"{ratio - 1:.0%} slower: {_cause(row, chosen)}"


def _cause(row: Prediction, chosen: Prediction) -> str:
    """The part of the update that a row loses most time with against the choice."""
    losses = {name: row.parts[name] - chosen.parts[name] for name in row.parts}
    worst = max(losses, key=lambda name: losses[name])
    strategy = row.candidate.strategy
    again = strategy.family == "deepspeed" and strategy.stage == 2 and row.accumulation > 1
    if worst == "network" and again:
        return f"it sends the gradients {row.accumulation} times an update"
    if worst == "network":
        return f"{_span(row.exposed.value)} of an update wait for the network"
    if row.candidate.checkpointing and not chosen.candidate.checkpointing:
        return "it fits only with gradient checkpointing, which runs every forward twice"
    if worst == "pipeline bubble":
        stages = strategy.pipeline
        return f"{stages} stages idle for {stages - 1} of {row.accumulation + stages - 1} turns"
    if worst == "logits" and strategy.pipeline > 1:
        return "the last stage has head and loss beside its layers, and the others wait for it"
    if worst == "kernel launches":
        return f"a micro-batch of {row.candidate.micro} is too small to keep the GPU busy"
    return f"{_span(losses[worst])} of an update more for {worst}"


def _span(seconds: float) -> str:
    return human_seconds(seconds) if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def micros(work: Workload, strategy: Strategy, world: int) -> list[int]:
    """Micro-batches that keep the global batch, ascending."""
    ranks = world // (strategy.tensor * strategy.pipeline)
    if ranks == 0 or work.global_sequences % ranks:
        return []
    return divisors(work.global_sequences // ranks)


def best_of(
    work: Workload,
    strategy: Strategy,
    cluster: Cluster,
    *,
    traced: Traced | None = None,
    wished: int = 0,
) -> Prediction | None:
    """A strategy's fastest candidate that fits; None where none does.

    Args:
        wished: a micro-batch that is taken where it is as fast as the fastest.
    """
    legal = micros(work, strategy, cluster.world)
    found: list[Prediction] = []
    for attention in ATTENTIONS:
        for checkpointing in (False, True):
            base = Candidate(
                strategy=strategy, micro=1, checkpointing=checkpointing, attention=attention
            )
            most = largest_micro(work, base, cluster, traced=traced)
            fitting = [n for n in legal if n <= most]
            tried = TRIED if strategy.pipeline == 1 else TRIED_IN_PIPELINES
            for micro in {*fitting[-tried:], *(n for n in fitting if n == wished)}:
                candidate = replace(base, micro=micro)
                memory = plan_memory(work, candidate, cluster, traced=traced)
                if memory.fits:
                    found.append(predict(work, candidate, cluster, traced=traced, memory=memory))
        if found:
            break  # eager attention moves and holds more than flash: looked at only if flash fails
    if not found:
        return None
    fastest = min(p.update.value for p in found)
    near = [p for p in found if p.update.value <= fastest * (1 + SAME)]
    return min(near, key=lambda p: (p.candidate.micro != wished, p.memory.device.value))


def rank(
    work: Workload, cluster: Cluster, *, asked: Candidate, traced: Traced | None = None
) -> Ranking:
    """Compare all strategies at the run's global batch."""
    rows, rejected = [], []
    listed = _with_asked(strategies(work.precision, cluster), asked.strategy)
    for strategy in listed:
        reason = obstacle(strategy, work, cluster)
        if reason:
            rejected.append(Rejected(strategy=strategy, reason=reason))
            continue
        best = best_of(work, strategy, cluster, traced=traced, wished=asked.micro)
        if best is None:
            rejected.append(
                Rejected(strategy=strategy, reason=_unfit(work, strategy, cluster, traced))
            )
        else:
            rows.append(best)
    rows.sort(key=lambda p: p.update.value)
    return Ranking(
        chosen=_choice(rows, listed, asked.strategy),
        asked=predict(work, asked, cluster, traced=traced),
        rows=tuple(rows),
        rejected=tuple(rejected),
    )


def _choice(
    rows: list[Prediction], listed: Sequence[Strategy], asked: Strategy
) -> Prediction | None:
    """The fastest that this package runs; of those that are as fast the one that was asked for."""
    runnable = [p for p in rows if p.candidate.strategy.config]
    if not runnable:
        return None
    near = [p for p in runnable if p.update.value <= runnable[0].update.value * (1 + SAME_STRATEGY)]
    return min(
        near,
        key=lambda row: (
            bare(row.candidate.strategy) != bare(asked),
            listed.index(row.candidate.strategy),
        ),
    )


def bare(strategy: Strategy) -> Strategy:
    """What a strategy does, without its name and file."""
    return replace(strategy, name="", config="")


def _with_asked(listed: Sequence[Strategy], asked: Strategy) -> tuple[Strategy, ...]:
    """The list, in which what was asked for is run by the file that was named for it."""
    if not asked.config or asked.stage > 1:  # no other stage is started by this package
        return tuple(listed)
    if bare(asked) in map(bare, listed):
        return tuple(
            replace(s, config=asked.config) if bare(s) == bare(asked) else s for s in listed
        )
    return (replace(asked, name=f"{asked.name}, as asked"), *listed)


def _unfit(work: Workload, strategy: Strategy, cluster: Cluster, traced: Traced | None) -> str:
    """How much the smallest way to run a strategy is too big."""
    candidate = Candidate(strategy=strategy, micro=1, checkpointing=True)
    memory = plan_memory(work, candidate, cluster, traced=traced)
    need, high, room = (
        size / 2**30 for size in (memory.device.value, memory.device.high, memory.usable)
    )
    held = f"{room:.1f} that may be planned with"
    if need <= room:
        need, held = high, f"{memory.capacity / 2**30:.1f} there are at its worst"
    return (
        f"a micro-batch of 1 with checkpointing takes {need:.1f} GiB of {held}; most of it "
        f"{memory.bottleneck}"
    )
