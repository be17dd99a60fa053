"""Checkpoints that real Accelerate and DeepSpeed ranks wrote become a run's first, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from launching import ROOT, TIME_LIMIT_S, records, run
from safetensors.torch import load_file, save_file

from recipes import cli
from recipes.checkpoint.arrays import find_checkpoint, open_checkpoint

SHAPE = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 16, "vocab_size": 300}
WORDS = {"DDP": "Accelerate, DDP", "1": "DeepSpeed, ZeRO-1", "2": "DeepSpeed, ZeRO-2"}
WORDS["0"] = "DeepSpeed, stage 0"
# The checkpoint's name, its kind, and the loss scale with the clean updates since its last change.
WRITTEN = [
    ("ddp_fp32", "DDP", None),
    ("ddp_bf16", "DDP", None),
    ("ddp_named", "DDP", None),
    ("accelerate_bf16", "1", None),
    ("accelerate_fp16", "1", (512.0, 3)),
    ("zero1_bf16", "1", None),
    ("zero1_fp32", "1", None),
    ("zero1_elastic", "1", None),
    ("bf16_wide", "1", None),
    ("zero2_fp16", "2", (512.0, 3)),
    ("zero0_fp16", "0", (512.0, 3)),
]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints by two ranks each, and what their engines held."""
    folder = tmp_path_factory.mktemp("foreign")
    ended = run("torchrun", 2, ["tests/drivers/foreign.py", str(folder)], folder / "log")
    assert ended.code == 0, ended.text[-4000:]
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    tiny.write_corpus(folder / "corpus")
    tiny.write_tokenizer(folder / "tokenizer.json")
    return folder


def run_file(folder: Path, corpus: Path, **changes: Any) -> Path:
    """A run of the model that the drivers trained."""
    model = {"model_type": "gpt2", **SHAPE, "bos_token_id": 0, "eos_token_id": 0}
    model |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} | changes
    tree = {
        "name": "taken",
        "output_dir": str(folder / "run"),
        "model": {"config": model},
        "data": {
            "kind": "files",
            "format": "parquet",
            "files": [f"{corpus}/corpus/*.parquet"],
            "tokenizer": {"file": str(corpus / "tokenizer.json")},
            "lanes": 8,
            "block_rows": 4,
            "prefetch": 16,
        },
        "batch": {"seq_len": 16, "global_sequences": 16, "micro": 2},
        "optim": {"lr": 0.01},
        "schedule": {"updates": 6, "warmup_updates": 4},
        "checkpoint": {"every_updates": 100},
        "log": {"every_updates": 1},
    }
    path = folder / "run.yaml"
    path.write_text(json.dumps(tree), encoding="utf-8")  # YAML is JSON's superset
    return path


def taken(source: Path, path: Path) -> int:
    return cli.main(["checkpoint", "import", str(source), str(path)])


@pytest.mark.parametrize(("name", "kind", "scale"), WRITTEN)
def test_weights_and_moments_come_over_bit_for_bit(
    name: str, kind: str, scale: Any, written: Path, corpus: Path, tmp_path: Path
) -> None:
    path = run_file(tmp_path, corpus, tie_word_embeddings=name != "zero1_fp32")
    assert taken(written / name, path) == 0
    opened = open_checkpoint(find_checkpoint(tmp_path / "run"))
    truth = load_file(written / f"{name}.truth" / "arrays.safetensors")
    assert set(opened.arrays.names()) == truth.keys()
    for array, expected in truth.items():
        assert torch.equal(opened.arrays.whole(array), expected), array
    state, step = opened.state, int((written / f"{name}.truth" / "step").read_text())
    assert opened.folder.name == "step-00000003"
    assert (state["strategy"], state["world"], state["data"]) == (WORDS[kind], 2, None)
    assert (state["progress"]["applied"], state["scalars"]["adam_step"]) == (3, step)
    told = state["scalars"]["loss_scale"], state["scalars"]["clean_updates"]
    assert told == (scale or (None, 0))
    assert opened.manifest.reason == "import"


