"""A labelled line and a plain table, of which the plan's text is made."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

LABEL = 16  # columns before the text of a labelled line
INDENT = 3  # before a table's rows
BELOW = 7  # before what stands below a row
LEAST = 20  # columns that the last one of a table needs beside the others
ROOMY = 100  # columns from which a table's own stand two apart


def line(console: Console, label: str, text: str, style: str = "") -> None:
    """A label and what belongs to it, wrapped beside the label; no word is broken."""
    lines(console, label, _wrapped(text, console.width - LABEL), style)


def lines(console: Console, label: str, texts: Sequence[str], style: str = "") -> None:
    """A label and lines that belong to it, as they are."""
    for place, text in enumerate(texts or [""]):
        head = f"  {label}" if place == 0 else ""
        _show(console, Text.assemble((head.ljust(LABEL), style), text))


def table(
    console: Console,
    headers: Sequence[str],
    rows: Iterable[Sequence[str]],
    left: Sequence[int],
    *,
    spare: int | None = None,
) -> None:
    """A plain table; columns are right-aligned but those in `left`.

    The last one is wrapped if it is one of `left`; columns that find no room stand below their row.
    A cell may have several lines.

    Args:
        spare: a column that is left out where the others would find no room beside it.
    """
    cells = [list(headers), *map(list, rows)]
    gap = 2 if console.width >= ROOMY else 1
    ends = len(headers) - 1 in left
    if spare is not None and not _room(console.width, cells, gap, ends):
        left = [column - (column > spare) for column in left if column != spare]
        cells = [row[:spare] + row[spare + 1 :] for row in cells]
        ends = len(cells[0]) - 1 in left
    beside = len(cells[0])
    while beside > 1 and not _room(console.width, [row[:beside] for row in cells], gap, ends):
        beside, ends = beside - 1, False
    for place, row in enumerate(cells):
        style = "dim" if place == 0 else ""
        for text in _row(row[:beside], cells, gap, left, console.width):
            _show(console, Text(text, style=style))
        for below in filter(None, row[beside:]):
            for text in _wrapped(below, console.width - BELOW):
                _show(console, Text(" " * BELOW + text, style=style))


def _widths(cells: Sequence[Sequence[str]]) -> list[int]:
    return [
        max(cell_len(part) for cell in column for part in cell.split("\n"))
        for column in zip(*cells, strict=True)
    ]


def _room(width: int, cells: Sequence[Sequence[str]], gap: int, ends: bool) -> bool:
    """Whether the columns stand beside each other; the last may be wrapped if it `ends` them."""
    *others, last = _widths(cells)
    return INDENT + sum(others) + gap * len(others) + (min(last, LEAST) if ends else last) <= width


def _row(
    row: Sequence[str], cells: Sequence[Sequence[str]], gap: int, left: Sequence[int], width: int
) -> list[str]:
    """The lines of one row."""
    widths = _widths([other[: len(row)] for other in cells])
    parts = [cell.split("\n") for cell in row]
    room = max(LEAST, width - INDENT - sum(widths[:-1]) - gap * (len(row) - 1))
    if len(row) - 1 in left and len(row) > 1:
        parts[-1] = _wrapped(row[-1], room)
    found = []
    for place in range(max(map(len, parts))):
        texts = []
        for column, part in enumerate(parts):
            text = part[place] if place < len(part) else ""
            blank = " " * (widths[column] - cell_len(text))
            texts.append(text + blank if column in left else blank + text)
        found.append((" " * INDENT + (" " * gap).join(texts)).rstrip())
    return found


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]


def _show(console: Console, text: Text) -> None:
    console.print(text, no_wrap=True, overflow="ignore", crop=False)
