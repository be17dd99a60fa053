"""The gradient self-test on real ranks, as it is and with planted faults; a JSON line per case.

torchrun --nproc_per_node 2 tests/drivers/selftests.py RESULTS.jsonl
torchrun --nproc_per_node 2 tests/drivers/selftests.py halved RUN.yaml ARGUMENTS  (the recipe)
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import torch
import torch.distributed as dist

DECEIVED: set[str] = set()  # the planted fault's name, while it is in force
true_all_reduce = dist.all_reduce


def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """On rank 1 a reduction of gradients leaves what it was given, though the others get theirs."""
    mine = tensor.clone() if "unreduced" in DECEIVED and tensor.numel() > 16 else None
    work = true_all_reduce(tensor, *args, **kwargs)
    if mine is not None and dist.get_rank() == 1:
        tensor.copy_(mine)
    return work


dist.all_reduce = all_reduce  # before DeepSpeed is imported, which keeps a reference

from recipes.engine import build, selftest, topology, update
from recipes.engine.strategy import Strategy, read_strategy

ZERO1 = read_strategy(None, "ds_configs/zero1_fp16.json", {})
ZERO0 = read_strategy(None, "ds_configs/zero0_fp16.json", {})
BF16 = read_strategy(None, "ds_configs/zero1_bf16.json", {})
DDP = Strategy(kind="DDP", precision="fp32", cpu=True, origin="DDP")
true_backward, true_finish, true_prepare = update.backward, update.finish_update, build.prepare
calls = {"backward": 0}


def backward(engine: build.Engine, loss: torch.Tensor) -> None:
    """The engine's own backward of a loss that the fault has changed."""
    calls["backward"] += 1
    second = (calls["backward"] - 1) % engine.plan.accumulation == 1
    if "dropped" in DECEIVED and engine.peers.rank == 1 and second:
        loss = loss * 0
    if "halved" in DECEIVED:
        loss = loss / 2
    if "divided twice" in DECEIVED:
        loss = loss / engine.plan.accumulation
    if "unscaled" in DECEIVED and engine.strategy.precision == "fp16":
        loss = loss / update.loss_scale(engine)
    true_backward(engine, loss)


def finish_update(engine: build.Engine) -> update.UpdateResult:
    """What the engine reports, or the norm of the scaled gradient; rank 1 may lose a step."""
    result = true_finish(engine)
    if "stale" in DECEIVED and engine.peers.rank == 1:
        with torch.no_grad():
            next(engine.module.parameters()).mul_(1.01)
    if "scaled norm" not in DECEIVED:
        return result
    norm = result.grad_norm * result.loss_scale
    return update.UpdateResult(applied=True, grad_norm=norm, loss_scale=result.loss_scale)


def prepare(*args: Any) -> build.Engine:
    """DDP's reductions by `all_reduce` above instead of in C++."""
    engine = true_prepare(*args)
    if engine.strategy.kind == "DDP" and "unreduced" in DECEIVED:

        def hook(_, bucket):  # type: ignore[no-untyped-def]  # DDP checks annotations
            all_reduce(bucket.buffer())
            future: Any = torch.futures.Future()
            future.set_result(bucket.buffer() / dist.get_world_size())
            return future

        engine.model.register_comm_hook(None, hook)
    return engine


@contextlib.contextmanager
def deceived(fault: str) -> Iterator[None]:
    """The engine with one fault."""
    DECEIVED.add(fault)
    calls["backward"] = 0
    yield
    DECEIVED.clear()


CASES = {
    "dropped": (ZERO1, BF16, DDP),
    "divided twice": (ZERO1, BF16, DDP),
    "unreduced": (ZERO1, BF16, DDP),
    "unscaled": (ZERO1, ZERO0),
    "scaled norm": (ZERO1, ZERO0),
    "stale": (ZERO1, DDP),
}


def main() -> int:
    update.backward, update.finish_update, build.prepare = backward, finish_update, prepare
    if sys.argv[1] == "halved":
        from recipes.pretrain import main as pretrain

        with deceived("halved"):
            return pretrain(sys.argv[2:])
    torch.set_num_threads(1)
    launch = topology.read_launch(os.environ, None)
    before = dict(os.environ)
    lines = [{"case": "nothing"} | selftest.run_all(BF16, launch, cpu=True)]
    for case, strategies in CASES.items():
        arms = [selftest.Arm(name=s.title, strategy=s, own=False) for s in strategies]
        with deceived(case):
            results = selftest.run_arms(arms, launch, cpu=True)
        lines.append({"case": case, "arms": [selftest.asdict(result) for result in results]})
    changed = {name for name, _ in before.items() ^ os.environ.items()}
    lines[0]["environment_changed"] = sorted(changed)
    if launch.rank == 0:
        Path(sys.argv[1]).write_text("".join(json.dumps(line) + "\n" for line in lines))
    dist.barrier()
    return 0


if __name__ == "__main__":
    sys.exit(main())
