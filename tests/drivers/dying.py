"""Rank processes without torch, joined by socket pairs, that die at a chosen file operation."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import struct
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SPIED = ("open", "write", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir")
LIMIT_S = 20
Pairs = list[tuple[socket.socket, socket.socket]]


class Sockets:
    """A group of processes; rank 0 is the hub."""

    def __init__(self, rank: int, pairs: Pairs) -> None:
        self.rank, self.world = rank, len(pairs) + 1
        self.links = [hub for hub, _ in pairs] if rank == 0 else [pairs[rank - 1][1]]
        for one in (end for pair in pairs for end in pair):
            if one not in self.links:
                one.close()  # so that a rank's death is seen at once

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value; RuntimeError if a rank has died."""
        if self.rank:
            _send(self.links[0], value)
            return _receive(self.links[0])
        values = [value, *map(_receive, self.links)]
        for link in self.links:
            _send(link, values)
        return values


def _send(link: socket.socket, value: Any) -> None:
    data = pickle.dumps(value)
    try:
        link.sendall(struct.pack("<q", len(data)) + data)
    except OSError as error:
        raise RuntimeError("connection closed by peer") from error


def _receive(link: socket.socket) -> Any:
    (size,) = struct.unpack("<q", _exactly(link, 8))
    return pickle.loads(_exactly(link, size))


def _exactly(link: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        try:
            more = link.recv(size - len(data))
        except OSError as error:
            raise RuntimeError("connection reset by peer") from error
        if not more:
            raise RuntimeError("connection closed by peer")
        data += more
    return data


@dataclass(kw_only=True)
class Spy:
    """Counts a process's file operations and dies at one of them; -1: at none."""

    at: int = -1
    when: str = "before"  # before | half | after
    everyone: bool = False
    seen: list[str] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)  # process numbers

    def install(self) -> None:
        """From now on."""
        for name in SPIED:
            setattr(os, name, self._wrapped(name, getattr(os, name)))

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def act(*given: Any, **named: Any) -> Any:
            if name == "open" and not given[1] & os.O_CREAT:
                return real(*given, **named)
            here = len(self.seen) == self.at
            self.seen.append(name)
            if here and self.when == "before":
                self._die()
            if here and self.when == "half":
                real(given[0], given[1][: len(given[1]) // 2])
                self._die()
            result = real(*given, **named)
            if here:
                self._die()
            return result

        return act

    def _die(self) -> None:
        for pid in self.ranks if self.everyone else []:
            if pid != os.getpid():
                os.kill(pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def run_ranks(
    world: int, folder: Path, victim: int, spy: Spy, act: Callable[[Sockets], None]
) -> tuple[bool, list[list[str]]]:
    """Fork the ranks, let one of them die (-1: none), and wait for the others.

    Returns:
        Whether the victim died; where there was none, the operations of each rank.
    """
    pairs = [socket.socketpair() for _ in range(world - 1)]
    pids: list[int] = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            mine = spy if rank == victim else Spy()
            _one_rank(rank, pairs, folder / f"seen-{rank}", mine, act)
        pids.append(pid)
    for one in (end for pair in pairs for end in pair):
        one.close()
    for pid in pids:  # none is reaped before all have ended: a rank kills the others by number
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    ends = [os.waitpid(pid, 0)[1] for pid in pids]
    for rank, status in enumerate(ends):
        signalled = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        assert signalled in (0, signal.SIGKILL), f"rank {rank} hung or crashed: {signalled}"
        assert signalled or os.WEXITSTATUS(status) in (0, 1), f"rank {rank} crashed"
    paths = [folder / f"seen-{rank}" for rank in range(world)]
    seen = [json.loads(path.read_text()) for path in paths] if victim < 0 else []
    return victim >= 0 and os.WIFSIGNALED(ends[victim]), seen


def _one_rank(
    rank: int, pairs: Pairs, seen: Path, spy: Spy, act: Callable[[Sockets], None]
) -> None:
    code = 3
    try:
        signal.alarm(LIMIT_S)
        group = Sockets(rank, pairs)
        spy.ranks = group.gather(os.getpid())
        spy.install()
        act(group)
        code = 0
        seen.write_text(json.dumps(spy.seen), encoding="utf-8")
    except (RuntimeError, OSError):
        code = 1  # a peer has died
    finally:
        if code == 3:
            traceback.print_exc()
        os._exit(code)
