"""The gradient self-test on two real ranks: silent on sound engines, precise about faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from launching import BIN, ROOT, Launched, free_port, records, run

from recipes.engine import selftest, toy, trial
from recipes.engine.strategy import Strategy, read_strategy

DRIVER = "tests/drivers/selftests.py"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("selftest")
    ended = run("torchrun", 2, [DRIVER, str(folder / "results")], folder / "log")
    assert ended.code == 0, ended.text[-4000:]
    lines = [json.loads(line) for line in (folder / "results").read_text().splitlines()]
    return {line["case"]: line for line in lines}


def test_every_shipped_arm_passes(found: dict[str, Any]) -> None:
    sound = found["nothing"]
    assert sound["passed"], [arm["differs"] for arm in sound["arms"]]
    assert [(arm["arm"], arm["origin"]) for arm in sound["arms"]] == [
        ("ZeRO-1 bf16", "ds_configs/zero1_bf16.json"),
        ("ZeRO-1 bf16 in small buckets", "ds_configs/zero1_bf16.json"),
        ("ZeRO-0 fp16", "ds_configs/zero0_fp16.json"),
        ("ZeRO-1 fp16", "ds_configs/zero1_fp16.json"),
        (
            "ZeRO-1 fp16 (zero1_fp16_less_traffic)",
            "ds_configs/zero1_fp16_less_traffic.json",
        ),
        ("DDP fp32", "DDP"),
        ("DDP bf16", "DDP"),
    ]
    assert [arm["own"] for arm in sound["arms"]] == [True, True] + 5 * [False]
    assert sound["left_out"] == [
        {"arm": "DDP fp16 (DDP)", "reason": "Accelerate turns fp16 off on the CPU"}
    ]


def test_a_sound_engine_stays_well_below_its_tolerance(found: dict[str, Any]) -> None:
    shares = {a["arm"]: a["error"] / a["tolerance"] for a in found["nothing"]["arms"]}
    assert max(shares.values()) < 0.5, shares


def test_a_fault_of_a_few_per_cent_is_above_every_tolerance() -> None:
    for precision in ("fp32", "fp16", "bf16"):
        rows, _ = toy.tolerances(precision, world=1024)
        assert rows < 0.05, "the rows' tolerance must not grow with the number of ranks"
        assert toy.tolerances(precision, world=8)[1] < 0.1
    assert toy.tolerances("fp32", 8)[0] < toy.tolerances("fp16", 8)[0]


def test_the_process_is_left_as_it_was(found: dict[str, Any]) -> None:
    # torch names its cache by a variable as soon as its compiler is imported.
    assert set(found["nothing"]["environment_changed"]) <= {"TORCHINDUCTOR_CACHE_DIR"}


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("dropped", ["the gradient of rank 1's micro-batch 2 of 3", "about 0 times"]),
        ("divided twice", ["the gradient of", "about 0.33", "seen on every rank"]),
        ("unreduced", ["the gradient of", "about 0"]),
        ("unscaled", ["the gradient of", "about 3.1e-05 times"]),
        ("scaled norm", ["the reported gradient norm in update 1", "about 3.3e+04 times"]),
    ],
)
def test_a_planted_fault_is_named_in_every_arm(
    found: dict[str, Any], case: str, words: list[str]
) -> None:
    for arm in found[case]["arms"]:
        assert not arm["passed"], (case, arm["arm"])
        assert all(word in arm["differs"] for word in words), arm["differs"]


def test_a_rank_that_alone_is_wrong_is_named(found: dict[str, Any]) -> None:
    zero1, ddp = found["stale"]["arms"]
    assert zero1["differs"].startswith("this rank's copy of rows.weight after the last update")
    assert zero1["differs"].endswith("seen on rank 1") and not ddp["passed"]
    assert found["unreduced"]["arms"][-1]["differs"].endswith("seen on rank 1")


def test_what_comes_first_is_told_and_not_what_follows_from_it() -> None:
    gradient = trial.Check(what="gradient", error=0.2, tolerance=0.1, factor=0.8)
    weights = trial.Check(what="weights", error=9.0, tolerance=0.1, factor=0.8, depth=3)
    fine = trial.Check(what="fine", error=0.09, tolerance=0.1, factor=1.0)
    assert max([weights, gradient, fine], key=lambda c: c.telling) is gradient
    no_number = trial.Check(what="nan", error=float("nan"), tolerance=0.1, factor=1.0)
    assert max([fine, no_number], key=lambda c: c.telling) is no_number


def test_the_toys_micro_batches_are_uneven_on_every_rank() -> None:
    for number in range(len(toy.RATES)):
        counts = [[toy.count(batch) for batch in rank] for rank in toy.window(number, 3)]
        assert all(len(set(rank)) > 1 for rank in counts)
        assert len({sum(rank) for rank in counts}) > 1
    reference = toy.Reference.compute(2, cpu=True)
    clipped = [norm > reference.clip for norm in reference.norms]
    assert clipped == [False, True, False]


def test_the_runs_own_arm_is_tested_by_its_exact_json() -> None:
    own = read_strategy(None, "ds_configs/zero1_fp16.json", {})
    assert own.deepspeed is not None
    tree = own.deepspeed | {"zero_optimization": own.deepspeed["zero_optimization"].copy()}
    tree["zero_optimization"]["overlap_comm"] = True
    overlapped = Strategy(kind="DEEPSPEED", precision="fp16", cpu=True, origin="x", deepspeed=tree)
    exact, small = selftest.own_arms(overlapped, 2, cpu=True)
    assert exact.strategy is overlapped and exact.name == "ZeRO-1 fp16 with overlap_comm"
    assert small.strategy.deepspeed is not None
    zero = small.strategy.deepspeed["zero_optimization"]
    assert zero["reduce_bucket_size"] * selftest.SEVERAL <= sum(toy.sizes(2, cpu=True))
    assert zero["overlap_comm"] is True


@pytest.fixture
def overlapping(tmp_path: Path) -> str:
    """The shipped ZeRO-1 bf16 arm with overlap_comm."""
    tree = json.loads((ROOT / "ds_configs/zero1_bf16.json").read_text())
    tree["zero_optimization"]["overlap_comm"] = True
    path = tmp_path / "overlap.json"
    path.write_text(json.dumps(tree))
    return str(path)


def test_overlap_trains_after_its_self_test_as_without(
    tiny_run: Path, tmp_path: Path, overlapping: str
) -> None:
    losses = []
    for name, config in (("with", overlapping), ("without", "ds_configs/zero1_bf16.json")):
        folder = tmp_path / name
        script = ["recipes/pretrain.py", str(tiny_run), "schedule.updates=4"]
        script += [f"output_dir={folder}", "--deepspeed_config", config]
        env = {"DS_ACCELERATOR": "cpu"}
        ended = run("torchrun", 2, script, tmp_path / f"{name}.log", env=env)
        assert ended.code == 0, ended.text[-4000:]
        losses.append([(r["loss"], r["grad_norm"]) for r in records(folder)])
    assert len(losses[0]) == 4 and losses[0] == losses[1]  # to the last bit, dropout included


def test_overlap_that_fails_its_self_test_is_refused(
    tiny_run: Path, tmp_path: Path, overlapping: str
) -> None:
    head = [str(BIN / "torchrun"), "--nproc_per_node", "2", "--master_port", str(free_port())]
    arguments = [str(tiny_run), f"output_dir={tmp_path / 'run'}", "--deepspeed_config", overlapping]
    with Launched([*head, DRIVER, "halved", *arguments], tmp_path / "log") as launched:
        ended = launched.wait()
    assert ended.code != 0
    assert f"overlap_comm=true in {overlapping}: the gradient self-test" in ended.text
    assert "ZeRO-1 bf16 with overlap_comm: the gradient of" in ended.text
    assert "about 0.5 times what it should be" in ended.text
    assert ended.text.count("set overlap_comm to false") == 1, "every rank finds it, one tells it"
    assert "exitcode  : 2" in ended.text and not (tmp_path / "run" / "metrics.jsonl").exists()
