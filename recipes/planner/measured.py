"""What `octet preflight` measured, in place of the hardware table's rates.

The schema is recipes/measure.py's, under `measured` in outputs/preflight.json.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from recipes.planner.hardware import Gpu, Hardware
from recipes.planner.workload import Measured

# A bandwidth is taken from a message this large or the largest there is; one below it would tell
# latency.
LARGE_BYTES = 16 * 2**20
SMALL_BYTES = 1024  # a latency comes from messages up to this size
SUPPORTED_SCHEMA = 1


def read_measured(path: str | Path, *, gpu: Gpu | None = None) -> Measured:
    """The rates that a preflight measured: matrix products, all-reduces within and between nodes.

    Of several nodes or ranks the slowest counts, since all wait for it. Bandwidths are bus
    bandwidths of the largest all-reduce; over all nodes they say what the network carries as a
    ring's, whichever algorithm the library chose. Latencies are seconds of the smallest all-reduce.

    Args:
        path: preflight.json, or what `recipes/measure.py --json` wrote.
        gpu: the planned GPU; what another device measured is refused.

    Raises:
        ValueError: it can't be read, was measured on another device, or holds nothing usable.
    """
    found = _measured_part(path)
    _check_device(str(found.get("device")), str(path), gpu)
    hosts, network = found.get("hosts") or [], found.get("network") or {}
    lines = network.get("collectives") or []
    lines = [line for line in lines if line.get("op") == "all_reduce" and line.get("correct")]
    whole = [line for line in lines if line.get("group") == "all"]
    if len(set(hosts)) > 1:
        inner, outer = [line for line in lines if line.get("group") == "node"], whole
    else:
        inner, outer = whole, []
    ranks = (found.get("matmul") or {}).get("ranks") or []
    result = Measured(
        path=str(path),
        matmul_flops=min((float(rank["flops"]) for rank in ranks), default=None),
        matmul_dtype=(found.get("matmul") or {}).get("dtype", "bf16"),
        within_bytes_per_s=_bandwidth(inner),
        within_latency_s=_latency(inner),
        # One link at a time is less than a node has where each GPU has a port of its own.
        between_bytes_per_s=_bandwidth(outer) or (network.get("between") or {}).get("bytes_per_s"),
        between_latency_s=_latency(outer),
    )
    if len(missing(result)) == len(_PARTS):
        raise ValueError(
            f"{path} holds no rate that a plan can use: no matrix products and no all-reduce of "
            f"{LARGE_BYTES // 2**20} MiB; run octet preflight with --only matmul,network on the "
            "GPUs"
        )
    return result


def _check_device(device: str, path: str, gpu: Gpu | None) -> None:
    if device == "cpu" and (gpu is None or "cpu" not in gpu.aliases):
        raise ValueError(
            f"{path} was measured on a CPU, which says nothing about GPUs; run octet preflight "
            "--hostfile hostfile on the machines to be planned for"
        )
    try:
        if gpu is not None:
            Hardware({gpu.name: gpu}, {}).gpu(device)
    except ValueError as error:
        raise ValueError(
            f"{path} was measured on {device}, planned is {gpu.name if gpu else ''}; name with "
            "--gpu what was measured, or leave --measured out"
        ) from error


# What the table gives where the preflight did not measure it, with what to do about it.
_PARTS = {
    "matmul_flops": "matrix products (preflight's matmul stage did not run)",
    "within_bytes_per_s": "bandwidth within a node (no large all-reduce among GPUs of one node)",
    "between_bytes_per_s": "bandwidth between nodes (no large all-reduce over several nodes)",
}


def missing(measured: Measured) -> list[str]:
    """What was not measured, so that the plan takes it from the hardware table."""
    return [text for name, text in _PARTS.items() if getattr(measured, name) is None]


def _measured_part(path: str | Path) -> dict[str, Any]:
    try:
        tree = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} can't be read as preflight's JSON: {error}; octet preflight writes it to "
            "outputs/preflight.json"
        ) from error
    if isinstance(tree, dict) and "measured" in tree:
        tree = tree["measured"]
        if tree is None:
            raise ValueError(
                f"{path} holds checks only, nothing was measured; run octet preflight without "
                "leaving the measurement out, and look at its findings"
            )
    if not isinstance(tree, dict) or tree.get("schema") != SUPPORTED_SCHEMA:
        raise ValueError(
            f"{path} is no result of octet preflight with schema {SUPPORTED_SCHEMA}; run it again "
            "with this version"
        )
    return tree


def _bandwidth(lines: Iterable[dict[str, Any]]) -> float | None:
    """Bus bandwidth of the largest message; of several groups the slowest. None without any."""
    large = [line for line in lines if line["bytes"] >= LARGE_BYTES]
    largest = max((line["bytes"] for line in large), default=0)
    return min(
        (float(x["busbw_bytes_per_s"]) for x in large if x["bytes"] == largest), default=None
    )


def _latency(lines: Iterable[dict[str, Any]]) -> float | None:
    """Seconds of the smallest message; of several groups the slowest. None without any."""
    small = [line for line in lines if line["bytes"] <= SMALL_BYTES]
    smallest = min((line["bytes"] for line in small), default=0)
    return max((float(x["seconds"]) for x in small if x["bytes"] == smallest), default=None)
