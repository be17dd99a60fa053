"""`octet preflight`: every node is looked at before a GPU-hour is spent.

First each node answers for itself and they meet (a few seconds), then, if nothing stands against
it, one distributed start measures what only all ranks together can say (`recipes/measure.py`). The
end is one table, remedies to be pasted, and `preflight.json`:

    schema      1
    time        when, in seconds since 1970; seconds: how long it took
    code        the exit code: 0 (warnings allowed), 3 nodes, network, ports, devices, versions;
                2 run folder, data and files; 3 where both fail
    hosts       [{"name", "slots"}] in rank order
    rows        [{"check", "node", "found", "expected", "verdict": "ok", "warn", "FAIL" or
                "not checked", "remedy", "code"}], one for each check and node
    interfaces  {host: interface towards the others}; exports: lines for a shell
    parameters  of the run's model, or null
    facts       {host: what it said, of `nodefacts`; {"error": why} if it said nothing}
    measured    what `recipes/measure.py` measured (its docstring has the schema; `network` is what
                `octet plan` reads), or null
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from recipes.cluster.asking import Asked, Ready, read
from recipes.cluster.jobfile import new_job_id
from recipes.cluster.launchers import Start, script_arguments
from recipes.cluster.remote import ROOT
from recipes.cluster.supervisor import supervise
from recipes.config import Run
from recipes.measure import stage_fault
from recipes.objective import run_length
from recipes.outcome import DONE, TOPOLOGY, USAGE, TopologyError
from recipes.preflight import table
from recipes.preflight.checks import node_rows
from recipes.preflight.gathering import Question, gather
from recipes.preflight.network_checks import proposed_exports, towards_others
from recipes.preflight.rank_checks import measured_rows
from recipes.preflight.rows import Facts, Row, Wanted, exit_code, fail, many, unchecked
from recipes.runfolder import write_record

logger = logging.getLogger(__name__)

SCRIPT = ROOT / "recipes" / "measure.py"
# Failures that a distributed start of a minute does not stumble over.
HARMLESS = ("clock", "run folder", "shared folder", "free space", "data", ".deepspeed_env")


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What only `octet preflight` can be asked for."""

    json: str = "outputs/preflight.json"
    measure: bool = True
    only: str = ""  # stages of recipes/measure.py, e.g. "network"; all where empty


def _files(ready: Ready) -> tuple[Path, ...]:
    """What every node must have alike."""
    found = [Path(ready.asked.run).resolve()] if ready.asked.run else []
    found += [ready.arm.path] if ready.arm else []
    found += [ready.arm.deepspeed_json] if ready.arm and ready.arm.deepspeed_json else []
    return tuple(found)


def _start(ready: Ready, wishes: Wishes) -> Start:
    """The measurement's start."""
    asked = ready.asked
    assert ready.arm is not None
    arguments = list(script_arguments(asked.launcher, ready.arm))
    arguments += ["--only", wishes.only] if wishes.only else []
    arguments += [str(Path(asked.run).resolve()), *asked.overrides] if asked.run else []
    return ready.start(SCRIPT, tuple(arguments), Path(asked.hostfile).resolve())


def preflight(asked: Asked, wishes: Wishes) -> int:
    """Check every node, print the table, write the JSON; returns the exit code.

    Raises:
        ValueError: what the request names is wrong, before any node is asked.
    """
    began = time.time()
    if wishes.only and (fault := stage_fault(wishes.only)):
        raise ValueError(fault)
    ready = read(asked, SCRIPT)
    path = Path(wishes.json).absolute()
    _check_writable(path)
    names = [host.name for host in ready.hosts]
    wanted = _wanted(ready)
    logger.info("asking %s …", many(len(names), "host"))
    question = Question(
        hosts=tuple(names),
        port=asked.port,
        working_dir=ready.working_dir,
        files=_files(ready),
        environ=ready.env,
        run=ready.run,
        always_ssh=wanted.by_pdsh,
    )
    facts, counted = gather(question)
    rows = node_rows(facts, replace(wanted, parameters=counted.get("count")))
    if error := counted.get("error"):
        remedy = "# correct the run file's model section"
        rows.append(fail("model", names[0], error, "a model that can be built", remedy, USAGE))
    there = {host: found for host, found in facts.items() if not found.get("error")}
    measured = None
    if reason := obstacle(ready, wishes, rows):
        rows.append(unchecked("ranks", "all", reason))
    else:
        logger.info("measuring on %d ranks …", sum(host.slots for host in ready.hosts))
        measured, more = _measure(ready, wishes, there)
        rows += more
    exports = proposed_exports(there) if len(there) > 1 else []
    record: dict[str, Any] = {
        "schema": 1,
        "time": began,
        "seconds": time.time() - began,
        "code": exit_code(rows),
        "hosts": [{"name": host.name, "slots": host.slots} for host in ready.hosts],
        "rows": [asdict(row) for row in rows],
        "interfaces": {node: ",".join(towards_others(node, f)) for node, f in there.items()},
        "exports": exports,
        "parameters": counted.get("count"),
        "facts": facts,
        "measured": measured,
    }
    _tell(rows, names, exports, f"{record['seconds']:.1f} s; {path}")
    write_record(path.parent, path.name, record)
    return exit_code(rows)


