"""The meter: one reduction for many updates, exact means, and only one rank that writes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from recipes.meter import Meter
from recipes.metrics import read_json_lines


class Ranks:
    """Two ranks with the same losses: the reduction doubles, and counts its calls."""

    def __init__(self) -> None:
        self.calls: list[list[float]] = []

    def reduce(self, losses: list[float]) -> list[float]:
        """What `sum_over_ranks` gives."""
        self.calls.append(list(losses))
        return [2.0 * loss for loss in losses]


class Tracker:
    """Keeps what it is handed."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, dict[str, Any]]] = []

    def __call__(self, values: dict[str, Any], step: int) -> None:
        self.seen.append((step, values))


def fields(step: int, tokens: int = 100, step_ms: float = 10.0) -> dict[str, Any]:
    """Everything of a record but the loss."""
    return {
        "step": step,
        "lr": 1e-3,
        "grad_norm": 1.0,
        "loss_scale": 1.0,
        "skipped_updates": 0,
        "tokens": tokens,
        "samples": 1,
        "data_digest": "0",
        "total_tokens": tokens * step,
        "total_samples": step,
        "step_ms": step_ms,
        "data_wait_ms": 0.0,
        "tokens_per_s": 1.0,
        "samples_per_s": 1.0,
        "mfu": None,
        "peak_memory_bytes": 1,
        "time": 1.7e9,
    }


def meter(folder: Path | None, done: int = 0) -> tuple[Meter, Ranks, Tracker]:
    """A meter with its doubles."""
    ranks, tracker = Ranks(), Tracker()
    made = Meter(reduce=ranks.reduce, track=tracker, folder=folder, total=50, done=done)
    return made, ranks, tracker


def test_many_updates_take_one_reduction(tmp_path: Path) -> None:
    made, ranks, tracker = meter(tmp_path)
    for step in (1, 2, 3):
        made.add(fields(step, tokens=100 * step), 25.0 * step)
    assert ranks.calls == []  # nothing is read before
    made.flush()
    assert ranks.calls == [[25.0, 50.0, 75.0]]
    records = read_json_lines(tmp_path / "metrics.jsonl")
    # summed over both ranks and divided by the window's tokens: 50/100, 100/200, 150/300
    assert [(r["step"], r["loss"]) for r in records] == [(1, 0.5), (2, 0.5), (3, 0.5)]
    assert [step for step, _ in tracker.seen] == [1, 2, 3]
    assert tracker.seen[2][1] == records[2]
    made.close()


def test_each_update_is_written_once(tmp_path: Path) -> None:
    made, ranks, _ = meter(tmp_path)
    made.add(fields(1), 50.0)
    made.flush()
    made.add(fields(2), 150.0)
    made.flush()
    made.close()
    assert ranks.calls == [[50.0], [150.0]]
    losses = [(r["step"], r["loss"]) for r in read_json_lines(tmp_path / "metrics.jsonl")]
    assert losses == [(1, 1.0), (2, 3.0)]
    assert made.last is not None and made.last.loss == 3.0


def test_a_flush_with_nothing_kept_writes_nothing(tmp_path: Path) -> None:
    made, _, tracker = meter(tmp_path)
    made.flush()
    made.close()
    assert read_json_lines(tmp_path / "metrics.jsonl") == [] and tracker.seen == []
    assert made.last is None


def test_a_window_without_tokens_does_not_divide_by_zero(tmp_path: Path) -> None:
    made, _, _ = meter(tmp_path)
    made.add(fields(1, tokens=0), 0.0)
    made.flush()
    made.close()
    assert read_json_lines(tmp_path / "metrics.jsonl")[0]["loss"] == 0.0


def test_a_rank_that_does_not_write_still_takes_part_in_the_reduction(tmp_path: Path) -> None:
    made, ranks, tracker = meter(None)
    made.add(fields(1), 25.0)
    made.flush()
    made.evaluation({"step": 1, "held_out_loss": 1.0, "held_out_perplexity": 2.7})
    made.close()
    assert ranks.calls == [[25.0]]
    assert made.last is not None and made.last.loss == 0.5  # every rank knows the mean
    assert tracker.seen == [] and list(tmp_path.iterdir()) == []


def test_the_line_of_the_last_update_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made, _, _ = meter(tmp_path)
    made.add(fields(9, step_ms=2000.0), 25.0)
    made.add(fields(10, step_ms=2000.0), 100.0)
    with caplog.at_level(logging.INFO, logger="recipes.meter"):
        made.flush()
    made.close()
    (line,) = caplog.messages
    # 40 updates left at 2 s
    assert line.startswith("step 10/50 | loss  2.0000 |") and line.endswith("| eta 1m20s")


def test_one_slow_update_does_not_move_the_typical_time(tmp_path: Path) -> None:
    made, _, _ = meter(None)
    assert made.typical_step_ms() == 0.0
    for step, ms in enumerate([90_000.0, 10.0, 12.0, 11.0, 10.0], 1):
        made.add(fields(step, step_ms=ms), 0.0)
    assert made.typical_step_ms() == 11.0  # the middle of 10 10 11 12 90000
    for step in range(100):
        made.add(fields(step, step_ms=7.0), 0.0)
    assert made.typical_step_ms() == 7.0  # only the last hundred count


def test_an_evaluation_is_a_record_of_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made, ranks, tracker = meter(tmp_path)
    values = {"step": 20, "tokens": 5, "held_out_loss": 7.5, "held_out_perplexity": 1808.04}
    with caplog.at_level(logging.INFO, logger="recipes.meter"):
        made.evaluation(values)
    made.close()
    assert read_json_lines(tmp_path / "evaluations.jsonl") == [values]
    assert read_json_lines(tmp_path / "metrics.jsonl") == []
    assert caplog.messages == ["step 20 | held-out loss 7.5000 | perplexity 1,808.0"]
    assert tracker.seen == [(20, {k: v for k, v in values.items() if k != "step"})]
    assert ranks.calls == []  # its sums were reduced where it was measured


def test_a_resume_cuts_every_file(tmp_path: Path) -> None:
    made, _, _ = meter(tmp_path)
    for step in (1, 2, 3):
        made.add(fields(step), 50.0)
        made.evaluation({"step": step, "held_out_loss": 1.0, "held_out_perplexity": 2.7})
        made.saved(SAVED | {"step": step})
    made.flush()
    made.close()
    again, _, _ = meter(tmp_path, done=2)
    again.close()
    for name in ("metrics", "evaluations", "saves"):
        assert [r["step"] for r in read_json_lines(tmp_path / f"{name}.jsonl")] == [1, 2]


SAVED = {"name": "step-00000100", "bytes": 75_900_000, "stall_ms": 31.4, "write_s": 0.42}


def test_a_checkpoint_is_told_and_recorded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made, _, _ = meter(tmp_path)
    with caplog.at_level(logging.INFO):
        made.saved(SAVED | {"step": 100})
    made.close()
    assert caplog.messages == [
        "step 100 | saved step-00000100, 75.9 MB; training stood still 31 ms, written in 420 ms"
    ]
    assert read_json_lines(tmp_path / "saves.jsonl") == [SAVED | {"step": 100}]
