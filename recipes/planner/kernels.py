"""Bytes that one layer's element-wise work moves through GPU memory, kernel by kernel.

Each line is one kernel as torch runs it: what it reads and writes, per token, in bytes. Matrix
products and flash attention are arithmetic-bound and counted in `recipes.planner.compute`. The
lists follow transformers' modelling code and torch's autograd formulas; tests hold their sums to
the operators that the real models call.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from recipes.planner.functions import activation_of
from recipes.planner.shape import Shape

# Backward by forward of the operators that transformers spells out: autograd adds sums, copies and
# zero-filled slices. Counted on its Llama and Qwen3 (tests/test_planner_kernels.py holds the sum).
RMS_BACKWARD, ROTARY_BACKWARD = 2.5, 2.25


@dataclass(frozen=True, kw_only=True)
class Moved:
    """Bytes per token and number of kernels of one direction.

    Attributes:
        whole: over the model's width, which every tensor rank repeats unless it divides the
            sequence. split: over widths that tensor ranks divide.
    """

    whole: float = 0.0
    split: float = 0.0
    kernels: int = 0

    @property
    def bytes(self) -> float:
        """On a rank that divides nothing."""
        return self.whole + self.split

    def on(self, tensor: int, *, sequence: bool) -> float:
        """Bytes on one of `tensor` ranks."""
        return self.split / tensor + self.whole / (tensor if sequence else 1)


@dataclass(frozen=True, kw_only=True)
class Style:
    """What decides how wide and how many the kernels are.

    Attributes:
        wide: bytes of an element of the residual stream and of norms: 4 under autocast, which runs
            norms in fp32 and keeps fp32 parameters, 2 where the parameters themselves are 16 bit.
        narrow: bytes of an element that a matrix product reads or writes.
        fused: element-wise chains are one kernel (torch.compile, hand-written kernels).
    """

    wide: int
    narrow: int
    fused: bool


def _norm(shape: Shape, style: Style, width: int) -> tuple[Moved, Moved]:
    """One norm over `width` elements."""
    w = style.wide
    if shape.norm == "layer" or style.fused:
        # Backward reads gradient and input once for the input's gradient, once for the weight's.
        return Moved(whole=2 * w * width, kernels=1), Moved(whole=5 * w * width, kernels=2)
    # transformers writes RMSNorm out: to fp32, square, mean, scale, back, times weight.
    forward = (w + 4) + (4 + 4) + 4 + (4 + 4) + (4 + w) + 2 * w
    return Moved(whole=forward * width, kernels=7), Moved(
        whole=RMS_BACKWARD * forward * width, kernels=14
    )


def _activation(shape: Shape, style: Style) -> tuple[Moved, Moved]:
    """The non-linearity, with the gate's product where there is one."""
    n, f = style.narrow, shape.ffn
    if style.fused:
        gate = 2 if shape.gated else 0
        up = Moved(split=(2 + gate / 2) * n * f, kernels=1)
        return up, Moved(split=(3 + gate) * n * f, kernels=1)
    function = activation_of(shape)
    size = max(n, style.wide) if function.widened else n
    count = function.forward // 2  # a kernel reads once or twice and writes once
    # silu(gate) * up: one product forward, two backward.
    gate = 3 if shape.gated else 0
    more = 1 if shape.gated else 0
    up = Moved(split=(function.forward * size + gate * n) * f, kernels=count + more)
    return up, Moved(
        split=(function.backward * size + 2 * gate * n) * f, kernels=2 * count + 2 * more
    )


def _rotary(shape: Shape, style: Style) -> tuple[Moved, Moved]:
    """Rotary positions on queries and keys: rotate half, two products, one sum."""
    if shape.positions:
        return Moved(), Moved()
    elements = shape.attention_width + shape.kv_width
    passes = 2 if style.fused else 9
    size, kernels = float(passes * style.narrow * elements), 2 if style.fused else 10
    again = 1.0 if style.fused else ROTARY_BACKWARD
    return Moved(split=size, kernels=kernels), Moved(split=again * size, kernels=2 * kernels)


