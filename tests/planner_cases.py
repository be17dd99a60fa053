"""Small, hand-computable inputs for the planner's tests."""

from __future__ import annotations

from recipes.planner.families import shape_of
from recipes.planner.figure import Figure, Source
from recipes.planner.hardware import Gpu, Nic
from recipes.planner.shape import Shape
from recipes.planner.strategies import data_parallel
from recipes.planner.workload import Candidate, Cluster, Strategy, Workload

# Round numbers: a matmul reaches its peak, a wave is always full.
GPU = Gpu(
    name="round",
    source="made up",
    memory_gib=80,
    flops_16bit=100e12,
    flops_32bit=10e12,
    matmul_share=1.0,
    sms=1,
    memory_bytes_per_s=1e12,
    link="nvswitch",
    link_bytes_per_s=100e9,
)
NIC = Nic(name="round", source="made up", bits_per_s=80e9, share=1.0)
XL: Shape = shape_of(
    {
        **{"model_type": "gpt2", "n_layer": 48, "n_embd": 1600, "n_head": 25},
        **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        "activation_function": "gelu_pytorch_tanh",
    },
    "GPT-2 XL",
)
LLAMA: Shape = shape_of({"model_type": "llama"}, "Llama 7B")
STRATEGIES = {strategy.name: strategy for strategy in data_parallel("fp16")}


def work(shape: Shape = XL, **changes: object) -> Workload:
    """The mission's update unless changed."""
    values = {"shape": shape, "seq_len": 1024, "global_sequences": 768} | changes
    return Workload(**values)  # type: ignore[arg-type]


def cluster(nodes: int = 2, gpus: int = 4, gpu: Gpu = GPU) -> Cluster:
    """Two nodes of four round GPUs unless changed."""
    return Cluster(gpu=gpu, nodes=nodes, gpus=gpus, nic=NIC if nodes > 1 else None)


def candidate(strategy: str | Strategy = "ZeRO-1", micro: int = 16, **changes: object) -> Candidate:
    """ZeRO-1 with the mission's micro-batch unless changed."""
    chosen = STRATEGIES[strategy] if isinstance(strategy, str) else strategy
    return Candidate(strategy=chosen, micro=micro, **changes)  # type: ignore[arg-type]


def banded(value: float, share: float, unit: str, source: Source, basis: str) -> Figure:
    """A value that may be off by `share` either way."""
    low, high = value * (1 - share), value * (1 + share)
    return Figure(value=value, low=low, high=high, unit=unit, source=source, basis=basis)
