"""The command that starts what the plan chose."""

from __future__ import annotations

import shlex
from pathlib import Path

from recipes.advice.arm_file import MIB
from recipes.advice.question import Question
from recipes.advice.wanted import HOSTFILE
from recipes.cluster.hostfile import read_hostfile
from recipes.config import Run
from recipes.planner.choose import bare
from recipes.planner.workload import Candidate, Precision

HOSTS = "HOSTS"  # stands for a hostfile that is still to be written
WEIGHTS = ("*.safetensors", "*.bin")  # files that transformers keeps a model in


def start_line(question: Question, candidate: Candidate) -> tuple[str, str]:
    """The command, with every key in which the choice differs from the run file; what else to do.

    The second is empty, or says what the command needs beside itself: a hostfile, weights, a line
    of the DeepSpeed JSON where the shipped one has it otherwise.
    """
    wanted, run, strategy = question.wanted, question.run, candidate.strategy
    keys = changed_keys(run, candidate, question.work.precision, question.cluster.world)
    changed = {key.partition("=")[0] for key in keys}
    kept = [item for item in wanted.overrides if item.partition("=")[0] not in changed]
    words = [wanted.run, *kept, *keys]
    asked = question.asked.strategy
    own = bool(asked.config) and bare(asked) == bare(strategy)
    config = asked.config if own else strategy.config
    hosts, host_note = _hosts(question)
    also = [host_note, _weights(run)]
    if strategy.family == "deepspeed" and strategy.overlap and not own:
        also.insert(0, '"overlap_comm": true in the DeepSpeed JSON that it names')
    if config.endswith(".json"):
        head = ["deepspeed", *(hosts or ["--hostfile", HOSTFILE]), "recipes/pretrain.py"]
        line = shlex.join([*head, *words, "--deepspeed_config", config])
    else:
        line = shlex.join(["octet", "launch", *hosts, "--config", config, *words])
    return line, "; ".join(filter(None, also))


def _hosts(question: Question) -> tuple[list[str], str]:
    """The option that names the planned machines, and what it still needs."""
    wanted, cluster = question.wanted, question.cluster
    if wanted.hostfile is not None:
        return ["--hostfile", wanted.hostfile], ""
    if wanted.gpus is None:
        return [], ""
    try:
        if [host.slots for host in read_hostfile(HOSTFILE)] == [cluster.gpus] * cluster.nodes:
            return [], ""
    except ValueError:  # none is there, or none that can be read: it is not the planned one
        pass
    lines = "1 line" if cluster.nodes == 1 else f"{cluster.nodes:,} lines"
    return ["--hostfile", HOSTS], f"{HOSTS}, a hostfile of {lines} NAME slots={cluster.gpus}"


def _weights(run: Run) -> str:
    """What is said of a model of which the configuration alone is here."""
    path = Path(run.model.pretrained) if run.model.pretrained is not None else None
    if path is None or not path.exists():
        return ""
    if path.is_dir() and any(next(path.glob(kind), None) for kind in WEIGHTS):
        return ""
    return f"the model's weights: model.pretrained={path} holds its configuration alone"


def changed_keys(run: Run, candidate: Candidate, precision: Precision, world: int) -> list[str]:
    """The run file's keys in which a candidate differs from it, as overrides.

    `batch.micro: auto` stays: the run settles it by the same plan.
    """
    strategy, model, found = candidate.strategy, run.model, []
    if run.batch.micro not in ("auto", candidate.micro):
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
        bucket_mb = 4 * strategy.bucket_elements // MIB  # gradients are fp32
        if bucket_mb and run.ddp.bucket_cap_mb != bucket_mb:
            found.append(f"ddp.bucket_cap_mb={bucket_mb}")
    sequences = evaluation_for(run, candidate, world)
    return found + ([f"evaluate.sequences={sequences}"] if sequences is not None else [])


def evaluation_for(run: Run, candidate: Candidate, world: int) -> int | None:
    """What evaluate.sequences must be raised to for this micro-batch; None where it may stay."""
    multiple = candidate.data_ranks(world) * candidate.micro
    if run.evaluate is None or run.evaluate.sequences % multiple == 0:
        return None
    return -(-run.evaluate.sequences // multiple) * multiple
