"""Who takes part: what the launcher said, what the libraries found, and whether the two agree."""

from __future__ import annotations

import os
import re
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from recipes.cluster.environment import INTERFACE_VARIABLES, differing, fingerprint
from recipes.cluster.hostfile import Host
from recipes.outcome import JoiningError, TopologyError


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What the launcher told this process."""

    rank: int
    local_rank: int
    world: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the topology table."""

    what: str
    found: str
    expected: str

    @property
    def agrees(self) -> bool:
        """Whether what was found is what was expected."""
        return self.found == self.expected


def read_launch(environ: Mapping[str, str], local_rank: int | None) -> Launch:
    """The launcher's RANK, LOCAL_RANK and WORLD_SIZE.

    Args:
        local_rank: the DeepSpeed launcher's `--local_rank` argument, which must agree where it is
            given.

    Raises:
        ValueError: this process was not started by a launcher, or its variables are not numbers.
    """
    missing = [
        name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if not environ.get(name, "").isdigit()
    ]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} not set: start with accelerate launch, torchrun or deepspeed "
            "(accelerate launch starts a single process without them for MULTI_CPU or "
            "num_processes 1; torchrun does not)"
        )
    launch = Launch(
        rank=int(environ["RANK"]),
        local_rank=int(environ["LOCAL_RANK"]),
        world=int(environ["WORLD_SIZE"]),
    )
    if local_rank is not None and local_rank != launch.local_rank:
        raise ValueError(
            f"--local_rank={local_rank} but LOCAL_RANK={launch.local_rank}; leave --local_rank out"
        )
    return launch


def refuse(rows: list[Row], reasons: list[str]) -> None:
    """Stop if any row disagrees.

    Raises:
        TopologyError: with the whole table and the likely reason.
    """
    if all(row.agrees for row in rows):
        return
    widths = [
        max(len(getattr(r, f)) for r in [*rows, _HEAD]) for f in ("what", "found", "expected")
    ]
    lines = [
        "  ".join(
            getattr(row, f).ljust(w)
            for f, w in zip(("what", "found", "expected"), widths, strict=True)
        )
        + ("" if row is _HEAD or row.agrees else "  <-- differs")
        for row in [_HEAD, *rows]
    ]
    raise TopologyError(
        "the job that started is not the job that was asked for:\n\n  "
        + "\n  ".join(lines)
        + "\n\n"
        "likely reason: " + "; or ".join(reasons)
    )


_HEAD = Row(what="what", found="found", expected="expected")


def check_launch(launch: Launch, hosts: tuple[Host, ...] | None, hostfile: str | None) -> None:
    """Compare the number of processes with the hostfile, before anything is initialised."""
    if hosts is None:
        return
    total = sum(host.slots for host in hosts)
    layout = " + ".join(f"{host.name}:{host.slots}" for host in hosts)
    refuse(
        [
            Row(
                what=f"processes ({hostfile}: {layout})",
                found=str(launch.world),
                expected=str(total),
            )
        ],
        [
            f"--num_processes, --nproc_per_node or --num_machines do not match {hostfile}",
            "a machine is missing from the launch",
        ],
    )


def check_device(strategy_cpu: bool | None, environ: Mapping[str, str], cuda: bool) -> bool:
    """Decide whether this run is on the CPU; never by falling back.

    Args:
        strategy_cpu: `use_cpu` of the Accelerate YAML, None where the launcher does not pass it on.
        cuda: whether torch sees a CUDA device.

    Raises:
        TopologyError: GPUs were asked for (or nothing was said) and none is visible.
    """
    hidden = environ.get("CUDA_VISIBLE_DEVICES")
    said_cpu = strategy_cpu is not False and (
        strategy_cpu is True
        or environ.get("DS_ACCELERATOR") == "cpu"
        or environ.get("ACCELERATE_USE_CPU", "false").lower() == "true"
        or (hidden is not None and (hidden == "" or hidden.startswith("-1")))
    )
    if said_cpu and cuda:
        refuse(
            [Row(what="device", found="cuda is visible", expected="cpu")],
            ["Accelerate takes a GPU that it sees: hide it with CUDA_VISIBLE_DEVICES=-1"],
        )
    if said_cpu:
        return True
    refuse(
        [
            Row(
                what="device",
                found="cuda" if cuda else "no GPU that torch can use",
                expected="cuda",
            )
        ],
        [
            "the driver or a CPU-only torch; nvidia-smi and "
            "python -c 'import torch; print(torch.version.cuda)' tell",
            "this is meant to run on the CPU: use accelerate_configs/local_*.yaml, or set "
            "DS_ACCELERATOR=cpu",
        ],
    )
    return False


