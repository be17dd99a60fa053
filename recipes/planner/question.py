"""What `octet plan` was asked: options in, work, machines and the run's own settings out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from recipes.cluster.hostfile import read_hostfile
from recipes.config import Batch, Run
from recipes.objective import legal_worlds
from recipes.planner.arm_file import read_arm_file
from recipes.planner.hardware import Gpu, Hardware, Nic, read_hardware
from recipes.planner.measured import missing, read_measured
from recipes.planner.micro import largest_of, legal_micros, planned_micro
from recipes.planner.shape import Shape, read_shape
from recipes.planner.strategies import data_parallel
from recipes.planner.traced import Traced
from recipes.planner.wanted import HOSTFILE, Wanted, length_faults, option_faults, worlds_of
from recipes.planner.workload import Candidate, Cluster, Measured, Precision, Strategy, Workload
from recipes.runfile import load_run

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
    faults.add(*option_faults(wanted))
    run = faults.attempt(lambda: load_run(wanted.run, list(wanted.overrides)))
    nodes_gpus = faults.attempt(lambda: _machines(wanted))
    hardware = faults.attempt(lambda: read_hardware(wanted.hardware))
    gpu = faults.attempt(lambda: _gpu(wanted, hardware)) if hardware else None
    measured = None
    if wanted.measured is not None:
        path = wanted.measured
        measured = faults.attempt(lambda: read_measured(path, gpu=gpu))
    nic = None
    if hardware and nodes_gpus and (measured is not None or not wanted.measured):
        nic = faults.attempt(lambda: _nic(wanted, hardware, nodes_gpus, measured))
    shape = faults.attempt(lambda: read_shape(run.model)) if run and not wanted.trace else None
    if run and nodes_gpus:
        faults.add(*_batch_faults(run, nodes_gpus[0] * nodes_gpus[1]))
        faults.add(*length_faults(run, wanted))
    worlds = None
    if nodes_gpus:
        worlds = faults.attempt(lambda: worlds_of(wanted, *nodes_gpus, nic is not None, run))
    arm = faults.attempt(lambda: _arm(wanted, run, shape)) if run else None
    if arm and gpu and arm[1] == "bf16" and not gpu.bf16:
        where = f"--config {wanted.config}" if wanted.config else "--precision bf16"
        faults.add(f"{where}: {gpu.name} has no bf16; use fp16")
    faults.end()
    assert run and nodes_gpus and gpu and arm and worlds is not None
    nodes, gpus = nodes_gpus
    cluster = Cluster(gpu=gpu, nodes=nodes, gpus=gpus, nic=nic, measured=measured)
    return _settle(wanted, run, shape, cluster, arm, worlds)


def _settle(
    wanted: Wanted,
    run: Run,
    shape: Shape | None,
    cluster: Cluster,
    arm: tuple[Strategy, Precision, list[str]],
    worlds: tuple[int, ...],
) -> Question:
    """The parts that need all the others: the trace, which takes seconds, and the micro-batch."""
    strategy, precision, notes = arm
    traced = None
    if shape is None:  # --trace: any architecture, so the shape comes from the model too
        from recipes.planner.trace import trace

        eager = run.model.attention == "eager"
        traced = trace(
            run.model,
            precision,
            strategy.autocast,
            "eager" if eager else "flash",
            run.batch.seq_len,
        )
        shape = traced.shape
    work = workload(run, shape, precision)
    asked, more = _asked(run, work, strategy, cluster)
    if cluster.measured is not None:
        table = "not measured, taken from the table"
        more += [f"{cluster.measured.path}: {table}: {text}" for text in missing(cluster.measured)]
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
    run: Run, work: Workload, strategy: Strategy, cluster: Cluster
) -> tuple[Candidate, list[str]]:
    """The run file's own settings; a micro-batch that does not divide its share is lowered."""
    candidate = Candidate(
        strategy=strategy,
        micro=1,
        checkpointing=run.model.gradient_checkpointing,
        attention="eager" if run.model.attention == "eager" else "flash",
    )
    legal = legal_micros(run.batch, cluster.world, run.evaluate)
    given = run.batch.micro
    if given == "auto":
        micro, _ = planned_micro(work, candidate, cluster, legal, timed=True)
        return replace(candidate, micro=micro), []
    micro, notes = largest_of(legal, given), []
    if micro != given:
        notes.append(
            f"batch.micro={given} can't be used on {cluster.world} GPUs: a rank's share of an "
            f"update is {work.global_sequences // cluster.world} sequences"
            f"{', and evaluate.sequences must divide too' if run.evaluate else ''}; planned with "
            f"{micro}, of {' '.join(map(str, legal))}"
        )
    return replace(candidate, micro=micro), notes


