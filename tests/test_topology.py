"""Topology: the table a wrong job gets, the device that is never guessed, errors all learn."""

from __future__ import annotations

import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from recipes.cluster.environment import fingerprint
from recipes.cluster.hostfile import Host
from recipes.engine import topology
from recipes.engine.peers import Peers
from recipes.engine.topology import (
    Launch,
    Row,
    check_device,
    check_launch,
    read_launch,
    refuse,
)
from recipes.outcome import JoiningError, NumbersError, PeerError, Stopped, TopologyError

HOSTS = (Host(name="worker-0", slots=4), Host(name="worker-1", slots=4))
ENVIRON = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}


# ---- what the launcher said


def test_the_launchers_variables() -> None:
    assert read_launch(ENVIRON, None) == Launch(rank=5, local_rank=1, world=8)
    assert read_launch(ENVIRON, 1) == Launch(rank=5, local_rank=1, world=8)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"RANK": ""}, "RANK not set: start with accelerate launch, torchrun or deepspeed"),
        ({"WORLD_SIZE": "eight"}, "WORLD_SIZE not set"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK not set"),
        ({"RANK": "", "LOCAL_RANK": "", "WORLD_SIZE": ""}, "RANK, LOCAL_RANK, WORLD_SIZE not set"),
    ],
)
def test_a_process_without_a_launcher_is_refused(change: dict[str, str], told: str) -> None:
    with pytest.raises(ValueError) as caught:
        read_launch(ENVIRON | change, None)
    assert str(caught.value).startswith(told)
    with pytest.raises(ValueError, match="RANK, LOCAL_RANK, WORLD_SIZE not set"):
        read_launch({}, None)


def test_a_local_rank_that_contradicts_the_launcher_is_refused() -> None:
    with pytest.raises(ValueError, match="--local_rank=0 but LOCAL_RANK=1; leave --local_rank out"):
        read_launch(ENVIRON, 0)


# ---- the table


def test_rows_that_agree_are_let_through() -> None:
    refuse([Row(what="a", found="1", expected="1")], ["never told"])
    refuse([], [])


def test_the_whole_table_with_every_number_and_reason() -> None:
    rows = [
        Row(what="processes: Accelerate", found="1", expected="8"),
        Row(what="rank", found="0", expected="0"),
        Row(what="distributed type", found="NO", expected="DEEPSPEED"),
    ]
    with pytest.raises(TopologyError) as caught:
        refuse(rows, ["no backend was chosen", "another job's variables are set"])
    assert str(caught.value).split("\n") == [
        "the job that started is not the job that was asked for:",
        "",
        "  what                   found  expected ",
        "  processes: Accelerate  1      8          <-- differs",
        "  rank                   0      0        ",
        "  distributed type       NO     DEEPSPEED  <-- differs",
        "",
        "likely reason: no backend was chosen; or another job's variables are set",
    ]


def test_the_launch_is_compared_with_the_hostfile() -> None:
    eight = Launch(rank=0, local_rank=0, world=8)
    check_launch(eight, HOSTS, "hostfile")
    check_launch(Launch(rank=0, local_rank=0, world=3), None, None)  # none was given
    with pytest.raises(TopologyError) as caught:
        check_launch(Launch(rank=0, local_rank=0, world=4), HOSTS, "my/hosts")
    text = str(caught.value)
    assert "processes (my/hosts: worker-0:4 + worker-1:4)  4      8         <-- differs" in text
    assert "do not match my/hosts; or a machine is missing from the launch" in text


# ---- the environment


def test_an_environment_that_differs_is_told_by_name_and_rank() -> None:
    same = fingerprint({"NCCL_DEBUG": "WARN"})
    topology.check_environment([same] * 3)
    with pytest.raises(TopologyError) as caught:
        topology.check_environment([same, fingerprint({"NCCL_DEBUG": "INFO"}), same])
    assert str(caught.value) == (
        "the ranks were started with different environments:\n"
        "  NCCL_DEBUG: one value on ranks 0, 2, another on rank 1; set the same on every node"
    )


