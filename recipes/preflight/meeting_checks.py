"""Rows about what the nodes found when they met: ports, connections and clocks."""

from __future__ import annotations

from recipes.preflight.rows import Row, many
from recipes.preflight.wanted import Facts, Wanted

CLOCK_S = 5.0  # far above NTP's; logs, make and certificates suffer from more


def meeting_rows(there: Facts, wanted: Wanted) -> list[Row]:
    """Ports, connections and clocks."""
    rows = port_rows(there, wanted)
    if len(there) > 1:
        rows += reach_rows(there, wanted) + clock_rows(there, wanted)
    return rows


def port_rows(there: Facts, wanted: Wanted) -> list[Row]:
    """The master port on the first host."""
    first = wanted.hosts[0].name
    port = there.get(first, {}).get("port")
    check = f"port {wanted.port}"
    if port is None:
        found = f"{first} did not answer"
        return [Row(check=check, node=first, found=found, verdict="not checked")]
    if not port.get("error"):
        return [Row(check=check, node=first, found="free")]
    holders = port["holders"]
    found = f"in use by {', '.join(holders)}" if holders else port["error"]
    remedy = f"# take another: --port {wanted.port + 1}"
    pids = [text.partition("(pid ")[2].partition(",")[0] for text in holders if "(pid " in text]
    if pids:
        remedy = f"ssh {first} kill {' '.join(pids)}   {remedy}"
    return [
        Row(check=check, node=first, found=found, expected="free", verdict="FAIL", remedy=remedy)
    ]


def reach_rows(there: Facts, wanted: Wanted) -> list[Row]:
    """Connections from every node to every other, on the master port and on high ports."""
    rows = []
    for node, found in there.items():
        meeting = found.get("meet") or {"error": "it did not take part"}
        if meeting.get("error"):
            why = meeting["error"]
            rows.append(Row(check="connections", node=node, found=why, verdict="not checked"))
            continue
        failed = 0
        for host, states in meeting["reached"].items():
            if there[node]["network"]["routes"].get(host, {}).get("error"):
                failed += 1  # told as a missing route
                continue
            listening = (there.get(host, {}).get("meet") or {}).get("listening", {})
            bad = {p: s for p, s in states.items() if s and not listening.get(p, "")}
            for state in dict.fromkeys(bad.values()):
                ports = [port for port, said in bad.items() if said == state]
                rows.append(_unreached(node, host, ports, state, there))
            failed += len(bad)
        if not failed:
            count = len(meeting["reached"])
            found_text = f"to {many(count, 'other')} and back"
            rows.append(Row(check="connections", node=node, found=found_text))
    return rows


def _unreached(node: str, host: str, ports: list[str], state: str, there: Facts) -> Row:
    meanings = {
        "refused": "refused, although it listens: a firewall rejects it",
        "no answer": "no answer: a firewall drops it, or the way back is missing",
    }
    source = there[node]["network"]["routes"].get(host, {}).get("source", f"ADDRESS-OF-{node}")
    return Row(
        check="connections",
        node=node,
        found=f"to {host}, port {', '.join(ports)}: {meanings.get(state, state)}",
        expected="any port open between the nodes",
        verdict="FAIL",
        remedy=f"ssh {host} sudo iptables -I INPUT -p tcp -s {source} -j ACCEPT   "
        "# or by the firewall that it has",
    )


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
    first = wanted.hosts[0].name
    rows, good = [], []
    for node in there:
        if node == first:
            continue
        clock = _clock(node, first, there)
        if clock is None:
            why = f"{first} did not answer"
            rows.append(Row(check="clock", node=node, found=why, verdict="not checked"))
            continue
        ahead, uncertainty = clock
        if abs(ahead) - uncertainty > CLOCK_S:
            way = "ahead of" if ahead > 0 else "behind"
            rows.append(
                Row(
                    check="clock",
                    node=node,
                    found=f"{abs(ahead):.1f} s {way} {first}",
                    expected=f"within {CLOCK_S:.0f} s",
                    verdict="FAIL",
                    remedy=f"ssh {node} sudo timedatectl set-ntp true   "
                    "# or: sudo chronyc makestep",
                )
            )
        else:
            good.append(abs(ahead) + uncertainty)
    if good:
        text = f"within {max(good) * 1000:,.2f} ms of {first}"
        rows.append(Row(check="clock", node="all" if not rows else "others", found=text))
    return rows
