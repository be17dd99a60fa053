"""`batch.micro: auto`: chosen by the plan, tried without a trace, lowered on all ranks alike."""

from __future__ import annotations

import json
import signal
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nursery
import pytest
import torch
from torch import nn

from recipes import auto_micro, objective
from recipes.config import Batch, Evaluate
from recipes.engine import room
from recipes.engine.strategy import Strategy, filled, read_strategy
from recipes.own_plan import Found, own_plan
from recipes.planner import micro as chosen
from recipes.runfile import load_run

CROWDED = "tests/drivers/crowded.py"
AUTO = ("batch.micro=auto", *nursery.QUIET)
# Logits of 8 x 32 x 131,072 take 134 MB in fp32, of which the loss needs several; ZeRO-1's bucket
# takes 200 MB beside. Dropout stays on.
WIDE = ("model.config.vocab_size=131072", "schedule.updates=3")


def facts(folder: Path) -> dict[str, Any]:
    """run.json."""
    return dict(json.loads((folder / "run.json").read_text()))


def batch(micro: Any = "auto", sequences: int = 24) -> Batch:
    """A batch section."""
    return Batch.model_validate({"seq_len": 8, "global_sequences": sequences, "micro": micro})


# ---- which


def test_micro_batches_divide_a_ranks_share_of_window_and_evaluation() -> None:
    assert chosen.legal_micros(batch(), 2) == [1, 2, 3, 4, 6, 12]
    held_out = Evaluate(every_updates=1, sequences=16)  # 8 a rank
    assert chosen.legal_micros(batch(), 2, held_out) == [1, 2, 4]
    assert chosen.legal_micros(batch(), 24) == [1]
    with pytest.raises(
        ValueError, match="sequences=17 can't be shared by 2 ranks equally; .* 16 o"
    ):
        chosen.legal_micros(batch(), 2, Evaluate(every_updates=1, sequences=17))
    with pytest.raises(ValueError, match="nearest: 4$"):
        chosen.legal_micros(batch(), 4, Evaluate(every_updates=1, sequences=3))
    assert len(chosen.legal_micros(batch(sequences=10**12), 1)) == 169  # (12 + 1) * (12 + 1)


def test_the_next_lower_one_and_the_largest_below_a_limit() -> None:
    legal = [1, 2, 4, 6, 12]
    assert [chosen.next_lower(legal, n) for n in (12, 6, 5, 1)] == [6, 4, 4, None]
    assert [chosen.largest_of(legal, n) for n in (100, 11, 6, 5, 0)] == [12, 6, 6, 4, 1]


@pytest.mark.parametrize(
    ("seconds", "timed", "expected"),
    [
        ({2: 3.0, 4: 2.5, 6: 2.0}, True, 6),
        ({2: 3.0, 4: 1.9, 6: 2.0}, True, 4),  # a smaller one that hides more
        ({2: 3.0, 4: 1.99, 6: 2.0}, True, 6),  # alike within one per cent: the larger
        ({2: 3.0, 4: 1.0, 6: 2.0}, False, 6),  # nobody knows the times
    ],
)
def test_of_those_that_fit_the_fastest(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float], timed: bool, expected: int
) -> None:
    from recipes.planner.workload import Candidate
    from recipes.planner.workload import Strategy as Planned

    def predict(work: Any, candidate: Candidate, cluster: Any, *, memory: Any) -> Any:
        return SimpleNamespace(update=SimpleNamespace(value=seconds[candidate.micro]))

    monkeypatch.setattr(chosen, "largest_micro", lambda *_: 11)
    monkeypatch.setattr(chosen, "plan_memory", lambda _, c, __: SimpleNamespace(fits=c.micro < 12))
    monkeypatch.setattr(chosen, "predict", predict)
    candidate = Candidate(strategy=Planned(name="ZeRO-1", family="deepspeed"), micro=1)
    args: Any = (None, candidate, None, [1, 2, 4, 6, 12])
    assert chosen.planned_micro(*args, timed=timed) == (expected, 11)


def test_auto_allows_every_world_that_a_micro_batch_of_one_allows() -> None:
    assert objective.legal_worlds(batch("auto"), lanes=24, workers=1) == [1, 2, 3, 4, 6, 8, 12, 24]
    assert objective.legal_worlds(batch(4), lanes=24, workers=1) == [1, 2, 3, 6]
    plan = objective.plan_batch(batch("auto"), 2, [1, 2], micro=6)
    assert (plan.micro, plan.accumulation, plan.global_sequences) == (6, 2, 24)


