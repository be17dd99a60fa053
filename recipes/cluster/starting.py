"""One start of a job: what is to be started, on which hosts, and why that can't work."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from recipes.cluster.arm import Arm
from recipes.cluster.hostfile import HOST_NAME, Host
from recipes.cluster.shell import PLAIN_CHARACTERS, is_plain

LAUNCHERS = ("accelerate", "accelerate-pdsh", "deepspeed", "torchrun")


@dataclass(frozen=True, kw_only=True)
class Start:
    """Everything a launcher's command line says.

    Attributes:
        hostfile: names exactly these hosts, or more where they were selected; with all their slots.
        master: the first host's address as the others reach it; empty: its name.
        python: the interpreter, at the same path on every host, in whose folder the launchers lie.
        script: what the ranks run, absolute, with `arguments`.
    """

    launcher: str
    hosts: tuple[Host, ...]
    hostfile: Path
    arm: Arm
    master: str
    port: int
    python: Path
    script: Path
    arguments: tuple[str, ...]

    @property
    def by_pdsh(self) -> bool:
        """Whether the launcher reaches the other hosts itself: one command, and a second shell."""
        return self.launcher in ("accelerate-pdsh", "deepspeed") and len(self.hosts) > 1

    @property
    def address(self) -> str:
        """What the ranks connect to."""
        return self.master or (self.hosts[0].name if len(self.hosts) > 1 else "127.0.0.1")


def faults(start: Start, *, supervised: bool = False) -> list[str]:
    """Why this can't be started, each with its remedy; empty when it can.

    Args:
        supervised: the arguments go to the launcher as they are; `pasteable` has other ways.
    """
    if start.launcher not in LAUNCHERS:
        near = difflib.get_close_matches(start.launcher, LAUNCHERS, n=1)
        guess = f"did you mean {near[0]}? " if near else ""
        return [f"--launcher {start.launcher}: {guess}expected one of {', '.join(LAUNCHERS)}"]
    if not start.hosts:
        return ["no host is left to start on; correct the hostfile or the selection"]
    found = []
    if start.launcher.startswith("accelerate") and len({h.slots for h in start.hosts}) > 1:
        listed = ", ".join(
            f"{h.name} slots={h.slots}" + (f" (line {h.line})" if h.line else "")
            for h in start.hosts
        )
        found.append(
            f"--launcher {start.launcher} starts equally many ranks on every host, these differ: "
            f"{listed}; choose equally many with --include, or use --launcher torchrun or deepspeed"
        )
    if start.launcher == "accelerate-pdsh" and start.arm.kind == "DDP":
        found.append(
            f"--launcher accelerate-pdsh reaches other hosts for DeepSpeed only, {start.arm.path} "
            "is DDP; use --launcher accelerate"
        )
    counted = start.launcher.startswith("accelerate") and len(start.hosts) == 1
    single = start.arm.gpu_ids != "all" and "," not in start.arm.gpu_ids
    if counted and single and start.arm.kind == "DDP":
        found.append(
            f"gpu_ids={start.arm.gpu_ids!r} in {start.arm.path}: Accelerate refuses a single one "
            "on one host for MULTI_GPU; write '-1,-1'"
        )
    if not 1 <= start.port <= 65535:
        found.append(f"--port {start.port}: expected 1 to 65535, the same for every host")
    return found + _address_faults(start) + _word_faults(start, supervised)


def _address_faults(start: Start) -> list[str]:
    if not HOST_NAME.fullmatch(start.address):
        return [f"--master {start.address!r}: expected a host name or an IPv4 address"]
    alone = start.address == "localhost" or start.address.startswith("127.")
    if alone and len(start.hosts) > 1 and not start.master:
        return [
            f"{start.hosts[0].name} in line {start.hosts[0].line} of the hostfile: the other hosts "
            "can't reach it by that name; write its host name or address"
        ]
    if alone and len(start.hosts) > 1:
        return [
            f"--master {start.address}: every host would look for it on itself; expected the first "
            "host's address as the others reach it"
        ]
    return []


def _word_faults(start: Start, supervised: bool) -> list[str]:
    if not start.by_pdsh:  # no second shell
        return []
    told = [("interpreter", str(start.python)), ("script", str(start.script))]
    told += [("hostfile", str(start.hostfile)), ("--config", str(start.arm.path))]
    told += [("DeepSpeed config", str(start.arm.deepspeed_json))]
    told += [("argument", word) for word in start.arguments] if supervised else []
    return [
        f"{what} {word!r}: --launcher {start.launcher} passes it through a shell on every host, "
        f"which would change it; expected {PLAIN_CHARACTERS} only (a symbolic link helps), or use "
        "--launcher accelerate or torchrun"
        for what, word in told
        if not is_plain(word)
    ]


def notes(start: Start) -> list[str]:
    """What the YAML states and the hostfile or `--launcher` overrides; worth a line, no fault."""
    if not start.launcher.startswith("accelerate"):
        return []  # these don't read it
    multinode = "pdsh" if start.launcher == "accelerate-pdsh" else "standard"
    world = sum(host.slots for host in start.hosts)
    used = {"num_machines": len(start.hosts), "num_processes": world}
    told: list[tuple[str, object, object, str]]
    told = [
        (key, value, used[key], "the hostfile") for key, value in start.arm.stated if key in used
    ]
    told += [
        (key, value, multinode, f"--launcher {start.launcher}")
        for key, value in start.arm.stated
        if key == "deepspeed_multinode_launcher" and len(start.hosts) > 1
    ]
    return [
        f"{key}={value} in {start.arm.path} is overridden: {origin} makes it {wins}"
        for key, value, wins, origin in told
        if value != wins
    ]


def script_arguments(launcher: str, arm: Arm) -> tuple[str, ...]:
    """What names the arm to the script under launchers that don't read the YAML."""
    if launcher.startswith("accelerate"):
        return ()
    if arm.deepspeed_json is not None:
        return ("--deepspeed_config", str(arm.deepspeed_json))
    return ("--accelerate_config", str(arm.path))
