"""Named arrays in safetensors files, shared out over the ranks and found again by name."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

PATTERN = "arrays-*.safetensors"


def shares(sizes: list[int], world: int) -> list[set[int]]:
    """Which arrays each rank writes, as even as the sizes allow: the largest first to the emptiest.

    Args:
        sizes: elements of each array.

    Returns:
        A set of indices for each rank.
    """
    owned: list[set[int]] = [set() for _ in range(world)]
    load = [0] * world
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        rank = load.index(min(load))
        owned[rank].add(index)
        load[rank] += sizes[index]
    return owned


def write_arrays(folder: Path, rank: int, arrays: dict[str, torch.Tensor]) -> Path:
    """Write this rank's share of the model's state as one file."""
    path = folder / f"arrays-{rank:05d}.safetensors"
    return _saved(arrays, path)


def write_rng(folder: Path, rank: int, states: dict[str, torch.Tensor]) -> Path:
    """Write one rank's random state."""
    path = _rng_path(folder, rank)
    return _saved(states, path)


def _saved(arrays: dict[str, torch.Tensor], path: Path) -> Path:
    try:
        save_file(arrays, str(path))
    except SafetensorError as error:
        raise OSError(f"{path.name} can't be written: {error}") from error
    path.chmod(
        0o644
    )  # safetensors leaves its temporary file's 0600, unreadable for one's colleagues
    return path


def read_rng(folder: Path, rank: int) -> dict[str, torch.Tensor] | None:
    """One rank's random state; None if fewer ranks wrote the checkpoint."""
    path = _rng_path(folder, rank)
    if not path.is_file():
        return None
    with safe_open(str(path), framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)


def _rng_path(folder: Path, rank: int) -> Path:
    return folder / f"rng-{rank:05d}.safetensors"


class ArrayReader:
    """Reads arrays by name, one at a time, whichever rank's file holds them."""

    def __init__(self, folder: Path) -> None:
        try:
            self._files = [safe_open(str(p), framework="pt") for p in sorted(folder.glob(PATTERN))]
        except SafetensorError as error:
            raise ValueError(f"arrays in {folder} can't be read: {error}") from error
        self._home = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118
        self._folder = folder

    def names(self) -> set[str]:
        """Every array's name."""
        return set(self._home)

    def read(self, name: str) -> torch.Tensor:
        """One array on the host.

        Raises:
            ValueError: the checkpoint does not hold it: another model was trained there.
        """
        if name not in self._home:
            raise ValueError(
                f"checkpoint {self._folder} has no array {name!r}: it holds another model; "
                "restore the run file's model section or start with --fresh"
            )
        try:
            return self._home[name].get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"array {name!r} in {self._folder} can't be read: {error}") from error
