"""A process that holds a run folder's lock until it is killed, or ends in order on a line.

python tests/drivers/locked.py PATH JSON
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recipes.checkpoint import lock

if __name__ == "__main__":
    lock.BEAT_S = 0.1
    if os.environ.get("NO_LOCKS"):  # a file system that carries none

        def unsupported(*_: object) -> None:
            raise OSError(37, "No locks available")

        lock.fcntl.lockf = unsupported  # type: ignore[assignment]
    with lock.FolderLock(Path(sys.argv[1]), json.loads(sys.argv[2])):
        print("held", flush=True)
        sys.stdin.readline()
