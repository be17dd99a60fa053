"""The hostfile: which machines, and how many GPUs each (`worker-0 slots=4`, # comments)."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field
from pathlib import Path

# pdsh expands brackets, commas and a leading ^, / or -; a shell would change most of the rest.
HOST_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
EXPECTED = "expected lines like 'worker-0 slots=4'"


@dataclass(frozen=True, kw_only=True)
class Host:
    """One machine: its name as the launcher reaches it, and its number of ranks.

    Attributes:
        slots: how many ranks run there: after a selection, as many as were chosen.
        line: where it stands in its hostfile, 0 where it comes from none.
        gpus: the chosen slots by index, ascending, after a selection; None without one (all).
    """

    name: str
    slots: int
    line: int = field(default=0, compare=False)  # the same host wherever it stands
    gpus: tuple[int, ...] | None = None


def read_hostfile(path: str | Path) -> tuple[Host, ...]:
    """Parse the format that DeepSpeed and Open MPI share, strictly.

    Raises:
        ValueError: all faults together, with line numbers. DeepSpeed itself reads `slots=4x` as 4,
            takes a byte-order mark for a part of the first name, and trains on the local node alone
            when the file is missing; all are errors here.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise ValueError(f"hostfile {path} can't be read: {reason}; {EXPECTED}") from error
    hosts: dict[str, Host] = {}
    faults = []
    if text.startswith("\ufeff"):
        faults.append("  line 1 begins with a byte-order mark; save the file as UTF-8 without it")
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), 1):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        fault = _line_fault(words, hosts)
        if fault:
            faults.append(f"  line {number} {line.strip()!r}: {fault}")
        else:
            slots = int(words[1].removeprefix("slots="))
            hosts[words[0].casefold()] = Host(name=words[0], slots=slots, line=number)
    if not hosts and not faults:
        faults.append(f"  no host in it; {EXPECTED}")
    if faults:
        raise ValueError(f"{_count(faults)} in hostfile {path}:\n" + "\n".join(faults))
    return tuple(hosts.values())


def _line_fault(words: list[str], known: dict[str, Host]) -> str | None:
    name, *rest = words
    if "@" in name or ":" in name:
        return "user and port belong into ~/.ssh/config; expected a bare host name"
    if not HOST_NAME.fullmatch(name):
        return f"{name!r} is no host name; expected letters, digits, '.', '-' and '_'"
    if name.casefold() in known:  # host names know no case
        return f"{name} stands here twice; give it one line with all its slots"
    if len(rest) != 1 or not re.fullmatch(r"slots=[1-9]\d{0,5}", rest[0], re.ASCII):
        return f"expected '{name} slots=N' with N a whole number above zero"
    return None


def select(hosts: tuple[Host, ...], include: str = "", exclude: str = "") -> tuple[Host, ...]:
    """Choose machines and slots in DeepSpeed's syntax: `worker-0@worker-1:0,2`.

    The hostfile's order stays, whatever the order of the selection, since ranks follow it. Once
    something is chosen every host says so in `gpus`; without a selection nothing changes.

    Raises:
        ValueError: all faults together. DeepSpeed itself reads `a@a:1` as `a:1`, and crashes on a
            selection that leaves nothing.
    """
    if not include and not exclude:
        return hosts
    faults: list[str] = []
    if include and exclude:
        faults.append("  --include and --exclude are both given; give one")
    named = _parse(hosts, include, faults, "--include") if include else {}
    left_out = _parse(hosts, exclude, faults, "--exclude") if exclude else {}
    chosen = {
        host.name: tuple(
            slot
            for slot in (named.get(host.name, ()) if include else _slots(host))
            if slot not in left_out.get(host.name, ())
        )
        for host in hosts
    }
    if not faults and not any(chosen.values()):
        faults.append(f"  it leaves no slot of {_spell(hosts)}")
    if faults:
        raise ValueError(f"{_count(faults)} in the selection of hosts:\n" + "\n".join(faults))
    return tuple(
        Host(name=h.name, slots=len(chosen[h.name]), line=h.line, gpus=chosen[h.name])
        for h in hosts
        if chosen[h.name]
    )


def _parse(
    hosts: tuple[Host, ...], text: str, faults: list[str], option: str
) -> dict[str, tuple[int, ...]]:
    """The slots that a selection names, by host; what is wrong with it goes to `faults`."""
    known = {host.name: host for host in hosts}
    found: dict[str, tuple[int, ...]] = {}
    for part in text.split("@"):
        name, colon, numbers = part.partition(":")
        fault = None
        if not name:
            fault = "expected NAME or NAME:SLOT,SLOT between the @, e.g. worker-0@worker-1:0,2"
        elif "," in name:
            fault = f"join hosts with @: {name.replace(',', '@')}"
        elif name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            remedy = f"did you mean {near[0]}?" if near else f"hosts: {', '.join(known)}"
            fault = f"{name} does not stand in the hostfile; {remedy}"
        elif name in found:
            fault = f"{name} is named twice; name it once with all its slots"
        if fault is None:
            found[name] = _slots(known[name])
            if colon:
                fault, found[name] = _parse_slots(name, found[name], numbers)
        if fault:
            faults.append(f"  {option} {part!r}: {fault}")
    return found


def _parse_slots(
    name: str, every: tuple[int, ...], text: str
) -> tuple[str | None, tuple[int, ...]]:
    words = text.split(",")
    if not all(re.fullmatch(r"\d{1,6}", word, re.ASCII) for word in words):
        return "expected slot numbers with commas between them, e.g. 0,2 (ranges are unknown)", ()
    slots = [int(word) for word in words]
    absent = sorted(set(slots) - set(every))
    if absent:
        listed = ", ".join(map(str, absent))
        has = f"{every[0]} to {every[-1]}" if len(every) > 1 else str(every[0])
        plural = "s" if len(absent) > 1 else ""
        return f"{name} has no slot{plural} {listed}; it has {has}", ()
    if len(set(slots)) != len(slots):
        return "a slot is named twice; name it once", ()
    return None, tuple(sorted(slots))


def _slots(host: Host) -> tuple[int, ...]:
    return tuple(range(host.slots)) if host.gpus is None else host.gpus


def _spell(hosts: tuple[Host, ...]) -> str:
    return " + ".join(f"{host.name}:{host.slots}" for host in hosts)


def _count(faults: list[str]) -> str:
    return f"{len(faults)} fault{'s' if len(faults) > 1 else ''}"
