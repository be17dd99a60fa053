"""Memory estimators side by side on published measurements (tests/published), as Markdown tables.

    python benchmarks/estimators.py

Compared with `recipes.planner.memory.plan_memory`:

- accelerate: `estimate_training_usage`, the number that `accelerate estimate-memory` prints, called
  as installed (one GPU, batch 1: it knows no batch and no sharding).
- DeepSpeed: `estimate_zero2_model_states_mem_needs` for stages 1 and 2 (it has none for stage 1)
  and `estimate_zero3_…` for stage 3, called as installed, without offloading: model states only.
- cookbook: the arithmetic of EleutherAI/cookbook calc/calc_transformer_mem.py, written anew here
  (params, gradients, optimizer, 34·s·b·h + 5·a·s²·b, bucket), with its defaults.

Rows are those whose source states the whole configuration. Published versions are years apart from
those installed, so no tool can be exact. A tool that counts less than all is not wrong, it answers
another question; the table says how far that answer is from what a GPU needs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

from accelerate.commands.estimate import estimate_training_usage
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from published_rows import Row, rows

from recipes.planner.memory import plan_memory

GIB = 2.0**30
ANY_GPU = "a100-80gb"  # where the source names none: what is needed doesn't depend on it
COOKBOOK_BUCKET = 5e8  # elements, its --zero-allgather-bucket-size, 2 bytes each


def accelerate(row: Row) -> float | None:
    """Bytes that `accelerate estimate-memory` would print for training."""
    kind = {"fp16": "float16", "bf16": "bfloat16"}[row.work.precision]
    return float(max(estimate_training_usage(4 * row.work.shape.parameters, kind).values()))


def deepspeed(row: Row) -> float | None:
    """Bytes of DeepSpeed's helpers; None where they have no answer (not sharded)."""
    shape, cluster = row.work.shape, row.cluster
    stage = row.candidate.strategy.stage
    machines = {"num_gpus_per_node": cluster.gpus, "num_nodes": cluster.nodes}
    if stage in (1, 2):
        _, gpu = estimate_zero2_model_states_mem_needs(
            shape.parameters, cpu_offload=False, **machines
        )
        return float(gpu)
    if stage == 3:
        largest = max(shape.vocab * shape.width, shape.layer_parameters)
        _, gpu, _ = estimate_zero3_model_states_mem_needs(
            shape.parameters, largest, cpu_offload=False, cpu_offload_params=False, **machines
        )
        return float(gpu)
    return None


def cookbook(row: Row) -> float | None:
    """Bytes by the cookbook's calculator with its defaults.

    Two embeddings whether tied or not, fp32 gradients, neither gradients nor optimizer divided by
    tensor parallelism, eager attention always, no logits; checkpointing leaves 34·s·b·h a layer.
    """
    shape, strategy = row.work.shape, row.candidate.strategy
    tensor = strategy.tensor
    ranks = row.candidate.data_ranks(row.cluster.world)
    parameters = shape.parameters + (shape.vocab * shape.width if shape.tied else 0)
    tokens = row.work.seq_len * row.candidate.micro
    layer = (10 + 24 / tensor) * tokens * shape.width
    if not row.candidate.checkpointing:
        layer += 5 * shape.heads * row.work.seq_len * tokens / tensor
    stage = strategy.stage
    states = 2 * parameters / tensor / (ranks if stage == 3 else 1)
    states += 4 * parameters / (ranks if stage >= 2 else 1)
    states += 12 * parameters / (ranks if stage >= 1 else 1)
    return states + layer * shape.layers + (2 * COOKBOOK_BUCKET if stage else 0.0)


def planner(row: Row) -> float | None:
    """Bytes of this package's plan, of the kind that the row measured."""
    plan = plan_memory(row.work, row.candidate, row.cluster)
    measured = row.peak()
    kind = measured[1] if measured else "smi"
    return {"alloc": plan.allocated, "reserved": plan.reserved}.get(kind, plan.device).value


TOOLS: dict[str, Callable[[Row], float | None]] = {
    "accelerate": accelerate,
    "DeepSpeed": deepspeed,
    "cookbook": cookbook,
    "octet": planner,
}


def print_errors(rows: list[Row]) -> None:
    """One line per measured peak: GiB, and each tool's error in per cent."""
    print("| row | kind | measured GiB | " + " | ".join(f"{t} %" for t in TOOLS) + " |")
    print("|---|---|--:|" + "--:|" * len(TOOLS))
    errors: dict[str, list[float]] = {tool: [] for tool in TOOLS}
    for row in rows:
        value, kind = row.peak() or (0.0, "")
        cells = []
        for tool, estimate in TOOLS.items():
            answer = estimate(row)
            if answer is None:
                cells.append("–")
                continue
            errors[tool].append(100 * (answer / value - 1))
            cells.append(f"{errors[tool][-1]:+.0f}")
        print(f"| {row.id} | {kind} | {value / 2**30:.2f} | {' | '.join(cells)} |")
    middle = [f"{median(map(abs, found)):.0f}" for found in errors.values()]
    print(f"| median of absolute errors | | | {' | '.join(middle)} |")


def print_verdicts(ran: list[Row], failed: list[Row]) -> None:
    """How often each tool's number says "fits" for runs that ran, and for runs out of memory."""
    print("| tool | ran: called too large | out of memory: called runnable |")
    print("|---|--:|--:|")
    for tool, estimate in TOOLS.items():
        cells = []
        for those, wrong in ((ran, False), (failed, True)):
            answers = [(estimate(row), row) for row in those]
            known = [(answer, row) for answer, row in answers if answer is not None]
            mistakes = sum(
                (answer <= GIB * row.cluster.gpu.memory_gib) is wrong for answer, row in known
            )
            cells.append(f"{mistakes} of {len(known)}")
        print(f"| {tool} | {' | '.join(cells)} |")
    against, trusted = (
        [plan_memory(c.work, c.candidate, c.cluster).fits for c in rows] for rows in (ran, failed)
    )
    print(
        f"| octet, by its planning limit | {against.count(False)} of {len(ran)} "
        f"| {trusted.count(True)} of {len(failed)} |"
    )


def main() -> None:
    memory = [row for row in rows("memory", ANY_GPU) if row.complete]
    print_errors([row for row in memory if row.peak()])
    ran = [row for row in rows("time") if row.complete]
    failed: list[Row] = []
    for row in memory:
        fits = row.measured("fits")
        if fits is not None:
            (ran if fits else failed).append(row)
    print()
    print_verdicts(ran, failed)


if __name__ == "__main__":
    main()
