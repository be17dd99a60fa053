"""The plan's page and charts: whole, self-contained, and drawn from the answer's numbers."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from planned import XL, answered, plan

from recipes.advice import chart, svg, words
from recipes.advice.page import figures, page

VOID = {"meta", "br", "link", "img", "input", "hr"}


class Checked(HTMLParser):
    """Reads a page; every tag must be closed in its turn, and nothing fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [f"{k}={v}" for k, v in attrs if k in ("src", "href", "data", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [f"{k}={v}" for k, v in attrs if k in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The worked example's JSON."""
    return answered(tmp_path_factory.mktemp("plan"), *XL)


@pytest.fixture(scope="module")
def text(answer: dict[str, Any]) -> str:
    """Its page."""
    return page(answer)


def pictures(text: str) -> list[ET.Element]:
    """The page's pictures, which are well-formed XML by themselves."""
    return [ET.fromstring(found) for found in re.findall(r"(?s)<svg.*?</svg>", text)]


def test_the_command_writes_the_page(tmp_path: Path, text: str) -> None:
    code, _, err = plan(*XL, "--html", str(tmp_path / "plan.html"))
    assert code == 0, err
    assert (tmp_path / "plan.html").read_text(encoding="utf-8") == text


def test_a_page_is_whole_and_fetches_nothing(text: str) -> None:
    checked = Checked()
    checked.feed(text)
    assert not checked.open
    assert not checked.fetched
    assert "<script" not in text and "@import" not in text and "url(" not in text
    assert 'name="viewport"' in text
    assert "prefers-color-scheme: dark" in text


def test_every_number_stands_on_it_with_band_source_and_basis(
    text: str, answer: dict[str, Any]
) -> None:
    checked = Checked()
    checked.feed(text)
    seen = set(map(str.strip, checked.text))
    found = figures(answer)
    assert len(found) > 100
    assert dict(found)["memory.device"] == answer["memory"]["device"]
    for place, figure in found:
        assert place in seen
        assert {words.number(figure[key]) for key in ("value", "low", "high")} <= seen
        assert figure["basis"] in seen
        assert figure["source"] in words.SOURCES
    shown = figures(answer["memory"]["phases"])
    assert len(shown) > 15 and {figure["basis"] for _, figure in shown} <= seen


def test_three_pictures(text: str) -> None:
    labels = [picture.get("aria-label") for picture in pictures(text)]
    assert labels == [
        "What an update's time goes into",
        "Memory of a GPU by phase, GiB",
        "Scaling efficiency over the number of GPUs",
    ]


def test_names_are_text_and_never_markup(answer: dict[str, Any]) -> None:
    gpu = {"name": "<script>alert(1)</script>", "source": "a & b"}
    told = page(answer | {"question": answer["question"] | {"gpu": gpu}})
    assert "<script" not in told
    assert "a &amp; b" in told


def of(gib: float) -> dict[str, Any]:
    """So many GiB."""
    return {"value": gib * words.GIB, "basis": "b"}


def memory_of(*phases: tuple[str, list[float]]) -> dict[str, Any]:
    """A memory section with 80 GiB of room; sizes in GiB."""
    return {
        "capacity": of(80),
        "usable": of(72),
        "phases": [
            {
                "name": name,
                "allocated": of(sum(sizes)),
                "items": [
                    {"name": f"n{i}", "kind": f"k{i}", "bytes": of(size)}
                    for i, size in enumerate(sizes)
                ],
            }
            for name, sizes in phases
        ],
    }


def test_memory_bars_are_as_high_as_their_bytes() -> None:
    picture = ET.fromstring(svg.memory_svg(memory_of(("forward", [10, 30]), ("update", [20]))))
    boxes = [(float(b.get("y", 0)), float(b.get("height", 0))) for b in picture.iter("rect")]
    assert len(boxes) == 3
    (y0, h0), (y1, h1), (_, h2) = boxes
    assert h1 == pytest.approx(3 * h0, abs=0.2)
    assert h2 == pytest.approx(2 * h0, abs=0.2)
    assert y1 + h1 == pytest.approx(y0, abs=0.1)  # stacked on the first
    limits = [float(r.get("y1", 0)) for r in picture.iter("line") if r.get("class") == "limit"]
    floor = y0 + h0
    assert [floor - level for level in limits] == pytest.approx([7.2 * h0, 8 * h0], abs=0.6)


def test_update_bars_are_as_long_as_their_seconds() -> None:
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "parts": {"arithmetic": {"value": 3.0}, "network": {"value": waits}},
            "update": {"value": 3.0 + waits},
            "chosen": name == "A",
        }
        for name, waits in (("A", 1.0), ("B", 3.0))
    ]
    picture = ET.fromstring(svg.update_svg(rows))
    widths = [float(box.get("width", 0)) for box in picture.iter("rect")]
    assert widths[0] == pytest.approx(3 * widths[1], abs=0.2)
    assert widths[2] == pytest.approx(widths[3], abs=0.2) == pytest.approx(widths[0], abs=0.2)
    assert "A ◀" in "".join(picture.itertext())


def points(*given: tuple[int, float, float | None]) -> list[dict[str, Any]]:
    """Points of a scaling section: GPUs, weak and strong efficiency."""
    return [
        {
            "world": world,
            "weak": {},
            "strong": None if strong is None else {},
            "efficiency_weak": {"value": weak},
            "efficiency_strong": None if strong is None else {"value": strong},
        }
        for world, weak, strong in given
    ]


def test_scaling_is_drawn_over_doublings() -> None:
    given = points((8, 1.0, 1.0), (16, 0.9, 0.5), (64, 0.8, None))
    picture = ET.fromstring(svg.scaling_svg(given))
    dots = [(float(d.get("cx", 0)), float(d.get("cy", 0))) for d in picture.iter("circle")]
    assert len(dots) == 5  # three weak ones, two strong ones
    (x8, top), (x16, _), (x64, _) = dots[:3]
    assert x64 - x16 == pytest.approx(2 * (x16 - x8), abs=0.2)
    assert dots[3] == (x8, top)
    assert dots[4][1] - top == pytest.approx(5 * (dots[1][1] - top), abs=0.5)


def test_the_chart_in_a_terminal() -> None:
    given = points((8, 1.0, 1.0), (16, 0.9, 0.5), (32, 0.8, None))
    lines = chart.scaling_chart(given).splitlines()
    level = {
        mark: [line.split("│")[0].strip() for line in lines if mark in line.partition("│")[2]]
        for mark in "ws"
    }
    assert level["s"] == ["100 %", "50 %"]
    assert level["w"] == ["90 %", "80 %"]  # at the first both are the same
    bottom = lines[-2]
    assert bottom.split() == ["8", "16", "32", "GPUs"]
    half = next(line for line in lines if line.strip().startswith("50 %"))
    assert half.index("s") == bottom.index("16")
    assert lines[-1].strip() == "efficiency: w weak, s strong"


def test_a_chart_of_many_doublings_stays_narrow() -> None:
    lines = chart.scaling_chart(points((1, 1.0, 1.0), (2**17, 0.5, 0.1))).splitlines()
    assert max(map(len, lines)) <= 110
    lines = chart.scaling_chart(points((1, 1.0, 1.0), (2**17, 0.5, 0.1)), 80).splitlines()
    assert 60 < max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (0.0123, "0.012"), (0.00123, "0.001"), (8.944, "8.94"), (13.44, "13.4")]
    + [(2573.4, "2,573"), (99.96, "100.0"), (-5.0, "-5.00")],
)
def test_three_digits(value: float, shown: str) -> None:
    assert words.number(value) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0 s"), (7e-7, "0.700 µs"), (0.2336, "234 ms"), (8.94, "8.94 s"), (119, "119 s")]
    + [(3240, "54.0 min"), (22320, "6.20 h"), (1_157_760, "13.4 days")],
)
def test_a_time_in_its_unit(seconds: float, shown: str) -> None:
    assert words.duration(seconds) == shown
