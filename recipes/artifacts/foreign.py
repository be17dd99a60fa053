"""Checkpoints that Accelerate or DeepSpeed wrote, opened as named arrays; needs neither of them.

Accelerate `save_state`, DDP          model.safetensors, optimizer.bin, scaler.pt
Accelerate `save_state`, DeepSpeed    latest, pytorch_model/…
DeepSpeed `save_checkpoint`           latest, global_stepN/mp_rank_00_model_states.pt, …
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from recipes.artifacts.unpickling import load_pickle

MOMENTS = ("exp_avg", "exp_avg_sq")
MODEL_FILES = ("model.safetensors", "pytorch_model.bin", "model.safetensors.index.json")
ADAM_FILES = ("optimizer.bin", "optimizer.pt")  # Accelerate's name, and transformers' Trainer's
STATES = "mp_rank_00_model_states.pt"
SHARD = re.compile(r"^(?:[a-z0-9]+_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt$")


@dataclass(kw_only=True)
class Foreign:
    """What a foreign checkpoint holds, under the names that it uses itself."""

    kind: str  # for people: "Accelerate, DDP", "DeepSpeed, ZeRO-1"
    world: int = 1
    weights: dict[str, list[torch.Tensor]]  # each array's consecutive parts, in order
    moments: dict[str, dict[str, list[torch.Tensor]]] = field(default_factory=dict)  # by kind
    shapes: dict[str, tuple[int, ...]]
    copies: dict[str, torch.Tensor] = field(default_factory=dict)  # further tensors of the model
    # Without names: the moments by number, and the numbers of each of the optimizer's groups.
    numbered: dict[int, dict[str, Any]] | None = None
    groups: list[list[int]] = field(default_factory=list)
    steps: set[int] = field(default_factory=set)  # as Adam counts them
    skipped: int = 0
    windows: int | None = None  # optimizer steps, skipped ones included, where the file says it
    loss_scale: float | None = None
    clean_updates: int = 0
    hysteresis: int = 1


def open_foreign(path: Path) -> Foreign:
    """Find out which kind of checkpoint lies in a folder, and open it.

    Raises:
        ValueError: there is none, it is damaged, or it is of a kind that can't be imported.
    """
    if not path.is_dir():
        raise ValueError(f"{path} is no folder; name the folder that the checkpoint was saved to")
    try:
        return _open(path)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(
            f"{path} is not laid out as the checkpoints of DeepSpeed 0.19 and Accelerate 1.15 are "
            f"({error!r}); {_REMEDY}"
        ) from error


def _open(path: Path) -> Foreign:
    if (path / "latest").is_file():
        tag = (path / "latest").read_text(encoding="utf-8", errors="replace").strip()
        if not tag or Path(tag).name != tag:
            raise ValueError(f"{path / 'latest'} names {tag!r}, which is no folder in {path}")
        return _deepspeed(path / tag)
    if any(path.glob("*mp_rank_*_model_states.pt")):
        return _deepspeed(path)
    if any((path / name).is_file() for name in MODEL_FILES):
        return _accelerate(path)
    names = sorted(entry.name for entry in path.iterdir())
    if any("fsdp" in name or name.endswith(".distcp") for name in names):
        raise ValueError(f"{path} was written by FSDP, which can't be imported; {_REMEDY}")
    inside = [name for name in names if (path / name).is_dir()]
    hint = f"; it holds {', '.join(inside[:6])}: name one of them" if inside else ""
    raise ValueError(
        f"{path} holds no checkpoint of Accelerate (model.safetensors and optimizer.bin) or "
        f"DeepSpeed (latest, or {STATES}){hint}"
    )


_REMEDY = "export its weights with the tool that wrote it, and name them as model.pretrained"


def _accelerate(path: Path) -> Foreign:
    weights = dict(_model_weights(path))
    adam = next((path / name for name in ADAM_FILES if (path / name).is_file()), None)
    if adam is None:
        raise ValueError(f"{path} has no {ADAM_FILES[0]}: {NO_MOMENTS}")
    state = load_pickle(adam)
    if not isinstance(state, dict) or not {"state", "param_groups"} <= state.keys():
        raise ValueError(f"{adam} is no optimizer's state: expected the keys state, param_groups")
    groups = state["param_groups"]
    found = Foreign(
        kind="Accelerate, DDP",
        world=max(1, len(list(path.glob("random_states_*.pkl")))),
        weights={name: [value.reshape(-1)] for name, value in weights.items()},
        shapes={name: tuple(value.shape) for name, value in weights.items()},
        steps=_steps(state["state"].values(), groups, adam),
    )
    if all("param_names" in group for group in groups):  # the optimizer was given the names
        for group in groups:
            for number, name in zip(group["params"], group["param_names"], strict=True):
                for kind in MOMENTS:
                    part = state["state"].get(number, {}).get(kind)
                    if part is not None:
                        found.moments.setdefault(kind, {})[name] = [part.reshape(-1)]
    else:
        found.numbered = state["state"]
        found.groups = [list(group["params"]) for group in groups]
    if (path / "scaler.pt").is_file():
        scaler = load_pickle(path / "scaler.pt")
        found.loss_scale = float(scaler["scale"])
        found.clean_updates = int(scaler["_growth_tracker"])
    return found


NO_MOMENTS = (
    "without Adam's moments there is nothing to go on from; to start anew from its weights, "
    "name them as model.pretrained"
)


def _model_weights(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    index = path / "model.safetensors.index.json"
    names = [MODEL_FILES[0]] if (path / MODEL_FILES[0]).is_file() else []
    if not names and index.is_file():
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        names = sorted({Path(name).name for name in listed})
    if not names:
        yield from load_pickle(path / MODEL_FILES[1]).items()
    for name in names:
        try:
            with safe_open(str(path / name), framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 (not a dict)
                    yield key, file.get_tensor(key)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path / name} can't be read: {error}") from error


def _steps(states: Any, groups: list[dict[str, Any]], where: Path) -> set[int]:
    """Adam's step counts; ValueError where the optimizer was not Adam."""
    found: set[int] = set()
    for state in states:
        if not set(MOMENTS) <= state.keys():
            raise ValueError(
                f"{where.name} holds {', '.join(map(str, state)) or 'nothing'} for a parameter, "
                f"expected {' and '.join(MOMENTS)}: only Adam and AdamW can be imported"
            )
        if "max_exp_avg_sq" in state:
            raise ValueError(f"{where.name} is of AMSGrad, which the recipe does not have")
        if "step" in state:
            found.add(int(state["step"]))
    # Some of DeepSpeed's own Adams count in the group.
    return found or {int(group["step"]) for group in groups if "step" in group}


