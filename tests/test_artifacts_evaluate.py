"""`octet evaluate` and `octet generate`: the run's own numbers, and one clear error."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import artifact_models as made
import numpy as np
import pytest
import torch

from recipes.artifacts import exporting, facts, held_out, loading
from recipes.artifacts.continuation import continue_text
from recipes.cli import main
from recipes.config import Run
from recipes.data.batches import collate
from recipes.data.feed import Corpus, HeldOut, look
from recipes.data.tokens import Encoder
from recipes.objective import BatchPlan

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The tiny run with one checkpoint."""
    settings = made.tiny_settings(tmp_path_factory.mktemp("evaluated"))
    made.save(settings, made.trained(settings))
    return settings


def as_the_run_does(run: Run, world: int) -> tuple[float, float]:
    """Loss sum and labels, added up over the ranks of a run."""
    artifact = loading.open_artifact(str(run.folder))
    settings, count = held_out.evaluation_run(artifact, None, None)
    tokenizer = artifact.folder / "tokenizer.json"
    corpus = Corpus.open(settings, look(settings, None, run.folder, tokenizer), tokenizer)
    plan = BatchPlan(world=world, micro=2, accumulation=1, global_sequences=16, seq_len=32)
    module = held_out.wrap(artifact.network, "full", prefer_chunked=False)
    sums = [0.0, 0.0]
    with torch.no_grad():
        for rank in range(world):
            for batch in HeldOut.open(corpus, plan, rank).batches(CPU):
                for i, value in enumerate(module(**batch)):
                    sums[i] += float(value)
    assert count == 16
    return sums[0], sums[1]


