"""The supervisor: one attempt at a job, from the first ssh to the last process gone.

An agent on each node (agent.py) starts the existing launchers' commands and watches the ranks. The
job is a success only if every rank left its end marker for this job's id; a launcher's own exit
code is never believed (`deepspeed` returns 0 when its child dies by a signal).
"""

from __future__ import annotations

import logging
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from recipes.cluster import nodes as cluster
from recipes.cluster.channel import BEAT_S, ChannelClosed
from recipes.cluster.jobfile import JobFile
from recipes.cluster.launchers import Start, commands, device_env, faults
from recipes.cluster.nodes import Interrupted, Node, agents
from recipes.cluster.verdict import TERMINATED, RankEnd, Report, judge

__all__ = ["Limits", "RankEnd", "Report", "supervise"]

logger = logging.getLogger(__name__)

RANK_SCRIPT = Path(__file__).with_name("rank.py")
MARKERS_S = 5.0  # from the launcher's end to the last rank's marker
POLL_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Seconds."""

    heartbeat_s: float = 20.0  # silence after which a node counts as lost; and what peers get
    grace_s: float = 600.0  # what a checkpoint may take after a stop


def supervise(
    start: Start,
    *,
    job_id: str,
    env: dict[str, str],
    logs: Path,
    working_dir: Path,
    limits: Limits = Limits(),  # noqa: B008  (frozen)
    echo: Callable[[str], None] = lambda text: None,
) -> Report:
    """Run one attempt of `start` on its hosts and watch it to its end.

    Args:
        start: what to run; `script` and `arguments` are the user's, `master` may be empty.
        job_id: of `jobfile.new_job_id`; `hostfile` in its `job_folder` will name the ranks' hosts.
        env: variables for every rank, carried by file.
        logs: folder for the logs; this attempt's go into one of its own, made on every node.
        echo: takes rank 0's output as it comes, in a thread.

    Raises:
        ValueError: the launcher can't run this start.
        TopologyError: a node can't be reached or prepared; nothing was started.
    """
    report = Report(code=0, cause="", job_id=job_id, logs=logs / job_id)
    with (
        _stop_signals() as wishes,
        _apart(echo) as told,
        agents(start, limits.heartbeat_s) as nodes,
    ):
        try:
            ways = cluster.greet(nodes, wishes)
            start = replace(start, master=start.master or cluster.master(nodes, ways))
            devices, faces = device_env(start), cluster.interfaces(nodes, ways, env)
            job = JobFile(
                job=job_id,
                hosts=tuple((host.name, host.slots) for host in start.hosts),
                slots=tuple((h.name, max(h.gpus) + 1 if h.gpus else h.slots) for h in start.hosts),
                script=str(start.script),
                arguments=start.arguments,
                env=env,
                node_env={host: devices[host] | named for host, named in faces.items()},
                working_dir=str(working_dir),
                logs=str(logs / job_id),
            )
            words = _words(start, job)
            cluster.prepare(nodes, job, start.port, wishes)
        except Interrupted:
            code = 128 + wishes[0]
            return replace(report, code=code, cause="stopped at the start", interrupted=True)
        # The agent must not give up on a head that is merely busy, nor the head on such an agent.
        told_limits = {"silence_s": limits.heartbeat_s, "grace_s": limits.grace_s}
        for node in nodes:
            with suppress(ChannelClosed):  # the watch will notice
                node.channel.send(go=words.get(node.host), limits=told_limits)
        attempt = _Attempt(nodes, job, limits, told, wishes)
        code, cause, first = attempt.watch()
    return replace(
        report, code=code, cause=cause, ends=attempt.ends, first=first, interrupted=bool(wishes)
    )


def _words(start: Start, job: JobFile) -> dict[str, list[str]]:
    """What each host must run, with rank.py in the script's place."""
    supervised = replace(
        start,
        script=RANK_SCRIPT,
        arguments=(str(job.path),),
        hostfile=job.folder / "launcher_hostfile",
    )
    if found := faults(supervised, supervised=True):
        raise ValueError("\n".join(found))
    return commands(supervised)


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Collect Ctrl-C, SIGTERM, SIGUSR1 and a closed terminal as wishes while the block runs.

    SIGUSR1 is what schedulers send ahead of a time limit, perhaps again and again: it asks for the
    checkpoint, and never for an end without one.
    """
    wishes: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if number != signal.SIGUSR1 or not wishes:
            wishes.append(number)

    numbers = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1}
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup
        numbers.remove(signal.SIGHUP)
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, note) for number in numbers} if main else {}
    try:
        yield wishes
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _apart(echo: Callable[[str], None]) -> Iterator[Callable[[str], None]]:
    """Echo in a thread: a terminal that takes no more text must not hold up the watch."""
    texts: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def work() -> None:
        for text in iter(texts.get, None):
            echo(text)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield texts.put
    finally:
        texts.put(None)
        thread.join()


class _Attempt:
    """The watch over a job that was started."""

    def __init__(
        self,
        nodes: list[Node],
        job: JobFile,
        limits: Limits,
        echo: Callable[[str], None],
        wishes: list[int],
    ) -> None:
        self.nodes, self.job, self.limits = nodes, job, limits
        self.echo, self.wishes = echo, wishes
        self.world = sum(node.slots for node in nodes)
        self.ends: dict[int, RankEnd] = {}
        self.stop_sent = 0  # how many wishes were passed on
        self.deadline = float("inf")

    def watch(self) -> tuple[int, str, RankEnd | None]:
        """Until every rank has ended or the time for it is over; returns the verdict."""
        while len(self.ends) < self.world and time.monotonic() < self.deadline:
            time.sleep(POLL_S)
            for node in self.nodes:
                self._listen(node)
            self._pass_wishes_on()
            self._notice_failures()
        return judge(self.ends, self.nodes, self.wishes[0] if self.stop_sent else 0)

    def _leave_within(self, limit_s: float) -> None:
        self.deadline = min(self.deadline, time.monotonic() + limit_s)

    def _listen(self, node: Node) -> None:
        if node.lost:
            return
        try:
            while (message := node.channel.receive(0.0)) is not None:
                self._take(node, message)
            silent = time.monotonic() - node.channel.heard
            if silent > self.limits.heartbeat_s + BEAT_S:
                node.lost = f"{node.host}: silent for {silent:.0f} s"
                node.lost_at = node.channel.heard
        except ChannelClosed:
            node.lost_at = time.monotonic()
            said = " ".join(cluster.last_words(node).split())[-400:]
            node.lost = f"{node.host}: connection lost ({said or 'closed'})"

    def _take(self, node: Node, message: dict[str, Any]) -> None:
        if "text" in message:
            self.echo(message["text"])
        elif "started" in message:
            node.started.add(message["started"]["rank"])
        elif "launcher" in message:
            node.launcher, node.launcher_ended = message["launcher"], time.monotonic()
            node.launcher_tail = message["tail"]
        elif "ended" in message:
            record = message["ended"]
            status = record["status"] or {}
            ours = status.get("job") == self.job.job
            self.ends[record["rank"]] = RankEnd(
                rank=record["rank"],
                host=node.host,
                code=record["code"],
                at=time.monotonic() - record["ago"],
                state=status.get("state", "") if ours else "",
                reason=status.get("reason", ""),
                # What its launcher's SIGTERM ended followed another rank, too.
                consequence=status.get("consequence", False)
                or (record["code"] == TERMINATED and not self.stop_sent),
                result=status.get("result"),
                log=record["log"],
                tail=record["tail"],
            )

    def _pass_wishes_on(self) -> None:
        if len(self.wishes) <= self.stop_sent:
            return
        self.stop_sent = len(self.wishes)
        if self.stop_sent > 1:
            self._leave_within(0.0)
            logger.warning("killing the ranks without a checkpoint")
            return
        self._leave_within(self.limits.grace_s)
        for node in self.nodes:
            with suppress(ChannelClosed):
                node.channel.send(stop=True)
        logger.warning(
            "stopping: the ranks finish their window and save, for at most %.0f s; "
            "once more kills them without a checkpoint",
            self.limits.grace_s,
        )

    def _notice_failures(self) -> None:
        """Limit the time of those that are left once others have ended, or can't end well."""
        if any(end.failed for end in self.ends.values()):
            self._leave_within(self.limits.heartbeat_s)
        elif self.ends:  # they end together, but for a rank that hangs as it leaves
            self._leave_within(max(self.limits.heartbeat_s, self.limits.grace_s))
        if any(node.lost for node in self.nodes):
            alone = all(node.lost for node in self.nodes)
            self._leave_within(0.0 if alone else self.limits.heartbeat_s)
        for node in self.nodes:
            if node.launcher is None or time.monotonic() - node.launcher_ended < MARKERS_S:
                continue
            # Without a rank the job never began; else its ranks get the time to tell why.
            self._leave_within(self.limits.heartbeat_s if node.started else 0.0)
