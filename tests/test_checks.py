"""Every fault of a node is named, with verdict, expectation and remedy; healthy nodes are not."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from node_facts import GIB, bad, gpu, node, nodes, spoiled, wanted

from recipes.cluster.hostfile import Host
from recipes.preflight.checks import node_rows
from recipes.preflight.network_checks import chosen, proposed_exports
from recipes.preflight.rows import exit_code
from recipes.preflight.table import merged

ALL = [f"worker-{i}" for i in range(3)]


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
    (
        "hostname",
        "worker-0",
        "machines",
        "FAIL",
        "it calls itself worker-0",
        "set-hostname worker-1",
    ),
    ("machine", "boot-0", "machines", "FAIL", "the same machine as worker-0", "drop worker-1"),
    ("commands/accelerate", None, "accelerate", "FAIL", "not installed", "octet sync"),
    ("memory/available", 3 * GIB, "host memory", "warn", "3 GiB available", "ps aux"),
    ("memory/shm_free", 64 << 20, "/dev/shm", "warn", "64 MiB free", "size=1024m /dev/shm"),
    ("limits/open_files", 1024, "open files", "warn", "limit 1024", "nofile"),
    ("limits/locked_bytes", 65536, "locked memory", "warn", "limit 64 KiB", "tee -a /etc/secur"),
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
        *("network/names/worker-1", {"addresses": ["127.0.1.1"]}, "names", "warn"),
        *("worker-1 is 127.0.1.1", "echo '10.0.0.11 worker-1'"),
    ),
    (
        *("network/names/worker-2", {"addresses": ["127.0.1.1"]}, "names", "FAIL"),
        *("worker-2 is 127.0.1.1", "echo '10.0.0.12 worker-2'"),
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
        *("/x/lock, 30 minutes old, held by nobody", "ssh worker-1 rm -f /x/lock"),
    ),
    ("data/0/count", 0, "data", "FAIL", "/shared/*.parquet: no file", "ls -l"),
    ("data/0/digest", "d2", "data", "FAIL", "other names or sizes", "ls -l"),
    ("data/0", {"what": "/d", "error": "Stale file handle"}, "data", "FAIL", "Stale", "'ls -l /d'"),
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


def test_who_has_the_port_is_named_and_is_not_ended_unseen() -> None:
    value = {"port": 29500, "error": "in use", "holders": ["python (pid 77, ann)"]}
    (row,) = bad(node_rows(spoiled("port", value, 0), wanted()))
    assert (row.check, row.node, row.verdict) == ("port 29500", "worker-0", "FAIL")
    assert "python (pid 77, ann)" in row.found and "kill" not in row.remedy
    assert "ss -tlnp sport = :29500" in row.remedy and "--port 29501" in row.remedy


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
    assert verdict(7.0, 30.0) == "not checked", "who can't say that it is right does not say so"


def test_a_port_that_could_not_be_taken_accuses_no_firewall() -> None:
    facts = spoiled("meet/reached/worker-2/40001", "another program answers there")
    facts["worker-2"]["meet"]["listening"]["40001"] = "Address already in use"
    assert bad(node_rows(facts, wanted())) == []


def test_a_node_that_did_not_come_to_the_meeting_accuses_no_firewall() -> None:
    facts = nodes()
    facts["worker-2"]["meet"] = {"error": "worker-2: no answer within 60 s"}
    for host in ALL[:2]:
        states = facts[host]["meet"]["reached"]["worker-2"]
        facts[host]["meet"]["reached"]["worker-2"] = dict.fromkeys(states, "refused")
    rows = [row for row in node_rows(facts, wanted()) if row.check == "connections"]
    assert [(row.node, row.verdict) for row in rows] == [("worker-2", "not checked")]


def test_a_firewall_around_a_node_is_one_line() -> None:
    facts = nodes(9)
    for states in facts["worker-3"]["meet"]["reached"].values():
        states.update(dict.fromkeys(states, "no answer"))
    hosts = tuple(Host(name=name, slots=2) for name in facts)
    (row,) = bad(node_rows(facts, wanted(hosts=hosts)))
    assert (row.check, row.node) == ("connections", "worker-3")
    assert row.found.startswith("to worker-0, worker-1, worker-2 and 5 more: no answer")
    assert row.remedy.startswith("for node in worker-0 worker-1 worker-2 worker-4 ")


def test_an_address_that_name_servers_rotate_is_no_difference() -> None:
    facts = nodes()
    for host, found in facts.items():
        both = ["10.0.0.12", "10.1.0.12"]
        found["network"]["names"]["worker-2"]["addresses"] = (
            both if host == "worker-1" else both[::-1]
        )
    assert bad(node_rows(facts, wanted())) == []


def test_a_node_may_know_more_of_its_own_addresses_than_the_others() -> None:
    facts = nodes()  # as systemd-resolved tells a machine's own name
    facts["worker-1"]["network"]["names"]["worker-1"]["addresses"] += ["10.9.0.1", "172.17.0.1"]
    assert bad(node_rows(facts, wanted())) == []


def test_the_remedy_for_a_loopback_name_leaves_localhost(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost worker-2 w2\n127.0.1.1\tworker-2\n10.0.0.1 worker-20\n")
    facts = spoiled("network/names/worker-2", {"addresses": ["127.0.1.1"]})
    (row,) = bad(node_rows(facts, wanted()))
    command = row.remedy.replace("ssh -t worker-1", "bash -c").replace("/etc/hosts", str(hosts))
    subprocess.run(command.replace("sudo ", ""), shell=True, check=True, executable="/bin/bash")
    lines = [line.split() for line in hosts.read_text().splitlines()]
    assert lines[0] == ["127.0.0.1", "localhost", "w2"] and lines[1] == ["127.0.1.1"]
    assert lines[2:] == [["10.0.0.1", "worker-20"], ["10.0.0.12", "worker-2"]]


def test_limits_are_added_to_one_file_and_high_ones_are_enough() -> None:
    facts = spoiled("limits/locked_bytes", 64 * GIB)
    assert bad(node_rows(facts, wanted())) == []
    facts["worker-1"]["limits"] = {"open_files": 1024, "locked_bytes": 65536}
    assert ["tee -a" in row.remedy for row in bad(node_rows(facts, wanted()))] == [True, True]


def test_a_lock_whose_builder_lives_on_any_node_is_let_alone() -> None:
    facts = spoiled("locks", [{"path": "/x/lock", "age_s": 1800.0, "held": False}])
    facts["worker-2"]["locks"] = [{"path": "/x/lock", "age_s": 1800.0, "held": True}]
    assert bad(node_rows(facts, wanted())) == []
    young = spoiled("locks", [{"path": "/x/lock", "age_s": 5.0, "held": False}])
    assert bad(node_rows(young, wanted())) == []


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
    assert row.remedy == "ssh -t worker-0 sudo apt-get install pdsh"


@pytest.mark.parametrize(("launcher", "verdict"), [("torchrun", "warn"), ("deepspeed", "FAIL")])
def test_a_foreign_environment_file_is_told(launcher: str, verdict: str) -> None:
    facts = spoiled("deepspeed_env", ["/root/.deepspeed_env sets A"], 0)
    (row,) = bad(node_rows(facts, wanted(launcher=launcher)))
    assert (row.check, row.verdict) == (".deepspeed_env", verdict)
    assert exit_code([row]) == (2 if verdict == "FAIL" else 0)


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


def test_a_network_of_its_own_is_good_practice() -> None:
    facts = nodes()
    for i, host in enumerate(ALL):
        entry = {"up": True, "addresses": [f"10.1.0.{i}"]}
        facts[host]["network"]["interfaces"]["ib0"] = entry
    rows = node_rows(facts, wanted(environ={"NCCL_SOCKET_IFNAME": "ib0"}))
    assert bad(rows) == []
    assert "NCCL_SOCKET_IFNAME=ib0; the hosts' names lead over eth0" in {row.found for row in rows}


def test_interfaces_are_proposed_for_all_or_by_node() -> None:
    line = "export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0"
    assert proposed_exports(nodes()) == [line]
    facts = nodes()
    for way in facts["worker-2"]["network"]["routes"].values():
        way["interface"] = "ens3"
    assert proposed_exports(facts)[0] == f"{line}   # on worker-0"
    assert "ens3" in proposed_exports(facts)[2]
    assert chosen("NCCL_SOCKET_IFNAME", "eth1:1,ib", ["eth1", "ib0"]) == (["eth1", "ib0"], [])
