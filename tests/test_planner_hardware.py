"""The hardware table, and the form of the published measurements it is confronted with."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from recipes.planner.families import shape_of
from recipes.planner.hardware import Gpu, Hardware, read_hardware
from recipes.planner.workload import Precision, Strategy, Workload
from recipes.runfile import read_yaml

PUBLISHED = Path(__file__).parent / "published"
# Data sheets, by hand: dense 16 bit with fp32 sums, fp32 without tensor cores, memory.
DATA_SHEETS = {
    "v100-32gb": (125e12, 15.7e12, 900e9),
    "a100-40gb": (312e12, 19.5e12, 1555e9),
    "a100-80gb": (312e12, 19.5e12, 2039e9),
    "h100-80gb": (989e12, 67e12, 3350e9),
    "h100-pcie": (756e12, 51e12, 2000e9),
    "h200": (989e12, 67e12, 4800e9),
    "l40s": (362e12, 91.6e12, 864e9),
    "rtx-4090": (165.2e12, 82.6e12, 1008e9),
    "mi300x": (1307.4e12, 163.4e12, 5300e9),
}
WRITTEN_ON_THE_BOX = {"16gb": 16, "32gb": 32, "40gb": 40, "80gb": 80, "96gb": 96}
ROW_KEYS = {
    *("id", "model", "gpu", "nic", "nodes", "gpus", "seq_len", "micro", "accumulation"),
    *("precision", "strategy", "attention", "kernels", "checkpointing", "loss"),
    *("measured", "unknown", "complete", "source"),
}


@pytest.fixture(scope="module")
def table() -> Hardware:
    return read_hardware()


def test_every_entry_is_sourced_and_plausible(table: Hardware) -> None:
    assert len(table.gpus) >= 14 and len(table.nics) >= 12
    for gpu in table.gpus.values():
        assert len(gpu.source) > 20, gpu.name
        assert 0.3 < gpu.matmul_share <= 1 and 0.8 <= gpu.sustained <= 1, gpu.name
        assert 80 <= gpu.sms <= 304, gpu.name
        assert gpu.flops_32bit < gpu.flops_16bit < 40 * gpu.flops_32bit, gpu.name
        # A link is slower than memory, and no 16-bit peak needs under 80 FLOP a byte.
        assert gpu.link_bytes_per_s < gpu.memory_bytes_per_s / 3, gpu.name
        assert 80 < gpu.flops_16bit / gpu.memory_bytes_per_s < 450, gpu.name
        assert (gpu.link == "pcie") == (gpu.link_bytes_per_s < 50e9), gpu.name
        size = next((n for part, n in WRITTEN_ON_THE_BOX.items() if part in gpu.name), None)
        if size is not None:
            assert 0.98 * size <= gpu.memory_gib < size, f"{gpu.name}: what the driver shows"
    for nic in table.nics.values():
        assert len(nic.source) > 10, nic.name
        assert 1e9 <= nic.bits_per_s <= 6400e9 and 1e-6 < nic.latency_s < 1e-3, nic.name


@pytest.mark.parametrize("name", DATA_SHEETS)
def test_peaks_are_the_data_sheets(table: Hardware, name: str) -> None:
    gpu = table.gpu(name)
    measured = (gpu.flops_16bit, gpu.flops_32bit, gpu.memory_bytes_per_s)
    assert measured == pytest.approx(DATA_SHEETS[name], rel=1e-9)


def test_volta_alone_has_neither_bf16_nor_flash_attention_2(table: Hardware) -> None:
    volta = ["v100-16gb", "v100-32gb"]
    assert [g.name for g in table.gpus.values() if not g.bf16] == volta
    assert [g.name for g in table.gpus.values() if not g.flash2] == volta


def test_names_in_a_name_agree_with_the_rate(table: Hardware) -> None:
    for nic in table.nics.values():
        gbit = re.search(r"\d+", nic.name)
        assert gbit is not None and float(gbit[0]) * 1e9 == nic.bits_per_s, nic.name


def test_every_name_means_one_gpu(table: Hardware) -> None:
    """As the lookup compares them: letters and digits only."""
    owner: dict[str, str] = {}
    for gpu in table.gpus.values():
        for name in (gpu.name, *gpu.aliases):
            plain = re.sub(r"[^a-z0-9]", "", name.lower())
            assert owner.setdefault(plain, gpu.name) == gpu.name, name
            assert table.gpu(name) is gpu, name


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"),
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("A100_80GB", "a100-80gb"),
    ],
)
def test_a_driver_s_name_is_known(table: Hardware, driver: str, name: str) -> None:
    assert table.gpu(driver).name == name


def test_an_unknown_name_is_never_guessed(table: Hardware) -> None:
    with pytest.raises(ValueError, match=r"--gpu 'a100-80g' .* did you mean a100-80gb\? known: v"):
        table.gpu("a100-80g")
    with pytest.raises(ValueError, match=r"--nic 'infiniband'.* or a rate such as 200gbit"):
        table.nic("infiniband")
    for rate in ("0gbit", "1mbit", "0.0000001gbit", "101tbit"):
        with pytest.raises(ValueError, match="expected 0.1gbit to 100tbit"):
            table.nic(rate)


def test_a_rate_is_a_network(table: Hardware) -> None:
    assert table.nic("50gbit").bits_per_s == 50e9
    assert table.nic("12.5GB/s").bits_per_s == 100e9
    assert table.nic("1.6Tbit").bits_per_s == 1.6e12
    assert table.nic("200gbit").source != "--nic 200gbit: the line rate"


def test_a_user_s_file_adds_and_replaces(table: Hardware, tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(
        "gpus:\n"
        "  mine: {source: measured, memory_gib: 79.2, flops_16bit: 312e12, flops_32bit: 19.5e12,\n"
        "    matmul_share: 0.9, sms: 108, memory_bytes_per_s: 2e12, link: pcie,\n"
        "    link_bytes_per_s: 2e10}\n"
        "nics:\n"
        "  efa-400: {source: preflight, bits_per_s: 400e9, share: 0.6}\n",
        encoding="utf-8",
    )
    both = read_hardware(own)
    assert both.gpu("mine").matmul_share == 0.9
    assert both.nic("efa-400").share == 0.6 and table.nic("efa-400").share == 0.85
    assert set(both.gpus) == {*table.gpus, "mine"} and set(both.nics) == set(table.nics)


def test_all_faults_of_a_user_s_file_are_told_at_once(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(
        "gpus:\n  half: {memory_gib: 80, matmul_share: 1.2, colour: red}\n  none: 3\n"
        "nics:\n  slow: {source: '', bits_per_s: 0}\n",
        encoding="utf-8",
    )
    with pytest.raises(ValueError) as told:
        read_hardware(own)
    lines = str(told.value).splitlines()
    for part in ("half.source", "half.matmul_share", "half.colour", "half.link", "gpus.none"):
        assert any(part in line for line in lines), part
    assert sum("nics.slow" in line for line in lines) == 2
    (tmp_path / "list.yaml").write_text("- 1\n", encoding="utf-8")
    with pytest.raises(ValueError, match="expected the sections gpus: and nics:"):
        read_hardware(tmp_path / "list.yaml")


MINE = """
    {source: measured, memory_gib: 79.2, flops_16bit: 312e12, flops_32bit: 19.5e12,
     matmul_share: 0.9, sms: 108, memory_bytes_per_s: 2e12, link: pcie, link_bytes_per_s: 2e10"""


def test_a_name_that_both_files_know_is_the_user_s(table: Hardware, tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(f"gpus:\n  mine: {MINE}, aliases: [h200, A100-SXM4-40GB]}}\n")
    both = read_hardware(own)
    assert table.gpu("h200").name == "h200" and both.gpu("h200").name == "mine"
    assert both.gpu("NVIDIA A100-SXM4-40GB").name == "a100-40gb"  # an alias that it left
    assert both.gpu("A100-SXM4-40GB").name == "mine"
    own.write_text(f"gpus:\n  a: {MINE}, aliases: [x]}}\n  b: {MINE}, aliases: [X]}}\n")
    with pytest.raises(ValueError, match="gpus.b: X is a already; name it once"):
        read_hardware(own)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("gpus: 3", "gpus=3: expected names with keys below them"),
        ("gpus: [a]", "gpus=['a']: expected names"),
        ("nics: x", "nics='x': expected names"),
        (
            f"gpus: {{g: {MINE}, flops_16bti: 3}}}}",
            "flops_16bti: unknown key; did you mean flops_16",
        ),
        ("gpus: {g: {flops_16bit: 1e-300}}", "g.flops_16bit=1e-300: expected greater than"),
        ("gpus: {g: {memory_bytes_per_s: 1e300}}", "g.memory_bytes_per_s=1e+300: expected less"),
        ("gpus: {g: {memory_gib: .inf}}", "g.memory_gib=inf: expected a finite number"),
        ("gpus: {g: {link: NVLink}}", "g.link='NVLink': expected 'nvlink', 'nvswitch'"),
        ("gpus: {g: {sms: 1.5}}", "g.sms=1.5: expected a valid integer"),
        ("nics: {n: {source: x}}", "nics.n.bits_per_s: missing"),
    ],
)
def test_a_user_s_file_is_held_to_its_form(tmp_path: Path, text: str, told: str) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(text.replace("flops_16bit: 312e12", "flops_16bit: 3e14") + "\n")
    with pytest.raises(ValueError) as caught:
        read_hardware(own)
    assert any(
        line.startswith(f"{own}: ") and told in line for line in str(caught.value).split("\n")
    )


def published(name: str) -> list[dict[str, Any]]:
    """The rows of one file."""
    rows: list[dict[str, Any]] = read_yaml(PUBLISHED / f"{name}.yaml")["rows"]
    return rows


@pytest.mark.parametrize("name", ["time", "memory"])
def test_published_rows_are_whole(table: Hardware, name: str) -> None:
    for row in published(name):
        where = row["id"]
        assert set(row) - {"note"} == ROW_KEYS, where
        assert row["model"] is None or shape_of(dict(row["model"]), where).layers > 0
        assert Strategy(**row["strategy"]).name and row["precision"] in get_args(Precision)
        assert row["gpu"] is None or isinstance(table.gpu(row["gpu"]), Gpu)
        assert row["nic"] is None or table.nic(row["nic"]).bits_per_s
        assert row["attention"] in ("flash", "eager") and row["kernels"] in ("torch", "fused")
        assert row["loss"] in get_args(get_type_hints(Workload)["loss"]) and isinstance(
            row["complete"], bool
        ), where
        assert row["source"]["repository"] and row["source"]["file"], where
        for value in row["measured"]:
            assert {"what", "value", "unit"} <= set(value) <= {"what", "value", "unit", "kind"}
        # "Complete" can be scored: nothing a prediction needs is open.
        if row["complete"]:
            assert None not in [row[k] for k in ("model", "micro", "seq_len", "nodes", "gpus")]
            assert row["checkpointing"] is not None, where
            assert row["nodes"] == 1 or row["nic"] or name == "memory", where


def test_ids_are_unique_and_series_name_real_rows() -> None:
    ids = [row["id"] for name in ("time", "memory", "network") for row in published(name)]
    assert len(ids) == len(set(ids))
    known = {row["id"]: row for row in published("time")}
    for series in read_yaml(PUBLISHED / "scaling.yaml")["series"]:
        worlds = [known[i]["nodes"] * known[i]["gpus"] for i in series["rows"]]
        assert worlds == sorted(set(worlds)), series["id"]
        assert set(series["anomalies"]) <= set(series["rows"])
        assert series["complete"] == all(known[i]["complete"] for i in series["rows"])


def test_transcribed_throughputs_reproduce_their_mfu(table: Hardware) -> None:
    """A typing error in shape, size or rate would show: MFU is rate · (6N + 12LhT) / peak."""
    checked = 0
    for row in published("time"):
        values = {value["what"]: value["value"] for value in row["measured"]}
        if not row["id"].startswith("mpt-") or "mfu" not in values:
            continue
        flops = shape_of(dict(row["model"]), row["id"]).flops_per_token(row["seq_len"])
        rate = values["throughput"] / (row["nodes"] * row["gpus"])
        peak = table.gpu(row["gpu"]).flops_16bit
        assert rate * flops / peak == pytest.approx(values["mfu"], rel=5e-3), row["id"]
        checked += 1
    assert checked == 191


def test_network_rows_are_within_reason(table: Hardware) -> None:
    for row in published("network"):
        assert row["op"] == "all_reduce" and row["source"]["repository"], row["id"]
        assert row["busbw"] or row["seconds"], row["id"]
        assert all(0 < rate < 1000 for rate in row["busbw"].values()), row["id"]
        if row["complete"] and row["nodes"] == 1 and row["gpus"] == 8:
            largest = row["busbw"][max(row["busbw"])] * 1e9
            entry = table.gpu(row["gpu"]).link_bytes_per_s
            assert largest == pytest.approx(entry, rel=0.08), "the table's link is not the measured"
