"""A launcher of the tests, without torch: starts this node's ranks and waits for them.

plain_launcher.py NUMBER SCRIPT [argument ...]; like DeepSpeed's, it does so in a child of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys


def main(number: int, words: list[str]) -> int:
    if os.environ.get("PLAIN_CHILD") is None:
        env = os.environ | {"PLAIN_CHILD": "1"}
        return subprocess.run([sys.executable, *sys.argv], env=env).returncode
    ranks = [
        subprocess.Popen(
            [sys.executable, *words], env=os.environ | {"RANK": str(n), "LOCAL_RANK": str(n)}
        )
        for n in range(number)
    ]
    return max(rank.wait() for rank in ranks)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
