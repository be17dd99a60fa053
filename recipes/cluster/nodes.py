"""The nodes of a job: an agent on each, how they see each other, the job file on all of them."""

from __future__ import annotations

import logging
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from recipes.cluster import remote
from recipes.cluster.channel import Channel, ChannelClosed
from recipes.cluster.environment import INTERFACE_VARIABLES
from recipes.cluster.jobfile import JobFile
from recipes.cluster.launchers import Start
from recipes.outcome import TopologyError

logger = logging.getLogger(__name__)

OPENING_S = 60.0  # ssh, and Python's start on a cold file system


@dataclass(kw_only=True)
class Node:
    """A node's agent, seen from here."""

    host: str
    process: subprocess.Popen[bytes]
    channel: Channel
    slots: int
    started: set[int] = field(default_factory=set)
    launcher: int | None = None  # its exit code
    launcher_ended: float = 0.0
    launcher_tail: str = ""
    lost: str = ""  # why, once it is
    bye: list[str] | None = None  # what could not be ended there


@contextmanager
def agents(start: Start) -> Iterator[list[Node]]:
    """An agent on every host; all are told to end everything when the block is left."""
    nodes: list[Node] = []
    try:
        for host in start.hosts:
            process = remote.start_module(host.name, "recipes.cluster.agent")
            assert process.stdin is not None and process.stdout is not None
            channel = Channel(process.stdout, process.stdin)
            nodes.append(Node(host=host.name, process=process, channel=channel, slots=host.slots))
        yield nodes
    finally:
        _dismiss(nodes)


def _dismiss(nodes: list[Node]) -> None:
    """End what is left on every node, and the agents."""
    for node in nodes:
        with suppress(ChannelClosed):
            node.channel.send(kill=True)
    end = time.monotonic() + 15.0
    for node in nodes:
        while node.bye is None and time.monotonic() < end:
            try:
                message = node.channel.receive(0.1) or {}
            except ChannelClosed:
                break
            node.bye = message.get("bye")
        if node.bye:
            logger.error("%s: could not be ended: %s", node.host, ", ".join(node.bye))
        with suppress(OSError):
            node.process.stdin.close()  # type: ignore[union-attr]
        try:
            node.process.wait(5.0)
        except subprocess.TimeoutExpired:
            node.process.kill()
            node.process.wait()


def _collect(nodes: list[Node], key: str) -> dict[str, Any]:
    """Every node's answer of a kind.

    Raises:
        TopologyError: all nodes that did not give it, each with its reason and remedy.
    """
    answers: dict[str, Any] = {}
    errors: list[str] = []
    end = time.monotonic() + OPENING_S
    for node in nodes:
        try:
            while node.host not in answers:
                message = node.channel.receive(0.1) or {}
                if key in message:
                    answers[node.host] = message[key]
                elif "refused" in message:
                    errors += message["refused"]
                    break
                elif time.monotonic() > end:
                    errors.append(f"{node.host}: no answer within {OPENING_S:.0f} s")
                    break
        except ChannelClosed:
            errors.append(remote.explain(node.host, last_words(node), node.process.poll()))
    if errors:
        raise TopologyError("nothing was started:\n" + "\n".join(f"  {e}" for e in errors))
    return answers


def last_words(node: Node) -> str:
    """What ssh said before it ended."""
    with suppress(subprocess.TimeoutExpired):
        node.process.wait(5.0)
    if node.process.poll() is None or node.process.stderr is None:
        return ""
    return node.process.stderr.read().decode(errors="replace")


def greet(nodes: list[Node]) -> dict[str, dict[str, Any]]:
    """How every node sees every other one."""
    hosts = [node.host for node in nodes]
    for node in nodes:
        with suppress(ChannelClosed):  # told below, with the reason
            node.channel.send(hello={"name": node.host, "hosts": hosts})
    answers = _collect(nodes, "hello")
    ways = {host: answers[host]["ways"] for host in hosts}
    errors = [
        f"on {host}: {way['error']}; every node must resolve every other's name"
        for host in hosts
        for way in ways[host].values()
        if "error" in way
    ]
    errors += [
        f"on {host}: {other} resolves to {way['address']}, which leads back to {host}; "
        "correct /etc/hosts there"
        for host in hosts
        for other, way in ways[host].items()
        if host != other and way.get("address", "").startswith("127.")
    ]
    if errors:
        raise TopologyError("nothing was started:\n" + "\n".join(f"  {e}" for e in errors))
    return ways


def master(nodes: list[Node], ways: dict[str, dict[str, Any]]) -> str:
    """The first host's address as the others reach it."""
    if len(nodes) == 1:
        return "127.0.0.1"
    return str(ways[nodes[1].host][nodes[0].host]["address"])


def interfaces(
    nodes: list[Node], ways: dict[str, dict[str, Any]], env: dict[str, str]
) -> dict[str, dict[str, str]]:
    """Name the interface that leads to the other nodes, where the user did not name one."""
    told: dict[str, dict[str, str]] = {}
    for node in nodes:
        # The first node looks towards the second one, every other towards the first.
        other = nodes[1 if node is nodes[0] else 0].host if len(nodes) > 1 else None
        name = ways[node.host][other]["interface"] if other else "lo"
        free = [key for key in INTERFACE_VARIABLES if key not in env]
        told[node.host] = {key: name for key in free if name}
    return told


def prepare(nodes: list[Node], job: JobFile, start: Start) -> None:
    """The job file on every node, before any launcher starts: pdsh reaches all of them at once."""
    for number, node in enumerate(nodes):
        node.channel.send(job=asdict(job), port=start.port if number == 0 else None)
    _collect(nodes, "ready")
