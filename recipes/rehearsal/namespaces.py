"""A rehearsal: every host of a hostfile as a network namespace of this Linux machine.

    octet rehearse --hostfile hostfile -- octet launch --hostfile hostfile \
        --config accelerate_configs/local_zero1_bf16.yaml recipes/runs/stdlib.yaml
    octet rehearse --hostfile hostfile --bandwidth 1gbit -- octet preflight --hostfile hostfile \
        --config accelerate_configs/local_zero1_bf16.yaml

Hosts have their own name, address, sshd, processes and /dev/shm; they share the file system, as
with shared storage, except for the folders that `--local` names. Nothing outside is changed, and
nothing can be left behind: the namespaces have no name and end with this process.
"""

from __future__ import annotations

import logging
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from recipes.cluster.hostfile import Host
from recipes.rehearsal import enter, foreground, node
from recipes.rehearsal.plan import plan, search_path

logger = logging.getLogger(__name__)


class Rehearsal:
    """The hosts, up and reachable by ssh while the context lasts."""

    def __init__(
        self, hosts: Sequence[Host], *, bandwidth: str | None = None, local: Sequence[str] = ()
    ) -> None:
        self._plan = plan(hosts, bandwidth, local)
        self.addresses = {host["name"]: host["address"] for host in self._plan["hosts"]}
        self.namespaces: dict[str, list[int]] = {}  # by host, in the order of node.NAMESPACES
        self._bandwidth = bandwidth
        # sshd and the switch start clean: no secret of the caller's shell reaches other hosts.
        self._env = {"PATH": search_path(), "LC_ALL": "C"}
        self._root: subprocess.Popen[str] | None = None
        self._channel: socket.socket | None = None
        self._started: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Rehearsal:
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel = ours
        words = [*node.UNSHARE, sys.executable, "-I", "-S", node.__file__]
        self._root = subprocess.Popen(
            [*words, "switch", str(its.fileno())],
            pass_fds=[its.fileno()],
            env=self._env,
            start_new_session=True,  # a Ctrl-C of the terminal must not take the hosts down first
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        its.close()
        done = False
        try:
            self._wait_until_ready(ours)
            done = True
        finally:
            if not done:
                self.close()
        return self

    def _wait_until_ready(self, channel: socket.socket) -> None:
        assert self._root is not None and self._root.stderr is not None
        try:
            node.send(channel, self._plan)
            for host in self.addresses:
                self.namespaces[host] = node.receive(channel, "host")
            node.receive(channel, "ready")
        except (node.Fault, OSError) as error:
            channel.close()
            said = self._root.communicate()[1].strip()  # by unshare itself, when it was refused
            reason = f"this machine refuses a rehearsal: {said or error}"
            if "not permitted" in reason or "denied" in reason:
                reason += (
                    "; expected root on the machine itself, in a virtual machine or in a "
                    "privileged container (docker run --privileged)"
                )
            raise ValueError(reason) from error
        self._check_logins()

    def _check_logins(self) -> None:
        """The first host reaches each of them by name, as every launcher will."""
        words = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15"]
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
        pipes |= {"stderr": subprocess.PIPE, "text": True, "env": self._env, "folder": "/"}
        tries = {host: self.popen([*words, host, "true"], **pipes) for host in self.addresses}
        said = {host: process.communicate()[1].strip() for host, process in tries.items()}
        refused = [f"  {h}: {said[h]}" for h, process in tries.items() if process.returncode != 0]
        if refused:
            raise ValueError("ssh into the rehearsal's hosts fails:\n" + "\n".join(refused))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Take everything down; returns when no process of it is left."""
        for descriptor in (d for inside in self.namespaces.values() for d in inside):
            os.close(descriptor)
        self.namespaces = {}
        if self._channel is not None:
            self._channel.close()
        if self._root is not None:
            for process in self._started:  # killed with the rest; a namespace ends when all its
                process.wait(20)  # processes are reaped, and these are ours to reap
            try:
                self._root.wait(20)
            except subprocess.TimeoutExpired:
                self._root.kill()  # its child, the first process of the namespaces, dies with it
                self._root.wait()
            if self._root.stderr is not None:
                self._root.stderr.close()

    def banner(self) -> str:
        """What was set up, for people."""
        hosts = "  ".join(f"{name} {address}" for name, address in self.addresses.items())
        rate = f"links of {self._bandwidth} each way" if self._bandwidth else "links not limited"
        private = self._plan["local"]
        lines = [f"rehearsal  {hosts}  ({rate})"]
        lines += [f"private    {' '.join(private)}: empty on each host"] if private else []
        lines += ["           own processes, names, sshd and /dev/shm; nothing outside is changed"]
        return "\n".join(lines)

    def popen(
        self,
        words: Sequence[str],
        *,
        host: str | None = None,
        folder: str | Path | None = None,
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """Start a command on a host (the first by default), as the leader of its own group.

        Args:
            folder: its working directory, as the host sees it; by default the caller's.
            options: as for subprocess.Popen.

        Raises:
            ValueError: the command or the folder is not there.
        """
        host = host or next(iter(self.addresses))
        folder = str(folder or Path.cwd())
        pid, *others = self.namespaces[host]
        answer, status = os.pipe()
        inner = [sys.executable, "-I", "-S", enter.__file__, str(status), folder]
        inner += [",".join(map(str, others)), *words]
        with _children_in(pid):
            process = subprocess.Popen(inner, pass_fds=[status, *others], **options)
        os.close(status)
        self._started.append(process)
        with os.fdopen(answer) as said:
            refusal = said.read()  # empty once the command has taken over
        if refusal:
            process.communicate()
            raise ValueError(f"{shlex.join(words)} on {host}: {refusal}")
        return process


@contextmanager
def _children_in(pid_namespace: int) -> Iterator[None]:
    """Processes started meanwhile belong to that pid namespace, and are still our children."""
    own = os.open("/proc/self/ns/pid", os.O_RDONLY)
    enter.setns(pid_namespace)
    try:
        yield
    finally:
        enter.setns(own)
        os.close(own)


def rehearse(
    hosts: Sequence[Host],
    command: Sequence[str],
    bandwidth: str | None = None,
    *,
    local: Sequence[str] = (),
) -> int:
    """Run a command on the first host, as on the real cluster; its exit code (128+n by signal n).

    Signals that this process gets are passed on to the command; the hosts go when it has ended.

    Args:
        bandwidth: what each host's link carries in each direction, like `1gbit`; None: no limit.
        local: folders that each host gets for itself, empty, like a node-local disk.

    Raises:
        ValueError: something is missing, refused, or not there; all of it together.
    """
    if not command:
        raise ValueError("octet rehearse: expected a command after --, like: -- ssh worker-1 true")
    with Rehearsal(hosts, bandwidth=bandwidth, local=local) as cluster:
        logger.info("%s", cluster.banner())
        with foreground.Forwarder() as forwarder:
            # So that `octet` and `accelerate` are found, as on a node with its environment active.
            path = os.pathsep.join([str(Path(sys.executable).parent), search_path()])
            code = forwarder.run(cluster.popen(command, env=os.environ | {"PATH": path}))
    logger.info("rehearsal over: exit code %d, every host is gone", code)
    return code
