"""Lanes: one global order of sequences for every world size and worker count, resumed in O(1).

    lane l      reads the units at positions l, l + L, l + 2L, ... of the endless unit order;
                L lanes, fixed for the run
    block       the next `block_rows` documents of the lane's unit, shuffled, tokenized and packed
    sequence n  comes from lane n mod L; rank r of W takes n = r (mod W), worker k of P every P-th
    Cursor      where a lane stands: three numbers and at most a row of tokens

A block is a pure function of (cursor, seed, source), so neither a shuffle buffer nor a half-packed
row needs saving: they are computed again. A cursor comes with its sequence; keep it when the
sequence was consumed.
"""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import signal
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing.synchronize import Event
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from recipes.data.files import describe_error, read_errors, retrying
from recipes.data.packing import PACKINGS, Head, count_ends
from recipes.data.source import Units
from recipes.data.tokens import Encoder

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
Tables = Generator[pa.Table, None, None]


@dataclass(frozen=True)
class Cursor:
    """Where a lane stands."""

    unit: int = 0  # units that this lane has finished
    row: int = 0  # first document of the open block in the current unit
    taken: int = 0  # sequences consumed from the open block
    head: Head = ()  # tokens carried into the open block, at most seq_len

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; `from_json` is the inverse."""
        return asdict(self)

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> Cursor:
        """The cursor that `to_json` described."""
        return cls(**{**tree, "head": tuple(tree["head"])})


@dataclass(frozen=True, kw_only=True)
class Order:
    """What the global order depends on besides the source; the last two fields don't change it."""

    lanes: int
    seq_len: int  # labels per sequence
    block_rows: int  # documents
    seed: int
    packing: Literal["concat", "best_fit"] = "concat"
    read_attempts: int = 5  # before a read error ends the run
    retry_wait_s: float = 1.0  # before the second attempt; doubles, with jitter


@dataclass(frozen=True, eq=False)
class Sequence:
    """One row of training text with its place in the global order."""

    n: int
    lane: int
    tokens: np.ndarray  # int32 [seq_len + 1]; -1 after the last document of a best-fit row
    samples: int  # documents that end here; over all sequences each document counts once
    cursor: Cursor  # of the lane after this sequence
    origin: tuple[int, int]  # unit position and first document of the block


def blocks(units: Units, position: int, row: int, order: Order) -> Tables:
    """The documents of a unit from `row` on, `block_rows` at a time, reopened after read errors.

    Raises:
        ValueError: still unreadable after `order.read_attempts`; names the file and what to do.
    """
    stream: Tables | None = None
    start = row

    def read() -> pa.Table | None:
        nonlocal stream
        try:
            if stream is None:
                unit = units.open(position, order.seed)
                rest = unit.skip(start) if start else unit
                stream = rest.with_format("arrow").iter(order.block_rows)
            return next(stream, None)
        except read_errors():
            stream = None  # a generator that has raised is finished: open the unit again
            raise

    def what() -> str:
        return units.describe(position, order.seed)

    try:
        while (table := retrying(order.read_attempts, order.retry_wait_s, what)(read)) is not None:
            yield table
            start += len(table)
    except read_errors() as error:
        skip = sorted({*units.skipped, units.unit(position, order.seed)})
        raise ValueError(
            f"{what()}: can't be read from document {start} on after "
            f"{order.read_attempts} attempts: {describe_error(error)}; "
            f"if it is broken for good, go round it with data.skip_units={skip}"
        ) from error
    finally:
        if stream is not None:
            stream.close()  # or Arrow complains when the interpreter ends


def pack_block(
    table: pa.Table, encoder: Encoder, order: Order, origin: tuple[int, int], head: Head
) -> tuple[np.ndarray, Head]:
    """Shuffle, tokenize and pack one block; a pure function of its arguments.

    Returns:
        int32 [sequences, seq_len + 1], and the tokens left over.
    """
    shuffled = np.random.default_rng((order.seed, *origin)).permutation(len(table))
    texts = table.column(0).take(pa.array(shuffled)).to_pylist()
    return PACKINGS[order.packing](encoder.encode(texts), head, order.seq_len)


