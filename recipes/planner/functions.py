"""Activation functions: what autograd keeps and what the kernels move, in transformers' form."""

from __future__ import annotations

from typing import NamedTuple

from recipes.planner.shape import Shape


class Activation(NamedTuple):
    """What an activation function saves and moves per element, its output counted.

    Attributes:
        tensors: saved, all of the compute type; without autocast.
        autocast: bytes saved, when a 16-bit matrix product feeds it.
        gated: bytes saved under autocast, of a gated feed-forward part with it.
        forward, backward: elements that its kernels read and write, one after the other.
    """

    tensors: int
    autocast: int
    gated: int
    forward: int = 2
    backward: int = 3

    @property
    def widened(self) -> bool:
        """Whether autocast runs a part of it in fp32."""
        return self.autocast > 2 * self.tensors


_ONE_KERNEL, _BY_OUTPUT = Activation(2, 4, 8), Activation(1, 2, 6)
_UNFUSED_TANH = Activation(5, 16, 22, 18, 28)
# transformers' names; tests/test_planner_shape.py counts each one again on torch's own functions.
ACTIVATIONS = {
    "gelu": _ONE_KERNEL,
    "gelu_10": Activation(3, 6, 10, 4, 10),
    "gelu_accurate": _UNFUSED_TANH,
    "gelu_fast": Activation(8, 16, 20, 21, 36),
    "gelu_new": _UNFUSED_TANH,
    "gelu_python": Activation(4, 8, 12, 11, 24),
    "gelu_python_tanh": _UNFUSED_TANH,
    "gelu_pytorch_tanh": _ONE_KERNEL,
    "hardswish": _ONE_KERNEL,
    "laplace": _ONE_KERNEL._replace(forward=10, backward=15),
    "leaky_relu": _ONE_KERNEL,
    "linear": _BY_OUTPUT._replace(forward=0, backward=0),
    "mish": _ONE_KERNEL,
    "quick_gelu": Activation(3, 6, 10, 7, 14),
    "relu": _BY_OUTPUT,
    "relu2": _ONE_KERNEL._replace(forward=4, backward=10),
    "relu6": _ONE_KERNEL,
    "sigmoid": _BY_OUTPUT,
    "silu": _ONE_KERNEL,
    "swish": _ONE_KERNEL,
    "tanh": _BY_OUTPUT,
}


def activation_of(shape: Shape) -> Activation:
    """What the shape's activation function saves and moves.

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
