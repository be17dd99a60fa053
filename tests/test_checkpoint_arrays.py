"""Arrays in pieces: written as safetensors, found by name, read by whoever needs which part."""

from __future__ import annotations

import errno
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_saves import ONE, TWO, place
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from thread_ranks import Threads, all_well, on_all_ranks

from recipes.checkpoint import arrays, commit, files, verify
from recipes.checkpoint.arrays import TogetherReader
from recipes.checkpoint.disks import Disks
from recipes.checkpoint.pieces import ArrayReader, Piece, read_rng, write_pieces, write_share

VALUES = {
    "fp64": torch.tensor([1.0, float("nan"), float("-inf"), 5e-324], dtype=torch.float64),
    "fp32": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
    "fp16": torch.tensor([1.5, 65504.0], dtype=torch.float16),
    "bf16": torch.tensor([1.5, 3e38, 2.0], dtype=torch.bfloat16),
    "int64": torch.tensor([-(2**63), 2**63 - 1]),
    "int32": torch.tensor([7], dtype=torch.int32),
    "int16": torch.tensor([-7], dtype=torch.int16),
    "int8": torch.tensor([-128, 127, 0], dtype=torch.int8),
    "uint8": torch.tensor([255], dtype=torch.uint8),
    "bool": torch.tensor([True, False, True]),
    "none": torch.empty(0),
}


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.reshape(-1).contiguous().view(torch.uint8).tolist()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)


def test_what_is_written_the_safetensors_library_reads_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "arrays-00000.safetensors"
    record = write_pieces(path, [Piece(f"x/{name}", 0, v) for name, v in VALUES.items()])
    assert record == files.describe(path)
    loaded = load_file(path)
    assert {f"x/{name}@0" for name in VALUES} == set(loaded)
    for name, values in VALUES.items():
        assert same(loaded[f"x/{name}@0"], values), name
    reader = ArrayReader(tmp_path, [path.name])
    assert all(same(reader.read(f"x/{name}"), values) for name, values in VALUES.items())


def test_what_the_safetensors_library_writes_is_read_too(tmp_path: Path) -> None:
    save_file({"a@0": torch.arange(3.0), "a@3": torch.arange(3.0, 5)}, tmp_path / "arrays-0.s")
    assert ArrayReader(tmp_path, ["arrays-0.s"]).read("a").tolist() == [0, 1, 2, 3, 4]