def _check_writable(path: Path) -> None:
    folder = path.parent if path.parent.exists() else path.parent.parent
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        raise ValueError(f"--json {path} can't be written; name a file in a folder of yours")


def _wanted(ready: Ready) -> Wanted:
    return Wanted(
        hosts=ready.hosts,
        hostfile=ready.asked.hostfile,
        launcher=ready.asked.launcher,
        port=ready.asked.port,
        cpu=ready.arm is not None and ready.arm.cpu,
        keep=ready.run.checkpoint.keep if ready.run else None,
        milestones=_milestones(ready.run) if ready.run else 0,
        environ=ready.env,
    )


def _milestones(run: Run) -> int | None:
    """Checkpoints that the run will keep for ever; None where its length is known at the start."""
    every = run.checkpoint.milestone_every
    if every is None:
        return 0
    if run.schedule.samples is not None or run.schedule.epochs is not None:
        return None
    return run_length(run.schedule, run.batch).updates // every


def _tell(rows: Sequence[Row], hosts: Sequence[str], exports: Sequence[str], end: str) -> None:
    console = Console(file=sys.stdout, highlight=False)
    if not console.is_terminal:
        console = Console(file=sys.stdout, highlight=False, width=table.WIDTH)
    table.show(console, rows, hosts)
    if exports:
        text = "\n# the interface, for a start without octet launch:\n" + "\n".join(exports)
        console.print(text, soft_wrap=True, markup=False)
    console.print(f"\n{table.summary(rows)}; {end}", soft_wrap=True, markup=False)


def obstacle(ready: Ready, wishes: Wishes, rows: Sequence[Row]) -> str:
    """Why no distributed start is made; empty if one is."""
    if not wishes.measure:
        return "not asked for"
    if ready.arm is None:
        return "no strategy was named (--config)"
    bad = [row.check for row in rows if row.verdict == "FAIL" and row.check not in HARMLESS]
    if bad:
        return f"first mend: {', '.join(dict.fromkeys(bad))}"
    return ""


def _measure(ready: Ready, wishes: Wishes, there: Facts) -> tuple[dict[str, Any] | None, list[Row]]:
    """One distributed start of the measurement, through the launcher that the run will use."""
    job = new_job_id()
    logs = Path(wishes.json).absolute().parent / "preflight-logs"
    try:
        report = supervise(
            _start(ready, wishes),
            job_id=job,
            env=ready.env,
            logs=logs,
            working_dir=ready.working_dir,
        )
    except TopologyError as error:
        cause = " ".join(str(error).split())
        return None, [fail("ranks", "all", cause, "a start that ends well", "")]
    first = report.ends.get(0)
    result = first.result if first else None
    if not isinstance(result, dict) or result.get("stage") != "done":
        result = None  # it did not come to its end
    rows = measured_rows(result, there, ready.env) if result else []
    if report.code != DONE and not any(row.verdict == "FAIL" for row in rows):
        failed = report.first
        where = f"rank {failed.rank} ({failed.host})" if failed else "all"
        cause = " ".join(report.cause.split())
        remedy = f"less {failed.log}" if failed and failed.log else f"ls {report.logs}"
        code = USAGE if report.code == USAGE else TOPOLOGY
        rows.append(fail("ranks", where, cause, "a start that ends well", remedy, code))
    elif report.code == DONE and result is None:
        rows.append(fail("ranks", "all", "rank 0 brought no result", "one", f"ls {report.logs}"))
    return result, rows
