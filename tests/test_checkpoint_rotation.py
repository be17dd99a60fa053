"""Rotation after a commit, pruning at a user's wish, and room on the disk."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoint_saves import ALONE, TWO, cut, flip, names, newest_step, place, save
from thread_ranks import all_well

from recipes.checkpoint import commit, rotation, space


def steps(root: Path) -> list[int]:
    """Committed steps, newest first."""
    return [int(path.name[5:]) for path in commit.committed(root)]


def saves(root: Path, *wanted: int, milestones: tuple[int, ...] = ()) -> None:
    for step in wanted:
        save(root, step, ALONE, facts={"milestone": step in milestones})


def test_rotation_keeps_the_newest_by_number(tmp_path: Path) -> None:
    saves(tmp_path, 99_999_999, 9, 100_000_000, 10)  # by name step-1000... would come first
    assert steps(tmp_path) == [100_000_000, 99_999_999, 10, 9]
    gone = [tmp_path / commit.folder_name(n) for n in (10, 9)]
    assert rotation.rotate(tmp_path, 2, 100_000_000) == gone
    assert names(tmp_path) == ["LATEST", "step-100000000", "step-99999999"]
    assert rotation.rotate(tmp_path, 2, 100_000_000) == []


def test_milestones_stay_and_are_counted_among_the_newest(tmp_path: Path) -> None:
    saves(tmp_path, 1, 2, 3, 4, 5, milestones=(1, 3, 4))
    rotation.rotate(tmp_path, 2, 5)
    assert steps(tmp_path) == [5, 4, 3, 1]
    saves(tmp_path, 6)
    rotation.rotate(tmp_path, 2, 6)
    assert steps(tmp_path) == [6, 5, 4, 3, 1]


@pytest.mark.parametrize("damage", [cut, Path.unlink])
@pytest.mark.parametrize("name", ["part-0.bin", "manifest.json"])
def test_a_broken_newer_checkpoint_pushes_out_no_good_one(
    name: str, damage: Any, tmp_path: Path
) -> None:
    saves(tmp_path, 1, 2, 3, 4)
    damage(tmp_path / "step-00000003" / name)
    rotation.rotate(tmp_path, 2, 4)
    assert steps(tmp_path) == [4, 3, 2], "3 is not whole, so that 2 is the second"


def test_a_newer_one_than_was_just_saved_is_neither_counted_nor_deleted(tmp_path: Path) -> None:
    saves(tmp_path, 1, 2, 3, 9)
    rotation.rotate(tmp_path, 2, 3)
    assert steps(tmp_path) == [9, 3, 2]


def test_an_old_one_with_a_broken_manifest_may_be_a_milestone_and_stays(tmp_path: Path) -> None:
    saves(tmp_path, 1, 2, 3, 4)
    flip(tmp_path / "step-00000001" / "manifest.json")
    assert rotation.rotate(tmp_path, 2, 4) == [tmp_path / "step-00000002"]
    assert steps(tmp_path) == [4, 3, 1]
    assert [p.name for p, _, _ in rotation.prune(tmp_path, keep=2)] == ["step-00000001"]


@pytest.mark.parametrize("keep", [1, 0])
def test_the_last_but_one_is_never_rotated_away(keep: int, tmp_path: Path) -> None:
    saves(tmp_path, 1)
    with pytest.raises(AssertionError, match="the one checkpoint left may be the broken one"):
        rotation.rotate(tmp_path, keep, 1)
    assert newest_step(tmp_path, ALONE) == 1


# ---- pruning


def test_a_rotation_that_fails_is_told_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stale(root: Path) -> list[Path]:
        raise OSError(116, "Stale file handle", str(root))

    monkeypatch.setattr(rotation, "committed", stale)
    assert rotation.rotate(tmp_path, 2, 3) == []
    assert "old checkpoints could not be deleted: Stale file handle" in caplog.text


def leftovers(root: Path) -> None:
    """One of every kind."""
    for name in (".step-00000007.partial", ".step-00000008.stale", "step-00000009.broken"):
        (root / name).mkdir()
        (root / name / "x.bin").write_bytes(b"x" * 10)


def test_pruning_deletes_leftovers_and_says_what_and_why(tmp_path: Path) -> None:
    saves(tmp_path, 1, 2, 3, milestones=(1,))
    leftovers(tmp_path)
    (tmp_path / "step-00000009.broken.mine").mkdir()
    told = rotation.prune(tmp_path, dry_run=True)
    assert [(path.name, size, why) for path, size, why in told] == [
        (".step-00000007.partial", 10, "its save was interrupted"),
        (".step-00000008.stale", 10, "its deletion was interrupted"),
        ("step-00000009.broken", 10, "set aside because it was not whole"),
    ]
    before = names(tmp_path)
    assert rotation.prune(tmp_path, dry_run=True) == told and names(tmp_path) == before
    assert rotation.prune(tmp_path) == told
    assert steps(tmp_path) == [3, 2, 1]
    assert names(tmp_path)[-1] == "step-00000009.broken.mine"
    assert rotation.prune(tmp_path) == [] == rotation.prune(tmp_path / "absent")


def test_pruning_old_checkpoints_spares_milestones_and_the_newest_whole(tmp_path: Path) -> None:
    saves(tmp_path, 1, 2, 3, 4, milestones=(1,))
    told = rotation.prune(tmp_path, keep=1)
    assert [(path.name, why) for path, _, why in told] == [
        ("step-00000003", "older than the newest 1"),
        ("step-00000002", "older than the newest 1"),
    ]
    assert steps(tmp_path) == [4, 1]


def test_pruning_reads_the_bytes_of_the_one_that_it_leaves(tmp_path: Path) -> None:
    saves(tmp_path, 1, 2, 3)
    flip(tmp_path / "step-00000003" / "part-0.bin")  # whole by its size
    rotation.prune(tmp_path, keep=1)
    assert steps(tmp_path) == [3, 2]
    flip(tmp_path / "step-00000002" / "part-0.bin")
    saves(tmp_path, 1)
    flip(tmp_path / "step-00000001" / "part-0.bin")
    assert rotation.prune(tmp_path, keep=1) == [], "none is whole: nothing is deleted"


def test_pruning_leaves_what_a_start_would_finish(tmp_path: Path) -> None:
    saves(tmp_path, 1, 2)
    (tmp_path / "step-00000002").rename(tmp_path / ".step-00000002.partial")
    (tmp_path / "step-00000001").rename(tmp_path / ".step-00000001.replaced")
    assert rotation.prune(tmp_path) == []
    assert newest_step(tmp_path, ALONE) == 2


# ---- room


def test_what_a_run_needs_by_hand() -> None:
    # GPT-2 small: 124,439,808 parameters of 12 bytes; 2 kept and the next
    assert space.checkpoint_need(124_439_808, 2, 0) == 3 * 1_493_277_696
    assert space.checkpoint_need(124_439_808, 2, 2) == 1_493_277_696
    assert space.checkpoint_need(124_439_808, 2, 7) == 1_493_277_696
    assert space.checkpoint_need(10, 2, 1, milestones=3) == 120 * (2 + 3)


def test_a_disk_without_room_is_named_and_ranks_of_a_disk_are_added_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = {0: 1_200_000_000, 1: 5_000_000_000}

    def statvfs(path: Any) -> Any:
        return SimpleNamespace(f_bavail=free[int(Path(path).name[-1])], f_frsize=1)

    for number in free:
        (tmp_path / f"disk-{number}").mkdir()
    monkeypatch.setattr(os, "statvfs", statvfs)

    def told(need: int) -> list[str]:
        results = all_well(
            lambda g: space.check_space(place(tmp_path, TWO, g.rank), need, g, TWO), 3
        )
        assert results[0] == results[1] == results[2]
        return results[0]

    assert told(1_200_000_000) == []
    first = f"worker-0: {tmp_path}/disk-0 has 1.2 GB free, the checkpoint needs 2.0 GB"
    assert told(2_000_000_000) == [first]
    first = f"worker-0: {tmp_path}/disk-0 has 1.2 GB free, the checkpoint needs 2.6 GB"
    second = f"worker-1: {tmp_path}/disk-1 has 5.0 GB free, the checkpoint needs 5.2 GB"
    assert told(2_600_000_000) == [first, second]


def test_room_is_looked_for_where_the_folder_will_be(tmp_path: Path) -> None:
    there = space.free_bytes(tmp_path)
    assert there > 0 and abs(space.free_bytes(tmp_path / "not" / "yet") - there) < 1 << 30
