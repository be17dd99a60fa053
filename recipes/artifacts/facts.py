"""What is known of a model's training: read from a checkpoint's state, kept beside an export.

name, step, tokens, samples      the run and how far it was
strategy, world                  how it was trained, "ZeRO-1 fp16" on how many ranks
held_out                         the run's last evaluation: step, held_out_loss, …; or null
revision                         the data set's commit on the hub; null for local files
versions, commit                 of the packages and of this project's checkout
end_of_text                      the token that closes every document
config                           the run file's settings, resolved
dtype, parameters                of an export
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from recipes.config import Run

FACTS, VERSION = "octet.json", 1
PRINTS = ("source", "units", "held_out")


def facts_of(state: dict[str, Any], step: int, folder: Path) -> dict[str, Any]:
    """The facts of a checkpoint, from its state.json and its run's folder.

    Raises:
        ValueError: the state names no end-of-text token, so it is none of ours.
    """
    config, progress = state.get("config") or {}, state.get("progress") or {}
    token = ((config.get("data") or {}).get("tokenizer") or {}).get("end_of_text")
    if not token:
        raise ValueError(f"{folder}/state.json has no data.tokenizer.end_of_text; it is damaged")
    return {
        "version": VERSION,
        "name": state.get("name") or config.get("name"),
        "step": step,
        "tokens": progress.get("tokens"),
        "samples": progress.get("samples"),
        "strategy": state.get("strategy"),
        "world": state.get("world"),
        "held_out": state.get("held_out"),
        "revision": _revision(state, folder),
        "fingerprints": {
            key: state["data"][key] for key in PRINTS if key in (state.get("data") or {})
        },
        "versions": state.get("versions") or {},
        "commit": state.get("commit"),
        "end_of_text": token,
        "config": config,
    }


def _revision(state: dict[str, Any], folder: Path) -> str | None:
    """The hub commit of the data; an imported checkpoint has it in its run's record at most."""
    if state.get("data"):
        return state["data"].get("revision")
    record = folder.resolve().parent.parent / "run.json"
    if not record.is_file():
        return None
    return json.loads(record.read_text(encoding="utf-8")).get("revision")


def read_facts(folder: Path) -> dict[str, Any]:
    """The facts beside an export; empty for a folder that another program wrote.

    Raises:
        ValueError: they can't be read, or another version of this package wrote them.
    """
    path = folder / FACTS
    if not path.is_file():
        return {}
    try:
        facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} can't be read: {error}; export the checkpoint again") from error
    if not isinstance(facts, dict) or facts.get("version") != VERSION:
        raise ValueError(f"{path} is not of version {VERSION}; export the checkpoint again")
    return facts


def run_of(facts: dict[str, Any]) -> Run | None:
    """The run file's settings; None where nothing is known of a run.

    Raises:
        ValueError: this version of the package does not know some of them.
    """
    if not facts.get("config"):
        return None
    try:
        return Run.model_validate_json(json.dumps(facts["config"]))
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise ValueError(
            "the run's settings are not of this version of the package; give the run file with "
            "--run: " + "; ".join(faults)
        ) from error
