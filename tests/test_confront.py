"""Plan against measured: arithmetic and words, and the real engine's runs on two ranks."""

from __future__ import annotations

import json
import logging
import signal
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nursery
import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from recipes import comparison, confront, own_plan
from recipes.comparison import Row, shown
from recipes.engine import instruments
from recipes.engine.strategy import read_strategy
from recipes.meter import Timing
from recipes.own_plan import Found
from recipes.planner.figure import Figure, exact
from recipes.runfile import load_run

CROWDED = "tests/drivers/crowded.py"
PARAMETERS = 42_880  # of tests/tiny.py's model: 2 layers of 32, 512 tokens, 32 positions


def figure(value: float, low: float, high: float) -> Figure:
    """A figure with a band."""
    return Figure(value=value, low=low, high=high, unit="s", source="formula", basis="made up")


def newest(folder: Path) -> dict[str, Any]:
    """The last start of plan.json, its quantities by name."""
    start = json.loads((folder / "plan.json").read_text())["starts"][-1]
    return start | {"quantities": {q["what"]: q for q in start["quantities"]}}


# ---- arithmetic and words


@pytest.mark.parametrize(
    ("plan", "measured", "error", "verdict"),
    [
        (figure(2.0, 1.5, 2.5), 2.4, 0.2, "inside"),
        (figure(2.0, 1.5, 2.5), 2.6, 0.3, "OUTSIDE"),
        (figure(2.0, 1.5, 2.5), 1.0, -0.5, "OUTSIDE"),
        (exact(200.0, "s", "a formula"), 201.0, 0.005, "inside"),  # up to one per cent
        (exact(200.0, "s", "a formula"), 203.0, 0.015, "OUTSIDE"),
        (figure(0.0, 0.0, 0.05), 0.04, None, "inside"),
        (None, 1.0, None, "not compared"),
        (figure(2.0, 1.5, 2.5), None, None, "not compared"),
    ],
)
def test_error_and_verdict(
    plan: Figure | None, measured: float | None, error: float | None, verdict: str
) -> None:
    row = Row(what="update time", plan=plan, measured=measured)
    assert row.error == (pytest.approx(error) if error is not None else None)
    assert row.verdict == verdict


def test_the_table_has_what_was_compared_and_below_it_what_was_not() -> None:
    plan = {"update time": figure(2.0, 1.5, 2.5), "bytes sent": exact(3e9, "bytes", "f")}
    measured = {"update time": 2.6, "tokens/s": 1234.0, "bytes sent": 3e9, "moments": 0.0}
    plan |= {"moments": exact(0.0, "bytes", "none")}  # agreed upon, and no news
    plan |= {"checkpoint": exact(5e8, "bytes", "f")}
    rows = comparison.rows(plan, measured, {"tokens/s": "no clock"}, {"checkpoint": "none yet"})
    assert [row.what for row in rows] == ["update time", "tokens/s", "bytes sent", "checkpoint"]
    assert [row.note for row in rows] == ["", "no clock", "", "none yet"]
    lines = comparison.table("title", rows).splitlines()
    assert lines[0] == "title"
    cells = [" ".join(line.split()) for line in lines]
    assert cells[2] == "update time 2.0 s 1.5 s to 2.5 s 2.6 s +30.0% OUTSIDE"
    assert cells[3] == "bytes sent 3.0 GB exact 3.0 GB +0.0% inside"
    assert lines[4:] == ["  tokens/s 1.2k: no clock", "  checkpoint: none yet"]
    (warning,) = comparison.warnings(rows)
    assert warning.startswith("update time: 2.6 s measured, 2.0 s planned; likely cause: a GPU")


def test_every_quantity_has_a_unit_that_is_shown_and_a_likely_cause() -> None:
    told = [shown(what, 0.5) for what in comparison.UNITS]
    assert "500 ms" in told and "50.0%" in told
    compared = set(comparison.UNITS) - {"peak resident"}
    assert compared <= comparison.CAUSES.keys()


