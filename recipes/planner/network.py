"""Seconds of communication: latency and bandwidth, within a node and between nodes.

A call takes `latency + payload / rate`, as in NCCL's own cost model (src/graph/tuning.cc), which
chooses the fastest of its protocols. Over several nodes NCCL has two algorithms for an all-reduce:

    ring   2(n-1)/n·S / min(B_link, B_node)                   all of it crosses from node to node
    tree   2(g-1)/g·S / B_link + 2(k-1)/k·S / B_node          the node's sum crosses

for n ranks, g of them in each of k nodes, B_link the GPUs' bus bandwidth within a node, B_node a
node's network. On more than two nodes a tree's inner nodes send 2·S and it is no faster than a ring
but for its latency. Gathers and scatters have rings only. The value is the faster of the two; the
low end of the band is the better of these bounds at the best rates, a tree's two parts at the same
time (as NVLink SHARP's does), the high end the ring at the worst.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from recipes.planner.figure import Figure, Source
from recipes.planner.hardware import NET_S
from recipes.planner.protocols import PROTOCOLS, Algorithm, Protocol
from recipes.planner.transfer import Op, Place, Transfer, ring_share
from recipes.planner.workload import Cluster

# Of a call through torch, over NCCL's own latency; and how much longer latencies may last at the
# high end. Both fitted to one curve, the all-reduce of 1 MiB to 16 GiB over eight A100s (18.0 to
# 234.9 GB/s, stas00/ml-engineering network/README.md), which therefore proves neither.
HOST_S = 30e-6
SLOW_LATENCY = 2.5
# How far rates may be off either way: bus bandwidths published for the same GPUs lie this close;
# of a network assumed, 0.72 to 0.98 of the line rate where the table has a share of 0.85.
LINK_BAND, NETWORK_BAND = 0.08, 0.15
# PCIe boxes differ by switches and sockets more than that (assumed).
PCIE_LINK_BAND = 0.4
# NVLink SHARP helps all-reduces only: 480 GB/s on eight H100s against 370 for gathers and scatters
# (NVIDIA/nccl-tests issue 212).
GATHER_LINK_BAND = 0.20
# A preflight's rates change by this much from run to run (assumed).
MEASURED_BAND = 0.10


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a group gets of the machines.

    Attributes:
        link_bytes_per_s: bus bandwidth within a node. network_bytes_per_s: of the group's share of
            a node's network, one way; infinite within a node.
        net_s: latency of a message between nodes. pcie: no NVLink within a node.
        small_s: what a measured all-reduce of a few bytes takes; None: NCCL's model and HOST_S.
        measured: whether the slower part of the way is.
    """

    link_bytes_per_s: float
    network_bytes_per_s: float
    net_s: float
    pcie: bool
    small_s: float | None
    measured: bool
    source: Source
    basis: str


def rates(place: Place, cluster: Cluster) -> Rates:
    """Bandwidths and latencies for a group; measured ones stand in for the table's.

    Raises:
        ValueError: it extends over nodes and nothing says what lies between them.
    """
    measured, nic, gpu = cluster.measured, cluster.nic, cluster.gpu
    link, network, small = gpu.link_bytes_per_s, math.inf, None
    if gpu.peers and 1 < place.per_node <= gpu.peers:
        # Every pair has links of its own, and a part of the node uses its part of them.
        link *= (place.per_node - 1) / gpu.peers
    named: list[tuple[Source, str]] = []
    if place.per_node > 1:
        named.append(("table", f"{gpu.name}'s {gpu.link}"))
        if measured is not None and measured.within_bytes_per_s is not None:
            link, small = measured.within_bytes_per_s, measured.within_latency_s
            named[-1] = ("measured", f"within a node in {measured.path}")
    if place.nodes > 1:
        small = None
        if measured is not None and measured.between_bytes_per_s is not None:
            network, small = measured.between_bytes_per_s, measured.between_latency_s
            named.append(("measured", f"between nodes in {measured.path}"))
        elif nic is not None:
            network = nic.bits_per_s / 8 * nic.share
            named.append(("table", f"{nic.name} between nodes"))
        else:
            raise ValueError(
                f"{place.ranks} ranks extend over {place.nodes} nodes but no network is named; "
                "add --nic NAME or RATE, or --measured preflight.json"
            )
    return Rates(
        link_bytes_per_s=link,
        network_bytes_per_s=network / place.beside,
        net_s=nic.latency_s if nic is not None else NET_S,
        pcie=gpu.link == "pcie",
        small_s=small,
        measured=bool(named) and named[-1][0] == "measured",
        source="table" if any(source == "table" for source, _ in named) else "measured",
        basis=", ".join(text for _, text in named),
    )


