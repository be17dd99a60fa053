"""Predicted GPU memory against numbers worked out by hand and a trace of GPT-2 XL.

Expected values are written out, in bytes per parameter or per token, so that the formulas are read
twice.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from planner_cases import GPU, LLAMA, candidate, cluster, work

from recipes.checkpoint.space import CHECKPOINT_BYTES, checkpoint_need
from recipes.planner import memory
from recipes.planner.activations import chunk_rows, head_bytes, layer_bytes
from recipes.planner.families import shape_of
from recipes.planner.memory import largest_micro, plan_memory, savings
from recipes.planner.shape import Shape
from recipes.planner.states import parts, states_of
from recipes.planner.workload import Candidate, Strategy, Workload

GIB = 2.0**30
XL = 1_557_611_200  # parameters, counted by hand in tests/test_planner_shape.py's manner
HF_XL = shape_of({"model_type": "gpt2", "n_layer": 48, "n_embd": 1600, "n_head": 25}, "HF")
ZERO1 = Strategy(name="ZeRO-1", family="deepspeed", stage=1, bucket_elements=500_000_000)
DDP = Strategy(name="DDP", family="ddp")


def plan(shape: Shape = HF_XL, strategy: Strategy = ZERO1, **changes: Any) -> memory.MemoryPlan:
    """Eight 80 GiB GPUs, all logits, the candidate's fields as keywords."""
    fields = {"micro": 4} | {k: v for k, v in changes.items() if k in Candidate.__annotations__}
    rest = {k: v for k, v in changes.items() if k in Workload.__annotations__}
    return plan_memory(
        work(shape, **{"loss": "full"} | rest), candidate(strategy, **fields), cluster()
    )


# ---- a trace of GPT-2 XL


# GiB allocated at the peak of a second micro-batch: transformers' GPT-2 XL on fake CUDA tensors,
# fp16, dropout 0.1, sequences of 1,024, ZeRO-1 over 8 GPUs. That trace keeps the 16-bit logits in a
# variable while backward runs, two bytes per logit that `SummedLoss` has let go.
@pytest.mark.parametrize(
    ("traced", "changes"),
    [
        (13.84, {"micro": 1}),
        (18.77, {"micro": 2}),
        (28.64, {"micro": 4}),
        (48.37, {"micro": 8}),
        (19.70, {"micro": 1, "attention": "eager"}),
        (30.48, {"micro": 2, "attention": "eager"}),
        (52.06, {"micro": 4, "attention": "eager"}),
        (21.61, {"shape": replace(HF_XL, activation="gelu_pytorch_tanh")}),
        (54.05, {"strategy": DDP}),
    ],
)
def test_the_peak_of_gpt2_xl_is_the_traced_one(traced: float, changes: dict[str, Any]) -> None:
    tokens = 1024 * changes.get("micro", 4)
    held = 2 * tokens * 50257 / GIB
    assert plan(**changes).allocated.value / GIB + held == pytest.approx(traced, rel=5e-4)


def test_checkpointing_keeps_two_bytes_a_token_and_width() -> None:
    found = plan(checkpointing=True)
    # 2P + 12P/8 + 2P, 1 GB of bucket, 48 inputs, 12 bytes a logit; final norm and embedding.
    expected = 5.5 * XL + 1e9 + 48 * 2 * 4096 * 1600 + 12 * 4096 * 50257 + 5 * 4096 * 1600
    assert found.allocated.value == pytest.approx(expected, rel=1e-3)


# ---- states, in bytes per parameter


@pytest.mark.parametrize(
    ("strategy", "parameters", "gradients", "masters", "moments"),
    [
        (DDP, 4, 4, 0, 8),
        (replace(DDP, stage=1), 4, 4, 0, 1),
        (replace(ZERO1, stage=0), 2, 2, 4, 8),
        (ZERO1, 2, 2, 0.5, 1),
        (replace(ZERO1, gradients32=True), 2, 4, 0.5, 1),
        (replace(ZERO1, stage=2), 2, 0.25, 0.5, 1),
        (replace(ZERO1, stage=3), 0.25, 0.25, 0.5, 1),
        (Strategy(name="FSDP2", family="fsdp2"), 0.5, 0.5, 0, 1),
        (Strategy(name="llm.c", family="sharded"), 2, 2, 4, 8),
        (Strategy(name="llm.c z1", family="sharded", stage=1), 2, 2, 0.5, 1),
        (Strategy(name="M", family="sharded", stage=1, gradients32=True), 2, 4, 0.5, 1),
    ],
)
def test_states_per_parameter(
    strategy: Strategy, parameters: float, gradients: float, masters: float, moments: float
) -> None:
    (part,) = parts(HF_XL, strategy)
    found = states_of(work(HF_XL), strategy, part, 8)
    expected = [n * XL for n in (parameters, gradients, masters, moments)]
    assert [found.parameters, found.gradients, found.masters, found.moments] == pytest.approx(
        expected, rel=1e-9
    )


