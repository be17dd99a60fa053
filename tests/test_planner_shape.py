"""Shapes against the real models' parameters, and activation functions against torch's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from operator_bytes import Counting
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.activations import ACT2FN

from recipes.config import Model
from recipes.model import count_parameters, flops_per_token
from recipes.planner.families import FAMILIES, read_shape, shape_of
from recipes.planner.functions import ACTIVATIONS
from recipes.planner.standin import as_on_gpu

SMALL = {"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6, "vocab_size": 500}
GPT2 = {"n_embd": 96, "n_layer": 3, "n_head": 6, "vocab_size": 500, "n_positions": 64}
CASES: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", **GPT2},
    "gpt2 inner": {"model_type": "gpt2", **GPT2, "n_inner": 100},
    "gpt2 untied": {"model_type": "gpt2", **GPT2, "tie_word_embeddings": False},
    "opt": {
        **{"model_type": "opt", **SMALL, "ffn_dim": 200, "max_position_embeddings": 64},
        **{"word_embed_proj_dim": 96, "pad_token_id": 1},
    },
    "gpt_neox": {"model_type": "gpt_neox", **SMALL, "intermediate_size": 200},
    "gpt_neox tied": {
        **{"model_type": "gpt_neox", **SMALL, "intermediate_size": 200},
        "tie_word_embeddings": True,
    },
    "gpt_neox no biases": {
        **{"model_type": "gpt_neox", **SMALL, "intermediate_size": 200},
        "attention_bias": False,
    },
    "llama": {"model_type": "llama", **SMALL, "intermediate_size": 200},
    "llama grouped": {"model_type": "llama", **SMALL, "num_key_value_heads": 2},
    "llama biases": {"model_type": "llama", **SMALL, "attention_bias": True, "mlp_bias": True},
    "llama wide heads": {"model_type": "llama", **SMALL, "head_dim": 32},
    "mistral": {"model_type": "mistral", **SMALL, "num_key_value_heads": 3},
    "qwen2": {"model_type": "qwen2", **SMALL, "num_key_value_heads": 2},
    "qwen3": {"model_type": "qwen3", **SMALL, "num_key_value_heads": 2, "head_dim": 48},
    "qwen3 biases": {
        **{"model_type": "qwen3", **SMALL, "num_key_value_heads": 2},
        **{"attention_bias": True, "tie_word_embeddings": True},
    },
}


def build(config: dict[str, Any]) -> Any:
    """The real model, without memory."""
    keys = dict(config)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(keys.pop("model_type"), **keys)
        )


@pytest.mark.parametrize("config", CASES.values(), ids=list(CASES))
def test_parameters_and_flops_are_the_real_model_s(config: dict[str, Any]) -> None:
    network, shape = build(config), shape_of(config, "model.config")
    assert shape.parameters == count_parameters(network)
    assert shape.flops_per_token(64) == flops_per_token(network, 64)


@pytest.mark.parametrize("config", CASES.values(), ids=list(CASES))
def test_a_config_json_gives_the_same_shape(config: dict[str, Any], tmp_path: Path) -> None:
    keys = dict(config)
    AutoConfig.for_model(keys.pop("model_type"), **keys).save_pretrained(tmp_path)
    stored = read_shape(Model(pretrained=str(tmp_path)))
    assert stored.parameters == shape_of(config, "model.config").parameters
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == stored.family


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_transformers_own(family: str) -> None:
    """But for keys that transformers derives from others where they are not given."""
    theirs = AutoConfig.for_model(family)
    derived = {key for key, value in FAMILIES[family].items() if value is None}
    for key in FAMILIES[family].keys() - derived:
        assert getattr(theirs, key) == FAMILIES[family][key], key


@pytest.mark.parametrize("family", FAMILIES)
def test_no_key_of_transformers_is_taken_for_a_typing_error(family: str) -> None:
    keys = AutoConfig.for_model(family).to_dict()
    assert shape_of(keys, "x") == shape_of({"model_type": family}, "x")


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"model_type": "gpt2", "n_layers": 4}, "x.n_layers=4: unknown key; did you mean n_layer?"),
        ({"model_type": "gpt2", "num_layers": 4}, "did you mean n_layer?"),
        ({"model_type": "gpt2", "intermediate_size": 64}, "did you mean n_inner?"),
        ({"model_type": "llama", "n_layer": 4}, "did you mean num_hidden_layers?"),
        ({"model_type": "llama", "num_key_value_head": 4}, "did you mean num_key_value_heads?"),
        ({"model_type": "llama", "ffn_dim": 4}, "did you mean intermediate_size?"),
        ({"model_type": ["llama"]}, "model_type=['llama'] has no closed form"),
        ({"model_type": None}, "model_type=None has no closed form"),
        ({"model_type": "gpt2", "n_layer": 10_001}, "expected a whole number from 1 to 10,000"),
        ({"model_type": "gpt2", "vocab_size": 10**400}, "from 1 to 1,000,000,000"),
        ({"model_type": "gpt2", "attn_pdrop": True}, "expected a share from 0"),
    ],
)
def test_a_key_or_value_that_would_mislead_is_refused(config: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError) as caught:
        shape_of(config, "x")
    assert told in str(caught.value)


def test_a_key_that_means_nothing_here_is_let_pass() -> None:
    plain = shape_of({"model_type": "gpt2"}, "x")
    assert shape_of({"model_type": "gpt2", "bos_token_id": 0, "rope_theta": 1e4}, "x") == plain
    assert shape_of({"model_type": "gpt2", "num_layers": 12}, "x") == plain  # says the same
    assert shape_of({"model_type": "gpt2", "num_hidden_layers": 2}, "x").layers == 2


def test_gpt2_xl_s_parameters_by_hand() -> None:
    """48 layers of 12h² matrices, 9h + 4h biases and 4h norms; tables; the final norm."""
    h = 1600
    layer = 12 * h * h + 9 * h + 4 * h
    tables = (50257 + 1024) * h
    shape = shape_of({"model_type": "gpt2", "n_layer": 48, "n_embd": h, "n_head": 25}, "x")
    assert shape.parameters == 48 * layer + tables + 2 * h == 1_557_611_200


def saved(name: str, gated: bool, dtype: torch.dtype, autocast: bool) -> float:
    """Bytes per element that autograd keeps between two matrix products, counted on fake tensors.

    The first product's input and the matrices are left out, with autocast's copies of them.
    """
    n, low = 64, torch.bfloat16
    kept: dict[int, torch.UntypedStorage] = {}
    with FakeTensorMode():
        inputs = torch.zeros(n, n, dtype=dtype, requires_grad=True)
        matrices = [torch.zeros(n, n, dtype=dtype, requires_grad=True) for _ in range(3)]
        known = {t.untyped_storage()._cdata for t in (inputs, *matrices)}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                kept[storage._cdata] = storage
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t)
        cast = torch.autocast("cpu", low, enabled=autocast)
        with hooks, cast, as_on_gpu(low if autocast else None):
            inner = ACT2FN[name](F.linear(inputs, matrices[0]))
            if gated:
                inner = inner * F.linear(inputs, matrices[1])
            F.linear(inner, matrices[2])
    copies = (2 * (4 if gated else 3)) if autocast else 0  # of the input and of the matrices
    return sum(storage.nbytes() for storage in kept.values()) / n**2 - copies


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_what_an_activation_function_saves(name: str) -> None:
    entry = ACTIVATIONS[name]
    low, full = torch.bfloat16, torch.float32
    for gated in (False, True):
        tensors = entry.tensors + (2 if gated else 0)
        assert saved(name, gated, low, autocast=False) == 2 * tensors
        assert saved(name, gated, full, autocast=False) == 4 * tensors
    assert saved(name, False, full, autocast=True) == entry.autocast
    assert saved(name, True, full, autocast=True) == entry.gated


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_what_the_kernels_of_an_activation_function_move(name: str) -> None:
    n = 1000
    inputs = torch.randn(n, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.ones(n, dtype=torch.bfloat16)
    with Counting() as counting:
        output = ACT2FN[name](inputs)
        counting.side = "backward"
        torch.autograd.grad(output, inputs, gradient)
    moved = [round(counting.bytes[side] / (2 * n)) for side in ("forward", "backward")]
    assert moved == [ACTIVATIONS[name].forward, ACTIVATIONS[name].backward]


def test_the_table_of_activations_is_whole() -> None:
    """All of transformers' names but those with parameters, or of no use in a decoder."""
    from transformers.activations import ACT2CLS

    left_out = {"prelu", "xielu", "sqrtsoftplus"}
    assert set(ACT2CLS) - left_out == set(ACTIVATIONS)
