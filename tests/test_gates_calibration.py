"""The calibration against closed forms (equal normal clusters), scipy's intervals, and the real gate."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from gates_cases import K, anchors, scored
from scipy import stats

from d2lib.errors import Refused
from d2lib.gates.bootstrap import paired_request_bootstrap
from d2lib.gates.calibration import (
    LEVEL,
    Structure,
    bca_ends,
    calibrate,
    cluster_t_ends,
    percentile_ends,
    student_t_quantile,
)
from d2lib.gates.request import RequestScore

EQUAL = Structure(rounds=np.full(24, 100.0), gains=np.zeros(24), gain=0.2, tau=0.06, sigma=0.8)
DEVIATION = math.hypot(0.06, 0.8 / 10)  # of one request's gain
UNEQUAL = replace(EQUAL, rounds=np.array([60.0, 70, 80, 100, 140, 150, 240, 300, 310, 320, 330, 500] * 2))


def near(rate: float, simulations: int) -> float:
    """Four standard errors of a simulated rate."""
    return 4 * math.sqrt(max(rate * (1 - rate), 1 / simulations) / simulations)


@pytest.mark.parametrize("degrees", [1, 2, 9, 11, 23, 29, 100])
@pytest.mark.parametrize("probability", [0.6, 0.9, 0.975, 0.995])
def test_t_quantile_is_scipys(degrees: int, probability: float) -> None:
    if (degrees, probability) != (1, 0.995):  # 63.66, the edge of the search
        assert student_t_quantile(probability, degrees) == pytest.approx(stats.t.ppf(probability, degrees), rel=1e-9)


@pytest.mark.parametrize("size", [4, 12, 24, 30])
def test_cluster_t_covers_equal_normal_clusters_exactly(size: int) -> None:
    """With equal clusters the ratio is a mean, the interval is Student's, and its coverage is the nominal one."""
    rounds, simulations = np.full(size, 50.0), 40_000
    sums = np.random.default_rng(size).normal(0, 3, (simulations, size)) * rounds
    ends = cluster_t_ends(sums, rounds)
    covered = float(((ends[:, 0] <= 0) & (ends[:, 1] >= 0)).mean())
    assert covered == pytest.approx(LEVEL, abs=near(LEVEL, simulations))
    theirs = stats.ttest_1samp(sums[0] / 50, 0).confidence_interval(LEVEL)
    assert ends[0] == pytest.approx(theirs, rel=1e-9)


def ratio(gain: np.ndarray, rounds: np.ndarray, axis: int = -1) -> np.ndarray:
    return gain.sum(axis=axis) / rounds.sum(axis=axis)


@pytest.mark.parametrize("skew", [False, True])
@pytest.mark.parametrize("method", ["percentile", "BCa"])
def test_intervals_are_scipys_on_the_same_resamples(skew: bool, method: str) -> None:
    rng = np.random.default_rng(7)
    rounds = UNEQUAL.rounds
    sums = rounds * (rng.exponential(0.2, 24) if skew else rng.normal(0.2, 0.1, 24))
    result = stats.bootstrap(
        (sums, rounds), ratio, n_resamples=4000, paired=True, vectorized=True, method=method, rng=rng
    )
    ordered = np.sort(result.bootstrap_distribution)[None]
    estimate = np.array([sums.sum() / rounds.sum()])
    ours = percentile_ends(ordered) if method == "percentile" else bca_ends(ordered, estimate, sums[None], rounds)
    assert ours[0] == pytest.approx(tuple(result.confidence_interval), abs=1e-12)


def test_percentile_is_the_gates_own_interval() -> None:
    """The calibration shares one set of resampling weights; the gate draws requests. Same interval, to Monte Carlo."""
    rng = np.random.default_rng(3)
    rounds = np.full(24, 1000)
    sums = rng.integers(0, 400, 24)
    weights = rng.multinomial(24, np.full(24, 1 / 24), size=10_000)
    ours = percentile_ends(np.sort((weights @ sums) / (weights @ rounds))[None])[0]
    gate = paired_request_bootstrap(sums, rounds)
    assert ours == pytest.approx((gate.lower, gate.upper), abs=0.05 * (gate.upper - gate.lower))


def test_rates_have_their_closed_forms() -> None:
    """Equal normal requests: the estimate is normal, and so is each request, so the rates are normal probabilities."""
    simulations = 4000
    result = calibrate(EQUAL, simulations=simulations, resamples=500, sizes=(24,), true_gains=(0.0, 0.1, 0.15, 0.2))
    error = DEVIATION / math.sqrt(24)
    for row in result.power:
        gain = stats.norm.sf(0.15, row["true_gain"], error)
        every = stats.norm.sf(-0.2, row["true_gain"], DEVIATION) ** 24
        assert row["gain"] == pytest.approx(gain, abs=near(gain, simulations))
        assert row["every_request"] == pytest.approx(every, abs=near(every, simulations))
        assert row["passes"] <= min(row["gain"], row["every_request"], row["lower_bound"])
    assert result.power_at_threshold == result.power[2]["passes"]
    assert result.power[2]["gain"] == pytest.approx(0.5, abs=near(0.5, simulations))
    assert result.false_pass == result.power[0]["passes"] == 0
    coverage = {row["method"]: row["coverage"] for row in result.coverage}
    assert coverage["cluster t"] == pytest.approx(LEVEL, abs=near(LEVEL, simulations))


