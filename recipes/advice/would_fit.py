"""Where nothing fits that this package runs: how many GPUs, which GPU or what strategy would do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from recipes.advice.question import Question
from recipes.advice.wanted import LARGEST_WORLD
from recipes.advice.words import settings
from recipes.objective import legal_worlds
from recipes.planner.choose import Ranking
from recipes.planner.hardware import Gpu, read_hardware
from recipes.planner.memory import plan_memory
from recipes.planner.strategies import obstacle, strategies
from recipes.planner.workload import Candidate, Cluster


def would_fit(question: Question, ranking: Ranking, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The nearest three ways out; each is None where there is none.

    Args:
        rows: the ranking's, as the JSON has them: fastest first, none of which can be started.
    """
    more = next(_more_gpus(question), None)
    other = next(_other_gpus(question), None)
    return {
        "more_gpus": None if more is None else {"world": more[0], "strategy": more[1]},
        "other_gpu": None if other is None else {"gpu": other[0].name, "strategy": other[1]},
        "without_config": f"{rows[0]['name']}, {settings(rows[0])}" if ranking.rows else None,
    }


def _more_gpus(question: Question) -> Iterator[tuple[int, str]]:
    """Sizes at which a strategy that can be started fits, ascending."""
    run, cluster = question.run, question.cluster
    single = run.batch.model_copy(update={"micro": 1})
    legal = legal_worlds(single, lanes=run.data.lanes, workers=run.data.workers)
    worlds = {*question.worlds, *(cluster.world * 2**n for n in range(LARGEST_WORLD.bit_length()))}
    for world in sorted(worlds & set(legal)):
        if cluster.world < world <= LARGEST_WORLD and world % cluster.gpus == 0:
            name = _fitting(question, replace(cluster, nodes=world // cluster.gpus))
            if name:
                yield world, name


def _other_gpus(question: Question) -> Iterator[tuple[Gpu, str]]:
    """GPUs with more memory on which a strategy that can be started fits, the smallest first."""
    own, needs_bf16 = question.cluster.gpu, question.work.precision == "bf16"
    known = read_hardware(question.wanted.hardware).gpus.values()
    for gpu in sorted(known, key=lambda gpu: gpu.memory_gib):
        if gpu.memory_gib > own.memory_gib and (gpu.bf16 or not needs_bf16):
            name = _fitting(question, replace(question.cluster, gpu=gpu, measured=None))
            if name:
                yield gpu, name


def _fitting(question: Question, cluster: Cluster) -> str:
    """The first strategy that can be started and fits with a micro-batch of 1; empty: none."""
    work = question.work
    for strategy in strategies(work.precision, cluster):
        if not strategy.config or obstacle(strategy, work, cluster):
            continue
        for checkpointing in (False, True):
            smallest = Candidate(strategy=strategy, micro=1, checkpointing=checkpointing)
            if plan_memory(work, smallest, cluster, traced=question.traced).fits:
                return strategy.name + (", checkpointing" if checkpointing else "")
    return ""
