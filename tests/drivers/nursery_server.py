"""Imports everything once, then forks the ranks of one job after another; see tests/nursery.py.

Each line on stdin is a job: {"job", "script", "argv", "ranks": [environment of each], "spaces":
[namespaces of each], "log", "cwd"}. Each line on stdout is an event: {"ready": threads}, {"job",
"pids"} or {"job", "rank", "code"} (minus the signal where one ended it). It ends, and its ranks
with it, when stdin closes.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from recipes.rehearsal.enter import setns

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
PRELOADED = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "accelerate",
    "deepspeed",
    "deepspeed.utils",
    "deepspeed.runtime.zero.muon.original_muon",  # it brings torch's compiler
    "deepspeed.module_inject.auto_ep_layer",
    "datasets",
    "transformers",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.auto.modeling_auto",
    "recipes.job",
    "recipes.pretrain",
    "recipes.resume",
    "recipes.telling",
    "recipes.diagnosis",
    "recipes.model",
    "torch.utils.data",
    "safetensors.torch",
    "pyarrow.parquet",
)


def enter(*paths: str) -> None:
    """Move this process (for a pid namespace: its later children) into namespaces."""
    handles = [os.open(path, os.O_RDONLY) for path in paths]  # /proc is another one afterwards
    for handle in handles:
        setns(handle)
        os.close(handle)


def fork_into(pids: str | None) -> int:
    """Fork; the child belongs to that pid namespace."""
    if pids is None:
        return os.fork()
    own = os.open("/proc/self/ns/pid", os.O_RDONLY)
    enter(pids)
    child = os.fork()
    if child:
        setns(own)
    os.close(own)
    return child


class Server:
    """The children that run, and the events about them."""

    def __init__(self, jobs: int, events: int) -> None:
        self.jobs, self.events = jobs, events
        self.selector = selectors.DefaultSelector()
        self.selector.register(jobs, selectors.EVENT_READ, None)
        self.rest = b""

    def tell(self, event: dict[str, Any]) -> None:
        os.write(self.events, json.dumps(event).encode() + b"\n")

    def serve(self) -> tuple[dict[str, Any], int] | None:
        """Until stdin closes; in a forked rank, returns its job and rank."""
        while True:
            for key, _ in self.selector.select():
                if key.fd != self.jobs:
                    self.reap(key.fd, *key.data)
                    continue
                read = os.read(self.jobs, 1 << 16)
                if not read:
                    return None
                *lines, self.rest = (self.rest + read).split(b"\n")
                for line in lines:
                    if (job := json.loads(line)) and (rank := self.fork(job)) is not None:
                        return job, rank

    def fork(self, job: dict[str, Any]) -> int | None:
        """Start a job's ranks; returns the rank in the children, None in the server."""
        pids = []
        for rank, spaces in enumerate(job["spaces"]):
            pid = fork_into(spaces.get("pid"))
            if pid == 0:
                return rank
            handle = os.pidfd_open(pid)
            self.selector.register(handle, selectors.EVENT_READ, (job["job"], rank, pid))
            pids.append(pid)
        self.tell({"job": job["job"], "pids": pids})
        return None

    def reap(self, handle: int, job: int, rank: int, pid: int) -> None:
        _, status = os.waitpid(pid, 0)
        self.selector.unregister(handle)
        os.close(handle)
        self.tell({"job": job, "rank": rank, "code": os.waitstatus_to_exitcode(status)})

    def become_rank(self, job: dict[str, Any], rank: int) -> None:
        """Leave nothing of the server but its imports."""
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        for key in list(self.selector.get_map().values()):
            if key.fd != self.jobs:
                os.close(key.fd)
        self.selector.close()
        os.close(self.jobs)
        os.close(self.events)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.close(log)
        os.close(nothing)
        os.environ.update(job["ranks"][rank])
        paths = [path for kind, path in job["spaces"][rank].items() if kind != "pid"]
        enter(*paths)
        os.chdir(job["cwd"])
        sys.argv = [job["script"], *job["argv"]]


def main() -> None:
    """Import, serve, and in a rank run the script as Python would."""
    jobs, events = os.dup(0), os.dup(1)  # what a library prints must not be taken for an event
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in PRELOADED:
        importlib.import_module(name)
    sys.modules.pop("recipes.pretrain")  # imported for what it needs; it runs as the script
    gc.freeze()  # else each rank's first collection copies all that the imports made
    server = Server(jobs, events)
    server.tell({"ready": len(os.listdir("/proc/self/task"))})  # noqa: PTH208
    found = server.serve()
    if found is None:
        return
    job, rank = found
    server.become_rank(job, rank)
    runpy.run_path(job["script"], run_name="__main__")


if __name__ == "__main__":
    main()
