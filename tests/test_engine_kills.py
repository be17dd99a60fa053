"""kill -9 with the real engine, at instants in the saves and between them: nothing is lost.

The instants inside a save are operations on the checkpoints' folder (each write, fsync, rename, ...
of one rank, before, after or half-way); tests/test_kill_harness.py tries a thousand without the
engine. OCTET_SOAK=N tries N times as many.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import nursery
import pytest
from launching import records
from nursery import EXACT

KILLS = {2: 22, 1: 8}  # by the number of ranks
SOAK = int(os.environ.get("OCTET_SOAK", "1"))
UPDATES = 120 * SOAK
WORDS = [f"schedule.updates={UPDATES}", "checkpoint.every_updates=2", *nursery.QUIET]
HIGHEST = 48  # operations of a lead in two or three saves; a rank that is none has about a third


def planted(rng: random.Random, world: int, at: int) -> dict[str, str]:
    """Where the next start dies, as its environment."""
    rank = rng.randrange(world)
    common = {"FAULTY": str(rank)}
    if rng.random() < 0.2:
        return common | {"KILL_UPDATE": str(at + rng.randint(1, 5))}
    highest = HIGHEST if rank == 0 else HIGHEST // 3
    where = {"KILL_OPERATION": str(rng.randint(1, highest))}
    where["KILL_WHEN"] = rng.choice(["before", "after", "half"])
    return common | where | {"KILL_ALL": str(rng.randrange(2))}


def committed(folder: Path) -> int:
    """The newest step that was told to be saved; -1 if none was."""
    return max([record["step"] for record in records(folder, "saves")], default=-1)


def kill_again_and_again(run_file: Path, folder: Path, world: int, kills: int) -> Counter[str]:
    """Start, be killed, start again; counts the instants of each kind and the checkpoints lost."""
    rng, kept, found = random.Random(world), -1, Counter[str]()
    for _ in range(kills):
        words = [*WORDS, f"checkpoint.write={rng.choice(['background', 'blocking'])}"]
        env = planted(rng, world, max(kept, 0))
        how: dict[str, Any] = {"ranks": world, "script": nursery.PLANTED, "env": env}
        ended = nursery.run(run_file, *words, folder=folder, **how)
        said = [line for line in ended.text.splitlines() if line.startswith("planted: ")]
        assert len(said) == 1 and -9 in ended.codes, (env, ended.codes, ended.text[-3000:])
        assert all(ended.codes), (env, ended.codes, ended.text[-3000:])
        went_on = nursery.resumed(ended)
        found["in a save" if "operation" in said[0] else "between saves"] += 1
        found["lost"] += went_on < kept
        kept = max(kept, went_on, committed(folder))
    ended = nursery.good(run_file, *WORDS, folder=folder, ranks=world)
    found["lost"] += nursery.resumed(ended) < kept
    return found


def test_a_kill_at_any_instant_loses_nothing(
    tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Counter[str]()
    for world, kills in KILLS.items():
        whole, folder = tmp_path / f"whole-{world}", tmp_path / f"run-{world}"
        nursery.good(tiny_run, *WORDS, folder=whole, ranks=world)
        found += kill_again_and_again(tiny_run, folder, world, kills * SOAK)
        # The data, the numbers and the arrays are those of the run that nothing ever happened to.
        assert nursery.told(folder, EXACT) == nursery.told(whole, EXACT)
        mine, reference = nursery.newest(folder), nursery.newest(whole)
        assert nursery.same(nursery.arrays(mine), nursery.arrays(reference))
        assert nursery.random_states(mine) == nursery.random_states(reference)
        names = sorted(path.name for path in (folder / "checkpoints").iterdir())
        assert names == ["LATEST", f"step-{UPDATES - 2:08d}", f"step-{UPDATES:08d}"]
        assert not [f for name in names[1:] for f in nursery.faults(folder / "checkpoints" / name)]
    with capsys.disabled():
        total, lost = found["in a save"] + found["between saves"], found["lost"]
        where = f"{found['in a save']} in a save, {found['between saves']} between saves"
        print(f"\nengine kills: {total} ({where}), lost: {lost}")
    assert not found["lost"]
