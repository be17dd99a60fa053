"""A data set as addressable units: one Parquet row group each, or one or several whole files.

    scan = scan_source(data, seed, revision=None, progress=True)   # one rank; JSON for all others
    train = Units(data, scan, "train")
    stream = train.open(position, seed)                            # a `datasets` stream of one unit

Unit ids are 0 .. n-1 over `data.split`, then over a held-out split if it has one of its own.
Positions count an endless sequence of units: a permutation of the part's units, then another one,
and so on.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, Literal

import datasets
import numpy as np
from datasets.data_files import DataFilesDict, DataFilesList

from recipes.config import Data
from recipes.data.files import find, footers, load_saved, local_path, read_errors
from recipes.data.scan import Scan as Scan
from recipes.data.scan import Split

Part = Literal["train", "held_out"]
SAVED_ROWS = 1000  # per unit of a saved data set, which has no row groups
READ_ROWS = 1024  # Parquet rows decoded at once, so that a giant row group does not fill the memory
HELD_OUT_STREAM = 1  # keeps the choice of held-out units apart from every other use of the seed


def scan_source(data: Data, seed: int, revision: str | None = None, progress: bool = False) -> Scan:
    """Look at the data set once, on one rank: files, units, held-out units, and that it can be
    read.

    Args:
        data: the run file's section.
        seed: chooses the held-out units if they are a share.
        revision: the hub commit that an earlier start recorded; it is used again.
        progress: show a bar while the ends of many Parquet files are read.

    Raises:
        ValueError: nothing found, the hub can't be reached, no such split or column, no documents,
            too few units to hold some out, or a unit in `data.skip_units` that does not exist.
    """
    found = find(data, revision)
    names = [data.split, *([data.held_out.split] if data.held_out and data.held_out.split else [])]
    if len(names) > 1 and names[0] == names[1]:
        raise ValueError(
            f"data.held_out.split={names[1]!r} is the training split; give another one"
        )
    splits = tuple(_split(data, found.format, n, found.splits[n], progress) for n in names)
    scan = Scan(
        kind=data.kind,
        format=found.format,
        splits=splits,
        revision=found.revision,
        left_out=found.left_out,
        held_out=_held_out(data, splits, seed),
    )
    if broken := sorted(unit for unit in data.skip_units if not 0 <= unit < scan.num_units):
        raise ValueError(f"data.skip_units={broken}: there are units 0 to {scan.num_units - 1}")
    _check_text(data, scan)
    return scan


def _split(data: Data, format: str, name: str, files: list[str], progress: bool) -> Split:
    rows: tuple[int, ...] | None = None
    if format == "parquet":
        tables = footers(files, data.read_attempts, progress)
        groups = tuple(len(table) for table in tables)
        rows = tuple(count for table in tables for count in table)
    elif format == "saved":
        total = len(load_saved(data)[name])
        groups = (-(-total // SAVED_ROWS),)
        rows = _evenly(total, groups[0])
    else:
        groups = (-(-len(files) // data.files_per_unit),)
        if format == "text":  # a file is a document
            rows = _evenly(len(files), groups[0])
    paths = [path for file in files if (path := local_path(data.kind, file)) and path.is_file()]
    sizes = tuple(path.stat().st_size for path in paths)
    return Split(name=name, files=tuple(files), groups=groups, rows=rows, sizes=sizes)


def _evenly(total: int, pieces: int) -> tuple[int, ...]:
    return tuple(total // pieces + (i < total % pieces) for i in range(pieces))


def _held_out(data: Data, splits: tuple[Split, ...], seed: int) -> tuple[int, ...]:
    if data.held_out is None:
        return ()
    total = splits[0].num_units
    if data.held_out.share is None:
        return tuple(range(total, total + splits[1].num_units))
    if total < 2:
        raise ValueError(
            f"data.held_out.share={data.held_out.share} needs at least two units, there is "
            f"{total}; "
            "give more or smaller files, fewer files_per_unit, or held_out.split"
        )
    count = min(max(1, round(data.held_out.share * total)), total - 1)
    chosen = np.random.default_rng((seed, HELD_OUT_STREAM)).choice(total, count, replace=False)
    return tuple(sorted(int(unit) for unit in chosen))


def _check_text(data: Data, scan: Scan) -> None:
    parts: list[Part] = ["train", "held_out"] if scan.held_out else ["train"]
    for part in parts:
        units = Units(data, scan, part)
        try:
            columns = units.columns()
        except read_errors() as error:
            raise ValueError(f"the {part} data can't be read: {error}; mend the files") from error
        if columns is None:
            raise ValueError(f"the {part} data is an empty stream: no unit of it holds a row")
        if columns.get(data.text_column) not in ("string", "large_string", "string_view"):
            raise ValueError(
                f"data.text_column={data.text_column!r} is no text column; there are "
                + ", ".join(f"{name} ({kind})" for name, kind in columns.items())
            )


class Units:
    """The units of one part, in an endless seeded order; small to pickle, and opened where it is
    used.

    A unit in `data.skip_units` keeps its place in the order and yields nothing: so the cursors of
    a run stay valid when a broken unit is listed between two starts.
    """

    def __init__(self, data: Data, scan: Scan, part: Part) -> None:
        self.data, self.scan, self.part = data, scan, part
        held_out = set(scan.held_out)
        wanted = part == "held_out"
        self._ids = [unit for unit in range(scan.num_units) if (unit in held_out) == wanted]
        self.skipped = frozenset(data.skip_units)
        if not set(self._ids) - self.skipped:
            raise ValueError(
                f"the {part} part has no units: {len(self._ids)} found, the rest is skipped"
            )
        self._orders: dict[tuple[int, int], np.ndarray] = {}
        self._streams: dict[int, datasets.IterableDataset] = {}
        self._ends = [list(accumulate(split.groups)) for split in scan.splits]

    @property
    def total(self) -> int:
        """Units in one pass, those in `data.skip_units` included."""
        return len(self._ids)

    @property
    def ids(self) -> list[int]:
        """The unit ids that are read, ascending."""
        return [unit for unit in self._ids if unit not in self.skipped]

    def order(self, seed: int, epoch: int) -> np.ndarray:
        """The unit ids of pass `epoch` in reading order, int64 [total]."""
        key = (seed, epoch)
        if key not in self._orders:
            if len(self._orders) > 1:  # lanes are in at most two passes at a time
                self._orders.pop(min(self._orders))
            ids = np.asarray(self._ids, np.int64)
            self._orders[key] = np.random.default_rng(key).permutation(ids)
        return self._orders[key]

    def unit(self, position: int, seed: int) -> int:
        """The id of the unit at `position` of the endless order."""
        epoch, index = divmod(position, self.total)
        return int(self.order(seed, epoch)[index])

    def open(self, position: int, seed: int) -> datasets.IterableDataset:
        """A stream of exactly the unit at `position`, with the text column only (not from text
        files).
        """
        return self.open_unit(self.unit(position, seed))

    def describe(self, position: int, seed: int) -> str:
        """The file and, in a Parquet file, the row group of the unit at `position`."""
        return self.describe_unit(self.unit(position, seed))

    def open_unit(self, unit: int) -> datasets.IterableDataset:
        """A stream of the unit with this id.

        Raises:
            ValueError: a local file is not the one that was scanned, on this machine.
        """
        which, index = self._place(unit)
        split = self.scan.splits[which]
        if self.scan.format == "saved":
            saved = load_saved(self.data)[split.name].select_columns([self.data.text_column])
            return saved.shard(split.num_units, index, contiguous=True).to_iterable_dataset()
        self._check_sizes(which, index)
        if which not in self._streams:
            self._streams[which] = self._stream(split)
        stream = self._streams[which]
        if self.scan.format != "parquet":
            return stream.shard(split.num_units, index).select_columns([self.data.text_column])
        file, group = self._group(which, index)
        stream = stream.shard(len(split.files), file)
        # Two levels, since sharding costs time in proportion to the number of shards.
        groups = split.groups[file]
        return stream.reshard().shard(groups, group) if groups > 1 else stream

    def describe_unit(self, unit: int) -> str:
        """The file (and row group) of the unit with this id, for people."""
        which, index = self._place(unit)
        split = self.scan.splits[which]
        if self.scan.format == "parquet":
            file, group = self._group(which, index)
            return f"{split.files[file]}, row group {group}"
        if self.scan.format == "saved":
            return f"{split.files[0]}, split {split.name}, piece {index} of {split.num_units}"
        files = split.unit_files(index)
        more = f" and {len(files) - 1} more files" if len(files) > 1 else ""
        return f"{split.files[files.start]}{more}"

    def columns(self) -> dict[str, str] | None:
        """Column names and types; None if no unit of this part holds a row."""
        if self.scan.format == "saved":
            features = load_saved(self.data)[self.scan.splits[0].name].features
            return (
                {n: str(getattr(f, "dtype", f)) for n, f in features.items()}
                if self.rows()
                else None
            )
        if self.scan.format == "parquet" and not self.rows():
            return None
        split = self.scan.splits[self._place(self._ids[0])[0]]
        stream = self._stream(split, all_columns=True)
        if self.scan.format != "parquet":
            split_units = split.num_units
            streams = (stream.shard(split_units, self._place(unit)[1]) for unit in self.ids)
            tables = (t for s in streams for t in s.with_format("arrow").iter(1))
            table = next((t for t in tables if len(t)), None)
            return None if table is None else {f.name: str(f.type) for f in table.schema}
        return {f.name: str(f.type) for f in stream.features.arrow_schema}

    def rows(self) -> int | None:
        """Documents in one pass, empty ones included, if that is known without reading."""
        counts = [split.rows for split in self.scan.splits]
        if any(count is None for count in counts):
            return None
        flat = [row for count in counts for row in count or ()]
        return sum(flat[unit] for unit in self.ids)

    def documents(self, seed: int) -> Iterator[str]:
        """The texts of the first pass, unit by unit, empty ones left out."""
        for position in range(self.total):
            if self.unit(position, seed) not in self.skipped:
                for table in self.open(position, seed).with_format("arrow").iter(SAVED_ROWS):
                    yield from filter(None, table.column(self.data.text_column).to_pylist())

    def _place(self, unit: int) -> tuple[int, int]:
        """Which split the unit is in, and its number there."""
        first = self.scan.splits[0].num_units
        return (0, unit) if unit < first else (1, unit - first)

    def _group(self, which: int, index: int) -> tuple[int, int]:
        """File and row group of a Parquet unit."""
        ends = self._ends[which]
        file = bisect_right(ends, index)
        return file, index - (ends[file - 1] if file else 0)

    def _file_indices(self, which: int, index: int) -> range:
        if self.scan.format != "parquet":
            return self.scan.splits[which].unit_files(index)
        file, _ = self._group(which, index)
        return range(file, file + 1)

    def _check_sizes(self, which: int, index: int) -> None:
        split = self.scan.splits[which]
        if len(split.sizes) != len(split.files):
            return
        for i in self._file_indices(which, index):
            path = local_path(self.scan.kind, split.files[i])
            if path is not None and (size := path.stat().st_size) != split.sizes[i]:
                raise ValueError(
                    f"{path} has {size} bytes on {os.uname().nodename}, {split.sizes[i]} where it "
                    f"was scanned; "
                    "every node must see the same files"
                )

    def _stream(self, split: Split, all_columns: bool = False) -> datasets.IterableDataset:
        names = [str(local_path(self.scan.kind, file) or file) for file in split.files]
        options: dict[str, Any] = {}
        if self.scan.format == "text":
            options = {"sample_by": "document"}
        elif self.scan.format == "parquet" and not all_columns:
            options = {"columns": [self.data.text_column], "batch_size": READ_ROWS}
        # A DataFilesList is taken as it is: globbing and asking for every file's date again would
        # cost one request per file in every worker.
        files = DataFilesDict({split.name: DataFilesList(names, [])})
        builder = datasets.load_dataset_builder(self.scan.format, data_files=files, **options)
        return builder.as_streaming_dataset(split=split.name)
