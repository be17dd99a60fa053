"""A gradient self-test of a few seconds on the real engine and ranks, against one process in fp64.

Every arm is built in the same start; afterwards the process is as good as new for a run. `toy`
holds model, data, reference and tolerances, `trial` what is compared.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState

from recipes.config import Run
from recipes.engine import build, topology, toy, trial
from recipes.engine.peers import Peers
from recipes.engine.strategy import OWNED, Strategy, read_strategy
from recipes.objective import BatchPlan
from recipes.outcome import TopologyError

CONFIGS = Path(__file__).resolve().parents[2] / "ds_configs"
SEVERAL = 6  # buckets that the toy is cut into where an arm's own bucket would hold it whole


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One strategy under test."""

    name: str
    strategy: Strategy
    own: bool  # of the run that is about to start


@dataclass(frozen=True, kw_only=True)
class ArmResult:
    """What the self-test found for one arm, over all ranks."""

    arm: str
    origin: str
    own: bool
    passed: bool
    check: str  # the one nearest to its tolerance, or furthest over it
    error: float
    tolerance: float
    differs: str  # "" where it passed
    skipped_updates: int
    seconds: float


def join(strategy: Strategy, launch: topology.Launch, *, cpu: bool) -> tuple[Peers, torch.device]:
    """Bring the ranks together as a run of this arm would, for measuring without a model.

    Raises:
        ValueError, TopologyError: what a run would be refused for.
    """
    with _as_new_afterwards():
        accelerator = _start(strategy, launch, toy.run_settings(launch.world, clip=1.0), cpu)
        return Peers(launch.rank, launch.world), accelerator.device


def run_all(own: Strategy, launch: topology.Launch, *, cpu: bool) -> dict[str, Any]:
    """Test the run's own arm and every other shipped kind that the device allows.

    Returns:
        JSON: `passed`, `arms` (`ArmResult`) and `left_out` with reasons; alike on every rank.
    """
    arms, left_out = shipped_arms(own, cpu=cpu, world=launch.world)
    results = run_arms([*own_arms(own, launch.world, cpu=cpu), *arms], launch, cpu=cpu)
    return {
        "passed": all(result.passed for result in results),
        "arms": [asdict(result) for result in results],
        "left_out": [{"arm": name, "reason": reason} for name, reason in left_out],
    }


def check_overlap(own: Strategy, launch: topology.Launch, *, cpu: bool) -> None:
    """Let `overlap_comm` through only if the self-test of exactly this arm passes here and now.

    Raises:
        ValueError: the gradients are not those of a single process.
    """
    if own.deepspeed is None or not own.deepspeed["zero_optimization"].get("overlap_comm"):
        return
    arms = own_arms(own, launch.world, cpu=cpu)
    failed = [result for result in run_arms(arms, launch, cpu=cpu) if not result.passed]
    if failed:
        raise ValueError(
            f"zero_optimization.overlap_comm=true in {own.origin}: the gradient self-test of this "
            "arm failed on these ranks, so training would be wrong without a sign:\n"
            + "\n".join(f"  {result.arm}: {result.differs}" for result in failed)
            + "\nset overlap_comm to false"
        )


