"""Step times and scaling against published runs that no constant was fitted to, and some that were.

`mpt-*` rows are in-sample: constants of recipes/planner/compute.py were chosen on them. They are
scored all the same, since a handful of constants can't bend 191 rows, but prove less than the
others.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from statistics import median

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import accuracy
from published_rows import Row, rows

from recipes.planner.predict import predict
from recipes.planner.scaling import odd_points

ROWS = {row.id: row for row in rows("time") if row.update_s()}
OUT_OF_SAMPLE = [row for row in ROWS.values() if not row.id.startswith("mpt-") and row.complete]
# Eight micro-batches of one or two on a DGX-2 with transformers' own AdamW of 2021, a Python loop
# over parameters: a step of which a third is not the model's. Kept in the count, not in the bound.
OLD_OPTIMIZER = {"hf-ddp-gpt2-large-v100", "hf-ds-zero1-gpt2-large-v100"}


def error(row: Row) -> float:
    """Predicted by measured update time, less one."""
    measured = row.update_s()
    assert measured is not None
    return predict(row.work, row.candidate, row.cluster).update.value / measured - 1


def mfu_points(row: Row) -> tuple[float, float]:
    """Predicted and measured MFU in per cent."""
    measured = row.measured("mfu")
    assert measured is not None
    return 100 * predict(row.work, row.candidate, row.cluster).mfu.value, 100 * measured


def test_there_are_rows_of_many_stacks() -> None:
    assert len(OUT_OF_SAMPLE) >= 20
    assert {row.id.split("-")[0] for row in OUT_OF_SAMPLE} >= {"hf", "flash", "llmc"}
    assert sum(name.startswith("mpt-") for name in ROWS) == 191


@pytest.mark.parametrize("row", OUT_OF_SAMPLE, ids=lambda row: row.id)
def test_a_step_is_within_a_quarter(row: Row) -> None:
    bound = 0.40 if row.id in OLD_OPTIMIZER else 0.25
    assert abs(error(row)) <= bound


def test_the_median_error_of_unseen_stacks() -> None:
    assert median(abs(error(row)) for row in OUT_OF_SAMPLE) <= 0.10


def test_errors_have_no_direction() -> None:
    """A model that is always too fast plans runs that cost more than was said."""
    assert abs(median(error(row) for row in OUT_OF_SAMPLE)) <= 0.05


@pytest.mark.parametrize("gpu", ["a100-40gb", "a100-80gb", "h100-80gb"])
def test_the_rows_that_constants_were_chosen_on(gpu: str) -> None:
    found = sorted(abs(error(r)) for i, r in ROWS.items() if i.startswith("mpt-") and gpu in i)
    assert median(found) <= 0.05
    assert found[int(0.97 * len(found))] <= 0.25  # 97 of 100


def scaling_curve(model: str, gpu: str) -> list[tuple[int, Row]]:
    """Rows of one model at 2,048 tokens from 8 GPUs on."""
    pattern = re.compile(rf"mpt-{model}-{gpu}-(\d+)-2048-b\d+$")
    found = [(int(m[1]), row) for name, row in ROWS.items() if (m := pattern.match(name))]
    return sorted(found, key=lambda pair: pair[0])


def test_scaling_from_8_to_128_and_the_slow_point() -> None:
    """MPT-1b on A100-40GB: all within 3 points of MFU but 32 GPUs, which is named."""
    curve = scaling_curve("1b", "a100-40gb")
    assert [world for world, _ in curve] == [8, 16, 32, 64, 128]
    points = [mfu_points(row) for _, row in curve]
    odd = odd_points([p for p, _ in points], [m for _, m in points])
    assert odd == [2]
    assert all(abs(p - m) <= 3 for i, (p, m) in enumerate(points) if i not in odd)


@pytest.mark.parametrize("model", ["125m", "350m", "760m", "3b", "7b"])
def test_no_point_of_a_smooth_curve_is_called_odd(model: str) -> None:
    points = [mfu_points(row) for _, row in scaling_curve(model, "a100-40gb")]
    assert len(points) == 5
    assert odd_points([p for p, _ in points], [m for _, m in points]) == []
    assert max(abs(p / m - 1) for p, m in points) <= 0.15


def test_the_document_shows_these_errors() -> None:
    """docs/planning.md; python benchmarks/accuracy.py --write"""
    _, shown, _ = accuracy.block(accuracy.DOCUMENT.read_text(encoding="utf-8"))
    assert shown.strip() == accuracy.report().strip()
