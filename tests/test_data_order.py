"""The global order: the same sequences for every world, worker count and chain of resumes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from data_helpers import (
    digest,
    make_order,
    make_units,
    parquet_data,
    take,
    train_tokenizer,
    write_parquet,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from recipes.data.lanes import Cursor, Order, Sequence, Sequences, loader
from recipes.data.packing import PAD
from recipes.data.source import Units
from recipes.data.state import merge_cursors
from recipes.data.tokens import Encoder

GOLDEN = {"concat": "9c579f1074ec69f5", "best_fit": "124cf5499fbc41b6"}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Units, Encoder, list[str]]:
    """72 documents in 3 files with 4 row groups each."""
    folder = tmp_path_factory.mktemp("corpus")
    documents = write_parquet(folder, files=3, rows=24, group=6)
    encoder = Encoder(train_tokenizer(folder), "<|endoftext|>")
    return make_units(parquet_data(folder)), encoder, documents


def run(
    corpus: tuple[Units, Encoder, list[str]],
    order: Order,
    world: int,
    start: int,
    steps: int,
    per_step: int,
    cursors: dict[int, Cursor],
) -> tuple[list[list[Sequence]], dict[int, Cursor]]:
    """Simulate all ranks for some steps: the global batches by number, and the merged cursors."""
    units, encoder, _ = corpus
    ranks = [
        iter(Sequences(units, encoder, order, cursors, start=start, rank=r, world=world))
        for r in range(world)
    ]
    consumed: list[dict[int, Cursor]] = [dict(cursors) for _ in ranks]
    batches = []
    for _ in range(steps):
        batch = []
        for rank, stream in enumerate(ranks):
            for _ in range(per_step // world):
                sequence = next(stream)
                consumed[rank][sequence.lane] = sequence.cursor
                batch.append(sequence)
        batches.append(sorted(batch, key=lambda s: s.n))
    for stream in ranks:
        stream.close()  # type: ignore[attr-defined]
    return batches, merge_cursors(consumed)


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_order_is_the_golden_one(
    corpus: tuple[Units, Encoder, list[str]], packing: str, tmp_path: Path
) -> None:
    """If this fails on purpose, raise VERSION in recipes/data/state.py: old checkpoints can't
    resume.
    """
    units, _, _ = corpus
    # The tokenizer's training may change with its library; the order must not depend on that.
    letters = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(tmp_path / "letters.json"))
    encoder = Encoder(tmp_path / "letters.json", "<|endoftext|>")
    taken = take(units, encoder, make_order(packing=packing), 40)
    assert [s.n for s in taken] == list(range(40))
    assert digest(taken) == GOLDEN[packing]


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_world_gives_the_same_global_batches(
    corpus: tuple[Units, Encoder, list[str]], data: st.DataObject
) -> None:
    lanes = data.draw(st.sampled_from([2, 4, 6, 12]))
    packing = data.draw(st.sampled_from(["concat", "best_fit"]))
    order = make_order(lanes=lanes, packing=packing)
    per_step = 12
    world = data.draw(st.sampled_from([w for w in (1, 2, 3, 4, 6, 12) if lanes % w == 0]))
    stop = data.draw(st.integers(1, 4))
    other = data.draw(st.sampled_from([w for w in (1, 2, 3, 4, 6, 12) if lanes % w == 0]))
    want, _ = run(corpus, order, 1, 0, 6, per_step, {})
    first, cursors = run(corpus, order, world, 0, stop, per_step, {})
    rest, _ = run(corpus, order, other, stop * per_step, 6 - stop, per_step, cursors)
    got = first + rest
    assert [[s.n for s in b] for b in got] == [[s.n for s in b] for b in want]
    assert [digest(b) for b in got] == [digest(b) for b in want]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_worker_processes_do_not_change_the_order(
    corpus: tuple[Units, Encoder, list[str]], workers: int
) -> None:
    units, encoder, _ = corpus
    order = make_order(lanes=12)
    want = take(units, encoder, order, 60)[1::2]
    sequences = Sequences(units, encoder, order, {}, start=0, rank=1, world=2)
    stream = iter(loader(sequences, workers, prefetch=4))
    got = [next(stream) for _ in range(30)]
    stream._shutdown_workers()  # type: ignore[attr-defined]
    assert [s.n for s in got] == [s.n for s in want]
    assert digest(got) == digest(want)


def test_a_chain_of_resumes_at_other_worlds_is_the_uninterrupted_run(
    corpus: tuple[Units, Encoder, list[str]],
) -> None:
    order = make_order(lanes=12)
    want, last = run(corpus, order, 1, 0, 16, 12, {})
    got: list[list[Sequence]] = []
    cursors: dict[int, Cursor] = {}
    rng = np.random.default_rng(3)
    while len(got) < 16:
        world = int(rng.choice([1, 2, 3, 4, 6, 12]))
        steps = min(int(rng.integers(1, 4)), 16 - len(got))
        batches, cursors = run(corpus, order, world, 12 * len(got), steps, 12, cursors)
        cursors = {k: Cursor.from_json(c.to_json()) for k, c in cursors.items()}
        got += batches
    assert [digest(b) for b in got] == [digest(b) for b in want]
    assert cursors == last


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_each_pass_holds_every_document_once(
    corpus: tuple[Units, Encoder, list[str]], packing: str
) -> None:
    units, encoder, documents = corpus
    order = make_order(lanes=4, packing=packing, seq_len=100)  # best fit cuts no document here
    stream = take(units, encoder, order, 400)
    assert stream[-1].origin[0] >= 2 * units.total, "the test reads less than two passes"
    decoded: list[str] = []
    for lane in range(4):
        mine = [s.tokens[s.tokens != PAD] for s in stream if s.lane == lane]
        if packing == "concat":
            mine[1:] = [row[1:] for row in mine[1:]]  # rows overlap by one token
        # A lane has 3 of the 12 units in each pass, 18 documents, and reads them in this order.
        decoded += decode(encoder, np.concatenate(mine))[:18]
    assert Counter(decoded) == Counter(documents)


def decode(encoder: Encoder, tokens: np.ndarray) -> list[str]:
    """The documents that end in a run of tokens."""
    parts = np.split(tokens.astype(int), np.flatnonzero(tokens == encoder.eot) + 1)[:-1]
    return [encoder.tokenizer.decode(part[:-1].tolist()) for part in parts]


def test_samples_count_every_document_once(corpus: tuple[Units, Encoder, list[str]]) -> None:
    units, encoder, documents = corpus
    stream = take(units, encoder, make_order(packing="best_fit", seq_len=8), 2000)
    in_pass = [s for s in stream if s.origin[0] < units.total]
    assert len(in_pass) < len(stream)
    assert sum(s.samples for s in in_pass) == len(documents)
    # What concatenation carries on is counted where it is shown: so count up to a block's end.
    stream = take(units, encoder, make_order(lanes=1, seq_len=8), 3000)
    shown = np.concatenate([s.tokens[1:] for s in stream])
    assert sum(s.samples for s in stream) == (shown == encoder.eot).sum()


def test_resume_reads_a_bounded_number_of_rows(
    corpus: tuple[Units, Encoder, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    units, encoder, _ = corpus
    order = make_order()
    stream = take(units, encoder, order, 1004)
    encoded: list[int] = []
    opened: list[int] = []
    encode, open_unit = encoder.encode, units.open_unit
    monkeypatch.setattr(encoder, "encode", lambda t: encoded.append(len(t)) or encode(t))
    monkeypatch.setattr(units, "open_unit", lambda u: opened.append(u) or open_unit(u))
    counts = {}
    for start in (10, 1000):
        encoded.clear()
        opened.clear()
        cursors = {s.lane: s.cursor for s in stream[:start]}
        got = take(units, encoder, order, 4, start=start, cursors=cursors)
        assert digest(got) == digest(stream[start : start + 4])
        counts[start] = (sum(encoded), len(opened))
    for rows, files in counts.values():
        # A lane may end its unit and open the next one, and needs two blocks if the first is used
        # up.
        assert rows <= 4 * 2 * order.block_rows
        assert files <= 4 * 2


def test_lanes_that_do_not_divide_are_refused(corpus: tuple[Units, Encoder, list[str]]) -> None:
    units, encoder, _ = corpus
    order = make_order(lanes=96)
    sequences = Sequences(units, encoder, order, {}, start=0, rank=0, world=8)
    message = (
        r"lanes=96 must be a multiple of world_size \* num_workers = 8 \* 5; "
        "legal workers: 1 2 3 4 6 12$"
    )
    with pytest.raises(ValueError, match=message):
        loader(sequences, 5, prefetch=4)
    with pytest.raises(ValueError, match="change data.lanes"):
        Sequences(units, encoder, order, {}, start=0, rank=0, world=5)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_loader_leaves_the_global_random_state_alone(
    corpus: tuple[Units, Encoder, list[str]], workers: int
) -> None:
    units, encoder, _ = corpus
    before = torch.random.get_rng_state()
    sequences = Sequences(units, encoder, make_order(), {}, start=0, rank=0, world=1)
    stream = iter(loader(sequences, workers, prefetch=2))
    next(stream)
    if workers:
        stream._shutdown_workers()  # type: ignore[attr-defined]
    assert torch.equal(torch.random.get_rng_state(), before)
