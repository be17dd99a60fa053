"""What a preflight holds the nodes' facts against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from recipes.cluster.hostfile import Host

Facts = Mapping[str, Mapping[str, Any]]  # by the hostfile's names


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The start that is planned, as far as it can be known before it."""

    hosts: tuple[Host, ...]
    hostfile: str = "hostfile"
    launcher: str = "accelerate"
    port: int = 29500
    cpu: bool = False  # the arm needs no GPU
    parameters: int | None = None  # of the run's model
    keep: int | None = None  # checkpoints
    environ: Mapping[str, str] = field(default_factory=dict)  # that the ranks will get

    @property
    def needs_pdsh(self) -> bool:
        """Whether the first host starts the others through pdsh."""
        several = len(self.hosts) > 1
        return several and self.launcher in ("deepspeed", "accelerate-pdsh")

    def slots(self, node: str) -> int:
        """Ranks on a node."""
        return next(host.slots for host in self.hosts if host.name == node)
