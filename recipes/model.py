"""The model: built by transformers in fp32, wrapped so that head and loss lie inside, counted."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from recipes.config import Model

logger = logging.getLogger(__name__)

HAS_CHUNKED = hasattr(F, "linear_cross_entropy") and hasattr(nn, "LinearCrossEntropyOptions")


class SummedLoss(nn.Module):
    """A causal language model whose forward returns the summed loss and the number of tokens in it.

    Sums, not means: only the whole window knows the denominator (`objective.gradient_factor`).
    """

    def __init__(self, network: PreTrainedModel, chunked: bool) -> None:
        super().__init__()
        self.network: Any = network
        self.chunked = chunked

    @property
    def config(self) -> Any:
        """The transformers config, where DeepSpeed and Accelerate look for it."""
        return self.network.config

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        position_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Summed cross entropy and token count.

        Args:
            input_ids: [B, T] int64.
            labels: [B, T] int64, the target of each position (already shifted); -100 counts for
                nothing. position_ids: [B, T] int64 that restart at each document; transformers
                derives the document mask from
                them, but only without an attention mask and a cache, so neither is passed.

        Returns:
            Two fp32 scalars.
        """
        count = (labels != -100).sum().to(torch.float32)
        if not self.chunked:
            logits = self.network(
                input_ids=input_ids, position_ids=position_ids, use_cache=False
            ).logits
            losses = F.cross_entropy(
                logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="sum"
            )
            return losses, count
        hidden = self.network.base_model(
            input_ids=input_ids, position_ids=position_ids, use_cache=False
        ).last_hidden_state
        head = self.network.get_output_embeddings()
        weight, bias = head.weight, head.bias
        if torch.is_autocast_enabled(hidden.device.type):
            # The chunked operator is not on autocast's list; the matrix product it replaces is.
            low = torch.get_autocast_dtype(hidden.device.type)
            hidden, weight = hidden.to(low), weight.to(low)
            bias = bias.to(low) if bias is not None else None
        # reduction="sum" would add up in 16 bit: infinite in fp16, one per cent off in bf16.
        losses = F.linear_cross_entropy(
            hidden.flatten(0, 1),
            weight,
            labels.flatten(),
            linear_bias=bias,
            ignore_index=-100,
            reduction="none",
            options=nn.LinearCrossEntropyOptions(),
        )
        return losses.float().sum(), count


def build_network(model: Model, seed: int, seq_len: int, vocab_size: int) -> PreTrainedModel:
    """A transformers causal language model with fp32 parameters.

    From scratch it is initialised as its own paper says, from `seed`; a folder or hub name is
    loaded.

    Raises:
        ValueError: an unknown architecture, a name that can't be loaded, an attention kind that
            does not take
            effect, or a shape that does not fit the data; all that can be known, at once.
    """
    config = _config(model)
    faults = shape_faults(config, seq_len, vocab_size)
    if faults:
        raise ValueError("\n".join(faults))
    torch.manual_seed(seed)
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": model.attention}
    try:
        if model.pretrained is not None:
            network = AutoModelForCausalLM.from_pretrained(
                model.pretrained, revision=model.revision or "main", config=config, **options
            )
        else:
            network = AutoModelForCausalLM.from_config(config, **options)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(
            f"model {model.pretrained or config.model_type} can't be built: {error}"
        ) from error
    if network.config._attn_implementation != model.attention:
        raise ValueError(
            f"model.attention={model.attention} does not take effect for {config.model_type}: it "
            f"uses {network.config._attn_implementation}"
        )
    network.config.use_cache = False
    _check_causal(network)
    if model.gradient_checkpointing:
        if not network.supports_gradient_checkpointing:
            raise ValueError(
                f"model.gradient_checkpointing has no effect: {config.model_type} lacks it"
            )
        network.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
    return network.float()


@contextmanager
def _probing(network: PreTrainedModel) -> Iterator[None]:
    """Without dropout and gradients, and with an attention kind that runs on any device."""
    was_training, attention = network.training, network.config._attn_implementation
    network.eval()
    if attention not in ("eager", "sdpa"):
        network.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            yield
    finally:
        if attention not in ("eager", "sdpa"):
            network.set_attn_implementation(attention)
        network.train(was_training)


def _probe(network: PreTrainedModel, **inputs: torch.Tensor) -> Any:
    """Logits of the first eight token numbers, without dropout."""
    with _probing(network):
        return network(**inputs, use_cache=False).logits


def _check_causal(network: PreTrainedModel) -> None:
    """Refuse a model whose tokens see the tokens that they shall predict (BERT as it comes)."""
    parameter = next(network.parameters())
    if parameter.is_meta:
        return
    ids = torch.arange(8, device=parameter.device).remainder(network.config.vocab_size)[None]
    other = ids.clone()
    other[0, -1] = (other[0, -1] + 1) % network.config.vocab_size
    before, after = _probe(network, input_ids=ids), _probe(network, input_ids=other)
    if not torch.allclose(before[:, :-1], after[:, :-1], atol=1e-5):
        raise ValueError(
            f"{network.config.model_type} lets a token see the tokens after it, so it can't be "
            "trained to predict them; set its is_decoder, or take a causal model"
        )


