"""Predicted peaks against what torch's CPU allocator really hands out for the real model.

What a CPU can tell: which tensors are alive when, in forward, loss and backward, with accumulated
gradients and Adam's states, in fp32 and with bf16 weights. What it can't: autocast (its list of
operations differs), dropout masks (wider), flash kernels' workspaces, DeepSpeed's buckets in 16 bit
beside them, the caching allocator, CUDA's context and NCCL.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from planner_cases import cluster, work
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from recipes.model import SummedLoss
from recipes.planner.families import shape_of
from recipes.planner.memory import MemoryPlan, plan_memory
from recipes.planner.workload import Candidate, Precision, Strategy

MICRO, SEQ = 4, 256
GPT2: dict[str, Any] = {
    **{"model_type": "gpt2", "n_embd": 256, "n_head": 4, "n_layer": 4, "n_positions": SEQ},
    **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "vocab_size": 4000},
    **{"bos_token_id": 0, "eos_token_id": 0},
}
LLAMA: dict[str, Any] = {
    **{"model_type": "llama", "hidden_size": 256, "num_attention_heads": 4, "vocab_size": 4000},
    **{"num_key_value_heads": 2, "intermediate_size": 704, "num_hidden_layers": 4},
}
# Few tokens in the vocabulary: the peak lies in a layer's backward, not in the loss.
NARROW = {"vocab_size": 300}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Two threads that wait for each other on a busy machine take a hundred times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def real_peak(
    config: dict[str, Any], precision: Precision, attention: str, folder: Path, **run: Any
) -> float:
    """Peak bytes that a window of accumulated micro-batches adds to what stands before it."""
    torch.manual_seed(0)
    keys = dict(config)
    made = AutoConfig.for_model(keys.pop("model_type"), **keys)
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    network = AutoModelForCausalLM.from_config(made, attn_implementation=attention, dtype=dtype)
    if run.get("checkpointing"):
        network.gradient_checkpointing_enable({"use_reentrant": False})
    module = SummedLoss(network.train(), chunked=run.get("loss") == "chunked")
    ids = torch.randint(0, keys["vocab_size"], (MICRO, SEQ))
    labels = ids.roll(1)

    def window() -> None:
        for _ in range(run.get("turns", 2)):
            module(ids, labels)[0].backward()

    window()  # whatever is made at the first call only
    module.zero_grad()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        window()
    recorded.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    totals = [e["args"] for e in events if e.get("name") == "[memory]"]
    start = totals[0]["Total Allocated"] - totals[0]["Bytes"]
    return max(entry["Total Allocated"] for entry in totals) - start


def planned(config: dict[str, Any], precision: Precision, attention: str, **run: Any) -> MemoryPlan:
    """The plan for one rank: DDP in fp32, 16-bit weights with masters otherwise."""
    turns, loss = run.get("turns", 2), run.get("loss", "full")
    family = Strategy(name="", family="ddp" if precision == "fp32" else "deepspeed")
    workload = work(
        shape_of(config, "model.config"),
        **{"seq_len": SEQ, "global_sequences": MICRO * turns},
        **{"precision": precision, "loss": loss},
    )
    chosen = Candidate(
        strategy=family,
        micro=MICRO,
        checkpointing=run.get("checkpointing", False),
        attention="eager" if attention == "eager" else "flash",
    )
    return plan_memory(workload, chosen, cluster(nodes=1, gpus=1))


def added(plan: MemoryPlan) -> float:
    """Bytes of forward and backward beside parameters, masters and moments."""
    standing = ("parameters", "master weights", "moments")
    return max(
        sum(i.bytes for i in phase.items if i.kind not in standing) for phase in plan.phases[:2]
    )


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "run",
    [{}, {"turns": 1}, {"checkpointing": True}, {"checkpointing": True, "narrow": True}],
    ids=["", "alone", "checkpointing", "narrow"],
)
def test_the_peak_is_the_real_one(
    config: dict[str, Any],
    precision: Precision,
    attention: str,
    run: dict[str, Any],
    tmp_path: Path,
) -> None:
    given = config | NARROW if run.get("narrow") else config
    plan = planned(given, precision, attention, **run)
    real = real_peak(given, precision, attention, tmp_path, **run)
    assert added(plan) == pytest.approx(real, rel=0.02)


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_the_chunked_loss_s_peak_is_the_real_one(config: dict[str, Any], tmp_path: Path) -> None:
    """In fp32, where torch takes the same chunks and policy on CPUs as on GPUs."""
    plan = planned(config, "fp32", "sdpa", loss="chunked")
    real = real_peak(config, "fp32", "sdpa", tmp_path, loss="chunked")
    assert added(plan) == pytest.approx(real, rel=0.05)


def test_chunks_save_what_the_plan_says(tmp_path: Path) -> None:
    wide = GPT2 | {"vocab_size": 16000}
    full, chunked = (
        real_peak(wide, "fp32", "sdpa", tmp_path, loss=loss) for loss in ("full", "chunked")
    )
    plans = [added(planned(wide, "fp32", "sdpa", loss=loss)) for loss in ("full", "chunked")]
    assert plans[0] - plans[1] == pytest.approx(full - chunked, rel=0.05)
