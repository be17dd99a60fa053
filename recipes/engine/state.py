"""Training state by parameter name, alike under every strategy: master weights and moments.

ZeRO-1 keeps slices of flat groups, stage 0 a list of fp32 copies, DDP the parameters themselves.
Outside this module there are only names: `weight/NAME`, `exp_avg/NAME` and `exp_avg_sq/NAME` in
fp32, `buffer/NAME` as it is, and the numbers of `Scalars`. A rank gives what it owns, in runs of
elements of the flattened arrays, and takes what it needs, whatever strategy wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from recipes.engine.build import Engine

MOMENTS = ("exp_avg", "exp_avg_sq")
WRAPPER = "network."  # recipes.model.SummedLoss around the transformers model, whose names count

Read = Callable[[str, int, int], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Scalars:
    """The state that is not an array."""

    adam_step: int  # applied updates as Adam counts them
    loss_scale: float | None  # None: saved without a scaler, so a new one starts where it starts
    clean_updates: int  # since the last overflow or growth, towards the next growth of the scale
    hysteresis: int  # overflows that the scale still forgives


@dataclass(frozen=True)
class _Held:
    """What this rank owns of one trainable parameter."""

    name: str
    start: int  # in the flattened parameter
    weight: torch.Tensor  # 1-D fp32 views of the master weight and the moments
    moments: dict[str, torch.Tensor]


def layout(engine: Engine) -> dict[str, dict[str, Any]]:
    """Shape and dtype of every array, by name; alike on all ranks."""
    found: dict[str, dict[str, Any]] = {}
    for name, parameter in _parameters(engine):
        kinds = ("weight", *MOMENTS) if parameter.requires_grad else ("weight",)
        for kind in kinds:
            found[f"{kind}/{name}"] = {"shape": list(parameter.shape), "dtype": "float32"}
    for name, buffer in _persistent_buffers(engine.module):
        dtype = str(buffer.dtype).removeprefix("torch.")
        found[f"buffer/{name}"] = {"shape": list(buffer.shape), "dtype": dtype}
    return found


def owned(engine: Engine) -> list[tuple[str, int, torch.Tensor]]:
    """What this rank owns of the state: array name, first element, 1-D values.

    The values are views of live memory wherever they can be: copy or write them before the next
    update. Over all ranks every element of every array stands exactly once. No communication.
    """
    return _pieces(engine, engine.peers.rank, engine.peers.world)


def whole(engine: Engine) -> dict[str, torch.Tensor]:
    """Every array on the host as this rank sees it, for small models; every rank must call it.

    Under ZeRO-1 the other ranks' shares are theirs; elsewhere all of it is this rank's own.
    """
    arrays = {
        name: torch.zeros(about["shape"], dtype=getattr(torch, about["dtype"]))
        for name, about in layout(engine).items()
    }
    if engine.strategy.stage == 1:
        mine = [(name, start, values.cpu()) for name, start, values in owned(engine)]
        pieces = [piece for share in engine.peers.gather(mine) for piece in share]
    else:
        pieces = _pieces(engine, 0, 1)
    for name, start, values in pieces:
        arrays[name].view(-1)[start : start + values.numel()] = values.cpu()
    return arrays


def fill(engine: Engine, read: Read, scalars: Scalars) -> None:
    """Put the state into a freshly prepared engine; `spread` must follow.

    Args:
        read: gives elements `start` to `stop` of the array of a name, 1-D on the host; called on
            every rank for the same names in the same order, with start = stop where the rank needs
            nothing of it.
    """
    sliced = engine.strategy.stage == 1
    if sliced:
        _link_moments(engine, scalars.adam_step)
    masters = {} if sliced else _masters(engine)
    with torch.no_grad():
        for name, parameter in _parameters(engine):
            if not parameter.requires_grad:
                values = read(f"weight/{name}", 0, parameter.numel())
                parameter.copy_(values.view(parameter.shape))
            elif sliced:
                _fill_fragment(name, parameter, read)
            else:
                master = masters[id(parameter)]
                _fill_whole(engine, name, master, read, scalars.adam_step)
                parameter.copy_(master)
        for name, buffer in _persistent_buffers(engine.module):
            buffer.copy_(read(f"buffer/{name}", 0, buffer.numel()).view(buffer.shape))
    _import_scale(engine, scalars)


def spread(engine: Engine) -> None:
    """Bring the parameters that forward uses in line with the master weights; a collective."""
    if engine.strategy.stage == 1:
        # As at the end of every update: each rank rounds its share and all gather the others'.
        engine.inner_optimizer.update_lp_params()


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


def _parameters(engine: Engine) -> list[tuple[str, nn.Parameter]]:
    return [(n.removeprefix(WRAPPER), p) for n, p in engine.module.named_parameters()]


def _frozen(engine: Engine) -> list[tuple[str, nn.Parameter]]:
    """Parameters that no optimizer holds (fixed position embeddings, say)."""
    return [(name, p) for name, p in _parameters(engine) if not p.requires_grad]


def _pieces(engine: Engine, rank: int, world: int) -> list[tuple[str, int, torch.Tensor]]:
    pieces: list[tuple[str, int, torch.Tensor]] = []
    for held in _held(engine, rank, world):
        pieces.append((f"weight/{held.name}", held.start, held.weight.detach()))
        pieces += [
            (f"{kind}/{held.name}", held.start, value.detach())
            for kind, value in held.moments.items()
        ]
    if rank == 0:
        for name, parameter in _frozen(engine):
            pieces.append((f"weight/{name}", 0, parameter.detach().float().reshape(-1)))
        for name, buffer in _persistent_buffers(engine.module):
            pieces.append((f"buffer/{name}", 0, buffer.detach().reshape(-1)))
    return pieces


def _held(engine: Engine, rank: int, world: int) -> Iterator[_Held]:
    trained = [(name, p) for name, p in _parameters(engine) if p.requires_grad]
    if engine.strategy.stage == 1:
        _link_moments(engine)
        for name, parameter in trained:
            fragment = getattr(parameter, "_hp_mapping", None)  # None: wholly other ranks'
            if fragment is not None:
                yield _Held(
                    name,
                    fragment.lp_fragment_address.start,
                    fragment.hp_fragment,
                    {kind: fragment.get_optim_state_fragment(kind) for kind in MOMENTS},
                )
        return
    # Every rank has everything: the elements are shared out evenly, in order.
    total = sum(parameter.numel() for _, parameter in trained)
    low, high = total * rank // world, total * (rank + 1) // world
    masters, first = _masters(engine), 0
    for name, parameter in trained:
        start, stop = max(low - first, 0), min(high - first, parameter.numel())
        first += parameter.numel()
        if start < stop:
            master = masters[id(parameter)]
            adam = _torch_adam(engine).state.get(master, {})  # empty before the first update
            moments = {
                kind: adam[kind].reshape(-1)[start:stop]
                if kind in adam
                else torch.zeros(stop - start)
                for kind in MOMENTS
            }
            yield _Held(name, start, master.data.reshape(-1)[start:stop], moments)


def _fill_fragment(name: str, parameter: nn.Parameter, read: Read) -> None:
    fragment: Any = getattr(parameter, "_hp_mapping", None)
    address = fragment.lp_fragment_address if fragment is not None else None
    start, count = (address.start, address.numel) if address is not None else (0, 0)
    for kind in ("weight", *MOMENTS):
        values = read(f"{kind}/{name}", start, start + count)
        if fragment is not None:
            target = fragment.get_hp_fragment(None if kind == "weight" else kind)
            target.copy_(values)


def _fill_whole(
    engine: Engine, name: str, master: torch.Tensor, read: Read, adam_step: int
) -> None:
    values = {
        kind: read(f"{kind}/{name}", 0, master.numel()).view(master.shape)
        for kind in ("weight", *MOMENTS)
    }
    master.data.copy_(values["weight"])
    state = _torch_adam(engine).state[master]
    device = master.device if engine.device.type == "cuda" else torch.device("cpu")
    state["step"] = torch.tensor(float(adam_step), dtype=torch.float32, device=device)
    for kind in MOMENTS:
        state[kind] = values[kind].to(device=master.device, dtype=torch.float32, copy=True)


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


def _masters(engine: Engine) -> dict[int, torch.Tensor]:
    """The fp32 weight that the optimizer works on, by the id of the module's parameter."""
    inner = engine.inner_optimizer
    if not hasattr(inner, "fp16_groups"):  # DDP, or stage 0 in fp32: the parameters themselves
        return {id(parameter): parameter for _, parameter in engine.module.named_parameters()}
    return {
        id(low): high
        for lows, highs in zip(inner.fp16_groups, inner.fp32_groups, strict=True)
        for low, high in zip(lows, highs, strict=True)
    }


def _torch_adam(engine: Engine) -> Any:
    """torch's AdamW below whatever wraps it."""
    return (
        engine.inner_optimizer.optimizer
        if engine.strategy.kind == "DEEPSPEED"
        else engine.inner_optimizer
    )


def _adam_states(engine: Engine) -> list[dict[str, Any]]:
    return list(_torch_adam(engine).state.values())


def _persistent_buffers(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Buffers that belong to the model's state (batch norm's), not masks and the like."""
    kept = set(module.state_dict(keep_vars=True))
    named = module.named_buffers()
    return [(name.removeprefix(WRAPPER), buffer) for name, buffer in named if name in kept]


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
