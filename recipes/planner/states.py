"""Parameters, gradients, optimizer states and buffers of every strategy, in bytes on one GPU.

P: parameters of one rank's part of the model, N: data-parallel ranks, e: bytes of the compute type.

| strategy | parameters | gradients | masters | moments | buffers |
|---|---|---|---|---|---|
| ddp | 4P | 4P | - | 8P | 4P without bucket view (torch's DDP; stage 1: 8P/N) |
| deepspeed 0 | eP | eP | 4P | 8P | update: 8P (fused_optimizer.py, fp32 gradients twice) |
| deepspeed 1 | eP | eP | 4P/N | 8P/N | bucket (stage_1_and_2.py: setup_buckets to the boundary) |
| deepspeed 2 | eP | eP/N | 4P/N | 8P/N | bucket |
| deepspeed 3 | eP/N | eP/N | 4P/N | 8P/N | bucket, gathered parameters |
| fsdp2 | 4P/N | 4P/N | - | 8P/N | gathered layers, gradients on their way |
| sharded | eP | eP | 4P/N | 8P/N | - (the ZeRO paper's stage 1; stage 0: N = 1) |

As the ZeRO paper (Rajbhandari 2019) counts: K = 12 bytes of Adam and master per parameter. In fp32
there is no master, except where DeepSpeed keeps its own copy of the slice.
"""

from __future__ import annotations

from dataclasses import dataclass

from recipes.planner.activations import key_share
from recipes.planner.shape import Shape
from recipes.planner.workload import Strategy, Workload

MOMENTS = 8  # bytes per parameter of Adam's two moments (fp32)
MASTER = 4
# DeepSpeed's stage3_max_live_parameters and sub_group_size (elements), runtime/zero/config.py.
LIVE_PARAMETERS = 1_000_000_000
SUB_GROUP = 1_000_000_000
# Elements that DeepSpeed's stage 0 flattens at once: engine.py, buffered_allreduce_fallback.
FLATTENED = 500_000_000
# FSDP2 gathers the next layer while it computes one, and keeps one reduce-scatter's input alive
# beside the one it fills: torch/distributed/fsdp/_fully_shard, _fsdp_param_group.py.
GATHERED_LAYERS = 2
REDUCED_LAYERS = 2
# DDP's bucket where the strategy names none: bucket_cap_mb's 25 MiB, in fp32 elements.
DDP_BUCKET = 25 * 2**20 // 4
# Buckets of the 16-bit communication hook that are on the wire at once (assumed: the next one is
# filled while one is sent).
COMPRESSED_BUCKETS = 2


@dataclass(frozen=True, kw_only=True)
class Part:
    """Parameters of one pipeline stage on one tensor-parallel rank."""

    layers: int
    layer: float  # of one layer
    embedding: float  # tables, final norm and head, as far as they lie here
    first: bool = True
    last: bool = True

    @property
    def parameters(self) -> float:
        """All of them."""
        return self.layers * self.layer + self.embedding


@dataclass(frozen=True, kw_only=True)
class States:
    """Bytes on one GPU.

    Attributes:
        gradients: accumulated ones; `kept`: also before the first backward of a window.
        bucket: of the reduction; `bucket_kept`: from the start, otherwise from the first backward
            of a window to its end.
        gathered: parameters of other ranks, in forward and backward.
        flying: gradients of layers that backward has not given away yet (fsdp2).
        reduction, update: temporaries of these phases.
        left: gradients that are still there in the update.
    """

    parameters: float
    gradients: float
    masters: float = 0.0
    moments: float
    bucket: float = 0.0
    gathered: float = 0.0
    flying: float = 0.0
    reduction: float = 0.0
    update: float = 0.0
    left: float
    kept: bool = False
    bucket_kept: bool = False

    @property
    def standing(self) -> float:
        """Parameters, masters and moments: there all the time."""
        return self.parameters + self.masters + self.moments


