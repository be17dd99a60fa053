"""What must not go on, ends at once, on every rank, with the reason; and nothing is lost by it."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path
from typing import Any

import nursery
import pytest
import tiny
from data_helpers import corrupt
from launching import records, status

from recipes.data.source import Units, scan_source
from recipes.runfile import load_run

WORDS = ["schedule.updates=2000", "checkpoint.every_updates=5", *nursery.QUIET]


def stop_at(run_file: Path, folder: Path, update: int, *words: str, **how: Any) -> nursery.Ended:
    """Train up to an update and stop."""
    with nursery.start(run_file, *WORDS, *words, folder=folder, **how) as ranks:
        ranks.reach(update)
        ranks.signal(0, signal.SIGTERM)
        ended = ranks.wait()
    assert set(ended.codes) == {75}, ended.text[-3000:]
    return ended


def test_two_runs_on_one_folder(tiny_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with nursery.start(tiny_run, *WORDS, folder=folder) as first:
        first.reach(3)
        for words in ([], ["--fresh"]):
            second = nursery.run(tiny_run, *WORDS, *words, folder=folder)
            assert set(second.codes) == {2}, second.text[-3000:]
            told = second.text
            assert f"{folder} is being trained by pid {first.pids[0]}" in told, told[-2000:]
            assert told.count("stop that run, or name another output_dir") == 1
            # Whoever wants to stop the living run finds its processes.
            assert [status(folder, rank)["pid"] for rank in (0, 1)] == list(first.pids)
        at = nursery.steps(folder)[-1]
        first.reach(at + 1)
        first.kill()  # a dead run's lock holds nobody up
        first.wait()
    began = time.monotonic()
    ended = stop_at(tiny_run, folder, at + 5)
    assert nursery.resumed(ended) >= at - 5
    assert time.monotonic() - began < 30


def test_a_changed_setting_is_named_with_and_without_the_record(
    tiny_run: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    stop_at(tiny_run, folder, 3)
    for gone in (False, True):
        if gone:
            (folder / "run.json").unlink()
        changed = ["optim.lr=0.02", "model.config.n_layer=3", "data.block_rows=5"]
        ended = nursery.run(tiny_run, *WORDS, *changed, folder=folder)
        assert set(ended.codes) == {2}, ended.text[-3000:]
        assert ended.text.count("optim.lr: 0.01 -> 0.02") == 1, ended.text[-3000:]
        assert "model.config.n_layer: 2 -> 3" in ended.text
        assert "data.block_rows: 4 -> 5" in ended.text
    before = nursery.newest(folder)
    ended = stop_at(tiny_run, folder, int(before.name[5:]) + 3)  # set back, it goes on
    assert nursery.resumed(ended) == int(before.name[5:])


def test_a_rank_that_does_not_come_to_the_save_is_named(tiny_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    env = {"ABSENT_UPDATE": "10", "FAULTY": "1", "OCTET_ENTRY_S": "3"}
    how: dict[str, Any] = {"script": nursery.PLANTED, "env": env}
    with nursery.start(tiny_run, *WORDS, folder=folder, **how) as ranks:
        ranks.until(lambda: 0 in ranks.codes, "the end of rank 0")
        seconds = time.time() - records(folder)[-1]["time"]
        assert ranks.codes[0] == 1, ranks.text()[-3000:]
        told = ranks.text()
    assert re.search(
        r"rank\(s\) 1 \(\S+\) did not come to the save of update 10 within 3 s", told
    ), told[-3000:]
    assert seconds < 10
    assert status(folder, 0)["exit_code"] == 1
    assert nursery.newest(folder).name == "step-00000005"
    assert not nursery.faults(nursery.newest(folder))
    ended = stop_at(tiny_run, folder, 12)
    assert nursery.resumed(ended) == 5


@pytest.mark.parametrize("arm", ["zero1_bf16", "ddp_bf16"])
def test_unreadable_data_saves_the_last_update_and_goes_on_round_it(
    tmp_path: Path, arm: str
) -> None:
    corpus = tiny.write_corpus(tmp_path / "corpus")
    run_file = tiny.write_run(tmp_path, corpus)
    folder = tmp_path / "run"
    words = ["data.read_attempts=1", "checkpoint.every_updates=1000"]
    stop_at(run_file, folder, 2, *words, arm=arm)
    run = load_run(str(run_file), [*WORDS, *words])
    units = Units(run.data, scan_source(run.data, run.seed), "train")
    found = re.search(r"part-(\d+)\.parquet, row group (\d+)", units.describe(17, run.seed))
    assert found, units.describe(17, run.seed)
    corrupt(corpus / f"part-{found[1]}.parquet", int(found[2]))
    ended = nursery.run(run_file, *WORDS, *words, folder=folder, arm=arm)
    assert set(ended.codes) == {2}, f"{ended.codes} {ended.text[-3000:]}"
    assert f"{found[0]}: can't be read from document" in ended.text
    last = nursery.steps(folder)[-1]
    assert int(nursery.newest(folder).name[5:]) == last > 2
    assert records(folder, "saves")[-1]["reason"] == "unreadable"
    remedy = re.search(r"data\.skip_units=\[[\d, ]+\]", ended.text)
    assert remedy, ended.text[-3000:]
    ended = stop_at(run_file, folder, last + 3, *words, remedy[0], arm=arm)
    assert nursery.resumed(ended) == last


@pytest.mark.parametrize(("arm", "micro"), [("zero1_bf16", 2), ("ddp_bf16", 8)])
def test_data_that_can_be_read_again_leaves_no_bit_changed(
    tmp_path: Path, arm: str, micro: int
) -> None:
    corpus = tiny.write_corpus(tmp_path / "corpus")
    run_file = tiny.write_run(tmp_path, corpus)
    words = ["schedule.updates=20", "data.read_attempts=1", "data.document_mask=true"]
    words += [f"batch.micro={micro}", *nursery.QUIET]
    folder, still = tmp_path / "run", tmp_path / "still"
    nursery.good(run_file, *words, folder=still, arm=arm)
    with nursery.start(run_file, *words, folder=folder, arm=arm) as ranks:
        ranks.reach(1)
        ranks.signal(0, signal.SIGTERM)
        ranks.wait()
    good = {path: path.read_bytes() for path in corpus.iterdir()}
    run = load_run(str(run_file), words)
    units = Units(run.data, scan_source(run.data, run.seed), "train")
    found = re.search(r"part-(\d+)\.parquet, row group (\d+)", units.describe(9, run.seed))
    assert found, units.describe(9, run.seed)
    corrupt(corpus / f"part-{found[1]}.parquet", int(found[2]))
    ended = nursery.run(run_file, *words, folder=folder, arm=arm)
    assert set(ended.codes) == {2}, f"{ended.codes} {ended.text[-3000:]}"
    assert ended.text.count("can't be read from document") == 1, ended.text[-3000:]
    for path, content in good.items():
        path.write_bytes(content)
    nursery.good(run_file, *words, folder=folder, arm=arm)
    assert nursery.told(folder, nursery.EXACT) == nursery.told(still, nursery.EXACT)
    mine, reference = nursery.newest(folder), nursery.newest(still)
    assert nursery.random_states(mine) == nursery.random_states(reference)
    assert nursery.same(nursery.arrays(mine), nursery.arrays(reference))


def test_checkpoints_that_are_all_broken_are_listed_and_left(
    tiny_run: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    stop_at(tiny_run, folder, 8)
    steps = sorted((folder / "checkpoints").glob("step-*"))
    assert len(steps) == 2
    damage = [steps[0] / "arrays-00001.safetensors", steps[1] / "state.json"]
    good = [path.read_bytes() for path in damage]
    damage[0].write_bytes(good[0][:-3])
    damage[1].unlink()
    for _ in range(2):  # nothing is changed by a refusal
        ended = nursery.run(tiny_run, *WORDS, folder=folder)
        assert set(ended.codes) == {2}, ended.text[-3000:]
        size = len(good[0])
        told = f"arrays-00001.safetensors has {size - 3} bytes, expected {size}"
        assert told in ended.text, ended.text[-3000:]
        assert "state.json" in ended.text and ended.text.count("anew with --fresh") == 1
    damage[0].write_bytes(good[0])  # the older one is whole again: back to it
    with nursery.start(tiny_run, *WORDS, folder=folder) as ranks:
        ranks.until(lambda: "resumed" in ranks.text(), "the resume")
        ranks.signal(0, signal.SIGTERM)
        ended = ranks.wait()
    assert nursery.resumed(ended) == int(steps[0].name[5:])
    assert f"checkpoint {steps[1].name} is broken, going back: state.json" in ended.text
    assert (folder / "checkpoints" / f"{steps[1].name}.broken").is_dir()
