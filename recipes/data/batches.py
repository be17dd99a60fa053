"""Sequences to tensors, the evaluation's fixed rows, and what a run can know about its data
beforehand.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch

from recipes.data.lanes import Cursor, Order, Sequence, blocks, lane
from recipes.data.packing import PACKINGS, PAD
from recipes.data.source import SAVED_ROWS, Units
from recipes.data.tokens import Encoder

IGNORED = -100  # torch's cross entropy leaves such labels out


def collate(
    sequences: Iterable[Sequence], eot: int, document_mask: bool, pin_memory: bool = False
) -> dict[str, torch.Tensor]:
    """One micro-batch, on the host.

    Args:
        eot: the end-of-text token; it is also the input at padded places.
        document_mask: add `position_ids` that start again at 0 after each document, and drop the
            label that would cross into the next document. The model needs no attention_mask and
            use_cache=False.
        pin_memory: page-locked tensors, for copies that don't block.

    Returns:
        `input_ids`, `labels` (labels[t] is the target of input_ids[t]; -100: none) and, with the
        mask, `position_ids`, all int64 [batch, seq_len].
    """
    rows = _stack(sequences)
    inputs = np.where(rows[:, :-1] == PAD, eot, rows[:, :-1])
    labels = np.where(_counted(rows, eot, document_mask), rows[:, 1:], IGNORED)
    batch = {"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(labels)}
    if document_mask:
        place = np.arange(inputs.shape[1])
        starts = np.zeros_like(inputs)
        starts[:, 1:] = np.where(inputs[:, :-1] == eot, place[1:], 0)
        batch["position_ids"] = torch.from_numpy(place - np.maximum.accumulate(starts, axis=1))
    return {key: value.pin_memory() for key, value in batch.items()} if pin_memory else batch


def count_labels(sequences: Iterable[Sequence], eot: int, document_mask: bool) -> int:
    """How many labels of `collate` are not -100; on the host, from the token arrays."""
    return int(np.count_nonzero(_counted(_stack(sequences), eot, document_mask)))


def _stack(sequences: Iterable[Sequence]) -> np.ndarray:
    return np.stack([sequence.tokens for sequence in sequences]).astype(np.int64)


def _counted(rows: np.ndarray, eot: int, document_mask: bool) -> np.ndarray:
    real = rows[:, 1:] != PAD
    return real & (rows[:, :-1] != eot) if document_mask else real


def held_out_rows(
    units: Units, encoder: Encoder, order: Order, count: int, rank: int, world: int
) -> list[Sequence]:
    """This rank's share of the first `count` held-out sequences, the same for every world and
    start.

    They come in turns from as many units as there are lanes, so that a few long documents don't
    decide the result; rank r of W takes every W-th. Only the first pass counts.

    Raises:
        ValueError: the held-out units hold fewer sequences.
    """
    lanes = min(order.lanes, units.total)
    first_pass = replace(order, lanes=lanes)
    waiting = deque(lane(units, encoder, first_pass, n, Cursor()) for n in range(lanes))
    rows: list[Sequence] = []
    while waiting and len(rows) < count:
        sequences = waiting.popleft()
        sequence = next(sequences)
        if sequence.origin[0] < units.total:
            rows.append(sequence)
            waiting.append(sequences)
        else:  # this lane's first pass is over
            sequences.close()
    for sequences in waiting:
        sequences.close()
    if len(rows) < count:
        raise ValueError(
            f"evaluate.sequences={count}: the held-out units hold only {len(rows)} sequences of "
            f"{order.seq_len} tokens; lower it or hold out more"
        )
    return rows[rank::world]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Counts over sampled documents."""

    documents: int  # rows read, empty ones included
    samples: int  # documents with at least one token
    tokens: int  # end-of-text tokens included
    sequences: float

    @property
    def tokens_per_sample(self) -> float:
        """Mean tokens of a sample, its end-of-text token included."""
        return self.tokens / self.samples

    @property
    def sequences_per_sample(self) -> float:
        """Mean sequences that a sample fills under the run's packing."""
        return self.sequences / self.samples

    @property
    def samples_per_document(self) -> float:
        """Share of the documents that are not empty."""
        return self.samples / self.documents


def measure(units: Units, encoder: Encoder, order: Order, documents: int = 2000) -> Measured:
    """Tokenize and pack about `documents` documents, in blocks from units spread evenly over the
    data.

    Raises:
        ValueError: a unit can't be read, or no sampled document holds a token.
    """
    places = min(-(-documents // order.block_rows), units.total)
    per_place = -(-documents // (order.block_rows * places))
    read, samples, tokens, rows = 0, 0, 0, 0
    for position in (i * units.total // places for i in range(places)):
        if units.unit(position, order.seed) in units.skipped:
            continue
        with closing(blocks(units, position, 0, order)) as tables:
            for table in islice(tables, per_place):
                docs = encoder.encode(table.column(0).to_pylist())
                read, samples = read + len(table), samples + len(docs)
                tokens += sum(map(len, docs))
                rows += len(PACKINGS[order.packing](docs, (), order.seq_len)[0])
    if not samples:
        raise ValueError(f"none of {read} sampled documents holds a token; check data.text_column")
    # What concatenation leaves over at the end of a block opens the next one, so nothing is
    # rounded.
    sequences = tokens / order.seq_len if order.packing == "concat" else float(rows)
    return Measured(documents=read, samples=samples, tokens=tokens, sequences=sequences)


def count_documents(units: Units) -> int:
    """Documents in one pass, empty ones included: from file ends where those tell, else by reading
    all.
    """
    if (known := units.rows()) is not None:
        return known
    streams = (units.open_unit(unit).with_format("arrow").iter(SAVED_ROWS) for unit in units.ids)
    return sum(len(table) for stream in streams for table in stream)
