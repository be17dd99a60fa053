"""What the commands that start ranks have in common: hosts, arm, launcher, address, environment.

Everything that a command line names is read here, and all that is wrong with it told at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from recipes.cluster.environment import INTERFACE_VARIABLES, forwarded
from recipes.cluster.hostfile import Host, read_hostfile, select
from recipes.cluster.launchers import LAUNCHERS, Arm, Start, arm_env, faults, read_arm
from recipes.cluster.remote import PYTHON
from recipes.config import Run
from recipes.objective import legal_worlds, plan_batch
from recipes.runfile import load_run

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The options of a command line, as they were given."""

    hostfile: str
    run: str = ""  # a run file
    overrides: tuple[str, ...] = ()  # of its keys
    config: str = ""  # an Accelerate YAML
    launcher: str = LAUNCHERS[0]
    include: str = ""
    exclude: str = ""
    master: str = ""  # found at the start where empty
    port: int = 29500
    interface: str = ""  # on every node; found on each where empty
    env: tuple[str, ...] = ()

    @property
    def selected(self) -> bool:
        """Whether the hostfile names more than is started."""
        return bool(self.include or self.exclude)


@dataclass(frozen=True, kw_only=True)
class Ready:
    """What was asked for, read: every part is there and right."""

    asked: Asked
    hosts: tuple[Host, ...]
    run: Run | None
    arm: Arm | None
    env: dict[str, str]  # for every rank
    working_dir: Path

    def start(self, script: Path, arguments: tuple[str, ...], hostfile: Path) -> Start:
        """A script's start as the launchers see it; `hostfile` is the launcher's."""
        assert self.arm is not None
        return Start(
            launcher=self.asked.launcher,
            hosts=self.hosts,
            hostfile=hostfile,
            arm=self.arm,
            master=self.asked.master,
            port=self.asked.port,
            python=PYTHON,
            script=script,
            arguments=arguments,
        )


def read(asked: Asked, script: Path) -> Ready:
    """Read everything that is named; run file and arm may be left out by an empty name.

    Raises:
        ValueError: all faults of options, hostfile, arm, run file and environment together.
    """
    problems: list[str] = []

    def attempt(make: Callable[[], T]) -> T | None:
        try:
            return make()
        except ValueError as error:
            problems.append(str(error))
            return None

    working_dir = Path.cwd()
    if asked.overrides and not asked.run:
        problems.append(f"{' '.join(asked.overrides)} has no effect without a run file")
    hosts = attempt(lambda: read_hostfile(asked.hostfile))
    if hosts and asked.selected:
        everyone = hosts
        hosts = attempt(lambda: select(everyone, asked.include, asked.exclude))
    arm = attempt(lambda: read_arm(Path(asked.config), working_dir)) if asked.config else None
    run = attempt(lambda: load_run(asked.run, list(asked.overrides))) if asked.run else None
    if hosts and run:
        number, batch, data = sum(host.slots for host in hosts), run.batch, run.data
        legal = legal_worlds(batch, lanes=data.lanes, workers=data.workers)
        attempt(lambda: plan_batch(batch, number, legal))
    env = attempt(lambda: forwarded(os.environ, asked.env)) or {}
    env |= arm_env(arm) if arm else {}
    env |= dict.fromkeys(INTERFACE_VARIABLES, asked.interface) if asked.interface else {}
    ready = Ready(
        asked=asked, hosts=hosts or (), run=run, arm=arm, env=env, working_dir=working_dir
    )
    if hosts and arm:
        problems += faults(ready.start(script, (), Path(asked.hostfile).resolve()))
    elif not 1 <= asked.port <= 65535:  # else `faults` has told it
        problems.append(f"--port {asked.port}: expected 1 to 65535")
    if problems:
        raise ValueError("\n".join(problems))
    return ready
