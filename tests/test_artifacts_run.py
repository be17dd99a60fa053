"""A real run with the real engine, then everything that comes after training, by command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT, records, run

from recipes.cli import main

ARM = "accelerate_configs/local_ddp_bf16.yaml"
# What somebody with nothing but transformers does with the folder, deepspeed and ours not there.
ELSEWHERE = """
import json, runpy, sys
fresh = runpy.run_path(sys.argv[1])
sys.meta_path[:] = [fresh["WithoutSome"](finder) for finder in sys.meta_path]
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[2]).eval()
tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
inputs = tokenizer("def ", return_tensors="pt")
with torch.no_grad():
    out = model.generate(**inputs, max_new_tokens=12, do_sample=False)
assert not {"deepspeed", "recipes"} & set(sys.modules)
print(json.dumps(tokenizer.decode(out[0], skip_special_tokens=True)))
"""


@pytest.fixture(scope="module")
def finished(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny run in fp32 on two ranks, to its end."""
    folder = tmp_path_factory.mktemp("finished")
    text = (ROOT / ARM).read_text()
    assert "mixed_precision: bf16" in text
    arm = folder / "local_ddp_fp32.yaml"
    arm.write_text(text.replace("mixed_precision: bf16", 'mixed_precision: "no"'))
    script = ["recipes/pretrain.py", str(tiny_run), "--accelerate_config", str(arm)]
    ended = run("torchrun", 2, [*script, f"output_dir={folder / 'run'}"], folder / "log")
    assert ended.code == 0, ended.text[-4000:]
    return folder / "run"


def test_a_real_run_leaves_as_a_model(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["export", str(finished), str(out)]) == 0
    assert "are equal bit for bit" in capsys.readouterr().out
    facts = json.loads((out / "octet.json").read_text())
    assert (facts["name"], facts["step"], facts["world"]) == ("tiny", 8, 2)
    assert facts["tokens"] == records(finished)[-1]["total_tokens"]
    assert facts["held_out"] == {
        key: value for key, value in records(finished, "evaluations")[-1].items() if key != "time"
    }
    assert facts["versions"]["torch"] and set(facts["fingerprints"])

    # The same held-out loss as the run's own, from the checkpoint and from the export.
    own = records(finished, "evaluations")[-1]["held_out_loss"]
    for model in (finished, out):
        assert main(["evaluate", str(model), "--device", "cpu", "--json"]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["loss"] == pytest.approx(own, rel=1e-5)
        assert result["runs_own_loss"] == own
        assert result["sequences"] == 16 and result["tokens"] == 16 * 32
        assert result["text_bytes"] > result["tokens"] and result["bytes_are_exact"]

    # The same continuation as elsewhere.
    words = ["--prompt", "def ", "--tokens", "12", "--greedy", "--device", "cpu"]
    assert main(["generate", str(finished), *words]) == 0
    text = capsys.readouterr().out
    script = str(ROOT / "recipes" / "artifacts" / "fresh_load.py")
    done = subprocess.run(
        [sys.executable, "-I", "-c", ELSEWHERE, script, str(out)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) + "\n" == text
