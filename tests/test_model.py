"""The model: its counts, its summed loss, and that nothing wrong is built in silence."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from recipes.config import Model
from recipes.diagnosis import first_non_finite
from recipes.model import (
    HAS_CHUNKED,
    SummedLoss,
    build_network,
    chunked_obstacle,
    count_parameters,
    flops_per_token,
    shape_faults,
    wrap,
)
from recipes.runfile import load_run

ROOT = Path(__file__).resolve().parent.parent
VOCAB = 101
GPT2 = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_embd": 32,
    "n_head": 2,
    "n_positions": 64,
    "vocab_size": VOCAB,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
}
GEMMA2 = LLAMA | {"model_type": "gemma2", "head_dim": 16, "final_logit_softcapping": 30.0}
needs_chunked = pytest.mark.skipif(not HAS_CHUNKED, reason="torch below 2.13 has no such operator")


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def build(config: dict[str, Any], **settings: Any) -> Any:
    """A network from scratch."""
    return build_network(Model(config=config, **settings), 0, 32, VOCAB)


def batch(rows: int = 3, length: int = 16) -> dict[str, torch.Tensor]:
    """Token numbers with shifted labels, some of which count for nothing."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB, (rows, length + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels[0, :5] = -100
    labels[-1, -1] = -100
    return {"input_ids": ids[:, :-1].contiguous(), "labels": labels}


def gradients(module: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Every parameter's gradient."""
    module.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


# ---- counts


def test_the_missions_model_has_its_1_557_611_200_parameters() -> None:
    model = load_run(ROOT / "recipes" / "runs" / "gpt2_xl.yaml").model
    keys = dict(model.config or {})
    config = AutoConfig.for_model(keys.pop("model_type"), **keys)
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    # 48 * (12 * 1600^2 + 13 * 1600) + 1600 * (50257 + 1024 + 2)
    assert count_parameters(network) == 1_557_611_200
    # 6 N + 12 L h T = 9,345,667,200 + 943,718,400
    assert flops_per_token(network, 1024) == 10_289_385_600.0
    assert chunked_obstacle(network) == "the model is on the meta device"


def test_flops_count_a_tied_matrix_once_and_leave_an_untied_look_up_out() -> None:
    # GPT-2: 2 * (12 * 32^2 + 13 * 32) + 32 * (101 + 64 + 2) = 30,752, all of it used
    tied = build(GPT2)
    assert count_parameters(tied) == 30_752
    assert flops_per_token(tied, 16) == 6 * 30_752 + 12 * 2 * 32 * 16
    # Llama: layer 32*32 q + 2 * 32*16 kv + 32*32 o + 3 * 32*64 mlp + 2 * 32 norms = 9,280;
    # two of them, the last norm's 32, and 32 * 101 for the input and for the head = 25,056
    untied = build(LLAMA)
    assert count_parameters(untied) == 25_056
    assert flops_per_token(untied, 16) == 6 * (25_056 - 32 * 101) + 12 * 2 * 32 * 16


# ---- the loss


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("loss", ["full", "auto", "chunked"])
def test_the_summed_loss_is_transformers_mean_times_the_count(
    config: dict[str, Any], loss: str
) -> None:
    if loss == "chunked" and not HAS_CHUNKED:
        pytest.skip("torch below 2.13 has no such operator")
    network = build(config)
    data = batch()
    total, count = wrap(network, loss, prefer_chunked=loss == "auto")(**data)
    assert count.item() == 3 * 16 - 6
    theirs = network(**data, shift_labels=data["labels"]).loss
    assert total.item() == pytest.approx(theirs.item() * count.item(), rel=1e-5)
    assert total.dtype == count.dtype == torch.float32 and total.shape == ()


def test_masked_labels_count_for_nothing_and_an_empty_window_is_zero() -> None:
    module = wrap(build(GPT2), "full", prefer_chunked=False)
    data = batch()
    whole, count = module(**data)
    per_row = [module(data["input_ids"][i : i + 1], data["labels"][i : i + 1]) for i in range(3)]
    assert sum(c.item() for _, c in per_row) == count.item()
    assert sum(t.item() for t, _ in per_row) == pytest.approx(whole.item(), rel=1e-6)
    empty, none = module(data["input_ids"], torch.full_like(data["labels"], -100))
    assert (empty.item(), none.item()) == (0.0, 0.0)


@needs_chunked
@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_the_chunked_loss_and_its_gradients_equal_the_full_ones(config: dict[str, Any]) -> None:
    network, data = build(config), batch()
    full, chunked = SummedLoss(network, chunked=False), SummedLoss(network, chunked=True)
    assert chunked(**data)[0].item() == pytest.approx(full(**data)[0].item(), rel=1e-6)
    expected, found = (gradients(module, module(**data)[0]) for module in (full, chunked))
    largest = max(value.abs().max().item() for value in expected.values())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6 * largest)


