"""The manifest of a checkpoint: every file of every rank on every disk, and what it holds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipes.checkpoint.disks import Disks
from recipes.checkpoint.files import FileRecord as FileRecord

MANIFEST, VERSION = "manifest.json", 2
STATE, STATE_VERSION = "state.json", 2  # what the recipe keeps besides arrays
LAYOUT = "arrays.json"  # {name: {"shape", "dtype"}} of every array
KNOWN = ("version", "step", "time", "world", "strategy", "milestone", "reason", "disks", "files")


class PlacedRecord(FileRecord):
    """A file of the manifest; all None for a common file, which is on every disk."""

    rank: int | None
    host: str | None
    disk: int | None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint consists of."""

    step: int
    time: float  # seconds since 1970
    world: int
    strategy: str
    milestone: bool  # kept for ever
    reason: str
    disks: tuple[Mapping[str, Any], ...]  # {"host": str, "ranks": [int]} each
    files: Mapping[str, PlacedRecord]
    sha256: str  # of everything else
    version: int = VERSION
    facts: Mapping[str, Any] = field(default_factory=dict)  # what else the writer recorded

    @property
    def bytes(self) -> int:
        """Of all files, each counted once."""
        return sum(record["bytes"] for record in self.files.values())

    def commons(self) -> set[str]:
        """Files that are on every disk."""
        return {name for name, record in self.files.items() if record["disk"] is None}

    def disk_files(self, disk: int) -> set[str]:
        """The ranks' files on one disk, without the common ones."""
        return {name for name, record in self.files.items() if record["disk"] == disk}


def digest(value: Mapping[str, Any]) -> str:
    """SHA-256 of the canonical JSON of everything but `sha256` itself."""
    rest = {key: item for key, item in value.items() if key != "sha256"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def compose(
    step: int, facts: Mapping[str, Any], disks: Disks, files: Mapping[str, PlacedRecord]
) -> bytes:
    """The manifest as it lies on every disk.

    Args:
        facts: JSON values; `time`, `world`, `strategy`, `milestone` and `reason` have their place.
    """
    value: dict[str, Any] = {"version": VERSION, "milestone": False, "reason": "", "strategy": ""}
    value |= {"world": len(disks.of_rank), **facts, "version": VERSION, "step": step}
    value["disks"] = [
        {"host": disks.hosts[ranks[0]], "ranks": list(ranks)}
        for ranks in map(disks.ranks, range(disks.count))
    ]
    value["files"] = {name: dict(files[name]) for name in sorted(files)}
    value["sha256"] = digest(value)
    return (json.dumps(value, indent=1) + "\n").encode()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint's folder.

    Raises:
        ValueError: there is none, or it is not what was written.
    """
    try:
        text = (folder / MANIFEST).read_bytes()
    except OSError as error:
        raise ValueError(f"{MANIFEST}: {error.strerror or error}") from error
    return parse(text)


def parse(text: bytes) -> Manifest:
    """A manifest from its bytes.

    Raises:
        ValueError: it is not what was written.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{MANIFEST} is damaged: {error}") from error
    if not isinstance(value, dict) or "version" not in value:
        raise ValueError(f"{MANIFEST} is damaged: it is no manifest")
    if value["version"] != VERSION:
        raise ValueError(
            f"{MANIFEST} has version {value['version']}, expected {VERSION}: another version of "
            "this package wrote it, and only that one can read it"
        )
    if value.get("sha256") != digest(value):
        raise ValueError(f"{MANIFEST} is not what was written (SHA-256 differs)")
    try:
        return _built(value)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{MANIFEST} lacks something: {error!r}") from error


def _built(value: dict[str, Any]) -> Manifest:
    files = {str(name): _record(str(name), record) for name, record in value["files"].items()}
    if not files:
        raise ValueError(f"{MANIFEST} lists no files")
    disks = tuple({"host": d["host"], "ranks": list(d["ranks"])} for d in value["disks"])
    numbers = {record["disk"] for record in files.values()} - {None}
    if not numbers <= set(range(len(disks))):
        raise ValueError(f"{MANIFEST} names a disk that it does not list")
    return Manifest(
        step=int(value["step"]),
        time=float(value["time"]),
        world=int(value["world"]),
        strategy=str(value["strategy"]),
        milestone=bool(value["milestone"]),
        reason=str(value["reason"]),
        disks=disks,
        files=files,
        sha256=value["sha256"],
        facts={key: item for key, item in value.items() if key not in (*KNOWN, "sha256")},
    )


def _record(name: str, record: Any) -> PlacedRecord:
    if not is_plain(name):
        raise ValueError(f"{MANIFEST} lists {name!r}, which is no plain file name")
    if not isinstance(record["bytes"], int) or not isinstance(record["sha256"], str):
        raise ValueError(f"{MANIFEST}: its record of {name} is damaged")
    return {
        "bytes": record["bytes"],
        "sha256": record["sha256"],
        "rank": record["rank"],
        "host": record["host"],
        "disk": record["disk"],
    }


def is_plain(name: str) -> bool:
    """Whether a name stays inside its folder and can be a checkpoint's file."""
    return bool(name) and "/" not in name and "\0" not in name and not name.startswith(".")
