"""Every arm of the engine room in one start of two ranks; writes a JSON line per result.

torchrun --nproc_per_node 2 tests/drivers/arms.py RESULTS.jsonl
"""

from __future__ import annotations

import copy
import functools
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
os.environ["DS_ACCELERATOR"] = "cpu"

import torch
import torch.distributed as dist

COUNTS: dict[str, list[int]] = {}


def counting(name: str, original: Any) -> Any:
    """A collective of torch.distributed that counts its calls and elements."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        keys = ("tensor", "output_tensor", "tensor_list", "output")
        tensor = args[0] if args else next(kwargs[k] for k in keys if k in kwargs)
        numel = sum(t.numel() for t in (tensor if isinstance(tensor, list) else [tensor]))
        if numel > 16:  # flags, norms and counts are neither gradients nor weights
            tally = COUNTS.setdefault(name, [0, 0])
            tally[0], tally[1] = tally[0] + 1, tally[1] + numel
        return original(*args, **kwargs)

    return call


# Before DeepSpeed is imported: it keeps references to some of these functions.
for _name in (
    "all_reduce",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
):
    setattr(dist, _name, counting(_name, getattr(dist, _name)))

import accelerate.utils
from accelerate.state import AcceleratorState, GradientState, PartialState

from recipes.config import Run
from recipes.engine import build, state, topology, update
from recipes.engine.peers import Peers
from recipes.engine.strategy import Strategy
from recipes.model import SummedLoss, build_network
from recipes.objective import BatchPlan, gradient_factor, scaled_loss
from recipes.outcome import TopologyError

ACCUMULATION, MICRO, SEQ_LEN, VOCAB, UPDATES = 4, 1, 16, 64, 3
RUN = {
    "name": "arms",
    "output_dir": "/nonexistent",
    "model": {
        "config": {
            "model_type": "gpt2",
            "n_layer": 2,
            "n_embd": 16,
            "n_head": 2,
            "n_positions": SEQ_LEN,
            "vocab_size": VOCAB,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }
    },
    "data": {"kind": "python_stdlib", "tokenizer": {"train_vocab_size": 300}},
    "batch": {"seq_len": SEQ_LEN, "global_sequences": 8, "micro": MICRO},
    # A large eps makes Adam's step follow the gradient's size, so that a wrong scale shows.
    "optim": {"lr": 0.05, "eps": 0.1, "clip": 0.5},
    "schedule": {"updates": UPDATES},
    "checkpoint": {"every_updates": 10},
}
JSONS = {
    "zero1_fp32": {"zero_optimization": {"stage": 1}},
    "zero1_bf16": {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}},
    "less_traffic_fp32": {
        "zero_optimization": {"stage": 1, "use_multi_rank_bucket_allreduce": False}
    },
    "zero1_fp16": json.loads((ROOT / "ds_configs/zero1_fp16.json").read_text()),
    "zero0_fp16": json.loads((ROOT / "ds_configs/zero0_fp16.json").read_text()),
}


READ_BACK = (
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "train_batch_size",
    "gradient_clipping",
    "zero_optimization_stage",
    "zero_reduce_bucket_size",
    "zero_allgather_bucket_size",
    "fp16_enabled",
)


def strategy(arm: str) -> Strategy:
    kind, precision = arm.rsplit("_", 1)
    if kind == "ddp":
        return Strategy(kind="DDP", precision=precision, cpu=True, origin=arm)  # type: ignore[arg-type]
    tree = copy.deepcopy(JSONS[arm])
    if tree["zero_optimization"]["stage"] == 1:
        tree["zero_optimization"] |= {"reduce_bucket_size": 10**6, "allgather_bucket_size": 10**6}
    return Strategy(kind="DEEPSPEED", precision=precision, cpu=True, origin=arm, deepspeed=tree)  # type: ignore[arg-type]


def engine_of(arm: str, accumulation: int = ACCUMULATION) -> build.Engine:
    """A freshly prepared engine; Accelerate's process-wide state is forgotten first."""
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    GradientState._reset_state()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    batch = {"seq_len": SEQ_LEN, "global_sequences": world * accumulation * MICRO, "micro": MICRO}
    run = Run.model_validate(RUN | {"batch": batch})
    plan = BatchPlan(
        world=world,
        micro=MICRO,
        accumulation=accumulation,
        global_sequences=batch["global_sequences"],
        seq_len=SEQ_LEN,
    )
    arm_strategy = strategy(arm)
    accelerator = build.start(arm_strategy, run, plan, cpu=True)
    launch = topology.Launch(rank=rank, local_rank=rank, world=world)
    topology.check_world(accelerator, launch, arm_strategy.kind, None)
    network = build_network(run.model, seed=0, seq_len=SEQ_LEN, vocab_size=VOCAB)
    module = SummedLoss(network, chunked=False)
    return build.prepare(accelerator, module, arm_strategy, run, plan, Peers(rank, world))


