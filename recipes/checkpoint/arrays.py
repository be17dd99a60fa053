"""The arrays of a checkpoint: by all ranks of a start together, or by one process's tools.

reader = TogetherReader(found, group)               # every rank
values = reader.read("weight/lm_head.weight", start, stop)

opened = open_checkpoint(find_checkpoint(path))     # one process
weights = opened.arrays.whole("weight/lm_head.weight")
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from recipes.checkpoint.commit import COMMITTED, committed
from recipes.checkpoint.group import Group
from recipes.checkpoint.manifest import MANIFEST, STATE, Manifest, read_manifest
from recipes.checkpoint.pieces import (
    KINDS,
    ArrayReader,
    Part,
    Piece,
    found_parts,
    is_arrays,
    joined,
    merged,
)
from recipes.checkpoint.verify import Found, check_folder

logger = logging.getLogger(__name__)

SENT_AT_ONCE = 1 << 26  # bytes: what a broadcast holds besides the array


class TogetherReader:
    """Reads by name on every rank; what a rank's disk lacks is sent by one that has it.

    All ranks must read the same names in the same order, each its own part. Where every disk has
    every file there is no communication. A rank holds no more than the part that it asks for, and
    the part of a piece that is being sent.
    """

    def __init__(self, found: Found, group: Group) -> None:
        """Open what is here.

        Raises:
            ValueError: a file can't be read; on every rank.
        """
        self._group, self._found = group, found
        files = [name for name in found.manifest.files if is_arrays(name)]
        self._holders = {
            name: [rank for rank in range(group.world) if name in found.good[rank]]
            for name in files
        }
        # Whether every rank has every file, so that nothing is exchanged.
        self.local = all(len(ranks) == group.world for ranks in self._holders.values())
        mine = [name for name in files if name in found.good[group.rank]]
        parts: list[tuple[str, Part]] = []
        fault = None
        try:
            self._files = ArrayReader(found.folder, mine)
            parts = list(self._files.parts())
        except (ValueError, OSError) as error:
            fault = str(error)
        first = [(n, p) for n, p in parts if self._holders[p.file][0] == group.rank]
        outcomes = group.gather(([] if self.local else first, fault))
        self._raise([text for _, text in outcomes])
        if not self.local:
            parts = [part for told, _ in outcomes for part in told]
        self._index = merged((name, Part(*part)) for name, part in parts)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Elements `start` to `stop` (the end) of an array, flat, on the host.

        Raises:
            ValueError: the checkpoint does not hold them; where ranks read for each other it is
                raised on every rank.
        """
        parts = found_parts(self._index, name, self._found.folder)
        stop = parts[-1].stop if stop is None else stop
        if self.local:
            return self._files.read(name, start, stop)
        ranges: list[tuple[int, int]] = self._group.gather((start, stop))
        pieces: list[Piece] = []
        fault = None
        for part in parts:
            low, high = max(start, part.start), min(stop, part.stop)
            here = self._group.rank in self._holders[part.file]
            sent, told = self._exchange(name, part, ranges)
            fault = fault or told
            if low < high:
                try:
                    values = (
                        self._files.part(name, part, low, high)
                        if here
                        else sent.values[low - sent.start : high - sent.start].clone()
                    )
                    pieces.append(Piece(name, low, values))
                except ValueError as error:
                    fault = fault or str(error)
        self._raise(self._group.gather(fault))
        return joined(pieces, name, start, stop, parts[0].kind)

    def _exchange(
        self, name: str, part: Part, ranges: list[tuple[int, int]]
    ) -> tuple[Piece, str | None]:
        """Send what some rank needs of a piece and has not, from the lowest rank that has it."""
        holders = self._holders[part.file]
        wanted = [
            (max(start, part.start), min(stop, part.stop))
            for rank, (start, stop) in enumerate(ranges)
            if rank not in holders
        ]
        wanted = [(low, high) for low, high in wanted if low < high]
        kind, fault = KINDS[part.kind], None
        if not wanted:
            return Piece(name, part.start, torch.empty(0, dtype=kind)), None
        low, high = min(low for low, _ in wanted), max(high for _, high in wanted)
        if self._group.rank == holders[0]:
            try:
                values = self._files.part(name, part, low, high).contiguous()
            except ValueError as error:
                fault, values = str(error), torch.zeros(high - low, dtype=kind)
        else:
            values = torch.empty(high - low, dtype=kind)
        for chunk in values.view(torch.uint8).split(SENT_AT_ONCE):
            self._group.broadcast(chunk, holders[0])
        return Piece(name, low, values), fault

    def _raise(self, faults: list[str | None]) -> None:
        texts = [f"rank {rank}: {text}" for rank, text in enumerate(faults) if text]
        if texts:
            raise ValueError("; ".join(texts))


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A whole checkpoint in one process."""

    folder: Path
    manifest: Manifest
    state: dict[str, Any]
    arrays: ArrayReader

    def common(self, name: str) -> Path:
        """The path of a file that is the same on every disk (ValueError if there is none)."""
        if name not in self.manifest.files:
            raise ValueError(f"{self.folder} has no {name}")
        return self.folder / name


def open_checkpoint(
    folder: Path, hashes: bool = True, progress: Callable[[int], None] | None = None
) -> Opened:
    """Open one checkpoint's folder.

    Args:
        hashes: check every byte first; else only sizes.
        progress: is told of every further bytes that were checked.

    Raises:
        ValueError: it is not whole, or parts of it are on other nodes.
    """
    checked = check_folder(folder, hashes, progress)
    if checked.faults:
        raise ValueError(
            f"{folder} is not whole: {'; '.join(checked.faults)}; choose another checkpoint "
            f"(octet checkpoint list {folder.absolute().parent.parent})"
        )
    if checked.elsewhere:
        parts = "; ".join(f"{', '.join(n)} on {host}" for host, n in checked.elsewhere.items())
        raise ValueError(
            f"{folder} is only a part of the checkpoint, the rest is on other nodes: {parts}; copy "
            "those files into it"
        )
    manifest = read_manifest(folder)
    state: dict[str, Any] = {}
    if STATE in manifest.files:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    files = [name for name in manifest.files if is_arrays(name)]
    arrays = ArrayReader(folder, files)
    return Opened(folder=folder, manifest=manifest, state=state, arrays=arrays)


def find_checkpoint(path: Path) -> Path:
    """A checkpoint's folder from a run folder (the newest that is whole by sizes) or itself.

    Raises:
        ValueError: there is none.
    """
    if COMMITTED.match(path.name) or (path / MANIFEST).is_file():
        return path
    root = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    faults: list[str] = []
    for folder in committed(root):
        found = check_folder(folder, hashes=False).faults
        if not found:
            for fault in faults:
                logger.warning("going back:%s", fault)
            return folder
        faults.append(f"\n  {folder.name}: {'; '.join(found)}")
    if faults:
        raise ValueError(f"no checkpoint in {root} is whole:{''.join(faults)}")
    raise ValueError(
        f"{path} holds no checkpoint; name a run folder, or a step-… folder in its checkpoints"
    )
