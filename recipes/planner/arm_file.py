"""A strategy file of accelerate_configs/ as a strategy of the plan, with its precision."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from recipes.cluster.arm import read_arm
from recipes.config import Run
from recipes.planner.shape import Shape
from recipes.planner.workload import Precision, Strategy
from recipes.runfile import read_yaml

# What DeepSpeed takes where its JSON is silent (runtime/zero/config.py).
DEFAULT_BUCKET = 500_000_000
MIB = 2**20
PRECISIONS: dict[str, Precision] = {"no": "fp32", "fp16": "fp16", "bf16": "bf16"}


def read_arm_file(
    path: str, run: Run, shape: Shape | None
) -> tuple[Strategy, Precision, list[str]]:
    """The strategy and precision that an Accelerate YAML names, and what to warn of.

    Raises:
        ValueError: all faults of the file; it runs on the CPU; its JSON has no stage.
    """
    arm = read_arm(Path(path), Path.cwd())
    if arm.cpu:
        raise ValueError(f"--config {path} runs on the CPU (use_cpu); the plan is for GPUs")
    if arm.deepspeed_json is None:
        tree = read_yaml(path)
        named = tree.get("mixed_precision", "no")
        if named not in PRECISIONS:
            raise ValueError(f"mixed_precision={named!r} in {path}: expected no, fp16 or bf16")
        return ddp_of(run, path), PRECISIONS[named], []
    tree = json.loads(arm.deepspeed_json.read_text(encoding="utf-8"))
    strategy, notes = deepspeed_of(tree, shape, path)
    on = [name for name in ("fp16", "bf16") if _enabled(tree, name)]
    return strategy, PRECISIONS[on[0] if on else "no"], notes


def ddp_of(run: Run, path: str = "") -> Strategy:
    """DDP with the run file's knobs."""
    knobs = run.ddp
    words = ["" if knobs.gradient_as_bucket_view else "no bucket view"]
    words.append("" if knobs.compress == "no" else f"{knobs.compress} on the wire")
    return Strategy(
        name=", ".join(["DDP", *filter(None, words)]),
        family="ddp",
        bucket_elements=knobs.bucket_cap_mb * MIB // 4,  # gradients are fp32
        overlap=True,
        bucket_view=knobs.gradient_as_bucket_view,
        compress=knobs.compress != "no",
        config=path,
    )


def deepspeed_of(
    tree: dict[str, Any], shape: Shape | None, path: str
) -> tuple[Strategy, list[str]]:
    """DeepSpeed as its JSON has it; `auto` buckets become hidden_size squared, as in Accelerate."""
    zero = tree.get("zero_optimization")
    stage = zero.get("stage") if isinstance(zero, dict) else None
    if not isinstance(zero, dict) or stage not in (0, 1, 2, 3):
        raise ValueError(f"{path}: its DeepSpeed JSON needs zero_optimization.stage, 0 to 3")
    bucket, notes = zero.get("reduce_bucket_size", DEFAULT_BUCKET), []
    if bucket == "auto" and shape is None:
        raise ValueError(f'{path}: "reduce_bucket_size": "auto": write a number, e.g. 100000000')
    if bucket == "auto":
        assert shape is not None
        bucket = shape.width**2
        notes.append(
            f'{path}: "reduce_bucket_size": "auto" becomes hidden_size squared = {bucket:,} '
            "elements: hundreds of small reductions; write 100000000"
        )
    overlap = bool(zero.get("overlap_comm", stage == 3))
    less = stage == 1 and zero.get("use_multi_rank_bucket_allreduce", True) is False
    words = [f"ZeRO-{stage}", "overlap_comm" if overlap else "", "less traffic" if less else ""]
    strategy = Strategy(
        name=", ".join(filter(None, words)),
        family="deepspeed",
        stage=stage,
        bucket_elements=int(bucket) if stage else 0,
        overlap=overlap,
        less_traffic=less,
        config=path,
    )
    return strategy, notes


def _enabled(tree: dict[str, Any], name: str) -> bool:
    section = tree.get(name)
    return isinstance(section, dict) and section.get("enabled") is True
