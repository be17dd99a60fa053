"""A run put together in order: what the loop works with, every check before the GPUs work."""

from __future__ import annotations

import argparse
import logging
import os
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from recipes import auto_micro, metrics, objective, runfolder
from recipes.checkpoint.disks import Disks, probe
from recipes.cluster.hostfile import read_hostfile
from recipes.config import Run
from recipes.confront import Confrontation
from recipes.data.feed import Corpus, Feed, HeldOut, Window
from recipes.engine import selftest, topology, update
from recipes.engine.build import Engine, prepare, start
from recipes.engine.peers import Peers
from recipes.engine.strategy import Strategy, read_strategy
from recipes.meter import Meter
from recipes.model import SummedLoss, build_network, count_parameters, flops_per_token, wrap
from recipes.opening import check_room, fixed_length, open_corpus, open_folder
from recipes.outcome import Outcome
from recipes.own_plan import Found
from recipes.progress import Progress
from recipes.resume import restore_newest
from recipes.saving import Saving
from recipes.telling import already_finished, banner, record_start

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Job:
    """Everything the loop works with."""

    run: Run
    engine: Engine
    corpus: Corpus
    feed: Feed
    held_out: HeldOut | None
    length: objective.Length
    progress: Progress
    meter: Meter
    flops_per_token: float
    peak_flops: float | None
    disks: Disks
    saving: Saving
    found: Found  # the machines that the ranks run on
    micro_note: str  # where an automatic micro-batch comes from; empty for a stated one
    confronting: Confrontation = field(init=False)
    held_out_result: dict[str, Any] | None = None  # of the last evaluation
    compile_checked: bool = False

    @property
    def plan(self) -> objective.BatchPlan:
        """How one update is divided."""
        return self.engine.plan

    def next_window(self) -> Window:
        """This rank's share of the next update; a blank one with the reason if it can't be read."""
        try:
            return self.feed.take()
        except ValueError as error:
            return self.feed.blank(error)

    def fields(
        self,
        window: Window,
        result: update.UpdateResult,
        agreed: update.Agreement,
        rate: float,
        started: float,
    ) -> dict[str, Any]:
        """A `Record` of the update that was just applied, without its loss."""
        step_ms = (time.perf_counter() - started) * 1000.0
        tokens_per_s = metrics.per_second(agreed.tokens, step_ms)
        return {
            "step": self.progress.applied,
            "lr": rate,
            "grad_norm": result.grad_norm,
            "loss_scale": result.loss_scale,
            "skipped_updates": self.progress.skipped,
            "tokens": agreed.tokens,
            "samples": agreed.samples,
            "data_digest": f"{agreed.digest:x}",
            "total_tokens": self.progress.tokens,
            "total_samples": self.progress.samples,
            "step_ms": step_ms,
            "data_wait_ms": window.wait_ms,
            "tokens_per_s": tokens_per_s,
            "samples_per_s": metrics.per_second(agreed.samples, step_ms),
            "mfu": self._mfu(tokens_per_s),
            "peak_memory_bytes": update.peak_memory_bytes(self.engine),
            "time": time.time(),
        }

    def _mfu(self, tokens_per_s: float) -> float | None:
        try:
            return metrics.model_flops_utilisation(
                tokens_per_s, self.flops_per_token, self.plan.world, self.peak_flops
            )
        except ValueError as error:  # a wrong peak is no reason to lose a run
            logger.warning("%s; mfu is null from here on", error)
            self.peak_flops = None
            return None