@pytest.mark.parametrize(
    ("value", "said"),
    [("atuo", "batch.micro='atuo': expected a valid integer, or auto"), ("0", "greater than 0")],
)
def test_a_run_file_says_a_number_or_auto(tiny_run: Path, value: str, said: str) -> None:
    assert load_run(tiny_run, ["batch.micro=auto"]).batch.micro == "auto"
    with pytest.raises(ValueError, match=said):
        load_run(tiny_run, [f"batch.micro={value}"])


def test_a_json_may_not_state_what_auto_settles(tiny_run: Path) -> None:
    tree = {"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": 1}
    strategy = Strategy(
        kind="DEEPSPEED", precision="fp16", cpu=None, origin="my.json", deepspeed=tree
    )
    run = load_run(tiny_run, ["batch.micro=auto"])
    plan = objective.plan_batch(run.batch, 2, [2])
    with pytest.raises(ValueError, match="my.json: batch.micro=auto settles it"):
        filled(strategy, run, plan)


# ---- on GPUs, by the plan's arithmetic alone


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, Found]:
    """An engine of four A100s, as far as a choice reads it; the run file of the worked example."""
    run = load_run(nursery.ROOT / "recipes/runs/gpt2_xl.yaml", ["batch.micro=auto"])
    strategy = read_strategy(None, str(nursery.ROOT / "ds_configs/zero1_fp16.json"), {})
    plan = objective.plan_batch(run.batch, 4, [4], micro=32)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 70 * 10**9)
    engine = SimpleNamespace(
        strategy=strategy,
        plan=plan,
        module=SimpleNamespace(chunked=True),
        device=SimpleNamespace(type="cuda"),
    )
    found = Found(gpus=("NVIDIA A100-SXM4-80GB",) * 4, memory=85 * 10**9, hosts=("a",) * 4)
    return engine, run, found


def test_on_a_gpu_the_plan_chooses_and_a_recorded_choice_stands(
    gpus: tuple[Any, Any, Found],
) -> None:
    engine, run, found = gpus
    legal = chosen.legal_micros(run.batch, 4, run.evaluate)
    micro, why = auto_micro._first_choice(engine, run, {}, found, legal, None)
    most = int(why.split()[-1])
    assert micro in legal and 1 < micro <= most, why
    assert why == f"the plan's; the largest that fits is {most}"
    small = replace(found, memory=40 * 10**9)  # what the driver shows, not the table's entry
    assert auto_micro._first_choice(engine, run, {}, small, legal, None)[0] < micro
    recorded = {"world": 4, "strategy": "ZeRO-1 fp16", "device": "cuda", "micro": 2}
    recorded["gpu"] = found.gpus[0]
    recorded["config"] = {"model": run.model.model_dump(mode="json")}
    again = auto_micro._first_choice(engine, run, recorded, found, legal, None)
    assert again == (2, "as at the last start")
    for other in (
        {"world": 8},
        {"strategy": "DDP fp16"},
        {"device": "cpu"},
        {"micro": 5},
        {"gpu": "H200"},
    ):
        assert (
            auto_micro._first_choice(engine, run, recorded | other, found, legal, None)[0] == micro
        )


def test_a_window_without_room_is_remembered(gpus: tuple[Any, Any, Found], tmp_path: Path) -> None:
    """The trial passed, training did not: the next start begins below."""
    engine, run, found = gpus
    run = run.model_copy(update={"output_dir": str(tmp_path)})
    legal = chosen.legal_micros(run.batch, 4, run.evaluate)
    assert auto_micro._no_room(engine, run, found) is None
    assert "batch.micro=32, accumulation 6" in auto_micro.ran_out(engine, run, found)
    assert auto_micro._no_room(engine, run, found) == engine.plan.micro == 32
    micro, why = auto_micro._first_choice(engine, run, {}, found, legal, 32)
    assert (micro, why) == (24, "below 32, for which a window had no room")
    # The next start found no room for that either and trained with 8: so does the one after it.
    settled = auto_micro._here(engine, found) | {"micro": 8}
    settled["config"] = run.model_dump(mode="json")
    assert auto_micro._first_choice(engine, run, settled, found, legal, 32)[0] == 8
    assert auto_micro._first_choice(engine, run, settled | {"micro": 32}, found, legal, 32)[0] == 24
    elsewhere = replace(found, gpus=("NVIDIA H200",) * 4)
    assert auto_micro._no_room(engine, run, elsewhere) is None
    (tmp_path / "no_room.json").write_text("{half")
    assert auto_micro._no_room(engine, run, found) is None


