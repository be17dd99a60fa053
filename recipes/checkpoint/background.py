"""Writing in a thread while training goes on: one at a time, and no failure is lost."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from recipes.checkpoint.group import FAULTS, Group


class Writer:
    """Runs one act after the other, in the background or at once.

    The thread is a daemon: a rank that ends by an error does not wait for peers that will never
    come. A rank that ends well must `collect` first.
    """

    def __init__(self, group: Group, background: bool) -> None:
        self.pending = False  # whether an act was started and not collected
        self._group, self._background = group, background
        self._done = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None

    def start(self, act: Callable[[Group], Any]) -> None:
        """Run `act(group)`; what it returns or raises is for `collect`, in the background or not.

        The one before must have been collected.
        """
        assert not self.pending, "two would be in flight"
        self.pending, self._value, self._error = True, None, None
        self._done.clear()
        if self._background:
            threading.Thread(target=self._run, args=[act], name="checkpoint", daemon=True).start()
        else:
            self._run(act)

    def _run(self, act: Callable[[Group], Any]) -> None:
        try:
            self._value = act(self._group)
        except FAULTS as error:
            self._error = error
        finally:  # any other error is a fault of our own, which is also shown as it comes
            self._error = self._error or sys.exc_info()[1]
            self._done.set()

    @property
    def ended(self) -> bool:
        """Whether an act has ended and was not collected."""
        return self.pending and self._done.is_set()

    def collect(self) -> Any:
        """Wait for the act, and give what it returned.

        Raises:
            OSError, RuntimeError, ValueError: what it raised.
        """
        assert self.pending, "nothing was started"
        self._done.wait()
        self.pending = False
        if self._error is not None:
            raise self._error
        return self._value
