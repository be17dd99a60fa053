"""The run file: what is trained, on which data, for how long, as frozen typed sections.

    run = load_run("recipes/runs/gpt2_xl.yaml", ["optim.lr=3e-4", "batch.micro=8"])

Every fault of the file and of the overrides is reported in one `ValueError`. Nothing here imports
torch. Which GPUs and which strategy are not said here: they are the hostfile's and
`accelerate_configs/`' facts.
"""

from __future__ import annotations

import difflib
import io
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

Positive = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """A frozen, strictly typed part of the run file; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())


class Model(Section):
    """What is trained: `config` builds from scratch, `pretrained` continues a folder or hub name."""

    config: dict[str, Any] | None = (
        None  # keyword arguments of a transformers config, with `model_type`
    )
    pretrained: str | None = None
    revision: str | None = None  # of `pretrained`
    attention: Literal["sdpa", "eager", "flash_attention_2", "flex_attention"] = "sdpa"
    gradient_checkpointing: bool = False
    compile: bool = False
    loss: Literal["auto", "full", "chunked"] = "auto"  # chunked: never all logits at once
    sync_batch_norm: bool = True  # only for models that have batch norm

    @model_validator(mode="after")
    def _one_origin(self) -> Model:
        if (self.config is None) == (self.pretrained is None):
            raise ValueError(
                "give either config (from scratch) or pretrained (a folder or hub name)"
            )
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ValueError("config needs model_type, for example gpt2 or llama")
        if self.revision is not None and self.pretrained is None:
            raise ValueError("revision has no effect without pretrained")
        return self


class Tokenizer(Section):
    """Where the token numbers come from; exactly one of the three origins."""

    name: str | None = None  # a hub name, or a folder with tokenizer files
    file: str | None = None  # a tokenizer.json
    train_vocab_size: Annotated[int, Field(ge=257)] | None = (
        None  # train a byte-level BPE on this data
    )
    train_documents: Positive = 2000
    revision: str | None = None  # of `name`
    end_of_text: str = "<|endoftext|>"
    engine: Literal["hf", "gigatoken"] = "hf"  # gigatoken: faster, used only if it proves equal

    @model_validator(mode="after")
    def _one_origin(self) -> Tokenizer:
        if sum(v is not None for v in (self.name, self.file, self.train_vocab_size)) != 1:
            raise ValueError("give exactly one of name, file and train_vocab_size")
        return self


class HeldOut(Section):
    """What evaluation reads: a split of its own, or a fixed share of the units that training never sees."""

    split: str | None = None
    share: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None

    @model_validator(mode="after")
    def _one_way(self) -> HeldOut:
        if (self.split is None) == (self.share is None):
            raise ValueError(
                "give either split (its name) or share (of the units, between 0 and 1)"
            )
        return self


class Data(Section):
    """Where documents come from and in which order they become sequences."""

    kind: Literal["hub", "files", "saved", "python_stdlib"]
    path: str | None = None  # hub: the data set's name; saved: the folder
    name: str | None = None  # hub: the configuration, e.g. sample-100BT
    revision: str | None = None  # hub: unset means the newest, resolved once and recorded
    split: str = "train"
    format: Literal["parquet", "json", "text"] | None = None  # files only
    files: list[str] = []  # files only: paths, globs or URLs
    text_column: str = "text"
    tokenizer: Tokenizer
    held_out: HeldOut | None = None
    lanes: Positive = 96
    block_rows: Positive = 128  # documents shuffled, tokenized and packed together
    files_per_unit: Positive = 1  # group small files, so that a block holds many documents
    packing: Literal["concat", "best_fit"] = "concat"
    document_mask: bool = False
    workers: Annotated[int, Field(ge=0)] = 1  # reader processes per rank
    prefetch: Positive = 256  # sequences ready ahead, per worker
    skip_units: list[int] = []  # broken pieces to go round; part of the data's fingerprint
    read_attempts: Positive = 5

    @model_validator(mode="after")
    def _kind_has_its_keys(self) -> Data:
        needs = {
            "hub": ["path"],
            "files": ["format", "files"],
            "saved": ["path"],
            "python_stdlib": [],
        }
        allowed = {
            "hub": ["path", "name", "revision"],
            "files": ["format", "files"],
            "saved": ["path"],
        }
        faults = [
            f"kind: {self.kind} needs {key}" for key in needs[self.kind] if not getattr(self, key)
        ]
        for key in ("path", "name", "revision", "format", "files"):
            if getattr(self, key) and key not in allowed.get(self.kind, []):
                faults.append(
                    f"{key}={getattr(self, key)!r} has no effect with kind: {self.kind}; remove it"
                )
        if self.kind == "python_stdlib" and self.held_out is not None and self.held_out.split:
            faults.append("python_stdlib has no splits; give held_out.share")
        if faults:
            raise ValueError("; ".join(faults))
        return self


class Optim(Section):
    """AdamW with weight decay on matrices only, and clipping by the global norm."""

    lr: Annotated[float, Field(gt=0)]
    betas: Annotated[
        list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)
    ] = [0.9, 0.95]
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    clip: Annotated[float, Field(gt=0)] = 1.0
    max_skipped_in_a_row: Positive = 8  # non-finite updates in a row before the run stops (exit 4)


class Schedule(Section):
    """How long, in exactly one of four units, and the learning rate's shape over applied updates."""

    samples: Positive | None = None  # documents
    tokens: Positive | None = None
    updates: Positive | None = None
    epochs: Annotated[float, Field(gt=0)] | None = (
        None  # passes over the documents, counted at the start
    )
    tokens_per_sample: Annotated[float, Field(gt=0)] | None = (
        None  # unset: measured at the start, recorded
    )
    warmup_updates: Annotated[int, Field(ge=0)] = 0
    shape: Literal["cosine", "linear", "constant"] = "cosine"
    final_share: Share = 0.1  # of optim.lr, at the last update

    @model_validator(mode="after")
    def _one_length(self) -> Schedule:
        if sum(v is not None for v in (self.samples, self.tokens, self.updates, self.epochs)) != 1:
            raise ValueError("give exactly one of samples, tokens, updates and epochs")
        if self.tokens_per_sample is not None and self.samples is None and self.epochs is None:
            raise ValueError(
                "tokens_per_sample has no effect unless the length is in samples or epochs"
            )
        return self


