"""GPUs and networks by name: data sheets and published measurements, with their sources.

The table is hardware.yaml beside this file; `--hardware FILE` adds entries in the same form. An
unknown name is an error that says what an entry needs: nothing is guessed.
"""

from __future__ import annotations

import difflib
import re
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from recipes.runfile import describe, read_yaml

# Rates that any machine keeps within; beyond them a unit was mistaken.
LEAST_RATE, MOST_RATE = 1e9, 1e18
# Of a network that is named by its rate: slower ones train nothing, faster ones don't exist.
LEAST_BITS, MOST_BITS = 1e8, 1e14
NET_S = 15e-6  # of a message between nodes, where nothing says it: assumed
Rate = Annotated[float, Field(ge=LEAST_RATE, le=MOST_RATE)]


class Entry(BaseModel):
    """A frozen, strictly typed entry of the table; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: str = ""
    source: str = Field(min_length=1)  # where every number of the entry comes from


class Gpu(Entry):
    """One GPU. Rates are per second, dense (no sparsity), one direction."""

    aliases: tuple[str, ...] = ()  # as drivers name it, e.g. "NVIDIA A100-SXM4-80GB"
    memory_gib: float = Field(ge=0.1, le=1e5)  # what the driver shows, GiB
    flops_16bit: Rate  # dense peak with fp32 accumulation
    flops_32bit: Rate  # dense peak of fp32 (TF32 off)
    matmul_share: float = Field(ge=0.01, le=1)  # best measured matmul rate by the peak
    # Of that rate, what a step of minutes sustains: GPUs that reach it only for moments, until
    # their power limit, are below 1.
    sustained: float = Field(default=1.0, ge=0.01, le=1)
    # Flash attention by matmul rate, relative to an A100's.
    flash: float = Field(default=1.0, ge=0.01, le=100)
    sms: int = Field(
        gt=0, le=100_000
    )  # multiprocessors (compute units), which share a product's tiles
    memory_bytes_per_s: Rate
    link: Literal["nvlink", "nvswitch", "xgmi", "pcie"]
    link_bytes_per_s: Rate  # all-reduce bus bandwidth within a node, large messages
    # Other GPUs of a full node with which each has links of its own; 0: they share a switch.
    peers: int = Field(default=0, ge=0, le=1000)
    bf16: bool = True
    flash2: bool = True  # the flash-attn package runs on it (Ampere or newer)


class Nic(Entry):
    """All of one node's network together."""

    bits_per_s: float = Field(ge=1e6, le=MOST_BITS)
    latency_s: float = Field(default=NET_S, ge=1e-9, le=1)  # of one message between nodes
    share: float = Field(default=0.85, ge=0.01, le=1)  # of the line rate that large messages get


class Hardware:
    """The table, and what a user added to it."""

    def __init__(self, gpus: dict[str, Gpu], nics: dict[str, Nic]) -> None:
        self.gpus, self.nics = gpus, nics

    def gpu(self, name: str) -> Gpu:
        """A GPU by its name or a driver's (ValueError: unknown)."""
        wanted = _plain(name)
        for entry in self.gpus.values():
            if wanted in {_plain(entry.name), *map(_plain, entry.aliases)}:
                return entry
        raise ValueError(_unknown("--gpu", name, self.gpus))

    def nic(self, name: str) -> Nic:
        """A network by name, or by its rate such as 200gbit (ValueError: neither)."""
        wanted = _plain(name)
        for entry in self.nics.values():
            if wanted == _plain(entry.name):
                return entry
        rate = re.fullmatch(r"(\d+(?:\.\d+)?)(gbit|gbps|gb/s|mbit|tbit)", name.strip().lower())
        if rate is None:
            raise ValueError(_unknown("--nic", name, self.nics) + ", or a rate such as 200gbit")
        unit = {"mbit": 1e6, "gbit": 1e9, "gbps": 1e9, "gb/s": 8e9, "tbit": 1e12}[rate[2]]
        bits = float(rate[1]) * unit
        if not LEAST_BITS <= bits <= MOST_BITS:
            raise ValueError(
                f"--nic {name!r}: expected 0.1gbit to 100tbit, all of a node's network together"
            )
        return Nic(name=name, source=f"--nic {name}: the line rate", bits_per_s=bits)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _unknown(option: str, name: str, known: dict[str, Any]) -> str:
    near = difflib.get_close_matches(name.lower(), known, n=1)
    guess = f"did you mean {near[0]}? " if near else ""
    return f"{option} {name!r} is not in the hardware table; {guess}known: {', '.join(known)}"


def read_hardware(extra: str | Path | None = None) -> Hardware:
    """The shipped table with the entries of `extra` added or replaced.

    A name that both know, be it an alias, is `extra`'s.

    Raises:
        ValueError: the file can't be read; every fault in it, at once.
    """
    shipped = files("recipes.planner").joinpath("hardware.yaml")
    gpus, nics, faults = _entries(read_yaml(Path(str(shipped))), str(shipped))
    if extra is not None:
        more_gpus, more_nics, found = _entries(read_yaml(extra), str(extra))
        faults += found
        # In front, so that a driver's name is theirs where both know it.
        gpus, nics = more_gpus | gpus | more_gpus, more_nics | nics | more_nics
    if faults:
        raise ValueError("\n".join(faults))
    return Hardware(gpus, nics)


def _entries(tree: Any, where: str) -> tuple[dict[str, Gpu], dict[str, Nic], list[str]]:
    faults: list[str] = []
    found: dict[str, dict[str, Any]] = {"gpus": {}, "nics": {}}
    if not isinstance(tree, dict) or not set(tree) <= set(found):
        return {}, {}, [f"{where}: expected the sections gpus: and nics:"]
    for section, kind in (("gpus", Gpu), ("nics", Nic)):
        entries = tree.get(section) or {}
        if not isinstance(entries, dict):
            faults.append(
                f"{where}: {section}={entries!r:.80}: expected names with keys below them"
            )
            continue
        for name, values in entries.items():
            if not isinstance(values, dict):
                faults.append(f"{where}: {section}.{name}={values!r:.80}: expected keys and values")
                continue
            try:
                found[section][str(name)] = kind.model_validate(values | {"name": str(name)})
            except ValidationError as error:
                faults += [
                    f"{where}: {section}.{name}.{describe(fault, kind)}" for fault in error.errors()
                ]
    return found["gpus"], found["nics"], faults + _twice(found["gpus"], where)


def _twice(gpus: dict[str, Gpu], where: str) -> list[str]:
    """Names that two entries of one file claim."""
    owner: dict[str, str] = {}
    faults = []
    for gpu in gpus.values():
        for name in (gpu.name, *gpu.aliases):
            first = owner.setdefault(_plain(name), gpu.name)
            if first != gpu.name:
                faults.append(f"{where}: gpus.{gpu.name}: {name} is {first} already; name it once")
    return faults
