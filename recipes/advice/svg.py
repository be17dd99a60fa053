"""Pictures of the plan as inline SVG: scaling, memory by phase, the update's parts.

Colours are the page's classes (`c0` to `c8`), so that they follow light and dark; every shape has a
title, which browsers show as a tooltip.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from recipes.advice.words import byte_unit, duration, gib

WIDTH = 640
LEFT, RIGHT, TOP, BOTTOM = 48, 28, 14, 30
BAR = 22  # height of a horizontal bar
MOST_ROWS = 12
COLOURS = 9


def scaling_svg(points: Sequence[dict[str, Any]]) -> str:
    """Efficiency of weak and strong scaling over the number of GPUs, in doublings."""
    height = 280
    worlds = [math.log2(point["world"]) for point in points]
    low, high = worlds[0], max(worlds[-1], worlds[0] + 1)

    def x(at: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (at - low) / (high - low)

    def y(share: float) -> float:
        return TOP + (height - TOP - BOTTOM) * (1 - min(share, 1.0))

    parts = [_rule(y(share), f"{share:.0%}") for share in (0, 0.25, 0.5, 0.75, 1)]
    for at, point in zip(worlds, points, strict=True):
        parts.append(_text(x(at), height - 10, f"{point['world']:,}", "middle"))
    for kind, colour in (("weak", 0), ("strong", 1)):
        known = [
            (x(at), y(point[f"efficiency_{kind}"]["value"]), point)
            for at, point in zip(worlds, points, strict=True)
            if point[f"efficiency_{kind}"] is not None
        ]
        line = " ".join(f"{px:.1f},{py:.1f}" for px, py, _ in known)
        parts.append(f'<polyline class="line s{colour}" points="{line}"/>')
        for px, py, point in known:
            share = point[f"efficiency_{kind}"]["value"]
            title = f"{point['world']:,} GPUs, {kind}: {share:.1%}"
            parts.append(_dot(px, py, colour, title))
    return _svg(height, "Scaling efficiency over the number of GPUs", parts)


def memory_svg(memory: dict[str, Any]) -> str:
    """A stacked bar for each phase, with lines for what may be planned with and what there is."""
    height, phases = 300, memory["phases"]
    capacity, usable = memory["capacity"]["value"], memory["usable"]["value"]
    most = max(capacity, *(phase["allocated"]["value"] for phase in phases)) * 1.06

    def y(size: float) -> float:
        return TOP + (height - TOP - BOTTOM) * (1 - size / most)

    unit, name = byte_unit(most)
    step = 10.0 ** math.floor(math.log10(most / unit))
    step *= 2 if most / unit / step > 5 else 1
    marks = [i * step for i in range(int(most / unit / step) + 1)]
    parts = [_rule(y(mark * unit), f"{mark:g}") for mark in marks]
    room = (WIDTH - LEFT - RIGHT) / len(phases)
    for column, phase in enumerate(phases):
        left = LEFT + room * (column + 0.2)
        parts += _stack(phase, item_kinds(memory), left, room * 0.6, y)
        parts.append(_text(left + room * 0.3, height - 10, phase["name"], "middle"))
    for limit, size in (("usable", usable), ("capacity", capacity)):
        level = y(size)
        parts.append(_level("limit", level))
        above = 4 if limit == "capacity" else -12
        parts.append(_text(WIDTH - RIGHT, level - above, f"{limit} {gib(size)}", "end"))
    return _svg(height, f"Memory of a GPU by phase, {name}", parts)


def _stack(
    phase: dict[str, Any], kinds: list[str], left: float, width: float, y: Callable[[float], float]
) -> list[str]:
    """A phase's items one upon another."""
    parts, base = [], 0.0
    for item in phase["items"]:
        size, basis = item["bytes"]["value"], item["bytes"]["basis"]
        unit, name = byte_unit(size)
        title = f"{phase['name']}: {item['name']} {size / unit:,.2f} {name}, {basis}"
        top, bottom = y(base + size), y(base)
        colour = kinds.index(item["kind"]) % COLOURS
        parts.append(_box(left, top, width, bottom - top, colour, title))
        base += size
    return parts


def item_kinds(memory: dict[str, Any]) -> list[str]:
    """Kinds of memory in the order of their first appearance, which is that of the colours."""
    return list(dict.fromkeys(i["kind"] for p in memory["phases"] for i in p["items"]))


def update_svg(rows: Sequence[dict[str, Any]]) -> str:
    """The parts of an update, seconds, a bar for each of the fastest strategies."""
    shown = [row for i, row in enumerate(rows) if i < MOST_ROWS or row.get("chosen")]
    names = list(shown[0]["parts"])
    longest = max(sum(part["value"] for part in row["parts"].values()) for row in shown)
    height, left = TOP + (BAR + 8) * len(shown) + 8, 210
    parts = []
    for line, row in enumerate(shown):
        top, start = TOP + (BAR + 8) * line, float(left)
        label = f"{row['name']}{' ◀' if row.get('chosen') else ''}"
        parts.append(_text(left - 8, top + BAR - 6, label, "end"))
        for colour, name in enumerate(names):
            seconds = row["parts"][name]["value"]
            width = (WIDTH - left - 60) * seconds / longest
            title = f"{row['name']}: {name} {duration(seconds)}"
            parts.append(_box(start, top, width, BAR, colour, title))
            start += width
        whole = duration(row["update"]["value"])
        parts.append(_text(start + 6, top + BAR - 6, whole, "start"))
    return _svg(height, "What an update's time goes into", parts)


def _svg(height: float, label: str, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}">\n'
        f"{body}\n</svg>"
    )


def _rule(level: float, label: str) -> str:
    line = (
        f'<line class="rule" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{level:.1f}" y2="{level:.1f}"/>'
    )
    return line + _text(LEFT - 6, level + 4, label, "end")


def _level(kind: str, y: float) -> str:
    return f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _box(x: float, y: float, width: float, height: float, colour: int, title: str) -> str:
    return (
        f'<rect class="c{colour}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
        f'height="{height:.1f}"><title>{escape(title)}</title></rect>'
    )


def _dot(x: float, y: float, colour: int, title: str) -> str:
    return (
        f'<circle class="c{colour}" cx="{x:.1f}" cy="{y:.1f}" r="4">'
        f"<title>{escape(title)}</title></circle>"
    )
