"""Real ranks of the real recipe that start in two seconds instead of nine.

    with nursery.start(RUN_FILE, f"output_dir={folder}", ranks=2) as ranks:
        ranks.signal(1, signal.SIGTERM)
        ended = ranks.wait()
    assert ended.codes == [75, 75], ended.text

One process imports torch, DeepSpeed and the recipe, and forks the ranks of every job; it has no
thread of its own then (jemalloc's, which Arrow brings, knows how to be forked). The ranks are
processes of their own, which join by gloo and end like those of any launcher;
test_resume_chains.py holds them against torchrun, bit for bit.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import launching
import torch
from launching import ROOT, free_port, records
from safetensors.torch import load_file

# What must not differ by a bit between two runs with the same ranks and strategy.
EXACT = ("step", "loss", "lr", "grad_norm", "tokens", "samples", "data_digest", "total_tokens")
# What the number of ranks and the strategy don't change.
ORDER = ("step", "lr", "tokens", "samples", "data_digest", "total_tokens", "total_samples")
# Nothing but training and saving.
QUIET = ("evaluate=null", "data.held_out=null", "sample=null")
RECIPE = "recipes/pretrain.py"
PLANTED = "tests/drivers/planted.py"  # the recipe with planted faults
LIMIT_S = 120.0
# As a launcher would, the ranks that are left are ended when one has failed.
GRACE_S = 20.0


@dataclass(frozen=True)
class Ended:
    """A job that came to its end."""

    codes: list[int]  # by rank; minus the signal that ended it
    text: str
    seconds: float


class Nursery:
    """The server and its events."""

    def __init__(self) -> None:
        foreign = ("ACCELERATE_", "DS_", "RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "OCTET_")
        env = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
        env |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests/drivers/nursery_server.py")],
            env=env | {"PYTHONUNBUFFERED": "1"},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C ends the tests, which end it
        )
        self.codes: dict[int, dict[int, int]] = {}
        self.pids: dict[int, list[int]] = {}
        self._rest, self.jobs = b"", 0
        self._selector = selectors.DefaultSelector()
        assert self.process.stdout is not None
        self._selector.register(self.process.stdout, selectors.EVENT_READ)
        self.threads: int | None = None
        end = time.monotonic() + 180
        while self.threads is None and time.monotonic() < end:
            self.listen(1.0)
        assert self.threads is not None, "the nursery did not start"

    def listen(self, limit_s: float) -> None:
        """Take in what the server says, waiting for it at most so long."""
        if not self._selector.select(limit_s):
            return
        assert self.process.stdout is not None and self.process.stderr is not None
        read = os.read(self.process.stdout.fileno(), 1 << 16)
        assert read, f"the nursery has ended: {self.process.stderr.read().decode()[-3000:]}"
        *lines, self._rest = (self._rest + read).split(b"\n")
        for line in lines:
            event = json.loads(line)
            if "ready" in event:
                self.threads = event["ready"]
            elif "pids" in event:
                self.pids[event["job"]] = event["pids"]
            else:
                self.codes.setdefault(event["job"], {})[event["rank"]] = event["code"]

    def ask(self, **job: Any) -> int:
        """Start a job; returns its number once its ranks exist."""
        self.jobs += 1
        assert self.process.stdin is not None
        words = json.dumps(job | {"job": self.jobs}).encode() + b"\n"
        os.write(self.process.stdin.fileno(), words)
        while self.jobs not in self.pids:
            self.listen(10.0)
        return self.jobs

    def close(self) -> None:
        """End the server; its ranks end with it."""
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self.process.kill()
        self.process.wait()


@cache
def shared() -> Nursery:
    """The one nursery of this process; ended with it."""
    nursery = Nursery()
    atexit.register(nursery.close)
    return nursery


class Ranks:
    """The ranks of a job; a context manager that leaves none behind."""

    def __init__(self, nursery: Nursery, number: int, log: Path) -> None:
        self._nursery, self._number, self.log = nursery, number, log
        self.began = time.monotonic()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in range(len(self.pids)):
            self.signal(rank, signal.SIGKILL)
        while len(self.codes) < len(self.pids):
            self._nursery.listen(10.0)

    @property
    def pids(self) -> list[int]:
        """By rank."""
        return self._nursery.pids[self._number]

    @property
    def codes(self) -> dict[int, int]:
        """Of the ranks that have ended."""
        return self._nursery.codes.setdefault(self._number, {})

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank that runs."""
        self._nursery.listen(0.0)
        if rank not in self.codes:
            with suppress(ProcessLookupError):
                os.kill(self.pids[rank], number)

    def kill(self) -> None:
        """SIGKILL to every rank, as a node that loses its power."""
        for rank in range(len(self.pids)):
            self.signal(rank, signal.SIGKILL)

    def text(self) -> str:
        """The output of all ranks so far."""
        return self.log.read_text(errors="replace") if self.log.is_file() else ""

    @property
    def update(self) -> int:
        """The last update that this start has told; -1 if none (needs log.every_updates=1)."""
        told = re.findall(r"^step 0*(\d+)/\d+ \|", self.text(), re.MULTILINE)
        return int(told[-1]) if told else -1

    def reach(self, update: int) -> None:
        """Wait until this start has trained up to an update."""
        self.until(lambda: self.update >= update, f"update {update}")

    def until(self, condition: Any, what: str, limit_s: float = LIMIT_S) -> Any:
        """Poll until `condition()` is true; a job that ends before fails the test."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            if value := condition():
                return value
            self._nursery.listen(0.02)
            gone = len(self.codes) == len(self.pids)
            assert not gone or condition(), f"ended before {what}: {self.text()[-4000:]}"
        raise AssertionError(f"{what} did not happen within {limit_s} s:\n{self.text()[-4000:]}")

    def wait(self, limit_s: float = LIMIT_S, grace_s: float = GRACE_S) -> Ended:
        """Wait for the end of all ranks; a job over its limit fails the test with its output."""
        end, failed = time.monotonic() + limit_s, None
        while len(self.codes) < len(self.pids):
            self._nursery.listen(0.1)
            now = time.monotonic()
            if now > end:
                raise AssertionError(f"still running after {limit_s} s:\n{self.text()[-4000:]}")
            if failed is None and any(self.codes.values()):
                failed = now
            if failed is not None and now > failed + grace_s:
                self.kill()
        codes = [self.codes[rank] for rank in range(len(self.pids))]
        return Ended(codes, self.text(), time.monotonic() - self.began)


@dataclass(frozen=True)
class Place:
    """Where a rank runs: namespaces by kind (as under /proc/PID/ns), and its environment."""

    spaces: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)


def arm_words(arm: str | Path) -> list[str]:
    """The script's words for a shipped arm's name, or for an Accelerate YAML."""
    path = ROOT / f"accelerate_configs/local_{arm}.yaml" if isinstance(arm, str) else arm
    return ["--accelerate_config", str(path)]


def fp32_arms(folder: Path) -> dict[str, Path]:
    """ZeRO-1 and DDP in fp32, where nothing but the order of sums can differ."""
    zero = json.loads((ROOT / "ds_configs/zero1_bf16.json").read_text())
    del zero["bf16"]
    (folder / "zero1_fp32.json").write_text(json.dumps(zero))
    texts = {
        "ZeRO-1 fp32": "distributed_type: DEEPSPEED\ndeepspeed_config:\n"
        f"  deepspeed_config_file: {folder}/zero1_fp32.json\nuse_cpu: true\n",
        "DDP fp32": "distributed_type: MULTI_GPU\nmixed_precision: 'no'\nuse_cpu: true\n",
    }
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text)
    return {name: folder / f"{name}.yaml" for name in texts}


def start(
    run_file: Path | str,
    *words: str,
    folder: Path,
    ranks: int | Sequence[Place] = 2,
    arm: str | Path = "zero1_bf16",
    script: str = RECIPE,
    env: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> Ranks:
    """Start the recipe into a run folder; every start's output goes to a log beside the folder."""
    nursery = shared()
    places = [Place()] * ranks if isinstance(ranks, int) else list(ranks)
    log = log or folder.with_name(f"{folder.name}-{nursery.jobs + 1}.log")
    common = {"WORLD_SIZE": str(len(places)), "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": str(free_port())} | dict(env or {})
    number = nursery.ask(
        script=str(ROOT / script),
        argv=[str(run_file), f"output_dir={folder}", *words, *arm_words(arm)],
        ranks=[
            {"RANK": str(rank), "LOCAL_RANK": str(rank)} | common | dict(place.env)
            for rank, place in enumerate(places)
        ],
        spaces=[dict(place.spaces) for place in places],
        log=str(log),
        cwd=str(ROOT),
    )
    return Ranks(nursery, number, log)


