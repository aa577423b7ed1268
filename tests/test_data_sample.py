"""The frozen sample: anyone redraws the same rounds, and another namespace or digest gives others."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from d2lib.data.manifest import Split
from d2lib.data.sample import FrozenSample, frozen_sample, sample_seed
from d2lib.errors import Refused
from d2lib.files import Hashed

DEV, LEGAL = Hashed("sha256", "a" * 64), Hashed("sha256", "b" * 64)


def populations(requests: int = 6, rounds: int = 50) -> dict[Split, tuple[Hashed, dict[str, list[int]]]]:
    def of(split: str) -> dict[str, list[int]]:
        return {f"{split}-{i}": list(range(128, 128 + 2 * rounds, 2)) for i in range(requests)}

    return {"dev": (DEV, of("dev")), "heldout_legal": (LEGAL, of("legal"))}


def draw(size: int = 40, namespace: str = "demo", **changed: Any) -> FrozenSample:
    return frozen_sample(namespace, populations(), size)


def test_a_redraw_is_the_same_sample() -> None:
    first = draw()
    assert first == draw()
    assert first.identity == draw().identity
    assert {split: len(pairs) for split, pairs in first.rounds.items()} == {"dev": 40, "heldout_legal": 40}
    for split, pairs in first.rounds.items():
        assert pairs == sorted(set(pairs))
        population = populations()[split][1]
        assert all(anchor in population[request] for request, anchor in pairs)
    assert first.population_rounds == {"dev": 300, "heldout_legal": 300}
    assert first.whole == {"dev": False, "heldout_legal": False}


def test_it_is_the_documented_draw() -> None:
    """From the description alone: the lowest SHA-256 ranks under a seed over namespace and digests."""
    text = json.dumps(
        {"k2": {"dev": str(DEV), "heldout_legal": str(LEGAL)}, "namespace": "demo"}, separators=(",", ":")
    )
    seed = "sha256:" + hashlib.sha256(text.encode()).hexdigest()
    found = draw()
    assert str(found.seed) == seed
    ranked = sorted(
        (hashlib.sha256(f"{seed}\ndev\n{request}\n{anchor}".encode()).digest(), (request, anchor))
        for request, anchors in populations()["dev"][1].items()
        for anchor in anchors
    )
    assert found.rounds["dev"] == sorted(pair for _, pair in ranked[:40])


def test_namespace_and_every_digest_change_it() -> None:
    other = Hashed("sha256", "c" * 64)
    population = populations()
    samples = [
        draw(),
        draw(namespace="demo2"),
        frozen_sample("demo", population | {"dev": (other, population["dev"][1])}, 40),
        frozen_sample("demo", population | {"heldout_legal": (other, population["heldout_legal"][1])}, 40),
        frozen_sample("demo", {"dev": (LEGAL, population["dev"][1]), "heldout_legal": (DEV, {"x": [1]})}, 40),
    ]
    assert len({str(sample.seed) for sample in samples}) == 5
    assert len({str(sample.identity) for sample in samples}) == 5
    assert len({tuple(sample.rounds["dev"]) for sample in samples}) == 5


@settings(max_examples=8, deadline=None)
@given(st.randoms(use_true_random=False))
def test_no_order_shows(random: Any) -> None:
    shuffled: dict[Split, tuple[Hashed, dict[str, list[int]]]] = {}
    splits = list(populations().items())
    random.shuffle(splits)
    for split, (digest, population) in splits:
        requests = list(population.items())
        random.shuffle(requests)
        shuffled[split] = (digest, {name: random.sample(anchors, len(anchors)) for name, anchors in requests})
    assert frozen_sample("demo", shuffled, 40).identity == draw().identity


def test_a_small_population_is_taken_whole_and_says_so() -> None:
    found = draw(size=300)
    assert found.whole == {"dev": True, "heldout_legal": True}
    assert found.as_dict()["whole"] == {"dev": True, "heldout_legal": True}
    assert len(found.rounds["dev"]) == 300
    assert draw(size=299).whole["dev"] is False
    assert draw(size=299).identity != found.identity


def test_every_round_has_the_same_chance() -> None:
    """Over 300 seeds each of 300 rounds is drawn about 300·40/300 = 40 times (sd 5.9); five sd on each side."""
    counts = Counter(
        pair for number in range(300) for pair in frozen_sample(f"n{number}", populations(), 40).rounds["dev"]
    )
    assert len(counts) == 300
    assert min(counts.values()) > 10
    assert max(counts.values()) < 70
    variance = sum((count - 40) ** 2 for count in counts.values()) / 300
    assert 20 < variance < 55  # binomial: 34.7


def test_nothing_to_draw_from_is_refused() -> None:
    with pytest.raises(Refused, match="no complete round"):
        frozen_sample("demo", {"dev": (DEV, {"r": []})})
    with pytest.raises(Refused, match="nothing to draw from"):
        frozen_sample("demo", {})
    with pytest.raises(Refused, match="nothing to draw from"):
        draw(size=0)
    assert sample_seed("a", {"dev": DEV}) != sample_seed("a", {"heldout_legal": DEV})
