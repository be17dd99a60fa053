"""The answer of `octet plan` in a terminal: a headline, then six sections of a few lines each."""

from __future__ import annotations

import io
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from recipes.planner import text_cost, text_fit
from recipes.planner.lines import LABEL, line
from recipes.planner.words import SOURCES, amount, headline, machines, pasteable

WIDTH = 110  # the most a line takes, and what is taken where no terminal says its width
NARROW = 80
SECTIONS = {
    "Strategy": text_fit.strategy,
    "Memory": text_fit.memory,
    "Batch": text_fit.batch,
    "Communication": text_cost.communication,
    "Time and money": text_cost.cost,
    "Scaling": text_cost.scaling,
}


def show(answer: dict[str, Any], stream: TextIO) -> None:
    """Print the whole answer."""
    terminal = Console(file=stream)
    width = min(terminal.width, WIDTH) if terminal.is_terminal else WIDTH
    text = rendered(answer, max(width, NARROW), styled=terminal.is_terminal)
    encoding = getattr(stream, "encoding", None) or "utf-8"  # which may lack some characters
    stream.write(text.encode(encoding, "replace").decode(encoding))


def rendered(answer: dict[str, Any], width: int = WIDTH, *, styled: bool = False) -> str:
    """The whole answer in lines of at most `width` columns, without blanks at their ends."""
    file = io.StringIO()
    console = Console(file=file, width=width, highlight=False, force_terminal=styled)
    _opening(console, answer)
    for number, (title, section) in enumerate(SECTIONS.items(), 1):
        console.print(Text(f"\n{number} {title}", style="bold"))
        section(console, answer)
    _closing(console)
    return "\n".join(text.rstrip() for text in file.getvalue().splitlines()) + "\n"


def _opening(console: Console, answer: dict[str, Any]) -> None:
    question = answer["question"]
    model = question["model"]
    console.print(
        Text(
            f"{question['name']}: {amount(model['parameters'])} parameters ({model['family']}), "
            f"{question['global_sequences']:,} x {question['seq_len']:,} tokens an update, "
            f"{question['precision']}\n"
            f"{machines(question)}\n"
        )
    )
    for label, text in headline(answer):
        room = console.width - LABEL - 2
        text = pasteable(text, room) if label == "start" else text
        console.print(line(label, text, style="bold"))
    for note in answer["notes"]:
        console.print(line("note", note, style="yellow"))


def _closing(console: Console) -> None:
    console.print()
    legend = "; ".join(f"{name}: {meaning}" for name, meaning in SOURCES.items())
    console.print(
        Text(
            "Bands stand in brackets. --json and --html give every number with its source "
            f"({legend})."
        )
    )
