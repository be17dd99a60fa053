"""Every way to ask a run for a checkpoint, whatever it is doing; and the saves by the clock."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import nursery
import pytest
from launching import records

WORDS = ["schedule.updates=2000", "checkpoint.every_updates=1000", *nursery.QUIET]


def check_stopped(ended: nursery.Ended, folder: Path) -> None:
    """All ranks ended alike, with a whole checkpoint of the last update that was recorded."""
    assert set(ended.codes) == {75}, f"{ended.codes}\n{ended.text[-3000:]}"
    newest = nursery.newest(folder)
    assert not nursery.faults(newest)
    assert int(newest.name[5:]) == nursery.steps(folder)[-1] < 2000
    assert records(folder, "saves")[-1]["reason"] == "stop"
    assert not list((folder / "checkpoints").glob(".step-*")), "leftovers"
    assert "start it again to go on" in ended.text


@pytest.mark.parametrize(
    ("number", "times", "rank"),
    [
        (signal.SIGTERM, 1, 1),
        (signal.SIGTERM, 2, 0),
        (signal.SIGUSR1, 1, 1),
        (signal.SIGINT, 1, 0),
    ],
)
def test_a_signal_to_one_rank_saves_on_all(
    tiny_run: Path, tmp_path: Path, number: int, times: int, rank: int
) -> None:
    folder = tmp_path / "run"
    with nursery.start(tiny_run, *WORDS, folder=folder) as ranks:
        ranks.reach(3)
        for _ in range(times):
            ranks.signal(rank, number)
        check_stopped(ranks.wait(), folder)


@pytest.mark.parametrize("write", ["background", "blocking"])
@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_during_a_save(tiny_run: Path, tmp_path: Path, write: str, rank: int) -> None:
    folder = tmp_path / "run"
    how: dict[str, Any] = {"script": nursery.PLANTED, "env": {"SLOW_FSYNC_MS": "200"}}
    words = [*WORDS, "checkpoint.every_updates=4", f"checkpoint.write={write}"]
    with nursery.start(tiny_run, *words, folder=folder, **how) as ranks:
        partial = folder / "checkpoints" / ".step-00000004.partial"
        ranks.until(partial.exists, "the save of update 4")
        ranks.signal(rank, signal.SIGTERM)
        ranks.signal(rank, signal.SIGTERM)
        check_stopped(ranks.wait(), folder)
    assert records(folder, "saves")[0]["step"] == 4
    assert {record["background"] for record in records(folder, "saves")} == {write == "background"}
    stopped = nursery.steps(folder)[-1]
    # In the background, training went on meanwhile; in its way, it did not.
    assert stopped in ((4, 5) if write == "blocking" else range(5, 100))
    if write == "background":
        stalls = [record["stall_ms"] for record in records(folder, "saves")]
        assert stalls[0] < 200, "training waited for the disk"


def test_sigterm_during_evaluation(tiny_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = [*WORDS[:2], "sample=null", "evaluate.every_updates=3"]
    how: dict[str, Any] = {"script": nursery.PLANTED, "env": {"SLOW_EVALUATION_S": "1"}}
    with nursery.start(tiny_run, *words, folder=folder, **how) as ranks:
        ranks.until((folder / "logs" / "evaluating").exists, "an evaluation")
        ranks.signal(1, signal.SIGTERM)
        check_stopped(ranks.wait(), folder)
    assert [e["step"] for e in records(folder, "evaluations")] == [0, 3]
    assert nursery.state(nursery.newest(folder))["held_out"] == records(folder, "evaluations")[-1]


def test_touched_files_save_and_stop(tiny_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with nursery.start(tiny_run, *WORDS, folder=folder) as ranks:
        ranks.reach(1)
        (folder / "SAVE").touch()
        ranks.until(lambda: records(folder, "saves"), "a checkpoint on request")
        assert not (folder / "SAVE").exists()
        [asked] = records(folder, "saves")
        ranks.reach(asked["step"] + 6)
        (folder / "STOP").touch()
        check_stopped(ranks.wait(), folder)
    assert not (folder / "STOP").exists()
    assert [record["reason"] for record in records(folder, "saves")] == ["asked", "stop"]
    assert asked.keys() >= {"bytes", "stall_ms", "write_s", "background", "time"}
    # The files of before are no wish of now: the same command goes on.
    for name in ("SAVE", "STOP"):
        (folder / name).touch()
    with nursery.start(tiny_run, *WORDS, folder=folder) as ranks:
        at = int(nursery.newest(folder).name[5:])
        ranks.reach(at + 6)
        assert not (folder / "STOP").exists()


def test_checkpoints_by_minutes(tiny_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    policy = "checkpoint={every_minutes: 0.01, keep: 3}"
    words = [word for word in WORDS if not word.startswith("checkpoint.")] + [policy]
    with nursery.start(tiny_run, *words, folder=folder) as ranks:
        ranks.until(lambda: len(records(folder, "saves")) >= 5, "five checkpoints")
        (folder / "STOP").touch()
        check_stopped(ranks.wait(), folder)
    saves = records(folder, "saves")
    times = [record["time"] for record in saves[:-1]]
    assert all(0.3 < b - a < 3 for a, b in zip(times, times[1:], strict=False)), times
    kept = sorted(path.name for path in (folder / "checkpoints").glob("step-*"))
    assert kept == [record["name"] for record in saves[-3:]]


def test_milestones_stay(tiny_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ["schedule.updates=17", "checkpoint.every_updates=2", *nursery.QUIET]
    nursery.good(tiny_run, *words, "checkpoint.milestone_every=5", folder=folder, ranks=1)
    kept = sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step-*"))
    assert kept == [5, 10, 15, 16, 17]
    assert not [
        fault for step in kept for fault in nursery.faults(folder / f"checkpoints/step-{step:08d}")
    ]
