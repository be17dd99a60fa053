"""What a run costs in days, GPU-hours and money, and how often to save it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from recipes.config import Batch, Checkpoint, Schedule
from recipes.metrics import human_seconds
from recipes.objective import run_length
from recipes.planner.figure import Figure, exact, total

HOUR = 3600.0
DAY = 24 * HOUR
# Llama 3 405B: 419 unexpected interruptions in 54 days on 16,384 H100 ("The Llama 3 Herd of
# Models", arXiv 2407.21783, section 3.3.4, table 5): one in 50,700 hours of a GPU.
PUBLISHED_MTBF_HOURS = 54 * 24 * 16384 / 419
PUBLISHED_MTBF = Figure(
    value=PUBLISHED_MTBF_HOURS,
    low=PUBLISHED_MTBF_HOURS,
    high=PUBLISHED_MTBF_HOURS,
    unit="h",
    source="table",
    basis="Llama 3 405B: 419 unexpected interruptions in 54 days on 16,384 H100",
)
# A run that loses more than this share of its time to failures does not come to its end: per cent.
HOPELESS = 90.0
MOST_EXPONENT = 700.0  # above which e to it is no float
# From GPU to page-locked host memory, per GPU while all of a node copy: PCIe 4.0 x16 carries 32
# GB/s on paper, memory that could not be page-locked takes some 3 GB/s.
HOST_COPY = Figure(
    value=10e9,
    low=3e9,
    high=25e9,
    unit="B/s",
    source="assumed",
    basis="GPU to host memory over PCIe 4.0, every GPU at once",
)
# What all nodes together write to and read from the run folder's disk.
DISK = Figure(
    value=1e9,
    low=0.2e9,
    high=5e9,
    unit="B/s",
    source="assumed",
    basis="a shared file system, all nodes together; `octet preflight RUN.yaml` measures yours",
)
# From a lost GPU until the first update of the new start, loading left out: noticing it, taking a
# spare node or giving up the lost one, starting every process.
RESTART = Figure(
    value=300.0,
    low=120.0,
    high=1800.0,
    unit="s",
    source="assumed",
    basis="noticing the loss, another node, starting every process",
)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """A whole run; without evaluations, checkpoints and failures.

    Attributes:
        price: None where no price was given; in its currency.
        tokens_per_sample: of a document; None where the length does not need it.
    """

    updates: int
    tokens: Figure
    tokens_per_sample: Figure | None
    days: Figure
    gpu_hours: Figure
    price: Figure | None


def tokens_of_a_sample(schedule: Schedule, batch: Batch, given: float | None) -> Figure | None:
    """The mean length of a document: given, stated in the run file, or assumed to fill a sequence.

    None where the run's length is in tokens or updates.
    """
    if schedule.samples is None:
        return None
    if given is not None:
        return exact(given, "tokens", "--tokens-per-sample")
    if schedule.tokens_per_sample is not None:
        return exact(schedule.tokens_per_sample, "tokens", "schedule.tokens_per_sample")
    return Figure(
        value=batch.seq_len,
        low=batch.seq_len,
        high=batch.seq_len,
        unit="tokens",
        source="assumed",
        basis="a document fills one sequence; the run measures it at its start, and updates, days "
        "and price grow in proportion",
    )


def cost(
    schedule: Schedule,
    batch: Batch,
    *,
    update: Figure,
    world: int,
    tokens_per_sample: float | None = None,
    price_per_gpu_hour: float | None = None,
) -> Cost:
    """What the run of a run file takes at `update` seconds an update on `world` GPUs.

    updates = ceil(samples x tokens per sample / (sequences x seq_len)); days = updates x update;
    GPU-hours = hours x GPUs; price = GPU-hours x price.

    Raises:
        ValueError: the length is in epochs, which only the data can turn into updates.
    """
    if schedule.epochs is not None:
        raise ValueError(
            f"schedule.epochs={schedule.epochs}: the plan reads no data, so it can't count the "
            "documents; plan with schedule.epochs=null schedule.samples=N (or tokens, or updates)"
        )
    sample = tokens_of_a_sample(schedule, batch, tokens_per_sample)
    length = run_length(
        schedule,
        batch,
        samples=schedule.samples,
        tokens_per_sample=None if sample is None else sample.value,
    )
    per_update = batch.global_sequences * batch.seq_len
    tokens = exact(float(length.updates * per_update), "tokens", "updates x tokens an update")
    if sample is not None:
        assert schedule.samples is not None
        tokens = sample.times(schedule.samples, "tokens", f"samples x tokens each: {sample.basis}")
    seconds = update.times(length.updates, "s", "updates x time of an update")
    hours = seconds.times(world / HOUR, "GPU-hours", "hours x GPUs")
    price = None
    if price_per_gpu_hour is not None:
        price = hours.times(price_per_gpu_hour, "currency of --price", "GPU-hours x --price")
    return Cost(
        updates=length.updates,
        tokens=tokens,
        tokens_per_sample=sample,
        days=seconds.times(1 / DAY, "days"),
        gpu_hours=hours,
        price=price,
    )


@dataclass(frozen=True, kw_only=True)
class Save:
    """What one checkpoint costs, and what a failure costs beside the work since the last one.

    Attributes:
        stall: training stands still so long for each save, seconds.
        written: until the save would survive a crash, seconds after its update.
        restart: from a failure to the first update of the next start, seconds.
    """

    stall: Figure
    written: Figure
    restart: Figure


def saving(checkpoint_bytes: float, world: int, policy: Checkpoint) -> Save:
    """The cost of `policy.write`: in the background a copy to host memory, else the whole write.

    Every rank copies its share at once; the disk's rate is that of all nodes together.
    """
    copy = HOST_COPY.inverse(
        checkpoint_bytes / world, "s", f"checkpoint / GPUs / {HOST_COPY.basis}"
    )
    disk = DISK.inverse(checkpoint_bytes, "s", f"checkpoint / {DISK.basis}")
    blocking = policy.write == "blocking"
    return Save(
        stall=disk if blocking else copy,
        written=disk if blocking else total((copy, disk), "s", "copied, then written"),
        restart=total((RESTART, disk), "s", f"{RESTART.basis}, loading the checkpoint"),
    )


def failures(gpu_hours: Figure, mtbf: Figure) -> Figure:
    """Failures that a run of so many GPU-hours must expect; `mtbf`: hours of one GPU."""
    source = total([gpu_hours, mtbf], "", "").source
    expected = gpu_hours.times(1 / mtbf.value, "failures", f"GPU-hours / MTBF ({mtbf.basis})")
    return replace(expected, source=source)


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A time between two saves, and the share of the run that saves and failures then take.

    Attributes:
        seconds: of training, from save to save.
        updates: the nearest whole number of updates, one at least.
        loss: per cent of the run's time, saves, work done twice and restarts together.
    """

    seconds: Figure
    updates: int
    loss: Figure

    @property
    def progresses(self) -> bool:
        """Whether the run comes to its end in spite of its failures."""
        return self.loss.value < HOPELESS