def test_the_advice_on_a_gpu_is_the_plans(gpus: tuple[Any, Any, Found]) -> None:
    engine, run, found = gpus
    small = replace(found, memory=40 * 10**9)
    text = auto_micro.advice(engine, run, small)
    assert "batch.micro=32, accumulation 6; 70.0 GB of 40.0 GB were allocated at the peak" in text
    legal = chosen.legal_micros(run.batch, 4, run.evaluate)
    most = own_plan(run, engine.strategy, small, chunked=True).micro(legal)[1]
    fits = chosen.largest_of(legal, most)
    assert f"by the plan batch.micro={fits} fits: the accumulation becomes {192 // fits}" in text
    engine.plan = objective.plan_batch(run.batch, 4, [4], micro=2)  # which should have fitted
    text = auto_micro.advice(engine, run, found)
    assert "does another process use this GPU (nvidia-smi)?" in text
    assert "start it again: auto then takes 1; the accumulation becomes 192" in text
    fixed = load_run(nursery.ROOT / "recipes/runs/gpt2_xl.yaml", ["batch.micro=2"])
    text = auto_micro.advice(engine, fixed, found)
    assert "try batch.micro=1: the accumulation becomes 192" in text
    engine.plan = objective.plan_batch(run.batch, 4, [4], micro=1)
    text = auto_micro.advice(engine, run, found)
    assert "a micro-batch of 1 is the least" in text
    assert "model.gradient_checkpointing=true saves" in text and "stage=2" not in text


# ---- the trial itself, below the wrappers


class Noisy(nn.Module):
    """A module with all that a forward can move: random state, running buffers, gradients."""

    def __init__(self, fails: Exception | None = None) -> None:
        super().__init__()
        self.matrix, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.fails, self.forwards = fails, 0

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, None]:
        """A summed loss; the second forward fails where that is asked for."""
        self.forwards += 1
        hidden = nn.functional.dropout(self.norm(self.matrix(input_ids)), 0.5)
        if self.fails is not None and self.forwards == 2:
            raise self.fails
        return hidden.sum(), None


def try_noisy(module: Noisy, accumulation: int = 4) -> str:
    """Try a batch on an engine that is nothing but the module."""
    engine: Any = SimpleNamespace(
        module=module,
        strategy=SimpleNamespace(kind="DDP", stage=None),
        plan=SimpleNamespace(accumulation=accumulation),
        accelerator=SimpleNamespace(autocast=nullcontext),
        device=torch.device("cpu"),
    )
    return room.try_out(engine, {"input_ids": torch.randn(8, 4)})