# ---- what a run counts of itself


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_collectives_are_counted_between_begin_and_end_alone(group: None) -> None:
    peers = SimpleNamespace(others=[], world=1)
    engine: Any = SimpleNamespace(peers=peers, strategy=SimpleNamespace(kind="DEEPSPEED"))
    before = dict(vars(ProcessGroup))
    host, counter = dist.new_group(backend="gloo"), instruments.Traffic(engine)
    peers.others.append(host.group_name)
    dist.all_reduce(torch.ones(5))
    counter.begin()
    assert counter.counting
    dist.all_reduce(torch.ones(3, dtype=torch.bfloat16))
    dist.all_gather_into_tensor(torch.ones(7), torch.ones(7))
    dist.reduce_scatter_tensor(torch.ones(2), torch.ones(2))
    dist.all_gather([torch.ones(4)], torch.ones(4))
    dist.broadcast(torch.ones(2, dtype=torch.float64), 0)
    dist.all_reduce(torch.ones(9), group=host)  # the background writer's
    seen = [(call.op, call.bytes, call.ranks) for call in counter.end()]
    assert seen == [
        ("all_reduce", 6, 1),
        ("all_gather", 28, 1),
        ("reduce_scatter", 8, 1),
        ("all_gather", 16, 1),
        ("broadcast", 16, 1),
    ]
    dist.all_reduce(torch.ones(5))
    assert not counter.counting and dict(vars(ProcessGroup)) == before


def test_a_ring_sends_twice_for_a_sum_and_once_for_a_gather() -> None:
    def sent(op: str) -> float:
        return confront.sent_bytes(instruments.Collective(op=op, bytes=1000, ranks=4))

    assert [sent(op) for op in ("all_reduce", "all_gather", "reduce")] == [1500, 750, 750]


# By arm: bytes sent and held on each of two ranks. ZeRO-1 all-reduces 2 bytes a parameter and
# gathers as many (facts.md), DDP all-reduces 4; masters and moments are halved by ZeRO-1.
COUNTED = {
    "zero1_bf16": {"sent": 3.0, "parameters": 2, "master weights": 2, "moments": 4},
    "ddp_bf16": {"sent": 4.0, "parameters": 4, "master weights": None, "moments": 8},
}


@pytest.mark.parametrize("arm", COUNTED)
def test_a_cpu_run_compares_what_a_cpu_can_tell(tiny_run: Path, tmp_path: Path, arm: str) -> None:
    ended = nursery.good(tiny_run, folder=tmp_path / "run", arm=arm)
    start, want = newest(tmp_path / "run"), COUNTED[arm]
    told = start["quantities"]
    assert told["bytes sent"]["measured"] == pytest.approx(want["sent"] * PARAMETERS, rel=2e-3)
    assert told["bytes sent"]["plan"]["value"] == told["bytes sent"]["measured"]  # to the byte
    for kind in ("parameters", "master weights", "moments"):
        held = told[kind]["measured"] / PARAMETERS if kind in told else None
        assert held == (pytest.approx(want[kind], rel=2e-3) if want[kind] else None)
    assert told["checkpoint"]["measured"] == pytest.approx(12 * PARAMETERS)
    assert told["tokens per update"]["measured"] == 512
    compared = set(told) - {"peak resident", "update time", "tokens/s", "data wait"}
    assert {told[what]["verdict"] for what in compared} == {"inside"}
    for what in ("peak resident", "update time", "tokens/s"):  # no number where there is no plan
        assert told[what]["plan"] is None and told[what]["measured"] > 0
        assert told[what]["note"] == "not comparable on a CPU"
    assert "MFU" not in told and "peak allocated" not in told
    assert (start["gpu"], start["world"], start["update"], start["final"]) == ("cpu", 2, 8, True)
    text = ended.text
    assert (
        text.count("plan against measured: micro 2, median of 4 updates") == 1
    )  # after six, two to warm up
    assert text.count("plan against measured at the end: micro 2, median of 6 updates") == 1
    assert text.index("sample   ") < text.index("plan against measured at the end")
    assert text.index("plan against measured at the end") < text.index("run folder   ")
    assert "checkpoint: none is saved yet" in text  # at first
    assert "plan.json        plan against measured, of every start" in text


