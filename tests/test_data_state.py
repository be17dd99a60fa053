"""State: what a checkpoint keeps, which changes it refuses, and a process that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from data_helpers import (
    corrupt,
    make_order,
    make_units,
    parquet_data,
    take,
    train_tokenizer,
    write_parquet,
)

from recipes.data.lanes import Cursor
from recipes.data.source import scan_source
from recipes.data.state import DataState, check_state, data_state, merge_cursors
from recipes.data.tokens import Encoder


@pytest.fixture
def state(tmp_path: Path) -> DataState:
    write_parquet(tmp_path, files=2, rows=10, group=5)
    data = parquet_data(tmp_path)
    encoder = Encoder(train_tokenizer(tmp_path), "<|endoftext|>")
    cursors = {0: Cursor(1, 5, 2, (4, 5)), 3: Cursor()}
    scan = scan_source(data, seed=7)
    return data_state(data, scan, encoder, make_order(), 8, next_sequence=16, cursors=cursors)


def test_state_survives_json(state: DataState) -> None:
    assert DataState.from_json(json.loads(json.dumps(state.to_json()))) == state


def test_cursor_survives_json() -> None:
    cursor = Cursor(3, 128, 7, (1, 2, 3))
    assert Cursor.from_json(json.loads(json.dumps(cursor.to_json()))) == cursor


OTHER: dict[str, Any] = {
    "seed": 8,
    "lanes": 6,
    "seq_len": 32,
    "block_rows": 9,
    "packing": "best_fit",
    "document_mask": True,
    "global_sequences": 16,
    "source": "elsewhere",
    "units": "others",
    "held_out": "more",
    "revision": "b" * 40,
    "tokenizer": "another",
    "end_of_text": 5,
    "version": 99,
}


def test_every_field_is_checked() -> None:
    progress = {"next_sequence", "cursors", "skip_units"}
    assert {field.name for field in fields(DataState)} == set(OTHER) | progress


@pytest.mark.parametrize("name", OTHER)
def test_each_difference_is_named_with_both_values(state: DataState, name: str) -> None:
    with pytest.raises(ValueError) as caught:
        check_state(state, replace(state, **{name: OTHER[name]}))
    line = f"  {name}: {getattr(state, name)!r} in the checkpoint, {OTHER[name]!r} now"
    assert str(caught.value).splitlines()[1:] == [line]


def test_all_differences_are_named_at_once(state: DataState) -> None:
    with pytest.raises(ValueError) as caught:
        check_state(state, replace(state, **OTHER))
    assert len(str(caught.value).splitlines()) == 1 + len(OTHER)


def test_progress_and_more_skipped_units_are_legal(state: DataState) -> None:
    check_state(state, replace(state, next_sequence=0, cursors={}))
    check_state(state, replace(state, skip_units=(3,)))
    with pytest.raises(ValueError, match=r"skip_units: \[3\] in the checkpoint, \[\] now"):
        check_state(replace(state, skip_units=(3,)), state)


@pytest.mark.parametrize("change", ["content", "order", "groups", "tokenizer"])
def test_real_changes_of_data_show_in_the_state(tmp_path: Path, change: str) -> None:
    def now(where: Path, vocabulary: str) -> DataState:
        data = parquet_data(where)
        encoder = Encoder(tmp_path / f"{vocabulary}.json", "<|endoftext|>")
        return data_state(data, scan_source(data, seed=7), encoder, make_order(), 8)

    plain = train_tokenizer(tmp_path / "t").read_text()
    (tmp_path / "plain.json").write_text(plain)
    (tmp_path / "tokenizer.json").write_text(plain + "\n")
    write_parquet(tmp_path / "before", files=2, rows=10, group=5)
    write_parquet(tmp_path / "moved", files=2, rows=10, group=5)
    before = now(tmp_path / "before", "plain")
    check_state(before, now(tmp_path / "moved", "plain"))  # the same files elsewhere
    write_parquet(
        tmp_path / "after",
        files=2,
        rows=12 if change == "content" else 10,
        group=2 if change == "groups" else 5,
    )
    if change == "order":
        (tmp_path / "after/part-0.parquet").rename(tmp_path / "after/part-9.parquet")
    vocabulary = "tokenizer" if change == "tokenizer" else "plain"
    named = {"content": "source", "order": "source", "groups": "units", "tokenizer": "tokenizer"}
    with pytest.raises(ValueError, match=f"  {named[change]}: "):
        check_state(before, now(tmp_path / "after", vocabulary))


def test_damaged_or_foreign_state_is_refused(state: DataState) -> None:
    tree = state.to_json()
    with pytest.raises(ValueError, match="version 0, expected 1"):
        DataState.from_json({**tree, "version": 0})
    with pytest.raises(ValueError, match=r"keys \['lanes'\]"):
        DataState.from_json({k: v for k, v in tree.items() if k != "lanes"})


def test_only_the_owner_of_a_lane_speaks_for_it() -> None:
    old, new = Cursor(0, 5), Cursor(2, 0)
    ranks = [{0: new, 1: old, 2: new}, {0: old, 1: new, 3: new}]
    assert merge_cursors(ranks) == {0: new, 1: new, 2: new, 3: new}
    assert merge_cursors([{0: new}, {0: old}]) == {0: new}


CONSUMER = """
import json, os, sys
from pathlib import Path
from data_helpers import corrupt, make_order, make_units, parquet_data
from recipes.data.lanes import Cursor, Sequences, loader
from recipes.data.tokens import Encoder

