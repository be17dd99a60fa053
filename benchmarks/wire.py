"""Bytes on the wire per update and parameter, read from the interface, against the formulas.

    torchrun --nproc_per_node 2 benchmarks/wire.py
    torchrun --nproc_per_node 4 benchmarks/wire.py

P parameters, N ranks, gradients and weights in 16 bit except DDP's fp32 gradients. Per rank and
update an all-reduce sends 2(N-1)/N and a gather (N-1)/N of its bytes (ring algorithms); all ranks
together N times that. Needs a quiet machine: anything else on the loopback interface is counted
too. The exact counts of calls and elements are asserted in tests/test_engine.py.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "drivers"))

import arms
import torch.distributed as dist

from recipes.engine import state

UPDATES = 4
ARMS = ("zero1_bf16", "less_traffic_bf16", "ddp_bf16", "zero0_fp16")


def formula(arm: str, world: int) -> float:
    """Bytes per parameter and update, all ranks together."""
    all_reduce, gather = 2 * (world - 1), world - 1  # in units of P elements
    return {
        "zero1_bf16": 2.0 * (all_reduce + gather),
        "less_traffic_bf16": 2.0 * (gather + gather),  # each owner gets a reduce
        "ddp_bf16": 4.0 * all_reduce,
        "zero0_fp16": 2.0 * all_reduce,
    }[arm]


def loopback_bytes() -> int:
    """Bytes that the loopback interface has received."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split()[1])
    raise OSError("no loopback interface in /proc/net/dev")


def measure(arm: str, accumulation: int) -> float:
    """Bytes per parameter and update, all ranks together."""
    engine = arms.engine_of(arm, accumulation)
    arms.train(engine, range(2))  # DDP lays out its buckets anew after the first backward
    dist.barrier()
    before = loopback_bytes()
    dist.barrier()
    arms.train(engine, range(2, 2 + UPDATES))
    dist.barrier()
    sent = loopback_bytes() - before
    return sent / UPDATES / sum(state.parameter_sizes(engine))


def main() -> None:
    arms.RUN["model"]["config"] |= {"n_embd": 256, "n_head": 4, "n_layer": 4}
    arms.JSONS["less_traffic_bf16"] = arms.JSONS["less_traffic_fp32"] | {"bf16": {"enabled": True}}
    world = int(os.environ["WORLD_SIZE"])
    rows = []
    for arm in ARMS:
        for accumulation in (1, 8):
            rows.append((arm, accumulation, measure(arm, accumulation), formula(arm, world)))
    if os.environ["RANK"] == "0":
        print(f"\n{world} ranks\n")
        print("| arm | accumulation | bytes / (parameter x update) | formula | ratio |")
        print("|---|--:|--:|--:|--:|")
        for arm, accumulation, found, expected in rows:
            print(
                f"| {arm} | {accumulation} | {found:.2f} "
                f"| {expected:.0f} | {found / expected:.2f} |"
            )


if __name__ == "__main__":
    main()
