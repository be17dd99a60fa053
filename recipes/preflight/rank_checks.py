"""Rows from what `recipes/measure.py` measured on every rank; its docstring has the schema."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipes.preflight.linkrates import human_bits, judge
from recipes.preflight.network_checks import towards_others
from recipes.preflight.rows import Row, Verdict
from recipes.preflight.wanted import Facts

VERDICTS: dict[str, Verdict] = {"fail": "FAIL", "warn": "warn"}
TITLES = {
    "matmul": "matmul rate",
    "network": "network",
    "selftest": "gradients",
    "data": "data rate",
}
COMMANDS = ("ssh ", "export ", "octet ", "sudo ", "#")  # other remedies are advice
JUDGED_BYTES = 128 * 2**20  # smaller collectives are held up by latency on fast networks


@dataclass(frozen=True, kw_only=True)
class Cards:
    """What the network cards of the poorest node are sold for, in bits per second."""

    one: float | None = None  # the fastest, over which two ranks talk
    all: float | None = None  # together


def cards(there: Facts, backend: str) -> Cards:
    """Cards that the job may use: NCCL takes InfiniBand where there is some, gloo never."""
    ones, sums = [], []
    for node, found in there.items():
        network = found["network"]
        rates = network["infiniband"] if backend == "nccl" else []
        ways = towards_others(node, found)
        rates = rates or [network["interfaces"][name].get("bits_per_s") for name in ways]
        if not rates or None in rates:
            return Cards()
        ones.append(max(rates))
        sums.append(sum(rates))
    return Cards(one=min(ones), all=min(sums)) if ones else Cards()


def measured_rows(result: Mapping[str, Any], there: Facts) -> list[Row]:
    """Every stage that was measured, and every fault that it found.

    Args:
        there: facts of the nodes, for the network cards.
    """
    rows = []
    findings: Sequence[Mapping[str, Any]] = result["findings"]
    for stage, title in TITLES.items():
        faults = [finding for finding in findings if finding["stage"] == stage]
        rows += [_finding_row(title, fault) for fault in faults]
        measured = result.get(stage)
        if measured is None:
            if not faults:
                row = Row(check=title, node="all", found="left out", verdict="not checked")
                rows.append(row)
        elif stage == "network":
            rows += _network(measured, cards(there, result["backend"]))
        else:
            rows += _STAGES[stage](measured, {fault["host"] for fault in faults})
    rows += [_finding_row(f["stage"], f) for f in findings if f["stage"] not in TITLES]
    return rows


def _finding_row(title: str, finding: Mapping[str, Any]) -> Row:
    remedy = finding["remedy"]
    return Row(
        check=title,
        node=_where(finding["host"], finding["ranks"]),
        found=finding["text"],
        verdict=VERDICTS[finding["verdict"]],
        remedy=remedy if not remedy or remedy.startswith(COMMANDS) else f"# {remedy}",
    )


def _where(host: str | None, ranks: Sequence[int] | None) -> str:
    named = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" if ranks else ""
    return f"{named} ({host})" if named and host else named or host or "all"


def _matmul(measured: Mapping[str, Any], told: Collection[str | None]) -> list[Row]:
    rates = [rank["flops"] for rank in measured["ranks"]]
    text = f"{human_flops(min(rates))} to {human_flops(max(rates))} in {measured['dtype']}"
    return [Row(check=TITLES["matmul"], node="all", found=text)]


def _network(measured: Mapping[str, Any], nics: Cards) -> list[Row]:
    rows = []
    if inside := measured.get("within"):
        found = f"{human_bits(inside['bits_per_s'])}, {_latency(inside)}"
        rows.append(Row(check="within a node", node="all", found=found))
    if links := measured.get("between"):
        rows.append(_judged("between nodes", links["bits_per_s"], nics.one, _latency(links)))
    worst = measured.get("worst_link")
    pairs = [link for link in measured["links"] if link["kind"] == "between"]
    if worst and len(pairs) > 1:
        share = f"{worst['share_of_median']:.0%} of the median"
        where = f"{worst['from']} to {worst['to']}"
        found = f"{human_bits(worst['bits_per_s'])}, {share}"
        rows.append(Row(check="slowest link", node=where, found=found))
    whole = [c for c in measured["collectives"] if c["group"] == "all" and c["op"] == "all_reduce"]
    if whole:
        largest = max(whole, key=lambda c: c["bytes"])
        expected = nics.all if links and largest["bytes"] >= JUDGED_BYTES else None
        more = f"bus bandwidth at {largest['bytes']:,} B"
        rows.append(_judged("all-reduce", 8 * largest["busbw_bytes_per_s"], expected, more))
    return rows


def _latency(links: Mapping[str, Any]) -> str:
    return f"{links['latency_s'] * 1e6:,.0f} µs one way"


def _judged(check: str, rate: float, expected: float | None, more: str) -> Row:
    verdict = judge(rate, expected)
    slow = verdict.state == "slow"
    return Row(
        check=check,
        node="all",
        found=f"{human_bits(rate)}, {more}",
        expected=f"{human_bits(expected)}: the network card" if expected else "",
        verdict="warn" if slow else "ok",
        remedy="# other traffic? wrong interface (NCCL_SOCKET_IFNAME, NCCL_IB_HCA)? MTU?"
        if slow
        else "",
    )


def _selftest(measured: Mapping[str, Any], told: Collection[str | None]) -> list[Row]:
    rows = []
    title = TITLES["selftest"]
    passed = dict.fromkeys(arm["arm"] for arm in measured["arms"] if arm["passed"])
    if passed:
        found = f"{', '.join(passed)} equal a single process"
        rows.append(Row(check=title, node="all", found=found))
    if not told:  # a finding tells more
        for arm in measured["arms"]:
            if not arm["passed"]:
                found = f"{arm['arm']}: {arm['differs']}"
                expected = "a single process's gradients"
                rows.append(
                    Row(check=title, node="all", found=found, expected=expected, verdict="FAIL")
                )
    for arm in measured["left_out"]:
        found = f"{arm['arm']}: {arm['reason']}"
        rows.append(Row(check=title, node="all", found=found, verdict="not checked"))
    return rows


def _data(measured: Mapping[str, Any], told: Collection[str | None]) -> list[Row]:
    rows = []
    for host, entry in measured["hosts"].items():
        if host in told:
            continue
        demand = entry["demand_tokens_per_s"]
        found = entry["error"] or f"{entry['tokens_per_s']:,.0f} tokens/s"
        rows.append(
            Row(
                check=TITLES["data"],
                node=host,
                found=found,
                expected=f"at most {demand:,.0f} tokens/s" if demand else "",
                verdict="FAIL" if entry["error"] else "ok",
            )
        )
    return rows


_STAGES = {"matmul": _matmul, "selftest": _selftest, "data": _data}


def human_flops(per_s: float) -> str:
    """Floating-point operations per second for people."""
    return f"{per_s / 1e12:.3g} TFLOP/s" if per_s >= 1e12 else f"{per_s / 1e9:.3g} GFLOP/s"