def test_fp32_states() -> None:
    full = work(HF_XL, precision="fp32")
    (part,) = parts(HF_XL, DDP)
    assert states_of(full, DDP, part, 8).standing == 12 * XL
    # DeepSpeed clones its slice even when that is fp32 already.
    assert states_of(full, ZERO1, part, 8).standing == (4 + 12 / 8) * XL


def test_buckets() -> None:
    (part,) = parts(HF_XL, DDP)
    held = states_of(work(HF_XL), replace(DDP, bucket_view=False), part, 8)
    assert (held.bucket, held.bucket_kept) == (4 * XL, True)
    wire = states_of(work(HF_XL), replace(DDP, compress=True, bucket_elements=1000), part, 8)
    assert wire.reduction == 2 * 2 * 1000
    assert states_of(work(HF_XL), ZERO1, part, 8).bucket == 1e9
    assert states_of(work(HF_XL), replace(ZERO1, overlap=True), part, 8).bucket == 2e9
    small = replace(ZERO1, bucket_elements=10**12)
    assert states_of(work(HF_XL), small, part, 8).bucket == 2 * XL


def test_published_differences_between_unsharded_and_sharded_states() -> None:
    """llm.c, pull request 309: nvidia-smi of 4 GPUs with and without ZeRO-1."""
    base = {"model_type": "gpt2", "vocab_size": 50304, "activation_function": "gelu_pytorch_tanh"}
    small = shape_of(base | {"resid_pdrop": 0.0, "embd_pdrop": 0.0}, "124M")
    large = replace(small, layers=48, width=1600, heads=25, kv_heads=25, ffn=6400)
    four = cluster(nodes=1, gpus=4)
    for shape, measured in ((large, 35975 - 22601), (small, 16661 - 15593)):
        planned = work(shape, kernels="fused", precision="bf16", loss="full")
        whole, shared = (
            plan_memory(
                planned, candidate(Strategy(name="", family="sharded", stage=n), micro=4), four
            ).allocated.value
            for n in (0, 1)
        )
        assert (whole - shared) / 2**20 == pytest.approx(measured, rel=0.005)


def test_stage_0_holds_its_gradients_three_times_in_the_update() -> None:
    """Why GPT-2 1.5B without ZeRO ended at 29 of 32 GB: 14P of states, 2P and twice 4P."""
    found = plan(strategy=replace(ZERO1, stage=0))
    assert found.phases[3].allocated == pytest.approx(24 * XL)


# ---- who holds what


def test_tensor_ranks_divide_matrices_and_repeat_norms() -> None:
    """Llama 7B: 32 layers of 202,375,168 in matrices and 8,192 in norms; two tables, one norm."""
    (part,) = parts(LLAMA, Strategy(name="", family="sharded", tensor=4))
    assert part.layer == 202_375_168 / 4 + 2 * 4096
    assert part.embedding == 2 * 32000 * 4096 / 4 + 4096
    grouped = replace(LLAMA, kv_heads=2)  # eight ranks: two heads are repeated four times
    (part,) = parts(grouped, Strategy(name="", family="sharded", tensor=8))
    keys = 2 * 4096 * 2 * 128 / 2
    assert part.layer == 2 * 4096 * 4096 / 8 + keys + 3 * 4096 * 11008 / 8 + 2 * 4096


def test_a_pipeline_s_ends() -> None:
    first, last = parts(HF_XL, Strategy(name="", family="sharded", pipeline=4))
    assert (first.layers, last.layers) == (12, 12)
    assert first.embedding == (50257 + 1024) * 1600
    assert last.embedding == 50257 * 1600 + 2 * 1600  # the tied matrix again, and the final norm
    one = parts(HF_XL, ZERO1)[0].parameters
    assert one == XL and first.parameters + last.parameters < one


def test_a_pipeline_s_first_stage_keeps_as_many_micro_batches_as_there_are_stages() -> None:
    staged = Strategy(name="", family="sharded", stage=1, pipeline=4)
    planned, micro = work(HF_XL, loss="inplace"), candidate(staged, micro=1)
    kept = {i.name: i.bytes for i in plan_memory(planned, micro, cluster()).peak.items}
    one = layer_bytes(planned, micro)["feed-forward"]
    assert kept["feed-forward"] == pytest.approx(one * 12 * 4)


