"""Sources: every kind is read through, held-out units stay apart, and faults name what is wrong."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_helpers import (
    TRAINED,
    corrupt,
    digest,
    make_order,
    make_units,
    one_pass,
    parquet_data,
    take,
    texts,
    write_parquet,
)

from recipes.config import Data, HeldOut
from recipes.data import files
from recipes.data.batches import count_documents, held_out_rows, measure
from recipes.data.lanes import Cursor, Sequences, lane, loader
from recipes.data.source import Scan, Units, scan_source
from recipes.data.tokens import Encoder


def read_all(units: Units) -> list[str]:
    return list(units.documents(seed=7))


def test_parquet_unit_is_a_row_group(tmp_path: Path) -> None:
    documents = write_parquet(tmp_path, files=3, rows=10, group=4)
    units = make_units(parquet_data(tmp_path))
    assert units.total == 9
    assert one_pass(units) == documents
    assert units.describe_unit(4).endswith("part-1.parquet, row group 1")
    assert [t.num_rows for t in units.open_unit(5).with_format("arrow").iter(9)] == [2]
    assert next(units.open_unit(0).with_format("arrow").iter(1)).column_names == ["text"]
    assert count_documents(units) == 30


def test_scan_survives_json_and_units_survive_pickle(tmp_path: Path) -> None:
    write_parquet(tmp_path, files=2, rows=10, group=5)
    data = parquet_data(tmp_path, held_out=HeldOut(share=0.25))
    scan = scan_source(data, seed=7)
    assert Scan.from_json(json.loads(json.dumps(scan.to_json()))) == scan
    units = Units(data, scan, "train")
    read_all(units)
    assert read_all(pickle.loads(pickle.dumps(units))) == read_all(units)


def test_first_pass_is_shuffled_and_passes_differ(tmp_path: Path) -> None:
    write_parquet(tmp_path, files=4, rows=10, group=1)
    units = make_units(parquet_data(tmp_path))
    first, second = units.order(7, 0).tolist(), units.order(7, 1).tolist()
    assert first != sorted(first) and second != first
    assert sorted(first) == sorted(second) == list(range(40))
    assert units.unit(40 + 3, 7) == second[3]


@pytest.mark.parametrize("per_unit", [1, 2, 3])
def test_json_files(tmp_path: Path, per_unit: int) -> None:
    documents = texts(20)
    for f in range(5):
        lines = [json.dumps({"body": t, "n": f}) for t in documents[f::5]]
        (tmp_path / f"{f}.jsonl").write_text("\n".join(lines))
    data = Data(
        kind="files",
        format="json",
        files=[str(tmp_path / "*.jsonl")],
        text_column="body",
        files_per_unit=per_unit,
        tokenizer=TRAINED,
    )
    units = make_units(data)
    assert units.total == -(-5 // per_unit)
    assert Counter(one_pass(units)) == Counter(documents)
    assert count_documents(units) == 20


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    documents = ["one\ntwo\n\nthree", "x" * 100, "", "last\n"]
    for i, text in enumerate(documents):
        (tmp_path / f"{i}.txt").write_text(text)
    data = Data(
        kind="files",
        format="text",
        files=[str(tmp_path / "*.txt")],
        files_per_unit=2,
        tokenizer=TRAINED,
    )
    units = make_units(data)
    assert units.total == 2
    assert one_pass(units) == documents
    assert sorted(read_all(units)) == sorted(d for d in documents if d)


def test_saved_data_set(tmp_path: Path) -> None:
    documents = texts(2500)
    whole = datasets.Dataset.from_dict({"text": documents, "n": list(range(2500))})
    whole.save_to_disk(str(tmp_path / "plain"))
    data = Data(kind="saved", path=str(tmp_path / "plain"), tokenizer=TRAINED)
    units = make_units(data)
    assert units.total == 3
    assert one_pass(units) == documents
    assert count_documents(units) == 2500

    splits = datasets.DatasetDict({"train": whole, "eval": whole.select(range(30))})
    splits.save_to_disk(str(tmp_path / "splits"))
    data = Data(
        kind="saved",
        path=str(tmp_path / "splits"),
        held_out=HeldOut(split="eval"),
        tokenizer=TRAINED,
    )
    scan = scan_source(data, seed=7)
    assert one_pass(Units(data, scan, "held_out")) == documents[:30]
    assert one_pass(Units(data, scan, "train")) == documents


def test_python_stdlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("a.py", "b.py", "package/c.py", "site-packages/no.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"# {name}\n")
    (tmp_path / "latin.py").write_bytes("# na\u00efve".encode("latin-1"))
    monkeypatch.setattr(files, "stdlib_folder", lambda: tmp_path)
    data = Data(kind="python_stdlib", tokenizer=TRAINED)
    scan = scan_source(data, seed=7)
    assert scan.splits[0].files == ("a.py", "b.py", "package/c.py")
    assert scan.left_out == 1
    assert one_pass(Units(data, scan, "train")) == ["# a.py\n", "# b.py\n", "# package/c.py\n"]


def test_the_real_standard_library_is_read() -> None:
    data = Data(kind="python_stdlib", files_per_unit=100, tokenizer=TRAINED)
    units = make_units(data)
    assert units.scan.left_out > 0
    assert sum(len(t) for t in units.open(0, 7).with_format("arrow").iter(50)) >= 50


def test_held_out_units_are_disjoint_and_fixed(tmp_path: Path) -> None:
    documents = write_parquet(tmp_path, files=2, rows=20, group=2)
    data = parquet_data(tmp_path, held_out=HeldOut(share=0.2))
    scan = scan_source(data, seed=7)
    assert scan == scan_source(data, seed=7)
    assert scan.held_out != scan_source(data, seed=8).held_out
    train, held = (set(one_pass(Units(data, scan, part))) for part in ("train", "held_out"))
    assert len(held) == 8
    assert not train & held
    assert train | held == set(documents)


def test_held_out_split_of_a_hub_data_set(tmp_path: Path) -> None:
    """A folder stands for the hub, which tests can't reach; the loading code is the same."""
    documents = write_parquet(tmp_path / "data", files=3, rows=10, group=5)
    for i, name in enumerate(["train-0", "train-1", "test-0"]):
        (tmp_path / "data" / f"part-{i}.parquet").rename(tmp_path / "data" / f"{name}.parquet")
    data = Data(kind="hub", path=str(tmp_path), held_out=HeldOut(split="test"), tokenizer=TRAINED)
    scan = scan_source(data, seed=7)
    assert scan.held_out == (4, 5)
    assert one_pass(Units(data, scan, "held_out")) == documents[20:]
    assert one_pass(Units(data, scan, "train")) == documents[:20]
    with pytest.raises(ValueError, match=r"no split \['dev'\]; there are \['test', 'train'\]"):
        scan_source(data.model_copy(update={"held_out": HeldOut(split="dev")}), seed=7)


