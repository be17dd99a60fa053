"""Non-finite windows, loss scaling and throughput, with faults planted in the real recipe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launching import Ended, records, run, status

DRIVER = "tests/drivers/faulty.py"
FP16 = ["--accelerate_config", "accelerate_configs/local_zero1_fp16.yaml"]


def train(
    tiny_run: Path, folder: Path, arm: list[str], env: dict[str, str], *settings: str
) -> Ended:
    script = [DRIVER, str(tiny_run), f"output_dir={folder}", *settings, *arm]
    return run("torchrun", 2, script, folder.parent / f"log-{folder.name}", env=env)


def test_fp16_one_bad_window_is_forgiven_and_two_in_a_row_halve_the_scale_once(
    tiny_run: Path, tmp_path: Path
) -> None:
    clean, poisoned = tmp_path / "clean", tmp_path / "poisoned"
    settings = ("schedule.updates=8", "evaluate.every_updates=8")
    ended = train(tiny_run, clean, FP16, {}, *settings)
    assert ended.code == 0, ended.text[-4000:]
    ended = train(tiny_run, poisoned, FP16, {"POISON": "2,5,6"}, *settings)
    assert ended.code == 0, ended.text[-4000:]
    assert "fp16 on the CPU is emulated and slow" in ended.text
    got = records(poisoned)
    assert [r["step"] for r in got] == list(range(1, 9))
    # windows 0 1 (2 bad) 3 4 (5 6 bad) 7 8 9 10: eight applied updates out of eleven windows
    assert [r["skipped_updates"] for r in got] == [0, 0, 1, 1, 3, 3, 3, 3]
    start = 2.0**15
    assert [r["loss_scale"] for r in got] == [start] * 4 + [start / 2] * 4
    want = records(clean)
    assert [r["lr"] for r in got] == [r["lr"] for r in want]  # skips do not move the schedule
    assert [r["data_digest"] for r in got[:2]] == [r["data_digest"] for r in want[:2]]
    assert got[2]["data_digest"] == want[3]["data_digest"]  # the bad window's data is not repeated
    assert got[4]["data_digest"] == want[7]["data_digest"]
    # throughput counts an applied update's own time, so a skip before it does not show
    assert all(r["tokens_per_s"] == pytest.approx(512e3 / r["step_ms"]) for r in got)


def test_fp16_every_window_bad_ends_with_a_report_and_exit_4(
    tiny_run: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    ended = train(tiny_run, folder, FP16, {"POISON": "all"}, "optim.max_skipped_in_a_row=5")
    assert ended.code != 0
    assert [status(folder, rank)["exit_code"] for rank in (0, 1)] == [4, 4], ended.text[-4000:]
    report = json.loads((folder / "nonfinite.json").read_text())
    assert (report["window"], report["update"], report["skipped_in_a_row"]) == (4, 0, 5)
    start = 2.0**15  # the first is forgiven, each later one halves
    assert report["loss_scales"] == [start, start / 2, start / 4, start / 8, start / 16]
    by_rank = report["first_non_finite"]
    assert "network.transformer.h.1.mlp " in by_rank[1] and "not finite" in by_rank[1]
    # only rank 1 was poisoned
    assert by_rank[0] == "every output, loss and gradient is finite on this rank"
    assert sorted(d["sequence"] for d in report["documents"]) == list(range(64, 80))  # window 4
    assert all(".parquet, row group" in d["file"] for d in report["documents"])
    assert report["last_checkpoint"] is None
    assert "5 updates in a row were not finite, the last in window 4" in ended.text


@pytest.mark.parametrize(
    "arm",
    [
        ["--accelerate_config", "accelerate_configs/local_ddp_bf16.yaml"],
        ["--accelerate_config", "accelerate_configs/local_zero1_bf16.yaml"],
        ["--deepspeed_config", "ds_configs/zero0_fp16.json"],
    ],
    ids=["ddp-bf16", "zero1-bf16", "zero0-fp16"],
)
def test_a_bad_window_is_skipped_under_every_arm(
    tiny_run: Path, tmp_path: Path, arm: list[str]
) -> None:
    folder = tmp_path / "run"
    env = {"POISON": "2", "DS_ACCELERATOR": "cpu"}
    ended = train(tiny_run, folder, arm, env, "schedule.updates=5", "evaluate.every_updates=5")
    assert ended.code == 0, ended.text[-4000:]
    assert [r["skipped_updates"] for r in records(folder)] == [0, 0, 1, 1, 1]
    assert all(0 < r["grad_norm"] < 100 for r in records(folder))
    assert records(folder)[-1]["loss"] < 6.5  # from ln 512 = 6.24: it still learns


def test_fp16_under_ddp_on_the_cpu_is_refused(tiny_run: Path, tmp_path: Path) -> None:
    yaml = tmp_path / "ddp_fp16.yaml"
    text = Path("accelerate_configs/local_ddp_bf16.yaml").read_text().replace("bf16", "fp16")
    yaml.write_text(text)
    ended = train(tiny_run, tmp_path / "run", ["--accelerate_config", str(yaml)], {})
    assert [status(tmp_path / "run", rank)["exit_code"] for rank in (0, 1)] == [2, 2]
    assert "Accelerate turns fp16 off without a word" in ended.text


@pytest.mark.parametrize("where", ["forward", "reader"])
def test_throughput_is_the_wall_clocks(tiny_run: Path, tmp_path: Path, where: str) -> None:
    # 4 micro-batches x 50 ms in the forward, or 8 sequences x 25 ms in the reader: 200 ms an update
    # at the least. DeepSpeed's own timer would be 3.6 and 17.8 times too fast.
    folder = tmp_path / where
    env = {"SLEEP_FORWARD_MS": "50"} if where == "forward" else {"SLEEP_READER_MS": "25"}
    arm = ["--accelerate_config", "accelerate_configs/local_zero1_bf16.yaml"]
    settings = ("schedule.updates=10", "evaluate.every_updates=10", "data.prefetch=1")
    assert train(tiny_run, folder, arm, env, *settings).code == 0
    late = records(folder)[4:]
    mean_ms = sum(r["step_ms"] for r in late) / len(late)
    rate = sum(r["tokens"] for r in late) / (mean_ms * len(late)) * 1000
    # All time between the planted sleeps and the record is counted, none is lost or counted twice.
    assert mean_ms >= 0.9 * 200
    assert rate <= 512 / 0.9 / 0.2
    waited = sum(r["data_wait_ms"] for r in late) / len(late)
    assert (waited > 100) == (where == "reader")
