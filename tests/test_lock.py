"""Two runs on one folder are refused; a dead run holds nothing for ever."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from recipes.checkpoint import lock
from recipes.checkpoint.lock import FolderLock, is_held

DRIVER = Path(__file__).parent / "drivers" / "locked.py"


@contextmanager
def holder(
    path: Path, who: dict[str, Any], env: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock."""
    process = subprocess.Popen(
        [sys.executable, str(DRIVER), str(path), json.dumps(who)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | (env or {}),
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "BEAT_S", 0.1)
    monkeypatch.setattr(lock, "WATCH_S", 0.6)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "lock"


def took_s(path: Path, who: dict[str, Any] | None = None) -> float:
    """Seconds that it took to take the lock, and give it back."""
    began = time.monotonic()
    with FolderLock(path, who or {}):
        return time.monotonic() - began


def record(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def no_locks(*_: object) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


def test_a_second_run_is_refused_with_who_holds_the_folder(path: Path) -> None:
    began = time.mktime((2026, 3, 1, 12, 3, 0, 0, 0, -1))
    who = {"host": "worker-0", "job": "4711", "began": began}
    with holder(path, who) as process:
        with pytest.raises(ValueError) as caught:
            FolderLock(path, {}).acquire()
        assert str(caught.value) == (
            f"{path.parent} is being trained by pid {process.pid} on worker-0 since 12:03 "
            "(job 4711); stop that run, or name another output_dir"
        )
        with pytest.raises(ValueError):  # and asking does not loosen it
            FolderLock(path, {}).acquire()
        assert record(path)["state"] == "held"
        assert is_held(path)
    assert not is_held(path) and not is_held(path.with_name("absent"))


def test_the_lock_of_a_killed_run_on_this_host_is_taken_at_once(path: Path) -> None:
    with holder(path, {}) as process:
        process.kill()
        process.wait()
        assert record(path)["state"] == "held", "it had no time to say so"
        assert took_s(path) < 0.4


def test_a_run_that_ended_in_order_is_not_waited_for_wherever_it_ran(path: Path) -> None:
    with holder(path, {"host": "elsewhere"}) as process:
        process.communicate("\n")
        assert process.returncode == 0
    assert record(path)["state"] == "ended"
    assert took_s(path) < 0.4


def test_a_stopped_process_still_holds_its_lock(path: Path) -> None:
    with holder(path, {}) as process:
        process.send_signal(19)  # SIGSTOP: its beat stands still, the kernel's lock does not
        time.sleep(1)
        with pytest.raises(ValueError, match="is being trained by pid"):
            FolderLock(path, {}).acquire()


@pytest.mark.parametrize("ours", ["granted", "unsupported"])
def test_where_locks_do_not_reach_the_beat_of_a_living_run_refuses(
    ours: str, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if ours == "unsupported":
        monkeypatch.setattr(fcntl, "lockf", no_locks)
    caplog.set_level(logging.INFO)
    with (
        holder(path, {"host": "worker-1"}, {"NO_LOCKS": "1"}),
        pytest.raises(ValueError, match=r"is being trained by pid \d+ on worker-1"),
    ):
        FolderLock(path, {}).acquire()
    assert "on worker-1, which did not end in order; watching" in caplog.text


@pytest.mark.parametrize("ours", ["granted", "unsupported"])
def test_where_locks_do_not_reach_a_dead_run_is_watched_and_then_taken_over(
    ours: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ours == "unsupported":
        monkeypatch.setattr(fcntl, "lockf", no_locks)
    with holder(path, {"host": "worker-1"}, {"NO_LOCKS": "1"}) as process:
        process.kill()
        process.wait()
        assert 0.6 <= took_s(path) < 2
    assert took_s(path) < 0.4, "the second end was in order"


def test_a_reboot_or_another_machine_of_the_same_name_is_watched(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with holder(path, {}) as process:
        process.kill()
        process.wait()
        monkeypatch.setattr(lock, "_machine", lambda: "another boot")
        assert took_s(path) >= 0.6


def test_another_error_of_the_lock_call_is_no_permission(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "lockf", broken)
    with pytest.raises(OSError, match="Input/output error"):
        FolderLock(path, {}).acquire()


def test_the_beat_goes_on_in_place_and_says_who(path: Path) -> None:
    with FolderLock(path, {"job": "7"}):
        first, inode = record(path), path.stat().st_ino
        assert (first["job"], first["pid"], first["state"]) == ("7", os.getpid(), "held")
        assert path.stat().st_size == lock.SIZE
        time.sleep(0.35)
        later = record(path)
        assert later["beat"] > first["beat"] and later["time"] > first["time"]
        assert later["key"] == first["key"] and path.stat().st_ino == inode
        assert path.stat().st_size == lock.SIZE
    assert record(path)["state"] == "ended" and path.is_file()
    assert not [t for t in threading.enumerate() if t.name == "lock"]


def test_one_process_does_not_open_the_file_twice(path: Path) -> None:
    """Closing a second descriptor would drop the kernel's lock of the first."""
    with FolderLock(path, {}):
        with pytest.raises(ValueError, match="by this very process"):
            FolderLock(path, {}).acquire()
        (path.parent / "link").symlink_to(path)
        with pytest.raises(ValueError, match="by this very process"):
            FolderLock(path.parent / "link", {}).acquire()
        script = (
            "import fcntl,sys; fcntl.lockf(open(sys.argv[1],'r+'), fcntl.LOCK_EX|fcntl.LOCK_NB)"
        )
        tried = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True)
        assert b"BlockingIOError" in tried.stderr or b"PermissionError" in tried.stderr
    FolderLock(path, {}).release()  # which never was acquired


def test_forked_children_neither_hold_nor_loosen_it(path: Path) -> None:
    with FolderLock(path, {}):
        pid = os.fork()
        if pid == 0:
            os.closerange(3, 64)
            os._exit(0)
        os.waitpid(pid, 0)
        with pytest.raises(subprocess.CalledProcessError):
            script = "import fcntl,sys; fcntl.lockf(open(sys.argv[1],'r+'), 6)"
            words = [sys.executable, "-c", script, str(path)]
            subprocess.run(words, check=True, capture_output=True)
    assert took_s(path) < 0.4


def test_a_torn_or_foreign_record_is_no_obstacle(path: Path) -> None:
    path.parent.mkdir()
    for text in ("", "{", "[1]", "nonsense"):
        path.write_text(text)
        assert took_s(path) < 0.4


def test_a_beat_reaches_the_server_at_once(path: Path) -> None:
    """A network file system keeps what is written for half a minute, and others see no beat."""
    lock_ = FolderLock(path, {})
    with lock_:
        assert fcntl.fcntl(lock_._handle, fcntl.F_GETFL) & os.O_DSYNC


def test_a_lock_that_cannot_be_closed_hides_no_end(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    held = FolderLock(path, {})
    held.acquire()
    close = os.close

    def full(handle: int) -> None:
        close(handle)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", full)
        held.release()
    assert "could not be marked as ended" in caplog.text
    assert took_s(path) < 0.4
