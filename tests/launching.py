"""Real launches: private ports and folders, a time limit each, every child ended by pid."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
TIME_LIMIT_S = 240


@dataclass(frozen=True)
class Ended:
    """A launch that came to its end."""

    code: int
    text: str  # stdout and stderr together


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def command(
    launcher: str, ranks: int, script: list[str], config: str = "local_zero1_bf16"
) -> list[str]:
    """The launcher's command for `ranks` processes of a script on this machine.

    Args:
        config: the Accelerate YAML; used by `accelerate` only.
    """
    port = str(free_port())
    if launcher == "accelerate":
        yaml = f"accelerate_configs/{config}.yaml"
        head = ["accelerate", "launch", "--config_file", yaml, "--num_processes", str(ranks)]
        return [str(BIN / head[0]), *head[1:], "--main_process_port", port, *script]
    if launcher == "deepspeed":
        return [str(BIN / "deepspeed"), "--num_gpus", str(ranks), "--master_port", port, *script]
    assert launcher == "torchrun"
    head = ["torchrun", "--nproc_per_node", str(ranks), "--master_port", port]
    return [str(BIN / head[0]), *head[1:], *script]


class Launched:
    """A running launch; a context manager that leaves no process behind."""

    def __init__(self, words: list[str], log: Path, env: dict[str, str] | None = None) -> None:
        inherited = {
            k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "DS_"))
        }
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            inherited.pop(name, None)
        # The launchers' scripts are found by a bare command too (deepspeed calls python itself).
        path = f"{BIN}{os.pathsep}{inherited.get('PATH', '')}"
        settings = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PATH": path}
        self.log = log
        self._file = log.open("wb")
        self.process = subprocess.Popen(
            words,
            cwd=ROOT,
            env=inherited | settings | (env or {}),
            stdin=subprocess.DEVNULL,
            stdout=self._file,
            stderr=subprocess.STDOUT,
        )

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self.process.pid)
            for child in [*parent.children(recursive=True), parent]:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
        self.process.wait()
        self._file.close()

    def wait(self, limit_s: float = TIME_LIMIT_S) -> Ended:
        """Wait for the end; a launch over its limit fails the test with its output."""
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"still running after {limit_s} s:\n{self.text()[-4000:]}"
            ) from None
        return Ended(code, self.text())

    def text(self) -> str:
        """The output so far."""
        return self.log.read_text(errors="replace")


def run(
    launcher: str,
    ranks: int,
    script: list[str],
    log: Path,
    *,
    config: str = "local_zero1_bf16",
    env: dict[str, str] | None = None,
    limit_s: float = TIME_LIMIT_S,
) -> Ended:
    """Launch and wait."""
    extra = {"DS_ACCELERATOR": "cpu"} if launcher == "deepspeed" else {}
    with Launched(command(launcher, ranks, script, config), log, extra | (env or {})) as launched:
        return launched.wait(limit_s)


def wait_for(condition: Any, limit_s: float, what: str) -> Any:
    """Poll until `condition()` is true; returns its value."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.01)
    raise AssertionError(f"{what} did not happen within {limit_s} s")


def status(folder: Path, rank: int) -> dict[str, Any]:
    """A rank's status file; empty while there is none or it is being written."""
    try:
        return json.loads((folder / "status" / f"rank-{rank}.json").read_text())
    except (OSError, ValueError):
        return {}


def records(folder: Path, name: str = "metrics") -> list[dict[str, Any]]:
    """Every whole line of a run's JSONL file."""
    path = folder / f"{name}.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.is_file() else []
    return [json.loads(line) for line in lines]