def build(run: Run, args: argparse.Namespace, outcome: Outcome) -> Job | None:
    """Put the run together; None if it was finished earlier.

    Raises:
        TopologyError: the processes or devices are not those that were asked for.
        ValueError: everything else that a user can mend.
    """
    launch = topology.read_launch(os.environ, args.local_rank)
    strategy = read_strategy(args.accelerate_config, args.deepspeed_config, os.environ)
    hosts = read_hostfile(args.hostfile) if args.hostfile else None
    topology.check_launch(launch, hosts, args.hostfile)
    cpu = topology.check_device(strategy.cpu, os.environ, torch.cuda.is_available())
    worlds = objective.legal_worlds(run.batch, lanes=run.data.lanes, workers=run.data.workers)
    plan = objective.plan_batch(run.batch, launch.world, worlds)
    _check_evaluation(run, plan)
    selftest.check_overlap(strategy, launch, cpu=cpu)
    with topology.joining(os.environ):
        accelerator = start(strategy, run, plan, cpu=cpu)
        ranks_per_host = topology.check_world(accelerator, launch, strategy.kind, hosts)
        peers = Peers(launch.rank, launch.world)
    outcome.joined = True

    disks = peers.alike(lambda: probe(run.folder, peers, peers.hosts[launch.rank]))
    recorded = open_folder(run, peers, disks, outcome, fresh=args.fresh)
    if recorded.get("finished"):
        if launch.rank == 0:
            logger.info("%s", already_finished(run, recorded["finished"]))
        return None
    corpus = open_corpus(run, peers, disks, recorded)
    module = peers.together(lambda: _build_module(run, corpus, strategy, cpu))
    engine = prepare(accelerator, module, strategy, run, plan, peers)
    found = auto_micro.look(engine)
    engine, micro_note = auto_micro.settle(engine, run, recorded, found)
    outcome.memory_advice = lambda: auto_micro.ran_out(engine, run, found)
    length = fixed_length(recorded, run, corpus, peers)
    peers.alike(lambda: check_room(run, peers, disks, count_parameters(module), length.updates))
    restored = restore_newest(engine, run, corpus, disks)
    job = Job(
        run=run,
        engine=engine,
        corpus=corpus,
        feed=Feed(corpus, engine.plan, launch.rank, restored.data),
        held_out=_held_out(run, peers, corpus, engine.plan),
        length=length,
        progress=restored.progress,
        meter=_meter(run, engine, length, restored.progress, first=launch.rank == 0),
        flops_per_token=flops_per_token(module.network, run.batch.seq_len),
        peak_flops=_peak_flops(engine),
        disks=disks,
        saving=Saving(engine, run, disks, restored.progress),
        found=found,
        micro_note=micro_note,
        held_out_result=restored.held_out,
    )
    job.confronting = Confrontation(job)
    peers.together(lambda: record_start(job, recorded, ranks_per_host))
    if launch.rank == 0:
        logger.info("%s", banner(job, worlds, count_parameters(module)))
    outcome.write("training")
    return job


def _held_out(run: Run, peers: Peers, corpus: Corpus, plan: objective.BatchPlan) -> HeldOut | None:
    if run.evaluate is None:
        return None
    return peers.together(lambda: HeldOut.open(corpus, plan, peers.rank))


def _check_evaluation(run: Run, plan: objective.BatchPlan) -> None:
    """Every rank evaluates as many whole micro-batches as the others (ValueError if it can't)."""
    step = plan.world * plan.micro
    count = run.evaluate.sequences if run.evaluate else step
    if count % step:
        lower, upper = count // step * step, -(-count // step) * step
        raise ValueError(
            f"evaluate.sequences={count} must be a multiple of ranks x micro = {plan.world} x "
            f"{plan.micro}; nearest: {f'{lower} or ' if lower else ''}{upper}"
        )


def _build_module(run: Run, corpus: Corpus, strategy: Strategy, cpu: bool) -> SummedLoss:
    network = build_network(run.model, run.seed, run.batch.seq_len, corpus.encoder.vocab_size)
    positions = getattr(network.config, "max_position_embeddings", None)
    if run.sample is not None and positions is not None:
        asked = len(corpus.encoder.encode_prompt(run.sample.prompt)) + run.sample.tokens
        if asked > positions:
            raise ValueError(
                f"sample.prompt and sample.tokens={run.sample.tokens} need {asked} positions, the "
                f"model has {positions}; lower sample.tokens"
            )
    on_gpu_in_16_bit = not cpu and strategy.precision != "fp32"
    module = wrap(network, run.model.loss, prefer_chunked=on_gpu_in_16_bit)
    if run.model.compile:
        module.compile()
    return module


def _meter(
    run: Run, engine: Engine, length: objective.Length, progress: Progress, *, first: bool
) -> Meter:
    tracked = bool(run.log.trackers)
    if tracked:
        settings = {k: str(v) for k, v in runfolder.flat(run.model_dump(mode="json")).items()}
        engine.accelerator.init_trackers(run.name, config=settings)
        engine.peers.together(lambda: _check_trackers(run, engine))

    def track(values: dict[str, Any], step: int) -> None:
        if tracked:
            shown = {k: v for k, v in values.items() if v is not None and k != "step"}
            engine.accelerator.log(shown, step=step)

    return engine.peers.together(
        lambda: Meter(
            reduce=lambda losses: update.sum_over_ranks(engine, losses),
            track=track,
            folder=run.folder if first else None,
            total=length.updates,
            done=progress.applied if progress.windows else -1,  # nothing restored: nothing to keep
        )
    )


def _check_trackers(run: Run, engine: Engine) -> None:
    """Accelerate leaves out a tracker whose package is missing, with a warning at most."""
    if engine.peers.rank != 0:
        return
    missing = sorted(set(run.log.trackers) - {t.name for t in engine.accelerator.trackers})
    if missing:
        raise ValueError(
            f"log.trackers: {', '.join(missing)} is not installed; install or remove it"
        )


def _peak_flops(engine: Engine) -> float | None:
    if engine.device.type != "cuda":
        return None
    return metrics.peak_flops(torch.cuda.get_device_name(engine.device))


def close(job: Job) -> None:
    """End readers and trackers, on every rank."""
    job.feed.close()
    job.engine.peers.barrier()
    job.engine.accelerator.end_training()
