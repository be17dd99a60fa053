"""Putting a run together and telling about it, where no engine is needed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from recipes import job, opening, telling
from recipes.config import Run
from recipes.engine.update import Agreement, UpdateResult
from recipes.objective import BatchPlan, Length

PLAN = BatchPlan(world=2, micro=2, accumulation=4, global_sequences=16, seq_len=32)


def run_of(**sections: Any) -> Run:
    tree: dict[str, Any] = {
        "name": "x",
        "model": {"config": {"model_type": "gpt2"}},
        "data": {"kind": "python_stdlib", "tokenizer": {"train_vocab_size": 300}},
        "batch": {"seq_len": 32, "global_sequences": 16, "micro": 2},
        "optim": {"lr": 1e-3},
        "schedule": {"updates": 10},
        "checkpoint": {"every_updates": 5},
    }
    return Run.model_validate(tree | sections)


class FirstRank:
    """Rank 0 alone."""

    def from_first(self, make: Callable[[], Any]) -> Any:
        return make()


class Corpus:
    """Says what was measured, and counts how often it was asked."""

    def __init__(self, tokens: float, sequences: float, share: float = 1.0) -> None:
        self.measured = SimpleNamespace(
            tokens_per_sample=tokens, sequences_per_sample=sequences, samples_per_document=share
        )
        self.counted = 0

    def measure(self) -> Any:
        return self.measured

    def count_documents(self) -> int:
        self.counted += 1
        return 1000


def length(
    schedule: dict[str, Any], corpus: Corpus, recorded: dict[str, Any] | None = None
) -> Length:
    run = run_of(schedule=schedule)
    return opening.fixed_length(recorded or {}, run, corpus, FirstRank())  # type: ignore[arg-type]


def test_the_length_in_each_of_its_four_units() -> None:
    corpus = Corpus(tokens=96.0, sequences=3.0)  # 96 tokens fill three rows of 32
    assert length({"updates": 7}, corpus) == Length(
        updates=7, tokens_per_sample=None, measured=False
    )
    # 10,000 tokens / (16 sequences x 32 tokens) = 19.53
    assert length({"tokens": 10_000}, corpus).updates == 20
    # 100 samples x 3 sequences / 16 = 18.75
    assert length({"samples": 100}, corpus) == Length(
        updates=19, tokens_per_sample=96.0, measured=True
    )
    assert corpus.counted == 0
    # 1,000 documents x 2 passes x 3 sequences / 16 = 375
    assert length({"epochs": 2.0}, corpus).updates == 375
    assert corpus.counted == 1


def test_empty_documents_are_no_samples_of_an_epoch() -> None:
    # 1,000 documents of which nine tenths hold tokens: 900 x 3 / 16 = 168.75
    assert length({"epochs": 1.0}, Corpus(96.0, 3.0, share=0.9)).updates == 169


def test_stated_tokens_per_sample_are_taken_as_stated_and_padding_as_measured() -> None:
    # Best fit measured 4 rows for 96 tokens, so 48 stated tokens fill 2: 100 x 2 / 16 = 12.5
    found = length({"samples": 100, "tokens_per_sample": 48.0}, Corpus(96.0, 4.0))
    assert found == Length(updates=13, tokens_per_sample=48.0, measured=False)


def test_a_recorded_length_never_moves() -> None:
    kept = {"length": {"updates": 5, "tokens_per_sample": 90.0, "measured": True}}
    assert length({"samples": 100}, Corpus(96.0, 3.0), kept).updates == 5


@pytest.mark.parametrize(("sequences", "nearest"), [(6, "4 or 8"), (2, "4"), (18, "16 or 20")])
def test_evaluation_must_fill_every_rank_alike(sequences: int, nearest: str) -> None:
    data = run_of().data.model_copy(update={"held_out": {"share": 0.1}})
    run = run_of().model_copy(
        update={"evaluate": SimpleNamespace(sequences=sequences), "data": data}
    )
    with pytest.raises(ValueError, match=rf"ranks x micro = 2 x 2; nearest: {nearest}$"):
        job._check_evaluation(run, PLAN)


def test_progress_counts_applied_and_skipped_windows_apart() -> None:
    progress = job.Progress()
    unsaid = dict.fromkeys(("stop", "save", "unreadable", "written"), False)
    agreed = Agreement(tokens=100, samples=3, digest=0, **unsaid)
    for applied in (True, False, False, True):
        scale = 8.0 if applied else 4.0
        progress.settle(UpdateResult(applied=applied, grad_norm=1.0, loss_scale=scale), agreed)
    assert (progress.applied, progress.skipped, progress.windows) == (2, 2, 4)
    assert (progress.tokens, progress.samples) == (200, 6)  # skipped windows trained on nothing
    assert progress.skipped_in_a_row == 0
    assert progress.scales == [8.0, 4.0, 4.0, 8.0]


def test_the_result_shows_the_drift_from_the_planned_length() -> None:
    values = {
        "updates": 19,
        "tokens": 9728,
        "skipped_updates": 1,
        "tokens_per_s": 5000.0,
        "tokens_per_sample": 99.0,
        "tokens_per_sample_planned": 90.0,
        "held_out_perplexity": 200.04,
        "held_out_perplexity_at_start": 4300.0,
    }
    assert telling.result(values).split("\n") == [
        "done     19 updates, 9,728 tokens, 1 skipped; 5,000 tokens/s",
        "held out perplexity 4,300.0 at the start, 200.0 at the end",
        "length   planned with 90.0 tokens a sample, 99.0 seen (+10.0%); the schedule did not move",
    ]
