"""What times say of a network, in plain numbers: rates, a fitted line, the worst link.

Bandwidths are defined as by nccl-tests (https://github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md):
the algorithm bandwidth is size by time, where the size is that of the whole buffer (the gathered
one of an all-gather, the one before a reduce-scatter); the bus bandwidth is what each link must
carry if the algorithm is the best one, so that it can be held against the hardware for any number
of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from recipes.preflight.rows import size

MIB = 2**20


def bus_factor(op: str, ranks: int) -> float:
    """Bus bandwidth by algorithm bandwidth."""
    shares = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}
    return shares[op] * (ranks - 1) / ranks if op in shares else 1.0


@dataclass(frozen=True, kw_only=True)
class Line:
    """`seconds = latency_s + num_bytes / bytes_per_s`."""

    latency_s: float
    bytes_per_s: float
    worst_misfit: float  # largest relative distance of a time from the line


def fit_line(points: Sequence[tuple[float, float]]) -> Line | None:
    """Latency and bandwidth from (bytes, seconds).

    Least squares of the *relative* distances, since the times span decades and a plain fit would
    only see the largest. They start from the median slope of all pairs, and distances beyond 1.5
    times the median one weigh less by the square, so that neither a slow message nor one that a
    token bucket let through at once bends the line. Neither latency nor time per byte is negative.

    Returns:
        None with fewer than two sizes, or where larger messages take no longer.
    """
    if len({size for size, _ in points}) < 2:
        return None
    pairs = [(p, q) for p in points for q in points if p[0] < q[0]]
    per_byte = median((q[1] - p[1]) / (q[0] - p[0]) for p, q in pairs)
    smallest = min(points)
    latency = max(smallest[1] - per_byte * smallest[0], 0.0)
    for _ in range(20):
        far = [abs(latency + per_byte * n - t) / t for n, t in points]
        limit = max(1.5 * median(far), 1e-9)
        weights = [min(1.0, (limit / f) ** 2) if f > 0 else 1.0 for f in far]
        latency, per_byte = _weighted(points, weights)
    far = [abs(latency + per_byte * n - t) / t for n, t in points]
    if per_byte <= 0:
        return None
    return Line(latency_s=latency, bytes_per_s=1.0 / per_byte, worst_misfit=max(far))


def _weighted(
    points: Sequence[tuple[float, float]], weights: Sequence[float]
) -> tuple[float, float]:
    """Latency and time per byte of the weighted relative least squares."""
    # (a + b n - t) / t = a x + b y - 1 with x = 1/t and y = n/t
    xs, ys, ones = [1.0 / t for _, t in points], [n / t for n, t in points], [1.0] * len(points)

    def total(left: Sequence[float], right: Sequence[float]) -> float:
        return sum(w * p * q for w, p, q in zip(weights, left, right, strict=True))

    xx, xy, yy = total(xs, xs), total(xs, ys), total(ys, ys)
    x, y = total(xs, ones), total(ys, ones)
    determinant = xx * yy - xy * xy
    if determinant <= 1e-12 * xx * yy:
        return 0.0, y / yy
    a, b = (x * yy - y * xy) / determinant, (y * xx - x * xy) / determinant
    return (a, max(b, 0.0)) if a >= 0 else (0.0, y / yy)


def summary(links: Sequence[Mapping[str, Any]]) -> dict[str, float | int] | None:
    """Medians over links of one kind, what a planner takes; None without any."""
    if not links:
        return None
    rate = median(link["bytes_per_s"] for link in links)
    latency = median(link["latency_s"] for link in links)
    return {
        "links": len(links),
        "latency_s": latency,
        "bytes_per_s": rate,
        "bits_per_s": 8 * rate,
    }


def worst_link(links: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The slowest link between nodes, and its share of the median one; None without any."""
    between = [link for link in links if link["kind"] == "between"]
    if not between:
        return None
    slowest = min(between, key=lambda link: link["bits_per_s"])
    return {
        "from": slowest["from"],
        "to": slowest["to"],
        "bits_per_s": slowest["bits_per_s"],
        "share_of_median": slowest["bits_per_s"] / median(link["bits_per_s"] for link in between),
    }


def human_bits(bits_per_s: float) -> str:
    """For example `0.94 Gbit/s`."""
    if bits_per_s >= 1e9:
        return f"{bits_per_s / 1e9:.2f} Gbit/s"
    return (
        f"{bits_per_s / 1e6:.0f} Mbit/s" if bits_per_s >= 1e6 else f"{bits_per_s / 1e3:.0f} kbit/s"
    )


def parse_size(text: str) -> int:
    """`8`, `1MiB`, `25 MiB`, `2GiB` in bytes.

    Raises:
        ValueError: it is no size.
    """
    units = {"": 1, "B": 1, "KiB": 2**10, "MiB": MIB, "GiB": 2**30}
    digits = text.strip().rstrip("BiKMG ")
    unit = text.strip()[len(digits) :].strip()
    if not digits.isdigit() or int(digits) == 0 or unit not in units:
        raise ValueError(
            f"size {text!r}: expected a whole number with B, KiB, MiB or GiB, as 25MiB"
        )
    return int(digits) * units[unit]


def rounds(nodes: int) -> list[list[tuple[int, int]]]:
    """Every pair of nodes once, in rounds in which no node is in two pairs (a round robin)."""
    seats = list(range(nodes + nodes % 2))
    out = []
    for _ in seats[1:]:
        pairs = list(zip(seats, reversed(seats), strict=True))[: len(seats) // 2]
        out.append([(min(p), max(p)) for p in pairs if max(p) < nodes])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return out


def hidden_share(comm_s: float, compute_s: float, both_s: float) -> float:
    """What part of the shorter of two was hidden behind the other."""
    hidden = (comm_s + compute_s - both_s) / min(comm_s, compute_s)
    return min(max(hidden, 0.0), 1.0)


def told(found: dict[str, Any]) -> list[str]:
    """What was found, for people."""
    lines = []
    for kind in ("within", "between"):
        links = found[kind]
        if links:
            where = "within a node" if kind == "within" else "between nodes"
            rate, latency = human_bits(links["bits_per_s"]), links["latency_s"] * 1e6
            lines.append(f"link {where}: {rate}, {latency:,.0f} us one way")
    worst = found["worst_link"]
    if worst:
        ends = f"{worst['from']} to {worst['to']}"
        lines.append(f"worst link: {ends}, {human_bits(worst['bits_per_s'])}")
    largest = {(c["group"], c["host"], c["op"]): c for c in found["collectives"]}
    lines += [
        f"{c['op']} ({c['host'] or c['group']}, {size(c['bytes'])}): "
        f"{human_bits(8 * c['busbw_bytes_per_s'])} bus, {c['seconds'] * 1e3:.3g} ms"
        for c in largest.values()
    ]
    return lines + [f"skipped {len(found['skipped'])} sizes"] * bool(found["skipped"])
