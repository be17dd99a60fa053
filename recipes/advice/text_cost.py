"""Sections 4 to 6 in a terminal: communication, time and money, scaling."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from recipes.advice import words
from recipes.advice.chart import scaling_chart
from recipes.advice.lines import line, table
from recipes.advice.words import amount, duration, duration_span, number, span

# ---- 4 communication


def communication(console: Console, answer: dict[str, Any]) -> None:
    """Section 4: what is sent, how long it takes, what of it is waited for."""
    part = answer["communication"]
    if answer["question"]["world"] == 1:
        console.print(Text(f"  {words.ALONE}"))
        return
    size, unit = words.sent_unit(max(t["sent"]["value"] for t in part["transfers"]))
    rows = [
        (
            t["what"],
            t["op"],
            f"{t['sent']['value'] / size:,.2f}",
            f"{t['calls']:,}",
            f"{t['group']} {t['ranks']:,}",
            duration_span(t["seconds"]),
            t["hides_behind"],
        )
        for t in part["transfers"]
    ]
    headers = ("an update", "", f"{unit} sent", "calls", "ranks", "takes", "hides behind")
    table(console, headers, rows, left=(0, 1, 4, 6), spare=1)
    text = f"{words.sent(part['sent_per_rank']['value'])} a rank"
    if part["between_nodes"]:
        flat, tree = (
            words.sent(part["between_nodes"][key]["value"]) for key in ("flat", "hierarchical")
        )
        text += f"; out of each node {flat} as one ring, {tree} hierarchically"
    line(console, "sent", text)
    line(
        console,
        "time",
        f"{duration_span(part['communication'])}: {duration(part['hidden']['value'])} hidden, "
        f"{duration_span(part['exposed'])} waited for ({part['exposed_share']['value']:.1%})",
    )
    line(console, "where", words.where(part))
    line(console, "negligible", words.negligible(part))
    line(console, "bucket", words.bucket(part))
    unit, others = words.elsewhere(part)
    line(console, f"{unit} elsewhere", others)


# ---- 5 time and money


def cost(console: Console, answer: dict[str, Any]) -> None:
    """Section 5: updates, days, price; how often to save."""
    cost = answer["cost"]
    sample = cost["tokens_per_sample"]
    if sample is not None:
        text = f"{amount(cost['samples'])} samples x {number(sample['value'])} tokens"
        line(console, "length", f"{text} ({sample['source']}: {sample['basis']})")
    text = f"{cost['updates']:,} = {amount(cost['tokens']['value'])} tokens, at "
    line(console, "updates", f"{text}{duration_span(cost['update'])} each")
    text = f"{words.days_span(cost['days'])} = {span(cost['gpu_hours'], 1, 'GPU-hours')}"
    if cost["price"] is not None:
        text += f", price {span(cost['price'])}"
    line(console, "takes", text)
    _checkpoints(console, cost)


def _checkpoints(console: Console, cost: dict[str, Any]) -> None:
    part = cost["checkpoint"]
    best, own, stall = part["best"], part["own"], part["stall"]
    line(console, "failures", words.failures(part))
    if best["progresses"]:
        text = (
            f"{words.every(best, cost)}: saves and failures then take {words.loss(best)}; a save "
        )
        text += f"stops training for {duration(stall['value'])} ({stall['source']})"
    else:
        text = words.STUCK
    line(console, "save every", text)
    if best["progresses"]:
        text = f"{own['seconds']['basis']}, {duration(own['seconds']['value'])}: {words.loss(own)}"
        line(console, "run file", text)


# ---- 6 scaling


def scaling(console: Console, answer: dict[str, Any]) -> None:
    """Section 6: the same on other numbers of GPUs."""
    points = answer["scaling"]["points"]
    size, unit = words.column_unit(point["strong"] for point in points)
    rows = [
        (
            f"{point['world']:,}",
            f"{point['nodes']:,}",
            *_strong_cells(point, size),
            _share(point["efficiency_strong"]),
            _share(point["efficiency_weak"]),
            point["note"],
        )
        for point in points
    ]
    headers = ("GPUs", "nodes", f"{unit}/update", "the run", "strong", "weak", "what changes")
    table(console, headers, rows, left=(6,), spare=1)
    console.print(Text("  strong: this global batch; weak: as many sequences per GPU as at first"))
    if not answer["scaling"]["network_known"]:
        line(console, "note", "more nodes need --nic, the network between them")
    if len(points) > 1:
        console.print(Text(scaling_chart(points, console.width)), no_wrap=True, crop=False)


def _strong_cells(point: dict[str, Any], size: float) -> tuple[str, str]:
    if point["strong"] is None:
        return "", ""
    days = duration(86400 * point["days"]["value"])
    return span(point["strong"]["update"], 1 / size), days


def _share(efficiency: dict[str, Any] | None) -> str:
    return "" if efficiency is None else f"{efficiency['value']:.0%}"
