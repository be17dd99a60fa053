"""The closed form of activations against the real transformers model on fake tensors."""

from __future__ import annotations

import dataclasses
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from planner_cases import candidate, cluster, work
from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions
from transformers import AutoConfig

from recipes.config import Model
from recipes.model import count_parameters
from recipes.planner.activations import chunk_rows
from recipes.planner.families import shape_of
from recipes.planner.memory import plan_memory
from recipes.planner.traced import Traced
from recipes.planner.tracing import trace
from recipes.planner.workload import Candidate, Precision, Strategy

SMALL = {
    **{"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 2000},
    **{"intermediate_size": 1408},
}
GPT2 = {
    **{"model_type": "gpt2", "n_embd": 512, "n_layer": 4, "n_head": 8, "vocab_size": 2000},
    **{"bos_token_id": 0, "eos_token_id": 0},
}
DRY = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
CASES: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "gpt2 dry": {**GPT2, **DRY},
    "gpt2 one kernel": {**GPT2, "activation_function": "gelu_pytorch_tanh"},
    "gpt2 relu": {**GPT2, **DRY, "activation_function": "relu"},
    "opt": {
        **{"model_type": "opt", **SMALL, "ffn_dim": 1408, "word_embed_proj_dim": 512},
        **{"pad_token_id": 1},
    },
    "opt attention dropout": {
        **{"model_type": "opt", **SMALL, "ffn_dim": 1408, "word_embed_proj_dim": 512},
        **{"pad_token_id": 1, "dropout": 0.0, "attention_dropout": 0.1},
    },
    "gpt_neox": {"model_type": "gpt_neox", **SMALL},
    "gpt_neox dropout": {"model_type": "gpt_neox", **SMALL, "hidden_dropout": 0.1},
    "llama": {"model_type": "llama", **SMALL},
    "llama grouped": {
        **{"model_type": "llama", **SMALL, "num_key_value_heads": 2, "attention_bias": True},
        **{"mlp_bias": True, "attention_dropout": 0.1, "hidden_act": "gelu_new"},
    },
    "llama odd heads": {"model_type": "llama", **SMALL, "head_dim": 60},
    "mistral": {"model_type": "mistral", **SMALL, "num_key_value_heads": 2},
    "qwen2": {"model_type": "qwen2", **SMALL, "num_key_value_heads": 4},
    "qwen3": {"model_type": "qwen3", **SMALL, "num_key_value_heads": 2, "head_dim": 96},
}
Attention = Literal["flash", "eager"]


def run_as(autocast: bool, micro: int, attention: Attention = "flash") -> Candidate:
    """DDP where autocast casts, ZeRO-1 where weights are 16 bit."""
    strategy = Strategy(name="", family="ddp" if autocast else "deepspeed", stage=0)
    return Candidate(strategy=strategy, micro=micro, attention=attention)


def traced(
    config: dict[str, Any], precision: Precision = "bf16", attention: Attention = "flash"
) -> Traced:
    """Sequences of 256 tokens."""
    kind = "eager" if attention == "eager" else "sdpa"
    return trace(Model(config=config, attention=kind), precision, False, attention, 256)


@pytest.mark.parametrize("attention", ["flash", "eager"])
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("config", CASES.values(), ids=list(CASES))
def test_the_closed_form_is_the_real_model_s(
    config: dict[str, Any], precision: Precision, attention: Attention
) -> None:
    found = traced(config, precision, attention)
    assert found.shape == shape_of(config, "")  # the known family's, not one read off the names
    for variant in found.variants:
        for micro in (1, 2, 7):
            chosen = run_as(variant.autocast, micro, attention)
            assert found.layer_ratio(chosen) == pytest.approx(1, abs=0.001)
            # GPT-NeoX turns a quarter of a head, OPT has no dropout behind its embedding: in a head
            # that is small beside 2,000 tokens.
            assert found.head_ratio(chosen) == pytest.approx(1, abs=0.06)
            layers = found.shape.layers * variant.layer.at(micro)
            whole = layers + variant.head.at(micro)
            head = variant.head.at(micro) / found.head_ratio(chosen)
            closed = layers / found.layer_ratio(chosen) + head
            assert closed == pytest.approx(whole, rel=0.01)


