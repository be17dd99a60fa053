"""What a rehearsal needs, and what it will set up: every fault at once, before anything starts."""

from __future__ import annotations

import ipaddress
import os
import pwd
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from recipes.cluster.hostfile import Host

# Each tool and the Debian or Ubuntu package that brings it.
TOOLS = {"unshare": "util-linux", "mount": "mount", "ip": "iproute2", "tc": "iproute2"}
TOOLS |= {"sshd": "openssh-server", "ssh": "openssh-client", "ssh-keygen": "openssh-client"}
TOOLS |= {"pdsh": "pdsh"}
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_-]*[A-Za-z0-9])?(\.[A-Za-z0-9_-]*[A-Za-z0-9])*")
UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


def search_path() -> str:
    """Where tools are looked for: sshd, ip and tc are often not on a user's own PATH."""
    return os.pathsep.join([*filter(None, [os.environ.get("PATH")]), SYSTEM_PATH])


def missing(path: str, *, user: int, platform: str = sys.platform) -> list[str]:
    """What a rehearsal needs and this machine lacks, each with its remedy."""
    found = []
    if platform != "linux":
        found.append(f"this is {platform}; rehearse on a Linux machine (namespaces are Linux's)")
    if user != 0:
        again = shlex.join([str(Path(sys.argv[0]).absolute()), *sys.argv[1:]])
        found.append(
            f"this is not root, which namespaces and sshd need; start it with: sudo {again}"
        )
    absent = {tool: package for tool, package in TOOLS.items() if not shutil.which(tool, path=path)}
    if absent:
        packages = " ".join(sorted(set(absent.values())))
        found.append(f"no {', '.join(absent)}; install with: apt-get install -y {packages}")
    return found


def parse_rate(text: str) -> int:
    """Bits per second of `1gbit`, `200mbit` or `2.5gbit`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text)
    rate = float(match[1]) * UNITS[match[2]] if match else 0.0
    if not 10**5 <= rate <= 10**11:
        raise ValueError(
            f"--bandwidth {text!r}: expected a rate from 100kbit to 100gbit, like 1gbit or 200mbit"
        )
    return round(rate)


def plan_hosts(hosts: Sequence[Host]) -> list[dict[str, str]]:
    """Name, address and kernel host name of each; an address in the hostfile is taken as it is."""
    faults, given = [], {}
    for host in hosts:
        with suppress(ValueError):
            given[host.name] = ipaddress.IPv4Address(host.name)
    planned = []
    spare = (a for a in ipaddress.IPv4Network("10.77.0.0/24") if int(a) & 0xFF >= 10)
    free = (a for a in spare if int(a) & 0xFF < 250 and a not in given.values())
    for host in hosts:
        address, name = given.get(host.name), host.name
        if address is not None:
            name = f"host-{str(address).replace('.', '-')}"
            if address.is_loopback or address.is_multicast or address.is_unspecified:
                faults.append(f"{host.name} can't be a host's address; give it a name")
        elif name.split(".")[0].lower() == "localhost":
            faults.append(f"{name} is every host's name for itself; expected one like worker-0")
        elif not NAME.fullmatch(name) or len(name) > 64:
            faults.append(f"{name!r} can't be a host name: up to 64 letters, digits, '-' and '.'")
        address = address or next(free, None)
        if address is None:
            faults.append(f"{name}: a rehearsal has room for 240 hosts")
        planned.append({"name": host.name, "host_name": name, "address": str(address)})
    if faults:
        raise ValueError("\n".join(faults))
    return planned


def check_local(folders: Sequence[str]) -> list[str]:
    """The absolute folders that each host gets for itself."""
    paths = [Path(folder).absolute() for folder in folders]
    bad = [str(path) for path in paths if not path.is_dir() or path == Path("/")]
    if bad:
        raise ValueError(
            f"--local {' '.join(bad)}: expected existing folders (not /); they stay as they are, "
            "each host gets an empty one over them"
        )
    return [str(path) for path in paths]


def plan(hosts: Sequence[Host], bandwidth: str | None, local: Sequence[str]) -> dict[str, Any]:
    """What node.py is to set up, JSON-able.

    Raises:
        ValueError: everything that is missing or can't be, together, each with its remedy.
    """
    path = search_path()
    faults, made = missing(path, user=os.geteuid()), {}
    parts = {
        "hosts": lambda: plan_hosts(hosts),
        "rate_bits": lambda: parse_rate(bandwidth) if bandwidth else None,
        "local": lambda: check_local(local),
    }
    for name, part in parts.items():
        try:
            made[name] = part()
        except ValueError as error:
            faults += str(error).splitlines()
    if faults:
        raise ValueError("octet rehearse can't start:\n  " + "\n  ".join(faults))
    homes = {pwd.getpwuid(0).pw_dir, str(Path.home())}  # ssh asks the first, tools the second
    return made | {"homes": sorted(homes), "sshd": shutil.which("sshd", path=path)}
