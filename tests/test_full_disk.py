"""A disk that is full at a save of a run: the older checkpoint is whole and the run goes on."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nursery
import pytest
import rehearsing
from launching import records
from nursery import EXACT

pytestmark = rehearsing.rootful()
WORDS = ["schedule.updates=20", "checkpoint.every_updates=4", *nursery.QUIET]
SAVES = [4, 8, 12, 16, 20]
SIZE = 6_000_000  # bytes; a checkpoint of the tiny run has half a million
MOUNT = """
mount -t tmpfs -o size=$1 tmpfs "$0" && mkdir "$0/other" && echo ready && exec cat
"""


class Disk:
    """A small disk that only processes in its mount namespace see."""

    def __init__(self, place: Path, size: int) -> None:
        place.mkdir()
        words = ["unshare", "--mount", "--propagation", "private", "sh", "-c", MOUNT]
        self.holder = subprocess.Popen(
            [*words, str(place), str(size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.holder.stdout is not None
        assert self.holder.stdout.readline() == b"ready\n", "no tmpfs"
        self.folder = place / "run"
        self.place = nursery.Place(spaces={"mnt": f"/proc/{self.holder.pid}/ns/mnt"})
        self.seen = Path(f"/proc/{self.holder.pid}/root{self.folder}")  # from outside

    def close(self) -> None:
        assert self.holder.stdin is not None and self.holder.stdout is not None
        self.holder.stdin.close()
        self.holder.wait(10)
        self.holder.stdout.close()

    def run(self, run_file: Path, *words: str, ranks: int = 2, **env: str) -> nursery.Ended:
        """Start the run on this disk and wait for its end."""
        how: dict[str, Any] = {"script": nursery.PLANTED, "ranks": [self.place] * ranks}
        log = self.folder.parent.with_suffix(f".{len(list(self.folder.parent.parent.iterdir()))}")
        return nursery.run(run_file, *WORDS, *words, folder=self.folder, env=env, log=log, **how)

    def free(self) -> None:
        """Make room again."""
        (self.seen.parent / "ballast").unlink(missing_ok=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = Disk(tmp_path / "disk", SIZE)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def whole(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    nursery.good(tiny_run, *WORDS, folder=folder)
    return folder


@pytest.mark.parametrize("write", ["background", "blocking"])
def test_full_at_every_save_stop(whole: Path, tiny_run: Path, disk: Disk, write: str) -> None:
    committed = [-1, *SAVES]  # before each of them
    for index, step in enumerate(SAVES):
        env = {"FULL_AT": f"{step}:150000", "FAULTY": "0"}
        if index % 2:  # the space that was reported is not there: it ends in the middle of a file
            env |= {"LYING_DISK": "1", "FAULTY": "0,1"}
        ended = disk.run(tiny_run, f"checkpoint.write={write}", **env)
        assert set(ended.codes) == {2}, f"{step} {ended.codes} {ended.text[-3000:]}"
        assert f"step-{step:08d}" in ended.text or f"update {step}" in ended.text
        assert "No space left on device" in ended.text or " free, " in ended.text
        # The last start's save failed, so this one went on from the one before and saved it.
        assert nursery.resumed(ended) == committed[max(0, index - 1)]
        found = sorted(path.name for path in (disk.seen / "checkpoints").glob("*"))
        assert not [name for name in found if name.startswith(".step")], "it keeps the space"
        if index:
            assert nursery.newest(disk.seen).name == f"step-{committed[index]:08d}"
            assert not nursery.faults(nursery.newest(disk.seen))
        disk.free()
    ended = disk.run(tiny_run)
    assert not any(ended.codes), ended.text[-3000:]
    assert nursery.told(disk.seen, EXACT) == nursery.told(whole, EXACT)
    mine, reference = nursery.newest(disk.seen), nursery.newest(whole)
    assert nursery.same(nursery.arrays(mine), nursery.arrays(reference))


@pytest.mark.parametrize("write", ["background", "blocking"])
def test_full_at_a_save_going_on(whole: Path, tiny_run: Path, disk: Disk, write: str) -> None:
    full = "4:150000,7:-1,12:150000,15:-1"
    env = {"FULL_AT": full, "FAULTY": "0,1", "LYING_DISK": "1"}
    words = [f"checkpoint.write={write}", "checkpoint.on_failure=go_on"]
    ended = disk.run(tiny_run, *words, **env)
    assert not any(ended.codes), ended.text[-3000:]
    assert ended.text.count("going on, as checkpoint.on_failure says") == 2
    assert [record["step"] for record in records(disk.seen, "saves")] == [8, 16, 20]
    assert nursery.told(disk.seen, EXACT) == nursery.told(whole, EXACT)
    assert not nursery.faults(nursery.newest(disk.seen))


def test_no_room_for_the_run_is_told_before_it_starts(tiny_run: Path, tmp_path: Path) -> None:
    small = Disk(tmp_path / "small", 1_200_000)
    try:
        ended = small.run(tiny_run)
        assert set(ended.codes) == {2}, ended.text[-3000:]
        assert "checkpoint.keep" in ended.text and " free" in ended.text
        assert records(small.seen) == []
    finally:
        small.close()
