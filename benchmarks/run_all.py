"""Every benchmark in turn, as `make bench` runs them; prints Markdown for benchmarks/README.md.

python benchmarks/run_all.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCHRUN = str(Path(sys.executable).parent / "torchrun")
COMMANDS = [
    [sys.executable, "benchmarks/data_path.py"],
    [TORCHRUN, "--nproc_per_node", "2", "benchmarks/loop.py", "zero1"],
    [TORCHRUN, "--nproc_per_node", "2", "benchmarks/loop.py", "ddp"],
    [TORCHRUN, "--nproc_per_node", "1", "benchmarks/loop.py", "zero1"],
    [TORCHRUN, "--nproc_per_node", "2", "benchmarks/checkpoint.py", "zero1"],
    [TORCHRUN, "--nproc_per_node", "2", "benchmarks/checkpoint.py", "ddp"],
    [sys.executable, "benchmarks/loss.py"],
    [sys.executable, "benchmarks/startup.py"],
    [sys.executable, "benchmarks/accuracy.py"],
    [sys.executable, "benchmarks/estimators.py"],
    [TORCHRUN, "--nproc_per_node", "2", "benchmarks/wire.py"],
    [TORCHRUN, "--nproc_per_node", "4", "benchmarks/wire.py"],
]


def main() -> int:
    failed = 0
    env = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    for command in COMMANDS:
        shown = " ".join([Path(command[0]).name, *command[1:]])
        print(f"\n`{shown}`", flush=True)
        failed += subprocess.run(command, cwd=ROOT, env=env, check=False).returncode != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
