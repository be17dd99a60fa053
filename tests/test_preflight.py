"""`octet preflight` over real hosts: healthy ones, and ones with a fault planted on each."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import launching
import pytest
import rehearsing
import tiny

from recipes.cluster.asking import Asked, read
from recipes.preflight.gathering import Question
from recipes.preflight.preflight import SCRIPT, Wishes, preflight
from recipes.rehearsal.node import __file__ as NODE_FILE

SITE = Path(sys.executable).parent.parent / "lib" / f"python3.{sys.version_info.minor}"
ARM = str(launching.ROOT / "accelerate_configs" / "local_zero1_bf16.yaml")


@dataclass(frozen=True)
class Checked:
    """How a preflight ended."""

    code: int
    text: str
    record: dict[str, Any]
    seconds: float
    left: list[Path]  # in the outputs folder

    def row(self, check: str, node: str) -> dict[str, Any]:
        """The one row of a check on a node."""
        rows = [r for r in self.record["rows"] if (r["check"], r["node"]) == (check, node)]
        assert len(rows) == 1, rows
        return dict(rows[0])

    def bad(self) -> set[tuple[str, str, str]]:
        """Check, node and verdict of every row that is not ok."""
        rows = self.record["rows"]
        return {(r["check"], r["node"], r["verdict"]) for r in rows if r["verdict"] != "ok"}


def check(
    cluster: rehearsing.Cluster,
    hostfile: Path,
    env: dict[str, str] | None = None,
    overrides: Sequence[str] = (),
    options: Sequence[str] = ("--no-ranks",),
) -> Checked:
    """Preflight from the first host."""
    folder = cluster.folder
    run = tiny.write_run(folder, folder / "corpus")
    words = [str(launching.BIN / "octet"), "preflight", "--hostfile", str(hostfile)]
    words += [str(run), "--config", ARM, "--json", str(folder / "out.json"), *options]
    words += overrides or [f"output_dir={folder}/outputs/tiny"]
    start = time.monotonic()
    (folder / "out.json").unlink(missing_ok=True)
    ended = cluster.run(words, env=env, limit_s=120)
    record = json.loads((folder / "out.json").read_text()) if ended.code in (0, 2, 3) else {}
    assert record, ended.text
    left = list(folder.glob("outputs*/**"))
    (folder / f"{hostfile.name}.txt").write_text(ended.text)
    return Checked(ended.code, ended.text, record, time.monotonic() - start, left)


# ---- input faults need no host


def test_every_fault_of_the_input_is_told_before_any_host_is_asked(tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("worker-0 slots=4x\n")
    asked = Asked(
        hostfile=str(tmp_path / "hostfile"),
        run=str(tmp_path / "none.yaml"),
        config=str(tmp_path / "none.yml"),
        overrides=("lr",),
        port=0,
        env=("NO_SUCH_VARIABLE",),
    )
    with pytest.raises(ValueError, match="slots=4x") as caught:
        read(asked, SCRIPT)
    for part in ("none.yaml", "none.yml", "--port 0", "NO_SUCH_VARIABLE"):
        assert part in str(caught.value)


def test_overrides_without_a_run_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("worker-0 slots=1\n")
    with pytest.raises(ValueError, match="no effect without a run file"):
        read(Asked(hostfile=str(tmp_path / "hostfile"), overrides=("a=1",)), SCRIPT)


def test_a_stage_that_does_not_exist_is_refused_before_any_host_is_asked(tmp_path: Path) -> None:
    asked = Asked(hostfile=str(tmp_path / "none"))
    with pytest.raises(ValueError, match="--only netwrok: expected some of matmul,network"):
        preflight(asked, Wishes(only="netwrok"))


@pytest.mark.parametrize(("launcher", "asked_for"), [("accelerate", False), ("deepspeed", True)])
def test_ssh_to_this_machine_is_asked_of_those_who_start_by_pdsh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str, asked_for: bool
) -> None:
    (tmp_path / "hostfile").write_text("localhost slots=1\nworker-1 slots=1\n")
    questions: list[Question] = []

    def note(question: Question) -> None:
        questions.append(question)
        raise ValueError("enough")

    monkeypatch.setattr("recipes.preflight.preflight.gather", note)
    with pytest.raises(ValueError, match="enough"):
        preflight(Asked(hostfile=str(tmp_path / "hostfile"), launcher=launcher), Wishes())
    assert questions[0].always_ssh is asked_for


# ---- a rehearsal


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[rehearsing.Cluster]:
    """Six hosts; every test of this module looks at them before or after the faults."""
    folder = tmp_path_factory.mktemp("preflight")
    tiny.write_corpus(folder / "corpus", documents=20)
    hosts = {f"worker-{i}": 1 for i in range(6)}
    with rehearsing.rehearsal(hosts, folder) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def healthy(cluster: rehearsing.Cluster) -> Checked:
    """Before any fault is planted."""
    (cluster.folder / "two").write_text("worker-0 slots=1\nworker-1 slots=1\n")
    return check(cluster, cluster.folder / "two")


@pytest.fixture(scope="module")
def slow(cluster: rehearsing.Cluster, healthy: Checked) -> Checked:
    """worker-1's processor is an old one: without the instructions that multiply bf16 fast."""
    # Not made slow by other programs: on a busy machine both ranks would be.
    undo = set_variable(cluster, "worker-1", "ONEDNN_MAX_CPU_ISA=SSE41")
    found = check(cluster, cluster.folder / "two", options=["--only", "matmul"])
    cluster.ok("ssh", "worker-1", undo)
    return found


