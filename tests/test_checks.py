"""Every fault of a node is named, with verdict, expectation and remedy; healthy nodes are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from node_facts import GIB, gpu, node, nodes, wanted

from recipes.cluster.hostfile import Host
from recipes.preflight.checks import node_rows
from recipes.preflight.network_checks import chosen, proposed_exports
from recipes.preflight.rows import Row, exit_code, majority, merged, size
from recipes.preflight.storage_checks import checkpoint_need

ALL = [f"worker-{i}" for i in range(3)]
Facts = dict[str, dict[str, Any]]


def bad(rows: list[Row]) -> list[Row]:
    """Rows that are not ok."""
    return [row for row in rows if row.verdict != "ok"]


def spoiled(path: str, value: Any, number: int = 1) -> Facts:
    """Healthy nodes but for one entry of one node; slashes lead into it, numbers into lists."""
    facts = nodes()
    *way, last = path.split("/")
    place: Any = facts[f"worker-{number}"]
    for key in way:
        place = place[int(key)] if isinstance(place, list) else place[key]
    if isinstance(place, list):
        place[int(last)] = value
    else:
        place[last] = value
    return facts


def test_healthy_nodes_have_nothing_to_mend() -> None:
    rows = node_rows(nodes(), wanted())
    assert bad(rows) == [] and exit_code(rows) == 0
    checks = {row.check for row in rows}
    assert checks >= {"ssh", "python", "packages", "our code", "GPUs", "names", "interface"}
    assert checks >= {"port 29500", "connections", "clock", "run folder", "shared folder", "data"}
    assert not any(row.remedy for row in rows)


def test_one_node_needs_no_others() -> None:
    facts = nodes(1)
    facts["worker-0"]["network"]["names"] = {"worker-0": {"addresses": ["127.0.0.1"]}}
    one = (Host(name="worker-0", slots=2),)
    rows = node_rows({k: {**v, "meet": None} for k, v in facts.items()}, wanted(hosts=one))
    assert bad(rows) == []


# path in worker-1's facts, value, then of the one row: check, verdict, words of found and remedy
NODE_FAULTS = [
    ("python/path", "/usr/bin/python3", "python", "FAIL", "/usr/bin/python3", "octet sync"),
    ("packages/torch", "2.12.0", "torch", "FAIL", "2.12.0", "octet sync --hostfile hostfile"),
    ("packages/nccl", "cu12 1", "nccl", "FAIL", "cu12 1", "octet sync"),
    ("files/gpt2_xl.yaml", "0ff", "gpt2_xl.yaml", "FAIL", "0ff", "octet sync"),
    ("sources", "0dd", "our code", "FAIL", "0dd", "octet sync"),
    ("commit", "feedbeef", "commit", "FAIL", "feedbeef", "octet sync"),
    ("machine", "boot-0", "machines", "FAIL", "the same machine as worker-0", "drop worker-1"),
    ("commands/accelerate", None, "accelerate", "FAIL", "not installed", "octet sync"),
    ("memory/available", 3 * GIB, "host memory", "warn", "3 GiB available", "ps aux"),
    ("memory/swap_used", 9 * GIB, "swap", "warn", "9 GiB in use", "ps aux"),
    ("memory/shm_free", 64 << 20, "/dev/shm", "warn", "64 MiB free", "size=1024m /dev/shm"),
    ("limits/open_files", 1024, "open files", "warn", "limit 1024", "nofile"),
    ("limits/locked_bytes", 65536, "locked memory", "warn", "limit 64 KiB", "memlock"),
    # GPUs
    ("gpus/devices", [gpu(0)], "GPUs", "FAIL", "1 GPU", "ssh worker-1 nvidia-smi -L"),
    (
        *("gpus", {"error": "NVML: Driver Not Loaded", "devices": []}, "GPUs", "FAIL"),
        *("no GPU (NVML: Driver Not Loaded)", "nvidia-smi"),
    ),
    (
        *("gpus", {"unread": "nvidia-ml-py is not installed", "devices": []}, "GPUs"),
        *("not checked", "nvidia-ml-py is not installed", "octet sync"),
    ),
    ("gpus/devices/1", {"index": 1, "error": "GPU is lost"}, "GPU 1", "FAIL", "lost", "-i 1"),
    ("gpus/devices/0/used_bytes", 9 * GIB, "GPU 0", "FAIL", "9 GiB of 80 GiB in use", "nvidia"),
    ("gpus/devices/0/processes", ["x (pid 3, eve)"], "GPU 0", "warn", "eve", "nvidia-smi -i 0"),
    ("gpus/devices/0/uncorrected_errors", 2, "GPU 0", "FAIL", "2 uncorrected ECC", "-d ECC"),
    ("gpus/devices/0/remap_pending", True, "GPU 0", "FAIL", "bad memory row", "--gpu-reset"),
    ("gpus/devices/0/remap_failed", True, "GPU 0", "FAIL", "no spare memory", "ROW_REMAPPER"),
    ("gpus/devices/0/slowdowns", ["power brake"], "GPU 0", "warn", "power brake at 34", "PERF"),
    ("gpus/devices/0/mig", True, "GPU 0", "FAIL", "MIG", "-mig 0"),
    ("gpus/devices/0/model", "H100", "GPU model", "warn", "H100", "nvidia-smi"),
    ("gpus/driver", "550.1", "GPU driver", "warn", "550.1", "nvidia-smi"),
    # network
    (
        *("network/names/worker-2", {"error": "Name or service not known", "addresses": []}),
        *("names", "FAIL", "worker-2: Name or service", "echo '10.0.0.12 worker-2' | sudo tee"),
    ),
    (
        *("network/names/worker-1", {"addresses": ["127.0.1.1"]}, "names", "FAIL"),
        *("worker-1 is 127.0.1.1", "echo '10.0.0.11 worker-1'"),
    ),
    (
        *("network/names/worker-2", {"addresses": ["10.9.0.12"]}, "names", "warn"),
        *("worker-2 is 10.9.0.12", "getent ahosts worker-2"),
    ),
    (
        *("network/routes/worker-2", {"error": "Network is unreachable"}, "route", "FAIL"),
        *("to worker-2: Network is unreachable", "ip route get 10.0.0.12"),
    ),
    (
        *("network/interfaces/docker0", {"up": True, "addresses": ["172.17.0.1"]}),
        *("interface", "warn", "docker0 could be taken too", "export NCCL_SOCKET_IFNAME=eth0"),
    ),
    (
        *("meet/reached/worker-2/40001", "no answer", "connections", "FAIL"),
        *(
            "to worker-2, port 40001: no answer: a firewall",
            "iptables -I INPUT -p tcp -s 10.0.0.11",
        ),
    ),
    ("meet/reached/worker-0/29500", "refused", "connections", "FAIL", "port 29500: refused", "-s"),
    (
        *("meet/clocks/worker-0", {"ahead_s": -60.0, "uncertainty_s": 0.1}, "clock", "FAIL"),
        *("60.0 s behind worker-0", "timedatectl"),
    ),
    # storage
    (
        *("folder", {"error": "Read-only file system: /s", "path": "/s"}, "run folder", "FAIL"),
        *("Read-only file system", "output_dir="),
    ),
    ("folder/free_bytes", GIB, "free space", "FAIL", "1 GiB", "df -h /shared/outputs/gpt2_xl"),
    ("meet/seen", ["worker-1"], "shared folder", "FAIL", "not the folder of worker-0", "df -h"),
    (
        *("locks", [{"path": "/x/lock", "age_s": 1800.0, "held": False}], "build lock", "FAIL"),
        *("/x/lock, 30 minutes old, held by nobody", "ssh worker-1 rm /x/lock"),
    ),
    ("data/0/count", 0, "data", "FAIL", "/shared/*.parquet: no file", "ls -l"),
    ("data/0/digest", "d2", "data", "FAIL", "other names or sizes", "ls -l"),
    ("data/0", {"what": "u", "unreached": "timed out"}, "data", "warn", "not reached", "curl"),
    ("data/0", {"what": "s3://u", "unread": "remote"}, "data", "not checked", "remote", ""),
]


@pytest.mark.parametrize("fault", NODE_FAULTS, ids=lambda fault: f"{fault[0]}-{fault[2]}")
def test_a_fault_of_one_node_is_named(fault: tuple[Any, ...]) -> None:
    path, value, check, verdict, found, remedy = fault
    (row,) = bad(node_rows(spoiled(path, value), wanted()))
    assert (row.check, row.node, row.verdict) == (check, "worker-1", verdict)
    assert found in row.found and remedy in row.remedy and "\n" not in row.remedy
    assert row.expected or verdict == "not checked"


def test_who_has_the_port_is_named_and_can_be_ended() -> None:
    value = {"port": 29500, "error": "in use", "holders": ["python (pid 77, ann)"]}
    (row,) = bad(node_rows(spoiled("port", value, 0), wanted()))
    assert (row.check, row.verdict) == (
        "port 29500",
        "FAIL",
    ) and "python (pid 77, ann)" in row.found
    assert row.remedy.startswith("ssh worker-0 kill 77 ") and "--port 29501" in row.remedy


@pytest.mark.parametrize(
    ("error", "found", "remedy"),
    [
        (
            "worker-1: nothing listens there; start sshd on it",
            "nothing listens there",
            "start sshd",
        ),
        ("worker-1: ssh asks for a password; run ssh-copy-id worker-1", "password", "ssh-copy-id"),
        ("worker-1: there is no checkout at /o there; run octet sync", "checkout", "octet sync --"),
        ("worker-1: no answer within 60 s", "no answer", "ssh worker-1 true"),
    ],
)
def test_a_host_that_is_away_stops_no_other_check(error: str, found: str, remedy: str) -> None:
    facts = nodes()
    facts["worker-1"] = {"error": error}
    facts["worker-2"]["packages"]["torch"] = "2.12.0"
    away, other = bad(node_rows(facts, wanted()))
    assert (away.check, away.node, away.verdict) == ("ssh", "worker-1", "FAIL")
    assert found in away.found and remedy in away.remedy
    assert (other.check, other.node) == ("torch", "worker-2")


def test_without_any_host_there_is_still_a_table() -> None:
    rows = node_rows({host: {"error": f"{host}: away"} for host in ALL}, wanted())
    assert [row.check for row in rows] == ["ssh"] * 3 and exit_code(rows) == 3


def test_without_the_first_host_port_and_clocks_are_not_guessed() -> None:
    facts = nodes()
    facts["worker-0"] = {"error": "worker-0: away"}
    for host in ALL[1:]:
        facts[host]["meet"]["clocks"].pop("worker-0")
    rows = [row for row in node_rows(facts, wanted()) if row.verdict == "not checked"]
    assert [row.check for row in rows] == ["port 29500", "clock", "clock"]


def test_a_clock_is_judged_beyond_its_uncertainty() -> None:
    def verdict(ahead: float, uncertainty: float) -> str:
        facts = nodes()
        facts["worker-1"]["meet"] = {"error": "no answer within 6 s"}
        facts["worker-1"]["clock"] = {"ahead_s": ahead, "uncertainty_s": uncertainty}
        return next(r.verdict for r in node_rows(facts, wanted()) if r.check == "clock")

    assert [verdict(7.0, 0.1), verdict(7.0, 4.0), verdict(-60.0, 4.0)] == ["FAIL", "ok", "FAIL"]


def test_a_port_that_could_not_be_taken_accuses_no_firewall() -> None:
    facts = spoiled("meet/reached/worker-2/40001", "another program answers there")
    facts["worker-2"]["meet"]["listening"]["40001"] = "Address already in use"
    assert bad(node_rows(facts, wanted())) == []


def test_a_lock_whose_builder_lives_on_any_node_is_let_alone() -> None:
    facts = spoiled("locks", [{"path": "/x/lock", "age_s": 1800.0, "held": False}])
    facts["worker-2"]["locks"] = [{"path": "/x/lock", "age_s": 1800.0, "held": True}]
    assert bad(node_rows(facts, wanted())) == []
    young = spoiled("locks", [{"path": "/x/lock", "age_s": 5.0, "held": False}])
    assert bad(node_rows(young, wanted())) == []


def test_the_odd_one_out_is_the_minority() -> None:
    assert majority({"a": "1", "b": "2", "c": "2"}) == "2"
    assert majority({"a": "1", "b": "2"}) == "1"  # the first of equals
    facts = spoiled("packages/torch", "2.12.0", 0)
    (row,) = bad(node_rows(facts, wanted()))
    assert row.node == "worker-0" and row.expected == "2.13.0, as on all others"


def test_a_cpu_arm_needs_no_gpu() -> None:
    facts = {
        host: node(i) | {"gpus": {"error": "none", "devices": []}} for i, host in enumerate(ALL)
    }
    (row,) = merged([r for r in node_rows(facts, wanted(cpu=True)) if r.check == "GPUs"], ALL)
    assert (row.node, row.found, row.verdict) == ("all", "no GPU", "ok")


def test_chosen_gpus_must_exist() -> None:
    hosts = tuple(Host(name=h, slots=1, gpus=(i,)) for h, i in zip(ALL, (0, 1, 7), strict=True))
    (row,) = bad(node_rows(nodes(), wanted(hosts=hosts)))
    assert row.node == "worker-2" and "none numbered 7" in row.found


def test_pdsh_is_needed_on_the_first_host_by_those_who_use_it() -> None:
    facts = nodes()
    for host in ALL:
        facts[host]["commands"]["pdsh"] = None
    assert bad(node_rows(facts, wanted())) == []
    (row,) = bad(node_rows(facts, wanted(launcher="deepspeed")))
    assert (row.check, row.node, row.verdict) == ("pdsh", "worker-0", "FAIL")
    assert row.remedy == "ssh worker-0 sudo apt-get install pdsh"


@pytest.mark.parametrize(("launcher", "verdict"), [("torchrun", "warn"), ("deepspeed", "FAIL")])
def test_a_foreign_environment_file_is_told(launcher: str, verdict: str) -> None:
    facts = spoiled("deepspeed_env", ["/root/.deepspeed_env sets A"], 0)
    (row,) = bad(node_rows(facts, wanted(launcher=launcher)))
    assert (row.check, row.verdict, row.code) == (".deepspeed_env", verdict, 2)


@pytest.mark.parametrize(
    ("variable", "value", "verdict", "found"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", "ok", "GLOO_SOCKET_IFNAME=eth0"),
        ("GLOO_SOCKET_IFNAME", "eth9", "FAIL", "no interface eth9; there are lo, eth0"),
        ("GLOO_SOCKET_IFNAME", "eth", "FAIL", "no interface eth"),
        ("GLOO_SOCKET_IFNAME", "lo", "FAIL", "no interface that is up and leads to another"),
        ("NCCL_SOCKET_IFNAME", "eth", "ok", "NCCL_SOCKET_IFNAME=eth"),
        ("NCCL_SOCKET_IFNAME", "=eth", "FAIL", "no interface eth"),
        ("NCCL_SOCKET_IFNAME", "^lo", "ok", "NCCL_SOCKET_IFNAME=^lo"),
        ("NCCL_SOCKET_IFNAME", "^eth", "FAIL", "no interface that is up"),
        ("NCCL_SOCKET_IFNAME", "ib0", "FAIL", "no interface ib0"),
    ],
)
def test_an_interface_variable_is_read_as_its_library_does(
    variable: str, value: str, verdict: str, found: str
) -> None:
    rows = node_rows(nodes(), wanted(environ={variable: value}))
    (row,) = merged([r for r in rows if variable in r.found], ALL)
    assert (row.node, row.verdict) == ("all", verdict) and found in row.found
    assert row.remedy == ("" if verdict == "ok" else f"export {variable}=eth0")


def test_a_network_of_its_own_is_only_a_warning() -> None:
    facts = nodes()
    for i, host in enumerate(ALL):
        entry = {"up": True, "addresses": [f"10.1.0.{i}"]}
        facts[host]["network"]["interfaces"]["ib0"] = entry
    rows = bad(node_rows(facts, wanted(environ={"NCCL_SOCKET_IFNAME": "ib0"})))
    assert [(row.verdict, row.check) for row in rows] == [("warn", "interface")] * 3


def test_interfaces_are_proposed_for_all_or_by_node() -> None:
    line = "export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0"
    assert proposed_exports(nodes()) == [line]
    facts = nodes()
    for way in facts["worker-2"]["network"]["routes"].values():
        way["interface"] = "ens3"
    assert proposed_exports(facts)[0] == f"{line}   # on worker-0"
    assert "ens3" in proposed_exports(facts)[2]
    assert chosen("NCCL_SOCKET_IFNAME", "eth1:1,ib", ["eth1", "ib0"]) == (["eth1", "ib0"], [])


def test_space_counts_the_checkpoints_that_are_kept_and_one_more() -> None:
    assert checkpoint_need(1_000, keep=3, present=0) == 48_000
    assert checkpoint_need(1_000, keep=3, present=2) == 24_000
    assert checkpoint_need(1_000, keep=3, present=9) == 12_000
    rows = bad(node_rows(nodes(), wanted(parameters=None)))
    assert {(row.check, row.verdict) for row in rows} == {("free space", "not checked")}


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
