"""Which strategy and precision were asked for, by the launcher's variables or by a file.

The launchers say it in three ways: `accelerate launch` exports variables, and the script's own
`--accelerate_config` and `--deepspeed_config` name the file under `torchrun` and `deepspeed`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from recipes.config import Run
from recipes.objective import BatchPlan
from recipes.runfile import read_yaml

Precision = Literal["fp32", "fp16", "bf16"]
# The run file's numbers, which a DeepSpeed JSON leaves to it.
OWNED = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
)


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """The arm that was asked for."""

    kind: Literal["DEEPSPEED", "DDP"]
    precision: Precision
    cpu: (
        bool | None
    )  # True or False where the file says it; None where the launcher passes nothing on
    origin: str  # the file or variable that said so, for messages
    deepspeed: dict[str, Any] | None = None  # DeepSpeed's JSON

    @property
    def stage(self) -> int | None:
        """The ZeRO stage; None without DeepSpeed."""
        return self.deepspeed["zero_optimization"]["stage"] if self.deepspeed is not None else None

    @property
    def title(self) -> str:
        """How the console names it, for example `ZeRO-1 bf16`."""
        return f"{'DDP' if self.kind == 'DDP' else f'ZeRO-{self.stage}'} {self.precision}"


def read_strategy(
    accelerate_config: str | None, deepspeed_config: str | None, environ: Mapping[str, str]
) -> Strategy:
    """The one strategy that the command line and the launcher's variables name.

    Raises:
        ValueError: none is named, two differ, or its file holds what this recipe can't honour.
    """
    found: list[Strategy] = []
    if accelerate_config is not None:
        found.append(_from_accelerate_yaml(accelerate_config))
    if deepspeed_config is not None:
        found.append(_from_json(deepspeed_config, cpu=None, origin=deepspeed_config))
    if environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        path = environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
        if path == "none":
            raise ValueError(
                "accelerate launch was given DeepSpeed without deepspeed_config_file; name one of "
                "ds_configs/*.json in the YAML, so that buckets and loss scaler are written down"
            )
        found.append(_from_json(path, cpu=None, origin=f"accelerate launch with {path}"))
    elif "ACCELERATE_MIXED_PRECISION" in environ:
        precision = _precision(environ["ACCELERATE_MIXED_PRECISION"], "accelerate launch")
        found.append(
            Strategy(kind="DDP", precision=precision, cpu=None, origin="accelerate launch")
        )
    if not found:
        raise ValueError(
            "no strategy is named; start with accelerate launch --config_file "
            "accelerate_configs/X.yaml, or add --accelerate_config accelerate_configs/X.yaml or "
            "--deepspeed_config ds_configs/X.json"
        )
    for other in found[1:]:
        if (other.kind, other.precision, other.deepspeed) != (
            found[0].kind,
            found[0].precision,
            found[0].deepspeed,
        ):
            raise ValueError(
                f"two strategies are named: {found[0].title} by {found[0].origin} and "
                f"{other.title} by {other.origin}; name one"
            )
    return found[0]


def _from_accelerate_yaml(path: str) -> Strategy:
    tree = read_yaml(path)
    kind = tree.get("distributed_type") if isinstance(tree, dict) else None
    cpu = tree.get("use_cpu", False) if isinstance(tree, dict) else False
    if not isinstance(cpu, bool):
        raise ValueError(f"use_cpu={cpu!r} in {path}: expected true or false")
    if kind == "DEEPSPEED" and "mixed_precision" in tree:
        raise ValueError(
            f"mixed_precision in {path} has no effect beside a DeepSpeed JSON, which says fp16 or "
            "bf16 itself; remove it"
        )
    if kind == "DEEPSPEED":
        json_path = (tree.get("deepspeed_config") or {}).get("deepspeed_config_file")
        if not json_path:
            raise ValueError(
                f"{path} needs deepspeed_config.deepspeed_config_file, one of ds_configs/*.json"
            )
        return _from_json(json_path, cpu=cpu, origin=path)
    if kind in ("MULTI_GPU", "MULTI_CPU", "NO"):
        return Strategy(
            kind="DDP",
            precision=_precision(tree.get("mixed_precision", "no"), path),
            cpu=cpu,
            origin=path,
        )
    raise ValueError(
        f"distributed_type={kind!r} in {path}; this recipe runs DEEPSPEED and MULTI_GPU (DDP)"
    )


def _precision(text: str, origin: str) -> Precision:
    names: dict[str, Precision] = {"no": "fp32", "fp16": "fp16", "bf16": "bf16"}
    if text not in names:
        raise ValueError(f"mixed_precision={text!r} from {origin}; expected no, fp16 or bf16")
    return names[text]


def _from_json(path: str, *, cpu: bool | None, origin: str) -> Strategy:
    try:
        tree = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"DeepSpeed config {path} can't be read: {error.strerror}; paths are relative to the "
            "working directory"
        ) from error
    except json.JSONDecodeError as error:
        raise ValueError(f"DeepSpeed config {path} is not valid JSON: {error}") from error
    faults = json_faults(tree)
    if faults:
        raise ValueError(
            f"{len(faults)} problem{'s' if len(faults) > 1 else ''} in {path}:\n"
            + "\n".join(f"  {fault}" for fault in faults)
        )
    on = [p for p in ("fp16", "bf16") if _enabled(tree, p, [])]
    precision = _precision(on[0] if on else "no", path)
    return Strategy(kind="DEEPSPEED", precision=precision, cpu=cpu, origin=origin, deepspeed=tree)


def json_faults(tree: Any) -> list[str]:
    """What in a DeepSpeed JSON this recipe can't honour, or that would be silently wrong."""
    if not isinstance(tree, dict) or not isinstance(tree.get("zero_optimization"), dict):
        return ["expected an object with zero_optimization.stage"]
    zero, faults = tree["zero_optimization"], []
    stage = zero.get("stage")
    if stage not in (0, 1) or not isinstance(stage, int) or isinstance(stage, bool):
        faults.append(
            f"zero_optimization.stage={stage!r}: expected 1, or 0 (no sharding); no other stage is "
            "tested"
        )
    for key in ("optimizer", "scheduler"):
        if key in tree:
            faults.append(f"{key}: remove it; AdamW and the learning rate come from the run file")
    for key in ("offload_optimizer", "offload_param"):
        if zero.get(key):
            faults.append(f"zero_optimization.{key}: offloading is not supported; remove it")
    on = {name: _enabled(tree, name, faults) for name in ("fp16", "bf16")}
    if on["fp16"] and on["bf16"]:
        faults.append("fp16 and bf16 are both enabled; enable one")
    if stage == 0 and not on["fp16"]:
        faults.append(
            "stage 0 is the fp16 comparison arm only (in bf16 its gradients are scaled wrongly); "
            "use DDP"
        )
    if on["bf16"] and tree["bf16"].get("check_grad_overflow") is False:
        faults.append("bf16.check_grad_overflow=false would apply non-finite gradients; remove it")
    if stage == 1:
        for key in ("reduce_bucket_size", "allgather_bucket_size"):
            size = zero.get(key)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                faults.append(
                    f"zero_optimization.{key}={zero.get(key)!r}: write a number of elements, e.g. "
                    "100000000 (auto becomes hidden_size squared: hundreds of small reductions)"
                )
    known = {"zero_optimization.reduce_bucket_size", "zero_optimization.allgather_bucket_size"}
    faults += [
        f'{spot}="auto": only {", ".join(OWNED)} may be auto; write the value'
        for spot in _autos(tree)
        if spot not in known and not spot.endswith(".enabled")
    ]
    return faults


