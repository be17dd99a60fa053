"""Every strategy that the plan compares, and why one can't be.

The list is one with the files of accelerate_configs/: a strategy whose `config` is empty can't be
run by this package yet, and the plan says so.
"""

from __future__ import annotations

from dataclasses import replace

from recipes.planner.workload import Cluster, Precision, Strategy, Workload

# Elements: what ds_configs/*.json have, and bucket_cap_mb: 100 of recipes/config.py in fp32.
BUCKET = 100_000_000
DDP_BUCKET = 100 * 2**20 // 4
FSDP2 = Strategy(name="FSDP2", family="fsdp2", stage=3, overlap=True)


def data_parallel(precision: Precision) -> tuple[Strategy, ...]:
    """Strategies that keep a layer whole on every rank."""
    shipped = precision != "fp32"  # no file of accelerate_configs/ trains in fp32
    zero1 = Strategy(
        name="ZeRO-1",
        family="deepspeed",
        stage=1,
        bucket_elements=BUCKET,
        config=f"accelerate_configs/zero1_{precision}.yaml" if shipped else "",
    )
    ddp = Strategy(
        name="DDP",
        family="ddp",
        bucket_elements=DDP_BUCKET,
        overlap=True,
        config=f"accelerate_configs/ddp_{precision}.yaml" if shipped else "",
    )
    zero0_file = "accelerate_configs/zero0_fp16.yaml" if precision == "fp16" else ""
    plain = replace(zero1, config="")
    return (
        zero1,
        replace(zero1, name="ZeRO-1, overlap_comm", overlap=True),
        replace(zero1, name="ZeRO-1, less traffic", less_traffic=True, config=_less(precision)),
        replace(zero1, name="ZeRO-0", stage=0, bucket_elements=0, config=zero0_file),
        ddp,
        replace(ddp, name="DDP, 16 bit on the wire", compress=True),
        replace(ddp, name="DDP, no bucket view", bucket_view=False),
        replace(plain, name="ZeRO-2", stage=2),
        replace(plain, name="ZeRO-2, overlap_comm", stage=2, overlap=True),
        replace(plain, name="ZeRO-3", stage=3, overlap=True),
        FSDP2,
    )


def _less(precision: Precision) -> str:
    return "ds_configs/zero1_fp16_less_traffic.json" if precision == "fp16" else ""


def model_parallel(cluster: Cluster) -> tuple[Strategy, ...]:
    """Tensor, sequence and pipeline parallelism and their products, ZeRO-1 over the rest."""
    base = Strategy(name="", family="sharded", stage=1, overlap=True)
    sizes = [n for n in (2, 4, 8) if n <= cluster.world]
    found = []
    for tensor in sizes:
        found.append(replace(base, name=f"TP {tensor}", tensor=tensor))
        found.append(replace(base, name=f"TP {tensor} + SP", tensor=tensor, sequence=True))
    for tensor in sizes:
        name = f"FSDP2 x TP {tensor} + SP"
        found.append(replace(FSDP2, name=name, tensor=tensor, sequence=True))
    for pipeline in sizes:
        found.append(replace(base, name=f"PP {pipeline}", pipeline=pipeline))
    for tensor in sizes:
        for pipeline in sizes:
            if tensor * pipeline <= cluster.world:
                name = f"TP {tensor} + SP x PP {pipeline}"
                found.append(
                    replace(base, name=name, tensor=tensor, pipeline=pipeline, sequence=True)
                )
    return tuple(found)


def strategies(precision: Precision, cluster: Cluster) -> tuple[Strategy, ...]:
    """All of them, those without communication over ranks left out on one GPU."""
    if cluster.world == 1:
        return tuple(s for s in data_parallel(precision) if s.name in ("ZeRO-1", "ZeRO-0", "DDP"))
    return data_parallel(precision) + model_parallel(cluster)


def obstacle(strategy: Strategy, work: Workload, cluster: Cluster) -> str:
    """Why a strategy can't be, whatever fits; empty if it can."""
    shape, tensor, pipeline = work.shape, strategy.tensor, strategy.pipeline
    if tensor > cluster.gpus:
        return f"{tensor} ranks share every layer but a node has {cluster.gpus} GPUs"
    if cluster.gpus % tensor:
        return f"a node's {cluster.gpus} GPUs don't divide by {tensor}"
    if shape.heads % tensor:
        return f"{shape.heads} heads don't divide by {tensor}"
    if shape.kv_heads % tensor:
        return f"{shape.kv_heads} key-value heads don't divide by {tensor}"
    if shape.ffn % tensor:
        return f"a feed-forward width of {shape.ffn} doesn't divide by {tensor}"
    if strategy.sequence and work.seq_len % tensor:
        return f"sequences of {work.seq_len} don't divide by {tensor}"
    if shape.layers % pipeline:
        return f"{shape.layers} layers don't divide by {pipeline}"
    if cluster.world % (tensor * pipeline):
        return f"{cluster.world} GPUs don't divide by {tensor * pipeline}"
    ranks = cluster.world // (tensor * pipeline)
    if work.global_sequences % ranks:
        return f"{work.global_sequences} sequences don't divide among {ranks} data-parallel ranks"
    return ""
