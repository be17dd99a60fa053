"""Rows about the GPUs that NVML found on each node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recipes.preflight.rows import (
    Facts,
    Row,
    Wanted,
    fail,
    many,
    odd_ones,
    ok,
    size,
    unchecked,
    warn,
)

# A driver and its daemon hold some hundred MiB of a card; a job of someone else far more.
OTHERS_SHARE = 0.05


def gpu_rows(there: Facts, wanted: Wanted) -> list[Row]:
    """Number, model, driver, and what makes single GPUs unfit or slow."""
    rows = []
    for node, found in there.items():
        rows += _node_rows(node, found["gpus"], wanted)
    if not wanted.cpu:
        rows += _odd_rows("GPU model", {n: _kinds(f["gpus"]) for n, f in there.items()})
        drivers = {n: f["gpus"].get("driver", "") for n, f in there.items()}
        rows += _odd_rows("GPU driver", drivers)
    return rows


def _node_rows(node: str, gpus: Mapping[str, Any], wanted: Wanted) -> list[Row]:
    devices = gpus["devices"]  # as CUDA counts them
    if wanted.cpu:
        found = f"{len(devices)}, not used" if devices else "no GPU"
        return [ok("GPUs", node, found, "none: the arm runs on CPUs")]
    host = next(host for host in wanted.hosts if host.name == node)
    expected = f"{host.slots} (the hostfile's slots)"
    if why := gpus.get("unread"):
        return [unchecked("GPUs", node, why, expected, wanted.sync)]
    chosen = host.gpus if host.gpus is not None else tuple(range(host.slots))
    if absent := [index for index in chosen if index >= len(devices)]:
        found = many(len(devices), "GPU")
        if not devices:
            found = f"no GPU ({gpus.get('error', 'none seen')})"
        elif host.gpus is not None:
            found += f", none numbered {', '.join(map(str, absent))}"
        remedy = f"ssh {node} nvidia-smi -L   # for CPUs: --config with one of the local_* arms"
        return [fail("GPUs", node, found, expected, remedy)]
    rows = [ok("GPUs", node, _models(gpus), expected)]
    for index in chosen:
        rows += _device_rows(node, f"GPU {index}", devices[index])
    return rows


def _models(gpus: Mapping[str, Any]) -> str:
    names = [device.get("model", "unreadable") for device in gpus["devices"]]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _kinds(gpus: Mapping[str, Any]) -> str:
    return ", ".join(sorted({d["model"] for d in gpus["devices"] if "model" in d}))


def _device_rows(node: str, check: str, device: Mapping[str, Any]) -> list[Row]:
    """Everything that is wrong with one GPU."""
    about, only = (check, node), f"-i {device['index']}"
    reset = f"ssh -t {node} sudo nvidia-smi --gpu-reset {only}"
    if error := device.get("error"):
        return [fail(*about, error, "a GPU that answers", reset)]
    rows = []
    look = f"ssh {node} nvidia-smi {only}"
    used, total = device["used_bytes"] or 0, device["memory_bytes"] or 0
    if total and used > OTHERS_SHARE * total:
        who = ", ".join(device["processes"]) or "processes that can't be seen from here"
        found = f"{size(used)} of {size(total)} in use by {who}"
        rows.append(fail(*about, found, "free memory", look))
    elif device["processes"]:
        found = f"in use by {', '.join(device['processes'])}"
        rows.append(warn(*about, found, "nobody else on it", look))
    if device["uncorrected_errors"]:
        found = f"{device['uncorrected_errors']} uncorrected ECC errors since the last reboot"
        rows.append(fail(*about, found, "0", f"{look} -q -d ECC,ROW_REMAPPER"))
    if device["remap_failed"]:
        look_at = f"{look} -q -d ROW_REMAPPER"
        rows.append(fail(*about, "no spare memory rows left", "a healthy GPU", look_at))
    elif device["remap_pending"]:
        rows.append(fail(*about, "a bad memory row waits to be replaced", "none", reset))
    if device["slowdowns"]:
        found = f"{', '.join(device['slowdowns'])} at {device['temperature_c']} °C"
        rows.append(warn(*about, found, "full clocks", f"{look} -q -d PERFORMANCE,TEMPERATURE"))
    if device["mig"]:
        remedy = f"ssh -t {node} sudo nvidia-smi -mig 0 {only}"
        rows.append(fail(*about, "divided into MIG slices", "a whole GPU", remedy))
    return rows


def _odd_rows(check: str, values: Mapping[str, str]) -> list[Row]:
    """Nodes that differ from most: allowed, but then the slowest sets the pace."""
    known = {node: value for node, value in values.items() if value}
    odd, expected = odd_ones(known) if known else ({}, "")
    return [
        warn(check, node, value, expected, f"ssh {node} nvidia-smi") for node, value in odd.items()
    ]
