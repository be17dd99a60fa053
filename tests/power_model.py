"""A disk that loses power: what was not flushed may be lost, half there, or there.

with Recorder(folder) as recorder:      # every file operation below the folder
    ...
for tree in recorder.crashes(seed): ... # folders that a power loss may have left
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Operation = tuple[Any, ...]


@dataclass(eq=False)
class File:
    """Contents in memory, and what of them is on the disk for certain."""

    data: bytes = b""
    flushed: bytes = b""


@dataclass(eq=False)
class Folder:
    """Entries in memory, those on the disk, and the changes in between, in order."""

    entries: dict[str, Any] = field(default_factory=dict)
    flushed: dict[str, Any] = field(default_factory=dict)
    pending: list[dict[str, Any]] = field(default_factory=list)

    def change(self, changes: dict[str, Any]) -> None:
        """One atomic change of entries; None removes one."""
        self.pending.append(changes)
        _apply(self.entries, changes)


def _apply(entries: dict[str, Any], changes: dict[str, Any]) -> None:
    for name, node in changes.items():
        entries.pop(name, None)
        if node is not None:
            entries[name] = node


class Recorder:
    """Records what is done to files below a folder, in the order of all threads."""

    def __init__(self, root: Path) -> None:
        self.root, self.operations = root, list[Operation]()
        self.start = _read(root)  # all of it on the disk
        self._lock = threading.RLock()
        self._paths: dict[int, str] = {}
        self._real: dict[str, Callable[..., Any]] = {}

    def __enter__(self) -> Recorder:
        for name in ("open", "write", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir"):
            self._real[name] = getattr(os, name)
            setattr(os, name, self._spying(name, self._real[name]))
        return self

    def __exit__(self, *_: object) -> None:
        for name, real in self._real.items():
            setattr(os, name, real)

    def _spying(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def act(*given: Any, **named: Any) -> Any:
            with self._lock:
                before = self._place(given[0], named.get("dir_fd"))
                fresh = name == "open" and not os.path.lexists(self.root / before)
                result = real(*given, **named)
                if before.startswith(".."):
                    return result
                if name == "open":
                    self._paths[result] = before
                    if given[1] & os.O_CREAT:
                        self.operations.append(("create" if fresh else "truncate", before))
                elif name == "write":
                    self.operations.append(("write", before, bytes(given[1][:result])))
                elif name in ("rename", "replace"):
                    self.operations.append(("rename", before, self._place(given[1], None)))
                else:
                    self.operations.append((name, before))
                return result

        return act

    def _place(self, where: Any, folder: int | None) -> str:
        if isinstance(where, int):
            path = Path(f"/proc/self/fd/{where}").readlink()
        else:
            above = Path() if folder is None else Path(f"/proc/self/fd/{folder}").readlink()
            path = above / where
        return os.path.relpath(path, self.root)

    def crashes(self, variants: int, seed: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
        """For every number of operations done: trees that the disk may hold after a power loss."""
        chance = random.Random(seed)
        for count in range(len(self.operations) + 1):
            disk = _loaded(self.start)
            for operation in self.operations[:count]:
                _do(disk, operation)
            for variant in range(variants):
                # None of what is pending, all of it, then any mixture.
                yield count, _left(disk, chance, {0: 0.0, 1: 1.0}.get(variant, 0.5), variant)


def _do(disk: Folder, operation: Operation) -> None:
    kind, path, *more = operation
    above, name = _find(disk, str(Path(path).parent)), Path(path).name
    if kind == "create":
        above.change({name: File()})
    elif kind == "mkdir":
        above.change({name: Folder()})
    elif kind == "truncate":
        above.entries[name].data = b""
    elif kind == "write":
        above.entries[name].data += more[0]
    elif kind == "fsync":
        node = _find(disk, path)
        if isinstance(node, File):
            node.flushed = node.data
        else:
            node.flushed, node.pending = dict(node.entries), []
    elif kind == "rename":
        target = Path(more[0])
        assert target.parent == Path(path).parent, "renamed to another folder"
        above.change({name: None, target.name: above.entries[name]})
    else:
        assert kind in ("unlink", "rmdir")
        above.change({name: None})


def _find(disk: Folder, path: str) -> Any:
    node: Any = disk
    for part in [p for p in path.split("/") if p not in ("", ".")]:
        node = node.entries[part]
    return node


def _left(node: Any, chance: random.Random, happened: float, variant: int) -> Any:
    """What is found after the power is back."""
    if isinstance(node, File):
        if node.data == node.flushed:
            return node.data
        half = node.data[: len(node.data) // 2]
        states = [node.flushed, node.data, half, bytes(len(node.data)), b""]
        return states[variant] if variant < 2 else chance.choice(states)
    entries = dict(node.flushed)
    for changes in node.pending:
        if chance.random() < happened:
            _apply(entries, changes)
    return {name: _left(one, chance, happened, variant) for name, one in entries.items()}


def _read(folder: Path) -> dict[str, Any]:
    return {p.name: _read(p) if p.is_dir() else p.read_bytes() for p in folder.iterdir()}


def _loaded(tree: dict[str, Any]) -> Folder:
    nodes: dict[str, Any] = {}
    for name, value in tree.items():
        nodes[name] = _loaded(value) if isinstance(value, dict) else File(value, value)
    return Folder(dict(nodes), dict(nodes))


def write_tree(folder: Path, tree: dict[str, Any]) -> None:
    """Make real what a crash left."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in tree.items():
        if isinstance(value, dict):
            write_tree(folder / name, value)
        else:
            (folder / name).write_bytes(value)