@needs_chunked
def test_the_chunked_loss_under_bf16_autocast_equals_the_full_one_loosely() -> None:
    network, data = build(GPT2), batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        full = SummedLoss(network, chunked=False)(**data)[0]
        chunked = SummedLoss(network, chunked=True)(**data)[0]
    assert chunked.dtype == torch.float32
    assert chunked.item() == pytest.approx(full.item(), rel=5e-3)


@needs_chunked
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_the_chunked_loss_of_8192_tokens_does_not_overflow_in_16_bit(dtype: torch.dtype) -> None:
    class Certain(nn.Module):
        """A network that is sure of token 0, whatever it reads."""

        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)
            nn.init.zeros_(self.head.weight)
            self.head.bias.data = 20.0 * F.one_hot(torch.tensor(0), 64).float()

        def base_model(self, input_ids: torch.Tensor, **_: Any) -> Any:
            return SimpleNamespace(last_hidden_state=self.embedding(input_ids))

        def get_output_embeddings(self) -> nn.Module:
            return self.head

    ids = 1 + torch.arange(8192).remainder(63).reshape(8, 1024)
    for network, autocast in ((Certain().to(dtype), False), (Certain(), True)):
        with torch.autocast("cpu", dtype=dtype, enabled=autocast):
            total, count = SummedLoss(network, chunked=True)(ids, ids)  # type: ignore[arg-type]
        # every loss is ln(e^20 + 63) = 20; 8,192 of them are more than fp16's 65,504
        assert (total.item(), count.item()) == (163_840.0, 8192.0)


@needs_chunked
def test_logits_that_are_capped_are_found_and_the_chunked_loss_refused() -> None:
    capped = GEMMA2 | {"final_logit_softcapping": 1.0, "initializer_range": 0.5}
    network = build(capped, attention="eager")
    assert "gemma2 does more to its logits" in (chunked_obstacle(network) or "")
    with pytest.raises(ValueError, match="model.loss=chunked can't take effect: gemma2 does more"):
        wrap(network, "chunked", prefer_chunked=True)
    assert wrap(network, "auto", prefer_chunked=True).chunked is False


@needs_chunked
def test_logits_that_are_capped_are_found_with_the_weights_of_a_fresh_start() -> None:
    network = build(GEMMA2, attention="eager")  # cap 30, deviation 0.02: as shipped by its authors
    assert chunked_obstacle(network) is not None


@needs_chunked
def test_the_loss_is_chosen_by_preference_unless_it_is_named() -> None:
    network = build(GPT2).train()
    assert wrap(network, "auto", prefer_chunked=True).chunked is True
    assert wrap(network, "auto", prefer_chunked=False).chunked is False
    assert wrap(network, "full", prefer_chunked=True).chunked is False
    assert wrap(network, "chunked", prefer_chunked=False).chunked is True
    assert network.training  # the look at eight tokens left no trace


