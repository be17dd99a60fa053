"""One record per applied update: console line, JSONL, and the arithmetic of throughput."""

from __future__ import annotations

import json
import logging
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from recipes.planner.hardware import read_hardware
from recipes.runfolder import write_text

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Record:
    """What one applied update did. Counts and means are over all ranks; times are rank 0's."""

    step: int  # applied updates so far
    loss: float  # mean over the window's tokens, natural logarithm
    lr: float
    grad_norm: float  # before clipping, of the unscaled gradient
    loss_scale: float  # 1.0 without a scaler
    skipped_updates: int  # non-finite windows so far
    tokens: int  # trained on in this update (padding and masked labels not counted)
    samples: int  # documents that ended in this update
    data_digest: str  # names the update's sequences, however many ranks shared them
    total_tokens: int
    total_samples: int
    step_ms: float
    data_wait_ms: float
    tokens_per_s: float
    samples_per_s: float
    mfu: float | None  # None on hardware that is not in planner/hardware.yaml
    peak_memory_bytes: int
    time: float  # at the update's end, seconds since 1970


def per_second(count: float, milliseconds: float) -> float:
    """A rate from a count and a time in ms."""
    return count / (milliseconds / 1000.0) if milliseconds > 0 else 0.0


def peak_flops(device_name: str | None) -> float | None:
    """The dense 16-bit peak of a GPU in FLOP/s, by the name its driver gives; None if unknown."""
    if not device_name:
        return None
    with suppress(ValueError):
        return read_hardware().gpu(device_name).flops_16bit
    return None


def model_flops_utilisation(
    tokens_per_s: float, flops_per_token: float, world: int, peak: float | None
) -> float | None:
    """MFU: the share of the GPUs' dense peak that the model's own FLOPs take.

    Raises:
        ValueError: above 1, which means a wrong peak or a wrong count.
    """
    if peak is None:
        return None
    share = tokens_per_s * flops_per_token / (world * peak)
    if share > 1.0:
        raise ValueError(
            f"MFU {share:.0%} is impossible: the GPU's peak or the token count is wrong"
        )
    return share


def eta_seconds(updates_left: int, mean_step_ms: float) -> float:
    """Time to the end of the run in seconds, evaluations and saving not counted."""
    return updates_left * mean_step_ms / 1000.0


def human_time(seconds: float) -> str:
    """Seconds as `5h12m`, `3m20s` or `42s`."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"


def human_rate(value: float) -> str:
    """A rate as `118.2k` or `950`."""
    return f"{value / 1000:.1f}k" if value >= 1000 else f"{value:.0f}"


def human_bytes(count: float) -> str:
    """Bytes in powers of 1000, as disks are sold: `75.9 MB`."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while count >= 999.5 and len(units) > 1:
        count /= 1000
        del units[0]
    whole = units[0] == "B" or count >= 99.95
    return f"{count:.0f} {units[0]}" if whole else f"{count:.1f} {units[0]}"


def human_seconds(seconds: float) -> str:
    """A short time as `31 ms` or `4.2 s`, a longer one as `3m20s`."""
    if seconds >= 60:
        return human_time(seconds)
    return f"{seconds:.1f} s" if seconds >= 0.9995 else f"{seconds * 1000:.0f} ms"


def console_line(record: Record, total: int, eta: float) -> str:
    """The fixed-width line of one logged update."""
    parts = [
        f"step {record.step:0{len(str(total))}d}/{total}",
        f"loss {record.loss:7.4f}",
        f"lr {record.lr:.1e}",
        f"norm {record.grad_norm:6.2f}",
        f"{human_rate(record.tokens_per_s):>6} tok/s",
        f"MFU {record.mfu:5.1%}" if record.mfu is not None else "",
        f"wait {record.data_wait_ms:5.1f} ms",
        f"scale {record.loss_scale:.0f}" if record.loss_scale != 1.0 else "",
        f"skipped {record.skipped_updates}" if record.skipped_updates else "",
        f"eta {human_time(eta)}",
    ]
    return " | ".join(part for part in parts if part)


class JsonLines:
    """A growing file of JSON objects with a `step`, which a resume cuts back to its checkpoint.

    What the disk has no room for is kept in memory and written when it has.
    """

    def __init__(self, path: Path, last_step: int) -> None:
        kept = [r for r in read_json_lines(path) if r["step"] <= last_step]
        write_text(path, "".join(json.dumps(r) + "\n" for r in kept))
        self._path, self._left = path, b""
        self._file = path.open("ab", buffering=0)

    def append(self, records: list[dict[str, Any]]) -> None:
        """Write whole lines and hand them to the operating system at once."""
        waiting = bool(self._left)
        self._left += "".join(json.dumps(r) + "\n" for r in records).encode()
        try:
            self._write()
        except OSError as error:
            if not waiting:
                logger.warning("%s: %s; its lines are kept for later", self._path, error.strerror)

    def _write(self) -> None:
        while self._left:
            self._left = self._left[self._file.write(self._left) or 0 :]

    def close(self) -> None:
        """Flush to the disk.

        Raises:
            OSError: the disk still has no room for the last lines.
        """
        try:
            self._write()
            os.fsync(self._file.fileno())
        finally:
            self._file.close()


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Every whole record of a file, up to what a crash cut short or the power left unwritten."""
    if not path.is_file():
        return []
    records = []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for line in filter(None, lines[:-1]):
        try:
            records.append(json.loads(line))
        except ValueError:
            logger.warning("%s is damaged after its record %d", path, len(records))
            break
    return records


def as_json(record: Record) -> dict[str, Any]:
    """A record as JSON values."""
    return asdict(record)
