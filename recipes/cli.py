"""The `octet` command: one function for each verb; `--help` loads neither torch nor the engine.

    octet plan      recipes/runs/gpt2_xl.yaml --hostfile hostfile --gpu a100-80gb --nic 200gbit
    octet preflight --hostfile hostfile --config accelerate_configs/zero1_fp16.yaml
    octet launch    --hostfile hostfile --config accelerate_configs/zero1_fp16.yaml \
        recipes/runs/gpt2_xl.yaml
    octet rehearse  --hostfile hostfile -- octet launch …     # the same on one Linux machine
    octet sync      --hostfile hostfile
"""

from __future__ import annotations

import argparse
import difflib
import io
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from recipes.advice.verb import plan
from recipes.artifacts.checkpoint_verbs import checkpoint
from recipes.artifacts.verbs import evaluate, export, generate
from recipes.outcome import TopologyError, exit_code
from recipes.verb import verb_parser


def main(argv: list[str] | None = None) -> int:
    """Run one verb; returns its exit code (recipes/outcome.py)."""
    words = sys.argv[1:] if argv is None else argv
    for stream in (sys.stdout, sys.stderr):  # not every terminal can show every character
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    if not words or words[0] not in VERBS:
        asked_for_help = bool(words) and words[0] in ("-h", "--help")
        stream = sys.stdout if asked_for_help else sys.stderr
        if words and not asked_for_help:
            near = difflib.get_close_matches(words[0], VERBS, n=1)
            guess = f"; did you mean {near[0]}?" if near else ""
            stream.write(f"octet: no command {words[0]!r}{guess}\n\n")
        stream.write(_usage())
        return 0 if asked_for_help else 2
    try:
        return VERBS[words[0]](words[1:])
    except (ValueError, TopologyError) as error:
        sys.stderr.write(f"\n{error}\n")
        return exit_code(error)
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted; nothing of it is left running\n")
        return 130


def _usage() -> str:
    lines = [
        f"  octet {verb:10} {(act.__doc__ or '').splitlines()[0]}" for verb, act in VERBS.items()
    ]
    return "usage: octet COMMAND …, each with --help\n\n" + "\n".join(lines) + "\n"


def _parser(verb: str, act: Callable[[list[str]], int]) -> argparse.ArgumentParser:
    words = verb_parser(verb, act)
    words.add_argument("--hostfile", default="hostfile", help="default: %(default)s")
    return words


def _add_start(parser: argparse.ArgumentParser) -> None:
    """How ranks are started; shared by the verbs that start some."""
    from recipes.cluster.launchers import LAUNCHERS

    parser.add_argument(
        "--launcher", choices=LAUNCHERS, default=LAUNCHERS[0], help="default: %(default)s"
    )
    parser.add_argument(
        "--port", type=int, default=29500, help="on the first host; default: %(default)s"
    )
    parser.add_argument("--master", default="", help="the first host's address; default: found")
    parser.add_argument("--interface", default="", help="on every node; default: found on each")
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="a variable for every rank, beside NCCL_*, OMP_* and the like; secrets travel only "
        "when named here; may be repeated",
    )
    for name, meaning in (("include", "only these"), ("exclude", "all but these")):
        parser.add_argument(f"--{name}", default="", metavar="HOST[:GPU,GPU][@HOST…]", help=meaning)


