"""Saves on a small disk with less and less room: what becomes of the older checkpoint?

    unshare -m sh -c 'mount -t tmpfs -o size=400k tmpfs DIR && exec python full_disk.py DIR'

Prints JSON: how many saves did not fit and how many did.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from thread_ranks import Threads, on_all_ranks

from recipes.checkpoint import commit, files, rotation, verify
from recipes.checkpoint.disks import Disks

DISKS, SIZE, BLOCK = Disks.one(2), 30_000, 4096
NO_SPACE = os.strerror(errno.ENOSPC)


def save(root: Path, step: int) -> list[Path | Exception]:
    """Two ranks, 30,000 bytes each."""

    def act(group: Threads) -> Path:
        def write(beside: Path) -> dict[str, files.FileRecord]:
            name = f"part-{group.rank}"
            return {name: files.write_file(beside / name, [bytes([step]) * SIZE])}

        return commit.commit(root, step, write, group, DISKS, {}, {"state.json": b"x" * 5000})

    return on_all_ranks(act, 2)


def newest(root: Path) -> int:
    """What a start finds."""
    found = on_all_ranks(lambda group: verify.newest_whole(root, group, DISKS), 2)
    assert all(isinstance(one, verify.Found) for one in found), found
    return int(found[0].step)


def room(folder: Path) -> int:
    """Free blocks."""
    return os.statvfs(folder).f_bavail


def main() -> int:
    """Every amount of room from none to plenty, a block more each time."""
    folder, failed, fitted, step = Path(sys.argv[1]), 0, 0, 2
    root, filler = folder / "checkpoints", folder / "filler"
    save(root, 1)
    for blocks in range(0, 26):
        before = sorted(p.name for p in root.iterdir())
        filler.write_bytes(bytes((room(folder) - blocks) * BLOCK))
        assert room(folder) == blocks
        results = save(root, step)
        errors = [str(r) for r in results if isinstance(r, OSError)]
        if errors:
            failed += 1
            assert len(errors) == 2 and NO_SPACE in errors[0], errors
            assert f"checkpoint step-{step:08d} was not written: rank" in errors[0]
            assert room(folder) == blocks, "the space is free again"
            assert sorted(p.name for p in root.iterdir()) == before
            assert newest(root) == step - 1
        else:
            fitted += 1
            assert newest(root) == step
            step += 1
            rotation.rotate(root, 2, step)
        filler.unlink()
    assert not isinstance(save(root, step)[0], Exception)
    assert newest(root) == step
    print(json.dumps({"failed": failed, "fitted": fitted}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
