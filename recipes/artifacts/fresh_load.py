"""Load an exported folder as anyone would; run by path in a fresh interpreter, never imported.

    python -I recipes/artifacts/fresh_load.py question.json

The question names the folder, token numbers and a text as inputs, texts to tokenize, threads and
two files for the answer: the logits (safetensors) and what was found (JSON). Neither deepspeed nor
this project can be imported here, as on the machine of somebody who has only transformers.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

ABSENT = ("deepspeed", "recipes")


class WithoutSome:
    """A finder of modules that knows all but the absent ones."""

    def __init__(self, finder: Any) -> None:
        self._finder = finder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """As the finder's own; None for what is to be absent."""
        if name.partition(".")[0] in ABSENT:
            return None
        return self._finder.find_spec(name, path, target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)


def main(question_path: str) -> None:
    """Answer one question."""
    question = json.loads(Path(question_path).read_text(encoding="utf-8"))
    sys.path.extend(p for p in question["paths"] if p not in sys.path)
    sys.meta_path[:] = [WithoutSome(finder) for finder in sys.meta_path]
    found = [name for name in ABSENT if importlib.util.find_spec(name) or name in sys.modules]
    assert not found, f"{found} can be imported in the fresh process"
    answer = load(question)
    loaded = sorted(name for name in ABSENT if name in sys.modules)
    assert not loaded, f"{loaded} was imported in the fresh process"
    Path(question["answer"]).write_text(json.dumps(answer), encoding="utf-8")


def load(question: dict[str, Any]) -> dict[str, Any]:
    """Load model and tokenizer, write the logits, tell the rest."""
    import torch
    import transformers
    from safetensors.torch import save_file

    torch.set_num_threads(question["threads"])  # else sums could be rounded in another order
    folder = question["folder"]
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    model, report = loaded
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = {text: tokenizer(text)["input_ids"] for text in question["texts"]}
    model.eval()
    with torch.no_grad():
        logits = {
            "numbers": model(torch.tensor([question["numbers"]])).logits.contiguous(),
            "text": model(**tokenizer(question["text"], return_tensors="pt")).logits.contiguous(),
        }
    save_file(logits, question["logits"])
    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "report": {kind: sorted(map(str, keys)) for kind, keys in report.items() if keys},
        "texts": texts,
        "special": {
            "eos": tokenizer.eos_token_id,
            "bos": tokenizer.bos_token_id,
            "pad": tokenizer.pad_token_id,
        },
        "transformers": transformers.__version__,
    }


if __name__ == "__main__":
    main(sys.argv[1])
