"""What the ranks measured becomes rows; each finding keeps its verdict, place and remedy."""

from __future__ import annotations

from typing import Any

import pytest
from node_facts import nodes

from recipes.preflight.rank_checks import Cards, cards, human_flops, measured_rows
from recipes.preflight.rows import Row, exit_code


def links(bits: float) -> dict[str, Any]:
    """A summary of links."""
    return {"links": 2, "latency_s": 81e-6, "bytes_per_s": bits / 8, "bits_per_s": bits}


def result(bits: float = 0.95e9, **changes: Any) -> dict[str, Any]:
    """What rank 0 of a healthy job brings back."""
    collective = {"group": "all", "op": "all_reduce", "bytes": 2**28, "busbw_bytes_per_s": 1.1e8}
    network: dict[str, Any] = {"within": links(11e9), "between": links(bits)}
    network |= {"collectives": [collective | {"bytes": 8}, collective]}
    network["worst_link"] = {"from": "a", "to": "b", "bits_per_s": bits, "share_of_median": 0.98}
    arm = {"arm": "ZeRO-1 bf16", "passed": True, "differs": ""}
    entry = {"reachable": True, "tokens_per_s": 9e5, "demand_tokens_per_s": 6e5, "error": ""}
    whole: dict[str, Any] = {"backend": "gloo", "findings": [], "network": network}
    whole["matmul"] = {"dtype": "bfloat16", "ranks": [{"flops": 8e10}, {"flops": 2e12}]}
    whole["selftest"] = {"arms": [arm, arm], "left_out": [{"arm": "DDP fp16", "reason": "CPU"}]}
    whole["data"] = {"hosts": {"worker-0": entry, "worker-1": entry}}
    return whole | changes


def finding(stage: str, verdict: str, **changes: Any) -> dict[str, Any]:
    """A finding."""
    found = {"stage": stage, "verdict": verdict, "host": "worker-1", "ranks": [2], "text": "slow"}
    return found | {"remedy": "look at its power"} | changes


def by_check(rows: list[Row], check: str) -> list[Row]:
    """The rows of a check."""
    return [row for row in rows if row.check == check]


def test_a_healthy_job_is_told_in_a_few_rows() -> None:
    rows = measured_rows(result(), nodes(), {})
    assert exit_code(rows) == 0
    assert {row.check for row in rows if row.verdict == "not checked"} == {"gradients"}
    (between,) = by_check(rows, "between nodes")
    assert between.found == "950 Mbit/s, 81 µs one way"
    assert "the network card" in between.expected and between.verdict == "ok"
    (reduce,) = by_check(rows, "all-reduce")
    assert reduce.found.endswith("bus bandwidth at 268,435,456 B")
    (rate,) = by_check(rows, "matmul rate")
    assert rate.found == "80 GFLOP/s to 2 TFLOP/s in bfloat16"
    assert by_check(rows, "gradients")[0].found == "ZeRO-1 bf16 equal a single process"
    assert [row.node for row in by_check(rows, "data rate")] == ["worker-0", "worker-1"]
    (slowest,) = by_check(rows, "slowest link")
    assert slowest.node == "a to b" and "98% of the median" in slowest.found


def test_a_link_far_below_its_card_is_a_warning() -> None:
    (row,) = by_check(measured_rows(result(bits=0.3e9), nodes(), {}), "between nodes")
    assert row.verdict == "warn" and row.remedy.startswith("# ")


@pytest.mark.parametrize("stage", ["matmul", "network", "selftest", "data"])
def test_a_finding_keeps_verdict_and_place(stage: str) -> None:
    title = {"matmul": "matmul rate", "selftest": "gradients", "data": "data rate"}.get(
        stage, stage
    )
    for verdict, shown, code in (("fail", "FAIL", 3), ("warn", "warn", 0)):
        rows = measured_rows(result(findings=[finding(stage, verdict)]), nodes(), {})
        row = by_check(rows, title)[0]
        assert (row.verdict, row.node, row.found) == (shown, "rank 2 (worker-1)", "slow")
        assert row.remedy == "# look at its power" and exit_code(rows) == code
    if stage == "data":  # told once
        assert [r.node for r in by_check(rows, title)] == ["rank 2 (worker-1)", "worker-0"]


def test_what_was_left_out_is_said() -> None:
    rows = measured_rows(result(data=None, selftest=None), nodes(), {})
    assert [r.check for r in rows if r.verdict == "not checked"] == ["gradients", "data rate"]


def test_a_single_rank_has_no_network() -> None:
    alone = {"within": None, "between": None, "worst_link": None, "links": [], "collectives": []}
    rows = measured_rows(result(network=alone), nodes(), {})
    (row,) = by_check(rows, "network")
    assert (row.verdict, row.found) == ("not checked", "a single rank has none")


def test_nccl_may_use_infiniband_and_gloo_may_not() -> None:
    assert cards(nodes(), "gloo", {}) == Cards(one=1e9, all=1e9)
    facts = nodes()
    for found in facts.values():
        found["network"]["infiniband"] = {"mlx5_0": 200e9, "mlx5_1": 200e9, "mlx5_bond_0": 100e9}
    del facts["worker-2"]["network"]["infiniband"]["mlx5_1"]
    assert cards(facts, "nccl", {}) == Cards(one=200e9, all=300e9)
    assert cards(facts, "nccl", {"NCCL_IB_HCA": "=mlx5_0:1"}) == Cards(one=200e9, all=200e9)
    assert cards(facts, "nccl", {"NCCL_IB_HCA": "^mlx5_bond"}) == Cards(one=200e9, all=200e9)
    assert cards(facts, "nccl", {"NCCL_IB_DISABLE": "1"}) == Cards(one=1e9, all=1e9)
    facts["worker-2"]["network"]["interfaces"]["eth0"]["bits_per_s"] = None  # a virtual card
    assert cards(facts, "gloo", {}) == Cards()
    for found in facts.values():
        found["network"]["interfaces"]["ib0"] = {"up": True, "addresses": [], "bits_per_s": 2e11}
    assert cards(facts, "gloo", {"GLOO_SOCKET_IFNAME": "ib0"}) == Cards(one=2e11, all=2e11)
    assert human_flops(3.12e14) == "312 TFLOP/s"
