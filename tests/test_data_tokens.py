"""Tokens: text never spells the end of text, engines agree, and every origin of a tokenizer.json
works.
"""

from __future__ import annotations

import builtins
import json
import multiprocessing
import pickle
import sys
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_helpers import TRAINED, texts, train_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from recipes import config
from recipes.data import tokens
from recipes.data.tokens import Encoder, prepare_tokenizer

EOT = "<|endoftext|>"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def real_texts() -> list[str]:
    """Sources of the standard library."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return [p.read_text(encoding="utf-8") for p in sorted(folder.glob("*.py"))[:60]]


def adversarial() -> list[str]:
    """Random Unicode, controls, long runs, and strings that look like special tokens."""
    rng = np.random.default_rng(0)
    ranges = [(0, 128), (0x80, 0x800), (0x300, 0x370), (0x4E00, 0x9FFF), (0x1F300, 0x1F700)]
    found = [EOT, f"{EOT}{EOT}", f"a{EOT}", f" {EOT} b", EOT[:-1], " " * 3000, "\n" * 50, "\x00"]
    for i in range(300):
        low, high = ranges[i % len(ranges)]
        found.append("".join(map(chr, rng.integers(low, high, 1 + i % 40))))
    return found


@pytest.mark.parametrize("engine", ["hf", "gigatoken"])
def test_text_never_spells_the_end_of_text(path: Path, engine: Any) -> None:
    encoder = Encoder(path, EOT, engine)
    for text, doc in zip(adversarial(), encoder.encode(adversarial()), strict=True):
        assert doc.dtype == np.int32
        assert np.flatnonzero(doc == encoder.eot).tolist() == [len(doc) - 1], text
    assert encoder.tokenizer.decode(encoder.encode([f"a {EOT} b"])[0][:-1].tolist()) == f"a {EOT} b"


@pytest.mark.parametrize("engine", ["hf", "gigatoken"])
def test_empty_documents_are_left_out(path: Path, engine: Any) -> None:
    encoder = Encoder(path, EOT, engine)
    one = encoder.encode(["unit"])[0]
    got = encoder.encode(["", "unit", "", None, "unit", ""])  # type: ignore[list-item]
    assert [doc.tolist() for doc in got] == [one.tolist()] * 2
    assert encoder.encode(["", ""]) == []


def test_engines_agree(path: Path, real_texts: list[str]) -> None:
    strings = real_texts + adversarial()
    reference, fast = Encoder(path, EOT, "hf"), Encoder(path, EOT, "gigatoken")
    for want, got in zip(reference.encode(strings), fast.encode(strings), strict=True):
        assert np.array_equal(want, got)


def test_a_different_engine_is_refused_not_used(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = Encoder._encode_gigatoken

    def wrong(engine: Any, batch: list[str]) -> tuple[np.ndarray, np.ndarray]:
        flat, lengths = encode(engine, batch)
        return flat ^ ("odd" in batch[0]), lengths

    monkeypatch.setattr(Encoder, "_encode_gigatoken", staticmethod(wrong))
    encoder = Encoder(path, EOT, "gigatoken")
    with pytest.raises(ValueError, match="gigatoken differs from hf.*'odd'.*use engine: hf"):
        encoder.encode(["even", "odd"])


def test_missing_engine_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def no_gigatoken(name: str, *rest: Any, **more: Any) -> Any:
        if name == "gigatoken":
            raise ImportError(name)
        return real_import(name, *rest, **more)

    monkeypatch.delitem(sys.modules, "gigatoken", raising=False)
    monkeypatch.setattr(builtins, "__import__", no_gigatoken)
    with pytest.raises(ValueError, match="needs the package gigatoken.*engine: hf"):
        Encoder(path, EOT, "gigatoken").encode(["text"])


@pytest.mark.parametrize("engine", ["hf", "gigatoken"])
def test_an_encoder_used_before_a_fork_works_after_it(path: Path, engine: Any) -> None:
    encoder = Encoder(path, EOT, engine)
    strings = texts(50) + adversarial()
    want = [doc.tolist() for doc in encoder.encode(strings)]
    with multiprocessing.get_context("fork").Pool(1) as pool:
        got = pool.apply_async(encoder.encode, (strings,)).get(timeout=30)
    assert [doc.tolist() for doc in got] == want
    again = pickle.loads(pickle.dumps(encoder)).encode(strings)
    assert [doc.tolist() for doc in again] == want


def test_ordinary_end_of_text_is_refused(tmp_path: Path) -> None:
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_tokens(["<end>"])  # not special: text that spells it becomes this token
    tokenizer.save(str(tmp_path / "t.json"))
    with pytest.raises(ValueError, match="turns the text of a document into the token '<end>'"):
        Encoder(tmp_path / "t.json", "<end>")


def test_saved_truncation_padding_and_templates_are_off(path: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(tmp_path / "t.json"))
    assert len(Encoder(tmp_path / "t.json", EOT).encode(["lane block cursor unit"])[0]) == len(
        Encoder(path, EOT).encode(["lane block cursor unit"])[0]
    )


def test_vocabulary_is_the_largest_id_plus_one(path: Path, tmp_path: Path) -> None:
    encoder = Encoder(path, EOT)
    assert encoder.vocab_size == TRAINED.train_vocab_size
    tree = json.loads(path.read_text())
    tree["added_tokens"].append({**tree["added_tokens"][0], "id": 999, "content": "<far>"})
    (tmp_path / "t.json").write_text(json.dumps(tree))
    assert Encoder(tmp_path / "t.json", EOT).vocab_size >= encoder.vocab_size + 1
    assert Encoder(tmp_path / "t.json", EOT).fingerprint != encoder.fingerprint


def test_trained_tokenizer_is_cached_by_data_and_settings(tmp_path: Path) -> None:
    settings = config.Tokenizer(train_vocab_size=280, train_documents=10)
    first = prepare_tokenizer(settings, lambda: texts(20), tmp_path)
    stamp = first.stat().st_mtime_ns
    assert prepare_tokenizer(settings, lambda: texts(10), tmp_path) == first
    assert first.stat().st_mtime_ns == stamp
    assert prepare_tokenizer(settings, lambda: texts(20, seed=1), tmp_path) != first
    other = config.Tokenizer(train_vocab_size=281, train_documents=10)
    assert prepare_tokenizer(other, lambda: texts(20), tmp_path) != first
    assert not list(tmp_path.glob("*.partial"))
    with pytest.raises(ValueError, match="needs documents to train on"):
        prepare_tokenizer(settings, lambda: [], tmp_path)


def test_tokenizer_from_file_and_folder(path: Path, tmp_path: Path) -> None:
    never: Any = None
    given = prepare_tokenizer(config.Tokenizer(file=str(path)), never, tmp_path)
    assert given == path
    folder = tmp_path / "folder"
    PreTrainedTokenizerFast(tokenizer_file=str(path), eos_token=EOT).save_pretrained(folder)
    loaded = prepare_tokenizer(config.Tokenizer(name=str(folder)), never, tmp_path / "cache")
    assert loaded.parent == tmp_path / "cache"
    want = Encoder(path, EOT).encode(texts(5))
    for a, b in zip(Encoder(loaded, EOT).encode(texts(5)), want, strict=True):
        assert np.array_equal(a, b)


def test_tokenizer_faults_are_value_errors(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "other.json").write_text('{"a": 1}')
    cases = {
        "can't be read: No such file": config.Tokenizer(file=str(tmp_path / "no.json")),
        "bad.json is no tokenizer.json": config.Tokenizer(file=str(tmp_path / "bad.json")),
        "other.json is no tokenizer.json: it has no model": config.Tokenizer(
            file=str(tmp_path / "other.json")
        ),
        "end_of_text='</s>' is not in .*endoftext": config.Tokenizer(
            file=str(path), end_of_text="</s>"
        ),
        "name='some/model' can't be loaded": config.Tokenizer(name="some/model"),
    }
    for match, settings in cases.items():
        with pytest.raises(ValueError, match=match):
            prepare_tokenizer(settings, lambda: [], tmp_path)


def test_training_leaves_no_thread_pool_behind(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/task").iterdir()))
    settings = config.Tokenizer(train_vocab_size=270)
    prepared = prepare_tokenizer(settings, lambda: texts(300, seed=9), tmp_path)
    Encoder(prepared, EOT).encode(texts(300))
    Encoder(prepared, EOT, "gigatoken").encode(texts(300))
    assert len(list(Path("/proc/self/task").iterdir())) == before
    assert tokens.os.environ["TOKENIZERS_PARALLELISM"] == "false"
