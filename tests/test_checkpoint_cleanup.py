"""What crashes leave behind is cleaned up, and a clean-up that fails ends nothing."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
from checkpoint_saves import ALONE, content, faults, names, newest, newest_step, save

from recipes.checkpoint import commit, recovery, rotation
from recipes.checkpoint.manifest import Manifest

PARTIAL, REPLACED = ".step-00000002.partial", ".step-00000002.replaced"


def test_half_written_folders_of_killed_saves_do_not_pile_up(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for step in (2, 3):
        (tmp_path / f".step-0000000{step}.partial").mkdir()
    (tmp_path / ".step-00000009.stale").mkdir()
    (tmp_path / ".LATEST").write_text("half")
    (tmp_path / "notes").mkdir()
    assert newest_step(tmp_path) == 1
    assert names(tmp_path) == ["LATEST", "notes", "step-00000001"]


def test_an_interrupted_first_save_is_no_broken_checkpoint(tmp_path: Path) -> None:
    (tmp_path / ".step-00000001.partial").mkdir()
    assert newest(tmp_path) is None
    assert names(tmp_path) == []


def test_a_manifest_that_is_not_to_be_read_for_a_moment_sets_nothing_whole_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / "step-00000002" / "part-0.bin").unlink()
    read, asked = recovery.read_manifest, []

    def sometimes(folder: Path) -> Manifest:
        asked.append(folder)
        if len(asked) > 2:  # each was looked over once; now they are put in order
            raise ValueError("manifest.json: Input/output error")
        return read(folder)

    monkeypatch.setattr(recovery, "read_manifest", sometimes)
    assert newest_step(tmp_path) == 1
    assert names(tmp_path) == ["LATEST", "step-00000001", "step-00000002.broken"]


def test_what_was_prepared_is_committed_at_the_next_start(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / "step-00000002").rename(tmp_path / PARTIAL)
    (tmp_path / "LATEST").write_text('"step-00000001"\n')
    assert newest_step(tmp_path) == 2
    assert names(tmp_path) == ["LATEST", "step-00000001", "step-00000002"]
    assert commit.read_pointer(tmp_path) == "step-00000002"


def test_what_was_prepared_and_is_not_whole_is_deleted(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / "step-00000002").rename(tmp_path / PARTIAL)
    (tmp_path / PARTIAL / "part-0.bin").unlink()
    assert newest_step(tmp_path) == 1
    assert names(tmp_path) == ["LATEST", "step-00000001"]


@pytest.mark.parametrize("new", ["absent", "prepared", "half", "in place"])
def test_a_replacement_between_its_renames_keeps_the_old_or_takes_the_new(
    new: str, tmp_path: Path
) -> None:
    save(tmp_path, 2, mark=1)
    (tmp_path / "step-00000002").rename(tmp_path / "old")
    save(tmp_path, 2, mark=2)
    (tmp_path / "old").rename(tmp_path / REPLACED)
    if new != "in place":
        (tmp_path / "step-00000002").rename(tmp_path / PARTIAL)
    if new == "absent":
        shutil.rmtree(tmp_path / PARTIAL)
    if new == "half":
        (tmp_path / PARTIAL / "manifest.json").unlink()
    assert newest_step(tmp_path) == 2
    mark = 1 if new in ("absent", "half") else 2
    assert (tmp_path / "step-00000002" / "part-1.bin").read_bytes() == content(2, 1, mark)
    assert names(tmp_path) == ["LATEST", "step-00000002"]


def test_an_older_save_of_the_step_is_the_way_back_when_the_new_one_is_broken(
    tmp_path: Path,
) -> None:
    save(tmp_path, 2, mark=1)
    (tmp_path / "step-00000002").rename(tmp_path / "old")
    save(tmp_path, 2, mark=2)
    (tmp_path / "old").rename(tmp_path / REPLACED)
    (tmp_path / "step-00000002" / "part-1.bin").unlink()
    assert newest_step(tmp_path) == 2
    assert (tmp_path / "step-00000002" / "part-1.bin").read_bytes() == content(2, 1, 1)
    assert names(tmp_path) == ["LATEST", "step-00000002", "step-00000002.broken"]
    (tmp_path / "step-00000002" / "part-1.bin").unlink()
    save(tmp_path, 1)
    assert newest_step(tmp_path) == 1  # and a second broken one gets a name of its own
    aside = ["step-00000002.broken", "step-00000002.broken2"]
    assert names(tmp_path) == ["LATEST", "step-00000001", *aside]


def test_the_pointer_is_made_right(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for text in ("", "nonsense", '"step-00000007"', "[1]"):
        (tmp_path / "LATEST").write_text(text)
        assert newest_step(tmp_path) == 1
        assert json.loads((tmp_path / "LATEST").read_text()) == "step-00000001"
    (tmp_path / "LATEST").unlink()
    assert newest_step(tmp_path) == 1
    assert commit.read_pointer(tmp_path) == "step-00000001"


def test_foreign_files_are_never_touched(tmp_path: Path) -> None:
    foreign = ["step-7", "step-00000001.bak", "my-step-00000001", "best", ".step-9.partial"]
    foreign += ["step-0000000x", ".step-00000001.other", "step-00000003.broken"]
    for name in foreign:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    (tmp_path / "step-00000099").write_text("a file")
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
        rotation.rotate(tmp_path, 2, step)
    assert newest_step(tmp_path) == 4
    own = ["LATEST", "step-00000003", "step-00000004"]
    assert names(tmp_path) == sorted([*foreign, *own, "step-00000099"])
    assert all((tmp_path / name / "file").read_text() == name for name in foreign)


def test_a_folder_that_cannot_be_deleted_is_told_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)

    def busy(folder: Path, **_: object) -> None:
        raise OSError(39, "Directory not empty", str(folder))

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(shutil, "rmtree", busy)
        assert rotation.rotate(tmp_path, 2, 3) == []
        assert "step-00000001 could not be deleted" in caplog.text
        assert newest_step(tmp_path) == 3
    assert names(tmp_path)[0] == ".step-00000001.stale", "and no start takes it"
    assert newest_step(tmp_path) == 3 and ".step-00000001.stale" not in names(tmp_path)


def test_what_was_not_whole_and_older_stays_for_people(tmp_path: Path) -> None:
    save(tmp_path, 1, ALONE)
    save(tmp_path, 2, ALONE)
    (tmp_path / "step-00000001" / "part-0.bin").unlink()
    assert newest_step(tmp_path, ALONE) == 2
    assert faults(tmp_path / "step-00000001") == ["part-0.bin is missing"]
