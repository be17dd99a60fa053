"""The agent: supervision's hand on each node, as long as its channel to `octet launch` is open.

It talks JSON, a message a line: orders on stdin, events on stdout. It starts the node's launcher,
watches the ranks by the notes that `rank.py` leaves, signals ranks by pid, never the launcher, and
ends every process of this job and no other. When the channel closes or falls silent it lets the
ranks save, then ends everything by itself.

    {"hello": {"name": "worker-0", "hosts": [...]}}       -> {"hello": {...}}
    {"job": {...}, "port": 29500 or null}                 -> {"ready": true} or {"refused": [why]}
    {"go": ["accelerate", ...] or null, "limits": {...}}  -> {"started"}, {"text"}, {"ended"},
                                                             {"launcher": its exit code, "tail"}
    {"stop": true} (the ranks save and end), {"kill": true} (everything ends)
                                                          -> {"bye": [what would not end]}
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from recipes.cluster.channel import Channel, ChannelClosed
from recipes.cluster.jobfile import from_json
from recipes.cluster.launchers import launcher_environment
from recipes.cluster.rank import die_with
from recipes.cluster.watch import Watch, tail_of
from recipes.cluster.ways import route

POLL_S = 0.2


def ways_to(hosts: list[str]) -> dict[str, Any]:
    """How this node reaches the others: `address`, own `source` address and `interface`."""
    ways: dict[str, Any] = {}
    for host in hosts:
        try:
            address = socket.gethostbyname(host)
        except OSError as error:
            ways[host] = {"error": f"{host}: {error.strerror or error}"}
            continue
        way = route(address)
        ways[host] = (
            {"error": f"{host}: {way['error']}"} if "error" in way else {"address": address} | way
        )
    return ways


def port_in_use(port: int) -> str:
    """Who listens on a port of this machine; empty when it is free."""
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("", port))
        except OSError as error:
            reason = error.strerror
        else:
            return ""
    for connection in psutil.net_connections("tcp"):
        if connection.laddr.port == port and connection.status == psutil.CONN_LISTEN:
            reason = "another user, pid ?"
            with suppress(psutil.Error):  # it may end meanwhile
                if connection.pid:
                    reason = f"{psutil.Process(connection.pid).name()}, pid {connection.pid}"
    return f"port {port} on {socket.gethostname()} is in use ({reason})"


def lock(path: Path) -> None:
    """Lock a file or folder as long as this process lives, where its file system can.

    Raises:
        BlockingIOError: another process has locked it.
    """
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if isinstance(error, BlockingIOError):
            raise


def _begin(parent: int) -> None:
    """In a launcher, before it is one. SIGUSR1, which Slurm may send to every process, is its end,
    and with it the ranks'; these have handlers of their own."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    die_with(parent)


class Agent:
    """One job on one node."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.launcher: subprocess.Popen[bytes] | None = None
        self.watch: Watch | None = None
        self.stopping = False
        self.limits: dict[str, float] = {"silence_s": 60.0, "grace_s": 0.0}

    def run(self) -> None:
        """Serve until the job is over or the head is gone."""
        try:
            while self._serve():
                pass
        except ChannelClosed:
            self._end_alone()

    def _serve(self) -> bool:
        """Handle one order and tell what is new; False when the job is over here."""
        order = self.channel.receive(POLL_S)
        if time.monotonic() - self.channel.heard > self.limits["silence_s"]:
            raise ChannelClosed("silence")
        if self.watch is not None:
            for event in self.watch.news():
                self.channel.send(**event)
            if self.stopping:
                self.watch.signal_ranks()
        if self.launcher is not None and (code := self.launcher.poll()) is not None:
            self.launcher = None
            self.channel.send(launcher=code, tail=tail_of(self._launcher_log()))
        if order is None:
            return True
        if "hello" in order:
            self.name = order["hello"]["name"]
            self.channel.send(hello={"ways": ways_to(order["hello"]["hosts"])})
        elif "job" in order:
            self._prepare(order)
        elif "go" in order:
            self._go(order)
        elif "stop" in order:
            self.stopping = True
        elif "kill" in order:
            left = self._kill()
            self.channel.send(bye=left)
            return False
        return True

    def _prepare(self, order: dict[str, Any]) -> None:
        job = from_json(order["job"])
        first, logs = order["port"] is not None, Path(job.logs)
        faults = []
        if first and (used := port_in_use(order["port"])):
            faults.append(f"{used}; end that, or choose another one with --port")
        if not Path(job.working_dir).is_dir():
            faults.append(f"{self.name} has no {job.working_dir}; run octet sync, or share it")
        try:
            logs.mkdir(parents=True, exist_ok=True)
            if first:
                lock(logs.parent / "lock")
        except BlockingIOError:
            faults.append(
                f"another job is running that writes to {logs.parent}; end that, or choose another "
                "folder (output_dir=)"
            )
        except OSError as error:
            faults.append(f"{self.name}: {error}")
        try:
            self.watch = Watch(job, self.name, job.write(self.name))
            # The ranks end with this lock; and systemd leaves what is locked when it tidies /tmp.
            with suppress(BlockingIOError):  # by an agent before this one, or its ranks
                lock(self.watch.markers)
        except (OSError, ValueError) as error:
            faults.append(f"{self.name}: {error}")
        self.channel.send(**({"refused": faults} if faults else {"ready": True}))

    def _go(self, order: dict[str, Any]) -> None:
        assert self.watch is not None
        self.limits = order["limits"]
        if order["go"] is None:
            return
        job, own_pid = self.watch.job, os.getpid()
        env = launcher_environment(os.environ)
        env |= {k: job.env[k] for k in ("DS_ACCELERATOR",) if k in job.env}
        env |= {"OCTET_TMPDIR": env["TMPDIR"]} if "TMPDIR" in env else {}
        env |= {
            "DS_ENV_FILE": str(job.folder / "deepspeed_env"),  # no other file is merged then
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(self.limits["grace_s"])),
            "TMPDIR": str(job.folder),  # torch's launcher leaves folders behind
        }
        with self._launcher_log().open("ab") as log:
            self.launcher = subprocess.Popen(
                order["go"],
                cwd=job.folder,  # Accelerate writes a file into it, which names the environment
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=lambda: _begin(own_pid),
            )

    def _launcher_log(self) -> Path:
        assert self.watch is not None
        return Path(self.watch.job.logs) / f"launcher.{self.name}.log"

    def _kill(self) -> list[str]:
        if self.watch is None:
            return []
        left = self.watch.kill()
        self.watch.job.remove(self.name)
        return left

    def _end_alone(self) -> None:
        """Nobody gives orders any more: the ranks save, then everything ends."""
        if self.watch is not None:
            end = time.monotonic() + self.limits["grace_s"]
            self.watch.news()
            while time.monotonic() < end and self.watch.saving():
                self.watch.signal_ranks()
                time.sleep(POLL_S)
                self.watch.news()
            self._kill()


def main() -> int:
    """Serve one job over stdin and stdout."""
    # Orders come over the channel; ssh and terminals must not end the agent before its ranks. (A
    # handler, since the launchers would inherit SIG_IGN.)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)
    Agent(Channel(sys.stdin.buffer, sys.stdout.buffer)).run()
    return 0


if __name__ == "__main__":
    code = main()
    os._exit(code)  # in order, Python would wait for the thread that reads stdin, and abort
