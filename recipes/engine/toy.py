"""The toy that the gradient self-test trains, and what one process in fp64 gets for it.

The toy model gives every position of every micro-batch of every rank an embedding row of its own,
so that a micro-batch that is lost, doubled or weighted wrongly shows by itself, at any number of
ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from recipes.config import Run
from recipes.engine import build

ACCUMULATION, MICRO, SLOTS, CLASSES, LAYERS = 3, 2, 8, 16, 4
ROWS = "rows.weight"  # the parameter whose rows belong to one micro-batch each
RATES = (0.0, 0.0, 0.1)  # of the updates; at rate 0 the weights stay what the reference holds
BOOSTS = (0.25, 2.0, 0.25)  # of the loss: the second update is clipped, the others are not
# The largest relative error of one rounding. Both engines' fp32 products may be TF32 on a GPU.
ROUNDING = {"fp32": 2.0**-24, "tf32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-9}
# On the way of one micro-batch's gradient: forward and backward through LAYERS + 1 matrices with
# activation and residual, and the cast of the gradient, as if all went the same way.
PATH_ROUNDINGS = 4.0 * (LAYERS + 1)
Tensors = dict[str, torch.Tensor]


class Toy(nn.Module):
    """Rows of its own for every position, a few layers, a head; summed loss and token count."""

    def __init__(self, rows: int, width: int, filled: bool = True) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(7)
        self.rows = nn.Embedding(rows, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(LAYERS))
        self.head = nn.Linear(width, CLASSES)
        with torch.no_grad():
            for parameter in self.parameters() if filled else ():
                spread = 0.5 if parameter.ndim < 2 or parameter is self.rows.weight else width**-0.5
                values = torch.randn(parameter.shape, generator=draw) * spread
                parameter.copy_(values.bfloat16())  # what every precision holds exactly

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Summed cross entropy and token count of [B, T] rows and classes; -100 is masked."""
        hidden = self.rows(input_ids)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        logits = self.head(hidden).flatten(0, 1)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = F.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")
        return loss, (labels != -100).sum().float()


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What one process in fp64 gets for the three updates."""

    clip: float
    norms: list[float]  # before clipping
    gradients: list[Tensors]  # after it
    before: Tensors  # weights
    after: Tensors

    @classmethod
    def compute(cls, world: int, *, cpu: bool) -> Reference:
        """On the CPU of this rank, over the whole windows of all ranks; for the toy of a device."""
        module = Toy(rows_of(world), width(cpu=cpu)).double()
        before = {name: p.detach().clone() for name, p in module.named_parameters()}
        clip, norms, gradients = float("inf"), [], []
        settings = run_settings(world, clip=1.0).optim
        optimizer = build.build_optimizer(module, settings, torch.device("cpu"))
        for number, (rate, boost) in enumerate(zip(RATES, BOOSTS, strict=True)):
            optimizer.zero_grad()
            batches = [batch for rank in window(number, world) for batch in rank]
            tokens = sum(count(batch) for batch in batches)
            whole = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
            (module(**whole)[0] * boost / tokens).backward()
            norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), clip)))
            clip = 2.0 * norms[0]
            gradients.append({n: _grad(p).clone() for n, p in module.named_parameters()})
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        after = {name: p.detach() for name, p in module.named_parameters()}
        return cls(
            clip=clip,
            norms=norms,
            gradients=gradients,
            before=before,
            after=after,
        )


def _grad(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def width(*, cpu: bool) -> int:
    """Of the toy: on a GPU wide enough that computing and reducing meet."""
    return 32 if cpu else 512


def sizes(world: int, *, cpu: bool) -> list[int]:
    """Elements of the toy's parameters."""
    with torch.device("meta"):
        module = Toy(rows_of(world), width(cpu=cpu), filled=False)
    return [parameter.numel() for parameter in module.parameters()]


def blocks(rows: torch.Tensor) -> int:
    """How many micro-batches the rows of a gradient belong to."""
    return len(rows) // (MICRO * SLOTS)


def rows_of(world: int) -> int:
    """Positions of one window, over all ranks."""
    return world * ACCUMULATION * MICRO * SLOTS


def count(batch: Tensors) -> int:
    """Labels that count."""
    return int((batch["labels"] != -100).sum())


def window(number: int, world: int) -> list[list[Tensors]]:
    """All ranks' micro-batches; a micro-batch has 1 to 16 tokens, and the classes are skewed.

    Skewed, so that the micro-batches' gradients point the same way and their sum is no small rest
    of large parts, in which rounding would look large.
    """
    draw = torch.Generator().manual_seed(1000 + number)
    rows = torch.arange(rows_of(world)).view(world, ACCUMULATION, MICRO, SLOTS)
    labels = torch.randint(0, 2, rows.shape, generator=draw)
    lengths = torch.randint(1, SLOTS + 1, rows.shape[:-1], generator=draw)
    lengths[:, 0, 1:], lengths[:, 1] = 0, SLOTS  # always uneven over the window
    labels[torch.arange(SLOTS) >= lengths[..., None]] = -100
    return [
        [{"input_ids": rows[r, k], "labels": labels[r, k]} for k in range(ACCUMULATION)]
        for r in range(world)
    ]


def run_settings(world: int, clip: float) -> Run:
    """A run file's settings for the toy: a large eps lets steps follow gradients."""
    return Run.model_validate(
        {
            "name": "selftest",
            "output_dir": "/nonexistent",  # nothing is written
            "model": {"config": {"model_type": "gpt2"}},
            "data": {"kind": "python_stdlib", "tokenizer": {"train_vocab_size": 300}},
            "batch": {
                "seq_len": SLOTS,
                "global_sequences": world * ACCUMULATION * MICRO,
                "micro": MICRO,
            },
            "optim": {"lr": 1.0, "betas": [0.0, 0.95], "eps": 0.1, "clip": clip},
            "schedule": {"updates": len(RATES)},
            "checkpoint": {"every_updates": 10},
        }
    )


def tolerances(precision: str, world: int) -> tuple[float, float]:
    """Relative errors that rounding alone may cause: of one micro-batch's rows, of shared weights.

    A micro-batch's rows hear of no other one: only of the roundings on its own way. A shared
    weight's gradient is also a sum of `world * ACCUMULATION` parts that is rounded after each, at
    random: its error grows with the square root. Real engines stay three times below; a part that
    is missing, halved or doubled is 50 to 100 % of its rows.
    """
    exact = torch.get_float32_matmul_precision() == "highest"
    kind = "tf32" if precision == "fp32" and not exact else precision
    parts = world * ACCUMULATION
    return (
        PATH_ROUNDINGS * ROUNDING[kind],
        (PATH_ROUNDINGS + 4 * parts**0.5) * ROUNDING[kind],
    )
