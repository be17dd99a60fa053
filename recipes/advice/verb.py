"""`octet plan`: what fits, which strategy, how long, how much; loads no torch but with --trace."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from recipes.verb import verb_parser

PRECISIONS = ("fp16", "bf16")


def plan(words: list[str]) -> int:
    """What fits, which strategy, how long, how much: answered before a GPU is rented.

    Six sections: strategy, memory, batch, communication, time and money, scaling. Every number has
    a band and a source; --json and --html show them all. Nothing is run and no GPU is needed.
    """
    args = _parser().parse_intermixed_args(words)
    if args.ledger is not None:
        return _ledger(args)
    from recipes.advice.answer import answer
    from recipes.advice.question import read
    from recipes.advice.text import show
    from recipes.advice.wanted import Wanted

    given = {field.name: getattr(args, field.name) for field in fields(Wanted)}
    wanted = Wanted(**(given | {"overrides": tuple(args.overrides)}))
    result = answer(read(wanted))
    told = _told(lambda: show(result, sys.stdout))
    if wanted.json:
        _write(wanted.json, "--json", json.dumps(result, indent=1, allow_nan=False) + "\n")
    if wanted.html:
        from recipes.advice.page import page

        _write(wanted.html, "--html", page(result))
    _end(told)
    return 0


def _parser() -> Any:
    parser = verb_parser("plan", plan)
    add = parser.add_argument
    add("run", nargs="?", default="", help="the run file, a YAML")
    add("overrides", nargs="*", metavar="section.key=value")
    add("--hostfile", metavar="FILE", help="nodes and GPUs on each; default: hostfile")
    add("--nodes", type=int, metavar="N", help="in place of a hostfile; default: 1")
    add("--gpus", type=int, metavar="N", help="on each node, in place of a hostfile")
    add("--gpu", metavar="NAME", help="e.g. a100-80gb; without it all that are known are listed")
    add("--nic", metavar="NAME|RATE", help="all of a node's network together, e.g. 200gbit")
    add("--precision", choices=PRECISIONS, help="default: --config's, else fp16")
    add(
        *("--config", "--strategy"),
        metavar="YAML",
        help="the one of accelerate_configs/ that the run would be started with",
    )
    add("--price", type=float, metavar="PRICE", help="of a GPU-hour, in any currency")
    add("--tokens-per-sample", type=float, metavar="N", help="mean length of a document")
    add("--measured", metavar="FILE", help="preflight.json: its rates in place of the table's")
    add("--hardware", metavar="YAML", help="more GPUs and networks (docs/planning.md)")
    add("--trace", action="store_true", help="count activations on the real model; loads torch")
    add("--mtbf", type=float, metavar="HOURS", help="between failures of one GPU")
    add("--worlds", metavar="N,N,…", help="numbers of GPUs for the scaling section")
    add("--json", metavar="FILE", help="write the whole answer (plan.schema.json)")
    add("--html", metavar="FILE", help="write it as a page with charts")
    add(
        "--ledger",
        nargs="+",
        metavar="RUN",
        help="run folders: what was planned against what was measured; goes with --json alone",
    )
    return parser


def _ledger(args: Any) -> int:
    """What finished runs say about their plans."""
    from recipes.advice.ledger import ledger, ledger_text
    from recipes.advice.wanted import Wanted, file_faults

    idle = [
        f"--{field.name.replace('_', '-')}"
        for field in fields(Wanted)
        if field.name not in ("json", "run", "overrides")
        and getattr(args, field.name) is not field.default  # 0 and an empty text are given too
    ]
    idle += [word for word in (args.run, *args.overrides) if word]
    faults = file_faults(Wanted(run="", json=args.json))
    if idle:
        faults.append(f"{' '.join(idle)} has no effect with --ledger; leave it out")
    result: dict[str, Any] = {}
    try:
        result = ledger(args.ledger)
    except ValueError as error:
        faults.append(str(error))
    if faults:
        raise ValueError("\n".join(faults))
    told = _told(lambda: sys.stdout.write(ledger_text(result).rstrip("\n") + "\n"))
    if args.json:
        _write(args.json, "--json", json.dumps(result, indent=1) + "\n")
    _end(told)
    return 0


def _told(write: Callable[[], Any]) -> OSError | None:
    """Write to the standard output; what went wrong with it, after which it is a sink."""
    try:
        write()
        sys.stdout.flush()
    except OSError as error:  # a full disk, or a reader such as `head` that has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return error
    return None


def _end(told: OSError | None) -> None:
    """Tell what went wrong with the standard output, once the files are written."""
    if told is not None and not isinstance(told, BrokenPipeError):
        raise ValueError(f"the standard output can't be written: {told.strerror}") from told


def _write(path: str, option: str, text: str) -> None:
    """Write what was asked for (ValueError: it can't be)."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{option} {path} can't be written: {error.strerror}") from error
