"""Seconds of arithmetic: one micro-batch forward and backward, and the optimizer's step.

A roofline over the kernels of a layer: matrix products at the GPU's measured best rate less what
training's shapes lose, flash attention at its own share, element-wise kernels at memory bandwidth,
and no faster than the host can launch them. Communication is `recipes.planner.network`'s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from recipes.planner.figure import Figure, Source
from recipes.planner.hardware import Gpu
from recipes.planner.kernels import Moved, Style, layer_moved, loss_bytes
from recipes.planner.workload import Candidate, Cluster, Workload

# The constants below that say "llm-foundry" were chosen on its A100-80GB and H100 tables (MosaicML,
# scripts/train/benchmarking/README.md): those rows prove nothing, every other stack's do
# (tests/test_planner_published.py, docs/planning.md).
#
# What training's products reach of the best shape's rate, and the inner dimension that filling and
# draining a product's pipeline costs as much time as: rate = best * TRAINING_SHAPES * K/(K + FILL).
# llm-foundry, 125 M to 13 B parameters at 2,048 tokens.
TRAINING_SHAPES = 0.85
FILL = 128
TILE = 128  # rows and columns of a product that one multiprocessor works on
SPLIT = 0.8  # share of a full wave that a product split along its inner dimension gets (assumed)
# A product whose rows are not 16 bytes apart falls off the tensor cores' fast path. nanoGPT's
# author measured a whole step 25 % faster for 124 M parameters when 50,257 became 50,304, where the
# head is a third of the arithmetic: about half the rate.
# torch.compile pads such products (inductor's shape_padding).
UNALIGNED_MATMUL = {"torch": 0.5, "fused": 0.9}
ALIGNMENT = 8  # elements of 16 bits
FP32_SHARE = 0.95  # assumed
# Causal flash attention by the matmul rate, and the sequence at which it reaches half of that.
# llm-foundry, 512 to 65,536 tokens. FlashAttention-2 with heads of 128 reaches a quarter more.
FLASH_FORWARD, FLASH_BACKWARD = 0.52, 0.42
FLASH_RAMP = 192
# Batched products of eager attention have an inner dimension of only 64 or 128: assumed.
EAGER_MATMUL = 0.5
# Share of the data sheet's bandwidth that element-wise kernels move. Fused kernels come near the
# 0.9 of stream benchmarks; torch's one after another do not: llm-foundry.
MEMORY_SHARE = {"torch": 0.60, "fused": 0.80}
# Host time to issue one kernel, forward and in autograd's thread. transformers' Python around
# torch's: a BERT-base of 12 layers takes 6 ms forward however short its input (transformers'
# benchmark page), half a millisecond a layer of 31 kernels. Compiled: assumed.
LAUNCH_S = {"torch": 15e-6, "fused": 5e-6}
# Bytes per owned parameter that Adam in fp32 moves: gradient to fp32 (6), unscale (8), norm (4),
# parameter and two moments read and written (24), gradient read (4), 16-bit copy (6).
# DDP's gradients are fp32 already: norm (4), clipping (8) and the 28 of the update.
ADAM_BYTES, ADAM_BYTES_AUTOCAST = 52.0, 40.0
# The step's Python around it: assumed.
STEP_S = 5e-3
# Either way; docs/planning.md has the errors against published runs.
BAND = 0.25


@dataclass(frozen=True, kw_only=True)
class MicroTime:
    """Seconds of one micro-batch on one GPU.

    Attributes:
        backward_s: with recomputation under gradient checkpointing.
        by_kind: seconds of matmul, attention, elementwise, logits, gradients and launch (what the
            host takes longer than the GPU).
    """

    forward_s: float
    backward_s: float
    figure: Figure
    by_kind: dict[str, float]


def matmul_rate(work: Workload, cluster: Cluster) -> tuple[float, Source, str]:
    """FLOP/s that a layer's products reach, with where that comes from."""
    measured = cluster.measured
    wide = work.precision == "fp32"
    if (
        measured is not None
        and measured.matmul_flops is not None
        and (measured.matmul_dtype == "fp32") == wide
    ):
        rate = measured.matmul_flops * TRAINING_SHAPES
        return rate, "measured", f"matmul rate of {measured.path}"
    gpu = cluster.gpu
    if wide:  # no tensor cores, and so no shortage of data to feed them
        return gpu.flops_32bit * FP32_SHARE, "table", f"{gpu.name}'s fp32 rate"
    rate = gpu.flops_16bit * gpu.matmul_share * gpu.sustained * TRAINING_SHAPES
    return rate, "table", f"{gpu.name}'s matmul rate"


