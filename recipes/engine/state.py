"""Training state by parameter name, alike under every strategy: master weights and moments.

ZeRO-1 keeps slices of flat groups, stage 0 a list of fp32 copies, DDP the parameters themselves.
Outside this module there are only names: `weight/NAME`, `exp_avg/NAME` and `exp_avg_sq/NAME` in
fp32, `buffer/NAME` as it is, and the numbers of `Scalars`. What one strategy wrote, another can
read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from recipes.engine.build import Engine

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class Scalars:
    """The state that is not an array."""

    adam_step: int  # applied updates as Adam counts them
    loss_scale: float | None  # None: saved without a scaler, so a new one starts where it starts
    clean_updates: int  # since the last overflow or growth, towards the next growth of the scale
    hysteresis: int  # overflows that the scale still forgives


def parameter_sizes(engine: Engine) -> list[int]:
    """Elements of every parameter, in the order that `export_arrays` counts them."""
    return [parameter.numel() for _, parameter in engine.module.named_parameters()]


def export_arrays(engine: Engine, keep: set[int]) -> dict[str, torch.Tensor]:
    """Copies on the host of some parameters' state; every rank must call it.

    Args:
        keep: indices of the parameters that this rank writes, so that no rank holds the whole
            model.
    """
    arrays: dict[str, torch.Tensor] = {}
    if engine.strategy.stage == 1:
        _link_moments(engine)
    for index, (name, parameter) in enumerate(engine.module.named_parameters()):
        for kind, value in _full_state(engine, parameter):
            if index in keep:
                arrays[f"{kind}/{name}"] = value.detach().to("cpu", copy=True).contiguous()
    if 0 in keep:
        for name, buffer in _persistent_buffers(engine.module):
            arrays[f"buffer/{name}"] = buffer.detach().to("cpu", copy=True).contiguous()
    return arrays


def import_arrays(engine: Engine, read: Callable[[str], torch.Tensor], scalars: Scalars) -> None:
    """Put arrays by name into a freshly prepared engine.

    Args:
        read: gives the array of a name; called for every name on every rank.
    """
    if engine.strategy.stage == 1:
        _link_moments(engine, scalars.adam_step)
    with torch.no_grad():
        for name, parameter in engine.module.named_parameters():
            values = {kind: read(f"{kind}/{name}") for kind in ("weight", *MOMENTS)}
            _set_full_state(engine, parameter, values, scalars.adam_step)
        for name, buffer in _persistent_buffers(engine.module):
            buffer.copy_(read(f"buffer/{name}"))
    _import_scale(engine, scalars)


def export_scalars(engine: Engine) -> dict[str, float | int | None]:
    """`Scalars` as JSON numbers."""
    steps = {int(state["step"]) for state in _adam_states(engine) if "step" in state}
    assert len(steps) <= 1, f"Adam's step differs between parameters: {sorted(steps)}"
    scale: float | None = None
    clean, hysteresis = 0, 1
    if engine.accelerator.scaler is not None:
        kept = engine.accelerator.scaler.state_dict()
        scale, clean = kept["scale"], kept["_growth_tracker"]
    elif engine.strategy.precision == "fp16":
        scaler = _deepspeed_scaler(engine)
        scale, clean = scaler.cur_scale, scaler.cur_iter - scaler.last_overflow_iter - 1
        hysteresis = getattr(scaler, "cur_hysteresis", 1)
    return asdict(
        Scalars(
            adam_step=steps.pop() if steps else 0,
            loss_scale=float(scale) if scale is not None else None,
            clean_updates=int(clean),
            hysteresis=int(hysteresis),
        )
    )


def _full_state(engine: Engine, parameter: nn.Parameter) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole fp32 weight and moments of one parameter; a collective under ZeRO-1."""
    if engine.strategy.stage == 1:
        # Here and below, not at the top: deepspeed chooses its accelerator when it is imported.
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        yield "weight", safe_get_full_fp32_param(parameter)
        for kind in MOMENTS:
            yield kind, safe_get_full_optimizer_state(parameter, kind)
        return
    master = _master(engine, parameter)
    yield "weight", master.data
    state = _adam_state_of(engine, master)
    for kind in MOMENTS:
        yield kind, state.get(kind, torch.zeros_like(master))


