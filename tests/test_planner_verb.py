"""`octet plan`: what it takes, what it refuses, and that it answers without torch."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from planned import COMMANDS, ROOT, XL, answered, part_of, plan

SECTIONS = [
    "1 Strategy",
    "2 Memory",
    "3 Batch",
    "4 Communication",
    "5 Time and money",
    "6 Scaling",
]
ONE_NODE = (XL[0], "--gpus", "8", "--gpu", "a100-80gb")
HUGE = ("batch.global_sequences=7680000000", "batch.micro=1")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_whole_answer_in_six_sections(name: str) -> None:
    code, out, err = plan(*COMMANDS[name])
    assert (code, err) == (0, "")
    places = [out.index(f"\n{section}\n") for section in SECTIONS]
    assert places == sorted(places)
    assert out.startswith(f"{name}: ")
    head = part_of(out, "headline")
    for label in ("take", "fits", "speed", "run", "as asked"):
        assert f"\n  {label} " in head
    assert not [line for line in out.splitlines() if len(line) > 110]
    assert not [line for line in out.splitlines() if line != line.rstrip()]


def test_an_answer_loads_neither_torch_nor_numpy() -> None:
    program = (
        "import sys\nfrom recipes.cli import main\n"
        "assert main(['plan', *sys.argv[1:]]) == 0\n"
        "heavy = {'torch', 'transformers', 'accelerate', 'deepspeed', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *XL], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_a_terminal_that_knows_few_characters_gets_an_answer_too() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "recipes.cli", "plan", *XL],
        cwd=ROOT,
        env={"PYTHONIOENCODING": "ascii", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "6 Scaling" in done.stdout


def test_nodes_and_gpus_stand_for_a_hostfile() -> None:
    def sections(*words: str) -> str:
        code, out, err = plan(*words)
        assert code == 0, err
        return out.partition("1 Strategy")[2]  # the headline's command names the hostfile

    words = [word for word in XL if word not in ("--hostfile", "hostfile")]
    assert sections(*XL)
    assert sections(*words, "--nodes", "2", "--gpus", "4") == sections(*XL)
    assert sections(*words) == sections(*XL)  # hostfile is the default


def test_overrides_are_of_the_run_file() -> None:
    code, out, _ = plan(*XL, "batch.global_sequences=384", "name=half")
    assert code == 0
    assert out.startswith("half: ")
    assert "384 x 1,024 tokens an update" in out


def test_auto_takes_the_plan_s_micro_batch(tmp_path: Path) -> None:
    found = answered(tmp_path, *XL, "batch.micro=auto")
    assert found["batch"]["asked_micro"] == "auto"
    asked, chosen = found["strategy"]["asked"], found["strategy"]["chosen"]
    assert asked["fits"]
    assert asked["update"]["value"] == pytest.approx(chosen["update"]["value"], rel=0.02)


def test_a_micro_batch_that_does_not_divide_is_lowered_and_told() -> None:
    # 24 GPUs get 32 sequences each; 768 sequences of evaluation too.
    words = [word if word != "hostfile" else "" for word in XL if word != "--hostfile"]
    words = [word for word in words if word]
    code, out, _ = plan(*words, "--nodes", "6", "--gpus", "4", "batch.micro=32")
    assert code == 0 and "note" not in part_of(out, "headline")
    code, out, _ = plan(*words, "--nodes", "12", "--gpus", "4", "batch.micro=32")
    assert "batch.micro=32 can't be used on 48 GPUs" in out
    assert "planned with 16, of 1 2 4 8 16" in " ".join(out.split())


def test_the_command_of_the_headline_can_be_pasted(monkeypatch: pytest.MonkeyPatch) -> None:
    from recipes import cli

    _, out, _ = plan(*XL)
    [typed] = re.findall(r"(?ms)^  start +(octet .*?)^  fits", out)
    words = shlex.split(typed.replace("\\\n", " "))
    monkeypatch.chdir(ROOT)
    assert cli.main([*words[1:], "--dry-run"]) == 0


# ---- faults


def test_every_fault_at_once(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=0\n")
    code, out, err = plan(
        *("no.yaml", "--hostfile", str(tmp_path / "hosts"), "--gpu", "a100-80"),
        *(
            "--price",
            "-1",
            "--mtbf",
            "0",
            "--measured",
            "nothing.json",
            "--tokens-per-sample",
            "-3",
        ),
        *("--hardware", "mine.yaml", "--html", str(tmp_path / "no" / "x.html")),
    )
    assert (code, out) == (2, "")
    for part in (
        "no.yaml can't be read",
        "a slots=0",
        "--price -1: expected",
        "--mtbf 0: expected",
        "--tokens-per-sample -3: expected",
        "nothing.json",
        "mine.yaml can't be read",
        "x.html can't be written",
    ):
        assert part in err, err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--hostfile", "hostfile"), "name a run file"),
        ((*XL[:5], "--nic", "200gbit"), None),
        ((*XL[:3], "--nic", "200gbit"), "name the GPU: --gpu NAME, one of v100-16gb"),
        ((*XL[:3], "--gpu", "a100-80g", "--nic", "1gbit"), "did you mean a100-80gb"),
        (XL[:5], "name the network between the 2 nodes: --nic 200gbit"),
        ((*XL[:5], "--nic", "fast"), "--nic 'fast' is not in the hardware table"),
        ((*XL[:5], "--nic", "0gbit"), "--nic '0gbit'"),
        ((*XL, "--nodes", "2", "--gpus", "4"), "--hostfile hostfile has no effect with --nodes"),
        ((XL[0], *XL[3:], "--nodes", "2"), "--nodes 2 needs --gpus N"),
        ((XL[0], *XL[3:], "--nodes", "0", "--gpus", "0"), "--nodes 0: expected 1 or more"),
        ((XL[0], *XL[3:], "--nodes", "0", "--gpus", "0"), "--gpus 0: expected 1 or more"),
        ((*ONE_NODE[:2], "5", *ONE_NODE[3:]), "5 GPUs can't share batch.global_sequences=768"),
        ((*ONE_NODE[:2], "5", *ONE_NODE[3:]), "nearest: 4 or 6"),
        ((*ONE_NODE, "--nic", "200gbit", "--worlds", "8"), "--nic 200gbit has no effect"),
        ((*ONE_NODE, "--worlds", "8,16"), "--worlds 8,16 needs --nic"),
        ((*XL, "--worlds", "8,9"), "9 is no whole number of nodes with 4 GPUs"),
        ((*XL, "--worlds", "8,x"), "expected numbers of GPUs as 8,64,1024"),
        ((*XL, "--worlds", "40,80"), "can't be shared by 40 GPUs"),
        ((*XL[:3], "--gpu", "v100-32gb", "--nic", "1gbit", "--precision", "bf16"), "has no bf16"),
        (
            (*XL, "--precision", "fp16", "--config", "accelerate_configs/ddp_fp16.yaml"),
            "--precision fp16 has no effect with --config",
        ),
        ((*XL, "--config", "accelerate_configs/local_ddp_bf16.yaml"), "runs on the CPU"),
        ((*XL, "--config", "accelerate_configs/none.yaml"), "none.yaml"),
        ((*XL, "schedule.samples=null", "schedule.epochs=2"), "schedule.epochs=null"),
        (
            (*XL, "schedule.samples=null", "schedule.updates=9000", "--tokens-per-sample", "9"),
            "--tokens-per-sample 9 has no effect",
        ),
        (
            (*XL, "schedule.tokens_per_sample=7.0", "--tokens-per-sample", "9"),
            "schedule.tokens_per_sample=7 stands in the run file",
        ),
        ((*XL, "model.config=null", "model.pretrained=gpt2"), "hf download gpt2 config.json"),
        ((*XL, "batch.micro=0"), "batch.micro=0: expected greater than 0"),
        ((*XL, "--ledger", "outputs"), "has no effect with --ledger"),
        (("--ledger", "x", "--price", "0", "--nodes", "0"), "--nodes --price has no effect with"),
        ((*XL, "--json", "-"), "the text goes to the standard output"),
        ((*XL, "--json", ""), "--json '': expected the name of a file"),
        ((*XL, "--config", ""), "--config '': expected the name of a file"),
        ((*XL, "--html", "x", "--json", "./x"), "--html x would be written over --json ./x"),
        ((*XL, "--json", XL[0]), f"--json {XL[0]} would be written over {XL[0]}"),
        ((*XL, "--worlds", "8,1000008"), "at most 100 numbers, none above 1,000,000"),
        ((*XL, "--worlds", "9" * 5000), "expected numbers of GPUs as 8,64,1024"),
        ((*ONE_NODE[:2], "2000000", *ONE_NODE[3:]), "the plan knows up to 1,000,000 GPUs"),
        ((*XL, "--mtbf", "1e308"), "--mtbf 1e+308: expected hours between failures of one GPU"),
        ((*XL, "--tokens-per-sample", "1e306"), "--tokens-per-sample 1e+306: expected a mean"),
        ((*XL[:-1], "1e308"), "--price 1e+308: expected the price of a GPU-hour, from 0 to 1,000"),
        ((*XL, f"schedule.samples={10**20}"), "schedule.samples=1e+20: the plan counts up to"),
        ((*XL, "model.config.n_layer=100000"), "expected a whole number from 1 to 10,000"),
        ((*XL, "model.config.n_layers=4"), "n_layers=4: unknown key; did you mean n_layer?"),
        ((*XL, "evaluate.sequences=100"), "100 can't be shared by 8 ranks equally; nearest: 96 or"),
        (
            (*XL, "evaluate.sequences=3"),
            "evaluate.sequences=3 can't be shared by 8 ranks equally; ",
        ),
        ((*XL[:5], "--nic", "1mbit"), "--nic '1mbit': expected 0.1gbit to 100tbit"),
        (
            (*XL[:4], "v100-32gb", *XL[5:], "model.attention=flash_attention_2"),
            "flash_attention_2 does not run on v100-32gb, it needs Ampere or newer; use sdpa",
        ),
    ],
)
def test_wrong_use_is_refused_with_the_remedy(words: tuple[str, ...], told: str | None) -> None:
    code, out, err = plan(*words)
    if told is None:
        assert code == 0, err
        return
    assert (code, out) == (2, "")
    assert told in err, err


def test_a_broken_run_file_hides_no_other_fault() -> None:
    """No run file, none that can be read, and a model that only --trace knows or doesn't."""
    words = ("--gpu", "nope", "--price", "-1", "--nodes", "2", "--gpus", "4")
    for run, told in (((), "name a run file"), (("no.yaml",), "no.yaml can't be read")):
        code, _, err = plan(*run, *words)
        assert code == 2
        for part in (told, "--gpu 'nope'", "--price -1", "name the network between the 2 nodes"):
            assert part in err, err
    for model, told in (
        ("pretrained: no/such", "hf download no/such config.json"),
        ("config: {model_type: gpt2, n_head: 7}", "768 can't be divided among 7 heads"),
    ):
        code, _, err = plan(XL[0], f"model={{{model}}}", "--trace", *words)
        assert code == 2
        assert told in err and "--gpu 'nope'" in err, err


