"""What the engine holds and what it sends, counted on it: sizes only, and nothing waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ProcessGroup

from recipes.engine.build import Engine
from recipes.engine.state import MOMENTS

# Methods of torch's ProcessGroup, through which every collective that is called from Python goes,
# DeepSpeed's too: the operation, and which argument is the full tensor of its payload.
METHODS = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "all_gather_single": ("all_gather", 0),
    "_allgather_base": ("all_gather", 0),
    "allgather": ("all_gather", 0),
    "all_gather_single_coalesced": ("all_gather", 0),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "reduce_scatter": ("reduce_scatter", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 1),
    "reduce": ("reduce", 0),
    "broadcast": ("broadcast", 0),
    "send": ("send", 0),
}


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One call; `bytes` is the full tensor's, `ranks` the size of its group."""

    op: str
    bytes: int
    ranks: int


class Traffic:
    """Counts the collectives of this rank between `begin` and `end`.

    Outside that stretch torch is as it was. Groups of other threads (`Peers.another`) are left out.
    DDP reduces in C++, unseen from here; its own record of its buckets is read instead.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._originals: dict[str, Any] = {}
        self._seen: list[Collective] = []

    @property
    def counting(self) -> bool:
        """Whether `begin` was called and `end` was not."""
        return bool(self._originals)

    def begin(self) -> None:
        """Count from here on."""
        self._seen = []
        for name in METHODS:
            # The class's own entry, which binds to an instance; what getattr gives would not.
            original = vars(ProcessGroup).get(name)  # torch 2.11 lacks some
            if original is not None:
                self._originals[name] = original
                setattr(ProcessGroup, name, self._counted(name, getattr(ProcessGroup, name)))

    def end(self) -> list[Collective]:
        """What was called; DDP's reduction of one window with it."""
        self.stop()
        return self._seen + _reduced_by_ddp(self._engine)

    def stop(self) -> None:
        """Leave torch as it was; nothing if it is."""
        for name, original in self._originals.items():
            setattr(ProcessGroup, name, original)
        self._originals = {}

    def _counted(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        op, at = METHODS[name]
        others = self._engine.peers.others

        def counted(group: Any, *args: Any, **kwargs: Any) -> Any:
            if group.group_name not in others and len(args) > at:
                size = sum(t.numel() * t.element_size() for t in _tensors(args[at]))
                self._seen.append(Collective(op=op, bytes=size, ranks=group.size()))
            return original(group, *args, **kwargs)

        return counted


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)


def _reduced_by_ddp(engine: Engine) -> list[Collective]:
    """Every bucket of DDP's reducer, reduced once in an update.

    A communication hook reduces them from Python instead, where they have been seen already.

    Raises:
        ValueError: this torch does not tell.
    """
    if engine.strategy.kind != "DDP" or engine.model._comm_hooks:
        return []
    told = engine.model._get_ddp_logging_data()
    sizes = told.get("rebuilt_bucket_sizes") or told.get("bucket_sizes")
    if not sizes:
        raise ValueError("torch's DDP does not tell the sizes of its buckets")
    return [
        Collective(op="all_reduce", bytes=int(size), ranks=engine.peers.world)
        for size in str(sizes).split(",")
    ]


def held_bytes(engine: Engine) -> dict[str, int]:
    """Bytes of this rank's lasting state by the plan's kinds, from the tensors' own storages."""
    inner = engine.inner_optimizer
    parameters = list(engine.module.parameters())
    masters: list[torch.Tensor] = []
    if engine.strategy.stage == 1:
        masters = list(inner.single_partition_of_fp32_groups)
    elif hasattr(inner, "fp32_groups"):
        masters = [high for group in inner.fp32_groups for high in group]
    adam = inner.optimizer if engine.strategy.kind == "DEEPSPEED" else inner
    moments = [kept[kind] for kept in adam.state.values() for kind in MOMENTS if kind in kept]
    return {
        "parameters": _stored(parameters),
        "master weights": _stored(masters) if not _same(masters, parameters) else 0,
        "moments": _stored(moments),
    }


def _stored(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages, each once, however many tensors look at it."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Whether the tensors lie in the others' storages (fp32 training has no copies)."""
    known = {t.untyped_storage().data_ptr() for t in others}
    return bool(some) and all(t.untyped_storage().data_ptr() in known for t in some)


def forget_peaks(engine: Engine) -> None:
    """Let the GPU's peaks begin here, so that they are training's and not the preparation's."""
    if engine.device.type == "cuda":
        torch.cuda.empty_cache()  # else what the preparation has reserved would be the first peak
        torch.cuda.reset_peak_memory_stats(engine.device)


def peak_reserved_bytes(engine: Engine) -> int | None:
    """The most that torch's allocator has taken from this rank's GPU; None without one."""
    if engine.device.type != "cuda":
        return None
    return torch.cuda.max_memory_reserved(engine.device)