@pytest.mark.parametrize(
    ("fails", "said"),
    [
        (None, ""),
        (torch.OutOfMemoryError("CUDA out of memory. Tried\nmore"), "CUDA out of memory. Tried"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_a_trial_moves_nothing_whether_it_fits_or_not(fails: Exception | None, said: str) -> None:
    module = Noisy(fails)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    batch_of = torch.get_rng_state()
    torch.randn(8, 4)  # what try_noisy draws for its batch
    random = torch.get_rng_state()
    torch.set_rng_state(batch_of)
    assert try_noisy(module) == said
    assert torch.equal(torch.get_rng_state(), random)
    after = module.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert module.forwards == 2  # the second one has the first one's gradients beside it


def test_a_window_of_one_micro_batch_is_tried_with_one_and_another_error_is_an_error() -> None:
    module = Noisy()
    assert try_noisy(module, accumulation=1) == "" and module.forwards == 1
    with pytest.raises(RuntimeError, match="shapes"):
        try_noisy(Noisy(RuntimeError("shapes do not fit")))


# ---- tried and taken, on real ranks


@pytest.mark.parametrize("arm", ["zero1_bf16", "ddp_bf16"])
def test_the_trial_leaves_no_trace(tiny_run: Path, tmp_path: Path, arm: str) -> None:
    auto, stated = tmp_path / "auto", tmp_path / "stated"
    ended = nursery.good(tiny_run, *AUTO, folder=auto, arm=arm)
    assert "2 ranks x 1 accumulated x 8 micro (auto: the largest up to 8, on a CPU)" in ended.text
    assert (facts(auto)["micro"], facts(auto)["config"]["batch"]["micro"]) == (8, "auto")
    nursery.good(tiny_run, "batch.micro=8", *nursery.QUIET, folder=stated, arm=arm)
    assert nursery.told(auto, nursery.EXACT) == nursery.told(stated, nursery.EXACT)
    ours, theirs = nursery.newest(auto), nursery.newest(stated)
    assert nursery.same(nursery.arrays(ours), nursery.arrays(theirs))
    assert nursery.random_states(ours) == nursery.random_states(theirs)
    assert nursery.state(ours)["scalars"] == nursery.state(theirs)["scalars"]


@pytest.mark.parametrize("arm", ["zero1_bf16", "ddp_bf16"])
def test_a_rank_without_room_lowers_it_on_all(tiny_run: Path, tmp_path: Path, arm: str) -> None:
    lowered, stated = tmp_path / "lowered", tmp_path / "stated"
    little = {"CROWDED": "1", "ROOM_MB": "320"}  # really limited, on one rank alone
    ended = nursery.good(
        tiny_run, *AUTO, *WIDE, folder=lowered, arm=arm, script=CROWDED, env=little
    )
    micro = facts(lowered)["micro"]
    assert micro < 8 and facts(lowered)["accumulation"] == 8 // micro, ended.text[-3000:]
    assert "rank 1: no room for a micro-batch of 8" in ended.text
    assert "DefaultCPUAllocator" in ended.text
    assert "micro 8 -> 4, accumulation 1 -> 2; the global batch stays 16" in ended.text
    assert f"x {micro} micro (auto: lowered from {2 * micro}" in ended.text
    # What follows is the run that stated it: no half of a failed trial is in it.
    words = (f"batch.micro={micro}", *nursery.QUIET, *WIDE)
    nursery.good(tiny_run, *words, folder=stated, arm=arm)
    assert nursery.told(lowered, nursery.EXACT) == nursery.told(stated, nursery.EXACT)


def test_a_gpus_word_is_understood_and_the_run_goes_on_with_it(
    tiny_run: Path, tmp_path: Path
) -> None:
    folder, whole = tmp_path / "run", tmp_path / "whole"
    little = {"CROWDED": "0", "GPU_ROOM": "2"}
    words = (*AUTO, "schedule.updates=60")
    with nursery.start(tiny_run, *words, folder=folder, script=CROWDED, env=little) as ranks:
        ranks.reach(3)
        ranks.signal(1, signal.SIGTERM)
        ended = ranks.wait()
    assert ended.codes == [75, 75], ended.text[-3000:]
    assert "rank 0: no room for a micro-batch of 8: CUDA out of memory. Tried to" in ended.text
    assert "micro 4 -> 2" in ended.text and "nobody reads" not in ended.text
    # With all the room in the world the settled value stands: a start does not undo another's.
    ended = nursery.good(tiny_run, *words, folder=folder)
    assert "4 accumulated x 2 micro (auto: as at the last start)" in ended.text
    assert nursery.resumed(ended) >= 3
    nursery.good(tiny_run, "batch.micro=2", *words[1:], folder=whole)
    assert nursery.told(folder, nursery.EXACT) == nursery.told(whole, nursery.EXACT)


def test_another_number_of_ranks_settles_it_anew(tiny_run: Path, tmp_path: Path) -> None:
    folder, words = tmp_path / "run", (*AUTO, "schedule.updates=60")
    how: dict[str, Any] = {"script": CROWDED, "env": {"GPU_ROOM": "2"}}
    with nursery.start(tiny_run, *words, folder=folder, **how) as ranks:
        ranks.reach(2)
        ranks.signal(0, signal.SIGTERM)
        assert ranks.wait().codes == [75, 75]
    assert facts(folder)["micro"] == 2
    nursery.good(tiny_run, *words, folder=folder, ranks=1)
    assert (facts(folder)["micro"], facts(folder)["world"]) == (8, 1)
    assert nursery.steps(folder) == list(range(1, 61))


# ---- no room at all


def test_where_not_even_one_sequence_fits_all_ranks_end_with_the_remedies(
    tiny_run: Path, tmp_path: Path
) -> None:
    env = {"CROWDED": "1", "GPU_ROOM": "0"}
    ended = nursery.run(tiny_run, *AUTO, folder=tmp_path / "run", script=CROWDED, env=env)
    assert ended.codes == [2, 2], ended.text[-3000:]
    assert "rank 1: no room for a micro-batch of 1: CUDA out of memory" in ended.text
    assert "a micro-batch of 1 is the least; what else saves memory:" in ended.text
    assert "Traceback" not in ended.text


def test_memory_that_runs_out_later_ends_in_one_message(tiny_run: Path, tmp_path: Path) -> None:
    env = {"CROWDED": "1", "FULL_WINDOW": "3"}
    folder = tmp_path / "run"
    ended = nursery.run(tiny_run, *nursery.QUIET, folder=folder, script=CROWDED, env=env)
    assert ended.codes[1] == 2, ended.text[-3000:]
    assert "rank 1: CUDA out of memory. Tried to allocate 1.50 GiB" in ended.text
    assert "this was with batch.micro=2, accumulation 4" in ended.text
    assert "try batch.micro=1: the accumulation becomes 8, the global batch and the" in ended.text
    assert "nobody reads" not in ended.text and "Traceback" not in ended.text
    told = json.loads((folder / "status" / "rank-1.json").read_text())
    assert told["exit_code"] == 2 and "try batch.micro=1" in told["reason"]
    assert not told["consequence"]
