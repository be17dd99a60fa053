"""The arm that --config names: read as Accelerate reads it, all faults at once."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from recipes.cluster.arm import KEYS, Arm, arm_env, read_arm

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = sorted((ROOT / "accelerate_configs").glob("*.yaml"))


def refused(folder: Path, text: str) -> list[str]:
    (folder / "arm.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError) as caught:
        read_arm(Path("arm.yaml"), folder)
    return str(caught.value).split("\n")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_file_is_an_arm(path: Path) -> None:
    arm = read_arm(path.relative_to(ROOT), ROOT)
    assert arm.path == path
    assert arm.kind == ("DDP" if "ddp" in path.stem else "DEEPSPEED")
    assert arm.cpu == path.stem.startswith("local")
    assert (arm.deepspeed_json is None) == (arm.kind == "DDP")
    if arm.deepspeed_json is not None:
        assert arm.deepspeed_json.is_absolute() and arm.deepspeed_json.is_file()
    hosts = 1 if arm.cpu else 2
    assert dict(arm.stated)["num_machines"] == hosts


def test_the_keys_are_those_that_accelerate_knows() -> None:
    from accelerate.commands.config.config_args import ClusterConfig

    assert set(KEYS) == {field.name for field in fields(ClusterConfig)}


def test_a_cpu_arm_hides_every_gpu_from_every_process() -> None:
    arm = Arm(path=Path("/a"), kind="DDP", deepspeed_json=None, cpu=True)
    assert arm_env(arm) == {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "-1"}
    assert arm_env(Arm(path=Path("/a"), kind="DDP", deepspeed_json=None, cpu=False)) == {}


@pytest.mark.parametrize("ids", ['"-1"', '"-1,-1"'])
def test_hidden_gpus_mean_the_cpu(ids: str, tmp_path: Path) -> None:
    (tmp_path / "arm.yaml").write_text(f"distributed_type: MULTI_GPU\ngpu_ids: {ids}\n")
    assert read_arm(Path("arm.yaml"), tmp_path).cpu


def test_the_json_is_looked_for_in_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text("{}")
    text = "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: ds.json}\n"
    (tmp_path / "arm.yaml").write_text(text)
    assert read_arm(tmp_path / "arm.yaml", tmp_path).deepspeed_json == tmp_path / "ds.json"


def test_all_faults_come_together(tmp_path: Path) -> None:
    text = """
distributed_type: DEEPSPEED
compute_environment: AMAZON_SAGEMAKER
num_machine: 2
num_processes: many
num_machines: 0
use_cpu: no
gpu_ids: 0,1
rdzv_backend: c10d
deepspeed_config:
  deepspeed_config_file: ds_configs/absent.json
  deepspeed_multinode_launcher: slurm
  deepspeed_hostfile: hosts
  zero_stage: 1
"""
    assert refused(tmp_path, text) == [
        f"11 faults in {tmp_path / 'arm.yaml'}:",
        "  num_machine: unknown key; did you mean num_machines?",
        "  num_machines=0: expected a whole number above zero",
        "  num_processes='many': expected a whole number above zero",
        "  use_cpu='no': expected true or false",
        "  compute_environment='AMAZON_SAGEMAKER': expected LOCAL_MACHINE",
        "  rdzv_backend='c10d': has no effect in a file; remove it (ranks follow the hostfile's "
        "order, which is the static rendezvous)",
        "  deepspeed_config.deepspeed_hostfile: remove it; hosts come from --hostfile, --include "
        "and --exclude",
        "  deepspeed_config.zero_stage: remove it; this stands in the DeepSpeed JSON",
        "  deepspeed_config.deepspeed_multinode_launcher='slurm': expected standard or pdsh; octet "
        "launch starts no other",
        "  deepspeed_config.deepspeed_config_file='ds_configs/absent.json' can't be read: No such "
        f"file or directory; it is relative to the working directory, {tmp_path}",
        "  gpu_ids='0,1' would hold on every host; remove it, and choose GPUs with --include or "
        "--exclude",
    ]


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("MULTI_CPU", "write MULTI_GPU, with use_cpu: true to run on the CPU"),
        ("NO", "Accelerate starts a single process for it; write MULTI_GPU"),
        ("FSDP", "this recipe runs DEEPSPEED and MULTI_GPU"),
        ("", "distributed_type=None: this recipe runs DEEPSPEED and MULTI_GPU"),
    ],
)
def test_another_strategy_is_refused_with_its_remedy(
    kind: str, remedy: str, tmp_path: Path
) -> None:
    assert remedy in refused(tmp_path, f"distributed_type: {kind}\n")[1]


def test_an_unquoted_number_of_a_gpu_is_refused_since_accelerate_crashes_on_it(
    tmp_path: Path,
) -> None:
    found = refused(tmp_path, "distributed_type: MULTI_GPU\ngpu_ids: -1\n")
    assert found[1:] == ["  gpu_ids=-1: expected text; put it between quotes"]


@pytest.mark.parametrize("section", ["", "deepspeed_config: {}", "deepspeed_config: [1]"])
def test_deepspeed_without_a_json_is_refused(section: str, tmp_path: Path) -> None:
    found = refused(tmp_path, f"distributed_type: DEEPSPEED\n{section}\n")
    assert "deepspeed_config_file" in found[1]


def test_a_broken_json_is_told(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text("{")
    text = "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: ds.json}\n"
    assert "'ds.json' is not valid JSON: " in refused(tmp_path, text)[1]


@pytest.mark.parametrize(("text", "told"), [("- a\n", "holds list"), ("a: [", "not valid YAML")])
def test_what_is_no_mapping_is_refused(text: str, told: str, tmp_path: Path) -> None:
    assert told in refused(tmp_path, text)[0]


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="absent.yaml can't be read"):
        read_arm(Path("absent.yaml"), tmp_path)
