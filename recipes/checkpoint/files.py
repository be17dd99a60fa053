"""Files that are flushed to the disk and hashed on the way, and folders that are."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypedDict

logger = logging.getLogger(__name__)

CHUNK = 1 << 23  # bytes: large enough for the disk, small enough for a progress bar
OURS = re.compile(r"^\.?step-\d{8,}(\.\w+)*$")


class FileRecord(TypedDict):
    """What a manifest says of a file that this rank wrote."""

    bytes: int
    sha256: str


def write_file(path: Path, buffers: Iterable[bytes | memoryview]) -> FileRecord:
    """Write a file and flush it to the disk.

    The digest is that of the bytes in memory, so that a disk that loses some is found out.

    Raises:
        OSError: with the path as its `filename`.
    """
    digest, size = hashlib.sha256(), 0
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            for buffer in buffers:
                whole = memoryview(buffer).cast("B")
                size += len(whole)
                for start in range(0, len(whole), CHUNK):
                    part = whole[start : start + CHUNK]
                    digest.update(part)
                    while part:
                        part = part[os.write(handle, part) :]
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(path)) from error
    return {"bytes": size, "sha256": digest.hexdigest()}


def describe(path: Path, progress: Callable[[int], None] | None = None) -> FileRecord:
    """A file's size in bytes and SHA-256.

    Args:
        progress: is told of every further bytes that were read.
    """
    digest, size = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file:
        buffer = memoryview(bytearray(CHUNK))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
            if progress is not None:
                progress(count)
    return {"bytes": size, "sha256": digest.hexdigest()}


def describe_bytes(content: bytes) -> FileRecord:
    """Size and SHA-256 of what is in memory."""
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def flush_folder(folder: Path) -> None:
    """Make what was created, renamed or deleted in a folder last."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, so that none of them is lost with the power."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    flush_folder(folder.parent)


def rename(path: Path, target: Path) -> None:
    """Rename within one folder, and make it last."""
    path.rename(target)
    flush_folder(target.parent)


def remove(folder: Path) -> bool:
    """Delete a checkpoint's folder, whole or partial; a failure is told and ends nothing.

    It is renamed to `.step-N.stale` first, so that a crash never leaves half of it under a name
    that counts.

    Returns:
        Whether it is gone.
    """
    assert OURS.match(folder.name), f"{folder} is none of ours"
    step = folder.name.removeprefix(".").split(".")[0]
    stale = folder.with_name(f".{step}.stale")
    try:
        if folder != stale:
            if stale.exists():
                shutil.rmtree(stale)
            rename(folder, stale)
        shutil.rmtree(stale)
    except OSError as error:
        logger.warning("%s could not be deleted: %s", folder, error)
        return False
    return True
