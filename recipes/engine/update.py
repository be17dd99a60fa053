"""One update: micro-batches with their gradient synchronisation, the step, its outcome."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from recipes.engine.build import Engine


@dataclass(frozen=True, kw_only=True)
class UpdateResult:
    """What an update did."""

    applied: bool  # False: the gradient was not finite and the parameters were left alone
    grad_norm: float  # before clipping, of the unscaled gradient; inf or nan where skipped
    loss_scale: float  # in force for the next update; 1.0 without a scaler


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What one rank has to say to all of them before a window."""

    stop: bool = False  # save and end
    save: bool = False
    unreadable: bool = False  # this rank's data could not be read
    written: bool = False  # the checkpoint in the background has come to its end here


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What the ranks agreed on for one window."""

    tokens: int
    samples: int
    digest: int  # of the window's data
    stop: bool  # wished by some rank, as are the next two
    save: bool
    unreadable: bool
    written: bool  # on every rank


class Announcement:
    """The window's counts and the ranks' flags, summed over ranks while it is being copied."""

    def __init__(
        self, engine: Engine, *, tokens: int, samples: int, digest: int, flags: Flags
    ) -> None:
        said = [flags.stop, flags.save, flags.unreadable, flags.written]
        counts = [tokens, samples, digest, *map(int, said)]
        self._counts, self._world = torch.tensor(counts, dtype=torch.int64), engine.peers.world
        # On the host network: the answer must not queue behind the GPU's work.
        self._work = dist.all_reduce(self._counts, group=engine.peers.group, async_op=True)

    def wait(self) -> Agreement:
        """The sums over all ranks."""
        self._work.wait()
        tokens, samples, digest, stop, save, unreadable, written = self._counts.tolist()
        return Agreement(
            tokens=tokens,
            samples=samples,
            digest=digest,
            stop=stop > 0,
            save=save > 0,
            unreadable=unreadable > 0,
            written=written == self._world,
        )


@contextmanager
def micro_batch(engine: Engine) -> Iterator[None]:
    """One forward and backward; gradients are reduced only in the window's last one."""
    with engine.accelerator.accumulate(engine.model):
        yield


def set_learning_rate(engine: Engine, rate: float) -> None:
    """Write the rate for the update that is about to be applied."""
    for group in engine.optimizer.param_groups:
        group["lr"] = rate


def backward(engine: Engine, loss: torch.Tensor) -> None:
    """Backpropagate; under DeepSpeed the window's last call also applies the update."""
    if engine.strategy.stage == 0:
        # DeepSpeed divides by the loss scale here, but multiplies by it for ZeRO optimizers only.
        loss = loss * engine.inner_optimizer.loss_scale
    engine.accelerator.backward(loss)


def finish_update(engine: Engine) -> UpdateResult:
    """Clip and apply (DDP), or learn what was applied (DeepSpeed); waits for the GPU, once."""
    assert engine.accelerator.sync_gradients, "the window is not complete"
    if engine.strategy.kind == "DDP":
        return _finish_ddp(engine)
    inner = engine.inner_optimizer
    norm = engine.model.get_global_grad_norm()
    norm = float(norm) if norm is not None else float("nan")
    if engine.strategy.stage == 0 and not inner.overflow:
        norm /= _scale_of_last_step(engine)
    return UpdateResult(applied=not inner.overflow, grad_norm=norm, loss_scale=loss_scale(engine))


def _scale_of_last_step(engine: Engine) -> float:
    # Stage 0 reports the norm of the scaled gradient, and has already grown the scale if this step
    # was due to.
    config = engine.inner_optimizer.loss_scale_config
    stable = config.cur_iter - 1 - config.last_overflow_iter - 1
    grown = config.dynamic_loss_scale and stable > 0 and stable % config.scale_window == 0
    return float(config.cur_scale / config.scale_factor if grown else config.cur_scale)


def _finish_ddp(engine: Engine) -> UpdateResult:
    accelerator, optimizer, scaler = engine.accelerator, engine.optimizer, engine.accelerator.scaler
    norm = float(accelerator.clip_grad_norm_(engine.model.parameters(), engine.clip))
    applied = norm == norm and norm not in (float("inf"), float("-inf"))
    if applied:
        optimizer.step()
    elif scaler is not None:
        # The clipping above unscaled and recorded the overflow. Fused AdamW would hide a skipped
        # step, so the step is not even called; the scale backs off all the same.
        scaler.update()
    # Gradients set to None would be made anew by the micro-batches that don't reduce, beside the
    # buckets that they are views of: 4 bytes per parameter more.
    optimizer.zero_grad(set_to_none=not engine.model.gradient_as_bucket_view)
    return UpdateResult(applied=applied, grad_norm=norm, loss_scale=loss_scale(engine))


def loss_scale(engine: Engine) -> float:
    """The loss scale in force; 1.0 without a scaler."""
    if engine.strategy.kind == "DEEPSPEED":
        return float(engine.inner_optimizer.loss_scale)
    scaler = engine.accelerator.scaler
    return float(scaler.get_scale()) if scaler is not None else 1.0


def sum_over_ranks(engine: Engine, values: list[torch.Tensor]) -> list[float]:
    """Sums over all ranks of scalars on the device: one reduction and one wait for them all."""
    if not values:
        return []
    stacked = torch.stack([v.to(torch.float64) for v in values])
    dist.all_reduce(stacked)
    return stacked.tolist()


def peak_memory_bytes(engine: Engine) -> int:
    """The most this rank has held: allocated on the GPU, or resident on the host without one."""
    if engine.device.type == "cuda":
        return torch.cuda.max_memory_allocated(engine.device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def rng_state(engine: Engine) -> dict[str, torch.Tensor]:
    """The random state that this rank's dropout draws from, as byte tensors."""
    states = {"cpu": torch.get_rng_state()}
    if engine.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(engine.device)
    return states


def set_rng_state(engine: Engine, states: dict[str, torch.Tensor]) -> None:
    """Go on drawing where `rng_state` was taken."""
    torch.set_rng_state(states["cpu"])
    if engine.device.type != "cuda":
        return
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], engine.device)
    else:  # saved on a CPU: each rank's own draw, since the ranks must not drop the same
        torch.cuda.manual_seed(int(torch.randint(2**31, ())))


def seed_rng(seed: int) -> None:
    """Seed what this rank's dropout draws from, on the host and the GPU."""
    torch.manual_seed(seed)