def test_hub_revision_is_resolved_once_then_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's answer is a double: tests have no network."""
    asked: list[Any] = []

    class Api:
        def dataset_info(self, path: str, revision: str | None) -> Any:
            asked.append((path, revision))
            return type("Info", (), {"sha": "a" * 40})

    monkeypatch.setattr(files, "HfApi", Api)
    data = Data(kind="hub", path="some/corpus", revision="v1", tokenizer=TRAINED)
    assert files._revision(data, None) == "a" * 40
    assert files._revision(data, "b" * 40) == "b" * 40
    assert asked == [("some/corpus", "v1")]


def test_unreachable_hub_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    data = Data(kind="hub", path="some/corpus", tokenizer=TRAINED)
    with pytest.raises(ValueError, match="some/corpus can't be opened.*network.*local copy"):
        scan_source(data, seed=7)


def test_faults_of_the_source_are_value_errors(tmp_path: Path) -> None:
    write_parquet(tmp_path / "p", files=1, rows=4, group=4)
    (tmp_path / "empty").mkdir()
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "empty/0.parquet")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/0.parquet").write_bytes(b"PAR1 not really")

    def fails(match: str, data: Data) -> None:
        with pytest.raises(ValueError, match=match):
            scan_source(data, seed=7)

    def changed(**settings: Any) -> Data:
        return parquet_data(tmp_path / "p").model_copy(update=settings)

    fails("nowhere.*matches no file; check", parquet_data(tmp_path / "nowhere"))
    fails("can't be opened", parquet_data(tmp_path, files=[str(tmp_path / "no.parquet")]))
    columns = r"'body' is no text column; there are id \(int64\), text \(string\)"
    fails(columns, changed(text_column="body"))
    fails("'id' is no text column", changed(text_column="id"))
    fails("empty stream", parquet_data(tmp_path / "empty"))
    fails(r"broken/0.parquet can't be read", parquet_data(tmp_path / "broken"))
    fails(r"skip_units=\[-1, 9\]: there are units 0 to 0", changed(skip_units=[9, -1]))
    fails("train part has no units", changed(skip_units=[0]))
    fails("at least two units, there is 1", changed(held_out=HeldOut(share=0.1)))
    fails("has no split", changed(split="dev"))
    saved = Data(kind="saved", path=str(tmp_path / "saved"), tokenizer=TRAINED)
    fails("saved.*can't be opened", saved)
    folder = Data(kind="hub", path=str(tmp_path / "p"), revision="v1", tokenizer=TRAINED)
    fails("no effect on a local folder", folder)


