"""Scores made by hand for the tests of journal and G2: small, exact, and adjustable one gate at a time."""

from __future__ import annotations

from collections.abc import Sequence

from d2lib.gates.g2 import SplitPart, build_part
from d2lib.gates.journal import Computation, Contract, Identities, ScoredSplit
from d2lib.gates.request import RequestScore

K = 5
ROUNDS = 40
COMPUTATION = Computation(torch="2.13.0+cpu", device="cpu, a processor, AVX2", batched=True)
REQUESTS: dict[ScoredSplit, int] = {"heldout_legal": 20, "dev": 30, "heldout_general": 10}


def digest(letter: str) -> str:
    return "sha256:" + letter * 64


def identities(**changed: str) -> Identities:
    names = ["manifest", "native", "drafter", "adapter", "pilot", "recipe", "source"]
    values = {name: digest("0123456"[i]) for i, name in enumerate(names)}
    return Identities(**{"namespace": "demo-full", **values, **changed})


def anchors(rounds: int = ROUNDS) -> list[int]:
    return list(range(128, 128 + 3 * rounds, 3))


def scored(
    request: str,
    plus: int,
    *,
    rounds: int = ROUNDS,
    kl: tuple[Sequence[float], Sequence[float]] = ([0.5] * K, [0.4] * K),
) -> RequestScore:
    """A request in which the candidate gains one token in `plus` of its rounds (negative: loses)."""
    step = 1 if plus > 0 else -1
    candidate = [2 + step] * abs(plus) + [2] * (rounds - abs(plus))
    return RequestScore.of(request, anchors(rounds), ([2] * rounds, candidate), ([kl[0]] * rounds, [kl[1]] * rounds))


def names(split: ScoredSplit, count: int | None = None) -> list[str]:
    return [f"{split}-{i:03}" for i in range(REQUESTS[split] if count is None else count)]


def contract(split: ScoredSplit, count: int | None = None, **changed: str) -> Contract:
    population = {n: anchors() for n in names(split, count)}
    return Contract.of(split, K, digest("c"), identities(**changed), population, COMPUTATION)


def scores(split: ScoredSplit, plus: int = 8, count: int | None = None) -> list[RequestScore]:
    return [scored(name, plus) for name in names(split, count)]


def part(split: ScoredSplit, plus: int = 8, **changed: str) -> SplitPart:
    return build_part(contract(split, **changed), scores(split, plus))
