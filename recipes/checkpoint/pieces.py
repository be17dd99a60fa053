"""Named arrays in safetensors files: each rank writes the pieces that it owns, any rank reads.

A piece is a run of consecutive elements of one flattened array, under the key `NAME@START`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from recipes.checkpoint.files import FileRecord, write_file
from recipes.checkpoint.manifest import LAYOUT

TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
KINDS = {name: kind for kind, name in TYPES.items()}


class Piece(NamedTuple):
    """Consecutive elements of a flattened array."""

    name: str
    start: int
    values: torch.Tensor  # 1-D, on any device


def arrays_name(rank: int) -> str:
    """The file of one rank's pieces."""
    return f"arrays-{rank:05d}.safetensors"


def rng_name(rank: int) -> str:
    """The file of one rank's random state."""
    return f"rng-{rank:05d}.safetensors"


def is_arrays(name: str) -> bool:
    """Whether a file of a checkpoint holds pieces."""
    return name.startswith("arrays-") and name.endswith(".safetensors")


def write_pieces(path: Path, pieces: Iterable[Piece]) -> FileRecord:
    """Write pieces as a safetensors file, flushed and hashed; at most one is copied to the host.

    Raises:
        OSError: with the path as its `filename`.
    """
    # The largest elements first, so that each piece lies at a multiple of its element's size.
    ordered = sorted(pieces, key=lambda piece: -piece.values.element_size())
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, start, values in ordered:
        assert values.ndim == 1, f"{name} is not flat"
        key, begin = f"{name}@{start}", end
        end += values.numel() * values.element_size()
        assert key not in header, f"{key} twice"
        header[key] = {"dtype": TYPES[values.dtype], "shape": [values.numel()]}
        header[key]["data_offsets"] = [begin, end]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return write_file(path, _content(text, ordered))


def _content(header: bytes, pieces: list[Piece]) -> Iterator[bytes | memoryview]:
    yield len(header).to_bytes(8, "little") + header
    for piece in pieces:
        if piece.values.numel():
            flat = piece.values.detach().to("cpu").contiguous()
            yield flat.view(torch.uint8).numpy().data


def write_share(
    folder: Path, rank: int, pieces: Iterable[Piece], random: Mapping[str, torch.Tensor]
) -> dict[str, FileRecord]:
    """Write one rank's pieces and its random state; the records by file name."""
    records = {arrays_name(rank): write_pieces(folder / arrays_name(rank), pieces)}
    return records | write_rng(folder, rank, random)


def write_rng(folder: Path, rank: int, states: Mapping[str, torch.Tensor]) -> dict[str, FileRecord]:
    """Write one rank's random state; the record by file name."""
    name = rng_name(rank)
    flat = [Piece(key, 0, state.reshape(-1)) for key, state in states.items()]
    return {name: write_pieces(folder / name, flat)}


def read_rng(folder: Path, rank: int) -> dict[str, torch.Tensor] | None:
    """One rank's random state; None if it is not here.

    Raises:
        ValueError: the file is broken.
    """
    name = rng_name(rank)
    if not (folder / name).is_file():
        return None
    reader = ArrayReader(folder, [name])
    return {key: reader.read(key) for key in reader.names()}


class Part(NamedTuple):
    """Where a piece lies."""

    start: int
    stop: int
    file: str
    kind: str  # as safetensors calls the element type


Index = dict[str, list[Part]]  # by array name, in order


def merged(parts: Iterable[tuple[str, Part]]) -> Index:
    """An index of pieces.

    Raises:
        ValueError: two pieces of an array overlap.
    """
    index: Index = {}
    for name, part in parts:
        index.setdefault(name, []).append(part)
    for name, found in index.items():
        found.sort()
        for before, after in zip(found, found[1:], strict=False):
            if after.start < before.stop:
                raise ValueError(
                    f"array {name!r} is there twice from element {after.start} on: in "
                    f"{before.file} and {after.file}"
                )
    return index