def test_a_file_that_changed_since_the_scan_is_refused(tmp_path: Path) -> None:
    write_parquet(tmp_path, files=2, rows=4, group=4)
    units = make_units(parquet_data(tmp_path))
    write_parquet(tmp_path, files=2, rows=5, group=5)
    with pytest.raises(ValueError, match="every node must see the same files"):
        units.open_unit(0)


def test_documents_without_tokens_end_in_an_error_not_a_hang(
    tmp_path: Path, encoder: Encoder
) -> None:
    pq.write_table(pa.table({"text": ["", None, ""]}), tmp_path / "0.parquet", row_group_size=1)
    units = make_units(parquet_data(tmp_path))
    with pytest.raises(ValueError, match="empty stream: no document holds a token"):
        take(units, encoder, make_order(lanes=2), 1)
    with pytest.raises(ValueError, match="none of 3 sampled documents"):
        measure(units, encoder, make_order())


def test_one_unit_that_was_read_up_to_its_end_is_not_empty(
    tmp_path: Path, encoder: Encoder
) -> None:
    write_parquet(tmp_path, files=1, rows=10, group=10)
    units = make_units(parquet_data(tmp_path))
    stream = take(units, encoder, make_order(lanes=1), 60)
    for i in range(0, 59):
        resumed = lane(units, encoder, make_order(lanes=1), i + 1, stream[i].cursor)
        assert digest([next(resumed)]) == digest([stream[i + 1]])


@pytest.mark.parametrize("workers", [0, 1])
def test_corrupt_row_group_is_named_and_skipped_on_demand(
    tmp_path: Path, encoder: Encoder, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    documents = write_parquet(tmp_path, files=2, rows=12, group=3)
    corrupt(tmp_path / "part-1.parquet", group=2)  # unit 6
    units = make_units(parquet_data(tmp_path))
    order = make_order(lanes=2, block_rows=2, seq_len=8)
    sequences = Sequences(units, encoder, order, {}, start=0, rank=0, world=1)
    stream = iter(loader(sequences, workers, prefetch=2))
    cursors: dict[int, Cursor] = {}
    message = (
        r"part-1.parquet, row group 2: can't be read from document 0 on after 2 attempts: "
        r".*data.skip_units=\[6\]"
    )
    with pytest.raises(ValueError, match=message):
        for n in range(1000):
            cursors[n % 2] = next(stream).cursor
    if workers:
        stream._shutdown_workers()  # type: ignore[attr-defined]
    if not workers:
        assert "part-1.parquet, row group 2: attempt 1 of 2 failed" in caplog.text
    # The same command with the unit listed goes on from the cursors it had.
    units = make_units(parquet_data(tmp_path, skip_units=[6]))
    assert sorted(read_all(units)) == sorted(documents[:18] + documents[21:])
    assert count_documents(units) == 21
    assert len(take(units, encoder, order, 200, start=n, cursors=cursors)) == 200


def test_held_out_rows_are_one_set_for_every_world(tmp_path: Path, encoder: Encoder) -> None:
    write_parquet(tmp_path, files=2, rows=40, group=5)
    data = parquet_data(tmp_path, held_out=HeldOut(share=0.3))
    units = Units(data, scan_source(data, seed=7), "held_out")
    want = held_out_rows(units, encoder, make_order(), 12, 0, 1)
    for world in (2, 3):
        shares = [held_out_rows(units, encoder, make_order(), 12, r, world) for r in range(world)]
        joined = sorted((s for share in shares for s in share), key=lambda s: s.n)
        assert digest(joined) == digest(want)
        assert all(s.n % world == r for r, share in enumerate(shares) for s in share)
    with pytest.raises(ValueError, match="evaluate.sequences=9999: the held-out units hold only"):
        held_out_rows(units, encoder, make_order(), 9999, 0, 1)


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_measure_agrees_with_reading_everything(
    tmp_path: Path, encoder: Encoder, packing: str
) -> None:
    documents = write_parquet(tmp_path, files=2, rows=40, group=10)
    units = make_units(parquet_data(tmp_path))
    order = make_order(packing=packing, block_rows=10)
    measured = measure(units, encoder, order, documents=80)
    tokens = sum(map(len, encoder.encode(documents)))
    assert (measured.documents, measured.samples, measured.tokens) == (80, 80, tokens)
    assert measured.tokens_per_sample == tokens / 80
    if packing == "concat":
        assert measured.sequences_per_sample == tokens / 16 / 80
    else:
        stream = take(units, encoder, order, 400)
        in_pass = [s for s in stream if s.origin[0] < units.total]
        assert measured.sequences == pytest.approx(len(in_pass), rel=0.05)
    assert measure(units, encoder, order, documents=20).documents == 20
