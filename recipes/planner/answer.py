"""The whole answer of `octet plan` as plain values, which text, page and JSON show.

plan.schema.json beside this file describes it; every estimated number is a figure with its band and
its source. Memory is in bytes, time in seconds.
"""

from __future__ import annotations

from typing import Any

from recipes.planner.choose import Ranking, rank
from recipes.planner.plain import row_json
from recipes.planner.question import Question
from recipes.planner.scaling import scale
from recipes.planner.sections import (
    batch_section,
    communication_section,
    cost_section,
    memory_section,
    scaling_section,
)
from recipes.planner.start_line import start_line

VERSION = 1  # of the JSON; plan.schema.json describes this one


def answer(question: Question) -> dict[str, Any]:
    """All six sections. Where nothing fits, sections 2 to 6 are of the run file's own settings."""
    work, cluster, traced = question.work, question.cluster, question.traced
    ranking = rank(work, cluster, asked=question.asked, traced=traced)
    subject = ranking.chosen or ranking.asked
    points = scale(work, subject.candidate, cluster, question.worlds, traced=traced)
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
        precision = question.work.precision
        command, also = start_line(question.wanted, question.run, chosen.candidate, precision)
        start = {"command": command, "also": also}
    return {
        "start": start,
        "chosen": None if chosen is None else row_json(chosen),
        "asked": row_json(ranking.asked),
        "rows": [
            row_json(row) | {"chosen": row is chosen, "why_not": ranking.why_not(row)}
            for row in ranking.rows
        ],
        "rejected": [
            {
                "name": rejected.strategy.name,
                "config": rejected.strategy.config or None,
                "reason": rejected.reason,
            }
            for rejected in ranking.rejected
        ],
    }
