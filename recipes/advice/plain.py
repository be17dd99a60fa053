"""Figures and predictions as the plain values that JSON holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from recipes.planner.figure import Figure, exact
from recipes.planner.memory import SOFT_HIGH, SOFT_LOW, Item
from recipes.planner.predict import Prediction
from recipes.planner.transfer import Transfer

SOFT = ("activations", "logits", "workspace")  # kinds of memory whose counts have a band
# Host memory that nobody measured on a GPU machine: half to one and a half of it (assumed).
HOST_LOW, HOST_HIGH = 0.5, 1.5


def figure_json(figure: Figure) -> dict[str, Any]:
    """A figure as the JSON holds it."""
    return {
        "value": figure.value,
        "low": figure.low,
        "high": figure.high,
        "unit": figure.unit,
        "source": figure.source,
        "basis": figure.basis,
    }


def exact_json(value: float, unit: str, basis: str) -> dict[str, Any]:
    """What a formula gives from known inputs, as the JSON holds it."""
    return figure_json(exact(value, unit, basis))


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
        "update": figure_json(row.update),
        "tokens_per_s": figure_json(row.tokens_per_s),
        "mfu": figure_json(row.mfu),
        "device": figure_json(row.memory.device),
        "arithmetic": figure_json(row.micro.figure.times(row.accumulation, "s")),
        "communication": figure_json(row.communication),
        "exposed": figure_json(row.exposed),
        "optimizer": figure_json(row.optimizer),
        "parts": {name: figure_json(part) for name, part in part_figures(row).items()},
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
    return {"name": item.name, "kind": item.kind, "bytes": figure_json(item_figure(item))}


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
