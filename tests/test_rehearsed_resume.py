"""Two rehearsed hosts: one is lost and comes back; and each keeps its part of a run on its disk."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import launching
import nursery
import psutil
import pytest
import rehearsing
from launching import records, wait_for
from nursery import EXACT, ORDER

pytestmark = rehearsing.rootful()
OCTET = str(launching.BIN / "octet")
LOSS = 1e-4  # in fp32, where only the order of the sums differs between numbers of ranks
WORDS = ["schedule.updates=400", "checkpoint.every_updates=4", *nursery.QUIET]
STILL = ["model.config.resid_pdrop=0.0", "model.config.embd_pdrop=0.0"]
HOSTS = ("worker-0", "worker-1")


class Hosts:
    """The hosts, each with a disk of its own at the same place."""

    def __init__(self, cluster: rehearsing.Cluster, disk: Path) -> None:
        self.cluster, self.disk = cluster, disk

    def places(self, *names: str) -> list[nursery.Place]:
        """A rank on each of these hosts, in order."""
        found: list[nursery.Place] = []
        kinds = ("pid", "mnt", "net", "uts", "ipc")
        for index, name in enumerate(names):
            handles = self.cluster._inside.namespaces[name]
            paths = [f"/proc/{os.getpid()}/fd/{handle}" for handle in handles]
            env = {"MASTER_ADDR": self.cluster.addresses[names[0]], "GLOO_SOCKET_IFNAME": "eth0"}
            env["LOCAL_RANK"] = str(names[:index].count(name))
            found.append(nursery.Place(dict(zip(kinds, paths, strict=True)), env))
        return found

    def seen(self, host: str, folder: Path) -> Path:
        """A host's own folder, from outside."""
        first = self.cluster.processes(host, system=True)[0]
        return Path(f"/proc/{first.pid}/root{folder}")

    def start(self, run_file: Path, folder: Path, *words: str, hosts: Any, **how: Any) -> Any:
        """Start ranks on these hosts into the folder at the same place on their own disks."""
        log = self.cluster.folder / f"{folder.name}-{nursery.shared().jobs}.log"
        places = self.places(*hosts)
        return nursery.start(run_file, *WORDS, *words, folder=folder, ranks=places, log=log, **how)

    def stop_at(
        self, run_file: Path, folder: Path, update: int, *words: str, where: str, **how: Any
    ) -> nursery.Ended:
        """Train up to an update and touch STOP on one host."""
        with self.start(run_file, folder, *words, **how) as ranks:
            ranks.reach(update)
            (self.seen(where, folder) / "STOP").touch()
            ended = ranks.wait()
        assert set(ended.codes) == {75}, ended.text[-3000:]
        return ended


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    folder = tmp_path_factory.mktemp("cluster")
    disk = folder / "disk"
    disk.mkdir()
    slots = dict.fromkeys(HOSTS, 2)
    with rehearsing.rehearsal(slots, folder, local=[str(disk)]) as cluster:
        yield Hosts(cluster, disk)


def test_a_lost_node_the_rest_of_the_run_and_the_node_again(
    hosts: Hosts, tiny_run: Path, tmp_path: Path
) -> None:
    cluster, out, whole, one = hosts.cluster, tmp_path / "run", tmp_path / "whole", tmp_path / "one"
    length = [*WORDS, *STILL, "schedule.updates=60"]
    arm = nursery.fp32_arms(tmp_path)["ZeRO-1 fp32"]
    nursery.good(tiny_run, *length, folder=whole, arm=arm)
    one.write_text("worker-0 slots=2\n")

    def launch(hostfile: Path) -> list[str]:
        words = [OCTET, "launch", "--hostfile", str(hostfile), "--config", str(arm)]
        return [*words, str(tiny_run), f"output_dir={out}", *length]

    with cluster.start(launch(cluster.hostfile)) as started:
        wait_for(lambda: nursery.steps(out)[-1:] >= [10], 120, "update 10")
        for process in cluster.processes("worker-1"):
            with suppress(psutil.Error):
                if "recipes/pretrain.py" in " ".join(process.cmdline()):
                    process.kill()
        ended = started.wait()
    assert ended.code == 128 + signal.SIGKILL, ended.text[-3000:]
    first = int(nursery.newest(out).name[5:])
    with cluster.start(launch(one)) as started:
        wait_for(lambda: nursery.steps(out)[-1:] >= [first + 9], 120, "more updates")
        (out / "STOP").touch()
        ended = started.wait()
    assert ended.code == 75, ended.text[-3000:]
    # A save that was prepared when the node went counts too, so it may be newer than the pointer.
    assert "ranks: 4 -> 2" in ended.text and nursery.resumed(ended) in (first, first + 4)
    second = int(nursery.newest(out).name[5:])
    assert second > first
    ended = cluster.run(launch(cluster.hostfile))
    assert ended.code == 0, ended.text[-3000:]
    assert "ranks: 2 -> 4" in ended.text and nursery.resumed(ended) == second
    assert nursery.told(out, ORDER) == nursery.told(whole, ORDER)
    losses = [[record["loss"] for record in records(path)] for path in (out, whole)]
    assert losses[0] == pytest.approx(losses[1], abs=LOSS)


