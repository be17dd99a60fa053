"""Reading a run file: YAML and overrides in, a validated `Run` out, every fault told at once.

    run = load_run("recipes/runs/gpt2_xl.yaml", ["optim.lr=3e-4", "batch.micro=8"])

Nothing here imports torch.
"""

from __future__ import annotations

import difflib
import io
import re
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from recipes.config import NUMBER, Run, Section


def load_run(path: str | Path, overrides: list[str] | None = None) -> Run:
    """Read a run file, apply `section.key=value` overrides and validate.

    Raises:
        ValueError: one text with every fault: unreadable YAML, unknown keys (with the nearest known
            one), wrong types, values out of range, and settings that could take no effect.
    """
    tree = read_yaml(path)
    if not isinstance(tree, dict):
        raise ValueError(
            f"{path} holds {type(tree).__name__}, expected sections such as model: and data:"
        )
    problems = [fault for item in overrides or [] if (fault := _override(tree, item))]
    run = None
    try:
        run = Run.model_validate(tree)
    except ValidationError as error:
        problems += [describe(fault) for fault in error.errors()]
    problems += _across_sections(_whole_sections(tree))
    if run is None or problems:
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        raise ValueError(f"{count} in {path}:\n" + "\n".join(f"  {p}" for p in problems))
    return run


def read_yaml(path: str | Path) -> Any:
    """A YAML file's values (ValueError if it can't be read or parsed)."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.reason if isinstance(error, UnicodeDecodeError) else error.strerror
        raise ValueError(
            f"{path} can't be read: {reason}; expected a YAML file in UTF-8"
        ) from error
    return _parse(text, str(path))


def _parse(text: str, where: str) -> Any:
    # ruamel reads YAML 1.2: 1e-4 is a number, `no` is text, and a key given twice is an error.
    try:
        return YAML(typ="safe", pure=True).load(io.StringIO(text))
    except YAMLError as error:
        raise ValueError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from error


def _override(tree: dict[str, Any], item: str) -> str | None:
    """Set one `section.key=value` in place; returns the fault, if any."""
    key, equals, value = item.partition("=")
    if not equals or not key:
        return f"override {item!r}: expected section.key=value"
    node: Any = tree
    *sections, leaf = key.split(".")
    for name in sections:
        node = node.setdefault(name, {}) if isinstance(node, dict) else None
        if not isinstance(node, dict):
            return f"override {item!r}: {name} is not a section"
    try:
        node[leaf] = _parse(value, f"override {item!r}")
    except ValueError as error:
        return str(error)
    return None


def describe(fault: Any, whole: type[BaseModel] = Run) -> str:
    """One pydantic fault of a `whole` as `section.key=value: what was expected`."""
    place = [str(part) for part in fault["loc"] if part != NUMBER]
    if fault["type"] == "extra_forbidden":
        known = list(_section_at(whole, fault["loc"][:-1]).model_fields)
        near = difflib.get_close_matches(place[-1], known, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}"
        return f"{'.'.join(place)}: unknown key; {remedy}"
    if fault["type"] == "missing":
        return f"{'.'.join(place)}: missing"
    text = fault["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    text = re.sub(r" or instance of \w+", "", text)
    if fault["type"] == "string_pattern_mismatch":  # only a run's name has one
        text = "expected letters, digits, '.', '_' and '-', beginning with a letter or digit"
    if NUMBER in fault["loc"]:
        text += ", or auto"
    if fault["type"] == "value_error":
        return f"{'.'.join(place)}: {text}"
    return f"{'.'.join(place)}={fault['input']!r:.80}: {text}"


def _section_at(section: type[BaseModel], place: tuple[Any, ...]) -> type[BaseModel]:
    for part in place:
        kinds = [
            section.model_fields[part].annotation,
            *get_args(section.model_fields[part].annotation),
        ]
        section = next(k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel))
    return section


def _whole_sections(tree: dict[str, Any]) -> dict[str, Any]:
    """The sections that are valid by themselves, so that one fault does not hide another."""
    whole: dict[str, Any] = {}
    for name, field in Run.model_fields.items():
        kinds = [field.annotation, *get_args(field.annotation)]
        section = next((k for k in kinds if isinstance(k, type) and issubclass(k, Section)), None)
        if section is None or name not in tree:
            continue
        with suppress(ValidationError):
            whole[name] = section.model_validate(tree[name])
    return whole


def _across_sections(whole: dict[str, Any]) -> list[str]:
    """Faults that show only when two settings are read together, where both are valid."""
    faults = []
    batch, data, schedule = whole.get("batch"), whole.get("data"), whole.get("schedule")
    evaluate, model = whole.get("evaluate"), whole.get("model")
    if batch and batch.global_sequences % batch.least_micro:
        faults.append(
            f"batch.global_sequences={batch.global_sequences} must be a multiple of "
            f"batch.micro={batch.micro}"
        )
    if evaluate and data and data.held_out is None:
        faults.append("evaluate needs data.held_out: give held_out.split or held_out.share")
    if data and data.held_out is not None and evaluate is None:
        faults.append("data.held_out has no effect without a valid evaluate section")
    if schedule and schedule.updates and schedule.warmup_updates > schedule.updates:
        faults.append(
            f"schedule.warmup_updates={schedule.warmup_updates} is more than schedule.updates="
            f"{schedule.updates}; the learning rate would never reach optim.lr"
        )
    if data and model and data.document_mask and model.attention == "flash_attention_2":
        faults.append(
            "data.document_mask with model.attention=flash_attention_2 loses the mask at "
            "micro-batches above one; use sdpa"
        )
    return faults
