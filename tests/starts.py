"""Starts of every launcher, arm and shape, with paths that depend on no machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from recipes.cluster.hostfile import Host
from recipes.cluster.launchers import LAUNCHERS, Arm, Start, faults, pasteable, script_arguments

WORK = Path("/repo")
TWO = (Host(name="worker-0", slots=4, line=2), Host(name="worker-1", slots=4, line=3))
CHOSEN = (
    Host(name="worker-0", slots=2, line=2, gpus=(0, 2)),
    Host(name="worker-1", slots=2, line=3, gpus=(1, 3)),
)
ZERO1 = Arm(
    path=WORK / "accelerate_configs/zero1_fp16.yaml",
    kind="DEEPSPEED",
    deepspeed_json=WORK / "ds_configs/zero1_fp16.json",
    cpu=False,
)
DDP = Arm(
    path=WORK / "accelerate_configs/ddp_fp16.yaml", kind="DDP", deepspeed_json=None, cpu=False
)
ARMS = {"ZeRO-1": ZERO1, "DDP": DDP}
SHAPES = {
    "2 hosts of 4": TWO,
    "1 host of 4": TWO[:1],
    "chosen GPUs": CHOSEN,
    "2 hosts of 4, on the CPU": TWO,
}


def start(
    launcher: str,
    arm: Arm = ZERO1,
    hosts: tuple[Host, ...] = TWO,
    arguments: tuple[str, ...] = ("recipes/runs/gpt2_xl.yaml", "optim.lr=3e-4"),
) -> Start:
    """A start of the recipe in /repo."""
    return Start(
        launcher=launcher,
        hosts=hosts,
        hostfile=WORK / "hostfile",
        arm=arm,
        master="10.0.0.1" if len(hosts) > 1 else "",
        port=29500,
        python=WORK / ".venv/bin/python",
        script=WORK / "recipes/pretrain.py",
        arguments=(*arguments, *script_arguments(launcher, arm)),
    )


def every() -> dict[tuple[str, str, str], Start]:
    """By launcher, arm and shape: all that can be started."""
    found = {
        (launcher, arm, shape): start(
            launcher, replace(ARMS[arm], cpu=shape.endswith("CPU"), gpu_ids="all"), SHAPES[shape]
        )
        for launcher in LAUNCHERS
        for arm in ARMS
        for shape in SHAPES
    }
    return {key: one for key, one in found.items() if not faults(one)}


def golden(launcher: str) -> str:
    """What `--dry-run` prints for every arm and shape under a launcher."""
    return "\n".join(
        f"######## {arm}, {shape}\n" + pasteable(one, {"NCCL_DEBUG": "INFO"}, {}, WORK)
        for (name, arm, shape), one in every().items()
        if name == launcher
    )


if __name__ == "__main__":  # after a change that is meant: look at the difference in git
    for name in LAUNCHERS:
        path = Path(__file__).parent / "golden" / f"{name}.txt"
        path.write_text(golden(name), encoding="utf-8")
