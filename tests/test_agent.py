"""A node's agent and its channel, without an engine: what is told and left, who is to blame."""

from __future__ import annotations

import fcntl
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest
from launching import ROOT, wait_for

from recipes.cluster import channel, nodes, remote, watch
from recipes.cluster.channel import Channel, ChannelClosed
from recipes.cluster.jobfile import JobFile, job_folder, new_job_id
from recipes.cluster.nodes import Node
from recipes.cluster.verdict import RankEnd, judge
from recipes.cluster.watch import Watch
from recipes.outcome import TopologyError

ACTOR = ROOT / "tests" / "drivers" / "actor.py"
LAUNCHER = ROOT / "tests" / "drivers" / "plain_launcher.py"
RANK = ROOT / "recipes" / "cluster" / "rank.py"
LIMITS = {"silence_s": 10.0, "grace_s": 10.0}


def job_of(folder: Path, *arguments: str, host: str = "localhost", ranks: int = 2) -> JobFile:
    """A job of the actor on one host."""
    return JobFile(
        job=new_job_id(),
        hosts=((host, ranks),),
        slots=((host, ranks),),
        script=str(ACTOR),
        arguments=(str(folder), *arguments),
        env={},
        node_env={},
        working_dir=str(folder),
        logs=str(folder / "logs" / "of-the-job"),
    )


class Head:
    """The head's side of a real agent on this machine."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin and process.stdout
        self.process, self.channel = process, Channel(process.stdout, process.stdin)
        self.said: list[dict[str, Any]] = []

    def hear(self, key: str, limit_s: float = 20.0) -> Any:
        """The next message of a kind."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            message = self.channel.receive(0.1)
            if message is not None:
                self.said.append(message)
                if key in message:
                    return message[key]
        raise AssertionError(f"no {key} in {self.said}")

    def start(self, job: JobFile) -> None:
        """Have the job's ranks started by the plain launcher."""
        self.channel.send(hello={"name": job.hosts[0][0], "hosts": []})
        self.channel.send(job=asdict(job), port=None)
        assert self.hear("ready")
        words = [sys.executable, str(LAUNCHER), str(job.hosts[0][1]), str(RANK), str(job.path)]
        self.channel.send(go=words, limits=LIMITS)


@contextmanager
def agent(words: list[str] | None = None) -> Iterator[Head]:
    """An agent as the head starts it, or by a shell command of the test."""
    if words is None:
        process = remote.start_module("localhost", "recipes.cluster.agent")
    else:
        pipe = subprocess.PIPE
        process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        yield Head(process)
    finally:
        process.kill()
        process.wait()


def of_job(job: JobFile) -> list[int]:
    """The processes of a job."""
    return [process.pid for process in Watch(job, job.hosts[0][0], job.folder).processes()]


# ---- the channel


def test_what_a_login_script_prints_is_no_message() -> None:
    (read, write), (_, sink) = os.pipe(), os.pipe()
    os.write(write, b'Welcome!\n42\nnull\n"text"\n[1]\n{"hello": 1}\n')
    heard = Channel(os.fdopen(read, "rb"), os.fdopen(sink, "wb"))
    assert heard.receive(5.0) == {"hello": 1}
    os.close(write)
    for _ in range(2):  # whoever asks
        with pytest.raises(ChannelClosed):
            heard.receive(5.0)


def test_a_line_that_a_login_script_leaves_open_hides_no_answer() -> None:
    command = f"printf 'Welcome to worker-0'; {remote.node_command('recipes.cluster.agent')}"
    with agent(["sh", "-c", command]) as head:
        head.channel.send(hello={"name": "localhost", "hosts": ["localhost"]})
        assert head.hear("hello")["ways"]["localhost"]["interface"] == "lo"


