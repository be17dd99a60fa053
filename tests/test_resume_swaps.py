"""Another strategy, precision or number of ranks takes over every bit of the optimizer's state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nursery
import pytest
from launching import records

WORDS = ["schedule.updates=200", "checkpoint.every_updates=100", *nursery.QUIET]
CHAINS = {
    "ZeRO-1 to DDP and back, other ranks": [
        ("zero1_bf16", 2),
        ("ddp_bf16", 4),
        ("ddp_bf16", 1),
        ("zero1_bf16", 2),
        ("zero1_bf16", 1),
    ],
    "fp16 to bf16 and back": [
        ("zero1_fp16", 2),
        ("zero1_bf16", 2),
        ("ddp_bf16", 2),
        ("zero1_fp16", 1),
    ],
}


def stop_after(run_file: Path, folder: Path, updates: int, **how: Any) -> nursery.Ended:
    """Train some updates and stop."""
    with nursery.start(run_file, *WORDS, folder=folder, **how) as ranks:
        ranks.until(lambda: ranks.update > 0, "an update")
        ranks.reach(ranks.update + updates - 1)
        (folder / "STOP").touch()
        ended = ranks.wait()
    assert set(ended.codes) == {75}, ended.text[-3000:]
    return ended


@pytest.mark.parametrize("name", CHAINS)
def test_moments_and_master_weights_go_over_bit_for_bit(
    tiny_run: Path, tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "run"
    legs = CHAINS[name]
    stop_after(tiny_run, folder, 3, arm=legs[0][0], ranks=legs[0][1])
    for arm, ranks in legs[1:]:
        checkpoint = nursery.newest(folder)
        before, told = nursery.arrays(checkpoint), nursery.state(checkpoint)
        assert {key.split("/")[0] for key in before} >= {"weight", "exp_avg", "exp_avg_sq"}
        assert all(before[key].abs().sum() > 0 for key in before if key.startswith("exp_avg"))
        # Loaded by the other engine and saved again by it, with nothing trained in between.
        how = {"arm": arm, "ranks": ranks, "script": nursery.PLANTED, "env": {"RESAVE": "1"}}
        ended = nursery.run(tiny_run, *WORDS, folder=folder, **how)
        assert set(ended.codes) == {75}, ended.text[-3000:]
        again = nursery.newest(folder)
        assert again.name == checkpoint.name
        after = nursery.state(again)
        assert (
            after["world"] == ranks
            and after["strategy"] != told["strategy"]
            or ranks != told["world"]
        )
        assert nursery.same(nursery.arrays(again), before)
        for key in ("adam_step",):
            assert after["scalars"][key] == told["scalars"][key]
        for key in ("progress", "data", "config", "length"):
            assert after.get(key) == told.get(key), key
        assert not nursery.faults(again)
        # And it trains on from there.
        stop_after(tiny_run, folder, 2, arm=arm, ranks=ranks)
        losses = [record["loss"] for record in records(folder)]
        assert losses[-1] < losses[0] + 0.05


def test_the_loss_scale_goes_on_in_fp16(tiny_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    stop_after(tiny_run, folder, 3, arm="zero1_fp16", ranks=1)
    told = nursery.state(nursery.newest(folder))["scalars"]
    assert told["loss_scale"] is not None
    how = {"script": nursery.PLANTED, "env": {"RESAVE": "1"}, "folder": folder}
    nursery.run(tiny_run, *WORDS, arm="zero1_fp16", ranks=2, **how)
    assert nursery.state(nursery.newest(folder))["scalars"] == told
