"""`octet plan` in this process, and the blocks of its output in docs/planning.md.

python tests/planned.py     # writes the blocks anew, after the plan's numbers have changed
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "planning.md"
RUNS = ROOT / "recipes" / "runs"
XL = ("recipes/runs/gpt2_xl.yaml", "--hostfile", "hostfile", "--gpu", "a100-80gb")
XL += ("--nic", "200gbit", "--price", "1.80")
# The four commands that must be answered at once.
COMMANDS = {
    "gpt2_xl": XL,
    "gpt2_xl_40gb": ("recipes/runs/gpt2_xl_40gb.yaml", *XL[1:4], "a100-40gb", *XL[5:]),
    "gpt2_small": ("recipes/runs/gpt2_small.yaml", *XL[1:]),
    "llama_7b": (
        *("recipes/runs/llama_7b.yaml", "--nodes", "2", "--gpus", "8", "--gpu", "a100-80gb"),
        *("--nic", "1600gbit", "--precision", "bf16"),
    ),
}
# A command, and the part of its output that the block below holds.
BLOCK = re.compile(r"(?ms)^<!-- output: (?P<part>[^>]+?) -->\n```\n(?P<body>.*?)^```$")
COMMAND = re.compile(r"(?ms)^```\n(octet plan [^`]*?)^```$")


def plan(*words: str) -> tuple[int, str, str]:
    """Exit code, output and error of `octet plan` from the repository's root."""
    from recipes import cli

    out, err, before = io.StringIO(), io.StringIO(), Path.cwd()
    os.chdir(ROOT)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.main(["plan", *words])
    finally:
        os.chdir(before)
    return code, out.getvalue(), err.getvalue()


def answered(folder: Path, *words: str) -> dict[str, Any]:
    """The JSON of a plan."""
    path = folder / "plan.json"
    code, _, err = plan(*words, "--json", str(path))
    assert code == 0, err
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def part_of(output: str, name: str) -> str:
    """A section of the output by its heading's number and name, or what stands before the first."""
    pieces = re.split(r"(?m)^(?=\d [A-Z])", output)
    if name == "headline":
        return pieces[0].strip("\n") + "\n"
    [found] = [piece for piece in pieces if piece.startswith(name)]
    return found.split("\n\nBands stand")[0].rstrip("\n") + "\n"


def refreshed(text: str) -> str:
    """The document with every block as the command above it prints it now."""
    outputs: dict[str, str] = {}

    def block(found: re.Match[str]) -> str:
        command = [c[1] for c in COMMAND.finditer(text, 0, found.start())][-1]
        if command not in outputs:
            words = shlex.split(command.replace("\\\n", " "))[2:]
            code, outputs[command], err = plan(*words)
            assert code == 0, err
        body = part_of(outputs[command], found["part"])
        return f"<!-- output: {found['part']} -->\n```\n{body}```"

    return BLOCK.sub(block, text)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    DOCUMENT.write_text(refreshed(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
