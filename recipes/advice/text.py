"""The answer of `octet plan` in a terminal: a headline, then six sections of a few lines each."""

from __future__ import annotations

import io
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from recipes.advice import text_cost, text_fit
from recipes.advice.headline import headline, machines, pasteable
from recipes.advice.lines import LABEL, line, lines
from recipes.advice.words import SOURCES, amount, plural

WIDTH = 110  # the most a line takes, and what is taken where no terminal says its width
NARROW = 80
# What stands for a character that the stream's encoding lacks (LANG=C); a braille cell is a dot.
ASCII = {"–": "-", "×": "x", "◀": "<", "µ": "u", "│": "|", "└": "+", "─": "-", "…": "..."}
ASCII |= {chr(cell): "." for cell in range(0x2801, 0x2900)}
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
    stream.write(encodable(text, encoding))


def encodable(text: str, encoding: str) -> str:
    """The text with a stand-in for every character that the encoding lacks."""
    lacking = {char for char in set(text) if not _has(encoding, char)}
    return text.translate({ord(char): ASCII.get(char, "?") for char in lacking})


def _has(encoding: str, char: str) -> bool:
    try:
        char.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


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
    text = f"{question['name']}: {amount(model['parameters'])} parameters ({model['family']}), "
    text += f"{question['global_sequences']:,} x {plural(question['seq_len'], 'token')} an update, "
    console.print(Text(f"{text}{question['precision']}\n{machines(question)}\n"))
    for label, text in headline(answer):
        if label == "start":
            lines(console, label, pasteable(text, console.width - LABEL), style="bold")
        else:
            line(console, label, text, style="bold")
    for note in answer["notes"]:
        line(console, "note", note, style="yellow")


def _closing(console: Console) -> None:
    console.print()
    legend = "; ".join(f"{name}: {meaning}" for name, meaning in SOURCES.items())
    console.print(
        Text(
            "Bands stand in brackets. --json and --html give every number with its source "
            f"({legend})."
        )
    )
