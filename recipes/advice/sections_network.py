"""Section 4 of the answer: communication."""

from __future__ import annotations

import math
from typing import Any

from recipes.advice.plain import exact_json, sent_json
from recipes.advice.question import Question
from recipes.planner import network, traffic
from recipes.planner.figure import Figure, total
from recipes.planner.predict import Prediction, communication_share
from recipes.planner.transfer import Transfer
from recipes.planner.workload import Cluster

NEGLIGIBLE = 0.03  # share of the update that waiting for the network may take
LATENCY_SHARE = 0.1  # of a bucket's reduction, that a bucket is made large enough for


def communication_section(question: Question, chosen: Prediction) -> dict[str, Any]:
    """What is sent in one update, how long that takes and what of it is waited for."""
    work, cluster, candidate = question.work, question.cluster, chosen.candidate
    flat, hierarchical = traffic.sent_between_nodes(work, candidate, cluster)
    strategy = candidate.strategy
    width = 4 if strategy.autocast or work.precision == "fp32" else 2
    enough, negligible = _enough(question, chosen), negligible_accumulation(chosen)
    return {
        "transfers": [_transfer_json(transfer, seconds) for transfer, seconds in chosen.transfers],
        "sent_per_rank": sent_json(t for t, _ in chosen.transfers),
        "between_nodes": None
        if cluster.nodes == 1
        else {
            "flat": exact_json(flat, "B", "one ring: all that a rank sends crosses"),
            "hierarchical": exact_json(hierarchical, "B", "a node's sum crosses: 2(k-1)/k x S"),
        },
        "levels": {name: level.to_json() for name, level in _levels(cluster, chosen).items()},
        "communication": chosen.communication.to_json(),
        "exposed": chosen.exposed.to_json(),
        "hidden": _hidden(chosen).to_json(),
        "exposed_share": communication_share(chosen).to_json(),
        "negligible_accumulation": None if negligible is None else negligible.to_json(),
        "auto_bucket_elements": work.shape.width**2,  # what Accelerate makes of "auto"
        "enough_bucket_bytes": None if enough is None else enough.to_json(),
        "bucket_elements": strategy.bucket_elements or None,
        "bucket_bytes": strategy.bucket_elements * width or None,
        "compared": _compared(question, chosen),
    }


def _transfer_json(transfer: Transfer, seconds: Figure) -> dict[str, Any]:
    return {
        "what": transfer.what,
        "op": transfer.op,
        "bytes": exact_json(transfer.bytes, "B", "payload of a call, the mean where they differ"),
        "calls": transfer.calls,
        "group": transfer.place.group,
        "ranks": transfer.place.ranks,
        "when": transfer.when,
        "hides_behind": transfer.hides_behind,
        "sent": sent_json([transfer]),
        "seconds": seconds.to_json(),
    }


def _hidden(chosen: Prediction) -> Figure:
    """What of the transfers arithmetic hides."""
    whole, shown = chosen.communication, chosen.exposed
    ends = [
        max(all_of_it - seen, 0.0)
        for all_of_it, seen in (
            (whole.value, shown.value),
            (whole.low, shown.low),
            (whole.high, shown.high),
        )
    ]
    return Figure(
        value=ends[0],
        low=min(ends),
        high=max(ends),
        unit="s",
        source=shown.source,
        basis="all transfers less what is waited for",
    )


