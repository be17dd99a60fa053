"""From the command to the first applied update, against a script that does only what it must.

    python benchmarks/startup.py

Both sides start two ranks of ZeRO-1 in bf16 on this machine's CPU under `accelerate launch`, with
the embedded default's model. The bare script imports the same libraries, prepares the same engine
and trains on random tokens: no data, no checks, no evaluation. They take turns.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
ROUNDS = 3
YAML = "accelerate_configs/local_zero1_bf16.yaml"
BARE = """
import json, os, sys, torch
os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed.ops
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import InitProcessGroupKwargs
from transformers import AutoConfig, AutoModelForCausalLM
tree = json.load(open("ds_configs/zero1_bf16.json"))
tree |= {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
tree |= {"gradient_clipping": 1.0, "train_batch_size": 16}
accelerator = Accelerator(
    deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=tree), gradient_accumulation_steps=2,
    kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
config = AutoConfig.for_model("gpt2", n_layer=6, n_embd=256, n_head=4, n_positions=256,
                              vocab_size=4096, bos_token_id=0, eos_token_id=0)
model = AutoModelForCausalLM.from_config(config)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
for _ in range(2):
    with accelerator.accumulate(model):
        ids = torch.randint(0, 4096, (4, 256))
        accelerator.backward(model(input_ids=ids, labels=ids).loss)
print("FIRST UPDATE", flush=True)
"""


def launch(script: list[str]) -> subprocess.Popen[str]:
    """Start two ranks."""
    words = [str(Path(sys.executable).parent / "accelerate"), "launch", "--config_file", YAML]
    return subprocess.Popen(
        [*words, *script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def time_bare(folder: Path) -> float:
    """Seconds to the first update of the bare script."""
    script = folder / "bare.py"
    script.write_text(BARE)
    started = time.perf_counter()
    process = launch([str(script)])
    assert process.stdout is not None
    for line in process.stdout:
        if "FIRST UPDATE" in line:
            took = time.perf_counter() - started
            process.wait()
            return took
    raise RuntimeError("the bare script failed")


def time_recipe(folder: Path) -> float:
    """Seconds to the recipe's first applied update, its held-out evaluation included."""
    out = folder / "run"
    settings = ["schedule.updates=1", "schedule.warmup_updates=0", "log.every_updates=1"]
    started = time.time()
    process = launch(
        [
            "recipes/pretrain.py",
            "recipes/runs/stdlib.yaml",
            "--fresh",
            f"output_dir={out}",
            *settings,
        ]
    )
    assert process.wait() == 0, "the recipe failed"
    record = json.loads((out / "metrics.jsonl").read_text().splitlines()[0])
    return float(record["time"]) - started


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        time_recipe(Path(folder))  # trains the tokenizer, warms the disk's cache
        times: dict[str, list[float]] = {"bare": [], "recipe": []}
        for _ in range(ROUNDS):
            times["bare"].append(time_bare(Path(folder)))
            times["recipe"].append(time_recipe(Path(folder)))
    bare, ours = median(times["bare"]), median(times["recipe"])
    print("\n| side | s from command to first update | ratio |\n|---|--:|--:|")
    print(f"| bare script | {bare:.1f} | 1 |\n| recipe | {ours:.1f} | {ours / bare:.2f} |")


if __name__ == "__main__":
    main()
