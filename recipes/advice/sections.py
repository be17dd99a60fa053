"""Sections 2, 3, 5 and 6 of the answer: memory, batch, time and money, scaling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from recipes.advice.plain import exact_json, item_figure, item_json, row_json
from recipes.advice.question import Question
from recipes.advice.start_line import evaluation_for
from recipes.objective import divisors, legal_worlds, nearest_worlds
from recipes.planner import memory, money
from recipes.planner.figure import Figure, exact, total
from recipes.planner.memory import SOFT_HIGH, SOFT_LOW, MemoryPlan
from recipes.planner.predict import Prediction
from recipes.planner.scaling import Point
from recipes.planner.workload import Candidate

MOST_STEPS = 7  # of the ladder of micro-batches


def memory_section(question: Question, chosen: Prediction) -> dict[str, Any]:
    """Bytes on one GPU by phase, what else fits, what would save, the host and the checkpoint."""
    work, cluster, traced = question.work, question.cluster, question.traced
    plan, candidate = chosen.memory, chosen.candidate
    saved = memory.checkpoint_bytes(work.shape)
    share = f"{plan.usable / plan.capacity:.0%} of it may be planned with"
    return {
        "capacity": _table(plan.capacity, f"{cluster.gpu.name}: {cluster.gpu.source}"),
        "usable": _table(plan.usable, share),
        "fits": plan.fits,
        "allocated": plan.allocated.to_json(),
        "reserved": plan.reserved.to_json(),
        "device": plan.device.to_json(),
        "peak": plan.peak.name,
        "largest_item": plan.bottleneck,
        "phases": [
            {
                "name": phase.name,
                "allocated": total(
                    [item_figure(item) for item in phase.items], "B", "all of its parts"
                ).to_json(),
                "items": [item_json(item) for item in phase.items],
            }
            for phase in plan.phases
        ],
        "largest_micro": memory.largest_micro(work, candidate, cluster, traced=traced),
        "savings": [
            {"what": s.what, "bytes": _saved(s.bytes, plan), "how": s.how, "cost": s.cost}
            for s in memory.savings(work, candidate, cluster, traced=traced)
        ],
        "host": [item_json(item) for item in memory.host_memory(work, cluster)],
        "checkpoint_bytes": exact_json(saved, "B", "12 B a parameter: weight and moments in fp32"),
    }


def _table(size: float, basis: str) -> dict[str, Any]:
    return Figure(value=size, low=size, high=size, unit="B", source="table", basis=basis).to_json()


def _saved(size: float, plan: MemoryPlan) -> dict[str, Any]:
    return Figure(
        value=size,
        low=size * (1 - SOFT_LOW),
        high=size * (1 + SOFT_HIGH),
        unit="B",
        source=plan.allocated.source,
        basis="difference of two peaks; off as activations are at the most",
    ).to_json()


def batch_section(question: Question, chosen: Prediction) -> dict[str, Any]:
    """How the global batch is divided, and the other ways that leave it as it is."""
    run, work, world = question.run, question.work, question.cluster.world
    candidate = chosen.candidate
    ranks = candidate.data_ranks(world)
    batch = run.batch.model_copy(update={"micro": candidate.micro})
    legal = legal_worlds(batch, lanes=run.data.lanes, workers=run.data.workers)
    return {
        "asked_micro": run.batch.micro,
        "micro": candidate.micro,
        "accumulation": chosen.accumulation,
        "data_ranks": ranks,
        "global_sequences": work.global_sequences,
        "global_tokens": work.global_tokens,
        "legal_worlds": legal,
        "world_is_legal": ranks in legal,
        "nearest_legal": nearest_worlds(legal, ranks),
        "evaluate_sequences": evaluation_for(run, candidate, world),
        "ladder": _ladder(question, candidate, work.global_sequences // ranks),
    }


def _ladder(question: Question, candidate: Candidate, share: int) -> list[dict[str, Any]]:
    """Every micro-batch that divides a rank's share, up to the first that does not fit."""
    steps: list[dict[str, Any]] = []
    for micro in divisors(share):
        changed = replace(candidate, micro=micro)
        plan = memory.plan_memory(question.work, changed, question.cluster, traced=question.traced)
        steps.append(
            {
                "micro": micro,
                "accumulation": share // micro,
                "device": plan.device.to_json(),
                "fits": plan.fits,
            }
        )
        if not plan.fits:
            break
    return steps[-MOST_STEPS:]


