"""The forwarder: a child in a group of its own is stopped, continued and ended as by itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import launching
import psutil
import pytest

DRIVER = """
import os, subprocess, sys
from recipes.rehearsal.foreground import Forwarder
with Forwarder() as forwarder:
    child = subprocess.Popen(sys.argv[1:], preexec_fn=os.setpgrp)
    sys.exit(forwarder.run(child))
"""


def start(*words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", DRIVER, *words], cwd=launching.ROOT)


@pytest.mark.parametrize(("script", "code"), [("exit 3", 3), ("kill -TERM $$", 143), ("true", 0)])
def test_the_child_s_end_is_ours(script: str, code: int) -> None:
    assert start("sh", "-c", script).wait(20) == code


def test_a_stop_stops_both_and_both_go_on(tmp_path: Path) -> None:
    started = start(
        "sh", "-c", f"touch {tmp_path / 'up'}; read line < /dev/null; sleep 0.5; exit 4"
    )
    launching.wait_for((tmp_path / "up").exists, 20, "the child's start")
    both = [psutil.Process(started.pid), *psutil.Process(started.pid).children()]
    os.kill(started.pid, signal.SIGTSTP)
    launching.wait_for(
        lambda: [p.status() for p in both] == [psutil.STATUS_STOPPED] * 2, 20, "the stop"
    )
    os.kill(started.pid, signal.SIGCONT)
    assert started.wait(20) == 4


def test_a_signal_that_is_ignored_from_the_start_stays_ignored(tmp_path: Path) -> None:
    program = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n{DRIVER}"
    script = f"touch {tmp_path / 'up'}; sleep 0.5; exit 5"
    words = [sys.executable, "-c", program, "sh", "-c", script]
    started = subprocess.Popen(words, cwd=launching.ROOT)
    launching.wait_for((tmp_path / "up").exists, 20, "the child's start")
    os.kill(started.pid, signal.SIGINT)
    assert started.wait(20) == 5


def test_what_a_scheduler_sends_reaches_the_child(tmp_path: Path) -> None:
    script = f"trap 'exit 6' USR1; touch {tmp_path / 'up'}; while true; do sleep 0.05; done"
    started = start("sh", "-c", script)
    launching.wait_for((tmp_path / "up").exists, 20, "the child's start")
    os.kill(started.pid, signal.SIGUSR1)
    assert started.wait(20) == 6
