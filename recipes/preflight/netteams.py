"""Ranks that act together, and their collectives on known values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from recipes.preflight.netlinks import Wire

OPS = ("all_reduce", "all_gather", "reduce_scatter")


@dataclass(frozen=True, kw_only=True)
class Team:
    """Ranks that act together."""

    group: str  # "all", "node" or "between"
    host: str | None
    ranks: tuple[int, ...]
    data: Any  # process group of the run's backend
    control: Any  # gloo's, for agreeing on numbers

    def most(self, value: float) -> float:
        """The largest of the ranks' values, on all of them."""
        import torch
        import torch.distributed as dist

        held = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(held, op=dist.ReduceOp.MAX, group=self.control)
        return float(held)

    @property
    def name(self) -> str:
        """For messages."""
        return {"all": "all ranks", "node": f"within {self.host}"}.get(self.group, "between nodes")


def teams_of(nodes: Mapping[str, list[int]]) -> list[Team]:
    """All ranks; with several nodes also each node's, and the nodes' first ranks."""
    import torch.distributed as dist

    specs: list[tuple[str, str | None, list[int]]] = [("all", None, sum(nodes.values(), []))]
    if len(nodes) > 1:
        specs += [("node", host, ranks) for host, ranks in nodes.items() if len(ranks) > 1]
        specs.append(("between", None, [ranks[0] for ranks in nodes.values()]))
    return [
        Team(
            group=group,
            host=host,
            ranks=tuple(ranks),
            data=dist.new_group(ranks),  # every rank must create every group
            control=dist.new_group(ranks, backend="gloo"),
        )
        for group, host, ranks in specs
    ]


def prepared(
    wire: Wire, team: Team, op: str, num_bytes: int
) -> tuple[Callable[[], Any], int, Callable[[], bool]]:
    """A collective on known values: the call, its elements, and the check after one call.

    For a reduction every rank holds the known value at its own every n-th place and zero elsewhere,
    so that the sum is exact in 16 bit for any number of ranks.
    """
    import torch
    import torch.distributed as dist

    count, place = len(team.ranks), team.ranks.index(wire.rank)
    chunk = max(1, num_bytes // wire.dtype.itemsize // count)
    want = wire.known(chunk * count)
    mine = want[place * chunk : (place + 1) * chunk]
    whole, part = torch.zeros_like(want), torch.zeros_like(mine)
    if op == "all_gather":
        part.copy_(mine)
    else:
        whole[place::count] = want[place::count]

    def call() -> None:
        if op == "all_reduce":
            dist.all_reduce(whole, group=team.data)
        elif op == "all_gather":
            dist.all_gather_into_tensor(whole, part, group=team.data)
        else:
            dist.reduce_scatter_tensor(part, whole, group=team.data)

    def verify() -> bool:
        found, expected = (part, mine) if op == "reduce_scatter" else (whole, want)
        same = torch.equal(found, expected)
        whole.zero_()  # sums that grow with every call would overflow
        part.zero_()
        return same

    return call, chunk * count, verify
