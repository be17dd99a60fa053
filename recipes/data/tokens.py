"""Text to token numbers: one tokenizer.json per run, and an encoder over it with two
interchangeable engines.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from recipes import config

GATE_DOCUMENTS = 64  # real documents on which a second engine must prove equal
PROBES = [
    " ",
    "\n\n \t",
    "a" * 300,
    " " * 300,
    "na\u00efve \u4e2d\u6587 \U0001f600",
    "e\u0301\u200d\u0000",
]
PROBES += ["don't 123,456.78 x_y-z", "\r\n\u00a0\u2028end", "<|endoftext|> <s></s> [SEP]"]


def prepare_tokenizer(
    settings: config.Tokenizer, documents: Callable[[], Iterable[str]], cache: Path
) -> Path:
    """The run's tokenizer.json, made by one rank: given, loaded by name, or trained on the data.

    Args:
        settings: the run file's section.
        documents: opens the training texts; called only if a tokenizer is trained.
        cache: the folder for loaded and trained tokenizers. A trained one is kept under a hash of
            its documents and settings.

    Raises:
        ValueError: it can't be read or fetched, or has no `end_of_text` token.
    """
    if settings.file is not None:
        path = Path(settings.file)
    elif settings.name is not None:
        path = _load(settings, cache)
    else:
        path = _train(settings, documents, cache)
    _end_of_text(_read(path), settings.end_of_text, str(path))
    return path


def _read(path: Path) -> Tokenizer:
    try:
        text = path.read_text(encoding="utf-8")
        tree = json.loads(text)
    except OSError as error:
        raise ValueError(f"tokenizer {path} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is no tokenizer.json: {error}") from error
    if not isinstance(tree, dict) or "model" not in tree:
        raise ValueError(f"{path} is no tokenizer.json: it has no model")
    return Tokenizer.from_str(text)


def _end_of_text(tokenizer: Tokenizer, token: str, where: str) -> int:
    number = tokenizer.token_to_id(token)
    if number is None:
        added = [str(t.content) for t in tokenizer.get_added_tokens_decoder().values()]
        raise ValueError(
            f"data.tokenizer.end_of_text={token!r} is not in {where}; its special tokens are "
            f"{added[:20]}"
        )
    return int(number)


def _write(tokenizer: Tokenizer, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(tokenizer.to_str(), encoding="utf-8")
    partial.replace(path)  # a reader sees the whole file or none
    return path


def _hash(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()[:16]


def _load(settings: config.Tokenizer, cache: Path) -> Path:
    from transformers import AutoTokenizer  # slow to import, and needed by this origin only

    name = str(settings.name)
    try:
        loaded = AutoTokenizer.from_pretrained(name, revision=settings.revision or "main")
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ValueError(
            f"data.tokenizer.name={name!r} can't be loaded: {' '.join(str(error).split())}; "
            "give a folder with tokenizer files, or data.tokenizer.file"
        ) from error
    if not getattr(loaded, "is_fast", False):
        raise ValueError(
            f"data.tokenizer.name={name!r} has no fast version; give data.tokenizer.file, a "
            f"tokenizer.json"
        )
    backend: Tokenizer = loaded.backend_tokenizer
    return _write(backend, cache / f"loaded-{_hash(backend.to_str())}.json")


def _train(settings: config.Tokenizer, documents: Callable[[], Iterable[str]], cache: Path) -> Path:
    texts = list(islice(documents(), settings.train_documents))
    if not texts:
        raise ValueError(
            "data.tokenizer.train_vocab_size needs documents to train on; there are none"
        )
    size = settings.train_vocab_size or 0
    path = cache / f"trained-{_hash(str(size), settings.end_of_text, *texts)}.json"
    if path.exists():
        return path
    _one_thread()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[settings.end_of_text],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _write(tokenizer, path)


def _one_thread() -> None:
    # Thread pools that exist before a fork have no threads after it: the reader processes would
    # wait for ever. One thread per process is also the faster division of a node's cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _plain(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # a document that spells a special token stays text
    return tokenizer


class Encoder:
    """Documents to token arrays; text can never yield the end-of-text token, which closes every
    document.

    Args:
        path: a tokenizer.json.
        end_of_text: the token appended to every document.
        engine: "hf" is the reference; "gigatoken" is faster and must prove equal on the first
            documents of every process that uses it.

    Raises:
        ValueError: no such token, text can spell it, or the engine is missing or not equal.
    """

    def __init__(
        self, path: Path | str, end_of_text: str, engine: Literal["hf", "gigatoken"] = "hf"
    ) -> None:
        _one_thread()
        text = Path(path).read_text(encoding="utf-8")
        self.tokenizer = _read(Path(path))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.tokenizer.encode_special_tokens = (
            True  # a document that spells a special token stays text
        )
        self.eot = _end_of_text(self.tokenizer, end_of_text, str(path))
        self.vocab_size = max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()
        self.engine = engine
        self._path = str(path)
        self._end_of_text = end_of_text
        self._fast: dict[int, Any] = {}  # by process: what one opened must not be used after a fork
        self._refuse_end_of_text(self._encode_hf([end_of_text, f"a {end_of_text}b"])[0])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_fast": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state
        _plain(self.tokenizer)  # a tokenizer forgets this when it is pickled

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """The token numbers of each document, int32, ending with `eot`; empty documents are left
        out.
        """
        texts = [text for text in texts if text]
        if not texts:
            return []
        if self.engine == "gigatoken":
            flat, lengths = self._encode_gigatoken(self._gigatoken(texts), texts)
        else:
            flat, lengths = self._encode_hf(texts)
        self._refuse_end_of_text(flat)
        lengths = lengths[lengths > 0]
        ends = np.cumsum(lengths + 1)
        tokens = np.full(len(flat) + len(lengths), self.eot, np.int32)
        inside = np.ones(len(tokens), bool)
        inside[ends - 1] = False
        tokens[inside] = flat
        starts = ends - lengths - 1
        return [tokens[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]

    def encode_prompt(self, text: str) -> list[int]:
        """The token numbers of a text to be continued: no end-of-text."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: list[int]) -> str:
        """The text of token numbers, end-of-text left out."""
        return str(self.tokenizer.decode([t for t in tokens if t != self.eot]))

    def _refuse_end_of_text(self, flat: np.ndarray) -> None:
        if (flat == self.eot).any():
            raise ValueError(
                f"{self._path} turns the text of a document into the token {self._end_of_text!r}; "
                f"its added "
                "token must be marked special, or choose another data.tokenizer.end_of_text"
            )

    def _encode_hf(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ids = [encoding.ids for encoding in encodings]
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        return np.concatenate([np.array(i, np.int32) for i in ids]), lengths

    @staticmethod
    def _encode_gigatoken(engine: Any, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        # parallel=False never touches the thread pool, which may have been lost in a fork.
        rows = engine.encode_batch(texts, parallel=False)
        offsets = np.asarray(rows.layout.offsets.data)
        flat = np.asarray(rows.layout.content.data)[offsets[0] : offsets[-1]]
        return flat.astype(np.int32), np.diff(offsets)

    def _gigatoken(self, texts: list[str]) -> Any:
        """This process's gigatoken engine, opened and compared with the reference when first
        used.
        """
        if os.getpid() not in self._fast:
            engine = self._open_gigatoken()
            sample = [
                *texts[:GATE_DOCUMENTS],
                *PROBES,
                self._end_of_text,
                f"x{self._end_of_text} y",
            ]
            for text in sample:
                want, _ = self._encode_hf([text])
                got, _ = self._encode_gigatoken(engine, [text])
                if not np.array_equal(want, got):
                    raise ValueError(
                        f"data.tokenizer.engine=gigatoken differs from hf with {self._path} on "
                        f"{text[:60]!r}; "
                        "use engine: hf"
                    )
            self._fast = {os.getpid(): engine}
        return self._fast[os.getpid()]

    def _open_gigatoken(self) -> Any:
        try:
            import gigatoken
        except ImportError as error:
            raise ValueError(
                "data.tokenizer.engine=gigatoken needs the package gigatoken; install the extra "
                "`fast`, "
                "or use engine: hf"
            ) from error
        # gigatoken always splits text at special tokens; it can't if it does not know them.
        tree = json.loads(Path(self._path).read_text(encoding="utf-8"))
        tree["added_tokens"] = [t for t in tree.get("added_tokens") or [] if not t.get("special")]
        tree["post_processor"] = tree["truncation"] = tree["padding"] = None
        try:
            return gigatoken.Tokenizer.from_json(json.dumps(tree))
        except (ValueError, RuntimeError, TypeError, KeyError) as error:
            raise ValueError(
                f"data.tokenizer.engine=gigatoken can't read {self._path}: {error}; use engine: hf"
            ) from error
