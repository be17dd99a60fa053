"""The network as the run uses it: links, then collectives over all ranks, in a node, between nodes.

Every result is checked against known values. Repeats follow from the time that a measurement may
take; a size that would take too long or does not fit into memory is skipped, with the reason.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from recipes.preflight import linkrates, netlinks
from recipes.preflight.netteams import OPS, Team, prepared, teams_of

logger = logging.getLogger(__name__)

LINK_SHARE = 0.4  # of the budget, for the links
CELL_SHARE = (1 - LINK_SHARE) / (4 * len(OPS) * 3)  # 4 sizes, 3 groups, about
OVERLAP_SHARE = 1 / 40  # of the budget, for one of the calls that are overlapped
MOST_REPEATS = 500
BUFFERS = 3.5  # what a measurement holds at once, in its own size


@dataclass(frozen=True, kw_only=True)
class Size:
    """A message size, and what in the run has it."""

    bytes: int
    why: str


class Bench:
    """One rank's part in measuring the network.

    Args:
        hosts: of each rank. device: torch's. dtype: torch's, of the run's gradients.
        budget_s: about how long all of it may take.
    """

    def __init__(
        self, *, rank: int, hosts: Sequence[str], device: Any, dtype: Any, budget_s: float
    ) -> None:
        self.wire = netlinks.Wire(rank=rank, device=device, dtype=dtype)
        self.nodes = netlinks.ranks_by_node(hosts)
        self.budget_s, self.started = budget_s, time.perf_counter()
        self.teams = teams_of(self.nodes)
        self.results: dict[str, list[dict[str, Any]]] = {
            name: [] for name in ("links", "collectives", "skipped", "overlap")
        }

    def measure(self, sizes: Sequence[Size]) -> dict[str, Any]:
        """Everything; JSON, alike on every rank (schema in recipes/measure.py)."""
        whole = self.teams[0]
        if len(whole.ranks) > 1:
            logger.info("network  links one at a time")
            share = LINK_SHARE * self.budget_s
            wire, wait = self.wire, lambda: whole.most(0.0)
            self.results["links"] = netlinks.measure_links(wire, self.nodes, wait, share)
            self._gather(whole, "links")
            for team in self.teams:
                if self.wire.rank in team.ranks:
                    logger.info("network  %s: %s", team.name, ", ".join(OPS))
                    self._collectives(team, sizes)
            self._overlap(whole)
            for name in ("collectives", "skipped", "overlap"):
                self._gather(whole, name)
        links = self.results["links"]
        of_kind = {k: [x for x in links if x["kind"] == k] for k in ("within", "between")}
        return {
            "dtype": str(self.wire.dtype).removeprefix("torch."),
            "budget_s": self.budget_s,
            "sizes": [{"bytes": size.bytes, "why": size.why} for size in sizes],
            **self.results,
            "within": linkrates.summary(of_kind["within"]),
            "between": linkrates.summary(of_kind["between"]),
            "worst_link": linkrates.worst_link(links),
        }

    def _gather(self, team: Team, name: str) -> None:
        """Every rank's lines, in rank order; a line is kept by one rank only."""
        import torch.distributed as dist

        lines: list[Any] = [None] * len(team.ranks)
        dist.all_gather_object(lines, self.results[name], group=team.control)
        self.results[name] = [line for of_rank in lines for line in of_rank]

    def _collectives(self, team: Team, sizes: Sequence[Size]) -> None:
        keeper = self.wire.rank == team.ranks[0]
        for op in OPS:
            place = {"group": team.group, "host": team.host, "op": op}
            prepared(self.wire, team, op, 8)[0]()  # opens the connections
            known: dict[str, Any] = {}  # the last size that was measured
            for size in sorted(sizes, key=lambda size: size.bytes):
                if reason := self._obstacle(team, op, size.bytes, known):
                    line = place | {"bytes": size.bytes, "reason": reason}
                    self.results["skipped"] += [line] if keeper else []
                    continue
                known = self._measure(team, op, size.bytes)
                line = place | {"ranks": list(team.ranks)} | known
                self.results["collectives"] += [line] if keeper else []

    def _obstacle(self, team: Team, op: str, num_bytes: int, known: dict[str, Any]) -> str:
        """Why this size is not measured; "" where it is. The same on every rank of the team."""
        spent, lack = time.perf_counter() - self.started, BUFFERS * num_bytes - self._free_bytes()
        if team.most(lack) > 0:
            return "the buffers do not fit into half of the free memory"
        if team.most(spent) > 2 * self.budget_s:
            return f"the time for the network ({self.budget_s:g} s) is used up"
        rates = [x["bytes_per_s"] for x in self.results["links"] if x["kind"] == "between"]
        expected = 0.0
        if rates and team.group != "node":
            expected = num_bytes * linkrates.bus_factor(op, len(team.ranks)) / min(rates)
        if known.get("bytes", 0) >= 2**16:  # below it is all latency
            expected = max(expected, known["seconds"] * num_bytes / known["bytes"])
        longest = self.budget_s / 8
        if 2 * expected > longest:  # once to check the values, once for the time
            return f"two calls would take {2 * expected:.1f} s, more than {longest:g} s"
        return ""

    def _free_bytes(self) -> float:
        """Half of this rank's part of the free memory."""
        if self.wire.device.type == "cuda":
            import torch

            return torch.cuda.mem_get_info(self.wire.device)[0] / 2
        import psutil

        local = next(ranks for ranks in self.nodes.values() if self.wire.rank in ranks)
        return psutil.virtual_memory().available / 2 / len(local)

    def _measure(self, team: Team, op: str, num_bytes: int) -> dict[str, Any]:
        """One operation at one size: checked once, then timed."""
        call, elements, verify = prepared(self.wire, team, op, num_bytes)
        first = self._timed(team, call, 1)
        correct = team.most(0.0 if verify() else 1.0) == 0.0
        share = CELL_SHARE * self.budget_s
        batches = 3 if 3 * first < share else 1
        repeats = min(max(int(share / first / batches), 1), MOST_REPEATS)
        seconds = median(self._timed(team, call, repeats) for _ in range(batches))
        size = elements * self.wire.dtype.itemsize
        rate = size / seconds
        return {
            "bytes": size,
            "repeats": batches * repeats,
            "seconds": seconds,
            "algbw_bytes_per_s": rate,
            "busbw_bytes_per_s": rate * linkrates.bus_factor(op, len(team.ranks)),
            "correct": correct,
        }

    def _timed(self, team: Team, call: Callable[[], Any], repeats: int) -> float:
        """Seconds of one call, on the slowest rank."""
        team.most(0.0)  # all start together
        started = time.perf_counter()
        for _ in range(repeats):
            call()
        self.wire.settle()
        return team.most((time.perf_counter() - started) / repeats)

    def _overlap(self, team: Team) -> None:
        """How much of a reduction hides behind arithmetic, at the largest size that is quick."""
        import torch
        import torch.distributed as dist

        sizes = [
            line["bytes"]
            for line in self.results["collectives"]
            if (line["group"], line["op"]) == ("all", "all_reduce")
            and line["seconds"] < OVERLAP_SHARE * self.budget_s
        ]
        num_bytes = int(team.most(max(sizes, default=8)))
        side = 4096 if self.wire.device.type == "cuda" else 256
        dtype = torch.float32 if self.wire.device.type == "cpu" else self.wire.dtype
        left = torch.ones(side, side, dtype=dtype, device=self.wire.device)
        buffer = torch.zeros(
            num_bytes // self.wire.dtype.itemsize, dtype=self.wire.dtype, device=self.wire.device
        )

        def reduce() -> Any:
            return dist.all_reduce(buffer, group=team.data, async_op=True)

        comm = median(self._timed(team, lambda: reduce().wait(), 1) for _ in range(3))
        once = median(self._timed(team, lambda: left @ left, 1) for _ in range(3))
        times = min(max(round(comm / once), 1), 10_000)

        def compute() -> None:
            for _ in range(times):
                left @ left

        def both() -> None:
            work = reduce()
            compute()
            work.wait()

        alone = median(self._timed(team, compute, 1) for _ in range(3))
        together = median(self._timed(team, both, 1) for _ in range(3))
        line = {"group": team.group, "op": "all_reduce", "bytes": num_bytes, "comm_s": comm}
        line |= {"compute_s": alone, "both_s": together}
        line["hidden_share"] = linkrates.hidden_share(comm, alone, together)
        self.results["overlap"] += [line] if self.wire.rank == team.ranks[0] else []
