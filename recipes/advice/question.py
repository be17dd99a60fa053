"""What `octet plan` was asked: options in, work, machines and the run's own settings out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from recipes.advice.arm_file import read_arm_file
from recipes.advice.machines import gpu_of, machines_of, nic_of
from recipes.advice.wanted import Wanted, file_faults, length_faults, option_faults, worlds_of
from recipes.config import Batch, Run
from recipes.objective import legal_worlds, nearest_worlds
from recipes.planner.families import read_shape
from recipes.planner.hardware import Gpu, Nic, read_hardware
from recipes.planner.measured import missing, read_measured
from recipes.planner.micro import largest_of, legal_micros, planned_micro
from recipes.planner.shape import Shape
from recipes.planner.strategies import data_parallel
from recipes.planner.traced import Traced
from recipes.planner.workload import Candidate, Cluster, Measured, Precision, Strategy, Workload
from recipes.runfile import load_run

NO_RUN = "name a run file, e.g. recipes/runs/gpt2_xl.yaml; overrides come after it"
MOST_SHOWN = 12  # micro-batches that a note lists

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Question:
    """What was asked, read: every part is there and right.

    Attributes:
        asked: the run file's own settings, under the strategy that it is to be started with.
        notes: what was changed or is worth a warning, a sentence each.
    """

    wanted: Wanted
    run: Run
    work: Workload
    cluster: Cluster
    asked: Candidate
    traced: Traced | None
    worlds: tuple[int, ...]
    notes: tuple[str, ...]


class _Faults:
    """Collects what is wrong, so that all of it is told at once."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def attempt(self, make: Callable[[], T]) -> T | None:
        """What `make` gives; None where it raised ValueError."""
        try:
            return make()
        except ValueError as error:
            self.texts.append(str(error))
            return None

    def add(self, *texts: str) -> None:
        """Note faults."""
        self.texts += texts

    def end(self) -> None:
        """Raise what was found (ValueError), if anything was."""
        if self.texts:
            raise ValueError("\n".join(self.texts))


def read(wanted: Wanted) -> Question:
    """Read everything that is named.

    Raises:
        ValueError: all faults of options, files, hardware and batch together.
    """
    faults = _Faults()
    faults.add(*option_faults(wanted), *file_faults(wanted))
    run = _run(wanted, faults)
    machines = faults.attempt(lambda: machines_of(wanted))
    gpu, nic, measured = _hardware(wanted, machines[0] if machines else None, faults)
    shape = faults.attempt(lambda: _shape(run, wanted)) if run else None
    world, legal = machines[0] * machines[1] if machines else None, None
    if run and world:
        faults.add(*_batch_faults(run, world))
        legal = faults.attempt(lambda: legal_micros(run.batch, world, run.evaluate))
    worlds = None
    if machines:
        network = machines[0] > 1 or nic is not None or wanted.nic is not None
        worlds = faults.attempt(lambda: worlds_of(wanted, *machines, network, run))
    arm = faults.attempt(lambda: _arm(wanted, run, shape, world)) if run else None
    if arm and run and gpu:
        faults.add(*_device_faults(wanted, run, gpu, arm[1]))
    faults.end()
    assert run and machines and gpu and arm and legal and worlds is not None
    nodes, gpus = machines
    cluster = Cluster(gpu=gpu, nodes=nodes, gpus=gpus, nic=nic, measured=measured)
    return _settle(wanted, run, shape, cluster, arm, worlds, legal)


def _run(wanted: Wanted, faults: _Faults) -> Run | None:
    if not wanted.run:
        faults.add(NO_RUN)
        return None
    run = faults.attempt(lambda: load_run(wanted.run, list(wanted.overrides)))
    if run is not None:
        faults.add(*length_faults(run, wanted))
    return run


def _hardware(
    wanted: Wanted, nodes: int | None, faults: _Faults
) -> tuple[Gpu | None, Nic | None, Measured | None]:
    """GPU and network from the table, or as they were measured."""
    hardware = faults.attempt(lambda: read_hardware(wanted.hardware or None))
    gpu = faults.attempt(lambda: gpu_of(wanted, hardware)) if hardware else None
    measured, nic = None, None
    if wanted.measured:
        path = wanted.measured
        measured = faults.attempt(lambda: read_measured(path, gpu=gpu))
    if hardware:
        nic = faults.attempt(lambda: nic_of(wanted, hardware, nodes, measured))
    return gpu, nic, measured


def _shape(run: Run, wanted: Wanted) -> Shape | None:
    """The model's shape; None where only a trace will tell it."""
    if not wanted.trace:
        return read_shape(run.model)
    from recipes.planner.tracing import check

    return check(run.model, _attention(run))


def _attention(run: Run) -> Literal["flash", "eager"]:
    return "eager" if run.model.attention == "eager" else "flash"


