"""A run that is stopped again and again is the run that was never stopped."""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass
from pathlib import Path

import nursery
import pytest
import torch
from launching import records, run
from nursery import EXACT, ORDER

UPDATES = 90
LENGTH = [f"schedule.updates={UPDATES}", "checkpoint.every_updates=5", "evaluate.every_updates=20"]
# Dropout draws by rank: without it the number of ranks changes only the order of the sums.
STILL = ["model.config.resid_pdrop=0.0", "model.config.embd_pdrop=0.0"]
# In fp32 on another number of ranks, where only the order of the sums differs.
LOSS, WEIGHTS = 1e-4, 1e-3


@dataclass(frozen=True)
class Leg:
    """One start of a chain and how it is stopped."""

    ranks: int = 2
    arm: str | Path = "zero1_bf16"
    how: str = "end"
    updates: int = 0  # that it trains before it is stopped


def walk(run_file: Path, folder: Path, words: list[str], legs: list[Leg]) -> list[nursery.Ended]:
    """Start, stop and start again; checks that each start goes on where it must."""
    ended: list[nursery.Ended] = []
    due, rng = -1, random.Random(7)
    for leg in legs:
        with nursery.start(run_file, *words, folder=folder, ranks=leg.ranks, arm=leg.arm) as ranks:
            at = max(due, 0) + leg.updates
            if leg.how != "end":
                ranks.reach(at)
            if leg.how == "STOP":
                (folder / "STOP").touch()
            elif leg.how != "end":
                ranks.signal(rng.randrange(leg.ranks), getattr(signal, leg.how))
            ended.append(ranks.wait())
        assert nursery.resumed(ended[-1]) == due, ended[-1].text[-3000:]
        if leg.how == "end":
            assert not any(ended[-1].codes), ended[-1].text[-3000:]
        elif leg.how == "SIGKILL":
            assert all(ended[-1].codes), ended[-1].codes
        else:
            assert set(ended[-1].codes) == {75}, ended[-1].text[-3000:]
            assert int(nursery.newest(folder).name[5:]) == nursery.steps(folder)[-1]
        assert not (folder / "STOP").exists()
        due = (
            int(nursery.newest(folder).name[5:]) if (folder / "checkpoints/LATEST").exists() else -1
        )
    return ended


@pytest.fixture(scope="module")
def whole(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uninterrupted run, under torchrun: this holds the nursery to a launcher's ranks too."""
    folder = tmp_path_factory.mktemp("whole")
    words = ["recipes/pretrain.py", str(tiny_run), f"output_dir={folder / 'run'}", *LENGTH]
    ended = run("torchrun", 2, [*words, *nursery.arm_words("zero1_bf16")], folder / "log")
    assert ended.code == 0, ended.text[-4000:]
    return folder / "run"


def test_stops_of_every_kind_leave_no_bit_changed(
    whole: Path, tiny_run: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    ways = ["STOP", "SIGTERM", "SIGKILL", "SIGTERM", "SIGKILL"]
    rng = random.Random(4)
    rng.shuffle(ways)
    legs = [Leg(how=how, updates=rng.randint(1, 8)) for how in ways]
    walk(tiny_run, folder, LENGTH, [*legs, Leg()])
    assert nursery.told(folder, EXACT) == nursery.told(whole, EXACT)
    assert records(folder, "evaluations") == records(whole, "evaluations")
    mine, reference = nursery.newest(folder), nursery.newest(whole)
    assert nursery.same(nursery.arrays(mine), nursery.arrays(reference))
    assert nursery.random_states(mine) == nursery.random_states(reference)
    assert nursery.state(mine)["data"] == nursery.state(reference)["data"]
    assert nursery.state(mine)["progress"] == nursery.state(reference)["progress"]


def test_other_ranks_and_strategies_on_the_way_give_the_same_curve(
    tiny_run: Path, tmp_path: Path
) -> None:
    arms = nursery.fp32_arms(tmp_path)
    folder, still, words = tmp_path / "run", tmp_path / "still", [*LENGTH, *STILL]
    nursery.good(tiny_run, *words, folder=still, arm=arms["ZeRO-1 fp32"])
    rng = random.Random(0)
    worlds, names = [4, 1, 2, 4, 1], [*arms, *arms, "ZeRO-1 fp32"]
    ways = ["STOP", "SIGTERM", "SIGKILL", "SIGTERM"]
    rng.shuffle(worlds)
    rng.shuffle(ways)
    legs = [
        Leg(ranks=ranks, arm=arms[name], how=how, updates=rng.randint(4, 12))
        for ranks, name, how in zip(worlds, names, [*ways, "end"], strict=True)
    ]
    stale = folder / "status" / "rank-9.json"  # as of a start on ten ranks
    stale.parent.mkdir(parents=True)
    stale.touch()
    ended = walk(tiny_run, folder, words, legs)
    for index, said in enumerate(ended[1:]):
        assert f"ranks: {worlds[index]} -> {worlds[index + 1]}" in said.text
        assert f"strategy: {names[index]} -> {names[index + 1]}" in said.text
    assert nursery.told(folder, ORDER) == nursery.told(still, ORDER)
    assert not stale.exists()  # no pid is left there of a rank that is no more
    losses = [[record["loss"] for record in records(path)] for path in (folder, still)]
    assert losses[0] == pytest.approx(losses[1], abs=LOSS)
    mine, reference = (nursery.arrays(nursery.newest(path)) for path in (folder, still))
    assert mine.keys() == reference.keys()
    apart = {name: distance(mine[name], reference[name]) for name in mine if "weight/" in name}
    assert max(apart.values()) < WEIGHTS, apart


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """How far two arrays are apart, as a share of the second one's norm."""
    return float((a - b).norm() / b.norm().clamp_min(1e-12))