class Batch(Section):
    """One update's size; the accumulation follows from it and the world size."""

    seq_len: Annotated[int, Field(ge=2)]  # tokens
    global_sequences: Positive  # per update, over all ranks
    micro: Positive  # sequences per rank and forward


class Checkpoint(Section):
    """When the run is saved, besides at the end and on SIGTERM or SIGINT."""

    every_updates: Positive
    keep: Annotated[int, Field(ge=2)] = (
        2  # newest kept; an older one is the way back from a broken one
    )


class Evaluate(Section):
    """Held-out loss: the first `sequences` of the held-out part, at the start, on the way and at the end."""

    every_updates: Positive
    sequences: Positive


class Sample(Section):
    """The continuation that is printed at the end."""

    prompt: str
    tokens: Positive = 64
    temperature: Annotated[float, Field(gt=0)] = 0.8
    top_k: Positive = 50


class Log(Section):
    """Console, JSONL and trackers."""

    every_updates: Positive = 10  # losses stay on the device in between
    trackers: list[Literal["tensorboard", "wandb", "trackio", "mlflow"]] = []


class Ddp(Section):
    """Knobs of torch's DistributedDataParallel, which no file of the ecosystem holds."""

    bucket_cap_mb: Positive = 100
    gradient_as_bucket_view: bool = True  # saves one copy of the gradients, 4 bytes per parameter
    static_graph: bool = False
    compress: Literal["no", "fp16", "bf16"] = "no"  # gradients on the wire


