"""Sections 2 to 6 of the answer: memory, batch, communication, time and money, scaling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from recipes.objective import legal_worlds
from recipes.planner import memory, money, network, traffic
from recipes.planner.plain import figure_json, item_json, row_json
from recipes.planner.predict import Prediction
from recipes.planner.question import Question
from recipes.planner.scaling import Point
from recipes.planner.workload import Candidate

NEGLIGIBLE = 0.03  # share of the update that waiting for the network may take
LATENCY_SHARE = 0.1  # of a bucket's reduction, that a bucket is made large enough for
MOST_STEPS = 7  # of the ladder of micro-batches


def memory_section(question: Question, chosen: Prediction) -> dict[str, Any]:
    """Bytes on one GPU by phase, what else fits, what would save, the host and the checkpoint."""
    work, cluster, traced = question.work, question.cluster, question.traced
    plan, candidate = chosen.memory, chosen.candidate
    return {
        "capacity": plan.capacity,
        "usable": plan.usable,
        "fits": plan.fits,
        "allocated": figure_json(plan.allocated),
        "reserved": figure_json(plan.reserved),
        "device": figure_json(plan.device),
        "peak": plan.peak.name,
        "largest_item": plan.bottleneck,
        "phases": [
            {
                "name": phase.name,
                "allocated": phase.allocated,
                "items": [item_json(item) for item in phase.items],
            }
            for phase in plan.phases
        ],
        "largest_micro": memory.largest_micro(work, candidate, cluster, traced=traced),
        "savings": [
            {"what": s.what, "bytes": s.bytes, "how": s.how, "cost": s.cost}
            for s in memory.savings(work, candidate, cluster, traced=traced)
        ],
        "host": [item_json(item) for item in memory.host_memory(work, candidate, cluster)],
        "checkpoint_bytes": memory.checkpoint_bytes(work.shape),
    }


def batch_section(question: Question, chosen: Prediction) -> dict[str, Any]:
    """How the global batch is divided, and the other ways that leave it as it is."""
    run, work, world = question.run, question.work, question.cluster.world
    candidate = chosen.candidate
    ranks = candidate.data_ranks(world)
    batch = run.batch.model_copy(update={"micro": candidate.micro})
    legal = legal_worlds(batch, lanes=run.data.lanes, workers=run.data.workers)
    nearest = sorted(sorted(legal, key=lambda w: (abs(w - ranks), w))[:2])
    return {
        "asked_micro": run.batch.micro,
        "micro": candidate.micro,
        "accumulation": chosen.accumulation,
        "data_ranks": ranks,
        "global_sequences": work.global_sequences,
        "global_tokens": work.global_tokens,
        "legal_worlds": legal,
        "world_is_legal": ranks in legal,
        "nearest_legal": nearest,
        "evaluate_sequences": _evaluate(question, ranks * candidate.micro),
        "ladder": _ladder(question, candidate, work.global_sequences // ranks),
    }


def _evaluate(question: Question, multiple: int) -> int | None:
    """What evaluate.sequences must be changed to for this micro-batch; None where it may stay."""
    evaluate = question.run.evaluate
    if evaluate is None or evaluate.sequences % multiple == 0:
        return None
    return -(-evaluate.sequences // multiple) * multiple


def _ladder(question: Question, candidate: Candidate, share: int) -> list[dict[str, Any]]:
    """Every micro-batch that divides a rank's share, up to the first that does not fit."""
    steps: list[dict[str, Any]] = []
    for micro in (m for m in range(1, share + 1) if share % m == 0):
        changed = replace(candidate, micro=micro)
        plan = memory.plan_memory(question.work, changed, question.cluster, traced=question.traced)
        steps.append(
            {
                "micro": micro,
                "accumulation": share // micro,
                "device": figure_json(plan.device),
                "fits": plan.fits,
            }
        )
        if not plan.fits:
            break
    return steps[-MOST_STEPS:]


def communication_section(question: Question, chosen: Prediction) -> dict[str, Any]:
    """What is sent in one update, how long that takes and what of it is waited for."""
    work, cluster, candidate = question.work, question.cluster, chosen.candidate
    flat, hierarchical = traffic.sent_between_nodes(work, candidate, cluster)
    strategy = candidate.strategy
    return {
        "transfers": [
            {
                "what": t.what,
                "op": t.op,
                "bytes": t.bytes,
                "calls": t.calls,
                "group": t.group,
                "ranks": t.ranks,
                "when": t.when,
                "hides_behind": t.hides_behind,
                "sent": t.sent,
                "seconds": figure_json(seconds),
            }
            for t, seconds in chosen.transfers
        ],
        "sent_per_rank": sum(t.sent for t, _ in chosen.transfers),
        "between_nodes": None
        if cluster.nodes == 1
        else {"flat": flat, "hierarchical": hierarchical},
        "levels": _levels(question, chosen),
        "communication": figure_json(chosen.communication),
        "exposed": figure_json(chosen.exposed),
        "hidden": max(chosen.communication.value - chosen.exposed.value, 0.0),
        "exposed_share": chosen.exposed.value / chosen.update.value,
        "negligible_accumulation": negligible_accumulation(chosen),
        "auto_bucket_elements": work.shape.width**2,  # what Accelerate makes of "auto"
        "enough_bucket_bytes": _enough(question, chosen),
        "bucket_elements": strategy.bucket_elements or None,
        "bucket_bytes": strategy.bucket_elements * (4 if strategy.autocast else 2) or None,
        "compared": _compared(question, chosen),
    }


