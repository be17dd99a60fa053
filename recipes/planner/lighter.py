"""Single changes that may lower a candidate's peak: what, how it is asked for, what it costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from recipes.planner.functions import ACTIVATIONS
from recipes.planner.workload import Candidate, Workload

Change = tuple[str, str, str, Workload, Candidate]  # what, how, cost, and the two after it
SMALL_BUCKET = 50_000_000  # elements; a reduction of 100 MB still runs at the network's full rate


def changes(work: Workload, candidate: Candidate) -> Iterator[Change]:
    """All that may be tried; some of them save nothing here."""
    shape = work.shape
    if ACTIVATIONS.get(shape.activation, ACTIVATIONS["gelu"]) is ACTIVATIONS["gelu_new"]:
        key = "activation_function" if shape.positions else "hidden_act"
        fused = replace(work, shape=replace(shape, activation="gelu_pytorch_tanh"))
        how, cost = f"model.config.{key}=gelu_pytorch_tanh", "the same curve, rounded differently"
        yield "the activation in one kernel", how, cost, fused, candidate
    if shape.dropout or shape.attention_dropout:
        dry = replace(work, shape=replace(shape, dropout=0.0, attention_dropout=0.0))
        cost = "none over one pass of the data"
        yield "no dropout", "model.config's dropouts = 0", cost, dry, candidate
    if not candidate.checkpointing:
        other = replace(candidate, checkpointing=True)
        cost = "every forward runs twice: a third more arithmetic"
        yield "checkpointing", "model.gradient_checkpointing=true", cost, work, other
    if candidate.attention == "eager":
        other = replace(candidate, attention="flash")
        yield "flash attention", "model.attention=sdpa", "none: it is faster", work, other
    if work.loss == "full":
        other_work = replace(work, loss="chunked")
        cost = "the head's product once more"
        yield "never all logits", "model.loss=chunked", cost, other_work, candidate
    if candidate.micro > 1:
        other = replace(candidate, micro=candidate.micro // 2)
        how = f"batch.micro={other.micro}"
        yield "half the micro-batch", how, "smaller matrices, more launches", work, other
    yield from _strategies(work, candidate)


def _strategies(work: Workload, candidate: Candidate) -> Iterator[Change]:
    strategy = candidate.strategy

    def with_(**changes: Any) -> Candidate:
        return replace(candidate, strategy=replace(strategy, **changes))

    if strategy.family == "ddp":
        if not strategy.bucket_view:
            how = "ddp.gradient_as_bucket_view=true"
            yield "gradients in DDP's buckets", how, "none", work, with_(bucket_view=True)
        zero = replace(strategy, family="deepspeed", stage=1, bucket_elements=SMALL_BUCKET)
        how, cost = (
            "accelerate_configs/zero1_*.yaml",
            "16-bit weights with fp32 masters, no autocast",
        )
        yield "ZeRO-1", how, cost, work, replace(candidate, strategy=zero)
    if strategy.family != "deepspeed":
        return
    if strategy.stage == 0:  # stages above 1 have no config here
        how = "accelerate_configs/zero1_*.yaml"
        other = with_(stage=1, bucket_elements=SMALL_BUCKET)
        yield "ZeRO-1", how, "one more all-gather an update", work, other
    if strategy.stage and strategy.bucket_elements > SMALL_BUCKET:
        how = f'"reduce_bucket_size": {SMALL_BUCKET} in the DeepSpeed JSON'
        other = with_(bucket_elements=SMALL_BUCKET)
        yield "a smaller bucket", how, "more and smaller reductions", work, other
    if strategy.stage and strategy.overlap:
        how, cost = (
            '"overlap_comm": false in the DeepSpeed JSON',
            "reductions wait for backward",
        )
        yield "one bucket, not two", how, cost, work, with_(overlap=False)
