"""The whole answer of `octet plan` as plain values, which text, page and JSON show.

plan.schema.json beside this file describes it; every number that is not a whole one is a figure
with its band and its source, but for what was asked. Memory is in bytes, time in seconds.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from recipes.advice.plain import row_json
from recipes.advice.question import Question
from recipes.advice.sections import (
    batch_section,
    cost_section,
    memory_section,
    scaling_section,
)
from recipes.advice.sections_network import communication_section
from recipes.advice.start_line import start_line
from recipes.advice.would_fit import would_fit
from recipes.planner.choose import Ranking, bare, rank
from recipes.planner.scaling import scale
from recipes.planner.workload import Candidate

SETTINGS = {
    "bucket_elements": "a bucket",
    "overlap": "overlap_comm",
    "compress": "16 bit on the wire",
}
VERSION = 1  # of the JSON; plan.schema.json describes this one


def answer(question: Question) -> dict[str, Any]:
    """All six sections. Where nothing fits, sections 2 to 6 are of the run file's own settings."""
    work, cluster, traced = question.work, question.cluster, question.traced
    ranking = rank(work, cluster, asked=question.asked, traced=traced)
    subject = ranking.chosen or ranking.asked
    data = question.run.data
    points = scale(
        *(work, subject.candidate, cluster, question.worlds),
        traced=traced,
        lanes=data.lanes // max(data.workers, 1),
    )
    cost = cost_section(question, subject)
    return {
        "version": VERSION,
        "question": _question(question),
        "strategy": _strategy(ranking, question),
        "memory": memory_section(question, subject),
        "batch": batch_section(question, subject),
        "communication": communication_section(question, subject),
        "cost": cost,
        "scaling": scaling_section(question, points, cost["updates"]),
        "notes": list(question.notes),
    }


def _question(question: Question) -> dict[str, Any]:
    wanted, work, cluster = question.wanted, question.work, question.cluster
    shape, nic = work.shape, cluster.nic
    return {
        "run": wanted.run,
        "name": question.run.name,
        "overrides": list(wanted.overrides),
        "model": {
            "family": shape.family,
            "parameters": shape.parameters,
            "layers": shape.layers,
            "width": shape.width,
            "heads": shape.heads,
            "vocabulary": shape.vocab,
            "traced": question.traced is not None,
        },
        "precision": work.precision,
        "seq_len": work.seq_len,
        "global_sequences": work.global_sequences,
        "global_tokens": work.global_tokens,
        "nodes": cluster.nodes,
        "gpus_per_node": cluster.gpus,
        "world": cluster.world,
        "gpu": {"name": cluster.gpu.name, "source": cluster.gpu.source},
        "nic": None
        if nic is None
        else {"name": nic.name, "bits_per_s": nic.bits_per_s, "source": nic.source},
        "measured": wanted.measured,
        "price_per_gpu_hour": wanted.price,
    }


def _strategy(ranking: Ranking, question: Question) -> dict[str, Any]:
    chosen, start = ranking.chosen, None
    if chosen is not None:
        command, also = start_line(question, chosen.candidate)
        start = {"command": command, "also": also}
    rows = [
        row_json(row) | {"chosen": row is chosen, "why_not": ranking.why_not(row)}
        for row in ranking.rows
    ]
    asked = ranking.asked.candidate
    return {
        "start": start,
        "chosen": None if chosen is None else row_json(chosen),
        "asked": row_json(ranking.asked),
        "asked_is_chosen": chosen is not None and _plain(asked) == _plain(chosen.candidate),
        "asked_differs": [] if chosen is None else differences(asked, chosen.candidate),
        "would_fit": would_fit(question, ranking, rows) if chosen is None else None,
        "rows": rows,
        "rejected": [
            {
                "name": rejected.strategy.name,
                "config": rejected.strategy.config or None,
                "reason": rejected.reason,
            }
            for rejected in ranking.rejected
        ],
    }


def _plain(candidate: Candidate) -> Candidate:
    """A candidate without what its strategy is called and which file has it."""
    return replace(candidate, strategy=bare(candidate.strategy))


def differences(asked: Candidate, chosen: Candidate) -> list[str]:
    """What of two strategies of one family and stage differs; as the first has it."""
    own, other = asked.strategy, chosen.strategy
    if (own.family, own.stage) != (other.family, other.stage):
        return []  # their names say it
    found = []
    for field in fields(own):
        value = getattr(own, field.name)
        if field.name in ("name", "config") or value == getattr(other, field.name):
            continue
        what = SETTINGS.get(field.name, field.name.replace("_", " "))
        if isinstance(value, bool):
            found.append(what if value else f"no {what}")
        else:
            found.append(f"{what} of {value:,}")
    return found
