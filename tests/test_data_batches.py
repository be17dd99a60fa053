"""Batches: labels, positions and the isolation of documents in real models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from recipes.data.batches import collate, count_labels
from recipes.data.lanes import Cursor, Sequence
from recipes.data.packing import pack_best_fit, pack_concat

EOT = 9


def row(tokens: list[int]) -> Sequence:
    return Sequence(0, 0, np.array(tokens, np.int32), 0, Cursor(), (0, 0))


def test_labels_are_the_next_tokens_and_padding_is_ignored() -> None:
    sequences = [row([1, 2, 9, 3, 4]), row([5, 9, -1, -1, -1])]
    batch = collate(sequences, EOT, document_mask=False)
    assert set(batch) == {"input_ids", "labels"}
    assert batch["input_ids"].tolist() == [[1, 2, 9, 3], [5, 9, 9, 9]]
    assert batch["labels"].tolist() == [[2, 9, 3, 4], [9, -100, -100, -100]]
    assert all(v.dtype == torch.int64 for v in batch.values())
    assert count_labels(sequences, EOT, document_mask=False) == 5


def test_document_mask_resets_positions_and_drops_crossing_labels() -> None:
    sequences = [row([1, 2, 9, 3, 4]), row([9, 5, 9, -1, -1])]
    batch = collate(sequences, EOT, document_mask=True)
    assert batch["labels"].tolist() == [[2, 9, -100, 4], [-100, 9, -100, -100]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0], [0, 0, 1, 0]]
    assert batch["position_ids"].dtype == torch.int64
    assert count_labels(sequences, EOT, document_mask=True) == 4


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("pack", [pack_concat, pack_best_fit])
def test_count_agrees_with_the_tensors(pack: Any, mask: bool) -> None:
    rng = np.random.default_rng(0)
    docs = [np.append(rng.integers(0, 9, n), EOT).astype(np.int32) for n in rng.integers(1, 20, 30)]
    rows, _ = pack(docs, (), 8)
    sequences = [row(r.tolist()) for r in rows]
    labels = collate(sequences, EOT, mask)["labels"]
    assert count_labels(sequences, EOT, mask) == int((labels != -100).sum())
    if mask and pack is pack_best_fit:
        assert int((labels != -100).sum()) == sum(len(d) - 1 for d in docs)


def models() -> list[Any]:
    torch.manual_seed(0)
    small: dict[str, Any] = {"vocab_size": 16, "use_cache": False, "attn_implementation": "sdpa"}
    gpt2 = GPT2Config(n_layer=2, n_embd=16, n_head=2, n_positions=32, **small)
    llama = LlamaConfig(
        num_hidden_layers=2,
        hidden_size=16,
        intermediate_size=32,
        num_attention_heads=2,
        max_position_embeddings=32,
        **small,
    )
    return [GPT2LMHeadModel(gpt2).eval(), LlamaForCausalLM(llama).eval()]


@pytest.mark.parametrize("model", models(), ids=["gpt2", "llama"])
def test_documents_in_a_row_do_not_see_each_other(model: Any) -> None:
    first, second = [1, 2, 3, 4, 9], [5, 6, 7, 1, 9]
    batch = collate([row([*first, *second, 3])], EOT, document_mask=True)
    logits = model(
        input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False
    ).logits
    alone = model(input_ids=torch.tensor([second]), use_cache=False).logits
    assert torch.allclose(logits[0, 5:10], alone[0], atol=1e-6)
    # The check can fail: without reset positions the second document sees the first.
    mixed = model(input_ids=batch["input_ids"], use_cache=False).logits
    assert not torch.allclose(mixed[0, 5:10], alone[0], atol=1e-3)


@pytest.mark.parametrize("model", models(), ids=["gpt2", "llama"])
def test_loss_of_one_document_has_no_gradient_in_the_other(model: Any) -> None:
    batch = collate([row([1, 2, 3, 4, 9, 5, 6, 7, 1, 9, 3])], EOT, document_mask=True)
    embedded = model.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()
    logits = model(
        inputs_embeds=embedded, position_ids=batch["position_ids"], use_cache=False
    ).logits
    losses = torch.nn.functional.cross_entropy(logits[0], batch["labels"][0], reduction="none")
    for mine, others in ((slice(0, 5), slice(5, 10)), (slice(5, 10), slice(0, 5))):
        (grad,) = torch.autograd.grad(losses[mine].sum(), embedded, retain_graph=True)
        assert grad[0, others].abs().max() == 0.0
        assert grad[0, mine].abs().max() > 0.0
