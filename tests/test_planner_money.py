"""Days, GPU-hours, price and the interval between checkpoints, on numbers computed by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
from planner_cases import banded

from recipes.config import Batch, Checkpoint, Schedule
from recipes.planner import money
from recipes.planner.figure import Figure, exact

BATCH = Batch(seq_len=1024, global_sequences=768, micro=16)
SAMPLES = Schedule(samples=100_000_000)


def update(value: float = 10.0) -> Figure:
    """An update of so many seconds, a fifth either way."""
    return banded(value, 0.2, "s", "table", "a test")


def fixed(value: float) -> Figure:
    """A time without a band."""
    return exact(value, "s", "a test")


def hours(value: float) -> Figure:
    """A mean time between failures."""
    return exact(value, "h", "a test")


def test_the_mission_in_days_hours_and_money() -> None:
    found = money.cost(SAMPLES, BATCH, update=update(), world=8, price_per_gpu_hour=1.8)
    # 1e8 documents of 1,024 tokens are 1e8 sequences: 1e8 / 768 = 130,208.3 updates, rounded up.
    assert found.updates == 130_209
    assert found.tokens.value == 1.024e11
    assert found.days.value == pytest.approx(130_209 * 10 / 86_400)  # 15.07
    assert found.days.low == pytest.approx(0.8 * found.days.value)
    assert found.days.high == pytest.approx(1.2 * found.days.value)
    assert found.gpu_hours.value == pytest.approx(130_209 * 10 / 3600 * 8)  # 2,893.5
    assert found.price is not None
    assert found.price.value == pytest.approx(found.gpu_hours.value * 1.8)
    assert found.price.unit == "currency of --price"
    assert (found.days.source, found.days.unit) == ("table", "days")


def test_without_a_price_there_is_none() -> None:
    assert money.cost(SAMPLES, BATCH, update=update(), world=8).price is None
    free = money.cost(SAMPLES, BATCH, update=update(), world=8, price_per_gpu_hour=0.0)
    assert free.price is not None and free.price.value == 0


def test_a_sample_is_as_long_as_somebody_says_or_is_said_to_be_assumed() -> None:
    assumed = money.cost(SAMPLES, BATCH, update=update(), world=8).tokens_per_sample
    assert assumed is not None
    assert (assumed.value, assumed.source) == (1024, "assumed")
    given = money.cost(SAMPLES, BATCH, update=update(), world=8, tokens_per_sample=512)
    assert given.tokens_per_sample is not None
    assert given.tokens_per_sample.source == "formula"
    assert given.updates == 65_105  # 1e8 / 2 / 768 = 65,104.2
    stated = Schedule(samples=1_536, tokens_per_sample=2048.0)
    found = money.cost(stated, BATCH, update=update(), world=8)
    assert found.updates == 4  # 1,536 x 2,048 tokens are 3,072 sequences
    assert found.tokens_per_sample is not None
    assert found.tokens_per_sample.basis == "schedule.tokens_per_sample"


@pytest.mark.parametrize(
    ("schedule", "updates"),
    [({"updates": 12}, 12), ({"tokens": 786_432 * 5}, 5), ({"tokens": 786_432 * 5 + 1}, 6)],
)
def test_lengths_that_need_no_documents(schedule: dict[str, Any], updates: int) -> None:
    found = money.cost(Schedule(**schedule), BATCH, update=update(), world=8)
    assert found.updates == updates
    assert found.tokens_per_sample is None
    assert found.tokens.value == updates * 786_432


def test_epochs_can_not_be_counted_without_the_data() -> None:
    with pytest.raises(ValueError, match=r"schedule.epochs=null schedule.samples=N"):
        money.cost(Schedule(epochs=2.0), BATCH, update=update(), world=8)


def test_the_best_interval_is_young_s_where_saves_are_cheap() -> None:
    # sqrt(2 x 1 s x 20,000 s) = 200 s; Daly's terms: x (1 + 0.005/3 + 0.000025/9) - 1 = 199.33 s.
    assert money.best_interval(1.0, 20_000.0) == pytest.approx(199.334, abs=1e-3)
    assert money.best_interval(50.0, 20.0) == 20.0  # a save takes longer than two failures


@pytest.mark.parametrize(("save", "mtbf"), [(1.0, 20_000.0), (30.0, 5_000.0), (0.2, 2e7)])
def test_no_other_interval_loses_less(save: float, mtbf: float) -> None:
    best = money.best_interval(save, mtbf)
    lost = money.lost_share(best, mtbf, save, 0.0, 0.0)
    for other in (best / 2, best * 2):
        assert money.lost_share(other, mtbf, save, 0.0, 0.0) > lost


def test_what_is_lost_by_hand() -> None:
    # Every 100 s a save of 1 s: 1 %. Every 10,000 s a failure: half of 100 s, 20 s not yet written
    # and 130 s of starting again: 2 %. Of all time: 10,000·e^0.015·(e^0.0101 - 1) = 103.046 s.
    share = money.lost_share(100.0, 10_000.0, stall=1.0, written=20.0, again=130.0)
    assert share == pytest.approx(1 - 100 / 103.0459, abs=1e-6)
    assert share == pytest.approx(0.03, abs=1e-3)


def test_no_more_than_everything_is_lost() -> None:
    # An update of 10 s between failures every 5 s: 5·e^2·(e^2.2 - 1) = 296.5 s for 10 s of work.
    half = money.lost_share(10.0, 5.0, stall=1.0, written=4.0, again=6.0)
    assert half == pytest.approx(1 - 10 / 296.48, abs=1e-4)
    assert money.lost_share(10.0, 1e-3, stall=1.0, written=4.0, again=6.0) == 1.0
    save = money.Save(stall=fixed(1.0), written=fixed(4.0), restart=fixed(6.0))
    stuck = money.checkpoint_interval(save, hours(0.001), 8, update())
    assert not stuck.progresses and stuck.loss.value == 100.0
    assert stuck.seconds.value == 10.0 and stuck.updates == 1
    assert money.checkpoint_interval(save, hours(1.0), 8, update()).progresses


def test_what_saves_take_is_told_in_whole_updates() -> None:
    save = money.Save(stall=fixed(2.0), written=fixed(20.0), restart=fixed(300.0))
    for mtbf in (1.0, 30.0, 50_000.0):
        found = money.checkpoint_interval(save, hours(mtbf), 8, update())
        assert found.seconds.value == 10.0 * found.updates
    policy = money.policy_interval(Checkpoint(every_minutes=1), update(100.0))
    assert policy.value == 100.0 and policy.basis.endswith("so after every update")


def test_failures_are_as_well_founded_as_their_rate() -> None:
    exactly = exact(2000.0, "GPU-hours", "a test")
    found = money.failures(exactly, money.PUBLISHED_MTBF)
    assert found.value == pytest.approx(2000 / 50_677, rel=1e-4)
    assert found.source == "table" and "Llama 3" in found.basis
    assert money.failures(exactly, hours(100.0)).source == "formula"


def test_published_failures_are_those_of_the_source() -> None:
    assert pytest.approx(50_677, abs=1) == money.PUBLISHED_MTBF_HOURS


def test_more_gpus_fail_more_often_and_save_more_often() -> None:
    save = money.Save(stall=fixed(2.0), written=fixed(20.0), restart=fixed(300.0))
    small = money.checkpoint_interval(save, hours(50_000.0), 8, update())
    large = money.checkpoint_interval(save, hours(50_000.0), 800, update())
    # M = 50,000 h / 8 = 2.25e7 s: sqrt(2 x 2 x 2.25e7) = 9,487 s, less 2 s, plus a third of 2:
    # 948.6 updates of 10 s. A hundredth of M: 948.7 s less 1.3.
    assert (small.updates, small.seconds.value) == (949, 9_490.0)
    assert (large.updates, large.seconds.value) == (95, 950.0)
    assert large.loss.value > small.loss.value
    assert small.seconds.source == "assumed"


def test_a_background_save_stops_training_for_the_copy_alone() -> None:
    background = money.saving(80e9, 8, Checkpoint(every_updates=500))
    blocking = money.saving(80e9, 8, Checkpoint(every_updates=500, write="blocking"))
    # 80 GB: 10 GB a GPU at 10 GB/s; to the disk, all of it at 1 GB/s.
    assert background.stall.value == pytest.approx(1.0)
    assert background.written.value == pytest.approx(81.0)
    assert blocking.stall.value == blocking.written.value == pytest.approx(80.0)
    assert background.restart.value == pytest.approx(300.0 + 80.0)
    assert background.stall.low < background.stall.value < background.stall.high


@pytest.mark.parametrize(
    ("policy", "seconds", "basis"),
    [
        ({"every_updates": 500}, 5000.0, "checkpoint.every_updates=500"),
        ({"every_minutes": 30}, 1800.0, "checkpoint.every_minutes=30"),
        ({"every_updates": 500, "every_minutes": 30}, 1800.0, "checkpoint.every_minutes=30"),
        ({"every_updates": 100, "every_minutes": 30}, 1000.0, "checkpoint.every_updates=100"),
    ],
)
def test_the_run_file_s_own_interval(policy: dict[str, Any], seconds: float, basis: str) -> None:
    found = money.policy_interval(Checkpoint(**policy), update())
    assert (found.value, found.basis) == (seconds, basis)


def test_the_own_interval_is_never_better_than_the_best() -> None:
    save = money.saving(18.7e9, 8, Checkpoint(every_updates=1))
    best = money.checkpoint_interval(save, hours(50_000.0), 8, update())
    own = money.interval_of(fixed(600.0), save, hours(50_000.0), 8, update())
    assert own.updates == 60
    assert own.loss.value > best.loss.value
    assert math.isfinite(best.loss.high)