def _memory_rate(gpu: Gpu, kernels: str) -> float:
    return gpu.memory_bytes_per_s * MEMORY_SHARE[kernels]


def style_of(work: Workload, candidate: Candidate) -> Style:
    """Widths of the kernels' elements for a precision and a strategy."""
    if work.precision == "fp32":
        return Style(wide=4, narrow=4, fused=work.kernels == "fused")
    wide = 4 if candidate.strategy.autocast else 2
    return Style(wide=wide, narrow=2, fused=work.kernels == "fused")


@dataclass(frozen=True, kw_only=True)
class _Side:
    """GPU seconds of one layer in one direction, by kind, and its kernels."""

    matmul: float
    attention: float
    elementwise: float
    kernels: int

    @property
    def total(self) -> float:
        return self.matmul + self.attention + self.elementwise


def _products(work: Workload, candidate: Candidate, gpu: Gpu, rate: float) -> tuple[float, float]:
    """Seconds of one layer's matrix products, forward and backward."""
    shape, tensor = work.shape, candidate.strategy.tensor
    tokens = candidate.micro * work.seq_len
    matrices = (
        (shape.width, (shape.attention_width + 2 * shape.kv_width) // tensor),
        (shape.attention_width // tensor, shape.width),
        (shape.width, shape.ffn * (2 if shape.gated else 1) // tensor),
        (shape.ffn // tensor, shape.width),
    )
    ahead = sum(_product(tokens, out, inner, gpu, rate) for inner, out in matrices)
    back = sum(
        _product(tokens, inner, out, gpu, rate) + _product(inner, out, tokens, gpu, rate)
        for inner, out in matrices
    )
    return ahead, back


@lru_cache(maxsize=4096)
def _product(rows: int, columns: int, inner: int, gpu: Gpu, rate: float) -> float:
    """Seconds of one matrix product, `rows` x `inner` by `inner` x `columns`.

    Its tiles run in waves over the multiprocessors, and a wave that is not full takes as long as a
    full one (NVIDIA, "Matrix Multiplication Background": wave quantization). Few tiles with a long
    inner dimension are split along it.
    """
    waves = -(-rows // TILE) * -(-columns // TILE) / gpu.sms
    full = waves / math.ceil(waves)
    if inner > max(rows, columns):
        full = max(full, SPLIT)
    return 2.0 * rows * columns * inner / (rate * full * inner / (inner + FILL))


def _layer(
    work: Workload, candidate: Candidate, cluster: Cluster, rate: float
) -> tuple[_Side, _Side]:
    shape, tensor = work.shape, candidate.strategy.tensor
    tokens = candidate.micro * work.seq_len
    style = style_of(work, candidate)
    ahead_s, back_s = _products(work, candidate, cluster.gpu, rate)
    # Whole scores: 4·s·width FLOPs a token; a causal flash kernel skips half of them.
    scores = 4.0 * work.seq_len * shape.attention_width * tokens / tensor
    if candidate.attention == "flash" and work.precision != "fp32":
        ramp = rate * cluster.gpu.flash * work.seq_len / (work.seq_len + FLASH_RAMP)
        ahead = scores / 2 / (ramp * FLASH_FORWARD)
        back = 2.5 * scores / 2 / (ramp * FLASH_BACKWARD)
    else:
        ahead, back = scores / (rate * EAGER_MATMUL), 2 * scores / (rate * EAGER_MATMUL)
    moved = layer_moved(shape, style, work.seq_len, candidate.attention)
    bandwidth = _memory_rate(cluster.gpu, work.kernels)

    def side(part: Moved, products: float, attention: float, matmuls: int) -> _Side:
        return _Side(
            matmul=products,
            attention=attention,
            elementwise=part.on(tensor, sequence=candidate.strategy.sequence) * tokens / bandwidth,
            kernels=part.kernels + matmuls,
        )

    return side(moved[0], ahead_s, ahead, 7), side(moved[1], back_s, back, 14)


def _head(work: Workload, candidate: Candidate, cluster: Cluster, rate: float) -> float:
    """Seconds of logits and loss, forward and backward."""
    shape, tensor = work.shape, candidate.strategy.tensor
    tokens = candidate.micro * work.seq_len
    aligned = (shape.vocab // tensor) % ALIGNMENT == 0 or work.precision == "fp32"
    products = 6.0 * shape.vocab * shape.width * tokens / tensor
    narrow = style_of(work, candidate).narrow
    in_place = work.loss.startswith("inplace") or work.kernels == "fused"
    moved = loss_bytes(shape.vocab, narrow, fused=in_place)
    seconds = products / (rate if aligned else rate * UNALIGNED_MATMUL[work.kernels])
    return seconds + moved * tokens / tensor / _memory_rate(cluster.gpu, work.kernels)


def _gradient_bytes(work: Workload, candidate: Candidate) -> float:
    """Bytes that accumulating and casting move per local parameter and micro-batch."""
    if work.precision == "fp32":
        return 12.0
    if candidate.strategy.autocast:
        # Weights to 16 bit (4 + 2), their gradients back (2 + 4), the sum in fp32 (12).
        return 24.0
    return 6.0


def local_parameters(work: Workload, candidate: Candidate) -> float:
    """Parameters that one rank computes with."""
    shape, strategy = work.shape, candidate.strategy
    inside = shape.layers * shape.layer_parameters / (strategy.tensor * strategy.pipeline)
    if strategy.pipeline == 1:
        return inside + shape.embedding_parameters / strategy.tensor
    return inside + shape.vocab * shape.width / strategy.tensor  # a table on either end


@lru_cache(maxsize=4096)
def micro_step(work: Workload, candidate: Candidate, cluster: Cluster) -> MicroTime:
    """Seconds of one micro-batch's forward and backward on the busiest pipeline stage, the last.

    Layers are divided equally, and head and loss come on top of the last stage's.
    """
    rate, source, basis = matmul_rate(work, cluster)
    forward, backward = _layer(work, candidate, cluster, rate)
    layers = work.shape.layers / candidate.strategy.pipeline
    head = _head(work, candidate, cluster, rate)
    gradients = (
        _gradient_bytes(work, candidate)
        * local_parameters(work, candidate)
        / _memory_rate(cluster.gpu, work.kernels)
    )
    recomputed = 1 if candidate.checkpointing else 0
    ahead = layers * forward.total + head / 3
    back = layers * (backward.total + recomputed * forward.total) + 2 * head / 3 + gradients
    kernels = layers * (forward.kernels * (1 + recomputed) + backward.kernels)
    waiting = max(0.0, kernels * LAUNCH_S[work.kernels] - (ahead + back))
    times = 1 + recomputed
    by_kind = {
        "matmul": layers * (forward.matmul * times + backward.matmul),
        "attention": layers * (forward.attention * times + backward.attention),
        "elementwise": layers * (forward.elementwise * times + backward.elementwise),
        "logits": head,
        "gradients": gradients,
        "launch": waiting,
    }
    value = ahead + back + waiting
    return MicroTime(
        forward_s=ahead + waiting / 3,
        backward_s=back + 2 * waiting / 3,
        figure=Figure(
            value=value,
            low=value * (1 - BAND),
            high=value * (1 + BAND),
            unit="s",
            source=source,
            basis=f"roofline over {basis} and memory bandwidth",
        ),
        by_kind=by_kind,
    )


def optimizer_seconds(work: Workload, candidate: Candidate, cluster: Cluster) -> Figure:
    """Seconds of Adam on what one rank owns, and of reading its gradients for the norm."""
    strategy = candidate.strategy
    local = local_parameters(work, candidate)
    sharded = strategy.family in ("fsdp2", "sharded") or strategy.stage >= 1
    owned = local / (candidate.data_ranks(cluster.world) if sharded else 1)
    gradient = 4.0 if strategy.autocast or work.precision == "fp32" else 2.0
    adam = ADAM_BYTES_AUTOCAST if gradient == 4.0 else ADAM_BYTES
    seconds = (adam * owned + gradient * local) / _memory_rate(cluster.gpu, work.kernels) + STEP_S
    return Figure(
        value=seconds,
        low=seconds * (1 - BAND),
        high=seconds * (1 + BAND),
        unit="s",
        source="table",
        basis=f"{adam:.0f} B per owned parameter at {cluster.gpu.name}'s memory bandwidth",
    )
