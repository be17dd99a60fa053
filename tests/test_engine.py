"""The engine room on two real ranks: parity with one process, state across arms, collectives.

All arms run in one start (tests/drivers/arms.py); the tests read what it measured.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from launching import run

# Largest difference of any fp32 master weight from a single process after three updates.
DRIFT = {"fp32": 1e-6, "fp16": 2e-4, "bf16": 2e-3}
LOSS = {"fp32": 1e-6, "fp16": 1e-4, "bf16": 1e-3}
NORM = {"fp32": 1e-5, "fp16": 1e-3, "bf16": 5e-3}  # relative
ARMS = ("zero1_fp32", "less_traffic_fp32", "ddp_fp32", "zero1_bf16", "ddp_bf16", "zero1_fp16")
ARMS += ("zero0_fp16",)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("arms")
    ended = run("torchrun", 2, ["tests/drivers/arms.py", str(folder / "results")], folder / "log")
    assert ended.code == 0, ended.text[-4000:]
    return [json.loads(line) for line in Path(folder / "results").read_text().splitlines()]


def one(measured: list[dict[str, Any]], **keys: Any) -> dict[str, Any]:
    found = [line for line in measured if all(line.get(k) == v for k, v in keys.items())]
    assert len(found) == 1, (keys, len(found))
    return found[0]


@pytest.mark.parametrize("arm", ARMS)
def test_uneven_tokens_over_ranks_and_micro_batches_equal_one_process(
    measured: list[dict[str, Any]], arm: str
) -> None:
    line, precision = one(measured, what="parity", arm=arm), arm.rsplit("_", 1)[1]
    for (loss, norm), (want_loss, want_norm), (_, naive_norm) in zip(
        line["got"], line["want"], line["naive"], strict=True
    ):
        assert loss == pytest.approx(want_loss, abs=LOSS[precision])
        assert norm == pytest.approx(want_norm, rel=NORM[precision])
        # Means of means would be far off, so the agreement above is no accident.
        assert abs(naive_norm / want_norm - 1) > 0.1
    assert line["drift"] < DRIFT[precision]


@pytest.mark.parametrize("arm", ["ddp_fp32", "ddp_bf16"])
def test_ddp_gradients_stay_views_of_their_buckets(
    measured: list[dict[str, Any]], arm: str
) -> None:
    """One copy of them, as gradient_as_bucket_view promises, through windows of four."""
    line = one(measured, what="gradients", arm=arm)
    assert len(line["kept"]) == 1  # one bucket holds the tiny model
    assert line["after"] == line["kept"]


def test_the_arms_are_what_they_are_called(measured: list[dict[str, Any]]) -> None:
    kinds = {arm: one(measured, what="parity", arm=arm)["type"] for arm in ARMS}
    assert {kind for arm, kind in kinds.items() if "zero1" in arm} == {"DeepSpeedZeroOptimizer"}
    assert {kind for arm, kind in kinds.items() if "ddp" in arm} == {"AdamW"}
    assert kinds["zero0_fp16"] == "FP16_UnfusedOptimizer"


@pytest.mark.parametrize("arm", ARMS)
def test_state_comes_back_bit_for_bit(measured: list[dict[str, Any]], arm: str) -> None:
    moved = one(measured, what="moved", **{"from": arm, "to": arm})
    assert moved["equal"]
    assert moved["losses"] == one(measured, what="uninterrupted", arm=arm)["losses"]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("zero1_fp32", "ddp_fp32"),
        ("ddp_fp32", "zero1_fp32"),
        ("zero1_fp16", "ddp_fp32"),
        ("ddp_bf16", "zero0_fp16"),
        ("zero0_fp16", "zero1_fp16"),
    ],
)
def test_state_moves_to_another_strategy(
    measured: list[dict[str, Any]], source: str, target: str
) -> None:
    moved = one(measured, what="moved", **{"from": source, "to": target})
    assert moved["equal"]
    loss = max(LOSS[arm.rsplit("_", 1)[1]] for arm in (source, target))
    went_on = one(measured, what="uninterrupted", arm=source)["losses"]
    for (got, _), (want, _) in zip(moved["losses"], went_on, strict=True):
        assert got == pytest.approx(want, abs=loss)


def test_a_scale_moves_with_the_state_and_starts_anew_where_there_was_none(
    measured: list[dict[str, Any]],
) -> None:
    def scale(source: str, target: str) -> float:
        return one(measured, what="moved", **{"from": source, "to": target})["scale"]

    start = 2.0**15
    assert scale("zero0_fp16", "zero1_fp16") == start
    assert scale("zero1_bf16", "zero1_fp16") == start  # not bf16's 1.0
    assert scale("zero1_fp16", "ddp_fp32") == 1.0


@pytest.mark.parametrize("accumulation", [1, 8])
@pytest.mark.parametrize(
    ("arm", "expected"),
    [
        # P elements each: one all-reduce of the gradients, one gather of the updated weights
        ("zero1_fp32", {"all_reduce": 1, "all_gather_into_tensor": 1}),
        # one reduce to each owner instead, which together carry P elements
        ("less_traffic_fp32", {"reduce": 1, "all_gather_into_tensor": 1}),
        ("zero0_fp16", {"all_reduce": 1}),
        ("ddp_fp32", {"all_reduce": 1}),
    ],
)
def test_what_an_update_sends_does_not_depend_on_accumulation(
    measured: list[dict[str, Any]], arm: str, expected: dict[str, int], accumulation: int
) -> None:
    line = one(measured, what="collectives", arm=arm, accumulation=accumulation)
    parameters = line["parameters"]
    assert parameters == 7872  # by hand: tests/drivers/arms.py's shape
    assert line["elements"] == {name: times * parameters for name, times in expected.items()}


def test_the_read_back_finds_every_number_that_is_not_what_was_given(
    measured: list[dict[str, Any]],
) -> None:
    said = one(measured, what="misread", arm="zero1_fp16")["said"]
    assert said.pop("nothing") == []
    assert {name: len(rows) > 0 for name, rows in said.items()} == dict.fromkeys(said, True)
    assert said["gradient_clipping"] == ["clipping"]
    assert said["zero_reduce_bucket_size"] == ["reduce bucket"]
    assert said["loss scale"] == ["initial loss scale"]
    ddp = one(measured, what="misread", arm="ddp_bf16")["said"]
    assert ddp == {"nothing": [], "native_amp": ["precision"]}


def test_two_worlds_of_one_are_refused(measured: list[dict[str, Any]]) -> None:
    said = one(measured, what="alone")["said"]
    assert "processes: Accelerate" in said and "<-- differs" in said
    assert "every rank trains alone on the same data" in said
