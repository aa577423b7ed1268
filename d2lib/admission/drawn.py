"""What admission computes again is drawn afresh: whoever made the inputs could not know which part it would be.

The seed comes from the operating system and stands in the receipt, so that anyone can draw the same part again.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence
from typing import TypeVar

from d2lib.files import canonical_json

T = TypeVar("T")


def fresh_seed() -> str:
    """32 random bytes in hex, other ones at every admission."""
    return os.urandom(32).hex()


def draw(seed: str, purpose: str, items: Sequence[T], count: int) -> list[T]:
    """A simple random sample without replacement, in the items' order; all of them when there are no more.

    The items with the lowest SHA-256(seed, purpose, item) are taken, as in d2lib.data.sample.

    Args:
        items: plain values, each once.
        count: how many.
    """

    def rank(place: int) -> bytes:
        return hashlib.sha256(canonical_json([seed, purpose, items[place]])).digest()

    return [items[place] for place in sorted(sorted(range(len(items)), key=rank)[:count])]


def detection(population: int, drawn: int, share: float = 0.01) -> float:
    """The probability that `drawn` of `population` items, without replacement, hold at least one of the bad ones.

    The bad ones are `share` of the population, rounded up (hypergeometric distribution).
    """
    bad = math.ceil(share * population)
    if drawn > population - bad:
        return 1.0
    missed = math.lgamma(population - bad + 1) - math.lgamma(population - bad - drawn + 1)
    missed -= math.lgamma(population + 1) - math.lgamma(population - drawn + 1)
    return 1 - math.exp(missed)
