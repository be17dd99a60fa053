"""Checkpoints: a fault on any rank and damage to any file leave a whole one to go back to."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_saves import (
    ALONE,
    ONE,
    WORLD,
    content,
    cut,
    faults,
    flip,
    names,
    newest,
    newest_step,
    save,
    writer,
)
from thread_ranks import Threads, on_all_ranks

from recipes.checkpoint import commit, files, manifest, verify


def test_a_commit_by_three_ranks(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "checkpoints"
    assert save(root, 100, facts={"reason": "updates"}) == [root / "step-00000100"] * WORLD
    folder = root / "step-00000100"
    parts = [f"part-{rank}.bin" for rank in range(WORLD)]
    assert names(folder) == ["manifest.json", *parts, "state.json"]
    told = json.loads((folder / "manifest.json").read_text())
    assert (told["version"], told["step"], told["world"], len(told["files"])) == (2, 100, 3, 4)
    assert (told["strategy"], told["reason"], told["milestone"]) == ("DDP bf16", "updates", False)
    assert told["disks"] == [{"host": "worker-0", "ranks": [0, 1, 2]}]
    assert told["files"]["part-1.bin"] == {
        "bytes": 200,
        "sha256": hashlib.sha256(content(100, 1)).hexdigest(),
        "rank": 1,
        "host": "worker-0",
        "disk": 0,
    }
    common = told["files"]["state.json"]
    assert (common["rank"], common["host"], common["disk"]) == (None, None, None)
    own = told.pop("sha256")
    canonical = json.dumps(told, sort_keys=True, separators=(",", ":"))
    assert own == hashlib.sha256(canonical.encode()).hexdigest()
    assert json.loads((root / "LATEST").read_text()) == "step-00000100"
    assert names(root) == ["LATEST", "step-00000100"]
    assert faults(folder) == []
    found = newest(root)
    assert found is not None and (found.step, found.folder) == (100, folder)
    assert found.good == (frozenset([*parts, "state.json"]),) * WORLD
    assert found.manifest.bytes == 4 * 200 and found.manifest.commons() == {"state.json"}


def test_the_digest_is_sha256_of_what_was_in_memory(tmp_path: Path) -> None:
    # the example of FIPS 180-4
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    record = {"bytes": 3, "sha256": digest}
    assert files.write_file(tmp_path / "abc", [b"a", memoryview(b"bc")]) == record
    assert files.describe(tmp_path / "abc") == files.describe_bytes(b"abc") == record


def test_a_large_file_is_hashed_in_pieces_and_progress_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "CHUNK", 7)
    record = files.write_file(tmp_path / "x", [b"0123456789" * 3])
    assert (tmp_path / "x").read_bytes() == b"0123456789" * 3
    seen: list[int] = []
    assert files.describe(tmp_path / "x", seen.append) == record
    assert seen == [7, 7, 7, 7, 2]


def test_a_step_is_saved_again_over_whatever_an_earlier_attempt_left(tmp_path: Path) -> None:
    save(tmp_path, 5)
    left = tmp_path / ".step-00000005.partial"
    left.mkdir()
    (left / "part-9.bin").write_bytes(b"old")
    save(tmp_path, 5, mark=1)
    assert names(tmp_path) == ["LATEST", "step-00000005"]
    folder = tmp_path / "step-00000005"
    assert faults(folder) == [] and not (folder / "part-9.bin").exists()
    assert (folder / "part-0.bin").read_bytes() == content(5, 0, mark=1)


def test_one_file_for_two_ranks_is_refused_and_so_is_a_path(tmp_path: Path) -> None:
    def doubled(group: Threads) -> Path:
        def write(folder: Path) -> dict[str, files.FileRecord]:
            record = files.write_file(folder / f"same-{group.rank}", [b"x"])
            return {"same": record, "../up": record, "manifest.json": record}

        return commit.commit(tmp_path, 1, write, group, ONE, {})

    for told in on_all_ranks(doubled, WORLD):
        text = str(told)
        assert "rank 1 wrote 'same', a name that is taken" in text
        assert "'../up'" in text and "'manifest.json'" in text
    assert names(tmp_path) == []


# ---- damage


SHORT, OTHER = "has 197 bytes, expected 200", "is not what was written (SHA-256 differs)"
FILES = [*(f"part-{rank}.bin" for rank in range(WORLD)), "state.json"]


@pytest.mark.parametrize(
    ("damage", "name", "told"),
    [
        *((Path.unlink, name, "is missing") for name in FILES),
        *((cut, name, SHORT) for name in FILES),
        *((flip, name, OTHER) for name in FILES),
        (Path.unlink, "manifest.json", "No such file"),
        (cut, "manifest.json", "is damaged"),
    ],
)
def test_a_damaged_file_sends_back_to_the_older_checkpoint_and_is_named(
    damage: Callable[[Path], Any],
    name: str,
    told: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    assert newest_step(tmp_path) == 2
    damage(tmp_path / "step-00000002" / name)
    with caplog.at_level(logging.WARNING, logger="recipes.checkpoint.verify"):
        assert newest_step(tmp_path) == 1
    text = caplog.messages[0]
    assert text.startswith(f"checkpoint step-00000002 is broken, going back: {name}")
    assert told in text and sum(text.count(other) for other in FILES) == FILES.count(name)
    # what was not whole is kept for people, under a name that no start takes
    assert names(tmp_path) == ["LATEST", "step-00000001", "step-00000002.broken"]
    assert commit.read_pointer(tmp_path) == "step-00000001"
    save(tmp_path, 2)
    assert newest_step(tmp_path) == 2


def test_files_swapped_between_ranks_or_left_from_an_older_save_are_found(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    third, second = tmp_path / "step-00000003", tmp_path / "step-00000002"
    (third / "part-0.bin").rename(third / "kept")
    (third / "part-1.bin").rename(third / "part-0.bin")
    (third / "kept").rename(third / "part-1.bin")
    assert faults(third) == [f"part-0.bin {OTHER}", f"part-1.bin {OTHER}"]
    (second / "part-2.bin").write_bytes((tmp_path / "step-00000001" / "part-2.bin").read_bytes())
    assert faults(second) == [f"part-2.bin {OTHER}"]
    assert newest_step(tmp_path) == 1


def test_a_whole_folder_under_another_steps_name_does_not_pass_for_it(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / "step-00000001").rename(tmp_path / "step-00000003")
    assert newest_step(tmp_path) == 2
    assert "step-00000003.broken" in names(tmp_path)


def test_no_damage_to_a_manifest_stops_the_search(tmp_path: Path) -> None:
    save(tmp_path, 1, ALONE)
    save(tmp_path, 2, ALONE)
    path = tmp_path / "step-00000002" / "manifest.json"
    good = path.read_bytes()
    flipped = [good[:i] + bytes([good[i] ^ 2]) + good[i + 1 :] for i in range(len(good))]
    odd = [b"[]", b"{}", b"null", b'{"files": 3}', b'{"version": 2}', b"[" * 100_000, b"\xff"]
    for damaged in [*odd, *flipped]:
        path.write_bytes(damaged)
        told = faults(path.parent)
        try:
            whole = json.loads(damaged) == json.loads(good)  # white space says nothing
        except (ValueError, RecursionError):
            whole = False
        assert bool(told) != whole, damaged
    assert newest_step(tmp_path, ALONE) == 1


@pytest.mark.parametrize("name", ["../state.json", "/etc/passwd", ".hidden", "a/b", "", "a\0b"])
def test_a_manifest_names_nothing_outside_its_folder(name: str, tmp_path: Path) -> None:
    save(tmp_path, 1)
    path = tmp_path / "step-00000001" / "manifest.json"
    value = json.loads(path.read_text())
    value["files"][name] = value["files"].pop("state.json")
    path.write_text(json.dumps(value | {"sha256": manifest.digest(value)}))
    (told,) = faults(path.parent)
    assert repr(name) in told and "no plain file name" in told


def test_a_manifest_of_another_version_says_so(tmp_path: Path) -> None:
    save(tmp_path, 1)
    path = tmp_path / "step-00000001" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 1}))
    (told,) = faults(path.parent)
    assert "has version 1, expected 2" in told


def test_with_no_whole_checkpoint_the_start_is_refused_with_every_fault(tmp_path: Path) -> None:
    assert newest(tmp_path / "absent") is None
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / "LATEST").write_text('"step-00000099"\n')
    assert newest_step(tmp_path) == 2
    (tmp_path / "step-00000001" / "part-0.bin").unlink()
    flip(tmp_path / "step-00000002" / "part-1.bin")
    before = names(tmp_path)
    with pytest.raises(ValueError) as caught:
        newest(tmp_path)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"no checkpoint in {tmp_path} is whole:"
    assert lines[1] == f"  step-00000002: part-1.bin {OTHER}"
    assert lines[2] == "  step-00000001: part-0.bin is missing"
    assert "--fresh" in lines[3]
    assert names(tmp_path) == before, "nothing is touched"


# ---- faults on one rank


@pytest.mark.parametrize("victims", [[0], [1], [2], [0, 2]])
def test_a_write_error_on_one_rank_is_told_on_all_and_loses_nothing(
    victims: list[int], tmp_path: Path
) -> None:
    save(tmp_path, 1)

    def act(group: Threads) -> Path:
        def write(folder: Path) -> dict[str, files.FileRecord]:
            if group.rank in victims:
                raise OSError(errno.ENOSPC, "No space left on device", "disk")
            return writer(2, group.rank)(folder)

        return commit.commit(tmp_path, 2, write, group, ONE, {})

    told = "; ".join(f"rank {rank} (worker-0): No space left on device (disk)" for rank in victims)
    for error in on_all_ranks(act, WORLD):
        assert isinstance(error, OSError)
        assert str(error) == f"checkpoint step-00000002 was not written: {told}"
    assert names(tmp_path) == ["LATEST", "step-00000001"], "its space is free again"
    save(tmp_path, 2)
    assert newest_step(tmp_path) == 2


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, MemoryError])
def test_an_error_of_any_usual_kind_is_told_so_that_nobody_waits(
    kind: type[Exception], tmp_path: Path
) -> None:
    def act(group: Threads) -> Path:
        def write(folder: Path) -> dict[str, files.FileRecord]:
            if group.rank == 1:
                raise kind("the GPU has gone")
            return writer(2, group.rank)(folder)

        return commit.commit(tmp_path, 2, write, group, ONE, {})

    for error in on_all_ranks(act, WORLD):
        assert isinstance(error, OSError) and "rank 1 (worker-0): the GPU has gone" in str(error)


@pytest.mark.parametrize("same_step", [False, True])
@pytest.mark.parametrize("stage", ["manifest.json", ".LATEST", "step-00000002"])
def test_an_error_in_publishing_is_told_on_all(
    stage: str, same_step: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 2 if same_step else 1)
    real_write, real_rename = files.write_file, files.rename

    def full(path: Path, buffers: Any) -> files.FileRecord:
        if path.name == stage:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return real_write(path, buffers)

    def stuck(path: Path, target: Path) -> None:
        if path.name.endswith(".partial") and target.name == stage:
            raise OSError(errno.EIO, "Input/output error", str(path))
        real_rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_file", full)
        patch.setattr(files, "rename", stuck)
        for error in save(tmp_path, 2, mark=1):
            assert re.search(r"rank 0 \(worker-0\): (No space|Input/output)", str(error)), error
    step = 2 if same_step else 1
    assert names(tmp_path) == ["LATEST", f"step-0000000{step}"]
    assert newest_step(tmp_path) == step
    old = (tmp_path / f"step-0000000{step}" / "part-0.bin").read_bytes()
    assert old == content(step, 0, mark=0)


def test_a_pointer_that_cannot_follow_takes_nothing_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1)
    real = files.rename

    def stuck(path: Path, target: Path) -> None:
        if target.name == "LATEST":
            raise OSError(errno.EIO, "Input/output error", str(path))
        real(path, target)

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(files, "rename", stuck)
        assert save(tmp_path, 2)[0] == tmp_path / "step-00000002"
    assert "LATEST does not name step-00000002: Input/output error" in caplog.text
    assert newest_step(tmp_path) == 2 and commit.read_pointer(tmp_path) == "step-00000002"


def test_a_file_that_the_disks_lead_cannot_see_is_reported(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "checkpoints", tmp_path / "the same path on the disk of rank 1"
    elsewhere.mkdir()

    def act(group: Threads) -> Path:
        def write(folder: Path) -> dict[str, files.FileRecord]:
            return writer(1, group.rank)(elsewhere if group.rank == 1 else folder)

        return commit.commit(root, 1, write, group, ONE, {})

    for told in on_all_ranks(act, WORLD):
        assert re.search(
            r"part-1\.bin was written but is not in .* on worker-0: is the folder shared\?",
            str(told),
        )
    assert newest(root) is None


def test_a_disk_that_lost_bytes_is_found_at_the_start_and_by_size_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hashes are those of the bytes in memory, so that what the disk made of them is checked."""

    def lying(flipped: bool) -> Callable[[Path], dict[str, files.FileRecord]]:
        def write(folder: Path) -> dict[str, files.FileRecord]:
            records = writer(2, 0)(folder)
            (flip if flipped else cut)(folder / "part-0.bin")
            return records

        return write

    save(tmp_path, 1, ALONE)
    group = commit.Alone()
    with pytest.raises(OSError, match=r"part-0.bin has 197 bytes in .*, 200 were written"):
        commit.commit(tmp_path, 2, lying(flipped=False), group, ALONE, {})
    commit.commit(tmp_path, 2, lying(flipped=True), group, ALONE, {})
    found = verify.newest_whole(tmp_path, group, ALONE)
    assert found is not None and found.step == 1
