"""Does an exported folder give the model's logits to somebody who has only transformers?

A fresh interpreter (recipes/artifacts/fresh_load.py) loads it; what it returns is compared here.
"""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from recipes.artifacts.loading import Artifact
from recipes.data.tokens import Encoder

SCRIPT = Path(__file__).with_name("fresh_load.py")
LONGEST = 32  # tokens of an input
TEXTS = ["Hello, world 123", " ", "\n\n \t", "na\u00efve \u4e2d\u6587 \U0001f600", "don't x_y-z"]
TEXT = "The reason why the sky is blue is"
LIMIT_S = 3600.0
SLACK = 16  # roundings by which logits may differ that another order of sums has touched


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What both processes feed to the model."""

    numbers: list[int]
    text: str
    ids: list[int]  # of the text


def choose_inputs(artifact: Artifact) -> Inputs:
    """Token numbers all over the vocabulary, and a text, that the model has room for."""
    size, room = artifact.encoder.vocab_size, min(artifact.positions or LONGEST, LONGEST)
    numbers = [i * size // room for i in range(room)]
    text = TEXT
    while len(artifact.encoder.encode_prompt(text)) > room:
        text = text[: len(text) // 2]
    return Inputs(numbers=numbers, text=text, ids=artifact.encoder.encode_prompt(text))


def logits_of(network: Any, inputs: Inputs) -> dict[str, torch.Tensor]:
    """Logits [1, tokens, vocabulary] of both inputs in the model's own dtype."""
    ids = torch.tensor([inputs.ids])
    with torch.no_grad():
        return {
            "numbers": network(torch.tensor([inputs.numbers])).logits,
            "text": network(input_ids=ids, attention_mask=torch.ones_like(ids)).logits,
        }


def prove(
    folder: Path,
    encoder: Encoder,
    dtype: torch.dtype,
    inputs: Inputs,
    expected: dict[str, torch.Tensor],
) -> str:
    """Load the folder in a fresh process and compare.

    Args:
        encoder: the run's own.
        dtype: of the exported weights; some architectures give fp32 logits whatever it is.
        expected: the logits of `inputs` with these weights.

    Returns:
        One sentence that says what was compared and found.

    Raises:
        ValueError: everything that is not as it should be.
    """
    answer, logits = ask(folder, inputs, TEXTS)
    texts = {text: encoder.encode_prompt(text) for text in TEXTS}
    eot = encoder.eot
    faults = [f"{kind}: {', '.join(keys)}" for kind, keys in answer["report"].items()]
    if answer["dtype"] != (wanted := str(dtype).removeprefix("torch.")):
        faults.append(f"dtype is {answer['dtype']}, expected {wanted}")
    if answer["texts"] != texts:
        wrong = next(text for text in texts if answer["texts"][text] != texts[text])
        faults.append(f"its tokenizer cuts {wrong!r} otherwise than the run's")
    if set(answer["special"].values()) != {eot}:
        faults.append(f"special tokens are {answer['special']}, expected {eot}")
    found = [comparison(logits[name], expected[name], name) for name in expected]
    faults += [fault for fault, _ in found if fault]
    if faults:
        raise ValueError(
            f"{folder} does not load as the model it was made from and is not kept: "
            + "; ".join(faults)
        )
    largest = max(difference for _, difference in found)
    same = "are equal bit for bit" if largest == 0.0 else f"differ by at most {largest:.2g}"
    return (
        f"Loaded by transformers {answer['transformers']} in a fresh process without deepspeed "
        f"and without Octet: its {wanted} logits and the checkpoint's {same}."
    )


def comparison(got: torch.Tensor, expected: torch.Tensor, name: str) -> tuple[str | None, float]:
    """A fault, if logits differ by more than rounding, and the greatest difference."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"logits of the {name} are {got.dtype} {list(got.shape)}", float("inf")
    if not torch.isfinite(expected).all():
        return f"logits of the {name} are not finite in {expected.dtype}", float("inf")
    difference = (got.double() - expected.double()).abs().max().item()
    scale = expected.double().abs().max().item()
    allowed = SLACK * torch.finfo(expected.dtype).eps * scale
    if difference <= allowed:
        return None, difference
    return f"logits of the {name} differ by {difference:.3g}, allowed {allowed:.2g}", difference


def ask(
    folder: Path, inputs: Inputs, texts: list[str]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What a fresh process finds in a folder: its JSON answer, and its logits.

    Raises:
        ValueError: the process failed; with the end of what it said.
    """
    with tempfile.TemporaryDirectory() as beside:
        place = Path(beside)
        question = {
            "folder": str(folder),
            "numbers": inputs.numbers,
            "text": inputs.text,
            "texts": texts,
            "threads": torch.get_num_threads(),
            "answer": str(place / "answer.json"),
            "logits": str(place / "logits.safetensors"),
            # An isolated interpreter leaves out the packages of `pip install --user`.
            "paths": [site.getusersitepackages()] if site.ENABLE_USER_SITE else [],
        }
        (place / "question.json").write_text(json.dumps(question), encoding="utf-8")
        hidden = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
        try:
            done = subprocess.run(
                [sys.executable, "-I", str(SCRIPT), str(place / "question.json")],
                env={**os.environ, **hidden},
                cwd=place,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=LIMIT_S,
            )
        except subprocess.TimeoutExpired as error:
            raise ValueError(f"{folder} was not loaded within {LIMIT_S:.0f} s") from error
        if done.returncode:
            raise ValueError(
                f"{folder} can't be loaded in a fresh process (exit {done.returncode}):\n"
                + done.stderr[-2000:]
            )
        answer = json.loads((place / "answer.json").read_text(encoding="utf-8"))
        return answer, load_file(place / "logits.safetensors")
