"""The supervisor: one attempt at a job, from the first ssh to the last process gone.

An agent on each node (agent.py) starts the existing launchers' commands and watches the ranks. The
job is a success only if every rank left its end marker for this job's id; a launcher's own exit
code is never believed (`deepspeed` returns 0 when its child dies by a signal).
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from recipes.cluster.channel import BEAT_S, ChannelClosed
from recipes.cluster.jobfile import JobFile
from recipes.cluster.launchers import Start, commands, device_env, faults
from recipes.cluster.nodes import Node, agents, greet, interfaces, last_words, master, prepare
from recipes.outcome import DONE, STOPPED

logger = logging.getLogger(__name__)

RANK_SCRIPT = Path(__file__).with_name("rank.py")
MARKERS_S = 5.0  # from the launcher's end to the last rank's marker


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Seconds."""

    heartbeat_s: float = 20.0  # silence after which a node counts as lost; and what peers get
    grace_s: float = 600.0  # what a checkpoint may take after a stop


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """How a rank ended."""

    rank: int
    host: str
    code: int  # signals as 128 + n
    state: str  # of its status: done, stopped, failed; "" if it left none
    reason: str
    consequence: bool  # it ended because another one had
    result: Any  # what the script put into `Outcome.result`
    log: str
    tail: str  # the last lines of its log, if it failed


