"""One link at a time, from rank to rank, one way: rate, latency and the line through several sizes.

The sender leads: it orders a burst of messages, waits until the other is ready, sends, and stops
its clock at a one-element answer, so that nothing is counted before it has arrived.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from recipes.preflight.linkrates import MIB, fit_line, rounds

SIZES = (8, 64 * 2**10, MIB, 4 * MIB)  # of the line that is fitted, with the streams
STREAMS = 3  # the best one counts, since other traffic only ever slows one down
LARGEST_MESSAGE, MOST_MESSAGES = 64 * MIB, 256
PERIOD = 251  # of the known values: small enough to be exact in bf16, no divisor of a buffer


@dataclass(frozen=True, kw_only=True)
class Wire:
    """What this rank sends and receives with."""

    rank: int
    device: Any  # torch.device
    dtype: Any  # torch.dtype of the messages, as the run's gradients have it

    def known(self, elements: int) -> Any:
        """Values that are known on both sides and exact in every precision."""
        import torch

        period = torch.arange(1, PERIOD + 1, device=self.device).to(self.dtype)
        return period.repeat(elements // PERIOD + 1)[:elements]

    def elements(self, num_bytes: int) -> int:
        """How many elements a message of this size has, at least one."""
        return max(1, num_bytes // self.dtype.itemsize)

    def settle(self) -> None:
        """Wait until the device has done what was asked of it."""
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def tell(self, peer: int, *numbers: int) -> None:
        """Send whole numbers."""
        import torch
        import torch.distributed as dist

        dist.send(torch.tensor(numbers, dtype=torch.int64, device=self.device), peer)

    def hear(self, peer: int, count: int) -> list[int]:
        """Receive whole numbers."""
        import torch
        import torch.distributed as dist

        told = torch.zeros(count, dtype=torch.int64, device=self.device)
        dist.recv(told, peer)
        return [int(number) for number in told.tolist()]


def answer(wire: Wire, peer: int) -> None:
    """Receive what the sender orders, until it orders nothing."""
    import torch
    import torch.distributed as dist

    while True:
        elements, count = wire.hear(peer, 2)
        if count == 0:
            return
        message = torch.zeros(elements, dtype=wire.dtype, device=wire.device)
        wire.tell(peer, 1)
        for _ in range(count):
            dist.recv(message, peer)
        wire.tell(peer, 1)
        wire.tell(peer, int(torch.equal(message, wire.known(elements))))


@dataclass
class Sender:
    """The leading side of one link."""

    wire: Wire
    peer: int
    correct: bool = True

    def burst(self, num_bytes: int, count: int = 1) -> float:
        """Seconds from the first of `count` messages to the answer."""
        import torch.distributed as dist

        elements = self.wire.elements(num_bytes)
        message = self.wire.known(elements)
        self.wire.tell(self.peer, elements, count)
        self.wire.hear(self.peer, 1)
        self.wire.settle()
        started = time.perf_counter()
        for _ in range(count):
            dist.send(message, self.peer)
        self.wire.hear(self.peer, 1)
        seconds = time.perf_counter() - started
        (same,) = self.wire.hear(self.peer, 1)
        self.correct = self.correct and bool(same)
        return seconds

    def probe(self, stream_s: float) -> dict[str, Any]:
        """Everything about this link.

        Args:
            stream_s: how long each of the streams shall take.
        """
        for _ in range(3):
            self.burst(SIZES[0])  # connections open with the first message
        # The best of several everywhere: other work only ever adds to a time.
        latency = min(self.burst(SIZES[0]) for _ in range(20)) / 2
        points: list[tuple[float, float]] = [(SIZES[0], latency)]
        for size in SIZES[1:]:
            times = [self.burst(size)]
            while len(times) < 5 and sum(times) < stream_s / 4:
                times.append(self.burst(size))
            points.append((size, max(min(times) - latency, latency)))
            if times[0] > stream_s:  # the next size would take several times as long
                break
        rates, message_bytes = [points[-1][0] / points[-1][1]], MIB
        for _ in range(STREAMS):
            message_bytes, count = stream_shape(rates[-1], stream_s)
            seconds = max(self.burst(message_bytes, count) - latency, 1e-9)
            rates.append(message_bytes * count / seconds)
            points.append((message_bytes * count, seconds))
        self.wire.tell(self.peer, 0, 0)
        line = fit_line(points)
        return {
            "bytes_per_s": max(rates[1:]),
            "bits_per_s": 8 * max(rates[1:]),
            "runs": rates[1:],
            "message_bytes": message_bytes,
            "latency_s": latency,
            "fit": None if line is None else dict(vars(line)),
            "correct": self.correct,
        }


def stream_shape(bytes_per_s: float, stream_s: float) -> tuple[int, int]:
    """Bytes and number of messages that take about `stream_s`; few and large, whole MiB."""
    wanted = bytes_per_s * stream_s
    message = min(max(int(wanted / 4) // MIB * MIB, MIB), LARGEST_MESSAGE)
    return message, min(max(round(wanted / message), 2), MOST_MESSAGES)


def measure_links(
    wire: Wire, nodes: dict[str, list[int]], wait_for_all: Callable[[], Any], budget_s: float
) -> list[dict[str, Any]]:
    """The links that this rank led: to its neighbour in the node, and to the other nodes.

    Pairs of different nodes are measured at the same time; a node is in one pair at a time.

    Args:
        nodes: ranks of each host, in rank order.
        wait_for_all: returns when every rank has come to it.
    """
    names = list(nodes)
    inside = [(ranks[0], ranks[1]) for ranks in nodes.values() if len(ranks) > 1]
    plan: list[list[tuple[int, int]]] = [inside] if inside else []
    for pairs in rounds(len(names)):
        firsts = [(nodes[names[a]][0], nodes[names[b]][0]) for a, b in pairs]
        plan += [firsts, [(b, a) for a, b in firsts]]
    links = []
    stream_s = min(0.5, max(0.05, budget_s / max(len(plan), 1) / (STREAMS + 2)))
    host_of = {rank: host for host, ranks in nodes.items() for rank in ranks}
    for pairs in plan:
        for sender, receiver in pairs:
            if wire.rank == receiver:
                answer(wire, sender)
            if wire.rank == sender:
                ends = {"from": host_of[sender], "to": host_of[receiver]}
                kind = "within" if ends["from"] == ends["to"] else "between"
                ranks = {"from_rank": sender, "to_rank": receiver}
                measured = Sender(wire, receiver).probe(stream_s)
                links.append({"kind": kind} | ends | ranks | measured)
        wait_for_all()
    return links


def ranks_by_node(hosts: Sequence[str]) -> dict[str, list[int]]:
    """Ranks of each host, from the host of each rank."""
    nodes: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        nodes.setdefault(host, []).append(rank)
    return nodes
