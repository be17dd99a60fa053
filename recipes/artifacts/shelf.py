"""The checkpoints of a run as a table, checked and pruned; needs no torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from recipes.checkpoint import recovery, verify
from recipes.checkpoint.commit import COMMITTED, committed, read_pointer
from recipes.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from recipes.runfile import load_run

SHOWN = 3  # files that are named in one cell


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One checkpoint of a run, or what a crash left of one."""

    name: str
    step: int
    kind: str  # committed | partial | replaced | stale | broken
    time: float | None  # of the save, seconds since 1970; None where the manifest can't be read
    bytes: int  # of all disks; without a manifest, of this one
    world: int | None
    strategy: str
    reason: str
    milestone: bool
    newest: bool  # the pointer names it
    whole: bool  # everything is here, by the sizes
    faults: tuple[str, ...]
    elsewhere: dict[str, list[str]]  # files that other nodes keep, by host

    @property
    def state(self) -> str:
        """In words."""
        if self.kind == "partial":
            return "a save is going on, or was interrupted"
        if self.kind == "replaced":
            return "being replaced by a newer save of this step"
        if self.kind == "stale":
            return "its deletion was interrupted"
        said = list(self.faults[:SHOWN])
        if len(self.faults) > SHOWN:
            said.append(f"and {len(self.faults) - SHOWN} more")
        said += [f"{len(names)} files elsewhere: {host}" for host, names in self.elsewhere.items()]
        if self.kind == "broken":
            return f"set aside at a resume: {'; '.join(said) or 'its bytes differ'}"
        return "; ".join(said) or "whole"


def checkpoints_of(path: Path) -> Path:
    """The checkpoints folder that a run folder, a run file or the folder itself stands for.

    Raises:
        ValueError: there is none.
    """
    if path.is_file() and path.suffix in (".yaml", ".yml"):
        path = load_run(path).folder
    for place in (path / "checkpoints", path):
        if place.is_dir() and (place.name == "checkpoints" or recovery.survey(place)):
            return place
    raise ValueError(
        f"{path} {'holds no checkpoints' if path.exists() else 'does not exist'}; name a run "
        "folder, for example outputs/gpt2_xl, or a run file"
    )


def entries(root: Path) -> list[Entry]:
    """Everything that is a checkpoint or was to be one, the newest first."""
    pointer = read_pointer(root)
    found = [
        _entry(root / copy.folder, copy.step, copy.kind, pointer) for copy in recovery.survey(root)
    ]
    for path in root.glob("step-*.broken*"):
        head = path.name.partition(".")[0]
        if COMMITTED.match(head) and path.is_dir():
            found.append(_entry(path, int(head.removeprefix("step-")), "broken", pointer))
    return sorted(found, key=lambda e: (e.step, e.kind == "committed"), reverse=True)


def _entry(folder: Path, step: int, kind: str, pointer: str | None) -> Entry:
    manifest: Manifest | None = None
    with suppress(ValueError):  # `check_folder` says why
        manifest = read_manifest(folder)
    checked = verify.check_folder(folder, hashes=False)
    here = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    return Entry(
        name=folder.name,
        step=step,
        kind=kind,
        time=manifest.time if manifest else None,
        bytes=manifest.bytes if manifest else here,
        world=manifest.world if manifest else None,
        strategy=manifest.strategy if manifest else "",
        reason=manifest.reason if manifest else "",
        milestone=manifest.milestone if manifest else False,
        newest=folder.name == pointer,
        whole=checked.whole,
        faults=tuple(checked.faults),
        elsewhere=checked.elsewhere,
    )


def to_verify(path: Path) -> list[Path]:
    """The checkpoints that a path stands for: itself, or all of a run, the newest first.

    Raises:
        ValueError: there is none.
    """
    if (path / MANIFEST).is_file() or (path.is_dir() and COMMITTED.match(path.name)):
        return [path]
    root = checkpoints_of(path)
    found = committed(root)
    if not found:
        raise ValueError(f"{root} holds no committed checkpoint")
    return found


def bytes_here(folders: list[Path]) -> int:
    """What verifying them will read on this machine."""
    return sum(
        (folder / name).stat().st_size
        for folder in folders
        for name in _listed(folder)
        if (folder / name).is_file()
    )


def _listed(folder: Path) -> Iterator[str]:
    try:
        yield from read_manifest(folder).files
    except ValueError:
        return


def verified(
    folders: list[Path], progress: Callable[[int], None]
) -> Iterator[tuple[Path, verify.Checked]]:
    """Check every byte that is on this machine."""
    for folder in folders:
        yield folder, verify.check_folder(folder, hashes=True, progress=progress)


def age(seconds: float) -> str:
    """`4 min`, `2.5 h`, `3 days`: how long ago."""
    for limit, unit, name in ((90.0, 1.0, "s"), (5400.0, 60.0, "min"), (172_800.0, 3600.0, "h")):
        if seconds < limit:
            count = seconds / unit
            return f"{count:.1f} {name}" if name == "h" and count < 10 else f"{count:.0f} {name}"
    return f"{seconds / 86_400.0:.0f} days"


def since(moment: float | None) -> str:
    """The age of what was written at a moment; `?` where it is not known."""
    return "?" if moment is None else age(max(0.0, time.time() - moment))
