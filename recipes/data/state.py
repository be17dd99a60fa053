"""What a checkpoint says about the data: what it was, in which order, and how far every lane was
consumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from recipes.config import Data
from recipes.data.lanes import Cursor, Order
from recipes.data.scan import Scan
from recipes.data.tokens import Encoder

VERSION = 1  # of the order: raise it when the same settings would yield other sequences


@dataclass(frozen=True, kw_only=True)
class DataState:
    """Everything that decides which sequences come next; nothing about ranks, workers or
    micro-batches.
    """

    version: int
    seed: int
    lanes: int
    seq_len: int
    block_rows: int
    packing: str
    document_mask: bool
    global_sequences: int
    source: str  # hash of file names and sizes
    units: str  # hash of the division into units
    held_out: str
    revision: str | None
    tokenizer: str  # sha256 of tokenizer.json
    end_of_text: int  # token number
    skip_units: tuple[int, ...]
    next_sequence: int = 0  # the first one that is not consumed
    cursors: dict[int, Cursor]  # by lane, after its last consumed sequence

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; `from_json` is the inverse."""
        return asdict(self) | {
            "cursors": {str(lane): c.to_json() for lane, c in self.cursors.items()}
        }

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> DataState:
        """The state that `to_json` described.

        Raises:
            ValueError: it was written by another version of this package, or is no such state.
        """
        if tree.get("version") != VERSION:
            raise ValueError(
                f"the checkpoint's data state has version {tree.get('version')}, expected "
                f"{VERSION}; "
                "resume with the version of this package that wrote it"
            )
        names = {field.name for field in fields(cls)}
        if wrong := sorted(names.symmetric_difference(tree)):
            raise ValueError(
                f"the checkpoint's data state is damaged: missing or unknown keys {wrong}"
            )
        cursors = {int(lane): Cursor.from_json(cursor) for lane, cursor in tree["cursors"].items()}
        return cls(**{**tree, "cursors": cursors, "skip_units": tuple(tree["skip_units"])})


def data_state(
    data: Data,
    scan: Scan,
    encoder: Encoder,
    order: Order,
    global_sequences: int,
    *,
    next_sequence: int = 0,
    cursors: Mapping[int, Cursor] | None = None,
) -> DataState:
    """The state of this run after `next_sequence` consumed sequences."""
    return DataState(
        version=VERSION,
        seed=order.seed,
        lanes=order.lanes,
        seq_len=order.seq_len,
        block_rows=order.block_rows,
        packing=order.packing,
        document_mask=data.document_mask,
        global_sequences=global_sequences,
        **scan.fingerprints(),
        revision=scan.revision,
        tokenizer=encoder.fingerprint,
        end_of_text=encoder.eot,
        skip_units=tuple(sorted(data.skip_units)),
        next_sequence=next_sequence,
        cursors=dict(cursors or {}),
    )


def merge_cursors(ranks: Iterable[Mapping[int, Cursor]]) -> dict[int, Cursor]:
    """The cursors of all lanes, from what each rank (in rank order) has consumed.

    A rank may also hold cursors it started from, of lanes that are not its own: lane l belongs to
    rank l mod world, and only its word counts. A lane that its owner has not read keeps no cursor.
    """
    all_ranks = list(ranks)
    world = len(all_ranks)
    return {
        lane: cursor
        for rank, cursors in enumerate(all_ranks)
        for lane, cursor in sorted(cursors.items())
        if lane % world == rank
    }


def check_state(saved: DataState, current: DataState) -> None:
    """Refuse to resume on other data or in another order; world, workers and micro-batch may
    differ.

    `skip_units` may grow: a skipped unit keeps its place in the order, so every cursor stays valid.

    Raises:
        ValueError: one text with every field that differs and both values.
    """
    progress = {"next_sequence", "cursors", "skip_units"}
    names = [field.name for field in fields(DataState) if field.name not in progress]
    faults = [
        f"{name}: {getattr(saved, name)!r} in the checkpoint, {getattr(current, name)!r} now"
        for name in names
        if getattr(saved, name) != getattr(current, name)
    ]
    if dropped := sorted(set(saved.skip_units) - set(current.skip_units)):
        faults.append(
            f"skip_units: {list(saved.skip_units)} in the checkpoint, {list(current.skip_units)} "
            f"now "
            f"({dropped} must stay)"
        )
    if faults:
        raise ValueError(
            "the checkpoint belongs to other data or another order; restore these settings or "
            "start anew:\n" + "\n".join(f"  {fault}" for fault in faults)
        )
