"""The plan's numbers and sentences as people read them; shared by terminal and page."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

GIB, MIB = 2.0**30, 2.0**20
GB = 1e9
LETTERS = {"formula": "f", "traced": "tr", "measured": "m", "table": "t", "assumed": "a"}
SOURCES = {
    "formula": "exact arithmetic of what was given",
    "traced": "counted on the real model",
    "measured": "by octet preflight, or in a run",
    "table": "a data sheet or a published measurement",
    "assumed": "nobody measured it for this case",
}
ALONE = "one GPU: nothing is sent"
STUCK = "the run can't progress: failures come faster than it saves and starts again"


def number(value: float) -> str:
    """Three significant digits, with separators: 0.0123, 8.94, 13.4, 2,573."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    digits = 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:.{digits}f}" if abs(value) >= 0.01 else f"{value:.1g}"


def span(figure: dict[str, Any], scale: float = 1.0, unit: str = "") -> str:
    """`8.94 s (7.60-10.6)`: a figure in another unit, with its band where it has one."""
    value, low, high = (number(figure[key] * scale) for key in ("value", "low", "high"))
    unit = f" {unit}" if unit else ""
    return f"{value}{unit}" if low == high else f"{value}{unit} ({low}–{high})"


def gib(count: float) -> str:
    """Bytes in GiB, one decimal."""
    return f"{count / GIB:,.1f}"


def plural(count: int, name: str) -> str:
    """`1 rank`, `1,024 ranks`."""
    return f"{count:,} {name}{'' if count == 1 else 's'}"


def byte_unit(most: float) -> tuple[float, str]:
    """Bytes of the unit for memories of which the largest is `most`, and its name."""
    return (GIB, "GiB") if most >= GIB else (MIB, "MiB")


def sent_unit(most: float) -> tuple[float, str]:
    """Bytes of the unit for transfers of which the largest is `most`, and its name."""
    for size, unit in ((GB, "GB"), (1e6, "MB"), (1e3, "kB")):
        if most >= 0.1 * size:
            return size, unit
    return 1.0, "B"


def sent(count: float) -> str:
    """Bytes on a wire or a disk: 8.18 GB, 34.0 MB."""
    size, unit = sent_unit(count / 10)  # a single one is 200 MB, not 0.2 GB
    return f"{number(count / size)} {unit}"


def duration(seconds: float) -> str:
    """A time in the unit that fits it: 0.7 µs, 230 ms, 8.9 s, 54 min, 6.2 h, 13.4 days."""
    size, unit = time_unit(seconds)
    return f"{number(seconds / size)} {unit}"


def duration_span(figure: dict[str, Any]) -> str:
    """`257 ms (154–359)`: a figure in seconds, in the unit that fits it."""
    size, unit = time_unit(figure["value"])
    return span(figure, 1 / size, unit)


def days_span(figure: dict[str, Any]) -> str:
    """`9.8 days (7.3–12.4)`: a figure in days, in the unit that fits it."""
    return duration_span({k: figure[k] * 86400 for k in ("value", "low", "high")})


def time_unit(seconds: float) -> tuple[float, str]:
    """Seconds of the unit that shows a time best, and its name."""
    for size, unit in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return size, unit
    if seconds >= 1 or seconds == 0:
        return 1.0, "s"
    return (1e-3, "ms") if seconds >= 1e-3 else (1e-6, "µs")


def column_unit(rows: Iterable[dict[str, Any] | None]) -> tuple[float, str]:
    """Seconds of the unit for a column with the updates of `rows`, and its name."""
    least = min((row["update"]["value"] for row in rows if row is not None), default=1.0)
    return next(
        ((size, unit) for size, unit in ((1.0, "s"), (1e-3, "ms")) if least >= 0.1 * size),
        (1e-6, "µs"),
    )


def amount(count: float) -> str:
    """A large number in words: 1.56 billion, 100 million, 4,096."""
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if count >= size:
            return f"{count / size:.3g} {word}"
    return f"{count:,.0f}"


def settings(row: dict[str, Any]) -> str:
    """Micro-batch, accumulation and what is unusual, as `micro 16 x 6, checkpointing`."""
    words = [f"micro {row['micro']} x {row['accumulation']}"]
    words += ["checkpointing"] if row["checkpointing"] else []
    words += ["eager attention"] if row["attention"] == "eager" else []
    return ", ".join(words)


# ---- 1 strategy


def reasons(strategy: dict[str, Any]) -> list[tuple[str, str]]:
    """Why each strategy is not the choice; those with one and the same reason in one line."""
    together: dict[str, list[str]] = {}
    for row in strategy["rows"] if strategy["chosen"] else []:
        if not row["chosen"]:
            together.setdefault(_with_config(row), []).append(row["name"])
    for row in strategy["rejected"]:
        together.setdefault(f"no: {row['reason']}", []).append(row["name"])
    told = [("; ".join(names), reason) for reason, names in together.items()]
    if strategy["rows"] and not strategy["chosen"]:
        told.insert(0, ("those with *", "they fit, but this package has no config of them yet"))
    return told


