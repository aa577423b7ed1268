"""A drafter that someone else trained: its configuration against the target's, before anything large is read."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from d2lib.drafter.family import Stored, open_stored
from d2lib.errors import Refused
from d2lib.files import Record


class DrafterFolder(Record):
    """Where a drafter is that is not made here."""

    folder: str = Field(min_length=1)
    """A dense drafter's, in DeepSpec's, SpecForge's or speculators' layout; relative to the run root."""


def open_drafter(folder: Path, target: Path, tap_layers: tuple[int, ...] | None, rows: int, span: int) -> Stored:
    """Read configurations and headers, and hold the one against the other.

    Args:
        folder: the drafter's.
        target: the target's.
        tap_layers: what the profile says, if it says so.
        rows: of the longest sequence.
        span: tokens of the shortest answer.

    Raises:
        Refused: for any reason that its family knows (sizes, tapped layers, vocabulary, mask token), other taps than
            the profile's, fewer positions than rows, or answers without a complete round.
    """
    stored = open_stored(folder, target)
    config = stored.config
    positions = getattr(config, "max_position_embeddings", rows)
    wrong = (
        (
            tap_layers is not None and tap_layers != config.target_layer_ids,
            "target and drafter have other tapped layers",
            list(config.target_layer_ids),
            list(tap_layers or ()),
            "leave tap_layers out: they are the drafter's",
        ),
        (
            rows > positions,
            "sequences are longer than the drafter's positions",
            f"longest_prompt + longest_answer up to {positions}",
            rows,
            "shorten longest_prompt or longest_answer",
        ),
        (
            span < max(2, config.block_size + 1),
            "an answer may be too short for one complete round",
            f"least_answer of at least {max(2, config.block_size + 1)}: the drafter's block and its anchor",
            span,
            "raise least_answer",
        ),
    )
    for holds, message, expected, found, remedy in wrong:
        if holds:
            raise Refused(message, expected=expected, found=found, where=folder, remedy=remedy)
    return stored
