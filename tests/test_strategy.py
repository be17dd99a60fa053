"""Strategy files: the shipped ones agree with everything they repeat, wrong ones are refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipes.cluster.hostfile import read_hostfile
from recipes.engine.strategy import Strategy, filled, json_faults, read_strategy
from recipes.objective import legal_worlds, plan_batch
from recipes.runfile import load_run, read_yaml

ROOT = Path(__file__).resolve().parent.parent
YAMLS = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
JSONS = sorted((ROOT / "ds_configs").glob("*.json"))
ZERO1_FP16 = json.loads((ROOT / "ds_configs" / "zero1_fp16.json").read_text())
ZERO1_BF16 = json.loads((ROOT / "ds_configs" / "zero1_bf16.json").read_text())


@pytest.fixture(autouse=True)
def _in_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # paths inside a YAML are relative to the working directory


# ---- the shipped files


def test_the_shipped_files_are_looked_at() -> None:
    assert {p.stem for p in YAMLS} >= {"ddp_fp16", "ddp_bf16", "zero1_fp16", "zero1_bf16"}
    assert {p.stem for p in JSONS} >= {"zero0_fp16", "zero1_fp16", "zero1_bf16"}


@pytest.mark.parametrize("path", YAMLS, ids=lambda p: p.stem)
def test_a_shipped_yaml_is_the_arm_of_its_name(path: Path) -> None:
    strategy = read_strategy(str(path), None, {})
    kind, precision = path.stem.removeprefix("local_").split("_")
    title = {"ddp": "DDP", "zero0": "ZeRO-0", "zero1": "ZeRO-1"}[kind]
    assert strategy.title == f"{title} {precision}"
    assert strategy.cpu is path.stem.startswith("local_")
    assert (strategy.stage is None) == (kind == "ddp")


@pytest.mark.parametrize("path", YAMLS, ids=lambda p: p.stem)
def test_a_shipped_yaml_counts_as_the_hostfile_does(path: Path) -> None:
    tree, hosts = read_yaml(path), read_hostfile(ROOT / "hostfile")
    if path.stem.startswith("local_"):
        assert (tree["num_machines"], tree["num_processes"]) == (1, 2)
        assert set(tree["gpu_ids"].split(",")) == {"-1"}  # or the launcher would show the GPUs
    else:
        assert tree["num_machines"] == len(hosts)
        assert tree["num_processes"] == sum(host.slots for host in hosts)
        assert tree["main_process_ip"] == hosts[0].name


@pytest.mark.parametrize("path", YAMLS, ids=lambda p: p.stem)
def test_accelerate_itself_reads_a_shipped_yaml(path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    ours, theirs = read_yaml(path), load_config_from_file(str(path))  # refuses unknown keys
    assert (
        str(getattr(theirs.distributed_type, "value", theirs.distributed_type))
        == (ours["distributed_type"])
    )
    assert theirs.num_processes == ours["num_processes"]
    assert theirs.use_cpu is ours["use_cpu"]
    if ours["distributed_type"] == "DEEPSPEED":
        assert Path(theirs.deepspeed_config["deepspeed_config_file"]).is_file()
        assert "mixed_precision" not in ours  # the JSON is its only home
        if ours["num_machines"] > 1:  # the other launchers start ssh or mpi by themselves
            assert theirs.deepspeed_config["deepspeed_multinode_launcher"] == "standard"
    else:
        assert theirs.mixed_precision == ours["mixed_precision"]


@pytest.mark.parametrize("path", JSONS, ids=lambda p: p.stem)
def test_a_shipped_json_has_no_fault_and_owns_no_number_of_the_run_file(path: Path) -> None:
    tree = json.loads(path.read_text())
    assert json_faults(tree) == []
    for key in (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
    ):
        assert tree[key] == "auto"


def test_both_fp16_arms_start_from_the_same_loss_scale() -> None:
    scalers = [json.loads(p.read_text())["fp16"] for p in JSONS if "fp16" in p.stem]
    assert len(scalers) >= 3 and all(scaler == scalers[0] for scaler in scalers)


# ---- what a JSON may not say


def change(tree: dict[str, Any], place: str, value: Any) -> dict[str, Any]:
    """A copy with one value put at a dotted place."""
    tree = copy.deepcopy(tree)
    node = tree
    *sections, leaf = place.split(".")
    for name in sections:
        node = node.setdefault(name, {})
    node[leaf] = value
    return tree


@pytest.mark.parametrize(
    ("base", "place", "value", "fault"),
    [
        (ZERO1_FP16, "zero_optimization.stage", 2, "zero_optimization.stage=2: expected 1, or 0"),
        (ZERO1_FP16, "zero_optimization.stage", 3, "zero_optimization.stage=3: expected 1, or 0"),
        (ZERO1_FP16, "zero_optimization.stage", "1", "zero_optimization.stage='1'"),
        (ZERO1_FP16, "zero_optimization.stage", True, "zero_optimization.stage=True"),
        (ZERO1_FP16, "zero_optimization.reduce_bucket_size", -5, "reduce_bucket_size=-5: write"),
        (ZERO1_FP16, "zero_optimization.reduce_bucket_size", "auto", "write a number of elements"),
        (
            ZERO1_FP16,
            "zero_optimization.allgather_bucket_size",
            5e8,
            "allgather_bucket_size=500000",
        ),
        (ZERO1_FP16, "zero_optimization.reduce_bucket_size", True, "reduce_bucket_size=True"),
        (ZERO1_FP16, "zero_optimization.reduce_bucket_size", None, "reduce_bucket_size=None"),
        (ZERO1_FP16, "optimizer", {"type": "Adam"}, "optimizer: remove it"),
        (ZERO1_FP16, "scheduler", {}, "scheduler: remove it"),
        (ZERO1_FP16, "bf16.enabled", True, "fp16 and bf16 are both enabled; enable one"),
        (ZERO1_FP16, "fp16.enabled", "true", "fp16.enabled='true': expected true or false"),
        (ZERO1_BF16, "bf16.enabled", "auto", "bf16.enabled='auto': expected true or false"),
        (
            ZERO1_BF16,
            "zero_optimization.offload_optimizer",
            {"device": "cpu"},
            "zero_optimization.offload_optimizer: offloading is not supported",
        ),
        (
            ZERO1_BF16,
            "zero_optimization.offload_param",
            {"device": "nvme"},
            "zero_optimization.offload_param: offloading is not supported",
        ),
        (ZERO1_BF16, "bf16.check_grad_overflow", False, "would apply non-finite gradients"),
        (ZERO1_BF16, "zero_optimization.stage", 0, "stage 0 is the fp16 comparison arm only"),
    ],
)
def test_a_json_that_cannot_be_honoured_is_named(
    base: dict[str, Any], place: str, value: Any, fault: str
) -> None:
    assert json_faults(base) == []
    found = json_faults(change(base, place, value))
    assert len(found) == 1 and fault in found[0], found


@pytest.mark.parametrize("value", [True, None, "auto", []])
def test_a_precision_that_is_no_object_is_a_fault_and_no_crash(value: Any) -> None:
    found = json_faults(change(ZERO1_FP16, "fp16", value))
    assert found and "fp16" in found[0]


@pytest.mark.parametrize("tree", [[], "x", None, {}, {"zero_optimization": 1}])
def test_a_json_without_a_stage_is_refused(tree: Any) -> None:
    assert json_faults(tree) == ["expected an object with zero_optimization.stage"]


def test_all_faults_of_a_json_come_together(tmp_path: Path) -> None:
    tree = change(change(ZERO1_FP16, "zero_optimization.stage", 2), "optimizer", {})
    tree = change(tree, "bf16.enabled", True)
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(tree))
    with pytest.raises(ValueError) as caught:
        read_strategy(None, str(path), {})
    head, *lines = str(caught.value).split("\n")
    assert head == f"3 problems in {path}:" and len(lines) == 3


# ---- filling in the run file's numbers


def strings(tree: Any) -> list[str]:
    """Every text value at any depth."""
    if isinstance(tree, dict):
        return [text for value in tree.values() for text in strings(value)]
    if isinstance(tree, list):
        return [text for value in tree for text in strings(value)]
    return [tree] if isinstance(tree, str) else []


def fill(tree: dict[str, Any], world: int = 8) -> dict[str, Any]:
    """`filled` for the mission's run file."""
    run = load_run("recipes/runs/gpt2_xl.yaml")
    worlds = legal_worlds(run.batch, lanes=run.data.lanes, workers=run.data.workers)
    strategy = Strategy(
        kind="DEEPSPEED", precision="fp16", cpu=None, origin="the test", deepspeed=tree
    )
    return filled(strategy, run, plan_batch(run.batch, world, worlds))


