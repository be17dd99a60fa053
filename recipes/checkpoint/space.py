"""Room for checkpoints: what a run needs, and whether a disk has it."""

from __future__ import annotations

import os
from pathlib import Path

from recipes.checkpoint.disks import Disks
from recipes.checkpoint.group import Group, told
from recipes.metrics import human_bytes

# Weights and Adam's two moments, each in fp32: what a checkpoint holds of every parameter.
CHECKPOINT_BYTES = 12


def checkpoint_need(parameters: int, keep: int, present: int, milestones: int = 0) -> int:
    """Bytes that a run still needs: one checkpoint more than it keeps, less those that exist.

    Args:
        present: checkpoints that exist and that rotation will delete in time.
        milestones: checkpoints still to come that are kept for ever.
    """
    return CHECKPOINT_BYTES * parameters * (keep + 1 - min(present, keep) + milestones)


def free_bytes(folder: Path) -> int:
    """Bytes that a user may still write where a folder is or will be."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def check_space(
    root: Path, need_here: int, group: Group, disks: Disks, what: str = "the checkpoint"
) -> list[str]:
    """Disks that have no room for the next checkpoint; every rank must call it.

    Args:
        need_here: bytes that this rank will write.
        what: that needs the room, for the text.

    Returns:
        A line for each, alike on every rank; empty if there is room.
    """
    needs: list[int] = group.gather(need_here)
    need = sum(needs[rank] for rank in disks.ranks(disks.of_rank[group.rank]))
    fault = None
    if disks.lead(group.rank):
        place = f"{disks.hosts[group.rank]}: " if disks.hosts[group.rank] else ""
        try:
            free = free_bytes(root)
        except OSError as error:
            fault = f"{place}{told(error, root)}"
        else:
            if free < need:
                fault = (
                    f"{place}{root} has {human_bytes(free)} free, {what} needs {human_bytes(need)}"
                )
    return [text for text in group.gather(fault) if text]
