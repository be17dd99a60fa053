"""What a trace of the real model counted, as plain numbers that the plan can use."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from recipes.planner.activations import head_bytes, layer_bytes
from recipes.planner.families import FAMILIES, shape_of
from recipes.planner.shape import Shape
from recipes.planner.workload import Candidate, Precision, Strategy, Workload


@dataclass(frozen=True, kw_only=True)
class Count:
    """Bytes by the micro-batch: a line from 2 on; one sequence, whose tensors are views, apart."""

    one: float
    fixed: float
    per_sequence: float

    def at(self, micro: int) -> float:
        """Bytes for `micro` sequences."""
        return self.one if micro == 1 else self.fixed + self.per_sequence * micro


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to run the model: `layer` of one layer, `head` of all else with the full loss."""

    attention: Literal["flash", "eager"]
    autocast: bool
    layer: Count
    head: Count


@dataclass(frozen=True, kw_only=True)
class Traced:
    """Bytes that autograd keeps of the real model, counted without a GPU.

    The plan scales its closed form by the ratio of count and closed form. Where a candidate is run
    as a traced variant is, that gives the count itself; elsewhere (tensor parallelism, fused
    kernels, the other attention) it is the closed form, corrected.
    """

    shape: Shape
    seq_len: int
    precision: Precision
    variants: tuple[Variant, ...]

    def layer_ratio(self, candidate: Candidate) -> float:
        """Counted bytes of a layer over those of the closed form."""
        variant = self._variant(candidate)
        work, alike = self._alike(variant, candidate.micro)
        return variant.layer.at(candidate.micro) / sum(layer_bytes(work, alike).values())

    def head_ratio(self, candidate: Candidate) -> float:
        """The same of embedding, final norm, head and full loss."""
        variant = self._variant(candidate)
        work, alike = self._alike(variant, candidate.micro)
        found = head_bytes(work, alike)
        kept = ("embedding", "final norm", "weight copies", "logits")
        return variant.head.at(candidate.micro) / sum(found[kind] for kind in kept)

    def _variant(self, candidate: Candidate) -> Variant:
        def distance(variant: Variant) -> tuple[bool, bool]:
            return (
                variant.attention != candidate.attention,
                variant.autocast != candidate.strategy.autocast,
            )

        return min(self.variants, key=distance)

    def _alike(self, variant: Variant, micro: int) -> tuple[Workload, Candidate]:
        """What the variant was traced as."""
        work = Workload(
            shape=self.shape,
            seq_len=self.seq_len,
            global_sequences=micro,
            precision=self.precision,
            loss="full",
        )
        strategy = _AUTOCAST if variant.autocast else _CAST
        return work, Candidate(strategy=strategy, micro=micro, attention=variant.attention)


_AUTOCAST = Strategy(name="traced", family="ddp")
_CAST = replace(_AUTOCAST, family="deepspeed")


def real_shape(config: Any, parameters: int) -> Shape:
    """The closed form's shape where it has the same parameters, else what the names say."""
    keys = config.to_dict()
    if config.model_type in FAMILIES:
        known = shape_of(keys, config.model_type)
        if known.parameters == parameters:
            return known
    width, heads = config.hidden_size, config.num_attention_heads
    shape = Shape(
        family=config.model_type,
        layers=config.num_hidden_layers,
        width=width,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or width // heads,
        ffn=getattr(config, "intermediate_size", None) or 4 * width,
        vocab=config.vocab_size,
        norm="rms" if hasattr(config, "rms_norm_eps") else "layer",
        tied=bool(config.tie_word_embeddings),
        activation=str(getattr(config, "hidden_act", "silu")),
        attention_dropout=float(getattr(config, "attention_dropout", 0.0) or 0.0),
        traced_parameters=parameters,
    )
    matrices = (parameters - shape.embedding_parameters) / shape.layers - shape.attention_matrices
    # Two matrices or three: whatever they are called.
    return replace(shape, gated=matrices > 2.5 * shape.width * shape.ffn)
