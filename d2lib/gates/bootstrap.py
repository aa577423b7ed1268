"""The paired request bootstrap: how sure a gain is when whole requests, not rounds, are the independent units.

Rounds of one request share a prompt and a style, so they are resampled together (a cluster bootstrap, Davison & Hinkley
1997, section 3.8). The statistic is a ratio of sums, Σ gain / Σ rounds, so that long requests weigh as they do in the
point estimate; the interval is the percentile interval (Efron & Tibshirani 1993, chapter 13).

Gains and rounds are counts. Their sums are therefore exact integers, which is why the result has the same bits for
any number of threads and for any order of the requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from d2lib.errors import Refused

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]

# The next four are part of the definition of the random stream, like the seed.
_TABLE = 1 << 16  # entries of the table of request tuples: 512 KiB, so that it stays in a core's cache
_DRAWS = 1 << 14  # draws at a time, 64 bits each: the C library maps larger arrays anew at every use
_NARROW = 1 << 19  # draws of 16 bits at a time, of whose arrays that is a small part
_CHUNK = 1500  # resamples at a time
_LOW = 32  # a total is kept as gain·2^32 + rounds, both exact


@dataclass(frozen=True)
class Bootstrap:
    """A ratio of sums and its percentile interval.

    estimate, lower, upper: accepted draft tokens per round (bonus excluded).
    resamples: [n] float64, the ratio in each resample, in the order of drawing.
    """

    estimate: float
    lower: float
    upper: float
    resamples: Float64
    requests: int
    rounds: int
    seed: int
    level: float

    def as_dict(self) -> dict[str, Any]:
        """Everything but the resamples themselves, which the seed gives again."""
        return {
            "estimate": self.estimate,
            "lower": self.lower,
            "upper": self.upper,
            "resamples": len(self.resamples),
            "requests": self.requests,
            "rounds": self.rounds,
            "seed": self.seed,
            "level": self.level,
            "interval": "percentile",
            "unit": "accepted draft tokens per round, bonus excluded",
        }


def paired_request_bootstrap(
    gain_sums: ArrayLike | Sequence[int],
    rounds: ArrayLike | Sequence[int],
    resamples: int = 10_000,
    seed: int = 23,
    level: float = 0.95,
) -> Bootstrap:
    """Resample R requests with replacement and take the ratio of sums in each resample.

    Args:
        gain_sums: [R] integers, per request Σ over its rounds of (accepted candidate - accepted baseline).
        rounds: [R] positive integers, the request's rounds, the same rounds for both arms (that is the pairing).
        resamples: how many resamples.
        seed: of PCG64.
        level: two-sided confidence level.
    Raises Refused: fewer than two requests, lengths that differ, anything that is not an integer (NaN and infinities
        among it), a request without rounds, or sums beyond 2^31.
    """
    gain, count = _integers(gain_sums, "gain_sums"), _integers(rounds, "rounds")
    if gain.shape != count.shape:
        raise Refused(
            "gains and rounds cover different requests", expected=f"{gain.size} rounds", found=f"{count.size}"
        )
    if gain.size < 2:
        raise Refused("a request bootstrap needs at least two requests", expected=">= 2", found=gain.size)
    if count.min() < 1:
        raise Refused("a request has no rounds", expected=">= 1 round each", found=int(count.min()))
    if resamples < 1 or not 0.0 < level < 1.0:
        raise Refused(
            "not a bootstrap", expected="resamples >= 1, 0 < level < 1", found=f"resamples {resamples}, level {level}"
        )
    totals = resample_totals(gain, count, resamples, np.random.Generator(np.random.PCG64(seed)))
    ratios = totals[0] / totals[1]
    tail = (1.0 - level) / 2.0
    lower, upper = _quantiles(ratios, (tail, 1.0 - tail))
    return Bootstrap(
        estimate=int(gain.sum()) / int(count.sum()),
        lower=lower,
        upper=upper,
        resamples=ratios,
        requests=int(gain.size),
        rounds=int(count.sum()),
        seed=seed,
        level=level,
    )


def resample_totals(gain: Int64, count: Int64, resamples: int, rng: np.random.Generator) -> tuple[Int64, Int64]:
    """([n] Σ gain, [n] Σ rounds) over R requests drawn uniformly with replacement, n times; exact.

    A uniform draw from the R^k ordered k-tuples of requests is k independent uniform draws of one request, so one
    random number and one look-up in a table of tuple sums do the work of k. Pairs (gain, rounds) are sorted first:
    the result is a function of the set of requests, not of their order.
    """
    size = gain.size
    if size * max(int(np.abs(gain).max()), int(count.max())) >= 1 << (_LOW - 1):
        raise Refused("sums are too large for exact arithmetic", expected="below 2^31", found=f"{size} requests")
    order = np.lexsort((count, gain))
    packed = (gain[order] << _LOW) + count[order]
    width = 1
    while width < size and size ** (width + 1) <= _TABLE:
        width += 1
    full, rest = divmod(size, width)
    tables = [(full, _tuple_sums(packed, width))] + ([(1, _tuple_sums(packed, rest))] if rest else [])
    draw, most = (_uniform16, _NARROW) if width == 1 and size <= 1 << 16 else (_uniform, _DRAWS)
    step = min(_CHUNK, max(1, most // full))
    totals = np.empty(resamples, dtype=np.int64)
    for start in range(0, resamples, step):
        chunk = totals[start : start + step]
        chunk[:] = 0
        for draws, table in tables:
            chunk += table[draw(rng, table.size, (draws, chunk.size))].sum(axis=0)
    return totals >> _LOW, totals & ((1 << _LOW) - 1)


def _uniform16(rng: np.random.Generator, size: int, shape: tuple[int, int]) -> NDArray[np.uint16]:
    """Uniform draws from 0 … size - 1, size at most 2^16: numpy takes four of each raw word."""
    return rng.integers(0, size, size=shape, dtype=np.uint16)


def _uniform(rng: np.random.Generator, size: int, shape: tuple[int, int]) -> Int64:
    """Uniform draws from 0 … size - 1, size below 2^32: multiply, shift, reject (Lemire 2019, ACM TOMACS 29(1)).

    What `rng.integers` gives, in less time: each raw word of 64 bits is two halves, and the generator is called once an
    array, not once a draw. Of the 2^32 halves, 2^32 mod size are too many for equal chances: they are left out.
    """
    count = shape[0] * shape[1]
    raw = rng.bit_generator.random_raw((count + 1) // 2)
    products = raw.astype("<u8", copy=False).view("<u4").astype(np.uint64)
    products *= np.uint64(size)
    rest = products.astype(np.uint32)
    products >>= np.uint64(32)
    drawn = products.view(np.int64)
    least = (1 << 32) % size
    if rest.min() < least:
        drawn = drawn[rest >= least]
        if drawn.size < count:
            drawn = np.concatenate((drawn, _uniform(rng, size, (1, count - drawn.size))[0]))
    return drawn[:count].reshape(shape)


def _tuple_sums(values: Int64, width: int) -> Int64:
    """[R^width] the sum of every ordered tuple of `width` of the R values."""
    sums = values
    for _ in range(width - 1):
        sums = np.add.outer(sums, values).ravel()
    return sums


def _quantiles(values: Float64, probabilities: tuple[float, ...]) -> list[float]:
    """Linear interpolation between order statistics (Hyndman & Fan 1996, type 7), as in numpy and scipy.

    Only the order statistics that are used are put in place, which is quicker than sorting.
    """
    places = [probability * (values.size - 1) for probability in probabilities]
    below = [min(int(place), max(0, values.size - 2)) for place in places]
    above = [min(low + 1, values.size - 1) for low in below]
    ordered = np.partition(values, sorted({*below, *above}))
    return [
        float(ordered[low] + (ordered[high] - ordered[low]) * (place - low))
        for place, low, high in zip(places, below, above, strict=True)
    ]


def _integers(values: ArrayLike | Sequence[int], name: str) -> Int64:
    array = np.asarray(values)
    if array.ndim != 1 or not np.can_cast(array.dtype, np.int64) or array.dtype.kind == "b":
        raise Refused(
            "a bootstrap takes counts",
            expected="a vector of integers",
            found=f"shape {array.shape}, {array.dtype}",
            where=name,
        )
    return array.astype(np.int64)
