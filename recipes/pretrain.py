"""The recipe: stream, train, evaluate, save, resume. Start it with a launcher, from the root:

    accelerate launch --config_file accelerate_configs/zero1_fp16.yaml \
        recipes/pretrain.py recipes/runs/gpt2_xl.yaml
    deepspeed --hostfile hostfile \
        recipes/pretrain.py recipes/runs/gpt2_xl.yaml --deepspeed_config ds_configs/zero1_fp16.json
    torchrun --nnodes 2 --nproc_per_node 4 --node_rank 0 --master_addr worker-0 \
        recipes/pretrain.py recipes/runs/gpt2_xl.yaml \
        --accelerate_config accelerate_configs/ddp_fp16.yaml batch.micro=8
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # when launched by path

from recipes import objective, runfolder
from recipes.checkpoint.lock import is_held
from recipes.cluster.shell import read_argument_line
from recipes.config import Run
from recipes.outcome import NumbersError, Outcome, PeerError, Stopped, exit_code
from recipes.runfile import load_run

logger = logging.getLogger("recipes.pretrain")


def main(argv: list[str] | None = None) -> int:
    """Run one rank; returns its exit code (recipes/outcome.py)."""
    args = parse_arguments(argv)
    rank, local_rank = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))
    logging.basicConfig(
        level=logging.INFO if rank == 0 else logging.WARNING,
        format="%(message)s" if rank == 0 else f"[rank {rank}] %(message)s",
    )
    with Outcome(rank=rank, local_rank=local_rank) as outcome:
        run = load_run(args.run, args.overrides)
        if not is_held(run.folder / "lock"):  # a living run's status files are its own
            outcome.folder = run.folder
        outcome.write("starting")
        pretrain(run, args, outcome)
    return outcome.code


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The script's arguments; everything that describes the run is in the run file."""
    parser = argparse.ArgumentParser(
        description="Pretrain a language model.",
        allow_abbrev=False,
        fromfile_prefix_chars="@",  # @FILE, an argument a line, for launchers with a second shell
    )
    parser.convert_arg_line_to_args = read_argument_line  # type: ignore[method-assign,assignment]
    parser.add_argument("run", help="the run file, e.g. recipes/runs/gpt2_xl.yaml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--accelerate_config", help="the arm, under torchrun and deepspeed")
    parser.add_argument("--deepspeed_config", help="the arm, as DeepSpeed's JSON")
    parser.add_argument("--hostfile", help="compare the processes found with this hostfile")
    parser.add_argument("--local_rank", type=int, help="passed by the deepspeed launcher")
    parser.add_argument("--fresh", action="store_true", help="delete the run folder, start anew")
    return parser.parse_intermixed_args(argv)


def pretrain(run: Run, args: argparse.Namespace, outcome: Outcome) -> None:
    """Build, resume, train, finish."""
    from recipes.job import build  # torch and the engine load only for a run file that is right

    job = build(run, args, outcome)
    if job is None:  # finished earlier, and said so
        return
    if job.progress.windows == 0:
        evaluate(job)
    train(job)
    finish(job)


def train(job: Any) -> None:
    """The loop. Nothing in it waits for the GPU but the update's own check for finite gradients."""
    import torch

    from recipes.engine import update

    engine, run, plan, progress = job.engine, job.run, job.plan, job.progress
    while progress.applied < job.length.updates:
        started = time.perf_counter()
        window = job.next_window()
        counts = update.Announcement(
            engine,
            tokens=window.tokens,
            samples=window.samples,
            digest=window.digest,
            flags=job.saving.flags(unreadable=window.fault is not None),
        )
        rate = objective.learning_rate(
            progress.applied, peak=run.optim.lr, total=job.length.updates, schedule=run.schedule
        )
        update.set_learning_rate(engine, rate)
        loss_sum = torch.zeros((), device=engine.device)
        random = update.rng_state(engine)
        for index, batch in enumerate(window.batches(engine.device)):
            with update.micro_batch(engine):
                loss, _ = engine.model(**batch)
                if index == 0:  # the other ranks' counts arrived while this forward ran
                    agreed = counts.wait()
                    if agreed.unreadable:
                        update.set_rng_state(engine, random)  # the forward has drawn from it
                        end_unreadable(job, window)
                    factor = objective.gradient_factor(
                        accumulation=plan.accumulation, world=plan.world, tokens=agreed.tokens
                    )
                update.backward(engine, objective.scaled_loss(loss, factor))
                loss_sum += loss.detach()
        result = update.finish_update(engine)
        job.feed.consume(window)
        progress.settle(result, agreed)
        if result.applied:
            job.meter.add(job.fields(window, result, agreed, rate, started), loss_sum)
        elif progress.skipped_in_a_row >= run.optim.max_skipped_in_a_row:
            give_up(job, window)
        after_update(job, result.applied, agreed)


