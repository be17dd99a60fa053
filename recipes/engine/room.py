"""Whether a micro-batch fits into this rank's memory: tried on the prepared engine, no trace left.

The trial comes before the first window and communicates nothing, so that a rank without room can
still tell the others. It runs the module itself, below DeepSpeed's and DDP's wrappers: the memory
is the same, and no state of theirs moves.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from recipes.config import Run
from recipes.engine import state, update
from recipes.engine.build import Engine, read_back
from recipes.engine.topology import refuse
from recipes.objective import BatchPlan
from recipes.outcome import out_of_memory

# From the second micro-batch on, the first one's gradients and DeepSpeed's bucket are there too.
MOST_BATCHES = 2


def rebatch(engine: Engine, run: Run, plan: BatchPlan) -> Engine:
    """The same prepared objects for another micro-batch and accumulation, verified again.

    Raises:
        TopologyError: the engine uses another number than the one it was given.
    """
    engine.accelerator.gradient_accumulation_steps = plan.accumulation
    if engine.strategy.kind == "DEEPSPEED":
        engine.model.set_train_micro_batch_size(plan.micro)
        engine.model.set_train_batch_size(plan.global_sequences)  # the accumulation follows
    engine = replace(engine, plan=plan)
    refuse(
        read_back(engine, run),
        ["a library changed how a batch is set after its start; give batch.micro a number"],
    )
    return engine


def try_out(engine: Engine, batch: Mapping[str, torch.Tensor]) -> str:
    """Run micro-batches as a window would, and forget them; no communication.

    Parameters, gradients, buffers, random state, loss scale and counters are afterwards as they
    were; memory that was taken is given back.

    Args:
        batch: arguments of the module's forward, of the full size, on the host.

    Returns:
        What the allocator said where there is no room; empty where there is.
    """
    module = engine.module
    if any(isinstance(m, nn.SyncBatchNorm) for m in module.modules()):
        return ""  # its forward communicates, so that a rank without room could not tell
    random = update.rng_state(engine)
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    fault = ""
    try:
        _run(engine, batch)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        fault = str(error).strip().split("\n")[0] or type(error).__name__
    for parameter in module.parameters():
        parameter.grad = None
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    update.set_rng_state(engine, random)
    if fault and module._compiled_call_impl is not None:
        torch._dynamo.reset()  # else the next size would be compiled as one of many, not for itself
    gc.collect()
    if engine.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(engine.device)
    return fault


def _run(engine: Engine, batch: Mapping[str, torch.Tensor]) -> None:
    kept = _states_to_come(engine)
    if engine.strategy.kind == "DEEPSPEED":
        # Else overlap_comm would reduce from the gradients' hooks.
        engine.model.set_gradient_accumulation_boundary(False)
        if engine.strategy.stage == 1:
            engine.inner_optimizer.set_gradient_accumulation_boundary(False)
    there = {key: value.to(engine.device) for key, value in batch.items()}
    for _ in range(min(engine.plan.accumulation, MOST_BATCHES)):
        with engine.accelerator.autocast():
            loss, _ = engine.module(**there)
        loss.backward()
    del kept


def _states_to_come(engine: Engine) -> list[torch.Tensor]:
    """Adam's moments, or as much memory where they come with the first update only."""
    if engine.strategy.stage == 1:
        return [values for _, _, values in state.owned(engine)]  # which creates them for good
    if engine.strategy.kind == "DEEPSPEED":
        return []  # stage 0 has created them
    trained = [p for p in engine.module.parameters() if p.requires_grad]
    return [torch.empty_like(p, dtype=torch.float32) for p in trained for _ in state.MOMENTS]
