"""`octet checkpoint list|verify|prune`: what a user sees of whole, broken and scattered saves."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny
from launching import ROOT
from thread_ranks import Threads, all_well

from recipes import cli
from recipes.artifacts import shelf
from recipes.checkpoint import commit, files, lock
from recipes.checkpoint.disks import Disks

SHARED = Disks(of_rank=(0, 0), hosts=("worker-0", "worker-0"))
APART = Disks(of_rank=(0, 1), hosts=("worker-0", "worker-1"))


def save(
    step: int,
    *folders: Path,
    disks: Disks = SHARED,
    size: int = 1000,
    ago_s: float = 0.0,
    milestone: bool = False,
) -> None:
    """A checkpoint of two ranks, whose run folders are `folders` (one, or one each)."""

    def act(group: Threads) -> None:
        name = f"arrays-0000{group.rank}.safetensors"

        def write(beside: Path) -> dict[str, files.FileRecord]:
            content = bytes([step % 256, group.rank]) * (size // 2)
            return {name: files.write_file(beside / name, [content])}

        facts = {"strategy": "ZeRO-1 bf16", "time": time.time() - ago_s, "milestone": milestone}
        root = folders[group.rank % len(folders)] / "checkpoints"
        facts |= {"reason": "milestone" if milestone else "updates"}
        commit.commit(root, step, write, group, disks, facts, {"state.json": b"{}"})

    all_well(act, 2)


def octet(*words: object) -> int:
    return cli.main(["checkpoint", *map(str, words)])


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def folder_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


# ---- list


def test_the_list_tells_each_checkpoint_and_each_leftover(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(100, tmp_path, ago_s=3 * 86_400, milestone=True)
    save(900, tmp_path, ago_s=7_300)
    save(1000, tmp_path, ago_s=240)
    (folder_of(tmp_path, 900) / "arrays-00001.safetensors").unlink()
    (tmp_path / "checkpoints" / ".step-00001100.partial").mkdir()
    save(950, tmp_path)
    folder_of(tmp_path, 950).rename(tmp_path / "checkpoints" / "step-00000950.broken")
    (tmp_path / "checkpoints" / "LATEST").write_text('"step-00001000"\n')
    (tmp_path / "checkpoints" / "notes").mkdir()  # a user's
    assert octet("list", tmp_path) == 0
    head, *rows = lines(capsys)
    assert head == "step age size ranks strategy why state"
    assert rows == [
        "(1100) ? 0 B ? ? ? a save is going on, or was interrupted",
        "1000 4 min 2.0 kB 2 ZeRO-1 bf16 updates whole (newest)",
        "(950) 0 s 2.0 kB 2 ZeRO-1 bf16 updates set aside at a resume: its bytes differ",
        "900 2.0 h 2.0 kB 2 ZeRO-1 bf16 updates arrays-00001.safetensors is missing",
        "100 3 days 2.0 kB 2 ZeRO-1 bf16 milestone, kept for ever whole",
    ]


def test_the_list_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(7, tmp_path)
    for path in (tmp_path, tmp_path / "checkpoints"):
        assert octet("list", path, "--json") == 0
        (row,) = json.loads(capsys.readouterr().out)
        assert (row["step"], row["whole"], row["state"], row["newest"]) == (7, True, "whole", True)
        assert (row["bytes"], row["world"], row["reason"]) == (2002, 2, "updates")


def test_a_run_file_stands_for_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_file = tiny.write_run(tmp_path, tmp_path / "corpus")
    assert octet("list", run_file) == 2
    assert "does not exist; name a run folder" in capsys.readouterr().err
    save(7, tmp_path / "outputs" / "tiny")
    assert octet("list", run_file) == 0
    assert lines(capsys)[1].startswith("7 ")


def test_an_unreadable_manifest_is_one_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(7, tmp_path)
    path = folder_of(tmp_path, 7) / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"world": 2', b'"world": 3'))
    assert octet("list", tmp_path) == 0
    (row,) = [row for row in lines(capsys) if row.startswith("7 ")]
    assert "manifest.json is not what was written" in row
    assert octet("verify", tmp_path) == 2


def test_parts_on_other_nodes_are_told_with_the_node(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    save(7, here, there, disks=APART)
    assert octet("list", here) == 0
    assert lines(capsys)[1].endswith("1 files elsewhere: worker-1 (newest)")
    assert octet("verify", here) == 0
    assert lines(capsys) == [
        "step-00000007: this machine's part is whole",
        "arrays-00001.safetensors: on the disk of worker-1, not read here; verify there",
    ]
    (folder_of(here, 7) / "state.json").write_text("[]")
    assert octet("verify", here) == 2
    assert "state.json is not what was written (SHA-256 differs)" in lines(capsys)
    assert octet("verify", there) == 0
    assert "worker-0, not read here" in lines(capsys)[1]


# ---- verify


def test_verify_reads_every_byte_and_tells_every_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (7, 8, 9):
        save(step, tmp_path)
    assert octet("verify", tmp_path) == 0
    assert lines(capsys) == [f"step-0000000{step}: whole" for step in (9, 8, 7)]
    path = folder_of(tmp_path, 8) / "arrays-00000.safetensors"
    flipped = bytearray(path.read_bytes())
    flipped[500] ^= 1
    path.write_bytes(flipped)
    (folder_of(tmp_path, 8) / "arrays-00001.safetensors").write_bytes(b"short")
    assert octet("list", tmp_path) == 0
    assert "is not what was written" not in capsys.readouterr().out  # sizes only
    assert octet("verify", tmp_path) == 2
    assert lines(capsys) == [
        "step-00000009: whole",
        "step-00000008: BROKEN",
        "arrays-00000.safetensors is not what was written (SHA-256 differs)",
        "arrays-00001.safetensors has 5 bytes, expected 1000",
        "step-00000007: whole",
    ]
    assert octet("verify", folder_of(tmp_path, 7)) == 0
    assert octet("verify", folder_of(tmp_path, 8)) == 2


def test_the_bar_counts_what_will_be_read(tmp_path: Path) -> None:
    save(7, tmp_path)
    folders = shelf.to_verify(tmp_path)
    seen: list[int] = []
    assert [checked.whole for _, checked in shelf.verified(folders, seen.append)] == [True]
    assert sum(seen) == shelf.bytes_here(folders) == 2002


# ---- prune


def test_prune_deletes_what_crashes_left_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (7, 8):
        save(step, tmp_path)
    root = tmp_path / "checkpoints"
    (root / ".step-00000009.partial").mkdir()
    (root / ".step-00000009.partial" / "arrays-00000.safetensors").write_bytes(b"x" * 500)
    (root / ".step-00000001.stale").mkdir()
    (root / "mine").mkdir()
    before = sorted(path.name for path in root.iterdir())
    assert octet("prune", tmp_path, "--dry-run") == 0
    assert lines(capsys) == [
        "would go: .step-00000001.stale, 0 B, its deletion was interrupted",
        "would go: .step-00000009.partial, 500 B, its save was interrupted",
        "500 B would be free",
    ]
    assert sorted(path.name for path in root.iterdir()) == before
    assert octet("prune", tmp_path) == 0
    assert lines(capsys)[-1] == "500 B freed"
    assert sorted(p.name for p in root.iterdir()) == [
        "LATEST",
        "mine",
        "step-00000007",
        "step-00000008",
    ]
    assert octet("prune", tmp_path) == 0
    assert lines(capsys) == ["nothing to delete"]


def test_prune_keeps_as_many_as_asked_and_milestones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2, 3, 4):
        save(step, tmp_path, milestone=step == 1)
    (folder_of(tmp_path, 4) / "state.json").write_text("{ }")  # other bytes: not the newest whole
    assert octet("prune", tmp_path, "--keep", 1) == 0
    (told, freed) = lines(capsys)
    assert re.fullmatch(r"deleted: step-00000002, [\d.]+ kB, older than the newest 1", told)
    assert re.fullmatch(r"[\d.]+ kB freed", freed)
    left = sorted(p.name for p in (tmp_path / "checkpoints").glob("step-*"))
    assert left == ["step-00000001", "step-00000003", "step-00000004"]
    assert octet("prune", tmp_path, "--keep", 0) == 2
    assert "--keep 0: expected 1 or more" in capsys.readouterr().err


def test_prune_waits_for_no_run_and_touches_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The lock is another process's: one process never finds its own."""
    save(7, tmp_path)
    (tmp_path / "checkpoints" / ".step-00000009.partial").mkdir()
    code = f"""
import sys, time; sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from recipes.checkpoint.lock import FolderLock
with FolderLock(Path({str(tmp_path)!r}) / "lock", {{"job": "4711"}}):
    print("held", flush=True)
    sys.stdin.readline()
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes, text=True) as holder:  # type: ignore[call-overload]
        assert holder.stdout.readline() == "held\n"
        assert octet("prune", tmp_path, "--keep", 1) == 2
        said = capsys.readouterr().err
        assert f"is being trained by pid {holder.pid}" in said and "(job 4711)" in said
        holder.communicate("\n")
    assert (tmp_path / "checkpoints" / ".step-00000009.partial").exists()
    assert octet("prune", tmp_path) == 0


# ---- the verb


def test_help_and_slips(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert octet("--help") == 0
    said = capsys.readouterr().out
    assert re.findall(r"octet checkpoint ([a-z]+) ", said) == ["list", "verify", "prune", "import"]
    assert octet("lst") == 2
    assert "no action 'lst'; did you mean list?" in capsys.readouterr().err
    assert octet() == 2
    (tmp_path / "empty").mkdir()
    assert octet("verify", tmp_path / "empty") == 2
    assert "holds no checkpoints; name a run folder" in capsys.readouterr().err
    (tmp_path / "checkpoints").mkdir()
    assert octet("list", tmp_path) == 0
    assert capsys.readouterr().out.endswith("no checkpoint yet\n")
    assert octet("verify", tmp_path) == 2


def test_listing_loads_no_torch(tmp_path: Path) -> None:
    save(7, tmp_path)
    code = f"""