def test_a_run_file_whose_end_is_reached_already_is_refused_before_anything_is_written(
    written: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, words = run_file(tmp_path, corpus), ["schedule.updates=3", "schedule.warmup_updates=1"]
    assert cli.main(["checkpoint", "import", str(written / "ddp_bf16"), str(path), *words]) == 2
    assert "schedule.updates=3 is reached already: 3 updates were applied there" in (
        capsys.readouterr().err
    )
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_the_state_is_what_a_run_of_ours_writes() -> None:
    from recipes.artifacts.foreign import Foreign
    from recipes.artifacts.importing import _state
    from recipes.engine.state import Scalars
    from recipes.progress import Progress
    from recipes.runfile import load_run

    found = Foreign(kind="x", weights={}, shapes={})
    state = _state(found, load_run(ROOT / "recipes/runs/stdlib.yaml"), step=3, adam_step=4)
    assert Progress(**state["progress"]).applied == 3
    assert asdict(Scalars(**state["scalars"]))["adam_step"] == 4


@pytest.mark.parametrize(("name", "config"), [("ddp_bf16", "zero1"), ("accelerate_fp16", "ddp")])
def test_the_recipe_goes_on_from_it(
    name: str, config: str, written: Path, corpus: Path, tmp_path: Path
) -> None:
    path = run_file(tmp_path, corpus)
    assert taken(written / name, path) == 0
    script = ["recipes/pretrain.py", str(path), "--accelerate_config"]
    script.append(f"accelerate_configs/local_{config}_bf16.yaml")
    ended = run("torchrun", 2, script, tmp_path / "log", limit_s=TIME_LIMIT_S)
    assert ended.code == 0, ended.text[-4000:]
    lines = records(tmp_path / "run")
    assert [line["step"] for line in lines] == [4, 5, 6]
    assert lines[0]["lr"] == pytest.approx(0.01)  # the warm-up's last update, not its first
    title = {"zero1": "ZeRO-1 bf16", "ddp": "DDP bf16"}[config]
    assert f"-> {title}" in ended.text
    # Untrained it would be ln 300 = 5.7; three updates on random tokens left it near that.
    assert all(5.0 < line["loss"] < 6.5 for line in lines)


# ---- refusals


def refused(source: Path, path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert taken(source, path) == 2
    assert not (path.parent / "run" / "checkpoints").exists()
    return capsys.readouterr().err


def test_another_model_is_refused_with_every_difference(
    written: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deeper = run_file(tmp_path, corpus, n_layer=3, n_embd=32)
    for name in ("ddp_bf16", "accelerate_bf16", "zero0_fp16"):
        said = refused(written / name, deeper, capsys)
        assert "another model was trained there" in said
        assert "transformer.h.2.ln_1.weight is missing" in said and "more" in said
        assert "transformer.wte.weight [300, 16] (expected [300, 32]) has another shape" in said
    untied = run_file(tmp_path, corpus, tie_word_embeddings=False)
    assert "lm_head.weight is missing" in refused(written / "zero1_bf16", untied, capsys)
    tied = run_file(tmp_path, corpus)
    said = refused(written / "zero1_fp32", tied, capsys)
    assert "lm_head.weight and transformer.wte.weight differ" in said
    shallow = run_file(tmp_path, corpus, n_layer=1)
    said = refused(written / "ddp_fp32", shallow, capsys)
    assert "transformer.h.1.ln_1.weight is not in the run file's model" in said


def test_a_run_folder_in_use_is_left_alone(
    written: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run_file(tmp_path, corpus)
    assert taken(written / "ddp_fp32", path) == 0
    assert taken(written / "ddp_fp32", path) == 2
    assert "holds a run already (step-00000003)" in capsys.readouterr().err


def test_kinds_that_cannot_be_taken_are_named(
    written: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run_file(tmp_path, corpus)
    assert "ZeRO stage 3" in refused(written / "zero3_bf16", path, capsys)
    assert "is no folder" in refused(tmp_path / "nowhere", path, capsys)
    for kind, files in {
        "FSDP": ["pytorch_model_fsdp_0/__0_0.distcp"],
        "tensor parallelism": ["mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"],
        "pipeline stages or experts": ["mp_rank_00_model_states.pt", "layer_00-model_states.pt"],
        "name one of them": ["checkpoint-500/model.safetensors"],
    }.items():
        folder = tmp_path / kind.replace(" ", "")
        for name in files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
        assert kind in refused(folder, path, capsys)


def damaged(written: Path, name: str, tmp_path: Path) -> Path:
    copy = tmp_path / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(written / name, copy)
    return copy


def test_a_rank_that_is_missing_is_named(
    written: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, copy = run_file(tmp_path, corpus), damaged(written, "zero1_bf16", tmp_path)
    next(copy.glob("*/bf16_zero_pp_rank_1_*")).unlink()
    assert "lacks the optimizer states of ranks [1] of 2" in refused(copy, path, capsys)
    copy = damaged(written, "ddp_fp32", tmp_path)
    (copy / "optimizer.bin").unlink()
    assert "has no optimizer.bin" in refused(copy, path, capsys)
    (copy / "latest").write_text("../../elsewhere")
    assert "names '../../elsewhere'" in refused(copy, path, capsys)
    (copy / "latest").write_text("global_step9")
    assert "global_step9 is missing" in refused(copy, path, capsys)


def test_a_truncated_file_is_named(
    written: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run_file(tmp_path, corpus)
    for name, pattern in {
        "zero1_bf16": "*/bf16_zero_pp_rank_1_*",
        "ddp_fp32": "model.safetensors",
        "ddp_bf16": "pytorch_model.bin",
        "ddp_named": "optimizer.bin",
    }.items():
        copy = damaged(written, name, tmp_path)
        file = next(copy.glob(pattern))
        file.write_bytes(file.read_bytes()[:-1000])
        assert file.name in refused(copy, path, capsys)


class Planted:
    """What a pickle could do."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.place),)


@pytest.mark.parametrize("packed", [True, False])
def test_nothing_in_a_file_is_run(
    packed: bool, written: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, copy = run_file(tmp_path, corpus), damaged(written, "zero1_bf16", tmp_path)
    states = copy / "global_step3" / "mp_rank_00_model_states.pt"
    planted = {"module": Planted(tmp_path / "was-here")}
    torch.save(planted, states, _use_new_zipfile_serialization=packed)
    said = refused(copy, path, capsys)
    assert f"{states.name}: it would run code of " in said and "mkdir" in said
    assert not (tmp_path / "was-here").exists()
    torch.load(states, weights_only=False)  # as others would have
    assert (tmp_path / "was-here").exists()


def test_other_optimizers_are_refused(
    written: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, copy = run_file(tmp_path, corpus), damaged(written, "ddp_fp32", tmp_path)
    state = torch.load(copy / "optimizer.bin")
    for kept in state["state"].values():
        kept["momentum_buffer"] = kept.pop("exp_avg_sq")
    torch.save(state, copy / "optimizer.bin")
    said = refused(copy, path, capsys)
    assert "step, exp_avg, momentum_buffer" in said and "only Adam and AdamW" in said


def test_numbers_that_fit_no_order_are_refused_and_so_are_frozen_parameters(
    written: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, copy = run_file(tmp_path, corpus), damaged(written, "ddp_fp32", tmp_path)
    state = torch.load(copy / "optimizer.bin")
    numbers = state["param_groups"][0]["params"]
    state["param_groups"][0]["params"] = [*numbers[1:], numbers[0]]
    torch.save(state, copy / "optimizer.bin")
    said = refused(copy, path, capsys)
    assert "none of the usual orders fits" in said and "named_parameters()" in said
    state["param_groups"][0]["params"] = numbers
    del state["state"][5]
    torch.save(state, copy / "optimizer.bin")
    said = refused(copy, path, capsys)
    assert "transformer.h.0.attn.c_attn.bias has no Adam state" in said


def test_a_scaler_and_transposed_groups_are_understood(
    written: Path, corpus: Path, tmp_path: Path
) -> None:
    """Trainer's file names, biases and norms first, a wrapper of its own, a scaler of a GPU."""
    path, copy = run_file(tmp_path, corpus), damaged(written, "ddp_bf16", tmp_path)
    state = torch.load(copy / "optimizer.bin")
    state["param_groups"].reverse()
    torch.save(state, copy / "optimizer.pt")
    (copy / "optimizer.bin").unlink()
    weights = torch.load(copy / "pytorch_model.bin")
    (copy / "pytorch_model.bin").unlink()
    kept = {f"_orig_mod.lightning.{n}": w.clone() for n, w in weights.items() if "lm_head" not in n}
    save_file(kept, copy / "model.safetensors")
    scaler = {"scale": 4096.0, "growth_factor": 2.0, "backoff_factor": 0.5, "_growth_tracker": 7}
    torch.save(scaler | {"growth_interval": 2000}, copy / "scaler.pt")
    assert taken(copy, path) == 0
    opened = open_checkpoint(find_checkpoint(tmp_path / "run"))
    truth = load_file(written / "ddp_bf16.truth" / "arrays.safetensors")
    assert all(torch.equal(opened.arrays.whole(name), truth[name]) for name in truth)
    assert opened.state["scalars"]["loss_scale"] == 4096.0
    assert opened.state["scalars"]["clean_updates"] == 7