def lane(
    units: Units, encoder: Encoder, order: Order, n: int, cursor: Cursor
) -> Generator[Sequence, None, None]:
    """Sequences n, n + lanes, n + 2 * lanes, ... without end, from `cursor` on.

    Raises:
        ValueError: a unit can't be read, or all units were read and none held a token.
    """
    index = n % order.lanes
    empty: set[int] = set()  # units read since the last token
    while True:
        position = index + cursor.unit * order.lanes
        unit = units.unit(position, order.seed)
        if not cursor.row:  # else the lane may have read its tokens before
            empty.add(unit)
        if unit not in units.skipped:
            with closing(blocks(units, position, cursor.row, order)) as tables:
                for table in tables:
                    origin = (position, cursor.row)
                    rows, head = pack_block(table, encoder, order, origin, cursor.head)
                    ends = count_ends(rows, encoder.eot)
                    after = Cursor(cursor.unit, cursor.row + len(table), 0, head)
                    for k in range(cursor.taken, len(rows)):
                        taken = replace(cursor, taken=k + 1) if k + 1 < len(rows) else after
                        yield Sequence(n, index, rows[k], int(ends[k]), taken, origin)
                        n += order.lanes
                    if len(rows) or head != cursor.head:
                        empty.clear()
                    cursor = after
        cursor = Cursor(cursor.unit + 1, 0, 0, cursor.head)
        if empty.issuperset(units.ids):
            raise ValueError(f"the {units.part} data is an empty stream: no document holds a token")


class Sequences(IterableDataset[Sequence]):
    """This rank's sequences from number `start` on, without end, in the global order.

    Args:
        cursors: of the lanes that have been read, by lane; the others start at the beginning.
        start: number of the first sequence that is not consumed yet, over all ranks.
        rank: of this process among `world`.
    """

    def __init__(
        self,
        units: Units,
        encoder: Encoder,
        order: Order,
        cursors: Mapping[int, Cursor],
        *,
        start: int,
        rank: int,
        world: int,
    ) -> None:
        self.units, self.encoder, self.order = units, encoder, order
        self.cursors, self.start, self.rank, self.world = dict(cursors), start, rank, world
        self.check(1)

    def check(self, workers: int) -> None:
        """Refuse a world size and worker count that can't share the lanes evenly (ValueError)."""
        lanes, workers = self.order.lanes, max(1, workers)
        if lanes % (self.world * workers):
            legal = [p for p in range(1, lanes + 1) if lanes % (self.world * p) == 0]
            remedy = f"legal workers: {' '.join(map(str, legal))}" if legal else "change data.lanes"
            raise ValueError(
                f"lanes={lanes} must be a multiple of world_size * num_workers = {self.world} * "
                f"{workers}; {remedy}"
            )

    def __iter__(self) -> Iterator[Sequence]:
        """The sequences of this worker, or of the rank if there are no workers."""
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        self.check(workers)
        first = self.start + (self.rank - self.start) % self.world + worker * self.world
        numbers = range(first, first + self.order.lanes, self.world * workers)
        cursors = [self.cursors.get(n % self.order.lanes, Cursor()) for n in numbers]
        lanes = [
            lane(self.units, self.encoder, self.order, n, cursor)
            for n, cursor in zip(numbers, cursors, strict=True)
        ]
        try:
            while True:
                for sequences in lanes:
                    yield next(sequences)
        finally:
            for sequences in lanes:
                sequences.close()


def _same(sequence: Sequence) -> Sequence:
    return sequence


def _start_worker(ending: Event, _: int) -> None:
    """A reader survives the signals that ask its rank for a last checkpoint, and dies with the
    rank.
    """

    def stop(*_: object) -> None:
        if ending.is_set():
            os._exit(0)

    # The kernel ends the reader if its rank is killed: a reader that waits for a server would not
    # notice.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGTERM, stop)
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)


def loader(sequences: Sequences, workers: int, prefetch: int) -> DataLoader[Sequence]:
    """Single sequences, read ahead by `workers` forked processes (0: in this process).

    Args:
        workers: processes of this rank; lanes must be a multiple of world_size * workers.
        prefetch: sequences ready ahead, per worker.

    Raises:
        ValueError: the lanes can't be shared evenly.
    """
    sequences.check(workers)
    # Its own generator: else every new iterator draws from torch's global one, and a resumed run
    # would see other random numbers than an uninterrupted one.
    settings: dict[str, Any] = {
        "batch_size": None,
        "collate_fn": _same,
        "generator": torch.Generator(),
    }
    if workers:
        context = multiprocessing.get_context("fork")
        ending = context.Event()
        atexit.register(ending.set)
        settings |= {
            "num_workers": workers,
            "prefetch_factor": prefetch,
            "persistent_workers": True,
            "multiprocessing_context": context,
            "worker_init_fn": partial(_start_worker, ending),
        }
    return DataLoader(sequences, **settings)
