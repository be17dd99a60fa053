"""The preflight's table on the console, and below it the remedies, ready to be pasted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from recipes.preflight.rows import Row, Verdict, merged

STYLES = {"ok": "green", "warn": "yellow", "FAIL": "bold red", "not checked": "dim"}
WIDTH = 120  # where no terminal says it


def show(console: Console, rows: Sequence[Row], hosts: Sequence[str]) -> None:
    """Print the table and the remedies."""
    lines = merged(rows, hosts)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("check", "node", "found", "expected"):
        table.add_column(name, overflow="fold")
    table.add_column("verdict", no_wrap=True)
    for row in lines:
        cells = [Text(text) for text in (row.check, row.node, row.found, row.expected)]
        table.add_row(*cells, Text(row.verdict, style=STYLES[row.verdict]))
    console.print(table)
    if text := remedies(lines):
        # Outside the table and never wrapped: a broken line could not be pasted.
        console.print(Text(f"\n{text}"), soft_wrap=True)


def remedies(lines: Sequence[Row]) -> str:
    """Every remedy once, each below a comment that says what it is for."""
    reasons: dict[str, list[str]] = {}
    for row in lines:
        if row.remedy and row.verdict != "ok":
            why = f"# {row.verdict}: {row.check} ({row.node}): {row.found}"
            reasons.setdefault(row.remedy, []).append(" ".join(why.split()))
    return "\n".join("\n".join([*why, remedy]) for remedy, why in reasons.items())


def summary(rows: Sequence[Row]) -> str:
    """How many of each verdict, counted by check and node."""
    counts = Counter(row.verdict for row in rows)
    names: dict[Verdict, str] = {"ok": "ok", "warn": "warned", "FAIL": "failed"}
    names |= {"not checked": "not checked"}
    return ", ".join(f"{counts[v]} {text}" for v, text in names.items() if counts[v] or v == "FAIL")
