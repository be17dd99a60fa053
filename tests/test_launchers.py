"""The launchers' commands: literal ones, and what the launchers themselves read out of them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import starts
from starts import CHOSEN, DDP, TWO, ZERO1, every, start

from recipes.cluster.hostfile import Host
from recipes.cluster.launchers import (
    LAUNCHERS,
    Start,
    commands,
    device_env,
    faults,
    launcher_environment,
    notes,
    pasteable,
    read_arm,
    script_arguments,
)
from recipes.cluster.shell import is_plain

ROOT = Path(__file__).resolve().parent.parent
ODD = ("say=a b", "it's", 'a"b', "$HOME", "$$x", "${local_rank}", "$local_rank", "{a: [1, 2]}")
ODD += ("`id`", "a\nb", "a\\b", "%n", "*", "ü", "~", "a;b&c|d>e", "", "  ", "!x", "#x")


# ---- literal commands


def test_accelerate_is_started_on_every_host_with_its_number() -> None:
    head = (
        "/repo/.venv/bin/accelerate launch --config_file /repo/accelerate_configs/zero1_fp16.yaml"
    )
    head += " --num_machines 2 --num_processes 8 --machine_rank"
    tail = " --main_process_ip 10.0.0.1 --main_process_port 29500"
    tail += " --deepspeed_config_file /repo/ds_configs/zero1_fp16.json"
    tail += " --deepspeed_multinode_launcher standard"
    tail += " /repo/recipes/pretrain.py recipes/runs/gpt2_xl.yaml optim.lr=3e-4"
    assert commands(start("accelerate")) == {
        "worker-0": f"{head} 0{tail}".split(),
        "worker-1": f"{head} 1{tail}".split(),
    }


def test_deepspeed_is_started_on_the_first_host_only() -> None:
    words = "/repo/.venv/bin/deepspeed --hostfile /repo/hostfile --include"
    words += " worker-0:0,2@worker-1:1,3 --master_addr 10.0.0.1 --master_port 29500"
    words += " /repo/recipes/pretrain.py recipes/runs/gpt2_xl.yaml optim.lr=3e-4"
    words += " --deepspeed_config /repo/ds_configs/zero1_fp16.json"
    assert commands(start("deepspeed", hosts=CHOSEN)) == {"worker-0": words.split()}


def test_torchrun_takes_hosts_of_different_size() -> None:
    hosts = (Host(name="a", slots=2), Host(name="b", slots=3))
    words = commands(start("torchrun", DDP, hosts))
    head = "/repo/.venv/bin/torchrun --nnodes 2 --nproc_per_node"
    assert words["a"][:8] == f"{head} 2 --node_rank 0 --master_addr".split()
    assert words["b"][:8] == f"{head} 3 --node_rank 1 --master_addr".split()
    assert words["b"][-2:] == ["--accelerate_config", "/repo/accelerate_configs/ddp_fp16.yaml"]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_dry_run_prints_what_stands_in_the_golden_file(launcher: str) -> None:
    path = Path(__file__).parent / "golden" / f"{launcher}.txt"
    assert starts.golden(launcher) == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("key", every())
def test_what_is_pasted_holds_the_very_words_of_the_supervised_start(key: Any) -> None:
    text = pasteable(every()[key], {}, {}, starts.WORK).replace("\\\n", " ")
    for words in commands(every()[key]).values():
        assert shlex.join(words) in " ".join(text.split())


def test_every_arm_is_started_by_every_launcher_in_every_shape_but_ddp_by_pdsh() -> None:
    assert len(every()) == 4 * 2 * 4 - 4


# ---- what the real launchers read out of the words


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    for name in ("RANK", "WORLD_SIZE", "PYTHONPATH", "PET_NNODES"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def real(tmp_path: Path) -> Iterator[Any]:
    """Makes a start's paths real files, since the launchers read them."""

    def make(one: Start) -> Start:
        arm = read_arm(
            Path(f"accelerate_configs/{one.arm.path.name}"),
            ROOT,
        )
        arm = replace(arm, cpu=one.arm.cpu)
        hostfile = tmp_path / "hostfile"
        hostfile.write_text("".join(f"{h.name} slots=4\n" for h in one.hosts))
        return replace(one, arm=arm, hostfile=hostfile, port=29519)

    yield make


def by_torch(words: list[str]) -> tuple[Any, list[str]]:
    """torchrun's own view: its launch configuration, and what a rank of it would run."""
    from torch.distributed.elastic.utils import macros
    from torch.distributed.run import config_from_args, get_args_parser

    args = words if not isinstance(words, list) else get_args_parser().parse_args(words[1:])
    config, _, arguments = config_from_args(args)
    return config, macros.substitute(arguments, "1")


