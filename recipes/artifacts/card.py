"""The model card of an export: what the run was, in words, and as metadata for the hub."""

from __future__ import annotations

import json
import math
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

USE = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # where this file lies
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
inputs = tokenizer({prompt}, return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))
```"""


def model_card(facts: dict[str, Any]) -> str:
    """README.md of an exported folder: YAML front matter, then Markdown.

    Args:
        facts: `recipes.artifacts.facts` with `dtype`, `parameters`, `max_length` and `proof`.
    """
    config = facts["config"]
    prompt = (config.get("sample") or {}).get("prompt") or "The"
    lines = [
        "---",
        metadata(facts).to_yaml().rstrip(),
        "---",
        "",
        f"# {facts['name']}",
        "",
        f"A causal language model with {facts['parameters']:,} parameters, "
        f"{_origin(config)}, by Octet's recipe (Accelerate and DeepSpeed).",
        "",
        "## Use",
        "",
        USE.format(prompt=json.dumps(prompt, ensure_ascii=False)),
        "",
        f"The longest text it was made for has {facts['max_length']:,} tokens. Documents end with "
        f"`{facts['end_of_text']}`, which is also the padding; nothing is put before a text.",
        "",
        "## Training",
        "",
        *_table(_rows(facts)),
        "",
        "## Check",
        "",
        facts["proof"],
        "",
        "`octet.json` holds all settings of the run. Licence, language, intended use and known "
        "limits are not recorded: add them before you publish the model.",
        "",
    ]
    return "\n".join(lines)


def metadata(facts: dict[str, Any]) -> ModelCardData:
    """The front matter."""
    config = facts["config"]
    data, model = config.get("data") or {}, config.get("model") or {}
    known: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["octet", "causal-lm", "pretraining"],
        "model_name": facts["name"],
    }
    if data.get("kind") == "hub":
        known["datasets"] = [data["path"]]
    if model.get("pretrained"):
        known["base_model"] = model["pretrained"]
    known["eval_results"] = _results(facts, data)
    return ModelCardData(**known)


def _results(facts: dict[str, Any], data: dict[str, Any]) -> list[EvalResult]:
    held_out = facts.get("held_out") or {}
    where: dict[str, Any] = {"dataset_type": data.get("path") or data.get("kind") or "unknown"}
    where |= {"dataset_name": f"held out of {_source(facts)}", "task_type": "text-generation"}
    named = {"held_out_loss": "loss", "held_out_perplexity": "perplexity"}
    return [
        EvalResult(**where, metric_type=kind, metric_name=f"held-out {kind}", metric_value=value)
        for key, kind in named.items()
        if isinstance(value := held_out.get(key), (int, float)) and math.isfinite(value)
    ]


def _origin(config: dict[str, Any]) -> str:
    model = config.get("model") or {}
    if not model.get("pretrained"):
        return f"a {(model.get('config') or {}).get('model_type', 'model')} trained from scratch"
    revision = f" at {model['revision']}" if model.get("revision") else ""
    return f"trained further from {model['pretrained']}{revision}"


def _source(facts: dict[str, Any]) -> str:
    data = facts["config"].get("data") or {}
    kind = str(data.get("kind") or "unknown data")
    if kind == "files":  # whose paths say something about one machine only
        return f"{data.get('format')} files"
    if kind == "python_stdlib":
        return "the sources of Python's standard library"
    parts = [data.get("path") or kind, data.get("name"), data.get("split")]
    text = ", ".join(str(part) for part in parts if part)
    return f"{text} at {facts['revision']}" if facts.get("revision") else text


def _rows(facts: dict[str, Any]) -> dict[str, str]:
    batch, held_out = facts["config"].get("batch") or {}, facts.get("held_out") or {}
    rows = {"run": str(facts["name"]), "updates": _count(facts["step"])}
    rows |= {"tokens": _count(facts["tokens"]), "documents": _count(facts["samples"])}
    if batch:
        rows["batch"] = (
            f"{_count(batch['global_sequences'])} sequences of {_count(batch['seq_len'])} tokens"
        )
    rows["data"] = _source(facts)
    if "held_out_loss" in held_out:
        rows["held-out loss"] = (
            f"{held_out['held_out_loss']:.4f} nats per token at update {_count(held_out['step'])}"
        )
    rows["strategy"] = f"{facts['strategy']} on {_count(facts['world'])} ranks"
    rows["weights"] = f"{facts['dtype']}, from fp32 master weights"
    rows["versions"] = ", ".join(f"{k} {v}" for k, v in sorted(facts["versions"].items()))
    rows["commit"] = str(facts["commit"] or "unknown")
    return rows


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else "unknown"


def _table(rows: dict[str, str]) -> list[str]:
    def plain(text: str) -> str:
        return text.replace("|", "\\|").replace("\n", " ")

    return ["| | |", "|---|---|", *(f"| {key} | {plain(value)} |" for key, value in rows.items())]