def parts(shape: Shape, strategy: Strategy) -> tuple[Part, ...]:
    """The stages that may hold most: the only one, or the first and the last of a pipeline.

    Matrices, their inner biases and the vocabulary are divided among tensor ranks, norms and outer
    biases repeated; a tied matrix lies on both ends of a pipeline.
    """
    t, p = strategy.tensor, strategy.pipeline
    layer = _layer(shape, t)
    table = shape.vocab * shape.width / t
    positions = float(shape.positions * shape.width)
    layers = -(-shape.layers // p)
    if p == 1:
        whole = (1 if shape.tied else 2) * table + positions + shape.norm_size
        return (Part(layers=layers, layer=layer, embedding=whole),)
    return (
        Part(layers=layers, layer=layer, embedding=table + positions, last=False),
        Part(layers=layers, layer=layer, embedding=table + shape.norm_size, first=False),
    )


def _layer(shape: Shape, t: int) -> float:
    if shape.traced_parameters is not None:
        rest = shape.traced_parameters - shape.embedding_parameters - shape.norm_size
        return rest / shape.layers / t
    keys = 2 * shape.width * shape.kv_width / key_share(shape, t)
    found = 2 * shape.width * shape.attention_width / t + keys + shape.mlp_matrices / t
    if shape.qkv_bias:
        found += shape.attention_width / t + 2 * shape.kv_width / key_share(shape, t)
    if shape.out_bias:
        found += shape.width
    if shape.mlp_bias:
        found += (2 if shape.gated else 1) * shape.ffn / t + shape.width
    return found + 2 * shape.norm_size + (2 * shape.head_dim if shape.qk_norm else 0)


def states_of(work: Workload, strategy: Strategy, part: Part, ranks: int) -> States:
    """Bytes of one GPU that holds `part` and shares it with `ranks` data-parallel ranks."""
    value = 4 if work.precision == "fp32" else 2
    build = {"ddp": _ddp, "deepspeed": _deepspeed, "fsdp2": _fsdp2, "sharded": _sharded}
    return build[strategy.family](strategy, part, ranks, value)


def _ddp(strategy: Strategy, part: Part, ranks: int, value: int) -> States:
    number = part.parameters
    wire = 2 * COMPRESSED_BUCKETS * (strategy.bucket_elements or DDP_BUCKET)
    alone = ranks == 1
    return States(
        parameters=4 * number,
        gradients=4 * number,
        moments=MOMENTS * number / (ranks if strategy.stage else 1),
        bucket=0.0 if strategy.bucket_view or alone else 4 * number,
        reduction=min(wire, 2 * number) if strategy.compress and not alone else 0.0,
        left=4 * number,
        kept=strategy.bucket_view and not alone,
        bucket_kept=True,
    )


def _deepspeed(strategy: Strategy, part: Part, ranks: int, value: int) -> States:
    number, stage = part.parameters, strategy.stage
    share = number / ranks
    gradient = 4 if strategy.gradients32 else value
    if stage == 0:
        return States(
            parameters=value * number,
            gradients=gradient * number,
            masters=MASTER * number if value == 2 else 0.0,
            moments=MOMENTS * number,
            reduction=value * min(number, FLATTENED),
            # An fp32 copy of every gradient, and the flat tensor that they are put into, before
            # the 16-bit gradients are let go.
            update=8 * number if value == 2 else 0.0,
            left=gradient * number,
        )
    bucket = min(strategy.bucket_elements, number)
    flat = value * bucket  # the slices of a bucket are flattened into a second one
    # Averaged gradients of the own slice, and their fp32 copy for Adam.
    own, copy = value * share, 4 * share if value == 2 else 0.0
    gathered = 0.0
    if stage == 3:
        gathered = value * min(number - share, LIVE_PARAMETERS)
        copy = min(copy, 4 * SUB_GROUP)
    return States(
        parameters=value * (share if stage == 3 else number),
        gradients=gradient * (number if stage == 1 else share),
        masters=MASTER * share,
        moments=MOMENTS * share,
        bucket=value * bucket * (2 if strategy.overlap else 1),
        gathered=gathered,
        reduction=flat + (own if stage == 1 else 0.0),
        update=copy,
        left=own,
    )


def _fsdp2(strategy: Strategy, part: Part, ranks: int, value: int) -> States:
    share = part.parameters / ranks
    # The root (embedding, final norm, head) stays gathered from forward to the end of backward, and
    # so do its gradients, until they are reduced last. What a reduction fills is fp32 at most.
    layers = min(GATHERED_LAYERS, part.layers) * part.layer
    flying = value * (part.layer + part.embedding) + 4 * REDUCED_LAYERS * part.layer
    return States(
        parameters=4 * share,
        gradients=4 * share,
        moments=MOMENTS * share,
        gathered=value * (layers + part.embedding),
        flying=flying,
        reduction=(value + 4) * part.embedding,
        left=4 * share,
    )


def _sharded(strategy: Strategy, part: Part, ranks: int, value: int) -> States:
    number = part.parameters
    share = number / ranks if strategy.stage else number
    gradient = 4 if strategy.gradients32 else value
    return States(
        parameters=value * number,
        gradients=gradient * number,
        masters=MASTER * share if value == 2 else 0.0,
        moments=MOMENTS * share,
        left=gradient * number,
        kept=True,  # llm.c and Megatron allocate them once
    )
