"""Two or more hosts for a test: the product's own rehearsal, shared by the tests of a module.

    pytestmark = rehearsing.rootful()

    @pytest.fixture(scope="module")
    def cluster(tmp_path_factory):
        folder = tmp_path_factory.mktemp("cluster")
        with rehearsing.rehearsal({"worker-0": 2, "worker-1": 2}, folder) as cluster:
            yield cluster

    def test_names(cluster):
        assert cluster.run(["ssh", "worker-1", "hostname"]).text == "worker-1\n"

The hosts share the file system, /tmp included, but for the folders in `local`.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import launching
import psutil
import pytest

from recipes.cluster.hostfile import Host, read_hostfile
from recipes.rehearsal import namespaces, node, plan

ROOT = launching.ROOT
REQUIRED = "OCTET_ROOTFUL"  # set to 1 where nothing may be skipped: a lack is a failure then


def rootful() -> list[pytest.MarkDecorator]:
    """Marks for tests that need a rehearsal; they skip with the reason where none is possible."""
    marks = [pytest.mark.rootful]
    if os.environ.get(REQUIRED) != "1":
        reason = _refusal()
        marks.append(pytest.mark.skipif(bool(reason), reason=reason or "possible here"))
    return marks


@cache
def _refusal() -> str:
    lacking = plan.missing(plan.search_path(), user=os.geteuid())
    if lacking:
        return "; ".join(lacking)
    tried = subprocess.run([*node.UNSHARE, "true"], capture_output=True, text=True)
    return tried.stderr.strip()


def shell_env(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a user's shell with the virtual environment active."""
    foreign = ("PYTEST", "ACCELERATE_", "DS_", "TORCHELASTIC_", "OCTET_", "COV_", "HYPOTHESIS_")
    foreign += ("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "GROUP_", "ROLE_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    path = env.get("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
    env |= {"PATH": f"{launching.BIN}{os.pathsep}{path}", "VIRTUAL_ENV": str(launching.BIN.parent)}
    return env | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | (extra or {})


class Started(launching.Launched):
    """A command on a host; `process` is a child of the test, its pid the outside's."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self.log = process, log
        self._file = log.open("rb")

    def interrupt(self) -> None:
        """Ctrl-C: SIGINT to the whole group of the command."""
        os.killpg(self.process.pid, signal.SIGINT)


class Cluster:
    """The hosts of a rehearsal, and what a test may do with them."""

    def __init__(
        self, hosts: Mapping[str, int], folder: Path, inside: namespaces.Rehearsal
    ) -> None:
        self.names, self.addresses, self.folder = list(hosts), inside.addresses, folder
        self.hostfile = folder / "hostfile"
        self._inside, self._runs = inside, 0
        # Namespaces are known by inode numbers, which also find what should be gone.
        self._pids = {name: os.fstat(inside.namespaces[name][0]).st_ino for name in hosts}

    def start(
        self,
        words: Sequence[str],
        log: Path | None = None,
        *,
        host: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
    ) -> Started:
        """Start a command in the background; stdout and stderr go to `log`."""
        self._runs += 1
        log = log or self.folder / f"run-{self._runs}.log"
        with log.open("wb") as output:
            process = self._inside.popen(
                [str(word) for word in words],
                host=host,
                folder=cwd,
                env=shell_env(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        return Started(process, log)

    def run(
        self,
        words: Sequence[str],
        host: str | None = None,
        env: Mapping[str, str] | None = None,
        limit_s: float = launching.TIME_LIMIT_S,
        cwd: Path = ROOT,
    ) -> launching.Ended:
        """Run a command on a host (the first by default) to its end; `code` is -n for signal n."""
        with self.start(words, host=host, env=env, cwd=cwd) as started:
            return started.wait(limit_s)

    def ok(self, *words: str, host: str | None = None) -> str:
        """The output of a command that must succeed, like `mount --bind A B`."""
        ended = self.run(words, host=host, limit_s=60)
        assert ended.code == 0, f"{words} ended with {ended.code}: {ended.text}"
        return ended.text

    def processes(self, host: str, *, system: bool = False) -> list[psutil.Process]:
        """What runs on a host (pids are the outside's), without its init and sshd."""
        found = _processes_in({self._pids[host]})
        return found if system else [p for p in found if not _of_the_system(p)]

    def sent_bytes(self, host: str) -> int:
        """What the host's link has sent, headers included."""
        return int(self.ok("cat", "/sys/class/net/eth0/statistics/tx_bytes", host=host))

    def power_off(self, host: str) -> None:
        """The plug is pulled: no process of the host ends in order, no peer hears of it."""
        self.ok("ip", "link", "set", "eth0", "down", host=host)
        for process in self.processes(host, system=True):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        launching.wait_for(lambda: not self.processes(host, system=True), 20, f"the end of {host}")

    def left(self) -> list[psutil.Process]:
        """Every process on any host."""
        return _processes_in(set(self._pids.values()))


def _processes_in(namespaces_: set[int]) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            inside = Path(f"/proc/{process.pid}/ns/pid").stat().st_ino in namespaces_
            if inside and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _of_the_system(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        words = process.cmdline()
        return not words or "sshd" in words[0] or node.__file__ in words
    return True  # it has ended meanwhile


@contextmanager
def rehearsal(
    hosts: Mapping[str, int],
    folder: Path,
    bandwidth: str | None = None,
    local: Sequence[str] = (),
) -> Iterator[Cluster]:
    """Hosts with these slots, their hostfile in `folder`; nothing of them is left afterwards."""
    lines = [f"{name} slots={slots}\n" for name, slots in hosts.items()]
    (folder / "hostfile").write_text("".join(lines), encoding="utf-8")
    read: tuple[Host, ...] = read_hostfile(folder / "hostfile")
    with namespaces.Rehearsal(read, bandwidth=bandwidth, local=local) as inside:
        cluster = Cluster(hosts, folder, inside)
        startup = Path.home() / ".bashrc"
        for host in hosts if startup.is_file() else ():
            # What a developer's shell does at its start (pyenv locks a folder) is none of ours.
            cluster.ok("mount", "--bind", "/dev/null", str(startup), host=host)
        yield cluster
    assert not cluster.left(), "processes of the rehearsal are left"