class ArrayReader:
    """Reads parts of arrays by name, whichever of the given files hold them."""

    def __init__(self, folder: Path, files: Iterable[str]) -> None:
        """Open the files (ValueError if one is broken)."""
        self._folder = folder
        self._files = {name: self._open(name) for name in sorted(files)}
        self._index = merged(self.parts())
        self.layout: dict[str, Any] = {}
        if (folder / LAYOUT).is_file():
            self.layout = json.loads((folder / LAYOUT).read_text(encoding="utf-8"))

    def _open(self, name: str) -> Any:
        try:
            return safe_open(str(self._folder / name), framework="pt")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"arrays in {self._folder / name} can't be read: {error}") from error

    def parts(self) -> Iterator[tuple[str, Part]]:
        """Every piece of these files with its array's name."""
        for file, opened in self._files.items():
            for key in opened.keys():  # noqa: SIM118 (not a dict)
                name, at, start = key.rpartition("@")
                if not at or not start.isdigit():
                    raise ValueError(f"{file} holds {key!r}, which is no piece of an array")
                view = opened.get_slice(key)
                stop = int(start) + math.prod(view.get_shape())
                yield name, Part(int(start), stop, file, view.get_dtype())

    def names(self) -> set[str]:
        """Every array's name."""
        return set(self._index)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Elements `start` to `stop` (the end) of an array, flat, on the host.

        Raises:
            ValueError: the checkpoint does not hold them: another model was trained there.
        """
        parts = found_parts(self._index, name, self._folder)
        stop = parts[-1].stop if stop is None else stop
        pieces = []
        for part in parts:
            low, high = max(start, part.start), min(stop, part.stop)
            if low < high:
                pieces.append(Piece(name, low, self.part(name, part, low, high)))
        return joined(pieces, name, start, stop, parts[0].kind)

    def part(self, name: str, part: Part, start: int, stop: int) -> torch.Tensor:
        """Elements `start` to `stop` of the array, which lie in this piece."""
        try:
            view = self._files[part.file].get_slice(f"{name}@{part.start}")
            # A copy: the library gives views of the mapped file, which alias each other.
            return view[start - part.start : stop - part.start].clone()
        except (SafetensorError, OSError) as error:
            raise ValueError(f"array {name!r} in {self._folder} can't be read: {error}") from error

    def whole(self, name: str) -> torch.Tensor:
        """A whole array in its shape.

        Raises:
            ValueError: it is not there, or its pieces are not all of it.
        """
        if name not in self.layout:
            raise ValueError(f"{self._folder / LAYOUT} does not name array {name!r}")
        shape = self.layout[name]["shape"]
        last = found_parts(self._index, name, self._folder)[-1]
        if last.stop != math.prod(shape):
            raise ValueError(
                f"array {name!r} in {self._folder} has {last.stop} elements, expected "
                f"{math.prod(shape)} for its shape {shape}"
            )
        return self.read(name).reshape(shape)


def found_parts(index: Index, name: str, folder: Path) -> list[Part]:
    """The pieces of an array (ValueError if there is none)."""
    if name not in index:
        raise ValueError(
            f"checkpoint {folder} has no array {name!r}: it holds another model; restore the run "
            "file's model section or start with --fresh"
        )
    return index[name]


def joined(pieces: Sequence[Piece], name: str, start: int, stop: int, kind: str) -> torch.Tensor:
    """Pieces in order as one run of elements (ValueError if some are missing)."""
    at = start
    for piece in pieces:
        if piece.start != at:
            break
        at += piece.values.numel()
    if at < stop:
        raise ValueError(f"array {name!r}: elements {at} to {stop} are in no file that is listed")
    if not pieces:
        return torch.empty(0, dtype=KINDS[kind])
    return pieces[0].values if len(pieces) == 1 else torch.cat([piece.values for piece in pieces])
