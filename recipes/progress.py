"""How far a run is: the counters that a checkpoint keeps."""

from __future__ import annotations

from dataclasses import dataclass, field

from recipes.engine.update import Agreement, UpdateResult


@dataclass(kw_only=True)
class Progress:
    """How far the run is: the counters of a checkpoint."""

    applied: int = 0
    windows: int = 0  # consumed, skipped ones included
    skipped: int = 0
    skipped_in_a_row: int = 0
    tokens: int = 0
    samples: int = 0
    scales: list[float] = field(default_factory=list)  # of the last 64 windows, for the report

    def settle(self, result: UpdateResult, agreed: Agreement) -> None:
        """Account for one window after its update."""
        self.windows += 1
        self.scales = [*self.scales[-63:], result.loss_scale]
        if result.applied:
            self.applied, self.skipped_in_a_row = self.applied + 1, 0
            self.tokens, self.samples = self.tokens + agreed.tokens, self.samples + agreed.samples
        else:
            self.skipped, self.skipped_in_a_row = self.skipped + 1, self.skipped_in_a_row + 1
