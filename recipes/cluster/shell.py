"""Words on their way through shells: what passes unharmed, and how the rest is written.

`deepspeed`, and `accelerate` with pdsh, paste arguments and variables into one line that pdsh
rewrites (%h, %n, %u) and a shell on every node reads again; `torchrun` and `accelerate` hand
arguments on as a list, but take them for templates ($$, $local_rank).
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from string import Template

PLAIN_CHARACTERS = "letters, digits and _ @ + = : , . / -"
_PLAIN = re.compile(r"[A-Za-z0-9_@+:,./-][A-Za-z0-9_@+=:,./-]*", re.ASCII)
# What a shell changes between double quotes, which DeepSpeed writes around such a value.
_IN_QUOTES = re.compile(r'([\\"$`])')


def is_plain(word: str) -> bool:
    """Whether any shell, and pdsh, leaves a word as it is."""
    return bool(_PLAIN.fullmatch(word))


def for_template(word: str) -> str:
    """The word that torch's launcher, which substitutes $ in arguments, turns into this one."""
    if Template(word).safe_substitute(local_rank="") == word:
        return word
    return word.replace("$", "$$")


def argument_line(argument: str) -> str:
    """An argument as a line of the file that `@FILE` names: JSON where plain text would not do."""
    ordinary = argument.isprintable() and argument and argument[0] not in "\"@ '"
    return argument if ordinary and argument.isascii() else json.dumps(argument)


def read_argument_line(line: str) -> list[str]:
    """The argument of a line of such a file; for `ArgumentParser.convert_arg_line_to_args`.

    Raises:
        ValueError: a line that begins with a double quote is not a JSON string.
    """
    if not line.startswith('"'):
        return [line] if line else []
    try:
        return [str(json.loads(line))]
    except json.JSONDecodeError as error:
        raise ValueError(f"argument file: {line!r} is no JSON string: {error}") from error


def deepspeed_env_line(name: str, value: str) -> str:
    """A line of the file DS_ENV_FILE that gives a variable this value on every node.

    DeepSpeed strips the value and puts it between double quotes as it is if it has to; pdsh and a
    shell read the outcome.

    Raises:
        ValueError: the value holds a line break, which such a file can't carry.
    """
    if any(end in value for end in "\n\r\0"):
        raise ValueError(
            f"{name} holds a line break, which can't travel through DeepSpeed's variables file; "
            "unset it, or use --launcher accelerate or torchrun"
        )
    text = re.sub("%(?=[%hnu])", "%%", value)
    if re.search(r"[^\w@%+=:,./-]", text):  # DeepSpeed's own condition for quotes
        text = _IN_QUOTES.sub(r"\\\1", text)
    if text != text.strip():
        text = f'""{text}""'  # empty strings at both ends protect the blanks from strip
    return f"{name}={text}"


def assignments(env: Mapping[str, str]) -> list[str]:
    """`NAME=value` before a command, quoted."""
    return [f"{name}={shlex.quote(value)}" for name, value in sorted(env.items())]


def with_values(words: list[str]) -> list[str]:
    """A command's words, quoted, an option and its value together."""
    parts: list[str] = []
    for word in words:
        if parts and parts[-1].startswith("--") and " " not in parts[-1] and word[:2] != "--":
            parts[-1] += f" {shlex.quote(word)}"
        else:
            parts.append(shlex.quote(word))
    return parts


def continued(parts: list[str], indent: str = "") -> str:
    """One command over lines of about 100 characters; all but the first are indented."""
    lines = [""]
    for part in parts:
        if lines[-1] and len(lines[-1]) + len(part) > 95:
            lines.append("" if indent else "    ")
        lines[-1] += ("" if lines[-1].strip() == "" else " ") + part
    return indent + f" \\\n{indent}".join(lines)


def here_document(path: Path, lines: Iterable[str]) -> str:
    """Shell text that writes a file which only its owner can read."""
    folder, file = shlex.quote(str(path.parent)), shlex.quote(str(path))
    body = "".join(f"{line}\n" for line in lines)
    return (
        f"mkdir -p {folder} && rm -f {file} && (umask 077 && cat > {file}) <<'END_OF_FILE'\n"
        f"{body}END_OF_FILE\n"
    )
