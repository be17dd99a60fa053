"""`octet export`: what lands on the disk is the model, and everybody's transformers loads it."""

from __future__ import annotations

import gc
import importlib.util
import json
import resource
import subprocess
import sys
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import artifact_models as made
import pytest
import torch
from safetensors import safe_open
from tokenizers import normalizers, processors
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.artifacts import exporting, facts, loading, proof, verbs
from recipes.cli import main
from recipes.config import Run


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A GPT-2 whose head is its embedding, saved at steps 4 and 8."""
    run = made.tiny_settings(tmp_path_factory.mktemp("tied"))
    network = made.trained(run)
    made.save(run, network, 4)
    made.save(run, network, 8)
    return run


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A Llama with a head of its own and rotary buffers that no checkpoint holds."""
    run = made.tiny_settings(tmp_path_factory.mktemp("untied"), made.LLAMA)
    made.save(run, made.trained(run))
    return run


def tensors(folder: Path) -> Counter[str]:
    """Names in all weights files."""
    names: Counter[str] = Counter()
    for path in folder.glob("*.safetensors"):
        with safe_open(str(path), framework="pt") as file:
            names.update(file.keys())
    return names


# ---- what is written


@pytest.fixture(scope="module")
def exported(tied: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tied model's folder."""
    out = tmp_path_factory.mktemp("exported") / "out"
    folder, said = exporting.export_checkpoint(str(tied.folder), str(out), "float32", 10**9)
    assert (
        folder == out
        and said.endswith("its float32 logits and the checkpoint's are equal bit for bit.")
        and "fresh process" in said
    )
    return out


def test_a_tied_model_is_exported_whole(tied: Run, exported: Path) -> None:
    out = exported
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    names = tensors(out)
    assert set(names.values()) == {1} and "lm_head.weight" not in names
    network = made.trained(tied)
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    for name, parameter in network.named_parameters():
        assert torch.equal(parameter, loaded.get_parameter(name)), name
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == "float32" and config["use_cache"] is True
    assert config["architectures"] == ["GPT2LMHeadModel"]
    generation = json.loads((out / "generation_config.json").read_text())
    assert [generation[f"{k}_token_id"] for k in ("eos", "bos", "pad")] == [0, 0, 0]
    assert generation["use_cache"] is True and loaded.generation_config.pad_token_id == 0
    settings = json.loads((out / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"  # known to transformers 4 too
    assert settings["clean_up_tokenization_spaces"] is False
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.model_max_length == 32 and tokenizer.eos_token == "<|endoftext|>"
    assert all(path.stat().st_mode & 0o044 for path in out.iterdir())  # colleagues can read it


def test_an_untied_model_in_bf16_and_in_shards(
    untied: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()  # an empty folder is no obstacle
    words = [str(untied.folder / "checkpoints" / "step-00000008"), str(out)]
    assert main(["export", *words, "--dtype", "bfloat16", "--shard-size", "60KB"]) == 0
    said = capsys.readouterr().out
    assert "The fp32 logits, up to" in said and "equal bit for bit" in said and str(out) in said
    assert len(list(out.glob("model-*.safetensors"))) > 1
    names = tensors(out)
    assert set(names.values()) == {1} and names["lm_head.weight"] == 1
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = AutoModelForCausalLM.from_pretrained(out)
    for name, parameter in made.trained(untied).named_parameters():
        assert torch.equal(parameter.to(torch.bfloat16), loaded.get_parameter(name)), name


def test_a_tokenizer_that_surrounds_texts_is_exported_without_that(
    tied: Run, tmp_path: Path
) -> None:
    artifact = loading.open_artifact(str(tied.folder))
    eot = ("<|endoftext|>", 0)
    artifact.encoder.tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A <|endoftext|>", special_tokens=[eot]
    )
    exporting.write_tokenizer(tmp_path, artifact, 32)
    ids = AutoTokenizer.from_pretrained(tmp_path)("abc")["input_ids"]
    assert ids == artifact.encoder.encode_prompt("abc") and len(ids) == 3
    template = {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    strip = exporting.without_templates
    assert strip(template) is None and strip(level) == level and strip(None) is None
    both = {"type": "Sequence", "processors": [level, template]}
    assert strip(both) == {"type": "Sequence", "processors": [level]}
    assert strip({"type": "Sequence", "processors": [template]}) is None


# ---- the proof


def test_the_proof_finds_other_weights_tokens_and_dtypes(exported: Path, tied: Run) -> None:
    artifact = loading.open_artifact(str(tied.folder))
    inputs = proof.choose_inputs(artifact)
    expected = proof.logits_of(artifact.network, inputs)
    expected["numbers"] = expected["numbers"].clone()
    expected["numbers"][0, 3, 7] += 1.0
    artifact.encoder.eot = 5
    artifact.encoder.tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(ValueError) as told:
        proof.prove(exported, artifact.encoder, torch.bfloat16, inputs, expected)
    wrong = ("logits of the numbers differ by 1", "special tokens", "float32, expected bfloat16")
    wrong += ("cuts 'Hello, world 123' otherwise",)
    for text in wrong:
        assert text in str(told.value)
    assert "logits of the text" not in str(told.value)


def test_a_folder_that_does_not_load_is_told_with_the_fresh_process_words(
    exported: Path, tied: Run, tmp_path: Path
) -> None:
    inputs = proof.choose_inputs(loading.open_artifact(str(tied.folder)))
    with pytest.raises(
        ValueError, match=r"(?s)can't be loaded in a fresh process \(exit 1\).*json"
    ):
        proof.ask(tmp_path, inputs, ["a"])


def test_the_fresh_process_has_neither_deepspeed_nor_this_project() -> None:
    assert importlib.util.find_spec("deepspeed") and importlib.util.find_spec("recipes")
    program = f"""
import importlib.util, runpy, sys
fresh = runpy.run_path({str(proof.SCRIPT)!r})
sys.meta_path[:] = [fresh["WithoutSome"](finder) for finder in sys.meta_path]
for name in ("deepspeed", "recipes", "deepspeed.ops"):
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    sys.exit(name)
assert importlib.util.find_spec("transformers") and not importlib.util.find_spec("deepspeed")
import importlib.metadata, numpy
assert importlib.metadata.version("numpy") == numpy.__version__
"""
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_logits_are_compared_with_a_stated_tolerance() -> None:
    exact = torch.tensor([[100.0, -50.0]])
    assert proof.comparison(exact, exact, "text") == (None, 0.0)
    fault, difference = proof.comparison(exact + 1e-4, exact, "text")
    assert fault is None and 0 < difference < 2e-4
    assert "differ by 0.01" in str(proof.comparison(exact + 0.01, exact, "text")[0])
    assert "float16" in str(proof.comparison(exact.half(), exact, "text")[0])
    broken = exact * float("nan")
    assert "not finite" in str(proof.comparison(broken, broken, "text")[0])


# ---- refusals


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a refused export says."""
    capsys.readouterr()
    assert main(["export", *words]) == 2
    return capsys.readouterr().err


def test_an_export_is_refused_where_something_lies(
    tied: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(tied.folder)
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "mine.txt").write_text("mine")
    assert "is not empty" in refused([source, str(taken)], capsys)
    assert "is not empty" in refused([source, str(taken / "mine.txt")], capsys)
    foreign = tmp_path / "out.partial"
    foreign.mkdir()
    (foreign / "mine.txt").write_text("mine")
    assert "no unfinished export" in refused([source, str(tmp_path / "out")], capsys)
    assert (foreign / "mine.txt").is_file() and (taken / "mine.txt").is_file()
    (foreign / facts.FACTS).write_text("{}")
    (foreign / exporting.CARD).write_text("a finished export that somebody named so")
    assert "no unfinished export" in refused([source, str(tmp_path / "out")], capsys)
    assert (foreign / "mine.txt").is_file()
    for inside in ("out", "step-00000008/out", "step-00000009/out"):
        words = [source, str(tied.folder / "checkpoints" / inside)]
        assert "among a run's checkpoints" in refused(words, capsys)
    (tmp_path / "manifest.json").write_text("{}")  # which many programs have
    assert exporting.check_target(str(tmp_path / "a" / "b"))[0] == tmp_path / "a" / "b"


def test_an_export_that_can_not_be_written_is_refused_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "mounted").mkdir()
    monkeypatch.setattr(exporting, "open_artifact", None)
    source = str(tmp_path)
    assert "exists and is not empty" in refused([source, "/"], capsys)
    assert "file is no folder" in refused([source, str(tmp_path / "file" / "out")], capsys)
    assert "name too long" in refused([source, str(tmp_path / ("x" * 300))], capsys)
    monkeypatch.setattr(exporting.os, "access", lambda *_: False)
    assert "that you may write to" in refused([source, str(tmp_path / "out")], capsys)
    monkeypatch.setattr(Path, "is_mount", lambda _: True)
    assert "is a mount point" in refused([source, str(tmp_path / "mounted")], capsys)


def test_an_unfinished_export_is_removed(tmp_path: Path) -> None:
    left = tmp_path / "out.partial"
    left.mkdir()
    (left / facts.FACTS).write_text("{}")
    (left / "model.safetensors").write_bytes(b"half")
    exporting.check_target(str(tmp_path / "out"))
    assert not left.exists()


def test_what_is_no_checkpoint_is_refused(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    assert "is no folder" in refused([str(tmp_path / "absent"), out], capsys)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert str(empty) in refused([str(empty), out], capsys)
    assert "transformers folder already" in refused([str(exported), out], capsys)
    for size in ("5", "GB", "-1GB", "0GB", "5TB"):
        assert "--shard-size" in refused([str(exported), out, f"--shard-size={size}"], capsys)
    assert verbs.parse_shard_size("1.5 GiB") == 3 << 29


def test_a_damaged_checkpoint_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made.tiny_settings(tmp_path)
    folder = made.save(run, made.trained(run))
    file = folder / "arrays-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)
    said = refused([str(folder), str(tmp_path / "out")], capsys)
    assert file.name in said and "SHA-256" in said
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


def test_every_array_that_does_not_fit_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made.tiny_settings(tmp_path)
    network = made.trained(run)
    found = made.arrays_of(network)
    del found["weight/transformer.ln_f.bias"]
    found["weight/transformer.extra.weight"] = torch.ones(3)
    found["weight/transformer.wpe.weight"] = torch.ones(16, 32)
    folder = made.save(run, network, found=found)
    said = refused([str(folder), str(tmp_path / "out")], capsys)
    assert "weight/transformer.ln_f.bias is missing" in said
    assert "weight/transformer.extra.weight is no array of the model" in said
    assert "weight/transformer.wpe.weight has shape [16, 32], the model [32, 32]" in said


def test_weights_that_overflow_fp16_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made.tiny_settings(tmp_path)
    network = made.trained(run)
    with torch.no_grad():
        network.transformer.h[1].mlp.c_fc.weight[0, 0] = 70_000.0
        network.transformer.ln_f.bias[1] = -1e6
    folder = made.save(run, network)
    said = refused([str(folder), str(tmp_path / "out"), "--dtype", "float16"], capsys)
    assert "don't fit float16" in said and "6.55e+04" in said
    assert "h.1.mlp.c_fc.weight holds values up to 7e+04" in said and "ln_f.bias" in said
    assert not (tmp_path / "out.partial").exists()
    with torch.no_grad():
        network.transformer.ln_f.bias[1] = float("nan")
    other = made.save(run, network, 9)
    said = refused([str(other), str(tmp_path / "out")], capsys)
    assert "ln_f.bias holds values up to nan" in said and "an earlier checkpoint" in said


def test_a_full_disk_leaves_nothing_behind(
    tied: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [str(tied.folder), str(tmp_path / "out")]
    usage = type("Usage", (), {"free": 1 << 20})()
    with monkeypatch.context() as patch:
        patch.setattr(exporting.shutil, "disk_usage", lambda _: usage)
        assert "has 1.0 MB free" in refused(words, capsys)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", "model.safetensors")

    with monkeypatch.context() as patch:
        patch.setattr(exporting, "write_tokenizer", full)
        assert "No space left on device (model.safetensors)" in refused(words, capsys)
    assert list(tmp_path.iterdir()) == []
    # What the safetensors library makes of a write that the system refuses.
    was = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (48_000, was[1]))
    try:
        assert "out was not written: Error while serializing" in refused(words, capsys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, was)
    assert list(tmp_path.iterdir()) == []


def test_a_proof_that_ends_early_leaves_nothing_and_has_the_memory_to_itself(
    tied: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    networks = []

    def opened(source: str) -> loading.Artifact:
        artifact = loading.open_artifact(source)
        networks.append(weakref.ref(artifact.network))
        return artifact

    def stopped(folder: Path, *_: Any) -> str:
        gc.collect()
        assert networks[0]() is None, "the weights are still held"
        assert (folder / "model.safetensors").is_file()
        raise KeyboardInterrupt

    monkeypatch.setattr(exporting, "open_artifact", opened)
    monkeypatch.setattr(exporting, "prove", stopped)
    assert main(["export", str(tied.folder), str(tmp_path / "out")]) == 130
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_on_the_disk_twice_is_found(tmp_path: Path, tied: Run) -> None:
    from safetensors.torch import save_file

    network = made.trained(tied)
    doubled = {name: value.clone() for name, value in network.state_dict().items()}
    save_file(doubled, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="twice or not at all"):
        exporting.check_weights(tmp_path, network)


def test_an_end_of_text_that_the_state_lacks_is_damage(tied: Run) -> None:
    state = made.state_of(tied, 8)
    del state["config"]["data"]["tokenizer"]
    with pytest.raises(ValueError, match="end_of_text; it is damaged"):
        facts.facts_of(state, 8, tied.folder)