def evaluated(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The JSON of an evaluation."""
    capsys.readouterr()
    assert main(["evaluate", *words, "--json", "--device", "cpu"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("world", [1, 4])
def test_the_loss_is_the_runs_own_whatever_its_ranks(
    run: Run, world: int, capsys: pytest.CaptureFixture[str]
) -> None:
    loss_sum, labels = as_the_run_does(run, world)
    result = evaluated([str(run.folder)], capsys)
    assert result["tokens"] == labels and result["sequences"] == 16
    assert result["loss"] == pytest.approx(loss_sum / labels, rel=1e-6)
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]), rel=1e-12)
    assert result["runs_own_loss"] == 5.25 and result["step"] == 8
    assert evaluated([str(run.folder), "--micro", "5"], capsys)["loss"] == pytest.approx(
        result["loss"], rel=1e-6
    )


def test_bits_per_byte_count_every_byte_of_the_labels(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    result = evaluated([str(run.folder), "--sequences", "7"], capsys)
    # A tokenizer of single bytes: every label is one byte, but for the ends of documents.
    artifact = loading.open_artifact(str(run.folder))
    settings, count = held_out.evaluation_run(artifact, None, 7)
    _, rows = held_out.read_held_out(artifact, settings, count, None)
    labels = np.concatenate([row.tokens[1:] for row in rows])
    assert result["tokens"] == len(labels) == 7 * 32
    assert result["text_bytes"] == np.count_nonzero(labels != 0) and result["bytes_are_exact"]
    expected = result["loss"] * result["tokens"] / math.log(2) / result["text_bytes"]
    assert result["bits_per_byte"] == pytest.approx(expected)
    assert result["runs_own_loss"] is None  # other sequences than the run's


def test_labels_that_the_mask_leaves_out_count_for_nothing(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (run.folder.parent / "tiny.yaml").read_text()
    path = tmp_path / "masked.yaml"
    path.write_text(text.replace("data:\n", "data:\n  document_mask: true\n"))
    result = evaluated([str(run.folder), "--run", str(path), "--sequences", "120"], capsys)
    artifact = loading.open_artifact(str(run.folder))
    settings, count = held_out.evaluation_run(artifact, str(path), 120)
    _, rows = held_out.read_held_out(artifact, settings, count, None)
    batch = collate(rows, 0, document_mask=True)
    assert result["tokens"] == int((batch["labels"] != -100).sum()) < 120 * 32
    assert result["text_bytes"] == int((batch["labels"] > 0).sum())
    loss_sum = held_out.wrap(artifact.network, "full", prefer_chunked=False)(**batch)[0]
    assert result["loss"] * result["tokens"] == pytest.approx(loss_sum.item(), rel=1e-5)


def test_people_are_told_the_same(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(run.folder), "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    for text in ("nats per token, in fp32 on cpu", "perplexity", "bits per byte", "(exact)"):
        assert text in said
    assert "the run said   5.2500 at this step" in said


def test_an_exported_folder_needs_no_run_file(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "prove", lambda *_: "Not proved here.")
    out = tmp_path / "out"
    assert main(["export", str(run.folder), str(out)]) == 0
    first, second = evaluated([str(run.folder)], capsys), evaluated([str(out)], capsys)
    assert first["loss"] == second["loss"] and second["runs_own_loss"] == 5.25
    words = ["--prompt", "def ", "--tokens", "9", "--seed", "4", "--device", "cpu"]
    said = []
    for model in (run.folder, out):
        assert main(["generate", str(model), *words]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] and said[0].startswith("def ")
    # Another project's folder: the run file says which data; the tokenizer is the folder's own.
    (out / facts.FACTS).unlink()
    assert main(["evaluate", str(out)]) == 2
    assert "name a run file with --run" in capsys.readouterr().err
    path = run.folder.parent / "tiny.yaml"
    third = evaluated([str(out), "--run", str(path)], capsys)
    assert third["loss"] == first["loss"] and third["runs_own_loss"] is None
    (out / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    assert main(["generate", str(out), *words]) == 2


def test_other_data_than_the_run_held_out_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = made.tiny_settings(tmp_path)
    artifact_folder = made.save(settings, made.trained(settings))
    artifact = loading.open_artifact(str(artifact_folder))
    artifact.facts["fingerprints"] = {"source": "0" * 16}
    chosen, count = held_out.evaluation_run(artifact, None, None)
    held_out.read_held_out(artifact, chosen, count, None)
    assert "not the data that the run held out: source 0000" in caplog.text


def test_the_runs_own_loss_is_told_of_the_same_rows_only(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (run.folder.parent / "tiny.yaml").read_text()
    for change, own in (
        (("evaluate:", "evaluate:"), 5.25),
        (("name: tiny", "name: tiny\nseed: 3"), None),
        (("seq_len: 32", "seq_len: 16"), None),
        (("share: 0.1", "share: 0.2"), None),
    ):
        assert change[0] in text
        path = tmp_path / "other.yaml"
        path.write_text(text.replace(*change))
        assert evaluated([str(run.folder), "--run", str(path)], capsys)["runs_own_loss"] == own


def test_a_loss_that_is_no_number_is_an_error(run: Run) -> None:
    artifact = loading.open_artifact(str(run.folder))
    settings, count = held_out.evaluation_run(artifact, None, 2)
    corpus, rows = held_out.read_held_out(artifact, settings, count, None)
    with torch.no_grad():
        artifact.network.transformer.ln_f.bias[0] = float("nan")
    with pytest.raises(ValueError, match="held-out loss is nan"):
        held_out.score(artifact, corpus, rows, 2, CPU)


def test_a_checkpoint_that_is_deleted_meanwhile_is_read_or_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = made.tiny_settings(tmp_path)
    made.save(settings, made.trained(settings))
    artifact = loading.open_artifact(str(settings.folder))
    with monkeypatch.context() as patch:
        # The files are open by now; all that is still read by name is the tokenizer.
        patch.setattr(
            loading, "Encoder", lambda path, token: Encoder(path.with_name("gone"), token)
        )
        with pytest.raises(ValueError, match="run goes on.*try again"):
            loading.open_artifact(str(settings.folder))
    shutil.rmtree(settings.folder / "checkpoints")
    chosen, count = held_out.evaluation_run(artifact, None, 3)
    corpus, rows = held_out.read_held_out(artifact, chosen, count, None)
    assert held_out.score(artifact, corpus, rows, 2, CPU).tokens == 3 * 32


def test_a_full_gpu_is_told() -> None:
    with (
        pytest.raises(ValueError, match="cuda has no memory left: take --device cpu"),
        loading.memory_of(torch.device("cuda"), "take --device cpu"),
    ):
        raise torch.OutOfMemoryError("40 GiB")


def test_an_evaluation_that_can_not_be_is_refused(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*words: str) -> str:
        capsys.readouterr()
        assert main(["evaluate", str(run.folder), *words]) == 2
        return capsys.readouterr().err

    assert "--sequences=0: expected 1 or more" in refused("--sequences", "0", "--micro", "-1")
    assert "--micro=-1" in refused("--sequences", "0", "--micro", "-1")
    assert "hold only" in refused("--sequences", "100000")
    if not torch.cuda.is_available():
        assert "finds no GPU" in refused("--device", "cuda")
    text = (run.folder.parent / "tiny.yaml").read_text()
    for change, fault in (
        (("  held_out: {share: 0.1}\n", ""), "holds no data out"),
        (("seq_len: 32,", "seq_len: 64,"), "longer than the model's 32 positions"),
    ):
        assert change[0] in text
        path = tmp_path / "other.yaml"
        path.write_text(text.replace(*change).replace("evaluate:", "#evaluate:", fault[0] == "h"))
        assert fault in refused("--run", str(path))


def test_settings_of_another_version_are_told(run: Run) -> None:
    state = made.state_of(run, 8)
    state["config"]["batch"]["colour"] = "blue"
    known = facts.facts_of(state, 8, run.folder)
    with pytest.raises(ValueError, match="(?s)--run.*batch.colour"):
        facts.run_of(known)


def test_facts_of_another_version_are_refused(tmp_path: Path) -> None:
    assert facts.read_facts(tmp_path) == {}
    for text in ('{"version": 99}', "[]", "{"):
        (tmp_path / facts.FACTS).write_text(text)
        with pytest.raises(ValueError, match="export the checkpoint again"):
            facts.read_facts(tmp_path)


def test_the_revision_is_the_states_or_else_the_runs(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {"revision": "abc", "source": "s", "units": "u", "held_out": "h", "cursors": {}}
    known = facts.facts_of(made.state_of(run, 8, data=data), 8, tmp_path)
    assert known["revision"] == "abc"
    assert known["fingerprints"] == {"source": "s", "units": "u", "held_out": "h"}
    folder = tmp_path / "checkpoints" / "step-00000008"
    assert facts.facts_of(made.state_of(run, 8), 8, folder)["revision"] is None
    (tmp_path / "run.json").write_text('{"revision": "def"}')
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    assert facts.facts_of(made.state_of(run, 8), 8, Path())["revision"] == "def"
    assert facts.facts_of(made.state_of(run, 8), 8, folder)["revision"] == "def"


def test_a_text_without_bytes_has_no_bits_per_byte() -> None:
    score = held_out.Score(
        loss=1.0, tokens=3, text_bytes=0, bytes_are_exact=True, sequences=1, seconds=0.1
    )
    assert score.bits_per_byte is None and score.to_json()["perplexity"] == pytest.approx(math.e)


# ---- continuations


def generated(run: Run, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What `octet generate` writes."""
    capsys.readouterr()
    assert main(["generate", str(run.folder), "--prompt", "def f", "--device", "cpu", *words]) == 0
    return capsys.readouterr().out


def test_a_continuation_follows_its_seed_and_leaves_the_random_state(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(11)
    before = torch.random.get_rng_state()
    first = generated(run, capsys, "--tokens", "20")
    assert torch.equal(before, torch.random.get_rng_state())
    assert first == generated(run, capsys, "--tokens", "20")
    assert first != generated(run, capsys, "--tokens", "20", "--seed", "1")
    greedy = generated(run, capsys, "--tokens", "20", "--greedy")
    assert greedy == generated(run, capsys, "--tokens", "20", "--greedy", "--seed", "9")
    assert greedy == generated(run, capsys, "--tokens", "20", "--top-k", "1")
    assert greedy == generated(run, capsys, "--tokens", "20", "--temperature", "0.01")
    assert all(text.startswith("def f") for text in (first, greedy))


def test_a_prompt_that_can_not_be_continued_is_refused(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*words: str) -> str:
        capsys.readouterr()
        assert main(["generate", str(run.folder), *words]) == 2
        return capsys.readouterr().err

    said = refused("--prompt", "x" * 30, "--tokens", "5")
    assert "30 tokens" in said and "the model takes 32; ask for 2 tokens or fewer" in said
    assert "shorten the prompt" in refused("--prompt", "x" * 33)
    assert "the prompt is empty" in refused("--prompt", "")
    assert "not in the terminal's encoding" in refused("--prompt", "a\udcff")
    said = refused("--prompt", "a", "--tokens", "0", "--top-k", "0", "--seed", "-1")
    assert all(f"--{n}" in said for n in ("tokens=0", "top-k=0", "seed=-1"))
    for temperature in ("0", "1e-45", "nan", "inf"):
        assert "--temperature" in refused("--prompt", "a", "--temperature", temperature)
    assert "less than 2^63" in refused("--prompt", "a", "--seed", str(1 << 80))
    said = refused("--prompt", "a", "--greedy", "--temperature", "1", "--top-k", "3")
    assert "--temperature and --top-k has no effect with --greedy" in said


def test_settings_that_a_model_brings_along_do_not_count(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact = loading.open_artifact(str(run.folder))
    said = []
    for settings in ({}, {"top_p": 0.01, "num_beams": 3, "repetition_penalty": 9.0}):
        for key, value in settings.items():
            setattr(artifact.network.generation_config, key, value)
        said.append(
            continue_text(
                artifact.network, artifact.encoder, "def f", tokens=20, device=CPU, seed=0
            )
        )
        assert said[-1] + "\n" == generated(run, capsys, "--tokens", "20")
    assert artifact.network.generation_config.top_p == 0.01


def test_a_damaged_transformers_folder_is_told(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "prove", lambda *_: "Not proved here.")
    out = tmp_path / "out"
    assert main(["export", str(run.folder), str(out)]) == 0
    (out / "manifest.json").write_text("{}")  # another program's; no checkpoint of ours
    weights, config = out / "model.safetensors", out / "config.json"
    content, settings = weights.read_bytes(), config.read_text()

    def refused() -> str:
        capsys.readouterr()
        assert main(["generate", str(out), "--prompt", "a", "--device", "cpu"]) == 2
        return capsys.readouterr().err

    for size in (3, 5000, len(content) - 1):
        weights.write_bytes(content[:size])
        assert "can't be loaded by transformers" in refused()
    weights.write_bytes(content)
    config.write_text(settings.replace('"n_layer": 2', '"n_layer": "two"'))
    assert "n_layer" in refused()
    config.write_text(settings.replace('"n_embd": 32', '"n_embd": 64'))
    said = refused()
    assert "mismatched keys" in said and "transformer.wpe.weight" in said and "ln_f.bias" in said


def test_a_tokenizer_of_another_model_is_refused(run: Run, tmp_path: Path) -> None:
    folder = shutil.copytree(run.folder / "checkpoints" / "step-00000008", tmp_path / "step")
    artifact = loading.open_artifact(str(run.folder))
    artifact.network.config.vocab_size = 100
    with pytest.raises(ValueError, match="has 257 tokens, the model 100"):
        loading._artifact(folder, artifact.network, artifact.encoder, {})
