"""The ranks that act together on checkpoints, as this room sees them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

FAULTS = (OSError, RuntimeError, ValueError, MemoryError)  # told to the peers, who else would wait


class Group(Protocol):
    """The ranks that write and read together."""

    rank: int
    world: int

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        ...

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Fill a tensor on the host with that of the rank `source`, in place."""
        ...


class Alone:
    """A group of one, for tools and tests."""

    rank, world = 0, 1

    def gather(self, value: Any) -> list[Any]:
        """The one value."""
        return [value]

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Nobody else is there."""


class StageError(OSError):
    """Some ranks failed; raised on all of them alike."""


def stage(
    group: Group, hosts: Sequence[str], what: str, act: Callable[[], Any], place: object = None
) -> list[Any]:
    """What `act`, which must not communicate, returns on every rank.

    Args:
        what: failed, for the text.
        place: the path that an error is about which names none.

    Raises:
        StageError: some rank failed; with all of them and why.
    """
    value, fault = None, None
    try:
        value = act()
    except FAULTS as error:
        fault = told(error, place)
    outcomes = group.gather((value, fault))
    faults = [
        f"rank {rank}{f' ({host})' if host else ''}: {text}"
        for rank, ((_, text), host) in enumerate(zip(outcomes, hosts, strict=True))
        if text
    ]
    if faults:
        raise StageError(f"{what}: {'; '.join(faults)}")
    return [value for value, _ in outcomes]


def told(error: BaseException, path: object = None) -> str:
    """An error as a person reads it: what the system says, and about which path."""
    if isinstance(error, OSError) and error.strerror:
        place = error.filename or path
        return f"{error.strerror} ({place})" if place else error.strerror
    return f"{error or type(error).__name__}" + (f" ({path})" if path else "")
