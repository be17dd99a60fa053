"""docs/planning.md shows what `octet plan` prints, and its file of hardware is taken."""

from __future__ import annotations

import re
from pathlib import Path

from planned import BLOCK, DOCUMENT, XL, plan, refreshed

TEXT = DOCUMENT.read_text(encoding="utf-8")


def test_every_section_is_shown() -> None:
    parts = [found["part"] for found in BLOCK.finditer(TEXT)]
    assert parts[:3] == ["headline", "1 Strategy", "2 Memory"]
    assert len(parts) == 9
    assert all(found["body"].strip() for found in BLOCK.finditer(TEXT))


def test_what_is_shown_is_what_is_printed() -> None:
    assert refreshed(TEXT) == TEXT, "run python tests/planned.py"


def test_the_hardware_that_is_described_is_taken(tmp_path: Path) -> None:
    [block] = re.findall(r"(?ms)^```yaml\n(gpus:.*?)^```", TEXT)
    (tmp_path / "mine.yaml").write_text(block)
    words = [*XL[:3], "--gpu", "my-gpu", "--nic", "my-fabric", "--hardware"]
    code, out, err = plan(*words, str(tmp_path / "mine.yaml"))
    assert code == 0, err
    assert "2 nodes of 4 my-gpu, 400 Gbit/s between them" in " ".join(out.split())
