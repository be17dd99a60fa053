"""The plan's headline: the decision in a few lines; shared by terminal and page."""

from __future__ import annotations

import textwrap
from typing import Any

from recipes.advice.words import (
    GB,
    GIB,
    days_span,
    duration_span,
    excess,
    gib,
    number,
    plural,
    settings,
    span,
)


def machines(question: dict[str, Any]) -> str:
    """`2 nodes of 4 a100-80gb, 200 Gbit/s between them`."""
    nodes, gpus, name = question["nodes"], question["gpus_per_node"], question["gpu"]["name"]
    text = f"{plural(nodes, 'node')} of {gpus} {name}"
    if nodes == 1:
        return text
    return f"{text}, {number(question['nic']['bits_per_s'] / GB)} Gbit/s between them"


def headline(answer: dict[str, Any]) -> list[tuple[str, str]]:
    """The answer in a few lines: a word and what belongs to it."""
    memory, strategy = answer["memory"], answer["strategy"]
    row = strategy["chosen"] or strategy["asked"]
    lines = _taken(strategy) if strategy["chosen"] else _nothing(strategy)
    device = span(memory["device"], 1 / GIB, "GiB")
    if memory["fits"]:
        text = f"{device} of {gib(memory['usable']['value'])} that may be planned with, in "
        text += f"{memory['peak']}; micro-batches up to {memory['largest_micro']:,}"
        lines.append(("fits", text))
    else:
        text = f"{excess(memory['device'], memory)}, in {memory['peak']}"
        text += "" if memory["largest_micro"] else "; so is a micro-batch of 1"
        lines.append(("too big", text))
    mfu = span(row["mfu"], 100, "%")
    rate = number(row["tokens_per_s"]["value"])
    lines.append(("speed", f"{duration_span(row['update'])} an update, {rate} tokens/s, MFU {mfu}"))
    lines.append(("run", _run_line(answer["cost"])))
    if strategy["chosen"]:
        lines.append(("as asked", against(answer)))
    return lines


def _taken(strategy: dict[str, Any]) -> list[tuple[str, str]]:
    """The choice, how it is started, and a faster one that it was preferred to."""
    chosen, start = strategy["chosen"], strategy["start"]
    lines = [("take", f"{chosen['name']}, {settings(chosen)}")]
    fastest = next(row for row in strategy["rows"] if row["config"])
    if not fastest["chosen"]:
        faster = 1 - fastest["update"]["value"] / chosen["update"]["value"]
        text = f"{fastest['name']} is {faster:.1%} faster, less than the plan can tell apart"
        lines.append(("", text))
    lines.append(("start", start["command"]))
    return lines + ([("with", start["also"])] if start["also"] else [])


def _nothing(strategy: dict[str, Any]) -> list[tuple[str, str]]:
    """That nothing fits, and what would."""
    asked, would = strategy["asked"], strategy["would_fit"]
    lines = [
        ("take", "nothing that this package runs fits; what follows is as asked,"),
        ("", f"{asked['name']}, {settings(asked)}, if it did"),
    ]
    more, other, here = would["more_gpus"], would["other_gpu"], would["without_config"]
    found = []
    if more is not None:
        found.append(f"{more['strategy']} on {more['world']:,} of these GPUs")
    if other is not None:
        found.append(f"{other['strategy']} on {other['gpu']}")
    if here is not None:
        found.append(f"here {here}, of which this package has no config yet")
    text = "; ".join(found) or "nothing that this package runs, on no GPU of the table"
    return [*lines, ("would fit", text)]


def _run_line(cost: dict[str, Any]) -> str:
    text = f"{plural(cost['updates'], 'update')}, {days_span(cost['days'])}, "
    text += f"{number(cost['gpu_hours']['value'])} GPU-hours"
    if cost["price"] is not None:
        text += f", price {span(cost['price'])}"
    return text


def against(answer: dict[str, Any]) -> str:
    """The run file's own settings beside the choice."""
    strategy, given = answer["strategy"], answer["batch"]["asked_micro"]
    asked, chosen, memory = strategy["asked"], strategy["chosen"], answer["memory"]
    lowered = given not in ("auto", asked["micro"])
    if strategy["asked_is_chosen"] and not lowered:
        return "the run file says the same"
    extras = ", ".join(strategy["asked_differs"])
    text = f"{asked['name']}, {settings(asked)}{' (' + extras + ')' if extras else ''}"
    text += f", in place of batch.micro={given}: " if lowered else ": "
    if strategy["asked_is_chosen"]:
        return text + "the same"
    if not asked["fits"]:
        return text + f"does not fit, {excess(asked['device'], memory)}"
    slower = asked["update"]["value"] / chosen["update"]["value"] - 1
    if abs(slower) < 0.005:
        return text + "as fast"
    return text + f"{abs(slower):.1%} {'slower' if slower > 0 else 'faster'}"


def pasteable(command: str, width: int) -> list[str]:
    """A command in lines that a shell joins again; a word is never broken."""
    lines = textwrap.wrap(command, width - 2, break_long_words=False, break_on_hyphens=False)
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]
