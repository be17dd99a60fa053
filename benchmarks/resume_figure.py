"""Draws docs/resume.svg: a run that loses a node on the way, beside the run that never lost one.

    python benchmarks/resume_figure.py       # as root; needs the extra `figures`

Real runs on two rehearsed hosts, each start by `octet launch` (ZeRO-1, bf16, no dropout): 2 x 2
ranks until the ranks of one host get SIGKILL, 1 x 2 ranks from the last checkpoint until somebody
touches STOP, 2 x 2 ranks to the end. The uninterrupted run has 2 x 2 ranks throughout.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

from recipes.cluster.hostfile import read_hostfile
from recipes.rehearsal.namespaces import Rehearsal

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
UPDATES, EVERY, KILL, STOP = 90, 10, 37, 62
SETTINGS = [f"schedule.updates={UPDATES}", f"checkpoint.every_updates={EVERY}", "evaluate=null"]
SETTINGS += [
    "data.held_out=null",
    "sample=null",
    "log.every_updates=1",
    "schedule.warmup_updates=10",
]
PARITY = 1e-2  # nats per token, in bf16 on another number of ranks
GREY, COLOURS = "#b8b8b8", ("#0072b2", "#d55e00", "#009e73")
Record = dict[str, Any]
Leg = tuple[str, str, int, list[Record]]  # ranks, how it ended, resumed from, records so far


class Cluster:
    """Two rehearsed hosts and a run folder that they share."""

    def __init__(self, folder: Path, inside: Rehearsal) -> None:
        self.folder, self._inside = folder, inside

    def hostfile(self, *hosts: str) -> Path:
        """A hostfile of two slots a host."""
        path = self.folder / f"hostfile-{len(hosts)}"
        path.write_text("".join(f"{host} slots=2\n" for host in hosts))
        return path

    def launch(self, name: str, *hosts: str) -> subprocess.Popen[bytes]:
        """Start `octet launch` on the first host."""
        words = [str(BIN / "octet"), "launch", "--hostfile", str(self.hostfile(*hosts))]
        words += ["--config", "accelerate_configs/local_zero1_bf16.yaml"]
        words += ["recipes/runs/rehearsal.yaml", f"output_dir={self.folder / name}", *SETTINGS]
        env = os.environ | {"OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{os.environ['PATH']}"}
        log = (self.folder / f"{name}.log").open("ab")
        return self._inside.popen(words, folder=ROOT, env=env, stdout=log, stderr=log)

    def kill_ranks(self, name: str, host: str) -> None:
        """SIGKILL to a host's ranks."""
        told = [json.loads(p.read_text()) for p in (self.folder / name / "status").glob("rank-*")]
        pids = [str(rank["pid"]) for rank in told if rank["host"] == host]
        self._inside.popen(["sh", "-c", f"kill -9 {' '.join(pids)}"], host=host).wait()


def records(folder: Path) -> list[Record]:
    """Every whole line of a run's metrics."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.is_file() else []
    return [json.loads(line) for line in lines]


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Wait until something is so; a job that ends before has failed."""
    while not condition():
        if process.poll() is not None:
            raise SystemExit(f"octet launch ended with {process.returncode}; see the logs")
        time.sleep(0.02)


def reached(folder: Path, update: int) -> bool:
    """Whether a run has recorded an update."""
    found = records(folder)
    return bool(found) and found[-1]["step"] >= update


def resumed(log: Path) -> int:
    """The update that the last start went on from; 0 for a start from the beginning."""
    found = re.findall(r"resumed\s+at update (\d+)", log.read_text())
    return int(found[-1]) if found else 0


def interrupted(cluster: Cluster) -> list[Leg]:
    """The three starts of the run that loses a node."""
    name, legs = "parts", list[Leg]()
    folder, log = cluster.folder / name, cluster.folder / f"{name}.log"

    def ended(ranks: str, how: str, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        legs.append((ranks, f"{how}, exit code {code}", resumed(log), records(folder)))

    process = cluster.launch(name, "worker-0", "worker-1")
    wait_for(lambda: reached(folder, KILL), process)
    cluster.kill_ranks(name, "worker-1")
    ended("2 x 2 ranks", "SIGKILL on worker-1", process)
    process = cluster.launch(name, "worker-0")
    wait_for(lambda: reached(folder, STOP), process)
    (folder / "STOP").touch()
    ended("1 x 2 ranks", "STOP touched", process)
    ended("2 x 2 ranks", "done", cluster.launch(name, "worker-0", "worker-1"))
    return legs


def check(whole: list[Record], parts: list[Record]) -> float:
    """Refuse to draw what is not so; the greatest difference of a loss."""
    for key in ("step", "data_digest", "lr", "tokens", "samples"):
        if [r[key] for r in whole] != [r[key] for r in parts]:
            raise SystemExit(f"{key} differs between the runs")
    worst = max(abs(a["loss"] - b["loss"]) for a, b in zip(whole, parts, strict=True))
    if worst > PARITY:
        raise SystemExit(f"losses differ by {worst}, more than {PARITY}")
    return float(worst)


def draw(whole: list[Record], legs: list[Leg], worst: float, out: Path) -> None:
    """The figure: losses above, their difference below."""
    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "octet", "font.size": 9, "axes.spines.top": False}
    matplotlib.rcParams |= {"axes.spines.right": False, "svg.fonttype": "none"}
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(
        2, 1, sharex=True, figsize=(8, 4.6), height_ratios=(3, 1), layout="constrained"
    )
    losses = {r["step"]: r["loss"] for r in whole}
    above.plot(losses.keys(), losses.values(), color=GREY, linewidth=5, label="never interrupted")
    for colour, (ranks, how, began, found) in zip(COLOURS, legs, strict=True):
        mine = [r for r in found if r["step"] > began]
        at = [r["step"] for r in mine]
        label = f"{ranks}, updates {at[0]} to {at[-1]}: {how}"
        above.plot(at, [r["loss"] for r in mine], color=colour, linewidth=1.3, label=label)
        below.plot(at, [r["loss"] - losses[r["step"]] for r in mine], color=colour, linewidth=1)
        for axis in (above, below) if at[-1] < UPDATES else ():
            axis.axvline(at[-1], color=colour, linestyle=":", linewidth=1)
    above.set_ylabel("loss, nats per token")
    above.legend(loc="upper right", framealpha=1, edgecolor="none")
    below.set_ylabel("difference")
    reach = max(5e-4, 1.2 * worst)
    below.set_ylim(-reach, reach)
    below.set_xlabel("update")
    figure.savefig(out, dpi=120, metadata={"Date": None} if out.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "resume.svg")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "hostfile").write_text("worker-0 slots=2\nworker-1 slots=2\n")
        with Rehearsal(read_hostfile(folder / "hostfile")) as inside:
            cluster = Cluster(folder, inside)
            code = cluster.launch("whole", "worker-0", "worker-1").wait()
            if code:
                raise SystemExit(f"{code}: {(folder / 'whole.log').read_text()[-3000:]}")
            legs = interrupted(cluster)
        whole = records(folder / "whole")
        worst = check(whole, legs[-1][3])
        draw(whole, legs, worst, args.out)
    print(
        f"{args.out}: data order and learning rate equal, losses within {worst:.1e} nats per token"
    )


if __name__ == "__main__":
    main()
