"""How an attempt ended: its exit code and the first cause, by what ranks and nodes left."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipes.cluster.nodes import Node
from recipes.outcome import DONE, STOPPED

TERMINATED = 128 + signal.SIGTERM


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """How a rank ended."""

    rank: int
    host: str
    code: int  # signals as 128 + n
    at: float  # by this machine's monotonic clock, whatever the node's says
    state: str  # of its status: done, stopped, failed; "" if it left none
    reason: str
    consequence: bool  # it ended because another one had
    result: Any  # what the script put into `Outcome.result`
    log: str
    tail: str  # the last lines of its log, if it failed

    @property
    def failed(self) -> bool:
        """Whether the job can't end well any more; without its end marker 0 is no success."""
        return self.code not in (DONE, STOPPED) or (self.code == DONE and self.state != "done")


@dataclass(frozen=True, kw_only=True)
class Report:
    """How an attempt ended."""

    code: int
    cause: str
    job_id: str
    logs: Path
    ends: dict[int, RankEnd] = field(default_factory=dict)
    first: RankEnd | None = None  # the rank that caused the failure
    interrupted: bool = False  # by the user, so that no restart is meant


def judge(
    ends: Mapping[int, RankEnd], nodes: Sequence[Node], wish: int
) -> tuple[int, str, RankEnd | None]:
    """The exit code, its cause, and the rank that is to blame, if one is.

    Args:
        wish: the signal by which the user stopped the job; 0 without one.
    """
    missing = sorted(set(range(sum(node.slots for node in nodes))) - ends.keys())
    bad = sorted((end for end in ends.values() if end.failed), key=lambda end: end.at)
    lost = sorted((node for node in nodes if node.lost), key=lambda node: node.lost_at)
    if wish and not lost and all(end.code == TERMINATED or end.consequence for end in bad):
        if missing:
            ranks = ", ".join(map(str, missing))
            return 128 + wish, f"stopped; rank {ranks} ended without a checkpoint", None
        if bad:
            return 128 + wish, "stopped before there was anything to save", None
    first = next((end for end in bad if not end.consequence), None)
    if lost and (first is None or lost[0].lost_at < first.at):
        return 1, "; ".join(node.lost for node in lost), None
    # What launchers ended by SIGTERM tells less than that another rank is missing.
    told = [end for end in bad if not missing or end.code != TERMINATED]
    if first := first or next(iter(told), None):
        return first.code or 1, _describe(first), first
    if missing:
        return 1, _unfinished(missing, nodes), None
    for end in ends.values():
        if end.code == STOPPED:
            return STOPPED, end.reason, None
    return DONE, "", None


def _unfinished(missing: list[int], nodes: Sequence[Node]) -> str:
    said = "\n".join(
        f"the launcher on {node.host} ended with {node.launcher}:\n{node.launcher_tail}"
        for node in nodes
        if node.launcher is not None
    )
    return f"rank {', '.join(map(str, missing))} left no end marker; " + (
        said or "no launcher has ended"
    )


def _describe(end: RankEnd) -> str:
    """A failed rank in one line: where, how, why."""
    place = f"{end.host} rank {end.rank}"
    if end.code == DONE:
        return f"{place} ended with 0 but without its end marker"
    how = f"exit {end.code}"
    if end.code > 128:
        with suppress(ValueError):
            how = f"killed by {signal.Signals(end.code - 128).name}"
    return f"{place} failed first: {how}" + (f": {end.reason}" if end.reason else "")
