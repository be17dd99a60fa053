"""The power fails at any instant of a save: what was not flushed is gone, or half there."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from power_model import Recorder, write_tree
from thread_ranks import Threads, all_well

from recipes.checkpoint import commit, files, rotation, verify
from recipes.checkpoint.disks import Disks

ONE, TWO = Disks(of_rank=(0, 0), hosts=("a", "a")), Disks(of_rank=(0, 1), hosts=("a", "b"))
VARIANTS = 8 * int(os.environ.get("OCTET_SOAK", "1"))


def root(folder: Path, disks: Disks, rank: int) -> Path:
    return folder / f"disk-{disks.of_rank[rank]}" / "checkpoints"


def text(step: int, mark: str, rank: int) -> bytes:
    return f"{step} {mark} {rank} ".encode() * 20


def save(folder: Path, disks: Disks, step: int, mark: str, keep: int = 9) -> None:
    def act(group: Threads) -> None:
        def write(beside: Path) -> dict[str, files.FileRecord]:
            name = f"part-{group.rank}"
            return {name: files.write_file(beside / name, [text(step, mark, group.rank)])}

        place, common = root(folder, disks, group.rank), {"state.json": text(step, mark, 9)}
        commit.commit(place, step, write, group, disks, {}, common)
        if disks.lead(group.rank):
            rotation.rotate(place, keep, step)

    all_well(act, 2)


def recover(folder: Path, disks: Disks) -> str:
    """Start again: which save is found, every byte looked at; and it is in order."""

    def act(group: Threads) -> verify.Found | None:
        return verify.newest_whole(root(folder, disks, group.rank), group, disks)

    found: list[verify.Found | None] = all_well(act, 2)
    if found[0] is None:
        return "nothing"
    marks = set()
    for rank, one in enumerate(found):
        assert one is not None
        data = (one.folder / f"part-{rank}").read_bytes()
        mark = data.split()[1].decode()
        assert data == text(one.step, mark, rank)
        assert (one.folder / "state.json").read_bytes() == text(one.step, mark, 9)
        marks.add(f"{one.step} {mark}")
        place = root(folder, disks, rank)
        assert json.loads((place / "LATEST").read_text()) == one.folder.name
        names = {p.name for p in place.iterdir()} - {"LATEST"}
        assert all(commit.COMMITTED.match(name) for name in names), names
        assert not [n for n in names if verify.check_folder(place / n).faults], names
    assert len(marks) == 1, marks
    return marks.pop()


def explore(
    before: Path, act: Callable[[Path], Any], disks: Disks, allowed: list[str], work: Path
) -> Counter[str]:
    """Lose the power after each operation of `act`, in several ways; what is found each time."""
    folder = work / "run"
    shutil.copytree(before, folder)
    with Recorder(folder) as recorder:
        act(folder)
    found: Counter[str] = Counter()
    for count, tree in recorder.crashes(VARIANTS):
        shutil.rmtree(work / "after", ignore_errors=True)
        write_tree(work / "after", tree)
        told = recover(work / "after", disks)
        last = recorder.operations[count - 1] if count else "nothing"
        assert told in allowed, f"{told} after {count} operations, the last of them {last}"
        if count == len(recorder.operations):
            assert told == allowed[-1], "it had been committed"
        found[told] += 1
    return found


@pytest.fixture(autouse=True)
def no_broken(caplog: pytest.LogCaptureFixture) -> Any:
    """A crash breaks nothing that was committed, so that nothing of it is said."""
    with caplog.at_level(logging.WARNING):
        yield
    assert "is broken" not in caplog.text


@pytest.mark.parametrize("disks", [ONE, TWO], ids=["one disk", "two disks"])
@pytest.mark.parametrize(
    ("steps", "again", "keep"),
    [((), 1, 9), ((1,), 2, 9), ((1, 2), 2, 9), ((1, 2, 3), 4, 2)],
    ids=["first", "over", "the same step again", "with rotation"],
)
def test_a_power_loss_leaves_the_old_or_the_new_checkpoint(
    steps: tuple[int, ...], again: int, keep: int, disks: Disks, tmp_path: Path
) -> None:
    before = tmp_path / "before"
    before.mkdir()
    for step in steps:
        save(before, disks, step, "old")
    allowed = [f"{steps[-1]} old" if steps else "nothing", f"{again} new"]
    found = explore(
        before, lambda folder: save(folder, disks, again, "new", keep), disks, allowed, tmp_path
    )
    assert min(found[one] for one in allowed) >= VARIANTS, found


def test_a_power_loss_during_the_recovery(tmp_path: Path) -> None:
    """Two disks, the same step again, and the second disk had not renamed."""
    before = tmp_path / "before"
    save(before, TWO, 1, "old")
    shutil.copytree(before / "disk-1", tmp_path / "kept")
    shutil.copytree(before, tmp_path / "other")
    save(tmp_path / "other", TWO, 1, "new")
    there = before / "disk-0" / "checkpoints"
    (there / "step-00000001").rename(there / ".step-00000001.replaced")
    shutil.copytree(
        tmp_path / "other" / "disk-0" / "checkpoints" / "step-00000001", there / "step-00000001"
    )
    shutil.copytree(
        tmp_path / "other" / "disk-1" / "checkpoints" / "step-00000001",
        before / "disk-1" / "checkpoints" / ".step-00000001.partial",
    )
    found = explore(before, lambda folder: recover(folder, TWO), TWO, ["1 new"], tmp_path)
    assert sum(found.values()) > 10 * VARIANTS


def test_the_model_finds_a_missing_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each flush of a save is needed: without it the model finds a lost checkpoint."""
    before = tmp_path / "before"
    save(before, ONE, 1, "old")
    monkeypatch.setattr(files, "flush_folder", lambda folder: None)
    with pytest.raises((AssertionError, ValueError)):
        explore(before, lambda f: save(f, ONE, 2, "new", 2), ONE, ["1 old", "2 new"], tmp_path)
