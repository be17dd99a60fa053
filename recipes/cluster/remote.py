"""Reaching the other machines: a module of ours on a host, by ssh, or directly where it is here.

Python on every host runs from the same path as here, in the same checkout: `octet sync` brings
both over.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(sys.executable)  # not resolved: the venv's own, whose folder holds the launchers
# Without them a host that is switched off, or a password prompt, would hold up everything. (And a
# connection that ssh keeps open for later calls would keep our pipe to its stderr open.)
SSH_OPTIONS = (
    *("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ControlMaster=no"),
    *("-o", "ServerAliveInterval=5"),
)
SILENCE_S = 15.0  # after which ssh gives up
# What ssh and the remote shell say, and what it means; the first that fits is told.
_REASONS = (
    ("could not resolve hostname", "its name does not resolve; add it to /etc/hosts or DNS"),
    ("name or service not known", "its name does not resolve; add it to /etc/hosts or DNS"),
    ("connection refused", "nothing listens there; start sshd on it"),
    ("no route to host", "no route leads there; is it switched on, is the address right?"),
    ("timed out", "it does not answer; is it switched on, does a firewall drop port 22?"),
    ("permission denied (", "ssh asks for a password; run ssh-copy-id {host}"),
    ("host key verification failed", "its host key is not known; run ssh {host} once"),
    (f"cd: {ROOT}", f"there is no checkout at {ROOT} there; run octet sync"),
    (f"{ROOT}: no such file", f"there is no checkout at {ROOT} there; run octet sync"),
    (
        f"{PYTHON}: permission denied",
        f"this user may not execute {PYTHON} there (it leads to {PYTHON.resolve()}); make the "
        "environment from a Python that every user can read",
    ),
    (str(PYTHON).lower(), f"there is no interpreter at {PYTHON} there; run octet sync"),
    ("no module named", "its environment is not this one's; run octet sync"),
)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a host answered; `error` is empty where it did, else the reason with its remedy."""

    host: str
    value: Any | None
    error: str


def is_this_machine(host: str) -> bool:
    """Whether a host name leads back here."""
    if host in ("localhost", socket.gethostname()):
        return True
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    own = {a.address.split("%")[0] for many in psutil.net_if_addrs().values() for a in many}
    return bool(found & own)


def ssh_words(host: str, command: str, silence_s: float = SILENCE_S) -> list[str]:
    """The ssh call that runs a shell command on a host, without asking anything."""
    silence = ("-o", f"ServerAliveCountMax={math.ceil(silence_s / 5)}")
    return ["ssh", *SSH_OPTIONS, *silence, host, command]


def node_command(module: str) -> str:
    """The shell command that runs a module of this package from the checkout.

    The empty line ends what a login script may have printed without ending the line.
    """
    return f"cd {shlex.quote(str(ROOT))} && echo && exec {shlex.quote(str(PYTHON))} -m {module}"


def start_module(
    host: str, module: str, *, always_ssh: bool = False, silence_s: float = SILENCE_S
) -> subprocess.Popen[bytes]:
    """Start a module on a host, with pipes.

    A session of its own keeps a terminal's Ctrl-C from it: the caller decides what that means.
    """
    words, kept = ["sh", "-c", node_command(module)], set[signal.Signals]()
    if always_ssh or not is_this_machine(host):
        words = ssh_words(host, node_command(module), silence_s)
        kept = {signal.SIGUSR1}  # schedulers may send it to every process, and ssh would end
    before = signal.pthread_sigmask(signal.SIG_BLOCK, kept)  # the child begins with it
    try:
        return subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env=os.environ | {"LC_ALL": "C"},  # the reasons are matched by their English words
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def explain(host: str, stderr: str, code: int | None) -> str:
    """Why a host did not answer, with the remedy."""
    said = " ".join(stderr.split())
    for words, meaning in _REASONS:
        if words.lower() in said.lower():
            return f"{host}: {meaning.format(host=host)}"
    return f"{host}: exit code {code}: {said[-400:] or 'no message'}"


def ask(
    hosts: Sequence[str],
    module: str,
    requests: dict[str, Any],
    limit_s: float,
    always_ssh: bool = False,
) -> dict[str, Answer]:
    """Run a module on every host at once: JSON on its stdin, JSON as the last line it prints.

    Args:
        requests: each host's request, JSON-able.
        limit_s: seconds that a host may take.
        always_ssh: go through ssh even to this machine, as pdsh does.
    """

    def one(host: str) -> Answer:
        try:
            process = start_module(host, module, always_ssh=always_ssh)
        except OSError as error:
            return Answer(host=host, value=None, error=f"{host}: {error}")
        try:
            out, err = process.communicate(json.dumps(requests[host]).encode(), timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return Answer(host=host, value=None, error=f"{host}: no answer within {limit_s:.0f} s")
        lines = out.decode(errors="replace").strip().splitlines()
        try:
            return Answer(host=host, value=json.loads(lines[-1]), error="")
        except (IndexError, ValueError):
            reason = explain(host, err.decode(errors="replace"), process.returncode)
            return Answer(host=host, value=None, error=reason)

    with ThreadPoolExecutor(max_workers=max(1, len(hosts))) as pool:
        return dict(zip(hosts, pool.map(one, hosts), strict=True))
