"""How long training stands still for a checkpoint, and how fast one is saved and loaded.

    torchrun --nproc_per_node 2 benchmarks/checkpoint.py zero1
    torchrun --nproc_per_node 2 benchmarks/checkpoint.py ddp

One run trains a 35 M-parameter model in blocks of some updates. In each block one checkpoint is
taken after the first update, each time in another way, the ways taking turns:

    none          nothing is saved: what the block takes
    background    the recipe: copied to host memory, written while training goes on
    blocking      the recipe with checkpoint.write=blocking
    save_state    Accelerate's, which leaves its files in the page cache
    durable       the same, and its files are then flushed to the disk, as the recipe's are

Printed are medians and their ratios. `stands still` is how long the call keeps the loop;
`costs in all` is how much longer the block took than the one without a checkpoint beside it, so
that a background write that slows the updates down does not look free. Then the newest checkpoint
of each kind is loaded again, from the disk, after the page cache forgot its files.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch.distributed as dist
from loop import embedded_run, recipe_job

from recipes import pretrain
from recipes.checkpoint.arrays import TogetherReader
from recipes.checkpoint.verify import newest_whole
from recipes.engine import state
from recipes.job import Job, close
from recipes.saving import Saving

ROUNDS, BLOCK, LOADS = 7, 6, 4
SHAPE = ["model.config.n_embd=768", "model.config.n_layer=4", "model.config.n_head=12"]
BATCH = ["batch.seq_len=64", "batch.global_sequences=4", "batch.micro=2", "data.lanes=4"]


def make_job(arm: str, folder: Path) -> Job:
    """The recipe's own job, built as the script builds it."""
    settings = [*SHAPE, *BATCH, "log.every_updates=1000", "checkpoint.write=background"]
    return recipe_job(embedded_run(str(folder), *settings, "evaluate.sequences=4"), arm)


def savings(job: Job) -> dict[str, Saving]:
    """The recipe's two ways to save, into one folder."""
    blocking = job.run.checkpoint.model_copy(update={"write": "blocking"})
    run = job.run.model_copy(update={"checkpoint": blocking})
    return {
        "background": job.saving,
        "blocking": Saving(job.engine, run, job.disks, job.progress),
    }


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in files_in(folder))


def save_state(job: Job, folder: Path, *, durable: bool) -> None:
    """Accelerate's; each rank flushes a part of its files, as each wrote a part."""
    job.engine.accelerator.save_state(str(folder))
    if durable:
        dist.barrier()
        for path in sorted(files_in(folder))[job.engine.peers.rank :: job.engine.peers.world]:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
    dist.barrier()


def block(job: Job, act: Callable[[], None] | None) -> tuple[float, float]:
    """Train some updates, with a checkpoint after the first; seconds in all, and in its call."""
    stalls: list[float] = []

    def due(job: Job, applied: bool, agreed: Any) -> None:
        if agreed.written:
            job.saving.settle(job)
        if act is not None and not stalls:
            started = time.perf_counter()
            act()
            stalls.append(time.perf_counter() - started)

    pretrain.after_update = due
    job.length = replace(job.length, updates=job.progress.applied + BLOCK)
    dist.barrier()
    started = time.perf_counter()
    pretrain.train(job)
    job.saving.finish(job)
    dist.barrier()
    return time.perf_counter() - started, sum(stalls)


def measure_saves(job: Job, folder: Path) -> dict[str, list[tuple[float, float]]]:
    """Rounds of blocks, in which the ways to save take turns."""
    ways, own = savings(job), job.saving
    acts: dict[str, Callable[[], None] | None] = {"none": None}
    acts |= {name: lambda: job.saving.save(job, "asked") for name in ways}
    for name in ("save_state", "durable"):
        acts[name] = lambda name=name: save_state(job, folder / name, durable=name == "durable")
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in acts}
    for round_ in range(ROUNDS + 1):
        for name, act in acts.items():
            if job.engine.peers.rank == 0:
                shutil.rmtree(folder / name, ignore_errors=True)
            dist.barrier()
            job.saving = ways.get(name, own)
            times = block(job, act)
            if round_:  # the first round warms up
                took[name].append(times)
    job.saving = own
    return took


