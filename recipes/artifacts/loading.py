"""A trained model to work with, from a run's checkpoint or from a transformers folder.

    artifact = open_artifact("outputs/gpt2_xl")          # a run: its newest whole checkpoint
    artifact = open_artifact("outputs/gpt2_xl/checkpoints/step-00001000")
    artifact = open_artifact("exported")                 # what `octet export` or another tool wrote

The weights are fp32 and on the host, whatever they were trained in.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from recipes.artifacts.facts import facts_of, read_facts
from recipes.checkpoint.arrays import find_checkpoint, open_checkpoint
from recipes.checkpoint.pieces import ArrayReader
from recipes.config import Tokenizer
from recipes.data.tokens import Encoder, prepare_tokenizer

KINDS = ("weight/", "buffer/")
WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")  # a checkpoint has no file of such a name
# What transformers lets through of a folder that is damaged or none of its own.
UNLOADABLE: tuple[type[Exception], ...] = (OSError, ValueError, LookupError, TypeError, ImportError)
UNLOADABLE += (AttributeError, EOFError, RuntimeError, pickle.UnpicklingError)
UNLOADABLE += (SafetensorError, StrictDataclassError)


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """A model with its tokenizer and what is known of its training."""

    folder: Path
    network: Any  # a transformers model, fp32, on the host, in evaluation mode
    encoder: Encoder
    facts: dict[str, Any]  # `recipes.artifacts.facts`; empty for another project's folder

    @property
    def end_of_text(self) -> str:
        """The token that closes every document, as text."""
        return str(self.encoder.tokenizer.id_to_token(self.encoder.eot))

    @property
    def positions(self) -> int | None:
        """The longest text that the model takes, in tokens; None if it has no such limit."""
        found = getattr(self.network.config, "max_position_embeddings", None)
        return int(found) if found is not None else None


def open_artifact(path: str, end_of_text: str | None = None) -> Artifact:
    """Open a run folder, a checkpoint or a transformers folder.

    Args:
        end_of_text: for a transformers folder that names none; else its own counts.

    Raises:
        ValueError: there is no such thing, it is not whole, or its parts don't fit each other.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(
            f"{path} is no folder; expected a run folder, a checkpoint of one (step-…) or a "
            "transformers folder"
        )
    try:
        if is_transformers_folder(folder):
            return _open_transformers(folder, end_of_text)
        return _open_checkpoint(find_checkpoint(folder))
    except OSError as error:
        raise ValueError(
            f"{folder} can't be read: {error}; if its run goes on, it may have deleted this "
            "checkpoint meanwhile: try again"
        ) from error


def is_transformers_folder(folder: Path) -> bool:
    """Whether transformers would find a model in it."""
    weights = (found for pattern in WEIGHTS for found in folder.glob(pattern))
    return (folder / "config.json").is_file() and any(weights)


def _open_checkpoint(folder: Path) -> Artifact:
    with tqdm(desc="verify", unit="B", unit_scale=True, leave=False, disable=None) as bar:
        opened = open_checkpoint(folder, hashes=True, progress=bar.update)
    facts = facts_of(opened.state, opened.manifest.step, opened.folder)
    # Before the weights, which take long: meanwhile a run that goes on may delete the checkpoint,
    # of which only the arrays are open already.
    encoder = Encoder(opened.common("tokenizer.json"), facts["end_of_text"])
    network = build_network(opened.common("config.json"), opened.arrays, str(folder))
    return _artifact(folder, network, encoder, facts)


def _artifact(folder: Path, network: Any, encoder: Encoder, facts: dict[str, Any]) -> Artifact:
    if encoder.vocab_size > network.config.vocab_size:
        raise ValueError(
            f"{folder}: the tokenizer has {encoder.vocab_size} tokens, the model "
            f"{network.config.vocab_size}; they belong to different models"
        )
    return Artifact(folder=folder, network=network, encoder=encoder, facts=facts)


def build_network(config: Path, arrays: ArrayReader, where: str) -> Any:
    """The model of a config.json with the fp32 weights and buffers of a checkpoint.

    Raises:
        ValueError: names or shapes differ from the model's; all of them.
    """
    try:
        built = AutoConfig.from_pretrained(config.parent)
        built.use_cache = True  # off while training
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(built, dtype=torch.float32)
    except UNLOADABLE as error:
        raise ValueError(f"{where}: no model can be built from config.json: {error}") from error
    wanted = state_names(empty)
    held = {n: tuple(v["shape"]) for n, v in arrays.layout.items() if n.startswith(KINDS)}
    check_names(wanted, held, where)
    state = {name.partition("/")[2]: arrays.whole(name) for name in wanted}
    # Given as a state dict the tensors become the parameters, without another copy; buffers that no
    # checkpoint holds (rotary frequencies) and ties are made as for any transformers folder.
    return _load(
        lambda options: type(empty).from_pretrained(
            None, config=built, state_dict=state, **options
        ),
        where,
    )


