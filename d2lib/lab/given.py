"""A drafter that someone else trained: its configuration against the target's, before anything large is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from d2lib.drafter.dense.checkpoint import read_dense
from d2lib.drafter.dense.config import DenseConfig
from d2lib.drafter.dense.refusals import refusals
from d2lib.drafter.dense.source import open_source
from d2lib.drafter.weights import Weights
from d2lib.errors import Refused
from d2lib.files import Record


class DrafterFolder(Record):
    """Where a drafter is that is not made here."""

    folder: str = Field(min_length=1)
    """A dense drafter's, in DeepSpec's, SpecForge's or speculators' layout; relative to the run root."""


@dataclass(frozen=True)
class GivenDrafter:
    """A drafter's folder and its target's, whose configurations agree."""

    folder: Path
    target: Path
    config: DenseConfig

    def read(self) -> Weights:
        """Its tensors in fp32, with the target's embedding and LM head; refuses as `read_dense`."""
        return read_dense(self.folder, self.target).weights


def open_drafter(folder: Path, target: Path, tap_layers: tuple[int, ...] | None, rows: int, span: int) -> GivenDrafter:
    """Read configurations and headers, and hold the one against the other.

    Args:
        folder: the drafter's.
        target: the target's.
        tap_layers: what the profile says, if it says so.
        rows: of the longest sequence.
        span: tokens of the shortest answer.

    Raises:
        Refused: for any reason that `refusals` knows (sizes, tapped layers, vocabulary, mask token), other taps than
            the profile's, fewer positions than rows, or answers without a complete round.
    """
    source = open_source(folder, target)
    config, reasons = refusals(source)
    if reasons or config is None:
        raise reasons[0].refused(source)
    wrong = (
        (
            tap_layers is not None and tap_layers != config.target_layer_ids,
            "target and drafter have other tapped layers",
            list(config.target_layer_ids),
            list(tap_layers or ()),
            "leave tap_layers out: they are the drafter's",
        ),
        (
            rows > config.max_position_embeddings,
            "sequences are longer than the drafter's positions",
            f"longest_prompt + longest_answer up to {config.max_position_embeddings}",
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
            raise Refused(message, expected=expected, found=found, where=source.config, remedy=remedy)
    return GivenDrafter(folder, target, config)
