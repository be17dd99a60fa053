"""`octet launch` around its attempts, which are played here: restarts, records, the terminal."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT
from tenacity import wait_none

from recipes.cluster import launch_job
from recipes.cluster.asking import Asked
from recipes.cluster.launch_job import Wishes, launch
from recipes.cluster.supervisor import Report

Play = Callable[[], int]


class Attempts:
    """Plays an attempt for each function: it returns the attempt's exit code."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.plays, self.fresh = folder, list[Play](), list[bool]()
        (folder / "hostfile").write_text("localhost slots=2\n")
        monkeypatch.setattr(launch_job, "supervise", self._supervise)
        monkeypatch.setattr(launch_job, "wait_exponential", lambda **_: wait_none())

    def _supervise(self, start: Any, *, job_id: str, logs: Path, **_: Any) -> Report:
        self.fresh.append("--fresh" in start.arguments)
        return Report(code=self.plays.pop(0)(), cause="", job_id=job_id, logs=logs / job_id)

    def launch(self, run: Path, *plays: Play, fresh: bool = False) -> int:
        """Launch with as many restarts as there are plays."""
        self.plays = list(plays)
        asked = Asked(
            hostfile=str(self.folder / "hostfile"),
            run=str(ROOT / "recipes" / "runs" / "rehearsal.yaml"),
            overrides=(f"output_dir={run}",),
            config=str(ROOT / "accelerate_configs" / "local_ddp_bf16.yaml"),
        )
        return launch(asked, Wishes(restarts=len(plays) - 1, fresh=fresh), echo=lambda text: None)


@pytest.fixture()
def attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Attempts:
    return Attempts(tmp_path, monkeypatch)


def test_a_fresh_start_is_fresh_until_the_earlier_run_is_gone(
    attempts: Attempts, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text("{}")

    def begin() -> int:
        (run / "run.json").unlink()
        (run / "run.json").write_text("{}")
        return 137

    # The first one crashes before it deletes anything: the second must not go on with the old run.
    assert attempts.launch(run, lambda: 1, begin, lambda: 137, lambda: 0, fresh=True) == 0
    assert attempts.fresh == [True, True, False, False]
    records = [json.loads(line) for line in (run / "logs" / "attempts.jsonl").open()]
    assert [record["code"] for record in records] == [1, 137, 137, 0]


def test_a_fresh_start_without_an_earlier_run_is_fresh_once(
    attempts: Attempts, tmp_path: Path
) -> None:
    """A login node sees no run folder: what the first attempt saved must not be deleted."""
    assert attempts.launch(tmp_path / "run", lambda: 1, lambda: 0, fresh=True) == 0
    assert attempts.fresh == [True, False]


def test_a_run_folder_that_is_not_here_does_not_change_the_outcome(
    attempts: Attempts, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    assert attempts.launch(tmp_path / "file" / "run", lambda: 137, lambda: 75, lambda: 0) == 0
    assert caplog.text.count("note: this attempt is not recorded") == 3


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_text_that_nobody_reads_or_can_show_is_no_error(encoding: str) -> None:
    """Ctrl-C ends `tee` as well; an error here would kill the ranks while they save."""
    code = "from recipes.cli import _write\n_write('\u00e9 \u6f22\\n')\ninput()\n"
    code += "for _ in range(3): _write('more\\n')"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PYTHONIOENCODING": encoding, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdin and process.stdout and process.stderr
    shown = "\u00e9 \u6f22" if encoding == "utf-8" else "? ?"
    assert process.stdout.readline().decode() == f"{shown}\n"
    process.stdout.close()
    process.stdin.write(b"\n")
    process.stdin.close()
    assert (process.wait(20), process.stderr.read()) == (0, b"")
