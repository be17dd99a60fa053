"""Bytes that the operators of one real transformer layer move, counted on fake tensors."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# Arithmetic, counted elsewhere; and what moves nothing that grows with a layer's tokens.
LEFT_OUT = {
    *("mm", "addmm", "bmm", "baddbmm", "device", "detach", "_unsafe_view", "lift_fresh"),
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"),
    *("_scaled_dot_product_flash_attention_for_cpu", "empty", "empty_like", "new_empty"),
    *("_scaled_dot_product_flash_attention_for_cpu_backward", "arange", "new_zeros", "ones_like"),
}


def _flash(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float | None = None, **_: Any):
    """The flash operator itself: on fake tensors without a GPU sdpa would pick another."""
    shared = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(shared, 1) if shared > 1 else x for x in (k, v))
    out = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False)
    return out[0].transpose(1, 2).contiguous(), None


def _size(tensor: torch.Tensor) -> int:
    """Bytes behind a tensor; a dimension that is only repeated costs nothing."""
    elements = 1
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= length if stride else 1
    return elements * tensor.element_size()


class Counting(TorchDispatchMode):
    """Sums inputs and outputs of every operator; `side` says which direction runs."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.side = "forward"

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        name = function._schema.name.split("::")[1]
        if not function.is_view and name not in LEFT_OUT:
            tensors = [
                t for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor)
            ]
            self.bytes[self.side] += sum(map(_size, tensors))
        return result


def _run(config: dict[str, Any], layers: int, batch: int, seq_len: int, attention: str) -> Counter:
    kind = config["model_type"]
    depth = "n_layer" if kind == "gpt2" else "num_hidden_layers"
    keys = {k: v for k, v in config.items() if k != "model_type"} | {depth: layers}
    if attention == "flash":
        ALL_ATTENTION_FUNCTIONS.register("flash_operator", _flash)
    with FakeTensorMode(allow_non_fake_inputs=True):
        network: Any = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(kind, **keys), attn_implementation="eager", dtype=torch.bfloat16
        )
        if attention == "flash":
            network.config._attn_implementation = "flash_operator"
        network.train()
        counting = Counting()
        with counting:
            ids = torch.zeros(batch, seq_len, dtype=torch.long)
            hidden = network.base_model(ids, use_cache=False).last_hidden_state
            counting.side = "backward"
            hidden.sum().backward()
    return counting.bytes


def layer_bytes_per_token(
    config: dict[str, Any], seq_len: int, attention: str
) -> tuple[float, float]:
    """Forward and backward of one layer, per token: what grows with both layers and batch."""
    runs = {(n, b): _run(config, n, b, seq_len, attention) for n in (1, 2) for b in (1, 3)}
    tokens = 2 * seq_len
    sides = []
    for side in ("forward", "backward"):
        wide = runs[2, 3][side] - runs[1, 3][side]
        sides.append((wide - (runs[2, 1][side] - runs[1, 1][side])) / tokens)
    return sides[0], sides[1]
