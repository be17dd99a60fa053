"""Arguments and variables of any kind arrive unharmed: real shells, real launchers, no GPU."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some
from starts import CHOSEN, DDP, start

from recipes.cluster.hostfile import Host
from recipes.cluster.launchers import Start, pasteable
from recipes.cluster.shell import (
    argument_line,
    deepspeed_env_line,
    for_template,
    is_plain,
    read_argument_line,
)

ROOT = Path(__file__).resolve().parent.parent
ODD = ("say=a b", "it's", 'a"b', "$HOME", "$$x", "${local_rank}", "{a: [1, 2]}", "`id`", "a\nb")
ODD += ("a\\b", "%n%h%%n", "*", "ü \u2028", "~", "a;b&c|d>e", "", "  ", "!x", "#x", "'q'")
VALUES = {
    "NCCL_A": "a b",
    "NCCL_B": 'it\'s "$HOME" `id` \\ {x} %n %% ; & | > * ~ #',
    "NCCL_C": " blanks at both ends ",
    "NCCL_D": "plain",
    "NCCL_E": "$$",
    "NCCL_F": "",
    "PYTHONPATH": "/a b:/c",
}
DUMP = """#!{python}
import json, os, sys
with open(os.environ["DUMP"] + "." + os.environ.get("RANK", "x"), "w") as file:
    json.dump([sys.argv[1:], dict(os.environ)], file)
"""
SCRIPT = """
import argparse, json, os, sys
sys.path.insert(0, {root!r})
from recipes.cluster.shell import read_argument_line
parser = argparse.ArgumentParser(fromfile_prefix_chars="@")
parser.convert_arg_line_to_args = read_argument_line
parser.add_argument("--local_rank")
parser.add_argument("words", nargs="*")
words = parser.parse_args().words
with open({dump!r} + "." + os.environ["RANK"], "w") as file:
    json.dump([words, dict(os.environ), os.getcwd(), sys.argv], file)
"""
# As sshd does it: a fresh environment, and the words, joined, to a shell.
SSH = """#!{python}
import os, subprocess, sys
words = sys.argv[1:]
while words[0].startswith("-"):
    del words[: 2 if words[0] in ("-o", "-p", "-l", "-F") else 1]
with open({log!r}, "a") as file:
    file.write(" ".join(words) + "\\n")