def test_documents_of_one_row_do_not_see_each_other() -> None:
    module = SummedLoss(build(LLAMA), chunked=False)
    data = batch(rows=1, length=12)
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
    together, _ = module(**data, position_ids=positions)
    alone = sum(
        module(data["input_ids"][:, a:b], data["labels"][:, a:b])[0].item()
        for a, b in ((0, 5), (5, 12))
    )
    assert together.item() == pytest.approx(alone, rel=1e-5)
    assert module(**data)[0].item() != pytest.approx(alone, rel=1e-5)  # without positions they do


# ---- building


def test_the_seed_decides_the_weights() -> None:
    one, same, other = (
        next(build_network(Model(config=GPT2), seed, 32, VOCAB).parameters()) for seed in (1, 1, 2)
    )
    assert torch.equal(one, same) and not torch.equal(one, other)


@pytest.mark.parametrize("origin", ["config", "folder"])
def test_parameters_are_fp32_whatever_the_origin_says(origin: str, tmp_path: Path) -> None:
    if origin == "config":
        network = build(GPT2 | {"dtype": "float16"})
    else:
        saved = build(GPT2).half()
        saved.save_pretrained(tmp_path)
        network = build_network(Model(pretrained=str(tmp_path)), 0, 32, VOCAB)
        torch.testing.assert_close(network.state_dict(), saved.float().state_dict(), rtol=0, atol=0)
    assert {p.dtype for p in network.parameters()} == {torch.float32}
    assert network.config.use_cache is False


def test_a_pretrained_folder_gives_the_same_weights_and_the_same_loss(tmp_path: Path) -> None:
    network = build(LLAMA)
    network.save_pretrained(tmp_path)
    again = build_network(Model(pretrained=str(tmp_path)), 99, 32, VOCAB)
    torch.testing.assert_close(again.state_dict(), network.state_dict(), rtol=0, atol=0)
    one, other = (SummedLoss(n, chunked=False)(**batch())[0].item() for n in (network, again))
    assert one == other


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"config": {"model_type": "gpt3"}}, "did you mean gptj or gpt2 or gpt-sw3?"),
        ({"config": GPT2 | {"n_layers": 3}}, "model.config: n_layers is no key of gpt2"),
        ({"config": GPT2 | {"n_head": 3}}, "model gpt2 can't be built"),
        ({"config": GPT2 | {"n_head": "two"}}, "n_head"),
        ({"config": GPT2, "attention": "flex_attention"}, "model gpt2 can't be built"),
        ({"config": GPT2, "attention": "flash_attention_2"}, "model gpt2 can't be built"),
        ({"config": {"model_type": "vit"}}, "vit"),  # sees pictures
        ({"pretrained": "/nowhere/at/all"}, "model.pretrained='/nowhere/at/all' can't be read"),
    ],
)
def test_a_model_that_cannot_be_built_is_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError) as caught:
        build_network(Model(**settings), 0, 32, VOCAB)
    assert told in str(caught.value)


def test_a_model_whose_tokens_see_their_own_targets_is_refused() -> None:
    bert = LLAMA | {"model_type": "bert"}
    del bert["num_key_value_heads"]
    with pytest.raises(ValueError, match="bert"):
        build(bert)


def test_a_shape_that_does_not_fit_the_data_is_told_at_once() -> None:
    with pytest.raises(ValueError) as caught:
        build_network(Model(config=GPT2), 0, 65, VOCAB + 1)
    first, second = str(caught.value).split("\n")
    assert first == "batch.seq_len=65 is longer than the model's 64 positions; lower it"
    assert second.startswith("the tokenizer has 102 tokens but the model's vocab_size is 101; ")
    assert shape_faults(AutoConfig.for_model("gpt2", n_positions=64, vocab_size=101), 64, 101) == []


def test_gradient_checkpointing_takes_effect_and_gives_the_same_gradients() -> None:
    data, calls, found = batch(), [], []
    for checkpointing in (False, True):
        network = build(GPT2, gradient_checkpointing=checkpointing).train()
        module, runs = SummedLoss(network, chunked=False), []
        network.transformer.h[0].ln_1.register_forward_hook(lambda *_, runs=runs: runs.append(1))
        found.append(gradients(module, module(**data)[0]))
        calls.append(len(runs))
    assert calls == [1, 2]  # the layer runs again in backward
    keywords = network.transformer.h[0]._gradient_checkpointing_func.keywords
    assert keywords["use_reentrant"] is False  # the other kind loses the gradient under DDP
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