def _latency(op: Op, place: Place, got: Rates, protocol: Protocol, algorithm: Algorithm) -> float:
    """Seconds of a call without payload: tuning.cc's sum over the steps of a ring or a tree."""
    link = protocol.pcie_s if got.pcie else protocol.link_s
    if op == "send":
        return protocol.base_s + (protocol.ring_net * got.net_s if place.nodes > 1 else link)
    if algorithm != "ring":
        within = (place.per_node - 1) * max(protocol.tree_link_s, link if got.pcie else 0.0)
        return protocol.base_s + 2 * (
            within + math.log2(place.nodes) * protocol.tree_net * got.net_s
        )
    times = 2 if op == "all_reduce" else 1
    across = times * (place.nodes - 1)
    steps = times * (place.ranks - 1) - across
    return protocol.base_s + steps * link + across * protocol.ring_net * got.net_s


def _payload(op: Op, place: Place, got: Rates, algorithm: Algorithm, net_share: float) -> float:
    """Seconds a byte of payload takes. `net_share`: what of it a tree's node sends."""
    link = got.link_bytes_per_s if place.per_node > 1 else math.inf
    if op in ("reduce", "broadcast", "send"):  # one after the other, all of it
        return 1.0 / min(link, got.network_bytes_per_s)
    if algorithm == "ring":
        return ring_share(op, place.ranks) / min(link, got.network_bytes_per_s)
    within, between = ring_share(op, place.per_node) / link, net_share / got.network_bytes_per_s
    return max(within, between) if algorithm == "piped tree" else within + between


@dataclass(frozen=True, kw_only=True)
class _Ways:
    """How a call can be made, and the best of them."""

    op: Op
    bytes: float
    place: Place
    got: Rates

    def best(
        self, *, tree: float | None, slow: float = 1.0, host: float = 1.0, piped: bool = False
    ) -> float:
        """Seconds of the fastest protocol and algorithm.

        Args:
            tree: what of the payload a tree's node sends; None: rings only.
            slow, host: factors on NCCL's latencies and on the host's.
            piped: the node's part goes on while the network's does.
        """
        smallest = math.inf
        for protocol in PROTOCOLS:
            if self.got.pcie and not protocol.pcie:
                continue
            ways: list[tuple[Algorithm, float]] = [("ring", 0.0)]
            if tree is not None:
                ways.append(("piped tree" if piped else "tree", tree))
            for algorithm, share in ways:
                latency = _latency(self.op, self.place, self.got, protocol, algorithm)
                payload = _payload(self.op, self.place, self.got, algorithm, share)
                smallest = min(smallest, slow * latency + self.bytes * payload / protocol.rate)
        return smallest + host * self.host_s

    @property
    def host_s(self) -> float:
        """What a call takes over NCCL's latency: by a measured small all-reduce, or HOST_S."""
        if self.got.small_s is None:
            return HOST_S
        small = min(
            _latency("all_reduce", self.place, self.got, p, "ring")
            for p in PROTOCOLS
            if p.pcie or not self.got.pcie
        )
        return max(self.got.small_s - small, 0.0)

    def at(self, link: float, network: float) -> _Ways:
        """The same with rates that differ by these shares."""
        got = replace(
            self.got,
            link_bytes_per_s=self.got.link_bytes_per_s * (1 + link),
            network_bytes_per_s=self.got.network_bytes_per_s * (1 + network),
        )
        return replace(self, got=got)


