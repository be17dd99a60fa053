"""A line of the preflight's table, and what the nodes' facts are held against."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from recipes.cluster.hostfile import Host
from recipes.outcome import DONE, TOPOLOGY, USAGE

Facts = Mapping[str, Mapping[str, Any]]  # by the hostfile's names
Verdict = Literal["ok", "warn", "FAIL", "not checked"]


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


def ok(check: str, node: str, found: str, expected: str = "") -> Row:
    """As it should be."""
    return Row(check=check, node=node, found=found, expected=expected)


def unchecked(check: str, node: str, why: str, expected: str = "", remedy: str = "") -> Row:
    """Not looked at."""
    return Row(
        check=check,
        node=node,
        found=why,
        expected=expected,
        verdict="not checked",
        remedy=remedy,
    )


def warn(check: str, node: str, found: str, expected: str, remedy: str) -> Row:
    """Allowed, but worth a look."""
    return Row(
        check=check, node=node, found=found, expected=expected, verdict="warn", remedy=remedy
    )


def fail(
    check: str, node: str, found: str, expected: str, remedy: str, code: int = TOPOLOGY
) -> Row:
    """To be mended before a start."""
    return Row(
        check=check,
        node=node,
        found=found,
        expected=expected,
        verdict="FAIL",
        remedy=remedy,
        code=code,
    )


def exit_code(rows: Iterable[Row]) -> int:
    """0 without a FAIL; 3 where nodes, network, ports, devices or versions fail; else 2."""
    codes = {row.code for row in rows if row.verdict == "FAIL"}
    return TOPOLOGY if TOPOLOGY in codes else USAGE if codes else DONE


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The start that is planned, as far as it can be known before it."""

    hosts: tuple[Host, ...]
    hostfile: str = "hostfile"
    launcher: str = "accelerate"
    port: int = 29500
    cpu: bool = False  # the arm needs no GPU
    parameters: int | None = None  # of the run's model
    keep: int | None = None  # checkpoints
    milestones: int | None = 0  # checkpoints that are kept for ever; None: not known before it
    environ: Mapping[str, str] = field(default_factory=dict)  # that the ranks will get

    @property
    def first(self) -> str:
        """The host that holds the master port."""
        return self.hosts[0].name

    @property
    def by_pdsh(self) -> bool:
        """Whether the first host starts the others through pdsh."""
        return len(self.hosts) > 1 and self.launcher in ("deepspeed", "accelerate-pdsh")

    @property
    def sync(self) -> str:
        """The remedy for whatever differs between checkouts and environments."""
        return f"octet sync --hostfile {shlex.quote(self.hostfile)}"

    def slots(self, node: str) -> int:
        """Ranks on a node."""
        return next(host.slots for host in self.hosts if host.name == node)


def majority(values: Mapping[str, str]) -> str:
    """What most nodes have; where none leads, what the first has."""
    counts = Counter(values.values())
    return max(values.values(), key=lambda value: counts[value])  # the first of equals


def odd_ones(values: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """Nodes that differ from most with what they have, and what was expected of them."""
    common = majority(values)
    odd = {node: value for node, value in values.items() if value != common}
    others = [node for node in values if node not in odd]
    return odd, f"{common}, as on {others[0] if len(others) == 1 else 'all others'}"


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
