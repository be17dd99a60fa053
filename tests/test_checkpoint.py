"""Checkpoints: a crash at any instant and a fault on any rank leave a whole one to go back to."""

from __future__ import annotations

import errno
import json
import logging
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipes.checkpoint import arrays, commit

WORLD = 3


class Threads:
    """Ranks of one process that exchange values over one shared barrier and list."""

    def __init__(self, rank: int, barrier: threading.Barrier, values: list[Any]) -> None:
        self.rank, self.world = rank, barrier.parties
        self.barrier, self.values = barrier, values

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value; a rank that never comes breaks the barrier after five seconds."""
        self.values[self.rank] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values


def on_all_ranks(act: Callable[[Threads], Any], world: int = WORLD) -> list[Any]:
    """Run `act` on every rank at once; each one's result, or the error that it raised."""
    barrier, values = threading.Barrier(world, timeout=5), [None] * world

    def one(rank: int) -> Any:
        try:
            return act(Threads(rank, barrier, values))
        except Exception as error:  # noqa: BLE001 (handed to the test)
            return error

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(one, range(world)))


def writer(step: int, rank: int) -> Callable[[Path], list[Path]]:
    """Writes one file a rank."""

    def write(folder: Path) -> list[Path]:
        path = folder / f"part-{rank}.bin"
        path.write_bytes(bytes([step % 256, rank]) * 100)
        return [path]

    return write


def save(root: Path, step: int, world: int = WORLD) -> list[Any]:
    """Commit one checkpoint with every rank."""

    def act(group: Threads) -> Path:
        return commit.commit(root, step, writer(step, group.rank), group, {"world": world})

    return on_all_ranks(act, world)


def names(root: Path) -> list[str]:
    """What lies in a folder."""
    return sorted(p.name for p in root.iterdir())


def test_a_commit_by_three_ranks(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "checkpoints"
    assert save(root, 100) == [root / "step-00000100"] * WORLD
    folder = root / "step-00000100"
    assert names(folder) == ["manifest.json", "part-0.bin", "part-1.bin", "part-2.bin"]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["version"], manifest["world"], len(manifest["files"])) == (1, 3, 3)
    assert manifest["files"]["part-1.bin"]["bytes"] == 200
    assert json.loads((root / "LATEST").read_text()) == "step-00000100"
    assert commit.faults_of(folder) == [] and commit.newest_whole(root) == folder


def test_the_digest_is_sha256(tmp_path: Path) -> None:
    (tmp_path / "abc").write_bytes(b"abc")  # the example of FIPS 180-4
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert commit.describe(tmp_path / "abc") == {"bytes": 3, "sha256": digest}


def test_a_step_is_saved_again_over_whatever_an_earlier_attempt_left(tmp_path: Path) -> None:
    save(tmp_path, 5)
    left = tmp_path / ".step-00000005.partial"
    left.mkdir()
    (left / "part-9.bin").write_bytes(b"old")
    save(tmp_path, 5)
    assert names(tmp_path) == ["LATEST", "step-00000005"]
    assert commit.faults_of(tmp_path / "step-00000005") == []
    assert not (tmp_path / "step-00000005" / "part-9.bin").exists()


# ---- damage


def cut(path: Path) -> None:
    """Lose the last three bytes."""
    path.write_bytes(path.read_bytes()[:-3])


def flip(path: Path) -> None:
    """Change one byte."""
    content = path.read_bytes()
    path.write_bytes(content[:9] + bytes([content[9] ^ 1]) + content[10:])


SHORT, OTHER = "has 197 bytes, expected 200", "is not what was written (SHA-256 differs)"