# ---- what went wrong


class Poison:
    """A forward hook that makes a module's output infinite from its n-th call on."""

    def __init__(self, call: int) -> None:
        self.calls, self.call = 0, call

    def __call__(self, _: nn.Module, __: Any, output: Any) -> Any:
        self.calls += 1
        if self.calls <= self.call:
            return output
        if isinstance(output, tuple):
            return (output[0] * float("inf"), *output[1:])
        return output * float("inf")


@pytest.mark.parametrize(
    "name", ["network.transformer.h.1.mlp.c_fc", "network.transformer.h.0.attn", "network.lm_head"]
)
def test_the_first_module_that_is_not_finite_is_named(name: str) -> None:
    module = SummedLoss(build(GPT2), chunked=False)
    module.get_submodule(name).register_forward_hook(Poison(call=1))
    told = first_non_finite(module, [batch(), batch(), batch()], 1.0)
    assert told == f"the output of {name} is not finite in micro-batch 1"


def test_a_loss_that_is_not_finite_while_all_outputs_are_is_told() -> None:
    class Impossible(SummedLoss):
        """Finite outputs and an infinite loss."""

        def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
            total, count = super().forward(*args, **kwargs)
            return total + float("inf"), count

    told = first_non_finite(Impossible(build(GPT2), chunked=False), [batch()], 1.0)
    assert told == "all outputs are finite but the loss is inf in micro-batch 0"


def test_a_gradient_that_overflows_is_named_where_backward_met_it_first() -> None:
    class Steep(torch.autograd.Function):
        """The identity with an infinite gradient."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * float("inf")

    module = SummedLoss(build(GPT2), chunked=False)
    steep = module.get_submodule("network.transformer.h.1.mlp.act")
    steep.register_forward_pre_hook(lambda _, inputs: (Steep.apply(inputs[0]),))
    told = first_non_finite(module, [batch()], 1.0)
    # backward passes the activation's output (finite), then what feeds it
    assert told == "the gradient at network.transformer.h.1.mlp.c_fc is not finite in micro-batch 0"


def test_when_all_is_finite_it_says_so_and_leaves_nothing_behind() -> None:
    module = SummedLoss(build(GPT2), chunked=False)
    assert "is finite" in first_non_finite(module, [batch(), batch()], 1.0)
    assert all(not m._forward_hooks for m in module.modules())
    assert all(p.grad is None for p in module.parameters())  # the engine's hooks did not fire


# ---- batch norm


def test_batch_norm_is_synchronised_where_it_can_be() -> None:
    from recipes.engine.build import _synchronised

    def synchronised(sync: str, world: int, device: str) -> nn.Module:
        path = ROOT / "recipes" / "runs" / "stdlib.yaml"
        run = load_run(path, [f"model.sync_batch_norm={sync}"])
        net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        return _synchronised(net, run, world, torch.device(device)).get_submodule("1")

    assert isinstance(synchronised("true", 2, "cuda"), nn.SyncBatchNorm)
    assert isinstance(synchronised("false", 2, "cpu"), nn.BatchNorm1d)
    assert isinstance(synchronised("true", 1, "cpu"), nn.BatchNorm1d)
    with pytest.raises(ValueError, match="can't be synchronised on the CPU; set model.sync_batch"):
        synchronised("true", 2, "cpu")


def test_a_model_without_batch_norm_is_left_as_it_is() -> None:
    from recipes.engine.build import _synchronised

    run, plain = load_run(ROOT / "recipes" / "runs" / "stdlib.yaml"), nn.LayerNorm(2)
    assert _synchronised(plain, run, 2, torch.device("cpu")) is plain
