"""One kind of communication of an update, and where its ranks are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from recipes.planner.workload import Cluster, Strategy

Op = Literal["all_reduce", "all_gather", "reduce_scatter", "reduce", "broadcast", "send"]
Hides = Literal["nothing", "last backward", "backward", "forward", "forward and backward"]
Group = Literal["data", "tensor", "pipeline"]
When = Literal["micro", "boundary", "update"]


def ring_share(op: Op, ranks: int) -> float:
    """Bytes that a rank sends by a ring, by the payload: as nccl-tests defines bus bandwidth.

    A reduction or broadcast passes every rank but one once; that one differs from call to call.
    """
    if op == "send":
        return 1.0
    return (2.0 if op == "all_reduce" else 1.0) * (ranks - 1) / ranks


@dataclass(frozen=True, kw_only=True)
class Place:
    """A group's ranks on the machines: tensor ranks side by side, data ranks, stages outermost.

    Attributes:
        per_node: ranks of the group in one node.
        beside: such groups that use a node's network at the same time.
    """

    ranks: int
    per_node: int
    beside: int = 1
    group: Group = "data"

    @property
    def nodes(self) -> int:
        """Nodes over which the group extends."""
        return -(-self.ranks // self.per_node)

    def transfer(
        self,
        what: str,
        op: Op,
        size: float,
        calls: int,
        when: When,
        hides_behind: Hides = "nothing",
        *,
        rounds: int = 1,
        largest: float = 0.0,
    ) -> Transfer:
        """A transfer of this group; `size` is the payload of all calls together.

        Args:
            rounds: micro-batches in each of which the calls begin anew.
            largest: bytes of the call that nothing hides, if it is larger than the mean.
        """
        return Transfer(
            what=what,
            op=op,
            bytes=size / calls if calls else 0.0,
            calls=calls,
            place=self,
            when=when,
            hides_behind=hides_behind,
            tail=min(1.0, rounds * max(largest, size / calls) / size) if size else 1.0,
        )


def group_place(strategy: Strategy, ranks: int, cluster: Cluster, group: Group) -> Place:
    """Where a group of `ranks` is; of stages, two neighbours."""
    gpus, tensor = cluster.gpus, strategy.tensor
    if group == "pipeline":
        # A stage's ranks are side by side: the neighbour's rank is a whole stage away.
        stage = cluster.world // strategy.pipeline
        if cluster.nodes > 1:
            return Place(group=group, ranks=ranks, per_node=1, beside=min(stage, gpus))
        return Place(group=group, ranks=ranks, per_node=ranks)
    per_node = min(ranks, gpus if group == "tensor" else max(1, gpus // tensor))
    beside = max(1, gpus // per_node) if ranks > per_node else 1
    return Place(group=group, ranks=ranks, per_node=per_node, beside=beside)


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One kind of communication of one update.

    Attributes:
        bytes: the payload S of one call, the whole tensor; the mean where calls differ in size.
        calls: of an update, on a rank.
        tail: share of the payload in calls that nothing hides: the first or last of each round.
        place: where its ranks are.
    """

    what: str
    op: Op
    bytes: float
    calls: int
    place: Place
    when: When
    hides_behind: Hides
    tail: float

    @property
    def sent(self) -> float:
        """Bytes that a rank sends in an update, by ring algorithms."""
        return self.calls * self.bytes * ring_share(self.op, self.place.ranks)
