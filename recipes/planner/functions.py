"""Activation functions: what autograd keeps of each in transformers' form."""

from __future__ import annotations

from typing import NamedTuple

from recipes.planner.shape import Shape


class Activation(NamedTuple):
    """What an activation function saves per element, its output (the next input) counted."""

    tensors: int  # all of the compute type; without autocast
    autocast: int  # bytes, when a 16-bit matrix product feeds it
    gated: int  # bytes under autocast, of a gated feed-forward part with it


_ONE_KERNEL, _BY_OUTPUT = Activation(2, 4, 8), Activation(1, 2, 6)
_UNFUSED_TANH = Activation(5, 16, 22)
# transformers' names; tests/test_planner_shape.py counts each one again on torch's own functions.
ACTIVATIONS = {
    "gelu": _ONE_KERNEL,
    "gelu_10": Activation(3, 6, 10),
    "gelu_accurate": _UNFUSED_TANH,
    "gelu_fast": Activation(8, 16, 20),
    "gelu_new": _UNFUSED_TANH,
    "gelu_python": Activation(4, 8, 12),
    "gelu_python_tanh": _UNFUSED_TANH,
    "gelu_pytorch_tanh": _ONE_KERNEL,
    "hardswish": _ONE_KERNEL,
    "laplace": _ONE_KERNEL,
    "leaky_relu": _ONE_KERNEL,
    "linear": _BY_OUTPUT,
    "mish": _ONE_KERNEL,
    "quick_gelu": Activation(3, 6, 10),
    "relu": _BY_OUTPUT,
    "relu2": _ONE_KERNEL,
    "relu6": _ONE_KERNEL,
    "sigmoid": _BY_OUTPUT,
    "silu": _ONE_KERNEL,
    "swish": _ONE_KERNEL,
    "tanh": _BY_OUTPUT,
}


def saved_by(shape: Shape) -> Activation:
    """What the shape's activation function saves.

    Raises:
        ValueError: no closed form for it. (A traced shape's bytes are counted; there one kernel is
            assumed for the division into kinds.)
    """
    found = ACTIVATIONS.get(shape.activation)
    if found is None and shape.traced_parameters is None:
        raise ValueError(
            f"activation {shape.activation!r} has no closed form here; known: "
            f"{', '.join(ACTIVATIONS)}; any other is counted by --trace"
        )
    return found or _ONE_KERNEL
