"""Whether a checkpoint is whole, and which is the newest that is, on however many disks."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from recipes.checkpoint import files
from recipes.checkpoint.commit import folder_name
from recipes.checkpoint.disks import Disks
from recipes.checkpoint.group import Group, stage, told
from recipes.checkpoint.manifest import MANIFEST, FileRecord, Manifest, parse, read_manifest
from recipes.checkpoint.recovery import Copy, settle, survey, tidy

logger = logging.getLogger(__name__)


def file_fault(
    path: Path,
    record: FileRecord,
    hashes: bool = True,
    progress: Callable[[int], None] | None = None,
) -> str | None:
    """What is wrong with a checkpoint's file; None if nothing is.

    Args:
        hashes: read every byte; else only its presence and size count.
        progress: is told of every further bytes that were read.
    """
    try:
        if not path.is_file():
            return f"{path.name} is missing"
        if (size := path.stat().st_size) != record["bytes"]:
            return f"{path.name} has {size} bytes, expected {record['bytes']}"
        if hashes and files.describe(path, progress)["sha256"] != record["sha256"]:
            return f"{path.name} is not what was written (SHA-256 differs)"
    except OSError as error:
        return f"{path.name} can't be read: {told(error)}"
    return None


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What one machine finds of a checkpoint."""

    faults: list[str]
    elsewhere: dict[str, list[str]]  # files by the host that keeps them on its own disk

    @property
    def whole(self) -> bool:
        """Everything is here and nothing is wrong."""
        return not self.faults and not self.elsewhere


def check_folder(
    folder: Path, hashes: bool = True, progress: Callable[[int], None] | None = None
) -> Checked:
    """Check a checkpoint's folder on this machine.

    Where it was written to several disks, the part of a disk that left no file here is elsewhere,
    which is no fault.
    """
    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        return Checked(faults=[str(error)], elsewhere={})
    absent = {
        disk
        for disk in range(len(manifest.disks))
        if not any((folder / name).exists() for name in manifest.disk_files(disk))
    }
    if len(absent) == len(manifest.disks):
        absent = set()
    faults: list[str] = []
    elsewhere: dict[str, list[str]] = {}
    for name, record in manifest.files.items():
        if record["disk"] in absent:
            elsewhere.setdefault(record["host"] or "another node", []).append(name)
        elif fault := file_fault(folder / name, record, hashes, progress):
            faults.append(fault)
    return Checked(faults=faults, elsewhere=elsewhere)


@dataclass(frozen=True, kw_only=True)
class Found:
    """A whole checkpoint, and which of its files each rank can read."""

    step: int
    folder: Path  # need not exist on a disk that has no part of it
    manifest: Manifest
    good: tuple[frozenset[str], ...]  # by rank: whole files on this rank's disk

    def read_common(self, name: str, group: Group) -> bytes:
        """A file's bytes on every rank; sent by the lowest rank that has it where one lacks it.

        Raises:
            OSError, ValueError: it can't be read any more; on every rank.
        """
        having = [rank for rank, names in enumerate(self.good) if name in names]
        if not having:
            raise ValueError(f"{self.folder.name} has no file {name}")
        content, fault = b"", None
        everywhere = len(having) == group.world
        if everywhere or group.rank == having[0]:
            try:
                content = (self.folder / name).read_bytes()
                if hashlib.sha256(content).hexdigest() != self.manifest.files[name]["sha256"]:
                    fault = f"{name} is not what was written (SHA-256 differs)"
            except OSError as error:
                fault = told(error)
        outcomes = group.gather((b"" if everywhere else content, fault))
        faults = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(outcomes) if text]
        if faults:
            raise ValueError(f"{self.folder}: {'; '.join(faults)}")
        return content if everywhere else bytes(outcomes[having[0]][0])


def newest_whole(root: Path, group: Group, disks: Disks) -> Found | None:
    """The newest whole checkpoint, going back over broken ones; every rank must call it.

    What a crash left is put in order: a prepared checkpoint is committed, newer ones that are not
    whole are set aside, leftovers are deleted and the pointer is written again.

    Returns:
        None if nothing was ever committed.

    Raises:
        ValueError: there are checkpoints, but none of them is whole.
        OSError: some disk can't be looked over or put in order.
    """
    lead = disks.lead(group.rank)
    what = f"the checkpoints in {root} can't be looked over"
    surveys = stage(group, disks.hosts, what, lambda: survey(root) if lead else [], root)
    by_disk: list[list[Copy]] = [surveys[rank] for rank in disks.leads()]
    broken: list[str] = []
    for step, sha256 in _candidates(by_disk):
        copies = [_copy(there, step, sha256) for there in by_disk]
        where, name = copies[disks.of_rank[group.rank]], f"step-{step:08d}"
        faults, found = _unreadable(copies, disks), None
        if sha256 is not None:
            faults, found = _examine(root, step, where, group, disks)
        if found is not None and not faults:
            settle(root, found.manifest, where, group, disks)
            return _mended(found, copies, group, disks)
        counted = any(copy is not None and copy.counts for copy in copies)
        if counted:
            broken.append(f"{name}: {'; '.join(faults)}")
        if group.rank == 0:
            what = "is broken" if counted else "was not written to its end"
            logger.warning("checkpoint %s %s, going back: %s", name, what, "; ".join(faults))
    if broken:
        listed = "\n  ".join(broken)
        raise ValueError(
            f"no checkpoint in {root} is whole:\n  {listed}\nrestore the files that are named, or "
            "start anew with --fresh"
        )
    if lead:
        tidy(root, None)
    return None


