"""The compute model on hand-computed cases."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planner_cases import GPU, LLAMA, XL, candidate, cluster, work

from recipes.planner import compute
from recipes.planner.compute import micro_step, optimizer_seconds
from recipes.planner.workload import Measured


def test_a_product_takes_its_flops_by_the_rate() -> None:
    """2·1024·1024·4096 FLOPs at 1 TFLOP/s, 4096/(4096 + 128) of it: 8.86 ms."""
    seconds = compute._product(1024, 1024, 4096, GPU, 1e12)
    assert seconds == pytest.approx(2 * 1024 * 1024 * 4096 / 1e12 * 4224 / 4096)


def test_a_wave_that_is_not_full_takes_as_long_as_a_full_one() -> None:
    gpu = GPU.model_copy(update={"sms": 60})
    # 8 x 8 tiles of 128 are 64: two waves of 60, little more than half full.
    alone = compute._product(1024, 1024, 512, gpu, 1e12)
    assert alone == pytest.approx(compute._product(1024, 1024, 512, GPU, 1e12) * 120 / 64)


def test_matmul_seconds_follow_from_the_models_flops() -> None:
    """6 FLOPs a token and matrix element, without what filling pipelines costs."""
    plan = micro_step(work(), candidate(), cluster())
    tokens = 16 * 1024
    matrices = XL.layers * (XL.attention_matrices + XL.mlp_matrices)
    ideal = 6 * matrices * tokens / (100e12 * compute.TRAINING_SHAPES)
    assert ideal < plan.by_kind["matmul"] < ideal * (1 + compute.FILL / 1600)


def test_parts_sum_to_the_micro_batch() -> None:
    plan = micro_step(work(), candidate(), cluster())
    assert sum(plan.by_kind.values()) == pytest.approx(plan.figure.value)
    assert plan.forward_s + plan.backward_s == pytest.approx(plan.figure.value)
    assert plan.figure.low == pytest.approx(0.75 * plan.figure.value)


def test_checkpointing_runs_every_layer_forward_once_more() -> None:
    plain = micro_step(work(), candidate(), cluster())
    again = micro_step(work(), candidate(checkpointing=True), cluster())
    added = again.figure.value - plain.figure.value
    head = plain.by_kind["logits"] / 3
    assert added == pytest.approx(plain.forward_s - head)


def test_causal_flash_skips_half_and_eager_does_not() -> None:
    """Eager: 12·s·h FLOPs a token and layer for all four products and their gradients."""
    eager = micro_step(work(), candidate(attention="eager"), cluster())
    flops = 12 * 1024 * XL.width * 16 * 1024 * XL.layers
    rate = 100e12 * compute.TRAINING_SHAPES * compute.EAGER_MATMUL
    assert eager.by_kind["attention"] == pytest.approx(flops / rate)
    assert micro_step(work(), candidate(), cluster()).figure.value < eager.figure.value


def test_an_odd_vocabulary_halves_the_heads_rate() -> None:
    padded = replace(XL, vocab=50264)
    odd, even = (
        micro_step(work(shape), candidate(), cluster()).by_kind["logits"] for shape in (XL, padded)
    )
    products = 6 * 50264 * 1600 * 16 * 1024 / (100e12 * compute.TRAINING_SHAPES)
    assert odd - even == pytest.approx(products, rel=1e-3)


def test_a_tiny_model_waits_for_the_host() -> None:
    tiny = replace(LLAMA, width=64, heads=1, kv_heads=1, ffn=128, head_dim=64, vocab=256)
    plan = micro_step(work(tiny, seq_len=64), candidate(micro=1), cluster())
    assert plan.by_kind["launch"] > plan.by_kind["matmul"]
    assert micro_step(work(), candidate(), cluster()).by_kind["launch"] == 0


def test_a_measured_matmul_rate_takes_the_tables_place() -> None:
    measured = Measured(path="preflight.json", matmul_flops=50e12)
    slow = micro_step(work(), candidate(), replace(cluster(), measured=measured))
    fast = micro_step(work(), candidate(), cluster())
    assert slow.figure.source == "measured" and fast.figure.source == "table"
    assert slow.by_kind["matmul"] == pytest.approx(2 * fast.by_kind["matmul"])


def test_a_gpu_that_can_not_sustain_its_rate_and_fp32() -> None:
    tired = GPU.model_copy(update={"sustained": 0.5})
    plan = micro_step(work(), candidate(), cluster())
    assert micro_step(work(), candidate(), cluster(gpu=tired)).by_kind["matmul"] == pytest.approx(
        2 * plan.by_kind["matmul"]
    )
    full = micro_step(work(precision="fp32"), candidate(), cluster())
    slower = (100 * compute.TRAINING_SHAPES) / (10 * compute.FP32_SHARE)
    assert full.by_kind["matmul"] == pytest.approx(slower * plan.by_kind["matmul"])


def test_the_optimizer_moves_52_bytes_of_what_it_owns() -> None:
    """ZeRO-1: an eighth of the masters, and all local 16-bit gradients once."""
    number = XL.layers * XL.layer_parameters + XL.embedding_parameters
    rate = 1e12 * compute.MEMORY_SHARE["torch"]
    expected = (52 * number / 8 + 2 * number) / rate + compute.STEP_S
    assert optimizer_seconds(work(), candidate(), cluster()).value == pytest.approx(expected)
    whole = (40 + 4) * number / rate + compute.STEP_S
    assert optimizer_seconds(work(), candidate("DDP"), cluster()).value == pytest.approx(whole)


def test_autocast_costs_what_it_casts() -> None:
    ddp, zero1 = (micro_step(work(), candidate(s), cluster()) for s in ("DDP", "ZeRO-1"))
    number = XL.layers * XL.layer_parameters + XL.embedding_parameters
    rate = 1e12 * compute.MEMORY_SHARE["torch"]
    assert ddp.by_kind["gradients"] == pytest.approx(24 * number / rate)
    assert zero1.by_kind["gradients"] == pytest.approx(6 * number / rate)
    assert ddp.by_kind["elementwise"] > zero1.by_kind["elementwise"]
