"""kill -9 at more than 1,000 instants of saves and recoveries: what is lost is counted.

OCTET_SOAK=10 tries ten times as many.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

DRIVER = Path(__file__).parent / "drivers" / "kill_harness.py"
MEMORY = Path("/dev/shm")
PARTS, INSTANTS = 2, 1040


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory where that is possible: a kill loses nothing that was written, flushed or not."""
    with tempfile.TemporaryDirectory(dir=MEMORY if os.access(MEMORY, os.W_OK) else None) as name:
        yield Path(name)


@pytest.mark.timeout(3600)
def test_no_checkpoint_is_lost_to_kill_9_at_any_instant(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    soak = int(os.environ.get("OCTET_SOAK", "1"))
    each = str(INSTANTS * soak // PARTS)
    started = [
        subprocess.Popen(
            [sys.executable, str(DRIVER), str(folder / str(part)), each, str(part), str(PARTS)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for part in range(PARTS)
    ]
    counts: Counter[str] = Counter()
    lost: list[str] = []
    possible = 0
    for process in started:
        out, err = process.communicate()
        assert process.returncode == 0, err[-4000:]
        found = json.loads(out)
        counts.update(found["counts"])
        lost += found["lost"]
        possible = found["possible"]
    with capsys.disabled():
        print(f"\nkill harness: {counts['tried']:,} instants, {counts['lost']} checkpoints lost")
    assert not lost, "\n".join(lost)
    assert counts["tried"] >= min(1000, possible // 2)
    # Both sides of the instant at which the new one counts were tried, in every situation.
    assert min(counts[key] for key in ("old", "new", "nothing")) > 20, counts
    scenarios = (
        "first",
        "over",
        "again",
        "rotate",
        "fails",
        "fails again",
        "killed again in the recovery",
    )
    assert min(counts[name] for name in scenarios) > 20, counts
