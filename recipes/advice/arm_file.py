"""A strategy file of accelerate_configs/ as a strategy of the plan, with its precision."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from recipes.cluster.arm import read_arm
from recipes.config import Run
from recipes.engine import strategy as engine
from recipes.objective import BatchPlan
from recipes.planner.shape import Shape
from recipes.planner.workload import Precision, Strategy
from recipes.runfile import read_yaml

# What DeepSpeed takes where its JSON is silent (runtime/zero/config.py).
DEFAULT_BUCKET = 500_000_000
MIB = 2**20
PRECISIONS: dict[str, Precision] = {"no": "fp32", "fp16": "fp16", "bf16": "bf16"}
UNSTARTED = (2, 3)  # stages that the engine does not run, and that can be planned
BUCKETS = ("reduce_bucket_size", "allgather_bucket_size")
LARGEST_BUCKET = 10**12  # elements; a bucket is never larger than the model


def read_arm_file(
    path: str, run: Run, shape: Shape | None, world: int | None = None
) -> tuple[Strategy, Precision, list[str]]:
    """The strategy and precision that an Accelerate YAML names, and what to warn of.

    Args:
        world: ranks, if known: numbers of the run file that the JSON repeats must agree.

    Raises:
        ValueError: all faults of the file and of the JSON that it names: what the engine would
            refuse, but for stages 2 and 3; it runs on the CPU.
    """
    arm = read_arm(Path(path), Path.cwd())
    if arm.cpu:
        raise ValueError(
            f"--config {path} runs on the CPU (use_cpu); the plan is for GPUs: name another"
        )
    tree = read_yaml(path)
    if arm.deepspeed_json is None:
        named = tree.get("mixed_precision", "no")
        if not isinstance(named, str) or named not in PRECISIONS:
            raise ValueError(f"mixed_precision={named!r} in {path}: expected no, fp16 or bf16")
        return ddp_of(run, path), PRECISIONS[named], []
    where = str(tree["deepspeed_config"]["deepspeed_config_file"])
    found = json.loads(arm.deepspeed_json.read_text(encoding="utf-8"))
    faults = json_faults(found)
    if "mixed_precision" in tree:
        faults.append(f"mixed_precision in {path} has no effect beside this JSON; remove it")
    if faults:
        count = f"{len(faults)} problem{'s' if len(faults) > 1 else ''}"
        raise ValueError(f"{count} in {where}:\n" + "\n".join(f"  {fault}" for fault in faults))
    on = [name for name in ("fp16", "bf16") if found.get(name, {}).get("enabled") is True]
    precision = PRECISIONS[on[0] if on else "no"]
    notes = _stated(found, run, precision, where, world)
    strategy, more = deepspeed_of(found, shape, path)
    return strategy, precision, notes + more


def json_faults(tree: Any) -> list[str]:
    """What the engine refuses of a DeepSpeed JSON; stages 2 and 3 and "auto" buckets are let pass.

    They can be planned, and `deepspeed_of` says that they can't be started.
    """
    zero = tree.get("zero_optimization") if isinstance(tree, dict) else None
    if not isinstance(zero, dict):
        return engine.json_faults(tree)
    checked, faults, stage = copy.deepcopy(tree), [], zero.get("stage")
    for key in BUCKETS:
        size = zero.get(key, DEFAULT_BUCKET if stage in UNSTARTED else None)
        if isinstance(size, int) and size > LARGEST_BUCKET:
            faults.append(f"zero_optimization.{key}={size}: expected 1 to {LARGEST_BUCKET:,}")
        checked["zero_optimization"][key] = DEFAULT_BUCKET if size == "auto" else size
    overlap = zero.get("overlap_comm", False)
    if not isinstance(overlap, bool) and overlap != "auto":
        faults.append(f"zero_optimization.overlap_comm={overlap!r}: expected true or false")
    if stage is not None and type(stage) is not int:
        faults.append(f"zero_optimization.stage={stage!r}: expected a whole number, 0 to 3")
        stage = 1  # so that it is told once
    checked["zero_optimization"]["stage"] = 1 if stage in UNSTARTED else stage
    return faults + engine.json_faults(checked)


def _stated(
    tree: dict[str, Any], run: Run, precision: Precision, where: str, world: int | None
) -> list[str]:
    """Notes on numbers of the run file that the JSON repeats (ValueError: they differ)."""
    batch = run.batch
    if world is not None and batch.global_sequences % (world * batch.least_micro) == 0:
        plan = BatchPlan(
            world=world,
            micro=batch.least_micro,
            accumulation=batch.global_sequences // (world * batch.least_micro),
            global_sequences=batch.global_sequences,
            seq_len=batch.seq_len,
        )
        asked = engine.Strategy(
            kind="DEEPSPEED", precision=precision, cpu=None, origin=where, deepspeed=tree
        )
        engine.filled(asked, run, plan)
    stated = [key for key in engine.OWNED[1:3] if tree.get(key, "auto") != "auto"]
    return [
        f'{where}: {key}={tree[key]!r} holds for this micro-batch alone; write "auto"'
        for key in stated
    ]


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
    """DeepSpeed as its checked JSON has it; `auto` buckets become hidden_size squared.

    So Accelerate makes them; this recipe's engine refuses them.
    """
    zero = tree["zero_optimization"]
    stage = zero["stage"]
    bucket, notes = zero.get("reduce_bucket_size", DEFAULT_BUCKET), []
    if bucket == "auto" and shape is None:
        raise ValueError(f'{path}: "reduce_bucket_size": "auto": write a number, e.g. 100000000')
    if bucket == "auto":
        assert shape is not None
        bucket = shape.width**2
        notes.append(
            f'{path}: "reduce_bucket_size": "auto" becomes hidden_size squared = {bucket:,} '
            "elements: hundreds of small reductions; can be planned, not started: write 100000000"
        )
    elif zero.get("allgather_bucket_size") == "auto":
        notes.append(
            f'{path}: "allgather_bucket_size": "auto" can be planned, not started: write 100000000'
        )
    if stage in UNSTARTED:
        notes.append(f"{path}: ZeRO-{stage} can be planned, not started: this package runs 0 and 1")
    scattered = zero.get("reduce_scatter", True) is not False
    if not scattered and stage == 2:
        notes.append(f"{path}: reduce_scatter=false is planned as true, and sends more")
    overlap = bool(zero.get("overlap_comm", stage == 3))
    less = stage == 1 and scattered and zero.get("use_multi_rank_bucket_allreduce", True) is False
    words = [f"ZeRO-{stage}", "overlap_comm" if overlap else "", "less traffic" if less else ""]
    strategy = Strategy(
        name=", ".join(filter(None, words)),
        family="deepspeed",
        stage=stage,
        bucket_elements=int(bucket) if stage else 0,
        overlap=overlap,
        less_traffic=less,
        config="" if notes else path,
    )
    return strategy, notes
