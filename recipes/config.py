"""The run file's sections: what is trained, on which data, for how long; frozen and typed.

`recipes.runfile.load_run` reads them. Which GPUs and which strategy are not said here: they are the
hostfile's and `accelerate_configs/`' facts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

Positive = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
NUMBER = "<number>"  # stands in pydantic's path of a fault, and in no run file
PositiveOrAuto = Annotated[
    Annotated[Positive, Tag(NUMBER)] | Annotated[Literal["auto"], Tag("auto")],
    Discriminator(lambda value: "auto" if value == "auto" else NUMBER),
]


class Section(BaseModel):
    """A frozen, strictly typed part of the run file; unknown keys are errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=()
    )


class Model(Section):
    """What is trained: from scratch by `config`, or continued from `pretrained`."""

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
        if self.revision is not None and self.name is None:
            raise ValueError("revision has no effect without name")
        return self


class HeldOut(Section):
    """What evaluation reads: a split of its own, or a share of the units, kept from training."""

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
    """How long, in one of four units, and the learning rate's shape over applied updates."""

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
        if self.shape == "constant" and "final_share" in self.model_fields_set:
            raise ValueError("final_share has no effect with shape: constant; remove it")
        return self


class Batch(Section):
    """One update's size; the accumulation follows from it and the world size."""

    seq_len: Annotated[int, Field(ge=2)]  # tokens
    global_sequences: Positive  # per update, over all ranks
    micro: PositiveOrAuto  # sequences per rank and forward; auto: by the plan, at the start

    @property
    def least_micro(self) -> int:
        """The stated micro-batch; 1, which divides every batch, while `auto` is not settled."""
        return 1 if self.micro == "auto" else self.micro


class Checkpoint(Section):
    """When the run is saved, besides at the end, on a signal and on RUN/SAVE; how, what is kept."""

    every_updates: Positive | None = None
    every_minutes: Annotated[float, Field(gt=0)] | None = None
    keep: Annotated[int, Field(ge=2)] = (
        2  # newest kept; an older one is the way back from a broken one
    )
    milestone_every: Positive | None = None  # updates; these checkpoints are never deleted
    # background: copied to the host's memory, written while training goes on; auto: if it has room
    write: Literal["auto", "background", "blocking"] = "auto"
    on_failure: Literal["stop", "go_on"] = "stop"  # when one can't be written: no space, say

    @model_validator(mode="after")
    def _some_time(self) -> Checkpoint:
        if self.every_updates is None and self.every_minutes is None:
            raise ValueError("give every_updates or every_minutes, or both")
        return self


class Evaluate(Section):
    """Held-out loss on the first `sequences`, at the start, on the way and at the end."""

    every_updates: Positive
    sequences: Positive


class Sample(Section):
    """The continuation that is printed at the end."""

    prompt: Annotated[str, Field(min_length=1)]
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
