"""Commit a checkpoint: written beside, flushed, listed in a manifest, renamed, pointed at.

    checkpoints/
      LATEST                      the newest committed folder's name
      step-00000100/
        manifest.json             every file's size and SHA-256
        ...

A crash at any instant leaves the old checkpoint or the new one whole.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

logger = logging.getLogger(__name__)

MANIFEST, POINTER, VERSION = "manifest.json", "LATEST", 1
COMMITTED = re.compile(r"^step-(\d{8,})$")


class Group(Protocol):
    """The ranks that write together."""

    rank: int
    world: int

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        ...


class Alone:
    """A group of one, for tools and tests."""

    rank, world = 0, 1

    def gather(self, value: Any) -> list[Any]:
        """The one value."""
        return [value]


def folder_name(step: int) -> str:
    """The committed folder of a step."""
    return f"step-{step:08d}"


def commit(
    root: Path, step: int, write: Callable[[Path], list[Path]], group: Group, facts: dict[str, Any]
) -> Path:
    """Write and commit one checkpoint; every rank must call it.

    Args:
        root: the `checkpoints` folder.
        write: writes this rank's files into the folder it is given and lists them; no two ranks
            write the same name.
        facts: JSON values for the manifest (world, strategy).

    Raises:
        OSError: some rank could not write, or its files do not reach rank 0's folder; the older
            checkpoints are untouched.
    """
    target, beside = root / folder_name(step), root / f".{folder_name(step)}.partial"
    if group.rank == 0:
        shutil.rmtree(beside, ignore_errors=True)
    group.gather(None)
    files, fault = _written(write, beside)
    records = group.gather((files, fault))
    faults = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(records) if text]
    if not faults:  # the same on every rank, so that all of them take part in this gather or none
        first = group.rank == 0
        told = _publish(root, target, beside, [r for r, _ in records], facts) if first else []
        faults = group.gather(told)[0]
    if faults:
        raise OSError(f"checkpoint {target.name} was not written: {'; '.join(faults)}")
    return target


def _written(
    write: Callable[[Path], list[Path]], folder: Path
) -> tuple[dict[str, dict[str, Any]], str | None]:
    """Write, flush and describe this rank's files; a fault is told, so that no peer waits."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        mine = write(folder)
        for path in mine:
            _flush(path)
        return {path.name: describe(path) for path in mine}, None
    except OSError as error:
        return {}, f"{error.strerror or error} ({error.filename or folder})"


def _publish(
    root: Path, target: Path, beside: Path, files: list[dict[str, Any]], facts: dict[str, Any]
) -> list[str]:
    listed = {name: record for part in files for name, record in part.items()}
    absent = [name for name in listed if not (beside / name).is_file()]
    if absent:
        return [
            f"{name} was written but is not in {beside}: is the folder shared?" for name in absent
        ]
    try:
        manifest = {"version": VERSION, **facts, "files": dict(sorted(listed.items()))}
        write_json(beside / MANIFEST, manifest)
        _flush(beside)
        replaced = root / f".{target.name}.replaced"
        if target.exists():  # the same step, saved again: the old one stays until the new one is in
            target.rename(replaced)
        beside.rename(target)
        _flush(root)
        shutil.rmtree(replaced, ignore_errors=True)
        write_json(root / f".{POINTER}", target.name)
        (root / f".{POINTER}").rename(root / POINTER)
        _flush(root)
    except OSError as error:
        return [f"rank 0: {error.strerror or error} ({error.filename})"]
    return []


def describe(path: Path) -> dict[str, Any]:
    """A file's size in bytes and SHA-256."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": _digest(file)}


def _digest(file: Any) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(1 << 22):
        digest.update(chunk)
    return digest.hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Write JSON and flush it to the disk."""
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    _flush(path)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def committed(root: Path) -> list[Path]:
    """Committed folders, newest first, by number and not by name or time."""
    if not root.is_dir():
        return []
    found = [(int(m[1]), p) for p in root.iterdir() if (m := COMMITTED.match(p.name))]
    return [path for _, path in sorted(found, reverse=True)]


def faults_of(folder: Path) -> list[str]:
    """What a committed folder lacks or holds otherwise than its manifest; empty if whole."""
    try:
        files = _listed(json.loads((folder / MANIFEST).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        return [f"{MANIFEST}: {error}"]
    faults = []
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            faults.append(f"{name} is missing")
        elif path.stat().st_size != expected["bytes"]:
            faults.append(f"{name} has {path.stat().st_size} bytes, expected {expected['bytes']}")
        elif describe(path)["sha256"] != expected["sha256"]:
            faults.append(f"{name} is not what was written (SHA-256 differs)")
    return faults


def _listed(manifest: Any) -> dict[str, dict[str, Any]]:
    """The files of a manifest (ValueError if it is none)."""
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict) or not files:
        raise ValueError("it lists no files")
    for name, record in files.items():
        if not isinstance(record, dict) or not {"bytes", "sha256"} <= record.keys():
            raise ValueError(f"its record of {name} is damaged")
    return files


def _recover(root: Path) -> None:
    """Clean up after a crash: half-written folders, and a replacement between its two renames."""
    for partial in root.glob(".step-*.partial"):
        _remove(partial)
    for old in root.glob(".step-*.replaced"):
        target = root / old.name.removeprefix(".").removesuffix(".replaced")
        if target.exists():
            _remove(old)
        else:
            old.rename(target)


def newest_whole(root: Path) -> Path | None:
    """The newest whole checkpoint, going back over broken ones; None if there is none. One rank."""
    _recover(root)
    for folder in committed(root):
        faults = faults_of(folder)
        if not faults:
            return folder
        logger.warning("checkpoint %s is broken, going back: %s", folder.name, "; ".join(faults))
    return None


def rotate(root: Path, keep: int) -> list[Path]:
    """Delete all but the newest `keep` committed checkpoints; call it after a commit, on one rank.

    Nothing that this module did not name itself is touched.
    """
    assert keep >= 2, "the one checkpoint left may be the broken one"
    stale = committed(root)[keep:]
    for folder in stale:
        _remove(folder)
    return stale


def _remove(folder: Path) -> None:
    """Delete a folder that is no longer needed; a failure is told and ends nothing."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        logger.warning("%s could not be deleted: %s", folder, error)