@dataclass(frozen=True, kw_only=True)
class Report:
    """How an attempt ended."""

    code: int
    cause: str
    job_id: str
    logs: Path
    ends: dict[int, RankEnd] = field(default_factory=dict)
    first: RankEnd | None = None  # the rank that caused the failure
    interrupted: bool = False  # by the user, so that no restart is meant


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
        echo: takes rank 0's output as it comes.

    Raises:
        ValueError: the launcher can't run this start.
        TopologyError: a node can't be reached or prepared; nothing was started.
    """
    with agents(start) as nodes, _stop_signals() as wishes:
        ways = greet(nodes)
        start = replace(start, master=start.master or master(nodes, ways))
        devices = device_env(start)
        job = JobFile(
            job=job_id,
            hosts=tuple((host.name, host.slots) for host in start.hosts),
            slots=tuple((h.name, max(h.gpus) + 1 if h.gpus else h.slots) for h in start.hosts),
            script=str(start.script),
            arguments=start.arguments,
            env=env,
            node_env={h: devices[h] | told for h, told in interfaces(nodes, ways, env).items()},
            working_dir=str(working_dir),
            logs=str(logs / job_id),
        )
        supervised = replace(
            start,
            script=RANK_SCRIPT,
            arguments=(str(job.path),),
            hostfile=job.folder / "launcher_hostfile",
        )
        if found := faults(supervised, supervised=True):
            raise ValueError("\n".join(found))
        prepare(nodes, job, start)
        words = commands(supervised)
        for node in nodes:
            node.channel.send(go=words.get(node.host), limits=_told(limits))
        return _Attempt(nodes, job, limits, echo, wishes).watch()


def _told(limits: Limits) -> dict[str, float]:
    # The agent must not give up on a head that is merely busy, nor the head on such an agent.
    return {"silence_s": limits.heartbeat_s, "grace_s": limits.grace_s}


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Collect Ctrl-C, SIGTERM and a closed terminal as wishes while the block runs."""
    wishes: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        wishes.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, note) for number in numbers} if main else {}
    try:
        yield wishes
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
        self.ends: dict[int, RankEnd] = {}  # in the order of arrival
        self.stop_sent = 0  # how many wishes were passed on
        self.deadline = float("inf")

    def watch(self) -> Report:
        """Until every rank has ended or the time for it is over."""
        while len(self.ends) < self.world and time.monotonic() < self.deadline:
            for node in self.nodes:
                self._listen(node)
            self._pass_wishes_on()
            self._notice_failures()
        return self._report()

    def _leave_within(self, limit_s: float) -> None:
        self.deadline = min(self.deadline, time.monotonic() + limit_s)

    def _listen(self, node: Node) -> None:
        if node.lost:
            return
        try:
            while (message := node.channel.receive(0.05)) is not None:
                self._take(node, message)
            silent = time.monotonic() - node.channel.heard
            if silent > self.limits.heartbeat_s + BEAT_S:
                node.lost = f"{node.host}: silent for {silent:.0f} s"
        except ChannelClosed:
            node.lost = f"{node.host}: connection lost ({last_words(node).strip() or 'closed'})"

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
                state=status.get("state", "") if ours else "",
                reason=status.get("reason", ""),
                # What its launcher's SIGTERM ended followed another rank, too.
                consequence=status.get("consequence", False)
                or (record["code"] == 128 + signal.SIGTERM and not self.stop_sent),
                result=status.get("result"),
                log=record["log"],
                tail=record["tail"],
            )

    def _pass_wishes_on(self) -> None:
        if len(self.wishes) <= self.stop_sent:
            return
        self.stop_sent = len(self.wishes)
        if self.stop_sent > 1:
            logger.warning("killing the ranks without a checkpoint")
            self._leave_within(0.0)
            return
        logger.warning(
            "stopping: the ranks finish their window and save, for at most %.0f s; "
            "once more kills them without a checkpoint",
            self.limits.grace_s,
        )
        self._leave_within(self.limits.grace_s)
        for node in self.nodes:
            with suppress(ChannelClosed):
                node.channel.send(stop=True)

    def _notice_failures(self) -> None:
        """Limit the time of those that are left once the job can't end well any more."""
        if any(end.code not in (DONE, STOPPED) for end in self.ends.values()):
            self._leave_within(self.limits.heartbeat_s)
        for node in self.nodes:
            if node.lost:
                self._leave_within(self.limits.heartbeat_s)
            if node.launcher is None or time.monotonic() - node.launcher_ended < MARKERS_S:
                continue
            # Without a rank the job never began; else its ranks get the time to tell why.
            self._leave_within(self.limits.heartbeat_s if node.started else 0.0)

    def _report(self) -> Report:
        bad = [end for end in self.ends.values() if end.code not in (DONE, STOPPED)]
        if self.stop_sent and bad and all(end.code == 128 + signal.SIGTERM for end in bad):
            bad = []  # stopped before there was anything to save
        own = [end for end in bad if not end.consequence]
        lost = any(node.lost for node in self.nodes)
        first = own[0] if own else bad[0] if bad and not lost else None
        code, cause = (first.code, _describe(first)) if first else self._verdict()
        return Report(
            code=code,
            cause=cause,
            job_id=self.job.job,
            logs=Path(self.job.logs),
            ends=self.ends,
            first=first,
            interrupted=bool(self.stop_sent),
        )

    def _verdict(self) -> tuple[int, str]:
        """The exit code and its cause, where no rank is to blame."""
        lost = [node.lost for node in self.nodes if node.lost]
        if lost:
            return 1, "; ".join(lost)
        missing = sorted(set(range(self.world)) - self.ends.keys())
        if missing:
            return self._unfinished(missing)
        if any(end.code == 128 + signal.SIGTERM for end in self.ends.values()):
            return 128 + self.wishes[0], "stopped before there was anything to save"
        if any(end.code == STOPPED for end in self.ends.values()):
            return STOPPED, next(e.reason for e in self.ends.values() if e.code == STOPPED)
        unmarked = [end for end in self.ends.values() if end.state != "done"]
        if unmarked:
            return 1, f"{_place(unmarked[0])} ended with 0 but without its end marker"
        return DONE, ""

    def _unfinished(self, missing: list[int]) -> tuple[int, str]:
        ranks = ", ".join(map(str, missing))
        if self.stop_sent:
            return 128 + self.wishes[0], f"stopped; rank {ranks} ended without a checkpoint"
        failed = [node for node in self.nodes if node.launcher is not None]
        said = "\n".join(
            f"the launcher on {node.host} ended with {node.launcher}:\n{node.launcher_tail}"
            for node in failed
        )
        return 1, f"rank {ranks} left no end marker; {said or 'no launcher has ended'}"


def _place(end: RankEnd) -> str:
    return f"{end.host} rank {end.rank}"


def _describe(end: RankEnd) -> str:
    """A failed rank in one line: where, how, why."""
    how = f"exit {end.code}"
    if end.code > 128:
        with suppress(ValueError):
            how = f"killed by {signal.Signals(end.code - 128).name}"
    return f"{_place(end)} failed first: {how}" + (f": {end.reason}" if end.reason else "")
