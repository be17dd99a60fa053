"""When a checkpoint is due, and what becomes of a failed one; no engine is needed for that."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recipes import saving
from recipes.checkpoint.disks import Disks
from recipes.checkpoint.group import Alone
from recipes.checkpoint.pieces import ArrayReader
from recipes.config import Run
from recipes.engine import state, update
from recipes.engine.update import Agreement
from recipes.outcome import StorageError
from recipes.progress import Progress
from recipes.saving import Saving

RUN: dict[str, Any] = {
    "name": "x",
    "model": {"config": {"model_type": "gpt2"}},
    "data": {"kind": "python_stdlib", "tokenizer": {"train_vocab_size": 300}},
    "batch": {"seq_len": 32, "global_sequences": 16, "micro": 2},
    "optim": {"lr": 1e-3},
    "schedule": {"updates": 10},
}


class Peer(Alone):
    """The one rank."""

    hosts = ("here",)

    def another(self) -> Peer:
        return self

    def alike(self, act: Any) -> Any:
        return act()

    def enter(self, what: str, limit_s: float) -> None:
        pass


class Meter:
    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []

    def flush(self) -> None:
        pass

    def saved(self, values: dict[str, Any]) -> None:
        self.told.append(values)


@pytest.fixture(autouse=True)
def _no_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "StopWish", lambda: SimpleNamespace(requested=False))
    monkeypatch.setattr(state, "owned", lambda engine: [("weight/w", 0, torch.ones(4))])
    monkeypatch.setattr(
        update, "rng_state", lambda engine: {"cpu": torch.zeros(2, dtype=torch.uint8)}
    )
    monkeypatch.setattr(saving, "_contents", lambda job, cursors: {})
    monkeypatch.setattr(saving, "_common", lambda job, contents: {"state.json": b"{}"})


def made(folder: Path, **policy: Any) -> tuple[Saving, Any]:
    """A run's saving, and as much of a job as it asks."""
    policy = {"every_updates": 5} | policy
    run = Run.model_validate(RUN | {"checkpoint": policy, "output_dir": str(folder)})
    engine = SimpleNamespace(
        peers=Peer(), plan=SimpleNamespace(world=1), strategy=SimpleNamespace(title="ZeRO-1 bf16")
    )
    one = Saving(engine, run, Disks.one(), Progress())  # type: ignore[arg-type]
    feed = SimpleNamespace(cursors=dict)
    job = SimpleNamespace(engine=engine, run=run, progress=Progress(), meter=Meter(), feed=feed)
    return one, job


def agreed(**said: bool) -> Agreement:
    unsaid = dict.fromkeys(("stop", "save", "unreadable", "written"), False)
    return Agreement(tokens=1, samples=1, digest=0, **(unsaid | said))


def after(step: int, windows: int | None = None) -> Progress:
    return Progress(applied=step, windows=step if windows is None else windows)


def test_what_is_due_after_a_window(tmp_path: Path) -> None:
    one, _ = made(tmp_path, milestone_every=8)

    def due(step: int, *, applied: bool = True, last: bool = False, **said: bool) -> str | None:
        now = after(step, step + 1)
        return one.due(now, applied=applied, agreed=agreed(**said), last=last)

    assert [due(step) for step in range(1, 9)] == [None] * 4 + ["updates", None, None, "milestone"]
    assert due(40) == "milestone"  # both
    assert due(5, applied=False) is None  # a skipped window is no update
    assert due(7, save=True) == "asked" and due(7, applied=False, save=True) == "asked"
    assert due(5, stop=True) == "stop" and due(5, stop=True, last=True) == "end"


def test_nothing_is_due_where_nothing_moved(tmp_path: Path) -> None:
    one, _ = made(tmp_path)
    assert one.due(Progress(), applied=False, agreed=agreed(stop=True), last=False) is None
    skipped = after(0, windows=1)  # the data went on, which a resume must know
    assert one.due(skipped, applied=False, agreed=agreed(stop=True), last=False) == "stop"


def test_minutes_and_touched_files_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = made(tmp_path, every_minutes=10.0)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 1.0)
    assert one.flags(unreadable=False) == update.Flags()
    (tmp_path / "SAVE").touch()
    assert not one.flags(unreadable=False).save  # not looked for in every window
    monkeypatch.setattr(time, "monotonic", lambda: now + 2.0)
    assert one.flags(unreadable=False) == update.Flags(save=True)
    (tmp_path / "SAVE").unlink()
    (tmp_path / "STOP").touch()
    monkeypatch.setattr(time, "monotonic", lambda: now + 3.0)
    assert one.flags(unreadable=True) == update.Flags(stop=True, unreadable=True)
    (tmp_path / "STOP").unlink()
    monkeypatch.setattr(time, "monotonic", lambda: now + 599.0)
    assert not one.flags(unreadable=False).save
    monkeypatch.setattr(time, "monotonic", lambda: now + 600.1)
    assert one.flags(unreadable=False) == update.Flags(save=True)
    due = one.due(after(3), applied=True, agreed=agreed(save=True), last=False)
    assert due == "minutes"


