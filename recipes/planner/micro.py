"""`batch.micro: auto`: which micro-batch the plan takes, among those that keep the global batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from recipes.config import Batch, Evaluate
from recipes.objective import divisors
from recipes.planner.choose import SAME, TRIED
from recipes.planner.memory import largest_micro, plan_memory
from recipes.planner.predict import predict
from recipes.planner.workload import Candidate, Cluster, Workload


def legal_micros(batch: Batch, world: int, evaluate: Evaluate | None = None) -> list[int]:
    """Micro-batches that divide a rank's share of the window and of the evaluation, ascending.

    Raises:
        ValueError: the ranks can't share the evaluation at any micro-batch.
    """
    share = batch.global_sequences // world
    if evaluate is None:
        return divisors(share)
    if evaluate.sequences % world:
        below = evaluate.sequences // world * world
        nearest = [str(n) for n in (below, below + world) if n]
        raise ValueError(
            f"evaluate.sequences={evaluate.sequences} can't be shared by {world} ranks equally; "
            f"nearest: {' or '.join(nearest)}"
        )
    return divisors(math.gcd(share, evaluate.sequences // world))


def largest_of(legal: Sequence[int], most: int) -> int:
    """The largest of `legal` that is not above `most`; the smallest where all are."""
    return max((n for n in legal if n <= most), default=min(legal))


def next_lower(legal: Sequence[int], micro: int) -> int | None:
    """What is tried after `micro` had no room; None where nothing is left."""
    return max((n for n in legal if n < micro), default=None)


def planned_micro(
    work: Workload, candidate: Candidate, cluster: Cluster, legal: Sequence[int], *, timed: bool
) -> tuple[int, int]:
    """The micro-batch to take, and the largest that fits whether it is legal or not (0: none).

    Args:
        timed: the cluster's rates are known, so that of the largest ones the fastest is taken, as
            in the plan's ranking; the larger of two that are alike. Otherwise the largest.
    """
    most = largest_micro(work, candidate, cluster)
    plans = {n: plan_memory(work, replace(candidate, micro=n), cluster) for n in legal}
    fitting = [n for n, memory in plans.items() if memory.fits]
    if not timed or not fitting:
        return max(fitting, default=min(legal)), most
    seconds = {}
    for micro in fitting[-TRIED:]:
        one = replace(candidate, micro=micro)
        seconds[micro] = predict(work, one, cluster, memory=plans[micro]).update.value
    best = min(seconds.values())
    return max(n for n, value in seconds.items() if value <= best * (1 + SAME)), most