@settings(max_examples=60, deadline=None)
@given(
    layout=st.lists(
        st.tuples(st.sampled_from([d for d in VALUES if d != "none"]), st.integers(0, 40)),
        max_size=8,
    )
)
def test_any_mixture_of_types_and_sizes_survives(
    layout: list[tuple[str, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("mixture")
    pieces = [
        Piece(f"w{index}", index, torch.randint(0, 2, (size,)).to(VALUES[kind].dtype))
        for index, (kind, size) in enumerate(layout)
    ]
    write_pieces(folder / "f", pieces)
    loaded = load_file(folder / "f")
    assert all(same(loaded[f"{p.name}@{p.start}"], p.values) for p in pieces)


def test_views_are_written_as_what_they_show(tmp_path: Path) -> None:
    base = torch.arange(12.0)
    pieces = [Piece("step", 0, base[::3]), Piece("part", 4, base[5:7])]
    write_pieces(tmp_path / "f", pieces)
    assert load_file(tmp_path / "f")["step@0"].tolist() == [0, 3, 6, 9]
    assert load_file(tmp_path / "f")["part@4"].tolist() == [5, 6]


def test_the_file_mode_is_the_users_choice_and_an_error_names_the_path(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_pieces(tmp_path / "f", [Piece("a", 0, torch.ones(2))])
    finally:
        os.umask(before)
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o640
    with pytest.raises(OSError) as caught:
        write_pieces(tmp_path / "absent" / "f", [])
    assert caught.value.errno == errno.ENOENT
    assert caught.value.filename == str(tmp_path / "absent" / "f")


def test_a_full_disk_in_the_middle_of_the_arrays_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, done = os.write, [0]

    def full(handle: int, data: Any) -> int:
        done[0] += 1
        if done[0] > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(handle, data[: max(1, len(data) // 2)])  # and short writes are gone on with

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        write_pieces(tmp_path / "f", [Piece("a", 0, torch.ones(1000))])
    assert caught.value.filename == str(tmp_path / "f")
    monkeypatch.setattr(os, "write", lambda handle, data: real(handle, data[:5]))
    write_pieces(tmp_path / "g", [Piece("a", 0, torch.arange(10.0))])
    assert load_file(tmp_path / "g")["a@0"].tolist() == list(range(10))


# ---- reading in one process


def checkpoint(root: Path, whole: dict[str, torch.Tensor], cuts: list[float], disks: Disks) -> None:
    """Every array cut into one piece a rank at these fractions."""
    layout = {
        name: {"shape": list(values.shape), "dtype": str(values.dtype).removeprefix("torch.")}
        for name, values in whole.items()
    }
    common = {"arrays.json": json.dumps(layout).encode(), "state.json": b'{"version": 2}'}

    def act(group: Threads) -> Path:
        pieces = []
        for name, values in whole.items():
            flat = values.reshape(-1)
            ends = [round(cut * flat.numel()) for cut in [0.0, *cuts, 1.0]]
            low, high = ends[group.rank], ends[group.rank + 1]
            if low < high or (group.rank == 0 and not flat.numel()):
                pieces.append(Piece(name, low, flat[low:high]))
        random_ = {"cpu": torch.tensor([group.rank, 9], dtype=torch.uint8)}

        def write(beside: Path) -> dict[str, files.FileRecord]:
            return write_share(beside, group.rank, pieces, random_)

        return commit.commit(
            place(root, disks, group.rank), 1, write, group, disks, {"strategy": "x"}, common
        )

    all_well(act, len(disks.of_rank))


WHOLE = {
    "weight/a": torch.arange(30.0).reshape(5, 6),
    "exp_avg/a": torch.linspace(-1, 1, 7),
    "buffer/n": torch.tensor(7),
    "buffer/none": torch.empty(0, 3),
    "weight/low": torch.arange(11, dtype=torch.bfloat16),
}


def test_arrays_are_found_by_name_whichever_rank_wrote_them(tmp_path: Path) -> None:
    checkpoint(tmp_path, WHOLE, [0.2, 0.5], ONE)
    opened = arrays.open_checkpoint(tmp_path / "step-00000001")
    assert opened.state == {"version": 2} and opened.manifest.world == 3
    assert opened.common("state.json") == tmp_path / "step-00000001" / "state.json"
    assert opened.arrays.names() == set(WHOLE)
    for name, values in WHOLE.items():
        assert same(opened.arrays.whole(name), values), name
        flat = values.reshape(-1)
        for start in range(flat.numel() + 1):
            for stop in range(start, flat.numel() + 1):
                assert same(opened.arrays.read(name, start, stop), flat[start:stop])
    with pytest.raises(ValueError, match=r"elements 30 to 31 are in no file"):
        opened.arrays.read("weight/a", 29, 31)


def test_what_was_read_is_the_callers_own(tmp_path: Path) -> None:
    write_pieces(tmp_path / "f", [Piece("a", 0, torch.arange(5.0))])
    record, reader = files.describe(tmp_path / "f"), ArrayReader(tmp_path, ["f"])
    first, second = reader.read("a"), reader.read("a", 1, 3)
    first.zero_()
    assert second.tolist() == [1, 2] and reader.read("a").tolist() == [0, 1, 2, 3, 4]
    assert files.describe(tmp_path / "f") == record


def test_only_the_files_of_the_manifest_are_opened(tmp_path: Path) -> None:
    checkpoint(tmp_path, WHOLE, [0.2, 0.5], ONE)
    folder = tmp_path / "step-00000001"
    write_pieces(folder / "arrays-00009.safetensors", [Piece("weight/a", 0, torch.zeros(30))])
    assert same(arrays.open_checkpoint(folder).arrays.whole("weight/a"), WHOLE["weight/a"])


def test_a_missing_array_is_named_and_a_broken_file_refused(tmp_path: Path) -> None:
    write_pieces(tmp_path / "f", [Piece("weight/a", 0, torch.zeros(1))])
    with pytest.raises(ValueError) as caught:
        ArrayReader(tmp_path, ["f"]).read("weight/b")
    text = str(caught.value)
    assert "has no array 'weight/b'" in text and str(tmp_path) in text and "--fresh" in text
    (tmp_path / "f").write_bytes(b"not an array")
    for name in ("f", "absent"):
        with pytest.raises(ValueError, match="can't be read"):
            ArrayReader(tmp_path, [name])


def test_gaps_overlaps_and_wrong_lengths_are_refused(tmp_path: Path) -> None:
    def reader(*starts: tuple[int, int]) -> ArrayReader:
        pieces = [Piece("a", low, torch.ones(high - low)) for low, high in starts]
        write_pieces(tmp_path / "f", pieces)
        return ArrayReader(tmp_path, ["f"])

    (tmp_path / "arrays.json").write_text('{"a": {"shape": [2, 3], "dtype": "float32"}}')
    assert reader((0, 2), (2, 6)).whole("a").shape == (2, 3)
    for starts in [((0, 2), (3, 6)), ((1, 6),), ((0, 5),)]:
        with pytest.raises(ValueError, match=r"array 'a'.*(in no file|has 5 elements)"):
            reader(*starts).whole("a")
    with pytest.raises(ValueError, match="has 7 elements, expected 6"):
        reader((0, 7)).whole("a")
    with pytest.raises(ValueError, match="'a' is there twice from element 1 on"):
        reader((0, 2), (1, 6))
    save_file({"odd": torch.ones(1)}, tmp_path / "f")
    with pytest.raises(ValueError, match="'odd', which is no piece"):
        ArrayReader(tmp_path, ["f"])


def test_a_checkpoint_that_is_not_whole_or_not_here_is_not_opened(tmp_path: Path) -> None:
    checkpoint(tmp_path / "two", WHOLE, [0.2, 0.5], TWO)
    with pytest.raises(ValueError, match=r"rest is on other nodes: .*arrays-00001.* on worker-1"):
        arrays.open_checkpoint(tmp_path / "two" / "disk-0" / "step-00000001")
    checkpoint(tmp_path / "one", WHOLE, [0.2, 0.5], ONE)
    folder = tmp_path / "one" / "step-00000001"
    (folder / "arrays-00001.safetensors").unlink()
    with pytest.raises(ValueError, match="is not whole: arrays-00001.safetensors is missing"):
        arrays.open_checkpoint(folder)


def test_a_run_folder_its_checkpoints_and_a_step_are_all_good_names(tmp_path: Path) -> None:
    root = tmp_path / "run" / "checkpoints"
    checkpoint(root, WHOLE, [0.2, 0.5], ONE)
    step = root / "step-00000001"
    for path in (tmp_path / "run", root, step):
        assert arrays.find_checkpoint(path) == step
    (step / "state.json").unlink()
    with pytest.raises(ValueError, match=r"step-00000001: state\.json is missing"):
        arrays.find_checkpoint(tmp_path / "run")
    with pytest.raises(ValueError, match="holds no checkpoint; name a run folder"):
        arrays.find_checkpoint(tmp_path)


def test_tools_pass_over_a_newer_one_that_is_cut_short_and_say_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint(tmp_path, WHOLE, [0.2, 0.5], ONE)
    newer = tmp_path / "step-00000002"
    newer.mkdir()
    assert arrays.find_checkpoint(tmp_path) == tmp_path / "step-00000001"
    assert "going back:" in caplog.text and "step-00000002: manifest.json" in caplog.text


def test_random_states_are_per_rank(tmp_path: Path) -> None:
    checkpoint(tmp_path, WHOLE, [0.2, 0.5], ONE)
    folder = tmp_path / "step-00000001"
    state = read_rng(folder, 1)
    assert state is not None and state["cpu"].tolist() == [1, 9]
    assert state["cpu"].dtype == torch.uint8
    assert read_rng(folder, 3) is None  # the run has grown since


# ---- reading by all ranks


def disks_of(*of_rank: int) -> Disks:
    return Disks(of_rank=of_rank, hosts=tuple(f"worker-{disk}" for disk in of_rank))


@pytest.mark.parametrize("reading", [(0, 1, 1), (0, 0, 1), (0, 1), (1, 0, 1, 0), (0, 1, 2)])
@pytest.mark.parametrize("chunk", [8, 1 << 20])
def test_ranks_read_for_each_other_what_their_disks_lack(
    reading: tuple[int, ...], chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two disks wrote; other ranks, more or fewer, and even a new disk, read any ranges."""
    monkeypatch.setattr(arrays, "SENT_AT_ONCE", chunk)
    checkpoint(tmp_path, WHOLE, [0.2, 0.5], TWO)
    order = list(dict.fromkeys(reading))
    disks = disks_of(*(order.index(disk) for disk in reading))
    world = len(reading)

    def act(group: Threads) -> None:
        root = tmp_path / f"disk-{reading[group.rank]}"
        found = verify.newest_whole(root, group, disks)
        assert found is not None
        reader = TogetherReader(found, group)
        assert not reader.local
        chance = random.Random(group.rank)
        for name, values in sorted(WHOLE.items()):
            flat = values.reshape(-1)
            assert same(reader.read(name), flat)
            for _ in range(5):
                low, high = sorted(chance.choices(range(flat.numel() + 1), k=2))
                assert same(reader.read(name, low, high), flat[low:high]), (name, low, high)

    all_well(act, world)


def test_nothing_is_sent_where_every_disk_has_everything(tmp_path: Path) -> None:
    checkpoint(tmp_path, WHOLE, [0.2, 0.5], ONE)

    def act(group: Threads) -> int:
        found = verify.newest_whole(tmp_path, group, ONE)
        assert found is not None
        reader = TogetherReader(found, group)
        assert reader.local
        if group.rank == 1:  # alone, so that a collective would wait for ever
            assert same(reader.read("weight/a", 3, 5), torch.tensor([3.0, 4.0]))
        return group.sent_bytes

    assert all_well(act, 3) == [0, 0, 0]


def test_only_what_is_lacking_is_sent(tmp_path: Path) -> None:
    checkpoint(tmp_path, {"w": torch.arange(100.0)}, [0.2, 0.5], TWO)

    def act(group: Threads) -> int:
        root = place(tmp_path, TWO, group.rank)
        found = verify.newest_whole(root, group, TWO)
        assert found is not None
        reader = TogetherReader(found, group)
        low, high = [(0, 20), (10, 50), (50, 100)][group.rank]
        assert reader.read("w", low, high).tolist() == list(range(low, high))
        return group.sent_bytes

    assert all_well(act, 3) == [10 * 4, 0, 0], "elements 10 to 20, from rank 0 to the others"


def test_an_unreadable_file_is_told_on_every_rank(tmp_path: Path) -> None:
    checkpoint(tmp_path, WHOLE, [0.2, 0.5], TWO)

    def act(group: Threads) -> None:
        root = place(tmp_path, TWO, group.rank)
        found = verify.newest_whole(root, group, TWO)
        assert found is not None
        group.gather(None)
        if group.rank == 1:
            (found.folder / "arrays-00001.safetensors").write_bytes(b"gone since")
        group.gather(None)
        TogetherReader(found, group)

    for error in on_all_ranks(act, 3):
        assert isinstance(error, ValueError)
        assert "rank 1: " in str(error) and "arrays-00001" in str(error)
