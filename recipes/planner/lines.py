"""A labelled line and a plain table, of which the plan's text is made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text

LABEL = 15


def line(label: str, text: str, style: str = "") -> Table:
    """A label and what belongs to it, wrapped beside the label."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=LABEL)
    grid.add_column(overflow="fold")
    grid.add_row(Text(f"  {label}", style=style), Text(text))
    return grid


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int]) -> Table:
    """A plain table; columns are right-aligned but those in `left`."""
    grid = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    grid.add_column("")
    for index, header in enumerate(headers):
        if index in left:
            grid.add_column(header, overflow="fold")
        else:
            grid.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        grid.add_row(" ", *map(Text, row))
    return grid
