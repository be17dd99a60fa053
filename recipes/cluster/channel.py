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
    """Messages of JSON, one a line; the other side is lost when it closes or falls silent."""

    def __init__(self, source: IO[bytes], sink: IO[bytes]) -> None:
        self._sink = sink
        self._inbox: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.heard = self._sent = time.monotonic()
        threading.Thread(target=self._read, args=(source,), daemon=True).start()

    def _read(self, source: IO[bytes]) -> None:
        for line in source:
            with suppress(ValueError):  # a login script may print before us
                self._inbox.put(json.loads(line))
        self._inbox.put(None)

    def send(self, **message: Any) -> None:
        """Send one message.

        Raises:
            ChannelClosed: the other side has closed.
        """
        try:
            self._sink.write(json.dumps(message).encode() + b"\n")
            self._sink.flush()
        except OSError as error:
            raise ChannelClosed(str(error)) from error
        self._sent = time.monotonic()

    def receive(self, wait_s: float) -> dict[str, Any] | None:
        """The next message, None when none came in time; beats both ways are handled here.

        Raises:
            ChannelClosed: the other side has closed.
        """
        if time.monotonic() - self._sent > BEAT_S:
            self.send(beat=True)
        try:
            message = self._inbox.get(timeout=wait_s)
        except queue.Empty:
            return None
        if message is None:
            raise ChannelClosed("the channel was closed")
        self.heard = time.monotonic()
        return None if message == {"beat": True} else message
