"""Supervision on one host, under real launchers: how jobs end, and that nothing is left of them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from launching import ROOT, free_port, wait_for

from recipes.cluster import nodes, remote, supervisor
from recipes.cluster.hostfile import Host
from recipes.cluster.jobfile import job_folder, new_job_id
from recipes.cluster.launchers import Start, read_arm
from recipes.cluster.remote import PYTHON
from recipes.cluster.supervisor import Limits, Report, supervise
from recipes.outcome import TopologyError

ACTOR = ROOT / "tests" / "drivers" / "actor.py"
ARM = ROOT / "accelerate_configs" / "local_ddp_bf16.yaml"
HARD = (
    "two words",
    "it's",
    'a "quote"',
    "$HOME `id` $(id)",
    "{braces}",
    "back\\slash",
    "ünï;&|<>*?",
)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A place for temporary files in which nothing may be left."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))


def start(folder: Path, *arguments: str, launcher: str = "torchrun", port: int = 0) -> Start:
    """Two ranks of the actor on this machine."""
    return Start(
        launcher=launcher,
        hosts=(Host(name="localhost", slots=2),),
        hostfile=folder / "hostfile",
        arm=read_arm(ARM, ROOT),
        master="",
        port=port or free_port(),
        python=PYTHON,
        script=ACTOR,
        arguments=(str(folder), *arguments),
    )


def run(folder: Path, *arguments: str, launcher: str = "torchrun", **more: Any) -> Report:
    """One attempt; asserts that nothing of it is left."""
    limits = Limits(heartbeat_s=10.0, grace_s=30.0)
    job_id, told = new_job_id(), []
    report = supervise(
        start(folder, *arguments, launcher=launcher),
        job_id=job_id,
        env=more.pop("env", {}),
        logs=folder / "logs",
        working_dir=folder,
        limits=limits,
        echo=told.append,
    )
    assert not left(job_id)
    assert not list((folder / "tmp").glob("*"))
    assert report.logs == folder / "logs" / job_id
    (folder / "told").write_text("".join(told))
    return report


def left(job_id: str) -> list[str]:
    """Processes and files of a job."""
    found = [str(job_folder(job_id))] if job_folder(job_id).exists() else []
    for process in psutil.process_iter():
        try:
            if job_id in " ".join(process.cmdline()) + str(process.environ()):
                found.append(f"{process.pid} {process.cmdline()}")
        except psutil.Error:
            continue
    return found


def seen(folder: Path, rank: int) -> dict[str, Any]:
    """What a rank saw of its arguments and environment."""
    return json.loads((folder / f"seen-{rank}.json").read_text())


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate", "deepspeed"])
def test_arguments_and_variables_reach_every_rank_unharmed(
    tmp_path: Path, launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "of-this-shell")  # must not travel by itself
    env = {"NCCL_DEBUG": "a b'c\"$d", "HF_TOKEN": "s3cr3t-value"}
    report = run(tmp_path, *HARD, launcher=launcher, env=env)
    assert (report.code, report.cause) == (0, "")
    for rank in (0, 1):
        found = seen(tmp_path, rank)
        assert found["argv"] == list(HARD)
        assert {name: found["env"].get(name) for name in env} == env
        assert "MY_TOKEN" not in found["env"]
        assert found["env"]["OCTET_JOB"] == report.job_id
        assert found["env"]["GLOO_SOCKET_IFNAME"] == "lo"
        assert found["cwd"] == str(tmp_path)
        assert report.ends[rank].result == {"rank": rank}
        assert (report.logs / f"rank-{rank}.localhost.log").read_text() == f"rank {rank} is here\n"
    assert (tmp_path / "told").read_text() == "rank 0 is here\n"
    assert "s3cr3t" not in "".join(p.read_text() for p in report.logs.iterdir())


@pytest.mark.parametrize(
    ("plan", "code", "rank", "cause"),
    [
        (("1=kill", "0=stay"), 137, 1, "localhost rank 1 failed first: killed by SIGKILL"),
        (("0=usage", "1=peer"), 2, 0, "rank 0 failed first: exit 2: optim.lr='fast'"),
        (("0=peer", "1=numbers"), 4, 1, "rank 1 failed first: exit 4: loss is nan"),
        (("1=exit0", "0=stay"), 1, 1, "localhost rank 1 ended with 0 but without its end marker"),
        (("0=child", "1=stay"), 137, 0, "killed by SIGKILL"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else None,
)
def test_the_first_cause_is_told_and_nothing_is_left(
    tmp_path: Path, plan: tuple[str, ...], code: int, rank: int | None, cause: str
) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)", str(ACTOR)])
    try:
        began = time.monotonic()
        report = run(tmp_path, *plan)
        assert report.code == code
        assert cause in report.cause
        assert (report.first.rank if report.first else None) == rank
        assert time.monotonic() - began < 60
        assert bystander.poll() is None  # a job that looks alike lives on
    finally:
        bystander.kill()
        bystander.wait()


@pytest.mark.parametrize("whom", ["the head: SIGINT", "every process: SIGUSR1"])
def test_an_interrupt_signals_the_ranks_once_and_waits_for_them(tmp_path: Path, whom: str) -> None:
    """Slurm signals a whole job step, launchers included; and it may do so more than once."""

    def interrupt() -> None:
        wait_for(
            lambda: (tmp_path / "waiting-0").exists() and (tmp_path / "waiting-1").exists(), 60, ""
        )
        if whom.startswith("the head"):
            os.kill(os.getpid(), signal.SIGINT)
            return
        children = psutil.Process().children(recursive=True)
        assert len(children) >= 6, children  # shell, agent, launcher, two wrappers with two ranks
        for _ in range(2):
            for process in [psutil.Process(), *children]:
                process.send_signal(signal.SIGUSR1)
            time.sleep(0.2)

    thread = threading.Thread(target=interrupt)
    thread.start()
    report = run(tmp_path, "0=wait", "1=wait")
    thread.join()
    assert report.code == 75
    assert report.interrupted
    assert report.cause == "stopped at update 7 of 9; start it again to go on"
    assert {end.state for end in report.ends.values()} == {"stopped"}
    assert "Traceback" not in (report.logs / "launcher.localhost.log").read_text()


def test_a_port_that_is_used_stops_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(TopologyError) as caught:
            supervise(
                start(tmp_path, port=port),
                job_id=new_job_id(),
                env={},
                logs=tmp_path / "logs",
                working_dir=tmp_path,
            )
    text = str(caught.value)
    assert f"port {port} on {socket.gethostname()} is in use (python" in text
    assert f"pid {os.getpid()}" in text
    assert "--port" in text
    assert not list(tmp_path.glob("seen-*"))


def test_an_agent_that_is_killed_leaves_no_rank_behind(tmp_path: Path) -> None:
    """Its launcher dies with it; DeepSpeed's has a child that would go on, and keep its ranks."""

    def kill() -> None:
        wait_for(lambda: len(list(tmp_path.glob("waiting-*"))) == 2, 60, "the ranks' start")
        for process in psutil.Process().children():
            with suppress(psutil.Error):  # one that has ended and is not waited for yet
                if "recipes.cluster.agent" in process.cmdline():
                    process.kill()

    thread = threading.Thread(target=kill)
    thread.start()
    report = run(tmp_path, "0=stay", "1=stay", launcher="deepspeed")
    thread.join()
    assert (report.code, report.cause) == (1, "localhost: connection lost (closed)")


