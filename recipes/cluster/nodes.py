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
ENDING_S = 15.0


class Interrupted(Exception):
    """The user wants to stop before anything was started."""


@dataclass(kw_only=True)
class Node:
    """A node's agent, seen from here."""

    host: str
    process: subprocess.Popen[bytes]
    channel: Channel
    slots: int
    job: dict[str, Any] | None = None  # once the agent was told of it
    started: set[int] = field(default_factory=set)
    launcher: int | None = None  # its exit code
    launcher_ended: float = 0.0
    launcher_tail: str = ""
    lost: str = ""  # why, once it is
    lost_at: float = 0.0  # when it was last heard of
    bye: list[str] | None = None  # what could not be ended there


def _agent(host: str, slots: int, silence_s: float) -> Node:
    try:
        process = remote.start_module(host, "recipes.cluster.agent", silence_s=silence_s)
    except OSError as error:
        raise TopologyError(f"{host}: {error}; install the ssh client here") from error
    assert process.stdin is not None and process.stdout is not None
    channel = Channel(process.stdout, process.stdin)
    return Node(host=host, process=process, channel=channel, slots=slots)


@contextmanager
def agents(start: Start, silence_s: float) -> Iterator[list[Node]]:
    """An agent on every host; when the block is left, nothing of the job is left on any of them."""
    nodes: list[Node] = []
    try:
        for host in start.hosts:
            nodes.append(_agent(host.name, host.slots, silence_s))
        yield nodes
    finally:
        _dismiss(nodes)
        _sweep([node for node in nodes if node.bye is None and node.job is not None])


def _dismiss(nodes: list[Node]) -> None:
    """End what is left on every node that can be reached, and the agents."""
    for node in nodes:
        with suppress(ChannelClosed):
            node.channel.send(kill=True)
    end = time.monotonic() + ENDING_S
    for node in nodes:
        there = node.job is not None and not node.lost  # else there is nothing to wait for
        while there and node.bye is None and time.monotonic() < end:
            try:
                message = node.channel.receive(0.1) or {}
            except ChannelClosed:
                break
            node.bye = message.get("bye")
        if node.bye:
            logger.error("%s: could not be ended: %s", node.host, ", ".join(node.bye))
        with suppress(OSError):
            node.process.stdin.close()  # type: ignore[union-attr]
    end = time.monotonic() + 5.0
    for node in nodes:
        try:
            node.process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            node.process.kill()
            node.process.wait()


def _sweep(nodes: list[Node]) -> None:
    """Where the agent is gone, or waits for a head that it lost, another one ends its job."""
    others = [_agent(node.host, node.slots, ENDING_S) for node in nodes]
    for node, other in zip(nodes, others, strict=True):
        other.job = node.job
        with suppress(ChannelClosed):
            other.channel.send(hello={"name": node.host, "hosts": []})
            other.channel.send(job=node.job, port=None)
    _dismiss(others)
    for other in others:
        if other.bye is None:
            logger.error(
                "%s: can't be reached, so that processes of the job may be left there for a while; "
                "they end by themselves",
                other.host,
            )


def _collect(nodes: list[Node], key: str, wishes: list[int]) -> dict[str, Any]:
    """Every node's answer of a kind.

    Raises:
        TopologyError: all nodes that did not give it, each with its reason and remedy.
        Interrupted: there is a wish to stop.
    """
    answers: dict[str, Any] = {}
    errors: list[str] = []
    end = time.monotonic() + OPENING_S
    for node in nodes:
        try:
            while node.host not in answers:
                if wishes:
                    raise Interrupted
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


def greet(nodes: list[Node], wishes: list[int]) -> dict[str, dict[str, Any]]:
    """How every node sees every other one; `wishes` fills when the user wants to stop."""
    hosts = [node.host for node in nodes]
    for node in nodes:
        with suppress(ChannelClosed):  # told below, with the reason
            node.channel.send(hello={"name": node.host, "hosts": hosts})
    answers = _collect(nodes, "hello", wishes)
    ways = {host: answers[host]["ways"] for host in hosts}
    errors = [
        f"on {host}: {way['error']}; every node must resolve every other's name"
        for host in hosts
        for way in ways[host].values()
        if "error" in way
    ]
    errors += [
        f"on {host}: {other} resolves to {way['address']}, which leads back to {host}; "
        "correct /etc/hosts there, or give one machine one line of the hostfile"
        for host in hosts
        for other, way in ways[host].items()
        if host != other and "error" not in way
        # The way to an own address begins at that address.
        if way["address"] == way["source"] or way["address"].startswith("127.")
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


def prepare(nodes: list[Node], job: JobFile, port: int, wishes: list[int]) -> None:
    """The job file on every node, before any launcher starts: pdsh reaches all of them at once."""
    for number, node in enumerate(nodes):
        node.job = asdict(job)
        with suppress(ChannelClosed):  # told below, with the reason
            node.channel.send(job=node.job, port=port if number == 0 else None)
    _collect(nodes, "ready", wishes)