def _config(model: Model) -> Any:
    if model.pretrained is not None:
        try:
            return AutoConfig.from_pretrained(model.pretrained, revision=model.revision or "main")
        except (OSError, ValueError) as error:
            raise ValueError(
                f"model.pretrained={model.pretrained!r} can't be read: {error}"
            ) from error
    keys = dict(model.config or {})
    kind = keys.pop("model_type")
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        known_kinds = list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        near = difflib.get_close_matches(kind, known_kinds, n=3, cutoff=0.5)
        remedy = f"did you mean {' or '.join(near)}?" if near else "see transformers' model list"
        raise ValueError(f"model.config.model_type={kind!r} is no causal language model; {remedy}")
    known = AutoConfig.for_model(kind)
    unknown = [key for key in keys if not hasattr(known, key)]
    if unknown:
        raise ValueError(
            f"model.config: {', '.join(unknown)} is no key of {kind}; it would have no effect"
        )
    try:
        return AutoConfig.for_model(kind, **keys)
    except (ValueError, TypeError, StrictDataclassError) as error:
        text = " ".join(str(error).split())
        raise ValueError(f"model.config for {kind} is not valid: {text}") from error


def shape_faults(config: Any, seq_len: int, vocab_size: int) -> list[str]:
    """Where the data does not fit the model's shape."""
    faults = []
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and seq_len > positions:
        faults.append(
            f"batch.seq_len={seq_len} is longer than the model's {positions} positions; lower it"
        )
    if vocab_size > config.vocab_size:
        faults.append(
            f"the tokenizer has {vocab_size} tokens but the model's vocab_size is "
            f"{config.vocab_size}; raise model.config.vocab_size or take a smaller tokenizer"
        )
    return faults


def wrap(network: PreTrainedModel, loss: str, prefer_chunked: bool) -> SummedLoss:
    """Choose how the loss is computed and wrap the network.

    Args:
        loss: `auto` follows `prefer_chunked` if this torch and the model's head allow it.
        prefer_chunked: the chunked loss never holds all logits, 14 bytes per token and vocabulary
            entry at the peak in 16 bit. On CPUs it is slower (benchmarks/README.md).

    Raises:
        ValueError: `chunked` was asked for and can't take effect.
    """
    if loss == "full" or (loss == "auto" and not prefer_chunked):
        return SummedLoss(network, chunked=False)
    obstacle = chunked_obstacle(network)
    if loss == "chunked" and obstacle:
        raise ValueError(f"model.loss=chunked can't take effect: {obstacle}; use full or auto")
    return SummedLoss(network, chunked=obstacle is None)


def chunked_obstacle(network: PreTrainedModel) -> str | None:
    """Why hidden state and head's matrix alone don't give the loss; None if they do.

    Some architectures scale or cap their logits. That is found by comparing logits once, on eight
    tokens.
    """
    if not HAS_CHUNKED:
        return f"torch {torch.__version__} has no linear_cross_entropy with options (2.13 has)"
    head: Any = network.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        return f"its head is {type(head).__name__}, not a matrix"
    if head.weight.is_meta:
        return "the model is on the meta device"
    ids = torch.arange(8, device=head.weight.device).remainder(network.config.vocab_size)[None]
    # Huge logits: a fresh model's are so small that a cap of 30 would hardly bend them.
    handle = head.register_forward_hook(lambda _, __, output: output * 1e4)
    try:
        logits = _probe(network, input_ids=ids)
        with _probing(network):
            expected = head(network.base_model(input_ids=ids, use_cache=False).last_hidden_state)
    finally:
        handle.remove()
    same = logits.shape == expected.shape and torch.allclose(logits, expected, rtol=1e-3, atol=1e-1)
    if not same:
        return f"{network.config.model_type} does more to its logits than the head's matrix"
    return None


def check_compiled() -> None:
    """Make sure that `model.compile` took effect; call it after the first update.

    Raises:
        ValueError: torch compiled nothing and fell back to running eagerly.
    """
    from torch._dynamo.utils import counters

    if not counters["stats"]["unique_graphs"]:
        raise ValueError(
            "model.compile=true had no effect: torch compiled no graph; set it to false"
        )


def count_parameters(network: nn.Module) -> int:
    """Parameters, tied ones once."""
    return sum(p.numel() for p in network.parameters())


def flops_per_token(network: PreTrainedModel, seq_len: int) -> float:
    """Model FLOPs per token, forward and backward: 6N + 12·L·h·T (PaLM, appendix B).

    Attention is counted whole, not causal.

    N counts tied embeddings once, since the same matrix works as the head; an untied input
    embedding is a look-up and is left out. Recomputation is not counted: this is for MFU, not HFU.
    """
    config = network.config
    used = count_parameters(network)
    embedding: Any = network.get_input_embeddings()
    head: Any = network.get_output_embeddings()
    if head is not None and head.weight is not embedding.weight:
        used -= embedding.weight.numel()
    layers, width = config.num_hidden_layers, config.hidden_size
    return 6.0 * used + 12.0 * layers * width * seq_len
