"""`batch.micro: auto`: the plan's micro-batch, tried before the first window, lowered if need be.

On GPUs it is the plan's. For CPUs there is no plan of times: the largest up to CPU_MICRO that the
host's free memory, shared by its ranks, has room for by the plan's arithmetic. Then every rank runs
micro-batches of the full size by itself, and if one has no room, all take the next lower one: the
accumulation rises, the global batch and the order of the data stay.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from contextlib import suppress
from typing import Any

import torch

from recipes import objective, runfolder
from recipes.checkpoint.snapshot import memory_left
from recipes.config import Run
from recipes.engine import room
from recipes.engine.build import Engine
from recipes.outcome import PeerError, exit_code
from recipes.own_plan import FAULTS, Found, OwnPlan, own_plan
from recipes.planner.micro import largest_of, legal_micros, next_lower

logger = logging.getLogger(__name__)

NO_ROOM = "no_room.json"  # in the run folder: a micro-batch that was too big for a window
CPU_MICRO = 8  # above it a CPU's matmuls gain nothing, and two ranks share its caches


def look(engine: Engine) -> Found:
    """The machines that the ranks run on; a collective of the host's network."""
    peers = engine.peers
    if engine.device.type == "cuda":
        name = torch.cuda.get_device_name(engine.device)
        memory = torch.cuda.get_device_properties(engine.device).total_memory
    else:
        name = ""
        memory = memory_left() // Counter(peers.hosts)[peers.hosts[peers.rank]]
    seen = peers.gather((name, memory))
    return Found(
        gpus=tuple(gpu for gpu, _ in seen),
        memory=min(size for _, size in seen),
        hosts=tuple(peers.hosts),
    )


def settle(engine: Engine, run: Run, recorded: dict[str, Any], found: Found) -> tuple[Engine, str]:
    """Settle `batch.micro: auto` on all ranks alike; returns the engine and what the banner says.

    Args:
        recorded: `run.json` of the last start; empty at the first.

    Raises:
        ValueError: the plan does not know the model, or not even a micro-batch of 1 has room.
    """
    if run.batch.micro != "auto":
        return engine, ""
    peers, world = engine.peers, engine.plan.world
    legal = legal_micros(run.batch, world, run.evaluate)
    failed = min(filter(None, peers.gather(_no_room(engine, run, found))), default=None)
    micro, why = peers.from_first(
        lambda: _first_choice(engine, run, recorded, found, legal, failed)
    )
    worlds = objective.legal_worlds(run.batch, lanes=run.data.lanes, workers=run.data.workers)
    while True:
        engine = room.rebatch(engine, run, objective.plan_batch(run.batch, world, worlds, micro))
        faults = peers.gather(room.try_out(engine, _batch(run, micro)))
        if not any(faults):
            return engine, f"auto: {why}"
        rank, fault = next((rank, text) for rank, text in enumerate(faults) if text)
        lower = next_lower(legal, micro)
        told = f"no room for a micro-batch of {micro}: {fault}"
        if lower is None and peers.rank == rank:
            raise ValueError(f"{told}\n{advice(engine, run, found)}")
        if lower is None:
            raise PeerError(f"rank {rank}: {told}", exit_code(ValueError()))
        if peers.rank == 0:
            logger.warning("rank %d: %s\n%s", rank, told, _lowered(engine.plan, lower))
        micro, why = lower, f"lowered from {micro}, for which rank {rank} had no room"


def _lowered(plan: objective.BatchPlan, micro: int) -> str:
    accumulation = plan.global_sequences // (plan.world * micro)
    return (
        f"batch    micro {plan.micro} -> {micro}, accumulation {plan.accumulation} -> "
        f"{accumulation}; the global batch stays {plan.global_sequences}"
    )


def _here(engine: Engine, found: Found) -> dict[str, Any]:
    """What a micro-batch that fits depends on, besides the model; run.json has the same keys."""
    here = {"world": engine.plan.world, "strategy": engine.strategy.title}
    return here | {"device": engine.device.type, "gpu": found.gpus[0]}


