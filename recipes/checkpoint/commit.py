"""Commit a checkpoint: written beside, flushed, listed in a manifest, renamed, pointed at.

    checkpoints/
      LATEST                      the newest committed folder's name
      step-00000100/
        manifest.json             every file's size and SHA-256
        ...
      .step-00000200.partial/     being written; prepared as soon as a valid manifest is in it
      .step-00000100.replaced/    the same step of an earlier save, until the new one is in
      .step-00000050.stale/       being deleted
      step-00000150.broken/       set aside at a resume because it was not whole

A crash at any instant leaves the old checkpoint or the new one whole. On several disks no disk
renames before all are prepared, so that `verify.newest_whole` can finish what a crash between two
renames left.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.checkpoint import files, manifest
from recipes.checkpoint.disks import Disks
from recipes.checkpoint.files import FileRecord
from recipes.checkpoint.group import Alone as Alone
from recipes.checkpoint.group import Group as Group
from recipes.checkpoint.group import StageError, stage, told
from recipes.checkpoint.manifest import MANIFEST, PlacedRecord

logger = logging.getLogger(__name__)

POINTER = "LATEST"
COMMITTED = re.compile(r"^step-(\d{8,})$")


def folder_name(step: int) -> str:
    """The committed folder of a step."""
    return f"step-{step:08d}"


@dataclass(frozen=True, kw_only=True)
class Places:
    """The names that a step's checkpoint has in its life."""

    root: Path
    step: int

    def _beside(self, suffix: str) -> Path:
        return self.root / f".{folder_name(self.step)}.{suffix}"

    @property
    def target(self) -> Path:
        """Committed."""
        return self.root / folder_name(self.step)

    @property
    def partial(self) -> Path:
        """Being written, or prepared."""
        return self._beside("partial")

    @property
    def replaced(self) -> Path:
        """An earlier save of the same step, until the new one is in."""
        return self._beside("replaced")

    @property
    def pointer(self) -> Path:
        """The pointer before it takes the place of the old one."""
        return self.root / f".{POINTER}"


def commit(
    root: Path,
    step: int,
    write: Callable[[Path], Mapping[str, FileRecord]],
    group: Group,
    disks: Disks,
    facts: Mapping[str, Any],
    common: Mapping[str, bytes] | None = None,
) -> Path:
    """Write and commit one checkpoint; every rank must call it.

    Args:
        root: the `checkpoints` folder.
        write: writes and flushes this rank's files into the folder it is given (`files.write_file`)
            and returns their records by name; no two ranks write the same name.
        facts: JSON values for the manifest (world, strategy, milestone, reason, time); rank 0's
            count.
        common: files that every disk gets, by name; rank 0's count.

    Raises:
        OSError: some rank could not write; the older checkpoints are untouched and what was
            written of this one is deleted again.
    """
    return _Commit(root, step, group, disks).run(write, dict(facts), dict(common or {}))


