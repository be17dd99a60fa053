"""The ranks as a group that exchanges small objects, and fails together."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from recipes.outcome import PeerError, exit_code

T = TypeVar("T")


class Peers:
    """The ranks as a group that exchanges small objects over the host network, not the GPU's."""

    def __init__(self, rank: int, world: int) -> None:
        import torch.distributed as dist

        self.rank, self.world = rank, world
        # Counts, flags and paths must not wait for the GPU's queue. Rank 0 may look at a large data
        # set for longer than the default half hour; a rank that dies is noticed at once.
        self.group = dist.new_group(backend="gloo", timeout=timedelta(days=1))

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        import torch.distributed as dist

        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.group)
        return values

    def barrier(self) -> None:
        """Wait for every rank."""
        self.gather(None)

    def from_first(self, make: Callable[[], T]) -> T:
        """What `make` returns on rank 0, on every rank; its error on every rank too."""
        outcome: tuple[str, Any, int] = ("", None, 0)
        error: Exception | None = None
        if self.rank == 0:
            try:
                outcome = ("ok", make(), 0)
            except (ValueError, RuntimeError, OSError) as caught:
                error, outcome = caught, ("failed", str(caught), exit_code(caught))
        state, value, code = self.gather(outcome)[0]
        if error is not None:
            raise error
        if state == "failed":
            raise PeerError(f"rank 0: {value}", code)
        return value

    def together(self, act: Callable[[], T]) -> T:
        """Run `act`, which must not communicate, on every rank; if one fails, all fail."""
        try:
            value, fault = act(), None
        except (ValueError, RuntimeError, OSError) as caught:
            value, fault = None, caught
        told = self.gather(None if fault is None else (str(fault), exit_code(fault)))
        for rank, other in enumerate(told):
            if other is None:
                continue
            if fault is not None and rank == self.rank:
                raise fault
            raise PeerError(f"rank {rank}: {other[0]}", other[1])  # the first one tells it
        return value  # type: ignore[return-value]
