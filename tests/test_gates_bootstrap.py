"""The request bootstrap against closed forms, against scipy, and against a slow loop over the same random stream."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from d2lib.errors import Refused
from d2lib.gates.bootstrap import _uniform, paired_request_bootstrap, resample_totals


def requests(size: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Gains and rounds of `size` requests of unequal length."""
    rng = np.random.default_rng(seed)
    rounds = rng.integers(40, 4000, size)
    return np.rint(rounds * rng.normal(0.2, 0.15, size)).astype(np.int64), rounds


def ratio(gain: np.ndarray, rounds: np.ndarray, axis: int = -1) -> np.ndarray:
    return gain.sum(axis=axis) / rounds.sum(axis=axis)


def test_two_requests_have_three_resamples_with_known_frequencies() -> None:
    result = paired_request_bootstrap([0, 100], [100, 300])
    values, counts = np.unique(result.resamples, return_counts=True)
    assert values.tolist() == [0.0, 100 / 400, 100 / 300]
    # twice the first 1/4, one of each 1/2, twice the second 1/4
    assert stats.chisquare(counts, [2500, 5000, 2500]).pvalue > 1e-3
    assert (result.lower, result.estimate, result.upper) == (0.0, 0.25, 100 / 300)


@pytest.mark.parametrize(("size", "winners"), [(10, 4), (24, 9), (30, 21), (300, 75)])
def test_equal_requests_resample_as_a_binomial(size: int, winners: int) -> None:
    gain = np.array([100] * winners + [0] * (size - winners))
    result = paired_request_bootstrap(gain, np.full(size, 100), resamples=40_000)
    won = stats.binom(size, winners / size)
    # the estimate of a quantile lies between the quantiles a few Monte Carlo errors away, and those are exact
    for bound, probability in ((result.lower, 0.025), (result.upper, 0.975)):
        assert won.ppf(probability - 0.004) / size <= bound <= won.ppf(probability + 0.004) / size
    seen = np.bincount(np.rint(result.resamples * size).astype(int), minlength=size + 1)
    expected = won.pmf(np.arange(size + 1)) * 40_000
    likely = expected > 20
    rest = [seen[~likely].sum()], [expected[~likely].sum()]
    observed, wanted = np.append(seen[likely], rest[0]), np.append(expected[likely], rest[1])
    assert stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue > 1e-3


@pytest.mark.parametrize("size", [1, 2, 3, 144, 27_000, 65_536, 3 << 30, (1 << 31) + 1, (1 << 32) - 1])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (10, 1500)])
def test_draws_are_numpys_own(size: int, shape: tuple[int, int]) -> None:
    """The same numbers as `integers`, also where up to half of the words are rejected."""
    found, expected = (np.random.Generator(np.random.PCG64(7)) for _ in range(2))
    drawn = _uniform(found, size, shape)
    assert drawn.dtype == np.int64
    assert np.array_equal(drawn, expected.integers(0, size, size=shape))