import sys
from recipes import cli
for verb in ("list", "verify", "prune"):
    assert cli.main(["checkpoint", verb, {str(tmp_path)!r}]) == 0
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((0, "0 s"), (89, "89 s"), (91, "2 min"), (5399, "90 min"), (5401, "1.5 h")),
        *((36_000, "10 h"), (172_799, "48 h"), (172_801, "2 days"), (10_000_000, "116 days")),
    ],
)
def test_ages(seconds: float, text: str) -> None:
    assert shelf.age(seconds) == text


def test_a_folder_that_cannot_be_written_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(7, tmp_path)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device", str(tmp_path / "lock"))

    monkeypatch.setattr(lock.os, "pwrite", full)
    assert octet("prune", tmp_path) == 2
    assert f"No space left on device ({tmp_path / 'lock'})" in capsys.readouterr().err
    assert folder_of(tmp_path, 7).exists()


@pytest.mark.parametrize(
    ("words", "name"),
    [(["verify"], "step-00000061"), (["list"], "step-00000061"), (["prune"], "step-00000060")],
)
def test_one_checkpoint_stands_for_no_other(
    words: list[str], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistyped step must neither be called whole nor cost its neighbours."""
    root = tmp_path / "checkpoints"
    for step in (50, 60):
        (root / f"step-{step:08d}").mkdir(parents=True)
    more = ["--keep", "1"] if words == ["prune"] else []
    assert cli.main(["checkpoint", *words, str(root / name), *more]) == 2
    assert f"{root / name} " in capsys.readouterr().err
    assert len(list(root.iterdir())) == 2
