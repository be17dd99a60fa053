"""A decoder's shape, from a run file's `model.config` or a config.json, without transformers.

The closed forms know the architectures of `FAMILIES`. Any other that transformers builds is counted
on the real model by `octet plan --trace`, which makes its `Shape` too.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from recipes.config import Model

# Defaults of transformers' configuration classes, which a run file may leave out;
# tests/test_planner_shape.py holds them to the installed version. None: derived from other keys.
_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_inner": None,
        "activation_function": "gelu_new",
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "tie_word_embeddings": True,
    },
    "opt": {
        "vocab_size": 50272,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "ffn_dim": 3072,
        "max_position_embeddings": 2048,
        "num_attention_heads": 12,
        "activation_function": "relu",
        "dropout": 0.1,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
    },
    "gpt_neox": {
        "vocab_size": 50432,
        "hidden_size": 6144,
        "num_hidden_layers": 44,
        "num_attention_heads": 64,
        "intermediate_size": 24576,
        "hidden_act": "gelu",
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "tie_word_embeddings": False,
    },
    "llama": _LLAMA | {"attention_bias": False, "mlp_bias": False},
    "mistral": _LLAMA | {"intermediate_size": 14336, "num_key_value_heads": 8},
    "qwen2": _LLAMA | {"vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32},
    "qwen3": _LLAMA
    | {
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "attention_bias": False,
    },
}
# Names that mean the same key in some families.
_SYNONYMS = {
    "gpt2": {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
    }
}


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


def read_shape(model: Model) -> Shape:
    """The shape of a run file's model.

    Raises:
        ValueError: every fault of its configuration; an unknown architecture; a hub name without a
            config.json at hand.
    """
    if model.config is not None:
        return shape_of(dict(model.config), "model.config")
    assert model.pretrained is not None
    folder = Path(model.pretrained)
    path = folder / "config.json" if folder.is_dir() else folder
    if not path.is_file():
        raise ValueError(
            f"model.pretrained={model.pretrained!r} is no folder here; the plan reads shapes "
            f"offline: fetch its config.json once (hf download {model.pretrained} config.json "
            "--local-dir DIR) and plan with model.pretrained=DIR"
        )
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} can't be read as JSON: {error}") from error
    if not isinstance(tree, dict):
        raise ValueError(f"{path} holds {type(tree).__name__}, expected a model's configuration")
    return shape_of(tree, str(path))


def shape_of(config: dict[str, Any], where: str) -> Shape:
    """The shape that a transformers configuration describes (ValueError: all its faults)."""
    family = config.get("model_type")
    if family not in FAMILIES:
        near = difflib.get_close_matches(str(family), FAMILIES, n=1, cutoff=0.7)
        guess = f"did you mean {near[0]}? " if near else ""
        raise ValueError(
            f"{where}: model_type={family!r} has no closed form here; {guess}known: "
            f"{', '.join(FAMILIES)}; any other architecture is counted by --trace"
        )
    synonyms = _SYNONYMS.get(family, {})
    given = {synonyms.get(key, key): value for key, value in config.items() if value is not None}
    values = FAMILIES[family] | {k: v for k, v in given.items() if k in FAMILIES[family]}
    faults = _faults(family, values, where)
    if faults:
        raise ValueError("\n".join(faults))
    builders = {"gpt2": _gpt2, "opt": _opt, "gpt_neox": _gpt_neox}
    return builders.get(family, _llama_like)(family, values)


def _faults(family: str, values: dict[str, Any], where: str) -> list[str]:
    faults = []
    for key, default in FAMILIES[family].items():
        value = values[key]
        if isinstance(default, (bool, str)):
            fits = isinstance(value, type(default))
        elif isinstance(default, float):
            fits = isinstance(value, (int, float)) and 0 <= value < 1
        else:
            counts = isinstance(value, int) and not isinstance(value, bool) and value > 0
            fits = counts or value is None
        if not fits:
            kind = {bool: "true or false", str: "a name", float: "a share from 0 to below 1"}
            expected = kind.get(type(default), "a positive whole number")
            faults.append(f"{where}.{key}={value!r}: expected {expected}")
    if faults:
        return faults
    width = values.get("n_embd") or values.get("hidden_size")
    heads = values.get("n_head") or values.get("num_attention_heads")
    assert isinstance(width, int) and isinstance(heads, int)
    if values.get("head_dim") is None and width % heads:
        faults.append(f"{where}: a width of {width} can't be divided among {heads} heads")
    kv_heads = values.get("num_key_value_heads") or heads
    if heads % kv_heads:
        faults.append(f"{where}: {heads} heads can't share {kv_heads} key-value heads equally")
    return faults


def _gpt2(family: str, values: dict[str, Any]) -> Shape:
    width, heads = values["n_embd"], values["n_head"]
    return Shape(
        family=family,
        layers=values["n_layer"],
        width=width,
        heads=heads,
        kv_heads=heads,
        head_dim=width // heads,
        ffn=values["n_inner"] or 4 * width,
        vocab=values["vocab_size"],
        positions=values["n_positions"],
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied=values["tie_word_embeddings"],
        activation=values["activation_function"],
        dropout=max(values["resid_pdrop"], values["embd_pdrop"]),
        attention_dropout=values["attn_pdrop"],
        fused_qkv=True,
        softmax32=False,
    )


def _opt(family: str, values: dict[str, Any]) -> Shape:
    width, heads = values["hidden_size"], values["num_attention_heads"]
    return Shape(
        family=family,
        layers=values["num_hidden_layers"],
        width=width,
        heads=heads,
        kv_heads=heads,
        head_dim=width // heads,
        ffn=values["ffn_dim"],
        vocab=values["vocab_size"],
        positions=values["max_position_embeddings"] + 2,  # two rows that are never used
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied=values["tie_word_embeddings"],
        activation=values["activation_function"],
        dropout=values["dropout"],
        attention_dropout=values["attention_dropout"],
    )


def _gpt_neox(family: str, values: dict[str, Any]) -> Shape:
    width, heads = values["hidden_size"], values["num_attention_heads"]
    return Shape(
        family=family,
        layers=values["num_hidden_layers"],
        width=width,
        heads=heads,
        kv_heads=heads,
        head_dim=width // heads,
        ffn=values["intermediate_size"],
        vocab=values["vocab_size"],
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied=values["tie_word_embeddings"],
        activation=values["hidden_act"],
        dropout=values["hidden_dropout"],
        attention_dropout=values["attention_dropout"],
        parallel=True,
        fused_qkv=True,
    )


def _llama_like(family: str, values: dict[str, Any]) -> Shape:
    width, heads = values["hidden_size"], values["num_attention_heads"]
    bias = values.get("attention_bias", family == "qwen2")
    return Shape(
        family=family,
        layers=values["num_hidden_layers"],
        width=width,
        heads=heads,
        kv_heads=values["num_key_value_heads"] or heads,
        head_dim=values["head_dim"] or width // heads,
        ffn=values["intermediate_size"],
        vocab=values["vocab_size"],
        gated=True,
        norm="rms",
        qk_norm=family == "qwen3",
        qkv_bias=bias,
        out_bias=bias and family != "qwen2",
        mlp_bias=values.get("mlp_bias", False),
        tied=values["tie_word_embeddings"],
        activation=values["hidden_act"],
        attention_dropout=values["attention_dropout"],
    )
