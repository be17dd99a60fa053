"""The way from this machine to another: its own address on it, and the interface that has it."""

from __future__ import annotations

import socket
from typing import Any

import psutil


def route(address: str) -> dict[str, Any]:
    """Source address and interface of packets to an address, or the error; nothing is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # only asks the kernel for the route
        except OSError as error:
            return {"error": str(error.strerror or error)}
        source = str(probe.getsockname()[0]).split("%")[0]
    bears = [
        name
        for name, entries in psutil.net_if_addrs().items()
        if source in [entry.address.split("%")[0] for entry in entries]
    ]
    return {"source": source, "interface": bears[0] if bears else ""}
