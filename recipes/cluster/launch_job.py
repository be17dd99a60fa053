"""`octet launch`: from a run file, a strategy file and a hostfile to a supervised job.

It builds the existing launchers' commands, has the supervisor watch them, and starts again from the
newest checkpoint where that is asked for and can help.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_result,
    stop_after_attempt,
    wait_exponential,
)

from recipes.cluster.asking import Asked, Ready, read
from recipes.cluster.environment import held_back
from recipes.cluster.jobfile import job_folder, new_job_id
from recipes.cluster.launchers import Start, notes, pasteable, script_arguments
from recipes.cluster.remote import ROOT
from recipes.cluster.supervisor import Limits, Report, supervise
from recipes.outcome import DONE, NUMBERS, STOPPED, TOPOLOGY, USAGE, TopologyError

logger = logging.getLogger(__name__)

SCRIPT = ROOT / "recipes" / "pretrain.py"
# A second start can't mend what these say.
FINAL = (DONE, USAGE, TOPOLOGY, NUMBERS)


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What only `octet launch` can be asked for."""

    restarts: int = 0
    fresh: bool = False
    limits: Limits = Limits()


def _start(ready: Ready, hostfile: Path, *, fresh: bool, compare: bool = True) -> Start:
    """The recipe's start; every rank compares with `hostfile` if `compare`."""
    asked = ready.asked
    assert ready.arm is not None
    arguments = [str(Path(asked.run).resolve()), *asked.overrides]
    arguments += ["--hostfile", str(hostfile)] if compare else []
    arguments += script_arguments(asked.launcher, ready.arm)
    arguments += ["--fresh"] if fresh else []
    return ready.start(SCRIPT, tuple(arguments), hostfile)


def dry_run(asked: Asked, wishes: Wishes) -> str:
    """The commands for each node, to be pasted there; nothing is started."""
    ready = read(asked, SCRIPT)
    hostfile = Path(asked.hostfile).resolve()
    start = _start(ready, hostfile, fresh=wishes.fresh, compare=not asked.selected)
    return pasteable(start, ready.env, {}, ready.working_dir)


def launch(asked: Asked, wishes: Wishes, echo: Callable[[str], None]) -> int:
    """Start the job, watch it, start it again if asked for; returns the first cause's exit code.

    Raises:
        ValueError: what is asked for is wrong. TopologyError: a node can't be prepared.
    """
    ready = read(asked, SCRIPT)
    told = notes(_start(ready, Path(asked.hostfile), fresh=False))
    for note in [*told, *held_back(os.environ, asked.env)]:
        logger.info("note: %s", note)
    reports: list[Report] = []
    earlier = _recorded(ready)

    def once() -> Report:
        # What the first attempt saved must not be deleted by the second; but if the first did not
        # come to delete an earlier run, the second must not go on with that.
        again = bool(reports) and (earlier is None or _recorded(ready) != earlier)
        fresh = wishes.fresh and not again
        reports.append(_attempt(ready, wishes, fresh, len(reports) + 1, echo))
        return reports[-1]

    def again(state: RetryCallState) -> None:
        wait_s = state.next_action.sleep if state.next_action else 0.0
        logger.warning("starting again in %.0f s (%d/%d)", wait_s, len(reports), wishes.restarts)

    report = Retrying(
        retry=retry_if_result(lambda r: r.code not in FINAL and not r.interrupted),
        stop=stop_after_attempt(wishes.restarts + 1),
        wait=wait_exponential(multiplier=5, max=300),
        before_sleep=again,
        retry_error_callback=lambda state: state.outcome.result(),  # type: ignore[union-attr]
    )(once)
    return report.code


def _recorded(ready: Ready) -> tuple[int, int] | None:
    """By what a start's record in the run folder differs from a later one; None if none is seen."""
    assert ready.run is not None
    try:
        found = (ready.run.folder / "run.json").stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _attempt(
    ready: Ready, wishes: Wishes, fresh: bool, number: int, echo: Callable[[str], None]
) -> Report:
    assert ready.run is not None
    job_id = new_job_id()
    logs = ready.run.folder.absolute() / "logs"
    start = _start(ready, job_folder(job_id) / "hostfile", fresh=fresh)
    began = time.time()
    logger.info(
        "job %s: %s on %s; logs in %s",
        job_id,
        start.launcher,
        " + ".join(f"{host.name}:{host.slots}" for host in ready.hosts),
        logs / job_id,
    )
    try:
        report = supervise(
            start,
            job_id=job_id,
            env=ready.env,
            logs=logs,
            working_dir=ready.working_dir,
            limits=wishes.limits,
            echo=echo,
        )
    except TopologyError as error:
        if number == 1:
            raise
        # It worked before: the node that the first attempt lost may yet come back.
        report = Report(code=1, cause=str(error), job_id=job_id, logs=logs / job_id)
    record = {"job": job_id, "attempt": number, "began": began, "ended": time.time()}
    record |= {"code": report.code, "cause": report.cause}
    try:
        logs.mkdir(parents=True, exist_ok=True)
        with (logs / "attempts.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    except OSError as error:  # a login node may not share the run folder
        logger.warning("note: this attempt is not recorded: %s", error)
    tell(report, wishes)
    return report


def tell(report: Report, wishes: Wishes) -> None:
    """Say how an attempt ended: the first cause first."""
    if report.code == DONE:
        logger.info("all %d ranks finished; logs: %s", len(report.ends), report.logs)
        return
    first, cause = report.first, report.cause
    if first is not None and first.reason and first.reason in first.tail:
        cause = cause.removesuffix(f": {first.reason}")  # the log says it
    if report.code != STOPPED:  # rank 0 has said how to go on, and its output is on the screen
        logger.error("\n%s", cause)
    elif wishes.fresh:
        logger.warning("leave --fresh out to go on: it would delete what was saved")
    if first is not None and first.rank != 0 and first.tail.strip():
        logger.error("its log ends with:\n%s", first.tail.strip())
    failed = [end for end in report.ends.values() if end.code not in (DONE, STOPPED)]
    others = [f"{end.host} rank {end.rank} (exit {end.code})" for end in failed if end is not first]
    if others:
        logger.error("after it: %s", ", ".join(others))
    logger.error("exit code %d; logs: %s", report.code, report.logs)
