"""Published measurements (tests/published/*.yaml) as the planner's inputs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.planner.families import shape_of
from recipes.planner.hardware import read_hardware
from recipes.planner.workload import Candidate, Cluster, Strategy, Workload
from recipes.runfile import read_yaml

FOLDER = Path(__file__).resolve().parent / "published"
BYTES = {"B": 1.0, "GB": 1e9, "MiB": 2.0**20, "GiB": 2.0**30}
HARDWARE = read_hardware()
# Where the source names no network and the ranks are on several nodes.
UNNAMED_NIC = "roce-1600"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured configuration."""

    id: str
    work: Workload
    candidate: Candidate
    cluster: Cluster
    complete: bool
    tree: dict[str, Any]

    def measured(self, what: str) -> float | None:
        """A measured value by its name."""
        for entry in self.tree["measured"]:
            if entry["what"] == what:
                return float(entry["value"])
        return None

    def peak(self) -> tuple[float, str] | None:
        """Measured bytes of the peak and their kind (alloc, reserved, smi, unstated)."""
        for entry in self.tree["measured"]:
            if entry["what"] == "peak":
                return entry["value"] * BYTES[entry["unit"]], entry["kind"]
        return None

    def update_s(self) -> float | None:
        """Seconds of an update, from whichever rate was measured."""
        if (update := self.measured("update")) is not None:
            return update
        for entry in self.tree["measured"]:
            if entry["what"] == "throughput":
                per_gpu = entry["unit"].endswith("/GPU")
                rate = entry["value"] * (self.cluster.world if per_gpu else 1)
                return self.work.global_tokens / rate
        return None


def rows(name: str, any_gpu: str = "") -> list[Row]:
    """The rows of one file whose model, GPU and batch are stated.

    Args:
        any_gpu: taken where the source names no GPU; empty: such rows are left out.
    """
    needed = ("gpu", "nodes", "gpus", "micro", "accumulation", "model")
    found = []
    for entry in read_yaml(FOLDER / f"{name}.yaml")["rows"]:
        entry = entry | {"gpu": entry["gpu"] or any_gpu}
        if all(entry.get(key) for key in needed):
            found.append(_row(entry))
    return found


def _row(entry: dict[str, Any]) -> Row:
    strategy = Strategy(**entry["strategy"])
    world = entry["nodes"] * entry["gpus"]
    ranks = world // (strategy.tensor * strategy.pipeline)
    nic = entry["nic"] or (UNNAMED_NIC if entry["nodes"] > 1 else None)
    shape = shape_of({"n_positions": entry["seq_len"]} | entry["model"], entry["id"])
    return Row(
        id=entry["id"],
        work=Workload(
            shape=shape,
            seq_len=entry["seq_len"],
            global_sequences=entry["micro"] * entry["accumulation"] * ranks,
            precision=entry["precision"],
            loss=entry["loss"],
            kernels=entry["kernels"],
        ),
        candidate=Candidate(
            strategy=strategy,
            micro=entry["micro"],
            checkpointing=entry["checkpointing"],
            attention=entry["attention"],
        ),
        cluster=Cluster(
            gpu=HARDWARE.gpu(entry["gpu"]),
            nodes=entry["nodes"],
            gpus=entry["gpus"],
            nic=HARDWARE.nic(nic) if nic else None,
        ),
        complete=entry["complete"],
        tree=entry,
    )