def test_both_ways_to_compute_are_traced_the_asked_one_first() -> None:
    model = Model(config={**GPT2, **DRY})
    for asked in (False, True):
        found = trace(model, "fp16", asked, "flash", 256)
        assert [v.autocast for v in found.variants] == [asked, not asked]
    assert len(trace(model, "fp32", True, "flash", 256).variants) == 1


def test_korthikanti_s_34_bytes_are_in_the_real_gpt2() -> None:
    """With its 24·s·b·h of an unfused activation: 58, and 5·a·s²·b of eager attention."""
    tokens, width = 256, 512
    flash = traced(GPT2).variants[0].layer.per_sequence
    assert flash / (tokens * width) == pytest.approx(58 + 4 * 8 / 512, rel=1e-3)
    eager = traced(GPT2, attention="eager").variants[0].layer.per_sequence
    assert eager == pytest.approx(58 * tokens * width + 5 * 8 * tokens**2, rel=1e-3)


@pytest.mark.parametrize("config", [GPT2, CASES["llama"]], ids=["gpt2", "llama"])
def test_checkpointing_keeps_one_tensor_a_layer(config: dict[str, Any]) -> None:
    """Counted on the real model with fake tensors: two bytes a token and width."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import AutoModelForCausalLM

    kept = []
    for layers in (1, 3):
        keys = {**config, "n_layer" if "n_layer" in config else "num_hidden_layers": layers}
        made = AutoConfig.for_model(keys.pop("model_type"), **keys)
        seen: dict[int, torch.UntypedStorage] = {}
        with FakeTensorMode(allow_non_fake_inputs=True):
            network = AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16).train()
            network.gradient_checkpointing_enable({"use_reentrant": False})
            known = {p.untyped_storage()._cdata for p in network.parameters()}

            def keep(tensor: torch.Tensor, seen: Any = seen, known: Any = known) -> torch.Tensor:
                if (storage := tensor.untyped_storage())._cdata not in known:
                    seen[storage._cdata] = storage
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
                network.base_model(input_ids=torch.zeros((2, 256), dtype=torch.long))
        kept.append(sum(storage.nbytes() for storage in seen.values()))
    assert (kept[1] - kept[0]) / 2 == pytest.approx(2 * 2 * 256 * 512, rel=0.01)


# ---- architectures without a closed form

OTHERS: dict[str, dict[str, Any]] = {
    "olmo2": {"model_type": "olmo2", **SMALL, "num_key_value_heads": 2},
    "phi3": {"model_type": "phi3", **SMALL, "num_key_value_heads": 2, "pad_token_id": 1},
    "gemma2": {"model_type": "gemma2", **SMALL, "num_key_value_heads": 2, "head_dim": 64},
    "bloom": {
        **{"model_type": "bloom", "hidden_size": 512, "n_head": 8, "n_layer": 4},
        "vocab_size": 2000,
    },
}


@pytest.mark.parametrize("name", OTHERS)
def test_any_architecture_is_counted_and_planned_with(name: str) -> None:
    config = OTHERS[name]
    found = traced(config, attention="eager")
    keys = dict(config)
    made = AutoConfig.for_model(keys.pop("model_type"), **keys)
    with torch.device("meta"):
        from transformers import AutoModelForCausalLM

        number = count_parameters(AutoModelForCausalLM.from_config(made))
    shape = found.shape
    assert shape.parameters == number and shape.family == name
    assert shape.gated is (name != "bloom")
    planned = work(shape, seq_len=256, loss="full", precision="bf16")
    for variant in found.variants:
        chosen = run_as(variant.autocast, 5, "eager")
        plan = plan_memory(planned, chosen, cluster(), traced=found)
        forward = plan.phases[0]
        names = ("activations", "logits")
        kept = sum(i.bytes for i in forward.items if i.kind in names and i.name != "loss forward")
        mask = next(i.bytes for i in forward.items if i.name == "causal mask")
        counted = shape.layers * variant.layer.at(5) + variant.head.at(5)
        assert kept - mask == pytest.approx(counted, rel=1e-6)
        assert plan.allocated.source == "traced"


def test_layers_that_differ_are_averaged_over_the_whole_depth() -> None:
    """Gemma 3's every sixth layer sees all tokens, with a mask of its own."""
    from recipes.planner import tracing as module

    model = Model(
        config={"model_type": "gemma3_text", **SMALL, "num_hidden_layers": 6}, attention="eager"
    )
    found = trace(model, "bf16", False, "eager", 256)
    way = module._Way(precision="bf16", autocast=False, attention="eager", seq_len=256)
    counted = [module._saved(module._config(model), n, 1, way)[0] for n in (1, 2, 5, 6)]
    assert counted[3] - counted[2] != counted[1] - counted[0]
    variant = found.variants[0]
    assert 6 * variant.layer.at(1) + variant.head.at(1) == pytest.approx(counted[3], rel=1e-9)


