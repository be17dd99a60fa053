"""Figures and predictions as the plain values that JSON holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from recipes.planner.figure import Figure, exact
from recipes.planner.memory import SOFT, SOFT_HIGH, SOFT_LOW, Item
from recipes.planner.predict import Prediction
from recipes.planner.transfer import Transfer

# Host memory that nobody measured on a GPU machine: half to one and a half of it (assumed).
HOST_LOW, HOST_HIGH = 0.5, 1.5


def exact_json(value: float, unit: str, basis: str) -> dict[str, Any]:
    """What a formula gives from known inputs, as the JSON holds it."""
    return exact(value, unit, basis).to_json()


def row_json(row: Prediction) -> dict[str, Any]:
    """A strategy's prediction as the JSON holds it."""
    candidate, strategy = row.candidate, row.candidate.strategy
    return {
        "name": strategy.name,
        "config": strategy.config or None,
        "micro": candidate.micro,
        "accumulation": row.accumulation,
        "checkpointing": candidate.checkpointing,
        "attention": candidate.attention,
        "fits": row.memory.fits,
        "update": row.update.to_json(),
        "tokens_per_s": row.tokens_per_s.to_json(),
        "mfu": row.mfu.to_json(),
        "device": row.memory.device.to_json(),
        "arithmetic": row.micro.figure.times(row.accumulation, "s").to_json(),
        "communication": row.communication.to_json(),
        "exposed": row.exposed.to_json(),
        "optimizer": row.optimizer.to_json(),
        "parts": {name: part.to_json() for name, part in part_figures(row).items()},
        "sent_per_rank": sent_json(transfer for transfer, _ in row.transfers),
        "bottleneck": row.bottleneck,
    }


def part_figures(row: Prediction) -> dict[str, Figure]:
    """The parts of an update; those of a micro-batch are off as much as all of it."""
    spans = {
        "network": row.exposed,
        "optimizer": row.optimizer,
        "pipeline bubble": row.bubble,
        "slowest rank": row.slowest,
    }
    whole = row.micro.figure
    return {
        name: spans[name] if name in spans else whole.times(seconds / whole.value, "s")
        for name, seconds in row.parts.items()
    }


def sent_json(transfers: Iterable[Transfer]) -> dict[str, Any]:
    """Bytes that a rank sends in an update."""
    sent = float(sum(transfer.sent for transfer in transfers))
    return exact_json(sent, "B", "payload x (ranks - 1)/ranks, twice for an all-reduce")


def item_json(item: Item) -> dict[str, Any]:
    """A part of the memory as the JSON holds it."""
    return {"name": item.name, "kind": item.kind, "bytes": item_figure(item).to_json()}


def item_figure(item: Item) -> Figure:
    """A part of the memory with its band: states are exact, what autograd keeps is not."""
    low = high = 1.0
    if item.kind in SOFT:
        low, high = 1 - SOFT_LOW, 1 + SOFT_HIGH
    elif item.source == "assumed":
        low, high = HOST_LOW, HOST_HIGH
    return Figure(
        value=item.bytes,
        low=item.bytes * low,
        high=item.bytes * high,
        unit="B",
        source=item.source,
        basis=item.basis,
    )