def test_percentile_undercovers_few_requests_and_says_so() -> None:
    """With R equal clusters its half-width is z·sqrt((R-1)/R)·s/sqrt(R) against Student's t: known, and too narrow."""
    result = calibrate(EQUAL, simulations=4000, resamples=2000, sizes=(12, 24))
    for row, words in zip([r for r in result.coverage if r["method"] == "percentile"], result.words, strict=True):
        size = row["requests"]
        expected = 2 * stats.t.cdf(stats.norm.ppf(0.975) * math.sqrt((size - 1) / size), size - 1) - 1
        assert row["coverage"] == pytest.approx(expected, abs=near(expected, 4000) + 0.01)
        assert f"At {size} requests" in words
        assert "too rarely" in words
        assert row["misses_above"] + row["misses_below"] == pytest.approx(1 - row["coverage"])


def test_a_run_without_noise() -> None:
    """No variance: every interval is a point on the truth, and the gates step from 0 to 1 at their threshold."""
    still = replace(UNEQUAL, tau=0.0, sigma=0.0)
    result = calibrate(still, simulations=8, resamples=100, true_gains=(0.0, 0.149, 0.15))
    assert [row["passes"] for row in result.power] == [0.0, 0.0, 1.0]
    assert {row["coverage"] for row in result.coverage} == {1.0}


@pytest.mark.parametrize(
    ("split", "gain", "passes"),
    [("dev", -0.01, 1.0), ("dev", -0.02, 0.0), ("heldout_general", -0.03, 1.0), ("heldout_general", -0.04, 0.0)],
)
def test_other_splits_use_their_own_gates(split: str, gain: float, passes: float) -> None:
    still = replace(UNEQUAL, tau=0.0, sigma=0.0)
    result = calibrate(still, split=split, simulations=4, resamples=50, true_gains=(gain,))  # type: ignore[arg-type]
    assert result.power[0]["passes"] == passes
    assert (result.power_at_threshold is None) == (split == "dev")


def test_same_seed_same_numbers_and_sizes_do_not_disturb_each_other() -> None:
    both, one = (calibrate(UNEQUAL, simulations=50, resamples=200, sizes=sizes) for sizes in ((12, 30), (30,)))
    assert [row for row in both.coverage if row["requests"] == 30] == one.coverage
    assert both.power == one.power
    assert calibrate(UNEQUAL, simulations=50, resamples=200, sizes=(12, 30)) == both
    assert calibrate(UNEQUAL, simulations=50, resamples=200, sizes=(12, 30), seed=24).coverage != both.coverage


def request(name: str, gains: np.ndarray) -> RequestScore:
    """A request whose rounds gain -1, 0, 1 … over a baseline of 1."""
    size = len(gains)
    accepted = ([1] * size, [1 + int(gain) for gain in gains])
    return RequestScore.of(name, anchors(size), accepted, ([[0.2] * K] * size, [[0.1] * K] * size))


def test_structure_of_equal_requests_without_noise_is_the_sample_variance() -> None:
    gains = [0, 1, 3, 2]
    structure = Structure.of(request(f"r{i}", np.full(40, gain)) for i, gain in enumerate(gains))
    assert (structure.gain, structure.sigma) == (1.5, 0.0)
    assert structure.tau == pytest.approx(np.std(gains, ddof=1))


def test_structure_of_identical_requests_has_no_variance_between() -> None:
    structure = Structure.of(scored(f"r{i}", 10) for i in range(6))
    assert structure.tau == 0
    assert structure.sigma**2 == pytest.approx(0.25 * 0.75 * 40 / 39)  # a Bernoulli(1/4) sample's variance


def test_structure_recovers_what_made_it() -> None:
    rng = np.random.default_rng(4)
    found = []
    for _ in range(8):
        means = rng.normal(0.3, 0.1, 60)
        rounds = rng.integers(50, 400, 60)
        found.append(
            Structure.of(
                request(f"r{i:02}", rng.choice([-1, 0, 1], n, p=[0.2, 0.6 - m, 0.2 + m]))
                for i, (m, n) in enumerate(zip(np.clip(means, 0, 0.6), rounds, strict=True))
            )
        )
    assert np.mean([s.gain for s in found]) == pytest.approx(0.3, abs=0.02)
    assert np.mean([s.tau for s in found]) == pytest.approx(0.1, abs=0.012)
    assert np.mean([s.sigma for s in found]) == pytest.approx(math.sqrt(0.7 - 0.3**2 - 0.1**2), abs=0.02)


def test_empirical_effects_keep_the_runs_own_shape() -> None:
    """One request far above the others: its skew shows in the simulated requests, their spread stays τ."""
    skewed = replace(UNEQUAL, gains=np.array([0.1] * 23 + [2.0]), sigma=0.0)
    drawn = skewed.simulate(24, 4000, "empirical", np.random.default_rng(1))
    assert drawn.std() == pytest.approx(skewed.tau, rel=0.05)
    assert stats.skew(drawn.ravel()) == pytest.approx(stats.skew(skewed.gains), rel=0.1)


def test_other_numbers_of_requests_take_the_runs_quantiles() -> None:
    assert UNEQUAL.sized(24) is UNEQUAL.rounds
    assert EQUAL.sized(12).tolist() == [100.0] * 12
    assert UNEQUAL.sized(2).tolist() == np.rint(np.quantile(UNEQUAL.rounds, [0.25, 0.75])).tolist()


def test_one_request_has_no_structure() -> None:
    with pytest.raises(Refused):
        Structure.of([scored("r", 1)])
