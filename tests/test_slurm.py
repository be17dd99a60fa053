"""The Slurm script, run by bash with stand-ins for Slurm and accelerate: there is no Slurm here.

The stand-in for srun runs each task with its SLURM_NODEID, side by side, and hands back the highest
exit code, as srun does; the one for accelerate notes its words and plays ranks.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "recipes" / "cluster" / "pretrain.sbatch"
ODD = ["name=a b", "x=it's", 'y="q"', "z=$HOME", "w={a: [1, 2]}", "v=`id`", "u=a\\b"]

SCONTROL = """#!/bin/sh
echo "$@" >> scontrol.log
if [ "$1 $2" = "show hostnames" ]; then echo "$3" | tr , '\\n'; fi
"""
SRUN = """#!{python}
import os, subprocess, sys
words = sys.argv[1:]
options = dict(word.split("=", 1) for word in words[: words.index("bash")])
with open("srun.log", "a") as log:
    log.write(repr(options) + "\\n")
assert options["--ntasks"] == options["--nodes"] and options["--ntasks-per-node"] == "1"
tasks = []
for node in range(int(options["--nodes"])):
    env = os.environ | {{"SLURM_NODEID": str(node), "SLURM_PROCID": str(node)}}
    out = open(options["--output"].replace("%n", str(node)), "a")
    words_of_task = words[words.index("bash"):]
    tasks.append(subprocess.Popen(words_of_task, env=env, stdout=out, stderr=out))
