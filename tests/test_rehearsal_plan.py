"""Before a rehearsal: what is missing, what can't be, and which host gets which address."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from recipes.cluster.hostfile import Host
from recipes.rehearsal import plan


def test_everything_that_is_missing_is_named_with_its_install_command(tmp_path: Path) -> None:
    for tool in ("ip", "tc", "ssh", "ssh-keygen", "unshare", "mount"):
        (tmp_path / tool).touch(mode=0o755)
    assert plan.missing(str(tmp_path), user=0) == [
        "no sshd, pdsh; install with: apt-get install -y openssh-server pdsh"
    ]
    other = plan.missing(str(tmp_path), user=1000, platform="darwin")
    assert len(other) == 3 and "Linux" in other[0]
    assert re.search(r"not root, .*; start it with: sudo /", other[1])


@pytest.mark.parametrize(
    ("text", "bits"), [("1gbit", 10**9), ("2.5gbit", 25 * 10**8), ("200mbit", 2 * 10**8)]
)
def test_a_rate_is_read_in_bits(text: str, bits: int) -> None:
    assert plan.parse_rate(text) == bits


@pytest.mark.parametrize("text", ["", "1", "1gb", "1 gbit", "1GB/s", "-1gbit", "0gbit", "1e3mbit"])
def test_another_rate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a rate .* like 1gbit or 200mbit"):
        plan.parse_rate(text)


def test_hosts_that_cannot_be_rehearsed_are_named_together() -> None:
    names = ("ok", "localhost", "127.0.0.2", "bad name", "x" * 65)
    with pytest.raises(ValueError) as caught:
        plan.plan_hosts([Host(name=name, slots=1) for name in names])
    assert len(str(caught.value).splitlines()) == 4


def test_an_address_that_the_hostfile_names_is_not_given_twice() -> None:
    hosts = [Host(name=name, slots=1) for name in ("a", "10.77.0.11", "b")]
    planned = plan.plan_hosts(hosts)
    assert [p["address"] for p in planned] == ["10.77.0.10", "10.77.0.11", "10.77.0.12"]
    assert [p["host_name"] for p in planned] == ["a", "host-10-77-0-11", "b"]


def test_a_private_folder_must_be_there(tmp_path: Path) -> None:
    assert plan.check_local([str(tmp_path)]) == [str(tmp_path)]
    with pytest.raises(ValueError, match="--local /no/such /: expected existing folders"):
        plan.check_local(["/no/such", str(tmp_path), "/"])


def test_every_fault_comes_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan.os, "geteuid", lambda: 1000)
    with pytest.raises(ValueError) as caught:
        plan.plan([Host(name="localhost", slots=1)], "fast", ["/no/such"])
    for word in ("not root", "localhost is", "--bandwidth 'fast'", "--local /no/such"):
        assert word in str(caught.value)