@pytest.mark.parametrize("size", [2, 7, 12, 24, 30, 300])
def test_totals_are_those_of_a_slow_loop_over_the_same_random_stream(size: int) -> None:
    """Decode every drawn tuple into its requests and add them up one by one, exactly."""
    gain, rounds = requests(size)
    resamples = 40
    totals = resample_totals(gain, rounds, resamples, np.random.Generator(np.random.PCG64(5)))
    order = sorted(range(size), key=lambda i: (gain[i], rounds[i]))
    width = max(k for k in range(1, min(17, size + 1)) if size**k <= 65536)
    groups = [width] * (size // width) + ([size % width] if size % width else [])
    rng = np.random.Generator(np.random.PCG64(5))
    full = rng.integers(0, size**width, size=(size // width, resamples), dtype=np.int64 if width > 1 else np.uint16)
    tail = rng.integers(0, size ** (size % width), size=(1, resamples)) if size % width else np.empty((0, resamples))
    for column in range(resamples):
        sums = [0, 0]
        for code, digits in zip([*full[:, column], *tail[:, column]], groups, strict=True):
            code = int(code)
            for _ in range(digits):
                code, digit = divmod(code, size)
                sums[0] += int(gain[order[digit]])
                sums[1] += int(rounds[order[digit]])
        assert (totals[0][column], totals[1][column]) == tuple(sums)


def test_interval_is_the_one_that_scipy_takes_from_the_same_resamples() -> None:
    gain, rounds = requests(30)
    ours = paired_request_bootstrap(gain, rounds)
    shell = stats.bootstrap((gain, rounds), ratio, n_resamples=10, paired=True, vectorized=True, method="percentile")
    shell.bootstrap_distribution = ours.resamples
    theirs = stats.bootstrap(
        (gain, rounds),
        ratio,
        n_resamples=0,
        bootstrap_result=shell,
        paired=True,
        vectorized=True,
        method="percentile",
    ).confidence_interval
    assert (ours.lower, ours.upper) == pytest.approx((theirs.low, theirs.high), abs=1e-15)


@pytest.mark.parametrize("size", [12, 30, 400])
def test_interval_agrees_with_scipys_own_draws(size: int) -> None:
    gain, rounds = requests(size)
    ours = paired_request_bootstrap(gain, rounds)
    theirs = stats.bootstrap(
        (gain, rounds), ratio, n_resamples=10_000, paired=True, vectorized=True, method="percentile", rng=3, batch=1000
    )
    error = 5 * theirs.standard_error / np.sqrt(10_000) / stats.norm.pdf(1.96) * np.sqrt(0.025 * 0.975) * np.sqrt(2)
    assert ours.lower == pytest.approx(theirs.confidence_interval.low, abs=error)
    assert ours.upper == pytest.approx(theirs.confidence_interval.high, abs=error)
    assert ours.estimate == ratio(gain, rounds)
    assert ours.resamples.std(ddof=1) == pytest.approx(theirs.standard_error, rel=0.05)


@settings(max_examples=40, deadline=None)
@given(
    pairs=st.lists(st.tuples(st.integers(-500, 2000), st.integers(1, 3000)), min_size=2, max_size=40),
    data=st.data(),
)
def test_order_of_the_requests_does_not_matter(pairs: list[tuple[int, int]], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(pairs))
    first, second = (
        paired_request_bootstrap([g for g, _ in p], [r for _, r in p], resamples=200) for p in (pairs, shuffled)
    )
    assert first.resamples.tobytes() == second.resamples.tobytes()
    assert first.as_dict() == second.as_dict()
    exact = Fraction(sum(g for g, _ in pairs), sum(r for _, r in pairs))
    assert first.estimate == float(exact)
    assert min(g / r for g, r in pairs) <= first.lower <= first.upper <= max(g / r for g, r in pairs)


def test_pairing_holds_when_both_arms_move_together() -> None:
    """A constant gain per round has an interval of no width, however much the requests' lengths differ."""
    rounds = requests(24)[1]
    result = paired_request_bootstrap(rounds * 2, rounds)
    assert (result.lower, result.estimate, result.upper) == (2.0, 2.0, 2.0)


def test_same_seed_same_bits_and_another_seed_other_bits() -> None:
    gain, rounds = requests(24)
    first, again, other = (paired_request_bootstrap(gain, rounds, seed=seed) for seed in (23, 23, 24))
    assert first.resamples.tobytes() == again.resamples.tobytes()
    assert first.resamples.tobytes() != other.resamples.tobytes()
    with ThreadPoolExecutor(4) as pool:
        many = list(pool.map(lambda _: paired_request_bootstrap(gain, rounds).resamples.tobytes(), range(8)))
    assert set(many) == {first.resamples.tobytes()}


@pytest.mark.parametrize(
    ("size", "digest"),
    [(12, "2ff2e2db280b2b4d"), (24, "74e8bd2c95fbe230"), (30, "453e934a2eec5473"), (700, "225d5b55b2427f74")],
)
def test_random_stream_is_pinned(size: int, digest: str) -> None:
    """A library that changes the stream behind a seed must not change a verdict unnoticed."""
    rounds = 50 + 7 * np.arange(size) % 600
    gain = (np.arange(size) * 37 % 101) - 30
    resamples = paired_request_bootstrap(gain, rounds).resamples
    assert hashlib.sha256(resamples.astype("<f8").tobytes()).hexdigest()[:16] == digest


@pytest.mark.parametrize(
    ("gain", "rounds"),
    [
        ([1.0, 2.0], [10, 10]),
        ([float("nan"), 2.0], [10, 10]),
        ([1, 2], [10.0, float("inf")]),
        ([1, 2], [10, 0]),
        ([1, 2], [10, -1]),
        ([1, 2, 3], [10, 10]),
        ([1], [10]),
        ([], []),
        ([[1, 2]], [[10, 10]]),
        ([True, False], [10, 10]),
        ([1, 2**31], [10, 10]),
        ([1, 2], [10, 2**31]),
        ([1, None], [10, 10]),
    ],
)
def test_what_is_not_a_count_is_refused(gain: list, rounds: list) -> None:
    with pytest.raises(Refused):
        paired_request_bootstrap(gain, rounds)


@pytest.mark.parametrize("bad", [{"resamples": 0}, {"level": 0.0}, {"level": 1.0}, {"level": float("nan")}])
def test_parameters_out_of_range_are_refused(bad: dict) -> None:
    with pytest.raises(Refused):
        paired_request_bootstrap([1, 2], [10, 10], **bad)


def test_largest_sums_stay_exact() -> None:
    """Totals near 2^31, of either sign, come back out of their packed form unharmed."""
    big = 2**30 - 1
    gain, rounds = np.array([-big, -big]), np.array([big, big])
    low, high = resample_totals(gain, rounds, 50, np.random.Generator(np.random.PCG64(1)))
    assert set(low.tolist()) == {-2 * big}
    assert set(high.tolist()) == {2 * big}


def test_one_resample_is_its_own_interval() -> None:
    result = paired_request_bootstrap([3, 5], [10, 20], resamples=1)
    assert result.lower == result.upper == result.resamples[0]
