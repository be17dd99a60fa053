"""docs/multi_node.md: every command for several nodes is pasted and trains, with 8 ranks."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import launching
import pytest
import rehearsing
from launching import ROOT, records

pytestmark = rehearsing.rootful()
TEXT = (ROOT / "docs" / "multi_node.md").read_text(encoding="utf-8").split("## Without")[1]
PREPARATION = re.findall(r"(?ms)^```\n((?:source|export) .*?)^```", TEXT)
# "# on worker-1" or "# once, on worker-0" heads every command that is meant for a node.
BLOCKS = re.findall(r"(?ms)^```\n# (?:once, )?on (worker-\d)\n(.*?)^```", TEXT)
HOSTS = {"worker-0": 4, "worker-1": 4}


def jobs() -> dict[str, list[tuple[str, str]]]:
    """The commands by the run that they start: host and text."""
    found: dict[str, list[tuple[str, str]]] = {}
    for host, command in BLOCKS:
        [name] = re.findall(r" name=(\S+)", command)
        found.setdefault(name, []).append((host, command))
    return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[rehearsing.Cluster]:
    with rehearsing.rehearsal(HOSTS, tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands need of a checkout, so that their runs do not land in this one."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("recipes", "accelerate_configs", "ds_configs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "hostfile", folder)
    (folder / ".venv").symlink_to(launching.BIN.parent)
    return folder


def test_all_four_ways_are_in_the_document() -> None:
    assert {name: sorted(host for host, _ in job) for name, job in jobs().items()} == {
        "by-accelerate": ["worker-0", "worker-1"],
        "by-pdsh": ["worker-0"],
        "by-deepspeed": ["worker-0"],
        "by-torchrun": ["worker-0", "worker-1"],
    }


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", sorted(jobs()))
def test_the_command_trains_as_it_is_pasted(
    cluster: rehearsing.Cluster, checkout: Path, name: str
) -> None:
    [preparation] = PREPARATION
    with ExitStack() as stack:
        running = [
            stack.enter_context(
                cluster.start(["bash", "-ec", preparation + command], host=host, cwd=checkout)
            )
            for host, command in jobs()[name]
        ]
        for each in running:
            ended = each.wait(360)
            assert ended.code == 0, ended.text
    told = json.loads((checkout / "outputs" / name / "run.json").read_text())
    assert told["hosts"] == HOSTS
    assert told["strategy"] == "ZeRO-1 fp16"
    assert told["accumulation"] == 2
    losses = [record["loss"] for record in records(checkout / "outputs" / name)]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 0.5
    assert not cluster.processes("worker-0")
    assert not cluster.processes("worker-1")


def test_make_rehearsal_runs_the_shipped_hostfile(tmp_path: Path) -> None:
    """The README's command, on an output folder of its own; eight ranks under `octet launch`."""
    words = ["make", "rehearsal", f"ARGS=output_dir={tmp_path / 'run'}"]
    with launching.Launched(words, tmp_path / "log") as launched:
        ended = launched.wait(360)
    assert ended.code == 0, ended.text
    assert json.loads((tmp_path / "run" / "run.json").read_text())["hosts"] == HOSTS
    for told in ("metrics.jsonl", "checkpoints/", str(tmp_path / "run" / "logs")):
        assert told in ended.text
