"""`octet launch` on two rehearsed hosts: four launchers, and every way in which a job breaks."""

from __future__ import annotations

import json
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import launching
import psutil
import pytest
import rehearsing
from launching import ROOT, records, status, wait_for

from recipes.cluster.jobfile import job_folder
from recipes.cluster.launchers import LAUNCHERS

pytestmark = rehearsing.rootful()
OCTET = str(launching.BIN / "octet")
RUN = "recipes/runs/rehearsal.yaml"
CONFIG = "accelerate_configs/local_zero1_bf16.yaml"
SHORT = ["schedule.updates=6", "checkpoint.every_updates=100"]
PROMPT = 'it\'s {"a"} $HOME `x` \\ é  two'
SECRET = "s3cr3t-f0r-y0u"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[rehearsing.Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    with rehearsing.rehearsal({"worker-0": 2, "worker-1": 2}, folder) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The same run with two ranks on one machine, without `octet launch`."""
    folder = tmp_path_factory.mktemp("alone")
    script = ["recipes/pretrain.py", RUN, *SHORT, f"output_dir={folder / 'run'}"]
    ended = launching.run("accelerate", 2, script, folder / "log")
    assert ended.code == 0, ended.text
    return records(folder / "run")


def launch(cluster: rehearsing.Cluster, out: Path, *words: str) -> list[str]:
    """The command of `octet launch` on the cluster."""
    head = [OCTET, "launch", "--hostfile", str(cluster.hostfile), "--config", CONFIG, RUN]
    return [*head, f"output_dir={out}", *words]


def quiet(cluster: rehearsing.Cluster) -> bool:
    """Whether no process is left on any host."""
    return not cluster.processes("worker-0") and not cluster.processes("worker-1")


class Spy:
    """Reads every command line and the environments of the ranks of a run while a block runs."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.words: set[str] = set()
        self.ranks: dict[int, dict[str, str]] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._over.wait(0.2):
            for process in psutil.process_iter():
                try:
                    line = process.cmdline()
                    if f"output_dir={self.out}" in line and "launch" not in line:
                        self.ranks[process.pid] = process.environ()
                    self.words.update(line)
                except psutil.Error:
                    continue

    def __enter__(self) -> Spy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_trains_the_same_run(
    cluster: rehearsing.Cluster, alone: list[dict[str, Any]], tmp_path: Path, launcher: str
) -> None:
    out = tmp_path / "run"
    words = launch(cluster, out, *SHORT, "--launcher", launcher, "--env", "HF_TOKEN")
    words += ["--env", "NCCL_DEBUG_FILE=/tmp/%h it's $x", f"sample.prompt={PROMPT}"]
    env = {"HF_TOKEN": SECRET, "OTHER_API_KEY": "not-yours"}
    with Spy(out) as spy:
        ended = cluster.run(words, env=env)
    assert ended.code == 0, ended.text
    assert quiet(cluster)

    told = json.loads((out / "run.json").read_text())
    assert told["hosts"] == {"worker-0": 2, "worker-1": 2}
    assert told["strategy"] == "ZeRO-1 bf16"
    assert told["accumulation"] == 4
    assert told["config"]["sample"]["prompt"] == PROMPT
    got = records(out)
    assert [r["data_digest"] for r in got] == [r["data_digest"] for r in alone]
    assert [r["loss"] for r in got] == pytest.approx([r["loss"] for r in alone], abs=5e-3)
    assert [r["lr"] for r in got] == [r["lr"] for r in alone]

    assert len(spy.ranks) >= 4
    for environ in spy.ranks.values():
        assert environ["HF_TOKEN"] == SECRET
        assert environ["NCCL_DEBUG_FILE"] == "/tmp/%h it's $x"
        assert environ["GLOO_SOCKET_IFNAME"] == "eth0"
        assert "OTHER_API_KEY" not in environ
    assert not [word for word in spy.words if SECRET in word]
    [attempt] = [json.loads(line) for line in (out / "logs" / "attempts.jsonl").open()]
    logs = {path.name for path in (out / "logs" / attempt["job"]).iterdir()}
    ranks = {f"rank-{rank}.worker-{rank // 2}.log" for rank in range(4)}
    assert ranks <= logs
    assert logs - ranks <= {"launcher.worker-0.log", "launcher.worker-1.log"}
    assert not [p for p in (out / "logs").rglob("*") if p.is_file() and SECRET in p.read_text()]
    assert not list(ROOT.glob(".deepspeed_env"))
    assert not [p for p in Path("/tmp").glob("octet-*") if attempt["job"] in p.name]


def test_what_crosses_the_link_is_what_the_formula_says(
    cluster: rehearsing.Cluster, tmp_path: Path
) -> None:
    """ZeRO-1 on 2 x 2 ranks: of 18 bytes a parameter (N = 4) a quarter leaves each host.

    The ring all-reduce sends 2(N-1)/N x 2 bytes a parameter and rank, the all-gather half of that:
    4.5 in all; each host has one rank whose successor in the ring is on the other host.
    """
    grown = ["model.config.n_embd=256", "model.config.n_head=4", "model.config.n_layer=3"]
    sent = []
    for updates in (2, 10):
        before = cluster.sent_bytes("worker-0"), cluster.sent_bytes("worker-1")
        words = launch(cluster, tmp_path / f"of-{updates}", f"schedule.updates={updates}", *grown)
        words += ["evaluate.every_updates=100", "checkpoint.every_updates=100", "--port", "29511"]
        ended = cluster.run([*words, "schedule.warmup_updates=1"])
        assert ended.code == 0, ended.text
        after = cluster.sent_bytes("worker-0"), cluster.sent_bytes("worker-1")
        sent.append([b - a for a, b in zip(before, after, strict=True)])
    found = re.search(r"rehearsal: ([\d,]+) parameters", ended.text)
    assert found is not None
    parameters = int(found[1].replace(",", ""))
    for few, many in zip(*sent, strict=True):
        assert (many - few) / 8 / parameters == pytest.approx(4.5, rel=0.05)


def started(cluster: rehearsing.Cluster, out: Path, *words: str) -> rehearsing.Started:
    """A long run that has trained a few updates."""
    long = ["schedule.updates=4000", "checkpoint.every_updates=3", "log.every_updates=1"]
    running = cluster.start(launch(cluster, out, *long, "sample=null", *words))
    wait_for(lambda: len(records(out)) >= 4, 120, f"training ({running.text()[-2000:]})")
    return running


def test_a_killed_rank_ends_its_job_and_no_other(
    cluster: rehearsing.Cluster, tmp_path: Path
) -> None:
    with started(cluster, tmp_path / "a") as one:
        other = cluster.start(launch(cluster, tmp_path / "b", *SHORT, "--port", "29512"))
        with other:
            pid = str(status(tmp_path / "a", 3)["pid"])
            cluster.ok("kill", "-KILL", pid, host="worker-1")
            ended = one.wait(60)
            assert ended.code == 137
            first = [line for line in ended.text.splitlines() if "failed first" in line]
            assert first == ["worker-1 rank 3 failed first: killed by SIGKILL"]
            spared = other.wait()
            assert spared.code == 0, spared.text
    assert quiet(cluster)


def test_an_interrupt_saves_everywhere_and_the_same_command_goes_on(
    cluster: rehearsing.Cluster, tmp_path: Path
) -> None:
    with started(cluster, tmp_path / "run") as running:
        running.interrupt()
        ended = running.wait(60)
    assert ended.code == 75, ended.text
    assert "stopping: the ranks finish their window and save" in ended.text
    stopped = re.search(r"stopped at update (\d+) of 4000", ended.text)
    assert stopped is not None
    assert [status(tmp_path / "run", rank)["exit_code"] for rank in range(4)] == [75] * 4
    assert "Traceback" not in ended.text
    assert quiet(cluster)
    with started(cluster, tmp_path / "run") as again:
        wait_for(lambda: len(records(tmp_path / "run")) > int(stopped[1]) + 1, 60, "more updates")
        again.process.send_signal(signal.SIGTERM)  # of a scheduler: the same
        assert again.wait(60).code == 75
        assert f"resumed  at update {stopped[1]}" in again.text()
    steps = [r["step"] for r in records(tmp_path / "run")]
    assert steps == list(range(1, len(steps) + 1))


def test_a_crash_starts_again_from_the_checkpoint(
    cluster: rehearsing.Cluster, tmp_path: Path
) -> None:
    with started(cluster, tmp_path / "run", "--restarts", "1") as running:
        wait_for(lambda: (tmp_path / "run" / "checkpoints" / "LATEST").exists(), 60, "a checkpoint")
        cluster.ok("kill", "-KILL", str(status(tmp_path / "run", 1)["pid"]))
        wait_for(lambda: "resumed  at update" in running.text(), 90, "the second attempt")
        wait_for(lambda: status(tmp_path / "run", 0).get("state") == "training", 60, "training")
        running.interrupt()
        assert running.wait(90).code == 75  # a wish of the user starts nothing again
    lines = (tmp_path / "run" / "logs" / "attempts.jsonl").read_text().splitlines()
    assert [json.loads(line)["code"] for line in lines] == [137, 75]
    assert quiet(cluster)


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--interface", "eth9"], 3, "no such network interface (NCCL_SOCKET_IFNAME=eth9"),
        (["--port", "29777"], 3, "port 29777 on worker-0 is in use (python"),
        (["optim.lr=fast"], 2, "optim.lr='fast': expected a valid number"),
        (["batch.micro=3"], 2, "batch.micro=3"),
        (["--hostfile", "nowhere"], 2, "hostfile nowhere can't be read"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else None,
)
def test_what_is_wrong_is_told_and_nothing_is_left(
    cluster: rehearsing.Cluster, tmp_path: Path, words: list[str], code: int, told: str
) -> None:
    listen = "import socket, time; s = socket.create_server(('', 29777)); time.sleep(100)"
    with cluster.start(["python", "-c", listen]):
        ended = cluster.run(launch(cluster, tmp_path / "run", *SHORT, *words))
    assert ended.code == code, ended.text
    assert told in ended.text
    assert "Traceback" not in ended.text
    assert quiet(cluster)


def test_a_host_without_a_name_is_told_with_all_others(
    cluster: rehearsing.Cluster, tmp_path: Path
) -> None:
    hosts = tmp_path / "hosts"
    names = ("worker-0", "worker-1", "worker-8", "worker-9")
    hosts.write_text("".join(f"{name} slots=1\n" for name in names))
    ended = cluster.run([*launch(cluster, tmp_path / "run"), "--hostfile", str(hosts)])
    assert ended.code == 3
    for name in ("worker-8", "worker-9"):
        assert f"{name}: its name does not resolve" in ended.text
    assert quiet(cluster)


@pytest.mark.parametrize("how", ["sshd", "power"])
def test_a_node_that_is_lost_ends_the_job(tmp_path: Path, how: str) -> None:
    """Last, in clusters of their own: the node does not come back."""
    with rehearsing.rehearsal({"worker-0": 1, "worker-1": 1}, tmp_path) as cluster:
        limits = ["--heartbeat", "5", "--grace", "30"]
        with started(cluster, tmp_path / "run", *limits) as running:
            if how == "sshd":
                cluster.ok("pkill", "-KILL", "sshd", host="worker-1")
            else:
                cluster.power_off("worker-1")
            ended = running.wait(60)
        assert ended.code == 1, ended.text
        assert "worker-1: " in ended.text.split("stopping")[0]
        wait_for(lambda: quiet(cluster), 60, "the end of the lost node's ranks")
        [line] = (tmp_path / "run" / "logs" / "attempts.jsonl").read_text().splitlines()
        left = job_folder(json.loads(line)["job"])
        assert how == "power" or not left.exists()
        shutil.rmtree(left, ignore_errors=True)  # without power nobody could, and /tmp is shared
