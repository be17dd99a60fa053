"""The options of `octet plan`, as they were given, and what is wrong with them by themselves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from recipes.config import Run
from recipes.planner.workload import Precision

HOSTFILE = "hostfile"  # what is read where nothing says the machines
LARGEST_WORLD = 2048  # that is planned unasked


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The options of a command line, as they were given; None or empty: not given."""

    run: str
    overrides: tuple[str, ...] = ()
    hostfile: str | None = None
    nodes: int | None = None
    gpus: int | None = None
    gpu: str | None = None
    nic: str | None = None
    precision: Precision | None = None
    config: str | None = None
    price: float | None = None
    tokens_per_sample: float | None = None
    measured: str | None = None
    hardware: str | None = None
    trace: bool = False
    mtbf: float | None = None
    worlds: str | None = None
    json: str | None = None
    html: str | None = None


def option_faults(wanted: Wanted) -> list[str]:
    """Numbers out of range, files that can't be written, options without effect."""
    faults = []
    for name, count in (("nodes", wanted.nodes), ("gpus", wanted.gpus)):
        if count is not None and count < 1:
            faults.append(f"--{name} {count}: expected 1 or more")
    if wanted.price is not None and not 0 <= wanted.price < float("inf"):
        faults.append(f"--price {wanted.price:g}: expected the price of a GPU-hour, 0 or more")
    for name, value, what in (
        ("tokens-per-sample", wanted.tokens_per_sample, "a mean number of tokens"),
        ("mtbf", wanted.mtbf, "hours between failures of one GPU"),
    ):
        if value is not None and not 0 < value < float("inf"):
            faults.append(f"--{name} {value:g}: expected {what}, above 0")
    for name, path in (("json", wanted.json), ("html", wanted.html)):
        if path is not None and not Path(path).absolute().parent.is_dir():
            faults.append(f"--{name} {path} can't be written: its folder does not exist")
        elif path is not None and Path(path).is_dir():
            faults.append(f"--{name} {path} is a folder; name a file in it")
    if wanted.config and wanted.precision:
        faults.append(
            f"--precision {wanted.precision} has no effect with --config, which says it; leave one "
            "out"
        )
    return faults


def length_faults(run: Run, wanted: Wanted) -> list[str]:
    """Why the run's length can't be planned, or is said twice."""
    schedule, faults = run.schedule, []
    if wanted.tokens_per_sample is not None:
        given = f"--tokens-per-sample {wanted.tokens_per_sample:g}"
        if schedule.samples is None:
            faults.append(f"{given} has no effect: the run's length is not in samples")
        elif schedule.tokens_per_sample is not None:
            stated = f"schedule.tokens_per_sample={schedule.tokens_per_sample:g}"
            faults.append(f"{given} has no effect: {stated} stands in the run file")
    if schedule.epochs is not None:
        faults.append(
            f"schedule.epochs={schedule.epochs:g}: the plan reads no data, so it can't count "
            "documents; plan with schedule.epochs=null schedule.samples=N (or tokens, or updates)"
        )
    return faults


def worlds_of(
    wanted: Wanted, nodes: int, gpus: int, network: bool, run: Run | None
) -> tuple[int, ...]:
    """Numbers of GPUs for the scaling section; without a network those within a node.

    Raises:
        ValueError: no numbers, no whole nodes, or more than a node without a network.
    """
    if wanted.worlds is None:
        powers = [2**n for n in range(LARGEST_WORLD.bit_length())]
        doubled = {w for p in powers for w in (p, nodes * gpus * p) if 8 <= w <= LARGEST_WORLD}
        whole = {w for w in doubled if (w % gpus == 0 if w > gpus else gpus % w == 0)}
        found = sorted(w for w in whole | {nodes * gpus} if w <= gpus or network)
        batch = run.batch.global_sequences if run else found[0]
        return tuple(found[next((i for i, w in enumerate(found) if batch % w == 0), 0) :])
    words = wanted.worlds.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise ValueError(f"--worlds {wanted.worlds}: expected numbers of GPUs as 8,64,1024")
    worlds = tuple(sorted({int(word) for word in words}))
    uneven = [w for w in worlds if (w % gpus if w > gpus else gpus % w)]
    if uneven:
        raise ValueError(
            f"--worlds {wanted.worlds}: {', '.join(map(str, uneven))} is no whole number of nodes "
            f"with {gpus} GPUs, nor an equal part of one"
        )
    if run and run.batch.global_sequences % worlds[0]:
        raise ValueError(
            f"--worlds {wanted.worlds}: batch.global_sequences={run.batch.global_sequences} can't "
            f"be shared by {worlds[0]} GPUs, the first of them, by which the others are measured"
        )
    if not network and nodes == 1 and worlds[-1] > gpus:
        raise ValueError(f"--worlds {wanted.worlds} needs --nic, the network between the nodes")
    if wanted.nic is not None and nodes == 1 and worlds[-1] <= gpus:
        raise ValueError(f"--nic {wanted.nic} has no effect: every number of --worlds is one node")
    return worlds