def test_numbers_without_bounds_are_planned_at_once() -> None:
    code, _, err = plan(*ONE_NODE[:2], "1", *ONE_NODE[3:], *HUGE)
    assert code == 0, err


def test_a_full_disk_under_the_output_is_told_and_a_closed_pipe_is_not(tmp_path: Path) -> None:
    program = "import sys; from recipes.cli import main; sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", program, "plan", *XL, "--json", str(tmp_path / "x.json")]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(words, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr.strip() == ("the standard output can't be written: No space left on device")
    assert json.loads((tmp_path / "x.json").read_text())  # the file is whole all the same
    piped = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert piped.stdout is not None and piped.stderr is not None
    piped.stdout.close()
    assert (piped.stderr.read(), piped.wait()) == (b"", 0)
    piped.stderr.close()


def test_flex_attention_is_planned_with_a_note(tmp_path: Path) -> None:
    found = answered(tmp_path, *XL, "model.attention=flex_attention")
    assert any("flex_attention is planned as if" in note for note in found["notes"])


def test_an_uneven_hostfile_is_told(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=4\nb slots=2\n")
    code, _, err = plan(XL[0], "--hostfile", str(tmp_path / "hosts"), *XL[3:])
    assert code == 2
    assert "has nodes of 2 and 4 GPUs; the plan knows equal nodes" in err


# ---- options that change the answer


def test_a_strategy_file_is_what_is_asked(tmp_path: Path) -> None:
    code, out, err = plan(*XL, "--config", "accelerate_configs/ddp_fp16.yaml", "batch.micro=8")
    assert code == 0, err
    assert "as asked      DDP, micro 8 x 12: " in out
    found = answered(tmp_path, *XL, "--config", "accelerate_configs/zero1_bf16.yaml")
    assert found["question"]["precision"] == "bf16"
    assert found["strategy"]["asked"]["config"] == "accelerate_configs/zero1_bf16.yaml"


def test_auto_buckets_are_flagged(tmp_path: Path) -> None:
    tree = json.loads((ROOT / "ds_configs" / "zero1_fp16.json").read_text())
    tree["zero_optimization"]["reduce_bucket_size"] = "auto"
    (tmp_path / "auto.json").write_text(json.dumps(tree))
    arm = (ROOT / "accelerate_configs" / "zero1_fp16.yaml").read_text()
    path = tmp_path / "auto.yaml"
    path.write_text(arm.replace("ds_configs/zero1_fp16.json", str(tmp_path / "auto.json")))
    code, out, err = plan(*XL, "--config", str(path))
    assert code == 0, err
    assert "hidden_size squared = 2,560,000 elements" in " ".join(out.split())


def test_more_hardware_by_a_file(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "gpus:\n  my-gpu:\n    source: a test\n    memory_gib: 94.0\n    flops_16bit: 8.35e14\n"
        "    flops_32bit: 5.1e13\n    matmul_share: 0.75\n    sms: 100\n"
        "    memory_bytes_per_s: 3.9e12\n"
        "    link: nvlink\n    link_bytes_per_s: 2.5e11\n"
    )
    code, out, err = plan(*XL[:4], "my-gpu", *XL[5:], "--hardware", str(mine))
    assert code == 0, err
    assert "2 nodes of 4 my-gpu" in out


def test_a_trace_counts_the_real_model(tmp_path: Path) -> None:
    words = ("recipes/runs/rehearsal.yaml", "--gpus", "2", "--gpu", "a100-80gb")
    plain, traced = answered(tmp_path, *words), answered(tmp_path, *words, "--trace")
    assert (plain["question"]["model"]["traced"], traced["question"]["model"]["traced"]) == (
        False,
        True,
    )
    sources = {i["bytes"]["source"] for p in traced["memory"]["phases"] for i in p["items"]}
    assert "traced" in sources
    peaks = [found["memory"]["allocated"]["value"] for found in (plain, traced)]
    assert peaks[1] == pytest.approx(peaks[0], rel=0.02)


def test_a_preflight_stands_in_for_the_table(tmp_path: Path) -> None:
    sums = [
        {"op": "all_reduce", "group": group, "correct": True, "bytes": size, "seconds": seconds}
        | {"busbw_bytes_per_s": rate}
        for group, rate in (("node", 2e11), ("all", 1e10))
        for size, seconds in ((8, 5e-5), (2**28, 0.05))
    ]
    measured = {"schema": 1, "device": "NVIDIA A100-SXM4-80GB", "hosts": ["a"] * 4 + ["b"] * 4}
    measured |= {"network": {"collectives": sums}}
    path = tmp_path / "preflight.json"
    path.write_text(json.dumps({"measured": measured}))
    found = answered(tmp_path, *XL[:5], "--measured", str(path))  # no --nic: it is measured
    assert found["question"]["nic"]["bits_per_s"] == 8e10
    big = found["communication"]["transfers"][0]
    assert big["seconds"]["source"] == "measured"
    assert str(path) in big["seconds"]["basis"]
    assert any("not measured" in note and "matrix products" in note for note in found["notes"])
    code, _, err = plan(*XL, "--measured", str(path))
    assert code == 2
    assert f"--nic 200gbit has no effect: {path} measured the network" in err
    code, _, err = plan(*XL[:4], "h100-80gb", *XL[5:], "--measured", str(path))
    assert code == 2
    assert "was measured on NVIDIA A100-SXM4-80GB" in err


def test_a_ledger_of_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from recipes.advice import ledger

    seen: list[Any] = []

    def found(folders: list[str]) -> dict[str, Any]:
        seen.extend(folders)
        return {"starts": []}

    monkeypatch.setattr(ledger, "ledger", found)
    monkeypatch.setattr(ledger, "ledger_text", lambda result: f"{len(result['starts'])} starts")
    code, out, _ = plan("--ledger", "outputs/a", "outputs/b", "--json", str(tmp_path / "l.json"))
    assert (code, out, seen) == (0, "0 starts\n", ["outputs/a", "outputs/b"])
    assert json.loads((tmp_path / "l.json").read_text()) == {"starts": []}
