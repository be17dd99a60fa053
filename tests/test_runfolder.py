"""The run folder: what makes another run of a run, and what a fresh start may delete."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipes import runfolder
from recipes.config import Run
from recipes.runfile import load_run

RUN_FILE = """
name: stdlib
model: {config: {model_type: gpt2, n_layer: 6}}
data:
  kind: python_stdlib
  tokenizer: {train_vocab_size: 4096, train_documents: 400}
  held_out: {share: 0.05}
  lanes: 8
  block_rows: 8
batch: {seq_len: 256, global_sequences: 16, micro: 4}
optim: {lr: 2e-3}
schedule: {updates: 64}
checkpoint: {every_updates: 16}
evaluate: {every_updates: 32, sequences: 32}
sample: {prompt: "def "}
log: {every_updates: 4}
"""


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "run.yaml").write_text(RUN_FILE)
    monkeypatch.chdir(work)


def run_of(*overrides: str) -> Run:
    """The run file above with some keys changed."""
    return load_run("run.yaml", list(overrides))


def record_of(run: Run) -> dict[str, Any]:
    """What its first start wrote, read back from JSON."""
    return dict(json.loads(json.dumps({"config": run.model_dump(mode="json")})))


# ---- the same run?


def test_nothing_changed_is_the_same_run() -> None:
    assert runfolder.changed(record_of(run_of()), run_of()) == ([], [])
    assert runfolder.check_same(record_of(run_of()), run_of()) == []


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("optim.lr=1e-3", "optim.lr: 0.002 -> 0.001"),
        ("batch.global_sequences=32", "batch.global_sequences: 16 -> 32"),
        ("batch.seq_len=128", "batch.seq_len: 256 -> 128"),
        ("seed=1", "seed: 0 -> 1"),
        ("name=other", "name: 'stdlib' -> 'other'"),
        ("schedule.updates=65", "schedule.updates: 64 -> 65"),
        ("model.config.n_layer=7", "model.config.n_layer: 6 -> 7"),
        ("model.config.scale_attn_weights=true", "model.config.scale_attn_weights: None -> True"),
        ("data.lanes=16", "data.lanes: 8 -> 16"),
        ("data.block_rows=16", "data.block_rows: 8 -> 16"),
        ("data.document_mask=true", "data.document_mask: False -> True"),
        ("data.held_out.share=0.1", "data.held_out.share: 0.05 -> 0.1"),
        ("data.tokenizer.train_documents=9", "data.tokenizer.train_documents: 400 -> 9"),
    ],
)
def test_a_key_that_moves_data_or_objective_makes_another_run(override: str, text: str) -> None:
    assert runfolder.changed(record_of(run_of()), run_of(override)) == ([text], [])
    with pytest.raises(ValueError) as caught:
        runfolder.check_same(record_of(run_of()), run_of(override))
    assert f"  {text}\n" in str(caught.value) and "--fresh" in str(caught.value)


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("batch.micro=2", "batch.micro: 4 -> 2"),
        ("log.every_updates=1", "log.every_updates: 4 -> 1"),
        ("log.trackers=[tensorboard]", "log.trackers: [] -> ['tensorboard']"),
        ("checkpoint.keep=5", "checkpoint.keep: 2 -> 5"),
        ("ddp.compress=bf16", "ddp.compress: 'no' -> 'bf16'"),
        ("data.workers=2", "data.workers: 1 -> 2"),
        ("data.skip_units=[3]", "data.skip_units: [] -> [3]"),
        ("data.tokenizer.engine=gigatoken", "data.tokenizer.engine: 'hf' -> 'gigatoken'"),
        ("model.gradient_checkpointing=true", "model.gradient_checkpointing: False -> True"),
        ("model.loss=full", "model.loss: 'auto' -> 'full'"),
        ("evaluate.sequences=16", "evaluate.sequences: 32 -> 16"),
        ("sample.prompt=x", "sample.prompt: 'def ' -> 'x'"),
        ("output_dir=/there", "output_dir: None -> '/there'"),
    ],
)
def test_a_key_that_moves_neither_may_change_and_is_told(override: str, text: str) -> None:
    assert runfolder.changed(record_of(run_of()), run_of(override)) == ([], [text])
    assert runfolder.check_same(record_of(run_of()), run_of(override)) == [text]


def test_a_section_may_come_and_go() -> None:
    fixed, free = runfolder.changed(record_of(run_of()), run_of("sample=null"))
    assert fixed == []
    assert "sample.prompt: 'def ' -> None" in free


def test_a_free_name_frees_no_key_that_only_begins_like_it() -> None:
    recorded = record_of(run_of())
    recorded["config"]["logging"] = 1  # a key of a later version
    recorded["config"]["batch"]["micro_steps"] = 2
    fixed, free = runfolder.changed(recorded, run_of())
    assert fixed == ["batch.micro_steps: 2 -> None", "logging: 1 -> None"] and free == []


def test_every_free_key_exists() -> None:
    keys = runfolder.flat(run_of().model_dump(mode="json"))
    for name in runfolder.FREE:
        assert any(key == name or key.startswith(name + ".") for key in keys), name


def test_all_changes_are_told_at_once() -> None:
    with pytest.raises(ValueError) as caught:
        runfolder.check_same(
            record_of(run_of()), run_of("seed=3", "optim.clip=0.5", "data.lanes=4")
        )
    told = str(caught.value).split("\n")
    assert told[0] == f"{run_of().folder} holds a run with other settings:"
    assert told[1:4] == ["  data.lanes: 8 -> 4", "  optim.clip: 1.0 -> 0.5", "  seed: 0 -> 3"]


# ---- flat


def test_flat_by_hand() -> None:
    tree = {"a": 1, "b": {"c": [1, {"d": 2}], "e": {"f": None}}, "g": {}}
    assert runfolder.flat(tree) == {"a": 1, "b.c": [1, {"d": 2}], "b.e.f": None, "g": {}}
    assert runfolder.flat({}) == {}


# ---- a fresh start


def test_a_fresh_start_deletes_all_that_a_run_writes_but_what_is_in_use_meanwhile(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    for name in runfolder.OURS:
        if "." in name:
            runfolder.write_text(folder / name, "{}")
        else:
            (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / ".run.json.partial").touch()  # of a start that was killed
    runfolder.clear(folder)
    assert {path.name for path in folder.iterdir()} == {"logs", "lock"}


@pytest.mark.parametrize("beside_a_run", [True, False])
def test_a_fresh_start_refuses_a_folder_that_holds_something_else(
    beside_a_run: bool, tmp_path: Path
) -> None:
    thesis = tmp_path / "mine" / "thesis.tex"
    thesis.parent.mkdir()
    thesis.write_text("three years of work")
    (thesis.parent / "status").mkdir()  # written before anything is decided
    if beside_a_run:
        runfolder.write_record(thesis.parent, "run.json", {"name": "x"})
    with pytest.raises(
        ValueError, match="--fresh would delete .*/mine, which also holds thesis.tex"
    ):
        runfolder.clear(thesis.parent)
    assert thesis.read_text() == "three years of work"


@pytest.mark.parametrize("name", ["notes.txt", "step-00000092-best", "best"])
def test_a_fresh_start_refuses_what_somebody_put_among_the_checkpoints(
    name: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    for ours in ("step-00000001", ".step-00000002.partial", "step-00000003.broken", name):
        (folder / "checkpoints" / ours).mkdir(parents=True)
    with pytest.raises(ValueError, match=f"which also holds checkpoints/{name};"):
        runfolder.clear(folder)
    (folder / "checkpoints" / name).rmdir()
    runfolder.clear(folder)
    assert not list(folder.iterdir())


def test_ranks_that_a_start_has_no_more_are_forgotten(tmp_path: Path) -> None:
    (tmp_path / "status").mkdir()
    for name in ("rank-0.json", "rank-1.json", "rank-2.json", "rank-11.json", "token"):
        (tmp_path / "status" / name).touch()
    runfolder.forget_ranks(tmp_path, world=2)
    left = {path.name for path in (tmp_path / "status").iterdir()}
    assert left == {"rank-0.json", "rank-1.json", "token"}


def test_a_fresh_start_has_nothing_to_do_where_nothing_is(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("absent", "empty"):
        runfolder.clear(tmp_path / name)
    assert (tmp_path / "empty").is_dir()


# ---- records


def test_a_record_is_there_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "deep" / "run"
    assert runfolder.read_record(folder) is None and runfolder.read_summary(folder) is None
    runfolder.write_record(folder, "run.json", {"name": "first"})
    with pytest.raises(TypeError):
        runfolder.write_record(folder, "run.json", {"name": object()})

    def dies(path: Path, target: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", dies)
        with pytest.raises(KeyboardInterrupt):
            runfolder.write_record(folder, "run.json", {"name": "second"})
    assert runfolder.read_record(folder) == {"name": "first"}
    runfolder.write_record(folder, "summary.json", {"loss": 1.5})
    assert runfolder.read_summary(folder) == {"loss": 1.5}


def test_the_origin_of_a_start_is_recorded() -> None:
    told = runfolder.provenance()
    assert set(told["versions"]) >= {"torch", "accelerate", "deepspeed", "transformers"}
    assert told["commit"] is None or len(told["commit"]) == 40
    assert told["started"] > 1.7e9 and told["command"]
    json.dumps(told)  # goes into run.json


@pytest.mark.parametrize("git", ["none", "without a commit"])
def test_a_start_without_a_commit_is_recorded_all_the_same(
    git: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if git == "without a commit":  # what git says in a repository that holds none yet
        program = tmp_path / "git"
        program.write_text("#!/bin/sh\necho HEAD\nexit 128\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    runfolder._commit.cache_clear()
    try:
        assert runfolder.provenance()["commit"] is None
    finally:
        runfolder._commit.cache_clear()


def test_the_files_that_are_named_to_the_user_are_those_that_are_written(tmp_path: Path) -> None:
    text = runfolder.where_everything_is(tmp_path)
    assert text.startswith(f"run folder   {tmp_path}")
    for name in ("run.json", "metrics.jsonl", "evaluations.jsonl", "checkpoints/", "summary.json"):
        assert name in text


def test_what_make_suggests_next_loads_and_is_another_run() -> None:
    makefile = (Path(__file__).parent.parent / "Makefile").read_text()
    suggested = [part.split("'")[0] for part in makefile.split("make pretrain ARGS='")[1:]]
    assert len(suggested) == 2
    for command in suggested:
        assert run_of(*command.split()).folder != run_of().folder
