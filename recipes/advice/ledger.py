"""`octet plan --ledger`: what finished and running runs say about their plans, from `plan.json`."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from rich.console import Console
from rich.table import Table

from recipes.comparison import PLAN, UNITS, shown
from recipes.runfile import describe

WIDTH = 140  # where no terminal says it
SCHEMA = 1
LATEST = 1e11  # seconds since 1970 of a start: the year 5138
HEAD = ("run", "date", "GPU", "strategy", "ranks", "micro", "", "plan", "measured", "error")


class _Part(BaseModel):
    """What is read of plan.json: strict in it, blind to all else."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _Value(_Part):
    value: float


class _Quantity(_Part):
    what: str
    plan: _Value | None
    measured: float | None
    error_percent: float | None
    verdict: str

    @model_validator(mode="after")
    def _is_known_and_whole(self) -> _Quantity:
        if self.what not in UNITS:
            raise ValueError(f"what={self.what!r:.80}: expected one of {', '.join(UNITS)}")
        if self.error_percent is not None and (self.plan is None or self.measured is None):
            raise ValueError("error_percent stands without a plan or a measurement")
        return self


class _Start(_Part):
    time: float = Field(ge=0, le=LATEST)
    gpu: str
    strategy: str
    world: int
    micro: int
    quantities: list[_Quantity]


class _Plan(_Part):
    name: str
    starts: list[_Start]


def ledger(folders: Sequence[str | Path]) -> dict[str, Any]:
    """The history of several runs as JSON values.

    Returns:
        `schema`; `starts`: every start that compared something, oldest first, as in `plan.json`
        (`recipes.confront`) with the run's `name` and `folder`; `median_error_percent`: by
        quantity the median of |error| over those starts, with their number.

    Raises:
        ValueError: every folder that is no run's, or holds no comparison, at once.
    """
    faults: list[str] = []
    starts: list[dict[str, Any]] = []
    for folder in _runs(folders):
        try:
            starts += _starts(folder)
        except ValueError as error:
            faults.append(str(error))
    if faults:
        raise ValueError("\n".join(faults))
    starts.sort(key=lambda start: start["time"])
    return {"schema": SCHEMA, "starts": starts, "median_error_percent": _medians(starts)}


def _runs(named: Sequence[str | Path]) -> list[Path]:
    """The run folders, each once; a run's plan.json stands for its folder."""
    folders: dict[Path, Path] = {}
    for path in map(Path, named):
        folder = path.parent if path.name == PLAN and not path.is_dir() else path
        folders.setdefault(folder.resolve(), folder)
    return list(folders.values())


def _starts(folder: Path) -> list[dict[str, Any]]:
    if not (folder / "run.json").is_file():
        what = "is no run folder (it has no run.json)" if folder.is_dir() else "does not exist"
        raise ValueError(f"{folder} {what}; name folders such as outputs/stdlib")
    path = folder / PLAN
    if not path.is_file():
        raise ValueError(
            f"{path} does not exist: the run has not come far enough to compare anything, or was "
            "trained by a version that did not; train on, or leave it out"
        )
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} can't be read: {error}; leave the run out") from error
    schema = told.get("schema") if isinstance(told, dict) else None
    if schema != SCHEMA:
        raise ValueError(
            f"{path} can't be read: schema {schema!r:.80}, expected {SCHEMA}; leave the run out"
        )
    try:
        _Plan.model_validate(told)
    except ValidationError as error:
        faults = [describe(fault, _Plan) for fault in error.errors()]
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise ValueError(f"{path} is damaged: {faults[0]}{more}; leave the run out") from error
    about = {"name": told["name"], "folder": str(folder)}
    return [about | start for start in told["starts"]]


def _medians(starts: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    errors: dict[str, list[float]] = {}
    for start in starts:
        for quantity in start["quantities"]:
            if quantity["error_percent"] is not None:
                errors.setdefault(quantity["what"], []).append(abs(quantity["error_percent"]))
    return {
        what: {"median": round(median(errors[what]), 3), "starts": len(errors[what])}
        for what in UNITS
        if what in errors
    }


def ledger_text(result: dict[str, Any]) -> str:
    """The history as a table, a line for each quantity that was compared, and the medians."""
    if not result["starts"]:
        return "no start of these runs has compared anything yet; train on"
    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, name in enumerate(HEAD):
        right = name in ("ranks", "micro", "plan", "measured", "error")
        table.add_column(name, justify="right" if right else "left", no_wrap=place > 3)
    table.add_column("", no_wrap=True)
    for start in result["starts"]:
        about = _about(start)
        compared = [q for q in start["quantities"] if q["error_percent"] is not None]
        for quantity in compared:
            table.add_row(*about, *_cells(quantity))
            about = [""] * len(about)
        if not compared:
            table.add_row(*about, "nothing could be compared", "", "", "", "")
    buffer = io.StringIO()
    Console(file=buffer, width=WIDTH, color_system=None, markup=False).print(table)
    lines = [line.rstrip() for line in buffer.getvalue().splitlines()]
    medians = result["median_error_percent"]
    if medians:
        lines += ["", f"median |error| over {len(result['starts'])} start(s)"]
        width = max(map(len, medians))
        lines += [
            f"  {what:{width}}  {values['median']:6.1f} %  ({values['starts']})"
            for what, values in medians.items()
        ]
    return "\n".join(lines)


def _about(start: dict[str, Any]) -> list[str]:
    date = time.strftime("%Y-%m-%d", time.localtime(start["time"]))
    return [
        str(start["name"]),
        date,
        str(start["gpu"]),
        str(start["strategy"]),
        str(start["world"]),
        str(start["micro"]),
    ]


def _cells(quantity: dict[str, Any]) -> list[str]:
    what = quantity["what"]
    return [
        what,
        shown(what, quantity["plan"]["value"]),
        shown(what, quantity["measured"]),
        f"{quantity['error_percent']:+.1f} %",
        "outside the band" if quantity["verdict"] == "OUTSIDE" else "",
    ]
