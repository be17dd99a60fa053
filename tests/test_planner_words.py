"""What the plan's text says: who is compared with what, in which unit, in how many columns."""

from __future__ import annotations

import copy
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planned import ROOT, XL, answered

from recipes.advice import words
from recipes.advice.answer import differences
from recipes.advice.headline import headline, pasteable
from recipes.advice.text import encodable, rendered, show
from recipes.planner.workload import Candidate, Strategy

SMALL = ("recipes/runs/stdlib.yaml", "--gpu", "rtx-4090")
NO_ROOM = ("recipes/runs/llama_7b.yaml", "--gpu", "a100-40gb", "--gpus", "8")


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Answers to five questions."""
    folder = tmp_path_factory.mktemp("plans")
    asked = {
        "xl": XL,
        "nothing": NO_ROOM,
        "alone": (*SMALL, "--gpus", "1"),
        "small": (*SMALL, "--gpus", "8"),
        "failing": (*XL, "--mtbf", "0.001"),
    }
    return {name: answered(folder, *given) for name, given in asked.items()}


def told(answer: dict[str, Any], label: str) -> str:
    """A line of the headline."""
    return dict(headline(answer))[label]


def section(answer: dict[str, Any], name: str, width: int = 110) -> str:
    """A section's text."""
    return re.split(r"(?m)^\d (?=[A-Z])", rendered(answer, width))[
        ["", "Strategy", "Memory", "Batch", "Communication", "Time", "Scaling"].index(name)
    ]


# ---- what was asked, beside the choice


def test_the_run_file_says_the_same_only_if_it_says_all_of_it(plans: dict[str, Any]) -> None:
    answer = copy.deepcopy(plans["xl"])
    assert told(answer, "as asked") == "the run file says the same"
    answer["batch"]["asked_micro"] = 20  # which could not be used
    assert "micro 16 x 6, in place of batch.micro=20: the same" in told(answer, "as asked")
    answer["batch"]["asked_micro"] = "auto"
    assert told(answer, "as asked") == "the run file says the same"
    answer["strategy"] |= {"asked_is_chosen": False, "asked_differs": ["a bucket of 5"]}
    assert told(answer, "as asked") == "ZeRO-1, micro 16 x 6 (a bucket of 5): as fast"


def test_what_differs_within_a_family_is_named() -> None:
    own = Strategy(name="a", family="deepspeed", stage=1, bucket_elements=1000, config="x")
    asked = Candidate(strategy=replace(own, overlap=True, bucket_elements=5000), micro=1)
    chosen = Candidate(strategy=replace(own, name="b", less_traffic=True, config="y"), micro=1)
    assert differences(asked, chosen) == ["a bucket of 5,000", "overlap_comm", "no less traffic"]
    assert differences(chosen, replace(chosen, micro=9)) == []
    ddp = Candidate(strategy=Strategy(name="DDP", family="ddp", overlap=True), micro=1)
    assert differences(asked, ddp) == []  # the names say it


def test_another_bucket_is_a_strategy_of_its_own(tmp_path: Path) -> None:
    config = json.loads((ROOT / "ds_configs" / "zero1_fp16.json").read_text())
    config["zero_optimization"]["reduce_bucket_size"] = 5_000_000
    (tmp_path / "ds.json").write_text(json.dumps(config))
    arm = (ROOT / "accelerate_configs" / "zero1_fp16.yaml").read_text()
    arm = arm.replace("ds_configs/zero1_fp16.json", str(tmp_path / "ds.json"))
    (tmp_path / "arm.yaml").write_text(arm)
    found = answered(tmp_path, *XL, "--config", str(tmp_path / "arm.yaml"))
    assert found["strategy"]["asked_is_chosen"]  # as fast as the shipped file, so it is kept
    assert str(tmp_path / "arm.yaml") in found["strategy"]["start"]["command"]
    names = [row["name"] for row in found["strategy"]["rows"]]
    assert "ZeRO-1" in names and "ZeRO-1, as asked" in names


def test_a_faster_one_that_was_passed_over_is_named(plans: dict[str, Any]) -> None:
    answer = plans["xl"]
    rows = [row for row in answer["strategy"]["rows"] if row["config"]]
    assert not rows[0]["chosen"], "the example has lost its point"
    text = headline(answer)[1][1]
    assert text.startswith(rows[0]["name"]) and "less than the plan can tell apart" in text


# ---- what fits


def test_what_is_too_big_says_which_bound_it_breaks() -> None:
    def one(value: float, high: float) -> str:
        gib = words.GIB
        device = {"value": value * gib, "low": value * gib, "high": high * gib}
        sizes = {"usable": {"value": 72.8 * gib}, "capacity": {"value": 79.2 * gib}}
        return words.excess(device, sizes)

    assert one(75.0, 85.0) == "75.0 GiB of 72.8 that may be planned with"
    assert one(72.0, 79.3) == "up to 79.3 GiB at the high end, of 79.2 in all"
    assert one(72.0, 79.0) == "up to 79.0 GiB at the high end, of 72.8"


def test_a_step_that_is_too_big_shows_its_high_end(plans: dict[str, Any]) -> None:
    step = plans["xl"]["batch"]["ladder"][-1]
    high = words.gib(step["device"]["high"])
    assert not step["fits"]
    assert f"(too big: up to {high})" in words.ladder(plans["xl"]["batch"])
    assert "the high end" in words.margin(plans["xl"]["memory"])


