"""What the gates on gain do on a run's own request structure: false passes, power, and the interval's coverage.

The model is the one that the request bootstrap assumes: gain of request i = μ + b_i + e_i, with b_i the request's own
effect (variance τ²) and e_i the mean of its n_i rounds' residuals (variance σ²/n_i). Both variances and the n_i come
from the run's scores. The gates on divergence have no part in it. Rounds within a request are taken as exchangeable:
per-request sums do not show how neighbouring rounds correlate; what that does to a request's mean is part of τ².

A shift of μ shifts the estimate, the interval's ends and every request's gain alike, so one set of simulations at μ = 0
gives the passing rate at every true gain.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from d2lib.errors import Refused
from d2lib.gates.g2 import SPECS
from d2lib.gates.journal import ScoredSplit
from d2lib.gates.request import RequestScore

Float64 = NDArray[np.float64]
Effects = Literal["normal", "empirical"]

METHODS = ("percentile", "BCa", "cluster t")
LEVEL = 0.95
TRUE_GAINS = tuple(step / 40 for step in range(-2, 17))
_SIMULATIONS_AT_ONCE = 64


@dataclass(frozen=True)
class Structure:
    """A run's request structure.

    rounds: [R] rounds per request. gains: [R] gain per request, accepted draft tokens per round.
    gain: the ratio of sums. tau: standard deviation between requests. sigma: standard deviation of one round's gain
    within its request.
    """

    rounds: Float64
    gains: Float64
    gain: float
    tau: float
    sigma: float

    @classmethod
    def of(cls, requests: Iterable[RequestScore]) -> Structure:
        """Estimate from scores: σ² pooled within requests, τ² by the method of moments, weighted by rounds.

        With w_i = τ² + σ²/n_i and Q = Σ n_i (g_i - g)², E Q = Σ n_i w_i - Σ n_i² w_i / N, which is solved for τ².
        """
        scores = sorted(requests, key=lambda score: score.request)
        if len(scores) < 2:
            raise Refused("a structure needs at least two requests", expected=">= 2", found=len(scores))
        rounds = np.array([score.rounds for score in scores], dtype=np.float64)
        gains = np.array([score.gain for score in scores])
        within = sum(_sum_of_squares(score) for score in scores)
        free = float(rounds.sum()) - len(scores)
        variance = within / free if free > 0 else 0.0
        total = float(rounds.sum())
        gain = float((rounds * gains).sum() / total)
        between = float((rounds * (gains - gain) ** 2).sum()) - variance * (len(scores) - 1)
        tau = math.sqrt(max(0.0, between / (total - float((rounds**2).sum()) / total)))
        return cls(rounds, gains, gain, tau, math.sqrt(variance))

    def sized(self, requests: int) -> Float64:
        """[requests] rounds per request: the run's own, or the run's quantiles for another number of requests."""
        if requests == self.rounds.size:
            return self.rounds
        return np.rint(np.quantile(self.rounds, (np.arange(requests) + 0.5) / requests))

    def simulate(self, requests: int, simulations: int, effects: Effects, rng: np.random.Generator) -> Float64:
        """[simulations, requests] gains per request at a true gain of 0."""
        shape = (simulations, requests)
        if effects == "empirical":
            pool = self.gains - self.gains.mean()
            scale = float(pool.std()) or 1.0
            between = rng.choice(pool / scale, size=shape)
        else:
            between = rng.standard_normal(shape)
        within = rng.standard_normal(shape) / np.sqrt(self.sized(requests))
        return np.asarray(self.tau * between + self.sigma * within)


@dataclass(frozen=True)
class Intervals:
    """Per simulation [S]: estimate, and per method the interval's ends [S, 2]; all at a true gain of 0."""

    estimate: Float64
    lowest: Float64
    ends: dict[str, Float64]


