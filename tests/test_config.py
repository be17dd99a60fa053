"""The run file: strict types, every fault at once, no setting without effect, no torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from recipes.config import Run
from recipes.runfile import load_run, read_yaml

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = sorted((ROOT / "recipes" / "runs").glob("*.yaml"))


def whole() -> dict[str, Any]:
    """The smallest run file that is right."""
    return {
        "name": "small",
        "model": {"config": {"model_type": "gpt2"}},
        "data": {"kind": "hub", "path": "owner/set", "tokenizer": {"name": "gpt2"}},
        "batch": {"seq_len": 8, "global_sequences": 12, "micro": 3},
        "optim": {"lr": 0.001},
        "schedule": {"updates": 10},
        "checkpoint": {"every_updates": 5},
    }


def load(tree: dict[str, Any], folder: Path, *overrides: str) -> Run:
    """Write a run file and load it."""
    path = folder / "run.yaml"
    with path.open("w", encoding="utf-8") as file:
        YAML(typ="safe", pure=True).dump(tree, file)
    return load_run(path, list(overrides))


def faults(tree: dict[str, Any], folder: Path, *overrides: str) -> list[str]:
    """The fault lines of a run file that must be refused."""
    with pytest.raises(ValueError) as caught:
        load(tree, folder, *overrides)
    head, *lines = str(caught.value).split("\n")
    count = f"{len(lines)} problem{'s' if len(lines) > 1 else ''}"
    assert head == f"{count} in {folder / 'run.yaml'}:"
    return [line.strip() for line in lines]


def test_the_smallest_run_file_loads_with_its_defaults(tmp_path: Path) -> None:
    run = load(whole(), tmp_path)
    assert (run.optim.clip, run.checkpoint.keep, run.data.lanes) == (1.0, 2, 96)
    assert (run.schedule.shape, run.schedule.final_share) == ("cosine", 0.1)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_every_shipped_run_file_loads_and_is_named_after_its_file(path: Path) -> None:
    assert load_run(path).name == path.stem


def test_at_least_the_four_shipped_run_files_were_looked_at() -> None:
    assert {p.stem for p in SHIPPED} >= {"gpt2_xl", "gpt2_xl_40gb", "gpt2_small", "stdlib"}


def test_every_fault_is_reported_at_once_with_the_nearest_known_key(tmp_path: Path) -> None:
    tree = whole()
    tree["modle"] = {}
    tree["data"] |= {"packing": "bestfit", "lanes": 0}
    tree["optim"] = {"lrr": 0.1}
    tree["checkpoint"]["keep"] = 1
    found = faults(tree, tmp_path, "schedule.tokens=7", "zebra=1", "seed")
    assert sorted(found) == sorted(
        [
            "override 'seed': expected section.key=value",
            "modle: unknown key; did you mean model?",
            "zebra: unknown key; known here: name, seed, output_dir, model, data, batch, optim, "
            "schedule, checkpoint, evaluate, sample, log, ddp",
            "data.lanes=0: expected greater than 0",
            "data.packing='bestfit': expected 'concat' or 'best_fit'",
            "optim.lr: missing",
            "optim.lrr: unknown key; did you mean lr?",
            "schedule: give exactly one of samples, tokens, updates and epochs",
            "checkpoint.keep=1: expected greater than or equal to 2",
        ]
    )


def test_a_wrong_type_does_not_hide_a_fault_of_two_other_sections(tmp_path: Path) -> None:
    found = faults(whole(), tmp_path, "optim.lr=-1", "batch.micro=5")
    # The learning rate's sign has nothing to do with 12 sequences in micro-batches of 5.
    assert any(line.startswith("optim.lr=-1") for line in found)
    assert any("batch.global_sequences=12" in line for line in found), found


def test_unknown_keys_are_found_in_nested_sections(tmp_path: Path) -> None:
    tree = whole()
    tree["data"]["held_out"] = {"shar": 0.1}
    tree["data"]["tokenizer"] = {"nmae": "gpt2"}
    found = faults(tree, tmp_path)
    assert "data.held_out.shar: unknown key; did you mean share?" in found
    assert "data.tokenizer.nmae: unknown key; did you mean name?" in found


@pytest.mark.parametrize(
    ("text", "place", "value"),
    [
        ("optim.lr=1e-4", "optim.lr", 1e-4),  # YAML 1.1 would read text
        ("optim.lr=6e-4", "optim.lr", 6e-4),
        ("batch.micro=4", "batch.micro", 4),
        ("optim.betas=[0.8, 0.99]", "optim.betas", [0.8, 0.99]),
        ("model.config.n_layer=3", "model.config", {"model_type": "gpt2", "n_layer": 3}),
        ("ddp.compress=no", "ddp.compress", "no"),  # YAML 1.1 would read false
        ("ddp.static_graph=true", "ddp.static_graph", True),
        ("name=hotter", "name", "hotter"),
        ("output_dir=a=b", "output_dir", "a=b"),  # only the first = parts key and value
        ("seed=", "seed", None),
    ],
)
def test_an_override_replaces_one_value(text: str, place: str, value: Any, tmp_path: Path) -> None:
    if value is None:
        assert faults(whole(), tmp_path, text) == ["seed=None: expected a valid integer"]
        return
    found: Any = load(whole(), tmp_path, text)
    for part in place.split("."):
        found = getattr(found, part)
    assert found == value and type(found) is type(value)


def test_an_override_can_add_a_section(tmp_path: Path) -> None:
    run = load(whole(), tmp_path, "sample.prompt=Hello", "sample.tokens=5")
    assert run.sample is not None and (run.sample.prompt, run.sample.tokens) == ("Hello", 5)


@pytest.mark.parametrize("text", ["lr", "=3", "", "optim.lr.x=1", "name.x=1"])
def test_an_override_that_names_no_key_is_refused(text: str, tmp_path: Path) -> None:
    (line,) = faults(whole(), tmp_path, text)
    assert line.startswith(f"override {text!r}: ")


def test_an_override_that_is_no_yaml_is_a_fault_among_the_others(tmp_path: Path) -> None:
    found = faults(whole(), tmp_path, "optim.betas=[1", "batch.micro=0")
    assert len(found) == 2
    assert any(line.startswith("override 'optim.betas=[1' is not valid YAML") for line in found)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ('batch.micro="8"', "batch.micro='8': expected a valid integer"),
        ("batch.micro=8.0", "batch.micro=8.0: expected a valid integer"),
        ("batch.micro=true", "batch.micro=True: expected a valid integer"),
        ('optim.lr="1e-4"', "optim.lr='1e-4': expected a valid number"),
        ("model.compile=1", "model.compile=1: expected a valid boolean"),
        ("optim.betas=[0.9]", "optim.betas=[0.9]: List should have at least 2 items"),
        ("optim.betas=[0.9, 1.0]", "optim.betas.1=1.0: expected less than 1"),
        ("schedule.final_share=1.1", "schedule.final_share=1.1: expected less than or equal to 1"),
        ("batch.seq_len=1", "batch.seq_len=1: expected greater than or equal to 2"),
        ("name=a/b", "name='a/b': "),
        ("log.trackers=[comet]", "log.trackers.0='comet': expected 'tensorboard', 'wandb'"),
    ],
)
def test_types_and_ranges_are_strict(override: str, line: str, tmp_path: Path) -> None:
    (found,) = faults(whole(), tmp_path, override)
    assert found.startswith(line)


@pytest.mark.parametrize("override", ["optim.lr=.inf", "optim.lr=.nan", "schedule.epochs=.inf"])
def test_numbers_that_no_run_could_use_are_refused(override: str, tmp_path: Path) -> None:
    tree = whole()
    if "epochs" in override:
        tree["schedule"] = {}
    assert len(faults(tree, tmp_path, override)) == 1


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"model": {"pretrained": "gpt2", "config": {"model_type": "gpt2"}}}, "give either config"),
        ({"model": {}}, "model: give either config (from scratch) or pretrained"),
        ({"model": {"config": {"n_layer": 2}}}, "config needs model_type, for example gpt2"),
        (
            {"model": {"config": {"model_type": "gpt2"}, "revision": "main"}},
            "revision has no effect without pretrained",
        ),
        ({"schedule": {}}, "give exactly one of samples, tokens, updates and epochs"),
        ({"schedule": {"samples": 1, "epochs": 1.0}}, "give exactly one of samples"),
        (
            {"schedule": {"updates": 10, "tokens_per_sample": 100.0}},
            "tokens_per_sample has no effect unless the length is in samples or epochs",
        ),
        (
            {"schedule": {"updates": 10, "shape": "constant", "final_share": 0.5}},
            "final_share has no effect",
        ),
    ],
)
def test_a_section_that_contradicts_itself_is_refused(
    change: dict[str, Any], line: str, tmp_path: Path
) -> None:
    (found,) = faults(whole() | change, tmp_path)
    assert line in found


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        ({"kind": "hub"}, ["hub needs path"]),
        ({"kind": "files"}, ["files needs format", "files needs files"]),
        ({"kind": "saved"}, ["saved needs path"]),
        ({"kind": "saved", "path": "p", "name": "n"}, ["name='n' has no effect with kind: saved"]),
        ({"kind": "hub", "path": "p", "files": ["f"]}, ["files=['f'] has no effect"]),
        ({"kind": "hub", "path": "p", "format": "text"}, ["format='text' has no effect"]),
        ({"kind": "python_stdlib", "path": "p"}, ["path='p' has no effect"]),
        (
            {"kind": "python_stdlib", "held_out": {"split": "test"}},
            ["python_stdlib has no splits; give held_out.share"],
        ),
        ({"kind": "hub", "path": "p", "held_out": {}}, ["give either split (its name) or share"]),
        ({"kind": "hub", "path": "p", "tokenizer": {}}, ["give exactly one of name, file and"]),
        (
            {"kind": "hub", "path": "p", "tokenizer": {"name": "a", "file": "b"}},
            ["give exactly one of name, file and train_vocab_size"],
        ),
        (
            {"kind": "hub", "path": "p", "tokenizer": {"file": "b", "revision": "r"}},
            ["revision has no effect without name"],
        ),
    ],
)
def test_each_kind_of_data_has_its_own_keys(
    data: dict[str, Any], lines: list[str], tmp_path: Path
) -> None:
    tree = whole()
    tree["data"] = {"tokenizer": {"name": "gpt2"}} | data
    tree["evaluate"] = {"every_updates": 1, "sequences": 1}
    tree["data"].setdefault("held_out", {"share": 0.1})
    text = "\n".join(faults(tree, tmp_path))
    assert all(line in text for line in lines), text


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["batch.micro=5"], "batch.global_sequences=12 must be a multiple of batch.micro=5"),
        (["evaluate.every_updates=1", "evaluate.sequences=1"], "evaluate needs data.held_out"),
        (["data.held_out.share=0.1"], "data.held_out has no effect without a"),
        (["schedule.warmup_updates=11"], "schedule.warmup_updates=11 is more than"),
        (
            ["data.document_mask=true", "model.attention=flash_attention_2"],
            "loses the mask at micro-batches above one; use sdpa",
        ),
    ],
)
def test_each_fault_between_two_sections(overrides: list[str], line: str, tmp_path: Path) -> None:
    (found,) = faults(whole(), tmp_path, *overrides)
    assert line in found


def test_all_faults_between_sections_come_together(tmp_path: Path) -> None:
    found = faults(
        whole(), tmp_path, "batch.micro=5", "data.held_out.share=0.1", "schedule.warmup_updates=11"
    )
    assert len(found) == 3


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("name: a\nseed: 1\nname: b\n", 'found duplicate key "name"'),
        ("name: [a\n", "is not valid YAML"),
        ("- name\n", "holds list, expected sections such as model: and data:"),
        ("", "holds NoneType"),
    ],
)
def test_a_file_that_is_no_run_file_is_refused(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError) as caught:
        load_run(path)
    assert told in str(caught.value) and str(path) in str(caught.value)


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent\.yaml can't be read: No such file"):
        load_run(tmp_path / "absent.yaml")
    path = tmp_path / "latin1.yaml"
    path.write_bytes("name: café".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin1\.yaml"):
        read_yaml(path)


def test_a_run_is_frozen(tmp_path: Path) -> None:
    run = load(whole(), tmp_path)
    with pytest.raises(ValueError, match="frozen"):
        run.batch.micro = 4  # type: ignore[misc]


def test_the_run_folder_is_absolute_and_named_after_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load(whole(), tmp_path).folder == tmp_path / "outputs" / "small"
    assert load(whole(), tmp_path, "output_dir=there").folder == tmp_path / "there"
    assert load(whole(), tmp_path, "output_dir=/there").folder == Path("/there")


class Recipe:
    """`recipes/pretrain.py` in a process in which nothing heavy can be imported."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("torch", "transformers", "accelerate", "deepspeed", "datasets"):
            (folder / f"{name}.py").write_text(f"raise SystemExit('{name} was imported')\n")

    def start(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run it from the root."""
        return subprocess.run(
            [sys.executable, "recipes/pretrain.py", *arguments],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(self.folder), "LOCAL_RANK": "0", "RANK": "0"},
            capture_output=True,
            text=True,
            timeout=60,
        )


def test_help_needs_no_torch(tmp_path: Path) -> None:
    done = Recipe(tmp_path).start("--help")
    assert done.returncode == 0, done.stderr
    assert "section.key=value" in done.stdout


def test_a_faulty_run_file_is_refused_before_torch_with_exit_code_2(tmp_path: Path) -> None:
    done = Recipe(tmp_path).start(
        "recipes/runs/stdlib.yaml", "batch.micro=0", "--accelerate_config", "x.yaml", "optim.lrr=1"
    )
    assert done.returncode == 2, done.stderr
    assert "2 problems in recipes/runs/stdlib.yaml:" in done.stderr
    assert "Traceback" not in done.stderr and "was imported" not in done.stderr


def test_an_abbreviated_option_is_refused(tmp_path: Path) -> None:
    assert Recipe(tmp_path).start("recipes/runs/stdlib.yaml", "--fres").returncode == 2


def test_the_recipe_does_reach_for_torch_once_the_run_file_is_right(tmp_path: Path) -> None:
    done = Recipe(tmp_path).start("recipes/runs/stdlib.yaml", f"output_dir={tmp_path / 'out'}")
    assert "torch was imported" in done.stderr  # or the two tests above could not fail
