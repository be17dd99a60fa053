"""The channel between `octet launch` and a node's agent: JSON messages over one ssh's pipes."""

from __future__ import annotations

import json
import queue
import threading
import time
from contextlib import suppress
from typing import IO, Any

BEAT_S = 2.0


class ChannelClosed(Exception):
    """The other side is gone."""


class Channel:
    """Messages of JSON, one a line; the other side is lost when it closes or falls silent.

    Beats come and go in threads: a side that is busy, with a slow file system or a terminal that
    takes no more text, is not silent.
    """

    def __init__(self, source: IO[bytes], sink: IO[bytes]) -> None:
        self._sink, self._sending = sink, threading.Lock()
        self._inbox: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.heard = time.monotonic()  # when a line came last
        threading.Thread(target=self._read, args=(source,), daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()

    def _read(self, source: IO[bytes]) -> None:
        for line in source:
            self.heard = time.monotonic()
            with suppress(ValueError):  # a login script may print before us
                message = json.loads(line)
                if isinstance(message, dict) and "beat" not in message:
                    self._inbox.put(message)
        self._inbox.put(None)

    def _beat(self) -> None:
        with suppress(ChannelClosed):
            while True:
                time.sleep(BEAT_S)
                self.send(beat=True)

    def send(self, **message: Any) -> None:
        """Send one message.

        Raises:
            ChannelClosed: the other side, or this one, has closed.
        """
        try:
            with self._sending:
                self._sink.write(json.dumps(message).encode() + b"\n")
                self._sink.flush()
        except (OSError, ValueError) as error:
            raise ChannelClosed(str(error)) from error

    def receive(self, wait_s: float) -> dict[str, Any] | None:
        """The next message, None when none came in time.

        Raises:
            ChannelClosed: the other side has closed.
        """
        try:
            message = self._inbox.get(timeout=wait_s)
        except queue.Empty:
            return None
        if message is None:
            self._inbox.put(None)  # whoever asks again
            raise ChannelClosed("the channel was closed")
        return message
