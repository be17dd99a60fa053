"""The run confronts its plan: what was predicted of an update against what it takes.

confronting.window_ended(job, applied)   # after each window, on every rank
confronting.window_begins(job)           # before the next; the second window's traffic is counted
confronting.finish(job)                  # once more at the end

After JUDGED updates and at the end rank 0 tells both beside each other and keeps them in the run
folder's `plan.json`:

    schema   1
    name     of the run
    starts   one entry for each start that came so far, the newest last:
             {"time", "gpu" ("cpu" without one), "strategy", "precision", "world", "hosts" (ranks of
             each), "micro", "accumulation", "from_update", "update" (when it was last judged),
             "final" (the run was finished), "notes", "quantities": [{"what", "unit",
             "plan": {"value", "low", "high", "unit", "source", "basis"} or null, "measured",
             "error_percent", "verdict", "note"}]}   (`recipes.comparison`)

Nothing of it waits for a GPU. Memory's peaks and the bytes held are the largest of any rank, times
are rank 0's, bytes sent are rank 0's of one window.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, cast

from recipes import comparison, runfolder
from recipes.comparison import PLAN, SCHEMA, read_plan
from recipes.engine import instruments, update
from recipes.meter import Timing
from recipes.own_plan import CPU, FAULTS, LASTING, own_plan
from recipes.planner.figure import Figure
from recipes.planner.transfer import Op, ring_share
from recipes.preflight.rows import many

if TYPE_CHECKING:
    from recipes.job import Job

logger = logging.getLogger(__name__)

WARM_UP = 2  # updates with first-time work in them: allocators, compilers, communicators
JUDGED = 6  # updates after which the first word is said
# A mean wait for data that is let pass whatever share of a short update it is.
WAIT_S = 0.005
ON_A_CPU = "not comparable on a CPU"


class Confrontation:
    """Collects, compares and tells, for one start."""

    def __init__(self, job: Job) -> None:
        self._found, self._traffic = job.found, instruments.Traffic(job.engine)
        instruments.forget_peaks(job.engine)
        self._first = job.engine.peers.rank == 0
        self._updates, self._from_update = 0, job.progress.applied
        self._sent: float | None = None
        self._counted = False
        self._notes: dict[str, str] = {}
        self._unplanned = "no plan"
        self._plan = self._planned(job) if self._first else {}
        self._earlier = earlier_starts(job.run.folder) if self._first else []

    def _planned(self, job: Job) -> dict[str, Figure]:
        """What the plan says of this start; empty, with a word to the user, where it can't."""
        run, engine = job.run, job.engine
        try:
            own = own_plan(run, engine.strategy, self._found, chunked=engine.module.chunked)
            figures = own.figures(engine.plan.micro)
        except FAULTS as error:
            self._unplanned = str(error) or type(error).__name__
            logger.info("no plan of this run: %s", self._unplanned)
            return {}
        if own.untimed and own.untimed != CPU:
            logger.info("no plan of this run's times: %s", own.untimed)
            self._notes |= dict.fromkeys(("update time", "tokens/s", "MFU"), own.untimed)
        return figures

    # ---- in the loop

    def window_begins(self, job: Job) -> None:
        """Count the traffic of the second window; of a later one if that was skipped."""
        more = job.progress.applied < job.length.updates
        if self._first and self._updates >= 1 and not self._counted and more:
            self._traffic.begin()

    def window_ended(self, job: Job, applied: bool) -> None:
        """Note a window's end; after JUDGED updates all ranks compare, once."""
        if self._traffic.counting:
            self._count(applied)
        if not applied:
            return
        self._updates += 1
        if self._updates == JUDGED and job.progress.applied < job.length.updates:
            self._judge(job, final=False)

    def _count(self, applied: bool) -> None:
        try:
            calls = self._traffic.end()
        except FAULTS as error:
            said = str(error) or type(error).__name__
            self._notes["bytes sent"], self._counted = f"not counted: {said}", True
            return
        if applied:  # a skipped one gathers no parameters
            self._sent, self._counted = sum(sent_bytes(call) for call in calls), True

    def finish(self, job: Job) -> None:
        """Compare once more, at the end of a finished run."""
        self._traffic.stop()
        if self._updates:
            self._judge(job, final=True)

    # ---- comparing

    def _judge(self, job: Job, *, final: bool) -> None:
        everyone = job.engine.peers.gather(self._held(job))
        if not self._first:
            return
        try:
            self._tell(job, everyone, final)
        except FAULTS as error:
            said = str(error) or type(error).__name__
            job.meter.say(f"plan and measurement can't be compared: {said}")

    def _held(self, job: Job) -> dict[str, int] | str:
        """This rank's bytes; what a library says in their place where it tells none."""
        engine = job.engine
        try:
            held = {**instruments.held_bytes(engine), "peak": update.peak_memory_bytes(engine)}
            return held | {"reserved": instruments.peak_reserved_bytes(engine) or 0}
        except FAULTS as error:
            return str(error) or type(error).__name__

    def _tell(self, job: Job, everyone: list[dict[str, int] | str], final: bool) -> None:
        told = [held for held in everyone if not isinstance(held, str)]
        if len(told) < len(everyone):
            fault = next(held for held in everyone if isinstance(held, str))
            raise LookupError(fault)
        most = {key: float(max(held[key] for held in told)) for key in told[0]}
        measured = self._measured(job, most)
        rows = comparison.rows(self._planned_for(measured), measured, self._why(job), self._lacking)
        last = " at the end" if final else ""
        timed = self._timed(job)
        counted = f"median of {many(len(timed), 'update')}" if timed else "too few updates to time"
        title = f"plan against measured{last}: micro {job.plan.micro}, {counted}"
        job.meter.say(comparison.table(title, rows))
        for line in comparison.warnings(rows):
            job.meter.say(f"beyond the plan's band: {line}")
        self._keep(job, rows, final)

    def _planned_for(self, measured: dict[str, float]) -> dict[str, Figure]:
        """The plan, in which a short wait is no fault however short the update is."""
        wait, step_s = self._plan.get("data wait"), measured.get("update time")
        if wait is None or not step_s:
            return self._plan
        return self._plan | {"data wait": replace(wait, high=max(wait.high, WAIT_S / step_s))}

    def _measured(self, job: Job, most: dict[str, float]) -> dict[str, float]:
        on_gpu = job.engine.device.type == "cuda"
        found: dict[str, float] = {key: most[key] for key in LASTING}
        found["peak allocated" if on_gpu else "peak resident"] = most["peak"]
        if on_gpu:
            found["peak reserved"] = most["reserved"]
        if self._sent is not None:
            found["bytes sent"] = self._sent
        found |= self._rates(job)
        if job.saving.last_bytes is not None:
            found["checkpoint"] = job.saving.last_bytes
        return found

    def _rates(self, job: Job) -> dict[str, float]:
        """What the timed updates say; nothing where all were the first ones."""
        timed = self._timed(job)
        if not timed:
            return {}
        step_s = median(t.step_ms for t in timed) / 1000.0
        tokens = sum(t.tokens for t in timed) / len(timed)
        found = {"update time": step_s, "tokens per update": tokens}
        found["tokens/s"] = tokens / step_s if step_s else 0.0
        whole_ms = sum(t.step_ms for t in timed)
        found["data wait"] = sum(t.wait_ms for t in timed) / whole_ms if whole_ms else 0.0
        if job.peak_flops is not None:
            peak = job.peak_flops * job.plan.world
            found["MFU"] = found["tokens/s"] * job.flops_per_token / peak
        return found

    def _timed(self, job: Job) -> list[Timing]:
        """The newest updates of this start without its first ones."""
        kept = list(job.meter.timings)
        return kept[max(WARM_UP - (self._updates - len(kept)), 0) :]

    def _why(self, job: Job) -> dict[str, str]:
        """Why a quantity has no plan."""
        notes = dict.fromkeys(comparison.UNITS, self._unplanned)
        if self._found.cpu:
            timed = ("peak resident", "update time", "tokens/s")
            notes |= dict.fromkeys(timed, ON_A_CPU)
        return notes | self._notes

    @property
    def _lacking(self) -> dict[str, str]:
        """Why a quantity has no measurement."""
        lacking = dict.fromkeys(comparison.UNITS, "too few updates")
        lacking |= {"checkpoint": "none is saved yet", "bytes sent": "not counted"}
        return lacking | {k: v for k, v in self._notes.items() if k == "bytes sent"}

    def _keep(self, job: Job, rows: Sequence[comparison.Row], final: bool) -> None:
        engine, strategy = job.engine, job.engine.strategy
        start = {
            "time": time.time(),
            "gpu": self._found.gpus[0] or "cpu",
            "strategy": strategy.title,
            "precision": strategy.precision,
            "world": job.plan.world,
            "hosts": dict(Counter(engine.peers.hosts)),
            "micro": job.plan.micro,
            "accumulation": job.plan.accumulation,
            "from_update": self._from_update,
            "update": job.progress.applied,
            "final": final,
            "notes": sorted({*self._notes.values(), *([] if self._plan else [self._unplanned])}),
            "quantities": [row.to_json() for row in rows],
        }
        whole = {"schema": SCHEMA, "name": job.run.name, "starts": [*self._earlier, start]}
        try:
            runfolder.write_record(job.run.folder, PLAN, whole)
        except OSError as error:  # a full disk must not end what the plan is only compared with
            logger.warning("%s can't be written: %s", job.run.folder / PLAN, error.strerror)


def sent_bytes(call: instruments.Collective) -> float:
    """What a rank sends for a collective that was called, by a ring as the plan counts it."""
    return call.bytes * ring_share(cast(Op, call.op), call.ranks)


def earlier_starts(folder: Path) -> list[dict[str, Any]]:
    """The entries that earlier starts left; none where the file is damaged."""
    try:
        return list(read_plan(folder)["starts"])
    except FileNotFoundError:
        return []
    except ValueError as error:
        logger.warning("%s; it is begun anew", error)
        return []
