"""What the plan says of an update's traffic, against the real engine's: counted, and on the wire.

All arms of a number of ranks run in one start (tests/drivers/traffic.py).
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import nursery
import pytest
import rehearsing

from recipes.planner import buckets, traffic
from recipes.planner.families import shape_of
from recipes.planner.hardware import Nic, read_hardware
from recipes.planner.shape import Shape
from recipes.planner.transfer import Op, Transfer, ring_share
from recipes.planner.workload import Candidate, Cluster, Precision, Strategy, Workload

GPU = read_hardware().gpu("a100-80gb")
NIC = Nic(name="nic", source="test", bits_per_s=100e9)
# tests/drivers/traffic.py's model and buckets.
SHAPE = shape_of(
    {
        "model_type": "gpt2",
        "n_layer": 4,
        "n_embd": 256,
        "n_head": 4,
        "n_positions": 16,
        "vocab_size": 64,
    },
    "test",
)
BUCKET, DDP_BUCKET = 10**6, 2**20
ZERO = Strategy(name="", family="deepspeed", stage=1, bucket_elements=BUCKET)
DDP = Strategy(name="", family="ddp", bucket_elements=DDP_BUCKET, overlap=True)
STRATEGIES: dict[str, tuple[Strategy, Precision]] = {
    "ZeRO-0": (replace(ZERO, stage=0), "fp16"),
    "ZeRO-1": (ZERO, "bf16"),
    "ZeRO-1 overlap": (replace(ZERO, overlap=True), "bf16"),
    "ZeRO-1 fp32": (ZERO, "fp32"),
    "ZeRO-1 less traffic": (replace(ZERO, less_traffic=True), "bf16"),
    "ZeRO-2": (replace(ZERO, stage=2), "bf16"),
    "ZeRO-3": (replace(ZERO, stage=3, overlap=True), "bf16"),
    "ZeRO-3 frugal": (replace(ZERO, stage=3, overlap=True), "bf16"),
    "DDP": (DDP, "bf16"),
    "DDP compressed": (replace(DDP, compress=True), "bf16"),
}
TWICE = ("ZeRO-0", "ZeRO-1", "ZeRO-1 less traffic", "ZeRO-2", "ZeRO-3", "DDP")
ROWS = [(arm, n) for arm in STRATEGIES for n in ((1, 8) if arm in TWICE else (1,))]
LOSS_BYTES = 8  # the driver sums the loss in every update, the recipe only for a logged line
NAMES = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}


def predicted(arm: str, accumulation: int, ranks: int) -> tuple[Transfer, ...]:
    strategy, precision = STRATEGIES[arm]
    work = Workload(
        shape=SHAPE,
        seq_len=16,
        global_sequences=ranks * accumulation,
        precision=precision,
        loss="full",
    )
    cluster = Cluster(gpu=GPU, nodes=1, gpus=ranks)
    return traffic.transfers(work, Candidate(strategy=strategy, micro=1), cluster)


@contextmanager
def own_network() -> Iterator[nursery.Place]:
    """A network namespace with a loopback interface only, where that is possible."""
    if any(mark.name == "skipif" and mark.args[0] for mark in rehearsing.rootful()):
        yield nursery.Place()
        return
    script = "ip link set lo up && echo up && exec sleep 600"
    words = ["unshare", "--net", "sh", "-c", script]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"up\n"
            yield nursery.Place(spaces={"net": f"/proc/{process.pid}/ns/net"})
        finally:
            process.kill()


@pytest.fixture(scope="module", params=[2, 4], ids="{} ranks".format)
def counted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, list[dict[str, Any]]]:
    """Number of ranks, and what they counted."""
    folder, ranks = tmp_path_factory.mktemp("traffic"), request.param
    results = folder / "results"
    script, log = "tests/drivers/traffic.py", folder / "log"
    with own_network() as place:
        nursery.good(results, folder=folder, ranks=[place] * ranks, script=script, log=log)
    return ranks, [json.loads(line) for line in results.read_text().splitlines()]


def row(counted: tuple[int, list[dict[str, Any]]], arm: str, accumulation: int) -> dict[str, Any]:
    (found,) = [
        line for line in counted[1] if (line["arm"], line["accumulation"]) == (arm, accumulation)
    ]
    return found


@pytest.fixture
def frugal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """ZeRO-3 as the driver's second arm has it: everything divided, nothing kept."""
    buckets.stage3_gathers.cache_clear()
    for name in ("PERSISTENT", "REUSE"):
        monkeypatch.setattr(buckets, name, 0)
    yield
    buckets.stage3_gathers.cache_clear()


