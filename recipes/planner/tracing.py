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
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from recipes.config import Model
from recipes.planner.families import FAMILIES, no_configuration, shape_of
from recipes.planner.shape import Shape
from recipes.planner.standin import FLASH, Seen, as_on_gpu, register_flash
from recipes.planner.traced import Count, Traced, Variant, real_shape
from recipes.planner.workload import Precision

if TYPE_CHECKING:
    import torch

Attention = Literal["flash", "eager"]
MICROS = (1, 2, 3)
# Layers that differ (sliding and full attention in turn) make a model's mean layer another than its
# second; below this share of the whole they count as alike.
UNEVEN = 0.0005
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
    check(model, attention)
    ways = (autocast, not autocast) if work_precision != "fp32" else (False,)
    with _quiet():
        variants, parameters = [], 0
        for cast in ways:
            way = _Way(
                precision=work_precision, autocast=cast, attention=attention, seq_len=seq_len
            )
            variant, parameters = _counted(config, way)
            variants.append(variant)
    return Traced(
        shape=real_shape(config, parameters),
        seq_len=seq_len,
        precision=work_precision,
        variants=tuple(variants),
    )


def check(model: Model, attention: Attention) -> Shape | None:
    """Whether a run file's model can be traced, before that is done; its shape if it has one.

    Raises:
        ValueError: all that shows in its configuration alone.
    """
    config = _config(model)
    faults = _refusals(config, model, attention)
    if faults:
        raise ValueError("\n".join(faults))
    if config.model_type not in FAMILIES:
        return None
    if model.config is not None:
        return shape_of(dict(model.config), "model.config")
    return shape_of(config.to_dict(), f"model.pretrained={model.pretrained}")


def _config(model: Model) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    keys, name = dict(model.config or {}), model.pretrained
    try:
        if name is not None:
            revision = model.revision or "main"
            return AutoConfig.from_pretrained(name, revision=revision, local_files_only=True)
        return AutoConfig.for_model(keys.pop("model_type"), **keys)
    except (OSError, ValueError, TypeError, StrictDataclassError) as error:
        if name is not None and not (Path(name) / "config.json").is_file():
            raise ValueError(f"--trace: {no_configuration(name)}") from error
        title = name or (model.config or {}).get("model_type")
        text = " ".join(str(error).split(" Should contain")[0].split())[:300]
        raise ValueError(f"--trace: {title} has no usable configuration: {text}") from error


def _refusals(config: Any, model: Model, attention: Attention) -> list[str]:
    """What can't be built, or would be counted wrong."""
    from transformers.models.auto import modeling_auto as auto

    kind, faults = config.model_type, []
    if kind not in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return [f"--trace: {kind} is no causal language model that transformers builds; take one"]
    both_sides = kind in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if both_sides and not (config.is_encoder_decoder or getattr(config, "is_decoder", False)):
        faults.append(
            f"--trace: {kind} reads to both sides, and this recipe trains causal models; give it "
            "is_decoder: true, or take another"
        )
    experts = [key for key in EXPERTS if (getattr(config, key, None) or 0) > 1]
    if experts:
        faults.append(
            f"--trace: {kind} has {experts[0]}={getattr(config, experts[0])}: what an expert keeps "
            "depends on the data, so no count without it is right; plan a dense model"
        )
    if not getattr(config, "num_attention_heads", None):
        faults.append(
            f"--trace: {kind} has no attention heads; only transformers are counted: take one"
        )
    capped = getattr(config, "attn_logit_softcapping", None)
    if capped is not None and attention == "flash" and model.attention == "sdpa":
        faults.append(
            f"--trace: {kind} caps its attention scores, which sdpa can't; set model.attention to "
            "eager or flash_attention_2"
        )
    return faults


@dataclass(frozen=True, kw_only=True)
class _Way:
    """How a model is run: one variant at one precision and sequence length."""

    precision: Precision
    autocast: bool
    attention: Attention
    seq_len: int


def _counted(config: Any, way: _Way) -> tuple[Variant, int]:
    """`_variant`, or in words why transformers can't build or run the model so."""
    from huggingface_hub.errors import StrictDataclassError

    faults = (RuntimeError, NotImplementedError, TypeError, AttributeError, AssertionError)
    try:
        return _variant(config, way)
    except (*faults, StrictDataclassError) as error:
        text = " ".join(str(error).split())[:300]
        raise ValueError(f"--trace: {config.model_type} can't be counted: {text}") from error


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
