"""The hostfile: which machines, and how many GPUs each (`worker-0 slots=4`, # comments)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Host:
    """One machine: its name as the launcher reaches it, and its number of ranks."""

    name: str
    slots: int


def read_hostfile(path: str | Path) -> tuple[Host, ...]:
    """Parse the format that DeepSpeed and Open MPI share, strictly.

    Raises:
        ValueError: all faults together, with line numbers. DeepSpeed itself reads `slots=4x` as 4
            and trains on the local node alone when the file is missing; both are errors here.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.reason if isinstance(error, UnicodeDecodeError) else error.strerror
        raise ValueError(
            f"hostfile {path} can't be read: {reason}; expected lines like 'worker-0 slots=4'"
        ) from error
    hosts: dict[str, Host] = {}
    faults = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        fault = _line_fault(words, hosts)
        if fault:
            faults.append(f"  line {number} {line.strip()!r}: {fault}")
        else:
            hosts[words[0]] = Host(name=words[0], slots=int(words[1].removeprefix("slots=")))
    if not hosts and not faults:
        faults.append("  no host in it; expected lines like 'worker-0 slots=4'")
    if faults:
        raise ValueError(
            f"{len(faults)} fault{'s' if len(faults) > 1 else ''} in hostfile {path}:\n"
            + "\n".join(faults)
        )
    return tuple(hosts.values())


def _line_fault(words: list[str], known: dict[str, Host]) -> str | None:
    name, *rest = words
    if "@" in name or ":" in name:
        return "user and port belong into ~/.ssh/config; expected a bare host name"
    if name in known:
        return f"{name} stands here twice; give it one line with all its slots"
    if len(rest) != 1 or not re.fullmatch(r"slots=[1-9]\d*", rest[0]):
        return f"expected '{name} slots=N' with N a whole number above zero"
    return None