def test_where_nothing_fits_the_ways_out_are_named(plans: dict[str, Any]) -> None:
    answer = plans["nothing"]
    would = answer["strategy"]["would_fit"]
    assert would["more_gpus"]["world"] == 16
    assert would["other_gpu"]["gpu"] != "a100-40gb"
    assert would["without_config"].startswith(answer["strategy"]["rows"][0]["name"])
    assert "on 16 of these GPUs" in told(answer, "would fit")
    assert told(answer, "too big").endswith("so is a micro-batch of 1")
    text = rendered(answer)
    assert "up to 0" not in text and "; no config of it here yet" not in text
    assert "no micro-batch is small enough" in text and "lower batch.micro" not in text
    assert words.reasons(answer["strategy"])[0][0] == "those with *"
    assert plans["xl"]["strategy"]["would_fit"] is None


def test_what_would_fit_does(plans: dict[str, Any], tmp_path: Path) -> None:
    would = plans["nothing"]["strategy"]["would_fit"]
    wider = (*NO_ROOM[:3], "--nodes", "2", "--gpus", "8", "--nic", "200gbit")
    assert answered(tmp_path, *wider)["strategy"]["chosen"]
    other = (NO_ROOM[0], "--gpu", would["other_gpu"]["gpu"], "--gpus", "8")
    assert answered(tmp_path, *other)["strategy"]["chosen"]


# ---- small numbers, one GPU, many failures


def test_one_gpu_sends_nothing_and_says_so(plans: dict[str, Any]) -> None:
    text = section(plans["alone"], "Communication")
    assert text.split("\n")[1].strip() == words.ALONE
    assert "GB" not in text and "0 s" not in text
    assert "1 rank x" in section(plans["alone"], "Batch")


def test_units_follow_the_numbers(plans: dict[str, Any]) -> None:
    text = section(plans["small"], "Strategy")
    assert "ms/update" in text and "s/update" in section(plans["xl"], "Strategy")
    memory = section(plans["small"], "Memory")
    rows = memory.split("  peak")[0].strip().splitlines()
    assert "MiB on each GPU" in memory and len(rows) > 6
    assert not re.search(r" 0\.0  ", memory.split("to save")[-1].split("host")[0])
    assert "MB sent" in section(plans["small"], "Communication")
    assert "GiB on each GPU" in section(plans["xl"], "Memory")


@pytest.mark.parametrize(
    ("count", "shown"),
    [(8.18e9, "8.18 GB"), (2e8, "200 MB"), (34e6, "34.0 MB"), (98, "98.0 B"), (0, "0 B")],
)
def test_bytes_in_their_unit(count: float, shown: str) -> None:
    assert words.sent(count) == shown


def test_one_is_not_many() -> None:
    assert words.plural(1, "rank") == "1 rank"
    assert words.plural(1024, "rank") == "1,024 ranks"


def test_a_run_that_fails_all_the_time_is_not_given_a_percentage(plans: dict[str, Any]) -> None:
    text = section(plans["failing"], "Time")
    assert words.STUCK in " ".join(text.split())
    assert "0 h" not in text and "one in 3.60 s" in text
    best = plans["failing"]["cost"]["checkpoint"]["best"]
    assert best["seconds"]["value"] == plans["failing"]["cost"]["update"]["value"]
    assert not best["progresses"] and best["loss"]["value"] <= 100


# ---- widths and encodings


@pytest.mark.parametrize("name", ["xl", "nothing", "alone", "small", "failing"])
@pytest.mark.parametrize("width", [80, 100, 110])
def test_no_line_is_too_long_and_no_word_is_cut(
    plans: dict[str, Any], name: str, width: int
) -> None:
    answer = plans[name]
    text = rendered(answer, width)
    assert max(map(len, text.splitlines())) <= width
    for row in answer["strategy"]["rows"] + answer["strategy"]["rejected"]:
        assert answer["strategy"]["chosen"] is None or row["name"] in text
    for saving in answer["memory"]["savings"]:
        if saving["bytes"]["value"] > 0.1 * words.GIB:
            assert saving["how"] in text
    whole = set(rendered(answer, 1000).split())
    assert {word for word in section(answer, "Memory", width).split()} <= whole


def test_a_label_alone_is_styled(plans: dict[str, Any]) -> None:
    text = rendered(plans["xl"], styled=True)
    assert re.search(r"\x1b\[1m  speed +\x1b\[0m\d", text)


def test_a_command_is_broken_between_its_words_alone() -> None:
    long = "recipes/runs/" + "x" * 120 + ".yaml"
    lines = pasteable(f"octet launch {long} batch.micro=1", 60)
    assert [line.removesuffix(" \\") for line in lines] == ["octet launch", long, "batch.micro=1"]


def test_a_long_run_file_stays_whole_in_the_start_line(plans: dict[str, Any]) -> None:
    answer = copy.deepcopy(plans["xl"])
    long = "recipes/runs/" + "x" * 120 + ".yaml"
    answer["strategy"]["start"]["command"] = f"octet launch --config a.yaml {long}"
    assert long in rendered(answer, 80)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_an_encoding_that_lacks_characters_gets_stand_ins(
    plans: dict[str, Any], encoding: str
) -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    show(plans["xl"], file)
    file.seek(0)
    text = file.read()
    assert "?" not in text
    band = plans["xl"]["memory"]["device"]
    assert f"({band['low'] / words.GIB:.1f}-{band['high'] / words.GIB:.1f})" in text
    assert re.search(r"(?m)^  100 % \|s\.+", text)
    assert encodable("1–2 µs", "utf-8") == "1–2 µs"