def test_each_host_keeps_its_part_and_the_run_goes_on_exactly(
    hosts: Hosts, tiny_run: Path, tmp_path: Path
) -> None:
    folder, whole = hosts.disk / "parts", tmp_path / "whole"
    first = hosts.stop_at(tiny_run, folder, 6, hosts=HOSTS, where="worker-1")
    assert "on 2 disks, each keeps its part: worker-0 (rank 0); worker-1 (rank 1)" in first.text
    seen = [hosts.seen(host, folder) for host in HOSTS]
    checkpoints = [nursery.newest(path) for path in seen]
    manifests = [(path / "manifest.json").read_bytes() for path in checkpoints]
    assert manifests[0] == manifests[1]
    assert [disk["host"] for disk in json.loads(manifests[0])["disks"]] == list(HOSTS)
    for rank, path in enumerate(checkpoints):
        names = {file.name for file in path.iterdir()}
        assert f"arrays-{rank:05d}.safetensors" in names
        assert f"arrays-{1 - rank:05d}.safetensors" not in names
        assert names >= {"state.json", "arrays.json", "tokenizer.json", "config.json"}
    at = int(checkpoints[0].name[5:])
    again = hosts.stop_at(tiny_run, folder, at + 5, hosts=HOSTS, where="worker-0")
    assert nursery.resumed(again) == at
    at = nursery.steps(seen[0])[-1]
    with nursery.start(tiny_run, *WORDS, folder=whole) as ranks:
        ranks.reach(at)
        ranks.signal(0, signal.SIGTERM)
        ranks.wait()
    assert nursery.told(seen[0], EXACT) == nursery.told(whole, EXACT)[:at]


def test_other_ranks_on_local_disks(hosts: Hosts, tiny_run: Path, tmp_path: Path) -> None:
    folder, whole = hosts.disk / "worlds", tmp_path / "whole"
    arm = nursery.fp32_arms(tmp_path)["ZeRO-1 fp32"]
    seen = hosts.seen("worker-0", folder)
    at = -1
    for names in (HOSTS, (HOSTS[0], HOSTS[0], HOSTS[1], HOSTS[1]), HOSTS[::-1]):
        ended = hosts.stop_at(
            tiny_run, folder, max(at, 0) + 5, *STILL, hosts=names, where="worker-1", arm=arm
        )
        assert nursery.resumed(ended) == at
        at = int(nursery.newest(seen).name[5:])
        seen = hosts.seen(names[0], folder)
    with nursery.start(tiny_run, *WORDS, *STILL, folder=whole, arm=arm) as ranks:
        ranks.reach(at)
        ranks.signal(0, signal.SIGTERM)
        ranks.wait()
    got: dict[int, dict[str, Any]] = {}
    for host in HOSTS:
        got |= {record["step"]: record for record in records(hosts.seen(host, folder))}
    want = records(whole)[:at]
    for record in want:
        mine = got[record["step"]]
        assert [mine[key] for key in ORDER] == [record[key] for key in ORDER]
        assert mine["loss"] == pytest.approx(record["loss"], abs=LOSS)


def test_a_lost_part_is_told_with_its_node(hosts: Hosts, tiny_run: Path) -> None:
    folder = hosts.disk / "lost"
    hosts.stop_at(tiny_run, folder, 10, hosts=HOSTS, where="worker-0")
    seen = [hosts.seen(host, folder) / "checkpoints" for host in HOSTS]
    older, newer = sorted(path.name for path in seen[0].glob("step-*"))
    part = "arrays-00001.safetensors"
    # Only worker-0 takes part: nothing is whole, nothing is touched.
    with hosts.start(tiny_run, folder, hosts=HOSTS[:1]) as ranks:
        ended = ranks.wait()
    assert set(ended.codes) == {2}, ended.text[-3000:]
    for step in (older, newer):
        assert step in ended.text
    assert f"{part} (written on worker-1) is on no node of this start" in ended.text
    # The newest is lost on worker-1: back to the older one.
    (seen[1] / newer / part).unlink()
    with hosts.start(tiny_run, folder, hosts=HOSTS) as ranks:
        ranks.until(lambda: "resumed" in ranks.text(), "the resume")
        ranks.signal(0, signal.SIGTERM)
        ended = ranks.wait()
    assert set(ended.codes) == {75}, ended.text[-3000:]
    assert nursery.resumed(ended) == int(older[5:])
    assert f"checkpoint {newer} is broken, going back" in ended.text
    assert part in ended.text and "worker-1" in ended.text


def test_kills_in_a_save_on_two_disks_lose_nothing(
    hosts: Hosts, tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, whole = hosts.disk / "kills", tmp_path / "whole"
    rng, kept, lost, count = random.Random(3), -1, 0, 10
    seen = [hosts.seen(host, folder) for host in HOSTS]
    how: dict[str, Any] = {"script": nursery.PLANTED, "hosts": HOSTS}
    for index in range(count):
        env = {"FAULTY": str(index % 2), "KILL_OPERATION": str(rng.randint(1, 40))}
        env |= {"KILL_WHEN": rng.choice(["before", "after", "half"]), "KILL_ALL": "1"}
        with hosts.start(tiny_run, folder, env=env, **how) as ranks:
            ended = ranks.wait()
        assert "planted: SIGKILL" in ended.text and all(ended.codes), ended.text[-3000:]
        went_on = nursery.resumed(ended)
        lost += went_on < kept
        saves = [record["step"] for record in records(seen[0], "saves")]
        kept = max([kept, went_on, *saves])
    ended = hosts.stop_at(tiny_run, folder, kept + 3, hosts=HOSTS, where="worker-0")
    assert nursery.resumed(ended) >= kept
    with capsys.disabled():
        print(f"\nengine kills on two disks: {count}, lost: {lost}")
    assert lost == 0
    at = nursery.steps(seen[0])[-1]
    with nursery.start(tiny_run, *WORDS, folder=whole) as ranks:
        ranks.reach(at)
        ranks.signal(0, signal.SIGTERM)
        ranks.wait()
    assert nursery.told(seen[0], EXACT) == nursery.told(whole, EXACT)[:at]
    left = {path.name for path in (seen[1] / "checkpoints").iterdir()}
    assert not {name for name in left if name.startswith(".")}