# ---- without a launcher


@pytest.fixture()
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain launcher of the tests in a real one's place: it starts in no time."""
    script = ROOT / "tests" / "drivers" / "plain_launcher.py"
    monkeypatch.setattr(
        supervisor,
        "commands",
        lambda s: {"localhost": [sys.executable, str(script), "2", str(s.script), *s.arguments]},
    )


@pytest.mark.usefixtures("plain")
def test_a_terminal_that_takes_no_text_does_not_hold_up_the_watch(tmp_path: Path) -> None:
    over = threading.Event()
    job_id = new_job_id()

    def release() -> None:
        wait_for(lambda: len(list(tmp_path.glob("seen-*"))) == 2, 30, "the ranks' start")
        wait_for(lambda: not left(job_id), 30, "the end of the job")
        over.set()

    thread = threading.Thread(target=release)
    thread.start()
    began = time.monotonic()
    report = supervise(
        start(tmp_path),
        job_id=job_id,
        env={},
        logs=tmp_path / "logs",
        working_dir=tmp_path,
        echo=lambda text: over.wait(30) and None,
    )
    thread.join()
    assert report.code == 0
    assert time.monotonic() - began < 20


@pytest.mark.usefixtures("plain")
def test_an_interrupt_while_nodes_are_opened_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "node_command", lambda module: "sleep 60")
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    began = time.monotonic()
    report = run(tmp_path)
    assert (report.code, report.interrupted, report.ends) == (130, True, {})
    assert time.monotonic() - began < 15
    assert not list(tmp_path.glob("seen-*"))


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("step", ["greet", "prepare"])
def test_an_agent_that_dies_at_the_start_is_told(
    tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(nodes, step)

    def then_die(agents: list[nodes.Node], *more: Any) -> Any:
        found = real(agents, *more)
        agents[0].process.kill()
        agents[0].process.wait()
        return found

    monkeypatch.setattr(nodes, step, then_die)
    if step == "greet":
        with pytest.raises(TopologyError, match="localhost: exit code -9"):
            run(tmp_path)
    else:
        report = run(tmp_path)
        assert (report.code, report.cause) == (1, "localhost: connection lost (closed)")


def test_under_nohup_a_closed_terminal_is_no_wish() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with supervisor._stop_signals() as wishes:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)
        assert wishes == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGHUP, before)


def test_ssh_is_deaf_to_what_a_scheduler_sends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = tmp_path / "ssh"
    client.write_text("#!/bin/sh\nexec grep SigBlk /proc/self/status\n")
    client.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    said = remote.start_module("localhost", "x", always_ssh=True).communicate(timeout=20)[0]
    assert int(said.split()[1], 16) & 1 << (signal.SIGUSR1 - 1)
    assert signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_without_its_head_the_job_saves_and_ends(tmp_path: Path) -> None:
    """`octet launch` killed by SIGKILL: the agents end the job by themselves."""
    code = f"""
import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import test_supervisor as t; from pathlib import Path
t.run(Path({str(tmp_path)!r}), "0=wait", "1=wait")
"""
    head = subprocess.Popen([sys.executable, "-c", code])
    try:
        wait_for(
            lambda: (tmp_path / "waiting-0").exists() and (tmp_path / "waiting-1").exists(), 60, ""
        )
        pids = [seen(tmp_path, rank)["pid"] for rank in (0, 1)]
        job_id = seen(tmp_path, 0)["env"]["OCTET_JOB"]
    finally:
        head.kill()
        head.wait()
    wait_for(lambda: not left(job_id), 30, "the end of the job")
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
