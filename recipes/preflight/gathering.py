"""The facts of all nodes, gathered in three rounds of one short ssh call to each."""

from __future__ import annotations

import logging
import random
import secrets
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipes.cluster import remote
from recipes.config import Run

logger = logging.getLogger(__name__)

MODULE = "recipes.preflight.nodefacts"
LIMIT_S = 60.0  # of a round; a folder on a file server that is away answers never
MEET_S = 6.0  # ssh and interpreters start within it, also on many nodes
HIGH_PORTS = 2  # for each node: gloo and NCCL listen on ephemeral ports
# All that the nodes have to know of the job's environment.
TOLD = ("TORCH_EXTENSIONS_DIR", "HF_ENDPOINT", "HF_HUB_OFFLINE", "https_proxy", "HTTPS_PROXY")


@dataclass(frozen=True, kw_only=True)
class Question:
    """What the nodes are asked about."""

    hosts: tuple[str, ...]
    port: int
    working_dir: Path
    files: tuple[Path, ...] = ()  # that must be equal everywhere
    environ: Mapping[str, str] = field(default_factory=dict)
    run: Run | None = None
    always_ssh: bool = False  # to this machine too: pdsh goes that way
    id: str = field(default_factory=lambda: secrets.token_hex(6))


def gather(question: Question) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Ask every node; a host that doesn't answer holds up nobody.

    Returns:
        Facts by host, `{"error": why}` for a host that did not answer; and the model's parameters
        as `{"count": N}`, or `{"error": why}` if it can't be built; empty if nobody could count.
    """
    with ThreadPoolExecutor(max_workers=1) as aside:
        counting = aside.submit(_count, question) if question.run else None
        facts = _first_round(question)
        there = [host for host, found in facts.items() if "error" not in found]
        try:
            if len(there) > 1:
                for host, answer in _meet(question, facts, there).items():
                    facts[host]["meet"] = answer
        finally:
            _leave(question, facts, there)
        return facts, counting.result() if counting else {}


def _count(question: Question) -> dict[str, Any]:
    """The model's parameters; importing transformers takes longer than all other checks."""
    assert question.run is not None
    first, run = question.hosts[0], question.run
    request = {"round": "parameters", "seq_len": run.batch.seq_len}
    request |= {"model": run.model.model_dump(mode="json")}
    answer = remote.ask([first], MODULE, {first: request}, LIMIT_S)[first]
    return answer.value or {}


def _first_round(question: Question) -> dict[str, dict[str, Any]]:
    common: dict[str, Any] = {"round": "facts", "hosts": question.hosts, "id": question.id}
    common["files"] = [str(path) for path in question.files]
    common["environ"] = {k: v for k, v in question.environ.items() if k in TOLD}
    if question.run:
        common |= {"folder": str(question.run.folder), "data": _data(question)}
    requests = {host: common | {"me": host} for host in question.hosts}
    # The first host starts the launch, and holds the port.
    requests[question.hosts[0]] |= {
        "port": question.port,
        "working_dir": str(question.working_dir),
    }
    before = time.time()
    answers = remote.ask(question.hosts, MODULE, requests, LIMIT_S, question.always_ssh)
    after = time.time()
    facts: dict[str, dict[str, Any]] = {}
    for host, answer in answers.items():
        if answer.value is None:
            facts[host] = {"error": answer.error}
            continue
        ahead, uncertainty = answer.value["time"] - (before + after) / 2, (after - before) / 2
        clock = {"ahead_s": ahead, "uncertainty_s": uncertainty}  # of the clock here
        facts[host] = answer.value | {"clock": clock}
    return facts


def _data(question: Question) -> dict[str, Any]:
    """The data section with absolute paths: the nodes' working directory is the checkout."""
    assert question.run is not None
    data = question.run.data.model_dump(mode="json")

    def absolute(path: str) -> str:
        return path if "://" in path else str(question.working_dir / path)

    if data["kind"] == "saved":
        data["path"] = absolute(data["path"])
    return data | {"files": [absolute(path) for path in data["files"]]}


def _meet(
    question: Question, facts: Mapping[str, Mapping[str, Any]], there: Sequence[str]
) -> dict[str, Any]:
    """Every node listens and connects to all others."""
    ranges = [facts[host]["network"]["ephemeral_ports"] for host in there]
    low, high = max(r[0] for r in ranges), min(r[1] for r in ranges)
    choice = random.SystemRandom()
    ports = {host: choice.sample(range(low, high), HIGH_PORTS) for host in there}
    first = question.hosts[0]
    if first in there and not facts[first]["port"].get("error"):
        ports[first].append(question.port)
    requests = {
        host: {
            "round": "meet",
            "id": question.id,
            "me": host,
            "listen": ports[host],
            "peers": {other: ports[other] for other in there if other != host},
            "limit_s": MEET_S,
        }
        for host in there
    }
    if question.run:
        for request in requests.values():
            request |= {"folder": str(question.run.folder), "tokens": there}
    answers = remote.ask(there, MODULE, requests, LIMIT_S)
    return {host: answer.value or {"error": answer.error} for host, answer in answers.items()}


def _leave(
    question: Question, facts: Mapping[str, Mapping[str, Any]], there: Sequence[str]
) -> None:
    """Take the tokens away, and the folders that were made for them."""
    guests = [host for host in there if "folder" in facts[host]]

    def made(host: str) -> list[str]:
        # The last to leave a shared folder removes it, whoever made it.
        sharing = {host, *(facts[host].get("meet", {}).get("seen") or [])}
        paths = {path for other in sharing for path in facts[other]["folder"]["made"]}
        return sorted(paths, key=len)

    requests = {
        host: {
            "round": "leave",
            "id": question.id,
            "me": host,
            "folder": facts[host]["folder"]["path"],
            "made": made(host),
        }
        for host in guests
    }
    for host, answer in remote.ask(guests, MODULE, requests, LIMIT_S).items():
        if answer.error:
            logger.warning("%s; a file .preflight-%s-* may be left there", host, question.id)
