"""`octet plan --ledger`: runs' own comparisons as one history, and what is wrong with a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipes.advice.ledger import ledger, ledger_text


def quantity(what: str, unit: str, plan: float | None, measured: float | None) -> dict[str, Any]:
    """An entry of plan.json; inside its band up to ten per cent."""
    error = None if None in (plan, measured) else round(100 * (measured / plan - 1), 3)  # type: ignore[operator]
    figure = {"value": plan, "low": plan, "high": plan, "unit": unit, "source": "formula"}
    return {
        "what": what,
        "unit": unit,
        "plan": figure | {"basis": "made up"} if plan is not None else None,
        "measured": measured,
        "error_percent": error,
        "verdict": "not compared" if error is None else "inside" if abs(error) < 10 else "OUTSIDE",
        "note": "",
    }


def start(time: float, *quantities: dict[str, Any], **facts: Any) -> dict[str, Any]:
    """A start of plan.json."""
    about = {"time": time, "gpu": "NVIDIA H200", "strategy": "ZeRO-1 fp16", "world": 8, "micro": 16}
    about |= {"accumulation": 6, "from_update": 0, "update": 6, "final": False, "notes": []}
    return about | facts | {"quantities": list(quantities)}


def write(folder: Path, *starts: dict[str, Any]) -> Path:
    """A run folder."""
    folder.mkdir()
    (folder / "run.json").write_text("{}")
    whole = {"schema": 1, "name": folder.name, "starts": list(starts)}
    (folder / "plan.json").write_text(json.dumps(whole))
    return folder


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Two runs with three starts."""
    peak, step = ("peak allocated", "bytes"), ("update time", "s")
    first = write(
        tmp_path / "first",
        start(2e9, quantity(*peak, 50e9, 52e9), quantity(*step, 2.0, 2.6)),  # +4 %, +30 %
        start(1e9, quantity(*peak, 50e9, 49e9), quantity(*step, None, 2.0)),  # -2 %
    )
    bare = quantity("tokens/s", "tokens/s", None, 900.0)
    second = write(
        tmp_path / "second",
        start(3e9, quantity(*peak, 10e9, 10.1e9), bare, gpu="cpu", world=2),  # +1 %
    )
    return [first, second]


def test_the_history_has_every_start_oldest_first(folders: list[Path]) -> None:
    result = ledger(folders)
    assert [(s["name"], s["time"]) for s in result["starts"]] == [
        ("first", 1e9),
        ("first", 2e9),
        ("second", 3e9),
    ]
    assert result["starts"][0]["folder"] == str(folders[0])
    assert result["median_error_percent"] == {
        "peak allocated": {"median": 2.0, "starts": 3},  # of 2, 4 and 1: the sign is no merit
        "update time": {"median": 30.0, "starts": 1},
    }
    assert json.loads(json.dumps(result)) == result
    assert ledger([str(folders[1])])["starts"][0]["gpu"] == "cpu"


def test_the_table_names_run_gpu_and_strategy_and_what_is_outside(folders: list[Path]) -> None:
    text = ledger_text(ledger(folders))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "run date GPU strategy ranks micro plan measured error"
    assert lines[1].endswith("NVIDIA H200 ZeRO-1 fp16 8 16 peak allocated 50.0 GB 49.0 GB -2.0 %")
    assert lines[1].startswith("first 2001-09-")
    assert lines[3] == "update time 2.0 s 2.6 s +30.0 % outside the band"  # the start said once
    assert "cpu ZeRO-1 fp16 2 16 peak allocated 10.0 GB 10.1 GB +1.0 %" in lines[4]
    assert "median |error| over 3 start(s)" in lines
    assert "peak allocated 2.0 % (3)" in lines
    assert all(len(line) <= 140 for line in text.splitlines())


def test_a_start_that_compared_nothing_says_so(tmp_path: Path) -> None:
    folder = write(tmp_path / "bare", start(1e9, quantity("tokens/s", "tokens/s", None, 1.0)))
    text = ledger_text(ledger([folder]))
    assert "nothing could be compared" in text and "median" not in text