def test_a_file_that_was_touched_before_the_start_is_removed_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "STOP").touch()
    made(tmp_path)
    assert not (tmp_path / "STOP").exists()
    assert "STOP was there before the start; removed" in caplog.text


@pytest.mark.parametrize("write", ["blocking", "background"])
def test_a_save_is_told_once_and_its_wish_is_taken_back(tmp_path: Path, write: str) -> None:
    one, job = made(tmp_path, write=write)
    job.progress = after(3)
    (tmp_path / "SAVE").touch()
    one.save(job, "asked")
    one.finish(job)
    one.finish(job)
    [told] = job.meter.told
    assert (told["step"], told["name"], told["reason"]) == (3, "step-00000003", "asked")
    assert told["bytes"] == 16 and told["background"] == (write == "background")
    assert told["stall_ms"] > 0 and told["write_s"] > 0
    assert not (tmp_path / "SAVE").exists()
    assert not one.unsaved(after(3)) and one.unsaved(after(3, windows=4))


def test_a_touched_file_that_cannot_be_removed_is_told_once_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one, job = made(tmp_path)
    (tmp_path / "SAVE").mkdir()
    now = time.monotonic()
    for step in (3, 4):
        job.progress = after(step)
        now += 10.0
        monkeypatch.setattr(time, "monotonic", lambda at=now: at)
        assert one.flags(unreadable=False).save == (step == 3)
        one.save(job, "asked")
        one.finish(job)
    assert caplog.text.count("SAVE can't be removed") == 1


def test_where_a_touched_file_cannot_be_looked_for_nobody_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = made(tmp_path)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 1.0)
    lost = Path("x" * 300)  # an error of the system, and not only "no such file"
    monkeypatch.setattr(one, "_run", SimpleNamespace(folder=lost, checkpoint=one._run.checkpoint))
    assert one.flags(unreadable=False) == update.Flags()


def broken(*_: Any, **__: Any) -> Any:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("write", ["blocking", "background"])
def test_a_failed_save_stops_the_run_or_is_told_as_the_run_file_says(
    tmp_path: Path, write: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(saving.commit, "commit", broken)
    one, job = made(tmp_path / "a", write=write, on_failure="stop")
    job.progress = after(5)
    with pytest.raises(StorageError, match="No space left on device.*older checkpoints are whole"):
        one.save(job, "updates")
        one.settle(job)
    one, job = made(tmp_path / "b", write=write, on_failure="go_on")
    job.progress = after(5)
    one.save(job, "updates")
    one.finish(job)
    assert "No space left on device" in caplog.text and "going on" in caplog.text
    assert job.meter.told == [] and one.unsaved(job.progress)
    job.progress = after(10)
    with pytest.raises(StorageError):  # the last one is needed
        one.save(job, "end")


def test_a_failure_before_is_found_at_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, job = made(tmp_path, write="background")
    job.progress = after(5)
    with monkeypatch.context() as patch:
        patch.setattr(saving.commit, "commit", broken)
        one.save(job, "updates")
        while not one.flags(unreadable=False).written:
            time.sleep(0.001)
    job.progress = after(10)
    with pytest.raises(StorageError, match="No space left"):
        one.save(job, "updates")


def test_no_room_for_a_copy_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(saving, "memory_left", lambda: 17)
    with caplog.at_level("INFO"):
        one, job = made(tmp_path, write="auto")
    assert "written in training's way: here needs 0.0 GB and has 0.0 GB left" in caplog.text
    job.progress = after(5)
    one.save(job, "updates")
    assert [told["background"] for told in job.meter.told] == [False]
    with pytest.raises(ValueError, match="checkpoint.write=background: no host memory"):
        made(tmp_path, write="background")


def test_what_is_written_in_the_background_is_the_state_of_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training goes on meanwhile, in the very memory that was saved."""
    values, go = torch.ones(4), threading.Event()
    check = saving.space.check_space

    def waiting(*args: Any) -> list[str]:
        go.wait(10)
        return check(*args)

    monkeypatch.setattr(state, "owned", lambda engine: [("weight/w", 0, values)])
    monkeypatch.setattr(saving.space, "check_space", waiting)
    one, job = made(tmp_path, write="background")
    job.progress = after(5)
    one.save(job, "updates")
    values.zero_()
    go.set()
    one.finish(job)
    folder = tmp_path / "checkpoints" / "step-00000005"
    reader = ArrayReader(folder, ["arrays-00000.safetensors"])
    assert reader.read("weight/w").tolist() == [1.0] * 4