def own_arms(own: Strategy, world: int, *, cpu: bool) -> list[Arm]:
    """The run's arm by its exact JSON; and in several buckets, which the toy would not fill."""
    tree = own.deepspeed
    overlaps = tree is not None and tree["zero_optimization"].get("overlap_comm")
    name = own.title + (" with overlap_comm" if overlaps else "")
    arms = [Arm(name=name, strategy=own, own=True)]
    if tree is not None and own.stage == 1:
        elements = sum(toy.sizes(world, cpu=cpu))
        keys = ("reduce_bucket_size", "allgather_bucket_size")
        small = tree["zero_optimization"] | dict.fromkeys(keys, elements // SEVERAL)
        strategy = replace(own, deepspeed=tree | {"zero_optimization": small})
        arms.append(Arm(name=f"{name} in small buckets", strategy=strategy, own=True))
    return arms


def shipped_arms(
    own: Strategy, *, cpu: bool, world: int
) -> tuple[list[Arm], list[tuple[str, str]]]:
    """The other kinds that are shipped; and those that can't run here, with the reason."""
    strategies = [read_strategy(None, str(path), {}) for path in sorted(CONFIGS.glob("*.json"))]
    strategies = [replace(s, origin=f"ds_configs/{Path(s.origin).name}") for s in strategies]
    strategies += [
        Strategy(kind="DDP", precision=precision, cpu=cpu, origin="DDP")
        for precision in ("fp32", "bf16", "fp16")
    ]
    arms: list[Arm] = []
    left_out: list[tuple[str, str]] = []
    for other in strategies:
        same = (other.kind, other.precision, other.deepspeed)
        if same == (own.kind, own.precision, own.deepspeed):
            continue
        reason = _obstacle(other, cpu=cpu, world=world)
        if reason:
            left_out.append((f"{other.title} ({other.origin})", reason))
        else:
            known = {arm.name for arm in arms} | {own.title}
            name = other.title + f" ({Path(other.origin).stem})" * (other.title in known)
            arms.append(Arm(name=name, strategy=other, own=False))
    return arms, left_out


def _obstacle(strategy: Strategy, *, cpu: bool, world: int) -> str:
    if strategy.kind == "DDP" and world == 1:
        return "a single process has nobody to reduce with"
    if strategy.kind == "DDP" and strategy.precision == "fp16" and cpu:
        return "Accelerate turns fp16 off on the CPU"
    if strategy.precision == "bf16" and not cpu and not torch.cuda.is_bf16_supported():
        return "this GPU has no bf16"
    return ""


def run_arms(arms: Sequence[Arm], launch: topology.Launch, *, cpu: bool) -> list[ArmResult]:
    """Each arm on a freshly built engine; alike on every rank.

    Raises:
        ValueError, TopologyError: the first arm's engine does not start at all.
    """
    reference = toy.Reference.compute(launch.world, cpu=cpu)
    results: list[ArmResult] = []
    peers: Peers | None = None
    with _as_new_afterwards():
        for arm in arms:
            started = time.perf_counter()
            checks, skipped = [], 0
            try:
                engine = _build(arm.strategy, launch, reference, cpu, peers)
            except (ValueError, TopologyError) as error:  # every rank reads the same and finds it
                if peers is None:
                    raise
                checks = [trial.failed(str(error))]
            else:
                peers = engine.peers
                checks, skipped = trial.compare(engine, reference)
                engine.accelerator.free_memory()
                del engine
            _forget()
            assert peers is not None
            worst = peers.gather(max(checks, key=lambda check: check.telling))
            seconds = time.perf_counter() - started
            results.append(_result(arm, worst, skipped, seconds))
    return results


def _result(arm: Arm, by_rank: list[trial.Check], skipped: int, seconds: float) -> ArmResult:
    """Put every rank's worst check together."""
    worst = max(by_rank, key=lambda check: check.telling)
    wrong = [rank for rank, check in enumerate(by_rank) if check.excess > 1]
    differs = ""
    if wrong:
        where = "every rank" if len(wrong) == len(by_rank) else f"rank {' '.join(map(str, wrong))}"
        differs = f"{worst.what} is {worst.error:.1e} off (tolerance {worst.tolerance:.0e}), "
        differs += f"about {worst.factor:.2g} times what it should be; seen on {where}"
        if worst.error == float("inf"):
            differs = f"{worst.what}; on {where}"
    return ArmResult(
        arm=arm.name,
        origin=arm.strategy.origin,
        own=arm.own,
        passed=not wrong,
        check=worst.what,
        error=worst.error,
        tolerance=worst.tolerance,
        differs=differs,
        skipped_updates=skipped,
        seconds=seconds,
    )


def _build(
    strategy: Strategy,
    launch: topology.Launch,
    reference: toy.Reference,
    cpu: bool,
    peers: Peers | None,
) -> build.Engine:
    run = toy.run_settings(launch.world, reference.clip)
    accelerator = _start(strategy, launch, run, cpu)
    peers = peers or Peers(launch.rank, launch.world)
    module = toy.Toy(toy.rows_of(launch.world), toy.width(cpu=cpu))
    plan, strategy = _plan(run, launch.world), _neutral(strategy)
    return build.prepare(accelerator, module, strategy, run, plan, peers)


def _start(strategy: Strategy, launch: topology.Launch, run: Run, cpu: bool) -> Accelerator:
    with topology.joining(os.environ):
        plan = _plan(run, launch.world)
        accelerator = build.start(_neutral(strategy), run, plan, cpu=cpu)
    topology.check_world(accelerator, launch, strategy.kind, None)
    return accelerator


def _plan(run: Run, world: int) -> BatchPlan:
    return BatchPlan(
        world=world,
        micro=toy.MICRO,
        accumulation=toy.ACCUMULATION,
        global_sequences=run.batch.global_sequences,
        seq_len=run.batch.seq_len,
    )


def _neutral(strategy: Strategy) -> Strategy:
    """Without the numbers that the run file owns, which are the toy's here."""
    if strategy.deepspeed is None:
        return strategy
    tree = {key: value for key, value in strategy.deepspeed.items() if key not in OWNED}
    return replace(strategy, deepspeed=tree)


@contextmanager
def _as_new_afterwards() -> Iterator[None]:
    """Leave variables, random state and Accelerate's process-wide state as they were found."""
    environ, random = dict(os.environ), torch.get_rng_state()
    told = logging.getLogger(build.__name__)
    told.setLevel(logging.WARNING)  # what it says of a run's arm, every arm would repeat
    gc.freeze()  # the libraries' objects; looking through them for every arm takes longer than it
    _forget()
    try:
        yield
    finally:
        _forget()
        gc.unfreeze()
        told.setLevel(logging.NOTSET)
        for name in set(os.environ) - set(environ):
            del os.environ[name]
        os.environ.update(environ)
        torch.set_rng_state(random)


def _forget() -> None:
    """Let the next Accelerator start anew; the process group stays."""
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    GradientState._reset_state()
    gc.collect()  # engines hang in reference cycles, with their buckets
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
