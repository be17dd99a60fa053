"""The plan's answer as data: the published schema, and numbers that must agree with each other."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
from planned import COMMANDS, ROOT, XL, answered, plan
from planner_cases import banded

from recipes.advice import sections_network, words
from recipes.advice.start_line import start_line
from recipes.advice.wanted import Wanted
from recipes.planner.figure import Figure
from recipes.planner.workload import Candidate, Strategy
from recipes.runfile import load_run

SCHEMA = json.loads((ROOT / "recipes" / "advice" / "plan.schema.json").read_text())


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The four commands' JSON."""
    folder = tmp_path_factory.mktemp("plans")
    return {name: answered(folder, *given) for name, given in COMMANDS.items()}


def figures(tree: Any) -> Iterator[dict[str, Any]]:
    """Every figure of an answer."""
    if isinstance(tree, dict):
        if "basis" in tree and "value" in tree:
            yield tree
        else:
            for value in tree.values():
                yield from figures(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from figures(value)


def test_the_schema_is_one_and_closed() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["properties"]["version"] == {"const": 1}

    def objects(tree: Any) -> Iterator[dict[str, Any]]:
        if isinstance(tree, dict):
            if tree.get("type") == "object" and "properties" in tree:
                yield tree
            for value in tree.values():
                yield from objects(value)
        elif isinstance(tree, list):
            for value in tree:
                yield from objects(value)

    found = list(objects(SCHEMA))
    assert len(found) > 20
    for each in found:
        assert each["additionalProperties"] is False
        assert set(each["required"]) == set(each["properties"])


def test_every_number_that_is_no_whole_one_is_a_figure() -> None:
    def bare(tree: Any, place: str) -> Iterator[str]:
        if isinstance(tree, dict):
            kinds = tree.get("type", ())
            if "number" in ([kinds] if isinstance(kinds, str) else kinds):
                yield place
            for key, value in tree.items():
                yield from bare(value, f"{place}/{key}")
        elif isinstance(tree, list):
            for index, value in enumerate(tree):
                yield from bare(value, f"{place}/{index}")

    found = set(bare(SCHEMA, ""))
    figure = {f"/$defs/figure/properties/{key}" for key in ("value", "low", "high")}
    assert figure <= found
    # Beside the figures only what was asked for, and the network's rate with its own source.
    assert all("/question/" in place for place in found - figure), found - figure


@pytest.mark.parametrize("name", COMMANDS)
def test_an_answer_is_what_the_schema_says(answers: dict[str, Any], name: str) -> None:
    jsonschema.validate(answers[name], SCHEMA, cls=jsonschema.Draft202012Validator)


def test_the_schema_refuses_what_is_not_in_it(answers: dict[str, Any]) -> None:
    for change in ({"more": 1}, {"version": 2}, {"memory": {}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(answers["gpt2_xl"] | change, SCHEMA)


def test_an_answer_where_nothing_fits_is_one_too(tmp_path: Path) -> None:
    words_ = ("recipes/runs/llama_7b.yaml", "--gpus", "4", "--gpu", "v100-16gb")
    found = answered(tmp_path, *words_)
    jsonschema.validate(found, SCHEMA, cls=jsonschema.Draft202012Validator)
    assert found["strategy"]["chosen"] is None
    assert not found["memory"]["fits"]
    assert found["memory"]["largest_micro"] == 0
    assert "nothing that this package runs fits" in plan(*words_)[1]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_figure_lies_in_its_band_and_says_where_from(
    answers: dict[str, Any], name: str
) -> None:
    found = list(figures(answers[name]))
    assert len(found) > 100
    for figure in found:
        assert figure["low"] <= figure["value"] <= figure["high"], figure
        assert figure["basis"], figure
        assert figure["source"] in words.SOURCES


@pytest.mark.parametrize("name", COMMANDS)
def test_the_parts_of_an_update_are_the_update(answers: dict[str, Any], name: str) -> None:
    answer = answers[name]
    for row in answer["strategy"]["rows"]:
        parts = {name: part["value"] for name, part in row["parts"].items()}
        assert sum(parts.values()) == pytest.approx(row["update"]["value"])
        assert row["bottleneck"] == max(parts, key=parts.__getitem__)
        for end in ("low", "high"):  # of each part by the update's
            whole = sum(part[end] for part in row["parts"].values())
            assert whole == pytest.approx(row["update"][end])
        tokens = answer["question"]["global_tokens"]
        assert row["tokens_per_s"]["value"] == pytest.approx(tokens / row["update"]["value"])
    times = [row["update"]["value"] for row in answer["strategy"]["rows"]]
    assert times == sorted(times)


@pytest.mark.parametrize("name", COMMANDS)
def test_one_choice_and_a_sentence_for_every_other(answers: dict[str, Any], name: str) -> None:
    strategy = answers[name]["strategy"]
    chosen = [row for row in strategy["rows"] if row["chosen"]]
    assert len(chosen) == 1
    assert chosen[0]["config"] and chosen[0]["fits"] and chosen[0]["why_not"] == ""
    assert {k: chosen[0][k] for k in strategy["chosen"]} == strategy["chosen"]
    for row in strategy["rows"]:
        assert row["chosen"] or row["why_not"]
    told = words.reasons(strategy)
    named = [name for names, _ in told for name in names.split("; ")]
    assert len(named) == len(strategy["rows"]) - 1 + len(strategy["rejected"])
    assert all(reason for _, reason in told)


def test_what_the_worked_example_must_say(answers: dict[str, Any]) -> None:
    strategy = answers["gpt2_xl"]["strategy"]
    rejected = {row["name"]: row["reason"] for row in strategy["rejected"]}
    assert rejected["TP 2"] == "25 heads don't divide by 2"
    marked = {row["name"] for row in strategy["rows"] if row["config"] is None}
    assert {"FSDP2", "ZeRO-2", "ZeRO-3"} <= marked
    assert strategy["chosen"]["name"].startswith("ZeRO-1")
    compared = {
        row["name"]: row["sent"]["value"] for row in answers["gpt2_xl"]["communication"]["compared"]
    }
    # 2(N-1)/N x 2 bytes x 1,557,611,200 parameters on 8 ranks: 5.452 GB; 1.5 times in DeepSpeed.
    assert compared["ZeRO-1 as the paper has it"] == pytest.approx(5.4516e9, rel=1e-4)
    assert compared["ZeRO-1 as DeepSpeed has it"] == pytest.approx(8.1775e9, rel=1e-4)


@pytest.mark.parametrize("name", COMMANDS)
def test_memory_adds_up(answers: dict[str, Any], name: str) -> None:
    memory = answers[name]["memory"]
    phases = {phase["name"]: phase for phase in memory["phases"]}
    for phase in phases.values():
        for end in ("value", "low", "high"):
            parts = sum(item["bytes"][end] for item in phase["items"])
            assert parts == pytest.approx(phase["allocated"][end], rel=1e-9)
    peak = phases[memory["peak"]]["allocated"]
    assert peak["value"] == max(phase["allocated"]["value"] for phase in phases.values())
    for end in ("value", "low", "high"):
        assert memory["allocated"][end] == pytest.approx(peak[end], rel=1e-9)
    levels = [memory[key]["value"] for key in ("allocated", "reserved", "device")]
    assert levels == sorted(levels)
    assert memory["fits"]
    assert memory["device"]["value"] <= memory["usable"]["value"]
    assert memory["device"]["high"] <= memory["capacity"]["value"]
    parameters = answers[name]["question"]["model"]["parameters"]
    assert memory["checkpoint_bytes"]["value"] == 12 * parameters


@pytest.mark.parametrize("name", COMMANDS)
def test_every_step_of_the_ladder_is_the_same_update(answers: dict[str, Any], name: str) -> None:
    batch = answers[name]["batch"]
    for step in batch["ladder"]:
        sequences = step["micro"] * step["accumulation"] * batch["data_ranks"]
        assert sequences == batch["global_sequences"]
        assert step["fits"] == (step["micro"] <= answers[name]["memory"]["largest_micro"])
    sizes = [step["device"]["value"] for step in batch["ladder"]]
    assert sizes == sorted(sizes)
    assert {"micro": batch["micro"], "accumulation": batch["accumulation"]}.items() <= next(
        step for step in batch["ladder"] if step["micro"] == batch["micro"]
    ).items()


def test_the_run_in_days_is_updates_times_their_time(answers: dict[str, Any]) -> None:
    cost = answers["gpt2_xl"]["cost"]
    assert cost["updates"] == 130_209
    days = 130_209 * cost["update"]["value"] / 86_400
    assert cost["days"]["value"] == pytest.approx(days)
    assert cost["price"]["value"] == pytest.approx(days * 24 * 8 * 1.8)
    assert cost["tokens_per_sample"]["source"] == "assumed"
    assert answers["llama_7b"]["cost"]["price"] is None
    assert answers["llama_7b"]["cost"]["tokens_per_sample"] is None
    checkpoint = cost["checkpoint"]
    assert checkpoint["own"]["loss"]["value"] >= checkpoint["best"]["loss"]["value"]
    assert checkpoint["mtbf_hours_per_gpu"]["value"] == pytest.approx(50_677, abs=1)


def test_options_that_change_time_and_money(tmp_path: Path) -> None:
    more = ("--tokens-per-sample", "512", "--mtbf", "1000")
    found = answered(tmp_path, *XL, *more)["cost"]
    assert found["updates"] == 65_105
    assert found["tokens_per_sample"]["source"] == "formula"
    assert found["checkpoint"]["mtbf_hours_per_gpu"]["basis"] == "--mtbf"
    assert found["checkpoint"]["failures_expected"]["value"] == pytest.approx(
        found["gpu_hours"]["value"] / 1000
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_scaling_reaches_beyond_a_thousand_gpus(answers: dict[str, Any], name: str) -> None:
    points = answers[name]["scaling"]["points"]
    worlds = [point["world"] for point in points]
    assert worlds == sorted(worlds)
    assert {answers[name]["question"]["world"], 16, 64, 1024} <= set(worlds)
    assert worlds[-1] > 1024
    first = points[0]
    assert first["efficiency_weak"] == first["efficiency_strong"]
    assert {first["efficiency_weak"][end] for end in ("low", "value", "high")} == {1.0}
    updates = answers[name]["cost"]["updates"]
    for point in points:
        if point["strong"] is None:
            assert point["days"] is None and point["note"]
        else:
            days = point["strong"]["update"]["value"] * updates / 86_400
            assert point["days"]["value"] == pytest.approx(days)


def test_one_node_without_a_network_stays_in_it(tmp_path: Path) -> None:
    words_ = (XL[0], "--gpus", "8", "--gpu", "a100-80gb")
    alone = answered(tmp_path, *words_)
    assert [point["world"] for point in alone["scaling"]["points"]] == [8]
    assert alone["communication"]["between_nodes"] is None
    assert alone["communication"]["levels"]["between"]["value"] == 0
    with_network = answered(tmp_path, *words_, "--nic", "200gbit", "--worlds", "8,64")
    assert [point["nodes"] for point in with_network["scaling"]["points"]] == [1, 8]


def test_how_much_accumulation_makes_waiting_negligible() -> None:
    def figure(value: float) -> Figure:
        return banded(value, 0.1, "s", "table", "a test")

    once = SimpleNamespace(when="boundary", sent=1.0)
    chosen = SimpleNamespace(
        exposed=figure(0.3),
        optimizer=figure(0.1),
        micro=SimpleNamespace(figure=figure(1.0)),
        transfers=((once, None),),
    )
    # 0.3 / (0.3 + 0.1 + 9) is 3.2 %, with 10 it is 2.9 %.
    found = sections_network.negligible_accumulation(chosen)
    # At the ends: (0.27·32.33 - 0.11)/1.1 = 7.8 and (0.33·32.33 - 0.09)/0.9 = 11.8.
    assert found is not None and (found.low, found.value, found.high) == (8, 10, 12)
    every = SimpleNamespace(when="micro", sent=1.0)
    chosen.transfers = ((once, None), (every, None))
    assert sections_network.negligible_accumulation(chosen) is None


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_starts_what_was_chosen(answers: dict[str, Any], name: str) -> None:
    strategy = answers[name]["strategy"]
    chosen, typed = strategy["chosen"], shlex.split(strategy["start"]["command"])
    assert typed[:2] == ["octet", "launch"]
    assert typed[typed.index("--config") + 1] == chosen["config"]
    at = typed.index(f"recipes/runs/{name}.yaml")
    run = load_run(ROOT / typed[at], typed[at + 1 :])
    assert run.batch.micro == chosen["micro"]
    assert run.model.gradient_checkpointing == chosen["checkpointing"]
    assert (run.model.attention == "eager") == (chosen["attention"] == "eager")


def test_a_strategy_s_own_keys_are_in_the_command() -> None:
    run = load_run(ROOT / XL[0], ["name=other"])
    wanted = Wanted(run=XL[0], overrides=("name=other",))

    def command(family: str, **more: Any) -> tuple[str, str]:
        strategy = Strategy(name="any", family=family, **more)
        question: Any = SimpleNamespace(
            wanted=wanted,
            run=run,
            work=SimpleNamespace(precision="fp16"),
            cluster=SimpleNamespace(world=8, nodes=2, gpus=4),
            asked=SimpleNamespace(strategy=Strategy(name="asked", family="fsdp2")),
        )
        return start_line(question, Candidate(strategy=strategy, micro=16))

    typed, also = command("ddp", compress=True, bucket_view=False, config="a.yaml")
    assert typed == (
        "octet launch --config a.yaml recipes/runs/gpt2_xl.yaml name=other ddp.compress=fp16 "
        "ddp.gradient_as_bucket_view=false"
    )
    assert also == ""
    typed, also = command("deepspeed", stage=1, overlap=True, config="z.yaml")
    assert typed == "octet launch --config z.yaml recipes/runs/gpt2_xl.yaml name=other"
    assert also.startswith('"overlap_comm": true')
    typed, _ = command("deepspeed", stage=1, less_traffic=True, config="less.json")
    assert typed == (
        "deepspeed --hostfile hostfile recipes/pretrain.py recipes/runs/gpt2_xl.yaml name=other "
        "--deepspeed_config less.json"
    )
