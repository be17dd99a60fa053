"""The network as one node sees it: names, routes, interfaces, and whether the others are reached.

`meet` runs on every node at the same time: each listens, each connects to every other, and each
tells the others its clock.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from recipes.cluster.ways import route
from recipes.preflight.gpus import describe_process

CONNECT_S = 3.0  # lets a lost SYN be sent twice more
PINGS = 4  # clock readings per connection; the one with the shortest way counts


def resolve(host: str) -> dict[str, Any]:
    """The addresses that this node knows a host by."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return {"error": str(error.strerror or error), "addresses": []}
    return {"addresses": list(dict.fromkeys(str(info[4][0]) for info in found))}


def interfaces() -> dict[str, dict[str, Any]]:
    """Network interfaces with their addresses."""
    stats = psutil.net_if_stats()
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: {
            "up": name in stats and stats[name].isup,
            "bits_per_s": _rate(name, stats[name].speed if name in stats else 0),
            "addresses": [a.address.split("%")[0] for a in entries if a.family in families],
        }
        for name, entries in psutil.net_if_addrs().items()
    }


def _rate(name: str, mbit_per_s: int) -> float | None:
    """What a network card is sold for; virtual ones report a rate that nobody holds them to."""
    folder = Path("/sys/class/net") / name
    real = (folder / "device").exists() or (folder / "bonding").exists()
    return mbit_per_s * 1e6 if real and mbit_per_s > 0 else None


def infiniband() -> dict[str, float]:
    """Bits per second of each InfiniBand or RoCE card, over its ports that are up."""
    rates: dict[str, float] = {}
    for port in Path("/sys/class/infiniband").glob("*/ports/*"):
        with suppress(OSError, ValueError, IndexError):  # "4: ACTIVE", "200 Gb/sec (4X HDR)"
            if "ACTIVE" in (port / "state").read_text():
                rate = float((port / "rate").read_text().split()[0]) * 1e9
                card = port.parts[-3]
                rates[card] = rates.get(card, 0.0) + rate
    return rates


def network_facts(hosts: list[str]) -> dict[str, Any]:
    """Names, routes and interfaces of this node."""
    with ThreadPoolExecutor(max_workers=min(32, len(hosts))) as pool:
        names = dict(zip(hosts, pool.map(resolve, hosts), strict=True))
    known = interfaces()
    routes = {
        host: route(entry["addresses"][0]) for host, entry in names.items() if entry["addresses"]
    }
    low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    return {
        "names": names,
        "interfaces": known,
        "routes": routes,
        "ephemeral_ports": [int(low), int(high)],
        "infiniband": infiniband(),
    }


def listener(port: int) -> socket.socket:
    """A listening socket on every address of this machine."""
    with suppress(OSError):  # IPv6 may be switched off
        return socket.create_server(
            ("", port), family=socket.AF_INET6, dualstack_ipv6=socket.has_dualstack_ipv6()
        )
    return socket.create_server(("", port))


def port_fact(port: int) -> dict[str, Any]:
    """Whether a port is free here, and who has it if not."""
    try:
        listener(port).close()
    except OSError as error:
        holders = []
        with suppress(psutil.Error):
            holders = [
                describe_process(c.pid)
                for c in psutil.net_connections("tcp")
                if c.laddr and c.laddr.port == port and c.status == psutil.CONN_LISTEN
            ]
        why = os.strerror(error.errno or 0)  # `strerror` has the address in it
        return {"port": port, "error": why, "holders": list(dict.fromkeys(holders))}
    return {"port": port}


def meet(request: dict[str, Any]) -> dict[str, Any]:
    """Listen for every other node and connect to it.

    Args:
        request: `id` of this preflight, `me`, `listen` (my ports), `peers` (each one's ports),
            `limit_s`.
    """
    end = time.monotonic() + float(request["limit_s"])
    listening, threads = {}, []
    for port in request["listen"]:
        try:
            server = listener(port)
        except OSError as error:
            listening[str(port)] = os.strerror(error.errno or 0)
            continue
        listening[str(port)] = ""
        arguments = (server, request["id"], len(request["peers"]), end)
        threads.append(threading.Thread(target=_serve, args=arguments))
        threads[-1].start()
    calls = [(host, port) for host, ports in request["peers"].items() for port in ports]
    reached: dict[str, dict[str, str]] = {host: {} for host in request["peers"]}
    clocks: dict[str, dict[str, float]] = {}
    greeting = f"{request['id']} {request['me']}\n"
    with ThreadPoolExecutor(max_workers=max(1, min(64, len(calls)))) as pool:
        answers = pool.map(lambda call: _call(call[0], call[1], greeting, end), calls)
        for (host, port), (state, clock) in zip(calls, answers, strict=True):
            reached[host][str(port)] = state
            if clock:
                clocks[host] = clock
    for thread in threads:
        thread.join()
    return {"listening": listening, "reached": reached, "clocks": clocks}


def _serve(server: socket.socket, name: str, expected: int, end: float) -> None:
    """Answer every caller of this preflight with the time; done when all others have called."""
    seen: set[str] = set()
    server.settimeout(0.1)
    with server:
        while len(seen) < expected and time.monotonic() < end:
            try:
                connection, _ = server.accept()
            except TimeoutError:
                continue
            with connection, suppress(OSError, UnicodeDecodeError):
                connection.settimeout(1.0)
                stream = connection.makefile("rw", encoding="utf-8", newline="\n")
                while (line := stream.readline(300)).startswith(f"{name} "):
                    seen.add(line)
                    stream.write(f"{time.time()!r}\n")
                    stream.flush()


def _call(host: str, port: int, greeting: str, end: float) -> tuple[str, dict[str, float] | None]:
    """Connect and read the other's clock; the state tells a refusal from silence."""
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=CONNECT_S)
        except ConnectionRefusedError:
            if time.monotonic() > end:
                return "refused", None
            time.sleep(0.05)  # the other may not listen yet
        except TimeoutError:
            return "no answer", None
        except OSError as error:
            return str(error.strerror or error), None
        else:
            break
    with connection:
        try:
            return "", _compare_clocks(connection, greeting)
        except TimeoutError:
            return "", None  # it took the connection, and is too busy to talk
        except (OSError, ValueError):
            return "another program answers there", None


def _compare_clocks(connection: socket.socket, greeting: str) -> dict[str, float]:
    """By how much this clock is ahead of the other, and how far that may be off."""
    connection.settimeout(CONNECT_S)
    stream = connection.makefile("rw", encoding="utf-8", newline="\n")
    readings = []
    for _ in range(PINGS):
        sent = time.time()
        stream.write(greeting)
        stream.flush()
        there = float(stream.readline(100))
        back = time.time()
        readings.append(((back - sent) / 2, (sent + back) / 2 - there))
    half_way, ahead = min(readings)
    return {"ahead_s": ahead, "uncertainty_s": half_way}