def test_compressed_gradients_are_counted_once(tiny_run: Path, tmp_path: Path) -> None:
    words = (*nursery.QUIET, "ddp.compress=fp16")
    nursery.good(tiny_run, *words, folder=tmp_path / "run", arm="ddp_bf16")
    sent = newest(tmp_path / "run")["quantities"]["bytes sent"]
    assert sent["measured"] == pytest.approx(2.0 * PARAMETERS, rel=2e-3)
    assert sent["verdict"] == "inside"


@pytest.mark.parametrize("arm", COUNTED)
def test_counting_changes_nothing(tiny_run: Path, tmp_path: Path, arm: str) -> None:
    runs = {}
    for counting in ("yes", "no"):
        folder = tmp_path / counting
        env = {"COUNTING": counting}
        nursery.good(tiny_run, *nursery.QUIET, folder=folder, arm=arm, script=CROWDED, env=env)
        runs[counting] = nursery.told(folder, nursery.EXACT)
    assert runs["yes"] == runs["no"]
    sent = {counting: newest(tmp_path / counting)["quantities"]["bytes sent"] for counting in runs}
    assert sent["yes"]["measured"] > 0 and sent["no"]["measured"] is None
    assert sent["no"]["note"] == "not counted"


def test_a_skipped_window_is_not_what_is_counted(tiny_run: Path, tmp_path: Path) -> None:
    # fp16 from 2^40: windows overflow until the scale has come down, and gather nothing.
    tree = json.loads((nursery.ROOT / "ds_configs/zero1_fp16.json").read_text())
    tree["fp16"] |= {"initial_scale_power": 30, "hysteresis": 1}
    (tmp_path / "high.json").write_text(json.dumps(tree))
    arm = tmp_path / "high.yaml"
    arm.write_text(
        "distributed_type: DEEPSPEED\nuse_cpu: true\ndeepspeed_config:\n"
        f"  deepspeed_config_file: {tmp_path}/high.json\n"
    )
    words = (*nursery.QUIET, "optim.max_skipped_in_a_row=40")
    ended = nursery.good(tiny_run, *words, folder=tmp_path / "run", arm=arm)
    assert nursery.records(tmp_path / "run")[-1]["skipped_updates"] > 2, ended.text[-2000:]
    sent = newest(tmp_path / "run")["quantities"]["bytes sent"]
    assert sent["verdict"] == "inside" and sent["measured"] == sent["plan"]["value"]


def test_a_resumed_run_keeps_what_earlier_starts_compared(tiny_run: Path, tmp_path: Path) -> None:
    folder, words = tmp_path / "run", (*nursery.QUIET, "schedule.updates=60")
    with nursery.start(tiny_run, *words, folder=folder) as ranks:
        ranks.reach(7)
        ranks.signal(0, signal.SIGTERM)
        assert ranks.wait().codes == [75, 75]
    first = json.loads((folder / "plan.json").read_text())["starts"]
    nursery.good(tiny_run, *words, folder=folder, arm="ddp_bf16")
    starts = json.loads((folder / "plan.json").read_text())["starts"]
    assert [s["strategy"] for s in starts] == ["ZeRO-1 bf16", "DDP bf16"]
    assert starts[:1] == first and [s["final"] for s in starts] == [False, True]
    assert (starts[0]["update"], starts[1]["update"]) == (6, 60)
    assert 7 <= starts[1]["from_update"] < 60


# ---- on GPUs, with a made-up plan: no GPU is needed to compare


