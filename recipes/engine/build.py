"""From a strategy to prepared objects, and back: what the engine uses is read and compared."""

from __future__ import annotations

import logging
import os
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DDPCommunicationHookType,
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
)
from torch import nn

from recipes.config import Optim, Run
from recipes.engine.peers import Peers
from recipes.engine.strategy import Strategy, filled
from recipes.engine.topology import Row, refuse
from recipes.objective import BatchPlan

logger = logging.getLogger(__name__)

# torch's GradScaler under DDP starts where ds_configs/*fp16*.json start DeepSpeed's.
DDP_INITIAL_SCALE = 2.0**15
DDP_SCALE_WINDOW = 1000


@dataclass(frozen=True, kw_only=True)
class Engine:
    """The prepared objects that the update and the state work on."""

    accelerator: Accelerator
    model: Any  # DeepSpeedEngine or DistributedDataParallel; call it, never the module inside
    module: Any  # the SummedLoss inside
    optimizer: Any  # Accelerate's wrapper
    strategy: Strategy
    plan: BatchPlan
    peers: Peers
    clip: float

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.accelerator.device

    @property
    def inner_optimizer(self) -> Any:
        """DeepSpeed's optimizer, or torch's own under DDP."""
        return self.optimizer.optimizer


def start(strategy: Strategy, run: Run, plan: BatchPlan, *, cpu: bool) -> Accelerator:
    """Start the process group, Accelerate and DeepSpeed; nothing is built yet.

    Raises:
        ValueError: the precision can't take effect on this device.
    """
    # DeepSpeed calls a collective by its older name, once per rank and start.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    if cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"  # Accelerate imports DeepSpeed for DDP too
    os.environ["ACCELERATE_USE_DEEPSPEED"] = str(strategy.kind == "DEEPSPEED").lower()
    if strategy.kind == "DDP":
        if strategy.precision == "fp16" and cpu:
            raise ValueError(
                f"{strategy.title} on the CPU: Accelerate turns fp16 off without a word "
                "there; use bf16, or rehearse fp16 with accelerate_configs/local_zero1_fp16.yaml"
            )
        return _start_ddp(strategy, run, plan, cpu)
    # With it Accelerate would ignore DeepSpeed and wrap the model in plain DDP.
    os.environ.pop("ACCELERATE_USE_CPU", None)
    if cpu:
        _prepare_deepspeed_for_cpu(strategy)
    logging.getLogger("DeepSpeed").setLevel(
        logging.WARNING
    )  # it tells every skipped and unskipped step
    plugin = DeepSpeedPlugin(hf_ds_config=filled(strategy, run, plan))
    # Without a named backend Accelerate counts one process on every rank of a CPU job.
    handlers: list[Any] = [InitProcessGroupKwargs(backend="gloo")] if cpu else []
    return Accelerator(
        deepspeed_plugin=plugin,
        gradient_accumulation_plugin=_accumulation(plan),
        kwargs_handlers=handlers,
        mixed_precision="no" if strategy.precision == "fp32" else strategy.precision,
        log_with=list(run.log.trackers) or None,
        project_dir=str(run.folder / "trackers"),
    )


def _accumulation(plan: BatchPlan) -> GradientAccumulationPlugin:
    # Windows are always whole, so the end of a loader must never force a short one.
    return GradientAccumulationPlugin(num_steps=plan.accumulation, sync_with_dataloader=False)


def _prepare_deepspeed_for_cpu(strategy: Strategy) -> None:
    import deepspeed.ops
    from deepspeed.accelerator import get_accelerator

    # Its shared-memory operator is compiled for a minute at the first start, and a start that is
    # killed meanwhile leaves a lock that hangs every later one. It would also keep ranks on two
    # "hosts" of one machine off the wire.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if strategy.precision == "fp16":
        # Refused without native half arithmetic; the emulated one is right, about ten times slower
        # than bf16.
        type(get_accelerator()).is_fp16_supported = lambda self: True
        logger.info(
            "fp16 on the CPU is emulated and slow: for rehearsing loss scaling on a tiny model only"
        )


def _start_ddp(strategy: Strategy, run: Run, plan: BatchPlan, cpu: bool) -> Accelerator:
    knobs = run.ddp
    auto = run.batch.micro == "auto"  # which promises no accumulation of 1
    if knobs.static_graph and (auto or plan.accumulation > 1):
        given = "batch.micro=auto" if auto else f"accumulation {plan.accumulation}"
        raise ValueError(
            f"ddp.static_graph=true can't work with {given}: DDP expects every backward to "
            "reduce; set it to false"
        )
    if knobs.compress == "bf16" and cpu:
        raise ValueError(
            "ddp.compress=bf16 can't take effect on the CPU: torch has that hook on NCCL only; use "
            "no or fp16"
        )
    handlers: list[Any] = [
        DistributedDataParallelKwargs(
            bucket_cap_mb=knobs.bucket_cap_mb,
            gradient_as_bucket_view=knobs.gradient_as_bucket_view,
            static_graph=knobs.static_graph,
            # A plain string finds no hook there, without a word.
            comm_hook=DDPCommunicationHookType(knobs.compress),
        ),
        GradScalerKwargs(init_scale=DDP_INITIAL_SCALE, growth_interval=DDP_SCALE_WINDOW),
    ]
    return Accelerator(
        cpu=cpu,
        mixed_precision="no" if strategy.precision == "fp32" else strategy.precision,
        gradient_accumulation_plugin=_accumulation(plan),
        kwargs_handlers=handlers,
        log_with=list(run.log.trackers) or None,
        project_dir=str(run.folder / "trackers"),
    )