def _enabled(tree: dict[str, Any], name: str, faults: list[str]) -> bool:
    section = tree.get(name, {})
    if not isinstance(section, dict):
        faults.append(f'{name}={section!r}: expected an object, {{"enabled": true}}')
        return False
    enabled = section.get("enabled", False)
    if not isinstance(enabled, bool):
        faults.append(f"{name}.enabled={enabled!r}: expected true or false")
        return False
    return enabled


def _autos(tree: Any, place: str = "") -> list[str]:
    """Where a JSON says "auto" about something that the run file does not own."""
    if isinstance(tree, dict):
        return [
            spot
            for key, value in tree.items()
            if place or key not in OWNED
            for spot in _autos(value, f"{place}.{key}" if place else key)
        ]
    return [place] if tree == "auto" else []


def filled(strategy: Strategy, run: Run, plan: BatchPlan) -> dict[str, Any]:
    """DeepSpeed's configuration with the run file's numbers in place of every "auto".

    Raises:
        ValueError: the JSON states a number that the run file owns, and a different one.
    """
    assert strategy.deepspeed is not None
    tree = copy.deepcopy(strategy.deepspeed)
    numbers = (plan.global_sequences, plan.micro, plan.accumulation, run.optim.clip)
    owned = dict(zip(OWNED, numbers, strict=True))
    faults = [
        f'{key}={tree[key]!r} in {strategy.origin}: the run file makes it {value}; write "auto"'
        for key, value in owned.items()
        if tree.get(key, "auto") not in ("auto", value)
    ]
    if run.batch.micro == "auto":  # what is stated would come to be wrong when it is settled
        faults = [
            f'{key}={tree[key]!r} in {strategy.origin}: batch.micro=auto settles it; write "auto"'
            for key in OWNED[1:3]
            if tree.get(key, "auto") != "auto"
        ] + [fault for fault in faults if not fault.startswith(OWNED[1:3])]
    if faults:
        raise ValueError("\n".join(faults))
    # The engine prints its own throughput otherwise, wrong by the accumulation factor under
    # Accelerate.
    return tree | owned | {"steps_per_print": 10**9, "wall_clock_breakdown": False}
