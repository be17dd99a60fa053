"""Finding files: what the run file's `data` section names, as portable file names per split.

A name is portable when every node can open it: a URL that carries the revision (hub), a path or
URL as given (files, saved), or a path below the standard library's folder (python_stdlib).
"""

from __future__ import annotations

import logging
import lzma
import sys
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import datasets
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError
from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_after_attempt
from tenacity.wait import wait_exponential_jitter
from tqdm import tqdm

from recipes.config import Data

# The base class of every failure of the hub's HTTP client, whichever client that is.
HTTPError: type[Exception] = HfHubHTTPError.__bases__[0]

logger = logging.getLogger(__name__)
FOOTER_THREADS = 16  # footers are small: the time goes into waiting for the server
FORMATS = ("parquet", "json", "text")


@dataclass(frozen=True, kw_only=True)
class Found:
    """The files of each split, and the hub revision that they belong to."""

    format: str
    splits: dict[str, list[str]]
    revision: str | None = None
    left_out: int = 0  # files that can't be decoded as UTF-8


def read_errors() -> tuple[type[Exception], ...]:
    """What reading a file may raise: the disk, the network, or damaged contents.

    aiohttp and zstandard are optional: they can't have raised anything unless they are loaded.
    """
    known: list[type[Exception]] = [
        OSError,
        EOFError,
        TimeoutError,
        ValueError,
        pa.ArrowException,
        zlib.error,
    ]
    known += [lzma.LZMAError, HTTPError]
    if aiohttp := sys.modules.get("aiohttp"):
        known.append(aiohttp.ClientError)
    if zstandard := sys.modules.get("zstandard"):
        known.append(zstandard.ZstdError)
    return tuple(known)


def retrying(attempts: int, wait_s: float, what: Callable[[], str]) -> Retrying:
    """Retry read errors, waiting `wait_s` seconds, then twice as long and so on, with jitter.

    Args:
        what: names for the log what is being read.
    """

    def log(state: RetryCallState) -> None:
        cause = state.outcome.exception() if state.outcome else None
        logger.warning(
            "%s: attempt %d of %d failed: %s",
            what(),
            state.attempt_number,
            attempts,
            describe_error(cause),
        )

    return Retrying(
        stop=stop_after_attempt(attempts),
        wait=wait_exponential_jitter(initial=wait_s, max=60 * wait_s, jitter=wait_s),
        retry=retry_if_exception_type(read_errors()),
        before_sleep=log,
        reraise=True,
    )