def test_sequence_parallelism_divides_the_rest() -> None:
    """Korthikanti 2022: sbh(10 + 24/t) becomes 34·sbh/t with sequence parallelism."""
    fused = work(replace(HF_XL, activation="gelu_pytorch_tanh"), kernels="fused")
    unit = 1024 * 1600

    def bytes_of(strategy: Strategy) -> float:
        kinds = layer_bytes(fused, candidate(strategy, micro=1))
        return sum(kinds.values()) / unit

    tensor = Strategy(name="", family="sharded", tensor=5)
    statistics = 16 / 1600
    assert bytes_of(replace(tensor, tensor=1)) == pytest.approx(34 + 4 * 25 / 1600 + statistics)
    assert bytes_of(tensor) == pytest.approx(10 + 24 / 5 + 4 * 5 / 1600 + statistics)
    both = replace(tensor, sequence=True)
    assert bytes_of(both) == pytest.approx((34 + 4 * 25 / 1600 + statistics) / 5)


def test_eager_attention_is_korthikanti_s_formula() -> None:
    fused = work(replace(HF_XL, activation="gelu_pytorch_tanh"), kernels="fused")
    kinds = layer_bytes(fused, candidate(ZERO1, micro=2, attention="eager"))
    tokens = 2048
    assert kinds["softmax"] + kinds["masks"] - 2 * tokens * 1600 == 5 * 25 * 1024 * tokens


# ---- phases


def test_a_single_micro_batch_has_no_gradients_when_backward_starts() -> None:
    alone = plan(global_sequences=32)  # 8 ranks x 4: accumulation 1
    many = plan()
    assert many.allocated.value - alone.allocated.value == pytest.approx(2 * XL + 1e9)
    assert {"gradients", "reduction bucket"} <= {i.name for i in many.peak.items}
    assert not {"gradients", "reduction bucket"} & {i.name for i in alone.peak.items}


def test_a_tiny_batch_s_peak_is_where_all_gradients_are_there() -> None:
    found = plan(micro=1, global_sequences=8, seq_len=16, checkpointing=True)
    assert found.peak.name == "reduction"


def test_items_add_up_and_say_where_they_come_from() -> None:
    found = plan(strategy=DDP)
    for phase in found.phases:
        assert phase.allocated == sum(item.bytes for item in phase.items)
        assert all(item.basis and item.bytes > 0 for item in phase.items)
    assert [phase.name for phase in found.phases] == ["forward", "backward", "reduction", "update"]
    assert found.peak.allocated == found.allocated.value == max(p.allocated for p in found.phases)
    assert found.bottleneck == "feed-forward"
    extra = sum(item.bytes for item in found.outside)
    assert found.device.value == pytest.approx(found.allocated.value + extra)


def test_levels_and_their_bands() -> None:
    found = plan()
    assert found.allocated.value < found.reserved.value < found.device.value
    assert found.device.value - found.reserved.value == 1.75 * GIB  # context and NCCL
    alone = plan_memory(work(HF_XL), candidate(DDP, micro=1), cluster(nodes=1, gpus=1))
    assert alone.device.value - alone.reserved.value == pytest.approx(0.8 * GIB)
    for level in (found.allocated, found.reserved, found.device):
        assert level.low < level.value < level.high


def test_full_and_chunked_loss() -> None:
    planned = work(HF_XL, precision="bf16")
    kinds = head_bytes(planned, candidate(ZERO1, micro=16))
    # 16,384 tokens over ceil(50257 / 1600) = 32: 512 rows, halved on GPUs.
    assert chunk_rows(16384, 1600, 50257) == 256
    gradients = 2 * (16384 * 1600 + 50257 * 1600)
    assert kinds["loss backward"] == 256 * 50257 * (4 + 2) + 256 * 1600 * 4 + gradients
    assert kinds["logits"] == 0
    full = head_bytes(replace(planned, loss="full"), candidate(ZERO1, micro=16))
    logits = 16384 * 50257
    assert (full["logits"], full["loss forward"], full["loss backward"]) == (
        4 * logits,
        6 * logits,
        8 * logits,
    )
    inplace = head_bytes(replace(planned, loss="inplace"), candidate(ZERO1, micro=16))
    assert (inplace["logits"], inplace["loss backward"]) == (2 * logits, 0)


def test_losses_in_place() -> None:
    """llm.c's holds the logits only; Megatron's 16-bit logits and fp32 probabilities."""
    fused, chosen = work(HF_XL, kernels="fused"), candidate(ZERO1, micro=4)
    logits = 4096 * 50257
    found = head_bytes(replace(fused, loss="inplace"), chosen)
    assert (found["logits"], found["loss forward"], found["loss backward"]) == (2 * logits, 0, 0)
    for planned in (replace(fused, loss="full"), work(HF_XL, loss="inplace32")):
        found = head_bytes(planned, chosen)
        assert (found["logits"], found["loss forward"]) == (4 * logits, 2 * logits)
        assert found["loss backward"] == 2 * logits


