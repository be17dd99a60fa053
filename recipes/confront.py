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

import json
import logging
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, cast

from recipes import comparison, runfolder
from recipes.comparison import PLAN
from recipes.engine import instruments, update
from recipes.meter import Timing
from recipes.own_plan import CPU, LASTING, Found, own_plan
from recipes.planner.figure import Figure
from recipes.planner.traffic import Op, ring_share
from recipes.preflight.rows import many

if TYPE_CHECKING:
    from recipes.job import Job

logger = logging.getLogger(__name__)

WARM_UP = 2  # updates with first-time work in them: allocators, compilers, communicators
JUDGED = 6  # updates after which the first word is said
# What a plan may stumble over in settings that it has never seen. The run is right without a plan.
FAULTS = (ValueError, ArithmeticError, LookupError, AssertionError)
ON_A_CPU = "not comparable on a CPU"


class Confrontation:
    """Collects, compares and tells, for one start."""

    def __init__(self, job: Job, found: Found) -> None:
        self._found, self._traffic = found, instruments.Traffic(job.engine)
        instruments.forget_peaks(job.engine)
        self._first = job.engine.peers.rank == 0
        self._updates, self._from_update = 0, job.progress.applied
        self._sent: float | None = None
        self._counted = False
        self._notes: dict[str, str] = {}
        self._plan = self._planned(job) if self._first else {}
        self._earlier = earlier_starts(job.run.folder) if self._first else []

    def _planned(self, job: Job) -> dict[str, Figure]:
        """What the plan says of this start; empty, with a word to the user, where it can't."""
        run, engine = job.run, job.engine
        try:
            own = own_plan(run, engine.strategy, self._found, chunked=engine.module.chunked)
            figures = own.figures(engine.plan.micro)
        except FAULTS as error:
            logger.info("no plan of this run: %s", str(error) or type(error).__name__)
            return {}
        if own.untimed and own.untimed != CPU:
            logger.info("no plan of this run's times: %s", own.untimed)
            self._notes |= dict.fromkeys(("update time", "tokens/s", "MFU"), own.untimed)
        return figures

    # ---- in the loop

    def window_begins(self, job: Job) -> None:
        """Count the traffic of the second window; of a later one if that was skipped."""
        if self._first and self._updates >= 1 and not self._counted:
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
        except ValueError as error:
            self._notes["bytes sent"], self._counted = str(error), True
            return
        if applied:  # a skipped one gathers no parameters
            self._sent, self._counted = sum(sent_bytes(call) for call in calls), True

    def finish(self, job: Job) -> None:
        """Compare once more, at the end of a finished run."""
        if self._updates:
            self._judge(job, final=True)

    # ---- comparing

    def _judge(self, job: Job, *, final: bool) -> None:
        engine = job.engine
        mine = {**instruments.held_bytes(engine), "peak": update.peak_memory_bytes(engine)}
        mine["reserved"] = instruments.peak_reserved_bytes(engine) or 0
        everyone = engine.peers.gather(mine)
        if not self._first:
            return
        most = {key: max(held[key] for held in everyone) for key in mine}
        rows = comparison.rows(self._plan, self._measured(job, most), self._why(job))
        last = " at the end" if final else ""
        counted = many(len(self._timed(job)), "update")
        title = f"plan against measured{last}, micro {job.plan.micro}, {counted}"
        job.meter.say(comparison.table(title, rows))
        for line in comparison.warnings(rows):
            logger.warning("beyond the plan's band: %s", line)
        self._keep(job, rows, final)

    def _measured(self, job: Job, most: dict[str, float]) -> dict[str, float]:
        on_gpu = job.engine.device.type == "cuda"
        found: dict[str, float] = {key: most[key] for key in LASTING}
        found["peak allocated" if on_gpu else "peak resident"] = most["peak"]
        if on_gpu:
            found["peak reserved"] = most["reserved"]
        if self._sent is not None:
            found["bytes sent"] = self._sent
        timed = self._timed(job)
        step_s = median(t.step_ms for t in timed) / 1000.0
        tokens = sum(t.tokens for t in timed) / len(timed)
        found |= {"update time": step_s, "tokens per update": tokens}
        found["tokens/s"] = tokens / step_s if step_s else 0.0
        whole_ms = sum(t.step_ms for t in timed)
        found["data wait"] = sum(t.wait_ms for t in timed) / whole_ms if whole_ms else 0.0
        if job.peak_flops is not None:
            peak = job.peak_flops * job.plan.world
            found["MFU"] = found["tokens/s"] * job.flops_per_token / peak
        if job.saving.last_bytes is not None:
            found["checkpoint"] = job.saving.last_bytes
        return found

    def _timed(self, job: Job) -> list[Timing]:
        """The newest updates of this start without its first ones, unless it has no others."""
        kept = list(job.meter.timings)
        return kept[max(WARM_UP - (self._updates - len(kept)), 0) :] or kept

    def _why(self, job: Job) -> dict[str, str]:
        """Why a quantity has no plan or no measurement."""
        notes = dict.fromkeys(comparison.UNITS, "no plan")
        notes |= {"checkpoint": "none is saved yet", "bytes sent": "not counted"}
        if self._found.cpu:
            timed = ("peak resident", "update time", "tokens/s")
            notes |= dict.fromkeys(timed, ON_A_CPU)
        return notes | self._notes

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
            "notes": sorted(set(self._notes.values())),
            "quantities": [row.to_json() for row in rows],
        }
        whole = {"schema": 1, "name": job.run.name, "starts": [*self._earlier, start]}
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
        told = json.loads((folder / PLAN).read_text(encoding="utf-8"))
        return list(told["starts"])
    except FileNotFoundError:
        return []
    except (OSError, ValueError, LookupError, TypeError) as error:
        logger.warning("%s can't be read and is begun anew: %s", folder / PLAN, error)
        return []