def _machines(wanted: Wanted) -> tuple[int, int]:
    """Nodes and GPUs on each."""
    if wanted.nodes is not None or wanted.gpus is not None:
        if wanted.hostfile is not None:
            raise ValueError(
                f"--hostfile {wanted.hostfile} has no effect with --nodes and --gpus; leave one out"
            )
        if wanted.gpus is None:
            raise ValueError(f"--nodes {wanted.nodes} needs --gpus N, the GPUs of each")
        return max(wanted.nodes or 1, 1), max(wanted.gpus, 1)
    hosts = read_hostfile(wanted.hostfile or HOSTFILE)
    counts = {host.slots for host in hosts}
    if len(counts) > 1:
        raise ValueError(
            f"hostfile {wanted.hostfile or HOSTFILE} has nodes of {sorted(counts)} GPUs; the plan "
            "knows equal nodes: leave some out, or ask with --nodes N --gpus N"
        )
    return len(hosts), counts.pop()


def _gpu(wanted: Wanted, hardware: Hardware) -> Gpu:
    if wanted.gpu is None:
        raise ValueError(
            f"name the GPU: --gpu NAME, one of {', '.join(hardware.gpus)}; describe another "
            "in a file for --hardware (docs/planning.md)"
        )
    return hardware.gpu(wanted.gpu)


def _nic(
    wanted: Wanted, hardware: Hardware, nodes_gpus: tuple[int, int], measured: Measured | None
) -> Nic | None:
    """The nodes' network; a measured one needs no name."""
    if wanted.nic is not None:
        return hardware.nic(wanted.nic)
    if measured is not None and measured.between_bytes_per_s is not None:
        return Nic(
            name="measured",
            source=f"{measured.path}: measured between nodes",
            bits_per_s=8 * measured.between_bytes_per_s,
            share=1.0,
        )
    if nodes_gpus[0] > 1:
        raise ValueError(
            f"name the network between the {nodes_gpus[0]} nodes: --nic 200gbit (all of a node's "
            f"cards together) or one of {', '.join(hardware.nics)}; or --measured preflight.json"
        )
    return None


def _batch_faults(run: Run, world: int) -> list[str]:
    """Whether this many GPUs can share the batch at all, whatever the micro-batch."""
    single: Batch = run.batch.model_copy(update={"micro": 1})
    legal = legal_worlds(single, lanes=run.data.lanes, workers=run.data.workers)
    if world in legal:
        return []
    nearest = sorted(sorted(legal, key=lambda w: (abs(w - world), w))[:2])
    return [
        f"{world} GPUs can't share batch.global_sequences={run.batch.global_sequences} and "
        f"data.lanes={run.data.lanes} equally at any micro-batch; legal: "
        f"{' '.join(map(str, legal))}; nearest: {' or '.join(map(str, nearest))}"
    ]


def _arm(wanted: Wanted, run: Run, shape: Shape | None) -> tuple[Strategy, Precision, list[str]]:
    if wanted.config:
        return read_arm_file(wanted.config, run, shape)
    precision = wanted.precision or "fp16"
    return data_parallel(precision)[0], precision, []  # ZeRO-1, as ds_configs/ has it
