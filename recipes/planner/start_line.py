"""The command that starts what the plan chose."""

from __future__ import annotations

import shlex

from recipes.config import Run
from recipes.planner.wanted import HOSTFILE, Wanted
from recipes.planner.workload import Candidate, Precision


def start_line(
    wanted: Wanted, run: Run, candidate: Candidate, precision: Precision
) -> tuple[str, str]:
    """The command, with every key in which the choice differs from the run file; what else to set.

    The second is a line of the DeepSpeed JSON, where the shipped one has it otherwise.
    """
    strategy = candidate.strategy
    words = [wanted.run, *wanted.overrides, *changed_keys(run, candidate, precision)]
    hosts = ["--hostfile", wanted.hostfile or HOSTFILE]
    if strategy.config.endswith(".json"):
        head = ["deepspeed", *hosts, "recipes/pretrain.py"]
        return shlex.join([*head, *words, "--deepspeed_config", strategy.config]), ""
    head = ["octet", "launch", *(hosts if wanted.hostfile else []), "--config", strategy.config]
    also = ""
    # A file that was named has what it has; of the shipped ones none overlaps.
    if strategy.family == "deepspeed" and strategy.overlap and strategy.config != wanted.config:
        also = '"overlap_comm": true in the DeepSpeed JSON that it names'
    return shlex.join([*head, *words]), also


def changed_keys(run: Run, candidate: Candidate, precision: Precision) -> list[str]:
    """The run file's keys in which a candidate differs from it, as overrides."""
    strategy, model, found = candidate.strategy, run.model, []
    if run.batch.micro != candidate.micro:
        found.append(f"batch.micro={candidate.micro}")
    if model.gradient_checkpointing != candidate.checkpointing:
        found.append(f"model.gradient_checkpointing={str(candidate.checkpointing).lower()}")
    if (model.attention == "eager") != (candidate.attention == "eager"):
        found.append(f"model.attention={'eager' if candidate.attention == 'eager' else 'sdpa'}")
    if strategy.family == "ddp":
        wire = precision if strategy.compress else "no"
        if (run.ddp.compress != "no") != strategy.compress:
            found.append(f"ddp.compress={wire}")
        if run.ddp.gradient_as_bucket_view != strategy.bucket_view:
            found.append(f"ddp.gradient_as_bucket_view={str(strategy.bucket_view).lower()}")
    return found