def by_accelerate(words: list[str]) -> tuple[Any, list[str], dict[str, str]]:
    """Accelerate's own view: torchrun's (or the `deepspeed` command), and the ranks' variables."""
    import torch.distributed.run as torchrun
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import (
        _filter_args,
        prepare_deepspeed_cmd_env,
        prepare_multi_gpu_env,
    )

    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(words[2:]))
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ""
        command, env = prepare_deepspeed_cmd_env(args)
        if command is not None:
            return None, command, env
    else:
        assert args.multi_gpu
        env = prepare_multi_gpu_env(args)
    told = ["--training_script", args.training_script, "--training_script_args"]
    told.append(args.training_script_args)
    config, arguments = by_torch(_filter_args(args, torchrun.get_args_parser(), told))
    return config, arguments, env


def by_deepspeed(words: list[str]) -> tuple[Any, dict[str, list[int]]]:
    """DeepSpeed's own view: its arguments, and the slots it starts ranks on."""
    from deepspeed.launcher import runner

    args = runner.parse_args(words[1:])
    pool = runner.fetch_hostfile(args.hostfile)
    active = runner.parse_inclusion_exclusion(pool, args.include, args.exclude)
    return args, runner.apply_num_nodes_and_gpus(active, args.num_nodes, args.num_gpus)


def check_torch(config: Any, one: Start, number: int) -> None:
    assert (config.min_nodes, config.max_nodes) == (len(one.hosts), len(one.hosts))
    assert config.nproc_per_node == one.hosts[number].slots
    assert config.rdzv_backend == "static"  # ranks follow the order of the hosts
    assert config.rdzv_configs["rank"] == number
    assert config.rdzv_endpoint == f"{one.address}:{one.port}"
    assert config.max_restarts == 0


def check_deepspeed(words: list[str], one: Start) -> None:
    args, active = by_deepspeed(words)
    assert list(active) == [host.name for host in one.hosts]
    expected = [list(host.gpus or range(host.slots)) for host in one.hosts]
    assert list(active.values()) == expected
    assert (args.master_addr, args.master_port) == (one.address, one.port)
    assert args.user_script == str(one.script)
    assert tuple(args.user_args) == one.arguments
    assert args.launcher == "pdsh"


@pytest.mark.parametrize("odd", [False, True], ids=["", "odd arguments"])
@pytest.mark.parametrize("key", every(), ids=lambda key: ", ".join(key))
def test_the_real_launcher_starts_these_ranks_there(key: Any, odd: bool, real: Any) -> None:
    one = real(every()[key])
    if odd:
        one = replace(one, arguments=(*ODD, "x=$$"))
    for number, words in enumerate(commands(one).values()):
        if one.launcher == "deepspeed":
            check_deepspeed(words, one)
            continue
        if one.launcher == "torchrun":
            config, arguments = by_torch(words)
        else:
            config, arguments, env = by_accelerate(words)
            expected = "DEEPSPEED" if env.get("ACCELERATE_USE_DEEPSPEED") == "true" else "DDP"
            assert expected == one.arm.kind
            told = env.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
            assert told == (str(one.arm.deepspeed_json) if one.arm.deepspeed_json else None)
        if one.by_pdsh:
            check_deepspeed(arguments, one)
            continue
        check_torch(config, one, number)
        assert arguments[-len(one.arguments) - 1 :] == [str(one.script), *one.arguments]


def test_without_the_word_standard_accelerate_would_start_pdsh(real: Any) -> None:
    words = commands(real(start("accelerate")))["worker-0"]
    at = words.index("--deepspeed_multinode_launcher")
    yaml = words[words.index("--config_file") + 1]
    text = Path(yaml).read_text().replace("  deepspeed_multinode_launcher: standard\n", "")
    other = real(start("accelerate")).hostfile.with_name("other.yaml")
    other.write_text(text)
    words = [str(other) if word == yaml else word for word in words]
    assert by_accelerate(words)[0] is not None
    assert by_accelerate(words[:at] + words[at + 2 :])[1][0] == "deepspeed"


# ---- devices and the launchers' environment


def test_the_ranks_of_chosen_gpus_see_only_those() -> None:
    chosen = {"worker-0": "0,2", "worker-1": "1,3"}
    for launcher in ("accelerate", "torchrun"):
        found = device_env(start(launcher, hosts=CHOSEN))
        assert found == {host: {"CUDA_VISIBLE_DEVICES": ids} for host, ids in chosen.items()}
    for launcher in ("accelerate-pdsh", "deepspeed"):  # DeepSpeed's launcher does that
        assert device_env(start(launcher, hosts=CHOSEN)) == {"worker-0": {}, "worker-1": {}}


def test_a_start_on_the_cpu_hides_every_gpu() -> None:
    one = start("accelerate", replace(ZERO1, cpu=True), CHOSEN)
    hidden = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "-1"}
    assert device_env(one) == {"worker-0": hidden, "worker-1": hidden}
    assert device_env(start("accelerate")) == {"worker-0": {}, "worker-1": {}}


