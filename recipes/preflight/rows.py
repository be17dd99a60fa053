"""A line of the preflight table: what was looked at and where, what was found and expected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Literal

from recipes.outcome import DONE, TOPOLOGY, USAGE

Verdict = Literal["ok", "warn", "FAIL", "not checked"]
SHOWN = 4  # nodes that are named in one cell


@dataclass(frozen=True, kw_only=True)
class Row:
    """One check on one node, or on all of them.

    `found` says why where the verdict is "not checked". `remedy` can be pasted into a shell; what
    can't is a comment of it.
    """

    check: str
    node: str
    found: str
    expected: str = ""
    verdict: Verdict = "ok"
    remedy: str = ""
    code: int = TOPOLOGY  # the exit code of a FAIL: 2 where the recipe itself would end with 2


def exit_code(rows: Iterable[Row]) -> int:
    """0 without a FAIL; 3 where nodes, network, ports, devices or versions fail; else 2."""
    codes = {row.code for row in rows if row.verdict == "FAIL"}
    return TOPOLOGY if TOPOLOGY in codes else USAGE if codes else DONE


def majority(values: Mapping[str, str]) -> str:
    """What most nodes have; where none leads, what the first has."""
    counts = Counter(values.values())
    return max(values.values(), key=lambda value: counts[value])  # the first of equals


def merged(rows: Sequence[Row], hosts: Sequence[str]) -> list[Row]:
    """Rows that differ in the node alone become one, so that many nodes fit on a screen."""
    checks = list(dict.fromkeys(row.check for row in rows))
    together: dict[Row, list[str]] = {}
    for row in sorted(rows, key=lambda row: checks.index(row.check)):
        together.setdefault(replace(row, node=""), []).append(row.node)
    away = {row.node for row in rows if row.check == "ssh" and row.verdict != "ok"}
    return [replace(row, node=nodes_text(nodes, hosts, away)) for row, nodes in together.items()]


def nodes_text(nodes: Sequence[str], hosts: Sequence[str], away: Set[str] = frozenset()) -> str:
    """Names of nodes for one cell; `away` did not answer."""
    if len(hosts) > 1 and set(nodes) == set(hosts):
        return "all"
    if len(nodes) > 1 and set(nodes) == set(hosts) - away:
        return "all that answer"
    if len(nodes) > SHOWN:
        return f"{', '.join(nodes[: SHOWN - 1])} and {len(nodes) - SHOWN + 1} more"
    return ", ".join(nodes)


def many(count: int, what: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def size(count: float) -> str:
    """Bytes as people read them, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" or abs(count) >= 100 else f"{count:.3g} {unit}"
