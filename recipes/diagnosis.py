"""Finding the module in which a run's numbers first went wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from recipes.model import SummedLoss


def first_non_finite(
    module: SummedLoss, batches: list[dict[str, torch.Tensor]], factor: float
) -> str:
    """Name the module that first went non-finite over these micro-batches, forward or backward.

    Args:
        factor: what training multiplies the summed loss by, the loss scale included.

    Returns:
        A sentence for the report.
    """
    outputs: list[tuple[str, torch.Tensor]] = []

    def note(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            tensor = getattr(first, "last_hidden_state", first)
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                outputs.append((name, tensor))

        return hook

    handles = [m.register_forward_hook(note(name)) for name, m in module.named_modules() if name]
    try:
        for index, batch in enumerate(batches):
            outputs.clear()
            loss, _ = module(**batch)
            for name, tensor in outputs:
                if not torch.isfinite(tensor).all():
                    return f"the output of {name} is not finite in micro-batch {index}"
            if not torch.isfinite(loss):
                return (
                    f"all outputs are finite but the loss is {loss.item()} in micro-batch {index}"
                )
            differentiable = [(name, tensor) for name, tensor in outputs if tensor.requires_grad]
            # Gradients of outputs, not of parameters: the engine's reduction hooks must not fire.
            gradients = torch.autograd.grad(
                loss * factor, [tensor for _, tensor in differentiable], allow_unused=True
            )
            for (name, _), gradient in reversed(list(zip(differentiable, gradients, strict=True))):
                if gradient is not None and not torch.isfinite(gradient).all():
                    return f"the gradient at {name} is not finite in micro-batch {index}"
    finally:
        for handle in handles:
            handle.remove()
    return "every output, loss and gradient is finite on this rank"
