"""Does the reference draft what the live loop drafted? Token by token, over every round of a trajectory.

The two compute in other orders, so where two tokens are as good as tied, either may win: such a round is counted apart,
with the margin by which the reference prefers its own token. Anything beyond rounding is a difference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from d2lib.data.blocks import D2Blocks
from d2lib.data.check import CheckRow, thousands
from d2lib.data.k2 import DRAFTS, K2File
from d2lib.drafter.batch import Round
from d2lib.drafter.batched import BatchedReference

MARGIN = 1e-4
"""A near tie: the reference prefers its token by no more than this share of its largest logit's magnitude."""
_BATCH = 256


@dataclass(frozen=True)
class Disagreement:
    """A round in which the drafts differ: the first slot that does, both tokens, and the reference's margin as a share
    of its largest logit's magnitude."""

    request: str
    anchor: int
    slot: int
    live: int
    reference: int
    margin: float


@dataclass(frozen=True)
class Parity:
    """What came out over a trajectory's rounds."""

    split: str
    rounds: int
    near_ties: list[Disagreement]
    differences: list[Disagreement]

    @property
    def equal(self) -> int:
        """Rounds whose two drafts are the same tokens."""
        return self.rounds - len(self.near_ties) - len(self.differences)

    def row(self) -> CheckRow:
        """The check for a table."""
        found = f"{thousands(self.rounds, 'round')}: {self.equal:,} equal, {thousands(len(self.near_ties), 'near tie')}"
        if self.near_ties:
            found += f" (margin at most {max(tie.margin for tie in self.near_ties):.1e})"
        if self.differences:
            worst = max(self.differences, key=lambda other: other.margin)
            found += (
                f", {len(self.differences):,} differ; the worst: {worst.request} anchor {worst.anchor} slot"
                f" {worst.slot}: live {worst.live}, reference {worst.reference}, margin {worst.margin:.1e}"
            )
        return CheckRow(
            name=f"parity with the live drafts, {self.split}",
            expected=f"the same two tokens in every round; a tie of at most {MARGIN:g} of the largest logit may differ",
            found=found,
            where=self.split,
            holds=self.rounds > 0 and not self.differences,
        )


@torch.no_grad()
def compare_drafts(
    drafter: BatchedReference,
    blocks: D2Blocks,
    k2: K2File,
    *,
    progress: Callable[[int], object] | None = None,
) -> Parity:
    """Draft every round of a trajectory in reference arithmetic and compare with what the live loop proposed.

    Args:
        drafter: the native drafter.
        blocks: of the trajectory's split.
        k2: the live trajectory.
        progress: called with the rounds done since the last call.
    """
    rounds = 0
    near_ties: list[Disagreement] = []
    differences: list[Disagreement] = []
    for request, lived in k2.rounds.items():
        for start in range(0, len(lived), _BATCH):
            part = lived[start : start + _BATCH]
            batch = blocks.rounds_batch(request, [found.anchor for found in part]).to(drafter.reference.head.device)
            drafts = drafter.draft_batch(batch, DRAFTS).tolist()
            for place, (found, again) in enumerate(zip(part, drafts, strict=True)):
                if again != list(found.drafts):
                    other = _disagreement(drafter, batch.round(place), request, list(found.drafts), again)
                    (near_ties if other.margin <= MARGIN else differences).append(other)
            rounds += len(part)
            if progress is not None:
                progress(len(part))
    return Parity(str(k2.header.split), rounds, near_ties, differences)


def _disagreement(
    drafter: BatchedReference, round: Round, request: str, live: list[int], again: list[int]
) -> Disagreement:
    slot = next(place for place in range(DRAFTS) if live[place] != again[place])
    previous = round.previous.clone()
    previous[1 : slot + 1] = torch.tensor(again[:slot], dtype=previous.dtype)
    logits = drafter.reference.forward(replace(round, previous=previous)).logits[slot]
    margin = float((logits[again[slot]] - logits[live[slot]]) / logits.abs().max())
    return Disagreement(request, round.anchor, slot, live[slot], again[slot], margin)
