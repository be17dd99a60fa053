"""What NVML says of this machine's GPUs; "no GPU" is an answer, not an error.

Written from NVML's documentation and tested with a stand-in for `pynvml`: no GPU has run it yet.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

# Bits of nvmlDeviceGetCurrentClocksThrottleReasons that make a GPU slower than its neighbours.
# Idle clocks, clocks that were set and the power cap are everyday states and are left out.
SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "thermal slowdown by the driver",
    0x40: "thermal slowdown by the hardware",
    0x80: "power brake",
}
NO_PERMISSION = 4  # NVML_ERROR_NO_PERMISSION


def read_gpus() -> dict[str, Any]:
    """Driver and devices; `error` says why there are none, `unread` why nobody could look."""
    try:
        nvml = importlib.import_module("pynvml")  # nvidia-ml-py
    except ImportError:
        return {"unread": "nvidia-ml-py is not installed", "devices": []}
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        # A driver that answers wrongly has device nodes; without one there is no GPU to speak of.
        nodes = sorted(str(p) for p in Path("/dev").glob("nvidia[0-9]*"))
        why = f"NVML: {error}" + (f", although {nodes[0]} exists" if nodes else "")
        return {"error": why, "devices": []}
    try:
        found = [_device(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
        # A batch system's GPUs for other jobs are counted, and closed to us; CUDA skips them.
        devices = [device for device in found if device is not None]
        return {"driver": _text(_asked(nvml, "nvmlSystemGetDriverVersion")), "devices": devices}
    except nvml.NVMLError as error:
        return {"error": f"NVML: {error}", "devices": []}
    finally:
        nvml.nvmlShutdown()


def _asked(nvml: ModuleType, name: str, *arguments: Any) -> Any:
    """One answer; None where this GPU or driver has no such thing (consumer cards have no ECC)."""
    try:
        return getattr(nvml, name)(*arguments)
    except (nvml.NVMLError, AttributeError):
        return None


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value or "unknown")


def _device(nvml: ModuleType, index: int) -> dict[str, Any] | None:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:  # "GPU is lost" and its like
        closed = getattr(error, "value", None) == NO_PERMISSION
        return None if closed else {"index": index, "error": str(error)}
    memory = _asked(nvml, "nvmlDeviceGetMemoryInfo", handle)
    reasons = _asked(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", handle) or 0
    remapped = _asked(nvml, "nvmlDeviceGetRemappedRows", handle) or (0, 0, 0, 0)
    errors = _asked(nvml, "nvmlDeviceGetTotalEccErrors", handle, 1, 0)  # uncorrected, since reboot
    mig = _asked(nvml, "nvmlDeviceGetMigMode", handle) or (0, 0)
    return {
        "index": index,
        "model": _text(_asked(nvml, "nvmlDeviceGetName", handle)),
        "memory_bytes": memory.total if memory else None,
        "used_bytes": memory.used if memory else None,
        "processes": _processes(nvml, handle),
        "uncorrected_errors": errors,
        "remap_pending": bool(remapped[2]),
        "remap_failed": bool(remapped[3]),
        "slowdowns": [text for bit, text in SLOWDOWNS.items() if reasons & bit],
        "temperature_c": _asked(nvml, "nvmlDeviceGetTemperature", handle, 0),
        "mig": bool(mig[0]),
    }


def _processes(nvml: ModuleType, handle: Any) -> list[str]:
    """Who works on a GPU, as `name (pid, user)`."""
    running = _asked(nvml, "nvmlDeviceGetComputeRunningProcesses", handle) or []
    return [describe_process(process.pid) for process in running]


def describe_process(pid: int | None) -> str:
    """`name (pid 12, user)`; other users' processes and other containers' may be hidden."""
    if pid is None:
        return "a process that this user may not see"
    try:
        process = psutil.Process(pid)
        return f"{process.name()} (pid {pid}, {process.username()})"
    except psutil.Error:
        return f"pid {pid}"
