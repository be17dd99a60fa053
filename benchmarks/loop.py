"""What the recipe's loop costs against a bare loop, plain torch, and the transformers Trainer.

    torchrun --nproc_per_node 2 benchmarks/loop.py zero1     # the recipe against a bare loop
    torchrun --nproc_per_node 2 benchmarks/loop.py ddp       # the same, and against the Trainer
    torchrun --nproc_per_node 1 benchmarks/loop.py zero1     # also against plain torch, one process

All sides take turns in one run, on the same machine state: blocks of updates of the embedded
default (6.3 M parameters, 8 sequences of 256 tokens, bf16). Printed are medians in ms per update
and their ratios to the recipe; on a noisy machine only the ratios mean something. The bare loop
works on the recipe's own prepared objects with windows that are already in memory: no reading, no
metrics, no agreement between ranks.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from torch.nn.parallel import DistributedDataParallel

from recipes import pretrain
from recipes.config import Run
from recipes.engine import update
from recipes.job import Job, build, close
from recipes.objective import gradient_factor
from recipes.outcome import Outcome
from recipes.runfile import load_run

ROUNDS, BLOCK = 8, 4  # blocks of each side, updates in a block
Timer = Callable[[], list[float]]  # runs one block; ms of each update


@contextmanager
def shared_folder() -> Iterator[str]:
    """A temporary folder that all ranks know by the job's port."""
    folder = Path(tempfile.gettempdir()) / f"octet-loop-{os.environ['MASTER_PORT']}"
    try:
        yield str(folder)
    finally:
        if os.environ["RANK"] == "0":
            shutil.rmtree(folder, ignore_errors=True)


def embedded_run(folder: str, *settings: str) -> Run:
    """The embedded default, long enough for every block and without evaluation in between."""
    path = ROOT / "recipes/runs/stdlib.yaml"
    endless = ["schedule.updates=100000", f"output_dir={folder}", "evaluate.every_updates=100000"]
    return load_run(path, [*endless, *settings])


def recipe_job(run: Run, arm: str) -> Job:
    """The recipe's own job, built as the script builds it."""
    yaml = ROOT / f"accelerate_configs/local_{arm}_bf16.yaml"
    args = argparse.Namespace(
        accelerate_config=str(yaml),
        deepspeed_config=None,
        hostfile=None,
        local_rank=None,
        fresh=False,
    )
    outcome = Outcome(rank=int(os.environ["RANK"]), local_rank=int(os.environ["LOCAL_RANK"]))
    job = build(run, args, outcome)
    assert job is not None
    return job


def fresh_windows(job: Job) -> list[list[dict[str, torch.Tensor]]]:
    """The next windows of this rank, read before the clock starts.

    Fresh ones every time: on data that it has learned by heart a model is several per cent faster.
    """
    return [list(job.feed.take().batches(job.engine.device)) for _ in range(BLOCK)]


def time_recipe(job: Job) -> Timer:
    """The recipe's loop itself, with its logging and without its checkpoints."""
    stamps: list[float] = []

    def due(job: Job, applied: bool, agreed: Any) -> None:
        if job.progress.applied % job.run.log.every_updates == 0:
            job.meter.flush()
        stamps.append(time.perf_counter())

    pretrain.after_update = due

    def block() -> list[float]:
        job.length = replace(job.length, updates=job.progress.applied + BLOCK)
        stamps[:] = [time.perf_counter()]
        pretrain.train(job)
        return [(end - start) * 1000 for start, end in zip(stamps, stamps[1:], strict=False)]

    return block


def time_bare(job: Job) -> Timer:
    """The least that trains with the same prepared objects."""
    engine, plan = job.engine, job.plan
    factor = gradient_factor(
        accumulation=plan.accumulation, world=plan.world, tokens=plan.global_tokens
    )
    ddp = isinstance(engine.model, DistributedDataParallel)

    def block() -> list[float]:
        times = []
        for batches in fresh_windows(job):
            started = time.perf_counter()
            for batch in batches:
                with engine.accelerator.accumulate(engine.model):
                    loss, _ = engine.model(**batch)
                    engine.accelerator.backward(loss * factor)
            if ddp:
                engine.accelerator.clip_grad_norm_(engine.model.parameters(), engine.clip)
                engine.optimizer.step()
                engine.optimizer.zero_grad()
            times.append((time.perf_counter() - started) * 1000)
        return times

    return block


