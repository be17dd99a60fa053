"""The real recipe with planted faults, for tests.

    POISON=3,6,7 torchrun --nproc_per_node 2 tests/drivers/faulty.py RUN.yaml ...

POISON names windows (or `all`) in which the second block's output is infinite on POISON_RANK;
ACCUMULATION is the run's. SLEEP_FORWARD_MS and SLEEP_READER_MS slow every micro-batch or sequence
down. WATCH_SYNCS=1 makes torch raise where the host waits for the GPU inside a window.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from recipes import pretrain


def plant() -> None:
    """Wrap the real classes; imported here, since the recipe itself imports them late."""
    import torch

    from recipes.data.lanes import Sequences
    from recipes.model import SummedLoss

    poisoned = os.environ.get("POISON", "")
    windows = {int(number) for number in poisoned.split(",") if number.isdigit()}
    mine = os.environ.get("POISON_RANK", "1") == os.environ["RANK"]
    accumulation = int(os.environ.get("ACCUMULATION", "4"))
    sleep_forward = float(os.environ.get("SLEEP_FORWARD_MS", "0")) / 1000
    sleep_reader = float(os.environ.get("SLEEP_READER_MS", "0")) / 1000
    calls = 0

    def spoil(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        return output * torch.inf

    original: Callable[..., Any] = SummedLoss.forward

    def forward(self: Any, *args: Any, **batch: Any) -> Any:
        nonlocal calls
        if not self.training:
            return original(self, *args, **batch)
        window, calls = calls // accumulation, calls + 1
        time.sleep(sleep_forward)
        if not (mine and (poisoned == "all" or window in windows)):
            return original(self, *args, **batch)
        handle = self.network.transformer.h[1].mlp.register_forward_hook(spoil, prepend=True)
        try:
            return original(self, *args, **batch)
        finally:
            handle.remove()

    SummedLoss.forward = forward  # type: ignore[method-assign]
    if os.environ.get("WATCH_SYNCS") == "1":
        watch_syncs()
    if sleep_reader:
        read = Sequences.__iter__

        def slowly(self: Any) -> Any:
            for sequence in read(self):
                time.sleep(sleep_reader)
                yield sequence

        Sequences.__iter__ = slowly  # type: ignore[method-assign]


def watch_syncs() -> None:
    """From a window's first reduction to its update, nothing may wait for the GPU."""
    import torch

    from recipes.engine import update

    announce, finish = update.Announcement.__init__, update.finish_update

    def start(self: Any, *args: Any, **kwargs: Any) -> None:
        announce(self, *args, **kwargs)
        torch.cuda.set_sync_debug_mode("error")

    def end(engine: Any) -> Any:
        torch.cuda.set_sync_debug_mode("default")
        return finish(engine)

    update.Announcement.__init__ = start  # type: ignore[method-assign]
    update.finish_update = end


if __name__ == "__main__":
    plant()
    sys.exit(pretrain.main())