@contextmanager
def joining(environ: Mapping[str, str]) -> Iterator[None]:
    """Turn what the libraries raise while the ranks find each other into one error.

    Raises:
        JoiningError: the meeting point can't be opened or reached, or a rank left at once.
    """
    try:
        yield
    except TopologyError:
        raise
    except RuntimeError as error:
        place = f"{environ.get('MASTER_ADDR', '?')}:{environ.get('MASTER_PORT', '?')}"
        said = " ".join(str(error).split())[:300]
        likely = (
            "another job uses this port (choose one with --main_process_port or --master_port); or "
            "a rank ended at once; or the address is not reachable"
        )
        if re.search("unable to find address for|no socket interface found", said, re.IGNORECASE):
            names = [f"{k}={environ[k]}" for k in INTERFACE_VARIABLES if environ.get(k)]
            likely = f"{socket.gethostname()} has no such network interface ({', '.join(names)})"
        raise JoiningError(
            f"the ranks did not come together at {place}: {said}\nlikely reason: {likely}"
        ) from error


def check_environment(fingerprints: Sequence[Mapping[str, str]]) -> None:
    """Compare the variables that must be the same everywhere; every rank finds the same.

    Args:
        fingerprints: `environment.fingerprint` of every rank, in rank order.

    Raises:
        TopologyError: each variable that differs, with the ranks.
    """
    if found := differing(fingerprints):
        raise TopologyError(
            "the ranks were started with different environments:\n  " + "\n  ".join(found)
        )


def check_world(
    accelerator: Any, launch: Launch, kind: str, hosts: tuple[Host, ...] | None
) -> dict[str, int]:
    """Compare launcher, torch.distributed, Accelerate and DeepSpeed after they have started.

    Returns:
        Ranks per host name, in rank order.
    """
    import torch.distributed as dist

    started = dist.is_available() and dist.is_initialized()
    rows = [
        Row(
            what="processes: torch.distributed",
            found=str(dist.get_world_size() if started else 1),
            expected=str(launch.world),
        ),
        Row(
            what="processes: Accelerate",
            found=str(accelerator.num_processes),
            expected=str(launch.world),
        ),
        Row(
            what="rank: Accelerate", found=str(accelerator.process_index), expected=str(launch.rank)
        ),
    ]
    if kind == "DEEPSPEED":
        import deepspeed.comm

        found = deepspeed.comm.get_world_size() if deepspeed.comm.is_initialized() else 1
        rows.append(Row(what="processes: DeepSpeed", found=str(found), expected=str(launch.world)))
    found_kind = accelerator.distributed_type.value
    wanted = (
        "DEEPSPEED"
        if kind == "DEEPSPEED"
        else found_kind
        if found_kind.startswith("MULTI_")
        else "MULTI_GPU or MULTI_CPU"
    )
    rows.append(Row(what="distributed type", found=found_kind, expected=wanted))
    reasons = [
        "Accelerate chose no communication backend, so every rank trains alone on the same data",
        "ACCELERATE_* variables of another job are set in this shell",
    ]
    refuse(rows, reasons)
    check_environment(_gather(fingerprint(os.environ), launch.world))
    return _ranks_per_host(launch.world, hosts)


def _gather(value: Any, world: int) -> list[Any]:
    import torch.distributed as dist

    values: list[Any] = [None] * world
    dist.all_gather_object(values, value)
    return values


def _ranks_per_host(world: int, hosts: tuple[Host, ...] | None) -> dict[str, int]:
    ranks = dict(Counter(_gather(socket.gethostname(), world)))
    if hosts is not None:
        layout = Row(
            what="ranks per host, in rank order",
            found=" ".join(map(str, ranks.values())),
            expected=" ".join(str(host.slots) for host in hosts),
        )
        reasons = [
            "the launcher started all processes on one machine",
            "hosts are in another order than in the hostfile",
        ]
        refuse([layout], reasons)
    return ranks
