"""A child in the foreground: it gets every signal and the terminal, as if it stood alone."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

# What a terminal sends to the whole group, and what `kill` sends to one process.
TO_GROUP = (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP)
TO_PROCESS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
WANTS_TERMINAL = (signal.SIGTTIN, signal.SIGTTOU)


class Forwarder:
    """Passes signals on to a child that leads a process group of its own, each exactly once.

    The terminal signals our group only, so that the child hears of a Ctrl-C from us; when it reads
    from the terminal (a shell, a debugger) it gets the terminal, and hears for itself from then on.
    Signals that arrive before the child runs are kept for it.
    """

    def __init__(self) -> None:
        self._child: int | None = None
        self._waiting: list[int] = []
        self._previous: dict[int, Any] = {}
        self._terminal: int | None = None

    def __enter__(self) -> Forwarder:
        for number in (*TO_GROUP, *TO_PROCESS):
            if signal.getsignal(number) != signal.SIG_IGN:  # as `nohup` wants it
                self._previous[number] = signal.signal(number, self._forward)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._terminal is not None:
            self._give_terminal(os.getpgrp())
            os.close(self._terminal)
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def run(self, process: subprocess.Popen[Any]) -> int:
        """Wait for the child's end: its exit code, 128+n when signal n ended it."""
        self._child = process.pid
        for number in self._waiting:
            self._send(number)
        while process.returncode is None:
            _, status = os.waitpid(process.pid, os.WUNTRACED)
            if os.WIFSTOPPED(status):
                self._stopped(os.WSTOPSIG(status))
            else:
                self._child = None
                process.returncode = os.waitstatus_to_exitcode(status)
        code = int(process.returncode)
        return 128 - code if code < 0 else code

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if self._child is None:
            self._waiting.append(number)
        else:
            self._send(number)

    def _send(self, number: int) -> None:
        assert self._child is not None
        with suppress(ProcessLookupError):
            if number in TO_GROUP:
                os.killpg(self._child, number)
            else:
                os.kill(self._child, number)

    def _stopped(self, number: int) -> None:
        """The child stopped: for want of the terminal, or because it was told to (Ctrl-Z)."""
        assert self._child is not None
        if number not in WANTS_TERMINAL or not self._give_terminal(self._child):
            if self._terminal is not None:
                self._give_terminal(os.getpgrp())
            os.kill(os.getpid(), signal.SIGSTOP)  # the shell sees a stopped job; `fg` goes on here
        os.killpg(self._child, signal.SIGCONT)

    def _give_terminal(self, group: int) -> bool:
        if self._terminal is None:
            try:
                self._terminal = os.open("/dev/tty", os.O_RDWR)
            except OSError:
                return False
        before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # else a background group stops here
        try:
            if os.tcgetpgrp(self._terminal) not in (os.getpgrp(), self._child):
                return False  # another job has it; `fg` will bring us back
            os.tcsetpgrp(self._terminal, group)
        except OSError:
            return False
        finally:
            signal.signal(signal.SIGTTOU, before)
        return True
