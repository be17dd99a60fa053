"""`octet checkpoint list|verify|prune|import`; only the last one loads torch."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from recipes.artifacts import shelf
from recipes.checkpoint import rotation
from recipes.checkpoint.group import told
from recipes.checkpoint.lock import FolderLock
from recipes.metrics import human_bytes
from recipes.outcome import DONE, USAGE
from recipes.runfile import load_run
from recipes.verb import verb_parser

WIDTH = 120  # where no terminal says it


def checkpoint(words: list[str]) -> int:
    """List, verify, prune or import checkpoints."""
    if words and words[0] in ACTIONS:
        try:
            return ACTIONS[words[0]](words[1:])
        except OSError as error:
            raise ValueError(told(error)) from error
    wants_help = bool(words) and words[0] in ("-h", "--help")
    text = ""
    if words and not wants_help:
        near = difflib.get_close_matches(words[0], ACTIONS, n=1)
        guess = f"; did you mean {near[0]}?" if near else ""
        text = f"octet checkpoint: no action {words[0]!r}{guess}\n\n"
    lines = [
        f"  octet checkpoint {name:7} {(act.__doc__ or '').splitlines()[0]}"
        for name, act in ACTIONS.items()
    ]
    text += "usage: octet checkpoint ACTION …, each with --help\n\n" + "\n".join(lines) + "\n"
    (sys.stdout if wants_help else sys.stderr).write(text)
    return DONE if wants_help else USAGE


def list_(words: list[str]) -> int:
    """Show a run's checkpoints: step, age, size, who wrote it and why, whole or what is missing.

    Only sizes are compared; `octet checkpoint verify` reads every byte.
    """
    parser = verb_parser("checkpoint list", list_)
    parser.add_argument("run", type=Path, help="a run folder, or a run file")
    parser.add_argument("--json", action="store_true", help="the same, and more, for programs")
    args = parser.parse_args(words)
    found = shelf.entries(shelf.checkpoints_of(args.run))
    if args.json:
        rows = [asdict(entry) | {"state": entry.state} for entry in found]
        sys.stdout.write(json.dumps(rows, indent=1) + "\n")
        return DONE
    if not found:
        sys.stdout.write("no checkpoint yet\n")
        return DONE
    _console().print(_table(found))
    return DONE


def _console() -> Console:
    console = Console(file=sys.stdout, highlight=False)
    if not console.is_terminal:
        console = Console(file=sys.stdout, highlight=False, width=WIDTH)
    return console


def _table(found: list[shelf.Entry]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, side in (("step", "right"), ("age", "right"), ("size", "right"), ("ranks", "right")):
        table.add_column(name, justify=side, no_wrap=True)  # type: ignore[arg-type]
    for name in ("strategy", "why", "state"):
        table.add_column(name, overflow="fold")
    for entry in found:
        why = f"{entry.reason}{', kept for ever' if entry.milestone else ''}"
        style = "green" if entry.whole else "yellow" if not entry.faults else "bold red"
        style = style if entry.kind in ("committed", "broken") else "dim"
        table.add_row(
            f"{'' if entry.kind == 'committed' else '('}{entry.step}"
            f"{'' if entry.kind == 'committed' else ')'}",
            shelf.since(entry.time),
            human_bytes(entry.bytes),
            str(entry.world or "?"),
            Text(entry.strategy or "?"),
            Text(why or "?"),
            Text(entry.state + (" (newest)" if entry.newest else ""), style=style),
        )
    return table


def verify(words: list[str]) -> int:
    """Read every byte of a run's checkpoints, or of one, and compare it with the manifest."""
    from tqdm import tqdm

    parser = verb_parser("checkpoint verify", verify)
    parser.add_argument("path", type=Path, help="a run folder, a run file or one checkpoint")
    args = parser.parse_args(words)
    folders = shelf.to_verify(args.path)
    broken = 0
    with tqdm(
        total=shelf.bytes_here(folders), unit="B", unit_scale=True, leave=False, disable=None
    ) as bar:
        for folder, checked in shelf.verified(folders, bar.update):
            broken += bool(checked.faults)
            lines = [f"{folder.name}: {'BROKEN' if checked.faults else 'whole'}"]
            lines += [f"  {fault}" for fault in checked.faults]
            lines += [
                f"  {', '.join(sorted(names))}: on the disk of {host}, not read here; verify there"
                for host, names in checked.elsewhere.items()
            ]
            if checked.elsewhere and not checked.faults:
                lines[0] = f"{folder.name}: this machine's part is whole"
            bar.clear()
            sys.stdout.write("\n".join(lines) + "\n")
            bar.refresh()
    return USAGE if broken else DONE


def prune(words: list[str]) -> int:
    """Delete what crashes left and, with --keep, all but the newest checkpoints and milestones.

    The newest checkpoint that is whole to the last byte is never deleted, and nothing while a run
    is training in the folder.
    """
    parser = verb_parser("checkpoint prune", prune)
    parser.add_argument("run", type=Path, help="a run folder, or a run file")
    parser.add_argument("--keep", type=int, metavar="N", help="whole ones that stay; default: all")
    parser.add_argument("--dry-run", action="store_true", help="tell what would go, delete nothing")
    args = parser.parse_args(words)
    if args.keep is not None and args.keep < 1:
        raise ValueError(f"--keep {args.keep}: expected 1 or more; the newest whole one stays")
    root = shelf.checkpoints_of(args.run)
    # The copy of a checkpoints folder alone has no run that could be training there.
    folder = root.parent if root.name == "checkpoints" else root
    with FolderLock(folder / "lock", {"job": "octet checkpoint prune"}):
        gone = rotation.prune(root, args.keep, args.dry_run)
    verb = "would go" if args.dry_run else "deleted"
    for path, size, why in gone:
        sys.stdout.write(f"{verb}: {path.name}, {human_bytes(size)}, {why}\n")
    total = human_bytes(sum(size for _, size, _ in gone))
    free = f"{total} would be free" if args.dry_run else f"{total} freed"
    sys.stdout.write(f"{free}\n" if gone else "nothing to delete\n")
    return DONE


def import_(words: list[str]) -> int:
    """Make a checkpoint that Accelerate or DeepSpeed wrote the first one of a new run.

    SOURCE is the folder that `save_state` or `save_checkpoint` was given. Weights, Adam's moments
    and steps and the loss scale are carried over by parameter name; the data is read anew.
    """
    parser = verb_parser("checkpoint import", import_)
    parser.add_argument("source", type=Path, metavar="SOURCE")
    parser.add_argument("run", help="the run file, whose model must be the one that was trained")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_intermixed_args(words)
    run = load_run(args.run, args.overrides)

    from recipes.artifacts.importing import import_checkpoint

    with FolderLock(run.folder / "lock", {"job": "octet checkpoint import"}):
        done = import_checkpoint(args.source, run)
    skipped = f", {done.skipped} skipped" if done.skipped else ""
    lines = [f"{done.kind}: {done.step} updates{skipped}, {done.parameters:,} parameters"]
    if done.loss_scale is not None:
        lines.append(f"loss scale {done.loss_scale:g}")
    lines += [*done.notes, f"written to {done.folder}"]
    lines.append(f"goes on at update {done.step}: start the recipe with {args.run} as usual")
    sys.stdout.write("\n".join(lines) + "\n")
    return DONE


ACTIONS: dict[str, Callable[[list[str]], int]] = {
    "list": list_,
    "verify": verify,
    "prune": prune,
    "import": import_,
}
