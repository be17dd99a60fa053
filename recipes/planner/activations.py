"""What autograd keeps for backward, in closed form, from a shape's attributes.

Counted by what each operation of transformers' own modules saves on a GPU, one kernel after another
(`kernels="torch"`); `octet plan --trace` counts the same on the real model, and tests hold the two
together within one per cent. With every activation in 16 bit, GPT-2's layer is Korthikanti's
34·s·b·h + 5·a·s²·b ("Reducing Activation Recomputation", 2022, equation 1), plus 24·s·b·h for its
unfused activation; his division by tensor and sequence parallelism (equations 2 and 4) is used too.

`kernels="fused"` is a hand-fused model (llm.c, flash-attn's, Megatron's) that recomputes nothing:
a norm saves its input and output, an activation likewise, a gated one gate, up and product; rotary
positions, masked softmax and scaling work in place. torch.compile's partitioner recomputes some of
these outputs, so it takes this or less.
"""

from __future__ import annotations

from dataclasses import dataclass

from recipes.planner.functions import activation_of
from recipes.planner.shape import Shape
from recipes.planner.workload import Candidate, Strategy, Workload

MASK = 1  # bytes per element of a dropout mask on a GPU (bool, from native_dropout)
STATISTIC = 4  # bytes of a norm's mean or reciprocal deviation, and of flash's log-sum-exp (fp32)
INDEX = 8  # bytes of a token number, a position or a label (int64)
# An activation function that saves as many is made of torch operators, products among them.
PYTHON_TENSORS = 3
FLASH_MULTIPLE = 8  # torch pads a head to a multiple of this (sdp's pad_last_dim<8>)


@dataclass(frozen=True, kw_only=True)
class Case:
    """The sizes that every term below needs.

    Attributes:
        value: bytes of an element that a matrix product reads.
        stream: bytes of an element between the layers (fp32 under autocast).
        casts: autocast makes 16-bit copies of weights and inputs.
        whole: tokens of a micro-batch that a rank holds of what tensor parallelism leaves whole.
        split: tokens by which a divided width counts: tokens / tensor ranks.
    """

    value: int
    stream: int
    casts: bool
    fused: bool
    tokens: int
    whole: float
    split: float


def case_of(work: Workload, candidate: Candidate) -> Case:
    """The sizes for one micro-batch on one GPU."""
    strategy = candidate.strategy
    tokens = work.seq_len * candidate.micro
    value = 4 if work.precision == "fp32" else 2
    casts = value == 2 and strategy.autocast
    return Case(
        value=value,
        stream=4 if casts else value,
        casts=casts,
        fused=work.kernels == "fused",
        tokens=tokens,
        whole=tokens / (strategy.tensor if strategy.sequence else 1),
        split=tokens / strategy.tensor,
    )


def key_share(shape: Shape, tensor: int) -> int:
    """Among how many of the tensor ranks keys and values are divided; the others repeat them."""
    return min(tensor, shape.kv_heads)


def layer_bytes(work: Workload, candidate: Candidate) -> dict[str, float]:
    """Bytes of one layer for one micro-batch on one GPU, by kind, without checkpointing.

    Kinds: norms (with the inputs of the matrices behind them), attention, softmax (eager only),
    feed-forward, masks (of dropout), weight copies (autocast's, alive while the graph is).
    """
    shape, case = work.shape, case_of(work, candidate)
    kinds = {
        "norms": _norms(shape, case),
        "attention": _attention(shape, case, candidate),
        "softmax": 0.0,
        "feed-forward": case.split * shape.ffn * _feed_forward(shape, case),
        "masks": 0.0,
        "weight copies": 0.0,
    }
    if shape.dropout:
        kinds["masks"] += 2.0 * MASK * case.whole * shape.width
    if candidate.attention == "eager":
        _scores(kinds, work, case)
    if case.casts:
        elements = shape.attention_matrices + shape.mlp_matrices
        kinds["weight copies"] = case.value * elements / candidate.strategy.tensor
    return kinds


