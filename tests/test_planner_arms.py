"""`octet plan --config`: what the engine would refuse is refused, and nothing crashes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from planned import ROOT, XL, answered, plan

JSON: dict[str, Any] = json.loads((ROOT / "ds_configs" / "zero1_fp16.json").read_text())
ARM = (ROOT / "accelerate_configs" / "zero1_fp16.yaml").read_text()
DDP = (ROOT / "accelerate_configs" / "ddp_fp16.yaml").read_text()


def written(folder: Path, tree: Any) -> str:
    """An arm whose JSON is `tree`."""
    (folder / "own.json").write_text(json.dumps(tree))
    path = folder / "own.yaml"
    path.write_text(ARM.replace("ds_configs/zero1_fp16.json", str(folder / "own.json")))
    return str(path)


def zero(**changes: Any) -> dict[str, Any]:
    """The shipped JSON with other values under zero_optimization."""
    return JSON | {"zero_optimization": JSON["zero_optimization"] | changes}


@pytest.mark.parametrize(
    ("tree", "told"),
    [
        ([1], "expected an object with zero_optimization.stage"),
        (JSON | {"zero_optimization": [1]}, "expected an object with zero_optimization.stage"),
        (zero(stage=5), "zero_optimization.stage=5"),
        (zero(stage=True), "zero_optimization.stage=True: expected a whole number"),
        (zero(stage=1.0), "zero_optimization.stage=1.0: expected a whole number"),
        (zero(stage="auto"), "zero_optimization.stage='auto'"),
        (zero(reduce_bucket_size=None), "reduce_bucket_size=None: write a number"),
        (zero(reduce_bucket_size=[1]), "reduce_bucket_size=[1]: write a number"),
        (zero(reduce_bucket_size="big"), "reduce_bucket_size='big': write a number"),
        (zero(reduce_bucket_size=float("inf")), "reduce_bucket_size=inf: write a number"),
        (zero(reduce_bucket_size=5e8), "reduce_bucket_size=500000000.0: write a number"),
        (zero(reduce_bucket_size=-5), "reduce_bucket_size=-5: write a number of elements"),
        (zero(stage=2, reduce_bucket_size=0), "reduce_bucket_size=0: write a number of elements"),
        (zero(stage=3, reduce_bucket_size="big"), "reduce_bucket_size='big': write a number"),
        (zero(overlap_comm="auto"), 'overlap_comm="auto"'),
        (zero(overlap_comm=2), "overlap_comm=2: expected true or false"),
        (zero(offload_optimizer={"device": "cpu"}), "offloading is not supported"),
        (JSON | {"bf16": {"enabled": True}}, "fp16 and bf16 are both enabled"),
        (JSON | {"fp16": {"enabled": 1}}, "fp16.enabled=1: expected true or false"),
        (JSON | {"fp16": {"enabled": "auto"}}, "fp16.enabled='auto'"),
        (JSON | {"fp16": []}, "fp16=[]: expected an object"),
        (JSON | {"optimizer": {}}, "optimizer: remove it"),
        (JSON | {"train_micro_batch_size_per_gpu": 4}, "the run file makes it 16"),
    ],
)
def test_what_the_engine_refuses_can_t_be_planned(tmp_path: Path, tree: Any, told: str) -> None:
    code, out, err = plan(*XL, "--config", written(tmp_path, tree))
    assert (code, out) == (2, "")
    assert told in err and "own.json" in err, err


def test_all_faults_of_a_json_are_told_at_once(tmp_path: Path) -> None:
    tree = zero(reduce_bucket_size=-1, overlap_comm=3, offload_param={"device": "cpu"})
    code, _, err = plan(*XL, "--price", "-1", "--config", written(tmp_path, tree))
    assert code == 2
    assert "3 problems in" in err and "--price -1" in err


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"stage": 2}, "ZeRO-2 can be planned, not started"),
        ({"stage": 3}, "ZeRO-3 can be planned, not started"),
        ({"allgather_bucket_size": "auto"}, '"auto" can be planned, not started'),
        ({"stage": 2, "reduce_scatter": False}, "reduce_scatter=false is planned as true"),
    ],
)
def test_what_can_be_planned_alone_says_so(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    found = answered(tmp_path, *XL, "--config", written(tmp_path, zero(**changes)))
    assert any(told in note for note in found["notes"])
    assert found["strategy"]["asked"]["config"] is None
    assert "own.yaml" not in found["strategy"]["start"]["command"]


def test_without_reduce_scatter_nothing_is_less_traffic(tmp_path: Path) -> None:
    both = {"use_multi_rank_bucket_allreduce": False}
    for more, name in (({}, "ZeRO-1, less traffic"), ({"reduce_scatter": False}, "ZeRO-1")):
        path = written(tmp_path, zero(**both, **more))
        assert answered(tmp_path, *XL, "--config", path)["strategy"]["asked"]["name"] == name


def test_a_number_that_the_json_repeats_is_warned_of(tmp_path: Path) -> None:
    path = written(tmp_path, JSON | {"train_micro_batch_size_per_gpu": 16})
    found = answered(tmp_path, *XL, "--config", path)
    assert any("=16 holds for this micro-batch alone" in note for note in found["notes"])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (DDP.replace("fp16", "[fp16]"), "mixed_precision=['fp16']"),
        (DDP.replace("fp16", "fp8"), "mixed_precision='fp8'"),
        (ARM + "mixed_precision: fp16\n", "mixed_precision in"),
    ],
)
def test_a_yaml_s_precision_is_checked(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "own.yaml").write_text(text)
    code, _, err = plan(*XL, "--config", str(tmp_path / "own.yaml"))
    assert code == 2
    assert told in err, err
