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

import json
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
from recipes.cluster.jobfile import JobFile, from_json
from recipes.cluster.launchers import launcher_environment
from recipes.cluster.rank import die_with

POLL_S = 0.2
TAIL_BYTES = 4000  # of a log, told with a failure


def facts(hosts: list[str]) -> dict[str, Any]:
    """What this node sees of the others: addresses, and the way to them.

    `source` is the own address on the way to a host, `interface` the interface that bears it.
    """
    names = {
        address.address: name
        for name, many in psutil.net_if_addrs().items()
        for address in many
        if address.family == socket.AF_INET
    }
    ways: dict[str, Any] = {}
    for host in hosts:
        try:
            address = socket.gethostbyname(host)
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((address, 9))  # sends nothing; it only asks for the route
                source = probe.getsockname()[0]
        except OSError as error:
            ways[host] = {"error": f"{host}: {error.strerror or error}"}
            continue
        ways[host] = {"address": address, "source": source, "interface": names.get(source)}
    return {"hostname": socket.gethostname(), "ways": ways}


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
            name = psutil.Process(connection.pid).name() if connection.pid else "another user"
            reason = f"{name}, pid {connection.pid or '?'}"
    return f"port {port} on {socket.gethostname()} is in use ({reason})"


def tail_of(log: Path) -> str:
    """The last lines of a log."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


class Watch:
    """The ranks of this node, by the notes in the job's folder."""

    def __init__(self, job: JobFile, name: str, markers: Path) -> None:
        self.job, self.name, self.markers = job, name, markers
        self.started: dict[int, dict[str, Any]] = {}
        self.ended: dict[int, dict[str, Any]] = {}
        self._signalled: set[int] = set()
        self._read = 0  # bytes of rank 0's log that were sent

    def news(self) -> list[dict[str, Any]]:
        """What happened since the last call, as events."""
        events = []
        for rank in self.job.ranks_of(self.name):
            if rank in self.ended:
                continue
            try:
                record = json.loads((self.markers / f"rank-{rank}.json").read_text())
            except OSError:
                continue
            if rank not in self.started:
                self.started[rank] = record
                events.append({"started": record})
            if record["code"] is not None:
                self.ended[rank] = record
                tail = tail_of(Path(record["log"])) if record["code"] else ""
                events.append({"ended": record | {"status": self._status(rank), "tail": tail}})
        text = self._text()
        return [{"text": text}, *events] if text else events

    def _status(self, rank: int) -> dict[str, Any] | None:
        try:
            return json.loads((self.markers / f"rank-{rank}.status").read_text())
        except OSError:
            return None

    def _text(self) -> str:
        """What rank 0 wrote to its log since the last call, whole lines."""
        if 0 not in self.started:
            return ""
        with Path(self.started[0]["log"]).open("rb") as log:
            log.seek(self._read)
            chunk = log.read()
        if 0 not in self.ended:
            chunk = chunk[: chunk.rfind(b"\n") + 1]
        self._read += len(chunk)
        return chunk.decode(errors="replace")

    def signal_ranks(self) -> None:
        """Ask this node's ranks to save and end, each once; those that start later too."""
        for rank in self.started.keys() - self.ended.keys() - self._signalled:
            self._signalled.add(rank)
            with suppress(ProcessLookupError):
                os.kill(self.started[rank]["pid"], signal.SIGTERM)

    def processes(self) -> list[psutil.Process]:
        """Every process of this job on this node, whoever started it."""
        mine, found = os.getpid(), []
        for process in psutil.process_iter():
            try:
                if process.pid == mine or process.uids().real != os.getuid():
                    continue
                named = any(str(self.job.folder) in word for word in process.cmdline())
                if named or process.environ().get("OCTET_JOB") == self.job.job:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def kill(self) -> list[str]:
        """End them all; returns what would not end."""
        for wait_s in (1.0, 2.0, 4.0):  # a process may be starting another one meanwhile
            victims = self.processes()
            for process in victims:
                with suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(victims, timeout=wait_s)
        return [f"pid {p.pid} {p.name()}" for p in self.processes()]


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
            self.channel.send(hello=facts(order["hello"]["hosts"]))
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
        faults = []
        if order["port"] is not None and (used := port_in_use(order["port"])):
            faults.append(f"{used}; end that, or choose another one with --port")
        if not Path(job.working_dir).is_dir():
            faults.append(f"{self.name} has no {job.working_dir}; run octet sync, or share it")
        try:
            Path(job.logs).mkdir(parents=True, exist_ok=True)
            self.watch = Watch(job, self.name, job.write(self.name))
        except (OSError, ValueError) as error:
            faults.append(f"{self.name}: {error}")
        self.channel.send(**({"refused": faults} if faults else {"ready": True}))

    def _go(self, order: dict[str, Any]) -> None:
        assert self.watch is not None
        self.limits = order["limits"]
        if order["go"] is None:
            return
        job, own_pid = self.watch.job, os.getpid()
        accelerator = {k: job.env[k] for k in ("DS_ACCELERATOR",) if k in job.env}
        env = (
            launcher_environment(os.environ)
            | accelerator
            | {
                "DS_ENV_FILE": str(job.folder / "deepspeed_env"),  # no other file is merged then
                "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(self.limits["grace_s"])),
            }
        )
        with self._launcher_log().open("ab") as log:
            self.launcher = subprocess.Popen(
                order["go"],
                cwd=job.folder,  # Accelerate writes a file into it, which names the environment
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=lambda: die_with(own_pid),
            )

    def _launcher_log(self) -> Path:
        assert self.watch is not None
        return Path(self.watch.job.logs) / f"launcher.{self.name}.log"

    def _kill(self) -> list[str]:
        left = self.watch.kill() if self.watch is not None else []
        if self.launcher is not None:
            self.launcher.wait()
        if self.watch is not None:
            self.watch.news()
            self.watch.job.remove()
        return left

    def _end_alone(self) -> None:
        """Nobody gives orders any more: the ranks save, then everything ends."""
        if self.watch is not None:
            end = time.monotonic() + self.limits["grace_s"]
            self.watch.news()
            while time.monotonic() < end and self.watch.started.keys() - self.watch.ended.keys():
                self.watch.signal_ranks()
                time.sleep(POLL_S)
                self.watch.news()
            self._kill()


def main() -> int:
    """Serve one job over stdin and stdout."""
    # Orders come over the channel; ssh and terminals must not end the agent before its ranks. (A
    # handler, since the launchers would inherit SIG_IGN.)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    Agent(Channel(sys.stdin.buffer, sys.stdout.buffer)).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
