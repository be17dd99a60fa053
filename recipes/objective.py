"""What is optimised, how long and how fast: loss scaling, length, rate, in plain numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from recipes.config import Batch, Schedule


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """How one update's sequences are divided."""

    world: int  # data-parallel size
    micro: int  # sequences per rank and forward
    accumulation: int  # micro-batches per rank and update
    global_sequences: int
    seq_len: int

    @property
    def global_tokens(self) -> int:
        """Token positions per update; padding and masked labels are not taken off."""
        return self.global_sequences * self.seq_len


def plan_batch(batch: Batch, world: int, legal: list[int], micro: int | None = None) -> BatchPlan:
    """Derive the accumulation from the global batch.

    Args:
        legal: the world sizes that this run file allows, for the message.
        micro: what `batch.micro: auto` was settled to; until then its batches are planned with 1.

    Raises:
        ValueError: `world` is not among them.
    """
    if world not in legal:
        nearest = nearest_worlds(legal, world)
        raise ValueError(
            f"{world} ranks can't share batch.global_sequences={batch.global_sequences} at "
            f"batch.micro={batch.micro} over data.lanes equally; legal ranks: "
            f"{' '.join(map(str, legal))}; nearest: {' or '.join(map(str, nearest))}"
        )
    micro = micro or batch.least_micro
    return BatchPlan(
        world=world,
        micro=micro,
        accumulation=batch.global_sequences // (world * micro),
        global_sequences=batch.global_sequences,
        seq_len=batch.seq_len,
    )


def gradient_factor(*, accumulation: int, world: int, tokens: int) -> float:
    """What a summed loss is multiplied by, so that the applied gradient is the token mean.

    Both engines divide by the accumulation in backward and average over the ranks; undoing both and
    dividing by the window's global token count gives every token the same weight, whatever rank or
    micro-batch it fell into.
    """
    return accumulation * world / max(tokens, 1)


def scaled_loss(loss_sum: Any, factor: float) -> Any:
    """`loss_sum * factor`, whose gradient is NaN where the loss is not finite.

    A loss can be infinite while its gradient is not (a target whose logit is -inf). Tying the two
    together lets the one check on the reduced gradient catch both, on every rank and in every
    precision, without reading the loss.
    """
    return loss_sum * (factor + 0.0 * loss_sum.detach())


def learning_rate(applied: int, *, peak: float, total: int, schedule: Schedule) -> float:
    """The rate of the update after `applied` applied ones: linear warm-up, then the shape.

    A pure function of applied updates: skipped updates, ranks and resumes cannot move it.
    """
    warmup, floor = schedule.warmup_updates, schedule.final_share
    if applied < warmup:
        return peak * (applied + 1) / warmup
    if schedule.shape == "constant":
        return peak
    progress = min(1.0, (applied - warmup) / max(1, total - 1 - warmup))
    if schedule.shape == "linear":
        return peak * (1.0 - (1.0 - floor) * progress)
    return peak * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress)))


@dataclass(frozen=True, kw_only=True)
class Length:
    """The run's length, fixed at its first start and kept for good."""

    updates: int
    tokens_per_sample: float | None  # stated or measured; None where the length does not need it
    measured: bool


def run_length(
    schedule: Schedule,
    batch: Batch,
    *,
    samples: int | None = None,
    tokens_per_sample: float | None = None,
    sequences_per_token: float | None = None,
) -> Length:
    """Turn samples, tokens, updates or epochs into applied updates, rounded up.

    Args:
        samples: documents of the whole run, for lengths in samples or epochs.
        tokens_per_sample: mean tokens of a document, stated or measured; for the same lengths.
        sequences_per_token: rows that a token takes up; 1 / seq_len unless packing pads.
    """
    if schedule.updates is not None:
        return Length(updates=schedule.updates, tokens_per_sample=None, measured=False)
    tokens = float(schedule.tokens or 0)
    in_samples = schedule.tokens is None
    if in_samples:
        assert samples is not None and tokens_per_sample is not None
        tokens = samples * tokens_per_sample
    sequences = tokens * (sequences_per_token or 1.0 / batch.seq_len)
    return Length(
        # rounded first: 1e-9 of a window is the arithmetic's noise, not another update
        updates=max(1, math.ceil(round(sequences / batch.global_sequences, 9))),
        tokens_per_sample=tokens_per_sample if in_samples else None,
        measured=in_samples and schedule.tokens_per_sample is None,
    )


def legal_worlds(batch: Batch, *, lanes: int, workers: int) -> list[int]:
    """World sizes at which every rank gets the same share of every window and of the lanes.

    With `batch.micro: auto` any that divides the window: a micro-batch of 1 always does.
    """
    readers = max(workers, 1)
    if lanes % readers or batch.global_sequences % batch.least_micro:
        return []
    shares = batch.global_sequences // batch.least_micro, lanes // readers
    return divisors(math.gcd(*shares))


def nearest_worlds(legal: list[int], world: int) -> list[int]:
    """The two legal world sizes nearest to one that is not, ascending; fewer if there are."""
    return sorted(sorted(legal, key=lambda w: (abs(w - world), w))[:2])


def divisors(number: int) -> list[int]:
    """All divisors of a positive number, ascending."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