def _deepspeed(path: Path) -> Foreign:
    _refuse_kinds(path)
    states = load_pickle(path / STATES)
    if not isinstance(states, dict) or not isinstance(states.get("module"), dict):
        raise ValueError(f"{path / STATES} holds no model; expected DeepSpeed's model states")
    shards = {int(m[1]): p for p in path.iterdir() if (m := SHARD.match(p.name))}
    if not shards:
        return _stage0(path, states)
    world = int(states.get("dp_world_size") or len(shards))
    if missing := sorted(set(range(world)) - shards.keys()):
        raise ValueError(
            f"{path} lacks the optimizer states of ranks {missing} of {world}; a node's disk may "
            "hold them"
        )
    loaded = [load_pickle(shards[rank])["optimizer_state_dict"] for rank in range(world)]
    stage = int(loaded[0].get("zero_stage", 1))
    if stage == 3:
        raise ValueError(f"{path} is of ZeRO stage 3, which can't be imported; {_REMEDY}")
    found = Foreign(
        kind=f"DeepSpeed, ZeRO-{stage}",
        world=world,
        weights={},
        moments={kind: {} for kind in MOMENTS},
        shapes={n: tuple(s) for group in states["param_shapes"] for n, s in group.items()},
        copies=dict(states["module"]),
        skipped=int(states.get("skipped_steps") or 0),
        windows=states.get("global_steps"),
    )
    for rank, shard in enumerate(loaded):
        _take_shard(found, shard, shards[rank])
    scaler = loaded[0].get("loss_scaler")
    if loaded[0].get("dynamic_loss_scale"):
        _take_scale(found, vars(scaler))
    return found


