"""The run folder: what a run records of itself, and whether a later start is still the same run."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

from recipes.checkpoint import files
from recipes.config import Run

# Keys that may change between two starts of one run: they touch neither data order nor objective.
FREE = {
    "output_dir",
    "log",
    "checkpoint",
    "evaluate",
    "sample",
    "ddp",
    "batch.micro",
    "data.workers",
    "data.prefetch",
    "data.skip_units",  # may only grow, which the checkpoint's data state checks
    "data.read_attempts",
    "data.tokenizer.engine",
    "model.attention",
    "model.gradient_checkpointing",
    "model.compile",
    "model.loss",
    "optim.max_skipped_in_a_row",
}
# Everything that a run writes into its folder.
OURS = {
    "run.json",
    "summary.json",
    "nonfinite.json",
    "plan.json",
    "no_room.json",
    "metrics.jsonl",
    "evaluations.jsonl",
    "saves.jsonl",
    "tokenizer.json",
    "checkpoints",
    "status",
    "trackers",
    "logs",
    "lock",
    "SAVE",
    "STOP",
}
# What is in use while a fresh start clears the folder: `octet launch` writes its logs, the ranks
# their status, and the lock is held.
KEPT = {"logs", "lock"}
PACKAGES = ("torch", "accelerate", "deepspeed", "transformers", "datasets", "tokenizers", "numpy")


def read_record(folder: Path) -> dict[str, Any] | None:
    """`run.json` of an earlier start; None if there was none."""
    path = folder / "run.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def read_summary(folder: Path) -> dict[str, Any] | None:
    """`summary.json` of a finished run; None while it is not finished."""
    path = folder / "summary.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def write_record(folder: Path, name: str, value: dict[str, Any]) -> None:
    """Write `run.json` or `summary.json` so that a reader never sees half of it."""
    write_text(folder / name, json.dumps(value, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file so that a reader never sees half of it, even after the power was lost."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.partial")
    try:
        files.write_file(beside, [text.encode()])
    except OSError:  # a full disk keeps no half of it
        beside.unlink(missing_ok=True)
        raise
    files.rename(beside, path)


def clear(folder: Path) -> None:
    """Delete an earlier run for a fresh start, if nothing but what runs write is there.

    Raises:
        ValueError: the folder holds something that no run of ours wrote.
    """
    if not folder.exists():
        return
    foreign = sorted(
        p.name for p in folder.iterdir() if p.name not in OURS and p.suffix != ".partial"
    )
    saved = folder / "checkpoints"
    for path in sorted(saved.iterdir()) if saved.is_dir() else ():
        if path.name not in ("LATEST", ".LATEST") and not files.OURS.match(path.name):
            foreign.append(f"checkpoints/{path.name}")
    if foreign:
        raise ValueError(
            f"--fresh would delete {folder}, which also holds {', '.join(foreign[:5])}; move that "
            "away, or name another output_dir"
        )
    for path in [p for p in folder.iterdir() if p.name not in KEPT]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def forget_ranks(folder: Path, world: int) -> None:
    """Delete the status of ranks that an earlier start had and this one has not."""
    for path in (folder / "status").glob("rank-*.json"):
        number = path.stem.removeprefix("rank-")
        if number.isdigit() and int(number) >= world:
            path.unlink(missing_ok=True)


def changed(recorded: dict[str, Any], run: Run) -> tuple[list[str], list[str]]:
    """Keys whose values differ from the recorded run: those that may not, and those that may."""
    before, after = flat(recorded["config"]), flat(run.model_dump(mode="json"))
    fixed: list[str] = []
    free: list[str] = []
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) == after.get(key):
            continue
        text = f"{key}: {before.get(key)!r} -> {after.get(key)!r}"
        may = any(key == name or key.startswith(name + ".") for name in FREE)
        (free if may else fixed).append(text)
    return fixed, free


def check_same(recorded: dict[str, Any], run: Run) -> list[str]:
    """Refuse to go on with another run's folder.

    Returns:
        The changes that are allowed, to be told.

    Raises:
        ValueError: every key whose change would make it another run.
    """
    fixed, free = changed(recorded, run)
    if fixed:
        raise ValueError(
            f"{run.folder} holds a run with other settings:\n  " + "\n  ".join(fixed) + "\n"
            "set them back to go on, start anew with --fresh, or give another name or output_dir"
        )
    return free


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys as `section.key`, for comparing and for trackers."""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            out |= flat(value, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = value
    return out


@cache
def _commit() -> str | None:
    """The commit of this checkout; None without git or without a commit."""
    words = ["git", "rev-parse", "--verify", "HEAD"]
    try:
        found = subprocess.run(
            words, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


@cache
def _packages() -> dict[str, str]:
    """Versions as they were at the start; a package may be replaced under a run."""
    return {name: importlib.metadata.version(name) for name in PACKAGES}


def versions() -> dict[str, Any]:
    """Versions and commit of what is running."""
    return {
        "versions": _packages(),
        "python": sys.version.split()[0],
        "commit": _commit(),
    }


def provenance() -> dict[str, Any]:
    """Versions, commit and command of this start."""
    return {
        **versions(),
        "command": sys.argv,
        "started": time.time(),
    }


def where_everything_is(folder: Path) -> str:
    """What lies where."""
    return "\n".join(
        [
            f"run folder   {folder}",
            "  run.json         settings, versions, command, hosts",
            "  metrics.jsonl    one record for every update",
            "  evaluations.jsonl  held-out loss and perplexity",
            "  saves.jsonl      one record for every checkpoint",
            "  plan.json        plan against measured, of every start",
            "  checkpoints/     arrays by parameter name; LATEST names the newest",
            "  summary.json     the result",
        ]
    )
