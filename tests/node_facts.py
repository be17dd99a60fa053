"""Facts of healthy nodes as `nodefacts` tells them, for tests to spoil."""

from __future__ import annotations

from typing import Any

from recipes.cluster.hostfile import Host
from recipes.preflight.rows import Row, Wanted

GIB = 1 << 30


def gpu(index: int) -> dict[str, Any]:
    """A healthy GPU."""
    return {
        "index": index,
        "model": "NVIDIA A100-SXM4-80GB",
        "memory_bytes": 80 * GIB,
        "used_bytes": GIB // 2,
        "processes": [],
        "uncorrected_errors": 0,
        "remap_pending": False,
        "remap_failed": False,
        "slowdowns": [],
        "temperature_c": 34,
        "mig": False,
    }


def node(number: int, count: int = 3) -> dict[str, Any]:
    """Facts of `worker-NUMBER` among `count` healthy nodes with two GPUs each."""
    me, hosts = f"worker-{number}", [f"worker-{i}" for i in range(count)]
    others = [host for host in hosts if host != me]
    ports = {host: ["40001", "40002"] for host in hosts}
    ports["worker-0"].append("29500")
    address = {host: f"10.0.0.1{i}" for i, host in enumerate(hosts)}
    facts: dict[str, Any] = {
        "hostname": me,
        "machine": f"boot-{number}",
        "python": {"path": "/octet/.venv/bin/python", "version": "3.11.7"},
        "packages": {"torch": "2.13.0", "deepspeed": "0.19.8", "numpy": "2.4.6", "nccl": "cu12 2"},
        "commit": "0123456789ab",
        "sources": "5eed",
        "files": {"gpt2_xl.yaml": "f00d"},
        "commands": dict.fromkeys(("pdsh", "accelerate", "deepspeed", "torchrun"), "/usr/bin/it"),
        "gpus": {"driver": "580.65.06", "devices": [gpu(0), gpu(1)]},
        "limits": {"open_files": 65536, "locked_bytes": -1},
        "memory": {"total": 512 * GIB, "available": 500 * GIB, "shm_free": 64 * GIB},
        "locks": [],
        "network": {
            "names": {host: {"addresses": [address[host]]} for host in hosts},
            "interfaces": {
                "lo": {"up": True, "addresses": ["127.0.0.1", "::1"]},
                "eth0": {"up": True, "addresses": [address[me]], "bits_per_s": 1e9},
            },
            "routes": {
                host: {"source": address[me], "interface": "lo" if host == me else "eth0"}
                for host in hosts
            },
            "ephemeral_ports": [32768, 60999],
            "infiniband": {"mlx5_0": 200e9},
        },
        "deepspeed_env": [],
        "folder": {
            "path": "/shared/outputs/gpt2_xl",
            "made": [],
            "free_bytes": 900 * GIB,
            "filesystem": "nfs4 on /shared",
            "bytes_per_s": 3e8,
            "checkpoints": 0,
        },
        "data": [{"what": "/shared/*.parquet", "count": 7, "bytes": 7 * GIB, "digest": "d1"}],
        "time": 0.0,
        "clock": {"ahead_s": 0.01, "uncertainty_s": 0.4},
        "meet": {
            "listening": dict.fromkeys(ports[me], ""),
            "reached": {host: dict.fromkeys(ports[host], "") for host in others},
            "clocks": {host: {"ahead_s": 0.001, "uncertainty_s": 0.0002} for host in others},
            "seen": hosts,
        },
    }
    if number == 0:
        facts["port"] = {"port": 29500}
    return facts


def nodes(count: int = 3) -> dict[str, dict[str, Any]]:
    """Facts of healthy nodes."""
    return {f"worker-{i}": node(i, count) for i in range(count)}


def wanted(**changes: Any) -> Wanted:
    """GPT-2 XL on three nodes of two GPUs."""
    hosts = tuple(Host(name=f"worker-{i}", slots=2) for i in range(3))
    settings: dict[str, Any] = {"hosts": hosts, "parameters": 1_557_611_200, "keep": 3}
    return Wanted(**(settings | changes))


def bad(rows: list[Row]) -> list[Row]:
    """Rows that are not ok."""
    return [row for row in rows if row.verdict != "ok"]


def spoiled(path: str, value: Any, number: int = 1) -> dict[str, dict[str, Any]]:
    """Healthy nodes but for one entry of one node; slashes lead into it, numbers into lists."""
    facts = nodes()
    *way, last = path.split("/")
    place: Any = facts[f"worker-{number}"]
    for key in way:
        place = place[int(key)] if isinstance(place, list) else place[key]
    if isinstance(place, list):
        place[int(last)] = value
    else:
        place[last] = value
    return facts
