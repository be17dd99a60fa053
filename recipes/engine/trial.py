"""One arm's trial: three updates of the toy on a prepared engine, compared with the reference.

With Adam's first beta at zero its first moment is the gradient that the optimizer was given:
reduced, unscaled and clipped. One update goes as it is, one is clipped and has another loss scale,
one moves the weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from recipes.engine import build, state, toy, update
from recipes.objective import gradient_factor, scaled_loss

RESCALE = 1 / 16  # of the loss scale, before the second update
MOST_SKIPS = 96  # fp16 may start with a scale of 2^32: 17 halvings, two overflows each, and reserve


@dataclass(frozen=True, kw_only=True)
class Check:
    """One comparison with the reference, on one rank."""

    what: str
    error: float  # relative
    tolerance: float
    factor: float  # what was found is about `factor` times what it should be
    depth: int = 0  # a fault shows in every deeper check too, so the first one is told

    @property
    def excess(self) -> float:
        """Error by tolerance; above 1 it failed, and what is not a number has failed."""
        return self.error / self.tolerance if self.error == self.error else float("inf")

    @property
    def telling(self) -> tuple[bool, int, float]:
        """The greatest one says most: a failed one, of the least depth, the furthest off."""
        return (self.excess > 1, -self.depth if self.excess > 1 else 0, self.excess)


def failed(what: str) -> Check:
    """An arm that came to no comparison."""
    return Check(what=what, error=float("inf"), tolerance=1.0, factor=0.0)


def compare(engine: build.Engine, reference: toy.Reference) -> tuple[list[Check], int]:
    """Train the three updates; what they did against the reference, and how many were skipped."""
    rows, shared = toy.tolerances(engine.strategy.precision, engine.plan.world)
    checks, skipped = [], 0
    for number in range(len(toy.RATES)):
        if number == 1:
            _rescale(engine)
        for _ in range(MOST_SKIPS if engine.strategy.precision == "fp16" else 1):
            result = _train(engine, number)
            if result.applied:
                break
            skipped += 1
        if not result.applied:
            what = f"update {number + 1} was never finite (loss scale {result.loss_scale:g})"
            return [failed(what)], skipped
        place = f"in update {number + 1}"
        want = torch.tensor(reference.norms[number])
        norm = torch.tensor(result.grad_norm)
        checks.append(_check(f"the reported gradient norm {place}", norm, want, shared, 1))
        arrays = state.whole(engine)
        for name, wanted in reference.gradients[number].items():
            found = arrays[f"exp_avg/{name}"]
            if name == toy.ROWS:
                checks += _row_checks(found, wanted, place, rows)
            else:
                checks.append(_check(f"the gradient of {name} {place}", found, wanted, shared))
    return checks + _weight_checks(engine, arrays, reference, shared), skipped


def _row_checks(
    found: torch.Tensor, wanted: torch.Tensor, place: str, tolerance: float
) -> list[Check]:
    """Every micro-batch's own rows."""
    blocks = zip(found.chunk(toy.blocks(found)), wanted.chunk(toy.blocks(found)), strict=True)
    return [
        _check(
            f"the gradient of rank {i // toy.ACCUMULATION}'s micro-batch "
            f"{i % toy.ACCUMULATION + 1} of {toy.ACCUMULATION} {place}",
            *block,
            tolerance,
        )
        for i, block in enumerate(blocks)
    ]


def _weight_checks(
    engine: build.Engine, arrays: toy.Tensors, reference: toy.Reference, tolerance: float
) -> list[Check]:
    """What the last update did to the fp32 weights, and whether this rank works with them."""
    checks = []
    for name, parameter in engine.module.named_parameters():
        before, after = reference.before[name], reference.after[name]
        master = arrays[f"weight/{name}"]
        step = f"the step of {name} in update {len(toy.RATES)}"
        # Decay and step each round the weight, which is larger than its change.
        slack = 2 * toy.ROUNDING["fp32"] * float(before.norm() / (after - before).norm())
        checks.append(_check(step, master.double() - before, after - before, tolerance + slack, 2))
        low = master.to(parameter.dtype)
        what = f"this rank's copy of {name} after the last update"
        checks.append(_check(what, parameter.detach().cpu(), low, toy.ROUNDING["fp32"], 3))
    return checks


def _check(
    what: str, found: torch.Tensor, wanted: torch.Tensor, tolerance: float, depth: int = 0
) -> Check:
    found, wanted = found.double().flatten(), wanted.double().flatten()
    size = max(float(wanted.dot(wanted)), 1e-30)
    return Check(
        what=what,
        error=float((found - wanted).norm()) / size**0.5,
        tolerance=tolerance,
        factor=float(found.dot(wanted)) / size,
        depth=depth,
    )


def _train(engine: build.Engine, number: int) -> update.UpdateResult:
    """The recipe's inner loop over one window of the toy's."""
    plan, everyone = engine.plan, toy.window(number, engine.plan.world)
    tokens = sum(toy.count(batch) for rank in everyone for batch in rank)
    factor = gradient_factor(accumulation=plan.accumulation, world=plan.world, tokens=tokens)
    update.set_learning_rate(engine, toy.RATES[number])
    for batch in everyone[engine.peers.rank]:
        with update.micro_batch(engine):
            loss, _ = engine.model(**{k: v.to(engine.device) for k, v in batch.items()})
            update.backward(engine, scaled_loss(loss, factor * toy.BOOSTS[number]))
    return update.finish_update(engine)


def _rescale(engine: build.Engine) -> None:
    """Another loss scale, which neither the reported norm nor the gradient may follow."""
    scaler = engine.accelerator.scaler
    if scaler is not None:
        scaler.load_state_dict(scaler.state_dict() | {"scale": scaler.get_scale() * RESCALE})
    elif engine.strategy.precision == "fp16":
        inner = engine.inner_optimizer
        holder = inner.loss_scaler if engine.strategy.stage == 1 else inner.loss_scale_config
        holder.cur_scale = holder.cur_scale * RESCALE
