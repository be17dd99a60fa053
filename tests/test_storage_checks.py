"""The preflight's rows about the run folder: shared or on each node, and room for checkpoints."""

from __future__ import annotations

import pytest
from node_facts import bad, nodes, spoiled, wanted

from recipes.preflight.checks import node_rows
from recipes.preflight.rows import Row, exit_code


def rows_of(check: str, rows: list[Row]) -> dict[str, Row]:
    return {row.node: row for row in rows if row.check == check}


def test_space_counts_the_checkpoints_that_are_kept_and_one_more() -> None:
    facts = nodes()
    room = 12 * 1_557_611_200 * 4
    for free, code in ((room, 0), (room - 1, 2)):
        for found in facts.values():
            found["folder"]["free_bytes"] = free
        assert exit_code(node_rows(facts, wanted())) == code
    rows = rows_of("free space", node_rows(facts, wanted(milestones=5)))
    assert rows["worker-0"].expected == "157 GiB for 3 checkpoints, 5 milestones and the next"
    rows = rows_of("free space", node_rows(facts, wanted(milestones=None)))
    assert "those that are kept for ever not counted" in rows["worker-0"].expected
    unknown = bad(node_rows(nodes(), wanted(parameters=None)))
    assert {(row.check, row.verdict) for row in unknown} == {("free space", "not checked")}


def test_a_run_folder_on_each_node_is_allowed_and_told_and_needs_its_part_only() -> None:
    facts = nodes()
    for name, found in facts.items():
        found["meet"]["seen"] = [name]
        found["folder"] |= {"filesystem": "ext4 on /local", "free_bytes": 12 * 1_557_611_200 * 4}
    facts["worker-0"]["folder"]["free_bytes"] //= 3  # two of six ranks write here
    facts["worker-2"]["folder"]["free_bytes"] //= 4
    rows = node_rows(facts, wanted())
    shared = rows_of("shared folder", rows)
    assert [row.verdict for row in shared.values()] == ["warn", "warn"]
    assert shared["worker-1"].found == "not the folder of worker-0 (ext4 on /local)"
    assert "each node keeps its part" in shared["worker-1"].expected
    assert "df -h" in shared["worker-1"].remedy
    space = rows_of("free space", rows)
    assert [space[name].verdict for name in facts] == ["ok", "ok", "FAIL"]
    assert space["worker-2"].expected.startswith("23.2 GiB for this node's part of 3 checkpoints")
    assert exit_code(rows) == 2


def test_two_nodes_of_three_may_share() -> None:
    facts = nodes()
    for name, found in facts.items():
        found["meet"]["seen"] = [name] if name == "worker-2" else ["worker-0", "worker-1"]
    rows = node_rows(facts, wanted())
    assert [r.verdict for r in rows_of("shared folder", rows).values()] == ["ok", "warn"]
    needs = [row.expected.partition(" for")[0] for row in rows_of("free space", rows).values()]
    assert needs == ["46.4 GiB", "46.4 GiB", "23.2 GiB"]


@pytest.mark.parametrize(
    ("who", "sees", "told"),
    [
        ("worker-1", ["worker-1"], "; worker-0 sees its files"),
        ("worker-0", ["worker-0", "worker-2"], "; worker-0 does not see its files"),
    ],
)
def test_a_folder_that_is_seen_from_one_side_only_is_a_fault(
    who: str, sees: list[str], told: str
) -> None:
    rows = rows_of("shared folder", node_rows(spoiled("meet/seen", sees, int(who[-1])), wanted()))
    assert rows["worker-1"].verdict == "FAIL" and told in rows["worker-1"].found
