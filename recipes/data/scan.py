"""What is known of a data set after one look at it, as plain values that travel to every rank as
JSON.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any

from recipes.data.files import local_path


@dataclass(frozen=True, kw_only=True)
class Split:
    """The files of one split and how they fall into units."""

    name: str
    files: tuple[str, ...]  # portable names
    groups: tuple[int, ...]  # Parquet: units of each file; else one number, the units of all files
    rows: tuple[int, ...] | None  # documents of each unit, where that is known without reading it
    sizes: tuple[int, ...]  # bytes of each local file

    @property
    def num_units(self) -> int:
        """How many units the split has."""
        return sum(self.groups)

    def unit_files(self, index: int) -> range:
        """Which of `files` make up unit `index`, if units are whole files; as `datasets` shards
        them.
        """
        base, extra = divmod(len(self.files), self.num_units)
        start = index * base + min(index, extra)
        return range(start, start + base + (index < extra))


@dataclass(frozen=True, kw_only=True)
class Scan:
    """What one rank found out about the data set, for all ranks and for later starts."""

    kind: str
    format: str  # parquet, json, text or saved
    splits: tuple[Split, ...]  # training, then held-out if it has a split of its own
    revision: str | None  # the hub commit
    left_out: int  # files that are not UTF-8
    held_out: tuple[int, ...]  # unit ids that training never reads

    @property
    def num_units(self) -> int:
        """Units of all splits."""
        return sum(split.num_units for split in self.splits)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; `from_json` is the inverse."""
        return asdict(self)

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> Scan:
        """The scan that `to_json` described, also after a trip through a JSON file."""
        splits = [
            Split(
                name=split["name"],
                files=tuple(split["files"]),
                groups=tuple(split["groups"]),
                rows=None if split["rows"] is None else tuple(split["rows"]),
                sizes=tuple(split["sizes"]),
            )
            for split in tree["splits"]
        ]
        return cls(**{**tree, "splits": tuple(splits), "held_out": tuple(tree["held_out"])})

    def fingerprints(self) -> dict[str, str]:
        """Short hashes of the files, of their division into units, and of what is held out.

        Local files count by base name and size, so that a data folder may move between starts.
        """

        def name(file: str) -> str:
            return PurePosixPath(file).name if local_path(self.kind, file) else file

        files = [[s.name, [name(file) for file in s.files], s.sizes] for s in self.splits]
        return {
            "source": _hash([self.kind, self.format, files]),
            "units": _hash([[s.groups, s.rows] for s in self.splits]),
            "held_out": f"{len(self.held_out)} units {_hash(self.held_out)}",
        }


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