def _with_config(row: dict[str, Any]) -> str:
    text = str(row["why_not"])
    if row["config"] or "config" in text:
        return text
    return f"{text}; no config of it here yet"


# ---- 2 memory


def excess(device: dict[str, Any], memory: dict[str, Any]) -> str:
    """Why a memory that does not fit does not: its value, or the high end of its band."""
    usable, capacity = memory["usable"]["value"], memory["capacity"]["value"]
    if device["value"] > usable:
        return f"{gib(device['value'])} GiB of {gib(usable)} that may be planned with"
    if device["high"] > capacity:
        return f"up to {gib(device['high'])} GiB at the high end, of {gib(capacity)} in all"
    return f"up to {gib(device['high'])} GiB at the high end, of {gib(usable)}"


def margin(memory: dict[str, Any]) -> str:
    """What is left of the memory that may be planned with, or missing, and at the high end."""
    device, usable, capacity = memory["device"], memory["usable"], memory["capacity"]
    left, spare = usable["value"] - device["value"], capacity["value"] - device["high"]
    text = f"{gib(abs(left))} GiB {'below' if left >= 0 else 'above'} the {gib(usable['value'])} "
    text += f"that may be planned with; the high end {gib(abs(spare))} "
    text += f"{'below' if spare >= 0 else 'above'} all {gib(capacity['value'])}"
    most = f"{memory['largest_micro']:,}" if memory["largest_micro"] else "none"
    return f"{text}; largest micro-batch {most}"


def ladder(batch: dict[str, Any]) -> str:
    """The other micro-batches of the same update, largest first, with their GiB."""
    steps = ", ".join(
        f"{step['micro']}×{step['accumulation']} {gib(step['device']['value'])}"
        f"{'' if step['fits'] else ' (too big: up to ' + gib(step['device']['high']) + ')'}"
        for step in reversed(batch["ladder"])
    )
    if not any(step["fits"] for step in batch["ladder"]):
        return f"no micro-batch is small enough. Micro-batch×accumulation and GiB: {steps}"
    return f"lower batch.micro; the update stays. Micro-batch×accumulation and GiB: {steps}"


# ---- 4 communication


def where(part: dict[str, Any]) -> str:
    """Where an update's transfers travel, for how long."""
    levels = {name: duration(level["value"]) for name, level in part["levels"].items()}
    text = f"{levels['latency']} of it latency"
    if part["between_nodes"] is None:
        return f"all within the node, {levels['within']}; {text}"
    return (
        f"hierarchically {levels['within']} within the nodes and {levels['between']} between them; "
        f"as one ring over all {levels['flat']}; {text}"
    )


def negligible(part: dict[str, Any]) -> str:
    """How much accumulation makes the waiting negligible."""
    need = part["negligible_accumulation"]
    if need is None:
        return "more accumulation does not help: it comes with every micro-batch"
    value, low, high = (f"{need[key]:,.0f}" for key in ("value", "low", "high"))
    band = value if low == high else f"{value} ({low}–{high})"
    return f"below 3 % of the update from an accumulation of {band}"


def bucket(part: dict[str, Any]) -> str:
    """The strategy's bucket beside the one that is large enough, and beside `auto`."""
    text = "none"
    if part["bucket_elements"]:
        text = f"{part['bucket_elements']:,} elements, {sent(part['bucket_bytes'])}"
    if part["enough_bucket_bytes"] is not None:
        text += f"; latency is below a tenth from {sent(part['enough_bucket_bytes']['value'])}"
    return text + f'; "auto" would be {part["auto_bucket_elements"]:,} elements'


def elsewhere(part: dict[str, Any]) -> tuple[str, str]:
    """The unit, and what other strategies would send."""
    size, unit = sent_unit(max(row["sent"]["value"] for row in part["compared"]))
    rows = (f"{row['name']} {number(row['sent']['value'] / size)}" for row in part["compared"])
    return unit, "; ".join(rows)


# ---- 5 time and money


def every(interval: dict[str, Any], cost: dict[str, Any]) -> str:
    """`503 updates, 54.4 min`, or that a run of so many updates is over before."""
    text = f"{plural(interval['updates'], 'update')}, {duration(interval['seconds']['value'])}"
    over = interval["updates"] >= cost["updates"]
    return f"the end alone will do, before {text}" if over else text


def failures(part: dict[str, Any]) -> str:
    """How many failures a run must expect, and from what."""
    mtbf, expected = part["mtbf_hours_per_gpu"], part["failures_expected"]["value"]
    hours = duration(3600 * mtbf["value"]) if mtbf["value"] < 100 else f"{mtbf['value']:,.0f} h"
    return f"{number(expected)} expected, one in {hours} of a GPU ({mtbf['basis']})"


def loss(interval: dict[str, Any]) -> str:
    """What saves and failures take at an interval."""
    return span(interval["loss"], 1, "%") if interval["progresses"] else STUCK
