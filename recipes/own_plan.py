"""The plan that a run makes of itself: of its run file, its strategy and the machines found.

    found = look(engine)                                  # a collective, once
    own = own_plan(run, strategy, found, chunked=True)    # ValueError: what can't be planned
    figures = own.figures(micro=8)

Where the GPU is not in the hardware table, or the ranks are CPUs, memory and traffic are planned
all the same: they need no rates. Times are then left out, with the reason.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from recipes.advice.arm_file import ddp_of, deepspeed_of
from recipes.advice.question import workload
from recipes.config import Run
from recipes.engine.strategy import Strategy
from recipes.metrics import human_bytes
from recipes.planner.families import read_shape
from recipes.planner.figure import Figure, exact
from recipes.planner.hardware import Gpu, Nic, read_hardware
from recipes.planner.measured import read_measured
from recipes.planner.memory import GIB, MemoryPlan, checkpoint_bytes, plan_memory, savings
from recipes.planner.micro import planned_micro
from recipes.planner.predict import predict
from recipes.planner.traffic import sent_per_rank
from recipes.planner.workload import Candidate, Cluster, Measured, Workload

PREFLIGHT = Path("outputs/preflight.json")  # where `octet preflight` writes
# Waiting for data is no part of any plan; up to so much of an update's time it is let pass.
DATA_WAIT = 0.05
# Kinds of the plan's memory that last from update to update, so that they can be looked at.
LASTING = ("parameters", "master weights", "moments")
CPU = "a CPU is in no hardware table"
# What a plan may stumble over in settings that it has never seen, or in a version of a library. A
# run is right without a plan.
FAULTS = (
    *(ValueError, ArithmeticError, LookupError, AssertionError, AttributeError, TypeError),
    *(RuntimeError, OSError),
)


@dataclass(frozen=True, kw_only=True)
class Found:
    """The machines that the ranks run on; alike on every rank.

    Attributes:
        gpus: every rank's GPU as its driver names it; empty names on CPUs.
        memory: bytes that a rank may take at most: of its GPU, or of the host by its ranks.
        hosts: every rank's host.
    """

    gpus: tuple[str, ...]
    memory: int
    hosts: tuple[str, ...]

    @property
    def cpu(self) -> bool:
        """Whether the ranks run on CPUs."""
        return not self.gpus[0]


@dataclass(frozen=True, kw_only=True)
class OwnPlan:
    """What is to be planned; `untimed` says why times can't be, empty where they can."""

    work: Workload
    candidate: Candidate  # its micro-batch is not settled
    cluster: Cluster
    untimed: str

    def figures(self, micro: int) -> dict[str, Figure]:
        """What the plan says of one update at this micro-batch, by quantity (`comparison`)."""
        work, cluster = self.work, self.cluster
        candidate = replace(self.candidate, micro=micro)
        memory = plan_memory(work, candidate, cluster)
        found = {kind: exact(_of_kind(memory, kind), "bytes", f"plan: {kind}") for kind in LASTING}
        sent = sent_per_rank(work, candidate, cluster)
        found |= {
            "bytes sent": exact(sent, "bytes", "plan: all transfers of an update"),
            "checkpoint": exact(checkpoint_bytes(work.shape), "bytes", "12 bytes a parameter"),
            "data wait": Figure(
                value=0.0,
                low=0.0,
                high=DATA_WAIT,
                unit="share",
                source="assumed",
                basis="the readers keep up",
            ),
            "tokens per update": exact(work.global_tokens, "tokens", "global_sequences x seq_len"),
        }
        if self.untimed == CPU:
            return found
        found |= {"peak allocated": memory.allocated, "peak reserved": memory.reserved}
        if not self.untimed:
            whole = predict(work, candidate, cluster, memory=memory)
            found |= {"update time": whole.update, "tokens/s": whole.tokens_per_s, "MFU": whole.mfu}
        return found

    def micro(self, legal: list[int]) -> tuple[int, int]:
        """`planned_micro` of this run."""
        timed = not self.untimed
        return planned_micro(self.work, self.candidate, self.cluster, legal, timed=timed)

    def ways_to_save(self, micro: int) -> list[str]:
        """How to need less memory at a micro-batch, what saves most first."""
        candidate = replace(self.candidate, micro=micro)
        found = savings(self.work, candidate, self.cluster)
        return [f"{s.how} saves {human_bytes(s.bytes)} ({s.what}; {s.cost})" for s in found]


