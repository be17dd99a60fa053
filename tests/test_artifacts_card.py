"""The model card of an export says what the run was."""

from __future__ import annotations

from pathlib import Path

import artifact_models as made
import pytest
from huggingface_hub import ModelCard

from recipes.artifacts import card, facts
from recipes.config import Run


@pytest.fixture
def tied(tmp_path: Path) -> Run:
    """A run whose card is written."""
    return made.tiny_settings(tmp_path)


def test_the_facts_and_the_card_say_what_the_run_was(tied: Run) -> None:
    state = made.state_of(tied, 8, held_out={"step": 8, "held_out_loss": 5.25})
    known = facts.facts_of(state, 8, tied.folder / "checkpoints" / "step-00000008")
    known |= {"dtype": "float16", "parameters": 1_234_567, "max_length": 32, "proof": "Loaded."}
    text = card.model_card(known)
    read = ModelCard(text)
    assert read.data.library_name == "transformers" and read.data.eval_results
    assert read.data.eval_results[0].metric_value == 5.25
    for word in ("1,234,567", "ZeRO-1 bf16 on 2 ranks", "4,096", "5.2500", "0123abcd", "float16"):
        assert word in text, word
    assert "torch 2.13.0" in text and "<|endoftext|>" in text and '"def "' in text
    assert facts.run_of(known) == tied


def test_a_card_of_a_hub_run_names_data_set_revision_and_base_model(tied: Run) -> None:
    known = facts.facts_of(made.state_of(tied, 8), 8, tied.folder)
    known |= {"dtype": "float32", "parameters": 1, "max_length": 32, "proof": "", "world": None}
    known["revision"], known["held_out"], known["commit"] = "abc123", None, None
    known["config"]["data"] |= {"kind": "hub", "path": "owner/set", "name": "small"}
    known["config"]["model"] = {"pretrained": "owner/base", "revision": "v1"}
    text = card.model_card(known)
    read = ModelCard(text)
    assert read.data.datasets == ["owner/set"] and read.data.base_model == "owner/base"
    assert "owner/set, small, train at abc123" in text
    assert "trained further from owner/base at v1" in text and "unknown" in text