def best_interval(save_s: float, mtbf_s: float) -> float:
    """The time between saves, seconds, that loses least at a mean time between failures.

    Young 1974: sqrt(2·δ·M); Daly 2006, equation 37, adds terms that matter where δ is not small:
    sqrt(2·δ·M)·(1 + sqrt(δ/2M)/3 + δ/2M/9) - δ below δ = 2M, M above.
    """
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = save_s / (2 * mtbf_s)
    return math.sqrt(2 * save_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def lost_share(
    interval_s: float, mtbf_s: float, stall: float, written: float, again: float
) -> float:
    """Share of the time that saves and failures take, 0 to 1.

    Daly 2006: an interval τ of work takes M·e^((w+R)/M)·(e^((τ+δ)/M) - 1) with failures that come
    at random, each of which costs the restart R and what was not yet written, w. For rare failures
    that is δ/τ + (τ/2 + w + R)/M.
    """
    restart, work = (written + again) / mtbf_s, (interval_s + stall) / mtbf_s
    if restart + work > MOST_EXPONENT:
        return 1.0
    return 1.0 - interval_s / (mtbf_s * math.exp(restart) * math.expm1(work))


def checkpoint_interval(save: Save, mtbf: Figure, world: int, update: Figure) -> Interval:
    """The whole updates that cost least; `mtbf` is of one GPU, the first failure stops all."""
    between = mtbf.value * HOUR / world

    def whole(stall: float) -> float:
        """Seconds of the nearest whole number of updates."""
        return max(1, round(best_interval(stall, between) / update.value)) * update.value

    seconds = Figure(
        value=whole(save.stall.value),
        low=whole(save.stall.low),
        high=whole(save.stall.high),
        unit="s",
        source="assumed",
        basis=f"Daly 2006: a save's stall, a failure every {human_seconds(between)} ({mtbf.basis})",
    )
    return interval_of(seconds, save, mtbf, world, update)


def interval_of(seconds: Figure, save: Save, mtbf: Figure, world: int, update: Figure) -> Interval:
    """An interval that was chosen, with its loss."""
    between = mtbf.value * HOUR / world
    at = seconds.value
    low, value, high = (
        100 * lost_share(at, between, stall, written, again)
        for stall, written, again in (
            (save.stall.low, save.written.low, save.restart.low),
            (save.stall.value, save.written.value, save.restart.value),
            (save.stall.high, save.written.high, save.restart.high),
        )
    )
    return Interval(
        seconds=seconds,
        updates=max(1, round(at / update.value)),
        loss=Figure(
            value=value,
            low=low,
            high=high,
            unit="%",
            source="assumed",
            basis="Daly 2006: saves, work done twice and restarts, of all time",
        ),
    )


def policy_interval(policy: Checkpoint, update: Figure) -> Figure:
    """The time between two saves of a run file: whichever of its two comes first.

    A save waits for the end of an update, so none is shorter than one.
    """
    by_updates = None
    if policy.every_updates is not None:
        basis = f"checkpoint.every_updates={policy.every_updates}"
        by_updates = update.times(policy.every_updates, "s", basis)
    if policy.every_minutes is None:
        assert by_updates is not None
        return by_updates
    basis = f"checkpoint.every_minutes={policy.every_minutes:g}"
    by_minutes = exact(policy.every_minutes * 60, "s", basis)
    if by_minutes.value < update.value:
        return update.times(1, "s", f"{basis}, so after every update")
    if by_updates is None or by_minutes.value < by_updates.value:
        return by_minutes
    return by_updates