def test_a_launcher_starts_without_secrets_and_without_what_a_shell_would_change() -> None:
    import sys

    environ = {"HOME": "/root", "LANG": "C.UTF-8", "LC_ALL": "C", "SSH_AUTH_SOCK": "/tmp/s"}
    environ |= {"PDSH_SSH_ARGS_APPEND": "-F /x", "DS_ACCELERATOR": "cpu"}
    other = {"HF_TOKEN": "hidden", "NCCL_DEBUG": "INFO", "PDSH_KEY": "hidden", "TZ": 'a"b'}
    other |= {"USER": "a$b", "PYTHONPATH": "/x", "RANK": "1", "TMPDIR": "/t%n", "PET_NNODES": "9"}
    path = {"PATH": "/usr/bin::/o$d:/bin"}
    own = str(Path(sys.executable).parent)
    assert launcher_environment(environ | other | path) == environ | {
        "PATH": f"{own}:/usr/bin:/bin"
    }


# ---- what can't be started


def test_unequal_hosts_are_refused_under_accelerate_with_their_lines() -> None:
    hosts = (Host(name="a", slots=4, line=3), Host(name="b", slots=2, line=5))
    for launcher in ("accelerate", "accelerate-pdsh"):
        assert faults(start(launcher, hosts=hosts)) == [
            f"--launcher {launcher} starts equally many ranks on every host, these differ: "
            "a slots=4 (line 3), b slots=2 (line 5); choose equally many with --include, or use "
            "--launcher torchrun or deepspeed"
        ]
    assert faults(start("deepspeed", hosts=hosts)) == []


def test_all_faults_of_a_start_come_together() -> None:
    hosts = (*TWO, Host(name="c", slots=1, line=9))
    one = replace(start("accelerate-pdsh", DDP, hosts), port=0, master="127.0.0.1")
    found = faults(replace(one, script=Path("/my code/pretrain.py")))
    assert [text[:24] for text in found] == [
        "--launcher accelerate-pd",
        "--launcher accelerate-pd",
        "--port 0: expected 1 to ",
        "--master 127.0.0.1: ever",
        "script '/my code/pretrai",
    ]
    assert faults(start("acelerate"))[0].startswith(
        "--launcher acelerate: did you mean accelerate? expected one of accelerate, "
    )
    assert faults(replace(one, hosts=()))[0].startswith("no host is left")
    assert "expected a host name or an IPv4" in faults(replace(start("torchrun"), master="::1"))[0]


@pytest.mark.parametrize("launcher", ["accelerate", "torchrun"])
def test_a_path_that_no_shell_reads_may_hold_anything(launcher: str) -> None:
    assert faults(replace(start(launcher), script=Path("/it's my code/$x.py"))) == []


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_supervised_start_puts_nothing_on_a_command_line_that_a_shell_would_change(
    launcher: str,
) -> None:
    rank = replace(start(launcher), script=Path("/repo/recipes/cluster/rank.py"))
    rank = replace(rank, arguments=("/tmp/octet-me-20260101-1a2b/job.json",))
    assert faults(rank, supervised=True) == []
    assert all(is_plain(word) for words in commands(rank).values() for word in words)


@pytest.mark.parametrize("launcher", ["accelerate-pdsh", "deepspeed"])
@pytest.mark.parametrize("odd", [word for word in ODD if word])
def test_a_path_that_a_second_shell_would_change_is_refused(launcher: str, odd: str) -> None:
    path = Path(f"/w/{odd}/x")
    arm = replace(ZERO1, path=path, deepspeed_json=path)
    one = replace(start(launcher, arm), script=path, python=path, hostfile=path)
    told = faults(replace(one, arguments=(str(path),)), supervised=True)
    assert [text.split(repr(str(path)))[0].strip() for text in told] == [
        *("interpreter", "script", "hostfile", "--config", "DeepSpeed config", "argument"),
    ]
    assert all("a symbolic link helps" in text for text in told)
    with pytest.raises(ValueError, match="a symbolic link helps"):
        pasteable(one, {}, {}, starts.WORK)
    with pytest.raises(ValueError, match="working directory"):
        pasteable(start(launcher), {}, {}, path)


def test_what_the_hostfile_overrides_in_the_yaml_is_told() -> None:
    stated = {"num_machines": 2, "num_processes": 16, "deepspeed_multinode_launcher": "standard"}
    arm = replace(ZERO1, stated=tuple(stated.items()))
    assert notes(start("accelerate-pdsh", arm)) == [
        f"num_processes=16 in {arm.path} is overridden: the hostfile makes it 8",
        f"deepspeed_multinode_launcher=standard in {arm.path} is overridden: "
        "--launcher accelerate-pdsh makes it pdsh",
    ]
    assert notes(start("torchrun", arm)) == []
    assert notes(start("accelerate", replace(arm, stated=()))) == []


def test_the_script_is_told_the_arm_where_the_launcher_is_not() -> None:
    assert script_arguments("accelerate", ZERO1) == script_arguments("accelerate-pdsh", DDP) == ()
    for launcher in ("deepspeed", "torchrun"):
        assert script_arguments(launcher, DDP) == ("--accelerate_config", str(DDP.path))
        told = script_arguments(launcher, ZERO1)
        assert told == ("--deepspeed_config", str(ZERO1.deepspeed_json))
