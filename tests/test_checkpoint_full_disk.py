"""No space, or any other error, at every operation of a save: it is told, and nothing is lost."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_saves import ONE, TWO, content, names, newest_step, place, save
from rehearsing import REQUIRED

from recipes.checkpoint.disks import Disks

DRIVER = Path(__file__).parent / "drivers" / "full_disk.py"
COUNTED = ("open", "write", "fsync", "rename", "mkdir")


class Failing:
    """Lets one of a save's file operations fail; counts them all."""

    def __init__(self, root: Path, at: int) -> None:
        self.root, self.at, self.done, self.hit = root, at, 0, ""
        self.lock = threading.Lock()

    def wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def act(*given: Any, **named: Any) -> Any:
            where = given[0]
            path = Path(f"/proc/self/fd/{where}").readlink() if isinstance(where, int) else where
            reading = name == "open" and not given[1] & os.O_CREAT
            if reading or not Path(path).is_relative_to(self.root):
                return real(*given, **named)
            with self.lock:
                here = self.done == self.at
                self.done += 1
            if here:
                self.hit = f"{name} {path}"
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            return real(*given, **named)

        return act

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name in COUNTED:
            patch.setattr(os, name, self.wrapped(name, getattr(os, name)))


@pytest.mark.parametrize("disks", [ONE, TWO], ids=["one disk", "two disks"])
@pytest.mark.parametrize("step", [1, 2], ids=["the same step again", "over an older one"])
def test_an_error_at_any_operation_is_told_on_all_ranks_and_loses_nothing(
    step: int, disks: Disks, tmp_path: Path
) -> None:
    before = tmp_path / "before"
    save(before, 1, disks)
    told, at = 0, 0
    while True:
        root = tmp_path / "run"
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(before, root)
        failing = Failing(root, at)
        with pytest.MonkeyPatch.context() as patch:
            failing.install(patch)
            results = save(root, step, disks, mark=1)
        if not failing.hit:
            break
        failed = {isinstance(result, OSError) for result in results}
        assert len(failed) == 1, f"{failing.hit}: not alike on all ranks: {results}"
        if failed == {True}:
            told += 1
            assert "No space left on device" in str(results[0]), results[0]
            for number in range(disks.count):
                left = names(place(root, disks, disks.leads()[number]))
                assert left == ["LATEST", "step-00000001"], failing.hit
        now, mark = (1, 0) if failed == {True} else (step, 1)
        assert newest_step(root, disks) == now, failing.hit
        for rank in range(3):
            path = place(root, disks, rank) / f"step-{now:08d}" / f"part-{rank}.bin"
            assert path.read_bytes() == content(now, rank, mark), failing.hit
        save(root, 3, disks)
        assert newest_step(root, disks) == 3
        at += 1
    assert told > 15 and at - told < 16, (told, at)


def private_mounts() -> str:
    """Why there can be no small disk here; empty if there can."""
    if not shutil.which("unshare"):
        return "unshare is not installed"
    tried = subprocess.run(
        ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, text=True
    )
    return tried.stderr.strip()


@pytest.mark.rootful
def test_a_small_disk_that_is_full_at_every_block_of_a_save(tmp_path: Path) -> None:
    if (reason := private_mounts()) and os.environ.get(REQUIRED) != "1":
        pytest.skip(f"no private mount: {reason}")
    python, driver, folder = map(shlex.quote, (sys.executable, str(DRIVER), str(tmp_path)))
    script = f"mount -t tmpfs -o size=400k tmpfs {folder} && exec {python} {driver} {folder}"
    done = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout)
    assert told["failed"] >= 18 and told["fitted"] >= 5, told
    assert names(tmp_path) == [], "the disk was private, nothing is left"
