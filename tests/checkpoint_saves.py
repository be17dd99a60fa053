"""Saves of small files by ranks that are threads, on one disk or several."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from thread_ranks import Threads, all_well, on_all_ranks

from recipes.checkpoint import commit, files, verify
from recipes.checkpoint.disks import Disks

WORLD = 3
ONE = Disks(of_rank=(0,) * WORLD, hosts=("worker-0",) * WORLD)
TWO = Disks(of_rank=(0, 1, 1), hosts=("worker-0", "worker-1", "worker-1"))
ALONE = Disks.one()


def content(step: int, rank: int, mark: int = 0) -> bytes:
    """200 bytes of one rank."""
    return bytes([step % 256, rank, mark, 7]) * 50


def writer(step: int, rank: int, mark: int = 0) -> Callable[[Path], dict[str, files.FileRecord]]:
    """Writes one file a rank."""

    def write(folder: Path) -> dict[str, files.FileRecord]:
        name = f"part-{rank}.bin"
        return {name: files.write_file(folder / name, [content(step, rank, mark)])}

    return write


def place(root: Path, disks: Disks, rank: int) -> Path:
    """Where a rank's disk is: `root` itself if there is one disk."""
    return root if disks.shared else root / f"disk-{disks.of_rank[rank]}"


def save(
    root: Path, step: int, disks: Disks = ONE, mark: int = 0, facts: dict[str, Any] | None = None
) -> list[Any]:
    """Commit one checkpoint with every rank; each one's path or error."""

    def act(group: Threads) -> Path:
        write, common = writer(step, group.rank, mark), {"state.json": content(step, 9, mark)}
        about = {"strategy": "DDP bf16", **(facts or {})}
        where = place(root, disks, group.rank)
        return commit.commit(where, step, write, group, disks, about, common)

    return on_all_ranks(act, len(disks.of_rank))


def newest(root: Path, disks: Disks = ONE) -> verify.Found | None:
    """What a start finds; all ranks must find the same step."""

    def act(group: Threads) -> verify.Found | None:
        return verify.newest_whole(place(root, disks, group.rank), group, disks)

    found = all_well(act, len(disks.of_rank))
    assert len({one and (one.step, one.manifest.sha256, one.good) for one in found}) == 1
    return found[0]


def newest_step(root: Path, disks: Disks = ONE) -> int | None:
    """The step of what a start finds."""
    found = newest(root, disks)
    return found.step if found else None


def names(root: Path) -> list[str]:
    """What lies in a folder."""
    return sorted(p.name for p in root.iterdir())


def faults(folder: Path) -> list[str]:
    """What is wrong with a checkpoint on this machine."""
    return verify.check_folder(folder).faults


def cut(path: Path) -> None:
    """Lose the last three bytes."""
    path.write_bytes(path.read_bytes()[:-3])


def flip(path: Path) -> None:
    """Change one byte."""
    old = path.read_bytes()
    path.write_bytes(old[:9] + bytes([old[9] ^ 1]) + old[10:])