@dataclass(frozen=True)
class Calibration:
    """What the simulations say. `coverage` and `power` are tables, one dict a row; rates in 0 … 1."""

    split: ScoredSplit
    requests: int
    rounds: int
    gain: float
    tau: float
    sigma: float
    simulations: int
    resamples: int
    seed: int
    effects: Effects
    false_pass: float
    power_at_threshold: float | None
    power_at_estimate: float
    coverage: list[dict[str, Any]]
    power: list[dict[str, Any]]
    words: list[str]

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def calibrate(
    structure: Structure,
    *,
    split: ScoredSplit = "heldout_legal",
    simulations: int = 1000,
    resamples: int = 10_000,
    sizes: Sequence[int] = (12, 24, 30),
    true_gains: Sequence[float] = TRUE_GAINS,
    effects: Effects = "normal",
    seed: int = 23,
) -> Calibration:
    """Simulate runs with this structure and judge each by the split's gates on gain.

    Args:
        structure: of the run.
        split: whose gates.
        simulations, resamples: how many runs, and bootstrap resamples in each.
        sizes: numbers of requests to report the interval's coverage at.
        true_gains: μ, where the passing rate is reported.
        effects: requests' effects from a normal distribution, or resampled from the run's own, scaled to τ.
        seed: each number of requests has its own stream, from (seed, requests).
    """
    own = structure.rounds.size
    runs = {
        size: _intervals(structure, size, simulations, resamples, effects, np.random.default_rng([seed, size]))
        for size in sorted({*sizes, own})
    }
    coverage = [{"requests": size, **row, "nominal": LEVEL} for size in sorted(sizes) for row in _coverage(runs[size])]
    power = [_passing(split, gain, runs[own]) for gain in true_gains]
    threshold = SPECS[split].gain
    return Calibration(
        split=split,
        requests=own,
        rounds=int(structure.rounds.sum()),
        gain=structure.gain,
        tau=structure.tau,
        sigma=structure.sigma,
        simulations=simulations,
        resamples=resamples,
        seed=seed,
        effects=effects,
        false_pass=_passing(split, 0.0, runs[own])["passes"],
        power_at_threshold=None if threshold is None else _passing(split, threshold, runs[own])["passes"],
        power_at_estimate=_passing(split, structure.gain, runs[own])["passes"],
        coverage=coverage,
        power=power,
        words=[_coverage_words(row) for row in coverage if row["method"] == "percentile"],
    )


def percentile_ends(ordered: Float64) -> Float64:
    """[S, 2] percentile interval from sorted resamples [S, B]."""
    tail = np.full(len(ordered), (1 - LEVEL) / 2)
    return np.stack([_at(ordered, tail), _at(ordered, 1 - tail)], axis=1)


def bca_ends(ordered: Float64, estimate: Float64, sums: Float64, rounds: Float64) -> Float64:
    """[S, 2] bias-corrected and accelerated interval (Efron 1987) from sorted resamples [S, B].

    estimate: [S]. sums: [S, R] gain sums, rounds: [R]; the acceleration comes from the jackknife over requests.
    """
    normal = NormalDist()
    size = ordered.shape[1]
    below = ((ordered < estimate[:, None]).sum(axis=1) + (ordered <= estimate[:, None]).sum(axis=1)) / 2
    share = np.clip(below / size, 0.5 / size, 1 - 0.5 / size)
    bias = np.array([normal.inv_cdf(value) for value in share])
    left_out = (sums.sum(axis=1, keepdims=True) - sums) / (rounds.sum() - rounds)
    deviation = left_out.mean(axis=1, keepdims=True) - left_out
    spread = (deviation**2).sum(axis=1)
    acceleration = np.divide((deviation**3).sum(axis=1), 6 * spread**1.5, out=np.zeros_like(spread), where=spread > 0)
    ends = []
    for z in (normal.inv_cdf((1 - LEVEL) / 2), normal.inv_cdf((1 + LEVEL) / 2)):
        adjusted = bias + (bias + z) / (1 - acceleration * (bias + z))
        ends.append(_at(ordered, np.array([normal.cdf(value) for value in adjusted])))
    return np.stack(ends, axis=1)


def cluster_t_ends(sums: Float64, rounds: Float64) -> Float64:
    """[S, 2] linearised ratio of sums with a t interval on R - 1 degrees of freedom (Cochran 1977, section 6.4).

    sums: [S, R] gain sums. rounds: [R].
    """
    size, total = rounds.size, rounds.sum()
    ratio = sums.sum(axis=1) / total
    residual = sums - ratio[:, None] * rounds
    error = np.sqrt(size / (size - 1) * (residual**2).sum(axis=1)) / total
    reach = student_t_quantile((1 + LEVEL) / 2, size - 1) * error
    return np.stack([ratio - reach, ratio + reach], axis=1)


def student_t_quantile(probability: float, degrees: int) -> float:
    """Student's t quantile for 0.5 < probability < 0.9999, by quadrature of the density and bisection."""
    nodes, weights = np.polynomial.legendre.leggauss(128)
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(degrees * math.pi)

    def mass(t: float) -> float:
        x = 0.5 * t * (nodes + 1)
        return 0.5 * t * scale * float((weights * (1 + x**2 / degrees) ** (-(degrees + 1) / 2)).sum())

    low, high = 0.0, 64.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if mass(middle) < probability - 0.5 else (low, middle)
    return 0.5 * (low + high)


