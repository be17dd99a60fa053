"""Packing: token arrays in, rows of seq_len + 1 tokens out.

Rows overlap by one token: inputs are row[:-1], labels row[1:], so that every token that has a
predecessor in its document is predicted exactly once. Every document ends with the end-of-text
token.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence

import numpy as np

PAD = -1  # in best-fit rows, after the last document
Head = tuple[int, ...]
Pack = Callable[[Sequence[np.ndarray], Head, int], tuple[np.ndarray, Head]]


def pack_concat(docs: Sequence[np.ndarray], head: Head, seq_len: int) -> tuple[np.ndarray, Head]:
    """Join all documents and cut the result: nothing is padded or lost.

    Args:
        docs: int32 token arrays.
        head: what the block before left over, at most `seq_len` tokens; the first of them is the
            last token of its last row.
        seq_len: labels per row.

    Returns:
        int32 [rows, seq_len + 1], and the tokens left over.
    """
    flat = np.concatenate([np.asarray(head, np.int32), *docs])
    count = max(0, (len(flat) - 1) // seq_len)
    if not count:
        return np.empty((0, seq_len + 1), np.int32), tuple(flat.tolist())
    windows = np.lib.stride_tricks.sliding_window_view(flat, seq_len + 1)
    rows = windows[: (count - 1) * seq_len + 1 : seq_len].copy()
    return rows, tuple(flat[count * seq_len :].tolist())


def pack_best_fit(docs: Sequence[np.ndarray], head: Head, seq_len: int) -> tuple[np.ndarray, Head]:
    """Place each document whole into the fullest row that has room, the longest first; pad with -1.

    A document over `seq_len + 1` tokens is first cut into pieces that overlap by one token.
    Nothing is left
    over: `head` must be empty and is returned empty.
    """
    assert not head, "best fit carries no tokens from block to block"
    width = seq_len + 1
    pieces = [d[i : i + width] for d in docs for i in range(0, len(d) - 1, seq_len)]
    pieces.sort(key=len, reverse=True)
    rows: list[list[np.ndarray]] = []
    free: list[tuple[int, int]] = []  # (room, row), ascending
    for piece in pieces:
        at = bisect_left(free, (len(piece), -1))
        if at == len(free):
            room, row = width, len(rows)
            rows.append([])
        else:
            room, row = free.pop(at)
        rows[row].append(piece)
        if room > len(piece):
            insort(free, (room - len(piece), row))
    packed = np.full((len(rows), width), PAD, np.int32)
    for target, parts in zip(packed, rows, strict=True):
        joined = np.concatenate(parts)
        target[: len(joined)] = joined
    return packed, ()


def count_ends(rows: np.ndarray, eot: int) -> np.ndarray:
    """Documents that end in each row, int64 [rows].

    Only labels count: the overlap shows a token twice, but as a label once.
    """
    return np.count_nonzero(rows[:, 1:] == eot, axis=1)


PACKINGS: dict[str, Pack] = {"concat": pack_concat, "best_fit": pack_best_fit}
