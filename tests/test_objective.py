"""Batch, length, learning rate and loss scaling, on values computed by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from recipes.config import Batch, Schedule
from recipes.objective import (
    gradient_factor,
    learning_rate,
    legal_worlds,
    plan_batch,
    run_length,
    scaled_loss,
)
from recipes.runfile import load_run

ROOT = Path(__file__).resolve().parent.parent
BATCH = Batch(seq_len=1024, global_sequences=768, micro=16)
XL_WORLDS = [1, 2, 3, 4, 6, 8, 12, 16, 24, 48]


# ---- batch


@pytest.mark.parametrize(("world", "accumulation"), [(8, 6), (6, 8), (4, 12), (1, 48), (48, 1)])
def test_the_missions_accumulation(world: int, accumulation: int) -> None:
    run = load_run(ROOT / "recipes" / "runs" / "gpt2_xl.yaml")
    worlds = legal_worlds(run.batch, lanes=run.data.lanes, workers=run.data.workers)
    plan = plan_batch(run.batch, world, worlds)
    assert (plan.accumulation, plan.world, plan.micro) == (accumulation, world, 16)
    assert plan.global_tokens == 768 * 1024 == 786_432


def test_legal_worlds_of_the_mission() -> None:
    # 768 / 16 = 48 micro-batches: 48's divisors, all of which divide 96 lanes too
    assert legal_worlds(BATCH, lanes=96, workers=1) == XL_WORLDS


def test_lanes_are_shared_by_every_rank_and_reader() -> None:
    # two readers per rank: twice each of the ten worlds divides 96 as well
    assert legal_worlds(BATCH, lanes=96, workers=2) == XL_WORLDS
    # five: no multiple of 5 divides 96
    assert legal_worlds(BATCH, lanes=96, workers=5) == []
    # 12 lanes: divisors of 48 that divide 12
    assert legal_worlds(BATCH, lanes=12, workers=1) == [1, 2, 3, 4, 6, 12]
    assert legal_worlds(BATCH, lanes=12, workers=4) == [1, 3]  # 4, 12
    # no reader process counts as one reader: the rank itself
    assert legal_worlds(BATCH, lanes=12, workers=0) == [1, 2, 3, 4, 6, 12]


@pytest.mark.parametrize(("world", "nearest"), [(7, "6 or 8"), (5, "4 or 6"), (64, "24 or 48")])
def test_an_illegal_world_is_refused_with_the_legal_ones(world: int, nearest: str) -> None:
    with pytest.raises(ValueError) as caught:
        plan_batch(BATCH, world, XL_WORLDS)
    text = str(caught.value)
    assert text.startswith(f"{world} ranks can't share batch.global_sequences=768 at ")
    assert "legal ranks: 1 2 3 4 6 8 12 16 24 48;" in text
    assert text.endswith(f"nearest: {nearest}")


@given(
    micro=st.integers(1, 12),
    windows=st.integers(1, 60),
    lanes=st.integers(1, 64),
    workers=st.integers(0, 4),
)
def test_ranks_times_accumulation_times_micro_is_the_global_batch(
    micro: int, windows: int, lanes: int, workers: int
) -> None:
    batch = Batch(seq_len=8, global_sequences=micro * windows, micro=micro)
    worlds = legal_worlds(batch, lanes=lanes, workers=workers)
    for world in worlds:
        plan = plan_batch(batch, world, worlds)
        assert plan.accumulation * plan.world * plan.micro == plan.global_sequences
        assert plan.accumulation >= 1
        assert lanes % (world * max(workers, 1)) == 0
    # and none is forgotten: one rank is legal whenever its readers can share the lanes
    assert (1 in worlds) == (lanes % max(workers, 1) == 0)


# ---- learning rate


def rates(shape: str, total: int, warmup: int, final_share: float | None) -> list[float]:
    """Every update's rate at a peak of 1."""
    schedule = Schedule.model_validate(
        {
            "updates": total,
            "warmup_updates": warmup,
            "shape": shape,
        }
        | ({} if final_share is None else {"final_share": final_share})
    )
    return [learning_rate(n, peak=1.0, total=total, schedule=schedule) for n in range(total)]


def test_linear_warm_up_then_linear_decay_by_hand() -> None:
    # 4 warm up to the peak, then from 1 to 0.2 in 4 steps of 0.2
    expected = [0.25, 0.5, 0.75, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]
    assert rates("linear", 9, 4, 0.2) == pytest.approx(expected, abs=1e-12)


def test_cosine_by_hand() -> None:
    # 0.1 + 0.9 * (1 + cos(pi * k/4)) / 2 for k = 0..4; cos = 1, sqrt(1/2), 0, -sqrt(1/2), -1
    half = math.sqrt(0.5)
    expected = [0.5, 1.0, 1.0, 0.55 + 0.45 * half, 0.55, 0.55 - 0.45 * half, 0.1]
    assert rates("cosine", 7, 2, 0.1) == pytest.approx(expected, abs=1e-12)