def test_a_side_that_is_busy_beats_and_hears(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "BEAT_S", 0.05)
    pipes = [os.pipe(), os.pipe()]
    one = Channel(os.fdopen(pipes[0][0], "rb"), os.fdopen(pipes[1][1], "wb"))
    other = Channel(os.fdopen(pipes[1][0], "rb"), os.fdopen(pipes[0][1], "wb"))
    began = time.monotonic()
    time.sleep(0.5)  # neither side asks for messages
    assert min(one.heard, other.heard) > began + 0.2
    assert one.receive(0.0) is None


# ---- the agent


def test_an_agent_that_is_dismissed_ends_in_order() -> None:
    """Python aborts, with a core file, when a thread still reads from stdin at its end."""
    with agent() as head:
        head.channel.send(hello={"name": "localhost", "hosts": []})
        head.channel.send(kill=True)
        assert head.hear("bye") == []
        assert head.process.wait(10) == 0  # its stdin is still open
        assert head.process.stderr and head.process.stderr.read() == b""


def test_ranks_end_with_their_agent_whoever_is_between_them(tmp_path: Path) -> None:
    """DeepSpeed's launcher has a child that outlives it, and keeps its ranks."""
    job = job_of(tmp_path, "0=stay", "1=stay")
    try:
        with agent() as head:
            head.start(job)
            wait_for(lambda: len(list(tmp_path.glob("waiting-*"))) == 2, 20, "the ranks' start")
            head.process.kill()
            wait_for(lambda: not of_job(job), 10, "the end of the ranks")
    finally:
        Watch(job, "localhost", job.folder).kill()
        job.remove("localhost")


def test_another_agent_sweeps_what_the_first_one_left(tmp_path: Path) -> None:
    job = job_of(tmp_path, "0=stay", "1=stay")
    with agent() as first, agent() as second:
        first.start(job)
        wait_for(lambda: len(list(tmp_path.glob("waiting-*"))) == 2, 20, "the ranks' start")
        assert first.process.stdin
        first.process.stdin.close()  # it lost its head, and lets the ranks save
        left = Node(host="localhost", process=second.process, channel=second.channel, slots=2)
        left.job = asdict(job)
        nodes._sweep([left])
        assert not of_job(job)
        assert not job.folder.exists()
        assert first.process.wait(5) == 0  # it has nothing to wait for any more


def test_a_run_folder_takes_one_job_at_a_time(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    Path(job.logs).parent.mkdir()
    with (Path(job.logs).parent / "lock").open("w") as other, agent() as head:
        fcntl.flock(other, fcntl.LOCK_EX)
        head.channel.send(hello={"name": "localhost", "hosts": []})
        head.channel.send(job=asdict(job), port=0)
        [why] = head.hear("refused")
        assert f"another job is running that writes to {tmp_path / 'logs'}" in why
        head.channel.send(kill=True)
        assert head.hear("bye") == []
    assert not job.folder.exists()


def test_launchers_leave_their_files_in_the_job_s_folder(tmp_path: Path) -> None:
    job = job_of(tmp_path, "0=stay", ranks=1)
    with agent() as head:
        head.start(job)
        wait_for(lambda: (tmp_path / "waiting-0").exists(), 20, "the rank's start")
        started = [psutil.Process(pid) for pid in of_job(job)]
        launchers = [p.environ() for p in started if str(LAUNCHER) in p.cmdline()]
        assert {env["TMPDIR"] for env in launchers} == {str(job.folder)}
        seen = json.loads((tmp_path / "seen-0.json").read_text())["env"]
        assert seen["TMPDIR"] == os.environ.get("TMPDIR", "/tmp")
        head.channel.send(kill=True)
        assert head.hear("bye") == []
    assert not of_job(job) and not job.folder.exists()


# ---- the job file


def test_the_job_s_folder_is_the_same_for_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """~/.ssh/config may name another user for a host."""
    here = job_folder("x")
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, "somebody-else")
    assert job_folder("x") == here