def window(number: int, accumulation: int = ACCUMULATION) -> list[list[dict[str, torch.Tensor]]]:
    """All ranks' micro-batches of one window: documents of very uneven lengths."""
    draw = torch.Generator().manual_seed(100 + number)
    world = int(os.environ["WORLD_SIZE"])

    def one() -> dict[str, torch.Tensor]:
        ids = torch.randint(0, VOCAB, (MICRO, SEQ_LEN + 1), generator=draw)
        labels = ids[:, 1:].clone()
        labels[:, int(torch.randint(1, SEQ_LEN, (), generator=draw)) :] = -100
        return {"input_ids": ids[:, :-1], "labels": labels}

    return [[one() for _ in range(accumulation)] for _ in range(world)]


def count(batches: list[dict[str, torch.Tensor]]) -> int:
    return sum(int((batch["labels"] != -100).sum()) for batch in batches)


def train(engine: build.Engine, numbers: range, rate: float = 0.05) -> list[tuple[float, float]]:
    """The recipe's inner loop over given windows; loss and gradient norm of each update."""
    rank, accumulation, out = engine.peers.rank, engine.plan.accumulation, []
    for number in numbers:
        everyone = window(number, accumulation)
        mine = everyone[rank]
        announced = update.Announcement(
            engine,
            tokens=count(mine),
            samples=1,
            digest=rank,
            flags=update.Flags(save=rank == 1, written=rank == 0),
        )
        update.set_learning_rate(engine, rate)
        agreed, total = announced.wait(), torch.zeros(())
        # One rank's wish is everybody's; a write has ended when it has on every rank.
        assert (agreed.save, agreed.written, agreed.stop) == (True, False, False)
        assert (agreed.samples, agreed.digest) == (engine.plan.world, sum(range(engine.plan.world)))
        factor = gradient_factor(
            accumulation=accumulation, world=engine.plan.world, tokens=agreed.tokens
        )
        for batch in mine:
            with update.micro_batch(engine):
                loss, _ = engine.model(**batch)
                update.backward(engine, scaled_loss(loss, factor))
                total += loss.detach()
        result = update.finish_update(engine)
        assert result.applied
        mean = update.sum_over_ranks(engine, [total])[0] / agreed.tokens
        out.append((mean, result.grad_norm))
    return out


def reference(naive: bool = False) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """The same updates by plain torch in one process on the whole window.

    Args:
        naive: average every micro-batch's own mean, as copied loops do.
    """
    run = Run.model_validate(RUN)
    module = SummedLoss(build_network(run.model, 0, SEQ_LEN, VOCAB), chunked=False)
    optimizer = build.build_optimizer(module, run.optim, torch.device("cpu"))
    out = []
    for number in range(UPDATES):
        batches = [batch for rank in window(number) for batch in rank]
        tokens, total = count(batches), 0.0
        for batch in batches:
            loss, counted = module(**batch)
            total += loss.item()
            (loss / counted / len(batches) if naive else loss / tokens).backward()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), run.optim.clip)
        optimizer.step()
        optimizer.zero_grad()
        out.append((total / tokens, float(norm)))
    return out, {
        name.removeprefix("network."): p.detach().clone() for name, p in module.named_parameters()
    }


def everything(engine: build.Engine) -> dict[str, torch.Tensor]:
    return state.whole(engine)