@pytest.fixture(scope="module")
def faulty(cluster: rehearsing.Cluster, healthy: Checked, slow: Checked) -> Checked:
    """One fault or more on every host, and all of them found in one go."""
    folder = cluster.folder
    (folder / "outputs" / "tiny").mkdir(parents=True)
    # worker-1: another version, a clock that is ahead, a folder of its own that is nearly full.
    metadata = next(SITE.glob("site-packages/datasets-*.dist-info/METADATA"))
    changed = re.sub(r"(?m)^Version: .*$", "Version: 5.1.9", metadata.read_text())
    (folder / "METADATA").write_text(changed)
    cluster.ok("ssh", "worker-1", "mount", "--bind", str(folder / "METADATA"), str(metadata))
    move_clock(cluster, "worker-1", 60)
    outputs = str(folder / "outputs")
    cluster.ok("ssh", "worker-1", "mount -t tmpfs -o size=1m none", outputs)
    # worker-2: a folder that can't be written, no data, and no way to worker-1.
    cluster.ok("ssh", "worker-2", f"mount --bind {outputs} {outputs}")
    cluster.ok("ssh", "worker-2", f"mount -o remount,ro,bind {outputs}")
    cluster.ok("ssh", "worker-2", "mount -t tmpfs none", str(folder / "corpus"))
    cluster.ok("ssh", "worker-2", "ip route replace unreachable", cluster.addresses["worker-1"])
    # worker-3: no environment; worker-4: no checkout; worker-5: no sshd.
    cluster.ok("ssh", "worker-3", f"mount -t tmpfs none {Path(sys.executable).parent}")
    cluster.ok("ssh", "worker-4", f"mount -t tmpfs none {launching.ROOT.parent}")
    for process in cluster.processes("worker-5", system=True):
        if "sshd" in process.name() and NODE_FILE not in process.cmdline():
            process.kill()
    # All: a lock without a builder, an interface that no host has, a name without an address.
    lock = folder / "extensions" / "py311_cpu" / "op" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    os.utime(lock, (time.time() - 1800,) * 2)
    (folder / "many").write_text(cluster.hostfile.read_text() + "nowhere slots=1\n")
    env = {"TORCH_EXTENSIONS_DIR": str(folder / "extensions"), "GLOO_SOCKET_IFNAME": "eth9"}
    listener = "import socket, time; s = socket.create_server(('', 29500)); time.sleep(600)"
    with cluster.start([sys.executable, "-c", listener]):
        launching.wait_for(
            lambda: ":29500" in cluster.ok("ss", "-tln"), 20, "a listener on the master port"
        )
        return check(cluster, folder / "many", env, overrides=overrides(folder))


def overrides(folder: Path) -> list[str]:
    """A model whose checkpoints don't fit into a MiB, and a batch that 7 ranks share."""
    shared = ["batch.global_sequences=14", "data.lanes=7"]
    return [f"output_dir={folder}/outputs/tiny", "model.config.n_embd=128", *shared]


def move_clock(cluster: rehearsing.Cluster, host: str, seconds: int) -> None:
    """On one host, Python reads a clock that is ahead (libfaketime breaks Python's sleep)."""
    module = cluster.folder / "clock" / "sitecustomize.py"
    module.parent.mkdir()
    module.write_text(f"import time\nreal = time.time\ntime.time = lambda: real() + {seconds}\n")
    set_variable(cluster, host, f"PYTHONPATH={module.parent}")


def set_variable(cluster: rehearsing.Cluster, host: str, setting: str) -> str:
    """On one host, every Python starts with a variable; returns the command that undoes it."""
    real = Path(sys.executable).resolve()
    aside, wrapper = cluster.folder / "python-aside", cluster.folder / "python-wrapper"
    aside.touch()
    wrapper.write_text(f'#!/bin/bash\nexport {setting}\nexec -a "$0" {aside} "$@"\n')
    wrapper.chmod(0o755)
    cluster.ok("ssh", host, f"mount --bind {real} {aside} && mount --bind {wrapper} {real}")
    return f"umount {real} {aside}"


def cpu_flags() -> str:
    """What this machine's processors can."""
    return Path("/proc/cpuinfo").read_text()


needs_hosts = rehearsing.rootful()