@pytest.mark.parametrize(("arm", "accumulation"), ROWS)
def test_payloads_and_calls_are_those_of_the_real_engine(
    counted: tuple[int, list[dict[str, Any]]],
    arm: str,
    accumulation: int,
    request: pytest.FixtureRequest,
) -> None:
    if arm == "ZeRO-3 frugal":
        request.getfixturevalue("frugal")
    found = row(counted, arm, accumulation)
    sizes: dict[str, float] = {"all_reduce": LOSS_BYTES}
    calls: dict[str, float] = {"all_reduce": 1}
    for t in predicted(arm, accumulation, counted[0]):
        name = NAMES.get(t.op, t.op)
        if arm == "DDP" and t.what == "gradients":
            assert found["reductions"] == [t.calls, t.calls * t.bytes / 4]
            continue
        sizes[name] = sizes.get(name, 0.0) + t.calls * t.bytes
        calls[name] = calls.get(name, 0) + t.calls
    assert found["bytes"] == pytest.approx(sizes, rel=1e-12)
    if arm == "ZeRO-3 frugal":  # without prefetching a module at a time, which is not modelled
        calls["all_gather_into_tensor"] = found["calls"]["all_gather_into_tensor"]
    assert found["calls"] == calls


def gloo_share(op: Op, ranks: int) -> float:
    """Bytes that gloo sends per rank, by the payload, where it is not the ring's share.

    A reduction to one rank scatters by a ring and then sends each rank's part to that one
    (gloo/reduce.cc). torch builds a scatter from a whole all-reduce (ProcessGroupGloo.cpp).
    """
    if op == "reduce":
        return (ranks - 1) / ranks * (1 + 1 / ranks)
    return ring_share("all_reduce" if op == "reduce_scatter" else op, ranks)


@pytest.mark.parametrize(("arm", "accumulation"), ROWS)
def test_bytes_on_the_wire_are_the_predicted_ones(
    counted: tuple[int, list[dict[str, Any]]],
    arm: str,
    accumulation: int,
    request: pytest.FixtureRequest,
) -> None:
    if arm == "ZeRO-3 frugal":
        request.getfixturevalue("frugal")
    ranks, transfers = counted[0], predicted(arm, accumulation, counted[0])
    if not {t.op for t in transfers} & {"reduce", "reduce_scatter"}:
        expected = ranks * sum(t.sent for t in transfers)
    else:
        expected = ranks * sum(t.calls * t.bytes * gloo_share(t.op, ranks) for t in transfers)
    assert row(counted, arm, accumulation)["wire"] == pytest.approx(expected, rel=0.01)


for _mark in rehearsing.rootful():
    _mark(test_bytes_on_the_wire_are_the_predicted_ones)


def test_the_drivers_model_is_the_tests(counted: tuple[int, list[dict[str, Any]]]) -> None:
    assert SHAPE.parameters == 3_180_032  # 4 (12·256² + 13·256) + (64 + 16)·256 + 2·256
    assert row(counted, "ZeRO-1", 1)["bytes"]["all_gather_into_tensor"] == 2 * 3_180_032


# ---- by hand


XL = shape_of({"model_type": "gpt2", "n_layer": 48, "n_embd": 1600, "n_head": 25}, "test")
P = 1_557_611_200


def of(
    strategy: Strategy, *, nodes: int = 2, gpus: int = 4, shape: Shape = XL, **more: Any
) -> list[Transfer]:
    cluster = Cluster(gpu=GPU, nodes=nodes, gpus=gpus, nic=NIC)
    work = Workload(shape=shape, seq_len=1024, global_sequences=512, **more)
    return list(traffic.transfers(work, Candidate(strategy=strategy, micro=4), cluster))


def sent(strategy: Strategy, **more: Any) -> float:
    return sum(t.sent for t in of(strategy, **more)) / 1e9


def test_gpt2_xl_on_eight_ranks_sends_what_the_formulas_say() -> None:
    # By hand, 7/8·2P = 2.7258 GB: DDP four of them, ZeRO-1 three, ZeRO-2 at accumulation 16 33.
    assert sent(DDP) == pytest.approx(10.90, abs=0.01)
    assert sent(replace(DDP, compress=True)) == pytest.approx(5.45, abs=0.01)
    assert sent(ZERO) == pytest.approx(8.18, abs=0.01)
    assert sent(replace(ZERO, less_traffic=True)) == pytest.approx(5.45, abs=0.01)
    assert sent(replace(ZERO, stage=2)) == pytest.approx(33 * 2.7258, rel=1e-3)
    assert sent(replace(ZERO, family="sharded")) == pytest.approx(5.45, abs=0.01)
    assert sent(ZERO, precision="fp32") == pytest.approx(2 * 8.18, abs=0.01)


def test_an_automatic_bucket_makes_hundreds_of_small_reductions() -> None:
    # Accelerate writes hidden_size² for "auto"; a file that names 1e8 makes 17 calls.
    (auto,) = [t for t in of(replace(ZERO, bucket_elements=1600**2)) if t.what == "gradients"]
    (named,) = [t for t in of(replace(ZERO, bucket_elements=10**8)) if t.what == "gradients"]
    assert (auto.calls, named.calls) == (200, 17)
    assert auto.calls * auto.bytes == named.calls * named.bytes == 2 * P


