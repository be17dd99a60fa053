"""Efficiency over the number of GPUs as a chart in a terminal."""

from __future__ import annotations

import math
from typing import Any

import plotille

COLUMNS = 9  # of the chart for each doubling, so that the numbers below stand where they belong
MOST = 90  # columns that the curves take
BESIDE = 20  # columns that stand beside them: per cents on the left, a number of GPUs on the right
LABEL = 8  # columns that the name of a tick needs
EMPTY = chr(0x2800)  # braille without a dot
ROWS = 10  # for 0 to 100 %
MARKS = {"weak": "w", "strong": "s"}


def scaling_chart(points: list[dict[str, Any]], within: int = MOST + BESIDE) -> str:
    """Efficiency of weak and strong scaling against the number of GPUs, in doublings.

    `within`: columns for all of it.

    plotille's canvas draws it; its own axes would load numpy, which takes longer than the plan.
    """
    worlds = [math.log2(point["world"]) for point in points]
    doublings = max(1, math.ceil(worlds[-1] - worlds[0]))
    columns = max(1, min(COLUMNS, min(MOST, within - BESIDE) // doublings))
    width, step = columns * doublings + 1, 100 / ROWS
    canvas = plotille.Canvas(
        width=width,
        height=ROWS + 1,
        xmin=worlds[0],
        xmax=worlds[0] + width / columns,
        ymin=-step / 2,
        ymax=100 + step / 2,
    )
    for kind, mark in MARKS.items():
        known = [
            (at, min(100 * point[f"efficiency_{kind}"]["value"], 100.0))
            for at, point in zip(worlds, points, strict=True)
            if point[f"efficiency_{kind}"] is not None
        ]
        for before, after in zip(known, known[1:], strict=False):
            canvas.line(*before, *after)
        for at, level in known:
            canvas.text(at, level, mark)
    rows = canvas.plot().replace(EMPTY, " ").splitlines()
    lines = [f"  {100 - i * 100 // ROWS:3} % │{row}" for i, row in enumerate(rows)]
    lines.append("        └" + "─" * width)
    every = -(-LABEL // columns)  # ticks of which one is named
    ticks = [
        f"{2 ** (worlds[0] + i):,.0f}".ljust(columns * every)
        for i in range(0, doublings + 1, every)
    ]
    lines.append(" " * 9 + "".join(ticks).rstrip() + " GPUs")
    lines.append(" " * 9 + "efficiency: " + ", ".join(f"{m} {k}" for k, m in MARKS.items()))
    return "\n".join(lines)
