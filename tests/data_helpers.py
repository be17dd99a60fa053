"""Small corpora and the objects over them, for the tests of recipes/data."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from recipes.config import Data, Tokenizer
from recipes.data.lanes import Cursor, Order, Sequence, Sequences
from recipes.data.source import Units, scan_source
from recipes.data.tokens import Encoder, prepare_tokenizer

WORDS = [
    "lane",
    "block",
    "cursor",
    "unit",
    "step",
    "row",
    "token",
    "head",
    "pack",
    "seed",
    "order",
    "file",
    "group",
    "rank",
    "world",
]
TRAINED = Tokenizer(train_vocab_size=300, train_documents=50)


def texts(count: int, seed: int = 0, longest: int = 30) -> list[str]:
    """Distinct short documents, each naming its number."""
    rng = random.Random(seed)
    return [
        f"<{i}> " + " ".join(rng.choices(WORDS, k=rng.randint(0, longest))) for i in range(count)
    ]


def write_parquet(folder: Path, files: int, rows: int, group: int) -> list[str]:
    """`files` Parquet files of `rows` documents in row groups of `group`; returns all documents."""
    folder.mkdir(parents=True, exist_ok=True)
    documents = texts(files * rows)
    for f in range(files):
        mine = documents[f * rows : (f + 1) * rows]
        table = pa.table({"id": list(range(rows)), "text": mine})
        pq.write_table(table, folder / f"part-{f}.parquet", row_group_size=group)
    return documents


def corrupt(path: Path, group: int) -> None:
    """Overwrite the text pages of one row group."""
    column = pq.read_metadata(path).row_group(group).column(1)
    start = column.dictionary_page_offset or column.data_page_offset
    raw = bytearray(path.read_bytes())
    raw[start : start + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    path.write_bytes(raw)


def parquet_data(folder: Path, **changes: Any) -> Data:
    """A data section over the Parquet files of a folder."""
    settings: dict[str, Any] = {
        "kind": "files",
        "format": "parquet",
        "files": [str(folder / "*.parquet")],
        "tokenizer": TRAINED,
    }
    return Data(**{**settings, **changes})


def train_tokenizer(folder: Path) -> Path:
    """A tokenizer.json over the documents' words."""
    return prepare_tokenizer(TRAINED, lambda: texts(50), folder)


def make_units(data: Data) -> Units:
    """The training part."""
    return Units(data, scan_source(data, seed=7), "train")


def make_order(**changes: Any) -> Order:
    """A small order that fails fast on read errors."""
    settings: dict[str, Any] = {
        "lanes": 4,
        "seq_len": 16,
        "block_rows": 5,
        "seed": 7,
        "read_attempts": 2,
        "retry_wait_s": 0.0,
    }
    return Order(**{**settings, **changes})


def take(
    units: Units,
    encoder: Encoder,
    order: Order,
    count: int,
    *,
    start: int = 0,
    cursors: dict[int, Cursor] | None = None,
) -> list[Sequence]:
    """`count` sequences of a single process."""
    stream = iter(Sequences(units, encoder, order, cursors or {}, start=start, rank=0, world=1))
    taken = [next(stream) for _ in range(count)]
    stream.close()  # type: ignore[attr-defined]
    return taken


def digest(sequences: Iterable[Sequence]) -> str:
    """A hash of the tokens, in the given order."""
    whole = hashlib.sha256()
    for sequence in sequences:
        whole.update(sequence.tokens.tobytes())
    return whole.hexdigest()[:16]


def one_pass(units: Units) -> list[str]:
    """All documents, by unit id and one unit at a time."""
    found = []
    for unit in units.ids:
        for table in units.open_unit(unit).with_format("arrow").iter(7):
            found += table.column(0).to_pylist()
    return found
