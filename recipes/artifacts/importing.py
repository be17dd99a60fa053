"""A foreign checkpoint becomes this run's first one: weights, Adam's moments, steps, loss scale."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from recipes.artifacts.foreign import Foreign, open_foreign
from recipes.artifacts.matching import Matched, expected_of, match
from recipes.checkpoint import commit, pieces, space
from recipes.checkpoint.disks import Disks
from recipes.checkpoint.files import FileRecord
from recipes.checkpoint.manifest import LAYOUT, STATE, STATE_VERSION
from recipes.config import Run
from recipes.data.tokens import Encoder, prepare_tokenizer
from recipes.model import build_network, shape_faults
from recipes.runfolder import versions


@dataclass(frozen=True, kw_only=True)
class Imported:
    """What was written, for people."""

    folder: Path
    kind: str
    step: int
    skipped: int
    parameters: int
    loss_scale: float | None
    notes: tuple[str, ...]


def import_checkpoint(source: Path, run: Run) -> Imported:
    """Write a checkpoint of `run` from one that Accelerate or DeepSpeed wrote.

    It is that of the last applied update there; reading starts at the run file's first sequence.

    Raises:
        ValueError: the run folder is in use, the checkpoint can't be read, or it is of another
            model; every difference is told.
        OSError: no space.
    """
    _refuse_used(run.folder)
    if run.data.tokenizer.train_vocab_size is not None:
        raise ValueError(
            "data.tokenizer.train_vocab_size would train a new tokenizer, which numbers other "
            "tokens than the imported weights know; give theirs as data.tokenizer.name or .file"
        )
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octet"
    tokenizer = prepare_tokenizer(run.data.tokenizer, lambda: (), cache)
    network = _network(run)
    encoder = Encoder(tokenizer, run.data.tokenizer.end_of_text)
    if faults := shape_faults(network.config, run.batch.seq_len, encoder.vocab_size):
        raise ValueError("\n".join(faults))
    found = open_foreign(source)
    matched = match(found, expected_of(network))
    adam_step, step = _steps(found)
    if run.schedule.updates is not None and run.schedule.updates <= step:
        raise ValueError(
            f"schedule.updates={run.schedule.updates} is reached already: {step} updates were "
            "applied there; raise it"
        )
    root = run.folder / "checkpoints"
    need = sum(values.numel() * 4 for _, _, values in _pieces(matched, convert=False))
    group, disks = commit.Alone(), Disks.one(host=socket.gethostname())
    if told := space.check_space(root, need, group, disks):
        raise ValueError(f"no room for the checkpoint: {'; '.join(told)}")

    def write(beside: Path) -> dict[str, FileRecord]:
        path = beside / pieces.arrays_name(0)
        return {path.name: pieces.write_pieces(path, (pieces.Piece(*p) for p in _pieces(matched)))}

    state = _state(found, run, step=step, adam_step=adam_step)
    common = {
        STATE: json.dumps(state, indent=1) + "\n",
        LAYOUT: json.dumps(_layout(matched), indent=1) + "\n",
        "tokenizer.json": tokenizer.read_text(encoding="utf-8"),
        "config.json": network.config.to_json_string(),
    }
    facts = {"world": found.world, "strategy": found.kind, "reason": "import", "time": time.time()}
    texts = {name: text.encode() for name, text in common.items()}
    folder = commit.commit(root, step, write, group, disks, facts, texts)
    return Imported(
        folder=folder,
        kind=found.kind,
        step=step,
        skipped=found.skipped,
        parameters=sum(p.numel() for p in network.parameters()),
        loss_scale=found.loss_scale,
        notes=_notes(matched, step, adam_step),
    )


def _refuse_used(folder: Path) -> None:
    root = folder / "checkpoints"
    there = [path.name for path in (folder / "run.json", *commit.committed(root)) if path.exists()]
    if there:
        raise ValueError(
            f"{folder} holds a run already ({', '.join(there[:3])}); name another folder: "
            "output_dir=FOLDER"
        )


def _network(run: Run) -> PreTrainedModel:
    """The run's model without its weights."""
    settings = run.model
    with torch.device("meta"):
        if settings.pretrained is None:
            # Neither changes a parameter, and the attention kind may need a GPU.
            plain = {"attention": "eager", "gradient_checkpointing": False}
            return build_network(settings.model_copy(update=plain), 0, run.batch.seq_len, 0)
        name, revision = settings.pretrained, settings.revision or "main"
        try:
            config = AutoConfig.from_pretrained(name, revision=revision)
        except OSError as error:
            raise ValueError(f"model.pretrained={name!r} can't be read: {error}") from error
        network: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    network.config.use_cache = False
    return network


def _steps(found: Foreign) -> tuple[int, int]:
    """Adam's step, and the updates that were applied."""
    if len(found.steps) != 1 or found.steps == {0}:
        told = f"counts {sorted(found.steps)}" if found.steps else "counts no step"
        raise ValueError(f"{found.kind}: Adam {told}; expected one number, 1 or more")
    (adam_step,) = found.steps
    if found.windows is None or found.windows <= found.skipped:
        return adam_step, adam_step
    return adam_step, found.windows - found.skipped


def _pieces(matched: Matched, convert: bool = True) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Every part of every array, in fp32 but for buffers: name, first element, values."""
    for name, parts in matched.parts.items():
        start = 0
        for part in parts:
            fp32 = convert and not name.startswith("buffer/")
            yield name, start, part.to(torch.float32) if fp32 else part
            start += part.numel()


def _layout(matched: Matched) -> dict[str, dict[str, Any]]:
    layout = {}
    for name, shape in matched.shapes.items():
        dtype = "float32"
        if name.startswith("buffer/"):
            dtype = str(matched.parts[name][0].dtype).removeprefix("torch.")
        layout[name] = {"shape": list(shape), "dtype": dtype}
    return layout


def _state(found: Foreign, run: Run, *, step: int, adam_step: int) -> dict[str, Any]:
    return {
        "version": STATE_VERSION,
        "name": run.name,
        "config": run.model_dump(mode="json"),
        "progress": {
            "applied": step,
            "windows": step + found.skipped,
            "skipped": found.skipped,
            "skipped_in_a_row": 0,
            "tokens": 0,  # how many they were there is not known
            "samples": 0,
            "scales": [],
        },
        "scalars": {
            "adam_step": adam_step,
            "loss_scale": found.loss_scale,
            "clean_updates": found.clean_updates,
            "hysteresis": found.hysteresis,
        },
        "data": None,
        "world": found.world,
        "strategy": found.kind,
        "held_out": None,
        "length": None,
        **versions(),
    }


def _notes(matched: Matched, step: int, adam_step: int) -> tuple[str, ...]:
    notes = [
        "tokens and samples are counted from here on; the data is read from its first sequence",
    ]
    if matched.rule:
        notes.append(
            f"moments had numbers in place of names: taken by {matched.rule}, shapes agree"
        )
    low = sorted(
        {
            str(part.dtype).removeprefix("torch.")
            for name, parts in matched.parts.items()
            for part in parts
            if part.dtype != torch.float32 and not name.startswith("buffer/")
        }
    )
    if low:
        notes.append(f"some of it was kept in {', '.join(low)} there and is fp32 now, unchanged")
    if adam_step != step:
        notes.append(f"Adam counted {adam_step} steps there; its bias correction goes on from that")
    return tuple(notes)
