"""Writing in a thread while training goes on: one at a time, and no failure is lost."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from recipes.checkpoint.group import Group


class _Task:
    """One act and how it went."""

    def __init__(self, act: Callable[[Group], Any], group: Group) -> None:
        self._act, self._group = act, group
        self._value: Any = None
        self.error: BaseException | None = None
        self.done = threading.Event()

    def run(self) -> None:
        """Act; whatever it raises is kept for `result`."""
        try:
            self._value = self._act(self._group)
        except (OSError, RuntimeError, ValueError, MemoryError) as error:
            self.error = error
        finally:  # any other error is a fault of our own, which is also shown as it comes
            self.error = self.error or sys.exc_info()[1]
            self.done.set()

    def result(self) -> Any:
        """Wait, and give what `act` returned or raise what it raised."""
        self.done.wait()
        if self.error is not None:
            raise self.error
        return self._value


class Writer:
    """Runs one act after the other, in the background or at once.

    The thread is a daemon: a rank that ends by an error does not wait for peers that will never
    come. A rank that ends well must `collect` first; one that ends by an error may `close`.
    """

    def __init__(self, group: Group, background: bool) -> None:
        self.background = background
        self._group = group
        self._tasks: deque[_Task] = deque()

    def start(self, act: Callable[[Group], Any]) -> None:
        """Run `act(group)`; waits for the one before it, and raises its error.

        What `act` returns or raises is for `collect`, in the background or not.
        """
        if self._tasks:
            last = self._tasks[-1]
            last.done.wait()
            if last.error is not None:
                self._tasks.pop()
                raise last.error
        task = _Task(act, self._group)
        self._tasks.append(task)
        if self.background:
            threading.Thread(target=task.run, name="checkpoint", daemon=True).start()
        else:
            task.run()

    @property
    def ended(self) -> bool:
        """Whether an act has ended whose result was not collected."""
        return bool(self._tasks) and self._tasks[0].done.is_set()

    @property
    def busy(self) -> bool:
        """Whether an act is running."""
        return bool(self._tasks) and not self._tasks[-1].done.is_set()

    def collect(self) -> Any:
        """Wait for the oldest act that was not collected.

        Returns:
            What it returned.

        Raises:
            OSError, RuntimeError, ValueError: what it raised.
        """
        assert self._tasks, "nothing was started"
        return self._tasks.popleft().result()

    def close(self, limit_s: float) -> bool:
        """Give what is running some time, for a rank that ends by an error.

        Returns:
            Whether it has ended.
        """
        return not self._tasks or self._tasks[-1].done.wait(limit_s)
