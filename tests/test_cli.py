"""The `octet` command: what it takes and refuses, and that the documents use it rightly."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT

from recipes import cli
from recipes.cluster import asking, launch_job
from recipes.preflight import preflight as checking
from recipes.rehearsal import namespaces

DOCUMENTS = [
    ROOT / "README.md",
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / "recipes").glob("*/*.yaml"),
]
XL = ["--config", "accelerate_configs/zero1_fp16.yaml", "recipes/runs/gpt2_xl.yaml"]


def written() -> list[tuple[str, list[str]]]:
    """Every `octet` command in a document, with the document's name."""
    found = []
    for path in DOCUMENTS:
        text = re.sub(r"(?m)^#\s?", "", path.read_text(encoding="utf-8"))
        for block in re.findall(r"(?ms)^```\w*\n(.*?)^```", text) or [text]:
            for line in re.sub(r"\\\n\s*", " ", block).splitlines():
                if re.match(rf"\s*octet ({'|'.join(cli.VERBS)}) ", line) and "…" not in line:
                    found.append((path.name, shlex.split(line, comments=True)[1:]))
    return found


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What would have been started, by verb; nothing is."""
    got: list[Any] = []
    monkeypatch.chdir(ROOT)

    def launch(asked: asking.Asked, wishes: launch_job.Wishes, echo: Any) -> int:
        got.append((asking.read(asked, launch_job.SCRIPT), wishes))
        return 0

    def preflight(asked: asking.Asked, wishes: checking.Wishes) -> int:
        got.append((asking.read(asked, checking.SCRIPT), wishes))
        return 0

    def rehearse(hosts: Any, command: list[str], bandwidth: str | None, local: list[str]) -> int:
        got.append((hosts, command, bandwidth, local))
        return 0

    monkeypatch.setattr(launch_job, "launch", launch)
    monkeypatch.setattr(checking, "preflight", preflight)
    monkeypatch.setattr(namespaces, "rehearse", rehearse)
    return got


def test_commands_are_found() -> None:
    assert {"README.md", "multi_node.md", "rehearsal.yaml"} <= {name for name, _ in written()}


@pytest.mark.parametrize(("place", "words"), written())
def test_a_command_of_a_document_is_taken(
    calls: list[Any],
    place: str,
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if words[0] == "sync":
        return  # it would ask the hosts; its options are those of every verb
    if words[0] in ("checkpoint", "export", "evaluate", "generate"):
        monkeypatch.chdir(tmp_path)  # no run is here, so each is taken and says what it misses
        assert cli.main(words) == 2
        named = words[2:] if words[0] == "checkpoint" else words[1:2]
        text = capsys.readouterr().err
        assert any(name in text for name in named), text
        return
    assert cli.main(words) == 0, capsys.readouterr().err
    if words[0] == "rehearse" and calls[0][1][0] == "octet":
        assert cli.main(calls[0][1][1:]) == 0, capsys.readouterr().err


def test_help_loads_neither_torch_nor_the_engine() -> None:
    program = (
        "import sys\nfrom recipes.cli import VERBS, main\n"
        "assert main(['--help']) == 0\n"
        "for verb in VERBS:\n"
        "    try:\n        main([verb, '--help'])\n"
        "    except SystemExit as end:\n        assert end.code == 0\n"
        "heavy = {'torch', 'transformers', 'accelerate', 'deepspeed'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for verb in ("launch", "preflight", "rehearse", "sync"):
        assert f"usage: octet {verb}" in done.stdout


def test_a_verb_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lunch"]) == 2
    assert "octet: no command 'lunch'; did you mean launch?" in capsys.readouterr().err
    assert cli.main([]) == 2


def test_options_and_overrides_in_any_order(calls: list[Any]) -> None:
    words = [
        "launch",
        "--port",
        "29501",
        XL[2],
        "optim.lr=1e-4",
        *XL[:2],
        "sample.prompt=b c",
        "--fresh",
    ]
    assert cli.main([*words, "--env", "NCCL_DEBUG=INFO", "--restarts", "2"]) == 0
    [(ready, wishes)] = calls
    assert ready.asked.overrides == ("optim.lr=1e-4", "sample.prompt=b c")
    assert (ready.asked.port, wishes.fresh, wishes.restarts) == (29501, True, 2)
    assert ready.env["NCCL_DEBUG"] == "INFO"
    assert [host.slots for host in ready.hosts] == [4, 4]


def test_every_fault_of_a_command_at_once(
    calls: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hosts").write_text("a slots=2\na slots=2\nbob@b slots=x\n")
    words = ["launch", "--hostfile", str(tmp_path / "hosts"), "--config", "none.yaml"]
    assert cli.main([*words, "none.yml", "--env", "NO_SUCH", "--port", "70000"]) == 2
    told = capsys.readouterr().err
    for part in ("a stands here twice", "user and port", "none.yaml", "none.yml", "NO_SUCH"):
        assert part in told, told
    assert "--port 70000" in told
    assert cli.main(["launch", *XL, "--restarts", "-1", "--heartbeat", "1", "--grace", "nan"]) == 2
    told = capsys.readouterr().err
    for name in ("--restarts=-1", "--heartbeat=1", "--grace=nan"):
        assert name in told
    assert not calls


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["launch", *XL[:2]], "name a run file, e.g. recipes/runs/gpt2_xl.yaml"),
        (["launch", *XL, "--hostfile", "five"], "5 ranks can't share batch.global_sequences=768"),
        (["preflight", *XL, "--hostfile", "five"], "legal ranks: 1 2 3 4 6 8"),
        (["launch", *XL, "--hostfile", "local"], "localhost in line 1 of the hostfile"),
        (["preflight", "--only", "network"], "--only network measures with ranks: give --config"),
        (["preflight", *XL, "--only", "network", "--no-ranks"], "not --no-ranks"),
        (["preflight", "optim.lr=1"], "optim.lr=1"),
        (["rehearse", "ls"], "ls: the command stands after --"),
        (["launch", *XL, "--include", "worker-0,worker-1"], "join hosts with @: worker-0@worker-1"),
        (["launch", "--config", XL[2], XL[1]], "is a run file; expected one of accelerate_configs"),
        (["launch", "--config", "ds_configs/zero1_fp16.json", XL[2]], "is DeepSpeed's JSON;"),
        (["launch", *XL, "name=a b"], "name='a b': expected letters, digits"),
        (["launch", *XL, "--env", "MY_TOKEN"], "not set in this shell; export it first"),
    ],
)
def test_what_can_not_work_is_told_before_any_host_is_asked(
    tmp_path: Path,
    words: list[str],
    told: str,
    calls: list[Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "five").write_text("a slots=5\n")
    (tmp_path / "local").write_text("localhost slots=2\nworker-1 slots=2\n")
    words = [str(tmp_path / word) if word in ("five", "local") else word for word in words]
    assert cli.main(words) == 2
    found = capsys.readouterr().err
    assert told in found
    assert "VALUE" not in found
    assert not calls


def test_a_record_that_could_not_be_written_is_told_first(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("a slots=1\n")
    asked = asking.Asked(hostfile=str(hosts))
    with pytest.raises(ValueError, match="--json .*x.json can't be written"):
        checking.preflight(asked, checking.Wishes(json=str(tmp_path / "no" / "such" / "x.json")))


def test_a_terminal_that_knows_few_characters_is_no_obstacle() -> None:
    for words in (["--help"], ["launch", "--help"]):
        done = subprocess.run(
            [sys.executable, "-m", "recipes.cli", *words],
            cwd=ROOT,
            env=os.environ | {"PYTHONIOENCODING": "ascii"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert "usage: octet" in done.stdout


def test_a_dry_run_prints_and_starts_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_TOKEN", "s3cr3t")
    assert cli.main(["launch", *XL, "--dry-run", "--env", "HF_TOKEN"]) == 0
    text = capsys.readouterr().out
    assert text.count("accelerate launch") == 2
    assert "--machine_rank 1 --main_process_ip worker-0" in text
    assert f"--hostfile {ROOT / 'hostfile'}" in text
    assert "s3cr3t" not in text
    assert cli.main(["launch", *XL, "--dry-run", "--include", "worker-1:0,1"]) == 0
    text = capsys.readouterr().out
    assert "--num_processes 2" in text
    assert "CUDA_VISIBLE_DEVICES=0,1" in text
    assert "--hostfile" not in text  # it names more than is started


def test_a_command_to_rehearse_stands_behind_dashes(calls: list[Any]) -> None:
    words = ["rehearse", "--bandwidth", "1gbit", "--local", "/scratch"]
    assert cli.main([*words, "--", "octet", "launch", "--port", "1", "--", "x"]) == 0
    [(hosts, command, bandwidth, local)] = calls
    assert command == ["octet", "launch", "--port", "1", "--", "x"]
    assert (len(hosts), bandwidth, local) == (2, "1gbit", ["/scratch"])
