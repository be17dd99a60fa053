"""A decoder's shape in plain numbers: what memory, arithmetic and traffic depend on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What memory, arithmetic and traffic depend on. Widths and counts are elements.

    Attributes:
        family: a key of FAMILIES, or another model_type whose numbers were traced.
        ffn: inner width of the feed-forward part; `gated`: it has a third matrix (SwiGLU).
        positions: rows of a learned position table; 0 for rotary positions.
        tied: one matrix is both embedding and head.
        activation: transformers' name; `gelu_new` runs as eight kernels, others as one.
        dropout, attention_dropout: probabilities.
        parallel: attention and feed-forward part read the same input (GPT-NeoX).
        fused_qkv: queries, keys and values come from one matrix.
        softmax32: eager attention's softmax runs in fp32 whatever its input is.
        traced_parameters: counted on the real model, for families without a closed form.
    """

    family: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    positions: int = 0
    gated: bool = False
    norm: Literal["layer", "rms"] = "layer"
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    tied: bool = False
    activation: str = "silu"
    dropout: float = 0.0
    attention_dropout: float = 0.0
    parallel: bool = False
    fused_qkv: bool = False
    softmax32: bool = True
    traced_parameters: int | None = None

    @property
    def kv_width(self) -> int:
        """Width of keys, and of values."""
        return self.kv_heads * self.head_dim

    @property
    def attention_width(self) -> int:
        """Width of queries and of the attention's output."""
        return self.heads * self.head_dim

    @property
    def attention_matrices(self) -> int:
        """Elements of one layer's attention matrices."""
        return self.width * (2 * self.attention_width + 2 * self.kv_width)

    @property
    def mlp_matrices(self) -> int:
        """Elements of one layer's feed-forward matrices."""
        return (3 if self.gated else 2) * self.width * self.ffn

    @property
    def norm_size(self) -> int:
        """Elements of one norm over the width."""
        return self.width * (2 if self.norm == "layer" else 1)

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer."""
        biases = 0
        if self.qkv_bias:
            biases += self.attention_width + 2 * self.kv_width
        if self.out_bias:
            biases += self.width
        if self.mlp_bias:
            biases += (2 if self.gated else 1) * self.ffn + self.width
        norms = 2 * self.norm_size + (2 * self.head_dim if self.qk_norm else 0)
        return self.attention_matrices + self.mlp_matrices + biases + norms

    @property
    def embedding_parameters(self) -> int:
        """Parameters of token and position tables, and of an untied head."""
        return self.vocab * self.width * (1 if self.tied else 2) + self.positions * self.width

    @property
    def parameters(self) -> int:
        """All parameters, tied ones once."""
        if self.traced_parameters is not None:
            return self.traced_parameters
        return self.layers * self.layer_parameters + self.embedding_parameters + self.norm_size

    def flops_per_token(self, seq_len: int) -> float:
        """Model FLOPs per token, forward and backward: 6N + 12·L·h·T (PaLM, appendix B).

        As `recipes.model.flops_per_token`, to which a test holds it: attention counted whole, an
        untied input embedding left out, recomputation not counted.
        """
        used = self.parameters - (0 if self.tied else self.vocab * self.width)
        return 6.0 * used + 12.0 * self.layers * self.width * seq_len