def _mended(found: Found, copies: list[Copy | None], group: Group, disks: Disks) -> Found:
    """Give a disk the common files that it lost and another one has."""
    good = [set(names) for names in found.good]
    for name in sorted(found.manifest.commons()):
        lacking = [
            rank
            for rank, disk in enumerate(disks.of_rank)
            if copies[disk] is not None and name not in good[rank]
        ]
        if not lacking:
            continue
        content, fault = found.read_common(name, group), ""
        if group.rank in lacking and disks.lead(group.rank):
            try:
                files.write_file(found.folder / name, [content])
                files.flush_folder(found.folder)
            except OSError as error:
                fault = told(error)
        faults = group.gather(fault)
        for rank in lacking:
            lead = disks.ranks(disks.of_rank[rank])[0]
            if not faults[lead]:
                good[rank].add(name)
            elif rank == lead and group.rank == 0:
                host = disks.hosts[rank]
                logger.warning("%s on %s can't be mended: %s", name, host, faults[rank])
    return replace(found, good=tuple(map(frozenset, good)))


def _candidates(by_disk: list[list[Copy]]) -> list[tuple[int, str | None]]:
    """Every save that some disk has a part of, the newest first."""
    times: dict[tuple[int, str | None], float] = {}
    for copies in by_disk:
        for copy in copies:
            if copy.sha256 is not None or copy.counts:
                times[copy.step, copy.sha256] = copy.time
    return sorted(times, key=lambda key: (key[0], times[key]), reverse=True)


def _copy(copies: list[Copy], step: int, sha256: str | None) -> Copy | None:
    """A disk's copy of one save."""
    for copy in copies:
        if (copy.step, copy.sha256) == (step, sha256) and (sha256 is not None or copy.counts):
            return copy
    return None


def _unreadable(copies: list[Copy | None], disks: Disks) -> list[str]:
    return [copy.fault + _on(disk, disks) for disk, copy in enumerate(copies) if copy is not None]


def _on(disk: int, disks: Disks) -> str:
    return "" if disks.shared else f" on {disks.host(disk)}"


def _examine(
    root: Path, step: int, where: Copy | None, group: Group, disks: Disks
) -> tuple[list[str], Found | None]:
    """Hash every file that is there, each disk's shared out over its ranks.

    Returns:
        What makes the save less than whole, and the save.
    """
    disk, content, names = disks.of_rank[group.rank], b"", []
    folder = root / (where.folder if where is not None else "absent")
    if where is not None and disks.lead(group.rank):
        with suppress(OSError):
            content, names = (folder / MANIFEST).read_bytes(), [p.name for p in folder.iterdir()]
    told_all = group.gather((content, names))
    try:
        manifest = parse(next((text for text, _ in told_all if text), b""))
    except ValueError as error:  # it could be read a moment ago
        return [str(error)], None
    ranks = disks.ranks(disk)
    there = set(told_all[ranks[0]][1])  # as the lead sees it, so that the shares fit together
    sizes = {name: r["bytes"] for name, r in manifest.files.items() if name in there}
    mine = _share(sizes, ranks.index(group.rank), len(ranks))
    checked = {name: file_fault(folder / name, manifest.files[name]) for name in mine}
    answers: list[dict[str, str | None]] = group.gather(checked)
    by_disk: list[dict[str, str | None]] = [{} for _ in range(disks.count)]
    for rank, answer in enumerate(answers):
        by_disk[disks.of_rank[rank]] |= answer
    whole = [frozenset(n for n, fault in seen.items() if fault is None) for seen in by_disk]
    good = tuple(whole[number] for number in disks.of_rank)
    found = Found(step=step, folder=root / folder_name(step), manifest=manifest, good=good)
    return _faults(manifest, by_disk, disks), found


def _faults(manifest: Manifest, by_disk: list[dict[str, str | None]], disks: Disks) -> list[str]:
    """Files that are whole on no disk, with what is wrong on each that has them."""
    faults: list[str] = []
    for name, record in manifest.files.items():
        seen = {disk: answer[name] for disk, answer in enumerate(by_disk) if name in answer}
        if None in seen.values():
            continue
        faults += [f"{fault}{_on(disk, disks)}" for disk, fault in seen.items()]
        if not seen and record["host"] and len(manifest.disks) > 1:
            faults.append(f"{name} (written on {record['host']}) is on no node of this start")
        elif not seen:
            faults.append(f"{name} is missing")
    return faults


def _share(sizes: Mapping[str, int], index: int, parts: int) -> list[str]:
    """One of several parts that take about as long to read: the largest to the emptiest."""
    load, mine = [0] * parts, []
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
        part = load.index(min(load))
        load[part] += sizes[name]
        if part == index:
            mine.append(name)
    return mine
