"""The options of `octet plan`, as they were given, and what is wrong with them by themselves."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from recipes.config import Run
from recipes.planner.workload import Precision

HOSTFILE = "hostfile"  # what is read where nothing says the machines
LARGEST_WORLD = 2048  # that is planned unasked
# Ten times the largest clusters that were built; each size of the scaling is planned by itself.
MOST_GPUS, MOST_SIZES = 1_000_000, 100
MOST_NUMBER = 1e9  # of a price, of hours, of a document's tokens
LEAST_HOURS = 1e-3  # between failures: below it nothing is ever saved
LONGEST = 10**15  # updates, tokens or samples; ten times all text there is
LARGEST_BATCH = 10**12  # sequences, or tokens of one


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
    """Numbers out of range, options without effect."""
    faults = []
    for name, count in (("nodes", wanted.nodes), ("gpus", wanted.gpus)):
        if count is not None and count < 1:
            faults.append(f"--{name} {count}: expected 1 or more")
    if wanted.gpus is not None and max(wanted.nodes or 1, 1) * wanted.gpus > MOST_GPUS:
        faults.append(
            f"--nodes {wanted.nodes or 1} --gpus {wanted.gpus}: the plan knows up to "
            f"{MOST_GPUS:,} GPUs"
        )
    for name, value, least, what in (
        ("price", wanted.price, 0.0, "the price of a GPU-hour"),
        ("tokens-per-sample", wanted.tokens_per_sample, 1.0, "a mean number of tokens"),
        ("mtbf", wanted.mtbf, LEAST_HOURS, "hours between failures of one GPU"),
    ):
        if value is not None and not least <= value <= MOST_NUMBER:
            faults.append(
                f"--{name} {value:g}: expected {what}, from {least:g} to {MOST_NUMBER:,.0f}"
            )
    if wanted.config and wanted.precision:
        faults.append(
            f"--precision {wanted.precision} has no effect with --config, which says it; leave one "
            "out"
        )
    return faults


def file_faults(wanted: Wanted) -> list[str]:
    """Files without a name, or that can't be written, or would be written over."""
    read = ("run", "hostfile", "config", "measured", "hardware")
    named = {name: getattr(wanted, name) for name in (*read, "json", "html")}
    empty = [name for name, path in named.items() if path == "" and name != "run"]
    faults = [f"--{name} '': expected the name of a file" for name in empty]
    taken: dict[Path, str] = {}
    for name, path in named.items():
        if not path:
            continue
        option = path if name == "run" else f"--{name} {path}"
        where = Path(path).absolute()
        if name not in read and path == "-":
            faults.append(f"{option}: the text goes to the standard output; name a file")
        elif name not in read and not where.parent.is_dir():
            faults.append(f"{option} can't be written: its folder does not exist")
        elif name not in read and where.is_dir():
            faults.append(f"{option} is a folder; name a file in it")
        elif name not in read and where.resolve() in taken:
            first = taken[where.resolve()]
            faults.append(f"{option} would be written over {first}; name another file")
        else:
            taken[where.resolve()] = option
    return faults


def length_faults(run: Run, wanted: Wanted) -> list[str]:
    """Why the run's length or batch can't be planned, or is said twice."""
    schedule, batch, faults = run.schedule, run.batch, []
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
    for name, number, most in (
        ("schedule.samples", schedule.samples, LONGEST),
        ("schedule.tokens", schedule.tokens, LONGEST),
        ("schedule.updates", schedule.updates, LONGEST),
        ("schedule.tokens_per_sample", schedule.tokens_per_sample, MOST_NUMBER),
        ("batch.seq_len", batch.seq_len, LARGEST_BATCH),
        ("batch.global_sequences", batch.global_sequences, LARGEST_BATCH),
    ):
        if number is not None and number > most:
            faults.append(f"{name}={number:g}: the plan counts up to {most:g}; lower it")
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
        found = sorted({nodes * gpus, *(w for w in whole if w <= gpus or network)})
        batch = run.batch.global_sequences if run else found[0]
        return tuple(found[next((i for i, w in enumerate(found) if batch % w == 0), 0) :])
    worlds = _numbers(wanted.worlds)
    faults = []
    uneven = [w for w in worlds if (w % gpus if w > gpus else gpus % w)]
    if uneven:
        faults.append(
            f"--worlds {wanted.worlds}: {', '.join(map(str, uneven))} is no whole number of nodes "
            f"with {gpus} GPUs, nor an equal part of one"
        )
    if run and run.batch.global_sequences % worlds[0]:
        faults.append(
            f"--worlds {wanted.worlds}: batch.global_sequences={run.batch.global_sequences} can't "
            f"be shared by {worlds[0]} GPUs, the first of them, by which the others are measured"
        )
    if not network and nodes == 1 and worlds[-1] > gpus:
        faults.append(f"--worlds {wanted.worlds} needs --nic, the network between the nodes")
    if wanted.nic is not None and nodes == 1 and worlds[-1] <= gpus:
        faults.append(
            f"--nic {wanted.nic} has no effect: every number of --worlds is one node; leave it out"
        )
    if faults:
        raise ValueError("\n".join(faults))
    return worlds


def _numbers(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"0*[1-9][0-9]{0,17}", word, re.ASCII) for word in words):
        raise ValueError(f"--worlds {text:.80}: expected numbers of GPUs as 8,64,1024")
    worlds = tuple(sorted({int(word) for word in words}))
    if worlds[-1] > MOST_GPUS or len(worlds) > MOST_SIZES:
        raise ValueError(
            f"--worlds {text:.80}: expected at most {MOST_SIZES} numbers, none above {MOST_GPUS:,}"
        )
    return worlds