def test_a_job_file_that_can_t_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    job = job_of(tmp_path)
    monkeypatch.setattr(JobFile, "_put", full)
    with pytest.raises(OSError, match="No space"):
        job.write("localhost")
    assert not job.folder.exists()


def test_a_host_that_is_done_leaves_the_others_their_part(tmp_path: Path) -> None:
    """Rehearsed hosts share /tmp."""
    job = JobFile(**(vars(job_of(tmp_path)) | {"hosts": (("a", 1), ("b", 1))}))
    job.write("a"), job.write("b")
    job.remove("a")
    assert (job.folder / "b").is_dir() and job.path.exists()
    job.remove("b")
    assert not job.folder.exists()


# ---- the watch over ranks


@contextmanager
def watched(folder: Path, ranks: int = 2) -> Iterator[Watch]:
    """A watch over ranks of which the test plays the notes; rank 0's log is `folder / "log"`."""
    job = job_of(folder, ranks=ranks)
    (folder / "log").touch()
    markers = job.write("localhost")
    for rank in range(ranks):
        note(markers, rank, folder, None)
    yield Watch(job, "localhost", markers)
    job.remove("localhost")


def note(markers: Path, rank: int, folder: Path, code: int | None, ended: float = 0.0) -> None:
    """A rank's note."""
    record = {"rank": rank, "pid": 0, "log": str(folder / "log"), "code": code, "ended": ended}
    (markers / f"rank-{rank}.json").write_text(json.dumps(record))


def texts(seen: Watch) -> str:
    """What it tells of rank 0's log now."""
    return "".join(event.get("text", "") for event in seen.news())


def test_ends_are_told_in_the_order_in_which_they_came(tmp_path: Path) -> None:
    with watched(tmp_path) as seen:
        now = time.time()
        note(seen.markers, 0, tmp_path, 134, now - 1.0)
        note(seen.markers, 1, tmp_path, 137, now - 2.0)
        ends = [event["ended"] for event in seen.news() if "ended" in event]
        assert [end["rank"] for end in ends] == [1, 0]
        assert [end["ago"] for end in ends] == pytest.approx([2.0, 1.0], abs=0.5)


def test_a_log_that_is_deleted_does_not_end_the_job(tmp_path: Path) -> None:
    with watched(tmp_path) as seen:
        seen.news()
        (tmp_path / "log").unlink()
        assert seen.news() == []


def test_a_progress_bar_is_shown_while_it_runs(tmp_path: Path) -> None:
    with watched(tmp_path) as seen:
        with (tmp_path / "log").open("w") as log:
            log.write("one\nbar 1\rbar 2\rba")
        assert texts(seen) == "one\nbar 1\rbar 2\r"


def test_a_flood_of_text_is_cut_and_its_end_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "TEXT_BYTES", 10)
    with watched(tmp_path) as seen:
        (tmp_path / "log").write_bytes(b"x" * 995 + b"end\n\xff")
        told = texts(seen)
        assert (
            told
            == f"\n[990 bytes are left out here; all is in {tmp_path / 'log'}]\nxxxxxend\n\ufffd"
        )
        assert texts(seen) == ""


# ---- the nodes


def test_two_names_of_one_machine_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    way = {"address": "10.0.0.1", "source": "10.0.0.1", "interface": "eth0"}
    facts = {"ways": {"a": way, "a.cluster": way}}
    monkeypatch.setattr(nodes, "_collect", lambda *_: {"a": facts, "a.cluster": facts})
    with pytest.raises(TopologyError) as caught:
        nodes.greet([node("a"), node("a.cluster")], [])
    assert "a.cluster resolves to 10.0.0.1, which leads back to a" in str(caught.value)


def test_a_wish_to_stop_ends_the_wait_for_a_node() -> None:
    silent = node("a")
    with pytest.raises(nodes.Interrupted):
        nodes._collect([silent], "hello", [2])


