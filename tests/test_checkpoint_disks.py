"""One disk for all nodes or one for each: found out, recorded, and both lose nothing."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoint_saves import (
    ONE,
    TWO,
    content,
    faults,
    flip,
    names,
    newest,
    newest_step,
    place,
    save,
    writer,
)
from thread_ranks import Threads, all_well, on_all_ranks

from recipes.checkpoint import commit, disks, files, rotation, verify
from recipes.checkpoint.disks import Disks

HOSTS = ("worker-0", "worker-1", "worker-1")


def probe(folders: list[Path], hosts: tuple[str, ...] = HOSTS) -> list[Any]:
    """Every rank with its own view of the run folder."""
    return on_all_ranks(
        lambda group: disks.probe(folders[group.rank], group, hosts[group.rank]), len(folders)
    )


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disks, "PATIENCE_S", 0.2)


def test_a_shared_folder_is_one_disk_and_separate_ones_are_several(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    assert probe([a, a, a]) == [Disks(of_rank=(0, 0, 0), hosts=HOSTS)] * 3
    assert probe([a, b, b]) == [TWO] * 3
    assert probe([b, a, b]) == [Disks(of_rank=(0, 1, 0), hosts=HOSTS)] * 3
    assert names(a / "status") == names(b / "status") == [], "the tokens are gone"


def test_tokens_of_a_start_that_was_killed_do_not_deceive_and_are_removed(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    (a / "status").mkdir(parents=True)
    for rank in (0, 1):
        (a / "status" / f"disk-{rank}-0123abcd.token").write_text("old")
    assert probe([a, b, b]) == [TWO] * 3
    assert names(a / "status") == ["disk-1-0123abcd.token"], "that rank's next visit removes it"


def test_a_folder_that_only_some_see_is_refused_by_the_hosts_names(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    for folder in (a, b):
        (folder / "status").mkdir(parents=True)

    def one_way(group: Threads) -> Disks:
        if group.rank == 1:  # sees what rank 0 writes, who does not see this rank's token
            real = disks._read

            def read(path: Path) -> str:
                return real(a / "status" / path.name) or real(path)

            return disks._numbered(b, group.gather(sorted_view(read, b, group)), HOSTS[:2])
        return disks._numbered(a, group.gather(sorted_view(disks._read, a, group)), HOSTS[:2])

    def sorted_view(read: Any, folder: Path, group: Threads) -> list[int]:
        (folder / "status" / f"t-{group.rank}").write_text(f"{group.rank}")
        group.gather(None)
        return [r for r in (0, 1) if read(folder / "status" / f"t-{r}") == f"{r}"]

    for error in on_all_ranks(one_way, 2):
        text = str(error)
        assert isinstance(error, ValueError)
        assert "worker-1 sees the files of worker-0, worker-0 not those of worker-1" in text
        assert "mount it alike on all nodes or name another output_dir" in text


def test_a_folder_that_cannot_be_written_is_told_on_all_ranks(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    for error in probe([tmp_path / "a", blocked, tmp_path / "a"]):
        assert isinstance(error, ValueError)
        assert "rank 1 (worker-1): Not a directory" in str(error)


def test_what_disks_say_of_themselves() -> None:
    assert (TWO.shared, TWO.count, TWO.leads(), TWO.host(1)) == (False, 2, (0, 1), "worker-1")
    assert [TWO.lead(rank) for rank in range(3)] == [True, True, False]
    assert TWO.ranks(1) == (1, 2)
    assert ONE.shared and ONE.describe() == "the run folder is one for all ranks"
    assert TWO.describe() == (
        "the run folder is on 2 disks, each keeps its part: worker-0 (rank 0); "
        "worker-1 (ranks 1, 2)"
    )
    alone = Disks.one()
    assert (alone.shared, alone.lead(0), alone.count) == (True, True, 1)


# ---- checkpoints on two disks


def test_each_disk_has_its_ranks_files_the_common_ones_and_the_same_manifest(
    tmp_path: Path,
) -> None:
    save(tmp_path, 3, TWO)
    first, second = (tmp_path / f"disk-{n}" / "step-00000003" for n in (0, 1))
    assert names(first) == ["manifest.json", "part-0.bin", "state.json"]
    assert names(second) == ["manifest.json", "part-1.bin", "part-2.bin", "state.json"]
    texts = {(folder / "manifest.json").read_bytes() for folder in (first, second)}
    told = json.loads(texts.pop())
    assert not texts, "the same on both"
    assert told["disks"] == [
        {"host": "worker-0", "ranks": [0]},
        {"host": "worker-1", "ranks": [1, 2]},
    ]
    assert [told["files"][f"part-{r}.bin"]["disk"] for r in range(3)] == [0, 1, 1]
    assert told["files"]["part-2.bin"]["host"] == "worker-1"
    for number in (0, 1):
        assert commit.read_pointer(tmp_path / f"disk-{number}") == "step-00000003"
    found = newest(tmp_path, TWO)
    assert found is not None
    mine, others = {"part-0.bin", "state.json"}, {"part-1.bin", "part-2.bin", "state.json"}
    assert found.good == (frozenset(mine), frozenset(others), frozenset(others))
    checked = verify.check_folder(first)
    assert checked.faults == [] and not checked.whole
    assert checked.elsewhere == {"worker-1": ["part-1.bin", "part-2.bin"]}


def test_only_rank_0s_common_files_and_facts_count(tmp_path: Path) -> None:
    def act(group: Threads) -> Path:
        common = {"state.json": f"of rank {group.rank}".encode()}
        facts = {"time": float(group.rank), "strategy": f"of rank {group.rank}"}
        where, write = place(tmp_path, TWO, group.rank), writer(1, group.rank)
        return commit.commit(where, 1, write, group, TWO, facts, common)

    all_well(act, 3)
    for number in (0, 1):
        folder = tmp_path / f"disk-{number}" / "step-00000001"
        assert (folder / "state.json").read_text() == "of rank 0"
        told = json.loads((folder / "manifest.json").read_text())
        assert (told["strategy"], told["time"]) == ("of rank 0", 0.0)


@pytest.mark.parametrize("unrenamed", [0, 1])
def test_a_crash_between_the_renames_of_two_disks_is_finished(
    unrenamed: int, tmp_path: Path
) -> None:
    save(tmp_path, 1, TWO)
    save(tmp_path, 2, TWO)
    there = tmp_path / f"disk-{unrenamed}"
    (there / "step-00000002").rename(there / ".step-00000002.partial")
    (there / "LATEST").write_text('"step-00000001"\n')
    assert newest_step(tmp_path, TWO) == 2
    for number in (0, 1):
        assert names(tmp_path / f"disk-{number}") == ["LATEST", "step-00000001", "step-00000002"]
        assert commit.read_pointer(tmp_path / f"disk-{number}") == "step-00000002"


def test_the_same_step_again_on_two_disks_and_one_has_not_renamed(tmp_path: Path) -> None:
    save(tmp_path, 2, TWO, mark=1)
    shutil.copytree(tmp_path / "disk-1", tmp_path / "kept")
    save(tmp_path, 2, TWO, mark=2)
    there = tmp_path / "disk-1"
    (there / "step-00000002").rename(there / ".step-00000002.partial")
    (tmp_path / "kept" / "step-00000002").rename(there / "step-00000002")
    assert newest_step(tmp_path, TWO) == 2
    for rank in range(3):
        folder = place(tmp_path, TWO, rank) / "step-00000002"
        assert (folder / f"part-{rank}.bin").read_bytes() == content(2, rank, mark=2)
    assert names(there) == ["LATEST", "step-00000002"], "the older save is superseded, not broken"


def test_a_lost_part_is_reported_with_the_nodes_name_and_the_older_one_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1, TWO)
    save(tmp_path, 2, TWO)
    shutil.rmtree(tmp_path / "disk-1" / "step-00000002")
    with caplog.at_level(logging.WARNING):
        assert newest_step(tmp_path, TWO) == 1
    told = "part-1.bin (written on worker-1) is on no node of this start"
    assert f"checkpoint step-00000002 is broken, going back: {told}" in caplog.text
    assert names(tmp_path / "disk-0") == ["LATEST", "step-00000001", "step-00000002.broken"]
    shutil.rmtree(tmp_path / "disk-1" / "step-00000001")
    with pytest.raises(ValueError, match=r"step-00000001: part-1\.bin \(written on worker-1\) is"):
        newest(tmp_path, TWO)


def test_damage_on_one_disk_is_reported_with_the_nodes_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1, TWO)
    save(tmp_path, 2, TWO)
    flip(tmp_path / "disk-1" / "step-00000002" / "part-2.bin")
    with caplog.at_level(logging.WARNING):
        assert newest_step(tmp_path, TWO) == 1
    assert "part-2.bin is not what was written (SHA-256 differs) on worker-1" in caplog.text
    for number in (0, 1):
        assert "step-00000002.broken" in names(tmp_path / f"disk-{number}")


def test_a_disk_that_cannot_be_looked_over_ends_the_start_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1, TWO)
    look = verify.survey

    def stale(root: Path) -> Any:
        if root.name == "disk-1":
            raise OSError(116, "Stale file handle")
        return look(root)

    monkeypatch.setattr(verify, "survey", stale)
    for told in on_all_ranks(
        lambda group: verify.newest_whole(place(tmp_path, TWO, group.rank), group, TWO), 3
    ):
        assert "looked over: rank 1 (worker-1): Stale file handle" in str(told)


def test_a_common_file_that_one_disk_lost_comes_from_another(tmp_path: Path) -> None:
    save(tmp_path, 1, TWO)
    folder = tmp_path / "disk-1" / "step-00000001"
    (folder / "state.json").unlink()
    found = newest(tmp_path, TWO)
    assert found is not None and found.step == 1
    assert all("state.json" in names_ for names_ in found.good)
    assert (folder / "state.json").read_bytes() == content(1, 9) and faults(folder) == []
    flip(tmp_path / "disk-0" / "step-00000001" / "state.json")
    assert newest_step(tmp_path, TWO) == 1
    assert faults(tmp_path / "disk-0" / "step-00000001") == []


def test_a_start_on_a_node_more_reads_through_the_others(tmp_path: Path) -> None:
    """Two disks wrote, a third one joins with an empty folder."""
    save(tmp_path, 1, TWO)
    more = Disks(of_rank=(0, 1, 2), hosts=("worker-0", "worker-1", "worker-2"))
    (tmp_path / "disk-2").mkdir()
    (tmp_path / "disk-2" / "LATEST").write_text('"step-00000077"\n')

    def act(group: Threads) -> tuple[verify.Found | None, bytes]:
        found = verify.newest_whole(place(tmp_path, more, group.rank), group, more)
        assert found is not None
        return found, found.read_common("state.json", group)

    for found, common in all_well(act, 3):
        assert found.good[2] == frozenset() and common == content(1, 9)
    assert names(tmp_path / "disk-2") == [], "a pointer to nothing would mislead"


def test_parts_that_were_copied_together_are_whole_for_one_node(tmp_path: Path) -> None:
    save(tmp_path, 1, TWO)
    folder = tmp_path / "disk-0" / "step-00000001"
    for name in ("part-1.bin", "part-2.bin"):
        shutil.copy(tmp_path / "disk-1" / "step-00000001" / name, folder)
    assert verify.check_folder(folder).whole
    found = verify.newest_whole(tmp_path / "disk-0", commit.Alone(), Disks.one())
    assert found is not None and found.step == 1


def test_each_disks_lead_rotates_its_own(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step, TWO)
    for number in (0, 1):
        there = tmp_path / f"disk-{number}"
        gone = [there / "step-00000002", there / "step-00000001"]
        assert rotation.rotate(there, 2, 4) == gone
        assert names(there) == ["LATEST", "step-00000003", "step-00000004"]
    assert newest_step(tmp_path, TWO) == 4


def test_a_common_file_that_changed_since_it_was_checked_is_told_on_all(tmp_path: Path) -> None:
    save(tmp_path, 1, ONE)

    def act(group: Threads) -> bytes:
        found = verify.newest_whole(tmp_path, group, ONE)
        assert found is not None
        group.gather(None)
        if group.rank == 0:
            flip(found.folder / "state.json")
        group.gather(None)
        return found.read_common("state.json", group)

    for error in on_all_ranks(act, 3):
        assert isinstance(error, ValueError) and "SHA-256 differs" in str(error)


def test_ranks_share_the_reading_by_size() -> None:
    sizes = {"a": 9, "b": 7, "c": 5, "d": 4, "e": 1}
    # 9 | 7 | 5 to the emptier (7+5), 4 to the other (9+4), 1 to the emptier (12+1)
    assert verify._share(sizes, 0, 2) == ["a", "d"] and verify._share(sizes, 1, 2) == [
        "b",
        "c",
        "e",
    ]


def test_every_record_of_a_file_is_flushed_before_it_counts(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught:
        files.write_file(tmp_path / "absent" / "x", [b"1"])
    assert caught.value.errno == 2 and caught.value.filename == str(tmp_path / "absent" / "x")