def _norms(shape: Shape, case: Case) -> float:
    """Inputs and statistics of the norms, and their outputs: the inputs of the matrices."""
    inputs = 1 if shape.parallel else 2
    copies = 2
    if case.casts and not case.fused:
        # Every matrix casts the fp32 output for itself.
        copies = (1 if shape.fused_qkv else 3) + (2 if shape.gated else 1)
    outputs = copies * case.value
    if shape.norm == "layer":
        saved = inputs * case.stream + outputs
        statistics = 2 * 2 * STATISTIC
    elif case.fused:
        saved, statistics = inputs * case.stream + outputs, 2 * STATISTIC
    else:
        # transformers' RMS norm: the input in fp32, a copy unless it is fp32 already, and the
        # normalised value, which its weight multiplies.
        in_fp32 = 4 * (inputs if case.stream == 4 else 2)
        saved, statistics = in_fp32 + 2 * case.stream + outputs, 2 * STATISTIC
    total = case.whole * (shape.width * saved + statistics)
    if shape.qk_norm:
        heads = case.split * (shape.attention_width + shape.kv_width)
        per_head = case.split * (shape.heads + shape.kv_heads) * STATISTIC
        total += heads * (case.value if case.fused else 4 + case.value) + per_head
    return total


def _attention(shape: Shape, case: Case, candidate: Candidate) -> float:
    """Queries, keys, values, and the output that the last matrix reads."""
    queries = case.split * shape.attention_width
    keys = case.tokens / key_share(shape, candidate.strategy.tensor) * shape.kv_width
    copied = shape.fused_qkv and shape.positions == 0 and not case.fused
    elements = 2 * queries  # queries and output
    statistics = 0.0
    if candidate.attention == "eager":
        elements += 2 * queries  # keys and values, repeated for every head
        if copied and candidate.micro == 1:
            elements += 2 * queries  # one sequence's values are a view: all of their tensor stays
    else:
        elements += 2 * keys
        statistics = STATISTIC * case.split * shape.heads
        if copied:
            # Rotated queries and keys are new tensors; the values, a view, hold the old ones. They
            # lie head by head, and so does flash's output, which is copied for the last matrix.
            elements += queries + keys + queries
        if shape.head_dim % FLASH_MULTIPLE:
            padded = -(-shape.head_dim // FLASH_MULTIPLE) * FLASH_MULTIPLE / shape.head_dim
            elements = padded * elements + queries  # and the output without the padding
    return case.value * elements + statistics


def _scores(kinds: dict[str, float], work: Workload, case: Case) -> None:
    """Add what eager attention keeps of its seq_len × seq_len probabilities."""
    shape = work.shape
    scores = case.split * work.seq_len * shape.heads
    wide = case.casts or shape.softmax32 or case.value == 4
    softmax = 4 if wide and not case.fused else case.value
    kinds["softmax"] = scores * softmax
    if shape.attention_dropout:
        kinds["masks"] += scores * MASK
    if shape.attention_dropout or softmax != case.value:
        kinds["softmax"] += scores * case.value  # dropped or cast, for the product with the values


def _feed_forward(shape: Shape, case: Case) -> float:
    """Bytes per element of the inner width."""
    saved = activation_of(shape)
    if case.fused:
        return case.value * (3 if shape.gated else min(2, saved.tensors))
    if case.casts:
        return saved.gated if shape.gated else saved.autocast
    return case.value * (saved.tensors + (2 if shape.gated else 0))


def kept_input(work: Workload, candidate: Candidate) -> float:
    """Bytes that gradient checkpointing keeps of one layer: its input."""
    case = case_of(work, candidate)
    return case.whole * work.shape.width * case.stream


def causal_mask(work: Workload, candidate: Candidate) -> float:
    """Bytes of the additive mask that transformers builds once per forward for eager attention."""
    if candidate.attention == "flash" or work.kernels == "fused":
        return 0.0
    return candidate.micro * work.seq_len**2 * float(case_of(work, candidate).stream)


def shares_kept_input(work: Workload, candidate: Candidate) -> bool:
    """Whether a recomputed layer's first norm saves the kept input itself, not an fp32 copy."""
    case = case_of(work, candidate)
    return work.shape.norm == "layer" or case.fused or case.stream == 4


def layer_transient(work: Workload, candidate: Candidate) -> float:
    """What one layer's backward holds at its peak beside what was saved.

    The gradient between the layers, and the larger of: the inner width's gradient with the largest
    matrix's, before that is added up; both factors' gradients of a product of that width; eager
    attention's gradient of the probabilities before and after the softmax, when all that lies
    behind it is free.
    """
    shape, case = work.shape, case_of(work, candidate)
    inner = case.split * shape.ffn * case.value
    matrix = shape.width * shape.ffn / candidate.strategy.tensor
    matrix *= case.value + 4 if case.casts else case.value
    peak = max(inner + matrix, _product(shape, case) * case.split * shape.ffn)
    if candidate.attention == "eager":
        kinds = {"masks": 0.0}
        _scores(kinds, work, case)
        softmax = 4 if case.casts or shape.softmax32 else case.value
        gradients = 2 * softmax * case.split * work.seq_len * shape.heads
        freed = case.split * shape.ffn * _feed_forward(shape, case) + _norms(shape, case) / 2
        freed += case.split * shape.attention_width * case.value
        freed += max(0.0, kinds["softmax"] - softmax * case.split * work.seq_len * shape.heads)
        peak = max(peak, gradients - freed)
    return case.whole * shape.width * case.stream + peak


def _product(shape: Shape, case: Case) -> int:
    """Bytes per inner element that a product's backward adds: three gradients less its result."""
    if activation_of(shape).tensors < PYTHON_TENSORS or case.fused:
        return 2 * case.value if shape.gated else 0
    return 3 * 4 - case.value if case.casts else 2 * case.value


# ---- embedding, head and loss


def head_bytes(work: Workload, candidate: Candidate) -> dict[str, float]:
    """Bytes beside the layers for one micro-batch on one GPU.

    Saved until backward: embedding (dropout mask, token numbers, rotary tables), final norm (with
    the head's input), logits (what the loss keeps), weight copies (autocast's, of the head).
    While it lasts, on top of those: loss forward, loss backward. After the loss, until the layers'
    backward is done: head gradient, which a tied matrix's sum waits for.

    Full loss (`SummedLoss`): logits in the compute type, their fp32 copy and the fp32
    log-probabilities in forward; the latter are kept, and backward makes two fp32 gradients.
    `inplace`: logits that their gradient overwrites (llm.c's fused_classifier, flash-attn's
    inplace_backward).
    """
    shape, case = work.shape, case_of(work, candidate)
    tensor = candidate.strategy.tensor
    rows = case.whole * shape.width
    mask = MASK * rows if shape.dropout else 0.0
    rotary = 0 if shape.positions else 2 * work.seq_len * shape.head_dim * case.stream
    if shape.norm == "layer" or case.fused:
        norm = rows * case.stream + 2 * STATISTIC * case.whole
    else:
        norm = rows * (4 + case.stream) + STATISTIC * case.whole
    matrix = shape.vocab * shape.width / tensor
    found = {
        "embedding": mask + 2 * INDEX * case.tokens + rotary,
        "final norm": norm + rows * case.value,
        "weight copies": matrix * case.value if case.casts else 0.0,
        "head gradient": matrix * (4 if case.casts else case.value),
    }
    return found | _loss(work, case, candidate.strategy)


def _loss(work: Workload, case: Case, strategy: Strategy) -> dict[str, float]:
    logits = case.split * work.shape.vocab
    if work.loss == "chunked":
        forward, backward = _chunks(work, case, strategy.tensor)
        return {"logits": 0.0, "loss forward": forward, "loss backward": backward}
    if work.loss == "inplace":
        return {"logits": case.value * logits, "loss forward": 0.0, "loss backward": 0.0}
    low = case.value * logits if case.value == 2 else 0.0
    if case.fused or work.loss == "inplace32":
        # Megatron's vocab_parallel_cross_entropy: 16-bit logits, an fp32 copy that becomes the
        # probabilities and then their gradient, and the 16-bit gradient.
        return {"logits": 4 * logits, "loss forward": low, "loss backward": low}
    forward = low + 4 * logits
    return {"logits": 4 * logits, "loss forward": forward, "loss backward": 8 * logits}


def _chunks(work: Workload, case: Case, tensor: int) -> tuple[float, float]:
    """What torch's chunked `linear_cross_entropy` holds in forward and in backward, on a GPU.

    torch 2.13, `torch/nn/modules/linear_cross_entropy.py`, policy compact, reduction none: one
    buffer of a chunk's logits (fp16: 16 bit; bf16: fp32 and a 16-bit copy; fp32: fp32); in backward
    the gradients of input and matrix, and a chunk of the input in fp32.
    """
    shape = work.shape
    chunk = chunk_rows(case.tokens, shape.width, shape.vocab)
    buffer = {"fp16": 2, "bf16": 4, "fp32": 4}[work.precision] * chunk * shape.vocab / tensor
    copies = 2 * chunk * shape.vocab / tensor if work.precision == "bf16" else 0.0
    rows = 4 * chunk * shape.width if case.value == 2 else 0.0
    gradients = case.tokens * shape.width + shape.vocab * shape.width / tensor
    return buffer, buffer + copies + rows + case.value * gradients


def chunk_rows(tokens: int, width: int, vocab: int) -> int:
    """Rows of one chunk of logits: torch's `aspect_ratio:2`, its choice on GPUs."""
    target = -(-tokens // -(-vocab // width))
    return max(1, min((1 << (target - 1).bit_length()) // 2, tokens))
