"""How many bytes of text the tokens stand for, which makes losses of different tokenizers
comparable.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np
from tokenizers import Tokenizer, pre_tokenizers

from recipes.data.tokens import Encoder


class ByteCounter:
    """Counts the bytes of token arrays.

    A byte-level tokenizer spells every byte as one character, so each token has a length in bytes,
    also where a row cuts a character; the count is exact unless the tokenizer alters the text
    first. For any other the text is decoded and counted in UTF-8, which can be off at the cuts and
    where decoding adds or drops spaces. End-of-text and other special tokens stand for no text.
    """

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._lengths = byte_lengths(encoder.tokenizer)
        if self._lengths is not None:
            self._lengths[encoder.eot] = 0  # it need not be marked special
        tree = json.loads(encoder.tokenizer.to_str())
        prefix = '"add_prefix_space": true' in json.dumps(tree.get("pre_tokenizer"))
        altered = prefix or tree.get("normalizer") is not None
        self.exact = self._lengths is not None and not altered

    def count(self, tokens: np.ndarray) -> int:
        """Bytes of one row's tokens, int64 [any]."""
        if self._lengths is not None:
            return int(self._lengths[tokens].sum())
        ends = np.flatnonzero(tokens == self._encoder.eot)
        pieces = np.split(tokens, ends + 1)
        texts = (self._encoder.decode(piece.tolist()) for piece in pieces)
        return sum(len(text.encode("utf-8", "replace")) for text in texts)


def byte_lengths(tokenizer: Tokenizer) -> np.ndarray | None:
    """Bytes of every token, int64 [largest token number + 1]; None if it is not byte-level."""
    tree = json.loads(tokenizer.to_str())
    if "ByteLevel" not in _kinds(tree.get("pre_tokenizer")):
        return None
    if "ByteLevel" not in _kinds(tree.get("decoder")):
        return None
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    added = {int(t["id"]): t for t in tree.get("added_tokens") or []}
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    lengths = np.zeros(max(vocabulary.values()) + 1, np.int64)
    for token, number in vocabulary.items():
        if number in added:
            special = added[number]["special"]
            lengths[number] = 0 if special else len(token.encode("utf-8"))
        elif set(token) <= alphabet:
            lengths[number] = len(token)
        else:
            return None
    return lengths


def _kinds(part: Any) -> set[str]:
    """The types that a part of a tokenizer.json is put together from."""
    if not isinstance(part, dict):
        return set()
    inner: Iterable[Any] = [*(part.get("pretokenizers") or []), *(part.get("decoders") or [])]
    return {part["type"]}.union(*map(_kinds, inner))
