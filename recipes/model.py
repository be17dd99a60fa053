"""The model: built by transformers in fp32, wrapped so that head and loss lie inside, counted."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

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
            f"model.attention={model.attention} does not take effect for {config.model_type}: it uses "
            f"{network.config._attn_implementation}"
        )
    network.config.use_cache = False
    if model.gradient_checkpointing:
        if not network.supports_gradient_checkpointing:
            raise ValueError(
                f"model.gradient_checkpointing has no effect: {config.model_type} does not support it"
            )
        network.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
    return network.float()


def _config(model: Model) -> Any:
    try:
        if model.pretrained is not None:
            return AutoConfig.from_pretrained(model.pretrained, revision=model.revision or "main")
        keys = dict(model.config or {})
        kind = keys.pop("model_type")
        config = AutoConfig.for_model(kind, **keys)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"model {model.pretrained or (model.config or {}).get('model_type')!r} can't be described: {error}"
        ) from error
    known = AutoConfig.for_model(kind)
    unknown = [key for key in keys if not hasattr(known, key)]
    if unknown:
        raise ValueError(
            f"model.config: {', '.join(unknown)} is no key of {kind}; it would have no effect"
        )
    return config


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
            f"the tokenizer has {vocab_size} tokens but the model's vocab_size is {config.vocab_size}; raise "
            "model.config.vocab_size or take a smaller tokenizer"
        )
    return faults


def wrap(network: PreTrainedModel, loss: str, low_precision: bool) -> SummedLoss:
    """Choose how the loss is computed and wrap the network.

    `auto` takes the chunked loss in 16 bit, where it saves time and the logits' memory, if this
    torch has it and the model's head is a plain matrix.

    Raises:
        ValueError: `chunked` was asked for and can't take effect.
    """
    if loss == "full":
        return SummedLoss(network, chunked=False)
    obstacle = chunked_obstacle(network)
    if loss == "chunked" and obstacle:
        raise ValueError(f"model.loss=chunked can't take effect: {obstacle}; use full or auto")
    return SummedLoss(network, chunked=obstacle is None and (loss == "chunked" or low_precision))


def chunked_obstacle(network: PreTrainedModel) -> str | None:
    """Why the loss can't be computed from the last hidden state and the head's matrix; None if it can.

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
    was_training = network.training
    network.eval()
    with torch.no_grad():
        logits = network(input_ids=ids, use_cache=False).logits
        hidden = network.base_model(input_ids=ids, use_cache=False).last_hidden_state
    network.train(was_training)
    if logits.shape[-1] != head.weight.shape[0] or not torch.allclose(
        head(hidden), logits, atol=1e-4, rtol=1e-4
    ):
        return f"{network.config.model_type} does more to its logits than the head's matrix"
    return None


def count_parameters(network: nn.Module) -> int:
    """Parameters, tied ones once."""
    return sum(p.numel() for p in network.parameters())


def flops_per_token(network: PreTrainedModel, seq_len: int) -> float:
    """Model FLOPs of forward and backward per token: 6N + 12·L·h·T (PaLM, appendix B; attention counted whole).

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


def first_non_finite(
    module: SummedLoss, batches: list[dict[str, torch.Tensor]], run: Callable[[Any], Any]
) -> str:
    """Name the first module whose output, or whose gradient, is not finite, over these micro-batches.

    Args:
        run: calls the module as training does (autocast); gets a function without arguments.

    Returns:
        A sentence for the report.
    """
    outputs: list[tuple[str, torch.Tensor]] = []

    def note(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            tensor = (
                output[0]
                if isinstance(output, tuple)
                else getattr(output, "last_hidden_state", output)
            )
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                outputs.append((name, tensor))

        return hook

    handles = [m.register_forward_hook(note(name)) for name, m in module.named_modules() if name]
    try:
        for index, batch in enumerate(batches):
            outputs.clear()
            loss, _ = run(lambda batch=batch: module(**batch))
            for name, tensor in outputs:
                if not torch.isfinite(tensor).all():
                    return f"the output of {name} is not finite in micro-batch {index}"
            if not torch.isfinite(loss):
                return f"all modules' outputs are finite but the loss is {float(loss)} in micro-batch {index}"
    finally:
        for handle in handles:
            handle.remove()
    return "every module's output and loss is finite; the gradient overflows in backward"
