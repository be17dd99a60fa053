"""How a rank ends: exit codes, status files, who prints, and a wish to stop that signals repeat."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipes.checkpoint.group import StageError
from recipes.engine.peers import Peers
from recipes.outcome import (
    NumbersError,
    Outcome,
    PeerError,
    Stopped,
    StopWish,
    TopologyError,
    exit_code,
)

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("x"), 2),
        (json.JSONDecodeError("x", "", 0), 2),
        (TopologyError("x"), 3),
        (NumbersError("x"), 4),
        (Stopped("x"), 75),
        (PeerError("x", 75), 75),
        (PeerError("x", 3), 3),
        (RuntimeError("x"), 1),
        (OSError("x"), 1),
        (PermissionError(errno.EACCES, "Permission denied", "/root/x"), 2),
        (OSError(errno.ENOSPC, "No space left on device", "/root/x"), 2),
        (FileNotFoundError(errno.ENOENT, "No such file", "ours"), 1),
        (KeyError("x"), 1),
        (KeyboardInterrupt(), 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_each_kind_of_end_has_its_exit_code(error: BaseException, code: int) -> None:
    assert exit_code(error) == code
    with Outcome(rank=0, local_rank=0) as outcome:
        raise error
    assert outcome.code == code


def test_a_run_that_ends_well_is_0(tmp_path: Path) -> None:
    with Outcome(rank=2, local_rank=2) as outcome:
        outcome.folder = tmp_path
    assert outcome.code == 0
    assert status(tmp_path, 2)["state"] == "done" and status(tmp_path, 2)["exit_code"] == 0


def test_an_exit_of_somebody_else_passes_through() -> None:
    with pytest.raises(SystemExit) as caught, Outcome(rank=0, local_rank=0):
        raise SystemExit(7)
    assert caught.value.code == 7


# ---- the status file


def status(folder: Path, rank: int) -> dict[str, object]:
    """What a rank wrote last."""
    text = (folder / "status" / f"rank-{rank}.json").read_text()
    assert text.endswith("\n") and text.count("\n") == 1
    return dict(json.loads(text))


def test_the_status_while_a_rank_runs_and_after_it_failed(tmp_path: Path) -> None:
    with Outcome(rank=5, local_rank=1) as outcome:
        outcome.write("starting")  # the folder is not known yet: nothing is written
        assert not list(tmp_path.iterdir())
        outcome.folder = tmp_path / "run"
        outcome.write("training")
        running = status(tmp_path / "run", 5)
        assert (running["state"], running["exit_code"], running["reason"]) == ("training", None, "")
        raise TopologyError("two processes, not eight")
    ended = status(tmp_path / "run", 5)
    assert (ended["state"], ended["exit_code"]) == ("failed", 3)
    assert (ended["rank"], ended["reason"]) == (5, "two processes, not eight")
    assert ended["host"] == socket.gethostname()
    assert isinstance(ended["time"], float) and ended["time"] >= running["time"]  # type: ignore[operator]


@pytest.mark.parametrize("error", [Stopped("at update 7"), PeerError("rank 1: stopped", 75)])
def test_a_stop_on_request_is_no_failure(error: Exception, tmp_path: Path) -> None:
    with Outcome(rank=0, local_rank=0) as outcome:
        outcome.folder = tmp_path
        raise error
    assert status(tmp_path, 0)["state"] == "stopped" and status(tmp_path, 0)["exit_code"] == 75


def test_a_full_disk_does_not_hide_how_a_rank_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "told"
    monkeypatch.setenv("OCTET_STATUS", str(told))
    (tmp_path / "run").touch()  # no folder: nothing can be written into it
    with Outcome(rank=0, local_rank=0) as outcome:
        outcome.folder = tmp_path / "run"
        raise Stopped("at update 7")
    assert outcome.code == 75
    ended = json.loads(told.read_text())
    assert (ended["state"], ended["exit_code"], ended["reason"]) == ("stopped", 75, "at update 7")


# ---- who prints


@pytest.mark.parametrize(
    ("rank", "local_rank", "joined", "error", "printed"),
    [
        # before the ranks act together, all of a node find the same: its first rank speaks
        (0, 0, False, ValueError("bad key"), "\nbad key\n"),
        (4, 0, False, ValueError("bad key"), "\nbad key\n"),
        (5, 1, False, ValueError("bad key"), ""),
        # from then on an error is this rank's own
        (5, 1, True, ValueError("bad row"), "\nrank 5: bad row\n"),
        (0, 0, True, NumbersError("nan"), "\nrank 0: nan\n"),
        # and what another rank found, that rank has printed
        (0, 0, True, PeerError("rank 5: bad row", 2), ""),
    ],
)
def test_an_error_is_printed_once(
    rank: int,
    local_rank: int,
    joined: bool,
    error: Exception,
    printed: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Outcome(rank=rank, local_rank=local_rank) as outcome:
        outcome.joined = joined
        raise error
    assert capsys.readouterr().err == printed


@pytest.mark.parametrize(
    ("error", "rank", "other"),
    [
        (ValueError("none is whole"), 0, False),
        (ValueError("none is whole"), 1, True),
        (StageError("rank 2: full"), 1, True),
        (OSError(116, "Stale file handle"), 1, False),  # which only this rank has met
        (RuntimeError("Connection closed by peer"), 1, False),
    ],
)
def test_what_all_ranks_find_alike_is_told_by_the_first(
    error: Exception, rank: int, other: bool
) -> None:
    def act() -> None:
        raise error

    peers = Peers.__new__(Peers)
    peers.rank = rank
    with pytest.raises(PeerError if other else type(error), match=str(error.args[-1])) as caught:
        peers.alike(act)
    assert exit_code(caught.value) == exit_code(error)


def test_a_fault_of_our_own_is_logged_with_its_trace_on_any_rank(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with Outcome(rank=5, local_rank=1) as outcome:
        raise KeyError("no such thing")
    assert outcome.code == 1
    assert caplog.messages == ["rank 5 failed"]
    assert "in test_a_fault_of_our_own" in caplog.text and "no such thing" in caplog.text
    assert capsys.readouterr().err == ""


# ---- the wish to stop


NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@pytest.fixture
def _handlers() -> Iterator[None]:
    kept = {number: signal.getsignal(number) for number in NUMBERS}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_handlers")
@pytest.mark.parametrize("number", NUMBERS)
def test_signals_are_a_wish_and_a_second_one_kills_nobody(number: signal.Signals) -> None:
    wish = StopWish()
    assert wish.requested is False
    os.kill(os.getpid(), number)
    assert wish.requested is True
    assert signal.getsignal(number) == wish._note  # or the next line would end the tests
    os.kill(os.getpid(), number)
    os.kill(os.getpid(), signal.SIGTERM)
    assert wish.requested is True


PROGRAM = """
import sys, time
from recipes.outcome import Outcome, Stopped, StopWish
wish = StopWish()
print("ready", flush=True)
with Outcome(rank=0, local_rank=0) as outcome:
    while not wish.requested:
        time.sleep(0.01)
    print("saving", flush=True)
    sys.stdin.readline()
    raise Stopped("with a checkpoint")
sys.exit(outcome.code)
"""


def test_a_process_that_is_signalled_again_while_it_saves_ends_with_75() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "saving\n"
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate("go on\n", timeout=30)
    assert process.returncode == 75, errors
    assert errors == "\nwith a checkpoint\n"
