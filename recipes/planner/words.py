"""The plan's numbers as people read them, and the headline; shared by terminal and page."""

from __future__ import annotations

import textwrap
from typing import Any

GIB = 2.0**30
GB = 1e9
LETTERS = {"formula": "f", "traced": "tr", "measured": "m", "table": "t", "assumed": "a"}
SOURCES = {
    "formula": "exact arithmetic of what was given",
    "traced": "counted on the real model",
    "measured": "by octet preflight, or in a run",
    "table": "a data sheet or a published measurement",
    "assumed": "nobody measured it for this case",
}


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


def reasons(strategy: dict[str, Any]) -> list[tuple[str, str]]:
    """Why each strategy is not the choice; those with one and the same reason in one line."""
    together: dict[str, list[str]] = {}
    for row in strategy["rows"]:
        if not row["chosen"]:
            together.setdefault(_with_config(row), []).append(row["name"])
    for row in strategy["rejected"]:
        together.setdefault(f"no: {row['reason']}", []).append(row["name"])
    return [("; ".join(names), reason) for reason, names in together.items()]


def _with_config(row: dict[str, Any]) -> str:
    text = str(row["why_not"])
    return text if row["config"] or "config" in text else f"{text}; no config of it here yet"


def machines(question: dict[str, Any]) -> str:
    """`2 nodes of 4 a100-80gb, 200 Gbit/s between them`."""
    nodes, gpus, name = question["nodes"], question["gpus_per_node"], question["gpu"]["name"]
    if nodes == 1:
        return f"1 node of {gpus} {name}"
    rate = question["nic"]["bits_per_s"] / GB
    return f"{nodes} nodes of {gpus} {name}, {rate:,.0f} Gbit/s between them"


def headline(answer: dict[str, Any]) -> list[tuple[str, str]]:
    """The answer in a few lines: a word and what belongs to it."""
    question, memory, cost = answer["question"], answer["memory"], answer["cost"]
    chosen, asked = answer["strategy"]["chosen"], answer["strategy"]["asked"]
    row = chosen or asked
    lines = []
    if chosen is None:
        lines.append(("take", "nothing that this package runs fits; what follows is as asked,"))
        lines.append(("", f"{row['name']}, {settings(row)}, if it did"))
    else:
        start = answer["strategy"]["start"]
        lines.append(("take", f"{row['name']}, {settings(row)}"))
        lines.append(("start", start["command"]))
        if start["also"]:
            lines.append(("with", start["also"]))
    fits = "fits" if memory["fits"] else "too big"
    lines.append(
        (
            fits,
            f"{span(memory['device'], 1 / GIB, 'GiB')} of {gib(memory['usable'])} that may be "
            f"planned with, in {memory['peak']}; micro-batches up to {memory['largest_micro']}",
        )
    )
    mfu = span(row["mfu"], 100, "%")
    rate = number(row["tokens_per_s"]["value"])
    lines.append(("speed", f"{duration_span(row['update'])} an update, {rate} tokens/s, MFU {mfu}"))
    lines.append(("run", _run_line(question, cost)))
    if chosen is not None:
        lines.append(("as asked", against(asked, chosen, memory["usable"])))
    return lines


def _run_line(question: dict[str, Any], cost: dict[str, Any]) -> str:
    text = f"{cost['updates']:,} updates, {days_span(cost['days'])}, "
    text += f"{number(cost['gpu_hours']['value'])} GPU-hours"
    if cost["price"] is not None:
        text += f", price {span(cost['price'])}"
    return text


def against(asked: dict[str, Any], chosen: dict[str, Any], usable: float) -> str:
    """The run file's own settings beside the choice."""
    same = ("name", "micro", "checkpointing", "attention")
    if all(asked[key] == chosen[key] for key in same):
        return "the run file says the same"
    text = f"{asked['name']}, {settings(asked)}: "
    if not asked["fits"]:
        return text + f"does not fit, {gib(asked['device']['value'])} of {gib(usable)} GiB"
    slower = asked["update"]["value"] / chosen["update"]["value"] - 1
    if abs(slower) < 0.005:
        return text + "as fast"
    return text + f"{abs(slower):.1%} {'slower' if slower > 0 else 'faster'}"


def margin(memory: dict[str, Any]) -> str:
    """What is left of the memory that may be planned with, or missing."""
    left = memory["usable"] - memory["device"]["value"]
    rest = f"the {gib(memory['usable'])} that may be planned with"
    text = f"{gib(abs(left))} GiB {'below' if left >= 0 else 'above'} {rest}"
    return f"{text}; largest micro-batch {memory['largest_micro'] or 'none'}"


def where(part: dict[str, Any]) -> str:
    """Where an update's transfers travel, for how long."""
    levels = {name: duration(seconds) for name, seconds in part["levels"].items()}
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
    return f"below 3 % of the update from an accumulation of {need}"


def bucket(part: dict[str, Any]) -> str:
    """The strategy's bucket beside the one that is large enough, and beside `auto`."""
    text = "none"
    if part["bucket_elements"]:
        text = f"{part['bucket_elements']:,} elements, {part['bucket_bytes'] / GB:.2f} GB"
    if part["enough_bucket_bytes"] is not None:
        text += f"; latency is below a tenth from {part['enough_bucket_bytes'] / 1e6:,.0f} MB"
    return text + f'; "auto" would be {part["auto_bucket_elements"]:,} elements'


def pasteable(command: str, width: int) -> str:
    """A command in lines that a shell joins again."""
    lines = textwrap.wrap(command, width - 2, break_long_words=False, break_on_hyphens=False)
    return " \\\n".join(lines)