def describe_error(error: BaseException | None) -> str:
    """Type and text of an error, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def find(data: Data, revision: str | None) -> Found:
    """The files of `data.split` and, if it is a split of its own, of the held-out split.

    Raises:
        ValueError: nothing there, no such split, or the hub can't be reached.
    """
    if data.kind == "python_stdlib":
        return _stdlib()
    if data.kind == "saved":
        saved = load_saved(data)
        return Found(format="saved", splits={name: [str(data.path)] for name in saved})
    what = data.path if data.kind == "hub" else f"data.files={data.files}"
    try:
        if data.kind == "files":
            builder = datasets.load_dataset_builder(str(data.format), data_files=data.files)
            revision = None
        else:
            revision = _revision(data, revision)
            builder = datasets.load_dataset_builder(str(data.path), data.name, revision=revision)
    except ImportError as error:
        raise ValueError(f"{what}: {error}; install what it names") from error
    except read_errors() as error:
        raise ValueError(
            f"{what} can't be opened: {describe_error(error)}; {_remedy(data)}"
        ) from error
    files = {str(name): list(names) for name, names in (builder.config.data_files or {}).items()}
    if builder.name not in FORMATS:
        raise ValueError(
            f"{what} is read as {builder.name!r}; expected one of {', '.join(FORMATS)}"
        )
    wanted = {data.split, (data.held_out and data.held_out.split) or data.split}
    if not any(files.values()):
        raise ValueError(f"{what} matches no file; {_remedy(data)}")
    if absent := [name for name in sorted(wanted) if not files.get(name)]:
        raise ValueError(f"{what} has no split {absent}; there are {sorted(files)}")
    return Found(format=str(builder.name), splits=files, revision=revision)


def _remedy(data: Data) -> str:
    if data.kind == "hub":
        return "check data.path, data.name and the network, or point data.path at a local copy"
    return "check data.files: paths, globs or URLs of existing files"


def _revision(data: Data, recorded: str | None) -> str | None:
    """The commit to read: as recorded by an earlier start, else what data.revision means now."""
    if Path(str(data.path)).is_dir():
        if data.revision:
            raise ValueError("data.revision has no effect on a local folder; remove it")
        return None
    if recorded is not None:
        return recorded
    try:
        return HfApi().dataset_info(str(data.path), revision=data.revision).sha
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ValueError(f"no such data set or folder, or no access to it: {error}") from error


def load_saved(data: Data) -> Mapping[str, datasets.Dataset]:
    """The splits of a folder that `save_to_disk` wrote; a folder without splits is `data.split`."""
    try:
        saved = datasets.load_from_disk(str(data.path))
    except (OSError, ValueError, pa.ArrowException) as error:
        raise ValueError(
            f"data.path={data.path} can't be opened: {describe_error(error)}; expected a folder "
            f"written by save_to_disk"
        ) from error
    splits = saved if isinstance(saved, datasets.DatasetDict) else {data.split: saved}
    wanted = {data.split, (data.held_out and data.held_out.split) or data.split}
    if absent := sorted(wanted - set(splits)):
        raise ValueError(f"data.path={data.path} has no split {absent}; there are {list(splits)}")
    return splits


@cache
def stdlib_folder() -> Path:
    """Where this Python's standard library lies."""
    return Path(sysconfig.get_paths()["stdlib"])


def _stdlib() -> Found:
    # Some files are written in other encodings on purpose, to test decoders; `text` would stop at
    # them.
    names, left_out = [], 0
    for path in sorted(stdlib_folder().rglob("*.py")):
        if "site-packages" in path.parts:
            continue
        try:
            path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            left_out += 1
        else:
            names.append(path.relative_to(stdlib_folder()).as_posix())
    if not names:
        raise ValueError(
            f"no .py files below {stdlib_folder()}; this Python has no sources on disk"
        )
    return Found(format="text", splits={"train": names}, left_out=left_out)


def local_path(kind: str, name: str) -> Path | None:
    """The path behind a portable name, or None for a URL."""
    if kind == "python_stdlib":
        return stdlib_folder() / name
    return None if "://" in name else Path(name)


class _Groups(Protocol):
    """The part of a Parquet footer that is read here."""

    num_row_groups: int

    def row_group(self, index: int) -> Any: ...


def footers(names: list[str], attempts: int, progress: bool) -> list[list[int]]:
    """The rows of every row group of every Parquet file, read from the files' ends only.

    Raises:
        ValueError: a footer can't be read; the text names the file.
    """

    def read(name: str) -> list[int]:
        wait_s = 1.0 if "://" in name else 0.0  # a local file does not recover by waiting

        def once() -> _Groups:
            with fsspec.open(name, "rb") as file:
                return pq.read_metadata(file)

        try:
            footer = retrying(attempts, wait_s, lambda: name)(once)
        except read_errors() as error:
            raise ValueError(
                f"the Parquet footer of {name} can't be read: {describe_error(error)}; mend or "
                f"remove the file"
            ) from error
        return [footer.row_group(g).num_rows for g in range(footer.num_row_groups)]

    with ThreadPoolExecutor(FOOTER_THREADS) as pool:
        done: Iterable[list[int]] = pool.map(read, names)
        return list(tqdm(done, "footers", len(names), disable=not progress or len(names) < 64))