def _no_room(engine: Engine, run: Run, found: Found) -> int | None:
    """The micro-batch for which a window of an earlier start here had no room, if any."""
    try:
        told = json.loads((run.folder / NO_ROOM).read_text(encoding="utf-8"))
        return int(told["micro"]) if told["here"] == _here(engine, found) else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def ran_out(engine: Engine, run: Run, found: Found) -> str:
    """Advice for a rank whose memory ran out while training; `auto` starts lower the next time."""
    micro = engine.plan.micro
    if run.batch.micro == "auto" and micro > 1:
        said = {"micro": micro, "here": _here(engine, found)}
        with suppress(OSError):
            runfolder.write_record(run.folder, NO_ROOM, said)
    with suppress(*FAULTS):
        return advice(engine, run, found)
    return ""


def _first_choice(
    engine: Engine,
    run: Run,
    recorded: dict[str, Any],
    found: Found,
    legal: list[int],
    failed: int | None,
) -> tuple[int, str]:
    """What is tried first, and where it comes from; on rank 0.

    Args:
        failed: for which an earlier start had no room in a window.
    """
    last = None
    if recorded.items() >= _here(engine, found).items():
        same_model = recorded["config"]["model"] == run.model.model_dump(mode="json")
        last = recorded.get("micro") if same_model else None  # an older version wrote none
    if failed is not None and (lower := next_lower(legal, failed)) is not None:
        lower = last if last in legal and last < lower else lower
        return lower, f"below {failed}, for which a window had no room"
    if last in legal:
        return last, "as at the last start"
    try:
        plan = own_plan(run, engine.strategy, found, chunked=engine.module.chunked)
    except FAULTS as error:
        said = str(error) or type(error).__name__
        raise ValueError(f"batch.micro=auto: {said}; give batch.micro a number") from error
    if not found.cpu:
        micro, most = plan.micro(legal)
        return micro, f"the plan's; the largest that fits is {most}"
    micro, _ = plan.micro([n for n in legal if n <= CPU_MICRO])
    return micro, f"the largest up to {CPU_MICRO}, on a CPU"


def _batch(run: Run, micro: int) -> dict[str, torch.Tensor]:
    """A micro-batch of full length in which every position counts; on the host."""
    ids = torch.zeros(micro, run.batch.seq_len, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if run.data.document_mask:  # two documents a row, so that the mask is really built
        half = max(run.batch.seq_len // 2, 1)
        batch["position_ids"] = torch.arange(run.batch.seq_len).remainder(half).expand_as(ids)
    return batch


def advice(engine: Engine, run: Run, found: Found) -> str:
    """What to do on a rank whose memory has run out; no communication."""
    micro, plan = engine.plan.micro, engine.plan
    peak = ""
    if engine.device.type == "cuda":
        most = torch.cuda.max_memory_allocated(engine.device)
        peak = f"; {most / 1e9:.1f} GB of {found.memory / 1e9:.1f} GB were allocated at the peak"
    text = f"this was with batch.micro={micro}, accumulation {plan.accumulation}{peak}\n"
    legal = legal_micros(run.batch, plan.world, run.evaluate)
    lower = next_lower(legal, micro)
    own = _own(engine, run, found)
    if own is not None and not found.cpu and lower is not None:
        most = own.micro(legal)[1]
        by_plan = largest_of(legal, most)
        if by_plan < micro:
            return f"{text}by the plan batch.micro={by_plan} fits: {_stays(plan, by_plan)}"
        text += f"by the plan up to {most} fit: does another process use this GPU (nvidia-smi)?\n"
    if lower is not None and run.batch.micro == "auto":
        return f"{text}start it again: auto then takes {lower}; {_stays(plan, lower)}"
    if lower is not None:
        return f"{text}try batch.micro={lower}: {_stays(plan, lower)}"
    ways = own.ways_to_save(micro) if own is not None else []
    ways = ways or ["a strategy that shards more, more ranks, or a smaller model.config"]
    return text + "a micro-batch of 1 is the least; what else saves memory:\n  " + "\n  ".join(ways)


def _stays(plan: objective.BatchPlan, micro: int) -> str:
    accumulation = plan.global_sequences // (plan.world * micro)
    return (
        f"the accumulation becomes {accumulation}, the global batch and the order of the data "
        "stay, and the next start goes on from the last checkpoint, if there is one"
    )


def _own(engine: Engine, run: Run, found: Found) -> OwnPlan | None:
    """The run's own plan; None where its model is unknown to it."""
    try:
        return own_plan(run, engine.strategy, found, chunked=engine.module.chunked)
    except FAULTS:
        return None
