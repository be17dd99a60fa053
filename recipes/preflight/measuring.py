"""The stages of `recipes/measure.py`, whose docstring has the schema, on ranks come together."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from recipes import objective
from recipes.config import Run
from recipes.data.feed import Corpus, Feed, look
from recipes.engine import selftest
from recipes.engine.peers import Peers
from recipes.engine.strategy import Strategy
from recipes.engine.topology import Launch
from recipes.preflight.linkrates import human_bits, told
from recipes.preflight.netbench import Bench, Size
from recipes.preflight.rows import size

logger = logging.getLogger(__name__)

MIB = 2**20
WARN_SLOWER, FAIL_SLOWER = 1.3, 2.0  # times, than the other ranks
WEAK_LINK = 0.7  # share of the median link
TYPICAL_MFU = 0.4  # readers below this share of the upper bound would hold the device back
MATMUL_REPEATS, MATMUL_S = 7, 0.05
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(kw_only=True)
class Measuring:
    """What the stages work with, and the result as it grows."""

    run: Run | None
    strategy: Strategy
    launch: Launch
    cpu: bool
    peers: Peers
    device: torch.device
    hosts: list[str]  # of each rank
    model: tuple[int, float] | None  # parameters, FLOPs per token
    result: dict[str, Any] = field(default_factory=dict)

    def finding(self, verdict: str, text: str, remedy: str, **where: Any) -> None:
        """Add one to the findings, of the stage that runs."""
        place = {"host": None, "ranks": []} | where
        line = {"stage": self.result["stage"], "verdict": verdict, "text": text, "remedy": remedy}
        self.result["findings"].append(line | place)


# ---- arithmetic


def matmul(job: Measuring) -> dict[str, Any]:
    """Each rank's rate of matrix products in the run's precision, all ranks at the same time."""
    logger.info("matmul   all ranks at the same time")
    dtype, note = DTYPES[job.strategy.precision], ""
    if job.cpu and dtype is torch.float16:
        dtype, note = torch.float32, "fp16 is emulated on the CPU; fp32 instead"
    side = 512 if job.cpu else 8192
    # Random values: with equal ones a GPU draws so little power that no limit is ever met.
    left, right = (torch.randn(side, side, device=job.device).to(dtype) for _ in "ab")
    product = torch.empty_like(left)

    def seconds(times: int) -> float:
        job.peers.barrier()
        started = time.perf_counter()
        for _ in range(times):
            torch.mm(left, right, out=product)
        if not job.cpu:
            torch.cuda.synchronize(job.device)
        return time.perf_counter() - started

    seconds(2)
    times = max(1, round(MATMUL_S / max(job.peers.gather(seconds(2) / 2))))
    mine = median(2.0 * side**3 * times / seconds(times) for _ in range(MATMUL_REPEATS))
    rates: list[float] = job.peers.gather(mine)
    ranks = []
    for rank, (host, rate) in enumerate(zip(job.hosts, rates, strict=True)):
        slower = slower_than_others(rates, rank)
        line = {"rank": rank, "host": host, "flops": rate, "slower_than_others": slower}
        ranks.append(line)
        if slower >= WARN_SLOWER:
            job.finding(
                "fail" if slower >= FAIL_SLOWER else "warn",
                f"rank {rank} on {host} multiplies {slower:.2f} times slower than the others "
                f"({rate / 1e9:,.1f} GFLOP/s)",
                "look for another process, heat or a power limit there (nvidia-smi -q -d "
                "PERFORMANCE, top); every other rank waits for it at each update",
                host=host,
                ranks=[rank],
            )
    logger.info("matmul   %.1f to %.1f GFLOP/s a rank", min(rates) / 1e9, max(rates) / 1e9)
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "note": note,
        "size": side,
        "threads": torch.get_num_threads(),
        "repeats": MATMUL_REPEATS,
        "median_flops": median(rates),
        "ranks": ranks,
    }


def slower_than_others(rates: Sequence[float], rank: int) -> float:
    """The other ranks' median rate by this one's."""
    others = [rate for other, rate in enumerate(rates) if other != rank]
    return median(others) / rates[rank] if others else 1.0


# ---- network


def network(job: Measuring, sizes: Sequence[Size], budget_s: float) -> dict[str, Any]:
    """Links and collectives, at the sizes that were asked for or else the run's."""
    parameters = job.model[0] if job.model else None
    bench = Bench(
        rank=job.launch.rank,
        hosts=job.hosts,
        device=job.device,
        dtype=DTYPES[wire_precision(job.run, job.strategy)],
        budget_s=budget_s,
    )
    found = bench.measure(sizes or run_sizes(job.run, job.strategy, parameters))
    for line in told(found):
        logger.info("network  %s", line)
    wrong = [
        f"{c['op']} of {size(c['bytes'])} ({c['host'] or c['group']})"
        for c in found["collectives"]
        if not c["correct"]
    ]
    wrong += [f"{x['from']} to {x['to']}" for x in found["links"] if not x["correct"]]
    if wrong:
        job.finding(
            "fail",
            f"wrong values arrived: {'; '.join(wrong)}",
            "do not train; try NCCL_P2P_DISABLE=1 or another interface, then look for the hardware",
        )
    worst = found["worst_link"]
    if worst and worst["share_of_median"] < WEAK_LINK:
        job.finding(
            "warn",
            f"the link {worst['from']} to {worst['to']} carries {human_bits(worst['bits_per_s'])}, "
            f"{worst['share_of_median']:.0%} of the median link",
            "look at cable, port and route between them",
            host=worst["from"],
        )
    return found


