"""`octet export`, `octet evaluate` and `octet generate`; loads torch only when one of them runs."""

from __future__ import annotations

import argparse
import json
import re
import sys
from typing import Any

from recipes.verb import verb_parser

DTYPES = ("float32", "bfloat16", "float16")
# What the training settled to says nothing of an evaluation, in fp32 and without gradients.
AUTO_MICRO = 8
MODEL = "a run folder, a checkpoint (step-…) or a transformers folder"
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def export(words: list[str]) -> int:
    """Write a checkpoint as a transformers folder, and prove in a fresh process that it loads.

    The folder appears under its name only after a process without deepspeed and without Octet has
    loaded it and given the same logits.
    """
    parser = verb_parser("export", export)
    parser.add_argument("checkpoint", help="a run folder (its newest) or a checkpoint (step-…)")
    parser.add_argument("out", help="the new folder")
    parser.add_argument(
        "--dtype", choices=DTYPES, default=DTYPES[0], help="of the weights; default: %(default)s"
    )
    parser.add_argument(
        "--shard-size", default="5GB", help="of one weights file at most; default: %(default)s"
    )
    args = parser.parse_args(words)
    shard_bytes = parse_shard_size(args.shard_size)
    from recipes.artifacts.exporting import export_checkpoint

    folder, proof = export_checkpoint(args.checkpoint, args.out, args.dtype, shard_bytes)
    sys.stdout.write(f"{proof}\nexported  {folder}\n")
    return 0


def parse_shard_size(text: str) -> int:
    """`5GB`, `500MB` or `2GiB` in bytes (ValueError if it is none)."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?i?B)", text.strip(), re.IGNORECASE)
    unit = UNITS.get(found[2].upper(), 0) if found else 0
    count = int(float(found[1]) * unit) if found else 0
    if count < 1:
        raise ValueError(f"--shard-size={text}: expected a size as 5GB, 500MB or 2GiB")
    return count


def evaluate(words: list[str]) -> int:
    """Held-out loss, perplexity and bits per byte of a checkpoint or a transformers folder.

    The sequences are those that the run itself evaluates, the arithmetic is fp32.
    """
    parser = verb_parser("evaluate", evaluate)
    parser.add_argument("model", help=MODEL)
    parser.add_argument("--run", metavar="RUN.yaml", help="whose data; default: the model's run")
    parser.add_argument("--sequences", type=int, help="default: the run's evaluate.sequences")
    parser.add_argument(
        "--micro",
        type=int,
        help=f"sequences at once; default: the run's, {AUTO_MICRO} where that is auto",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    _add_device(parser)
    args = parser.parse_args(words)
    _check_least(sequences=(args.sequences, 1), micro=(args.micro, 1))
    from recipes.artifacts import held_out
    from recipes.artifacts.loading import choose_device, open_artifact

    device = choose_device(args.device)
    artifact = open_artifact(args.model, held_out.fallback_end_of_text(args.run))
    run, count = held_out.evaluation_run(artifact, args.run, args.sequences)
    revision = None if args.run else artifact.facts.get("revision")
    corpus, rows = held_out.read_held_out(artifact, run, count, revision)
    own_micro = AUTO_MICRO if run.batch.micro == "auto" else run.batch.micro
    score = held_out.score(artifact, corpus, rows, args.micro or own_micro, device)
    own = held_out.own_loss(artifact, run, count)
    result = {"model": str(artifact.folder), "run": run.name, "step": artifact.facts.get("step")}
    result |= {"device": str(device), **score.to_json(), "runs_own_loss": own}
    if args.json:
        sys.stdout.write(json.dumps(result, indent=1) + "\n")
    else:
        sys.stdout.write("\n".join(_describe(result)) + "\n")
    return 0


def _describe(result: dict[str, Any]) -> list[str]:
    """An evaluation for people."""
    how = "exact" if result["bytes_are_exact"] else "of the decoded text"
    own, bits = result["runs_own_loss"], result["bits_per_byte"]
    lines = [
        f"model          {result['model']}",
        f"held-out loss  {result['loss']:.4f} nats per token, in fp32 on {result['device']}",
        f"perplexity     {result['perplexity']:,.2f}",
        f"bits per byte  {'none: there is no text' if bits is None else f'{bits:.4f}'}",
        f"over           {result['tokens']:,} tokens, {result['text_bytes']:,} bytes ({how}) in "
        f"{result['sequences']:,} sequences, {result['seconds']:.1f} s",
    ]
    if own is not None:
        lines.append(f"the run said   {own:.4f} at this step ({result['loss'] - own:+.1g})")
    return lines


def generate(words: list[str]) -> int:
    """Continue a prompt with a checkpoint or a transformers folder."""
    parser = verb_parser("generate", generate)
    parser.add_argument("model", help=MODEL)
    parser.add_argument("--prompt", required=True, help="the text to go on from")
    parser.add_argument("--tokens", type=int, default=64, help="at most; default: %(default)s")
    parser.add_argument("--temperature", type=float, help="default: 0.8")
    parser.add_argument("--top-k", type=int, help="draw among so many; default: 50")
    parser.add_argument("--greedy", action="store_true", help="take the likeliest token each time")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    _add_device(parser)
    args = parser.parse_args(words)
    drawing = {"--temperature": args.temperature, "--top-k": args.top_k}
    if args.greedy and (idle := [name for name, v in drawing.items() if v is not None]):
        raise ValueError(f"{' and '.join(idle)} has no effect with --greedy; leave one out")
    temperature = 0.8 if args.temperature is None else args.temperature
    top_k = 50 if args.top_k is None else args.top_k
    _check_least(tokens=(args.tokens, 1), top_k=(top_k, 1), seed=(args.seed, 0))
    if not 0.01 <= temperature < float("inf"):
        raise ValueError(f"--temperature={temperature}: expected 0.01 or more, or --greedy")
    if args.seed >= 1 << 63:
        raise ValueError(f"--seed={args.seed}: expected less than 2^63")
    from recipes.artifacts.continuation import check_prompt, continue_text
    from recipes.artifacts.loading import choose_device, memory_of, open_artifact

    device = choose_device(args.device)
    artifact = open_artifact(args.model)
    check_prompt(artifact.encoder, args.prompt, args.tokens, artifact.positions)
    with memory_of(device, "take --device cpu"):
        text = continue_text(
            artifact.network.to(device),
            artifact.encoder,
            args.prompt,
            tokens=args.tokens,
            device=device,
            seed=args.seed,
            temperature=temperature,
            top_k=top_k,
            greedy=args.greedy,
        )
    sys.stdout.write(text + "\n")
    return 0


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s"
    )


def _check_least(**given: tuple[int | None, int]) -> None:
    """Refuse numbers below their least (ValueError with all of them)."""
    faults = [
        f"--{name.replace('_', '-')}={value}: expected {least} or more"
        for name, (value, least) in given.items()
        if value is not None and value < least
    ]
    if faults:
        raise ValueError("\n".join(faults))
