"""A checkpoint as a transformers folder: written beside, proved in a fresh process, renamed."""

from __future__ import annotations

import json
import logging
import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import GenerationConfig, PreTrainedTokenizerFast

from recipes.artifacts.card import model_card
from recipes.artifacts.facts import FACTS
from recipes.artifacts.loading import Artifact, is_transformers_folder, open_artifact, quiet
from recipes.artifacts.proof import choose_inputs, logits_of, prove
from recipes.checkpoint import files
from recipes.checkpoint.commit import COMMITTED, POINTER
from recipes.metrics import human_bytes
from recipes.model import count_parameters

logger = logging.getLogger(__name__)

SPARE_BYTES = 64 << 20  # for tokenizer, card and what a file system keeps to itself
CARD = "README.md"


def export_checkpoint(source: str, out: str, dtype: str, shard_bytes: int) -> tuple[Path, str]:
    """Write a checkpoint as a transformers folder and prove that it loads.

    The host holds the fp32 weights once, and while the proof runs the exported ones once.

    Args:
        source: a run folder or a checkpoint of one.
        out: the new folder; it may exist if it is empty.
        dtype: of torch, by its name.
        shard_bytes: greatest size of a weights file.

    Returns:
        The folder, and one sentence that says what was proved.

    Raises:
        ValueError: `out` is taken or has no room, the checkpoint is not whole or not this model's,
            a weight does not fit the dtype, or the folder does not load as it should.
    """
    try:
        if is_transformers_folder(Path(source)):
            raise ValueError(
                f"{source} is a transformers folder already; name a run or a checkpoint"
            )
        target, beside = check_target(out)
        return target, _export(source, target, beside, getattr(torch, dtype), shard_bytes)
    except SafetensorError as error:  # its writer tells a full disk so
        raise ValueError(f"{out} was not written: {error}") from error
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise ValueError(f"{out} was not written: {error.strerror or error}{where}") from error


def _export(source: str, target: Path, beside: Path, dtype: torch.dtype, shard_bytes: int) -> str:
    artifact = open_artifact(source)
    logger.info("read      %s, every byte as it was written", artifact.folder)
    encoder, name = artifact.encoder, str(dtype).removeprefix("torch.")
    parameters = count_parameters(artifact.network)
    _check_room(target.parent, parameters * dtype.itemsize)
    inputs = choose_inputs(artifact)
    exact = logits_of(artifact.network, inputs)
    cast(artifact.network, dtype)
    expected = logits_of(artifact.network, inputs)
    facts = artifact.facts | {"dtype": name, "parameters": parameters}
    facts["max_length"] = longest_text(artifact)
    with ExitStack() as undone:  # whatever ends it, Ctrl-C too, leaves nothing behind
        undone.callback(shutil.rmtree, beside, ignore_errors=True)
        _write(beside, artifact, facts, shard_bytes)
        del artifact  # else the proof would need memory for the weights twice
        logger.info("written   %s, %s parameters in %s", beside, f"{parameters:,}", name)
        facts["proof"] = prove(beside, encoder, dtype, inputs, expected)
        if dtype != torch.float32:
            facts["proof"] += _rounding(exact, expected)
        _publish(beside, target, facts)
        undone.pop_all()
    return str(facts["proof"])


def _rounding(exact: dict[str, torch.Tensor], cast_: dict[str, torch.Tensor]) -> str:
    largest = max(float(logits.abs().max()) for logits in exact.values())
    rounding = max(float((cast_[n].double() - exact[n].double()).abs().max()) for n in exact)
    return f" The fp32 logits, up to {largest:.2g}, differ from them by up to {rounding:.2g}."


def check_target(out: str) -> tuple[Path, Path]:
    """Where the folder will be, and where it is written before; an unfinished one is removed.

    Raises:
        ValueError: something else is there, or nothing can be.
    """
    target = Path(os.path.realpath(out))
    beside = target.parent / f"{target.name}.partial"
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{out} exists and is not empty; name another folder or remove it")
    if target.is_mount():  # nothing can be renamed to it
        raise ValueError(f"{out} is a mount point; name a folder in it")
    if any(
        COMMITTED.match(p.name) or (p.name == "checkpoints" and (p / POINTER).exists())
        for p in target.parents
    ):
        raise ValueError(f"{out} lies among a run's checkpoints; name a folder outside")
    above = _nearest(target.parent)
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise ValueError(f"{out} can't be made: {above} is no folder that you may write to")
    if beside.exists():
        # The card comes last: a folder that has one is somebody's finished export.
        ours = beside.is_dir() and (beside / FACTS).is_file() and not (beside / CARD).exists()
        if not ours and (not beside.is_dir() or any(beside.iterdir())):
            raise ValueError(f"{beside} exists and is no unfinished export; remove it")
        shutil.rmtree(beside)
    return target, beside


