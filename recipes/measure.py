"""What every rank measures before a run: arithmetic, network, gradients, data. Start it like a run:

    accelerate launch --config_file accelerate_configs/local_zero1_bf16.yaml \
        recipes/measure.py recipes/runs/stdlib.yaml --json measured.json
    torchrun --nproc_per_node 2 recipes/measure.py --only network \
        --accelerate_config accelerate_configs/local_ddp_bf16.yaml

`octet preflight` starts it on every node. Rank 0 holds the job's result (`outcome.result`,
`--json`); the other ranks' is {"schema", "rank", "host", "stage"}: how far they came. A stage that
did not run is null. Times are in seconds, sizes in bytes; a host is its socket host name.

    schema      1
    world       ranks; hosts: host of each rank, in rank order
    device      "cpu" or the GPU's name; backend "gloo" or "nccl"; arm "ZeRO-1 bf16"; origin: a file
    seconds     {"matmul": 0.8, ...}: what each stage took
    findings    [{"stage", "verdict": "fail" or "warn", "host" or null, "ranks", "text", "remedy"}]
    matmul      {"dtype", "note", "size", "threads", "repeats", "median_flops",
                 "ranks": [{"rank", "host", "flops", "slower_than_others"}]}
                flops: median rate while all ranks work; slower_than_others: median of the other
                ranks' rates by this one's (1.3: it takes 30 % more time), 1 for a single rank
    network     {"dtype", "budget_s", "sizes": [{"bytes", "why"}],
                 "collectives": [{"group": "all", "node" (within `host`) or "between" (first ranks
                     of the nodes), "host" or null, "ranks", "op": "all_reduce", "all_gather" or
                     "reduce_scatter", "bytes", "repeats", "seconds" (median call),
                     "algbw_bytes_per_s", "busbw_bytes_per_s", "correct"}],
                 "skipped": [{"group", "host", "op", "bytes", "reason"}],
                 "overlap": [{"group", "op", "bytes", "comm_s", "compute_s", "both_s",
                     "hidden_share"}] (1: the shorter one is hidden whole),
                 "links": [{"kind": "within" (two ranks of a node) or "between", "from", "to",
                     "from_rank", "to_rank", "bytes_per_s", "bits_per_s" (best of `runs`, one way),
                     "runs" (bytes per second of each), "message_bytes", "latency_s" (one way, 8 B),
                     "fit": {"latency_s", "bytes_per_s", "worst_misfit"} or null, "correct"}],
                 "within", "between": {"links", "latency_s", "bytes_per_s", "bits_per_s"} or null:
                     medians over those links, what a planner takes,
                 "worst_link": {"from", "to", "bits_per_s", "share_of_median"} or null}
    selftest    {"passed", "arms": [{"arm", "origin", "own" (the run's own), "passed", "check" (the
                     one nearest to or furthest over its tolerance), "error", "tolerance", "differs"
                     ("", or what, where, on which ranks), "skipped_updates", "seconds"}],
                 "left_out": [{"arm", "reason"}]}
    data        {"source", "measured_s", "flops_per_token", "ranks": [{"rank", "host", "reachable",
                     "tokens_per_s", "first_s" (until the first sequences), "demand_tokens_per_s",
                     "error"}], "hosts": {HOST: {"reachable", "tokens_per_s",
                     "demand_tokens_per_s", "error"}}}; demand: the matmul rate by the model's FLOPs
                per token, what the device would take at 100 % MFU: an upper bound; null without
                `matmul`
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # when launched by path

from recipes.config import Run
from recipes.outcome import Outcome
from recipes.preflight.linkrates import parse_size
from recipes.preflight.netbench import Size
from recipes.preflight.nodefacts import model_facts
from recipes.runfile import load_run

logger = logging.getLogger("recipes.measure")

STAGES = ("matmul", "network", "selftest", "data")


def main(argv: list[str] | None = None) -> int:
    """Measure on one rank; what was found wrong is a finding and no exit code."""
    args = parse_arguments(argv)
    rank, local_rank = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))
    logging.basicConfig(
        level=logging.INFO if rank == 0 else logging.WARNING,
        format="%(message)s" if rank == 0 else f"[rank {rank}] %(message)s",
    )
    with Outcome(rank=rank, local_rank=local_rank) as outcome:
        run = load_run(args.run, args.words) if args.run else None
        measure(run, args, outcome)
    return outcome.code


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The script's arguments, which repeat the run's."""
    parser = argparse.ArgumentParser(
        description="Measure the ranks before a run.", allow_abbrev=False
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="RUN section.key=value",
        help="the run file, whose sizes and data are measured, and its overrides",
    )
    parser.add_argument("--accelerate_config", help="the arm, under torchrun and deepspeed")
    parser.add_argument("--deepspeed_config", help="the arm, as DeepSpeed's JSON")
    parser.add_argument("--only", default=",".join(STAGES), help=f"of {','.join(STAGES)}")
    parser.add_argument("--sizes", help="of the messages, e.g. 8B,1MiB,25MiB; unset: the run's")
    parser.add_argument("--seconds", type=float, default=6.0, help="for the network, about")
    parser.add_argument("--data_seconds", type=float, default=2.0, help="for the data, about")
    parser.add_argument("--json", help="where rank 0 writes the result")
    parser.add_argument("--local_rank", type=int, help="passed by the deepspeed launcher")
    args = parser.parse_intermixed_args(argv)
    named = bool(args.words) and ("=" not in args.words[0] or Path(args.words[0]).is_file())
    args.run = args.words.pop(0) if named else None
    if fault := stage_fault(args.only):
        parser.error(fault)
    if args.words and not args.run:
        parser.error(f"{args.words[0]} has no effect without a run file")
    return args


