"""Rows about the GPUs that NVML found on each node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recipes.preflight.rows import Row, majority, many, size
from recipes.preflight.wanted import Facts, Wanted

# A driver and its daemon hold some hundred MiB of a card; a job of someone else far more.
OTHERS_SHARE = 0.05


def gpu_rows(there: Facts, wanted: Wanted) -> list[Row]:
    """Number, model, driver, and what makes single GPUs unfit or slow."""
    rows = []
    for node, found in there.items():
        rows += _node_rows(node, found["gpus"], wanted)
    rows += _odd("GPU model", {n: _kinds(f["gpus"]) for n, f in there.items()}, wanted)
    rows += _odd("GPU driver", {n: f["gpus"].get("driver", "") for n, f in there.items()}, wanted)
    return rows


def _node_rows(node: str, gpus: Mapping[str, Any], wanted: Wanted) -> list[Row]:
    host = next(host for host in wanted.hosts if host.name == node)
    chosen = host.gpus if host.gpus is not None else tuple(range(host.slots))
    devices = {device["index"]: device for device in gpus["devices"]}
    if wanted.cpu:
        found = f"{len(devices)}, not used" if devices else "no GPU"
        return [Row(check="GPUs", node=node, found=found, expected="none: the arm runs on CPUs")]
    expected = f"{host.slots} (the hostfile's slots)"
    if gpus.get("unread"):
        remedy = f"octet sync --hostfile {wanted.hostfile}"
        found = gpus["unread"]
        return [
            Row(
                check="GPUs",
                node=node,
                found=found,
                expected=expected,
                verdict="not checked",
                remedy=remedy,
            )
        ]
    if absent := [index for index in chosen if index not in devices]:
        found = (
            many(len(devices), "GPU") if devices else f"no GPU ({gpus.get('error', 'none seen')})"
        )
        if host.gpus is not None and devices:
            found += f", none numbered {', '.join(map(str, absent))}"
        remedy = f"ssh {node} nvidia-smi -L   # for a run on CPUs name one of the local_* arms"
        row = Row(
            check="GPUs",
            node=node,
            found=found,
            expected=expected,
            verdict="FAIL",
            remedy=remedy + " with --config",
        )
        return [row]
    rows = [Row(check="GPUs", node=node, found=_models(gpus), expected=expected)]
    for index in chosen:
        rows += [_device_row(node, index, *fault) for fault in _faults(devices[index])]
    return rows


def _models(gpus: Mapping[str, Any]) -> str:
    names = [device.get("model", "unreadable") for device in gpus["devices"]]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _kinds(gpus: Mapping[str, Any]) -> str:
    return ", ".join(sorted({d["model"] for d in gpus["devices"] if "model" in d}))


def _faults(device: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Found, expected, verdict and remedy of everything that is wrong with one GPU."""
    if error := device.get("error"):
        return [(error, "a GPU that answers", "FAIL", "sudo nvidia-smi --gpu-reset")]
    faults = []
    used, total = device["used_bytes"] or 0, device["memory_bytes"] or 0
    if total and used > OTHERS_SHARE * total:
        who = ", ".join(device["processes"]) or "processes that can't be seen from here"
        found = f"{size(used)} of {size(total)} in use by {who}"
        faults.append((found, "free memory", "FAIL", "nvidia-smi"))
    elif device["processes"]:
        found = f"in use by {', '.join(device['processes'])}"
        faults.append((found, "nobody else on it", "warn", "nvidia-smi"))
    if device["uncorrected_errors"]:
        found = f"{device['uncorrected_errors']} uncorrected ECC errors since the last reboot"
        faults.append((found, "0", "FAIL", "nvidia-smi -q -d ECC,ROW_REMAPPER"))
    if device["remap_failed"]:
        query = "nvidia-smi -q -d ROW_REMAPPER"
        faults.append(("no spare memory rows left", "a healthy GPU", "FAIL", query))
    elif device["remap_pending"]:
        reset = "sudo nvidia-smi --gpu-reset"
        faults.append(("a bad memory row waits to be replaced", "none", "FAIL", reset))
    if device["slowdowns"]:
        found = f"{', '.join(device['slowdowns'])} at {device['temperature_c']} °C"
        faults.append((found, "full clocks", "warn", "nvidia-smi -q -d PERFORMANCE,TEMPERATURE"))
    if device["mig"]:
        found = "divided into MIG slices"
        faults.append((found, "a whole GPU", "FAIL", "sudo nvidia-smi -mig 0"))
    return faults


def _device_row(node: str, index: int, found: str, expected: str, verdict: Any, remedy: str) -> Row:
    return Row(
        check=f"GPU {index}",
        node=node,
        found=found,
        expected=expected,
        verdict=verdict,
        remedy=f"ssh {node} {remedy} -i {index}",
    )


def _odd(check: str, values: Mapping[str, str], wanted: Wanted) -> list[Row]:
    """Nodes that differ from most: allowed, but then the slowest sets the pace."""
    values = {node: value for node, value in values.items() if value}
    if wanted.cpu or not values:
        return []
    common = majority(values)
    return [
        Row(
            check=check,
            node=node,
            found=value,
            expected=f"{common}, as on most nodes",
            verdict="warn",
            remedy=f"ssh {node} nvidia-smi",
        )
        for node, value in values.items()
        if value != common
    ]
