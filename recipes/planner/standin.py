"""A fake CPU tensor's forward made to save what a GPU's would: attention, autocast, dropout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from recipes.planner.activations import FLASH_MULTIPLE

if TYPE_CHECKING:
    import torch

FLASH = "octet_flash"  # the name under which transformers finds the attention below


@dataclass
class Seen:
    """Attention calls of one forward: the types of the flash operator's, sdpa's, softmaxes."""

    flash: list[torch.dtype]
    library: int = 0
    softmax: int = 0


_seen = Seen(flash=[])


def register_flash() -> None:
    """Make the flash operator known to transformers, without a mask, as sdpa and FA2 run it."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(FLASH, _flash)
    ALL_MASK_ATTENTION_FUNCTIONS.register(FLASH, lambda *_, **__: None)


def _flash(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    import torch
    import torch.nn.functional as F

    if attention_mask is not None or others.get("position_bias") is not None:
        raise RuntimeError(
            "it adds a mask or a bias to its scores, so flash attention can't run it"
        )
    if torch.is_autocast_enabled("cpu"):
        low = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(low), key.to(low), value.to(low)
    head = query.shape[-1]
    if value.shape[-1] != head:
        raise RuntimeError(
            "its values are not as wide as its keys, so flash attention can't run it"
        )
    if head % FLASH_MULTIPLE:
        room = (0, FLASH_MULTIPLE - head % FLASH_MULTIPLE)
        query, key, value = F.pad(query, room), F.pad(key, room), F.pad(value, room)
    _seen.flash.append(query.dtype)
    out = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, dropout, True, False, scale=scaling
    )[0]
    return out[..., :head].transpose(1, 2).contiguous(), None


# CUDA's autocast runs these in fp32 and the CPU's does not: torch's "Automatic Mixed Precision"
# page, as far as decoders use them.
# fmt: off
IN_FP32 = frozenset((
    "__pow__", "__rdiv__", "__rpow__", "__rtruediv__", "cosh", "cumprod", "cumsum", "dist", "exp",
    "expm1", "group_norm", "layer_norm", "log", "log10", "log1p", "log2", "log_softmax", "norm",
    "normalize", "pow", "prod", "reciprocal", "rsqrt", "sinh", "softmax", "softmin", "softplus",
    "sum", "tan",
))
# fmt: on


@contextmanager
def as_on_gpu(low: torch.dtype | None) -> Iterator[Seen]:
    """CUDA's autocast list (for the type `low`) and dropout masks; yields the attention calls."""
    import torch
    from torch.overrides import TorchFunctionMode

    class AsOnGpu(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs, name = kwargs or {}, getattr(func, "__name__", "")
            _seen.library += name == "scaled_dot_product_attention"
            _seen.softmax += name == "softmax"
            if name == "dropout":
                share = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
                training = kwargs.get("training", args[2] if len(args) > 2 else True)
                if training and 0 < share < 1:
                    return torch.native_dropout(args[0], share, True)[0]
            if low is not None and name in IN_FP32 and torch.is_autocast_enabled("cpu"):
                args = tuple(_wide(value, low) for value in args)
                kwargs = {key: _wide(value, low) for key, value in kwargs.items()}
            return func(*args, **kwargs)

    _seen.flash, _seen.library, _seen.softmax = [], 0, 0
    with AsOnGpu():
        yield _seen


def _wide(value: Any, low: torch.dtype) -> Any:
    import torch

    return value.float() if isinstance(value, torch.Tensor) and value.dtype == low else value