def forget(folder: Path) -> None:
    """Have the page cache drop a folder's files."""
    dist.barrier()
    os.sync()
    for path in files_in(folder):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    dist.barrier()


def timed(act: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    value = act()
    dist.barrier()
    return time.perf_counter() - started, value


def load_ours(job: Job) -> tuple[float, float]:
    """Seconds to find the newest whole checkpoint, every byte read, and to fill the engine."""
    peers = job.engine.peers
    root = job.run.folder / "checkpoints"
    checking, found = timed(lambda: newest_whole(root, peers, job.disks))
    scalars = state.Scalars(**state.export_scalars(job.engine))  # type: ignore[arg-type]

    def fill() -> None:
        state.fill(job.engine, TogetherReader(found, peers).read, scalars)
        state.spread(job.engine)

    return checking, timed(fill)[0]


def measure_loads(job: Job, folder: Path) -> dict[str, list[float]]:
    """Seconds, by way."""
    took: dict[str, list[float]] = {"recipe: verify": [], "recipe: load": [], "load_state": []}
    for _ in range(LOADS):
        forget(job.run.folder / "checkpoints")
        checking, filling = load_ours(job)
        took["recipe: verify"].append(checking)
        took["recipe: load"].append(filling)
        forget(folder / "save_state")
        theirs = folder / "save_state"
        took["load_state"].append(
            timed(lambda: job.engine.accelerator.load_state(str(theirs)))[0]  # noqa: B023
        )
    return took


def tell_saves(
    arm: str, took: dict[str, list[tuple[float, float]]], sizes: dict[str, int], parameters: int
) -> None:
    plain = [whole for whole, _ in took["none"]]
    update_ms = 1000 * median(plain) / BLOCK
    print(f"\n{arm}, {parameters / 1e6:.1f} M parameters, {update_ms:.0f} ms an update\n")
    print("| way | MB | stands still, ms | costs in all, ms | still: save_state / it | MB/s |")
    print("|---|--:|--:|--:|--:|--:|")
    reference = median(still for _, still in took["save_state"])
    for name, times in took.items():
        if name == "none":
            continue
        still = median(s for _, s in times)
        extra = median(w - p for (w, _), p in zip(times, plain, strict=True))
        size = sizes[name]
        rate = "" if name == "background" else f"{size / 1e6 / still:.0f}"
        print(
            f"| {name} | {size / 1e6:.0f} | {1000 * still:.0f} | {1000 * extra:.0f} | "
            f"{reference / still:.2f} | {rate} |"
        )


def tell_loads(took: dict[str, list[float]], sizes: dict[str, int]) -> None:
    print("\n| loaded from the disk | s | MB/s |\n|---|--:|--:|")
    both = [a + b for a, b in zip(took["recipe: verify"], took["recipe: load"], strict=True)]
    for name, times in {**took, "recipe, both": both}.items():
        size = sizes["save_state" if name == "load_state" else "blocking"]
        print(f"| {name} | {median(times):.2f} | {size / 1e6 / median(times):.0f} |")
    ratio = median(took["load_state"]) / median(both)
    print(f"\nload_state / recipe, both: {ratio:.2f}")


def main() -> None:
    arm, rank = sys.argv[1], int(os.environ["RANK"])
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    folder = Path(tempfile.gettempdir()) / f"octet-checkpoint-{os.environ['MASTER_PORT']}"
    try:
        job = make_job(arm, folder / "run")
        saves = measure_saves(job, folder)
        newest = sorted((folder / "run" / "checkpoints").glob("step-*"))[-1]
        sizes = {name: size_of(folder / name) for name in ("save_state", "durable")}
        sizes |= {"background": size_of(newest), "blocking": size_of(newest)}
        loads = measure_loads(job, folder)
        parameters = sum(p.numel() for p in job.engine.module.parameters())
        job.meter.close()
        close(job)
        if rank == 0:
            tell_saves(arm, saves, sizes, parameters)
            tell_loads(loads, sizes)
    finally:
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
