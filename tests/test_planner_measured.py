"""Reading a preflight's rates for the plan: a real result of two hosts, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipes.planner.hardware import Gpu, read_hardware
from recipes.planner.measured import missing, read_measured

# Of four ranks on two hosts, by `recipes/measure.py --sizes 8B,1MiB,16MiB` over gloo.
GOLDEN = Path(__file__).parent / "golden" / "preflight_two_hosts.json"
A100 = "NVIDIA A100-SXM4-80GB"


def tree() -> dict[str, Any]:
    """The result as if the ranks had been GPUs."""
    found: dict[str, Any] = json.loads(GOLDEN.read_text())
    found["measured"]["device"] = A100
    return found


def written(folder: Path, found: Any) -> Path:
    path = folder / "preflight.json"
    path.write_text(json.dumps(found))
    return path


@pytest.fixture
def gpu() -> Gpu:
    return read_hardware().gpu(A100)


def test_the_slowest_of_ranks_and_nodes_counts(tmp_path: Path, gpu: Gpu) -> None:
    path = written(tmp_path, tree())
    found = read_measured(path, gpu=gpu)
    assert found.path == str(path)
    # Read off the file: 16 MiB among two ranks of worker-1, the slower host; 16 B over all four.
    assert found.within_bytes_per_s == pytest.approx(0.9225e9, rel=1e-3)
    assert found.within_latency_s == pytest.approx(164.6e-6, rel=1e-3)
    assert found.between_bytes_per_s == pytest.approx(0.7495e9, rel=1e-3)
    assert found.between_latency_s == pytest.approx(1752.8e-6, rel=1e-3)
    flops = [rank["flops"] for rank in tree()["measured"]["matmul"]["ranks"]]
    assert found.matmul_flops == min(flops) < max(flops)
    assert missing(found) == []


def test_what_the_ranks_wrote_themselves_is_read_too(tmp_path: Path) -> None:
    whole, part = tree(), tree()["measured"]
    assert read_measured(written(tmp_path, part)) == read_measured(written(tmp_path, whole))


def test_one_node_says_nothing_about_the_network_between(tmp_path: Path) -> None:
    found = tree()
    found["measured"]["hosts"] = ["worker-0"] * 4
    found["measured"]["network"]["between"] = None
    result = read_measured(written(tmp_path, found))
    assert result.within_bytes_per_s == pytest.approx(0.7495e9, rel=1e-3)  # all ranks are one node
    assert result.between_bytes_per_s is None and result.between_latency_s is None
    (text,) = missing(result)
    assert text.startswith("bandwidth between nodes")


def test_a_link_stands_in_for_a_collective_that_was_too_slow(tmp_path: Path) -> None:
    found = tree()
    network = found["measured"]["network"]
    network["collectives"] = [c for c in network["collectives"] if c["group"] != "all"]
    result = read_measured(written(tmp_path, found))
    assert result.between_bytes_per_s == network["between"]["bytes_per_s"]


def test_a_wrong_or_small_result_is_not_taken(tmp_path: Path) -> None:
    found = tree()
    for line in found["measured"]["network"]["collectives"]:
        if line["host"] == "worker-1":
            line["correct"] = False
        if line["group"] == "all":
            line["bytes"] = min(line["bytes"], 2**20)
    found["measured"]["network"]["between"] = None
    result = read_measured(written(tmp_path, found))
    assert result.within_bytes_per_s == pytest.approx(1.0269e9, rel=1e-3)  # worker-0's
    assert result.between_bytes_per_s is None


def refused(path: Path, gpu: Gpu | None = None) -> str:
    with pytest.raises(ValueError) as caught:
        read_measured(path, gpu=gpu)
    return str(caught.value)


def test_a_cpus_rates_are_refused() -> None:
    assert "measured on a CPU" in refused(GOLDEN)
    assert "run octet preflight --hostfile hostfile" in refused(GOLDEN)


def test_another_gpus_rates_are_refused(tmp_path: Path) -> None:
    said = refused(written(tmp_path, tree()), gpu=read_hardware().gpu("h100-80gb"))
    assert f"was measured on {A100}, planned is h100-80gb" in said


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"measured": None}, "holds checks only"),
        ({"measured": {"schema": 2}}, "no result of octet preflight with schema 1"),
        ([1], "no result of octet preflight"),
        (
            {"measured": {"schema": 1, "device": A100, "matmul": None, "network": None}},
            "holds no rate that a plan can use",
        ),
    ],
)
def test_what_holds_nothing_says_what_to_run(tmp_path: Path, change: Any, message: str) -> None:
    assert message in refused(written(tmp_path, change))
    assert "run" in refused(written(tmp_path, change))


def test_an_unreadable_file_says_where_it_comes_from(tmp_path: Path) -> None:
    assert "outputs/preflight.json" in refused(tmp_path / "none.json")
    (tmp_path / "broken.json").write_text("{")
    assert "can't be read as preflight's JSON" in refused(tmp_path / "broken.json")


def changed(folder: Path, place: str, value: Any) -> Path:
    """The result with one value of every rank, or of every all-reduce, replaced."""
    found = tree()
    measured = found["measured"]
    *way, key = place.split(".")
    for part in way:
        measured = measured[part]
    for entry in measured if isinstance(measured, list) else [measured]:
        entry[key] = value
    return written(folder, found)


@pytest.mark.parametrize(
    ("place", "value", "told"),
    [
        ("matmul.ranks.flops", 1e18, "matmul.ranks.0.flops=1e+18: expected less than"),
        ("matmul.ranks.flops", 0, "matmul.ranks.0.flops=0: expected greater than"),
        ("matmul.ranks.flops", -5, "matmul.ranks.0.flops=-5: expected greater than"),
        ("matmul.ranks.flops", float("nan"), "matmul.ranks.0.flops=nan: expected a finite"),
        ("matmul.ranks.flops", "fast", "matmul.ranks.0.flops='fast': expected a valid number"),
        ("matmul.ranks", 3, "matmul.ranks=3: expected a valid list"),
        ("matmul", [1], "matmul=[1]: expected a valid dictionary"),
        ("matmul.dtype", "int8", "matmul.dtype='int8': expected 'float32'"),
        ("network.collectives", ["a"], "network.collectives.0='a': expected a valid dictionary"),
        ("network.collectives.seconds", 0, "network.collectives.0.seconds=0: expected greater"),
        ("network.collectives.bytes", "8", "network.collectives.0.bytes='8': expected a valid"),
        ("network.collectives.busbw_bytes_per_s", 0, "busbw_bytes_per_s=0.0: expected greater"),
        ("network.between.bytes_per_s", 0, "network.between.bytes_per_s=0: expected greater"),
        ("hosts", 5, "hosts=5: expected a valid list"),
        ("device", None, "device=None: expected a valid string"),
    ],
)
def test_a_damaged_value_is_told_with_its_place(
    tmp_path: Path, gpu: Gpu, place: str, value: Any, told: str
) -> None:
    path = changed(tmp_path, place, value)
    lines = refused(path, gpu=gpu).split("\n")
    assert all(line.startswith(f"{path}: ") for line in lines) and len(lines) <= 11
    assert told in lines[0], lines


def test_a_part_that_is_missing_is_told(tmp_path: Path, gpu: Gpu) -> None:
    found = tree()
    for line in found["measured"]["network"]["collectives"]:
        del line["bytes"]
    assert "network.collectives.0.bytes: missing" in refused(written(tmp_path, found), gpu=gpu)


def test_no_gpu_is_faster_than_its_peak(tmp_path: Path, gpu: Gpu) -> None:
    """312 TFLOP/s of an A100 in 16 bit, 19.5 in fp32; a boosted clock gives a few per cent."""
    assert read_measured(changed(tmp_path, "matmul.ranks.flops", 320e12), gpu=gpu).matmul_flops
    path = changed(tmp_path, "matmul.ranks.flops", 330e12)
    assert "3.3e+14 FLOP/s in bf16 are above a100-80gb's peak of 3.12e+14" in refused(path, gpu)
    found = tree()
    found["measured"]["matmul"] |= {"dtype": "float32", "ranks": [{"flops": 21e12}]}
    assert "in fp32 are above" in refused(written(tmp_path, found), gpu)
    found["measured"]["matmul"]["ranks"] = [{"flops": 19e12}]
    assert read_measured(written(tmp_path, found), gpu=gpu).matmul_dtype == "fp32"


def test_wrong_sums_are_counted_and_nothing_else_but_them_is_refused(
    tmp_path: Path, gpu: Gpu
) -> None:
    path = changed(tmp_path, "network.collectives.correct", False)
    assert "every all-reduce in it gave a wrong sum" in refused(path, gpu)
    found = tree()
    wrong = [c for c in found["measured"]["network"]["collectives"] if c["host"] == "worker-1"]
    for line in wrong:
        line["correct"] = False
    sums = sum(line["op"] == "all_reduce" for line in wrong)
    assert read_measured(written(tmp_path, found), gpu=gpu).wrong_sums == sums > 0
