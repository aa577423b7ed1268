"""The frozen sample: which complete rounds the pilot is judged on, fixed by the data's digests before any training.

Every round of a split's population gets the rank SHA-256(seed, split, request, anchor), and the rounds with the lowest
ranks are taken: a simple random sample without replacement that needs no random-number library, does not depend on the
order of anything, and that anyone can redraw.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from d2lib.data.manifest import Split
from d2lib.errors import Refused
from d2lib.files import Hashed, canonical_json, sha256_bytes

SIZE = 1000
SAMPLED: tuple[Literal["dev"], Literal["heldout_legal"]] = ("dev", "heldout_legal")
"""The splits that the pilot is judged on."""

Population = Mapping[str, Sequence[int]]
"""Request → anchors of its complete rounds."""


@dataclass(frozen=True)
class FrozenSample:
    """A drawn sample.

    rounds: split → (request, anchor), sorted. population_rounds: split → complete rounds it was drawn from.
    whole: split → whether the population was no larger than `size`, so that all of it was taken.
    """

    namespace: str
    seed: Hashed
    size: int
    population_rounds: dict[Split, int]
    rounds: dict[Split, list[tuple[str, int]]]

    @property
    def whole(self) -> dict[Split, bool]:
        """Split → whether every complete round was taken."""
        return {split: count <= self.size for split, count in self.population_rounds.items()}

    @property
    def identity(self) -> Hashed:
        """Digest over everything above; two samples with one identity are the same sample."""
        return sha256_bytes(
            canonical_json(
                {
                    "namespace": self.namespace,
                    "seed": str(self.seed),
                    "size": self.size,
                    "population_rounds": self.population_rounds,
                    "rounds": {split: [list(pair) for pair in pairs] for split, pairs in self.rounds.items()},
                }
            )
        )

    def as_dict(self) -> dict[str, Any]:
        """What a receipt keeps: everything but the rounds themselves, which anyone can redraw."""
        return {
            "namespace": self.namespace,
            "seed": str(self.seed),
            "identity": str(self.identity),
            "size": self.size,
            "population_rounds": dict(self.population_rounds),
            "rounds": {split: len(pairs) for split, pairs in self.rounds.items()},
            "whole": self.whole,
        }


def sample_seed(namespace: str, k2: Mapping[Split, Hashed]) -> Hashed:
    """SHA-256 over the namespace and the K2 files' digests by split, as canonical JSON."""
    return sha256_bytes(canonical_json({"namespace": namespace, "k2": {name: str(k2[name]) for name in sorted(k2)}}))


def frozen_sample(
    namespace: str, populations: Mapping[Split, tuple[Hashed, Population]], size: int = SIZE
) -> FrozenSample:
    """Draw `size` rounds from each split's population; all of them when there are no more.

    Args:
        namespace: the pilot's.
        populations: split → (digest of its K2 file, its complete rounds).
        size: rounds per split.
    Raises Refused: no splits, a split without complete rounds, or a size below 1.
    """
    if not populations or size < 1:
        raise Refused("nothing to draw from", expected="splits and a size >= 1", found=f"{len(populations)}, {size}")
    seed = sample_seed(namespace, {split: digest for split, (digest, _) in populations.items()})
    rounds: dict[Split, list[tuple[str, int]]] = {}
    counts: dict[Split, int] = {}
    for split in sorted(populations):
        pairs = {(request, int(anchor)) for request, anchors in populations[split][1].items() for anchor in anchors}
        if not pairs:
            raise Refused("a split has no complete round", expected=">= 1", found=0, where=split)
        counts[split] = len(pairs)
        rounds[split] = sorted(sorted(pairs, key=lambda pair: (_rank(seed, split, *pair), pair))[:size])
    return FrozenSample(namespace, seed, size, counts, rounds)


def _rank(seed: Hashed, split: Split, request: str, anchor: int) -> bytes:
    return hashlib.sha256(f"{seed}\n{split}\n{request}\n{anchor}".encode()).digest()
