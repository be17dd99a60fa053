"""What `octet sync` has to bring to a host: one look at it, which changes nothing there."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from recipes.cluster.remote import explain, ssh_words

MARK = "octet-synced"  # in .git the files of the last sync, in an environment: it came from one
LIST_FILES = "git ls-files -z --cached --others --exclude-standard"
# What compiled packages depend on; smaller steps of Python's version don't matter to them.
ABI = "import sys, platform; print('abi', sys.implementation.cache_tag, platform.machine())"
PACKAGES = (
    "import importlib.metadata as m, json; "
    "print(json.dumps({d.metadata['Name']: d.version for d in m.distributions()}))"
)
SURVEY = """
test -e {root}/{token} && echo root-shared
test -e {prefix}/{token} && echo env-shared
rsync --version >/dev/null 2>&1 && echo rsync
test -e {prefix}/pyvenv.cfg && echo env-there
test -e {prefix}/{mark} && echo env-ours
if test -e {root}/.git && cd {root}; then
    git -c safe.directory='*' for-each-ref --format='ref %(objectname)'
    git -c safe.directory='*' rev-parse --verify --quiet HEAD | sed 's/^/ref /'
fi
test -x {base} && {base} -c {abi}
exit 0
"""


class SyncFault(RuntimeError):
    """Why one host can't be synced, with its remedy."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """What is brought over: a checkout, and the environment that a Python belongs to."""

    root: Path
    python: Path

    @property
    def prefix(self) -> Path:
        """The environment's folder."""
        return self.python.parent.parent

    @property
    def base(self) -> Path:
        """The interpreter that the environment was made from."""
        return self.python.resolve()

    def git(self, *words: str, text: str = "") -> str:
        """Output of git in the checkout, whoever owns it."""
        told = ["git", "-c", "safe.directory=*", *words]
        done = subprocess.run(told, cwd=self.root, input=text, capture_output=True, text=True)
        if done.returncode != 0:
            raise ValueError(f"{shlex.join(told)} in {self.root}: {done.stderr.strip()}")
        return done.stdout

    def files(self) -> list[str]:
        """What git knows or would add, and what is there."""
        named = self.git(*LIST_FILES.split()[1:]).split("\0")
        return [name for name in named if name and os.path.lexists(self.root / name)]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one host needs."""

    host: str
    checkout: bool
    environment: bool
    told: str = ""  # what else there is to say


def over_ssh(host: str, command: str, text: str = "") -> str:
    """Output of a shell command on a host."""
    done = subprocess.run(
        ssh_words(host, command), input=text, capture_output=True, text=True, errors="replace"
    )
    if done.returncode != 0:
        raise SyncFault(explain(host, done.stderr, done.returncode))
    return done.stdout


def packages(python: Path, host: str | None = None) -> dict[str, str]:
    """Versions of what a Python has, here or on a host."""
    words = [str(python), "-I", "-c", PACKAGES]  # -I: not what lies in the working directory
    if host:
        said = over_ssh(host, shlex.join(words))
    else:
        said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    found: dict[str, str] = json.loads(said.splitlines()[-1])
    return found


def differing_packages(here: dict[str, str], there: dict[str, str]) -> str:
    """What two environments don't have in common; empty if nothing."""
    names = sorted(n for n in here.keys() | there.keys() if here.get(n) != there.get(n))
    shown = [f"{n} {there.get(n, 'absent')} (here {here.get(n, 'absent')})" for n in names[:4]]
    return ", ".join(shown) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


@contextmanager
def token_in(source: Source) -> Iterator[str]:
    """A file in checkout and environment, by whose name a host sees whether it shares them."""
    name = f".octet-{uuid.uuid4().hex}"
    folders = {source.root, source.prefix}
    try:
        for folder in folders:
            try:
                (folder / name).touch()
            except OSError as error:
                raise ValueError(
                    f"{folder} can't be written ({error.strerror}); sync from a checkout of yours"
                ) from error
        yield name
    finally:
        for folder in folders:
            with suppress(OSError):
                (folder / name).unlink()


def look(source: Source, host: str, token: str) -> Plan:
    """What the host has and needs.

    Raises:
        SyncFault: the host can't be reached, or something there would be lost or would not work.
    """
    places = {"root": source.root, "prefix": source.prefix, "base": source.base, "abi": ABI}
    quoted = {key: shlex.quote(str(value)) for key, value in places.items()}
    lines = over_ssh(host, SURVEY.format(**quoted, token=token, mark=MARK)).splitlines()
    checkout, environment, told = "root-shared" not in lines, "env-shared" not in lines, ""
    if checkout:
        _check_history(source, host, [line[4:] for line in lines if line.startswith("ref ")])
    if environment:
        _check_interpreter(source, host, [line for line in lines if line.startswith("abi ")])
        if "env-there" in lines and "env-ours" not in lines:
            _check_own_environment(source, host)
            environment, told = False, "environment made there, same packages"
    if "rsync" not in lines and (checkout or environment):
        raise SyncFault(f"{host}: no rsync there; install with: apt-get install -y rsync")
    return Plan(host=host, checkout=checkout, environment=environment, told=told)


def _check_own_environment(source: Source, host: str) -> None:
    """An environment that was made on the host stays as it is, and must be as good as ours."""
    differing = differing_packages(packages(source.python), packages(source.python, host))
    if differing:
        raise SyncFault(
            f"{host}: its environment {source.prefix} was made there and differs: {differing}; "
            "run make .venv/run.installed there, or move it away and run octet sync again"
        )


def _check_history(source: Source, host: str, refs: list[str]) -> None:
    """Its commits must all be known here: replacing its .git then loses nothing."""
    if not (source.root / ".git").is_dir():
        raise SyncFault(
            f"{host}: it does not share {source.root}, which is no clone of its own (.git is not a "
            "folder): nodes could not tell their commit; sync from a clone"
        )
    if not refs:
        return
    known = source.git("cat-file", "--batch-check", text="\n".join(refs) + "\n").splitlines()
    unknown = [line.split()[0] for line in known if line.endswith("missing")]
    if unknown:
        raise SyncFault(
            f"{host}: its checkout at {source.root} holds commits that are not here "
            f"({unknown[0][:12]}); fetch them, or move that folder away"
        )


def _check_interpreter(source: Source, host: str, found: list[str]) -> None:
    """The same Python must lie below a copied environment."""
    if not (source.prefix / "pyvenv.cfg").is_file():
        raise SyncFault(
            f"{host}: it does not share {source.python}, which belongs to no virtual environment "
            "that could be copied; make one: make .venv/run.installed"
        )
    words = [str(source.python), "-c", ABI]
    here = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    if found != [here]:
        there = f"is {found[0][4:]}, here {here[4:]}" if found else "is not there"
        raise SyncFault(
            f"{host}: the environment's Python {source.base} {there}; install the same one, "
            "or make the environment from one that every node has: "
            "make clean && make PYTHON=/usr/bin/python3 .venv/run.installed"
        )