def _eager_attention(shape: Shape, style: Style, seq_len: int) -> tuple[Moved, Moved]:
    """Scores and probabilities as whole matrices: scale, mask, softmax in fp32, cast, dropout."""
    n, scores = style.narrow, shape.heads * seq_len
    upcast = n == 2 and (style.wide == 4 or shape.softmax32)  # softmax in fp32, and back
    softmax, cast = (4, 6) if upcast and not style.fused else (n, 0)
    if style.fused:  # scale, mask and softmax are one kernel
        forward, backward, kernels = 4 * n, 7 * n, 1
    else:
        # Product written, scaled, masked, softmax, read by the second product.
        forward = n + 2 * n + (2 * n + 1) + (cast + 2 * softmax + cast) + n
        # Their gradients: written and the probabilities read by the second product's, softmax,
        # scale, read by both of the first product's.
        backward = 2 * n + (cast + 3 * softmax + cast) + 2 * n + 2 * n
        kernels = 4 + (2 if upcast else 0)
    if shape.attention_dropout:
        forward, backward, kernels = forward + 2 * n + 1, backward + 2 * n + 1, kernels + 1
    return Moved(split=forward * scores, kernels=kernels), Moved(
        split=backward * scores, kernels=kernels + 2
    )


def _dropout(shape: Shape, style: Style) -> tuple[Moved, Moved]:
    """Two dropouts on a layer's outputs, with byte masks."""
    if not shape.dropout or style.fused:
        return Moved(), Moved()
    each = (2 * style.narrow + 1) * shape.width
    return Moved(whole=2 * each, kernels=2), Moved(whole=2 * each, kernels=2)


def _glue(shape: Shape, style: Style) -> tuple[Moved, Moved]:
    """Residual sums, the casts that autocast adds before matrix products, bias gradients."""
    w, n, h = style.wide, style.narrow, shape.width
    residual = 2 * (2 * w + n) * h if not style.fused else 2 * (w + n) * h
    joined = 2 * 3 * w * h if not style.fused else 2 * w * h  # gradients of the two branches
    forward, backward, kernels = float(residual), float(joined), 2
    if w > n and not style.fused:
        forward += 2 * (w + n) * h  # norms' fp32 outputs are cast for the matrix product
        backward += 2 * (w + n) * h + 2 * (w + n) * h  # and their gradients back
        kernels += 2
    widths = shape.attention_width + 2 * shape.kv_width if shape.qkv_bias else 0
    widths += (h if shape.out_bias else 0) + (shape.ffn + h if shape.mlp_bias else 0)
    return Moved(whole=forward, kernels=kernels), Moved(
        whole=backward, split=n * widths, kernels=kernels + 4
    )


@lru_cache(maxsize=512)
def layer_moved(shape: Shape, style: Style, seq_len: int, attention: str) -> tuple[Moved, Moved]:
    """Element-wise traffic of one layer per token: forward, backward."""
    parts = [
        _norm(shape, style, shape.width),
        _norm(shape, style, shape.width),
        _activation(shape, style),
        _rotary(shape, style),
        _dropout(shape, style),
        _glue(shape, style),
    ]
    if attention == "eager":
        parts.append(_eager_attention(shape, style, seq_len))
    if shape.qk_norm:
        heads = _norm(shape, style, shape.attention_width + shape.kv_width)
        ahead, back = (Moved(split=part.whole, kernels=part.kernels) for part in heads)
        parts.append((ahead, back))
    ahead, back = (
        Moved(
            whole=sum(part[side].whole for part in parts),
            split=sum(part[side].split for part in parts),
            kernels=sum(part[side].kernels for part in parts),
        )
        for side in (0, 1)
    )
    return ahead, back


def loss_bytes(vocab: int, narrow: int, *, fused: bool) -> float:
    """Bytes that the loss moves per token, forward and backward, over `vocab` logits.

    Logits written, cast to fp32, log-softmax read and written, its gradient, back to 16 bit, and
    read by the head's two products; the chunked loss does the same block by block. Fused: written,
    read twice for the normaliser, replaced by the gradient, read twice.
    """
    if fused:
        return 6.0 * narrow * vocab
    cast = (narrow + 4) if narrow != 4 else 0
    forward = narrow + cast + 8
    backward = 12 + cast + 2 * narrow
    return float(forward + backward) * vocab