def time_plain_torch(job: Job) -> Timer:
    """torch alone in one process: bf16 autocast, AdamW, the same micro-batches."""
    from recipes.engine.build import build_optimizer
    from recipes.model import build_network, wrap

    run, device = job.run, job.engine.device
    network = build_network(run.model, run.seed, run.batch.seq_len, job.corpus.encoder.vocab_size)
    module = wrap(network, run.model.loss, prefer_chunked=False)
    optimizer = build_optimizer(module, run.optim, device)
    tokens = job.plan.global_tokens

    def block() -> list[float]:
        times = []
        for batches in fresh_windows(job):
            started = time.perf_counter()
            for batch in batches:
                with torch.autocast("cpu", torch.bfloat16):
                    loss, _ = module(**batch)
                (loss / tokens).backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), run.optim.clip)
            optimizer.step()
            optimizer.zero_grad()
            times.append((time.perf_counter() - started) * 1000)
        return times

    return block


def time_trainer(job: Job) -> Timer:
    """The transformers Trainer under DDP on the same rows; DeepSpeed on the CPU it refuses."""
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from recipes.model import build_network

    run, plan = job.run, job.plan
    network = build_network(run.model, run.seed, run.batch.seq_len, job.corpus.encoder.vocab_size)

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.ends.append(time.perf_counter())

    def block() -> list[float]:
        windows = fresh_windows(job) + fresh_windows(job)
        kept = [s._shared_state.copy() for s in (AcceleratorState, PartialState, GradientState)]
        for shared in (AcceleratorState, PartialState, GradientState):
            shared._shared_state.clear()
        clock = Clock()
        arguments = TrainingArguments(
            output_dir=str(run.folder / "trainer"),
            max_steps=BLOCK + 1,  # the first update has no start to measure from
            per_device_train_batch_size=plan.micro,
            gradient_accumulation_steps=plan.accumulation,
            learning_rate=run.optim.lr,
            max_grad_norm=run.optim.clip,
            bf16=True,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_steps=run.log.every_updates,
            disable_tqdm=True,
            dataloader_num_workers=1,
        )
        rows = [row for window in windows for batch in window for row in batch["input_ids"]]
        dataset = [{"input_ids": row, "labels": row} for row in rows * plan.world]
        Trainer(model=network, args=arguments, train_dataset=dataset, callbacks=[clock]).train()
        for shared, state in zip(
            (AcceleratorState, PartialState, GradientState), kept, strict=True
        ):
            shared._shared_state.clear()
            shared._shared_state.update(state)
        return [(b - a) * 1000 for a, b in zip(clock.ends, clock.ends[1:], strict=False)]

    return block


def main() -> None:
    arm = sys.argv[1]
    world = int(os.environ["WORLD_SIZE"])
    with shared_folder() as folder:
        job = recipe_job(embedded_run(folder), arm)
        sides: dict[str, Timer] = {"recipe": time_recipe(job), "bare loop": time_bare(job)}
        if world == 1:
            sides["plain torch, one process"] = time_plain_torch(job)
        if arm == "ddp":
            sides["transformers Trainer"] = time_trainer(job)
        times: dict[str, list[float]] = {name: [] for name in sides}
        for round_ in range(ROUNDS + 1):
            for name, block in sides.items():
                update.sum_over_ranks(job.engine, [torch.zeros(())])  # start together
                took = block()
                if round_:  # the first round warms up
                    times[name] += took
        job.meter.close()
        close(job)
    if os.environ["RANK"] == "0":
        ours = median(times["recipe"])
        print(f"\n{arm}, {world} ranks, {ROUNDS * BLOCK} updates a side\n")
        print("| side | ms per update | recipe / side |\n|---|--:|--:|")
        for name, values in times.items():
            print(f"| {name} | {median(values):.0f} | {ours / median(values):.3f} |")


if __name__ == "__main__":
    main()