class _Commit:
    """One commit; each stage ends with every rank knowing whether all of them passed it."""

    def __init__(self, root: Path, step: int, group: Group, disks: Disks) -> None:
        self._at = Places(root=root, step=step)
        self._group, self._disks = group, disks
        self._lead = disks.lead(group.rank)
        self._where = f" on {disks.hosts[group.rank]}" if disks.hosts[group.rank] else ""
        self._moved = False

    def run(
        self,
        write: Callable[[Path], Mapping[str, FileRecord]],
        facts: dict[str, Any],
        common: dict[str, bytes],
    ) -> Path:
        """All stages in order."""
        facts.setdefault("time", time.time())
        # Several disks need rank 0's values; on one, rank 0 is the only lead.
        values = (facts, common) if self._group.rank == 0 and not self._disks.shared else None
        facts, common = self._stage(lambda: self._prepare(values))[0] or (facts, common)
        records = self._stage(lambda: self._write(write, common))
        listed, doubled = self._listed(records, common)
        text = manifest.compose(self._at.step, facts, self._disks, listed)
        self._stage(lambda: self._seal(listed, doubled, text))
        self._stage(self._publish)
        self._point()
        return self._at.target

    def _stage(self, act: Callable[[], Any]) -> list[Any]:
        """Run a stage on every rank; a fault of one is told on all and ends the commit."""
        what = f"checkpoint {self._at.target.name} was not written"
        try:
            return stage(self._group, self._disks.hosts, what, act, self._at.partial)
        except StageError:
            with suppress(OSError):  # what is left is cleaned at the next save or start
                self._retract()
            raise

    def _prepare(self, values: Any) -> Any:
        """Make the partial folder anew; hand on what the other ranks are to know."""
        if self._lead:
            files.make_folder(self._at.root)
            for left in (self._at.partial, *self._replaced_before()):
                if left.exists() and not files.remove(left):
                    raise OSError(f"{left} is in the way and can't be deleted")
            self._at.partial.mkdir()
        return values

    def _replaced_before(self) -> list[Path]:
        """A leftover of an earlier replacement, where its successor is in place."""
        return [self._at.replaced] if self._at.target.exists() else []

    def _write(
        self, write: Callable[[Path], Mapping[str, FileRecord]], common: dict[str, bytes]
    ) -> dict[str, FileRecord]:
        if not self._lead:  # asks the server, whose answer a network file system would else cache
            self._at.partial.mkdir(exist_ok=True)
        mine = dict(write(self._at.partial))
        if self._lead:
            for name, content in common.items():
                files.write_file(self._at.partial / name, [content])
        return mine

    def _listed(
        self, records: list[dict[str, FileRecord]], common: dict[str, bytes]
    ) -> tuple[dict[str, PlacedRecord], list[str]]:
        """The files of all ranks with where each lies, and names that were used twice."""
        listed: dict[str, PlacedRecord] = {}
        doubled: list[str] = []
        for name, content in common.items():
            listed[name] = {
                **files.describe_bytes(content),
                "rank": None,
                "host": None,
                "disk": None,
            }
        for rank, mine in enumerate(records):
            host, disk = self._disks.hosts[rank], self._disks.of_rank[rank]
            for name, record in mine.items():
                if name in listed or name == MANIFEST or not manifest.is_plain(name):
                    doubled.append(f"rank {rank} wrote {name!r}, a name that is taken or not plain")
                listed[name] = {
                    "bytes": record["bytes"],
                    "sha256": record["sha256"],
                    "rank": rank,
                    "host": host,
                    "disk": disk,
                }
        return listed, doubled

    def _seal(self, listed: Mapping[str, PlacedRecord], doubled: list[str], text: bytes) -> None:
        """See that this disk holds what it should, and put the manifest beside it: prepared."""
        if doubled:
            raise ValueError("; ".join(doubled))
        if not self._lead:
            return
        partial, disk = self._at.partial, self._disks.of_rank[self._group.rank]
        here = {name: r for name, r in listed.items() if r["disk"] in (None, disk)}
        absent = []
        for name, record in here.items():
            path = partial / name
            if not path.is_file():
                absent.append(f"{name} was written but is not in {partial}{self._where}")
            elif (size := path.stat().st_size) != record["bytes"]:
                absent.append(
                    f"{name} has {size} bytes in {partial}{self._where}, {record['bytes']} were "
                    "written"
                )
        if absent:
            raise ValueError(f"{'; '.join(absent)}: is the folder shared?")
        files.write_file(partial / MANIFEST, [text])
        files.flush_folder(partial)
        # The pointer's bytes too, before anything is renamed: a full disk shows here.
        pointer = json.dumps(self._at.target.name) + "\n"
        files.write_file(self._at.pointer, [pointer.encode()])
        files.flush_folder(self._at.root)

    def _publish(self) -> None:
        """Rename; an earlier save of the same step stays until the new one is in."""
        if not self._lead:
            return
        if self._at.target.exists():
            files.rename(self._at.target, self._at.replaced)
        self._moved = True
        files.rename(self._at.partial, self._at.target)

    def _point(self) -> None:
        """Let the pointer follow; the checkpoint counts already, so a failure is only told."""
        if not self._lead:
            return
        try:
            files.rename(self._at.pointer, self._at.root / POINTER)
            if self._at.replaced.exists():
                files.remove(self._at.replaced)
        except OSError as error:
            logger.warning("%s does not name %s: %s", POINTER, self._at.target.name, told(error))

    def _retract(self) -> None:
        """Take back what this disk has of a commit that failed, and free the space."""
        if not self._lead:
            return
        at = self._at
        if self._moved and at.target.exists() and not at.partial.exists():
            files.remove(at.target)
        if at.replaced.exists() and not at.target.exists():
            with suppress(OSError):  # `newest_whole` does it at the next start
                files.rename(at.replaced, at.target)
        if at.partial.exists():
            files.remove(at.partial)
        with suppress(OSError):
            at.pointer.unlink()


def committed(root: Path) -> list[Path]:
    """Committed folders, newest first, by number and not by name or time."""
    if not root.is_dir():
        return []
    matches = [(COMMITTED.match(path.name), path) for path in root.iterdir() if path.is_dir()]
    found = [(int(match[1]), path) for match, path in matches if match]
    return [path for _, path in sorted(found, reverse=True)]


def step_of(folder: Path) -> int:
    """The step of a committed folder, by its name."""
    return int(folder.name.removeprefix("step-"))


def read_pointer(root: Path) -> str | None:
    """The name that the pointer holds; None if there is none to be read."""
    try:
        value = json.loads((root / POINTER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, str) else None
