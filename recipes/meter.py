"""Keeps updates until a line is logged, then reduces their losses at once and tells everyone.

Losses stay on the device in between: reading one per update would make the host wait for the GPU.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from tqdm import tqdm

from recipes.metrics import (
    JsonLines,
    Record,
    as_json,
    console_line,
    eta_seconds,
    human_bytes,
    human_rate,
    human_seconds,
)
from recipes.outcome import StorageError

logger = logging.getLogger(__name__)


class Timing(NamedTuple):
    """What one applied update took, on this rank."""

    step_ms: float
    wait_ms: float  # for the readers
    tokens: int  # over all ranks


class Meter:
    """Turns finished updates into records: JSONL, trackers, progress bar and console lines.

    Args:
        reduce: sums device scalars over all ranks and reads them; a collective.
        track: hands one dict to the trackers; a no-op without any.
        folder: the run folder on the rank that writes, None on the others.
    """

    def __init__(
        self,
        *,
        reduce: Callable[[list[Any]], list[float]],
        track: Callable[[dict[str, Any], int], None],
        folder: Path | None,
        total: int,
        done: int,
    ) -> None:
        self._reduce, self._track, self._total = reduce, track, total
        self._pending: list[tuple[dict[str, Any], Any]] = []
        self.timings: deque[Timing] = deque(maxlen=1000)  # of this start's newest updates
        self.last: Record | None = None
        self._files: dict[str, JsonLines] = {}
        self._bar: Any = None
        if folder is not None:
            for name in ("metrics", "evaluations", "saves"):
                self._files[name] = JsonLines(folder / f"{name}.jsonl", last_step=done)
        self._wants_bar, self._done = folder is not None and sys.stderr.isatty(), done

    def add(self, fields: dict[str, Any], loss_sum: Any) -> None:
        """Keep one applied update.

        Args:
            fields: everything of `Record` but the loss.
            loss_sum: this rank's summed loss over the window, a scalar on the device.
        """
        self._pending.append((fields, loss_sum))
        timing = Timing(fields["step_ms"], fields["data_wait_ms"], fields["tokens"])
        self.timings.append(timing)
        if self._wants_bar and self._bar is None:
            self._bar = tqdm(
                total=self._total, initial=max(self._done, 0), unit="update", dynamic_ncols=True
            )
        if self._bar is not None:
            self._bar.update(1)

    def flush(self) -> None:
        """Reduce, read and write what was kept; every rank must call it at the same update."""
        sums = self._reduce([loss for _, loss in self._pending])
        records = [
            Record(**fields, loss=total / max(fields["tokens"], 1))
            for (fields, _), total in zip(self._pending, sums, strict=True)
        ]
        self._pending = []
        if not records:
            return
        self.last = records[-1]
        if not self._files:
            return
        self._files["metrics"].append([as_json(record) for record in records])
        for record in records:
            self._track(as_json(record), record.step)
        self._show(records[-1])

    def _show(self, record: Record) -> None:
        eta = eta_seconds(self._total - record.step, self.typical_step_ms())
        if self._bar is not None:
            shown = f"loss {record.loss:.4f} lr {record.lr:.1e} "
            self._bar.set_postfix_str(shown + f"{human_rate(record.tokens_per_s)} tok/s")
        else:
            logger.info("%s", console_line(record, self._total, eta))

    def typical_step_ms(self) -> float:
        """The median of the last hundred updates, which one slow update does not move."""
        newest = [timing.step_ms for timing in self.timings][-100:]
        return median(newest) if newest else 0.0

    def evaluation(self, values: dict[str, Any]) -> None:
        """Write one held-out evaluation; `values` holds its step."""
        if not self._files:
            return
        self._files["evaluations"].append([values])
        self._track({k: v for k, v in values.items() if k != "step"}, values["step"])
        text = f"step {values['step']} | held-out loss {values['held_out_loss']:.4f}"
        self.say(f"{text} | perplexity {values['held_out_perplexity']:,.1f}")

    def saved(self, values: dict[str, Any]) -> None:
        """Tell and record a committed checkpoint: step, name, bytes, stall_ms, write_s, …"""
        if not self._files:
            return
        self._files["saves"].append([values])
        self.say(
            f"step {values['step']} | saved {values['name']}, {human_bytes(values['bytes'])}; "
            f"training stood still {human_seconds(values['stall_ms'] / 1000)}, "
            f"written in {human_seconds(values['write_s'])}"
        )

    def say(self, text: str) -> None:
        """A line for the console that does not tear the progress bar."""
        if self._bar is not None:
            tqdm.write(text)
        else:
            logger.info("%s", text)

    def close(self) -> None:
        """End the bar and flush the files to the disk.

        Raises:
            StorageError: the disk has no room for the last records.
        """
        if self._bar is not None:
            self._bar.close()
        for name, file in self._files.items():
            try:
                file.close()
            except OSError as error:
                raise StorageError(f"the end of {name}.jsonl is lost: {error.strerror}") from error