def test_all_folders_that_are_wrong_are_told_at_once(tmp_path: Path, folders: list[Path]) -> None:
    empty, old, torn, later = (tmp_path / name for name in ("empty", "old", "torn", "later"))
    empty.mkdir()
    write(old)
    (old / "plan.json").unlink()
    write(torn)
    (torn / "plan.json").write_text('{"schema": 1, "name": "torn"')
    write(later)
    (later / "plan.json").write_text('{"schema": 2, "name": "later", "starts": []}')
    odd = write(tmp_path / "odd", {"time": 1e9})
    wrong = [tmp_path / "absent", empty, old, torn, later, odd]
    with pytest.raises(ValueError) as caught:
        ledger(wrong)
    told = str(caught.value).splitlines()
    assert [line.split(" ")[0].removesuffix("/plan.json") for line in told] == [
        str(w) for w in wrong
    ]
    assert "does not exist" in told[0]
    assert "is no run folder (it has no run.json)" in told[1]
    assert "has not come far enough to compare anything" in told[2]
    assert "can't be read" in told[3]
    assert "schema 2, expected 1" in told[4]
    assert "is damaged: starts.0.gpu: missing (and 4 more)" in told[5]
    found = ledger([*wrong, folders[0]])  # one good run is shown, with what is left out
    assert found["left_out"] == told and found["starts"]
    assert f"left out: {told[0]}" in ledger_text(found)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"time": "nan"}, "starts.0.time='nan': expected a valid number"),
        ({"time": 1e300}, "starts.0.time=1e+300: expected less than"),
        ({"gpu": 1}, "starts.0.gpu=1: expected a valid string"),
        ({"quantities": [3]}, "starts.0.quantities.0=3: expected a valid dictionary"),
        ({"quantities": [quantity("zzz", "s", 1.0, 2.0)]}, "what='zzz': expected one of peak"),
        (
            {"quantities": [quantity("MFU", "share", 1.0, 2.0) | {"plan": None}]},
            "error_percent stands without a plan",
        ),
    ],
)
def test_a_damaged_comparison_is_told_with_its_place(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    folder = write(tmp_path / "bad", start(1e9) | changes)
    with pytest.raises(ValueError) as caught:
        ledger([folder])
    assert str(caught.value).startswith(f"{folder}/plan.json is damaged: ")
    assert told in str(caught.value)


def test_a_plan_that_is_no_object_is_told(tmp_path: Path) -> None:
    folder = write(tmp_path / "list")
    (folder / "plan.json").write_text("[1]")
    with pytest.raises(ValueError, match="schema None, expected 1"):
        ledger([folder])


def test_a_run_counts_once_however_it_is_named(folders: list[Path]) -> None:
    first = folders[0]
    named = [first, f"{first}/", first / "plan.json", first.parent / "x" / ".." / "first"]
    assert len(ledger(named)["starts"]) == 2


def test_runs_without_a_start_are_told_so(tmp_path: Path) -> None:
    text = ledger_text(ledger([write(tmp_path / "none")]))
    assert text == "no start of these runs has compared anything yet; train on"


def test_a_name_is_no_markup(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "run", start(1e9, quantity("MFU", "share", 0.5, 0.5), gpu="[red]x[/b]")
    )
    assert "[red]x[/b]" in ledger_text(ledger([folder]))


def test_a_start_that_differs_from_the_others_is_marked(tmp_path: Path) -> None:
    """All are a tenth slower than planned; the third was twice as slow, on a shared machine."""
    times = [1.1, 1.12, 2.2, 1.09, 1.1]
    starts = [start(1e9 + n, quantity("update time", "s", 1.0, t)) for n, t in enumerate(times)]
    result = ledger([write(tmp_path / "run", *starts)])
    odd = [s["quantities"][0].get("odd", False) for s in result["starts"]]
    assert odd == [False, False, True, False, False]
    assert ledger_text(result).count("unlike the other starts") == 1
    few = ledger([write(tmp_path / "few", *starts[:3])])
    assert not any("odd" in s["quantities"][0] for s in few["starts"])