env = {{"HOME": "/", "PATH": "/usr/bin:/bin"}}
sys.exit(subprocess.run(["sh", "-c", " ".join(words[1:])], env=env).returncode)
"""


def tool(path: Path, text: str, **values: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.format(python=sys.executable, **values))
    path.chmod(0o755)


def paste(text: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    given = {"PATH": os.environ["PATH"], "HOME": "/root"} | env
    return subprocess.run(
        ["bash", "-c", text], env=given, capture_output=True, text=True, timeout=300
    )


def sections(text: str) -> list[str]:
    """What is pasted on each host."""
    parts = text.split("\n# on ")
    return [parts[0], *("# on " + part for part in parts[1:])]


def dumped(path: Path, rank: str = "x") -> Any:
    return json.loads(path.with_name(f"{path.name}.{rank}").read_text())


# ---- launchers that no second shell follows


@pytest.mark.parametrize("launcher", ["accelerate", "torchrun", "deepspeed"])
def test_a_pasted_text_hands_on_every_argument_and_variable(launcher: str, tmp_path: Path) -> None:
    work = tmp_path / "my $work's"
    work.mkdir()
    tool(work / "bin" / launcher, DUMP)
    hosts = CHOSEN[:1] if launcher == "deepspeed" else CHOSEN
    one = replace(start(launcher, DDP, hosts), arguments=ODD, python=work / "bin" / "python")
    env = VALUES | {"HF_TOKEN": "hidden", "NCCL_G": "line\nbreak"}
    node_env = {"worker-1": {"GLOO_SOCKET_IFNAME": "eth 1"}}
    text = pasteable(one, env, node_env, work)
    assert "hidden" not in text
    parts = sections(text)
    assert len(parts) == len(hosts)
    for number, part in enumerate(parts):
        done = paste(part, {"DUMP": str(tmp_path / "dump"), "HF_TOKEN": "from the shell"})
        assert done.returncode == 0, done.stderr
        words, seen = dumped(tmp_path / "dump")
        arguments = words[-len(ODD) :]
        expected = list(ODD) if launcher == "deepspeed" else [for_template(word) for word in ODD]
        assert arguments == expected
        assert {name: seen[name] for name in env} == env | {"HF_TOKEN": "from the shell"}
        assert seen.get("GLOO_SOCKET_IFNAME") == ("eth 1" if number else None)
        assert seen["PWD"] == str(work)


def test_a_secret_that_the_shell_does_not_hold_stops_the_pasted_command(tmp_path: Path) -> None:
    tool(tmp_path / "bin" / "torchrun", DUMP)
    one = replace(start("torchrun", DDP), python=tmp_path / "bin" / "python")
    text = sections(pasteable(one, {"HF_TOKEN": "hidden"}, {}, tmp_path))[0]
    done = paste(text, {"DUMP": str(tmp_path / "dump")})
    assert done.returncode != 0
    assert "HF_TOKEN: export it in this shell first" in done.stderr
    assert not list(tmp_path.glob("dump*"))


# ---- launchers that lead through pdsh, ssh and a second shell


def cluster(folder: Path, launcher: str) -> Start:
    """Two hosts that a stand-in for ssh leads to, with the real launchers and the real pdsh."""
    tool(folder / "tools" / "ssh", SSH, log=str(folder / "ssh.log"))
    (folder / "script.py").write_text(
        SCRIPT.format(root=str(ROOT), dump=str(folder / "dump")), encoding="utf-8"
    )
    (folder / "hostfile").write_text("a slots=1\nb slots=1\n")
    (folder / "arm.yaml").write_text(
        "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: ds.json}\n"
    )
    (folder / "ds.json").write_text("{}")
    one = start(launcher, hosts=(Host(name="a", slots=1), Host(name="b", slots=1)))
    arm = replace(one.arm, path=folder / "arm.yaml", deepspeed_json=folder / "ds.json", cpu=True)
    return replace(
        one,
        arm=arm,
        hostfile=folder / "hostfile",
        python=Path(sys.executable),
        script=folder / "script.py",
        port=29533,
        arguments=ODD,
    )


@pytest.mark.skipif(shutil.which("pdsh") is None, reason="pdsh is missing: apt-get install pdsh")
@pytest.mark.parametrize("launcher", ["deepspeed", "accelerate-pdsh"])
def test_through_pdsh_every_argument_and_variable_arrives(launcher: str, tmp_path: Path) -> None:
    one = cluster(tmp_path, launcher)
    own = {"WANDB_API_KEY": "of this shell", "MY_OWN": "1"}
    node_env = {"a": {"GLOO_SOCKET_IFNAME": "eth0"}, "b": {"GLOO_SOCKET_IFNAME": "eth1"}}
    text = pasteable(one, VALUES | {"HF_TOKEN": "hidden"}, node_env, tmp_path)
    assert "hidden" not in text
    assert "# HF_TOKEN is not in this text: " in text
    assert "# GLOO_SOCKET_IFNAME is not in this text: it differs between hosts" in text
    path = f"{tmp_path / 'tools'}:{os.environ['PATH']}"
    done = paste(text, own | {"PATH": path})
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in ("0", "1"):
        words, seen, folder, argv = dumped(tmp_path / "dump", rank)
        assert words == list(ODD)
        assert {name: seen.get(name) for name in VALUES} == VALUES
        assert (seen["WORLD_SIZE"], seen["MASTER_ADDR"], seen["MASTER_PORT"]) == (
            *("2", "10.0.0.1", "29533"),
        )
        assert folder == str(tmp_path)
        assert seen["DS_ACCELERATOR"] == "cpu"
        assert not {"HF_TOKEN", "WANDB_API_KEY", "GLOO_SOCKET_IFNAME"} & set(seen)
        if launcher == "accelerate-pdsh":
            assert "MY_OWN" not in seen
            assert seen["ACCELERATE_DEEPSPEED_CONFIG_FILE"] == str(tmp_path / "ds.json")
        assert all(is_plain(word) for word in argv)
    assert "of this shell" not in (tmp_path / "ssh.log").read_text()
    files = list((tmp_path / "outputs" / ".launch").iterdir())
    assert len(files) == 2
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)


def test_plain_arguments_need_no_file(tmp_path: Path) -> None:
    text = pasteable(start("deepspeed"), {}, {}, Path("/repo"))
    assert text.split("\n") == [
        "# on worker-0, from where pdsh reaches the others",
        "cd /repo &&",
        "DS_ENV_FILE=/dev/null \\",
        "/repo/.venv/bin/deepspeed --hostfile /repo/hostfile --master_addr 10.0.0.1 --master_port 29500 \\",  # noqa: E501
        "    /repo/recipes/pretrain.py recipes/runs/gpt2_xl.yaml optim.lr=3e-4 \\",
        "    --deepspeed_config /repo/ds_configs/zero1_fp16.json",
        "",
    ]


def test_a_line_break_in_a_variable_is_refused_where_it_cannot_travel() -> None:
    with pytest.raises(ValueError, match="NCCL_A holds a line break, which can't travel"):
        pasteable(start("deepspeed"), {"NCCL_A": "a\nb"}, {}, Path("/repo"))


# ---- the files


@given(some.lists(some.text()))
def test_a_file_of_arguments_gives_back_every_argument(arguments: list[str]) -> None:
    text = "".join(f"{argument_line(argument)}\n" for argument in arguments)
    assert text.isascii()
    parser = argparse.ArgumentParser()
    parser.convert_arg_line_to_args = read_argument_line  # type: ignore[method-assign]
    found = [a for line in text.splitlines() for a in parser.convert_arg_line_to_args(line)]
    assert found == arguments


def test_a_file_of_arguments_is_read_as_a_person_writes_it() -> None:
    assert argument_line("sample.prompt=it's $5 {a}") == "sample.prompt=it's $5 {a}"
    assert read_argument_line("optim.lr = 1") == ["optim.lr = 1"]
    assert read_argument_line("") == []
    with pytest.raises(ValueError, match="is no JSON string"):
        read_argument_line('"open')


@given(some.text(some.characters(exclude_characters="\n\r\0", exclude_categories=["Cs"])))
def test_a_line_of_variables_survives_deepspeeds_quotes(value: str) -> None:
    import re

    line = deepspeed_env_line("A", value) + "\n"
    key, found = line.split("=", maxsplit=1)  # as deepspeed/launcher/runner.py reads it
    found = found.strip()
    if re.search(r"[^\w@%+=:,./-]", found):
        found = f'"{found}"'
    assert key == "A"
    inner = found[1:-1] if found.startswith('"') else found
    inner = inner.removeprefix('""').removesuffix('""')
    assert re.sub(r"\\([\\\"$`])", r"\1", inner).replace("%%", "%") == value.replace("%%", "%")
