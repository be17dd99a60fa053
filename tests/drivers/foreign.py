"""Checkpoints that other projects would leave behind, written by Accelerate and DeepSpeed.

torchrun --nproc_per_node 2 tests/drivers/foreign.py FOLDER

FOLDER/NAME is the checkpoint, FOLDER/NAME.truth what the engine held, by parameter name.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

SHAPE = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 16, "vocab_size": 300}
DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
UPDATES = 3
MOMENTS = ("exp_avg", "exp_avg_sq")


class Wrapped(nn.Module):
    """A model one level down, as many recipes hold it."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, **batch: torch.Tensor) -> Any:
        return self.network(**batch)


def model(wrapped: bool = False, untied: bool = False) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model("gpt2", **SHAPE, **DROPOUT, tie_word_embeddings=not untied)
    network = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return Wrapped(network) if wrapped else network


def adam(module: nn.Module, groups: str) -> torch.optim.AdamW:
    named = list(module.named_parameters())
    if groups == "one":
        return torch.optim.AdamW(module.parameters(), lr=0.01)
    if groups == "named":
        return torch.optim.AdamW(named[::-1], lr=0.01)
    parts = [[p for _, p in named if p.ndim >= 2], [p for _, p in named if p.ndim < 2]]
    return torch.optim.AdamW([{"params": part, "weight_decay": 0.1} for part in parts], lr=0.01)


def batch(number: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1000 * dist.get_rank() + number)
    ids = torch.randint(0, SHAPE["vocab_size"], (1, 16), generator=draw)
    return {"input_ids": ids, "labels": ids}


def plainly(name: str) -> str:
    return name.removeprefix("module.").removeprefix("network.")


def write_truth(path: Path, arrays: Iterator[tuple[str, torch.Tensor]], step: int) -> None:
    held = {name: value.detach().clone().contiguous() for name, value in arrays}
    if dist.get_rank() == 0:
        path.mkdir()
        save_file(held, path / "arrays.safetensors")
        (path / "step").write_text(str(step))


def zero_truth(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in module.named_parameters():
        yield f"weight/{plainly(name)}", safe_get_full_fp32_param(parameter)
        for kind in MOMENTS:
            yield f"{kind}/{plainly(name)}", safe_get_full_optimizer_state(parameter, kind)


def torch_truth(module: nn.Module, optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in module.named_parameters():
        yield f"weight/{plainly(name)}", parameter
        for kind in MOMENTS:
            yield f"{kind}/{plainly(name)}", optimizer.state[parameter][kind]


def stage0_truth(module: nn.Module, optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    names = {id(parameter): plainly(name) for name, parameter in module.named_parameters()}
    for low, high in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
        for parameter, master in zip(low, high, strict=True):
            name = names[id(parameter)]
            yield f"weight/{name}", master
            for kind in MOMENTS:
                yield f"{kind}/{name}", optimizer.optimizer.state[master][kind]


def link(zero: Any) -> None:
    """DeepSpeed links the moments of its first parameter group only."""
    zero._hp_optimizer_states_linked = False
    zero._lazy_init_hp_params_optimizer_state()


def ddp(folder: Path, name: str, precision: str, groups: str, wrapped: bool, safe: bool) -> None:
    forget()
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "false"
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    module = model(wrapped)
    prepared, optimizer = accelerator.prepare(module, adam(module, groups))
    for number in range(UPDATES):
        accelerator.backward(prepared(**batch(number)).loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(str(folder / name), safe_serialization=safe)
    plain = accelerator.unwrap_model(prepared)
    write_truth(folder / f"{name}.truth", torch_truth(plain, optimizer.optimizer), UPDATES)


def config(stage: int, precision: str, more: dict[str, Any]) -> dict[str, Any]:
    zero = {"stage": stage, "reduce_bucket_size": 500, "allgather_bucket_size": 500}
    tree: dict[str, Any] = {"zero_optimization": zero | more.pop("zero", {})}
    tree |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    tree |= {"train_batch_size": dist.get_world_size() if dist.is_initialized() else 2}
    tree |= {"steps_per_print": 10**9, "zero_allow_untested_optimizer": True}
    if precision == "fp16":
        tree["fp16"] = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}
    if precision == "bf16":
        tree["bf16"] = {"enabled": True}
    return tree | more


def forget() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    GradientState._reset_state()


def accelerated(folder: Path, name: str, precision: str, groups: str, wrapped: bool) -> None:
    """DeepSpeed under Accelerate, saved by `save_state`."""
    forget()
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config(1, precision, {})),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
        mixed_precision=precision,
    )
    module = model(wrapped)
    engine, optimizer = accelerator.prepare(module, adam(module, groups))
    for number in range(UPDATES):
        accelerator.backward(engine(**batch(number)).loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(str(folder / name))
    link(engine.optimizer)
    write_truth(folder / f"{name}.truth", zero_truth(engine.module), UPDATES)


def deepspeeded(
    folder: Path, name: str, stage: int, precision: str, groups: str, more: dict[str, Any]
) -> None:
    """DeepSpeed alone, saved by `save_checkpoint`."""
    forget()
    module = model(untied=more.pop("untied", False))
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=adam(module, groups), config=config(stage, precision, more)
    )
    for number in range(UPDATES):
        engine.backward(engine(**batch(number)).loss)
        engine.step()
    engine.save_checkpoint(str(folder / name))
    if dist.get_rank() == 0:
        (folder / f"{name}.json").write_text(json.dumps({"type": type(engine.optimizer).__name__}))
    if stage == 3:
        return
    if stage == 0:
        state = next(iter(engine.optimizer.optimizer.state.values()))
        truth = stage0_truth(engine.module, engine.optimizer)
        write_truth(folder / f"{name}.truth", truth, int(state["step"]))
        return
    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
        link(engine.optimizer)
    write_truth(folder / f"{name}.truth", zero_truth(engine.module), UPDATES)


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    type(get_accelerator()).is_fp16_supported = lambda self: True
    ddp(folder, "ddp_fp32", "no", "one", wrapped=False, safe=True)
    ddp(folder, "ddp_bf16", "bf16", "two", wrapped=True, safe=False)
    ddp(folder, "ddp_named", "no", "named", wrapped=False, safe=True)
    accelerated(folder, "accelerate_bf16", "bf16", "two", wrapped=True)
    accelerated(folder, "accelerate_fp16", "fp16", "one", wrapped=False)
    deepspeeded(folder, "zero1_bf16", 1, "bf16", "two", {})
    deepspeeded(folder, "zero1_fp32", 1, "fp32", "one", {"untied": True})
    deepspeeded(folder, "zero1_elastic", 1, "bf16", "two", {"zero": {"elastic_checkpoint": True}})
    deepspeeded(folder, "zero2_fp16", 2, "fp16", "two", {"zero": {"round_robin_gradients": True}})
    deepspeeded(folder, "bf16_wide", 1, "bf16", "two", {"data_types": {"grad_accum_dtype": "fp32"}})
    deepspeeded(folder, "zero0_fp16", 0, "fp16", "two", {})
    deepspeeded(folder, "zero3_bf16", 3, "bf16", "one", {})
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # a thread of a process group that is left behind may abort an orderly exit


if __name__ == "__main__":
    main()
