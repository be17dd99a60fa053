"""Checkpoints of tiny models made in process by the real commit, without an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tiny
import torch

from recipes.checkpoint.commit import Alone, commit
from recipes.checkpoint.disks import Disks
from recipes.checkpoint.pieces import Piece, write_pieces
from recipes.config import Model, Run
from recipes.model import build_network
from recipes.runfile import load_run

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 512,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
VERSIONS = {"torch": "2.13.0", "transformers": "5.24.0"}
Arrays = dict[str, torch.Tensor]


def tiny_settings(folder: Path, model: dict[str, Any] | None = None) -> Run:
    """The tiny run, with a tokenizer of single bytes, on a corpus of its own."""
    path = tiny.write_run(folder, tiny.write_corpus(folder / "corpus"))
    run = load_run(path, [f"output_dir={folder / 'run'}"])
    return run if model is None else run.model_copy(update={"model": Model(config=model)})


def trained(run: Run) -> Any:
    """The run's network with weights that are clearly not fresh ones."""
    network = build_network(run.model, 3, run.batch.seq_len, 257)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return network.eval()


def arrays_of(network: Any) -> Arrays:
    """Every array of a checkpoint, by name; the moments are made up."""
    kept = set(network.state_dict(keep_vars=True))
    found = {f"weight/{name}": p.detach() for name, p in network.named_parameters()}
    for kind in ("exp_avg", "exp_avg_sq"):
        found |= {f"{kind}/{n}": torch.full_like(p, 0.5) for n, p in network.named_parameters()}
    return found | {f"buffer/{n}": b for n, b in network.named_buffers() if n in kept}


def state_of(run: Run, step: int, **changes: Any) -> dict[str, Any]:
    """state.json of a checkpoint that was taken right after an evaluation."""
    held_out = {"step": step, "held_out_loss": 5.25, "held_out_perplexity": 190.6}
    return {
        "version": 2,
        "name": run.name,
        "config": run.model_dump(mode="json"),
        "progress": {"applied": step, "windows": step, "tokens": 4096, "samples": 31},
        "scalars": {"adam_step": step, "loss_scale": None, "clean_updates": 0, "hysteresis": 1},
        "data": None,
        "world": 2,
        "strategy": "ZeRO-1 bf16",
        "held_out": held_out,
        "versions": VERSIONS,
        "commit": "0123abcd",
    } | changes


def save(
    run: Run, network: Any, step: int = 8, *, found: Arrays | None = None, **changes: Any
) -> Path:
    """Commit a checkpoint of the run; every array lies in two pieces.

    Args:
        found: in place of the network's arrays. changes: of state.json.
    """
    found = arrays_of(network) if found is None else found
    tokenizer = tiny.write_tokenizer(run.folder.parent / "tokenizer.json").read_bytes()
    described = {
        name: {"shape": list(v.shape), "dtype": str(v.dtype).removeprefix("torch.")}
        for name, v in found.items()
    }
    common = {
        "state.json": json.dumps(state_of(run, step, **changes)).encode(),
        "arrays.json": json.dumps(described).encode(),
        "config.json": network.config.to_json_string().encode(),
        "tokenizer.json": tokenizer,
    }

    def pieces() -> Any:
        for name, value in found.items():
            flat, middle = value.reshape(-1), value.numel() // 2
            for start, stop in ((0, middle), (middle, len(flat))):
                if stop > start:
                    yield Piece(name, start, flat[start:stop])

    def write(folder: Path) -> dict[str, Any]:
        file = "arrays-00000.safetensors"
        return {file: write_pieces(folder / file, pieces())}

    facts = {"time": 1.0, "world": 1, "strategy": "ZeRO-1 bf16", "reason": "step"}
    root = run.folder / "checkpoints"
    return commit(root, step, write, Alone(), Disks.one(), facts, common)
