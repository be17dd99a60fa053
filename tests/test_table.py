"""The table: many nodes on one screen, what agrees in one line, sizes and exit codes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from node_facts import GIB, bad, nodes, spoiled, wanted

from recipes.cluster.hostfile import Host
from recipes.preflight.checks import node_rows
from recipes.preflight.rows import Row, exit_code, majority, odd_ones, size
from recipes.preflight.table import MOST_LINES, capped, merged, remedies


def test_many_nodes_that_agree_fill_one_screen() -> None:
    facts = nodes(64)
    for number, found in enumerate(facts.values()):
        found["memory"]["available"] -= number * GIB
        found["folder"]["bytes_per_s"] *= 1 + number / 64
    hosts = tuple(Host(name=name, slots=2) for name in facts)
    rows = node_rows(facts, wanted(hosts=hosts))
    lines = merged(rows, list(facts))
    assert bad(rows) == [] and len(lines) == len({row.check for row in rows}) < 25
    (memory,) = [line for line in lines if line.check == "host memory"]
    assert memory.found.endswith(" available and 61 more") and memory.node == "all"


def test_a_fault_of_every_node_leaves_room_for_the_others() -> None:
    rows = [
        Row(check="x", node=f"w{i}", found=f"{i}", verdict="FAIL", remedy=f"r{i}")
        for i in range(99)
    ]
    rows.append(Row(check="y", node="w1", found="1", verdict="FAIL"))
    lines = capped(rows)
    assert len(lines) == MOST_LINES + 2 and lines[-1].check == "y"
    assert lines[MOST_LINES].found == "87 more like these, in the JSON"
    assert remedies(lines).count("# FAIL: x") == MOST_LINES


def test_the_odd_one_out_is_the_minority() -> None:
    assert majority({"a": "1", "b": "2", "c": "2"}) == "2"
    assert majority({"a": "1", "b": "2"}) == "1"  # the first of equals
    assert odd_ones({"a": "1", "b": "2"}) == ({"b": "2"}, "1, as on a")
    facts = spoiled("packages/torch", "2.12.0", 0)
    (row,) = bad(node_rows(facts, wanted()))
    assert row.node == "worker-0" and row.expected == "2.13.0, as on all others"


def test_the_exit_code_tells_topology_from_input() -> None:
    def row(verdict: Any, code: int) -> Row:
        return Row(check="x", node="a", found="", verdict=verdict, code=code)

    assert exit_code([row("warn", 3), row("not checked", 3)]) == 0
    assert exit_code([row("FAIL", 2)]) == 2
    assert exit_code([row("FAIL", 2), row("FAIL", 3)]) == 3


def test_rows_that_differ_in_the_node_alone_are_one() -> None:
    make: Callable[[str, str], Row] = lambda node, text: Row(check="x", node=node, found=text)  # noqa: E731
    many = [f"w{i}" for i in range(9)]
    rows = merged([make(n, "a") for n in many[:6]] + [make(n, "b") for n in many[6:8]], many)
    assert [row.node for row in rows] == ["w0, w1, w2 and 3 more", "w6, w7"]
    assert merged([make(n, "a") for n in many], many)[0].node == "all"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (1020 << 20, "1020 MiB"),
        (80 * GIB, "80 GiB"),
        (2**45, "32 TiB"),
    ],
)
def test_sizes_as_people_read_them(count: int, text: str) -> None:
    assert size(count) == text