def test_zero3_gathers_again_what_it_did_not_keep() -> None:
    ahead, back, kept = buckets.stage3_gathers(XL, replace(ZERO, stage=3))
    # Biases and norms stay; the tied embedding is gathered at both ends of the forward.
    assert kept.elements == 48 * (4 + 3 + 1 + 4 + 1) * 1600 + 2 * 1600
    assert ahead.elements == P - kept.elements + 50257 * 1600
    # A parameter is kept when it is needed again within 1e9 elements: half that far from the end.
    assert back.elements == pytest.approx(P - 0.5e9, rel=0.02)
    small, none, _ = buckets.stage3_gathers(replace(XL, layers=8), replace(ZERO, stage=3))
    assert small.elements > 3e8 and none.elements == 0


def test_every_padded_group_divides_among_the_ranks() -> None:
    shape = replace(XL, vocab=50259)
    matrices = (50259 + 1024) * 1600 + 48 * 12 * 1600**2
    vectors = 48 * 13 * 1600 + 2 * 1600
    for ranks in (3, 7, 8):
        found = buckets.elements(shape, ZERO, align=2 * ranks)
        assert found == sum(-(-n // (2 * ranks)) * 2 * ranks for n in (matrices, vectors))


def test_only_what_leaves_a_node_is_counted_between_nodes() -> None:
    work = Workload(shape=XL, seq_len=1024, global_sequences=512)
    candidate = Candidate(strategy=replace(ZERO, bucket_elements=10**8), micro=4)
    cluster = Cluster(gpu=GPU, nodes=2, gpus=4, nic=NIC)
    flat, hierarchical = traffic.sent_between_nodes(work, candidate, cluster)
    # Gradients and weights, 2P bytes each: 2·7/8 + 7/8 of them by a ring, 2·1/2 + 1/2 of two sums.
    assert flat == pytest.approx(2.625 * 2 * P, rel=1e-6)
    assert hierarchical == pytest.approx(1.5 * 2 * P, rel=1e-6)
    one = Cluster(gpu=GPU, nodes=1, gpus=8)
    assert traffic.sent_between_nodes(work, candidate, one) == (0.0, 0.0)


def test_tensor_parallelism_stays_in_the_node_and_data_groups_share_its_network() -> None:
    # 24 heads, so that a layer divides by 2 and 4.
    shape = shape_of({"model_type": "gpt2", "n_layer": 24, "n_embd": 1536, "n_head": 24}, "test")
    tensor = Strategy(name="", family="sharded", stage=1, tensor=2)
    found = {t.what: t for t in of(tensor, shape=shape)}
    inner = found["activations"]
    assert (inner.op, inner.place.ranks, inner.place.per_node, inner.place.nodes) == (
        "all_reduce",
        2,
        2,
        1,
    )
    assert inner.bytes == 4 * 1024 * 1536 * 2
    # 512 sequences over 4 data ranks, 4 at a time: 32 micro-batches of 2·24 + the embedding's.
    assert inner.calls == 32 * (2 * 24 + 1)
    outer = found["gradients"]
    assert (outer.place.ranks, outer.place.per_node, outer.place.beside) == (4, 2, 2)
    with_sequence = of(replace(tensor, sequence=True), shape=shape)
    scattered = [t for t in with_sequence if t.place.group == "tensor" and t.op != "all_reduce"]
    plain = [t for t in of(tensor, shape=shape) if t.what.startswith("activations")]
    same = sum(t.sent for t in scattered if t.what != "inputs again")
    assert same == pytest.approx(sum(t.sent for t in plain))


def test_a_pipeline_sends_activations_one_way_and_gradients_the_other() -> None:
    found = {t.what: t for t in of(Strategy(name="", family="sharded", stage=1, pipeline=2))}
    onward, back = found["activations onward"], found["gradients back"]
    assert onward.bytes == back.bytes == 4 * 1024 * 1600 * 2
    assert onward.calls == back.calls == 32  # 512 sequences over 4 data ranks, 4 at a time
    assert (onward.place.per_node, onward.place.beside) == (1, 4)  # a stage fills a node
    assert found["tied embedding"].bytes == 2 * 50257 * 1600


def test_fsdp2_gathers_and_scatters_for_every_micro_batch() -> None:
    found = {t.what: t for t in of(Strategy(name="", family="fsdp2", stage=3, overlap=True))}
    ahead, back = found["parameters, forward"], found["parameters, backward"]
    assert ahead.calls * ahead.bytes == 16 * 2 * P  # 512 / (8·4) micro-batches
    # Embedding, head and final norm stay gathered.
    assert back.calls * back.bytes == 16 * 2 * 48 * (12 * 1600**2 + 13 * 1600)
    assert found["gradients"].calls * found["gradients"].bytes == pytest.approx(16 * 2 * P)
    assert found["gradients"].when == "micro"


def test_one_rank_sends_nothing() -> None:
    assert of(ZERO, nodes=1, gpus=1) == []


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gpt2"},
        {"model_type": "llama"},
        {"model_type": "qwen2"},
        {"model_type": "qwen3"},
        {"model_type": "opt"},
        {"model_type": "gpt_neox"},
    ],
    ids=lambda config: config["model_type"],
)
def test_the_list_of_parameters_is_whole(config: dict[str, Any]) -> None:
    shape = shape_of(config, "test")
    assert sum(p.elements for p in buckets.parameters(shape)) == shape.parameters
