"""Rows about the run folder, the data and locks that an earlier build left behind."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from recipes.checkpoint.space import checkpoint_need
from recipes.outcome import USAGE
from recipes.preflight.rows import (
    Facts,
    Row,
    Wanted,
    fail,
    majority,
    many,
    ok,
    size,
    unchecked,
    warn,
)

LOCK_AGE_S = 120.0  # a build may run on a machine outside the hostfile: only old locks are told
ELSEWHERE = "or name another folder: output_dir=FOLDER"


def storage_rows(there: Facts, wanted: Wanted) -> list[Row]:
    """Run folder and data, where a run file was named, and locks."""
    named = next(iter(there.values()))
    rows = lock_rows(there)
    if "data" in named:
        rows = data_rows(there) + rows
    if "folder" in named:
        rows = folder_rows(there, wanted) + space_rows(there, wanted) + rows
    return rows


def folder_rows(there: Facts, wanted: Wanted) -> list[Row]:
    """Whether every node can write to the run folder, and whether it is one folder."""
    rows = []
    able = []
    for node, found in there.items():
        folder = found["folder"]
        if error := folder.get("error"):
            path = shlex.quote(folder["path"])
            remedy = f"ssh {node} 'ls -ld {path}; findmnt -T {path}'   # {ELSEWHERE}"
            text = f"{folder['path']}, writable"
            rows.append(fail("run folder", node, error, text, remedy, USAGE))
        else:
            able.append(node)
            rows.append(ok("run folder", node, f"written at {size(folder['bytes_per_s'])}/s"))
    base = wanted.first if wanted.first in able else next(iter(able), "")
    return rows + [_shared_row(node, base, there) for node in able if node != base]


def _shared_row(node: str, base: str, there: Facts) -> Row:
    """One folder for all, or one on each node; not one that is seen from one side only."""
    check, folder = "shared folder", there[node]["folder"]
    seen = [_seen(there, name) for name in (node, base)]
    if seen[0] is None or seen[1] is None:
        return unchecked(check, node, "the nodes did not meet")
    sees, is_seen = base in seen[0], node in seen[1]
    if sees and is_seen:
        return ok(check, node, folder["filesystem"])
    found = f"not the folder of {base} ({folder['filesystem']})"
    remedy = f"ssh {node} df -h {shlex.quote(folder['path'])}   # {ELSEWHERE}"
    if sees or is_seen:
        found += f"; {f'{base} does not see its files' if sees else f'{base} sees its files'}"
        return fail(check, node, found, "one folder for all, or one each", remedy, USAGE)
    expected = "as you wish: each node keeps its part of every checkpoint, a resume needs all parts"
    return warn(check, node, found, expected, remedy)


def _seen(there: Facts, node: str) -> list[str] | None:
    """The nodes whose tokens a node found in its run folder; None if they were not looked for."""
    seen: list[str] | None = (there[node].get("meet") or {}).get("seen")
    return seen


def _share(there: Facts, wanted: Wanted, node: str) -> float:
    """The part of every checkpoint that a node's disk gets: that of the ranks which write there."""
    seen = _seen(there, node)
    if seen is None:
        return 1.0
    together = [n for n in there if n == node or (n in seen and node in (_seen(there, n) or []))]
    every = sum(host.slots for host in wanted.hosts)
    return sum(wanted.slots(name) for name in together) / every