@pytest.mark.parametrize("path", JSONS, ids=lambda p: p.stem)
def test_no_auto_is_left_after_filling(path: Path) -> None:
    tree = json.loads(path.read_text())
    before = copy.deepcopy(tree)
    result = fill(tree)
    assert "auto" not in strings(result)
    assert tree == before  # the strategy itself keeps its words
    assert result["zero_optimization"] == tree["zero_optimization"]


def test_the_filled_numbers_are_the_run_files() -> None:
    for world, accumulation in ((8, 6), (6, 8), (4, 12)):  # 768 / (world * 16)
        result = fill(ZERO1_FP16, world)
        assert result["train_batch_size"] == 768
        assert result["train_micro_batch_size_per_gpu"] == 16
        assert result["gradient_accumulation_steps"] == accumulation
        assert result["gradient_clipping"] == 1.0
    assert result["wall_clock_breakdown"] is False and result["steps_per_print"] >= 10**9


def test_a_json_may_leave_the_numbers_out_or_repeat_them() -> None:
    bare = {k: v for k, v in ZERO1_FP16.items() if v != "auto"}
    assert fill(bare) == fill(ZERO1_FP16) == fill(change(ZERO1_FP16, "train_batch_size", 768))


@pytest.mark.parametrize(
    "place", ["zero_optimization.overlap_comm", "fp16.loss_scale", "fp16.initial_scale_power"]
)
def test_an_auto_that_the_run_file_cannot_fill_is_refused(place: str) -> None:
    tree = change(ZERO1_FP16, place, "auto")
    found = json_faults(tree)
    if not found:
        with pytest.raises(ValueError, match="auto"):
            fill(tree)


