"""Which environment variables travel to the ranks, and whether the ranks have the same.

An allow-list travels, through a private file. Names that hold a secret travel only when they are
named, and no value of one is ever told.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

PREFIXES = (
    *("NCCL_", "OFI_NCCL_", "GLOO_", "UCX_", "FI_"),  # the network
    *("OMP_", "MKL_", "KMP_", "CUDA_", "TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "TRITON_"),
    *("HF_", "TOKENIZERS_", "TRANSFORMERS_"),
)
NAMES = (
    *("DS_ACCELERATOR", "PYTHONPATH", "PYTHONWARNINGS", "PYTHONFAULTHANDLER", "PYTHONHASHSEED"),
    "CUBLAS_WORKSPACE_CONFIG",
)
# Which interface leads to the other nodes, for gloo and for NCCL.
INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
# Each process has its own, from its launcher or from the choice of slots.
PER_PROCESS = re.compile(
    r"(LOCAL_|GROUP_|ROLE_|NODE_|CROSS_)?(RANK|WORLD_SIZE|SIZE)|MASTER_(ADDR|PORT)|ROLE_NAME"
    r"|(TORCHELASTIC|PET|ACCELERATE|FSDP|PARALLELISM_CONFIG|OCTET)_.*"
    r"|CUDA_VISIBLE_DEVICES|DS_ENV_FILE"
)
_SECRET = re.compile(
    r"(^|_)\w*(TOKENS?|KEYS?|SECRETS?|PASSWORDS?|PASSWD|PASSPHRASE|CREDENTIALS?)(_|$)"
)
_WITH_PASSWORD = re.compile(r"[a-z][a-z0-9+.-]*://[^/@\s]*:[^/@\s]*@", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
# May differ between nodes without harm: interfaces and devices, places on disk, numbers of cores.
_PER_NODE = re.compile(
    r".*(_IFNAME|_HCA|_DEVICES?|_DEVICE_NAME|_DOMAIN|_HOME|_DIR|_CACHE|_PATH|_FILE|_NUM_THREADS)"
    r"|OMP_PLACES|OMP_PROC_BIND|KMP_AFFINITY|TORCH_ELASTIC_.*"
)


def is_secret(name: str, value: str = "") -> bool:
    """Whether a variable holds a secret: by a word of its name, or a password inside a URL."""
    return bool(_SECRET.search(name.upper()) or _WITH_PASSWORD.match(value))


def is_allowed(name: str) -> bool:
    """Whether a variable is on the allow-list, secret or not."""
    listed = name in NAMES or name.startswith(PREFIXES)
    return listed and not PER_PROCESS.fullmatch(name) and bool(_NAME.fullmatch(name))


def forwarded(environ: Mapping[str, str], extra: Sequence[str] = ()) -> dict[str, str]:
    """What travels to every rank: the allow-list of this shell, and what `--env` names.

    Args:
        extra: `NAME`, taken from `environ`, or `NAME=VALUE`. Only here can a secret be named.

    Raises:
        ValueError: all faults of `extra` together, without any value.
    """
    found = {k: v for k, v in environ.items() if is_allowed(k) and not is_secret(k, v)}
    faults: list[str] = []
    seen: set[str] = set()
    for item in extra:
        name, equals, value = item.partition("=")
        fault = _extra_fault(name, value, environ, given=bool(equals), again=name in seen)
        seen.add(name)
        if fault:
            faults.append(f"--env {name}: {fault}")
        else:
            found[name] = value if equals else environ[name]
    if faults:
        count = f"{len(faults)} fault{'s' if len(faults) > 1 else ''}"
        raise ValueError(f"{count} in --env:\n" + "\n".join(f"  {f}" for f in faults))
    return dict(sorted(found.items()))


def _extra_fault(
    name: str, value: str, environ: Mapping[str, str], *, given: bool, again: bool
) -> str | None:
    if not _NAME.fullmatch(name):
        return "expected NAME or NAME=VALUE, with letters, digits and _ in the name"
    if again:
        return "given twice; give it once"
    if name == "CUDA_VISIBLE_DEVICES":
        return "the launchers set it for each rank; choose GPUs with --include or --exclude"
    if PER_PROCESS.fullmatch(name):
        return "the launchers set it for each rank; leave it out"
    if given and is_secret(name, value):
        return (
            f"a command line can be read by everybody on this machine; export {name} in this shell "
            f"and write --env {name}"
        )
    if not given and name not in environ:
        way = "" if is_secret(name) else f", or write --env {name}=VALUE"
        return f"not set in this shell; export it first{way}"
    return None


def held_back(environ: Mapping[str, str], extra: Sequence[str] = ()) -> list[str]:
    """What a user may expect to travel and does not, each with the remedy; never a value."""
    named = {item.partition("=")[0] for item in extra}
    notes = [
        f"{name} holds a secret and stays here; --env {name} sends it"
        for name, value in sorted(environ.items())
        if is_allowed(name) and is_secret(name, value) and name not in named
    ]
    if "CUDA_VISIBLE_DEVICES" in environ:
        notes.append("CUDA_VISIBLE_DEVICES stays here; choose GPUs with --include or --exclude")
    return notes


def fingerprint(environ: Mapping[str, str]) -> dict[str, str]:
    """A short hash of every variable that must be the same on all ranks; no secrets."""
    return {
        name: hashlib.sha256(value.encode("utf-8", "surrogateescape")).hexdigest()[:12]
        for name, value in sorted(environ.items())
        if is_allowed(name) and not is_secret(name, value) and not _PER_NODE.fullmatch(name)
    }


def differing(fingerprints: Sequence[Mapping[str, str]]) -> list[str]:
    """One message for each variable that is not the same on all ranks: its name and the ranks.

    Args:
        fingerprints: of `fingerprint`, in the order of the ranks.
    """
    messages = []
    for name in sorted({name for known in fingerprints for name in known}):
        ranks: dict[str | None, list[int]] = {}
        for rank, known in enumerate(fingerprints):
            ranks.setdefault(known.get(name), []).append(rank)
        if len(ranks) == 1:
            continue
        unset = ranks.pop(None, None)
        parts = [f"one value on {_spell(ranks.pop(next(iter(ranks))))}"]
        parts += [f"another on {_spell(others)}" for others in ranks.values()]
        if unset is not None:
            parts = [parts[0].replace("one value", "set"), *parts[1:]]
            parts.append(f"not set on {_spell(unset)}")
        messages.append(f"{name}: {', '.join(parts)}; set the same on every node")
    return messages


def _spell(ranks: Iterable[int]) -> str:
    """Ranks in few words: `ranks 0-3, 6`."""
    runs = []
    for _, run in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0]):
        numbers = [rank for _, rank in run]
        runs.append(str(numbers[0]) + (f"-{numbers[-1]}" if len(numbers) > 1 else ""))
    many = len(runs) > 1 or "-" in runs[0]
    return f"rank{'s' if many else ''} {', '.join(runs)}"


def foreign_deepspeed_env(folders: Iterable[Path]) -> list[str]:
    """Files that DeepSpeed's launcher would merge into the job unasked: what they name, no values.

    It takes `.deepspeed_env` from the home and from the working directory (unless DS_ENV_FILE names
    another file), crashes on a line without `=`, and puts every other line on the command line of
    each node, where a shell reads it.
    """
    messages = []
    for path in dict.fromkeys(folder / ".deepspeed_env" for folder in folders):
        try:
            lines = path.read_text(encoding="utf-8").split("\n")
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError) as error:
            messages.append(f"{path}: can't be read ({error}); remove it")
            continue
        names, faults = _look_at(lines[:-1] if lines[-1] == "" else lines)
        text = f"{path} sets {', '.join(dict.fromkeys(names)) or 'nothing'}"
        text += "".join(f"; {fault}" for fault in faults)
        messages.append(f"{text}; remove it, and send variables with --env")
    return messages


def _look_at(lines: list[str]) -> tuple[list[str], list[str]]:
    names, faults = [], []
    for number, line in enumerate(lines, 1):
        name, equals, value = line.partition("=")
        name, value = name.strip(), value.strip()
        if not equals:
            faults.append(f"line {number} crashes the launcher (no = in it)")
        elif not _NAME.fullmatch(name):
            faults.append(f"line {number} breaks the command on every node (no variable's name)")
        else:
            names.append(name)
            if re.search(r'["$`\\%]', value):
                faults.append(f"line {number} ({name}) is changed by the shell of every node")
    return names, faults