def stage_fault(only: str) -> str:
    """What is wrong with the value of `--only`; empty if nothing."""
    unknown = sorted(set(only.split(",")) - set(STAGES))
    return f"--only {', '.join(unknown)}: expected some of {','.join(STAGES)}" if unknown else ""


def measure(run: Run | None, args: argparse.Namespace, outcome: Outcome) -> None:
    """Start the ranks as the run would, and measure stage by stage."""
    sizes = [Size(bytes=parse_size(s), why="asked for") for s in (args.sizes or "").split(",") if s]
    import torch  # loads only for arguments that are right

    from recipes.engine import selftest, topology
    from recipes.engine.strategy import read_strategy
    from recipes.preflight import measuring

    launch = topology.read_launch(os.environ, args.local_rank)
    strategy = read_strategy(args.accelerate_config, args.deepspeed_config, os.environ)
    cpu = topology.check_device(strategy.cpu, os.environ, torch.cuda.is_available())
    model = model_facts(run.model, run.batch.seq_len) if run is not None else None
    peers, device = selftest.join(strategy, launch, cpu=cpu)
    outcome.joined = True
    hosts = peers.gather(socket.gethostname())
    job = measuring.Measuring(
        run=run,
        strategy=strategy,
        launch=launch,
        cpu=cpu,
        peers=peers,
        device=device,
        hosts=hosts,
        model=model,
    )
    job.result |= {"schema": 1, "world": launch.world, "hosts": hosts}
    job.result |= {"device": "cpu" if cpu else torch.cuda.get_device_name(device)}
    job.result |= {"backend": torch.distributed.get_backend(), "arm": strategy.title}
    job.result |= {"origin": strategy.origin, "seconds": {}, "findings": []}
    job.result |= dict.fromkeys(STAGES)
    own = {"schema": 1, "rank": launch.rank, "host": hosts[launch.rank], "stage": ""}
    outcome.result = job.result if launch.rank == 0 else own
    stages = {
        "matmul": lambda: measuring.matmul(job),
        "network": lambda: measuring.network(job, sizes, args.seconds),
        "selftest": lambda: measuring.gradients(job),
        "data": lambda: measuring.data(job, args.data_seconds),
    }
    for name, stage in stages.items():
        if name not in args.only.split(",") or (name == "data" and run is None):
            continue
        job.result["stage"] = own["stage"] = name
        outcome.write("measuring")
        started = time.perf_counter()
        job.result[name] = stage()
        job.result["seconds"][name] = round(time.perf_counter() - started, 3)
        logger.info("%-8s took %.1f s", name, job.result["seconds"][name])
    job.result["stage"] = own["stage"] = "done"
    if launch.rank == 0:
        for found in job.result["findings"]:
            logger.info("%s: %s: %s", found["verdict"].upper(), found["stage"], found["text"])
        if args.json:
            Path(args.json).write_text(json.dumps(job.result, indent=1) + "\n", encoding="utf-8")
    peers.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
