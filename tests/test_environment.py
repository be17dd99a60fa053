"""What travels to the ranks: an allow-list, secrets only by name, no value ever told."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.cluster.environment import (
    differing,
    fingerprint,
    foreign_deepspeed_env,
    forwarded,
    held_back,
    is_secret,
)

TRAVEL = {
    "NCCL_DEBUG": "INFO",
    "GLOO_SOCKET_IFNAME": "eth0",
    "OMP_NUM_THREADS": "8",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "PYTHONPATH": "/a b:/c",
    "HF_HOME": "/data/hf",
    "TOKENIZERS_PARALLELISM": "false",
    "DS_ACCELERATOR": "cpu",
}
STAY = {
    "PATH": "/bin",
    "HOME": "/root",
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "1",
    "TORCHELASTIC_RUN_ID": "x",
    "ACCELERATE_USE_DEEPSPEED": "true",
    "PET_NNODES": "2",
    "CUDA_VISIBLE_DEVICES": "0",
    "DS_ENV_FILE": "/x",
    "OMPI_COMM_WORLD_SIZE": "2",
    "NCCL-DEBUG": "INFO",
    "BASH_FUNC_x%%": "() { :; }",
}
SECRETS = {
    "HF_TOKEN": "hf_abc",
    "HF_HUB_TOKEN": "hf_def",
    "WANDB_API_KEY": "w",
    "AWS_SECRET_ACCESS_KEY": "s",
    "MY_PASSWORD": "p",
    "HF_ENDPOINT": "https://me:pass@hub.example.org",
}


def test_the_allow_list_travels_and_nothing_else() -> None:
    assert forwarded(TRAVEL | STAY | SECRETS) == dict(sorted(TRAVEL.items()))


@pytest.mark.parametrize(("name", "value"), SECRETS.items())
def test_a_secret_travels_only_when_it_is_named(name: str, value: str) -> None:
    assert is_secret(name, value)
    assert forwarded(SECRETS, [name]) == {name: value}


@pytest.mark.parametrize(
    "name", ["TOKENIZERS_PARALLELISM", "KEYBOARD", "PYTHONPATH", "NCCL_DEBUG", "OMP_NUM_THREADS"]
)
def test_a_name_that_only_resembles_a_secret_is_none(name: str) -> None:
    assert not is_secret(name, "https://hub.example.org/a@b")


@pytest.mark.parametrize("name", ["api_key", "HF_TOKEN_PATH", "SSH_KEYS", "DB_CREDENTIALS"])
def test_a_secret_is_known_by_any_word_of_its_name(name: str) -> None:
    assert is_secret(name)


def test_a_named_variable_travels_with_the_given_or_the_shells_value() -> None:
    given = forwarded({"LD_PRELOAD": "/x.so"}, ["LD_PRELOAD", "MODE=a=b c", "NCCL_ALGO="])
    assert given == {"LD_PRELOAD": "/x.so", "MODE": "a=b c", "NCCL_ALGO": ""}


def test_all_faults_of_env_come_together_and_tell_no_value() -> None:
    extra = ["ABSENT", "A-B=1", "RANK=0", "CUDA_VISIBLE_DEVICES", "HF_TOKEN=hidden", "X=1", "X=2"]
    with pytest.raises(ValueError) as caught:
        forwarded({}, extra)
    assert str(caught.value).split("\n") == [
        "6 faults in --env:",
        "  --env ABSENT: not set in this shell; export it first, or write --env ABSENT=VALUE",
        "  --env A-B: expected NAME or NAME=VALUE, with letters, digits and _ in the name",
        "  --env RANK: the launchers set it for each rank; leave it out",
        "  --env CUDA_VISIBLE_DEVICES: the launchers set it for each rank; choose GPUs with "
        "--include or --exclude",
        "  --env HF_TOKEN: a command line can be read by everybody on this machine; export "
        "HF_TOKEN in this shell and write --env HF_TOKEN",
        "  --env X: given twice; give it once",
    ]


def test_what_a_user_may_expect_to_travel_is_told_with_the_remedy_and_without_the_value() -> None:
    environ = {"HF_TOKEN": "hidden", "HF_HUB_TOKEN": "hidden", "CUDA_VISIBLE_DEVICES": "7"}
    assert held_back(environ, ["HF_HUB_TOKEN"]) == [
        "HF_TOKEN holds a secret and stays here; --env HF_TOKEN sends it",
        "CUDA_VISIBLE_DEVICES stays here; choose GPUs with --include or --exclude",
    ]


# ---- the same on every rank


def test_a_fingerprint_holds_short_hashes_of_what_must_be_equal_and_no_secret() -> None:
    found = fingerprint(TRAVEL | STAY | SECRETS)
    assert set(found) == {
        "NCCL_DEBUG",
        "CUDA_DEVICE_ORDER",
        "TORCH_NCCL_BLOCKING_WAIT",
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTHONPATH",
        "TOKENIZERS_PARALLELISM",
        "DS_ACCELERATOR",
    }
    assert all(len(value) == 12 for value in found.values())
    assert not set(found.values()) & set(TRAVEL.values())


@pytest.mark.parametrize(
    "name",
    ["NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "CUDA_VISIBLE_DEVICES"]
    + ["OMP_NUM_THREADS", "HF_HOME", "TRITON_CACHE_DIR", "CUDA_HOME", "UCX_NET_DEVICES"],
)
def test_what_may_differ_between_nodes_is_not_compared(name: str) -> None:
    assert fingerprint({name: "x"}) == {}


def test_equal_ranks_have_nothing_to_tell() -> None:
    assert differing([fingerprint(TRAVEL)] * 3) == []
    assert differing([]) == []


def test_a_difference_names_the_variable_and_the_ranks_and_never_the_value() -> None:
    ranks = [{"NCCL_ALGO": "Ring", "NCCL_DEBUG": "INFO", "PYTHONPATH": "/a"} for _ in range(8)]
    for rank in (4, 5, 7):
        ranks[rank]["NCCL_ALGO"] = "Tree"
    for rank in (0, 1, 2):
        del ranks[rank]["NCCL_DEBUG"]
    ranks[6]["PYTHONPATH"] = "/b"
    del ranks[7]["PYTHONPATH"]
    messages = differing([fingerprint(environ) for environ in ranks])
    assert messages == [
        "NCCL_ALGO: one value on ranks 0-3, 6, another on ranks 4-5, 7; set the same on every node",
        "NCCL_DEBUG: set on ranks 3-7, not set on ranks 0-2; set the same on every node",
        "PYTHONPATH: set on ranks 0-5, another on rank 6, not set on rank 7; set the same on every "
        "node",
    ]


# ---- files that DeepSpeed's launcher would merge


def test_no_foreign_file_is_nothing_to_tell(tmp_path: Path) -> None:
    assert foreign_deepspeed_env([tmp_path, tmp_path / "absent"]) == []


def test_a_foreign_file_is_told_with_its_names_and_bad_lines_and_without_values(
    tmp_path: Path,
) -> None:
    path = tmp_path / ".deepspeed_env"
    path.write_text('HF_TOKEN=hidden\n\n# note\n# A=1\nB=x"y\nC=a b\n')
    assert foreign_deepspeed_env([tmp_path, tmp_path]) == [
        f"{path} sets HF_TOKEN, B, C; line 2 crashes the launcher (no = in it); line 3 crashes the "
        "launcher (no = in it); line 4 breaks the command on every node (no variable's name); "
        "line 5 (B) is changed by the shell of every node; remove it, and send variables with --env"
    ]


def test_an_unreadable_foreign_file_is_told(tmp_path: Path) -> None:
    (tmp_path / ".deepspeed_env").mkdir()
    (message,) = foreign_deepspeed_env([tmp_path])
    assert "can't be read" in message
