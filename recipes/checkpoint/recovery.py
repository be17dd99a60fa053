"""What crashes leave in a checkpoints folder: looked over, and put in order at the next start."""

from __future__ import annotations

import json
import logging
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from recipes.checkpoint import files
from recipes.checkpoint.commit import POINTER, Places, read_pointer
from recipes.checkpoint.disks import Disks
from recipes.checkpoint.group import Group, stage, told
from recipes.checkpoint.manifest import Manifest, read_manifest

logger = logging.getLogger(__name__)

LEFT = re.compile(r"^(\.?)step-(\d{8,})(?:\.(partial|replaced|stale))?$")
ASIDE = re.compile(r"^step-\d{8,}\.broken\d*$")
KINDS = {("", None): "committed", (".", "partial"): "partial", (".", "replaced"): "replaced"}
KINDS |= {(".", "stale"): "stale"}


@dataclass(frozen=True, kw_only=True)
class Copy:
    """One folder of a checkpoint on one disk."""

    step: int
    kind: str  # committed | partial | replaced | stale
    folder: str  # its name
    sha256: str | None = None  # its manifest's; None if that can't be read
    time: float = 0.0  # of the save, seconds since 1970
    fault: str = ""  # why the manifest can't be read

    @property
    def counts(self) -> bool:
        """Whether it was committed once."""
        return self.kind in ("committed", "replaced")


def survey(root: Path) -> list[Copy]:
    """Every folder of a checkpoint here, leftovers too."""
    copies = []
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        match = LEFT.match(path.name)
        kind = KINDS.get((match[1], match[3])) if match else None
        if match is None or kind is None or not path.is_dir():
            continue
        copy = Copy(step=int(match[2]), kind=kind, folder=path.name)
        if kind != "stale":
            copy = _read(path, copy)
        copies.append(copy)
    return copies


def _read(path: Path, copy: Copy) -> Copy:
    about = {"step": copy.step, "kind": copy.kind, "folder": copy.folder}
    try:
        manifest = read_manifest(path)
        if manifest.step != copy.step:
            raise ValueError(f"it is the checkpoint of step {manifest.step} under another name")
    except ValueError as error:
        return Copy(**about, fault=str(error))  # type: ignore[arg-type]
    return Copy(**about, sha256=manifest.sha256, time=manifest.time)  # type: ignore[arg-type]


def settle(root: Path, chosen: Manifest, where: Copy | None, group: Group, disks: Disks) -> None:
    """Make the chosen save the committed one on every disk; every rank must call it.

    Args:
        where: its copy on this rank's disk, if there is one.

    Raises:
        OSError: a disk could not be put in order; on every rank.
    """

    def put() -> None:
        if disks.lead(group.rank) and root.is_dir():
            _settle(Places(root=root, step=chosen.step), chosen, where)

    stage(group, disks.hosts, "the checkpoints can't be put in order", put, root)


def _settle(at: Places, chosen: Manifest, where: Copy | None) -> None:
    for copy in survey(at.root):
        if copy.kind != "committed" or copy.step < at.step:
            continue
        if where is not None and copy.folder == where.folder:
            continue  # whole, whether or not its manifest can be read once more
        if copy.step == at.step and copy.sha256 is not None and copy.time <= chosen.time:
            if at.replaced.exists():
                files.remove(at.replaced)
            files.rename(at.target, at.replaced)  # its successor is whole
        else:
            _set_aside(at.root / copy.folder)
    if where is not None and where.kind != "committed":
        files.rename(at.root / where.folder, at.target)
        logger.info("%s was written whole before the crash and is committed now", at.target.name)
    tidy(at.root, at.target.name if where is not None else None)


def _set_aside(folder: Path) -> None:
    aside, number = folder.with_name(f"{folder.name}.broken"), 1
    while aside.exists():
        number += 1
        aside = folder.with_name(f"{folder.name}.broken{number}")
    files.rename(folder, aside)
    logger.warning("%s is not whole and is kept aside as %s", folder, aside.name)


def tidy(root: Path, chosen: str | None) -> None:
    """Delete leftovers that no checkpoint needs, and let the pointer name the chosen one."""
    for copy in survey(root):
        if copy.kind != "committed":
            files.remove(root / copy.folder)
    with suppress(OSError):
        (root / f".{POINTER}").unlink()
    if not root.is_dir() or read_pointer(root) == chosen:
        return
    try:
        if chosen is None:
            (root / POINTER).unlink(missing_ok=True)
            files.flush_folder(root)
            return
        files.write_file(root / f".{POINTER}", [(json.dumps(chosen) + "\n").encode()])
        files.rename(root / f".{POINTER}", root / POINTER)
    except OSError as error:  # nothing is chosen by the pointer
        logger.warning("%s does not name %s: %s", POINTER, chosen, told(error))