# ---- what fits


def test_capacity_is_what_the_driver_shows() -> None:
    found = plan()
    assert found.capacity == 80 * GIB and found.usable == pytest.approx(0.92 * 80 * GIB)


def test_a_plan_fits_with_a_margin_and_its_band_below_the_capacity() -> None:
    device = plan().device
    cramped = GPU.model_copy(update={"memory_gib": device.value / 0.93 / GIB})
    roomy = GPU.model_copy(update={"memory_gib": 1.001 * device.high / GIB})
    barely = GPU.model_copy(update={"memory_gib": 0.999 * device.high / GIB})
    verdicts = [
        plan_memory(work(HF_XL, loss="full"), candidate(ZERO1, micro=4), cluster(gpu=gpu)).fits
        for gpu in (cramped, barely, roomy)
    ]
    assert verdicts == [False, False, True]


@pytest.mark.parametrize("strategy", [ZERO1, DDP, replace(ZERO1, stage=3)])
@pytest.mark.parametrize("loss", ["full", "chunked"])
def test_the_largest_micro_batch_fits_and_the_next_does_not(strategy: Strategy, loss: str) -> None:
    planned = work(HF_XL, loss=loss, global_sequences=10_000_000)
    most = largest_micro(planned, candidate(strategy, micro=1), cluster())
    assert most > 4
    for micro, fits in ((1, True), (most, True), (most + 1, False)):
        assert plan_memory(planned, candidate(strategy, micro=micro), cluster()).fits is fits


def test_the_largest_micro_batch_may_be_the_whole_share() -> None:
    """Without accumulation there is less to hold, so a larger one fits."""
    short, one = work(HF_XL, seq_len=128, global_sequences=10_000), candidate(ZERO1, micro=1)
    many = largest_micro(short, one, cluster())
    planned = replace(short, global_sequences=8 * (many + 1))
    assert largest_micro(planned, one, cluster()) > many


def test_nothing_fits_a_small_gpu() -> None:
    tiny = GPU.model_copy(update={"memory_gib": 8})
    assert largest_micro(work(HF_XL), candidate(ZERO1, micro=1), cluster(gpu=tiny)) == 0


# ---- savings, host, disk


def test_savings_are_what_the_changed_plan_has_less_of() -> None:
    planned, chosen = work(HF_XL, loss="full"), candidate(ZERO1, micro=4, attention="eager")
    found = {s.what: s for s in savings(planned, chosen, cluster())}
    sizes = [s.bytes for s in found.values()]
    assert sizes == sorted(sizes, reverse=True)
    tokens = 4096
    kernel = found["the activation in one kernel"]
    assert kernel.bytes == pytest.approx(24 * tokens * 1600 * 48)
    assert kernel.how == "model.config.activation_function=gelu_pytorch_tanh"
    # Residual masks, and of the probabilities a mask and a second copy; the embedding's mask.
    dropout = tokens * (2 * 1600 * 48 + 3 * 25 * 1024 * 48 + 1600)
    assert found["no dropout"].bytes == pytest.approx(dropout)
    assert found["flash attention"].bytes == pytest.approx(
        tokens * 48 * 25 * (5 * 1024 - 4), rel=1e-3
    )
    assert found["a smaller bucket"].bytes == pytest.approx(2 * 450e6)
    assert {"checkpointing", "never all logits", "half the micro-batch"} <= set(found)


def test_savings_of_ddp() -> None:
    chosen = candidate(replace(DDP, bucket_view=False), micro=2)
    found = {s.what: s.bytes for s in savings(work(HF_XL), chosen, cluster())}
    assert found["gradients in DDP's buckets"] == pytest.approx(4 * XL)
    assert found["ZeRO-1"] > 8 * XL


def test_a_checkpoint_is_what_the_recipe_plans_room_for() -> None:
    assert memory.checkpoint_bytes(HF_XL) == checkpoint_need(XL, keep=0, present=0)
    assert memory.CHECKPOINT_BYTES == CHECKPOINT_BYTES


def test_host_memory_of_a_node() -> None:
    items = {i.name: i for i in memory.host_memory(work(HF_XL), cluster())}
    assert items["model at the start"].bytes == 4 * 4 * XL
    assert items["copy for the background writer"].bytes == 12 * XL / 2
    assert items["rank processes"].source == items["readers"].source == "assumed"


def test_an_unknown_activation_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="xielu.*gelu_new.*--trace"):
        plan(replace(HF_XL, activation="xielu"))