def _set_full_state(
    engine: Engine, parameter: nn.Parameter, values: dict[str, torch.Tensor], adam_step: int
) -> None:
    if engine.strategy.stage == 1:
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        safe_set_full_fp32_param(parameter, values["weight"])
        for kind in MOMENTS:
            safe_set_full_optimizer_state(parameter, values[kind], kind)
    else:
        master = _master(engine, parameter)
        master.data.copy_(values["weight"])
        state = _adam_state_of(engine, master)
        device = master.device if engine.device.type == "cuda" else torch.device("cpu")
        state["step"] = torch.tensor(float(adam_step), dtype=torch.float32, device=device)
        for kind in MOMENTS:
            state[kind] = values[kind].to(device=master.device, dtype=torch.float32, copy=True)
    parameter.data.copy_(values["weight"])


def _link_moments(engine: Engine, adam_step: int | None = None) -> None:
    """Link Adam's state on the flat slices to the parameters, creating it where no step has.

    DeepSpeed links once, after the first of its parameter groups has stepped: the moments of every
    later group stay unlinked. Private in DeepSpeed 0.19.8; tests/test_engine.py watches it.

    Args:
        adam_step: the step count of created state; None leaves the state of earlier steps alone.
    """
    zero = engine.inner_optimizer
    device = engine.device if engine.device.type == "cuda" else torch.device("cpu")
    for flat in zero.single_partition_of_fp32_groups:
        state = zero.optimizer.state[flat]
        if adam_step is not None or "step" not in state:
            state["step"] = torch.tensor(float(adam_step or 0), device=device)
            for kind in MOMENTS:
                state[kind] = torch.zeros_like(flat)
    zero._hp_optimizer_states_linked = False
    zero._lazy_init_hp_params_optimizer_state()


def _master(engine: Engine, parameter: nn.Parameter) -> torch.Tensor:
    if engine.strategy.kind == "DDP":
        return parameter
    stage0 = engine.inner_optimizer
    for low, high in zip(stage0.fp16_groups, stage0.fp32_groups, strict=True):
        for low_parameter, master in zip(low, high, strict=True):
            if low_parameter is parameter:
                return master
    raise AssertionError("a parameter is in no optimizer group")


def _torch_adam(engine: Engine) -> Any:
    """torch's AdamW below whatever wraps it."""
    return (
        engine.inner_optimizer.optimizer
        if engine.strategy.kind == "DEEPSPEED"
        else engine.inner_optimizer
    )


def _adam_states(engine: Engine) -> list[dict[str, Any]]:
    return list(_torch_adam(engine).state.values())


def _adam_state_of(engine: Engine, master: torch.Tensor) -> dict[str, Any]:
    return _torch_adam(engine).state[master]


def _persistent_buffers(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Buffers that belong to the model's state (batch norm's), not masks and the like."""
    kept = set(module.state_dict(keep_vars=True))
    return [(name, buffer) for name, buffer in module.named_buffers() if name in kept]


def _deepspeed_scaler(engine: Engine) -> Any:
    inner = engine.inner_optimizer
    return inner.loss_scaler if engine.strategy.stage == 1 else inner.loss_scale_config


def _import_scale(engine: Engine, scalars: Scalars) -> None:
    if scalars.loss_scale is None:
        return
    if engine.accelerator.scaler is not None:
        kept = engine.accelerator.scaler.state_dict()
        kept |= {"scale": scalars.loss_scale, "_growth_tracker": scalars.clean_updates}
        engine.accelerator.scaler.load_state_dict(kept)
    elif engine.strategy.precision == "fp16":
        scaler = _deepspeed_scaler(engine)
        scaler.cur_scale = scalars.loss_scale
        # Only the distance to the last overflow counts.
        scaler.cur_iter, scaler.last_overflow_iter = scalars.clean_updates, -1
        if hasattr(scaler, "cur_hysteresis"):
            scaler.cur_hysteresis = min(scalars.hysteresis, scaler.delayed_shift)