def _levels(question: Question, chosen: Prediction) -> dict[str, float]:
    """Seconds of all payload by where it travels, hierarchically and as one ring; and latency."""
    parts = [network.breakdown(transfer, question.cluster) for transfer, _ in chosen.transfers]
    return {
        "within": sum(part.within_s for part in parts),
        "between": sum(part.between_s for part in parts),
        "flat": sum(part.flat_s for part in parts),
        "latency": sum(part.latency_s for part in parts),
    }


def _enough(question: Question, chosen: Prediction) -> float | None:
    """Bytes a gradient bucket should have so that latency is at most so much of its reduction."""
    for transfer, _ in chosen.transfers:
        if transfer.what == "gradients":
            place = transfer.place
            return network.enough_bytes(transfer.op, LATENCY_SHARE, place, question.cluster)
    return None


def negligible_accumulation(chosen: Prediction, share: float = NEGLIGIBLE) -> int | None:
    """Micro-batches an update from which on less than `share` of it waits for the network.

    None where the waiting comes with every micro-batch, so that accumulation can't help. Solves
    exposed / (exposed + step + n·micro) < share for n.
    """
    if any(t.when == "micro" and t.sent for t, _ in chosen.transfers):
        return None
    rest = chosen.exposed.value * (1 / share - 1) - chosen.optimizer.value
    return max(1, math.floor(rest / chosen.micro.figure.value) + 1)


def _compared(question: Question, chosen: Prediction) -> list[dict[str, Any]]:
    """What other ways would send for the same model, batch and ranks."""
    ranks = chosen.candidate.data_ranks(question.cluster.world)
    ring, payload = 2 * (ranks - 1) / ranks, 2.0 * question.work.shape.parameters
    once, accumulation = ring * payload, chosen.accumulation
    return [
        {"name": "DDP, fp32 gradients", "sent": 2 * once},
        {"name": "DDP, 16-bit gradients", "sent": once},
        {"name": "ZeRO-1 as DeepSpeed has it", "sent": 1.5 * once},
        {"name": "ZeRO-1 as the paper has it", "sent": once},
        {"name": f"ZeRO-2, accumulation {accumulation}", "sent": (accumulation + 0.5) * once},
    ]


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
    mtbf = wanted.mtbf or money.PUBLISHED_MTBF_HOURS
    basis = "--mtbf" if wanted.mtbf else money.MTBF_BASIS
    best = money.checkpoint_interval(save, mtbf, world, chosen.update, basis)
    own = money.policy_interval(run.checkpoint, chosen.update)
    return {
        "samples": run.schedule.samples,
        "updates": cost.updates,
        "tokens": figure_json(cost.tokens),
        "tokens_per_sample": None
        if cost.tokens_per_sample is None
        else figure_json(cost.tokens_per_sample),
        "update": figure_json(chosen.update),
        "days": figure_json(cost.days),
        "gpu_hours": figure_json(cost.gpu_hours),
        "price": None if cost.price is None else figure_json(cost.price),
        "checkpoint": {
            "mtbf_hours_per_gpu": mtbf,
            "mtbf_basis": basis,
            "failures_expected": cost.gpu_hours.value / mtbf,
            "stall": figure_json(save.stall),
            "written": figure_json(save.written),
            "restart": figure_json(save.restart),
            "best": _interval_json(best),
            "own": _interval_json(money.interval_of(own, save, mtbf, world, chosen.update)),
        },
    }


def _interval_json(interval: money.Interval) -> dict[str, Any]:
    return {
        "seconds": figure_json(interval.seconds),
        "updates": interval.updates,
        "loss": figure_json(interval.loss),
    }


def scaling_section(question: Question, points: Sequence[Point], updates: int) -> dict[str, Any]:
    """The same on other numbers of GPUs: strong at this global batch, weak at this one per GPU.

    days: of the whole run, `updates` long, at the same global batch.
    """
    return {
        "points": [
            {
                "world": point.world,
                "nodes": point.nodes,
                "weak": None if point.weak is None else row_json(point.weak),
                "strong": None if point.strong is None else row_json(point.strong),
                "days": None
                if point.strong is None
                else figure_json(point.strong.update.times(updates / money.DAY, "days")),
                "efficiency_weak": point.efficiency_weak,
                "efficiency_strong": point.efficiency_strong,
                "note": point.note,
            }
            for point in points
        ],
        "network_known": question.cluster.nic is not None,
    }
