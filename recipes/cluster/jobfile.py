"""The job file: what every rank of a supervised job needs, carried to each node as a file.

Arguments and environment stand in it as JSON, mode 0600 in a folder of mode 0700, so that no shell
reads them and no command line shows them. `recipes/cluster/rank.py` reads it on each rank, with the
standard library alone; this module writes it.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import stat
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any


def new_job_id() -> str:
    """An id that tells when it began, and that nobody can guess to prepare its folder."""
    return f"{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(8)}"


def job_folder(job: str) -> Path:
    """A job's private folder, at the same path on every node, whoever the user is there."""
    return Path(f"/tmp/octet-{job}")


@dataclass(frozen=True, kw_only=True)
class JobFile:
    """One attempt at a job."""

    job: str  # its id
    hosts: tuple[tuple[str, int], ...]  # name and number of ranks, in rank order
    slots: tuple[tuple[str, int], ...]  # name and slots, of which the launcher may use a part
    script: str
    arguments: tuple[str, ...]
    env: dict[str, str]
    node_env: dict[str, dict[str, str]]  # by host: what differs between nodes
    working_dir: str
    logs: str

    @property
    def folder(self) -> Path:
        """The job's private folder, at the same path on every node."""
        return job_folder(self.job)

    @property
    def path(self) -> Path:
        """Where the file lies on every node."""
        return self.folder / "job.json"

    def ranks_of(self, host: str) -> range:
        """The ranks that a host runs: ranks follow the hostfile's order."""
        first = 0
        for name, slots in self.hosts:
            if name == host:
                return range(first, first + slots)
            first += slots
        raise KeyError(host)

    def write(self, host: str) -> Path:
        """Put the file on this node, with a folder for this node's markers inside; returns that.

        Raises:
            ValueError: somebody else owns the folder.
        """
        self.folder.mkdir(mode=0o700, exist_ok=True)
        found = self.folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise ValueError(f"{self.folder} belongs to somebody else; remove it")
        markers = self.folder / host
        try:
            markers.mkdir(mode=0o700, exist_ok=True)
            self._put(host, "job.json", json.dumps(asdict(self)))
            self._put(host, "hostfile", _hostfile(self.hosts))
            self._put(host, "launcher_hostfile", _hostfile(self.slots))
        except OSError:  # the disk is full, say
            self.remove(host)
            raise
        return markers

    def _put(self, host: str, name: str, text: str) -> None:
        beside = self.folder / f".{name}.{host}"
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        beside.rename(self.folder / name)

    def remove(self, host: str) -> None:
        """Delete the node's part of the folder, and the rest with the last part."""
        shutil.rmtree(self.folder / host, ignore_errors=True)
        if not any((self.folder / name).exists() for name, _ in self.hosts):
            shutil.rmtree(self.folder, ignore_errors=True)


def _hostfile(hosts: tuple[tuple[str, int], ...]) -> str:
    return "".join(f"{name} slots={slots}\n" for name, slots in hosts)


def from_json(tree: dict[str, Any]) -> JobFile:
    """The job file out of what `asdict` and JSON made of it."""
    pairs = {key: tuple((name, n) for name, n in tree[key]) for key in ("hosts", "slots")}
    return JobFile(**(tree | pairs | {"arguments": tuple(tree["arguments"])}))
