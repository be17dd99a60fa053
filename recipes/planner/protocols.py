"""What NCCL's protocols cost, as its own model has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Algorithm = Literal["ring", "tree", "piped tree"]


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """One of NCCL's ways to move data.

    Attributes:
        rate: share of the bandwidth that is payload.
        base_s: latency of a call.
        link_s, pcie_s: of a ring's step over NVLink and over PCIe; tree_link_s: of a tree's.
        ring_net, tree_net: of a step between nodes, by that of a ring's with the first protocol.
        pcie: whether it works without NVLink.
    """

    rate: float
    base_s: float
    link_s: float
    pcie_s: float
    tree_link_s: float
    ring_net: float
    tree_net: float
    pcie: bool = True


# NVIDIA/nccl src/graph/tuning.cc, `baseLat` and `hwLat` (2.19 to 2.26), microseconds there: Simple
# takes 14 a step between nodes, LL128 4.0 and 8.5, LL 2.7 and 5.0 (ring, tree). A message of LL is
# a quarter payload, as `busBw * 1/4` there, of LL128 120 bytes in 128. LL128 needs NVLink.
PROTOCOLS = (
    Protocol(
        rate=1.0,
        base_s=8.4e-6,
        link_s=3.4e-6,
        pcie_s=5.7e-6,
        tree_link_s=4.0e-6,
        ring_net=1.0,
        tree_net=1.0,
    ),
    Protocol(
        rate=120 / 128,
        base_s=14e-6,
        link_s=1.9e-6,
        pcie_s=2.5e-6,
        tree_link_s=1.25e-6,
        ring_net=4.0 / 14.0,
        tree_net=8.5 / 14.0,
        pcie=False,
    ),
    Protocol(
        rate=0.25,
        base_s=6.6e-6,
        link_s=0.6e-6,
        pcie_s=1.0e-6,
        tree_link_s=0.6e-6,
        ring_net=2.7 / 14.0,
        tree_net=5.0 / 14.0,
    ),
)
