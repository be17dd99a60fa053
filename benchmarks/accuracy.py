"""How far the plan is off: every published measurement of tests/published/ against its prediction.

    python benchmarks/accuracy.py            # prints the tables
    python benchmarks/accuracy.py --write    # puts them into docs/planning.md

No clock is involved: the numbers are the same on every machine, and tests hold bounds on them
(test_planner_published.py, test_planner_memory_published.py, test_planner_network.py).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from published_rows import FOLDER, HARDWARE, Row, rows

from recipes.planner.memory import plan_memory
from recipes.planner.network import one_call
from recipes.planner.predict import predict
from recipes.planner.transfer import Place, ring_share
from recipes.planner.workload import Cluster
from recipes.runfile import read_yaml

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "planning.md"
BEGIN, END = "<!-- accuracy: begin -->", "<!-- accuracy: end -->"
GIB = 2.0**30
# Beginning of a row's id, and what it is. The constants were chosen on the first.
STACKS = {
    "mpt-": "llm-foundry MPT, 125 M to 70 B, A100 and H100 (constants chosen on these)",
    "hf-": "transformers GPT-2 and GPT-3 shapes, eager, DDP and ZeRO-1, V100 and A100",
    "flash-": "flash-attention's fused GPT, 125 M to 2.7 B, A100",
    "llmc-": "llm.c GPT-2, 124 M to 1.6 B, A100 and H100",
    "titan-": "torchtitan Llama, 8 B to 70 B, A100 and H100 (stated in part)",
    "fms-": "fms-fsdp Llama, 7 B to 70 B, 128 A100 (stated in part)",
    "tinyllama-16": "TinyLlama, 16 A100 (stated in part)",
}


def signed(share: float) -> str:
    """A share as `+3.1 %`."""
    return f"{100 * share:+.1f} %"


def table(head: list[str], body: list[list[str]]) -> Iterator[str]:
    """Markdown, the first column to the left."""
    yield "| " + " | ".join(head) + " |"
    yield "|---|" + "--:|" * (len(head) - 1)
    for line in body:
        yield "| " + " | ".join(line) + " |"


def time_errors() -> Iterator[str]:
    """Update times by stack."""
    found: dict[str, list[float]] = {stack: [] for stack in STACKS}
    for row in rows("time"):
        measured = row.update_s()
        stack = next((s for s in STACKS if row.id.startswith(s)), None)
        if measured is None or stack is None:
            continue
        plan = predict(row.work, row.candidate, row.cluster)
        found[stack].append(plan.update.value / measured - 1)
    body = []
    for stack, errors in found.items():
        worst = max(errors, key=abs)
        inside = sum(abs(e) <= 0.25 for e in errors)
        cells = [
            str(len(errors)),
            signed(median(errors)),
            f"{100 * median(map(abs, errors)):.1f} %",
        ]
        body.append([STACKS[stack], *cells, signed(worst), f"{inside} of {len(errors)}"])
    head = ["time of an update", "runs", "median", "median, unsigned", "worst", "within 25 %"]
    yield from table(head, body)


def memory_errors() -> Iterator[str]:
    """Peaks whose source states the whole configuration."""
    body = []
    for row in rows("memory", "a100-80gb"):
        peak = row.peak()
        if peak is None or not row.complete:
            continue
        plan = plan_memory(row.work, row.candidate, row.cluster)
        of_kind = {"alloc": plan.allocated, "reserved": plan.reserved}.get(peak[1], plan.device)
        planned = of_kind.value
        cells = [peak[1], f"{peak[0] / GIB:.2f}", f"{planned / GIB:.2f}"]
        body.append([row.id, *cells, signed(planned / peak[0] - 1)])
    yield from table(["peak memory", "kind", "measured GiB", "planned GiB", "error"], body)


def verdicts() -> Iterator[str]:
    """Runs that ran, and runs that ran out of memory, by what the plan says of them."""
    ran: list[Row] = [row for row in rows("time") if row.complete]
    failed: list[Row] = []
    for row in rows("memory"):
        fits = row.measured("fits")
        if fits is not None and row.complete:
            (ran if fits else failed).append(row)
    body = []
    for name, those in (("runs that ran", ran), ("runs that ran out of memory", failed)):
        said = [plan_memory(r.work, r.candidate, r.cluster).fits for r in those]
        body.append([name, str(len(said)), str(sum(said)), str(len(said) - sum(said))])
    yield from table(["verdict", "runs", "plan: fits", "plan: does not"], body)


def network_errors() -> Iterator[str]:
    """All-reduces of 16 MiB and more, whose time is bandwidth's."""
    body = []
    for entry in read_yaml(FOLDER / "network.yaml")["rows"]:
        if not entry["complete"] or not entry["busbw"]:
            continue
        nic = HARDWARE.nic(entry["nic"]) if entry["nic"] else None
        cluster = Cluster(
            gpu=HARDWARE.gpu(entry["gpu"]), nodes=entry["nodes"], gpus=entry["gpus"], nic=nic
        )
        place = Place(ranks=cluster.world, per_node=cluster.gpus)
        ratios, inside = [], 0
        for size, gb_per_s in entry["busbw"].items():
            if size < 16 * 2**20:
                continue
            took = ring_share("all_reduce", cluster.world) * size / gb_per_s / 1e9
            plan = one_call("all_reduce", float(size), place, cluster)
            ratios.append(plan.value / took - 1)
            inside += plan.low <= took <= plan.high
        if ratios:
            where = f"{entry['id']}: {entry['nodes']} x {entry['gpus']} {entry['gpu']}"
            worst = signed(max(ratios, key=abs))
            body.append(
                [
                    where,
                    str(len(ratios)),
                    signed(median(ratios)),
                    worst,
                    f"{inside} of {len(ratios)}",
                ]
            )
    yield from table(["all-reduce from 16 MiB", "sizes", "median", "worst", "in the band"], body)


def report() -> str:
    """All tables."""
    parts = [time_errors(), memory_errors(), verdicts(), network_errors()]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def block(text: str) -> tuple[str, str, str]:
    """docs/planning.md before, within and after the place of the tables."""
    before, rest = text.split(BEGIN)
    within, after = rest.split(END)
    return before, within, after


def main() -> None:
    tables = report()
    print(tables, end="")
    if "--write" in sys.argv:
        before, _, after = block(DOCUMENT.read_text(encoding="utf-8"))
        text = f"{before}{BEGIN}\n{tables}{END}{after}"
        DOCUMENT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
