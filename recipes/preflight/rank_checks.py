"""Rows from what `recipes/measure.py` measured on every rank; its docstring has the schema."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipes.preflight.linkrates import human_bits
from recipes.preflight.network_checks import chosen, towards_others
from recipes.preflight.rows import Facts, Row, Verdict, ok, unchecked, warn

VERDICTS: dict[str, Verdict] = {"fail": "FAIL", "warn": "warn"}
TITLES = {
    "matmul": "matmul rate",
    "network": "network",
    "selftest": "gradients",
    "data": "data rate",
}
SLOW_SHARE = 0.7  # of the expected rate: headers, CPU and small messages take up to a fifth
JUDGED_BYTES = 128 * 2**20  # smaller collectives are held up by latency on fast networks


@dataclass(frozen=True, kw_only=True)
class Cards:
    """What the network cards of the poorest node are sold for, in bits per second."""

    one: float | None = None  # the fastest, over which two ranks talk
    all: float | None = None  # together


def cards(there: Facts, backend: str, environ: Mapping[str, str]) -> Cards:
    """What the job may use of every node's, as far as all of them tell their rate."""
    rates = [_rates(node, found, backend, environ) for node, found in there.items()]
    if not rates or not all(rates) or any(None in of_node for of_node in rates):
        return Cards()
    sold = [[rate for rate in of_node if rate is not None] for of_node in rates]
    return Cards(one=min(map(max, sold)), all=min(map(sum, sold)))


def _rates(
    node: str, found: Mapping[str, Any], backend: str, environ: Mapping[str, str]
) -> list[float | None]:
    """Of the cards that a node's ranks use: NCCL takes InfiniBand where there is some."""
    network = found["network"]
    if backend == "nccl" and environ.get("NCCL_IB_DISABLE", "0") == "0":
        names, _ = chosen(
            "NCCL_IB_HCA", environ.get("NCCL_IB_HCA", "^"), list(network["infiniband"])
        )
        if names:
            return [network["infiniband"][name] for name in names]
    variable = f"{backend.upper()}_SOCKET_IFNAME"
    names = list(towards_others(node, found))
    if value := environ.get(variable):
        names, _ = chosen(variable, value, list(network["interfaces"]))
    return [network["interfaces"][name].get("bits_per_s") for name in names]


def measured_rows(result: Mapping[str, Any], there: Facts, environ: Mapping[str, str]) -> list[Row]:
    """Every stage that was measured, and every fault that it found.

    Args:
        there: facts of the nodes, for the network cards. environ: of the ranks, for those chosen.
    """
    rows = []
    for stage, title in TITLES.items():
        faults = [finding for finding in result["findings"] if finding["stage"] == stage]
        rows += [_finding_row(title, fault) for fault in faults]
        measured = result.get(stage)
        if measured is None:
            rows += [] if faults else [unchecked(title, "all", "left out")]
        elif stage == "matmul":
            rows.append(_matmul(measured))
        elif stage == "network":
            rows += _network(measured, cards(there, result["backend"], environ))
        elif stage == "selftest":
            rows += _selftest(measured)
        else:
            rows += _data(measured, {fault["host"] for fault in faults})
    return rows


def _finding_row(title: str, finding: Mapping[str, Any]) -> Row:
    return Row(
        check=title,
        node=_where(finding["host"], finding["ranks"]),
        found=finding["text"],
        verdict=VERDICTS[finding["verdict"]],
        remedy=f"# {finding['remedy']}",
    )


def _where(host: str | None, ranks: Sequence[int]) -> str:
    named = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" if ranks else ""
    return f"{named} ({host})" if named and host else named or host or "all"


def _matmul(measured: Mapping[str, Any]) -> Row:
    rates = [rank["flops"] for rank in measured["ranks"]]
    text = f"{human_flops(min(rates))} to {human_flops(max(rates))} in {measured['dtype']}"
    return ok(TITLES["matmul"], "all", text)


def _network(measured: Mapping[str, Any], sold: Cards) -> list[Row]:
    rows = []
    if inside := measured["within"]:
        found = f"{human_bits(inside['bits_per_s'])}, {_latency(inside)}"
        rows.append(ok("within a node", "all", found))
    if between := measured["between"]:
        rows.append(_judged("between nodes", between["bits_per_s"], sold.one, _latency(between)))
    worst = measured["worst_link"]
    if worst and between["links"] > 1:
        share = f"{worst['share_of_median']:.0%} of the median"
        found = f"{human_bits(worst['bits_per_s'])}, {share}"
        rows.append(ok("slowest link", f"{worst['from']} to {worst['to']}", found))
    whole = [c for c in measured["collectives"] if c["group"] == "all" and c["op"] == "all_reduce"]
    if whole:
        largest = max(whole, key=lambda c: c["bytes"])
        expected = sold.all if between and largest["bytes"] >= JUDGED_BYTES else None
        more = f"bus bandwidth at {largest['bytes']:,} B"
        rows.append(_judged("all-reduce", 8 * largest["busbw_bytes_per_s"], expected, more))
    return rows or [unchecked(TITLES["network"], "all", "a single rank has none")]


def _latency(links: Mapping[str, Any]) -> str:
    return f"{links['latency_s'] * 1e6:,.0f} µs one way"


def _judged(check: str, rate: float, expected: float | None, more: str) -> Row:
    """A rate against what the network cards are sold for; None where nobody knows that."""
    found = f"{human_bits(rate)}, {more}"
    if expected is None:
        return ok(check, "all", found)
    text = f"{human_bits(expected)}: the network card"
    if rate >= SLOW_SHARE * expected:
        return ok(check, "all", found, text)
    remedy = "# other traffic? wrong interface (NCCL_SOCKET_IFNAME, NCCL_IB_HCA)? MTU?"
    return warn(check, "all", found, text, remedy)


def _selftest(measured: Mapping[str, Any]) -> list[Row]:
    """Arms that passed, and those that can't run here; the findings tell of the others."""
    title = TITLES["selftest"]
    passed = dict.fromkeys(arm["arm"] for arm in measured["arms"] if arm["passed"])
    rows = [ok(title, "all", f"{', '.join(passed)} equal a single process")] if passed else []
    left_out = [f"{arm['arm']}: {arm['reason']}" for arm in measured["left_out"]]
    return rows + [unchecked(title, "all", text) for text in left_out]


def _data(measured: Mapping[str, Any], told: Collection[str]) -> list[Row]:
    """What each host reads; not of those that the findings have told of."""
    rows = []
    for host, entry in measured["hosts"].items():
        if host not in told:
            demand = entry["demand_tokens_per_s"]
            expected = f"at most {demand:,.0f} tokens/s" if demand else ""
            found = f"{entry['tokens_per_s']:,.0f} tokens/s"
            rows.append(ok(TITLES["data"], host, found, expected))
    return rows


def human_flops(per_s: float) -> str:
    """Floating-point operations per second for people."""
    return f"{per_s / 1e12:.3g} TFLOP/s" if per_s >= 1e12 else f"{per_s / 1e9:.3g} GFLOP/s"