def test_the_start_compares_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for Accelerate and the gather of two ranks: one process is all there is here."""

    class Kind:
        value = "MULTI_CPU"

    class Alone:
        num_processes, process_index, distributed_type = 1, 0, Kind

    def gathered(value: Any, world: int) -> list[Any]:
        return [value, other] if isinstance(value, dict) else [value]

    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setattr(topology, "_gather", gathered)
    launch = Launch(rank=0, local_rank=0, world=1)
    other = fingerprint(os.environ)
    assert list(topology.check_world(Alone(), launch, "DDP", None).values()) == [1]
    other = fingerprint({**os.environ, "NCCL_DEBUG": "INFO"})
    with pytest.raises(TopologyError, match="NCCL_DEBUG: one value on rank 0, another on rank 1"):
        topology.check_world(Alone(), launch, "DDP", None)


# ---- ranks that don't meet


@pytest.mark.parametrize(
    ("said", "likely"),
    [
        ("The server socket has failed to listen", "another job uses this port"),
        ("Unable to find address for: eth9", "no such network interface (GLOO_SOCKET_IFNAME=eth9)"),
    ],
)
def test_ranks_that_do_not_meet_are_told_why(said: str, likely: str) -> None:
    environ = {"MASTER_ADDR": "worker-0", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth9"}
    with pytest.raises(JoiningError) as caught, topology.joining(environ):
        raise RuntimeError(said)
    assert f"did not come together at worker-0:29500: {said}" in str(caught.value)
    assert likely in str(caught.value)
    with pytest.raises(TopologyError, match="^as it is$"), topology.joining(environ):
        raise TopologyError("as it is")


# ---- the device


@pytest.mark.parametrize(
    ("strategy_cpu", "environ"),
    [
        (True, {}),
        (None, {"DS_ACCELERATOR": "cpu"}),
        (None, {"ACCELERATE_USE_CPU": "True"}),
        (None, {"ACCELERATE_USE_CPU": "true"}),
        (None, {"CUDA_VISIBLE_DEVICES": ""}),
        (None, {"CUDA_VISIBLE_DEVICES": "-1"}),
        (None, {"CUDA_VISIBLE_DEVICES": "-1,-1"}),
    ],
)
def test_the_cpu_is_used_where_it_was_asked_for(
    strategy_cpu: bool | None, environ: dict[str, str]
) -> None:
    assert check_device(strategy_cpu, environ, False) is True
    with pytest.raises(TopologyError, match="hide it with CUDA_VISIBLE_DEVICES=-1"):
        check_device(strategy_cpu, environ, True)


@pytest.mark.parametrize("environ", [{"DS_ACCELERATOR": "cpu"}, {"CUDA_VISIBLE_DEVICES": ""}])
def test_a_file_that_asks_for_gpus_is_not_overruled_by_a_variable(environ: dict[str, str]) -> None:
    assert check_device(False, environ, True) is False
    with pytest.raises(TopologyError, match="no GPU that torch can use"):
        check_device(False, environ, False)


@pytest.mark.parametrize("strategy_cpu", [False, None])
@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"DS_ACCELERATOR": "cuda"},
        {"ACCELERATE_USE_CPU": "False"},
        {"CUDA_VISIBLE_DEVICES": "0"},
        {"CUDA_VISIBLE_DEVICES": "0,1,2,3"},
    ],
)
def test_without_a_word_about_the_cpu_a_gpu_is_needed(
    strategy_cpu: bool | None, environ: dict[str, str]
) -> None:
    assert check_device(strategy_cpu, environ, True) is False
    with pytest.raises(TopologyError) as caught:
        check_device(strategy_cpu, environ, False)
    text = str(caught.value)
    assert "device  no GPU that torch can use  cuda" in text
    assert "accelerate_configs/local_*.yaml, or set DS_ACCELERATOR=cpu" in text


# ---- errors that every rank learns


class Together(Peers):
    """Peers of one process: threads that exchange values over a barrier, without torch."""

    def __init__(self, rank: int, barrier: threading.Barrier, values: list[Any]) -> None:
        self.rank, self.world = rank, barrier.parties
        self.meeting, self.values = barrier, values

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value; a rank that never comes breaks the barrier after ten seconds."""
        self.values[self.rank] = value
        self.meeting.wait()
        values = list(self.values)
        self.meeting.wait()
        return values


def on_all_ranks(act: Any, world: int = 3) -> list[Any]:
    """`act` on every rank at once: its value, or its error."""
    barrier, values = threading.Barrier(world, timeout=10), [None] * world

    def one(rank: int) -> Any:
        try:
            return act(Together(rank, barrier, values))
        except (ValueError, RuntimeError, OSError) as error:
            return error

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(one, range(world)))


def fail(error: Exception) -> Any:
    """Raise from an expression."""
    raise error


def test_what_the_first_rank_made_is_on_every_rank() -> None:
    made = []

    def act(peers: Peers) -> Any:
        return peers.from_first(lambda: made.append(peers.rank) or {"rank": peers.rank})

    assert on_all_ranks(act) == [{"rank": 0}] * 3
    assert made == [0]  # and nobody else did the work


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("bad key"), 2),
        (TopologyError("four, not eight"), 3),
        (NumbersError("nan"), 4),
        (Stopped("at 7"), 75),
        (OSError("disk"), 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
@pytest.mark.parametrize("way", ["from_first", "together"])
def test_an_error_of_one_rank_ends_all_with_its_exit_code(
    way: str, error: Exception, code: int
) -> None:
    def act(peers: Peers) -> Any:
        if way == "from_first":
            return peers.from_first(lambda: fail(error))
        return peers.together(lambda: fail(error) if peers.rank == 0 else "fine")

    own, *others = on_all_ranks(act)
    assert own is error  # the rank that found it raises the very error
    for other in others:
        assert isinstance(other, PeerError)
        assert (str(other), other.code) == (f"rank 0: {error}", code)


def test_together_gives_each_rank_its_own_value() -> None:
    assert on_all_ranks(lambda peers: peers.together(lambda: peers.rank * 10)) == [0, 10, 20]
    assert on_all_ranks(lambda peers: peers.together(lambda: None)) == [None] * 3


def test_of_two_errors_the_first_ranks_is_told_and_only_once() -> None:
    def act(peers: Peers) -> Any:
        return peers.together(
            lambda: fail(ValueError(f"row {peers.rank}")) if peers.rank else "fine"
        )

    fine, first, second = on_all_ranks(act)
    assert isinstance(first, ValueError) and str(first) == "row 1"  # printed by the rank itself
    for peer in (fine, second):  # and by nobody else
        assert isinstance(peer, PeerError)
        assert (str(peer), peer.code) == ("rank 1: row 1", 2)


def test_an_error_in_between_leaves_the_ranks_in_step() -> None:
    def act(peers: Peers) -> Any:
        with contextlib.suppress(ValueError, PeerError):
            peers.together(lambda: fail(ValueError("once")) if peers.rank == 1 else None)
        peers.barrier()
        return peers.from_first(lambda: "on we go")

    assert on_all_ranks(act) == ["on we go"] * 3
