"""Checkout and environment on every node: brought over by rsync, or found to be shared already.

octet sync --hostfile hostfile
octet sync --hostfile hostfile --dry-run    # says what it finds, prints the rsync commands

What travels: the files that git knows or would add (so no outputs and no caches), `.git` (every
node must know the commit that it runs), and the virtual environment, byte for byte to the same
path, since nodes often reach no package index; it needs the same Python below it on each node.
What is deleted: files that an earlier sync brought and that are gone here. A history with commits
of its own and an environment that was made on the node are left alone, and told.
"""

from __future__ import annotations

import logging
import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from recipes.cluster.hostfile import Host
from recipes.cluster.remote import PYTHON, ROOT, explain, is_this_machine, ssh_words
from recipes.cluster.sync_survey import (
    LIST_FILES,
    MARK,
    Plan,
    Source,
    SyncFault,
    differing_packages,
    look,
    over_ssh,
    packages,
    token_in,
)

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


def _rsync(host: str, folder: Path, *options: str) -> list[str]:
    shell = shlex.join(ssh_words(host, "")[:-2])
    return ["rsync", "-as", *options, "-e", shell, f"{folder}/", f"{host}:{folder}/"]


def _checkout_commands(source: Source, host: str) -> list[list[str]]:
    history = ["--delete", f"--exclude=/{MARK}", "--exclude=*.lock"]
    return [
        _rsync(host, source.root / ".git", *history),
        _rsync(host, source.root, "--files-from=-", "--from0", "--ignore-missing-args"),
    ]


def _environment_command(source: Source, plan: Plan) -> list[str]:
    return _rsync(plan.host, source.prefix, "--delete", f"--exclude=/{MARK}")


def _do(host: str, words: list[str], text: str = "") -> None:
    done = subprocess.run(words, input=text, capture_output=True, text=True, errors="replace")
    if done.returncode != 0:
        raise SyncFault(f"{explain(host, done.stderr, done.returncode)} ({shlex.join(words)})")


def _bring(source: Source, plan: Plan) -> str:
    """Carry a plan out; one line on what was done."""
    if plan.checkout or plan.environment:
        logger.info("%s: copying", plan.host)
    host, root, did = plan.host, shlex.quote(str(source.root)), [plan.told] * bool(plan.told)
    if plan.checkout:
        mark = shlex.quote(f"{source.root}/.git/{MARK}")
        files = source.files()
        before = over_ssh(host, f"mkdir -p {root}/.git && if test -e {mark}; then cat {mark}; fi")
        history, tree = _checkout_commands(source, host)
        _do(host, history)
        _do(host, tree, "\0".join(files))
        stale = set(before.split("\0")) - set(files) - {""}
        if stale:
            over_ssh(host, f"cd {root} && xargs -0 rm -f --", "\0".join(sorted(stale)))
        over_ssh(host, f"cat > {mark}", "\0".join(files))
        did.append(f"checkout, {len(files)} files" + (f", {len(stale)} gone" if stale else ""))
    if plan.environment:
        prefix = shlex.quote(str(source.prefix))
        over_ssh(host, f"mkdir -p {prefix} && touch {prefix}/{MARK}")
        _do(host, _environment_command(source, plan))
        differing = differing_packages(packages(source.python), packages(source.python, host))
        if differing:
            raise SyncFault(
                f"{host}: its environment still differs: {differing}; is its disk full?"
            )
        did.append("environment")
    return f"{host}: {'; '.join(did) or 'shared folder, nothing to do'}"


def _told(source: Source, plan: Plan) -> str:
    """A plan as commands that can be pasted."""
    parts = ["checkout"] * plan.checkout + ["environment"] * plan.environment
    parts += [plan.told] * bool(plan.told)
    lines = [f"# {plan.host}: {', '.join(parts) or 'shared folder, nothing to do'}"]
    if plan.checkout:
        history, tree = _checkout_commands(source, plan.host)
        lines += [_make(plan.host, source.root / ".git"), shlex.join(history)]
        lines += [f"cd {shlex.quote(str(source.root))} && {LIST_FILES} | {shlex.join(tree)}"]
    if plan.environment:
        lines += [_make(plan.host, source.prefix), shlex.join(_environment_command(source, plan))]
    return "\n".join(lines)


def _make(host: str, folder: Path) -> str:
    return shlex.join(ssh_words(host, f"mkdir -p {shlex.quote(str(folder))}"))


def sync(
    hosts: Sequence[Host], *, dry_run: bool = False, root: Path = ROOT, python: Path = PYTHON
) -> str:
    """Bring the checkout and the environment to every other host; says what was done on each.

    Args:
        dry_run: only look; the text holds the commands instead.

    Raises:
        ValueError: the failures of all hosts together, each with its remedy. The hosts that can be
            synced have been.
    """
    source = Source(root=root, python=python)
    lacking = [tool for tool in ("rsync", "git") if not shutil.which(tool)]
    if lacking:
        tools = " ".join(lacking)
        raise ValueError(f"octet sync: no {tools} here; install with: apt-get install -y {tools}")
    others = [host.name for host in hosts if not is_this_machine(host.name)]
    if not others:
        return "no other host in the hostfile, nothing to do\n"
    with token_in(source) as token:  # gone again before anything is copied
        plans, faults = _on_all(others, lambda host: look(source, host, token))
    act = _told if dry_run else _bring
    ends, more = _on_all(list(plans), lambda host: act(source, plans[host]))
    faults |= more
    if faults:
        told = [f"  {faults[host]}" for host in others if host in faults]
        told += [] if dry_run else [f"  done: {text}" for text in ends.values()]
        raise ValueError("\n".join(["octet sync failed:", *told]))
    return "".join(f"{text}\n" for text in ends.values())


def _on_all(
    hosts: Sequence[str], act: Callable[[str], Result]
) -> tuple[dict[str, Result], dict[str, str]]:
    """Results and faults by host, of something done on all of them at once."""
    results, faults = {}, {}
    with ThreadPoolExecutor(max_workers=8) as pool:
        for host, running in [(host, pool.submit(act, host)) for host in hosts]:
            try:
                results[host] = running.result()
            except SyncFault as fault:
                faults[host] = str(fault)
    return results, faults