def _levels(cluster: Cluster, chosen: Prediction) -> dict[str, Figure]:
    """Seconds of all payload by where it travels, hierarchically and as one ring; and latency."""
    parts: dict[str, list[Figure]] = {"within": [], "between": [], "flat": [], "latency": []}
    for transfer, _ in chosen.transfers:
        place = transfer.place
        part, got = network.breakdown(transfer, cluster), network.rates(place, cluster)
        off = network.bands(transfer.op, got, cluster)
        link, outside = (off.link, off.link_worst), (off.network, off.network)
        slow = got.network_bytes_per_s < (got.link_bytes_per_s if place.per_node > 1 else math.inf)
        for name, seconds, (best, worst) in (
            ("within", part.within_s, link),
            ("between", part.between_s, outside),
            ("flat", part.flat_s, outside if slow else link),
        ):
            low, high = seconds / (1 + best), seconds / (1 - worst)
            parts[name].append(
                Figure(
                    value=seconds, low=low, high=high, unit="s", source=got.source, basis=got.basis
                )
            )
        call = network.one_call(transfer.op, 0.0, place, cluster).times(transfer.calls)
        parts["latency"].append(
            Figure(
                value=part.latency_s,
                low=min(call.low, part.latency_s),
                high=max(call.high, part.latency_s),
                unit="s",
                source=got.source,
                basis=got.basis,
            )
        )
    bases = {
        "within": "payload within the nodes, hierarchically",
        "between": "payload between the nodes, hierarchically",
        "flat": "payload as one ring over all ranks",
        "latency": "all calls without payload",
    }
    return {name: total(found, "s", bases[name]) for name, found in parts.items()}


def _enough(question: Question, chosen: Prediction) -> Figure | None:
    """Bytes a gradient bucket should have so that latency is at most so much of its reduction."""
    cluster = question.cluster
    for transfer, _ in chosen.transfers:
        if transfer.what == "gradients":
            place = transfer.place
            enough = network.enough_bytes(transfer.op, LATENCY_SHARE, place, cluster)
            call = network.one_call(transfer.op, 0.0, place, cluster)
            off = network.bands(transfer.op, network.rates(place, cluster), cluster)
            within = place.nodes == 1
            best = off.link if within else off.network
            worst = off.link_worst if within else off.network
            return Figure(
                value=enough,
                low=enough * call.low / call.value * (1 - worst),
                high=enough * call.high / call.value * (1 + best),
                unit="B",
                source=call.source,
                basis="latency is a tenth of the bucket's time",
            )
    return None


def negligible_accumulation(chosen: Prediction, share: float = NEGLIGIBLE) -> Figure | None:
    """Micro-batches an update from which on less than `share` of it waits for the network.

    None where the waiting comes with every micro-batch, so that accumulation can't help. Solves
    exposed / (exposed + step + n·micro) < share for n.
    """
    if any(t.when == "micro" and t.sent for t, _ in chosen.transfers):
        return None

    def least(exposed: float, step: float, micro: float) -> int:
        return max(1, math.floor((exposed * (1 / share - 1) - step) / micro) + 1)

    waits, step, micro = chosen.exposed, chosen.optimizer, chosen.micro.figure
    return Figure(
        value=least(waits.value, step.value, micro.value),
        low=least(waits.low, step.high, micro.high),
        high=least(waits.high, step.low, micro.low),
        unit="micro-batches",
        source=total([waits, step, micro], "", "").source,
        basis=f"waiting is {share:.0%} of an update",
    )


def _compared(question: Question, chosen: Prediction) -> list[dict[str, Any]]:
    """What other ways would send for the same model, batch and ranks."""
    ranks = chosen.candidate.data_ranks(question.cluster.world)
    ring, payload = 2 * (ranks - 1) / ranks, 2.0 * question.work.shape.parameters
    once, accumulation = ring * payload, chosen.accumulation
    found = (
        ("DDP, fp32 gradients", 2 * once),
        ("DDP, 16-bit gradients", once),
        ("ZeRO-1 as DeepSpeed has it", 1.5 * once),
        ("ZeRO-1 as the paper has it", once),
        (f"ZeRO-2, accumulation {accumulation}", (accumulation + 0.5) * once),
    )
    basis = "by 2(n-1)/n x 2 B x parameters, an all-reduce of 16-bit gradients"
    return [{"name": name, "sent": exact_json(sent, "B", basis)} for name, sent in found]