def _device_faults(wanted: Wanted, run: Run, gpu: Gpu, precision: Precision) -> list[str]:
    """What the GPU can't compute."""
    faults = []
    if precision == "bf16" and not gpu.bf16:
        where = f"--config {wanted.config}" if wanted.config else "--precision bf16"
        faults.append(f"{where}: {gpu.name} has no bf16; use fp16")
    if run.model.attention == "flash_attention_2" and not gpu.flash2:
        faults.append(
            f"model.attention=flash_attention_2 does not run on {gpu.name}, it needs Ampere or "
            "newer; use sdpa"
        )
    if run.model.attention == "flash_attention_2" and precision == "fp32":
        faults.append("model.attention=flash_attention_2 has no fp32; use sdpa")
    return faults


def _settle(
    wanted: Wanted,
    run: Run,
    shape: Shape | None,
    cluster: Cluster,
    arm: tuple[Strategy, Precision, list[str]],
    worlds: tuple[int, ...],
    legal: list[int],
) -> Question:
    """The parts that need all the others: the trace, which takes seconds, and the micro-batch."""
    strategy, precision, notes = arm
    traced = None
    if wanted.trace:  # any architecture, so the shape comes from the model too
        from recipes.planner.tracing import trace

        kind, seq_len = _attention(run), run.batch.seq_len
        traced = trace(run.model, precision, strategy.autocast, kind, seq_len)
        shape = traced.shape
    assert shape is not None
    work = workload(run, shape, precision)
    asked, more = _asked(run, work, strategy, cluster, legal)
    if run.model.attention == "flex_attention":
        more.append("model.attention=flex_attention is planned as if it were flash attention")
    if cluster.measured is not None:
        more += _measured_notes(cluster.measured)
    return Question(
        wanted=wanted,
        run=run,
        work=work,
        cluster=cluster,
        asked=asked,
        traced=traced,
        worlds=worlds,
        notes=(*notes, *more),
    )


def _measured_notes(measured: Measured) -> list[str]:
    table = "not measured, taken from the table"
    found = [f"{measured.path}: {table}: {text}" for text in missing(measured)]
    if measured.wrong_sums:
        found.append(
            f"{measured.path}: all-reduces with a wrong sum are left out, {measured.wrong_sums} of "
            "them; see what octet preflight says of it"
        )
    return found


def workload(run: Run, shape: Shape, precision: Precision) -> Workload:
    """One update of a run file; `loss: auto` is chunked in 16 bit on a GPU (recipes/model.py)."""
    loss = run.model.loss
    if loss == "auto":
        loss = "full" if precision == "fp32" else "chunked"
    return Workload(
        shape=shape,
        seq_len=run.batch.seq_len,
        global_sequences=run.batch.global_sequences,
        precision=precision,
        loss=loss,
        kernels="fused" if run.model.compile else "torch",
    )


def _asked(
    run: Run, work: Workload, strategy: Strategy, cluster: Cluster, legal: list[int]
) -> tuple[Candidate, list[str]]:
    """The run file's own settings; a micro-batch that does not divide its share is lowered."""
    candidate = Candidate(
        strategy=strategy,
        micro=1,
        checkpointing=run.model.gradient_checkpointing,
        attention=_attention(run),
    )
    given = run.batch.micro
    if given == "auto":
        micro, _ = planned_micro(work, candidate, cluster, legal, timed=True)
        return replace(candidate, micro=micro), []
    micro, notes = largest_of(legal, given), []
    if micro != given:
        shown = legal[-MOST_SHOWN:]
        few = f"{' '.join(map(str, shown))}" if shown == legal else f"… {' '.join(map(str, shown))}"
        notes.append(
            f"batch.micro={given} can't be used on {cluster.world} GPUs: a rank's share of an "
            f"update is {work.global_sequences // cluster.world} sequences"
            f"{', and evaluate.sequences must divide too' if run.evaluate else ''}; planned with "
            f"{micro}, of {few}"
        )
    return replace(candidate, micro=micro), notes


def _batch_faults(run: Run, world: int) -> list[str]:
    """Whether this many GPUs can share the batch at all, whatever the micro-batch."""
    single: Batch = run.batch.model_copy(update={"micro": 1})
    legal = legal_worlds(single, lanes=run.data.lanes, workers=run.data.workers)
    if world in legal:
        return []
    nearest = nearest_worlds(legal, world)
    return [
        f"{world} GPUs can't share batch.global_sequences={run.batch.global_sequences} and "
        f"data.lanes={run.data.lanes} equally at any micro-batch; legal: "
        f"{' '.join(map(str, legal))}; nearest: {' or '.join(map(str, nearest))}"
    ]


def _arm(
    wanted: Wanted, run: Run, shape: Shape | None, world: int | None
) -> tuple[Strategy, Precision, list[str]]:
    if wanted.config:
        return read_arm_file(wanted.config, run, shape, world)
    precision = wanted.precision or "fp16"
    return data_parallel(precision)[0], precision, []  # ZeRO-1, as ds_configs/ has it
