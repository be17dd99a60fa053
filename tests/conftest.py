"""Shared fixtures."""

from __future__ import annotations

from pathlib import Path

import data_helpers
import pytest
import tiny

from recipes.data.tokens import Encoder


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run file of a tiny model on a tiny corpus; give every run its own output_dir."""
    folder = tmp_path_factory.mktemp("tiny")
    return tiny.write_run(folder, tiny.write_corpus(folder / "corpus"))


@pytest.fixture
def encoder(tmp_path: Path) -> Encoder:
    """A small byte-level tokenizer with an end-of-text token."""
    return Encoder(data_helpers.train_tokenizer(tmp_path / "tokenizer"), "<|endoftext|>")
