"""Sections 4 to 6 in a terminal: communication, time and money, scaling."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from recipes.planner.chart import scaling_chart
from recipes.planner.lines import line, table
from recipes.planner.words import (
    GB,
    amount,
    bucket,
    days_span,
    duration,
    duration_span,
    negligible,
    number,
    span,
    where,
)

# ---- 4 communication


def communication(console: Console, answer: dict[str, Any]) -> None:
    """Section 4: what is sent, how long it takes, what of it is waited for."""
    part = answer["communication"]
    rows = [
        (
            t["what"],
            t["op"],
            f"{t['sent'] / GB:.2f}",
            f"{t['calls']:,}",
            f"{t['group']} {t['ranks']}",
            duration_span(t["seconds"]),
            t["hides_behind"],
        )
        for t in part["transfers"]
    ]
    headers = ("an update", "", "GB sent", "calls", "ranks", "takes", "hides behind")
    console.print(table(headers, rows, left=(0, 1, 4, 6)))
    text = f"{part['sent_per_rank'] / GB:.2f} GB a rank"
    if part["between_nodes"]:
        flat, tree = (part["between_nodes"][key] / GB for key in ("flat", "hierarchical"))
        text += f"; out of each node {flat:.2f} GB as one ring, {tree:.2f} GB hierarchically"
    console.print(line("sent", text))
    console.print(
        line(
            "time",
            f"{duration_span(part['communication'])}: {duration(part['hidden'])} hidden, "
            f"{duration_span(part['exposed'])} waited for ({part['exposed_share']:.1%})",
        )
    )
    console.print(line("where", where(part)))
    console.print(line("negligible", negligible(part)))
    console.print(line("bucket", bucket(part)))
    others = "; ".join(f"{row['name']} {row['sent'] / GB:.1f}" for row in part["compared"])
    console.print(line("GB elsewhere", others))


# ---- 5 time and money


def cost(console: Console, answer: dict[str, Any]) -> None:
    """Section 5: updates, days, price; how often to save."""
    cost = answer["cost"]
    sample = cost["tokens_per_sample"]
    if sample is not None:
        text = f"{amount(cost['samples'])} samples x {number(sample['value'])} tokens"
        console.print(line("length", f"{text} ({sample['source']}: {sample['basis']})"))
    console.print(
        line(
            "updates",
            f"{cost['updates']:,} = {amount(cost['tokens']['value'])} tokens, at "
            f"{duration_span(cost['update'])} each",
        )
    )
    text = f"{days_span(cost['days'])} = {span(cost['gpu_hours'], 1, 'GPU-hours')}"
    if cost["price"] is not None:
        text += f", price {span(cost['price'])}"
    console.print(line("takes", text))
    _checkpoints(console, cost["checkpoint"])


def _checkpoints(console: Console, part: dict[str, Any]) -> None:
    best, own = part["best"], part["own"]
    console.print(
        line(
            "failures",
            f"{number(part['failures_expected'])} expected at {part['mtbf_hours_per_gpu']:,.0f} h "
            f"between failures of a GPU ({part['mtbf_basis']})",
        )
    )
    console.print(
        line(
            "save every",
            f"{best['updates']:,} updates, {duration(best['seconds']['value'])}: saves and "
            f"failures then take {span(best['loss'], 1, '%')}; a save stops training for "
            f"{duration(part['stall']['value'])} ({part['stall']['source']})",
        )
    )
    console.print(
        line(
            "run file",
            f"{own['seconds']['basis']}, {duration(own['seconds']['value'])}: "
            f"{span(own['loss'], 1, '%')}",
        )
    )


# ---- 6 scaling


def scaling(console: Console, answer: dict[str, Any]) -> None:
    """Section 6: the same on other numbers of GPUs."""
    points = answer["scaling"]["points"]
    rows = [
        (
            f"{point['world']:,}",
            f"{point['nodes']:,}",
            *_strong_cells(point),
            f"{point['efficiency_weak']:.0%}" if point["weak"] else "",
            point["note"],
        )
        for point in points
    ]
    headers = ("GPUs", "nodes", "s/update", "the run", "strong", "weak", "what changes")
    console.print(table(headers, rows, left=(6,)))
    console.print(Text("  strong: this global batch; weak: as many sequences per GPU as at first"))
    if not answer["scaling"]["network_known"]:
        console.print(line("note", "more nodes need --nic, the network between them"))
    if len(points) > 1:
        console.print(Text(scaling_chart(points)), no_wrap=True, crop=False)


def _strong_cells(point: dict[str, Any]) -> tuple[str, str, str]:
    if point["strong"] is None:
        return "", "", ""
    days = duration(86400 * point["days"]["value"])
    return span(point["strong"]["update"]), days, f"{point['efficiency_strong']:.0%}"