def job(folder: Path, found: Found, **facts: Any) -> Any:
    """As much of a job as a comparison reads; four ranks of a made-up GPU."""
    run = load_run(nursery.ROOT / "recipes/runs/gpt2_xl.yaml", [f"output_dir={folder}"])
    strategy = read_strategy(None, str(nursery.ROOT / "ds_configs/zero1_fp16.json"), {})
    held = {"parameters": 100, "master weights": 50, "moments": 100, "peak": 70e9, "reserved": 72e9}
    everyone = [held, held | {"peak": 75e9}, held, held]  # the fullest rank counts
    peers = SimpleNamespace(rank=0, hosts=list(found.hosts), gather=lambda _: everyone, world=4)
    said: list[str] = []
    meter = SimpleNamespace(timings=deque([Timing(9e9, 9e9, 1)] * 2), say=said.append, said=said)
    meter.timings += [Timing(1000.0, 100.0, 786_432)] * 3 + [Timing(3000.0, 100.0, 786_432)]
    engine = SimpleNamespace(
        peers=peers,
        strategy=strategy,
        device=SimpleNamespace(type="cuda"),
        module=SimpleNamespace(chunked=True),
        plan=SimpleNamespace(world=4, micro=16, accumulation=12),
    )
    progress = SimpleNamespace(applied=0)
    made = {"run": run, "engine": engine, "plan": engine.plan, "meter": meter, "progress": progress}
    made |= {"length": SimpleNamespace(updates=100), "saving": SimpleNamespace(last_bytes=None)}
    made |= {"flops_per_token": 1e10, "peak_flops": 1e16, "found": found}
    return SimpleNamespace(**(made | facts))


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """No look at an engine that is not there."""
    monkeypatch.setattr(instruments, "forget_peaks", lambda _: None)
    held = dict.fromkeys(("parameters", "master weights", "moments"), 0)
    monkeypatch.setattr(instruments, "held_bytes", lambda _: held)
    monkeypatch.setattr(instruments, "peak_reserved_bytes", lambda _: 0)
    monkeypatch.setattr(confront.update, "peak_memory_bytes", lambda _: 0)
    monkeypatch.setattr(instruments.Traffic, "begin", lambda _: None)


def train(confronting: confront.Confrontation, made: Any, updates: int) -> None:
    """Windows that pass."""
    for _ in range(updates):
        confronting.window_begins(made)
        made.progress.applied += 1
        confronting.window_ended(made, True)


