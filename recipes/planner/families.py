"""A decoder's shape, from a run file's `model.config` or a config.json, without transformers.

The closed forms know the architectures of `FAMILIES`. Other decoders that transformers builds are
counted on the real model by `octet plan --trace`, which makes its `Shape` too.
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

from recipes.config import Model
from recipes.planner.shape import Shape

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
        "attention_bias": True,
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
# What the families, and people, call one and the same number. A family takes no other's name: it
# would be ignored.
_ALIKE = (
    ("n_layer", "num_hidden_layers", "num_layers"),
    ("n_embd", "hidden_size", "d_model"),
    ("n_head", "num_attention_heads", "num_heads"),
    ("n_inner", "ffn_dim", "intermediate_size"),
    ("activation_function", "hidden_act"),
)
_NEAR = 0.75  # likeness (difflib's ratio) from which an unknown key is taken for a typing error
_DEPTH = ("n_layer", "num_hidden_layers")
MOST_LAYERS = 10_000  # ten times the deepest transformers that were trained (DeepNet's 1,000)
MOST = 10**9  # of any other number, so that no product of them leaves a float's range


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
        raise ValueError(no_configuration(model.pretrained))
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} can't be read as JSON: {error}") from error
    if not isinstance(tree, dict):
        raise ValueError(f"{path} holds {type(tree).__name__}, expected a model's configuration")
    return shape_of(tree, str(path))


def no_configuration(pretrained: str) -> str:
    """What is told of a model whose config.json is not at hand."""
    if Path(pretrained).is_dir():
        return f"model.pretrained={pretrained!r} has no config.json in it; add the model's"
    return (
        f"model.pretrained={pretrained!r} is no folder here; the plan reads shapes offline: fetch "
        f"its config.json once (hf download {pretrained} config.json --local-dir DIR) and plan "
        "with model.pretrained=DIR"
    )


def shape_of(config: dict[str, Any], where: str) -> Shape:
    """The shape that a transformers configuration describes (ValueError: all its faults)."""
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        near = difflib.get_close_matches(str(family), FAMILIES, n=1, cutoff=0.7)
        guess = f"did you mean {near[0]}? " if near else ""
        raise ValueError(
            f"{where}: model_type={family!r} has no closed form here; {guess}known: "
            f"{', '.join(FAMILIES)}; --trace counts other causal decoders with attention, on the "
            "real model"
        )
    synonyms = _SYNONYMS.get(family, {})
    given = {synonyms.get(key, key): value for key, value in config.items() if value is not None}
    values = FAMILIES[family] | {k: v for k, v in given.items() if k in FAMILIES[family]}
    faults = _mistyped(family, config, values, where) + _faults(family, values, where)
    if faults:
        raise ValueError("\n".join(faults))
    builders = {"gpt2": _gpt2, "opt": _opt, "gpt_neox": _gpt_neox}
    return builders.get(family, _llama_like)(family, values)


def _mistyped(family: str, config: dict[str, Any], values: dict[str, Any], where: str) -> list[str]:
    """Keys that nothing would read, where another was meant; other unknown ones are let pass."""
    known = {key: key for key in FAMILIES[family]} | _SYNONYMS.get(family, {})
    elsewhere = {key for keys in FAMILIES.values() for key in keys}
    faults = []
    for key in config.keys() - known.keys():
        group = next((names for names in _ALIKE if key in names), ())
        meant = next((name for name in group if name in FAMILIES[family]), None)
        if meant is None and key not in elsewhere:
            near = difflib.get_close_matches(key, known, n=1, cutoff=_NEAR)
            meant = near[0] if near else None
        if meant is not None and config[key] != values[known[meant]]:
            faults.append(f"{where}.{key}={config[key]!r:.80}: unknown key; did you mean {meant}?")
    return sorted(faults)


def _faults(family: str, values: dict[str, Any], where: str) -> list[str]:
    faults = []
    for key, default in FAMILIES[family].items():
        value = values[key]
        most = MOST_LAYERS if key in _DEPTH else MOST
        if isinstance(default, (bool, str)):
            fits = isinstance(value, type(default))
        elif isinstance(default, float):
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            fits = number and 0 <= value < 1
        else:
            counts = isinstance(value, int) and not isinstance(value, bool)
            fits = value is None or (counts and 0 < value <= most)
        if not fits:
            kind = {bool: "true or false", str: "a name", float: "a share from 0 to below 1"}
            expected = kind.get(type(default), f"a whole number from 1 to {most:,}")
            faults.append(f"{where}.{key}={value!r:.80}: expected {expected}")
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
    width = values["n_embd"]
    return Shape(
        **_common(family, values, width, values["n_layer"], values["n_head"]),
        ffn=values["n_inner"] or 4 * width,
        positions=values["n_positions"],
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        activation=values["activation_function"],
        dropout=max(values["resid_pdrop"], values["embd_pdrop"]),
        attention_dropout=values["attn_pdrop"],
        fused_qkv=True,
        softmax32=False,
    )


def _opt(family: str, values: dict[str, Any]) -> Shape:
    return Shape(
        **_hidden(family, values),
        ffn=values["ffn_dim"],
        positions=values["max_position_embeddings"] + 2,  # two rows that are never used
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        activation=values["activation_function"],
        dropout=values["dropout"],
        attention_dropout=values["attention_dropout"],
    )


def _gpt_neox(family: str, values: dict[str, Any]) -> Shape:
    return Shape(
        **_hidden(family, values),
        ffn=values["intermediate_size"],
        qkv_bias=values["attention_bias"],
        out_bias=values["attention_bias"],
        mlp_bias=True,
        activation=values["hidden_act"],
        dropout=values["hidden_dropout"],
        attention_dropout=values["attention_dropout"],
        parallel=True,
        fused_qkv=True,
    )


def _llama_like(family: str, values: dict[str, Any]) -> Shape:
    bias = values.get("attention_bias", family == "qwen2")
    return Shape(
        **_hidden(family, values),
        ffn=values["intermediate_size"],
        gated=True,
        norm="rms",
        qk_norm=family == "qwen3",
        qkv_bias=bias,
        out_bias=bias and family != "qwen2",
        mlp_bias=values.get("mlp_bias", False),
        activation=values["hidden_act"],
        attention_dropout=values["attention_dropout"],
    )


def _hidden(family: str, values: dict[str, Any]) -> dict[str, Any]:
    """`_common` under the names that all families but gpt2 use."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads")
    return _common(family, values, *(values[name] for name in names))


def _common(
    family: str, values: dict[str, Any], width: int, layers: int, heads: int
) -> dict[str, Any]:
    """The part of a shape that every family has."""
    return {
        "family": family,
        "layers": layers,
        "width": width,
        "heads": heads,
        "kv_heads": values.get("num_key_value_heads") or heads,
        "head_dim": values.get("head_dim") or width // heads,
        "vocab": values["vocab_size"],
        "tied": values["tie_word_embeddings"],
    }
