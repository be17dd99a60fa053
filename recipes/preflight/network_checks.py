"""Rows about names, routes, interfaces, ports, connections and clocks."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Any

from recipes.cluster.environment import INTERFACE_VARIABLES
from recipes.preflight.rows import Facts, Row, Wanted, fail, majority, many, ok, unchecked, warn
from recipes.preflight.table import shortened

CLOCK_S = 5.0  # far above NTP's; logs, make and certificates suffer from more


def network_rows(there: Facts, wanted: Wanted) -> list[Row]:
    """What each node knows of the others, and what was found when they met."""
    rows = name_rows(there)
    if len(there) > 1:
        rows += interface_rows(there, wanted)
    rows.append(port_row(there, wanted))
    if len(there) > 1:
        rows += reach_rows(there) + clock_rows(there, wanted)
    return rows


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.split("%")[0]).is_loopback


# ---- names, routes, interfaces


def name_rows(there: Facts) -> list[Row]:
    """Every host's name on every host: resolved, to an address that the others reach."""
    names = next(iter(there.values()))["network"]["names"]
    known: dict[str, dict[str, str]] = {name: {} for name in names}  # name -> node -> addresses
    for node, found in there.items():
        for name, entry in found["network"]["names"].items():
            outside = [a for a in entry["addresses"] if len(names) == 1 or not _is_loopback(a)]
            if outside:
                known[name][node] = " ".join(sorted(outside))
    rows = []
    for node, found in there.items():
        entries = found["network"]["names"].items()
        faults = [_name_row(node, name, entry, known[name]) for name, entry in entries]
        told = [row for row in faults if row is not None]
        rows += told or [ok("names", node, f"{many(len(names), 'name')} known")]
    return rows


def _name_row(
    node: str, name: str, entry: Mapping[str, Any], known: Mapping[str, str]
) -> Row | None:
    """What is wrong with a name on a node; `known`: its addresses on the nodes that know some."""
    found = f"{name}: {entry['error']}" if entry.get("error") else f"{name} is {known.get(node)}"
    if not known:
        remedy = f"# give {name} an address that the others reach, in DNS or in every /etc/hosts"
        return fail("names", node, found, "an address", remedy)
    right = majority(known)
    if node in known:
        # A host may have several, in any order, and know more of its own than the others do.
        if set(known[node].split()) & set(right.split()):
            return None
        remedy = f"ssh {node} getent ahosts {name}"
        return warn("names", node, found, f"{right}, as on most nodes", remedy)
    line = f"echo '{right.split()[0]} {name}' | sudo tee -a /etc/hosts"
    if entry.get("error"):
        return fail("names", node, found, right, f'ssh -t {node} "{line}"')
    found = f"{name} is {entry['addresses'][0]}"
    # The name alone leaves the loopback lines: localhost may stand there too.
    remedy = f"sudo sed -i -E '/^127\\./s/\\s{name}(\\s|$)/ /' /etc/hosts; {line}"
    # Debian gives a machine's own name 127.0.1.1: gloo waits for itself, unless it is told which
    # interface to take, as `octet launch` does.
    tell = warn if name == node else fail
    return tell("names", node, found, right, f'ssh -t {node} "{remedy}"')


def towards_others(node: str, found: Mapping[str, Any]) -> dict[str, str]:
    """Interface -> source address of this node's packets to the other hosts."""
    ways = {}
    for host, way in found["network"]["routes"].items():
        if host != node and way.get("interface") and not _is_loopback(way["source"]):
            ways[way["interface"]] = way["source"]
    return ways