def _intervals(
    structure: Structure,
    requests: int,
    simulations: int,
    resamples: int,
    effects: Effects,
    rng: np.random.Generator,
) -> Intervals:
    rounds = structure.sized(requests)
    gains = structure.simulate(requests, simulations, effects, rng)
    sums = gains * rounds
    estimate = sums.sum(axis=1) / rounds.sum()
    # The gate's seed is fixed, so its resamples of R requests are the same in every run; so are these.
    weights = rng.multinomial(requests, np.full(requests, 1 / requests), size=resamples).astype(np.float64)
    drawn_rounds = weights @ rounds
    percentile, bca = [], []
    for start in range(0, simulations, _SIMULATIONS_AT_ONCE):
        part = slice(start, start + _SIMULATIONS_AT_ONCE)
        ordered = np.sort((sums[part] @ weights.T) / drawn_rounds, axis=1)
        percentile.append(percentile_ends(ordered))
        bca.append(bca_ends(ordered, estimate[part], sums[part], rounds))
    ends = (np.concatenate(percentile), np.concatenate(bca), cluster_t_ends(sums, rounds))
    return Intervals(estimate, gains.min(axis=1), dict(zip(METHODS, ends, strict=True)))


def _coverage(run: Intervals) -> list[dict[str, Any]]:
    """How often each interval covers the true gain, with that rate's own standard error."""
    rows = []
    for method, ends in run.ends.items():
        covered = (ends[:, 0] <= 0) & (ends[:, 1] >= 0)
        rate = float(covered.mean())
        rows.append(
            {
                "method": method,
                "coverage": rate,
                "standard_error": math.sqrt(max(rate * (1 - rate), 0.25 / covered.size) / covered.size),
                "mean_width": float((ends[:, 1] - ends[:, 0]).mean()),
                "misses_above": float((ends[:, 0] > 0).mean()),
                "misses_below": float((ends[:, 1] < 0).mean()),
            }
        )
    return rows


def _passing(split: ScoredSplit, gain: float, run: Intervals) -> dict[str, Any]:
    """Passing rates at a true gain: of each gate on gain, and of all of them together."""
    spec, everything = SPECS[split], np.ones(run.estimate.size, dtype=bool)
    at_least = spec.gain if spec.floor is None else spec.floor if spec.gain is None else max(spec.gain, spec.floor)
    holds = {
        "gain": run.estimate + gain >= at_least if at_least is not None else everything,
        "lower_bound": run.ends["percentile"][:, 0] + gain > spec.lower_bound
        if spec.lower_bound is not None
        else everything,
        "every_request": run.lowest + gain >= spec.request_gain,
    }
    passes = np.logical_and.reduce(list(holds.values()))
    return {
        "true_gain": gain,
        "passes": float(passes.mean()),
        **{name: float(held.mean()) for name, held in holds.items()},
    }


def _coverage_words(row: dict[str, Any]) -> str:
    size, rate, error = row["requests"], row["coverage"], row["standard_error"]
    if rate < LEVEL - 2 * error:
        judgement = "it covers too rarely: read its lower bound as somewhat less certain than 97.5%"
    elif rate > LEVEL + 2 * error:
        judgement = "it covers more often than it says"
    else:
        judgement = "it covers as often as it says, within the simulation's error"
    return (
        f"At {size} requests the percentile interval covers the true gain in {rate:.1%} of simulated runs "
        f"(±{2 * error:.1%}; nominal {LEVEL:.0%}): {judgement}."
    )


def _sum_of_squares(score: RequestScore) -> float:
    """Σ over the request's rounds of (gain - mean gain)², exact from the table of pairs."""
    squares = sum(count * (j - i) ** 2 for i, row in enumerate(score.pairs) for j, count in enumerate(row))
    return squares - score.gain_sum**2 / score.rounds


def _at(ordered: Float64, probability: Float64) -> Float64:
    """[S] each row's quantile at its own probability, by linear interpolation of sorted rows [S, B]."""
    place = np.clip(probability, 0, 1) * (ordered.shape[1] - 1)
    below = np.minimum(place.astype(np.int64), ordered.shape[1] - 2)
    row = np.arange(len(ordered))
    low, high = ordered[row, below], ordered[row, below + 1]
    return np.asarray(low + (high - low) * (place - below))