def run(run_file: Path | str, *words: str, limit_s: float = LIMIT_S, **how: Any) -> Ended:
    """Start and wait."""
    with start(run_file, *words, **how) as ranks:
        return ranks.wait(limit_s)


def good(run_file: Path | str, *words: str, **how: Any) -> Ended:
    """Start, wait, and expect every rank to end well."""
    ended = run(run_file, *words, **how)
    assert not any(ended.codes), f"{ended.codes}\n{ended.text[-4000:]}"
    return ended


def told(folder: Path, keys: Sequence[str]) -> list[tuple[Any, ...]]:
    """These fields of every record of a run."""
    return [tuple(record[key] for key in keys) for record in records(folder)]


def steps(folder: Path) -> list[int]:
    """The updates that a run has recorded."""
    return [record["step"] for record in records(folder)]


def resumed(ended: Ended | launching.Ended) -> int:
    """The update that a start went on from; -1 for a start from the beginning."""
    found = re.search(r"resumed\s+at update (\d+)", ended.text)
    return int(found[1]) if found else -1


def newest(folder: Path) -> Path:
    """The checkpoint of a run folder that its pointer names."""
    name = json.loads((folder / "checkpoints" / "LATEST").read_text())
    return folder / "checkpoints" / str(name)


def arrays(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every array of a checkpoint put together from its pieces, by this function's own rules."""
    shapes = json.loads((checkpoint / "arrays.json").read_text())
    found: dict[str, dict[int, torch.Tensor]] = {name: {} for name in shapes}
    for path in sorted(checkpoint.glob("arrays-*.safetensors")):
        for key, values in load_file(path).items():
            name, _, start = key.rpartition("@")
            assert int(start) not in found[name], f"{key} stands twice"
            found[name][int(start)] = values
    whole = {}
    for name, pieces in found.items():
        ordered = sorted(pieces.items())
        ends = [0, *(start + len(values) for start, values in ordered)]
        assert [start for start, _ in ordered] == ends[:-1], f"{name}: gaps or overlaps"
        dtype = getattr(torch, shapes[name]["dtype"])
        whole[name] = torch.cat([values for _, values in ordered]).view(shapes[name]["shape"])
        assert whole[name].dtype == dtype
    return whole


def state(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint says besides its arrays."""
    return dict(json.loads((checkpoint / "state.json").read_text()))


def random_states(checkpoint: Path) -> list[bytes]:
    """Of every rank's dropout."""
    return [path.read_bytes() for path in sorted(checkpoint.glob("rng-*.safetensors"))]


def faults(checkpoint: Path) -> list[str]:
    """What a committed checkpoint lacks, by its manifest, without the product's own check."""
    told = json.loads((checkpoint / "manifest.json").read_text())
    wrong = []
    for name, about in told["files"].items():
        path = checkpoint / name
        good = path.is_file() and sha256(path.read_bytes()).hexdigest() == about["sha256"]
        wrong += [] if good else [f"{checkpoint.name}/{name}"]
    return wrong


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Whether two sets of arrays are the same, bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
