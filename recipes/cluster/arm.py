"""The arm that `--config` names: an Accelerate YAML, as far as starting the job depends on it."""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from recipes.runfile import read_yaml

# What accelerate 1.15 knows; it refuses a file with any other key.
KEYS = (
    *("compute_environment", "distributed_type", "mixed_precision", "use_cpu", "debug", "gpu_ids"),
    *("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port"),
    *("rdzv_backend", "same_network", "main_training_function", "enable_cpu_affinity"),
    *("fp8_config", "deepspeed_config", "fsdp_config", "parallelism_config", "dynamo_config"),
    *("megatron_lm_config", "mpirun_config", "downcast_bf16", "command_file", "commands"),
    *("tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_env"),
)
# What may stand beside a DeepSpeed JSON.
DEEPSPEED_KEYS = ("deepspeed_config_file", "deepspeed_multinode_launcher", "zero3_init_flag")
MULTINODE_LAUNCHERS = ("standard", "pdsh")


@dataclass(frozen=True, kw_only=True)
class Arm:
    """Strategy and device of a job, as the launchers must know them.

    Attributes:
        path: the Accelerate YAML, absolute.
        deepspeed_json: absolute; None for DDP.
        cpu: whether the ranks run on the CPU: `use_cpu`, or `gpu_ids` that hide every GPU.
        gpu_ids: as the YAML has them, for Accelerate counts them.
        stated: machine and process counts and the multi-node launcher that the YAML states and that
            hostfile and `--launcher` override.
    """

    path: Path
    kind: Literal["DEEPSPEED", "DDP"]
    deepspeed_json: Path | None
    cpu: bool
    gpu_ids: str = "all"
    stated: tuple[tuple[str, int | str], ...] = ()


def read_arm(path: Path, working_dir: Path) -> Arm:
    """Read what `--config` names; a `deepspeed_config_file` in it is relative to `working_dir`.

    Raises:
        ValueError: all faults together.
    """
    path = working_dir / path
    tree = read_yaml(path)
    if isinstance(tree, dict) and "distributed_type" not in tree:
        other = "a run file" if "batch" in tree else "DeepSpeed's JSON" if _is_json(tree) else ""
        if other:
            raise ValueError(
                f"--config {path} is {other}; expected one of accelerate_configs/*.yaml, and the "
                "run file without an option"
            )
    if not isinstance(tree, dict):
        raise ValueError(
            f"{path} holds {type(tree).__name__}, expected keys such as distributed_type"
        )
    faults = [_unknown(str(key)) for key in tree if key not in KEYS]
    faults += _type_faults(tree)
    kind, found = _kind(tree)
    faults += found
    section = tree.get("deepspeed_config") or {}
    deepspeed_json = None
    if kind == "DEEPSPEED":
        deepspeed_json, found = _deepspeed(section, working_dir)
        faults += found
    gpu_ids = str(tree.get("gpu_ids") or "all")
    hidden = bool(re.fullmatch(r"-1(,-1)*", gpu_ids.replace(" ", "")))
    if gpu_ids != "all" and not hidden:
        faults.append(
            f"gpu_ids={gpu_ids!r} would hold on every host; remove it, and choose GPUs with "
            "--include or --exclude"
        )
    if faults:
        count = f"{len(faults)} fault{'s' if len(faults) > 1 else ''}"
        raise ValueError(f"{count} in {path}:\n" + "\n".join(f"  {fault}" for fault in faults))
    stated = {key: tree[key] for key in ("num_machines", "num_processes") if key in tree}
    if kind == "DEEPSPEED" and "deepspeed_multinode_launcher" in section:
        stated["deepspeed_multinode_launcher"] = section["deepspeed_multinode_launcher"]
    return Arm(
        path=path,
        kind=kind,
        deepspeed_json=deepspeed_json,
        cpu=bool(tree.get("use_cpu", False)) or hidden,
        gpu_ids=gpu_ids,
        stated=tuple(stated.items()),
    )


