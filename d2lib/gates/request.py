"""What is kept of one request: exact counts per arm, so that every figure and gate downstream is a ratio of sums."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Self

from pydantic import Field, model_validator

from d2lib.files import Record, canonical_json, sha256_bytes
from d2lib.gates.gate import digest_field

KL_ROUNDING = 1e-9  # nats per round by which rounding may take a divergence below zero


class ArmScore(Record):
    """One drafter on one request's rounds; K slots.

    accepted_sum: accepted draft tokens over all rounds, bonus excluded.
    accepted_by_slot: [K] rounds in which slot k was accepted, i.e. the accepted prefix is longer than k.
    kl_sum: [K] Σ over rounds of KL(teacher || drafter) at slot k, teacher-forced, in nats.
    """

    rounds: int = Field(gt=0)
    accepted_sum: int = Field(ge=0)
    accepted_by_slot: list[int] = Field(min_length=1)
    kl_sum: list[float] = Field(min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(self.kl_sum) != len(self.accepted_by_slot):
            raise ValueError(f"{len(self.accepted_by_slot)} slots accepted, {len(self.kl_sum)} slots of KL")
        chain = [self.rounds, *self.accepted_by_slot, 0]
        if any(later > earlier for earlier, later in pairwise(chain)):
            raise ValueError(f"an accepted prefix cannot grow from slot to slot: {chain[1:-1]} of {self.rounds} rounds")
        if sum(self.accepted_by_slot) != self.accepted_sum:
            raise ValueError(f"slots sum to {sum(self.accepted_by_slot)} accepted tokens, not {self.accepted_sum}")
        if min(self.kl_sum) < -KL_ROUNDING * self.rounds:
            raise ValueError(f"a divergence is negative: {min(self.kl_sum)}")
        return self


class RequestScore(Record):
    """Baseline and candidate on the same rounds of one request.

    anchors: digest of the list of anchors, in order (see `anchors_digest`).
    pairs: [K+1][K+1], pairs[i][j] = rounds in which the baseline accepted i and the candidate j draft tokens.
    """

    request: str = Field(min_length=1)
    rounds: int = Field(gt=0)
    anchors: str = digest_field()
    baseline: ArmScore
    candidate: ArmScore
    pairs: list[list[int]]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        size = len(self.pairs)
        if any(len(row) != size for row in self.pairs) or min(min(row) for row in self.pairs) < 0:
            raise ValueError("pairs is not a square table of counts")
        margins = {
            "baseline": [sum(row) for row in self.pairs],
            "candidate": [sum(row[j] for row in self.pairs) for j in range(size)],
        }
        for arm, margin in margins.items():
            score: ArmScore = getattr(self, arm)
            if score.rounds != self.rounds:
                raise ValueError(f"{arm} covers {score.rounds} rounds, the request has {self.rounds}")
            if sum(margin) != self.rounds or [sum(margin[k + 1 :]) for k in range(size - 1)] != score.accepted_by_slot:
                raise ValueError(f"pairs and {arm}.accepted_by_slot disagree")
        return self

    @classmethod
    def of(
        cls,
        request: str,
        anchors: Sequence[int],
        accepted: tuple[Sequence[int], Sequence[int]],
        kl: tuple[Sequence[Sequence[float]], Sequence[Sequence[float]]],
    ) -> RequestScore:
        """Tally R rounds of (baseline, candidate).

        Args:
            request: the request's id.
            anchors: [R] anchors, rising.
            accepted: per arm [R] accepted draft tokens, bonus excluded.
            kl: per arm [R][K] nats. Summed by `math.fsum`, which rounds once, so that no order or batch shows.
        """
        slots = range(len(kl[0][0]))
        pairs = [[0] * (len(slots) + 1) for _ in range(len(slots) + 1)]
        for first, second in zip(*accepted, strict=True):
            pairs[first][second] += 1
        arms = [
            ArmScore(
                rounds=len(counts),
                accepted_sum=sum(counts),
                accepted_by_slot=[sum(count > k for count in counts) for k in slots],
                kl_sum=[math.fsum(row[k] for row in rows) for k in slots],
            )
            for counts, rows in zip(accepted, kl, strict=True)
        ]
        return cls(
            request=request,
            rounds=len(anchors),
            anchors=anchors_digest(anchors),
            baseline=arms[0],
            candidate=arms[1],
            pairs=pairs,
        )

    @property
    def gain_sum(self) -> int:
        """Σ over rounds of accepted candidate - accepted baseline."""
        return self.candidate.accepted_sum - self.baseline.accepted_sum

    @property
    def gain(self) -> float:
        """Accepted draft tokens per round that the candidate gains, bonus excluded."""
        return self.gain_sum / self.rounds


def anchors_digest(anchors: Sequence[int]) -> str:
    """`sha256:…` over the anchors' canonical JSON; names a request's rounds."""
    return str(sha256_bytes(canonical_json([int(anchor) for anchor in anchors])))