def main(folder, workers, retry_wait_s):
    order = make_order(retry_wait_s=retry_wait_s)
    log = folder / "log.jsonl"
    lines = [json.loads(x) for x in log.read_text().splitlines()] if log.exists() else []
    cursors = {x["n"] % 4: Cursor.from_json(x["cursor"]) for x in lines}
    encoder = Encoder(folder / "tokenizer.json", "<|endoftext|>")
    sequences = Sequences(make_units(parquet_data(folder)), encoder, order, cursors,
                          start=len(lines), rank=0, world=1)
    with log.open("a") as out:
        for s in loader(sequences, workers, prefetch=8):
            record = {"n": s.n, "tokens": s.tokens.tolist(), "cursor": s.cursor.to_json()}
            out.write(json.dumps(record) + "\\n")
            out.flush()
            print(s.n, flush=True)

main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
"""


def consumer(folder: Path, workers: int, retry_wait_s: float = 0.0) -> subprocess.Popen[str]:
    tests = Path(__file__).parent
    path = os.pathsep.join([str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-c", CONSUMER, str(folder), str(workers), str(retry_wait_s)],
        stderr=subprocess.PIPE if retry_wait_s else None,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )


def wait_for(process: subprocess.Popen[str], count: int) -> None:
    assert process.stdout is not None
    for _ in range(count):
        assert process.stdout.readline(), "the consumer ended by itself"


def test_a_killed_process_resumes_to_the_same_sequences(tmp_path: Path) -> None:
    write_parquet(tmp_path, files=3, rows=24, group=6)
    train_tokenizer(tmp_path).rename(tmp_path / "tokenizer.json")
    for workers, count in ((1, 37), (2, 50)):
        process = consumer(tmp_path, workers)
        wait_for(process, count)
        process.kill()
        process.communicate()
        log = tmp_path / "log.jsonl"
        whole = log.read_text().splitlines(keepends=True)
        log.write_text("".join(x for x in whole if x.endswith("\n")))  # a torn last line is lost
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(lines) >= 87
    encoder = Encoder(tmp_path / "tokenizer.json", "<|endoftext|>")
    want = take(make_units(parquet_data(tmp_path)), encoder, make_order(), len(lines))
    assert [line["n"] for line in lines] == list(range(len(lines)))
    assert [line["tokens"] for line in lines] == [s.tokens.tolist() for s in want]


def test_readers_survive_the_signals_of_a_stop_and_end_with_their_rank(tmp_path: Path) -> None:
    write_parquet(tmp_path, files=3, rows=24, group=6)
    train_tokenizer(tmp_path).rename(tmp_path / "tokenizer.json")
    process = consumer(tmp_path, 1)
    wait_for(process, 5)
    readers = readers_of(process)
    for reader in readers:
        os.kill(reader, signal.SIGTERM)
        os.kill(reader, signal.SIGINT)
    wait_for(process, 40)
    process.kill()
    process.communicate(timeout=20)
    wait_until_gone(readers)


def test_a_reader_that_waits_for_a_retry_ends_with_its_rank(tmp_path: Path) -> None:
    write_parquet(tmp_path, files=1, rows=24, group=6)
    for group in range(4):
        corrupt(tmp_path / "part-0.parquet", group)
    train_tokenizer(tmp_path).rename(tmp_path / "tokenizer.json")
    process = consumer(tmp_path, 1, retry_wait_s=120.0)
    assert process.stderr is not None
    while "attempt 1 of 2 failed" not in process.stderr.readline():
        assert process.poll() is None
    readers = readers_of(process)
    process.kill()
    wait_until_gone(readers)
    process.communicate(timeout=20)


def readers_of(process: subprocess.Popen[str]) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert children
    return [int(child) for child in children]


def wait_until_gone(readers: list[int]) -> None:
    deadline = time.monotonic() + 3
    while any(Path(f"/proc/{reader}").exists() for reader in readers):
        assert time.monotonic() < deadline, "a reader outlives its rank"
        time.sleep(0.05)
