"""The network benchmark: its arithmetic by hand, and real ranks on a link of a known rate."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rehearsing

from recipes.preflight import linkrates, netlinks

MIB = 2**20


def rootful(test: Callable[..., None]) -> Callable[..., None]:
    """Where namespaces are possible."""
    for mark in rehearsing.rootful():
        test = mark(test)
    return test


def test_bandwidths_are_those_of_nccl_tests() -> None:
    # A ring all-reduce of 8 ranks moves 2 * 7/8 of the buffer over each link.
    assert linkrates.bus_factor("all_reduce", 8) == 1.75
    assert linkrates.bus_factor("all_gather", 8) == 0.875
    assert linkrates.bus_factor("reduce_scatter", 4) == 0.75
    assert linkrates.bus_factor("all_reduce", 2) == 1.0
    assert linkrates.bus_factor("send", 2) == 1.0


def test_a_line_through_exact_times_is_found_exactly() -> None:
    # 50 us and 1 GB/s: 8 B take 50.008 us, 1 MB 1.05 ms, 100 MB 100.05 ms
    line = linkrates.fit_line([(8, 50.008e-6), (1e6, 1.05e-3), (1e8, 0.10005)])
    assert line is not None
    assert line.latency_s == pytest.approx(50e-6) and line.bytes_per_s == pytest.approx(1e9)
    assert line.worst_misfit < 1e-9


def test_one_slow_message_does_not_bend_the_line() -> None:
    points = [(n, 50e-6 + n / 1e9) for n in (8, 1e4, 1e5, 1e6, 1e7, 1e8)]
    points[3] = (1e6, 9 * points[3][1])
    line = linkrates.fit_line(points)
    assert line is not None
    assert line.latency_s == pytest.approx(50e-6, rel=0.15)
    assert line.bytes_per_s == pytest.approx(1e9, rel=0.15)
    assert line.worst_misfit > 0.8, "the slow one is told"


def test_a_fit_needs_two_sizes_and_has_no_negative_latency() -> None:
    assert linkrates.fit_line([(8, 1e-4), (8, 2e-4)]) is None
    assert linkrates.fit_line([(8, 1e-3), (8e6, 1e-3), (1e6, 1e-3)]) is None  # size tells nothing
    line = linkrates.fit_line([(1e6, 1e-3), (2e6, 3e-3)])  # a line through them meets 0 below 0
    assert line is not None and line.latency_s == 0.0


def test_the_worst_link_is_named_and_the_median_is_the_planners() -> None:
    def link(kind: str, start: str, end: str, bits: float) -> dict[str, Any]:
        ends = {"kind": kind, "from": start, "to": end, "latency_s": 1e-5}
        return ends | {"bits_per_s": bits, "bytes_per_s": bits / 8}

    links = [link("between", "a", "b", 8e9), link("between", "b", "a", 2e9)]
    links += [link("between", "a", "c", 8e9), link("within", "a", "a", 1e9)]
    worst = linkrates.worst_link(links)
    assert worst == {"from": "b", "to": "a", "bits_per_s": 2e9, "share_of_median": 0.25}
    summary = linkrates.summary(links[:3])
    assert summary is not None and summary["links"] == 3
    assert (summary["bits_per_s"], summary["bytes_per_s"]) == (8e9, 1e9)
    assert linkrates.worst_link(links[3:]) is None and linkrates.summary([]) is None


def test_what_was_hidden_is_what_both_together_did_not_take() -> None:
    assert linkrates.hidden_share(2.0, 4.0, 4.0) == 1.0
    assert linkrates.hidden_share(2.0, 4.0, 5.0) == 0.5
    assert linkrates.hidden_share(2.0, 4.0, 6.5) == 0.0


def test_rates_as_people_read_them() -> None:
    told = [linkrates.human_bits(rate) for rate in (9.4e9, 0.94e9, 5e5)]
    assert told == ["9.40 Gbit/s", "940 Mbit/s", "500 kbit/s"]


def test_sizes_are_read() -> None:
    sizes = [linkrates.parse_size(text) for text in ("8", "8B", "64KiB", "25 MiB", "2GiB")]
    assert sizes == [8, 8, 65536, 25 * MIB, 2**31]
    for text in ("", "MiB", "1.5MiB", "25MB", "-1", "0"):
        with pytest.raises(ValueError, match="expected a whole number with B, KiB, MiB or GiB"):
            linkrates.parse_size(text)


@pytest.mark.parametrize("nodes", range(1, 10))
def test_every_pair_of_nodes_meets_once_and_no_node_twice_at_a_time(nodes: int) -> None:
    rounds = linkrates.rounds(nodes)
    pairs = [pair for pairs in rounds for pair in pairs]
    assert sorted(pairs) == [(a, b) for a in range(nodes) for b in range(a + 1, nodes)]
    for together in rounds:
        busy = [node for pair in together for node in pair]
        assert len(busy) == len(set(busy))


def test_a_stream_has_few_large_messages_for_about_the_time_asked() -> None:
    assert netlinks.stream_shape(125e6, 0.5) == (14 * MIB, 4)  # 1 Gbit/s: 59 MB
    assert netlinks.stream_shape(1e5, 0.5) == (MIB, 2)  # a slow link is not asked for more
    message, count = netlinks.stream_shape(50e9, 0.5)
    assert message == netlinks.LARGEST_MESSAGE and count == netlinks.MOST_MESSAGES


@rootful
@pytest.mark.parametrize(("bandwidth", "slots", "bits"), [("200mbit", 1, 2e8), ("1gbit", 2, 1e9)])
def test_a_limited_link_is_found_within_15_per_cent(
    tmp_path: Path, bandwidth: str, slots: int, bits: float
) -> None:
    hosts = {"worker-0": slots, "worker-1": slots}
    found = tmp_path / "measured.json"
    with rehearsing.rehearsal(hosts, tmp_path, bandwidth=bandwidth) as cluster:
        arguments = ["recipes/measure.py", "--only", "network", "--json", str(found)]
        arguments += ["--deepspeed_config", "ds_configs/zero1_bf16.json"]
        arguments += ["--sizes", "8B,1MiB,400MiB"]
        head = ["torchrun", "--nnodes", "2", "--nproc_per_node", str(slots)]
        head += ["--master_addr", "worker-0", "--master_port", "29500"]
        env = {"DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "eth0"}
        starts = [
            cluster.start([*head, "--node_rank", str(number), *arguments], host=host, env=env)
            for number, host in enumerate(hosts)
        ]
        for start in starts:
            with start:
                ended = start.wait()
            assert ended.code == 0, ended.text[-3000:]
    network = json.loads(found.read_text())["network"]
    between = [link for link in network["links"] if link["kind"] == "between"]
    assert [(x["from"], x["to"]) for x in between] == [
        ("worker-0", "worker-1"),
        ("worker-1", "worker-0"),
    ]
    for link in between:
        assert link["bits_per_s"] == pytest.approx(bits, rel=0.15)
        assert link["bits_per_s"] == 8 * link["bytes_per_s"] == 8 * max(link["runs"])
        assert link["fit"]["bytes_per_s"] == pytest.approx(bits / 8, rel=0.25)
        assert link["correct"] and 0 < link["latency_s"] < 0.05
    assert network["between"]["bits_per_s"] == pytest.approx(bits, rel=0.15)
    assert (network["within"] is None) == (slots == 1)
    if slots == 2:
        assert network["within"]["bits_per_s"] > 2 * bits, "a node's own link is not limited"
    # A collective over the link can't be faster than it, and 400 MiB is not tried.
    whole = [c for c in network["collectives"] if c["group"] == "all" and c["bytes"] == MIB]
    assert {c["op"] for c in whole} == {"all_reduce", "all_gather", "reduce_scatter"}
    assert all(c["correct"] and 8 * c["busbw_bytes_per_s"] < 1.25 * bits for c in whole)
    skipped = [s for s in network["skipped"] if s["group"] == "all"]
    assert {(s["op"], s["bytes"]) for s in skipped} == {(c["op"], 400 * MIB) for c in whole}
    assert all("two calls would take" in s["reason"] for s in skipped)
