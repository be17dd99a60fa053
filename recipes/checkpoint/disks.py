"""Which ranks share a disk: found out by tokens that ranks leave for each other, not believed."""

from __future__ import annotations

import os
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from recipes.checkpoint.group import Group, told

PATIENCE_S = 2.0  # what a network file system may take to show a new file to another host


@dataclass(frozen=True, kw_only=True)
class Disks:
    """The disk of every rank's run folder; disks are numbered by their lowest rank."""

    of_rank: tuple[int, ...]
    hosts: tuple[str, ...]  # by rank

    @staticmethod
    def one(world: int = 1, host: str = "") -> Disks:
        """One disk for all."""
        return Disks(of_rank=(0,) * world, hosts=(host,) * world)

    @property
    def shared(self) -> bool:
        """Whether all ranks write to one disk."""
        return self.count == 1

    @property
    def count(self) -> int:
        """Number of disks."""
        return max(self.of_rank) + 1

    def ranks(self, disk: int) -> tuple[int, ...]:
        """The ranks of a disk, lowest first."""
        return tuple(rank for rank, number in enumerate(self.of_rank) if number == disk)

    def lead(self, rank: int) -> bool:
        """Whether a rank is the lowest of its disk."""
        return self.ranks(self.of_rank[rank])[0] == rank

    def leads(self) -> tuple[int, ...]:
        """The lowest rank of each disk."""
        return tuple(self.ranks(disk)[0] for disk in range(self.count))

    def host(self, disk: int) -> str:
        """A host that a disk belongs to, for people."""
        return self.hosts[self.ranks(disk)[0]]

    def describe(self) -> str:
        """One line for people."""
        if self.shared:
            return "the run folder is one for all ranks"
        parts = []
        for disk in range(self.count):
            names = dict.fromkeys(self.hosts[rank] for rank in self.ranks(disk))
            ranks = self.ranks(disk)
            word = "rank" if len(ranks) == 1 else "ranks"
            parts.append(f"{' and '.join(names)} ({word} {', '.join(map(str, ranks))})")
        return f"the run folder is on {self.count} disks, each keeps its part: {'; '.join(parts)}"


def probe(folder: Path, group: Group, host: str) -> Disks:
    """Find out which ranks share the run folder; every rank must call it.

    Raises:
        ValueError: a rank can't write there, or the ranks see each other one way only.
    """
    status, key = folder / "status", uuid.uuid4().hex
    # A name never used before: an old name's absence may be cached by a network file system.
    mine = status / f"disk-{group.rank}-{key[:8]}.token"
    fault = None
    try:
        status.mkdir(parents=True, exist_ok=True)
        for old in status.glob(f"disk-{group.rank}-*.token"):
            old.unlink(missing_ok=True)
        mine.write_text(key, encoding="utf-8")
    except OSError as error:
        fault = told(error, status)
    everyone = group.gather((host, mine.name, key, fault))
    hosts = tuple(name for name, *_ in everyone)
    faults = [f"rank {r} ({hosts[r]}): {text}" for r, (*_, text) in enumerate(everyone) if text]
    seen: set[int] = set()
    if not faults:
        seen = _visible(status, [(name, content) for _, name, content, _ in everyone])
    views = group.gather(sorted(seen))
    with suppress(OSError):
        mine.unlink()
    if faults:
        raise ValueError(
            f"the run folder {folder} can't be written: {'; '.join(faults)}; make it writable "
            "there or name another output_dir"
        )
    return Disks(of_rank=_numbered(folder, views, hosts), hosts=hosts)


def _visible(status: Path, tokens: list[tuple[str, str]]) -> set[int]:
    """The ranks whose tokens are to be read here, asked for by name until they come or time is."""
    seen: set[int] = set()
    end = time.monotonic() + PATIENCE_S
    while True:
        for rank, (name, content) in enumerate(tokens):
            if rank not in seen and _read(status / name) == content:
                seen.add(rank)
        if len(seen) == len(tokens) or time.monotonic() > end:
            return seen
        time.sleep(0.05)


def _read(path: Path) -> str:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(handle, 64).decode("utf-8", errors="replace")
    except OSError:
        return ""
    finally:
        os.close(handle)


def _numbered(folder: Path, views: list[list[int]], hosts: tuple[str, ...]) -> tuple[int, ...]:
    """Disks as groups of ranks that all see each other."""
    faults = {
        f"{hosts[rank]} sees the files of {hosts[other]}, {hosts[other]} "
        f"{'not those of ' + hosts[rank] if rank not in views[other] else 'sees others too'}"
        for rank, view in enumerate(views)
        for other in view
        if views[other] != view
    }
    faults |= {
        f"{hosts[rank]} does not see its own files"
        for rank, view in enumerate(views)
        if rank not in view
    }
    if faults:
        raise ValueError(
            f"the run folder {folder} is neither one folder for all nodes nor one for each: "
            f"{'; '.join(sorted(faults))}; mount it alike on all nodes or name another output_dir"
        )
    order = list(dict.fromkeys(view[0] for view in views))
    return tuple(order.index(view[0]) for view in views)
