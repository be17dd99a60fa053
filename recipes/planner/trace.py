"""The bytes that autograd keeps of the real transformers model, counted without a GPU.

The model is built and run on fake tensors, which have a shape and a type but no memory, at one and
two layers and three micro-batches, and once at its full depth. Fake tensors lie on the CPU, so what
differs on a GPU is put right before autograd sees it, and checked:

* attention: `flash` is a registered attention that calls torch's flash operator itself; the CPU's
  choice would be another kernel. It counts its calls, so a model that goes round it is refused.
* autocast: the CPU's list of fp32 operations is shorter; the rest of CUDA's list is cast here.
* dropout: the CPU keeps a mask of the input's type; `native_dropout`, the GPU's, one of a byte.

One difference is left: for 16-bit input the CPU keeps a layer norm's mean and deviation in 16 bit
and a GPU in fp32, 4 bytes per token and norm.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from recipes.config import Model
from recipes.planner.standin import FLASH, Seen, as_on_gpu, register_flash
from recipes.planner.traced import Count, Traced, Variant, real_shape
from recipes.planner.workload import Precision

if TYPE_CHECKING:
    import torch

__all__ = ["Traced", "trace"]

Attention = Literal["flash", "eager"]
MICROS = (1, 2, 3)
# Layers that differ (sliding and full attention in turn) make a model's mean layer another than its
# second; below this share of the whole they count as alike.
UNEVEN = 0.002
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def trace(
    model: Model, work_precision: Precision, autocast: bool, attention: Attention, seq_len: int
) -> Traced:
    """Count a run file's model.

    In 16 bit both ways to compute are traced, autocast and 16-bit weights, the asked one first.

    Raises:
        ValueError: a model that can't be built or counted right, with the reason.
    """
    config = _config(model)
    _refuse(config, model, attention)
    ways = (autocast, not autocast) if work_precision != "fp32" else (False,)
    with _quiet():
        variants, parameters = [], 0
        for cast in ways:
            way = _Way(
                precision=work_precision, autocast=cast, attention=attention, seq_len=seq_len
            )
            try:
                variant, parameters = _variant(config, way)
            except (RuntimeError, NotImplementedError, TypeError, AttributeError) as error:
                text = " ".join(str(error).split())[:300]
                raise ValueError(
                    f"--trace: {config.model_type} can't be counted: {text}"
                ) from error
            variants.append(variant)
    return Traced(
        shape=real_shape(config, parameters),
        seq_len=seq_len,
        precision=work_precision,
        variants=tuple(variants),
    )


def _config(model: Model) -> Any:
    from transformers import AutoConfig

    keys = dict(model.config or {})
    try:
        if model.pretrained is not None:
            return AutoConfig.from_pretrained(model.pretrained, local_files_only=True)
        return AutoConfig.for_model(keys.pop("model_type"), **keys)
    except (OSError, ValueError, TypeError) as error:
        name = model.pretrained or (model.config or {}).get("model_type")
        raise ValueError(f"--trace: {name} has no usable configuration: {error}") from error


def _refuse(config: Any, model: Model, attention: Attention) -> None:
    """What would be counted wrong."""
    experts = [key for key in EXPERTS if (getattr(config, key, None) or 0) > 1]
    if experts:
        raise ValueError(
            f"--trace: {config.model_type} has {experts[0]}={getattr(config, experts[0])}: what an "
            "expert keeps depends on the data, so no count without it is right"
        )
    if not getattr(config, "num_attention_heads", None):
        raise ValueError(
            f"--trace: {config.model_type} has no attention heads; only transformers are counted"
        )
    capped = getattr(config, "attn_logit_softcapping", None)
    if capped is not None and attention == "flash" and model.attention == "sdpa":
        raise ValueError(
            f"--trace: {config.model_type} caps its attention scores, which sdpa can't; set "
            "model.attention to eager or flash_attention_2"
        )


@dataclass(frozen=True, kw_only=True)
class _Way:
    """How a model is run: one variant at one precision and sequence length."""

    precision: Precision
    autocast: bool
    attention: Attention
    seq_len: int


def _variant(config: Any, way: _Way) -> tuple[Variant, int]:
    """The counts of one way, and the parameters of the whole model."""
    one = {micro: _saved(config, 1, micro, way)[0] for micro in MICROS}
    two = {micro: _saved(config, 2, micro, way)[0] for micro in MICROS}
    layer = {micro: two[micro] - one[micro] for micro in MICROS}
    head = {micro: one[micro] - layer[micro] for micro in MICROS}
    depth = config.num_hidden_layers
    whole, parameters = _saved(config, depth, 1, way)
    if abs(whole - head[1] - depth * layer[1]) > UNEVEN * whole:
        share = (whole - head[1]) / (depth * layer[1])
        layer = {micro: size * share for micro, size in layer.items()}
    counts = [
        Count(one=c[1], fixed=c[2] - 2 * (c[3] - c[2]), per_sequence=c[3] - c[2])
        for c in (layer, head)
    ]
    return (
        Variant(attention=way.attention, autocast=way.autocast, layer=counts[0], head=counts[1]),
        parameters,
    )


def _saved(config: Any, layers: int, micro: int, way: _Way) -> tuple[float, int]:
    """Bytes that one forward with the full loss keeps beside the parameters; and their number."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from recipes.model import SummedLoss, count_parameters

    compute = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    kept: dict[int, torch.UntypedStorage] = {}
    with FakeTensorMode(allow_non_fake_inputs=True):
        dtype = torch.float32 if way.autocast else compute[way.precision]
        network = _build(config, layers, dtype, way.attention)
        known = {_address(t) for t in (*network.parameters(), *network.buffers())}
        ids, labels = (torch.zeros((micro, way.seq_len), dtype=torch.long) for _ in range(2))

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if _address(tensor) not in known:
                # Held, so that no later tensor can take its place and its address.
                kept.setdefault(_address(tensor), tensor.untyped_storage())
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t)
        low = compute[way.precision]
        cast = torch.autocast("cpu", dtype=low) if way.autocast else nullcontext()
        with hooks, cast, as_on_gpu(low if way.autocast else None) as seen:
            SummedLoss(network, chunked=False)(ids, labels)
    _check(config, layers, way, seen)
    return float(sum(storage.nbytes() for storage in kept.values())), count_parameters(network)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _build(config: Any, layers: int, dtype: torch.dtype, attention: Attention) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    cut = copy.deepcopy(config)
    cut.num_hidden_layers = layers
    if getattr(cut, "layer_types", None):
        cut.layer_types = list(cut.layer_types)[:layers]
    torch.set_default_dtype(dtype)
    try:
        network = AutoModelForCausalLM.from_config(cut, attn_implementation="eager", dtype=dtype)
    finally:
        torch.set_default_dtype(torch.float32)
    if attention == "flash":
        register_flash()
        network.config._attn_implementation = FLASH
    return network.train()


def _check(config: Any, layers: int, way: _Way, seen: Seen) -> None:
    """The intended attention and type were really used."""
    import torch

    names = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    wanted = layers if way.attention == "flash" else 0
    other = len(seen.flash) != wanted or set(seen.flash) - {names[way.precision]}
    softmaxes = layers if way.attention == "eager" else 0
    if other or seen.library or seen.softmax < softmaxes:
        raise ValueError(
            f"--trace: {config.model_type} has an attention of its own ({len(seen.flash)} flash, "
            f"{seen.library} sdpa, {seen.softmax} eager calls in {layers} layers, asked for "
            f"{way.attention}); trace it with the other model.attention"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers warns of every option that a fake run leaves out."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