def test_constant_after_the_warm_up() -> None:
    assert rates("constant", 5, 2, None) == [0.5, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("shape", ["linear", "cosine"])
@given(total=st.integers(3, 5000), share=st.floats(0.0, 1.0), data=st.data())
def test_the_last_update_has_the_final_share_and_none_has_more_than_the_peak(
    shape: str, total: int, share: float, data: st.DataObject
) -> None:
    warmup = data.draw(st.integers(0, total - 2))
    schedule = Schedule.model_validate(
        {"updates": total, "warmup_updates": warmup, "shape": shape, "final_share": share}
    )

    def rate(applied: int) -> float:
        return learning_rate(applied, peak=3e-4, total=total, schedule=schedule)

    assert rate(total - 1) == pytest.approx(3e-4 * share, abs=1e-15)
    assert max(rate(n) for n in range(0, total, max(1, total // 50))) <= 3e-4 * (1 + 1e-12)
    assert rate(warmup) == pytest.approx(3e-4)
    assert rate(total + 5) == pytest.approx(3e-4 * share, abs=1e-15)  # never below


def test_the_first_update_already_moves() -> None:
    assert rates("cosine", 10, 5, 0.1)[0] == 0.2


# ---- length


def schedule(**length: float) -> Schedule:
    """A schedule of one length."""
    return Schedule.model_validate(length)


def test_a_length_in_updates_is_taken_as_it_is() -> None:
    length = run_length(schedule(updates=64), BATCH)
    assert (length.updates, length.tokens_per_sample, length.measured) == (64, None, False)


def test_a_length_in_tokens_is_rounded_up_to_whole_updates() -> None:
    def updates(tokens: int) -> int:
        return run_length(schedule(tokens=tokens), BATCH).updates

    assert updates(786_432) == 1
    assert updates(786_433) == 2
    assert updates(10 * 786_432) == 10
    assert updates(1) == 1
    assert run_length(schedule(tokens=1), BATCH).measured is False


def test_a_length_in_samples() -> None:
    # 100 M documents of 1,024.5 tokens: 1.0245e11 / 786,432 = 130,271.91 -> 130,272
    length = run_length(
        schedule(samples=100_000_000), BATCH, samples=100_000_000, tokens_per_sample=1024.5
    )
    assert (length.updates, length.tokens_per_sample, length.measured) == (130_272, 1024.5, True)


def test_a_stated_mean_is_not_called_measured() -> None:
    length = run_length(
        schedule(samples=768, tokens_per_sample=1024.0),
        BATCH,
        samples=768,
        tokens_per_sample=1024.0,
    )
    assert (length.updates, length.measured) == (1, False)


def test_a_length_in_epochs_counts_the_rows_that_padding_costs() -> None:
    # 1.5 passes over 1,024 documents = 1,536; 512 tokens each; one row holds 800 of them:
    # 1,536 * 512 / 800 = 983.04 rows = 1.28 updates -> 2; without padding 768 rows -> 1
    padded = run_length(
        schedule(epochs=1.5),
        BATCH,
        samples=1536,
        tokens_per_sample=512.0,
        sequences_per_token=1 / 800,
    )
    dense = run_length(schedule(epochs=1.5), BATCH, samples=1536, tokens_per_sample=512.0)
    assert (padded.updates, dense.updates) == (2, 1)
    assert padded.measured


def test_rounding_noise_makes_no_further_update() -> None:
    # 10 documents of 0.8 tokens are 8 tokens, 4 rows of 2, 4 updates; the floats say a hair more
    mean = (0.1 + 0.2) / 0.3 * 0.8
    assert 10 * mean / 2 > 4.0
    batch = Batch(seq_len=2, global_sequences=1, micro=1)
    length = run_length(schedule(samples=10), batch, samples=10, tokens_per_sample=mean)
    assert length.updates == 4
    more = run_length(schedule(samples=10), batch, samples=10, tokens_per_sample=0.8001)
    assert more.updates == 5  # 4.0005 is no noise


# ---- loss scaling


def test_the_gradient_factor_by_hand() -> None:
    # both engines divide by 6 and average over 8: 6 * 8 / 786,432 = 1 / 16,384
    assert gradient_factor(accumulation=6, world=8, tokens=786_432) == 1 / 16_384
    assert gradient_factor(accumulation=1, world=1, tokens=0) == 1.0  # no division by zero


@given(counts=st.lists(st.lists(st.integers(0, 9), min_size=2, max_size=2), min_size=1, max_size=4))
def test_every_token_of_a_window_weighs_the_same(counts: list[list[int]]) -> None:
    """`counts` are the tokens of each micro-batch of each rank; every token's gradient is 1."""
    world, accumulation = len(counts), 2
    tokens = sum(map(sum, counts))
    assume(tokens > 0)
    factor = gradient_factor(accumulation=accumulation, world=world, tokens=tokens)
    # as the engines do: divide each micro-batch by the accumulation, then average over ranks
    applied = sum(sum(n * factor / accumulation for n in rank) for rank in counts) / world
    assert applied == pytest.approx(1.0)  # the mean of ones


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_the_gradient_of_a_loss_that_is_not_finite_is_nan(bad: float) -> None:
    x = torch.tensor(2.0, requires_grad=True)
    loss = 3.0 * x + torch.tensor(bad)  # its gradient alone would be a harmless 3
    scaled_loss(loss, 0.5).backward()
    assert x.grad is not None and x.grad.isnan()


def test_the_gradient_of_a_finite_loss_is_exact() -> None:
    x = torch.tensor([1.5, -2.0], requires_grad=True)
    loss = (x**2).sum() * 7.0
    scaled = scaled_loss(loss, 1 / 16_384)
    scaled.backward()
    assert scaled.item() == 43.75 / 16_384  # 7 * (2.25 + 4)
    assert x.grad is not None
    assert x.grad.tolist() == [21.0 / 16_384, -28.0 / 16_384]  # 7 * 2x, and powers of two
