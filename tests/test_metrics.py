"""Every printed number, on values computed by hand, and the record files."""

from __future__ import annotations

import json
import resource
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from recipes.metrics import (
    JsonLines,
    Record,
    as_json,
    console_line,
    eta_seconds,
    human_bytes,
    human_rate,
    human_seconds,
    human_time,
    model_flops_utilisation,
    peak_flops,
    per_second,
    read_json_lines,
)

RECORD = Record(
    step=1200,
    loss=2.81342,
    lr=2.9e-4,
    grad_norm=0.4321,
    loss_scale=65536.0,
    skipped_updates=2,
    tokens=786_432,
    samples=700,
    data_digest="ab12",
    total_tokens=943_718_400,
    total_samples=840_000,
    step_ms=6655.0,
    data_wait_ms=0.21,
    tokens_per_s=118_171.6,
    samples_per_s=105.2,
    mfu=0.4871,
    peak_memory_bytes=70_000_000_000,
    time=1.7e9,
)


def test_a_rate_by_hand() -> None:
    assert per_second(786_432, 6_553.6) == pytest.approx(120_000.0)  # 786,432 / 6.5536 s
    assert per_second(5, 0.0) == 0.0


# ---- MFU

XL_FLOPS = 10_289_385_600.0  # 6 * 1,557,611,200 + 12 * 48 * 1600 * 1024


def test_the_mfu_of_the_mission_by_hand() -> None:
    assert XL_FLOPS == 6 * 1_557_611_200 + 12 * 48 * 1_600 * 1_024
    # 120,000 tokens/s on 8 A100: 1.234726e15 of 8 * 312e12 = 2.496e15 FLOP/s -> 49.468 %
    share = model_flops_utilisation(120_000.0, XL_FLOPS, 8, peak_flops("NVIDIA A100-SXM4-80GB"))
    assert share == pytest.approx(0.494682, abs=1e-6)


def test_more_than_all_of_the_peak_is_refused() -> None:
    # one GPU cannot do the work of two and a half: 312e12 / 1.02893856e10 = 30,322 tokens/s
    assert model_flops_utilisation(30_322.0, XL_FLOPS, 1, 312e12) == pytest.approx(1.0, abs=1e-4)
    with pytest.raises(ValueError, match="MFU 101% is impossible: the GPU's peak or the token"):
        model_flops_utilisation(30_626.0, XL_FLOPS, 1, 312e12)


def test_an_unknown_gpu_has_no_mfu() -> None:
    assert peak_flops("Radeon VII") is None
    assert peak_flops(None) is None
    assert peak_flops("") is None
    assert model_flops_utilisation(1e12, XL_FLOPS, 1, None) is None


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),  # the longer name wins
        ("NVIDIA H200", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA L40S", 362),
        ("Tesla V100-SXM2-32GB", 125),
    ],
)
def test_the_peak_by_the_name_that_torch_reports(name: str, tera: int) -> None:
    assert peak_flops(name) == tera * 1e12


@pytest.mark.parametrize(
    "name", ["NVIDIA L40", "NVIDIA A10", "NVIDIA A10G", "Tesla V100-PCIE-16GB"]
)
def test_a_similar_name_is_not_taken_for_another_gpu(name: str) -> None:
    assert peak_flops(name) is None


# ---- times and rates for people


def test_the_remaining_time_by_hand() -> None:
    assert eta_seconds(130_272 - 1_200, 6_500.0) == 838_968.0  # 129,072 * 6.5 s


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0s"),
        (42, "42s"),
        (59.6, "1m00s"),
        (60, "1m00s"),
        (200, "3m20s"),
        (3599.4, "59m59s"),
        (3599.6, "1h00m"),
        (18_720, "5h12m"),
        (838_968, "233h02m"),
    ],
)
def test_a_time_in_words(seconds: float, text: str) -> None:
    assert human_time(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (950.4, "950"), (1000.0, "1.0k"), (118_171.6, "118.2k"), (999.4, "999")],
)
def test_a_rate_in_words(value: float, text: str) -> None:
    assert human_rate(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (75_911_040, "75.9 MB"), (999_600, "1.0 MB")]
    + [(18.7e9, "18.7 GB"), (123.4e9, "123 GB"), (4.2e15, "4200 TB")],
)
def test_bytes_in_words(value: float, text: str) -> None:
    assert human_bytes(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0314, "31 ms"), (0.9996, "1.0 s"), (4.21, "4.2 s"), (200, "3m20s")]
)
def test_a_short_time_in_words(seconds: float, text: str) -> None:
    assert human_seconds(seconds) == text