def cost_section(question: Question, chosen: Prediction) -> dict[str, Any]:
    """Updates, days, GPU-hours, price, and the interval between checkpoints that loses least."""
    run, wanted, world = question.run, question.wanted, question.cluster.world
    cost = money.cost(
        run.schedule,
        run.batch,
        update=chosen.update,
        world=world,
        tokens_per_sample=wanted.tokens_per_sample,
        price_per_gpu_hour=wanted.price,
    )
    save = money.saving(memory.checkpoint_bytes(question.work.shape), world, run.checkpoint)
    mtbf = exact(wanted.mtbf, "h", "--mtbf") if wanted.mtbf else money.PUBLISHED_MTBF
    best = money.checkpoint_interval(save, mtbf, world, chosen.update)
    own = money.policy_interval(run.checkpoint, chosen.update)
    return {
        "samples": run.schedule.samples,
        "updates": cost.updates,
        "tokens": cost.tokens.to_json(),
        "tokens_per_sample": None
        if cost.tokens_per_sample is None
        else cost.tokens_per_sample.to_json(),
        "update": chosen.update.to_json(),
        "days": cost.days.to_json(),
        "gpu_hours": cost.gpu_hours.to_json(),
        "price": None if cost.price is None else cost.price.to_json(),
        "checkpoint": {
            "mtbf_hours_per_gpu": mtbf.to_json(),
            "failures_expected": money.failures(cost.gpu_hours, mtbf).to_json(),
            "stall": save.stall.to_json(),
            "written": save.written.to_json(),
            "restart": save.restart.to_json(),
            "best": _interval_json(best),
            "own": _interval_json(money.interval_of(own, save, mtbf, world, chosen.update)),
        },
    }


def _interval_json(interval: money.Interval) -> dict[str, Any]:
    return {
        "seconds": interval.seconds.to_json(),
        "updates": interval.updates,
        "loss": interval.loss.to_json(),
        "progresses": interval.progresses,
    }


def scaling_section(question: Question, points: Sequence[Point], updates: int) -> dict[str, Any]:
    """The same on other numbers of GPUs: strong at this global batch, weak at this one per GPU.

    days: of the whole run, `updates` long, at the same global batch.
    """
    base = next((point for point in points if point.strong is not None), None)
    return {
        "points": [
            {
                "world": point.world,
                "nodes": point.nodes,
                "weak": None if point.weak is None else row_json(point.weak),
                "strong": None if point.strong is None else row_json(point.strong),
                "days": None
                if point.strong is None
                else point.strong.update.times(updates / money.DAY, "days").to_json(),
                "efficiency_weak": _efficiency(point, point.weak, point.efficiency_weak, base),
                "efficiency_strong": _efficiency(
                    point, point.strong, point.efficiency_strong, base
                ),
                "note": point.note,
            }
            for point in points
        ],
        "network_known": question.cluster.nic is not None,
    }


def _efficiency(
    point: Point, there: Prediction | None, value: float, base: Point | None
) -> dict[str, Any] | None:
    """Tokens/s per GPU by the first point's; what is off at one size is so at the other."""
    if there is None or base is None or base.strong is None:
        return None
    first, rate, grown = base.strong.tokens_per_s, there.tokens_per_s, point.world / base.world
    ends = [value, rate.low / first.low / grown, rate.high / first.high / grown]
    return Figure(
        value=value,
        low=min(ends),
        high=max(ends),
        unit="",
        source=rate.source,
        basis=f"tokens/s per GPU by that of {base.world:,} GPUs, both at the same end",
    ).to_json()