def test_numbers_that_contradict_the_run_file_are_refused_together() -> None:
    tree = change(change(ZERO1_FP16, "train_batch_size", 512), "gradient_clipping", 0.5)
    with pytest.raises(ValueError) as caught:
        fill(tree)
    assert str(caught.value).split("\n") == [
        'train_batch_size=512 in the test: the run file makes it 768; write "auto"',
        'gradient_clipping=0.5 in the test: the run file makes it 1.0; write "auto"',
    ]


# ---- which arm was asked for

ZERO1_ENV = {
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds_configs/zero1_fp16.json",
    "ACCELERATE_MIXED_PRECISION": "no",  # what accelerate launch exports beside a JSON
}


@pytest.mark.parametrize(
    ("accelerate", "deepspeed", "environ", "title"),
    [
        ("accelerate_configs/ddp_bf16.yaml", None, {}, "DDP bf16"),
        ("accelerate_configs/zero1_bf16.yaml", None, {}, "ZeRO-1 bf16"),
        (None, "ds_configs/zero0_fp16.json", {}, "ZeRO-0 fp16"),
        (None, None, ZERO1_ENV, "ZeRO-1 fp16"),
        (None, None, {"ACCELERATE_MIXED_PRECISION": "fp16"}, "DDP fp16"),
        (None, None, {"ACCELERATE_MIXED_PRECISION": "no"}, "DDP fp32"),
        (
            None,
            None,
            {"ACCELERATE_USE_DEEPSPEED": "false", "ACCELERATE_MIXED_PRECISION": "bf16"},
            "DDP bf16",
        ),
        # the same arm, said twice
        ("accelerate_configs/zero1_fp16.yaml", None, ZERO1_ENV, "ZeRO-1 fp16"),
        ("accelerate_configs/zero1_fp16.yaml", "ds_configs/zero1_fp16.json", {}, "ZeRO-1 fp16"),
        (
            "accelerate_configs/ddp_fp16.yaml",
            None,
            {"ACCELERATE_MIXED_PRECISION": "fp16"},
            "DDP fp16",
        ),
    ],
)
def test_each_way_to_name_an_arm(
    accelerate: str | None, deepspeed: str | None, environ: dict[str, str], title: str
) -> None:
    assert read_strategy(accelerate, deepspeed, environ).title == title


