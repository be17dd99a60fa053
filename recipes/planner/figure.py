"""A number of the plan, with its band and where it comes from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

Source = Literal["formula", "traced", "measured", "table", "assumed"]
# A result is no better founded than the weakest number in it.
_WEAKEST: tuple[Source, ...] = ("assumed", "table", "formula", "traced", "measured")


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A value that lies between `low` and `high`, in `unit`.

    Attributes:
        source: formula (exact arithmetic of known inputs), traced (counted on the real model),
            measured (by `octet preflight` or a run), table (a data sheet or a published
            measurement), assumed (nobody measured it for this case).
        basis: one phrase that says which formula, table or file.
    """

    value: float
    low: float
    high: float
    unit: str
    source: Source
    basis: str

    def __post_init__(self) -> None:
        assert self.low <= self.value <= self.high, self

    def times(self, factor: float, unit: str = "", basis: str = "") -> Figure:
        """The figure scaled by an exactly known positive factor."""
        return Figure(
            value=self.value * factor,
            low=self.low * factor,
            high=self.high * factor,
            unit=unit or self.unit,
            source=self.source,
            basis=basis or self.basis,
        )

    def to_json(self) -> dict[str, Any]:
        """As JSON holds it: its attributes by name."""
        return asdict(self)

    def inverse(self, numerator: float, unit: str, basis: str) -> Figure:
        """`numerator / figure`: a rate from a time, or a time from a rate."""
        return Figure(
            value=numerator / self.value,
            low=numerator / self.high,
            high=numerator / self.low,
            unit=unit,
            source=self.source,
            basis=basis,
        )


def exact(value: float, unit: str, basis: str) -> Figure:
    """What a formula gives from known inputs, without a band."""
    return Figure(value=value, low=value, high=value, unit=unit, source="formula", basis=basis)


def total(parts: Iterable[Figure], unit: str, basis: str) -> Figure:
    """A sum whose parts may all be off in the same direction: the bands add up."""
    listed = list(parts)
    return Figure(
        value=sum(p.value for p in listed),
        low=sum(p.low for p in listed),
        high=sum(p.high for p in listed),
        unit=unit,
        source=min((p.source for p in listed), key=_WEAKEST.index, default="formula"),
        basis=basis,
    )