def rootful(function: Any) -> Any:
    """Marks of a test that needs the rehearsal."""
    for mark in needs_hosts:
        function = mark(function)
    return function


@rootful
def test_healthy_hosts_pass_in_seconds_and_nothing_is_left(
    cluster: rehearsing.Cluster, healthy: Checked
) -> None:
    assert healthy.code == 0, healthy.text
    assert healthy.bad() == {("ranks", "all", "not checked")}
    assert healthy.record["seconds"] < 60
    assert healthy.record["parameters"] > 10_000
    assert healthy.record["interfaces"] == {"worker-0": "eth0", "worker-1": "eth0"}
    assert "export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0\n" in healthy.text
    assert "0 failed" in healthy.text
    clock = healthy.record["facts"]["worker-1"]["meet"]["clocks"]["worker-0"]
    assert abs(clock["ahead_s"]) < 0.1
    assert healthy.left == []


@rootful
@pytest.mark.skipif("avx512f" not in cpu_flags(), reason="bf16 is slow on this CPU anyway")
def test_a_slow_rank_is_named_with_its_host(slow: Checked) -> None:
    rows = [row for row in slow.record["rows"] if row["check"] == "matmul rate"]
    (row,) = [row for row in rows if row["verdict"] != "ok"]
    assert row["node"] == "rank 1 (worker-1)", slow.text
    assert row["verdict"] == "FAIL" and slow.code == 3
    assert slow.record["measured"]["world"] == 2
    left_out = {row["check"] for row in slow.record["rows"] if row["found"] == "left out"}
    assert left_out == {"network", "gradients", "data rate"}


@rootful
@pytest.mark.parametrize(
    ("check", "node", "found", "remedy"),
    [
        ("datasets", "worker-1", "5.1.9", "octet sync --hostfile "),
        ("clock", "worker-1", "60.0 s ahead of worker-0", "ssh -t worker-1 sudo timedatectl"),
        ("shared folder", "worker-1", "not the folder of worker-0 (tmpfs", "df -h"),
        ("free space", "worker-1", "1 MiB", "output_dir="),
        ("run folder", "worker-2", "Read-only file system", "ssh worker-2 'ls -ld /"),
        ("data", "worker-2", "no file", "ssh worker-2 'ls -l /"),
        ("route", "worker-2", "to worker-1: No route to host", "ip route get 10."),
        ("connections", "worker-1", "to worker-2, port", "ssh -t worker-2 sudo iptables"),
        ("ssh", "worker-3", "there is no interpreter at", "octet sync"),
        ("ssh", "worker-4", "there is no checkout at", "octet sync"),
        ("ssh", "worker-5", "nothing listens there", "start sshd"),
        ("ssh", "nowhere", "its name does not resolve", "/etc/hosts"),
        ("names", "worker-0", "nowhere: ", "# give nowhere an address"),
        ("port 29500", "worker-0", "in use by python", "ss -tlnp sport = :29500"),
        ("interface", "worker-1", "GLOO_SOCKET_IFNAME=eth9: no interface eth9", "=eth0"),
        (
            "build lock",
            "worker-1",
            "31 minutes old, held by nobody",
            "worker-2; do ssh $node rm -f /",
        ),
    ],
)
def test_each_planted_fault_is_named(
    faulty: Checked, check: str, node: str, found: str, remedy: str
) -> None:
    rows = [r for r in faulty.record["rows"] if (r["check"], r["node"]) == (check, node)]
    (row,) = [r for r in rows if r["verdict"] != "ok"]
    assert row["verdict"] == ("warn" if check == "shared folder" else "FAIL"), row
    assert found in row["found"] and remedy in row["remedy"], row
    # As it can be pasted: a line of its own, unbroken.
    assert f"\n{row['remedy']}\n" in faulty.text


@rootful
def test_faulty_hosts_stop_the_start_and_hide_nothing(faulty: Checked) -> None:
    assert faulty.code == 3
    ranks = faulty.row("ranks", "all")
    assert ranks["verdict"] == "not checked"
    assert faulty.row("names", "worker-1")["found"].startswith("nowhere: ")
    assert faulty.row("run folder", "worker-1")["verdict"] == "ok"  # small, but it takes a file
    good = {r["check"] for r in faulty.record["rows"] if r["verdict"] == "ok"}
    assert {"python", "our code", "packages", "files", "GPUs"} <= good
    assert faulty.seconds < 60


@rootful
def test_faults_of_the_input_alone_end_with_2(cluster: rehearsing.Cluster, faulty: Checked) -> None:
    (cluster.folder / "first").write_text("worker-0 slots=1\n")
    overridden = ["data.files=['/no/such/*.parquet']", f"output_dir={cluster.folder}/outputs/t"]
    found = check(cluster, cluster.folder / "first", overrides=overridden)
    assert found.code == 2, found.text
    assert found.row("data", "worker-0")["found"] == "/no/such/*.parquet: no file"
