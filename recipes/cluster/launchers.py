"""The existing launchers' commands for a hostfile and an arm; nothing is started here.

commands(start)         what each host must run, as lists of words that no shell needs to read
pasteable(start, ...)   the same for a person, as shell text
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from recipes.cluster.arm import Arm, arm_env, read_arm
from recipes.cluster.environment import is_secret
from recipes.cluster.shell import (
    argument_line,
    assignments,
    continued,
    deepspeed_env_line,
    for_template,
    here_document,
    is_plain,
    with_values,
)
from recipes.cluster.starting import LAUNCHERS, Start, faults, notes, script_arguments

__all__ = ["LAUNCHERS", "Arm", "Start", "arm_env", "commands", "device_env", "faults"]
__all__ += ["launcher_environment", "notes", "pasteable", "read_arm", "script_arguments"]

# A launcher needs itself and ssh, and nothing of what the user's shell knows besides.
LAUNCHER_NAMES = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR"),
    *("LD_LIBRARY_PATH", "SSH_AUTH_SOCK", "KRB5CCNAME", "XDG_RUNTIME_DIR", "DS_ACCELERATOR"),
)
LAUNCHER_PREFIXES = ("LC_", "PDSH_")
_UNSAFE_VALUE = re.compile(r'["$`\\%\n\r]')


def device_env(start: Start) -> dict[str, dict[str, str]]:
    """By host: the variables that choose its devices, for launcher and ranks.

    DeepSpeed's launcher chooses GPUs itself, by `--include`; there is nothing to say then.
    """
    chooses = start.by_pdsh or start.launcher == "deepspeed"
    return {
        host.name: {"CUDA_VISIBLE_DEVICES": ",".join(map(str, host.gpus))}
        if host.gpus is not None and not start.arm.cpu and not chooses
        else arm_env(start.arm)
        for host in start.hosts
    }


def commands(start: Start) -> dict[str, list[str]]:
    """By host: the words to run there, in rank order; the first host only where pdsh does the rest.

    Ranks follow the hostfile's order, since every rendezvous is static.
    """
    if start.launcher == "deepspeed":
        return {start.hosts[0].name: _deepspeed(start)}
    if start.by_pdsh:
        return {start.hosts[0].name: _accelerate(start, 0)}
    build = _torchrun if start.launcher == "torchrun" else _accelerate
    return {host.name: build(start, number) for number, host in enumerate(start.hosts)}


def _accelerate(start: Start, number: int) -> list[str]:
    world = sum(host.slots for host in start.hosts)
    words = [str(start.python.parent / "accelerate"), "launch", "--config_file"]
    words += [str(start.arm.path), "--num_machines", str(len(start.hosts))]
    words += ["--num_processes", str(world)]
    if len(start.hosts) > 1:
        words += ["--machine_rank", str(number), "--main_process_ip", start.address]
    words += ["--main_process_port", str(start.port)]
    if start.arm.deepspeed_json is not None:  # absolute, wherever the launcher is started
        words += ["--deepspeed_config_file", str(start.arm.deepspeed_json)]
    if start.by_pdsh:
        words += ["--deepspeed_multinode_launcher", "pdsh"]
        words += ["--deepspeed_hostfile", str(start.hostfile)]
        chosen = _inclusion(start)
        words += ["--deepspeed_inclusion_filter", chosen] if chosen else []
    elif start.arm.kind == "DEEPSPEED" and len(start.hosts) > 1:  # Accelerate's default is pdsh
        words += ["--deepspeed_multinode_launcher", "standard"]
    return words + _script(start, template=not start.by_pdsh)


def _deepspeed(start: Start) -> list[str]:
    words = [str(start.python.parent / "deepspeed"), "--hostfile", str(start.hostfile)]
    chosen = _inclusion(start)
    words += ["--include", chosen] if chosen else []
    if len(start.hosts) == 1:  # it starts the ranks itself, but would ask ssh for this host first
        words.append("--no_ssh_check")
    words += ["--master_addr", start.address, "--master_port", str(start.port)]
    return words + _script(start, template=False)


def _torchrun(start: Start, number: int) -> list[str]:
    words = [str(start.python.parent / "torchrun"), "--nnodes", str(len(start.hosts))]
    words += ["--nproc_per_node", str(start.hosts[number].slots)]
    if len(start.hosts) > 1:
        words += ["--node_rank", str(number), "--master_addr", start.address]
    words += ["--master_port", str(start.port)]
    return words + _script(start, template=True)


def _script(start: Start, *, template: bool) -> list[str]:
    words = [str(start.script), *start.arguments]
    return [for_template(word) for word in words] if template else words


def _inclusion(start: Start) -> str:
    """The selection in DeepSpeed's syntax; empty where none was made."""
    if all(host.gpus is None for host in start.hosts):
        return ""
    return "@".join(
        host.name if host.gpus is None else f"{host.name}:{','.join(map(str, host.gpus))}"
        for host in start.hosts
    )