def reading(arrays: dict[str, torch.Tensor]) -> state.Read:
    """Reads runs of elements of arrays in memory."""
    return lambda name, start, stop: arrays[name].view(-1)[start:stop]


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest difference of any element."""
    return max(float((a[name] - b[name]).abs().max()) for name in b)


@contextmanager
def counted() -> Iterator[dict[str, list[int]]]:
    """Calls and elements of the collectives within, by name."""
    COUNTS.clear()
    yield COUNTS


def ddp_reductions(engine: build.Engine, number: int) -> tuple[int, int]:
    """How many gradient reductions DDP issues in one window, and of how many elements in all."""
    with torch.profiler.profile(record_shapes=True) as profile:
        train(engine, range(number, number + 1))
    events = [e for e in profile.events() if "all_reduce" in e.name and e.name.startswith("gloo")]
    sizes = [sum(torch.Size(shape).numel() for shape in e.input_shapes if shape) for e in events]
    return sum(size > 16 for size in sizes), sum(size for size in sizes if size > 16)


def misread(arm: str) -> dict[str, Any]:
    """What the read-back says when the engine uses another value than it was given, one by one."""
    engine = engine_of(arm)
    run = Run.model_validate(RUN)
    said: dict[str, list[str]] = {"nothing": differing(engine, run)}
    if arm.startswith("ddp"):
        engine.accelerator.native_amp = False  # as Accelerate does for fp16 on the CPU
        said["native_amp"] = differing(engine, run)
    else:
        for name in READ_BACK:
            right = getattr(engine.model, name)
            setattr(
                engine.model,
                name,
                lambda right=right: not right() if right() is True else right() + 1,
            )
            said[name] = differing(engine, run)
            setattr(engine.model, name, right)
        engine.inner_optimizer.loss_scaler.cur_scale = 2.0**32
        said["loss scale"] = differing(engine, run)
    return {"what": "misread", "arm": arm, "said": said}


def differing(engine: build.Engine, run: Run) -> list[str]:
    return [row.what for row in build.read_back(engine, run) if not row.agrees]


def alone() -> dict[str, Any]:
    """Without a named backend Accelerate counts one process on every rank of a CPU job."""
    build.InitProcessGroupKwargs = lambda backend: accelerate.utils.InitProcessGroupKwargs()
    try:
        engine_of("zero1_fp32")
    except TopologyError as error:
        return {"what": "alone", "said": str(error)}
    return {"what": "alone", "said": "nothing"}


Saved = dict[str, tuple[dict[str, torch.Tensor], dict[str, Any]]]
ARMS = ("zero1_fp32", "less_traffic_fp32", "ddp_fp32", "zero1_bf16", "ddp_bf16", "zero1_fp16")
MOVES = [
    ("zero1_fp32", "ddp_fp32"),
    ("ddp_fp32", "zero1_fp32"),
    ("zero1_fp16", "ddp_fp32"),
    ("ddp_bf16", "zero0_fp16"),
    ("zero0_fp16", "zero1_fp16"),
    ("zero1_bf16", "zero1_fp16"),
]


def gradient_storages(engine: build.Engine) -> list[int]:
    """Addresses of the memory that lies behind gradients, each once."""
    grads = [p.grad for p in engine.module.parameters() if p.grad is not None]
    return sorted({grad.untyped_storage().data_ptr() for grad in grads})


def parity(saved: Saved) -> Iterator[dict[str, Any]]:
    """Every arm against one process; leaves each arm's state in `saved`."""
    want, weights = reference()
    naive, _ = reference(naive=True)
    for arm in (*ARMS, "zero0_fp16"):
        engine = engine_of(arm)
        got = train(engine, range(UPDATES))
        arrays = everything(engine)
        drift = distance({name: arrays[f"weight/{name}"] for name in weights}, weights)
        line = {"what": "parity", "arm": arm, "got": got, "want": want, "drift": drift}
        yield line | {"naive": naive, "type": type(engine.inner_optimizer).__name__}
        saved[arm] = (arrays, state.export_scalars(engine))
        before = gradient_storages(engine)
        on = train(engine, range(UPDATES, UPDATES + 2))
        yield {"what": "gradients", "arm": arm, "kept": before, "after": gradient_storages(engine)}
        yield {"what": "uninterrupted", "arm": arm, "losses": on}


def moves(saved: Saved) -> Iterator[dict[str, Any]]:
    """State put into a fresh engine, of the same arm and of another."""
    for source, target in [(arm, arm) for arm in saved] + MOVES:
        engine = engine_of(target)
        arrays, scalars = saved[source]
        state.fill(engine, reading(arrays), state.Scalars(**scalars))
        state.spread(engine)
        same = all(torch.equal(arrays[n], t) for n, t in everything(engine).items())
        line = {"what": "moved", "from": source, "to": target, "equal": same}
        line["losses"] = train(engine, range(UPDATES, UPDATES + 2))
        yield line | {"scale": update.loss_scale(engine)}


def collectives() -> Iterator[dict[str, Any]]:
    """Calls and elements of one update, at accumulation 1 and 8."""
    for arm in ("zero1_fp32", "less_traffic_fp32", "zero0_fp16", "ddp_fp32"):
        for accumulation in (1, 8):
            engine = engine_of(arm, accumulation)
            train(engine, range(2))  # DDP lays its buckets out anew after the first backward
            if arm == "ddp_fp32":
                calls, elements = ddp_reductions(engine, 2)
                tallies = {"all_reduce": [calls, elements]}
            else:
                with counted() as counts:
                    train(engine, range(2, 3))
                tallies = dict(counts)
            yield {
                "what": "collectives",
                "arm": arm,
                "accumulation": accumulation,
                "parameters": sum(p.numel() for p in engine.module.parameters()),
                "calls": {name: tally[0] for name, tally in tallies.items()},
                "elements": {name: tally[1] for name, tally in tallies.items()},
            }


def main() -> None:
    torch.set_num_threads(1)
    saved: Saved = {}
    lines = [*parity(saved), *moves(saved), *collectives()]
    lines += [misread("zero1_fp16"), misread("ddp_bf16"), alone()]
    if os.environ["RANK"] == "0":
        Path(sys.argv[1]).write_text("".join(json.dumps(line) + "\n" for line in lines))
    dist.barrier()


if __name__ == "__main__":
    main()