def wire_precision(run: Run | None, strategy: Strategy) -> str:
    """The precision that gradients travel in: DDP's are fp32 unless compressed."""
    if strategy.kind == "DEEPSPEED":
        return strategy.precision
    return "fp32" if run is None or run.ddp.compress == "no" else run.ddp.compress


def run_sizes(run: Run | None, strategy: Strategy, parameters: int | None) -> list[Size]:
    """The message sizes that a run of this arm really has."""
    sizes = {8: "flags and norms", MIB: "small", 25 * MIB: "torch's bucket"}
    whole = 2 * parameters if parameters else None
    if strategy.stage == 1:
        assert strategy.deepspeed is not None
        bucket = 2 * strategy.deepspeed["zero_optimization"]["reduce_bucket_size"]
        sizes[min(bucket, whole or bucket)] = "the reduce bucket"
    elif strategy.kind == "DDP" and run is not None:
        sizes[run.ddp.bucket_cap_mb * MIB] = "DDP's bucket"
    if whole:
        sizes[whole] = "the whole model in 16 bit"
    return [Size(bytes=count, why=why) for count, why in sorted(sizes.items())]


# ---- gradients


def gradients(job: Measuring) -> dict[str, Any]:
    """The gradient self-test of the run's arm and the shipped ones."""
    logger.info("selftest gradients of every arm against a single process")
    found = selftest.run_all(job.strategy, job.launch, cpu=job.cpu)
    for arm in found["arms"]:
        share = f"{arm['error'] / arm['tolerance']:.0%} of the tolerance"
        logger.info("selftest %s: %s", arm["arm"], arm["differs"] or f"equal ({share})")
        if not arm["passed"]:
            job.finding(
                "fail" if arm["own"] else "warn",
                f"{arm['arm']} ({arm['origin']}): {arm['differs']}",
                "do not train with this arm; install the versions of constraints.txt, set "
                "overlap_comm to false",
            )
    return found


# ---- data


def data(job: Measuring, seconds: float) -> dict[str, Any]:
    """Every rank opens the run's own data path and reads for a while."""
    assert job.run is not None and job.model is not None
    logger.info("data     reading for %g s on every rank", seconds)
    flops = job.model[1]
    rates = [rank["flops"] for rank in (job.result["matmul"] or {}).get("ranks", [])]
    mine: dict[str, Any] = {"source": "", "tokens_per_s": None, "first_s": None, "error": ""}
    try:
        mine |= _read(job, job.run, seconds)
    except (ValueError, RuntimeError, OSError) as error:
        mine["error"] = " ".join(str(error).split()) or type(error).__name__
    everyone: list[dict[str, Any]] = job.peers.gather(mine)
    ranks: list[dict[str, Any]] = []
    for rank, (host, found) in enumerate(zip(job.hosts, everyone, strict=True)):
        demand = rates[rank] / flops if rates else None
        ranks.append(
            {"rank": rank, "host": host, "reachable": not found["error"]}
            | {key: found[key] for key in ("tokens_per_s", "first_s", "error")}
            | {"demand_tokens_per_s": demand}
        )
    hosts = {host: host_data([r for r in ranks if r["host"] == host]) for host in job.hosts}
    for host, entry in hosts.items():
        _judge(job, host, entry, [r["rank"] for r in ranks if r["host"] == host])
    return {
        "source": next((found["source"] for found in everyone if found["source"]), ""),
        "measured_s": seconds,
        "flops_per_token": flops,
        "ranks": ranks,
        "hosts": hosts,
    }


def host_data(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One node's part: sums over its ranks, the first error."""
    out: dict[str, Any] = {"reachable": all(rank["reachable"] for rank in ranks)}
    for key in ("tokens_per_s", "demand_tokens_per_s"):
        values = [rank[key] for rank in ranks]
        out[key] = None if None in values else sum(values)
    return out | {"error": next((rank["error"] for rank in ranks if rank["error"]), "")}


def _judge(job: Measuring, host: str, entry: dict[str, Any], ranks: list[int]) -> None:
    rate, demand = entry["tokens_per_s"], entry["demand_tokens_per_s"]
    if entry["error"]:
        remedy = "make the data of the run file reachable from this node (mount, proxy, token)"
        job.finding("fail", f"data on {host}: {entry['error']}", remedy, host=host, ranks=ranks)
    elif demand and not job.cpu and rate < TYPICAL_MFU * demand:  # a CPU's MFU is anyone's guess
        text = f"{host} reads {rate:,.0f} tokens/s; its ranks could take up to {demand:,.0f}"
        remedy = "raise data.workers, or put the data on a faster disk"
        job.finding("warn", text, remedy, host=host, ranks=ranks)


def _read(job: Measuring, run: Run, seconds: float) -> dict[str, Any]:
    """Open the data as a run does and take sequences; first_s ends at the first micro-batch."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octet"
    started = time.perf_counter()
    found = job.peers.from_first(lambda: look(run, None, cache))
    legal = objective.legal_worlds(run.batch, lanes=run.data.lanes, workers=run.data.workers)
    # One micro-batch at a time, so that the clock can be looked at in between.
    plan = replace(objective.plan_batch(run.batch, job.launch.world, legal), accumulation=1)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Path(folder) / "tokenizer.json"
        tokenizer.write_text(found["tokenizer"], encoding="utf-8")
        corpus = Corpus.open(run, found, tokenizer)
        feed = Feed(corpus, plan, job.launch.rank, None)
        try:
            feed.take()
            first_s = time.perf_counter() - started
            tokens, started = 0, time.perf_counter()
            while time.perf_counter() - started < seconds:
                tokens += feed.take().tokens
            rate = tokens / (time.perf_counter() - started)
        finally:
            feed.close()
    return {"source": corpus.describe(), "tokens_per_s": rate, "first_s": first_s}
