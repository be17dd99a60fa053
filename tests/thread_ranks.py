"""Ranks as threads of one process, for everything in checkpoints that needs no engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class Threads:
    """One of some ranks that exchange values over one shared barrier and list."""

    def __init__(self, rank: int, barrier: threading.Barrier, values: list[Any]) -> None:
        self.rank, self.world = rank, barrier.parties
        self.barrier, self.values = barrier, values
        self.sent_bytes = 0  # by this rank's broadcasts

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value; a rank that never comes breaks the barrier after some seconds."""
        self.values[self.rank] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values

    def broadcast(self, tensor: Any, source: int) -> None:
        """Fill the tensor with that of the source."""
        values = self.gather(tensor)
        if self.rank != source:
            tensor.copy_(values[source])
        else:
            self.sent_bytes += tensor.numel() * tensor.element_size()
        self.gather(None)


def on_all_ranks(act: Callable[[Threads], Any], world: int, limit_s: float = 5) -> list[Any]:
    """Run `act` on every rank at once; each one's result, or the error that it raised."""
    barrier, values = threading.Barrier(world, timeout=limit_s), [None] * world

    def one(rank: int) -> Any:
        try:
            return act(Threads(rank, barrier, values))
        except Exception as error:  # noqa: BLE001 (handed to the test)
            return error

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(one, range(world)))


def all_well(act: Callable[[Threads], Any], world: int) -> list[Any]:
    """Run `act` on every rank at once; the first rank's error is raised."""
    results = on_all_ranks(act, world)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results
