"""Sections 1 to 3 in a terminal: strategy, memory, batch."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from recipes.planner.lines import line, table
from recipes.planner.words import GB, GIB, gib, margin, number, reasons, span

# ---- 1 strategy


def strategy(console: Console, answer: dict[str, Any]) -> None:
    """Section 1: the ranking, and why each other one is not the choice."""
    section = answer["strategy"]
    rows = [_strategy_row(row) for row in section["rows"]]
    headers = ("strategy", "micro x acc.", "s/update", "tokens/s", "MFU %", "GiB", "bottleneck")
    if rows:
        console.print(table(headers, rows, left=(0, 6)))
        console.print(
            Text("  ◀ the choice   * no config of it in this package yet   c checkpointing")
        )
    console.print()
    console.print(table(("why not", ""), reasons(section), left=(0, 1)))


def _strategy_row(row: dict[str, Any]) -> tuple[str, ...]:
    mark = " ◀" if row["chosen"] else "" if row["config"] else " *"
    flags = " c" if row["checkpointing"] else ""
    flags += " eager" if row["attention"] == "eager" else ""
    return (
        row["name"] + mark,
        f"{row['micro']} x {row['accumulation']}{flags}",
        span(row["update"]),
        number(row["tokens_per_s"]["value"]),
        number(100 * row["mfu"]["value"]),
        gib(row["device"]["value"]),
        row["bottleneck"],
    )


# ---- 2 memory


def memory(console: Console, answer: dict[str, Any]) -> None:
    """Section 2: what lies on a GPU in each phase, how full it gets, what would save."""
    memory = answer["memory"]
    kinds = list(dict.fromkeys(i["kind"] for p in memory["phases"] for i in p["items"]))
    headers = ("GiB on each GPU", *(phase["name"] for phase in memory["phases"]))
    rows = []
    for kind in kinds:
        sums = [
            sum(i["bytes"] for i in phase["items"] if i["kind"] == kind)
            for phase in memory["phases"]
        ]
        if any(size >= 0.05 * GIB for size in sums):
            rows.append((kind, *(gib(size) if size else "" for size in sums)))
    rows.append(("allocated", *(gib(phase["allocated"]) for phase in memory["phases"])))
    console.print(table(headers, rows, left=(0,)))
    levels = ", ".join(
        f"{name} {span(memory[name], 1 / GIB)}" for name in ("allocated", "reserved", "device")
    )
    console.print(line("peak", f"{levels} of {gib(memory['capacity'])} GiB"))
    console.print(line("margin", margin(memory)))
    savings = [(s["what"], gib(s["bytes"]), s["how"], s["cost"]) for s in memory["savings"]]
    if savings:
        console.print(table(("to save", "GiB", "how", "costs"), savings, left=(0, 2, 3)))
    host = sum(item["bytes"] for item in memory["host"])
    parts = ", ".join(f"{item['name']} {gib(item['bytes'])}" for item in memory["host"])
    console.print(line("host", f"{gib(host)} GiB on each node: {parts}"))
    console.print(line("checkpoint", f"{memory['checkpoint_bytes'] / GB:,.1f} GB"))


# ---- 3 batch


def batch(console: Console, answer: dict[str, Any]) -> None:
    """Section 3: how the global batch is divided, and how else it could be."""
    batch = answer["batch"]
    console.print(
        line(
            "an update",
            f"{batch['data_ranks']} ranks x {batch['accumulation']} accumulated x {batch['micro']} "
            f"sequences = {batch['global_sequences']:,} ({batch['global_tokens']:,} tokens)",
        )
    )
    legal = " ".join(map(str, batch["legal_worlds"])) or "none"
    if not batch["world_is_legal"]:
        legal += f"; nearest: {' or '.join(map(str, batch['nearest_legal'])) or 'none'}"
    console.print(line("legal GPUs", f"{legal} (at micro-batch {batch['micro']})"))
    if batch["evaluate_sequences"]:
        text = f"evaluate.sequences={batch['evaluate_sequences']} (ranks x micro-batch divide it)"
        console.print(line("set too", text))
    steps = ", ".join(
        f"{step['micro']}×{step['accumulation']} {gib(step['device']['value'])}"
        f"{'' if step['fits'] else ' (too big)'}"
        for step in reversed(batch["ladder"])
    )
    text = f"lower batch.micro; the update stays. Micro-batch×accumulation and GiB: {steps}"
    console.print(line("out of memory", text))
