"""Rows about names, routes and interfaces."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Any

from recipes.cluster.environment import INTERFACE_VARIABLES
from recipes.preflight.rows import Row, majority, many
from recipes.preflight.wanted import Facts, Wanted


def network_rows(there: Facts, wanted: Wanted) -> list[Row]:
    """What each node knows of the others before a packet is sent."""
    rows = name_rows(there)
    if len(there) > 1:
        rows += interface_rows(there, wanted)
    return rows


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.split("%")[0]).is_loopback


def name_rows(there: Facts) -> list[Row]:
    """Every host's name on every host: resolved, to an address that the others reach."""
    rows = []
    names = next(iter(there.values()))["network"]["names"]
    several = len(names) > 1
    known: dict[str, dict[str, str]] = {name: {} for name in names}  # name -> node -> address
    for node, found in there.items():
        for name, entry in found["network"]["names"].items():
            real = [a for a in entry["addresses"] if not (several and _is_loopback(a))]
            if real:
                known[name][node] = real[0]
    for node, found in there.items():
        faults = 0
        for name, entry in found["network"]["names"].items():
            address = majority(known[name]) if known[name] else ""
            line = f"echo '{address} {name}' | sudo tee -a /etc/hosts"
            if entry.get("error"):
                faults += 1
                rows.append(_name_row(node, f"{name}: {entry['error']}", address, line))
            elif name not in known or node not in known[name]:
                faults += 1
                # Debian gives a machine's own name 127.0.1.1: gloo then waits for itself.
                drop = f"sudo sed -i '/^127\\..*{name}/d' /etc/hosts; {line}"
                rows.append(_name_row(node, f"{name} is {entry['addresses'][0]}", address, drop))
            elif known[name][node] != majority(known[name]):
                rows.append(
                    Row(
                        check="names",
                        node=node,
                        found=f"{name} is {known[name][node]}",
                        expected=f"{address}, as on most nodes",
                        verdict="warn",
                        remedy=f"ssh {node} getent ahosts {name}",
                    )
                )
        if not faults:
            rows.append(Row(check="names", node=node, found=f"{many(len(names), 'name')} known"))
    return rows


def _name_row(node: str, found: str, expected: str, remedy: str) -> Row:
    if not expected:  # no node knows it
        name = found.split()[0].rstrip(":")
        remedy = f"# give {name} an address that the others reach, in DNS or in every /etc/hosts"
    return Row(
        check="names",
        node=node,
        found=found,
        expected=expected or "an address",
        verdict="FAIL",
        remedy=f'ssh {node} "{remedy}"' if expected else remedy,
    )


def towards_others(node: str, found: Mapping[str, Any]) -> dict[str, str]:
    """Interface -> source address of this node's packets to the other hosts."""
    ways = {}
    for host, way in found["network"]["routes"].items():
        if host != node and way.get("interface") and not _is_loopback(way["source"]):
            ways[way["interface"]] = way["source"]
    return ways


def proposed_exports(there: Facts) -> list[str]:
    """Lines that name the interface to NCCL and gloo; one for each node where names differ."""
    names = {node: ",".join(towards_others(node, found)) for node, found in there.items()}
    names = {node: name for node, name in names.items() if name}
    lines = {
        node: "export " + " ".join(f"{variable}={name}" for variable in INTERFACE_VARIABLES)
        for node, name in names.items()
    }
    if len(set(lines.values())) == 1:
        return [next(iter(lines.values()))]
    return [f"{line}   # on {node}" for node, line in lines.items()]


def interface_rows(there: Facts, wanted: Wanted) -> list[Row]:
    """Routes to the other hosts, and the variables that choose an interface."""
    rows = []
    for node, found in there.items():
        network = found["network"]
        for host, way in network["routes"].items():
            if host != node and way.get("error"):
                rows.append(
                    Row(
                        check="route",
                        node=node,
                        found=f"to {host}: {way['error']}",
                        expected="a route",
                        verdict="FAIL",
                        remedy=f"ssh {node} ip route get {network['names'][host]['addresses'][0]}",
                    )
                )
        ways = towards_others(node, found)
        if not ways:
            continue
        text = ", ".join(f"{name} ({address})" for name, address in ways.items())
        rows.append(Row(check="interface", node=node, found=text))
        for variable in INTERFACE_VARIABLES:
            rows += _variable_rows(node, variable, wanted, network["interfaces"], ways)
    return rows


def chosen(variable: str, value: str, names: list[str]) -> tuple[list[str], list[str]]:
    """Interfaces that a variable's value selects, and names in it that select none.

    NCCL takes prefixes, exact names after `=` and exclusions after `^`; gloo exact names.
    """
    excluded = variable.startswith("NCCL") and value.startswith("^")
    value = value.removeprefix("^") if excluded else value
    exact = not variable.startswith("NCCL") or value.startswith("=")
    words = [word for word in value.removeprefix("=").split(",") if word]
    words = [word.partition(":")[0] for word in words] if variable.startswith("NCCL") else words

    def fits(name: str, word: str) -> bool:
        return name == word if exact else name.startswith(word)

    if excluded:
        return [name for name in names if not any(fits(name, word) for word in words)], []
    picked = [name for name in names if any(fits(name, word) for word in words)]
    return picked, [word for word in words if not any(fits(name, word) for name in names)]


def _variable_rows(
    node: str,
    variable: str,
    wanted: Wanted,
    interfaces: Mapping[str, Mapping[str, Any]],
    ways: Mapping[str, str],
) -> list[Row]:
    value = wanted.environ.get(variable)
    right = ",".join(ways)
    if not value:
        usable = [
            name
            for name, entry in interfaces.items()
            if entry["up"] and any(not _is_loopback(a) for a in entry["addresses"])
        ]
        others = [name for name in usable if name not in ways]
        if not others or variable != INTERFACE_VARIABLES[0]:
            return []
        return [
            Row(
                check="interface",
                node=node,
                found=f"{variable} is not set; {', '.join(others)} could be taken too",
                expected=right,
                verdict="warn",
                remedy=f"export {' '.join(f'{v}={right}' for v in INTERFACE_VARIABLES)}",
            )
        ]
    picked, absent = chosen(variable, value, list(interfaces))
    picked = [name for name in picked if interfaces[name]["up"] and interfaces[name]["addresses"]]
    picked = [n for n in picked if not all(map(_is_loopback, interfaces[n]["addresses"]))]
    found, verdict = f"{variable}={value}", "ok"
    if absent:
        found += f": no interface {', '.join(absent)}; there are {', '.join(interfaces)}"
        verdict = "FAIL"
    elif not picked:
        found += ": no interface that is up and leads to another machine"
        verdict = "FAIL"
    elif not set(picked) & ways.keys():
        # A network of its own for the GPUs is good practice; the benchmark shows whether it works.
        found += f": the hosts' names lead over {right}"
        verdict = "warn"
    remedy = "" if verdict == "ok" else f"export {variable}={right}"
    return [
        Row(
            check="interface",
            node=node,
            found=found,
            expected=right,
            verdict=verdict,  # type: ignore[arg-type]
            remedy=remedy,
        )
    ]