def _nearest(folder: Path) -> Path:
    return next(p for p in [folder, *folder.parents] if p.exists())


def _check_room(folder: Path, needed: int) -> None:
    there = _nearest(folder)
    free, needed = shutil.disk_usage(there).free, needed + SPARE_BYTES
    if free < needed:
        raise ValueError(
            f"{there} has {human_bytes(free)} free, the export needs {human_bytes(needed)}"
        )


def cast(network: Any, dtype: torch.dtype) -> None:
    """Convert parameters and persistent buffers in place; other buffers stay as they are made.

    Raises:
        ValueError: a value is not finite, or becomes infinite in this dtype; every array's name.
    """
    kept = network.state_dict(keep_vars=True)
    faults = []
    for name, value in {id(v): (k, v) for k, v in reversed(kept.items())}.values():
        if not value.is_floating_point():
            continue
        low = value.data.to(dtype)
        if not torch.isfinite(low).all():
            largest = value.data.abs().max().item()
            faults.append(f"{name} holds values up to {largest:.3g}")
        value.data = low
    if faults:
        limit = torch.finfo(dtype).max
        raise ValueError(
            f"the weights don't fit {str(dtype).removeprefix('torch.')}, whose largest number is "
            f"{limit:.4g}; take a wider --dtype, or an earlier checkpoint where they are nan or "
            "inf:\n" + "\n".join(f"  {fault}" for fault in faults)
        )
    network.config.dtype = dtype


def longest_text(artifact: Artifact) -> int:
    """Tokens of the longest text that the model was made for.

    From scratch it has seen positions below the run's seq_len only; a model that was trained
    further keeps its own limit.
    """
    config = artifact.facts["config"]
    trained = int(config["batch"]["seq_len"])
    return artifact.positions or trained if config["model"]["pretrained"] else trained


def _write(beside: Path, artifact: Artifact, facts: dict[str, Any], shard_bytes: int) -> None:
    beside.mkdir(parents=True)
    # First, since it tells a later export that this folder may be removed.
    (beside / FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    network, eot = artifact.network, artifact.encoder.eot
    network.config.bos_token_id = network.config.eos_token_id = eot
    # The padding not in config.json: some architectures count positions by it.
    network.generation_config = GenerationConfig(
        bos_token_id=eot, eos_token_id=eot, pad_token_id=eot, use_cache=True
    )
    with quiet():
        network.save_pretrained(beside, max_shard_size=shard_bytes)
    check_weights(beside, network)
    write_tokenizer(beside, artifact, facts["max_length"])


def check_weights(folder: Path, network: Any) -> None:
    """Refuse weights files that hold a tensor twice or not at all (ValueError)."""
    names: list[str] = []
    held = 0
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        names += header
        held += sum(end - start for start, end in (t["data_offsets"] for t in header.values()))
    kept = {id(v): v for v in network.state_dict(keep_vars=True).values()}.values()
    expected = sum(v.numel() * v.element_size() for v in kept)
    if held != expected or len(names) != len(set(names)):
        raise ValueError(
            f"{folder} holds {held} bytes of tensors, the model {expected}: a tensor is there "
            "twice or not at all; please report this with the model's config.json"
        )


def write_tokenizer(folder: Path, artifact: Artifact, max_length: int) -> None:
    """The run's tokenizer for transformers; it adds nothing to a text, as in training."""
    tree = json.loads(artifact.encoder.tokenizer.to_str())
    tree["post_processor"] = without_templates(tree.get("post_processor"))
    (folder / "tokenizer.json").write_text(json.dumps(tree, ensure_ascii=False), encoding="utf-8")
    token = artifact.end_of_text
    PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        eos_token=token,
        bos_token=token,
        pad_token=token,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    ).save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    # The name by which transformers 4 and 5 both find it.
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def without_templates(part: Any) -> Any:
    """A post-processor without the parts that put special tokens around a text."""
    if not isinstance(part, dict):
        return part
    if part.get("type") == "Sequence":
        inner = [kept for p in part["processors"] if (kept := without_templates(p)) is not None]
        return {**part, "processors": inner} if inner else None
    adding = ("TemplateProcessing", "BertProcessing", "RobertaProcessing")
    return None if part.get("type") in adding else part


def _publish(beside: Path, target: Path, facts: dict[str, Any]) -> None:
    (beside / FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    mode = (beside / FACTS).stat().st_mode & 0o777
    for path in beside.glob("*.safetensors"):
        path.chmod(mode)  # the library leaves 0600, unreadable for one's colleagues
    (beside / CARD).write_text(model_card(facts), encoding="utf-8")
    for path in beside.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    files.flush_folder(beside)
    files.rename(beside, target)