def own_plan(run: Run, strategy: Strategy, found: Found, *, chunked: bool) -> OwnPlan:
    """Put a run's own plan together.

    Args:
        chunked: how the loss is computed after all.

    Raises:
        ValueError: the closed forms don't know the model's architecture.
    """
    shape = read_shape(run.model)
    if strategy.deepspeed is not None:
        planned, _ = deepspeed_of(strategy.deepspeed, shape, strategy.origin)
    else:
        planned = ddp_of(run, strategy.origin)
    work = workload(run, shape, strategy.precision)
    work = replace(work, loss="chunked" if chunked else "full")
    candidate = Candidate(
        strategy=planned,
        micro=1,
        checkpointing=run.model.gradient_checkpointing,
        attention="eager" if run.model.attention == "eager" else "flash",
    )
    cluster, untimed = _cluster(found)
    return OwnPlan(work=work, candidate=candidate, cluster=cluster, untimed=untimed)


def _cluster(found: Found) -> tuple[Cluster, str]:
    """The machines for the plan, and why their times can't be planned."""
    world, per_host = len(found.hosts), set(Counter(found.hosts).values())
    gpu, untimed = _gpu(found)
    nodes = len(set(found.hosts))
    if len(per_host) > 1:
        layout = " + ".join(str(n) for n in Counter(found.hosts).values())
        untimed = untimed or f"the plan knows equal nodes, and these have {layout} ranks"
        return Cluster(gpu=gpu, nodes=1, gpus=world), untimed
    measured = _preflight(found, gpu) if not untimed else None
    nic = None
    if measured is not None and measured.between_bytes_per_s is not None:
        rate = 8 * measured.between_bytes_per_s
        nic = Nic(name="measured", source=str(PREFLIGHT), bits_per_s=rate, share=1.0)
    if nodes > 1 and nic is None:
        why = f"{PREFLIGHT} does not tell the network between these nodes: run octet preflight"
        return Cluster(gpu=gpu, nodes=1, gpus=world), untimed or why
    cluster = Cluster(gpu=gpu, nodes=nodes, gpus=world // nodes, nic=nic, measured=measured)
    return cluster, untimed


def _gpu(found: Found) -> tuple[Gpu, str]:
    """The table's entry with the memory that is really there; one of memory alone without it."""
    names, hardware = sorted(set(found.gpus)), read_hardware()
    memory_gib = found.memory / GIB
    untimed = CPU if found.cpu else ""
    if len(names) > 1:
        untimed = f"the plan knows equal GPUs, and these are {', '.join(names)}"
    if not untimed:
        try:
            return hardware.gpu(names[0]).model_copy(update={"memory_gib": memory_gib}), ""
        except ValueError:
            untimed = (
                f"{names[0]} is not in the hardware table: add it to recipes/planner/hardware.yaml "
                "(aliases), or describe it in a file for octet plan --hardware"
            )
    # An entry that holds the memory; its rates are another GPU's, which `untimed` leaves unread.
    other = next(iter(hardware.gpus.values()))
    about = {"name": names[0] or "host memory", "source": "memory alone", "aliases": []}
    stand_in = other.model_copy(update=about | {"memory_gib": memory_gib})
    return stand_in, untimed


def _preflight(found: Found, gpu: Gpu) -> Measured | None:
    """What `octet preflight` measured of these very machines; None if it did not."""
    try:
        told = json.loads(PREFLIGHT.read_text(encoding="utf-8"))["measured"]
        if set(told["hosts"]) != set(found.hosts):
            return None
        return read_measured(PREFLIGHT, gpu=gpu)
    except (OSError, ValueError, LookupError, TypeError):  # a missing or foreign file is no fault
        return None


def _of_kind(memory: MemoryPlan, kind: str) -> float:
    """Bytes of a kind in the phase that has most of it."""
    return max(sum(i.bytes for i in phase.items if i.kind == kind) for phase in memory.phases)
