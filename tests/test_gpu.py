"""What only a GPU can show; one is enough. Skipped elsewhere, with the reason."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import records, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
]
ARMS = ("zero1_fp16", "zero1_bf16", "ddp_fp16", "ddp_bf16")


def train(tiny_run: Path, folder: Path, arm: str, **env: str) -> list[dict[str, Any]]:
    """Eight updates on one GPU; accumulation is 16 sequences / micro 2 = 8."""
    script = ["tests/drivers/faulty.py", str(tiny_run), f"output_dir={folder}"]
    script += ["--accelerate_config", f"accelerate_configs/{arm}.yaml"]
    script += [f"model.config.{key}=0.0" for key in ("resid_pdrop", "embd_pdrop")]
    settings = {"ACCUMULATION": "8", "POISON_RANK": "0", "DS_ACCELERATOR": "cuda"} | env
    ended = run("torchrun", 1, script, folder.parent / f"log-{folder.name}", env=settings)
    assert ended.code == 0, ended.text[-4000:]
    return records(folder)


def test_the_arms_agree_on_one_gpu(tiny_run: Path, tmp_path: Path) -> None:
    curves = {arm: train(tiny_run, tmp_path / arm, arm) for arm in ARMS}
    for arm, curve in curves.items():
        for got, want in zip(curve, curves["ddp_bf16"], strict=True):
            assert got["data_digest"] == want["data_digest"]
            assert got["loss"] == pytest.approx(want["loss"], abs=1e-2), arm


@pytest.mark.parametrize("arm", ARMS)
def test_a_planted_overflow_is_skipped(tiny_run: Path, tmp_path: Path, arm: str) -> None:
    curve = train(tiny_run, tmp_path / arm, arm, POISON="2")
    assert [r["skipped_updates"] for r in curve] == [0, 0, *[1] * 6]


@pytest.mark.parametrize("arm", ARMS)
def test_nothing_waits_for_the_gpu_inside_a_window(
    tiny_run: Path, tmp_path: Path, arm: str
) -> None:
    assert len(train(tiny_run, tmp_path / arm, arm, WATCH_SYNCS="1")) == 8


def test_mfu_is_recorded_for_a_known_gpu(tiny_run: Path, tmp_path: Path) -> None:
    name = torch.cuda.get_device_name()
    curve = train(tiny_run, tmp_path / "run", "ddp_bf16", CUDA_VISIBLE_DEVICES="0")
    from recipes.metrics import peak_flops

    assert all((r["mfu"] is not None) == (peak_flops(name) is not None) for r in curve), os.environ


@pytest.mark.parametrize("arm", ["zero1_fp16", "ddp_fp16"])
def test_the_planned_peak_is_the_allocators(tiny_run: Path, tmp_path: Path, arm: str) -> None:
    """A model that fills gigabytes, so that what the plan leaves out is no share of it."""
    folder, small = tmp_path / arm, {"n_layer": 12, "n_embd": 768, "n_head": 12}
    script = ["recipes/pretrain.py", str(tiny_run), f"output_dir={folder}", "batch.micro=4"]
    script += ["--accelerate_config", f"accelerate_configs/{arm}.yaml", "schedule.updates=8"]
    script += ["batch.seq_len=512", "model.config.n_positions=512"]
    script += [f"model.config.{key}={value}" for key, value in small.items()]
    settings = {"DS_ACCELERATOR": "cuda"}
    ended = run("torchrun", 1, script, tmp_path / "log", env=settings)
    assert ended.code == 0, ended.text[-4000:]
    [start] = json.loads((folder / "plan.json").read_text())["starts"]
    told = {quantity["what"]: quantity for quantity in start["quantities"]}
    assert abs(told["peak allocated"]["error_percent"]) <= 5