def test_only_a_yaml_says_whether_the_run_is_on_the_cpu() -> None:
    assert read_strategy("accelerate_configs/local_zero1_bf16.yaml", None, {}).cpu is True
    assert read_strategy("accelerate_configs/zero1_bf16.yaml", None, {}).cpu is False
    assert read_strategy(None, "ds_configs/zero1_bf16.json", {}).cpu is None
    assert read_strategy(None, None, ZERO1_ENV).cpu is None


def test_no_arm_is_refused_with_the_ways_to_name_one() -> None:
    with pytest.raises(ValueError, match="no strategy is named; start with accelerate launch"):
        read_strategy(None, None, {})


@pytest.mark.parametrize(
    ("accelerate", "deepspeed", "environ", "told"),
    [
        (
            "accelerate_configs/zero1_bf16.yaml",
            None,
            ZERO1_ENV,
            "zero1_bf16.yaml and ZeRO-1 fp16 by accelerate launch with ds_configs/zero1_fp16",
        ),
        (
            "accelerate_configs/ddp_fp16.yaml",
            "ds_configs/zero1_fp16.json",
            {},
            "DDP fp16 by accelerate_configs/ddp_fp16.yaml and ZeRO-1 fp16 by ds_configs/",
        ),
        (
            "accelerate_configs/zero1_fp16.yaml",
            "ds_configs/zero1_fp16_less_traffic.json",  # one knob apart, and the same title
            {},
            "two strategies are named",
        ),
        ("accelerate_configs/ddp_fp16.yaml", None, {"ACCELERATE_MIXED_PRECISION": "bf16"}, "two"),
    ],
)
def test_two_different_arms_are_refused(
    accelerate: str | None, deepspeed: str | None, environ: dict[str, str], told: str
) -> None:
    with pytest.raises(ValueError) as caught:
        read_strategy(accelerate, deepspeed, environ)
    assert told in str(caught.value) and str(caught.value).endswith("; name one")


def test_deepspeed_without_a_json_is_refused() -> None:
    with pytest.raises(ValueError, match="without deepspeed_config_file; name one of ds_configs"):
        read_strategy(None, None, {"ACCELERATE_USE_DEEPSPEED": "true"})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("distributed_type: FSDP\n", "distributed_type='FSDP'"),
        ("- 1\n", "distributed_type=None"),
        ("", "distributed_type=None"),
        ("distributed_type: DEEPSPEED\n", "needs deepspeed_config.deepspeed_config_file"),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 1}\n",
            "needs deepspeed_config.deepspeed_config_file",
        ),
        ("distributed_type: MULTI_GPU\nmixed_precision: fp8\n", "expected no, fp16 or bf16"),
        ("distributed_type: MULTI_GPU\nmixed_precision: bf16\n" * 2, "duplicate key"),
    ],
)
def test_a_yaml_that_cannot_be_honoured_is_refused(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "arm.yaml"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        read_strategy(str(path), None, {})
    assert told in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "make", "told"),
    [
        ("absent.json", lambda path: None, "can't be read: No such file or directory; paths are"),
        ("half.json", lambda path: path.write_text('{"fp16":'), "is not valid JSON: Expecting"),
    ],
)
def test_an_unreadable_json_is_refused(
    name: str, make: Callable[[Path], Any], told: str, tmp_path: Path
) -> None:
    make(tmp_path / name)
    with pytest.raises(ValueError, match=told):
        read_strategy(None, str(tmp_path / name), {})