def launch(words: list[str]) -> int:
    """Start a run on all nodes with one command, and watch it."""
    from recipes.cluster.launch_job import Wishes, dry_run
    from recipes.cluster.launch_job import launch as start
    from recipes.cluster.supervisor import Limits

    parser = _parser("launch", launch)
    parser.add_argument("run", nargs="?", default="", help="the run file, a YAML")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--config", required=True, help="one of accelerate_configs/*.yaml")
    _add_start(parser)
    parser.add_argument(
        "--fresh", action="store_true", help="delete the run (not its logs), start anew"
    )
    parser.add_argument(
        "--restarts", type=int, default=0, help="after a crash or exit 75, from the checkpoint"
    )
    parser.add_argument(
        "--grace", type=float, default=600.0, help="seconds to save in; default: 600"
    )
    parser.add_argument(
        "--heartbeat",
        type=float,
        default=20.0,
        help="seconds of silence that lose a node; default: 20",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the commands, start nothing")
    args = parser.parse_intermixed_args(words)
    if not args.run:
        raise ValueError("name a run file, e.g. recipes/runs/gpt2_xl.yaml; overrides come after it")
    faults = [
        f"--{name}={value:g}: expected {least} or more"
        for name, value, least in (
            ("restarts", args.restarts, 0),
            ("grace", args.grace, 0),
            ("heartbeat", args.heartbeat, 5),
        )
        if not value >= least
    ]
    if faults:
        raise ValueError("\n".join(faults))
    limits = Limits(heartbeat_s=args.heartbeat, grace_s=args.grace)
    wishes = Wishes(restarts=args.restarts, fresh=args.fresh, limits=limits)
    if args.dry_run:
        sys.stdout.write(dry_run(_asked(args), wishes))
        return 0
    return start(_asked(args), wishes, echo=_write)


def preflight(words: list[str]) -> int:
    """Check every node, the network and the ranks' arithmetic before a GPU-hour is spent."""
    from recipes.preflight.preflight import Wishes
    from recipes.preflight.preflight import preflight as check

    parser = _parser("preflight", preflight)
    parser.add_argument(
        "run", nargs="?", default="", help="the run file: adds its data, disk and sizes"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument(
        "--config",
        default="",
        help="one of accelerate_configs/*.yaml: ranks are started and measured",
    )
    _add_start(parser)
    parser.add_argument("--json", default="outputs/preflight.json", help="default: %(default)s")
    parser.add_argument("--no-ranks", action="store_true", help="look at the nodes only")
    parser.add_argument(
        "--only", default="", metavar="STAGES", help="of network,matmul,selftest,data"
    )
    args = parser.parse_intermixed_args(words)
    if args.only and (args.no_ranks or not args.config):
        raise ValueError(f"--only {args.only} measures with ranks: give --config, not --no-ranks")
    wishes = Wishes(json=args.json, measure=not args.no_ranks, only=args.only)
    return check(_asked(args), wishes)


def _asked(args: argparse.Namespace) -> Any:
    from recipes.cluster.asking import Asked

    given = {field.name: getattr(args, field.name) for field in fields(Asked)}
    listed: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
    return Asked(**listed)


def _write(text: str) -> None:
    encoding = sys.stdout.encoding  # which may lack a character of the model's
    try:
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()
    except OSError:  # the terminal is gone, or Ctrl-C ended `tee` too; the ranks are to save
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def rehearse(words: list[str]) -> int:
    """Make every host of a hostfile a network namespace of this machine, and run a command there.

    The command stands after --. It runs on the first host, exactly as on the real cluster: the
    others answer to their names, by ssh and pdsh. Needs root; touches nothing outside.
    """
    from recipes.cluster.hostfile import read_hostfile
    from recipes.rehearsal.namespaces import rehearse as run

    own, command = words, []
    if "--" in words:
        own, command = words[: words.index("--")], words[words.index("--") + 1 :]
    parser = _parser("rehearse", rehearse)
    parser.usage = "octet rehearse [--hostfile FILE] [--bandwidth RATE] [--local DIR] -- COMMAND"
    parser.add_argument("--bandwidth", metavar="RATE", help="of each link, e.g. 1gbit")
    parser.add_argument(
        "--local", action="append", default=[], metavar="DIR", help="each host gets its own"
    )
    args, more = parser.parse_known_args(own)
    if more:
        raise ValueError(
            f"{' '.join(more)}: the command stands after --, as in octet rehearse -- ls"
        )
    return run(read_hostfile(args.hostfile), command, args.bandwidth, local=args.local)


def sync(words: list[str]) -> int:
    """Bring checkout and environment to the other hosts, unless they share this folder."""
    from recipes.cluster.hostfile import read_hostfile
    from recipes.cluster.sync import sync as run

    parser = _parser("sync", sync)
    parser.add_argument("--dry-run", action="store_true", help="print the commands, copy nothing")
    args = parser.parse_args(words)
    sys.stdout.write(run(read_hostfile(args.hostfile), dry_run=args.dry_run))
    return 0


VERBS: dict[str, Callable[[list[str]], int]] = {
    "plan": plan,
    "preflight": preflight,
    "launch": launch,
    "rehearse": rehearse,
    "sync": sync,
    "checkpoint": checkpoint,
    "export": export,
    "evaluate": evaluate,
    "generate": generate,
}


if __name__ == "__main__":
    sys.exit(main())
