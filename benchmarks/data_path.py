"""python benchmarks/data_path.py [--megabytes 12] [--seq_len 1024] [--block_rows 512]

What the data path costs, beside what run_clm and Accelerate do, on one Parquet text.

Tokens per CPU-second, up to collated micro-batches of tensors (this process, one thread; no side
has children; higher is better):
    run_clm    `map(tokenize, batched).map(group_texts, batched)` over a stream, as in run_clm.py
    lanes      the same files through recipes/data, with each engine

Seconds to the first sequence after a resume (lower is better):
    lanes      from cursors at sequence 10 and 1,000,000; four lanes
    skipping   what `accelerate.skip_first_batches` does: iterate over everything that was consumed

The text is the Python standard library's sources, cut into documents of about 3,000 characters;
the tokenizer is a byte-level BPE trained on it.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

os.environ["RAYON_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from accelerate import skip_first_batches
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast, default_data_collator

from recipes.config import Data, Tokenizer
from recipes.data.batches import collate
from recipes.data.lanes import Cursor, Order, Sequences
from recipes.data.source import Units, scan_source
from recipes.data.tokens import Encoder, prepare_tokenizer

END = "<|endoftext|>"
LANES = 4
ROW_GROUP = 512  # documents
MICRO = 8  # sequences collated together, on both sides


def main(argv: list[str] | None = None) -> int:
    """Measure and print two Markdown tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[2])
    parser.add_argument("--megabytes", type=float, default=12.0)
    parser.add_argument("--seq_len", type=int, default=1024)
    parser.add_argument("--block_rows", type=int, default=512)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as folder:
        corpus = write_corpus(Path(folder), int(args.megabytes * 1e6))
        settings = Tokenizer(train_vocab_size=32000, train_documents=2000)
        tokenizer = prepare_tokenizer(settings, lambda: corpus, Path(folder))
        units = open_units(f"{folder}/*.parquet", settings)
        print(
            f"{len(corpus):,} documents, {sum(map(len, corpus)) / 1e6:.1f} M characters, ", end=""
        )
        print(f"{units.total} row groups, seq_len {args.seq_len}, block_rows {args.block_rows}\n")
        throughput(units, tokenizer, args.seq_len, args.block_rows)
        resume(units, tokenizer, args.seq_len)
    return 0


def open_units(pattern: str, settings: Tokenizer) -> Units:
    """All row groups of the files."""
    data = Data(kind="files", format="parquet", files=[pattern], tokenizer=settings)
    return Units(data, scan_source(data, seed=0), "train")


def write_corpus(folder: Path, characters: int) -> list[str]:
    """Documents of about 3,000 characters, shuffled, in four Parquet files."""
    documents: list[str] = []
    left = characters
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" in path.parts or left <= 0:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        documents += [text[i : i + 3000] for i in range(0, len(text), 3000)]
        left -= len(text)
    documents = [documents[i] for i in np.random.default_rng(0).permutation(len(documents))]
    for part in range(4):
        table = pa.table({"text": documents[part::4]})
        pq.write_table(table, folder / f"{part}.parquet", row_group_size=ROW_GROUP)
    return documents


def run_clm(
    units: Units, tokenizer: Path, seq_len: int, calls: list[int]
) -> Iterator[dict[str, Any]]:
    """The two maps of transformers' run_clm.py over a stream."""
    fast = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer), eos_token=END)

    def tokenize(examples: dict[str, Any]) -> Any:
        return fast(examples["text"])

    def group_texts(examples: dict[str, Any]) -> dict[str, Any]:
        calls[0] += 1
        joined = {k: list(chain(*examples[k])) for k in examples}
        total = len(joined["input_ids"]) // seq_len * seq_len
        result = {
            k: [t[i : i + seq_len] for i in range(0, total, seq_len)] for k, t in joined.items()
        }
        result["labels"] = result["input_ids"].copy()
        return result

    files = list(units.scan.splits[0].files)
    stream = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    tokenized = stream.map(tokenize, batched=True, remove_columns=["text"])
    yield from tokenized.map(group_texts, batched=True)


