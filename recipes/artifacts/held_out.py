"""The held-out loss of a model, as its run measures it, and what it means per byte of text."""

from __future__ import annotations

import logging
import math
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from recipes.artifacts.facts import run_of
from recipes.artifacts.loading import Artifact, memory_of
from recipes.artifacts.text_bytes import ByteCounter
from recipes.config import Run, Tokenizer
from recipes.data.batches import IGNORED, held_out_rows
from recipes.data.feed import Corpus, look, to_device
from recipes.data.lanes import Sequence
from recipes.data.source import Units
from recipes.model import shape_faults, wrap
from recipes.runfile import load_run

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Score:
    """The loss over held-out sequences."""

    loss: float  # nats per token, end-of-text tokens included
    tokens: int  # labels
    text_bytes: int  # of the text that the labels stand for; end-of-text stands for none
    bytes_are_exact: bool
    sequences: int
    seconds: float

    @property
    def perplexity(self) -> float:
        """exp of the loss, bounded so that it is a number."""
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float | None:
        """What the model needs to write down the text, document ends included; None without text.

        It does not depend on the tokenizer, so models with different ones can be compared.
        """
        if not self.text_bytes:
            return None
        return self.loss * self.tokens / math.log(2.0) / self.text_bytes

    def to_json(self) -> dict[str, Any]:
        """Plain values, the derived ones included."""
        derived = {"perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}
        return asdict(self) | derived


def evaluation_run(artifact: Artifact, path: str | None, count: int | None) -> tuple[Run, int]:
    """The run file that names the data, with the model's own tokenizer, and how many sequences.

    Args:
        path: a run file to take in place of the model's own run.

    Raises:
        ValueError: there is no run file, it holds nothing out, or it does not fit the model.
    """
    run = load_run(path) if path else run_of(artifact.facts)
    if run is None:
        raise ValueError(
            f"{artifact.folder} does not say which data to use; name a run file with --run"
        )
    if run.data.held_out is None:
        raise ValueError(
            f"the run {run.name} holds no data out; name a run file with data.held_out with --run"
        )
    if count is None:
        count = run.evaluate.sequences if run.evaluate else 0
    if count < 1:
        raise ValueError(f"--sequences={count}: expected 1 or more")
    faults = shape_faults(artifact.network.config, run.batch.seq_len, artifact.encoder.vocab_size)
    if faults:
        raise ValueError("\n".join(faults))
    tokenizer = Tokenizer(file="tokenizer.json", end_of_text=artifact.end_of_text)
    data = run.data.model_copy(update={"tokenizer": tokenizer})
    return run.model_copy(update={"data": data}), count


def fallback_end_of_text(path: str | None) -> str | None:
    """The run file's end-of-text token, for a model whose folder names none."""
    return load_run(path).data.tokenizer.end_of_text if path else None


def read_held_out(
    artifact: Artifact, run: Run, count: int, revision: str | None
) -> tuple[Corpus, list[Sequence]]:
    """The first `count` held-out sequences: those that a run on any number of ranks evaluates.

    Args:
        revision: the hub commit of the data that the run recorded.

    Raises:
        ValueError: the data can't be read, or holds fewer.
    """
    with tempfile.TemporaryDirectory() as made:
        # Not the checkpoint's own file, which a run that goes on may have deleted meanwhile.
        tokenizer = Path(made) / "tokenizer.json"
        tokenizer.write_text(artifact.encoder.tokenizer.to_str(), encoding="utf-8")
        corpus = Corpus.open(run, look(run, revision, Path(made), tokenizer), tokenizer)
        now, then = corpus.scan.fingerprints(), artifact.facts.get("fingerprints") or {}
        if changed := [f"{key} {then[key]} -> {now[key]}" for key in then if then[key] != now[key]]:
            logger.warning("not the data that the run held out: %s", ", ".join(changed))
        units = Units(run.data, corpus.scan, "held_out")
        return corpus, held_out_rows(units, corpus.encoder, corpus.order, count, 0, 1)


def score(
    artifact: Artifact, corpus: Corpus, rows: list[Sequence], micro: int, device: torch.device
) -> Score:
    """The fp32 loss over some rows, `micro` at a time.

    Raises:
        ValueError: the device has no memory for so many rows at once, or the loss is no number.
    """
    started = time.perf_counter()
    counter = ByteCounter(artifact.encoder)
    total, tokens, text_bytes = 0.0, 0, 0
    with (
        memory_of(device, f"lower --micro={micro}, or take --device cpu"),
        torch.no_grad(),
        tqdm(total=len(rows), desc="evaluate", unit="seq", leave=False, disable=None) as bar,
    ):
        network = artifact.network.to(device).eval()
        module = wrap(network, "auto", prefer_chunked=device.type == "cuda").eval()
        for batch in to_device(rows, micro, corpus, device):
            total += float(module(**batch)[0])
            for labels in batch["labels"].cpu():
                counted = labels[labels != IGNORED].numpy()
                tokens += len(counted)
                text_bytes += counter.count(counted)
            bar.update(len(batch["labels"]))
    if not math.isfinite(total):
        raise ValueError(
            f"{artifact.folder}: its held-out loss is {total}, no number: the weights are broken, "
            "or the training had diverged; take an earlier checkpoint"
        )
    return Score(
        loss=total / max(tokens, 1),
        tokens=tokens,
        text_bytes=text_bytes,
        bytes_are_exact=counter.exact,
        sequences=len(rows),
        seconds=time.perf_counter() - started,
    )


def own_loss(artifact: Artifact, run: Run, count: int) -> float | None:
    """What the run itself measured at this step on these sequences; None if it did not."""
    own, held_out = run_of(artifact.facts), artifact.facts.get("held_out") or {}
    if own is None or own.evaluate is None or held_out.get("step") != artifact.facts.get("step"):
        return None
    if count != own.evaluate.sequences or _rows_of(own) != _rows_of(run):
        return None
    loss = held_out.get("held_out_loss")
    return float(loss) if loss is not None else None


def _rows_of(run: Run) -> tuple[Any, ...]:
    """What decides which rows are held out, the tokenizer apart, which is the model's own."""
    return run.seed, run.batch.seq_len, run.data.model_copy(update={"tokenizer": None})
