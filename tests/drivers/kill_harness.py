"""Real processes that are killed at every operation of a save: was a checkpoint lost?

    python tests/drivers/kill_harness.py FOLDER INSTANTS PART PARTS

Ranks are forked from this process, which has no torch, and joined by socket pairs. Prints JSON:
instants tried, what was lost, and how often the old and the new checkpoint were found.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "drivers")]

from dying import Spy, run_ranks
from thread_ranks import Threads, all_well

from recipes.checkpoint import commit, files, rotation, verify
from recipes.checkpoint.disks import Disks

files.CHUNK = 64  # so that small files take several writes
FOREIGN = {"notes.txt": "kept", "best/model.bin": "kept", ".step-1.partial/a": "kept"}


@dataclass(frozen=True)
class Setting:
    """What is saved over what, by whom, where to."""

    scenario: str
    disks: Disks

    def __str__(self) -> str:
        return f"{self.scenario}, disks {self.disks.of_rank}"

    def root(self, folder: Path, rank: int) -> Path:
        return folder / f"disk-{self.disks.of_rank[rank]}" / "checkpoints"

    @property
    def world(self) -> int:
        return len(self.disks.of_rank)

    def all(self, act: Callable[[Threads], Any]) -> list[Any]:
        """In this process, one thread a rank; an error of one is raised."""
        return all_well(act, self.world)


def content(step: int, generation: int, rank: int, part: int) -> bytes:
    return f"{step} {generation} {rank} {part} ".encode() * 12


def save(
    setting: Setting, folder: Path, group: Any, step: int, generation: int, fail: bool = False
) -> Path:
    def write(beside: Path) -> dict[str, files.FileRecord]:
        records = {}
        for part in range(2):
            name = f"part-{group.rank}-{part}.bin"
            data = content(step, generation, group.rank, part)
            records[name] = files.write_file(beside / name, [data])
            if fail and group.rank == 1:
                raise OSError(28, "No space left on device", name)
        return records

    root, facts = setting.root(folder, group.rank), {"milestone": step == 2}
    common = {"state.json": content(step, generation, 99, 0)}
    return commit.commit(root, step, write, group, setting.disks, facts, common)


def prepare(setting: Setting, folder: Path) -> None:
    """What is there before the save that is killed."""
    steps = {"first": 0, "over": 1, "again": 2, "rotate": 4, "fails": 1, "fails again": 1}
    for step in range(1, steps[setting.scenario] + 1):
        setting.all(lambda group, step=step: save(setting, folder, group, step, 0))
    for disk in range(setting.disks.count):
        root = folder / f"disk-{disk}" / "checkpoints"
        for name, text in FOREIGN.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)


OLD_NEW: dict[str, tuple[tuple[int, int] | None, tuple[int, int] | None]] = {
    "first": (None, (1, 1)),
    "over": ((1, 0), (2, 1)),
    "again": ((2, 0), (2, 1)),
    "rotate": ((4, 0), (5, 1)),
    "fails": ((1, 0), (1, 0)),
    "fails again": ((1, 0), (1, 0)),
}


def act(setting: Setting, folder: Path, group: Any) -> None:
    """What the ranks do when they are killed."""
    scenario = setting.scenario
    step, generation = {"fails": (2, 1), "fails again": (1, 1)}.get(
        scenario, OLD_NEW[scenario][1] or (0, 0)
    )
    try:
        save(setting, folder, group, step, generation, fail=scenario.startswith("fails"))
    except OSError:
        if not scenario.startswith("fails"):
            raise
        return
    os.close(os.open(folder / f"returned-{group.rank}", os.O_WRONLY | os.O_CREAT))
    if scenario == "rotate" and setting.disks.lead(group.rank):
        rotation.rotate(setting.root(folder, group.rank), 2, step)


def recover(setting: Setting, folder: Path, group: Any) -> verify.Found | None:
    return verify.newest_whole(setting.root(folder, group.rank), group, setting.disks)


def inspect(setting: Setting, folder: Path) -> str:
    """After the crash: old, new or nothing is found; raises AssertionError for what is lost."""
    old, new = OLD_NEW[setting.scenario]
    returned = list(folder.glob("returned-*"))
    pointed = [commit.read_pointer(setting.root(folder, r)) for r in setting.disks.leads()]
    for rank, name in zip(setting.disks.leads(), pointed, strict=True):
        root = setting.root(folder, rank)
        if name is not None and not (root / f".{name}.replaced").exists():
            assert not verify.check_folder(root / name).faults, f"LATEST misleads to {name}"
    found = setting.all(lambda group: recover(setting, folder, group))
    which = identify(setting, folder, found)
    assert which in (old, new), f"found {which}, neither {old} nor {new}"
    assert which == new or not returned, f"{new} was committed, found {which}"
    latest = max((int(name[5:]) for name in pointed if name), default=0)
    assert latest <= (which[0] if which else 0), f"LATEST was {latest}, found {which}"
    clean(setting, folder, found[0])
    following(setting, folder, 6)
    return "nothing" if which is None else "new" if which == new and new != old else "old"


def identify(
    setting: Setting, folder: Path, found: list[verify.Found | None]
) -> tuple[int, int] | None:
    """Step and generation of what was found, every byte of every file looked at."""
    if found[0] is None:
        return None
    generations = set()
    for rank, one in enumerate(found):
        assert one is not None and one.step == found[0].step
        state = (one.folder / "state.json").read_bytes()
        generations.add(int(state.split()[1]))
        for part in range(2):
            data = (one.folder / f"part-{rank}-{part}.bin").read_bytes()
            generation = int(data.split()[1])
            assert data == content(one.step, generation, rank, part), f"rank {rank}: {data!r}"
            generations.add(generation)
    assert len(generations) == 1, f"files of several saves: {generations}"
    return found[0].step, generations.pop()


def clean(setting: Setting, folder: Path, found: verify.Found | None) -> None:
    """No leftovers, a right pointer, and foreign files as they were."""
    for rank in setting.disks.leads():
        root = setting.root(folder, rank)
        for name, text in FOREIGN.items():
            assert (root / name).read_text() == text, name
        own = {p.name for p in root.iterdir()} - {name.split("/")[0] for name in FOREIGN}
        odd = {name for name in own if not commit.COMMITTED.match(name)}
        assert odd == ({"LATEST"} if found else set()), f"left: {sorted(own)}"
        assert commit.read_pointer(root) == (found.folder.name if found else None)
        for path in commit.committed(root):
            assert not verify.check_folder(path).faults, f"{path.name} is not whole"
    if setting.scenario == "rotate" and found is not None:
        steps = {int(p.name[5:]) for p in commit.committed(setting.root(folder, 0))}
        assert {2, found.step} <= steps and len(steps - {2}) >= 2, f"left: {steps}"


def following(setting: Setting, folder: Path, step: int) -> None:
    """The next save works, and is what is found afterwards."""
    setting.all(lambda group: save(setting, folder, group, step, 7))
    found = setting.all(lambda group: recover(setting, folder, group))
    assert identify(setting, folder, found) == (step, 7)


def settings() -> list[Setting]:
    layouts = [(0, 0), (0, 1), (0, 0, 0), (0, 1, 1), (0, 0, 1)]
    made = []
    for scenario, of_rank in itertools.product(OLD_NEW, layouts):
        hosts = tuple(f"worker-{disk}" for disk in of_rank)
        made.append(Setting(scenario, Disks(of_rank=of_rank, hosts=hosts)))
    return made


@dataclass(frozen=True)
class Instant:
    """Where a rank dies; `again`: where another one dies while the ranks recover from that."""

    setting: Setting
    victim: int
    at: int
    operation: str
    when: str
    everyone: bool
    again: tuple[int, int, str] | None = None

    def __str__(self) -> str:
        who = f"rank {self.victim}{' and all others' if self.everyone else ''}"
        text = f"{self.setting}: {who} {self.when} operation {self.at} ({self.operation})"
        return text + (
            f", then rank %d at %d, {self.again[2]}" % self.again[:2] if self.again else ""
        )


def instants(work: Path) -> list[Instant]:
    """Every operation of every rank in every setting, from runs that nobody dies in."""
    found = []
    for setting in settings():
        _, seen = run_ranks(
            setting.world, fresh(setting, work), -1, Spy(), partial(act, setting, work / "run")
        )
        for rank, operations in enumerate(seen):
            assert operations or not setting.disks.lead(rank), (
                f"{setting}: rank {rank} does nothing"
            )
            for at, operation in enumerate(operations):
                moments = ["before", "after"] + ["half"] * (operation == "write")
                for when, everyone in itertools.product(moments, (False, True)):
                    found.append(Instant(setting, rank, at, operation, when, everyone))
    for one in [i for i in found if i.operation in ("rename", "mkdir", "rmdir") and i.everyone]:
        places = itertools.product(range(one.setting.world), range(12), ("before", "after"))
        found += [replace(one, again=place) for place in places]
    return found


def fresh(setting: Setting, work: Path) -> Path:
    """A copy of what is there before the save that is killed."""
    template = work / f"template {setting}"
    if not template.exists():
        template.mkdir(parents=True)
        prepare(setting, template)
    folder = work / "run"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(template, folder)
    return folder


def attempt(one: Instant, work: Path) -> str | None:
    """Kill at one instant, start again and look; None if nobody died."""
    setting, folder = one.setting, fresh(one.setting, work)
    spy = Spy(at=one.at, when=one.when, everyone=one.everyone)
    died, _ = run_ranks(setting.world, folder, one.victim, spy, partial(act, setting, folder))
    if died and one.again is not None:
        victim, at, when = one.again
        spy = Spy(at=at, when=when, everyone=True)
        doing = partial(recover, setting, folder)
        died, _ = run_ranks(setting.world, folder, victim, spy, doing)
    return inspect(setting, folder) if died else None


def main() -> int:
    """Try this part's share of the instants."""
    logging.disable(logging.INFO)
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("recipes").addHandler(handler)
    work, wanted, part, parts = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    every = instants(work)
    random.Random(4).shuffle(every)
    counts: Counter[str] = Counter()
    lost = []
    for one in every[part::parts]:
        if counts["tried"] >= wanted:
            break
        told.clear()
        try:
            found = attempt(one, work)
            assert not [text for text in told if "broken" in text], told
        except (AssertionError, OSError, ValueError, RuntimeError) as error:
            lost.append(f"{one}: {error!r}")
            found = "lost"
        if found is not None:
            counts.update(["tried", found, one.setting.scenario])
            counts["killed again in the recovery"] += one.again is not None
    assert "torch" not in sys.modules, "a process with torch's threads must not be forked"
    print(json.dumps({"counts": counts, "lost": lost[:20], "possible": len(every)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
