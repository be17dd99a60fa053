"""Which checkpoints are deleted, and when: after a commit only, and never the last whole ones."""

from __future__ import annotations

import logging
from pathlib import Path

from recipes.checkpoint import files
from recipes.checkpoint.commit import committed, step_of
from recipes.checkpoint.group import told
from recipes.checkpoint.manifest import read_manifest
from recipes.checkpoint.recovery import ASIDE, survey
from recipes.checkpoint.verify import check_folder

logger = logging.getLogger(__name__)


def rotate(root: Path, keep: int, step: int) -> list[Path]:
    """Delete old checkpoints after the commit of `step`; on each disk, by its lead.

    The newest `keep` that are whole by their sizes and not newer than `step` stay, so that broken
    ones never push out good ones, and so do milestones. A folder whose manifest can't be read may
    be a milestone: it is left to `octet checkpoint prune`. Nothing that this room did not name
    itself is touched.

    Returns:
        What was deleted.
    """
    assert keep >= 2, "the one checkpoint left may be the broken one"
    kept, gone = 0, []
    try:
        for folder in committed(root):
            if step_of(folder) > step:
                continue
            if kept < keep:
                kept += not check_folder(folder, hashes=False).faults
            elif not _milestone(folder, unreadable=True) and files.remove(folder):
                gone.append(folder)
    except OSError as error:  # on one disk only, where all ranks have to go on alike
        logger.warning("old checkpoints could not be deleted: %s", told(error, root))
    return gone


def prune(
    root: Path, keep: int | None = None, dry_run: bool = False
) -> list[tuple[Path, int, str]]:
    """Delete leftovers and, with `keep`, old checkpoints at a user's wish; no run may be writing.

    The newest checkpoint that is whole to the last byte stays whatever `keep` says, milestones
    stay, and so does what a start would still need to finish an interrupted save.

    Args:
        keep: how many of the newest whole checkpoints stay besides milestones; None: all.
        dry_run: delete nothing.

    Returns:
        What was (or would be) deleted: path, bytes, why.
    """
    chosen = _leftovers(root) + ([] if keep is None else _old(root, keep))
    found = [(path, _size(path), why) for path, why in chosen]
    return [one for one in found if dry_run or files.remove(one[0])]


def _leftovers(root: Path) -> list[tuple[Path, str]]:
    copies = survey(root)
    whole = {c.step for c in copies if c.kind == "committed" and c.sha256 is not None}
    found = []
    for copy in copies:
        path = root / copy.folder
        if copy.kind == "stale":
            found.append((path, "its deletion was interrupted"))
        elif copy.kind == "partial" and copy.sha256 is None:
            found.append((path, "its save was interrupted"))
        elif copy.kind == "replaced" and copy.step in whole:
            found.append((path, "the same step was saved again"))
    aside = sorted(p for p in root.iterdir() if ASIDE.match(p.name)) if root.is_dir() else []
    return found + [(path, "set aside because it was not whole") for path in aside]


def _old(root: Path, keep: int) -> list[tuple[Path, str]]:
    kept, proven, found = 0, False, []
    for folder in committed(root):
        sound = not check_folder(folder, hashes=False).faults
        if kept < keep or not proven:
            # Every byte is read until one is proven: the newest may be rotten inside.
            proven = proven or (sound and not check_folder(folder).faults)
            kept += sound
        elif not _milestone(folder, unreadable=False):
            found.append((folder, f"older than the newest {keep}"))
    return found if proven else []


def _milestone(folder: Path, *, unreadable: bool) -> bool:
    """What the manifest says; `unreadable` if it can't be read."""
    try:
        return read_manifest(folder).milestone
    except ValueError:
        return unreadable


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
