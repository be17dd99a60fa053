"""Bytes of text that tokens stand for, by byte-level and by other tokenizers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from recipes.artifacts.text_bytes import ByteCounter, byte_lengths
from recipes.data.tokens import Encoder

TEXTS = ["plain words", "na\u00efve \u4e2d\u6587 \U0001f600", "tabs\t and\n\nlines  ", "don't x_y"]


def train(folder: Path, tokenizer: Tokenizer, trainer: Any, *added: str) -> Encoder:
    """A tokenizer trained on the texts, with words added to it."""
    tokenizer.train_from_iterator(TEXTS * 20, trainer)
    tokenizer.add_tokens(list(added))
    tokenizer.save(str(folder / "tokenizer.json"))
    return Encoder(folder / "tokenizer.json", "<eot>")


def byte_level(folder: Path) -> Encoder:
    """A byte-level BPE with merges, and one added word."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<eot>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    return train(folder, tokenizer, trainer, "\u4e2d\u6587")


def test_bytes_of_a_byte_level_tokenizer_are_exact_even_inside_a_character(tmp_path: Path) -> None:
    counter = ByteCounter(encoder := byte_level(tmp_path))
    assert counter.exact
    for text in TEXTS:
        (tokens,) = encoder.encode([text])
        assert counter.count(tokens) == len(text.encode())
        halves = [counter.count(part) for part in np.array_split(tokens, 3)]
        assert sum(halves) == len(text.encode())
    lengths = byte_lengths(encoder.tokenizer)
    assert lengths is not None and lengths[encoder.eot] == 0
    joined = np.concatenate(encoder.encode(TEXTS))
    assert counter.count(joined) == sum(len(t.encode()) for t in TEXTS)


def test_bytes_are_not_called_exact_where_the_text_is_altered(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path).tokenizer
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.save(str(tmp_path / "altered.json"))
    counter = ByteCounter(Encoder(tmp_path / "altered.json", "<eot>"))
    assert not counter.exact
    tree = json.loads((tmp_path / "tokenizer.json").read_text())
    # An end of text that is in the vocabulary only, where no merge leads to it.
    tree["added_tokens"] = [t for t in tree["added_tokens"] if t["content"] != "<eot>"]
    (tmp_path / "bare.json").write_text(json.dumps(tree))
    counter = ByteCounter(encoder := Encoder(tmp_path / "bare.json", "<eot>"))
    assert counter.exact and counter.count(encoder.encode(["abc"])[0]) == 3


def test_bytes_of_another_tokenizer_are_those_of_the_decoded_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=90, special_tokens=["<eot>", "<unk>"], show_progress=False
    )
    counter = ByteCounter(encoder := train(tmp_path, tokenizer, trainer))
    assert not counter.exact
    joined = np.concatenate(encoder.encode(TEXTS[:1] * 3))
    assert counter.count(joined) == 3 * len(TEXTS[0].encode())
    assert counter.count(joined[:0]) == 0