sys.exit(max(task.wait() for task in tasks))
"""
# Two ranks, each of which ends as PLAY says: with a code, or with 75 when it is signalled. A
# launcher that is signalled itself would leave a file.
ACCELERATE = """#!{python}
import json, os, signal, subprocess, sys
node = os.environ["SLURM_NODEID"]
json.dump([sys.argv[1:], os.getcwd()], open(f"words-{{node}}.json", "w"))
signal.signal(signal.SIGTERM, lambda *_: open("launcher-was-signalled", "w"))
RANK = '''
import json, os, pathlib, signal, sys, time
rank, code = int(sys.argv[1]), sys.argv[2]
folder = pathlib.Path(os.environ["STATUS"])
folder.mkdir(parents=True, exist_ok=True)
def end(code):
    record = dict(exit_code=code, time=time.time() + rank)
    (folder / f"rank-{{rank}}.json").write_text(json.dumps(record))
    sys.exit(code)
told = [False]
signal.signal(signal.SIGTERM, lambda *_: told.__setitem__(0, True))
if code != "wait":
    end(int(code))
pathlib.Path(f"ready-{{rank}}").touch()
while not told[0] and not pathlib.Path("agreed").exists():  # the ranks agree at the next window
    time.sleep(0.02)
pathlib.Path("agreed").touch()
end(75)
'''
ranks = [int(node) * 2 + local for local in (0, 1)]
plays = os.environ["PLAY"].split()
children = [subprocess.Popen([sys.executable, "-c", RANK, str(r), plays[r]]) for r in ranks]
sys.exit(1 if any([child.wait() for child in children]) else 0)
"""


def tool(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def submit(tmp_path: Path) -> Path:
    """A repository's root to submit from, with stand-ins first on PATH."""
    for name in ("recipes", "accelerate_configs", "ds_configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "tiny.yaml").write_text((ROOT / "recipes/runs/stdlib.yaml").read_text())
    venv = tmp_path / ".venv" / "bin"
    tool(venv / "python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    tool(venv / "accelerate", ACCELERATE.format(python=sys.executable))
    tool(tmp_path / "tools" / "scontrol", SCONTROL)
    tool(tmp_path / "tools" / "srun", SRUN.format(python=sys.executable))
    return tmp_path


def begin(submit: Path, words: list[str], play: str = "0 0 0 0", **env: str) -> Any:
    # Slurm runs a copy of the script, from a folder of its own.
    copy = submit / "spool" / "slurm_script"
    copy.parent.mkdir(exist_ok=True)
    shutil.copy(SCRIPT, copy)
    own = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    own |= {"PATH": f"{submit / 'tools'}:{os.environ['PATH']}", "PLAY": play}
    own |= {"STATUS": str(submit / "outputs" / "stdlib" / "status")}
    own |= {"SLURM_SUBMIT_DIR": str(submit), "SLURM_JOB_ID": "12345678"}
    own |= {"SLURM_JOB_NODELIST": "node7,node9", "SLURM_GPUS_ON_NODE": "2"}
    return subprocess.Popen(
        ["bash", str(copy), *words],
        cwd="/",
        env=own | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: Any) -> tuple[int, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out + err


def words_of(submit: Path, node: int) -> list[str]:
    words, folder = json.loads((submit / f"words-{node}.json").read_text())
    assert folder == str(submit)
    return words


def test_every_node_runs_this_command_with_its_number(submit: Path) -> None:
    code, text = finish(begin(submit, ["tiny.yaml", "optim.lr=3e-4"]))
    assert (code, text) == (0, "")
    job = "outputs/slurm/12345678"
    for node in (0, 1):
        assert (
            words_of(submit, node)
            == (
                "launch --config_file accelerate_configs/zero1_fp16.yaml --num_machines 2"
                f" --num_processes 4 --machine_rank {node} --main_process_ip node7"
                " --main_process_port 29678 --deepspeed_multinode_launcher standard"
                f" recipes/pretrain.py tiny.yaml optim.lr=3e-4 --hostfile {job}/hostfile"
            ).split()
        )
        assert (submit / job / f"node-{node}.log").is_file()
    assert (submit / job / "hostfile").read_text() == "node7 slots=2\nnode9 slots=2\n"
    assert "requeue" not in (submit / "scontrol.log").read_text()


def test_accelerate_reads_the_command_as_it_is_meant(submit: Path) -> None:
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    finish(begin(submit, ["tiny.yaml"], ARM="zero1_bf16"))
    words = words_of(submit, 1)
    words[words.index("--config_file") + 1] = str(ROOT / "accelerate_configs/zero1_bf16.yaml")
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(words[1:]))
    assert (args.num_machines, args.num_processes, args.machine_rank) == (2, 4, 1)
    assert (args.main_process_ip, args.main_process_port) == ("node7", 29678)
    assert args.deepspeed_multinode_launcher == "standard"
    assert args.deepspeed_config_file == "ds_configs/zero1_bf16.json"


def test_arguments_reach_every_node_unharmed(submit: Path) -> None:
    # The run file's own reader would refuse these keys.
    tool(submit / ".venv/bin/python", f'#!/bin/sh\ncat > /dev/null; echo "{submit}/s"\n')
    code, text = finish(begin(submit, ["tiny.yaml", *ODD, "--fresh"]))
    assert code == 0, text
    for node in (0, 1):
        words = words_of(submit, node)
        at = words.index("tiny.yaml")
        assert words[at + 1 : -2] == [*ODD, "--fresh"]


def test_a_job_that_comes_back_does_not_start_afresh(submit: Path) -> None:
    code, text = finish(begin(submit, ["tiny.yaml", "--fresh"], SLURM_RESTART_COUNT="1"))
    assert code == 0, text
    assert "--fresh" not in words_of(submit, 0)


def test_the_number_of_ranks_can_be_given_where_there_are_no_gpus(submit: Path) -> None:
    one = {"SLURM_GPUS_ON_NODE": "", "RANKS_PER_NODE": "2", "SLURM_JOB_NODELIST": "node7"}
    code, text = finish(begin(submit, ["tiny.yaml"], **one))
    assert code == 0, text
    assert "--num_machines 1 --num_processes 2" in " ".join(words_of(submit, 0))
    assert not (submit / "words-1.json").exists()


def test_before_the_limit_the_ranks_save_and_the_job_goes_back_into_the_queue(
    submit: Path,
) -> None:
    process = begin(submit, ["tiny.yaml"], "wait wait wait wait")
    end = time.monotonic() + 30
    while not all((submit / f"ready-{rank}").exists() for rank in range(4)):
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGUSR1)  # as --signal=B:USR1 has Slurm do it
    code, text = finish(process)
    assert (code, text) == (75, "saved; job 12345678 goes back into the queue\n")
    assert (submit / "scontrol.log").read_text().split("\n")[-2] == "requeue 12345678"
    assert not (submit / "launcher-was-signalled").exists()


@pytest.mark.parametrize(
    ("play", "expected"),
    [
        ("75 75 75 0", 1),  # not every rank saved
        ("1 75 75 75", 1),
        ("3 2 1 1", 3),  # the first cause
        ("1 1 4 1", 4),
        ("1 1 1 1", 1),
    ],
)
def test_a_failure_gives_the_first_cause_and_does_not_go_back(
    play: str, expected: int, submit: Path
) -> None:
    code, _ = finish(begin(submit, ["tiny.yaml"], play))
    assert code == expected
    assert "requeue" not in (submit / "scontrol.log").read_text()


def test_an_earlier_starts_status_is_no_reason_to_come_back(submit: Path) -> None:
    status = submit / "outputs" / "stdlib" / "status"
    status.mkdir(parents=True)
    for rank in range(4):
        record = {"exit_code": 75, "time": 1.0}
        (status / f"rank-{rank}.json").write_text(json.dumps(record))
    tool(submit / ".venv/bin/accelerate", "#!/bin/sh\nexit 1\n")  # no rank ever starts
    assert finish(begin(submit, ["tiny.yaml"]))[0] == 1
    assert "requeue" not in (submit / "scontrol.log").read_text()


@pytest.mark.parametrize(
    ("words", "env", "told"),
    [
        ([], {}, "no run file"),
        (["absent.yaml"], {}, "absent.yaml can't be read"),
        (["tiny.yaml", "optim.lr=fast"], {}, "optim.lr='fast': expected a valid number"),
        (["tiny.yaml"], {"ARM": "zero9"}, "ARM=zero9: there is no accelerate_configs/zero9.yaml"),
        (["tiny.yaml"], {"SLURM_GPUS_ON_NODE": ""}, "no GPU here"),
        (["tiny.yaml"], {"SLURM_SUBMIT_DIR": "/tmp"}, "no recipes/pretrain.py in /tmp"),
        (["tiny.yaml"], {"SLURM_JOB_NODELIST": ""}, "scontrol names no host"),
    ],
)
def test_what_is_wrong_is_told_before_a_node_works(
    words: list[str], env: dict[str, str], told: str, submit: Path
) -> None:
    code, text = finish(begin(submit, words, **env))
    assert code == 2
    assert told in text
    assert not (submit / "srun.log").exists()


def test_slurm_signals_the_script_alone_and_ahead_of_the_limit() -> None:
    text = SCRIPT.read_text()
    assert re.search(r"(?m)^#SBATCH --signal=B:USR1@600$", text)
    assert re.search(r"(?m)^#SBATCH --requeue$", text)
    first = text.index("set -u")
    assert text.rindex("#SBATCH") < first  # Slurm reads no option after the first command