def state_names(network: Any) -> dict[str, tuple[int, ...]]:
    """Shape of every array that a checkpoint holds of a model, tied ones once."""
    kept = set(network.state_dict(keep_vars=True))
    shapes = {f"weight/{name}": tuple(p.shape) for name, p in network.named_parameters()}
    return shapes | {
        f"buffer/{name}": tuple(b.shape) for name, b in network.named_buffers() if name in kept
    }


def check_names(
    wanted: dict[str, tuple[int, ...]], held: dict[str, tuple[int, ...]], where: str
) -> None:
    """Refuse arrays that are not exactly the model's (ValueError with every difference)."""
    faults = [f"{name} is missing" for name in wanted if name not in held]
    faults += [f"{name} is no array of the model" for name in held if name not in wanted]
    faults += [
        f"{name} has shape {list(held[name])}, the model {list(shape)}"
        for name, shape in wanted.items()
        if name in held and held[name] != shape
    ]
    if faults:
        shown = "\n".join(f"  {fault}" for fault in faults)
        raise ValueError(f"{where} does not hold the model of its config.json:\n{shown}")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' bars, and without what deepspeed says when transformers loads it."""
    shown, other = transformers_logging.is_progress_bar_enabled(), logging.getLogger("DeepSpeed")

    def grave(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    transformers_logging.disable_progress_bar()
    other.addFilter(grave)  # a level would be set anew when deepspeed is imported
    try:
        yield
    finally:
        other.removeFilter(grave)
        if shown:
            transformers_logging.enable_progress_bar()


def _load(load: Callable[[dict[str, Any]], Any], where: str) -> Any:
    """A model by `from_pretrained`, with nothing missing and nothing left over."""
    options = {"dtype": torch.float32, "output_loading_info": True}
    options["ignore_mismatched_sizes"] = True  # they are reported, all of them
    try:
        with quiet():
            network, report = load(options)
    except UNLOADABLE as error:
        raise ValueError(f"{where} can't be loaded by transformers: {error}") from error
    faults = [
        f"{kind.replace('_', ' ')}: {', '.join(map(str, report[kind]))}"
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
        if report.get(kind)
    ]
    if faults:
        raise ValueError(f"{where} is not the model of its config.json; {'; '.join(faults)}")
    return network.eval()


def _open_transformers(folder: Path, end_of_text: str | None) -> Artifact:
    facts = read_facts(folder)
    token = facts.get("end_of_text") or _own_end_of_text(folder) or end_of_text
    if token is None:
        raise ValueError(
            f"{folder}: its tokenizer names no eos_token, which ends a text; add it to "
            "tokenizer_config.json"
        )
    tokenizer = folder / "tokenizer.json"
    with tempfile.TemporaryDirectory() as made:
        if not tokenizer.is_file():
            settings = Tokenizer(name=str(folder), end_of_text=token)
            tokenizer = prepare_tokenizer(settings, lambda: (), Path(made))
        encoder = Encoder(tokenizer, token)
    network = _load(
        lambda options: AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, **options
        ),
        str(folder),
    )
    return _artifact(folder, network, encoder, facts)


def _own_end_of_text(folder: Path) -> str | None:
    try:
        token = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        ).eos_token
    except UNLOADABLE as error:
        raise ValueError(f"{folder}: its tokenizer can't be loaded: {error}") from error
    return str(token) if token is not None else None


def choose_device(asked: str) -> torch.device:
    """`auto` is the GPU where there is one.

    Raises:
        ValueError: a GPU was asked for and torch finds none.
    """
    found = torch.cuda.is_available()
    if asked == "cuda" and not found:
        raise ValueError("--device=cuda: torch finds no GPU here; take --device cpu")
    return torch.device("cuda" if found and asked != "cpu" else "cpu")


@contextlib.contextmanager
def memory_of(device: torch.device, remedy: str) -> Iterator[None]:
    """Tell a GPU without room, which a run may be using, as ValueError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ValueError(f"{device} has no memory left: {remedy}") from error