def _is_json(tree: dict[str, Any]) -> bool:
    return "zero_optimization" in tree


def arm_env(arm: Arm) -> dict[str, str]:
    """What keeps every process of a CPU arm off the GPUs; Accelerate does not pass use_cpu on."""
    return {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "-1"} if arm.cpu else {}


def _unknown(key: str) -> str:
    near = difflib.get_close_matches(key, KEYS, n=1)
    remedy = f"did you mean {near[0]}?" if near else "remove it; Accelerate refuses the file"
    return f"{key}: unknown key; {remedy}"


def _kind(tree: dict[str, Any]) -> tuple[Literal["DEEPSPEED", "DDP"], list[str]]:
    kind = tree.get("distributed_type")
    if kind in ("DEEPSPEED", "MULTI_GPU"):
        return ("DEEPSPEED" if kind == "DEEPSPEED" else "DDP"), []
    if kind in ("MULTI_CPU", "NO"):
        remedy = "Accelerate starts a single process for it; write MULTI_GPU"
        remedy += ", with use_cpu: true to run on the CPU" if kind == "MULTI_CPU" else ""
    else:
        remedy = "this recipe runs DEEPSPEED and MULTI_GPU (DDP)"
    return "DDP", [f"distributed_type={kind!r}: {remedy}"]


def _type_faults(tree: dict[str, Any]) -> list[str]:
    faults = []
    for key in ("num_machines", "num_processes"):
        value = tree.get(key, 1)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            faults.append(f"{key}={value!r}: expected a whole number above zero")
    if not isinstance(tree.get("use_cpu", False), bool):
        faults.append(f"use_cpu={tree['use_cpu']!r}: expected true or false")
    if not isinstance(tree.get("gpu_ids") or "all", str):
        faults.append(f"gpu_ids={tree['gpu_ids']!r}: expected text; put it between quotes")
    where = tree.get("compute_environment", "LOCAL_MACHINE")
    if where != "LOCAL_MACHINE":
        faults.append(f"compute_environment={where!r}: expected LOCAL_MACHINE")
    if tree.get("rdzv_backend", "static") != "static":
        faults.append(
            f"rdzv_backend={tree['rdzv_backend']!r}: has no effect in a file; remove it (ranks "
            "follow the hostfile's order, which is the static rendezvous)"
        )
    return faults


def _deepspeed(section: Any, working_dir: Path) -> tuple[Path | None, list[str]]:
    """The JSON's absolute path, and what is wrong with the YAML's `deepspeed_config`."""
    if not isinstance(section, dict):
        return None, [f"deepspeed_config={section!r}: expected keys such as deepspeed_config_file"]
    faults = []
    for key in section:
        if key in (
            "deepspeed_hostfile",
            "deepspeed_inclusion_filter",
            "deepspeed_exclusion_filter",
        ):
            faults.append(
                f"deepspeed_config.{key}: remove it; hosts come from --hostfile, --include and "
                "--exclude"
            )
        elif key not in DEEPSPEED_KEYS:
            faults.append(f"deepspeed_config.{key}: remove it; this stands in the DeepSpeed JSON")
    multinode = section.get("deepspeed_multinode_launcher", "standard")
    if multinode not in MULTINODE_LAUNCHERS:
        faults.append(
            f"deepspeed_config.deepspeed_multinode_launcher={multinode!r}: expected standard or "
            "pdsh; octet launch starts no other"
        )
    name = section.get("deepspeed_config_file")
    if not isinstance(name, str) or not name:
        faults.append("deepspeed_config.deepspeed_config_file is missing; name one of ds_configs/")
        return None, faults
    path = working_dir / name
    where = f"deepspeed_config.deepspeed_config_file={name!r}"
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        faults.append(
            f"{where} can't be read: {error.strerror}; it is relative to the working directory, "
            f"{working_dir}"
        )
    except ValueError as error:
        faults.append(f"{where} is not valid JSON: {error}")
    return path, faults
