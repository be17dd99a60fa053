"""What crashes leave behind is cleaned up, and a clean-up that fails ends nothing."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from recipes.checkpoint import commit


def save(root: Path, step: int) -> Path:
    def write(folder: Path) -> list[Path]:
        (folder / "a.bin").write_bytes(b"x" * step)
        return [folder / "a.bin"]

    return commit.commit(root, step, write, commit.Alone(), {})


def test_half_written_folders_of_killed_saves_do_not_pile_up(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for step in (2, 3):
        (tmp_path / f".step-0000000{step}.partial").mkdir()
    (tmp_path / "notes").mkdir()
    assert commit.newest_whole(tmp_path) == tmp_path / "step-00000001"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["LATEST", "notes", "step-00000001"]


def test_a_folder_that_cannot_be_deleted_is_told_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)

    def busy(folder: Path, **_: object) -> None:
        raise OSError(39, "Directory not empty", str(folder))

    monkeypatch.setattr(shutil, "rmtree", busy)
    with caplog.at_level(logging.WARNING):
        commit.rotate(tmp_path, keep=2)
    assert "step-00000001 could not be deleted" in caplog.text
    assert commit.newest_whole(tmp_path) == tmp_path / "step-00000003"
