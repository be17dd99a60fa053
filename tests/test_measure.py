"""What the ranks measure before a run: two real ranks, sound and with planted faults."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from launching import run

from recipes import measure
from recipes.config import Run
from recipes.engine.strategy import Strategy, read_strategy
from recipes.preflight import measuring, nodefacts
from recipes.preflight.netbench import Size
from recipes.runfile import load_run

MIB = 2**20
STAGES = ("matmul", "network", "selftest", "data")
ZERO1 = ["--deepspeed_config", "ds_configs/zero1_bf16.json"]


def model_size(path: Path) -> tuple[int, float]:
    """Parameters and FLOPs per token."""
    run = load_run(path, [])
    return nodefacts.model_facts(run.model, run.batch.seq_len)


def measured(
    folder: Path, arguments: list[str], env: dict[str, str] | None = None
) -> tuple[dict[str, Any], str]:
    """The result of two ranks, and what they said."""
    script = ["tests/drivers/measured.py", *arguments, "--json", str(folder / "measured.json")]
    settings = {"DS_ACCELERATOR": "cpu", "PYTHONPATH": "."} | (env or {})
    ended = run("torchrun", 2, script, folder / "log", env=settings)
    assert ended.code == 0, ended.text[-4000:]
    return json.loads((folder / "measured.json").read_text()), ended.text


@pytest.fixture(scope="module")
def sound(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    folder = tmp_path_factory.mktemp("sound")
    arguments = [str(tiny_run), *ZERO1, "--seconds", "3", "--data_seconds", "1"]
    return measured(folder, arguments)


@pytest.fixture(scope="module")
def faulty(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    folder = tmp_path_factory.mktemp("faulty")
    arguments = [str(tiny_run), *ZERO1, "--only", "matmul,network,data", "--seconds", "1"]
    arguments += ["--sizes", "8B,64KiB", "--data_seconds", "0.5"]
    env = {"HOSTS": "worker-0,worker-1", "FAULTS": "slow,wrong,unreadable"}
    return measured(folder, arguments, env)


def test_every_stage_is_measured(sound: tuple[dict[str, Any], str], tiny_run: Path) -> None:
    result, text = sound
    assert (result["schema"], result["world"], result["backend"]) == (1, 2, "gloo")
    assert (result["arm"], result["origin"]) == ("ZeRO-1 bf16", "ds_configs/zero1_bf16.json")
    assert result["device"] == "cpu" and len(result["hosts"]) == 2
    assert set(result["seconds"]) == set(STAGES) and result["stage"] == "done"
    assert [f for f in result["findings"] if f["verdict"] == "fail"] == []
    assert all(re.search(rf"(?m)^{stage} +took \d", text) for stage in STAGES)

    matmul = result["matmul"]
    assert (matmul["dtype"], matmul["note"], len(matmul["ranks"])) == ("bfloat16", "", 2)
    assert all(1e8 < rank["flops"] < 1e14 for rank in matmul["ranks"])

    network, parameters = result["network"], model_size(tiny_run)[0]
    assert [size["bytes"] for size in network["sizes"]] == [8, 2 * parameters, MIB, 25 * MIB]
    assert [link["kind"] for link in network["links"]] == ["within"]
    assert network["between"] is None and network["worst_link"] is None
    assert network["within"]["bytes_per_s"] == network["links"][0]["bytes_per_s"]
    assert all(line["correct"] for line in network["collectives"])
    assert {line["group"] for line in network["collectives"]} == {"all"}
    (overlap,) = network["overlap"]
    assert overlap["op"] == "all_reduce" and 0 <= overlap["hidden_share"] <= 1

    assert result["selftest"]["passed"] and len(result["selftest"]["arms"]) == 7


def test_the_data_path_is_read_on_every_rank(sound: tuple[dict[str, Any], str]) -> None:
    data, matmul = sound[0]["data"], sound[0]["matmul"]
    assert data["source"].startswith("files: 2 files in 40 units")
    for rank, of in zip(data["ranks"], matmul["ranks"], strict=True):
        assert rank["reachable"] and rank["tokens_per_s"] > 100 and rank["first_s"] > 0
        demand = of["flops"] / data["flops_per_token"]
        assert rank["demand_tokens_per_s"] == pytest.approx(demand)
    (host,) = data["hosts"].values()
    assert host["tokens_per_s"] == pytest.approx(sum(r["tokens_per_s"] for r in data["ranks"]))


def test_each_fault_is_a_finding_that_names_its_place(faulty: tuple[dict[str, Any], str]) -> None:
    result, text = faulty
    found = {finding["stage"]: finding for finding in result["findings"]}
    assert set(found) == {"matmul", "network", "data"}, result["findings"]
    slow = found["matmul"]
    assert (slow["verdict"], slow["host"], slow["ranks"]) == ("fail", "worker-1", [1])
    assert re.match(r"rank 1 on worker-1 multiplies \d+\.\d\d times slower", slow["text"])
    wrong = found["network"]
    assert wrong["verdict"] == "fail"
    assert "all_gather of 8 B (all)" in wrong["text"] and "all_reduce" not in wrong["text"]
    hidden = found["data"]
    assert (hidden["verdict"], hidden["host"], hidden["ranks"]) == ("fail", "worker-1", [1])
    assert hidden["text"] == "data on worker-1: /data/corpus is not mounted"
    assert f"FAIL: data: {hidden['text']}" in text


def test_a_node_without_data_does_not_hide_the_others(faulty: tuple[dict[str, Any], str]) -> None:
    hosts = faulty[0]["data"]["hosts"]
    assert hosts["worker-0"]["reachable"] and hosts["worker-0"]["tokens_per_s"] > 100
    assert not hosts["worker-1"]["reachable"] and hosts["worker-1"]["tokens_per_s"] is None
    assert faulty[0]["selftest"] is None


def test_two_nodes_have_links_both_ways_and_groups_between(
    faulty: tuple[dict[str, Any], str],
) -> None:
    network = faulty[0]["network"]
    ends = [(link["kind"], link["from"], link["to"]) for link in network["links"]]
    assert ends == [("between", "worker-0", "worker-1"), ("between", "worker-1", "worker-0")]
    groups = {line["group"] for line in network["collectives"]}
    assert groups == {"all", "between"} and network["within"] is None
    assert network["worst_link"]["share_of_median"] <= 1


def test_a_rank_is_held_against_the_others_and_not_itself() -> None:
    assert measuring.slower_than_others([100.0, 50.0], 1) == 2.0
    assert measuring.slower_than_others([100.0, 50.0], 0) == 0.5
    assert measuring.slower_than_others([90.0, 100.0, 110.0, 50.0], 3) == 2.0
    assert measuring.slower_than_others([70.0], 0) == 1.0


def test_a_nodes_data_is_the_sum_of_its_ranks() -> None:
    rank = {"reachable": True, "tokens_per_s": 10.0, "demand_tokens_per_s": 30.0, "error": ""}
    assert measuring.host_data([rank, rank]) == rank | {
        "tokens_per_s": 20.0,
        "demand_tokens_per_s": 60.0,
    }
    lost = {"reachable": False, "tokens_per_s": None, "demand_tokens_per_s": 30.0, "error": "gone"}
    found = measuring.host_data([rank, lost])
    assert (found["reachable"], found["tokens_per_s"], found["error"]) == (False, None, "gone")


def test_sizes_are_those_that_the_run_has() -> None:
    zero1 = read_strategy(None, "ds_configs/zero1_fp16.json", {})
    model = 1_557_611_200  # GPT-2 XL: larger than the bucket of 100 M elements
    sizes = measuring.run_sizes(None, zero1, model)
    assert [size.bytes for size in sizes] == [8, MIB, 25 * MIB, 200_000_000, 2 * model]
    assert sizes[3] == Size(bytes=200_000_000, why="the reduce bucket")
    # A smaller model never fills its bucket.
    assert [s.bytes for s in measuring.run_sizes(None, zero1, 50_000)] == [
        8,
        100_000,
        MIB,
        25 * MIB,
    ]


def test_gradients_travel_in_the_arms_precision() -> None:
    run = load_run("recipes/runs/stdlib.yaml", [])
    compressed = load_run("recipes/runs/stdlib.yaml", ["ddp.compress=bf16"])
    ddp = Strategy(kind="DDP", precision="bf16", cpu=True, origin="DDP")
    zero1 = read_strategy(None, "ds_configs/zero1_fp16.json", {})

    def precision(run: Run | None, strategy: Strategy) -> str:
        return measuring.wire_precision(run, strategy)

    assert precision(run, ddp) == "fp32" and precision(None, ddp) == "fp32"
    assert precision(compressed, ddp) == "bf16" and precision(run, zero1) == "fp16"
    assert 100 * MIB in [s.bytes for s in measuring.run_sizes(run, ddp, 6_325_120)]


def test_the_models_size_is_known_without_its_weights() -> None:
    parameters, flops = model_size(Path("recipes/runs/gpt2_xl.yaml"))
    assert 1.5e9 < parameters < 1.6e9
    assert flops == 6.0 * parameters + 12.0 * 48 * 1600 * 1024


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "netwrok"], "--only netwrok: expected some of matmul,network,selftest,data"),
        (["optim.lr=1"], "optim.lr=1 has no effect without a run file"),
    ],
)
def test_arguments_that_can_have_no_effect_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        measure.parse_arguments(arguments)
    assert message in capsys.readouterr().err


def test_the_run_file_is_the_first_word_even_with_an_equals_sign(tmp_path: Path) -> None:
    odd = tmp_path / "a=b.yaml"
    odd.touch()
    for word in ("x.yaml", str(odd)):
        args = measure.parse_arguments(["--only", "data", word, "a.b=1"])
        assert (args.run, args.words) == (word, ["a.b=1"])
