"""Rows about the run folder, the data and locks that an earlier build left behind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recipes.outcome import USAGE
from recipes.preflight.rows import Row, majority, size
from recipes.preflight.wanted import Facts, Wanted

# Weights and Adam's two moments, each in fp32: what a checkpoint holds of every parameter.
CHECKPOINT_BYTES = 12
LOCK_AGE_S = 120.0  # a build may run on a machine outside the hostfile: only old locks are told


def storage_rows(there: Facts, wanted: Wanted) -> list[Row]:
    """Run folder, data, locks."""
    rows = []
    if any("folder" in found for found in there.values()):
        rows += folder_rows(there, wanted) + space_rows(there, wanted)
    if any("data" in found for found in there.values()):
        rows += data_rows(there)
    return rows + lock_rows(there)


def folder_rows(there: Facts, wanted: Wanted) -> list[Row]:
    """Whether every node can write to the run folder, and whether it is one folder."""
    rows = []
    path = next(f["folder"]["path"] for f in there.values() if "folder" in f)
    able = [node for node, found in there.items() if not found["folder"].get("error")]
    for node, found in there.items():
        if error := found["folder"].get("error"):
            rows.append(
                Row(
                    check="run folder",
                    node=node,
                    found=error,
                    expected=f"{path}, writable",
                    verdict="FAIL",
                    remedy=f"ssh {node} 'ls -ld {path}; findmnt -T {path}'   "
                    "# or name another: output_dir=FOLDER",
                    code=USAGE,
                )
            )
        else:
            speed = f"{size(found['folder']['bytes_per_s'])}/s"
            rows.append(Row(check="run folder", node=node, found=f"written at {speed}"))
    if len(there) == 1:
        return rows
    seen = {
        node: found["meet"]["seen"]
        for node, found in there.items()
        if "seen" in (found.get("meet") or {})
    }
    first = wanted.hosts[0].name
    base = first if first in able else (able[0] if able else "")
    for node in there:
        if node == base or node not in able:
            continue
        # Both ways: a node that can't read the first one's files, or whose files the first misses.
        if node not in seen or base not in seen:
            why = "the nodes did not meet"
            rows.append(Row(check="shared folder", node=node, found=why, verdict="not checked"))
        elif base in seen[node] and node in seen[base]:
            where = there[node]["folder"]["filesystem"]
            rows.append(Row(check="shared folder", node=node, found=where))
        else:
            rows.append(
                Row(
                    check="shared folder",
                    node=node,
                    found=f"not the folder of {base} ({there[node]['folder']['filesystem']})",
                    expected=f"{path} on shared storage",
                    verdict="FAIL",
                    remedy=f"ssh {node} df -h {path}   # or name a shared one: output_dir=FOLDER",
                    code=USAGE,
                )
            )
    return rows


def checkpoint_need(parameters: int, keep: int, present: int) -> int:
    """Bytes that a run still needs: one checkpoint more than it keeps, less those that exist."""
    return CHECKPOINT_BYTES * parameters * (keep + 1 - min(present, keep))


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
            rows.append(Row(check="free space", node=node, found=why, verdict="not checked"))
            continue
        need = checkpoint_need(wanted.parameters, wanted.keep, folder.get("checkpoints", 0))
        what = f"{size(need)} for {wanted.keep} checkpoints and the next"
        enough = free >= need
        rows.append(
            Row(
                check="free space",
                node=node,
                found=size(free),
                expected=what,
                verdict="ok" if enough else "FAIL",
                remedy=""
                if enough
                else f"ssh {node} df -h {folder['path']}   # make room, or name another "
                "folder: output_dir=FOLDER",
                code=USAGE,
            )
        )
    return rows


def data_rows(there: Facts) -> list[Row]:
    """The data that the run file names, present and the same on every node."""
    rows = []
    count = len(next(iter(there.values()))["data"])
    for index in range(count):
        entries = {node: found["data"][index] for node, found in there.items()}
        rows += _one_source(entries)
    return rows


def _one_source(entries: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    rows = []
    texts = {node: _text(entry) for node, entry in entries.items()}
    common = majority({n: str(e.get("digest", "")) for n, e in entries.items()})
    usual = next(n for n, e in entries.items() if str(e.get("digest", "")) == common)
    for node, entry in entries.items():
        what = entry["what"]
        look = f"ssh {node} ls -l '{what}'"
        if why := entry.get("unread"):
            text = f"{what}: {why}"
            rows.append(Row(check="data", node=node, found=text, verdict="not checked"))
        elif why := entry.get("unreached"):
            rows.append(
                Row(
                    check="data",
                    node=node,
                    found=f"{what} is not reached: {why}",
                    expected="a connection",
                    verdict="warn",
                    remedy=f"ssh {node} curl -sSI {what}   # or export https_proxy, or "
                    "HF_HUB_OFFLINE=1 with a full cache",
                )
            )
        elif entry.get("reached"):
            rows.append(Row(check="data", node=node, found=f"{what} is reached"))
        elif not entry["count"]:
            rows.append(
                Row(
                    check="data",
                    node=node,
                    found=f"{what}: no file",
                    expected=texts[usual] if entries[usual].get("count") else "files",
                    verdict="FAIL",
                    remedy=look,
                    code=USAGE,
                )
            )
        elif entry["digest"] != common:
            rows.append(
                Row(
                    check="data",
                    node=node,
                    found=f"{texts[node]}, other names or sizes",
                    expected=f"{texts[usual]}, as on {usual}",
                    verdict="FAIL",
                    remedy=look,
                    code=USAGE,
                )
            )
        else:
            rows.append(Row(check="data", node=node, found=f"{texts[node]}"))
    return rows


def _text(entry: Mapping[str, Any]) -> str:
    if "count" not in entry:
        return str(entry["what"])
    return f"{entry['count']} files, {size(entry['bytes'])}"


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
            remedy = f"ssh {node} rm {path}"
            if len(places[path]) > 1:
                nodes = " ".join(places[path])
                remedy = f"for node in {nodes}; do ssh $node rm -f {path}; done"
            rows.append(
                Row(
                    check="build lock",
                    node=node,
                    found=f"{path}, {ages[path] / 60:.0f} minutes old, held by nobody",
                    expected="none: every later start would wait for it",
                    verdict="FAIL",
                    remedy=remedy,
                )
            )
        if not stale:
            busy = len(found["locks"])
            text = f"{busy} of builds that run" if busy else "none"
            rows.append(Row(check="build lock", node=node, found=text))
    return rows
