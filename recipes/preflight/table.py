"""The preflight's table on the console, and below it the remedies, ready to be pasted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import replace

from rich.console import Console
from rich.table import Table
from rich.text import Text

from recipes.preflight.rows import Row, Verdict

STYLES = {"ok": "green", "warn": "yellow", "FAIL": "bold red", "not checked": "dim"}
WIDTH = 120  # where no terminal says it
SHOWN = 4  # nodes, or values of nodes that are well, named in one cell
MOST_LINES = 12  # of one check: a broken switch is a fault of every node, and the same one


def show(console: Console, rows: Sequence[Row], hosts: Sequence[str]) -> None:
    """Print the table and the remedies."""
    lines = capped(merged(rows, hosts))
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


def merged(rows: Sequence[Row], hosts: Sequence[str]) -> list[Row]:
    """Rows that differ in the node alone become one, so that many nodes fit on a screen.

    Of a check with many different values on nodes that are well, a few are told.
    """
    checks = list(dict.fromkeys(row.check for row in rows))
    together: dict[Row, list[str]] = {}
    for row in sorted(rows, key=lambda row: checks.index(row.check)):
        together.setdefault(replace(row, node=""), []).append(row.node)
    alike: dict[Row, list[str]] = {}  # but for what was found
    for row in together:
        alike.setdefault(replace(row, found=""), []).append(row.found)
    away = {row.node for row in rows if row.check == "ssh" and row.verdict != "ok"}
    lines = []
    for row, texts in alike.items():
        named = [together[replace(row, found=text)] for text in texts]
        if row.verdict == "ok" and len(texts) > SHOWN:
            texts, named = [shortened(texts)], [list(dict.fromkeys(sum(named, [])))]
        for text, nodes in zip(texts, named, strict=True):
            lines.append(replace(row, found=text, node=nodes_text(nodes, hosts, away)))
    return lines


def capped(lines: Sequence[Row]) -> list[Row]:
    """At most so many lines of one check and verdict; the last one counts the rest."""
    totals = Counter((row.check, row.verdict) for row in lines)
    seen: Counter[tuple[str, str]] = Counter()
    kept = []
    for row in lines:
        kind = row.check, row.verdict
        seen[kind] += 1
        if seen[kind] <= MOST_LINES:
            kept.append(row)
        elif seen[kind] == MOST_LINES + 1:
            more = f"{totals[kind] - MOST_LINES} more like these, in the JSON"
            kept.append(Row(check=row.check, node="…", found=more, verdict=row.verdict))
    return kept


def nodes_text(nodes: Sequence[str], hosts: Sequence[str], away: Set[str] = frozenset()) -> str:
    """Names of nodes for one cell; `away` did not answer."""
    if len(hosts) > 1 and set(nodes) == set(hosts):
        return "all"
    if len(nodes) > 1 and set(nodes) == set(hosts) - away:
        return "all that answer"
    return shortened(nodes)


def shortened(words: Sequence[str]) -> str:
    """All of a few, the first of many."""
    if len(words) > SHOWN:
        return f"{', '.join(words[: SHOWN - 1])} and {len(words) - SHOWN + 1} more"
    return ", ".join(words)


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
