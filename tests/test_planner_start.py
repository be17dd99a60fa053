"""The command that the plan ends in: the machines, files and keys that were planned, each once."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from planned import ROOT, XL, answered

from recipes.runfile import load_run

WORDS = (XL[0], *XL[3:])


def started(folder: Path, *words: str) -> tuple[list[str], str, dict[str, Any]]:
    """The command's words, what it needs beside itself, and the whole answer."""
    found = answered(folder, *words)
    start = found["strategy"]["start"]
    return shlex.split(start["command"]), start["also"], found


def arm(folder: Path, **changes: Any) -> str:
    """A copy of the shipped ZeRO-1 arm with other values under zero_optimization."""
    tree = json.loads((ROOT / "ds_configs" / "zero1_fp16.json").read_text())
    tree["zero_optimization"] |= changes
    (folder / "own.json").write_text(json.dumps(tree))
    text = (ROOT / "accelerate_configs" / "zero1_fp16.yaml").read_text()
    path = folder / "own.yaml"
    path.write_text(text.replace("ds_configs/zero1_fp16.json", str(folder / "own.json")))
    return str(path)


def test_machines_without_a_hostfile_are_said(tmp_path: Path) -> None:
    words, also, _ = started(tmp_path, *WORDS, "--nodes", "3", "--gpus", "8")
    assert words[words.index("--hostfile") + 1] == "HOSTS"
    assert "HOSTS, a hostfile of 3 lines NAME slots=8" in also
    words, also, _ = started(tmp_path, *WORDS, "--gpus", "8")
    assert "HOSTS, a hostfile of 1 line NAME slots=8" in also
    words, also, _ = started(tmp_path, *WORDS, "--nodes", "2", "--gpus", "4")
    assert "--hostfile" not in words and "HOSTS" not in also  # ./hostfile is just so


def test_an_overlap_that_the_named_file_lacks_is_said(tmp_path: Path) -> None:
    (tmp_path / "three").write_text("a slots=8\nb slots=8\nc slots=8\n")
    hosts, shipped = str(tmp_path / "three"), "accelerate_configs/zero1_fp16.yaml"
    words, also, found = started(tmp_path, *WORDS, "--hostfile", hosts, "--config", shipped)
    assert found["strategy"]["chosen"]["name"] == "ZeRO-1, overlap_comm"
    assert words[2:6] == ["--hostfile", hosts, "--config", shipped]
    assert also == '"overlap_comm": true in the DeepSpeed JSON that it names'


def test_a_user_s_own_file_that_does_what_is_chosen_is_started(tmp_path: Path) -> None:
    own = arm(tmp_path, overlap_comm=True)
    words, also, found = started(tmp_path, *WORDS, "--config", own)
    assert found["strategy"]["chosen"]["name"] == "ZeRO-1, overlap_comm"
    assert words[words.index("--config") + 1] == own
    assert also == ""
    small = arm(tmp_path, reduce_bucket_size=50_000_000)  # as fast as the shipped one
    words, _, _ = started(tmp_path, *WORDS, "--config", small)
    assert words[words.index("--config") + 1] == small


def test_the_evaluation_is_changed_where_the_choice_needs_it(tmp_path: Path) -> None:
    words, _, found = started(tmp_path, *XL, "evaluate.sequences=8")
    run = load_run(ROOT / XL[0], words[words.index(XL[0]) + 1 :])
    assert run.evaluate is not None and found["strategy"]["chosen"]["micro"] > 1
    assert run.evaluate.sequences == 8 * found["strategy"]["chosen"]["micro"]
    assert sum(word.startswith("evaluate.sequences=") for word in words) == 1


@pytest.mark.parametrize("given", ["batch.micro=auto", "batch.micro=1", "model.attention=eager"])
def test_a_key_stands_in_the_command_once(tmp_path: Path, given: str) -> None:
    words, _, found = started(tmp_path, *XL, given, "name=other")
    keys = [word.partition("=")[0] for word in words[words.index(XL[0]) + 1 :]]
    assert len(keys) == len(set(keys)) and "name" in keys
    run = load_run(ROOT / XL[0], words[words.index(XL[0]) + 1 :])
    assert run.batch.micro == ("auto" if "auto" in given else found["strategy"]["chosen"]["micro"])
    assert run.model.attention == "sdpa"


def test_ddp_s_bucket_is_the_chosen_one(tmp_path: Path) -> None:
    small = ("recipes/runs/gpt2_small.yaml", *XL[1:])
    words, _, found = started(tmp_path, *small, "ddp.bucket_cap_mb=25")
    ddp = found["strategy"]["chosen"]["name"].startswith("DDP")
    assert ("ddp.bucket_cap_mb=100" in words) == ddp
    assert ("ddp.bucket_cap_mb=25" in words) != ddp


def test_a_configuration_without_weights_is_said(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    words = (*XL, f"model={{pretrained: {tmp_path}}}")
    _, also, _ = started(tmp_path, *words)
    assert f"model.pretrained={tmp_path} holds its configuration alone" in also
    (tmp_path / "model.safetensors").write_text("")
    assert "alone" not in started(tmp_path, *words)[1]