def test_a_gpu_run_is_held_against_all_of_its_plan(
    on_gpu: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plan = {"peak allocated": figure(75e9, 74e9, 78e9), "peak reserved": figure(71e9, 70e9, 73e9)}
    plan |= {"update time": figure(0.5, 0.4, 0.6), "tokens/s": figure(1.5e6, 1.3e6, 2e6)}
    plan |= {"MFU": figure(0.2, 0.15, 0.25), "data wait": figure(0.0, 0.0, 0.05)}
    monkeypatch.setattr(own_plan.OwnPlan, "figures", lambda self, micro: plan)
    found = Found(gpus=("NVIDIA A100-SXM4-80GB",) * 4, memory=85 * 10**9, hosts=("a",) * 4)
    made = job(tmp_path, found)
    confronting = confront.Confrontation(made)
    train(confronting, made, 5)
    assert made.meter.said == []
    with caplog.at_level(logging.WARNING):
        train(confronting, made, 1)
    start = newest(tmp_path)
    told = start["quantities"]
    assert (start["gpu"], start["update"], start["final"]) == ("NVIDIA A100-SXM4-80GB", 6, False)
    assert told["peak allocated"]["error_percent"] == 0.0  # of rank 1
    assert told["update time"]["measured"] == 1.0  # the median; the first two are left out
    assert told["update time"]["error_percent"] == 100.0
    assert told["tokens/s"]["measured"] == 786_432
    assert told["MFU"]["measured"] == pytest.approx(786_432 * 1e10 / (4 * 1e16))
    assert told["data wait"]["measured"] == pytest.approx(400 / 6000)
    outside = {what for what, q in told.items() if q["verdict"] == "OUTSIDE"}
    assert outside == {"update time", "tokens/s", "data wait"}
    table, *warned = made.meter.said
    assert "update time" in table and "median of 4 updates" in table
    assert len(warned) == 3 and any("the readers don't keep up" in line for line in warned)
    train(confronting, made, 3)
    assert len(made.meter.said) == 4  # once, not at every update
    confronting.finish(made)
    assert newest(tmp_path)["final"] and "at the end" in made.meter.said[4]
    assert len(json.loads((tmp_path / "plan.json").read_text())["starts"]) == 1


def test_an_unknown_gpu_is_planned_without_times_and_said_once(
    on_gpu: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = Found(gpus=("Fantasy 9000",) * 4, memory=80 * 10**9, hosts=("a",) * 4)
    made = job(tmp_path, found)
    with caplog.at_level(logging.INFO):
        train(confront.Confrontation(made), made, 6)
    (said,) = [r.getMessage() for r in caplog.records if "no plan" in r.getMessage()]
    assert "Fantasy 9000 is not in the hardware table: add it to" in said
    told = newest(tmp_path)["quantities"]
    assert told["peak allocated"]["plan"]["value"] > 1e9  # memory and traffic need no rates
    assert told["update time"]["plan"] is None
    assert "Fantasy 9000" in told["update time"]["note"]


def test_short_updates_may_wait_for_some_milliseconds(
    on_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = {"data wait": figure(0.0, 0.0, 0.05)}
    monkeypatch.setattr(own_plan.OwnPlan, "figures", lambda self, micro: plan)
    found = Found(gpus=("NVIDIA A100-SXM4-80GB",) * 4, memory=85 * 10**9, hosts=("a",) * 4)
    for wait_ms, verdict in ((4.0, "inside"), (6.0, "OUTSIDE")):
        made = job(tmp_path, found)
        made.meter.timings = deque([Timing(20.0, wait_ms, 100)] * 6)
        train(confront.Confrontation(made), made, 6)
        assert newest(tmp_path)["quantities"]["data wait"]["verdict"] == verdict


def test_two_updates_are_too_few_to_time(
    on_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = {"data wait": figure(0.0, 0.0, 0.05), "update time": figure(1.0, 0.8, 1.2)}
    monkeypatch.setattr(own_plan.OwnPlan, "figures", lambda self, micro: plan)
    found = Found(gpus=("NVIDIA A100-SXM4-80GB",) * 4, memory=85 * 10**9, hosts=("a",) * 4)
    made = job(tmp_path, found, length=SimpleNamespace(updates=2))
    made.meter.timings = deque([Timing(9e3, 8e3, 100)] * 2)
    confronting = confront.Confrontation(made)
    train(confronting, made, 2)
    confronting.finish(made)
    assert len(made.meter.said) == 1 and "too few updates to time" in made.meter.said[0]
    told = newest(tmp_path)["quantities"]
    assert told["update time"]["note"] == "too few updates" and "data wait" in told


def test_a_library_that_tells_nothing_ends_no_run(
    on_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def mute(_: Any) -> dict[str, int]:
        raise AttributeError("no single_partition_of_fp32_groups")

    found = Found(gpus=("NVIDIA A100-SXM4-80GB",) * 4, memory=85 * 10**9, hosts=("a",) * 4)
    made = job(tmp_path, found)
    monkeypatch.setattr(instruments, "held_bytes", mute)
    made.engine.peers.gather = lambda mine: [mine] * 4
    train(confront.Confrontation(made), made, 6)
    assert made.meter.said == [
        "plan and measurement can't be compared: no single_partition_of_fp32_groups"
    ]


def test_a_fault_of_the_plan_is_none_of_the_run(
    on_gpu: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(self: Any, micro: int) -> dict[str, Figure]:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(own_plan.OwnPlan, "figures", broken)
    (tmp_path / "plan.json").write_text("{half a file")
    found = Found(gpus=("NVIDIA A100-SXM4-80GB",) * 4, memory=85 * 10**9, hosts=("a",) * 4)
    made = job(tmp_path, found)
    with caplog.at_level(logging.INFO):
        train(confront.Confrontation(made), made, 6)
    assert "no plan of this run: division by zero" in caplog.text
    assert "it is begun anew" in caplog.text
    told = newest(tmp_path)["quantities"]
    assert (
        told["update time"]["measured"] == 1.0 and told["update time"]["note"] == "division by zero"
    )