def _refuse_kinds(path: Path) -> None:
    if not path.is_dir():
        raise ValueError(f"{path} is missing, though `latest` names it")
    names = [entry.name for entry in path.iterdir()]
    kinds = {
        r"zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt": "ZeRO stage 3",
        r"mp_rank_(?!00)\d+_model_states\.pt": "tensor parallelism",
        r"layer_\d+.*model_states\.pt": "pipeline stages or experts",
        r"expp_rank_.*": "experts",
    }
    for pattern, kind in kinds.items():
        if any(re.fullmatch(pattern, name) for name in names):
            raise ValueError(f"{path} is of {kind}, which can't be imported; {_REMEDY}")


def _take_shard(found: Foreign, shard: dict[str, Any], path: Path) -> None:
    """Add one rank's parts of every parameter; ranks come in order."""
    base, masters = shard["base_optimizer_state"], shard["single_partition_of_fp32_groups"]
    if isinstance(base, dict):
        states = [base["state"].get(number, {}) for number in range(len(masters))]
        counted = base["param_groups"]
    else:  # `elastic_checkpoint`
        states, key = base, "base_optimizer_state_step"
        counted = [{"step": shard[key]}] if key in shard else []
    found.steps |= _steps(states, counted, path)
    for state, master, where in zip(states, masters, shard["param_slice_mappings"], strict=True):
        for name, part in where.items():
            place = slice(part.start, part.start + part.numel)
            found.weights.setdefault(name, []).append(master[place])
            for kind in MOMENTS:
                found.moments[kind].setdefault(name, []).append(state[kind].reshape(-1)[place])


def _take_scale(found: Foreign, scaler: dict[str, Any]) -> None:
    found.loss_scale = float(scaler["cur_scale"])
    found.clean_updates = int(scaler["cur_iter"] - scaler["last_overflow_iter"] - 1)
    found.hysteresis = int(scaler.get("cur_hysteresis", 1))


def _stage0(path: Path, states: dict[str, Any]) -> Foreign:
    """Stage 0: whole tensors; in fp16 with lists of fp32 copies beside them."""
    wrapper = states.get("optimizer")
    if not wrapper:
        raise ValueError(f"{path} has no optimizer's state: {NO_MOMENTS}")
    adam = wrapper.get("optimizer_state_dict", wrapper)
    if "fp32_groups_flat" in wrapper:
        raise ValueError(
            f"{path} is of stage 0 with DeepSpeed's fused optimizer, whose flat state names no "
            f"parameter; {_REMEDY}"
        )
    if not {"state", "param_groups"} <= adam.keys():
        raise ValueError(f"{path} holds an optimizer's state of an unknown kind; {_REMEDY}")
    found = Foreign(
        kind="DeepSpeed, stage 0",
        world=int(states.get("dp_world_size") or 1),
        weights={name: [value.reshape(-1)] for name, value in states["module"].items()},
        shapes={name: tuple(value.shape) for name, value in states["module"].items()},
        numbered={n: dict(state) for n, state in adam["state"].items()},
        groups=[list(group["params"]) for group in adam["param_groups"]],
        steps=_steps(adam["state"].values(), adam["param_groups"], path / STATES),
        skipped=int(states.get("skipped_steps") or 0),
        windows=states.get("global_steps"),
    )
    for numbers, masters in zip(found.groups, wrapper.get("fp32_groups", []), strict=False):
        for number, master in zip(numbers, masters, strict=True):
            assert found.numbered is not None
            found.numbered[number]["weight"] = master
    if wrapper.get("dynamic_loss_scale"):
        _take_scale(found, wrapper)
    return found
