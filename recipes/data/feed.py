"""Windows of training data for one rank, and the cursors of what was consumed.

found = look(run, revision=None, cache=folder)       # rank 0; JSON for the others
corpus = Corpus.open(run, found, tokenizer_path)
feed = Feed(corpus, plan, rank, state=None)
window = feed.take(); ...; feed.consume(window)
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recipes.config import Run
from recipes.data.batches import (
    Measured,
    collate,
    count_documents,
    count_labels,
    held_out_rows,
    measure,
)
from recipes.data.lanes import Cursor, Order, Sequence, Sequences, loader
from recipes.data.packing import PAD
from recipes.data.source import Scan, Units, scan_source
from recipes.data.state import DataState, check_state, data_state, merge_cursors
from recipes.data.tokens import Encoder, prepare_tokenizer
from recipes.objective import BatchPlan

Batch = dict[str, torch.Tensor]


def look(
    run: Run, revision: str | None, cache: Path, tokenizer: Path | None = None
) -> dict[str, Any]:
    """Scan the source and prepare the tokenizer, on one rank; JSON for all the others.

    Args:
        revision: the hub commit that an earlier start recorded.
        cache: folder for trained and loaded tokenizers.
        tokenizer: the one that an earlier start of this run made.

    Raises:
        ValueError: the data can't be found or read, or the tokenizer can't be made.
    """
    scan = scan_source(run.data, run.seed, revision, progress=True)
    units = Units(run.data, scan, "train")
    path = tokenizer
    if path is None:
        path = prepare_tokenizer(run.data.tokenizer, lambda: units.documents(run.seed), cache)
    return {"scan": scan.to_json(), "tokenizer": path.read_text(encoding="utf-8")}


@dataclass(frozen=True)
class Corpus:
    """The data set and tokenizer of a run, opened on one rank."""

    run: Run
    scan: Scan
    tokenizer_path: Path
    tokenizer: str  # the file's text, which every checkpoint holds
    order: Order

    @classmethod
    def open(cls, run: Run, found: dict[str, Any], tokenizer_path: Path) -> Corpus:
        """From what `look` found, with the tokenizer written to a path on this machine."""
        order = Order(
            lanes=run.data.lanes,
            seq_len=run.batch.seq_len,
            block_rows=run.data.block_rows,
            seed=run.seed,
            packing=run.data.packing,
            read_attempts=run.data.read_attempts,
        )
        scan = Scan.from_json(found["scan"])
        return cls(run, scan, tokenizer_path, found["tokenizer"], order)

    @cached_property
    def units(self) -> Units:
        """The training part."""
        return Units(self.run.data, self.scan, "train")

    @cached_property
    def encoder(self) -> Encoder:
        """The tokenizer, which cuts prompts and documents alike."""
        settings = self.run.data.tokenizer
        return Encoder(self.tokenizer_path, settings.end_of_text, settings.engine)

    def measure(self) -> Measured:
        """Tokens and sequences per sample, from documents all over the data."""
        return measure(self.units, self.encoder, self.order)

    def count_documents(self) -> int:
        """Documents in one pass over the training part."""
        return count_documents(self.units)

    def state(self, next_sequence: int, cursors: dict[int, Cursor]) -> DataState:
        """What a checkpoint keeps of the data."""
        return replace(self._at_start, next_sequence=next_sequence, cursors=dict(cursors))

    @cached_property
    def _at_start(self) -> DataState:
        """Hashing every file's name takes a while, and a save must not wait for it."""
        sequences = self.run.batch.global_sequences
        return data_state(self.run.data, self.scan, self.encoder, self.order, sequences)

    def describe(self) -> str:
        """One line for people."""
        data, scan = self.run.data, self.scan
        files = sum(len(split.files) for split in scan.splits)
        text = f"{data.path or data.kind}: {files:,} files in {scan.num_units:,} units"
        text += f" ({len(scan.held_out):,} held out)" if scan.held_out else ""
        text += f", {scan.left_out} undecodable files left out" if scan.left_out else ""
        text += f", units {list(data.skip_units)} skipped" if data.skip_units else ""
        if scan.num_units < 10 * data.lanes:
            text += f"; few units for {data.lanes} lanes: passes end unevenly"
        return text


@dataclass(frozen=True)
class Window:
    """This rank's share of one update."""

    corpus: Corpus
    micro: int
    sequences: list[Sequence]
    wait_ms: float  # spent waiting for the readers
    fault: ValueError | None = None  # why its data could not be read; its rows are blank then

    @cached_property
    def tokens(self) -> int:
        """Labels that count."""
        mask = self.corpus.run.data.document_mask
        return count_labels(self.sequences, self.corpus.encoder.eot, mask)

    @property
    def samples(self) -> int:
        """Documents that end in this window."""
        return sum(sequence.samples for sequence in self.sequences)

    @cached_property
    def digest(self) -> int:
        """Sum of 40-bit hashes of the sequences; summed over ranks it names the update's data.

        However the ranks share them, the same numbered sequences give the same sum.
        """
        return sum(
            int.from_bytes(
                hashlib.blake2b(f"{s.n} ".encode() + s.tokens.tobytes(), digest_size=5).digest(),
                "big",
            )
            for s in self.sequences
        )

    def batches(self, device: torch.device) -> Iterator[Batch]:
        """The micro-batches on the device; the copies run while the host goes on."""
        yield from to_device(self.sequences, self.micro, self.corpus, device)

    def documents(self) -> list[dict[str, Any]]:
        """Where each sequence comes from."""
        units, seed, rows = self.corpus.units, self.corpus.order.seed, self.corpus.order.block_rows
        return [
            {
                "sequence": sequence.n,
                "file": units.describe(sequence.origin[0], seed),
                "documents": f"{sequence.origin[1]} to {sequence.origin[1] + rows - 1}",
            }
            for sequence in self.sequences
        ]