def space_rows(there: Facts, wanted: Wanted) -> list[Row]:
    """Free space against the checkpoints."""
    rows = []
    for node, found in there.items():
        folder = found["folder"]
        if "free_bytes" not in folder:
            continue
        free = folder["free_bytes"]
        if wanted.parameters is None or wanted.keep is None:
            why = f"{size(free)}; the model's size is not known"
            rows.append(unchecked("free space", node, why))
            continue
        present, share = folder.get("checkpoints", 0), _share(there, wanted, node)
        whole = checkpoint_need(wanted.parameters, wanted.keep, present, wanted.milestones or 0)
        need, part = round(whole * share), "" if share == 1.0 else "this node's part of "
        kept = f"{wanted.keep} checkpoints"
        if wanted.milestones is None:  # how many is known at the start
            kept += ", those that are kept for ever not counted,"
        elif wanted.milestones:
            kept += f", {many(wanted.milestones, 'milestone')}"
        expected = f"{size(need)} for {part}{kept} and the next"
        about = ("free space", node, size(free), expected)
        remedy = f"ssh {node} df -h {shlex.quote(folder['path'])}   # make room, {ELSEWHERE}"
        rows.append(ok(*about) if free >= need else fail(*about, remedy, USAGE))
    return rows


def data_rows(there: Facts) -> list[Row]:
    """The data that the run file names, present and the same on every node."""
    rows = []
    for index in range(len(next(iter(there.values()))["data"])):
        rows += _source_rows({node: found["data"][index] for node, found in there.items()})
    return rows


def _source_rows(entries: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    common = majority({n: str(e.get("digest", "")) for n, e in entries.items()})
    usual = next(n for n, e in entries.items() if str(e.get("digest", "")) == common)
    rows = []
    for node, entry in entries.items():
        what = entry["what"]
        look = f"ssh {node} {shlex.quote(f'ls -l {what}')}"  # that node's shell expands a pattern
        text = f"{what}: {_counted(entry)}"
        if why := entry.get("unread"):
            rows.append(unchecked("data", node, f"{what}: {why}"))
        elif why := entry.get("unreached"):
            remedy = f"ssh {node} curl -sSI {what}   # or --env https_proxy, or HF_HUB_OFFLINE=1 "
            found = f"{what} is not reached: {why}"
            rows.append(warn("data", node, found, "a connection", f"{remedy}with a full cache"))
        elif entry.get("reached"):
            rows.append(ok("data", node, f"{what} is reached"))
        elif why := entry.get("error"):
            rows.append(fail("data", node, f"{what}: {why}", "files", look, USAGE))
        elif not entry["count"]:
            expected = _counted(entries[usual]) if entries[usual].get("count") else "files"
            rows.append(fail("data", node, f"{what}: no file", expected, look, USAGE))
        elif entry["digest"] != common:
            expected = f"{_counted(entries[usual])}, as on {usual}"
            rows.append(fail("data", node, f"{text}, other names or sizes", expected, look, USAGE))
        else:
            rows.append(ok("data", node, text))
    return rows


def _counted(entry: Mapping[str, Any]) -> str:
    return f"{many(entry.get('count', 0), 'file')}, {size(entry.get('bytes', 0))}"


def lock_rows(there: Facts) -> list[Row]:
    """Locks of torch's extension builds that nobody holds: every later start waits for them."""
    held = {lock["path"] for found in there.values() for lock in found["locks"] if lock["held"]}
    ages: dict[str, float] = {}  # a shared folder is seen from every node
    places: dict[str, list[str]] = {}
    for node, found in there.items():
        for lock in found["locks"]:
            if lock["path"] not in held and lock["age_s"] > LOCK_AGE_S:
                ages[lock["path"]] = max(lock["age_s"], ages.get(lock["path"], 0.0))
                places.setdefault(lock["path"], []).append(node)
    rows = []
    for node, found in there.items():
        stale = [path for path, nodes in places.items() if node in nodes]
        for path in stale:
            word, nodes = shlex.quote(path), places[path]
            remedy = f"ssh {node} rm -f {word}"
            if len(nodes) > 1:
                remedy = f"for node in {' '.join(nodes)}; do ssh $node rm -f {word}; done"
            text = f"{path}, {ages[path] / 60:.0f} minutes old, held by nobody"
            expected = "none: every later start would wait for it"
            rows.append(fail("build lock", node, text, expected, remedy))
        if not stale:
            busy = len(found["locks"])
            rows.append(ok("build lock", node, f"{busy} of builds that run" if busy else "none"))
    return rows
