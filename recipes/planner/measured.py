"""What `octet preflight` measured, in place of the hardware table's rates.

The schema is recipes/measure.py's, under `measured` in outputs/preflight.json.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from recipes.planner.hardware import Gpu, Hardware
from recipes.planner.workload import Measured, Precision
from recipes.runfile import describe

# A bandwidth is taken from a message this large or the largest there is; one below it would tell
# latency.
LARGE_BYTES = 16 * 2**20
SMALL_BYTES = 1024  # a latency comes from messages up to this size
SUPPORTED_SCHEMA = 1
# A clock above the data sheet's may exceed the peak by a little; more is a mistaken unit.
ABOVE_PEAK = 1.05
MOST_FAULTS = 10  # that are told of one file, which has a line for each rank
PRECISIONS: dict[str, Precision] = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}

Bandwidth = Annotated[float, Field(ge=125e3, le=1e14)]  # 1 Mbit/s; beyond them nothing is trained


class _Part(BaseModel):
    """What is read of the file: strict in it, blind to all else."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _Rank(_Part):
    flops: float = Field(ge=1e9, le=1e17)


class _Matmul(_Part):
    dtype: Literal["float32", "float16", "bfloat16"] = "bfloat16"
    ranks: list[_Rank] = []


class _Collective(_Part):
    group: str
    op: str
    correct: bool
    bytes: int = Field(ge=1)
    seconds: float = Field(ge=1e-9, le=3600)
    busbw_bytes_per_s: float = Field(ge=0, le=1e14)
    ranks: list[int] = []

    @model_validator(mode="after")
    def _moves(self) -> _Collective:
        if not self.busbw_bytes_per_s and len(self.ranks) != 1:  # one alone sends nothing
            raise ValueError("busbw_bytes_per_s=0.0: expected greater than 0")
        return self


class _Between(_Part):
    bytes_per_s: Bandwidth


class _Network(_Part):
    collectives: list[_Collective] = []
    between: _Between | None = None


class _Found(_Part):
    device: str
    hosts: list[str] = []
    matmul: _Matmul | None = None
    network: _Network | None = None


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
    found = _checked(_measured_part(path), str(path))
    _check_device(found.device, str(path), gpu)
    network, matmul = found.network or _Network(), found.matmul or _Matmul()
    sums = [line for line in network.collectives if line.op == "all_reduce"]
    lines = [line for line in sums if line.correct and len(line.ranks) != 1]
    if sums and not any(line.correct for line in sums):
        raise ValueError(
            f"{path}: every all-reduce in it gave a wrong sum; mend the network or its library "
            "(octet preflight tells which) before anything is planned on it"
        )
    whole = [line for line in lines if line.group == "all"]
    if len(set(found.hosts)) > 1:
        inner, outer = [line for line in lines if line.group == "node"], whole
    else:
        inner, outer = whole, []
    # One link at a time is less than a node has where each GPU has a port of its own.
    link = network.between.bytes_per_s if network.between is not None else None
    result = Measured(
        path=str(path),
        matmul_flops=min((rank.flops for rank in matmul.ranks), default=None),
        matmul_dtype=PRECISIONS[matmul.dtype],
        within_bytes_per_s=_bandwidth(inner),
        within_latency_s=_latency(inner),
        between_bytes_per_s=_bandwidth(outer) or link,
        between_latency_s=_latency(outer),
        wrong_sums=sum(not line.correct for line in sums),
    )
    _check_peak(result, gpu)
    if len(missing(result)) == len(_PARTS):
        raise ValueError(
            f"{path} holds no rate that a plan can use: no matrix products and no all-reduce of "
            f"{LARGE_BYTES // 2**20} MiB; run octet preflight with --only matmul,network on the "
            "GPUs"
        )
    return result


def _checked(tree: dict[str, Any], path: str) -> _Found:
    """The part that is read (ValueError: every fault in it with its place)."""
    try:
        return _Found.model_validate(tree)
    except ValidationError as error:
        told = [f"{path}: {describe(fault, _Found)}" for fault in error.errors()]
        more = len(told) - MOST_FAULTS
        rest = [f"{path}: and {more} more; run octet preflight again"] if more > 0 else []
        raise ValueError("\n".join(told[:MOST_FAULTS] + rest)) from error


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


def _check_peak(measured: Measured, gpu: Gpu | None) -> None:
    if gpu is None or measured.matmul_flops is None:
        return
    peak = gpu.flops_32bit if measured.matmul_dtype == "fp32" else gpu.flops_16bit
    if measured.matmul_flops > ABOVE_PEAK * peak:
        raise ValueError(
            f"{measured.path}: matmul: the slowest rank's {measured.matmul_flops:.3g} FLOP/s in "
            f"{measured.matmul_dtype} are above {gpu.name}'s peak of {peak:.3g}; was another GPU "
            "measured? Run octet preflight again, or leave --measured out"
        )


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


def _bandwidth(lines: Iterable[_Collective]) -> float | None:
    """Bus bandwidth of the largest message; of several groups the slowest. None without any."""
    large = [line for line in lines if line.bytes >= LARGE_BYTES]
    largest = max((line.bytes for line in large), default=0)
    return min((x.busbw_bytes_per_s for x in large if x.bytes == largest), default=None)


def _latency(lines: Iterable[_Collective]) -> float | None:
    """Seconds of the smallest message; of several groups the slowest. None without any."""
    small = [line for line in lines if line.bytes <= SMALL_BYTES]
    smallest = min((line.bytes for line in small), default=0)
    return max((x.seconds for x in small if x.bytes == smallest), default=None)
