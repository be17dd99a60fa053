"""Plan against measured: quantities, errors, verdicts, likely causes; plain values and text."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from rich.console import Console
from rich.table import Table
from rich.text import Text

from recipes.metrics import human_bytes, human_rate, human_seconds
from recipes.planner.figure import Figure
from recipes.runfile import describe

Verdict = Literal["inside", "OUTSIDE", "not compared"]
SCHEMA = 1  # of plan.json
LATEST = 1e11  # seconds since 1970 of a start: the year 5138
PLAN = "plan.json"  # in the run folder; `recipes.confront` has its schema
# What is compared, in this order, with its unit; `max` or `mean` over the ranks is the caller's.
UNITS = {
    "peak allocated": "bytes",
    "peak reserved": "bytes",
    "peak resident": "bytes",
    "update time": "s",
    "tokens/s": "tokens/s",
    "MFU": "share",
    "data wait": "share",
    "bytes sent": "bytes",
    "parameters": "bytes",
    "master weights": "bytes",
    "moments": "bytes",
    "checkpoint": "bytes",
    "tokens per update": "tokens",
}
# A figure without a band is a formula of known inputs. What it leaves out (alignment, a norm that
# is reduced, buffers) stays below this.
EXACT = 0.01
STYLES = {"inside": "green", "OUTSIDE": "bold yellow", "not compared": "dim"}
WIDTH = 100  # where no terminal says it
CAUSES = {
    "peak allocated": "another attention kind, loss or activation than planned takes effect, or "
    "the model's modules keep more than the closed form knows: octet plan --trace counts them",
    "peak reserved": "fragmentation; try PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    "update time": "a GPU that is slow or shared, or a network below the table's: octet preflight "
    "measures both, and octet plan --measured plans with it",
    "data wait": "the readers don't keep up: raise data.workers or data.prefetch, or put the data "
    "on a faster disk",
    "bytes sent": "this version of a library reduces in another way than the plan knows",
    "checkpoint": "buffers, frozen parameters or arrays that the plan does not count",
    "tokens per update": "padding or masked labels (data.packing, data.document_mask)",
}
CAUSES |= {"tokens/s": CAUSES["update time"], "MFU": CAUSES["update time"]}
CAUSES |= dict.fromkeys(
    ("parameters", "master weights", "moments"),
    "the model has other parameters than its configuration says, or another type of them",
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One quantity. `note` says why there is no plan or no measurement."""

    what: str
    plan: Figure | None
    measured: float | None
    note: str = ""

    @property
    def error(self) -> float | None:
        """How far the measurement is from the plan, as a share of the plan."""
        if self.plan is None or self.measured is None or self.plan.value == 0:
            return None
        return self.measured / self.plan.value - 1.0

    @property
    def verdict(self) -> Verdict:
        """Whether the measurement lies in the plan's band."""
        if self.plan is None or self.measured is None:
            return "not compared"
        low, high = self.plan.low, self.plan.high
        if low == high:
            low, high = low - EXACT * abs(low), high + EXACT * abs(high)
        return "inside" if low <= self.measured <= high else "OUTSIDE"

    def to_json(self) -> dict[str, Any]:
        """As `plan.json` holds it; `error` in per cent."""
        error = self.error
        return {
            "what": self.what,
            "unit": UNITS[self.what],
            "plan": self.plan.to_json() if self.plan is not None else None,
            "measured": self.measured,
            "error_percent": round(100.0 * error, 3) if error is not None else None,
            "verdict": self.verdict,
            "note": self.note,
        }


def rows(
    plan: Mapping[str, Figure],
    measured: Mapping[str, float],
    unplanned: Mapping[str, str],
    unmeasured: Mapping[str, str],
) -> list[Row]:
    """Every quantity that is planned or measured, in the order of UNITS; no zeros that agree.

    Args:
        unplanned, unmeasured: by quantity why it has no plan, or no measurement.
    """
    found = []
    for what in UNITS:
        figure, value = plan.get(what), measured.get(what)
        if figure is None and value is None:
            continue
        if figure is not None and figure.high == 0 and value == 0:
            continue
        note = unplanned.get(what, "") if figure is None else ""
        note = unmeasured.get(what, "") if value is None else note
        found.append(Row(what=what, plan=figure, measured=value, note=note))
    return found


def shown(what: str, value: float) -> str:
    """A quantity for people."""
    unit = UNITS[what]
    if unit == "bytes":
        return human_bytes(value)
    if unit == "s":
        return human_seconds(value)
    if unit == "share":
        return f"{value:.1%}"
    return human_rate(value) if unit == "tokens/s" else f"{value:,.0f}"


def table(title: str, compared: list[Row]) -> str:
    """Title, table, and below it what is not compared and why."""
    buffer = io.StringIO()
    console = Console(file=buffer, width=WIDTH, color_system=None)
    lines = Table(box=None, pad_edge=False, header_style="bold")
    for name, side in (("", "left"), ("plan", "right"), ("band", "right"), ("measured", "right")):
        lines.add_column(name, justify=side, no_wrap=True)  # type: ignore[arg-type]
    lines.add_column("error", justify="right")
    lines.add_column("verdict")
    left: dict[str, list[str]] = {}
    for row in compared:
        if row.plan is None or row.measured is None:
            value = f" {shown(row.what, row.measured)}" if row.measured is not None else ""
            left.setdefault(row.note, []).append(f"{row.what}{value}")
            continue
        lines.add_row(*_cells(row), Text(row.verdict, style=STYLES[row.verdict]))
    if lines.row_count:
        console.print(lines)
    text = "\n".join(f"  {line}".rstrip() for line in buffer.getvalue().splitlines())
    rest = [f"  {', '.join(those)}: {why}" for why, those in left.items()]
    return "\n".join([title, *([text] if text else []), *rest])


def _cells(row: Row) -> list[str]:
    assert row.plan is not None and row.measured is not None
    plan, what = row.plan, row.what
    exact = plan.low == plan.high
    band = "exact" if exact else f"{shown(what, plan.low)} to {shown(what, plan.high)}"
    error = None if row.error is None else round(row.error, 3) + 0.0  # no minus before a zero
    cells = [what, shown(what, plan.value), band, shown(what, row.measured)]
    return [*cells, f"{error:+.1%}" if error is not None else ""]


def warnings(compared: list[Row]) -> list[str]:
    """A line for each quantity outside its band, with the likely cause."""
    return [
        f"{row.what}: {shown(row.what, row.measured)} measured, {shown(row.what, row.plan.value)} "
        f"planned; likely cause: {CAUSES[row.what]}"
        for row in compared
        if row.verdict == "OUTSIDE" and row.plan is not None and row.measured is not None
    ]


# ---- plan.json, read again


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


def read_plan(folder: Path) -> dict[str, Any]:
    """A run's `plan.json`, in which all that is read of it is right.

    Raises:
        FileNotFoundError: there is none. ValueError: it can't be read, or is damaged.
    """
    path = folder / PLAN
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} can't be read: {error}") from error
    schema = told.get("schema") if isinstance(told, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"{path} can't be read: schema {schema!r:.80}, expected {SCHEMA}")
    try:
        _Plan.model_validate(told)
    except ValidationError as error:
        faults = [describe(fault, _Plan) for fault in error.errors()]
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise ValueError(f"{path} is damaged: {faults[0]}{more}") from error
    whole: dict[str, Any] = told
    return whole
