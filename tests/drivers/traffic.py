"""What the real engine sends, in one start of all ranks: collectives counted, bytes on the wire.

traffic.py RESULTS.jsonl, as a rank of a job (tests/nursery.py). A JSON line per arm and
accumulation, all of one update: `calls` and `bytes` by operation (whole tensors: the gathered one,
the one before a scatter), and `wire`, the bytes that the loopback interface took, of all ranks
together; give the job a network of its own, since other traffic would be counted too. For DDP
`reductions` are calls and elements of another update's gradients, by the profiler.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import arms
import torch
import torch.distributed as dist
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

# Updates before, and those counted, by accumulation. ZeRO-3 gathers ahead from its third
# micro-batch on, DDP lays out its buckets anew after the first update.
UPDATES = {1: (3, 3), 8: (2, 2)}
BUCKET, DDP_BUCKET_MB = 10**6, 4
SHAPE = {"n_embd": 256, "n_head": 4, "n_layer": 4}
ALL, ONCE = (1, 8), (1,)
FRUGAL = {"stage": 3, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
FRUGAL |= {"stage3_param_persistence_threshold": 0}


@dataclass(frozen=True)
class Arm:
    """One of arms.py's, with more of its JSON's zero_optimization or of the run file's ddp."""

    name: str
    zero: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    accumulations: tuple[int, ...] = ALL


ARMS = {
    "ZeRO-0": Arm("zero0_fp16"),
    "ZeRO-1": Arm("zero1_bf16"),
    "ZeRO-1 overlap": Arm("zero1_bf16", {"overlap_comm": True}, accumulations=ONCE),
    "ZeRO-1 fp32": Arm("zero1_fp32", accumulations=ONCE),
    "ZeRO-1 less traffic": Arm("zero1_bf16", {"use_multi_rank_bucket_allreduce": False}),
    "ZeRO-2": Arm("zero1_bf16", {"stage": 2}),
    "ZeRO-3": Arm("zero1_bf16", {"stage": 3}),
    "ZeRO-3 frugal": Arm("zero1_bf16", FRUGAL, accumulations=ONCE),
    "DDP": Arm("ddp_bf16"),
    "DDP compressed": Arm("ddp_bf16", ddp={"compress": "fp16"}, accumulations=ONCE),
}
Tally = dict[str, list[int]]
COUNTS: Tally = {}


def counting(name: str, original: Any) -> Any:
    """A collective that counts its calls and its whole tensor's bytes."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        keys = ("input", "input_tensor") if name == "reduce_scatter_tensor" else ("output",)
        keys += ("tensor", "output_tensor", "tensor_list")
        place = 1 if name == "reduce_scatter_tensor" else 0
        given = args[place] if len(args) > place else next(kwargs[k] for k in keys if k in kwargs)
        size = sum(t.nbytes for t in (given if isinstance(given, list) else [given]))
        tally = COUNTS.setdefault(name, [0, 0])
        tally[0], tally[1] = tally[0] + 1, tally[1] + size
        return original(*args, **kwargs)

    return call


for _name in ("all_reduce", "reduce", "all_gather", "all_gather_into_tensor"):
    setattr(dist, _name, counting(_name, getattr(dist, _name)))
for _name in ("reduce_scatter_tensor", "broadcast"):
    setattr(dist, _name, counting(_name, getattr(dist, _name)))


def build_network(*args: Any, **kwargs: Any) -> Any:
    """A whole network; under ZeRO-3 transformers would build one that is divided already."""
    unset_hf_deepspeed_config()
    return whole_network(*args, **kwargs)


whole_network, arms.build_network = arms.build_network, build_network


def loopback_bytes() -> int:
    """Bytes that the loopback interface has taken."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split()[1])
    raise OSError("no loopback interface in /proc/net/dev")


def engine_of(arm: Arm, accumulation: int) -> Any:
    """A fresh engine of the recipe."""
    original = arms.strategy
    arms.RUN["ddp"] = {"bucket_cap_mb": DDP_BUCKET_MB} | arm.ddp

    def strategy(name: str) -> Any:
        made = original(name)
        if made.deepspeed is not None:
            made.deepspeed["zero_optimization"] |= {"reduce_bucket_size": BUCKET} | arm.zero
        return made

    arms.strategy = strategy
    try:
        return arms.engine_of(arm.name, accumulation)
    finally:
        arms.strategy = original


def measure(name: str, accumulation: int) -> dict[str, Any]:
    engine = engine_of(ARMS[name], accumulation)
    warm, updates = UPDATES[accumulation]
    arms.train(engine, range(warm))
    COUNTS.clear()
    wires = []
    for number in range(warm, warm + updates):
        dist.barrier()
        before = loopback_bytes()
        dist.barrier()
        arms.train(engine, range(number, number + 1))
        dist.barrier()
        wires.append(loopback_bytes() - before)
    counts = copy.deepcopy(COUNTS)
    dist.barrier()
    reductions: Any = None
    if ARMS[name].name.startswith("ddp"):  # in C++, where no Python function is called
        reductions = arms.ddp_reductions(engine, warm + updates)
    return {
        "arm": name,
        "accumulation": accumulation,
        "calls": {op: tally[0] / updates for op, tally in counts.items()},
        "bytes": {op: tally[1] / updates for op, tally in counts.items()},
        "wire": min(wires),  # what TCP sends again only ever adds
        "reductions": reductions,
    }


def main() -> None:
    torch.set_num_threads(1)
    arms.RUN["model"]["config"] |= SHAPE  # type: ignore[index]
    lines = [measure(name, n) for name, arm in ARMS.items() for n in arm.accumulations]
    if os.environ["RANK"] == "0":
        Path(sys.argv[1]).write_text("".join(json.dumps(line) + "\n" for line in lines))
    dist.barrier()


if __name__ == "__main__":
    main()