def test_a_folder_with_a_config_is_traced(tmp_path: Path) -> None:
    keys = dict(CASES["mistral"])
    AutoConfig.for_model(keys.pop("model_type"), **keys).save_pretrained(tmp_path)
    found = trace(Model(pretrained=str(tmp_path)), "bf16", False, "flash", 256)
    assert found.variants == traced(CASES["mistral"]).variants


def test_a_trace_is_plain_numbers() -> None:
    found = traced(GPT2)
    assert pickle.loads(pickle.dumps(found)) == found
    assert json.loads(json.dumps(dataclasses.asdict(found)))["seq_len"] == 256


def test_a_trace_corrects_what_was_not_traced() -> None:
    """Tensor parallelism and the other attention: the closed form by the traced ratio."""
    found = traced(OTHERS["olmo2"])
    planned = work(found.shape, seq_len=256, precision="bf16")
    one, two = (
        candidate(Strategy(name="", family="sharded", tensor=t, sequence=True), micro=2)
        for t in (1, 2)
    )
    whole, half = (plan_memory(planned, c, cluster(), traced=found).phases[0] for c in (one, two))
    names = ("norms", "attention", "feed-forward")
    sizes = [sum(i.bytes for i in p.items if i.name in names) for p in (whole, half)]
    assert sizes[1] == pytest.approx(sizes[0] / 2, rel=0.01)


# ---- refusals


@pytest.mark.parametrize(
    ("config", "attention", "reason"),
    [
        ({"model_type": "mixtral", **SMALL}, "eager", "num_local_experts=8.*depends on the data"),
        ({"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2}, "eager", "no attent"),
        (OTHERS["bloom"], "flash", "an attention of its own.*other model.attention"),
        (OTHERS["gemma2"], "flash", "caps its attention scores.*eager or flash_attention_2"),
        ({"model_type": "smollm3", **SMALL}, "eager", "can't be counted.*[Pp]adding_idx"),
        ({"model_type": "no_such"}, "eager", "no_such has no usable configuration"),
        ({"model_type": "bert"}, "eager", "bert reads to both sides"),
        ({"model_type": "t5"}, "eager", "t5 is no causal language model"),
        ({"model_type": "gpt2", "n_layers": 3}, "eager", "did you mean n_layer"),
    ],
)
def test_what_would_be_counted_wrong_is_refused(
    config: dict[str, Any], attention: Attention, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        traced(config, attention=attention)


def test_the_process_is_as_before() -> None:
    from transformers.utils import logging

    before = logging.get_verbosity(), torch.get_default_dtype()
    traced(GPT2)
    assert (logging.get_verbosity(), torch.get_default_dtype()) == before
    assert not torch.is_autocast_enabled("cpu")


def test_nothing_loads_torch_before_a_trace() -> None:
    code = (
        "import sys, recipes.planner.tracing, recipes.planner.memory; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("tokens", "width", "vocab"),
    [(16384, 1600, 50257), (1024, 768, 50257), (8192, 4096, 128256), (8, 64, 500), (5, 512, 300)],
)
def test_the_chunks_are_torch_s(tokens: int, width: int, vocab: int) -> None:
    options = LinearCrossEntropyOptions()._adjust(tokens, width, vocab, torch.float32)
    assert options.acc_policy == "compact"
    assert options.batch_chunk_size == chunk_rows(tokens, width, vocab)