class Run(Section):
    """A whole run file."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    seed: Annotated[int, Field(ge=0)] = 0
    output_dir: str | None = None  # unset: outputs/<name> under the working directory
    model: Model
    data: Data
    batch: Batch
    optim: Optim
    schedule: Schedule
    checkpoint: Checkpoint
    evaluate: Evaluate | None = None
    sample: Sample | None = None
    log: Log = Log()
    ddp: Ddp = Ddp()

    @property
    def folder(self) -> Path:
        """The run folder, absolute."""
        return Path(self.output_dir or f"outputs/{self.name}").absolute()


def load_run(path: str | Path, overrides: list[str] | None = None) -> Run:
    """Read a run file, apply `section.key=value` overrides and validate.

    Raises:
        ValueError: one text with every fault: unreadable YAML, unknown keys (with the nearest known
            one), wrong
            types, values out of range, and settings that could take no effect.
    """
    tree = read_yaml(path)
    if not isinstance(tree, dict):
        raise ValueError(
            f"{path} holds {type(tree).__name__}, expected sections such as model: and data:"
        )
    problems = [fault for item in overrides or [] if (fault := _override(tree, item))]
    try:
        run = Run.model_validate(tree)
        problems += _across_sections(run)
    except ValidationError as error:
        problems += [_describe(fault) for fault in error.errors()]
    if problems:
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        raise ValueError(f"{count} in {path}:\n" + "\n".join(f"  {p}" for p in problems))
    return run


def read_yaml(path: str | Path) -> Any:
    """A YAML file's values (ValueError if it can't be read or parsed)."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}; expected a YAML file") from error
    return _parse(text, str(path))


def _parse(text: str, where: str) -> Any:
    # ruamel reads YAML 1.2: 1e-4 is a number, `no` is text, and a key given twice is an error.
    try:
        return YAML(typ="safe", pure=True).load(io.StringIO(text))
    except YAMLError as error:
        raise ValueError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from error


def _override(tree: dict[str, Any], item: str) -> str | None:
    """Set one `section.key=value` in place; returns the fault, if any."""
    key, equals, value = item.partition("=")
    if not equals or not key:
        return f"override {item!r}: expected section.key=value"
    node: Any = tree
    *sections, leaf = key.split(".")
    for name in sections:
        node = node.setdefault(name, {}) if isinstance(node, dict) else None
        if not isinstance(node, dict):
            return f"override {item!r}: {name} is not a section"
    try:
        node[leaf] = _parse(value, f"override {item!r}")
    except ValueError as error:
        return str(error)
    return None


def _describe(fault: Any) -> str:
    """One pydantic fault as `section.key=value: what was expected`."""
    place = [str(part) for part in fault["loc"]]
    if fault["type"] == "extra_forbidden":
        known = list(_section_at(fault["loc"][:-1]).model_fields)
        near = difflib.get_close_matches(place[-1], known, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}"
        return f"{'.'.join(place)}: unknown key; {remedy}"
    if fault["type"] == "missing":
        return f"{'.'.join(place)}: missing"
    text = fault["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    if fault["type"] == "value_error":
        return f"{'.'.join(place)}: {text}"
    return f"{'.'.join(place)}={fault['input']!r}: {text}"


def _section_at(place: tuple[Any, ...]) -> type[BaseModel]:
    section: type[BaseModel] = Run
    for part in place:
        kinds = [
            section.model_fields[part].annotation,
            *get_args(section.model_fields[part].annotation),
        ]
        section = next(k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel))
    return section


def _across_sections(run: Run) -> list[str]:
    """Faults that show only when two sections are read together."""
    faults = []
    if run.batch.global_sequences % run.batch.micro:
        faults.append(
            f"batch.global_sequences={run.batch.global_sequences} must be a multiple of batch.micro={run.batch.micro}"
        )
    if run.evaluate is not None and run.data.held_out is None:
        faults.append("evaluate needs data.held_out: give held_out.split or held_out.share")
    if run.evaluate is None and run.data.held_out is not None:
        faults.append(
            "data.held_out has no effect without an evaluate section; add one or remove it"
        )
    if run.schedule.updates is not None and run.schedule.warmup_updates > run.schedule.updates:
        faults.append(
            f"schedule.warmup_updates={run.schedule.warmup_updates} is more than schedule.updates="
            f"{run.schedule.updates}; the learning rate would never reach optim.lr"
        )
    if run.data.document_mask and run.model.attention == "flash_attention_2":
        faults.append(
            "data.document_mask with model.attention=flash_attention_2 loses the mask at micro-batches above one; "
            "use sdpa or flex_attention"
        )
    return faults