def lanes(
    units: Units, tokenizer: Path, engine: Any, seq_len: int, block_rows: int, count: int, **at: Any
) -> Iterator[Any]:
    """The sequences of a single rank from `count` lanes, in this process."""
    order = Order(lanes=count, seq_len=seq_len, block_rows=block_rows, seed=0)
    encoder = Encoder(tokenizer, END, engine)
    where = {"cursors": {}, "start": 0, **at}
    cursors, start = where["cursors"], where["start"]
    yield from Sequences(units, encoder, order, cursors, start=start, rank=0, world=1)


def throughput(units: Units, tokenizer: Path, seq_len: int, block_rows: int) -> None:
    """One first pass over the corpus each, so that no cache is warm."""
    sides: dict[str, Callable[[], Iterator[Any]]] = {
        "run_clm": lambda: blocks_of_run_clm(units, tokenizer, seq_len),
        "lanes, hf": lambda: blocks_of_lanes(units, tokenizer, "hf", seq_len, block_rows),
        "lanes, gigatoken": lambda: blocks_of_lanes(
            units, tokenizer, "gigatoken", seq_len, block_rows
        ),
    }
    rates = {
        name: max(tokens_per_second(side(), seq_len) for _ in range(3)) / 1e6
        for name, side in sides.items()
    }
    print("| path | Mtok / CPU-s | against run_clm |\n|---|--:|--:|")
    for name, rate in rates.items():
        print(f"| {name} | {rate:.2f} | {rate / rates['run_clm']:.1f} |")


def tokens_per_second(blocks: Iterator[Any], seq_len: int) -> float:
    """From the end of the first block to the end of the last, without the first one's sequences.

    Opening and the equality gate stay out; every counted sequence is made under the clock.
    """
    first = next(blocks)
    started = time.process_time()  # no side has child processes here
    count = sum(block != first for block in blocks)
    return count * seq_len / (time.process_time() - started)


def blocks_of_run_clm(units: Units, tokenizer: Path, seq_len: int) -> Iterator[int]:
    """For every sequence the number of its `group_texts` call; batches are collated."""
    calls, waiting = [0], []
    for row in run_clm(units, tokenizer, seq_len, calls):
        waiting.append(row)
        if len(waiting) == MICRO:
            default_data_collator(waiting)
            waiting = []
        yield calls[0]


def blocks_of_lanes(
    units: Units, tokenizer: Path, engine: Any, seq_len: int, block_rows: int
) -> Iterator[tuple[int, int]]:
    """For every sequence its block, up to a block's end in the last unit; batches are collated."""
    waiting = []
    for sequence in lanes(units, tokenizer, engine, seq_len, block_rows, 1):
        waiting.append(sequence)
        if len(waiting) == MICRO:
            collate(waiting, eot=0, document_mask=False)
            waiting = []
        yield sequence.origin
        if sequence.origin[0] == units.total - 1 and not sequence.cursor.taken:
            return


def resume(units: Units, tokenizer: Path, seq_len: int) -> None:
    """Wall seconds from nothing to the first sequence; a lane's position is plain arithmetic."""
    print("\n| resume | at sequence | s to the first sequence |\n|---|--:|--:|")
    for at in (10, 1_000_000):
        # About one unit per row group's worth of sequences; any whole number is a legal cursor.
        unit = at * seq_len // (LANES * ROW_GROUP * 800)
        cursors = {lane: Cursor(unit, 128, 1) for lane in range(LANES)}
        for engine in ("hf", "gigatoken"):
            started = time.perf_counter()
            next(lanes(units, tokenizer, engine, seq_len, 128, LANES, cursors=cursors, start=at))
            print(f"| lanes, {engine} | {at:,} | {time.perf_counter() - started:.2f} |")
    at = 2000
    started = time.perf_counter()
    loader = DataLoader(
        list_stream(run_clm(units, tokenizer, seq_len, [0])), batch_size=None, num_workers=0
    )
    next(iter(skip_first_batches(loader, at)))
    print(f"| skip_first_batches | {at:,} | {time.perf_counter() - started:.2f} |")


class list_stream(torch.utils.data.IterableDataset[Any]):  # noqa: N801
    """A stream as torch's loader wants it."""

    def __init__(self, stream: Iterator[Any]) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[Any]:
        return self.stream


if __name__ == "__main__":
    raise SystemExit(main())
