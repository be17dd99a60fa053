"""`octet plan --ledger`: what finished and running runs say about their plans, from `plan.json`."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from recipes.comparison import PLAN, SCHEMA, UNITS, read_plan, shown
from recipes.planner.scaling import odd_points

LEAST_STARTS = 4  # of which one can differ from the others
WIDTH = 140  # where no terminal says it
HEAD = ("run", "date", "GPU", "strategy", "ranks", "micro", "", "plan", "measured", "error")


def ledger(folders: Sequence[str | Path]) -> dict[str, Any]:
    """The history of several runs as JSON values.

    Returns:
        `schema`; `starts`: every start that compared something, oldest first, as in `plan.json`
        (`recipes.confront`) with the run's `name` and `folder`; `median_error_percent`: by
        quantity the median of |error| over those starts, with their number; `left_out`: why a
        folder is not among them.

    Raises:
        ValueError: no folder is a run's that compared anything; what is wrong with each.
    """
    faults: list[str] = []
    starts: list[dict[str, Any]] = []
    runs = _runs(folders)
    for folder in runs:
        try:
            starts += _starts(folder)
        except ValueError as error:
            faults.append(str(error))
    if len(faults) == len(runs):
        raise ValueError("\n".join(faults))
    starts.sort(key=lambda start: start["time"])
    _mark_odd(starts)
    medians = _medians(starts)
    return {
        "schema": SCHEMA,
        "starts": starts,
        "median_error_percent": medians,
        "left_out": faults,
    }


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
    try:
        told = read_plan(folder)
    except FileNotFoundError as error:
        raise ValueError(
            f"{folder / PLAN} does not exist: the run has not come far enough to compare anything, "
            "or was trained by a version that did not; train on, or leave it out"
        ) from error
    except ValueError as error:
        raise ValueError(f"{error}; leave the run out") from error
    about = {"name": told["name"], "folder": str(folder)}
    return [about | start for start in told["starts"]]


def _mark_odd(starts: Sequence[dict[str, Any]]) -> None:
    """Mark update times that are off the plan in another way than the others are.

    A plan that is off by a constant is off for all; a start that differs had a slow node, or its
    machine to share.
    """
    found = [
        quantity
        for start in starts
        for quantity in start["quantities"]
        if quantity["what"] == "update time" and quantity["error_percent"] is not None
    ]
    if len(found) < LEAST_STARTS:
        return
    planned, measured = ([q["plan"]["value"] for q in found], [q["measured"] for q in found])
    for index in odd_points(planned, measured):
        found[index]["odd"] = True


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
    left_out = [f"left out: {fault}" for fault in result["left_out"]]
    if not result["starts"]:
        return "\n".join(["no start of these runs has compared anything yet; train on", *left_out])
    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, name in enumerate(HEAD):
        right = name in ("ranks", "micro", "plan", "measured", "error")
        table.add_column(name, justify="right" if right else "left", no_wrap=place > 3)
    table.add_column("", no_wrap=True)
    for start in result["starts"]:
        about = _about(start)
        compared = [q for q in start["quantities"] if q["verdict"] != "not compared"]
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
    return "\n".join([*lines, *([""] if left_out else []), *left_out])


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
        f"{quantity['error_percent']:+.1f} %" if quantity["error_percent"] is not None else "",
        ", ".join(_remarks(quantity)),
    ]


def _remarks(quantity: dict[str, Any]) -> list[str]:
    outside = ["outside the band"] if quantity["verdict"] == "OUTSIDE" else []
    return [*outside, *(["unlike the other starts"] if quantity.get("odd") else [])]
