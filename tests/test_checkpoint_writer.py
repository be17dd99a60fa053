"""Snapshots, the thread that writes them, and the memory that they take."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from recipes.checkpoint import snapshot
from recipes.checkpoint.background import Writer
from recipes.checkpoint.commit import Alone
from recipes.checkpoint.pieces import Piece, write_pieces
from recipes.checkpoint.snapshot import HostCopy, memory_left


def pieces() -> list[Piece]:
    return [
        Piece("a", 0, torch.arange(5.0)),
        Piece("b", 3, torch.tensor([True, False, True])),
        Piece("c", 0, torch.empty(0)),
        Piece("d", 1, torch.arange(3, dtype=torch.bfloat16)),
        Piece("e", 0, torch.tensor([2**60])),
    ]


def test_a_snapshot_does_not_see_what_training_does_next() -> None:
    copy, live = HostCopy(), pieces()
    taken = copy.take(iter(live))
    assert [(p.name, p.start) for p in taken] == [(p.name, p.start) for p in live]
    for old, new in zip(live, taken, strict=True):
        assert torch.equal(old.values, new.values) and old.values.dtype == new.values.dtype
        old.values.zero_()
    assert taken[0].values.tolist() == [0, 1, 2, 3, 4] and taken[4].values.item() == 2**60


def test_the_memory_of_a_snapshot_is_used_again() -> None:
    copy = HostCopy()
    assert copy.bytes == 0
    first = copy.take(pieces())
    address, held = first[0].values.data_ptr(), copy.bytes
    assert sum(p.values.numel() * p.values.element_size() for p in pieces()) <= held <= 5 * 64
    assert copy.take(pieces())[0].values.data_ptr() == address and copy.bytes == held
    copy.take(pieces()[:1])
    assert copy.bytes == 64, "another layout takes the place of the old one"
    copy.release()
    assert copy.bytes == 0


def test_memory_left_is_what_the_host_or_the_smallest_cgroup_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 0 < memory_left() <= psutil.virtual_memory().total
    inner = tmp_path / "job" / "step"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (inner / "memory.current").write_text("500\n")
    (inner.parent / "memory.max").write_text("1000\n")
    (inner.parent / "memory.current").write_text("700\n")
    (inner.parent / "memory.stat").write_text("anon 1\ninactive_file 40\nactive_file 2\n")
    monkeypatch.setattr(snapshot, "_cgroups", lambda: [inner, inner.parent])
    assert memory_left() == 342


def test_a_process_knows_its_cgroups(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(path.is_relative_to(snapshot.CGROUPS) for path in snapshot._cgroups())


# ---- the thread


def test_in_the_background_the_caller_goes_on_and_collects_later() -> None:
    writer, go, threads = Writer(Alone(), background=True), threading.Event(), []

    def act(group: Any) -> str:
        threads.append(threading.current_thread())
        assert go.wait(5) and group.world == 1
        return "written"

    assert not writer.pending and not writer.ended
    writer.start(act)
    assert writer.pending and not writer.ended
    with pytest.raises(AssertionError, match="two would be in flight"):
        writer.start(act)
    go.set()
    assert writer.collect() == "written" and not writer.pending and not writer.ended
    assert threads[0] is not threading.main_thread() and threads[0].daemon


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("error", [OSError(28, "No space"), RuntimeError("peer"), KeyError("ours")])
def test_a_failure_is_raised_when_it_is_collected(
    error: Exception, background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # shows faults of our own
    writer = Writer(Alone(), background)

    def fail(_: Any) -> None:
        raise error

    if not background and isinstance(error, KeyError):
        with pytest.raises(KeyError):  # a fault of our own is not kept for later
            writer.start(fail)
        return
    writer.start(fail)
    with pytest.raises(type(error)):
        writer.collect()
    assert not writer.pending
    writer.start(lambda _: "next")
    assert writer.collect() == "next"


def test_without_a_background_it_is_done_at_once_in_the_callers_thread() -> None:
    writer, threads = Writer(Alone(), background=False), []
    writer.start(lambda _: threads.append(threading.current_thread()))
    assert threads == [threading.current_thread()] and writer.ended
    assert writer.collect() is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_snapshot_of_a_gpu_is_exact_and_page_locked(tmp_path: Path) -> None:
    copy = HostCopy()
    live = [Piece(p.name, p.start, p.values.cuda()) for p in pieces()]
    for _ in range(2):
        taken = copy.take(live)
        assert all(not p.values.is_cuda for p in taken) and taken[0].values.is_pinned()
        assert [p.values.tolist() for p in taken] == [p.values.tolist() for p in pieces()]
    write_pieces(tmp_path / "f", live)
    write_pieces(tmp_path / "g", taken)
    assert (tmp_path / "f").read_bytes() == (tmp_path / "g").read_bytes()
    copy.release()