def test_ssh_is_as_patient_as_the_heartbeat_and_keeps_no_connection() -> None:
    words = " ".join(remote.ssh_words("a", "true", 61.0))
    assert "ServerAliveInterval=5 " in words and "ServerAliveCountMax=13 " in words
    assert "ControlMaster=no" in words


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (f"bash: line 1: cd: {ROOT}: Permission denied", "there is no checkout"),
        (f"sh: 1: exec: {remote.PYTHON}: Permission denied", "may not execute"),
        (f"sh: 1: exec: {remote.PYTHON}: not found", "there is no interpreter"),
        ("me@a: Permission denied (publickey,password).", "ssh-copy-id a"),
    ],
)
def test_who_denies_permission_makes_a_difference(said: str, told: str) -> None:
    assert told in remote.explain("a", said, 1)


# ---- the verdict


def node(host: str, ranks: int = 1, **more: Any) -> Node:
    """A node without an agent."""
    nowhere = Channel(io.BytesIO(), io.BytesIO())
    return Node(host=host, process=None, channel=nowhere, slots=ranks, **more)  # type: ignore[arg-type]


def end(rank: int, code: int, at: float, **more: Any) -> tuple[int, RankEnd]:
    """How a rank ended."""
    told = {"host": "a", "state": "done" if code == 0 else "failed", "reason": "", "log": ""}
    told |= {"consequence": False, "result": None, "tail": ""}
    return rank, RankEnd(rank=rank, code=code, at=at, **(told | more))


ABORT, TERM = 134, 143
TWO = [node("a", 2)]
LOST = [node("a", 2, lost="a: silent for 22 s", lost_at=3.0)]


@pytest.mark.parametrize(
    ("ends", "nodes_", "wish", "code", "cause"),
    [
        # NCCL aborts the ranks whose peer has left; they may be heard of first
        (
            [end(0, ABORT, 2.0), end(1, 137, 1.9)],
            TWO,
            0,
            137,
            "rank 1 failed first: killed by SIGK",
        ),
        # a node that was silent before they aborted is the cause, one that fell silent later not
        ([end(0, ABORT, 4.0)], LOST, 0, 1, "a: silent for 22 s"),
        ([end(0, ABORT, 2.0)], LOST, 0, ABORT, "rank 0 failed first: killed by SIGABRT"),
        # a rank that ends too early, as if all were well, is no victim of its peers
        (
            [end(0, 1, 2.0, consequence=True), end(1, 0, 1.0, state="")],
            *(TWO, 0, 1, "rank 1 ended with 0 but without its end marker"),
        ),
        # what the launcher ended with SIGTERM is not why a rank is missing
        ([end(1, TERM, 1.0, consequence=True)], TWO, 0, 1, "rank 0 left no end marker"),
        ([end(n, TERM, 1.0, consequence=True) for n in (0, 1)], TWO, 0, TERM, "killed by SIGTERM"),
        # stopped at its start: the peers of a rank that had nothing to save are no failures
        (
            [end(0, TERM, 1.0), end(1, 1, 1.1, consequence=True)],
            *(TWO, 2, 130, "stopped before there was anything to save"),
        ),
        ([end(0, 75, 1.0, state="stopped")], TWO, 2, 130, "rank 1 ended without a checkpoint"),
        ([end(0, 1, 1.0), end(1, 75, 1.0)], TWO, 2, 1, "rank 0 failed first"),
        ([end(n, 75, 1.0, reason="stopped at 7") for n in (0, 1)], TWO, 2, 75, "stopped at 7"),
        ([end(n, 0, 1.0) for n in (0, 1)], TWO, 0, 0, ""),
    ],
)
def test_the_first_cause_is_to_blame(
    ends: list[tuple[int, RankEnd]], nodes_: list[Node], wish: int, code: int, cause: str
) -> None:
    found = judge(dict(ends), nodes_, wish)
    assert (found[0], cause in found[1], cause != "" or found[1] == "") == (code, True, True), found