def after_update(job: Any, applied: bool, agreed: Any) -> None:
    """What is due now and then: a logged line, an evaluation, a checkpoint, the end on request."""
    from recipes.model import check_compiled

    job.confronting.window_ended(job, applied)
    if job.run.model.compile and not job.compile_checked:
        check_compiled()
        job.compile_checked = True
    run, step, saving = job.run, job.progress.applied, job.saving
    last = step == job.length.updates
    if applied and (step % run.log.every_updates == 0 or last):
        job.meter.flush()
    if agreed.written:
        saving.settle(job)
    if applied and run.evaluate and (step % run.evaluate.every_updates == 0 or last):
        evaluate(job)
    reason = saving.due(job.progress, applied=applied, agreed=agreed, last=last)
    if reason is not None:
        saving.save(job, reason)
    if agreed.stop and not last:
        job.meter.close()
        raise Stopped(f"stopped at update {step} of {job.length.updates}; start it again to go on")
    job.confronting.window_begins(job)


def end_unreadable(job: Any, window: Any) -> None:
    """End the run on all ranks, with a checkpoint, because one of them can't read its data.

    Raises:
        ValueError: always, on the rank that can't. PeerError: always, on the others.
    """
    if job.saving.unsaved(job.progress):
        job.saving.save(job, "unreadable")
    job.saving.finish(job)
    faults = job.engine.peers.gather(str(window.fault) if window.fault else None)
    job.meter.close()
    if window.fault is not None:
        raise window.fault
    rank, text = next((r, text) for r, text in enumerate(faults) if text is not None)
    raise PeerError(f"rank {rank}: {text}", exit_code(ValueError()))


def evaluate(job: Any) -> None:
    """Record the held-out loss in nats per token; the training state is not touched."""
    import torch

    from recipes.engine import update

    if job.run.evaluate is None:
        return
    engine = job.engine
    engine.model.eval()
    sums = [torch.zeros((), device=engine.device) for _ in range(2)]
    with torch.no_grad():
        for batch in job.held_out.batches(engine.device):
            for total, value in zip(sums, engine.model(**batch), strict=True):
                total += value
    engine.model.train()
    loss_sum, tokens = update.sum_over_ranks(engine, sums)
    loss = loss_sum / max(tokens, 1.0)
    perplexity = math.exp(min(loss, 700.0))  # exp overflows a float above 709
    values = {"step": job.progress.applied, "tokens": job.progress.tokens}
    values |= {"held_out_loss": loss, "held_out_perplexity": perplexity}
    job.held_out_result = values
    job.meter.evaluation(values)


def give_up(job: Any, window: Any) -> None:
    """End the run after too many non-finite windows in a row, with what is needed to find out why.

    Raises:
        NumbersError: always.
    """
    from recipes.diagnosis import first_non_finite
    from recipes.resume import last_checkpoint

    engine, progress = job.engine, job.progress
    job.saving.finish(job)
    batches = list(window.batches(engine.device))
    factor = objective.gradient_factor(accumulation=1, world=1, tokens=window.tokens) * (
        progress.scales[-1] if progress.scales else 1.0
    )
    try:
        with engine.accelerator.autocast():
            culprit = first_non_finite(engine.module, batches, factor)
    except RuntimeError as error:  # no memory for the search, say; the rest of the report stands
        culprit = f"the search for the module failed: {error}"
    report = {
        "window": progress.windows - 1,
        "update": progress.applied,
        "skipped_in_a_row": progress.skipped_in_a_row,
        "loss_scales": progress.scales,
        "first_non_finite": engine.peers.gather(culprit),  # by rank
        "documents": sum(engine.peers.gather(window.documents()), []),
        "last_checkpoint": last_checkpoint(job.run.folder),
    }
    job.meter.flush()
    if engine.peers.rank == 0:
        runfolder.write_record(job.run.folder, "nonfinite.json", report)
    raise NumbersError(
        f"{progress.skipped_in_a_row} updates in a row were not finite, the last in window "
        f"{report['window']}: {culprit}; loss scales {progress.scales[-8:]}; documents, every "
        f"rank's finding and the last good checkpoint are in {job.run.folder / 'nonfinite.json'}"
    )


def finish(job: Any) -> None:
    """Write the summary, show a continuation and say where everything lies."""
    from recipes.job import close
    from recipes.telling import continuation, result, summary

    peers, folder = job.engine.peers, job.run.folder
    job.meter.close()
    values = peers.from_first(lambda: summary(job))
    lead = job.disks.lead(peers.rank)
    peers.together(lambda: runfolder.write_record(folder, "summary.json", values) if lead else None)
    if peers.rank == 0:
        logger.info("\n%s", result(values))
        if job.run.sample is not None:
            logger.info("sample   %s\n", continuation(job))
    job.confronting.finish(job)
    close(job)
    if peers.rank == 0:
        logger.info("%s", runfolder.where_everything_is(folder))


if __name__ == "__main__":
    sys.exit(main())
