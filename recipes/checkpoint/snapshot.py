"""A copy of the state in host memory, so that it can be written while training goes on."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import psutil
import torch

from recipes.checkpoint.pieces import Piece

logger = logging.getLogger(__name__)

ALIGNMENT = 64  # bytes
CGROUPS = Path("/sys/fs/cgroup")


class HostCopy:
    """Copies pieces into memory that is kept and used again: a run holds one copy at most.

    For pieces on a GPU the memory is page-locked, so that the copy runs at the bus's rate.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._tried = self._pinned = False  # to page-lock it, and whether it is

    @property
    def bytes(self) -> int:
        """Host memory that is held."""
        return self._buffer.numel()

    def take(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Copy the pieces to the host; the copies are good until the next call."""
        given = list(pieces)
        offsets, end = [], 0
        for piece in given:
            offsets.append(end)
            size = piece.values.numel() * piece.values.element_size()
            end += -(-size // ALIGNMENT) * ALIGNMENT
        on_gpu = any(piece.values.is_cuda for piece in given)
        self._reserve(end, pin=on_gpu)
        copies = []
        for piece, offset in zip(given, offsets, strict=True):
            values = piece.values.detach()
            size = values.numel() * values.element_size()
            room = self._buffer[offset : offset + size].view(values.dtype)
            room.copy_(values, non_blocking=values.is_cuda)
            copies.append(Piece(piece.name, piece.start, room))
        if on_gpu:
            torch.cuda.synchronize()
        return copies

    def _reserve(self, size: int, pin: bool) -> None:
        if self._buffer.numel() == size and self._tried == pin:
            return
        self.release()
        self._tried = pin
        self._buffer = torch.empty(size, dtype=torch.uint8)
        if pin and size:
            # Not torch's pinned allocator, which rounds up to a power of two.
            code = int(torch.cuda.cudart().cudaHostRegister(self._buffer.data_ptr(), size, 0))
            if code:
                logger.info("no page-locked memory (CUDA error %d): snapshots are slower", code)
            self._pinned = code == 0

    def release(self) -> None:
        """Give the memory back."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._buffer.data_ptr())
        self._buffer, self._pinned = torch.empty(0, dtype=torch.uint8), False


def memory_left() -> int:
    """Bytes of memory that processes of this host may still take, cgroups' limits included."""
    left = int(psutil.virtual_memory().available)
    for group in _cgroups():
        limit, used = _number(group / "memory.max"), _number(group / "memory.current")
        if limit is not None and used is not None:
            left = min(left, limit - used + _reclaimable(group))
    return max(left, 0)


def _cgroups() -> list[Path]:
    """This process's cgroups of version 2, from the inmost to the outmost."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    for line in lines:
        if line.startswith("0::"):
            path = CGROUPS / line[3:].lstrip("/")
            return [path, *(p for p in path.parents if CGROUPS in (p, *p.parents))]
    return []


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # "max" is no limit
        return None


def _reclaimable(group: Path) -> int:
    """Page cache that the kernel gives back when memory is asked for."""
    try:
        lines = (group / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    stat = dict(line.split() for line in lines)
    return int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