def launcher_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment in which a launcher starts: what it and ssh need, no secret, nothing else.

    PATH with the interpreter's own folder first (Accelerate calls `deepspeed` by its bare name),
    HOME, USER, LOGNAME, SHELL, locale, time zone, TMPDIR, LD_LIBRARY_PATH (for the interpreter
    itself), the ssh agent and Kerberos tickets, PDSH_*, DS_ACCELERATOR. Accelerate writes all of it
    into DeepSpeed's variables file, and DeepSpeed exports it in the command line of every host,
    where a shell reads it: a value that a shell would change is left out.
    """
    kept = {
        name: value
        for name, value in environ.items()
        if (name in LAUNCHER_NAMES or name.startswith(LAUNCHER_PREFIXES))
        and not is_secret(name, value)
        and not _UNSAFE_VALUE.search(value)
    }
    own = str(Path(sys.executable).parent)
    path = [p for p in environ.get("PATH", os.defpath).split(os.pathsep) if p and p != own]
    safe = [part for part in path if not _UNSAFE_VALUE.search(part)]
    return kept | {"PATH": os.pathsep.join([own, *safe])}


def pasteable(
    start: Start,
    env: Mapping[str, str],
    node_env: Mapping[str, Mapping[str, str]],
    working_dir: Path,
) -> str:
    """What a person pastes into a shell on each host to start the job without `octet launch`.

    Variables stand before the command. A secret's value is not shown: it is taken from the shell
    that the text is pasted into. Where pdsh leads through a second shell, variables, and arguments
    that would not survive it, are put into private files first: DeepSpeed's DS_ENV_FILE, and a file
    of arguments that the script reads for `@FILE`.

    Args:
        env: for all ranks. node_env: more of it by host.

    Raises:
        ValueError: this start has faults, or a variable can't travel.
    """
    found = faults(start)
    if start.by_pdsh and not is_plain(str(working_dir)):
        found.append(
            f"working directory {str(working_dir)!r}: --launcher {start.launcher} changes to it "
            "through a shell on every host; use a path without such characters"
        )
    if found:
        raise ValueError("\n".join(found))
    devices = device_env(start)
    own = {
        h.name: dict(env) | devices[h.name] | dict(node_env.get(h.name, {})) for h in start.hosts
    }
    if start.by_pdsh:
        return _paste_once(start, own, working_dir)
    return "\n".join(
        f"# on {host}\ncd {shlex.quote(str(working_dir))} &&\n"
        + _exports(own[host])
        + _with_variables(own[host], words, start)
        for host, words in commands(start).items()
    )


def _exports(env: Mapping[str, str]) -> str:
    return "".join(
        f'export {name}="${{{name}:?export it in this shell first}}" &&\n'
        for name, value in sorted(env.items())
        if is_secret(name, value)
    )


def _with_variables(env: Mapping[str, str], words: list[str], start: Start) -> str:
    shown = continued(assignments({k: v for k, v in env.items() if not is_secret(k, v)}))
    script = len(words) - len(start.arguments) - 1
    launcher, rest = with_values(words[:script]), with_values(words[script:])
    return (
        f"{shown} \\\n" if shown else ""
    ) + f"{continued(launcher)} \\\n{continued(rest, '    ')}\n"


def _paste_once(start: Start, own: Mapping[str, Mapping[str, str]], working_dir: Path) -> str:
    """The text for launchers that reach the other hosts by pdsh."""
    folder = working_dir / "outputs" / ".launch"
    shared = dict(set.intersection(*(set(env.items()) for env in own.values())))
    names = sorted({name for env in own.values() for name in env})
    text = "".join(
        f"# {name} is not in this text: DeepSpeed would show a secret in every host's list of "
        "processes. octet launch sends it.\n"
        if any(is_secret(name, env.get(name, "")) for env in own.values())
        else f"# {name} is not in this text: it differs between hosts, and DeepSpeed gives all the "
        "same. octet launch sends it.\n"
        for name in names
        if name not in shared or is_secret(name, shared[name])
    )
    arguments = list(start.arguments)
    if not all(is_plain(word) for word in arguments):
        lines = [argument_line(word) for word in arguments]
        path = folder / f"arguments-{_digest(lines)}"
        text += f"# on each of {' '.join(own)}, or once where {working_dir} is shared\n"
        text += here_document(path, lines) + "\n"
        start = replace(start, arguments=(f"@{path}",))
    first, words = next(iter(commands(start).items()))
    text += f"# on {first}, from where pdsh reaches the others\ncd {working_dir} &&\n"
    sent = {k: v for k, v in sorted(shared.items()) if not is_secret(k, v)}
    lines = [deepspeed_env_line(name, value) for name, value in sent.items()]
    variables = Path("/dev/null")  # no file: nor is a .deepspeed_env that lies about merged
    if lines or start.launcher == "accelerate-pdsh":  # Accelerate appends its own to the file
        variables = folder / f"variables-{_digest([first, *lines])}"
        text += here_document(variables, lines).replace("\n", " &&\n", 1)
    settings = {"DS_ENV_FILE": str(variables)}
    settings |= {k: v for k, v in sent.items() if k == "DS_ACCELERATOR"}
    if start.launcher == "deepspeed":
        return text + _with_variables(settings, words, start)
    # Accelerate writes the whole environment into the file: it gets a small one.
    kept = ["HOME", "USER", "LOGNAME", "LANG", "SSH_AUTH_SOCK", "KRB5CCNAME", "LD_LIBRARY_PATH"]
    kept += ["TMPDIR", "PDSH_SSH_ARGS_APPEND"]
    quoted = [f'${{{name}+{name}="${name}"}}' for name in kept]
    settings |= {k: v for k, v in sent.items() if k == "PYTHONPATH"}
    text += continued([f'env -i PATH={start.python.parent}:"$PATH"', *quoted]) + " \\\n"
    return text + _with_variables(settings, words, start)


def _digest(lines: list[str]) -> str:
    """A name for a file by what is in it, so that two jobs do not share one by chance."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:8]
