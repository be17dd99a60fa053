"""Sections 1 to 3 in a terminal: strategy, memory, batch."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from recipes.advice import words
from recipes.advice.lines import line, table
from recipes.advice.words import GIB, gib, number, plural, span

NAMES = 0.42  # share of a line's columns that names of strategies may take

# ---- 1 strategy


def strategy(console: Console, answer: dict[str, Any]) -> None:
    """Section 1: the ranking, and why each other one is not the choice."""
    section = answer["strategy"]
    size, unit = words.column_unit(section["rows"])
    rows = [_strategy_row(row, size) for row in section["rows"]]
    headers = ("strategy", "micro x acc.", f"{unit}/update", "tokens/s", "MFU %", "GiB")
    if rows:
        table(console, (*headers, "bottleneck"), rows, left=(0, 6), spare=6)
        console.print(
            Text("  ◀ the choice   * no config of it in this package yet   c checkpointing")
        )
    told = [
        (_listed(names, int(NAMES * console.width)), reason)
        for names, reason in words.reasons(section)
    ]
    if told:
        console.print()
        table(console, ("why not", ""), told, left=(0, 1))


def _listed(names: str, width: int) -> str:
    """`A; B; C` in lines, none of which ends within a name."""
    found = [""]
    for name in names.split("; "):
        if found[-1] and len(found[-1]) + len(name) + 3 > width:
            found[-1] += ";"
            found.append("")
        found[-1] += f"; {name}" if found[-1] else name
    return "\n".join(found)


def _strategy_row(row: dict[str, Any], size: float) -> tuple[str, ...]:
    mark = " ◀" if row["chosen"] else "" if row["config"] else " *"
    flags = " c" if row["checkpointing"] else ""
    flags += " eager" if row["attention"] == "eager" else ""
    return (
        row["name"] + mark,
        f"{row['micro']} x {row['accumulation']}{flags}",
        span(row["update"], 1 / size),
        number(row["tokens_per_s"]["value"]),
        number(100 * row["mfu"]["value"]),
        gib(row["device"]["value"]),
        row["bottleneck"],
    )


# ---- 2 memory


def memory(console: Console, answer: dict[str, Any]) -> None:
    """Section 2: what lies on a GPU in each phase, how full it gets, what would save."""
    memory = answer["memory"]
    size, unit = words.byte_unit(memory["allocated"]["value"])
    _phases(console, memory, size, unit)
    levels = ", ".join(
        f"{name} {span(memory[name], 1 / GIB)}" for name in ("allocated", "reserved", "device")
    )
    line(console, "peak", f"{levels} of {gib(memory['capacity']['value'])} GiB")
    line(console, "margin", words.margin(memory))
    savings = [
        (s["what"], f"{s['bytes']['value'] / size:,.1f}", s["how"], s["cost"])
        for s in memory["savings"]
        if s["bytes"]["value"] >= 0.05 * size
    ]
    if savings:
        table(console, ("to save", unit, "how", "costs"), savings, left=(0, 2, 3))
    sizes = {item["name"]: item["bytes"]["value"] for item in memory["host"]}
    parts = ", ".join(f"{name} {number(part / GIB)}" for name, part in sizes.items())
    line(console, "host", f"{number(sum(sizes.values()) / GIB)} GiB on each node: {parts}")
    line(console, "checkpoint", words.sent(memory["checkpoint_bytes"]["value"]))


def _phases(console: Console, memory: dict[str, Any], size: float, unit: str) -> None:
    """A line for each kind that shows in this unit."""
    phases = memory["phases"]
    rows = []
    for kind in dict.fromkeys(i["kind"] for p in phases for i in p["items"]):
        sums = [
            sum(i["bytes"]["value"] for i in phase["items"] if i["kind"] == kind)
            for phase in phases
        ]
        if any(part >= 0.05 * size for part in sums):
            rows.append((kind, *(f"{part / size:,.1f}" if part else "" for part in sums)))
    allocated = (f"{phase['allocated']['value'] / size:,.1f}" for phase in phases)
    rows.append(("allocated", *allocated))
    table(console, (f"{unit} on each GPU", *(phase["name"] for phase in phases)), rows, left=(0,))


# ---- 3 batch


def batch(console: Console, answer: dict[str, Any]) -> None:
    """Section 3: how the global batch is divided, and how else it could be."""
    batch = answer["batch"]
    text = f"{plural(batch['data_ranks'], 'rank')} x {batch['accumulation']} accumulated x "
    text += f"{plural(batch['micro'], 'sequence')} = {batch['global_sequences']:,} "
    line(console, "an update", f"{text}({batch['global_tokens']:,} tokens)")
    legal = " ".join(f"{world:,}" for world in batch["legal_worlds"]) or "none"
    if not batch["world_is_legal"]:
        legal += f"; nearest: {' or '.join(map(str, batch['nearest_legal'])) or 'none'}"
    line(console, "legal GPUs", f"{legal} (at micro-batch {batch['micro']})")
    if batch["evaluate_sequences"]:
        text = f"evaluate.sequences={batch['evaluate_sequences']} (ranks x micro-batch divide it)"
        line(console, "set too", text)
    line(console, "out of memory", words.ladder(batch))
