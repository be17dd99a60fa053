"""The recipe on ranks with little memory, for tests; only ranks in CROWDED have little.

ROOM_MB=300       while micro-batches are tried the process may map so much more than it has mapped:
                  a real limit (RLIMIT_AS), at which torch's CPU allocator really fails
GPU_ROOM=4        a trial with more sequences than this ends as a GPU's allocator would. A fake, for
                  machines without a GPU: it raises torch's own error, with the text of a real one
FULL_WINDOW=3     in this window's first micro-batch memory runs out, likewise faked
COUNTING=no       no window's traffic is counted
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from recipes import pretrain
from recipes.confront import Confrontation
from recipes.engine import room, update

TOLD = (
    "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 79.25 GiB of "
    "which 904.25 MiB is free.\nMore that nobody reads"
)


def mapped_bytes() -> int:
    """Address space of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def plant_room() -> None:
    """ROOM_MB and GPU_ROOM."""
    run = room._run

    def crowded(engine: Any, batch: Mapping[str, torch.Tensor]) -> None:
        sequences = len(batch["input_ids"])
        if sequences > int(os.environ.get("GPU_ROOM", sequences)):
            raise torch.OutOfMemoryError(TOLD)
        if "ROOM_MB" not in os.environ:
            return run(engine, batch)
        before = resource.getrlimit(resource.RLIMIT_AS)
        limit = mapped_bytes() + int(os.environ["ROOM_MB"]) * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
        try:
            return run(engine, batch)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)

    room._run = crowded


def plant_window() -> None:
    """FULL_WINDOW."""
    backward, full = update.backward, int(os.environ.get("FULL_WINDOW", "0"))
    counts = {"micro": 0}

    def wrapped(engine: Any, loss: torch.Tensor) -> None:
        counts["micro"] += 1
        if counts["micro"] == 1 + (full - 1) * engine.plan.accumulation:
            raise torch.OutOfMemoryError(TOLD)
        backward(engine, loss)

    if full:
        update.backward = wrapped


if __name__ == "__main__":
    if os.environ["RANK"] in os.environ.get("CROWDED", "0,1,2,3").split(","):
        plant_room()
        plant_window()
    if os.environ.get("COUNTING") == "no":
        Confrontation.window_begins = lambda *_: None  # type: ignore[method-assign]
    sys.exit(pretrain.main())