# ---- the console line


def test_the_whole_console_line() -> None:
    assert console_line(RECORD, 50_000, 18_720.0) == (
        "step 01200/50000 | loss  2.8134 | lr 2.9e-04 | norm   0.43 | 118.2k tok/s | MFU 48.7% "
        "| wait   0.2 ms | scale 65536 | skipped 2 | eta 5h12m"
    )


def test_what_there_is_nothing_to_say_about_is_left_out() -> None:
    plain = replace(RECORD, mfu=None, loss_scale=1.0, skipped_updates=0, tokens_per_s=950.0)
    assert console_line(plain, 50_000, 42.0) == (
        "step 01200/50000 | loss  2.8134 | lr 2.9e-04 | norm   0.43 |    950 tok/s "
        "| wait   0.2 ms | eta 42s"
    )


def test_lines_of_one_run_have_one_width() -> None:
    others = [
        replace(RECORD, step=1, loss=10.9, grad_norm=123.4, tokens_per_s=9_400.0, mfu=0.031),
        replace(RECORD, step=50_000, lr=1e-5, data_wait_ms=123.4),
    ]
    widths = {len(console_line(r, 50_000, 18_720.0)) for r in (RECORD, *others)}
    assert len(widths) == 1


# ---- JSON lines


def lines(*steps: int) -> str:
    """The text of records with these steps."""
    return "".join(json.dumps({"step": step, "loss": 1.0 / step}) + "\n" for step in steps)


def test_a_record_survives_the_file(tmp_path: Path) -> None:
    file = JsonLines(tmp_path / "deep" / "metrics.jsonl", last_step=0)
    file.append([as_json(RECORD)])
    (read,) = read_json_lines(tmp_path / "deep" / "metrics.jsonl")  # before closing: handed on
    file.close()
    assert Record(**read) == RECORD


def test_a_resume_cuts_what_lies_past_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(1, 2, 3, 4))
    file = JsonLines(path, last_step=2)
    file.append([{"step": 3, "loss": 0.5}])
    file.close()
    assert path.read_text() == lines(1, 2) + '{"step": 3, "loss": 0.5}\n'
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_half_last_line_is_dropped_and_the_next_record_starts_on_its_own(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(1, 2) + '{"step": 3, "lo')
    assert [r["step"] for r in read_json_lines(path)] == [1, 2]
    file = JsonLines(path, last_step=3)
    file.append([{"step": 3, "loss": 0.25}])
    file.close()
    assert [r["step"] for r in read_json_lines(path)] == [1, 2, 3]


def test_a_last_line_that_lacks_only_its_end_counts_as_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(1, 2)[:-1])
    assert [r["step"] for r in read_json_lines(path)] == [1]


def test_what_the_power_left_unwritten_ends_the_records(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(lines(1, 2).encode() + b"\0" * 40 + lines(9).encode())
    assert [r["step"] for r in read_json_lines(path)] == [1, 2]
    assert "metrics.jsonl is damaged after its record 2" in caplog.text


def test_a_fresh_start_empties_the_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(1, 2))
    JsonLines(path, last_step=0).close()
    assert path.read_text() == ""


def test_several_records_of_one_append_are_one_line_each(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = JsonLines(path, last_step=0)
    file.append([{"step": 1}, {"step": 2}])
    file.append([])
    file.append([{"step": 3}])
    file.close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'


def test_a_missing_file_holds_no_record(tmp_path: Path) -> None:
    assert read_json_lines(tmp_path / "absent.jsonl") == []


def test_what_the_disk_has_no_room_for_is_written_when_it_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel's limit on a file's size stands for the disk's: the write that crosses it is cut
    short and the next one fails.
    """
    file = JsonLines(tmp_path / "metrics.jsonl", last_step=0)
    kept = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30, kept[1]))
        for step in (1, 2, 3, 4):
            file.append([{"step": step}])
        assert (tmp_path / "metrics.jsonl").stat().st_size == 30  # in the middle of a line
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, kept)
        signal.signal(signal.SIGXFSZ, handler)
    assert caplog.text.count("its lines are kept for later") == 1
    file.append([{"step": 5}])
    assert [r["step"] for r in read_json_lines(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    file.close()
