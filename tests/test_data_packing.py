"""Packing: every token once, no row too long, every document's end counted once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.data.packing import PAD, count_ends, pack_best_fit, pack_concat

EOT = 0
documents = st.lists(st.integers(1, 40), min_size=1, max_size=30)


def make(lengths: list[int]) -> list[np.ndarray]:
    """Documents of distinct tokens, each closed by EOT."""
    numbers = iter(range(1, 10**6))
    return [np.array([*(next(numbers) for _ in range(n)), EOT], np.int32) for n in lengths]


@settings(max_examples=100, deadline=None)
@given(st.lists(documents, min_size=1, max_size=5), st.integers(2, 20))
def test_concat_keeps_every_token_once_over_blocks(blocks: list[list[int]], seq_len: int) -> None:
    flat_docs = make([n for block in blocks for n in block])
    flat = np.concatenate(flat_docs)
    labels, ends, head, at = [flat[:1]], 0, (), 0
    for block in blocks:
        rows, head = pack_concat(flat_docs[at : at + len(block)], head, seq_len)
        at += len(block)
        assert rows.dtype == np.int32
        assert rows.shape[1] == seq_len + 1
        assert len(head) <= seq_len
        labels += [row[1:] for row in rows]
        ends += int(count_ends(rows, EOT).sum())
    assert np.array_equal(np.concatenate([*labels, np.array(head[1:], np.int32)]), flat)
    in_head = sum(token == EOT for token in head[1:])
    assert ends + in_head == len(flat_docs)


@settings(max_examples=100, deadline=None)
@given(documents, st.integers(2, 20))
def test_best_fit_predicts_every_token_of_every_document_once(
    lengths: list[int], seq_len: int
) -> None:
    docs = make(lengths)
    rows, head = pack_best_fit(docs, (), seq_len)
    assert head == ()
    assert rows.shape[1] == seq_len + 1
    pairs = set()  # (input, label) inside documents, each pair is unique but for EOT
    for row in rows:
        real = row[: np.count_nonzero(row != PAD)]
        assert (row[len(real) :] == PAD).all()
        pairs |= {(a, b) for a, b in zip(real[:-1], real[1:], strict=True) if a != EOT}
    wanted = {(a, b) for doc in docs for a, b in zip(doc[:-1], doc[1:], strict=True)}
    assert pairs == wanted
    inside = sum(int(((row[:-1] != EOT) & (row[1:] != PAD)).sum()) for row in rows)
    assert inside == sum(len(doc) - 1 for doc in docs)
    assert count_ends(rows, EOT).sum() == len(docs)


def test_best_fit_cuts_no_document_that_fits() -> None:
    docs = make([6, 9, 3, 2, 9, 5])
    rows, _ = pack_best_fit(docs, (), 9)
    for doc in docs:
        assert any(
            np.array_equal(row[i : i + len(doc)], doc) for row in rows for i in range(len(row))
        )
    assert len(rows) == 4  # 10 + 10, then 7, then 6 + 4; and 3 beside the 7


def test_concat_overlaps_rows_by_one_token() -> None:
    rows, head = pack_concat([np.arange(1, 12, dtype=np.int32)], (), 4)
    assert rows.tolist() == [[1, 2, 3, 4, 5], [5, 6, 7, 8, 9]]
    assert head == (9, 10, 11)


def test_an_end_in_the_overlap_counts_once() -> None:
    rows, _ = pack_concat(make([4, 4, 4]), (), 4)
    assert rows[0].tolist()[-1] == EOT and rows[1].tolist()[0] == EOT
    assert count_ends(rows, EOT).tolist() == [
        1,
        0,
        1,
    ]  # ends at 4, 9 and 14; rows label 1-4, 5-8 and 9-12


@pytest.mark.parametrize("length", [8, 9, 10, 16, 17])
def test_long_document_ends_once_in_best_fit(length: int) -> None:
    rows, _ = pack_best_fit(make([length]), (), 8)
    assert count_ends(rows, EOT).sum() == 1