def build_optimizer(module: nn.Module, optim: Optim, device: torch.device) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices and embeddings only, fused on GPUs."""
    named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for _, p in named if p.ndim >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (optim.betas[0], optim.betas[1])
    return torch.optim.AdamW(
        [g for g in groups if g["params"]],
        lr=optim.lr,
        betas=betas,
        eps=optim.eps,
        fused=device.type == "cuda",
    )


def prepare(
    accelerator: Accelerator,
    module: nn.Module,
    strategy: Strategy,
    run: Run,
    plan: BatchPlan,
    peers: Peers,
) -> Engine:
    """Wrap the module for the strategy and verify by reading back.

    Raises:
        ValueError: the module's trainable parameters are not fp32, or batch norm can't be
            synchronised here. TopologyError: the engine uses another number than the one it was
            given.
    """
    low = sorted(
        {str(p.dtype) for p in module.parameters() if p.requires_grad and p.dtype != torch.float32}
    )
    if low:
        raise ValueError(
            f"the model was built with {', '.join(low)} parameters; expected torch.float32 for all"
        )
    module = _synchronised(module, run, plan.world, accelerator.device)
    optimizer = build_optimizer(module, run.optim, accelerator.device)
    # The training loader is never prepared: Accelerate would split the already split stream again.
    model, wrapped = accelerator.prepare(module, optimizer)
    engine = Engine(
        accelerator=accelerator,
        model=model,
        module=accelerator.unwrap_model(model),
        optimizer=wrapped,
        strategy=strategy,
        plan=plan,
        peers=peers,
        clip=run.optim.clip,
    )
    if strategy.stage == 0:
        _mend_stage0(engine)
    refuse(
        read_back(engine, run),
        ["a library changed what a key means; run make test with these versions"],
    )
    return engine


def _synchronised(module: nn.Module, run: Run, world: int, device: torch.device) -> nn.Module:
    """Batch norm whose statistics are over all ranks, for models that have batch norm."""
    has_batch_norm = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules())
    if not has_batch_norm or world == 1 or not run.model.sync_batch_norm:
        return module
    if device.type == "cpu":
        raise ValueError(
            "the model has batch norm, which can't be synchronised on the CPU; "
            "set model.sync_batch_norm=false"
        )
    return nn.SyncBatchNorm.convert_sync_batchnorm(module)


def _mend_stage0(engine: Engine) -> None:
    """Undo the update on zero gradients with which DeepSpeed's 16-bit wrapper creates Adam's state.

    It advances Adam's step counter, so that the first real update would be 0.735 of what it should
    be, and it decays the fp32 weights once. (The loss scale that stage 0 leaves out is applied in
    `update.backward`.)
    """
    inner = engine.inner_optimizer
    for adam_state in inner.optimizer.state.values():
        adam_state["step"].zero_()
    for low, high in zip(inner.fp16_groups, inner.fp32_groups, strict=True):
        for parameter, master in zip(low, high, strict=True):
            master.data.copy_(parameter.data)


def read_back(engine: Engine, run: Run) -> list[Row]:
    """What the engine will really do, beside what was asked for."""
    plan, strategy, model = engine.plan, engine.strategy, engine.model
    used = engine.accelerator.gradient_accumulation_steps
    pairs: list[tuple[str, Any, Any]] = [("accumulation: Accelerate", used, plan.accumulation)]
    if strategy.kind == "DDP":
        native = engine.accelerator.native_amp or strategy.precision == "fp32"
        pairs += [
            ("wrapped in DistributedDataParallel", type(model).__name__, "DistributedDataParallel"),
            ("precision", strategy.precision if native else "fp32", strategy.precision),
            ("gradients compressed", _compression(model), run.ddp.compress),
            ("loss scaler", engine.accelerator.scaler is not None, strategy.precision == "fp16"),
        ]
    else:
        zero = (strategy.deepspeed or {})["zero_optimization"]
        pairs += [
            ("micro-batch", model.train_micro_batch_size_per_gpu(), plan.micro),
            ("accumulation: DeepSpeed", model.gradient_accumulation_steps(), plan.accumulation),
            ("global batch", model.train_batch_size(), plan.global_sequences),
            ("clipping", float(model.gradient_clipping()), float(run.optim.clip)),
            ("ZeRO stage", int(model.zero_optimization_stage()), strategy.stage),
            ("precision", _engine_precision(model), strategy.precision),
        ]
        if strategy.stage == 1:
            pairs += [
                ("reduce bucket", int(model.zero_reduce_bucket_size()), zero["reduce_bucket_size"]),
                (
                    "gather bucket",
                    int(model.zero_allgather_bucket_size()),
                    zero["allgather_bucket_size"],
                ),
                (
                    "reduce bucket: optimizer",
                    int(engine.inner_optimizer.reduce_bucket_size),
                    zero["reduce_bucket_size"],
                ),
            ]
        if strategy.precision == "fp16":
            power = (strategy.deepspeed or {})["fp16"].get("initial_scale_power", 16)
            pairs.append(
                ("initial loss scale", float(engine.inner_optimizer.loss_scale), float(2**power))
            )
    return [
        Row(what=what, found=str(found), expected=str(expected)) for what, found, expected in pairs
    ]


def _compression(model: Any) -> str:
    """The 16-bit hook that DDP sends its gradients through, which torch tells no public way."""
    names = [getattr(hook, "__name__", "") for hook, _ in model._comm_hooks]
    return names[0].removesuffix("_compress_hook") if names else "no"


def _engine_precision(model: Any) -> str:
    if model.fp16_enabled():
        return "fp16"
    return "bf16" if model.bfloat16_enabled() else "fp32"
