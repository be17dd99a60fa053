"""The answer of `octet plan` as one page that needs no network: page.html filled by Jinja."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from recipes.advice import headline, svg, words

FIGURE_KEYS = {"value", "low", "high", "unit", "source", "basis"}


def page(answer: dict[str, Any]) -> str:
    """The page's whole text."""
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    environment.filters |= {"number": words.number, "gib": words.gib, "amount": words.amount}
    environment.filters |= {"duration": words.duration, "sent": words.sent}
    environment.filters |= {"figure": figure_html, "time": time_html, "bytes": bytes_html}
    template = environment.from_string(
        files("recipes.advice").joinpath("page.html").read_text(encoding="utf-8")
    )
    return template.render(
        answer=answer,
        words=words,
        headline=headline,
        scaling=Markup(svg.scaling_svg(answer["scaling"]["points"])),
        memory=Markup(svg.memory_svg(answer["memory"])),
        update=Markup(svg.update_svg(answer["strategy"]["rows"] or [answer["strategy"]["asked"]])),
        kinds=svg.item_kinds(answer["memory"]),
        parts=list(answer["strategy"]["asked"]["parts"]),
        figures=figures(answer),
    )


def figure_html(figure: dict[str, Any], scale: float = 1.0, unit: str = "") -> Markup:
    """A figure with its band beside it, its source as a letter and its basis as a tooltip."""
    value, low, high = (words.number(figure[key] * scale) for key in ("value", "low", "high"))
    band = "" if low == high else Markup(" <small>{}–{}</small>").format(low, high)
    return Markup('<span class="figure {}" title="{}: {}">{}{}{}<sup>{}</sup></span>').format(
        figure["source"],
        figure["source"],
        figure["basis"],
        value,
        f" {unit}" if unit else "",
        band,
        words.LETTERS[figure["source"]],
    )


def time_html(figure: dict[str, Any], seconds: float = 1.0) -> Markup:
    """A time of so many seconds each (86,400: days), in the unit that fits it."""
    size, unit = words.time_unit(figure["value"] * seconds)
    return figure_html(figure, seconds / size, unit)


def bytes_html(figure: dict[str, Any]) -> Markup:
    """Bytes on a wire or a disk, in the unit that fits them."""
    size, unit = words.sent_unit(figure["value"])
    return figure_html(figure, 1 / size, unit)


def figures(tree: Any, place: str = "") -> list[tuple[str, dict[str, Any]]]:
    """Every figure of an answer with the path to it, as `memory.device`."""
    if isinstance(tree, dict):
        if tree.keys() == FIGURE_KEYS:
            return [(place, tree)]
        return [
            found
            for key, value in tree.items()
            for found in figures(value, f"{place}.{key}" if place else key)
        ]
    if isinstance(tree, list):
        return [
            found
            for index, value in enumerate(tree)
            for found in figures(value, f"{place}[{_name(value, index)}]")
        ]
    return []


def _name(value: Any, index: int) -> str:
    named = isinstance(value, dict) and (value.get("name") or value.get("world"))
    return str(named or index)
