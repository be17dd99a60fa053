"""What a run says of itself: the banner at the start, `run.json`, the summary, a continuation."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from recipes import metrics, runfolder
from recipes.artifacts.continuation import continue_text
from recipes.config import Run

if TYPE_CHECKING:
    from recipes.job import Job


def banner(job: Job, worlds: list[int], parameters: int) -> str:
    """What the job is, in a few lines, before it trains."""
    plan, length, strategy = job.plan, job.length, job.engine.strategy
    device = job.engine.device.type
    measured = ""
    if length.tokens_per_sample is not None:
        how = "measured" if length.measured else "stated"
        measured = f", {length.tokens_per_sample:,.0f} tokens a sample ({how})"
    lines = [
        f"{job.run.name}: {parameters:,} parameters, {strategy.title}, {plan.world} ranks on "
        f"{device}",
        f"batch    {plan.global_sequences} sequences = {plan.global_tokens:,} tokens an update: "
        f"{plan.world} ranks x {plan.accumulation} accumulated x {plan.micro} micro"
        f"{f' ({job.micro_note})' if job.micro_note else ''}; "
        f"legal ranks {' '.join(map(str, worlds))}",
        f"length   {length.updates:,} updates = {length.updates * plan.global_tokens:,} tokens"
        f"{measured}",
        f"data     {job.corpus.describe()}",
    ]
    if job.progress.windows:
        lines.append(f"resumed  at update {job.progress.applied:,}")
    return "\n".join(lines)


def summary(job: Job) -> dict[str, Any]:
    """The result of a finished run, from what was recorded."""
    records = metrics.read_json_lines(job.run.folder / "metrics.jsonl")
    held_out = metrics.read_json_lines(job.run.folder / "evaluations.jsonl")
    result: dict[str, Any] = {
        "name": job.run.name,
        "updates": job.progress.applied,
        "skipped_updates": job.progress.skipped,
        "tokens": job.progress.tokens,
        "samples": job.progress.samples,
        "loss": records[-1]["loss"] if records else None,  # they may lie on another node's disk
        "tokens_per_s": metrics.per_second(
            sum(r["tokens"] for r in records), sum(r["step_ms"] for r in records)
        ),
    }
    if job.length.tokens_per_sample is not None and job.progress.samples:
        result["tokens_per_sample"] = job.progress.tokens / job.progress.samples
        result["tokens_per_sample_planned"] = job.length.tokens_per_sample
    if held_out:
        result |= {
            "held_out_loss": held_out[-1]["held_out_loss"],
            "held_out_perplexity": held_out[-1]["held_out_perplexity"],
            "held_out_perplexity_at_start": held_out[0]["held_out_perplexity"],
        }
    return result


def result(values: dict[str, Any]) -> str:
    """The end of a run in a few lines, from its `summary`."""
    lines = [
        f"done     {values['updates']:,} updates, {values['tokens']:,} tokens, "
        f"{values['skipped_updates']} skipped; {values['tokens_per_s']:,.0f} tokens/s"
    ]
    if "held_out_perplexity" in values:
        before, after = values["held_out_perplexity_at_start"], values["held_out_perplexity"]
        lines.append(f"held out perplexity {before:,.1f} at the start, {after:,.1f} at the end")
    if "tokens_per_sample" in values:
        planned, seen = values["tokens_per_sample_planned"], values["tokens_per_sample"]
        lines.append(
            f"length   planned with {planned:,.1f} tokens a sample, {seen:,.1f} seen "
            f"({seen / planned - 1:+.1%}); the schedule did not move"
        )
    return "\n".join(lines)


def continuation(job: Job) -> str:
    """What the trained model writes after the run file's prompt; on one rank, no communication."""
    asked = job.run.sample
    assert asked is not None
    with job.engine.accelerator.autocast():
        return continue_text(
            job.engine.module.network,
            job.corpus.encoder,
            asked.prompt,
            tokens=asked.tokens,
            temperature=asked.temperature,
            top_k=asked.top_k,
            seed=job.run.seed,
            device=job.engine.device,
        )


def already_finished(run: Run, summary: dict[str, Any]) -> str:
    """What a start of a finished run is told."""
    text = f"{run.name} is finished: {summary['updates']} updates"
    if summary.get("held_out_perplexity"):
        text += f", held-out perplexity {summary['held_out_perplexity']:,.1f}"
    return f"{text}\n{runfolder.where_everything_is(run.folder)}"


def record_start(job: Job, recorded: dict[str, Any], ranks_per_host: dict[str, int]) -> None:
    """Write `run.json` on every disk, keeping what earlier starts were."""
    if not job.disks.lead(job.engine.peers.rank):
        return
    strategy = job.engine.strategy
    here = runfolder.provenance() | {
        "world": job.plan.world,
        "hosts": ranks_per_host,
        "strategy": strategy.title,
        "distributed_type": job.engine.accelerator.distributed_type.value,
        "deepspeed": strategy.deepspeed,
        "device": str(job.engine.device.type),
        "gpu": job.found.gpus[0],  # as its driver names it; empty on a CPU
        "micro": job.plan.micro,
        "accumulation": job.plan.accumulation,
        "from_update": job.progress.applied,
    }
    runfolder.write_record(
        job.run.folder,
        "run.json",
        here
        | {
            "name": job.run.name,
            "folder": str(job.run.folder),
            "config": job.run.model_dump(mode="json"),
            "length": asdict(job.length),
            "revision": job.corpus.scan.revision,
            "data": job.corpus.describe(),
            "earlier_starts": [
                *recorded.get("earlier_starts", []),
                *([{k: recorded[k] for k in here if k in recorded}] if recorded else []),
            ],
        },
    )
