"""What is planned, in plain values: the work, the machines, a strategy, a way to run it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from recipes.planner.hardware import Gpu, Nic
from recipes.planner.shape import Shape

Precision = Literal["fp32", "fp16", "bf16"]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One update of one model, however it is run.

    Attributes:
        seq_len: tokens of a sequence.
        global_sequences: sequences per update over all ranks.
        loss: full (all logits at once) or chunked (never all; recipes/model.py), and two that this
            recipe does not use: inplace (once in 16 bit, replaced by their gradient: flash-attn's
            and Liger's fused cross entropy) and inplace32 (an fp32 copy becomes probabilities and
            gradient: Megatron's vocabulary-parallel cross entropy).
        kernels: torch (one library kernel after another, as transformers runs uncompiled) or fused
            (torch.compile, or hand-fused element-wise kernels).
    """

    shape: Shape
    seq_len: int
    global_sequences: int
    precision: Precision = "fp16"
    loss: Literal["full", "chunked", "inplace", "inplace32"] = "chunked"
    kernels: Literal["torch", "fused"] = "torch"

    @property
    def global_tokens(self) -> int:
        """Token positions per update."""
        return self.global_sequences * self.seq_len


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """`nodes` equal machines with `gpus` GPUs each.

    Attributes:
        nic: all of a node's network together; None only for a single node.
        measured: by `octet preflight`, in place of table values (`recipes.planner.measured`).
    """

    gpu: Gpu
    nodes: int
    gpus: int
    nic: Nic | None = None
    measured: Measured | None = None

    @property
    def world(self) -> int:
        """GPUs in all."""
        return self.nodes * self.gpus


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a preflight measured, in place of the table; None where it did not."""

    path: str
    matmul_flops: float | None = None  # the slowest rank's rate, FLOP/s
    matmul_dtype: Precision = "bf16"  # of which fp16 is as fast
    within_bytes_per_s: float | None = None  # bus bandwidth of an all-reduce within a node
    within_latency_s: float | None = None
    between_bytes_per_s: float | None = None  # of a node's network, one way
    between_latency_s: float | None = None
    wrong_sums: int = 0  # all-reduces that were not taken since their result was wrong


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How states, gradients and layers are divided over ranks.

    Attributes:
        family: ddp (torch's, states whole on every rank, 16 bit by autocast), deepspeed (`stage` 0
            to 3, 16-bit parameters with fp32 masters), fsdp2 (torch's fully sharded), sharded (as
            the ZeRO paper has stage 1: reduce-scatter and all-gather; llm.c, Megatron's
            distributed optimizer).
        stage: of ZeRO. `sharded` at 0 keeps all states whole; `ddp` at 1 shares out the optimizer's
            (torch's ZeroRedundancyOptimizer).
        bucket_elements: DeepSpeed's reduce_bucket_size; DDP's bucket in fp32 elements.
        overlap: reduce while the last micro-batch's backward goes on (DDP always does).
        less_traffic: DeepSpeed's use_multi_rank_bucket_allreduce=false.
        bucket_view: DDP's gradient_as_bucket_view, with gradients zeroed where they lie, as this
            recipe does. Set to None (`zero_grad`'s default) they are made anew beside the buckets
            while micro-batches accumulate, as without it: False.
        compress: DDP's 16-bit communication hook.
        gradients32: 16-bit gradients are accumulated in fp32 (Megatron's with bf16; DeepSpeed's
            data_types.grad_accum_dtype).
        tensor, pipeline: ranks that share a layer, and stages that share the depth.
        chunks: of layers that each stage has in turn (Megatron's interleaved schedule).
        sequence: Megatron's sequence parallelism, beside `tensor`.
        config: the file of accelerate_configs/ that runs it; empty: this package has none yet.
    """

    name: str
    family: Literal["ddp", "deepspeed", "fsdp2", "sharded"]
    stage: int = 0
    bucket_elements: int = 0
    overlap: bool = False
    less_traffic: bool = False
    bucket_view: bool = True
    compress: bool = False
    gradients32: bool = False
    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1
    sequence: bool = False
    config: str = ""

    @property
    def autocast(self) -> bool:
        """Whether parameters stay fp32 and each operation casts (DDP); otherwise 16-bit copies."""
        return self.family == "ddp"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A strategy with everything that decides memory and speed."""

    strategy: Strategy
    micro: int  # sequences per rank and forward
    checkpointing: bool = False
    attention: Literal["flash", "eager"] = "flash"  # flash: sdpa or flash_attention_2

    def data_ranks(self, world: int) -> int:
        """The data-parallel size N."""
        return world // (self.strategy.tensor * self.strategy.pipeline)

    def accumulation(self, work: Workload, world: int) -> int:
        """Micro-batches per rank and update; the caller has checked that it is whole."""
        return work.global_sequences // (self.data_ranks(world) * self.micro)
