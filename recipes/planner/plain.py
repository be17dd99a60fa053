"""Figures and predictions as the plain values that JSON holds."""

from __future__ import annotations

from typing import Any

from recipes.planner.figure import Figure
from recipes.planner.memory import Item
from recipes.planner.predict import Prediction


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
        "parts": dict(row.parts),
        "sent_per_rank": sum(transfer.sent for transfer, _ in row.transfers),
        "bottleneck": row.bottleneck,
    }


def item_json(item: Item) -> dict[str, Any]:
    """A part of the memory as the JSON holds it."""
    return {
        "name": item.name,
        "kind": item.kind,
        "bytes": item.bytes,
        "source": item.source,
        "basis": item.basis,
    }