@dataclass(frozen=True, kw_only=True)
class Bands:
    """Shares by which rates may be off: within a node up and down, between nodes either way."""

    link: float
    link_worst: float
    network: float


def bands(op: Op, got: Rates, cluster: Cluster) -> Bands:
    """How far the rates of `rates` may be off for a call."""
    table_band = PCIE_LINK_BAND if got.pcie else LINK_BAND
    link = worst = MEASURED_BAND if got.measured else table_band
    if op != "all_reduce" and (got.measured or cluster.gpu.link == "nvswitch"):
        worst = GATHER_LINK_BAND
    network = MEASURED_BAND if got.measured else NETWORK_BAND
    return Bands(link=link, link_worst=worst, network=network)


def one_call(op: Op, num_bytes: float, place: Place, cluster: Cluster) -> Figure:
    """Seconds of one call with a payload of `num_bytes`."""
    got = rates(place, cluster)
    ways = _Ways(op=op, bytes=num_bytes, place=place, got=got)
    nodes, sums = place.nodes, op == "all_reduce" and place.nodes > 1
    measured = got.measured
    # A measured all-reduce over the nodes says what the algorithm made of the network, whichever it
    # was: as a ring's rate.
    taken = (1.0 if nodes == 2 else 2.0) if sums and not measured else None
    value = ways.best(tree=taken)
    off = bands(op, got, cluster)
    bound = ring_share(op, nodes) if nodes > 1 and not measured else None
    low = ways.at(off.link, off.network).best(
        tree=bound if op in ("all_reduce", "all_gather", "reduce_scatter") else None,
        host=0.0,
        piped=True,
    )
    high = ways.at(-off.link_worst, -off.network).best(
        tree=2.0 if sums and nodes > 2 else None, slow=SLOW_LATENCY, host=SLOW_LATENCY
    )
    return Figure(
        value=value,
        low=min(low, value),
        high=max(high, value),
        unit="s",
        source=got.source,
        basis=f"{op} over {place.ranks} ranks: {got.basis}",
    )


def seconds(transfer: Transfer, cluster: Cluster) -> Figure:
    """Seconds of all of a transfer's calls in an update, one after the other."""
    one = one_call(transfer.op, transfer.bytes, transfer.place, cluster)
    calls = transfer.calls
    return one.times(calls, basis=f"{calls} x {one.basis}" if calls > 1 else one.basis)


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """Where a transfer's seconds of an update are, payload only but for `latency_s`.

    Attributes:
        within_s, between_s: of a hierarchical algorithm, in the node and between nodes.
        flat_s: of a flat ring over all ranks. latency_s: of all calls.
    """

    within_s: float
    between_s: float
    flat_s: float
    latency_s: float


def breakdown(transfer: Transfer, cluster: Cluster) -> Breakdown:
    """The parts of a transfer's time, at the rates of `rates`."""
    place = transfer.place
    got = rates(place, cluster)
    size = transfer.bytes * transfer.calls
    within = between = 0.0
    if place.per_node > 1:
        within = size * ring_share(transfer.op, place.per_node) / got.link_bytes_per_s
    if place.nodes > 1:
        between = size * ring_share(transfer.op, place.nodes) / got.network_bytes_per_s
    ways = _Ways(op=transfer.op, bytes=0.0, place=place, got=got)
    return Breakdown(
        within_s=within,
        between_s=between,
        flat_s=size * _payload(transfer.op, place, got, "ring", 0.0),
        latency_s=transfer.calls * ways.best(tree=None),
    )


def enough_bytes(op: Op, share: float, place: Place, cluster: Cluster) -> float:
    """The payload from which on latency is at most `share` of a call: what a bucket should have.

    Raises:
        ValueError: `share` is not between 0 and 1.
    """
    if not 0 < share < 1:
        raise ValueError(f"share={share} of a call's time; expected a number between 0 and 1")
    got = rates(place, cluster)
    ways = _Ways(op=op, bytes=0.0, place=place, got=got)
    latency = _latency(op, place, got, PROTOCOLS[0], "ring") + ways.host_s
    return latency * (1 - share) / share / _payload(op, place, got, "ring", 0.0)