@pytest.mark.parametrize(
    ("damage", "name", "told"),
    [
        *((Path.unlink, f"part-{rank}.bin", "is missing") for rank in range(WORLD)),
        *((cut, f"part-{rank}.bin", SHORT) for rank in range(WORLD)),
        *((flip, f"part-{rank}.bin", OTHER) for rank in range(WORLD)),
        (Path.unlink, "manifest.json", "No such file"),
        (cut, "manifest.json", "Expecting"),
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
    assert commit.newest_whole(tmp_path) == tmp_path / "step-00000002"
    damage(tmp_path / "step-00000002" / name)
    with caplog.at_level(logging.WARNING, logger="recipes.checkpoint.commit"):
        assert commit.newest_whole(tmp_path) == tmp_path / "step-00000001"
    (text,) = caplog.messages
    assert text.startswith(f"checkpoint step-00000002 is broken, going back: {name}")
    assert told in text and text.count("part-") == name.count("part-")


def test_no_damage_to_a_manifest_stops_the_search(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    path = tmp_path / "step-00000002" / "manifest.json"
    good, crashes = path.read_bytes(), set()
    flipped = [good[:i] + bytes([good[i] ^ 2]) + good[i + 1 :] for i in range(len(good))]
    for damaged in [b"[]", b"{}", b"null", b'{"files": 3}', b'{"files": {"a": 3}}', *flipped]:
        path.write_bytes(damaged)
        try:
            assert commit.newest_whole(tmp_path) is not None
        except (KeyError, TypeError, AttributeError) as error:
            crashes.add(repr(error))
    assert not crashes


def test_with_no_whole_checkpoint_there_is_none_whatever_the_pointer_says(tmp_path: Path) -> None:
    assert commit.newest_whole(tmp_path / "absent") is None
    save(tmp_path, 1)
    (tmp_path / "LATEST").write_text('"step-00000099"\n')
    assert commit.newest_whole(tmp_path) == tmp_path / "step-00000001"
    (tmp_path / "step-00000001" / "part-0.bin").unlink()
    assert commit.newest_whole(tmp_path) is None


# ---- crashes


class Crash(Exception):
    """The machine is gone: nothing of ours catches it."""


def crash(*_: Any) -> list[Path]:
    """Put in place of a stage."""
    raise Crash


def dying_rename(name: str, *, after: bool = False) -> Callable[[Path, Path], None]:
    """`Path.rename` that dies at the given file, before or after it happened."""
    real = Path.rename

    def rename(path: Path, target: Path) -> None:
        if path.name != name or after:
            real(path, target)
        if path.name == name:
            raise Crash

    return rename


@pytest.mark.parametrize(
    ("stage", "arrived"),
    [
        ("write", False),
        ("manifest", False),
        ("before .step-00000002.partial", False),
        ("after .step-00000002.partial", True),
        ("before .LATEST", True),
    ],
)
def test_a_crash_at_any_stage_leaves_a_whole_checkpoint(
    stage: str, arrived: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1, world=1)
    with monkeypatch.context() as patch:
        if stage == "manifest":
            patch.setattr(commit, "write_json", crash)
        elif stage != "write":
            when, name = stage.split()
            patch.setattr(Path, "rename", dying_rename(name, after=when == "after"))
        write = crash if stage == "write" else writer(2, 0)
        with pytest.raises(Crash):
            commit.commit(tmp_path, 2, write, commit.Alone(), {})
    newest = tmp_path / ("step-00000002" if arrived else "step-00000001")
    assert commit.newest_whole(tmp_path) == newest
    assert commit.faults_of(tmp_path / json.loads((tmp_path / "LATEST").read_text())) == []
    save(tmp_path, 2, world=1)  # and the next attempt succeeds
    assert commit.newest_whole(tmp_path) == tmp_path / "step-00000002"
    assert names(tmp_path) == ["LATEST", "step-00000001", "step-00000002"]


@pytest.mark.parametrize("name", [".step-00000002.partial", ".LATEST"])
def test_a_crash_while_the_only_step_is_saved_again_leaves_it_whole(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is stopped right after its resume saves the step it came from."""
    save(tmp_path, 2, world=1)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", dying_rename(name))
        save(tmp_path, 2, world=1)
    assert commit.newest_whole(tmp_path) == tmp_path / "step-00000002"
    assert commit.faults_of(tmp_path / json.loads((tmp_path / "LATEST").read_text())) == []


# ---- faults on one rank


@pytest.mark.parametrize("victims", [[0], [1], [2], [0, 2]])
def test_a_write_error_on_one_rank_is_told_on_all_and_loses_nothing(
    victims: list[int], tmp_path: Path
) -> None:
    save(tmp_path, 1)

    def act(group: Threads) -> Path:
        def write(folder: Path) -> list[Path]:
            if group.rank in victims:
                raise OSError(errno.ENOSPC, "No space left on device", "disk")
            return writer(2, group.rank)(folder)

        return commit.commit(tmp_path, 2, write, group, {})

    faults = "; ".join(f"rank {rank}: No space left on device (disk)" for rank in victims)
    for told in on_all_ranks(act):
        assert isinstance(told, OSError)
        assert str(told) == f"checkpoint step-00000002 was not written: {faults}"
    assert commit.committed(tmp_path) == [tmp_path / "step-00000001"]
    save(tmp_path, 2)
    assert commit.newest_whole(tmp_path) == tmp_path / "step-00000002"


def test_a_full_disk_below_safetensors_is_told_on_all_and_nobody_waits(tmp_path: Path) -> None:
    """The arrays are most of a checkpoint; safetensors raises an error of its own kind."""

    def act(group: Threads) -> Path:
        def write(folder: Path) -> list[Path]:
            there = folder if group.rank != 1 else folder / "absent"
            return [arrays.write_arrays(there, group.rank, {f"w{group.rank}": torch.ones(2)})]

        return commit.commit(tmp_path, 1, write, group, {})

    for told in on_all_ranks(act):
        assert isinstance(told, OSError) and "rank 1: " in str(told), repr(told)


def test_an_error_in_publishing_is_told_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)

    def full(path: Path, value: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(commit, "write_json", full)
    assert all("rank 0: No space left on device" in str(told) for told in save(tmp_path, 2))
    assert commit.newest_whole(tmp_path) == tmp_path / "step-00000001"


def test_a_file_that_rank_0_cannot_see_is_reported(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "checkpoints", tmp_path / "the same path on the disk of rank 1"
    elsewhere.mkdir()

    def act(group: Threads) -> Path:
        def write(folder: Path) -> list[Path]:
            return writer(1, group.rank)(elsewhere if group.rank == 1 else folder)

        return commit.commit(root, 1, write, group, {})

    for told in on_all_ranks(act):
        assert re.search(
            r"part-1\.bin was written but is not in .* is the folder shared\?", str(told)
        )
    assert commit.newest_whole(root) is None


def test_rotation_keeps_the_newest_by_number(tmp_path: Path) -> None:
    for step in (99_999_999, 9, 100_000_000, 10):  # by name step-1000... would come first
        save(tmp_path, step, world=1)
    newest_first = [tmp_path / commit.folder_name(n) for n in (100_000_000, 99_999_999, 10, 9)]
    assert commit.committed(tmp_path) == newest_first
    assert commit.rotate(tmp_path, keep=2) == newest_first[2:]
    assert names(tmp_path) == ["LATEST", "step-100000000", "step-99999999"]
    assert commit.rotate(tmp_path, keep=2) == []


def test_rotation_touches_nothing_that_is_not_its_own(tmp_path: Path) -> None:
    foreign = ["step-7", "step-00000001.bak", "my-step-00000001", "best", ".step-00000009.partial"]
    for name in foreign:
        (tmp_path / name).mkdir()
    for step in (1, 2, 3, 4):
        save(tmp_path, step, world=1)
    commit.rotate(tmp_path, keep=2)
    assert names(tmp_path) == sorted([*foreign, "LATEST", "step-00000003", "step-00000004"])


@pytest.mark.parametrize("keep", [1, 0])
def test_the_last_but_one_is_never_deleted(keep: int, tmp_path: Path) -> None:
    save(tmp_path, 1, world=1)
    with pytest.raises(AssertionError, match="the one checkpoint left may be the broken one"):
        commit.rotate(tmp_path, keep)
    assert commit.newest_whole(tmp_path) is not None


# ---- arrays


@given(sizes=st.lists(st.integers(1, 10**6), max_size=40), world=st.integers(1, 9))
def test_every_array_is_written_once_and_the_shares_are_even(sizes: list[int], world: int) -> None:
    owned = arrays.shares(sizes, world)
    assert len(owned) == world
    assert sorted(i for share in owned for i in share) == list(range(len(sizes)))
    loads = [sum(sizes[i] for i in share) for share in owned]
    # the largest-first rule leaves no two ranks further apart than one array
    assert max(loads) - min(loads) <= max(sizes, default=0)


def test_shares_by_hand() -> None:
    # 9 | 7 | 5 to the emptier (7+5), 4 to the other (9+4), 1 to the emptier (12+1)
    assert arrays.shares([4, 9, 1, 7, 5], 2) == [{1, 0}, {3, 4, 2}]
    assert arrays.shares([3], 3) == [{0}, set(), set()]


def test_arrays_are_found_by_name_whichever_rank_wrote_them(tmp_path: Path) -> None:
    written = [
        {"weight/a": torch.arange(6.0).reshape(2, 3), "exp_avg/a": torch.zeros(2, 3)},
        {"weight/b": torch.tensor([float("nan"), float("-inf"), 1e-45])},
        {},  # a rank without a share
        {"buffer/n": torch.tensor(7), "weight/low": torch.ones(3, dtype=torch.bfloat16)},
    ]
    for rank, mine in enumerate(written):
        path = arrays.write_arrays(tmp_path, rank, mine)
        assert path.name == f"arrays-{rank:05d}.safetensors"
        assert path.stat().st_mode & 0o777 == 0o644  # readable for colleagues
    reader = arrays.ArrayReader(tmp_path)
    together = {name: value for mine in written for name, value in mine.items()}
    assert reader.names() == set(together)
    for name, value in together.items():
        torch.testing.assert_close(reader.read(name), value, rtol=0, atol=0, equal_nan=True)


def test_a_missing_array_is_named_and_a_broken_file_refused(tmp_path: Path) -> None:
    path = arrays.write_arrays(tmp_path, 0, {"weight/a": torch.zeros(1)})
    with pytest.raises(ValueError) as caught:
        arrays.ArrayReader(tmp_path).read("weight/b")
    text = str(caught.value)
    assert "has no array 'weight/b'" in text and str(tmp_path) in text and "--fresh" in text
    path.write_bytes(b"not an array")
    with pytest.raises(ValueError, match="can't be read"):
        arrays.ArrayReader(tmp_path)


def test_random_states_are_per_rank(tmp_path: Path) -> None:
    for rank in (0, 1):
        arrays.write_rng(tmp_path, rank, {"cpu": torch.tensor([rank, 9], dtype=torch.uint8)})
    state = arrays.read_rng(tmp_path, 1)
    assert state is not None and state["cpu"].tolist() == [1, 9]
    assert arrays.read_rng(tmp_path, 2) is None  # the run has grown since
    assert arrays.ArrayReader(tmp_path).names() == set()  # and they are no arrays of the model