def proposed_exports(there: Facts) -> list[str]:
    """A shell's lines that name the interfaces; one for each node where they differ."""
    names = {node: ",".join(towards_others(node, found)) for node, found in there.items()}
    lines = {
        node: "export " + " ".join(f"{variable}={name}" for variable in INTERFACE_VARIABLES)
        for node, name in names.items()
        if name
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
                address = network["names"][host]["addresses"][0]
                remedy = f"ssh {node} ip route get {address}"
                rows.append(fail("route", node, f"to {host}: {way['error']}", "a route", remedy))
        if ways := towards_others(node, found):
            rows.append(ok("interface", node, ", ".join(ways)))
            for variable in INTERFACE_VARIABLES:
                if value := wanted.environ.get(variable):
                    about = (node, variable, value, network["interfaces"], ways)
                    rows.append(_variable_row(*about))
    return rows


def chosen(variable: str, value: str, names: list[str]) -> tuple[list[str], list[str]]:
    """Interfaces that a variable's value selects, and names in it that select none.

    NCCL takes prefixes, exact names after `=` and exclusions after `^`; gloo exact names.
    """
    nccl = variable.startswith("NCCL")
    excluded = nccl and value.startswith("^")
    value = value.removeprefix("^") if excluded else value
    exact = not nccl or value.startswith("=")
    words = [word for word in value.removeprefix("=").split(",") if word]
    words = [word.partition(":")[0] for word in words] if nccl else words  # :port of a card

    def fits(name: str, word: str) -> bool:
        return name == word if exact else name.startswith(word)

    if excluded:
        return [name for name in names if not any(fits(name, word) for word in words)], []
    picked = [name for name in names if any(fits(name, word) for word in words)]
    return picked, [word for word in words if not any(fits(name, word) for name in names)]


def _variable_row(
    node: str,
    variable: str,
    value: str,
    interfaces: Mapping[str, Mapping[str, Any]],
    ways: Mapping[str, str],
) -> Row:
    picked, absent = chosen(variable, value, list(interfaces))
    usable = [
        name
        for name in picked
        if interfaces[name]["up"]
        and any(not _is_loopback(address) for address in interfaces[name]["addresses"])
    ]
    found, right = f"{variable}={value}", ",".join(ways)
    if absent:
        found += f": no interface {', '.join(absent)}; there are {', '.join(interfaces)}"
    elif not usable:
        found += ": no interface that is up and leads to another machine"
    elif not set(usable) & ways.keys():
        # A network of its own for the GPUs is good practice; the benchmark shows whether it works.
        return ok("interface", node, f"{found}; the hosts' names lead over {right}")
    else:
        return ok("interface", node, found)
    return fail("interface", node, found, right, f"export {variable}={right}")


# ---- the port, connections, clocks


def port_row(there: Facts, wanted: Wanted) -> Row:
    """The master port on the first host."""
    first, check = wanted.first, f"port {wanted.port}"
    port = there.get(first, {}).get("port")
    if port is None:
        return unchecked(check, first, f"{first} did not answer")
    if not port.get("error"):
        return ok(check, first, "free")
    holders = port["holders"]
    found = f"in use by {', '.join(holders)}" if holders else port["error"]
    # Who it is must be looked at before it is ended: it may be a job that runs well.
    remedy = f"ssh -t {first} sudo ss -tlnp sport = :{wanted.port}   "
    return fail(
        check, first, found, "free", remedy + f"# or take another: --port {wanted.port + 1}"
    )


def reach_rows(there: Facts) -> list[Row]:
    """Connections from every node to every other, on the master port and on high ports."""
    rows = []
    for node, found in there.items():
        meeting = found.get("meet") or {"error": "it did not take part"}
        if meeting.get("error"):
            rows.append(unchecked("connections", node, meeting["error"]))
            continue
        reached, silent = meeting["reached"], {}
        for host, states in reached.items():
            listening = (there.get(host, {}).get("meet") or {}).get("listening", {})
            # A port that the other could not take, or never tried to, accuses no firewall.
            bad = {port: s for port, s in states.items() if s and listening.get(port) == ""}
            if bad or not listening:
                silent[host] = bad
        routes = found["network"]["routes"]
        told = {host: bad for host, bad in silent.items() if "error" not in routes.get(host, {})}
        rows += _unreached(node, {host: bad for host, bad in told.items() if bad}, routes)
        if not silent:
            rows.append(ok("connections", node, f"to {many(len(reached), 'other')} and back"))
    return rows


MEANINGS = {
    "refused": "refused, although it listens: a firewall rejects it",
    "no answer": "no answer: a firewall drops it, or the way back is missing",
}


def _unreached(
    node: str, silent: Mapping[str, Mapping[str, str]], routes: Mapping[str, Mapping[str, str]]
) -> list[Row]:
    """A row for each reason, with all the hosts that it holds for."""
    states = dict.fromkeys(state for bad in silent.values() for state in bad.values())
    rows = []
    for state in states:
        hosts = [host for host, bad in silent.items() if state in bad.values()]
        where = shortened(hosts)
        if len(hosts) == 1:
            ports = [port for port, said in silent[where].items() if said == state]
            where += f", port {', '.join(ports)}"
        source = routes.get(hosts[0], {}).get("source", f"ADDRESS-OF-{node}")
        rule = f"sudo iptables -I INPUT -p tcp -s {source} -j ACCEPT"
        remedy = f"ssh -t {hosts[0]} {rule}"
        if len(hosts) > 1:
            remedy = f"for node in {' '.join(hosts)}; do ssh -t $node {rule}; done"
        text = f"to {where}: {MEANINGS.get(state, state)}"
        remedy += "   # or by the firewall that it has"
        rows.append(fail("connections", node, text, "any port open between the nodes", remedy))
    return rows


def _clock(node: str, first: str, there: Facts) -> tuple[float, float] | None:
    """By how much a node's clock is ahead of the first's, and how far that may be off."""
    direct = (there[node].get("meet") or {}).get("clocks", {}).get(first)
    if direct:
        return direct["ahead_s"], direct["uncertainty_s"]
    here, other = there[node].get("clock"), there.get(first, {}).get("clock")
    if not here or not other:
        return None
    uncertainty = here["uncertainty_s"] + other["uncertainty_s"]
    return here["ahead_s"] - other["ahead_s"], uncertainty


def clock_rows(there: Facts, wanted: Wanted) -> list[Row]:
    """Clocks against the first host's."""
    first = wanted.first
    rows = []
    good: dict[str, float] = {}
    for node in there:
        if node == first:
            continue
        clock = _clock(node, first, there)
        if clock is None:
            rows.append(unchecked("clock", node, f"{first} did not answer"))
            continue
        ahead, uncertainty = clock
        if abs(ahead) - uncertainty > CLOCK_S:
            found = f"{abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} {first}"
            remedy = f"ssh -t {node} sudo timedatectl set-ntp true   # or: sudo chronyc makestep"
            rows.append(fail("clock", node, found, f"within {CLOCK_S:.0f} s", remedy))
        elif uncertainty > CLOCK_S:
            rows.append(unchecked("clock", node, f"read to {uncertainty:.0f} s only"))
        else:
            good[node] = abs(ahead) + uncertainty
    text = f"within {max(good.values(), default=0.0) * 1000:,.2f} ms of {first}"
    return rows + [ok("clock", node, text) for node in good]