def to_device(
    sequences: list[Sequence], micro: int, corpus: Corpus, device: torch.device
) -> Iterator[Batch]:
    """Collate `micro` sequences at a time and copy them without blocking."""
    mask, eot, pinned = corpus.run.data.document_mask, corpus.encoder.eot, device.type == "cuda"
    for i in range(0, len(sequences), micro):
        batch = collate(sequences[i : i + micro], eot, mask, pin_memory=pinned)
        yield {key: value.to(device, non_blocking=True) for key, value in batch.items()}


class Feed:
    """An endless supply of windows for one rank, resumed where the last consumed one ended.

    Args:
        state: the data part of a checkpoint; None at the start.
    """

    def __init__(self, corpus: Corpus, plan: BatchPlan, rank: int, state: DataState | None) -> None:
        self._corpus, self._plan = corpus, plan
        self._cursors = dict(state.cursors) if state else {}
        self._next_sequence = state.next_sequence if state else 0
        sequences = Sequences(
            corpus.units,
            corpus.encoder,
            corpus.order,
            self._cursors,
            start=self._next_sequence,
            rank=rank,
            world=plan.world,
        )
        data = corpus.run.data
        self._iterator = iter(loader(sequences, data.workers, data.prefetch))

    def take(self) -> Window:
        """The next window; it counts as consumed only after `consume`.

        Raises:
            ValueError: the data can't be read; names the file, the document and the remedy.
        """
        started = time.perf_counter()
        count = self._plan.accumulation * self._plan.micro
        try:
            sequences = [next(self._iterator) for _ in range(count)]
        except ValueError as error:
            # torch puts the reader's whole traceback in front of what the reader said.
            last = str(error).strip().split("\n")[-1]
            raise ValueError(last.removeprefix("ValueError: ")) from error
        wait_ms = (time.perf_counter() - started) * 1000.0
        return Window(self._corpus, self._plan.micro, sequences, wait_ms)

    def blank(self, fault: ValueError) -> Window:
        """A window without labels, in place of one that can't be read.

        Its rank can enter the forward with the others and tell them there; nothing is trained.
        """
        padding = np.full(self._corpus.order.seq_len + 1, PAD, np.int32)
        row = Sequence(
            n=self._next_sequence, lane=0, tokens=padding, samples=0, cursor=Cursor(), origin=(0, 0)
        )
        return Window(self._corpus, self._plan.micro, [row] * self._plan.micro, 0.0, fault)

    def consume(self, window: Window) -> None:
        """Advance past a window, after its update."""
        self._cursors |= {sequence.lane: sequence.cursor for sequence in window.sequences}
        self._next_sequence += self._plan.global_sequences

    def cursors(self) -> dict[int, Cursor]:
        """Where this rank's lanes stand."""
        return dict(self._cursors)

    def state(self, cursors_of_ranks: Iterable[dict[int, Cursor]]) -> dict[str, Any]:
        """The data part of a checkpoint as JSON, from every rank's cursors in rank order."""
        return self._corpus.state(self._next_sequence, merge_cursors(cursors_of_ranks)).to_json()

    def close(self) -> None:
        """End the readers."""
        shut = getattr(self._iterator, "_shutdown_workers", None)
        if shut is not None:
            shut()


def resumed_state(corpus: Corpus, saved: dict[str, Any]) -> DataState:
    """A checkpoint's data state, if it belongs to this data and order.

    Raises:
        ValueError: naming every difference.
    """
    state = DataState.from_json(saved)
    check_state(state, corpus.state(0, {}))
    return state


@dataclass(frozen=True)
class HeldOut:
    """This rank's share of the held-out sequences, read once."""

    corpus: Corpus
    micro: int
    sequences: list[Sequence]

    @classmethod
    def open(cls, corpus: Corpus, plan: BatchPlan, rank: int) -> HeldOut:
        """Read the first `evaluate.sequences` held-out sequences of the first pass.

        Raises:
            ValueError: there are fewer.
        """
        assert corpus.run.evaluate is not None
        units = Units(corpus.run.data, corpus.scan, "held_out")
        count = corpus.run.evaluate.sequences
        rows = held_out_rows(units, corpus.encoder, corpus.order, count, rank, plan.world)
        return cls(corpus, plan.micro, rows)

    def batches(self, device: torch.device) -> Iterator[Batch]:
        """Micro-batches on the device."""
        yield from to_device(self.sequences, self.micro, self.corpus, device)
