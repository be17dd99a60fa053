"""The ranks as a group that exchanges small objects, and fails together."""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from recipes.outcome import CollectiveError, PeerError, exit_code

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class Peers:
    """The ranks as a group that exchanges small objects over the host network, not the GPU's."""

    def __init__(self, rank: int, world: int) -> None:
        import torch.distributed as dist

        self.rank, self.world = rank, world
        # Counts, flags and paths must not wait for the GPU's queue. Rank 0 may look at a large data
        # set for longer than the default half hour; a rank that dies is noticed at once.
        self.group = dist.new_group(backend="gloo", timeout=timedelta(days=1))
        self.others: list[str] = []  # names of the groups of `another`
        self.hosts: list[str] = self.gather(socket.gethostname())
        self._entries = 0

    def another(self) -> Peers:
        """The same ranks over connections of their own, for a thread beside the training."""
        other = Peers(self.rank, self.world)
        self.others.append(other.group.group_name)
        return other

    def enter(self, what: str, limit_s: float) -> None:
        """Wait until every rank has come here, which takes them no longer than `limit_s`.

        Raises:
            CollectiveError: some did not come; on every rank that did, with the names of those.
        """
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import _get_default_store

        self._entries += 1
        store, key = _get_default_store(), f"octet/{self._entries}/{what}"
        store.set(f"{key}/{self.rank}", "here")
        if store.add(f"{key}/count", 1) == self.world:
            store.set(f"{key}/all", "here")
        try:
            store.wait([f"{key}/all"], timedelta(seconds=limit_s))
        except dist.DistStoreError as error:
            absent = [rank for rank in range(self.world) if not store.check([f"{key}/{rank}"])]
            named = ", ".join(f"{rank} ({self.hosts[rank]})" for rank in absent)
            raise CollectiveError(
                f"rank(s) {named} did not come to {what} within {limit_s:g} s"
            ) from error

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        import torch.distributed as dist

        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrite a tensor on the host with that of `source`, on every rank."""
        import torch.distributed as dist

        dist.broadcast(tensor, source, group=self.group)

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

    def alike(self, act: Callable[[], T]) -> T:
        """Run `act`, which fails on all ranks alike if it fails; rank 0 tells it for all."""
        try:
            return act()
        except (ValueError, OSError) as error:
            own = isinstance(error, OSError) and error.errno is not None  # the system's word to it
            if self.rank == 0 or own:
                raise
            raise PeerError(f"rank 0: {error}", exit_code(error)) from error

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
