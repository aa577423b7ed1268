"""The request bootstrap against scipy's, and a dataset of the production's row counts."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from d2lib.benchmark.measure import Row, in_child, medians
from d2lib.data.manifest import FileEntry, Manifest, SequenceEntry, Split
from d2lib.data.sidecar import TOP, write_sidecar
from d2lib.gates.bootstrap import paired_request_bootstrap

PRODUCTION: Mapping[Split, tuple[int, int]] = {
    "train": (65, 496_416),
    "dev": (30, 233_500),
    "heldout_legal": (24, 220_458),
    "heldout_general": (12, 40_566),
}
"""Split → sequences, rows of the production's capture."""

DIM = 8
"""Of the dataset's taps and hidden states: small, so that a disk holds it; its files and rows are the production's."""


def measure_bootstrap(*, repeats: int, resamples: int = 10_000) -> list[Row]:
    """The whole interval, ours and scipy's: percentile, paired, vectorized, in the batches that it likes best."""
    import scipy.stats  # a test dependency: what ours is measured against

    rows = []
    for requests, bound in ((30, 5.0), (2_000, 1.5)):
        rng = np.random.default_rng(23)
        rounds = rng.integers(50, 4_000, requests)
        gains = rng.integers(-20, 400, requests)

        def ratio(gain: np.ndarray, count: np.ndarray, axis: int = -1) -> np.ndarray:
            return np.asarray(gain.sum(axis=axis) / count.sum(axis=axis))

        def theirs(batch: int | None) -> object:
            return scipy.stats.bootstrap(
                (gains, rounds),  # noqa: B023
                ratio,
                paired=True,
                vectorized=True,
                method="percentile",
                n_resamples=resamples,
                batch=batch,
                rng=np.random.default_rng(23),
            )

        seconds = medians(
            {
                "ours": lambda: paired_request_bootstrap(gains, rounds, resamples),  # noqa: B023
                "scipy": lambda: theirs(None),
                "scipy in batches": lambda: theirs(200),
            },
            repeats,
            calls=20 if requests < 100 else 1,
        )
        best = min(seconds["scipy"], seconds["scipy in batches"])
        at = f"{requests:,} requests, {resamples:,} resamples"
        rows.append(
            Row("request bootstrap", at, "scipy.stats.bootstrap", best / seconds["ours"], "times faster", ">=", bound)
        )
    return rows


def measure_dataset(*, threads: int, production: Mapping[Split, tuple[int, int]] = PRODUCTION) -> list[Row]:
    """Open a dataset of these counts in a child; the files are made in a temporary folder first."""
    with tempfile.TemporaryDirectory(prefix="d2-benchmark-") as name:
        folder = Path(name)
        rows = _write(folder, production)
        figures = in_child("dataset", folder=name, dim=DIM, threads=threads)
    at = f"{sum(count for count, _ in production.values())} sequences, {rows:,} rows, dim {DIM}"
    return [
        Row("dataset: open", at, "", figures["seconds"], "s", "<=", 1.0),
        Row("dataset: open", at, "before", figures["extra"], "MB", "<=", 100.0),
        Row("dataset: first batch", at, "before", figures["read"], "MB of files read", "<=", 2.0),
        Row("dataset: an epoch's order", at, "", figures["order"], "bytes per block", "<=", 8.0),
    ]


def _write(folder: Path, production: Mapping[Split, tuple[int, int]]) -> int:
    generator = torch.Generator().manual_seed(23)
    (folder / "shards").mkdir()
    entries, total = [], 0
    for split, (count, rows) in production.items():
        for number in range(count):
            length = rows // count + (number < rows % count)
            path = f"shards/{split}-{number:02}.safetensors"
            write_sidecar(
                folder / path,
                tokens=torch.randint(64, (length,), generator=generator),
                taps=torch.randn(length, 3 * DIM, generator=generator),
                hidden=torch.randn(length, DIM, generator=generator),
                top20_ids=torch.arange(TOP).expand(length, TOP),
                top20_logprobs=torch.arange(0.0, -TOP, -1).expand(length, TOP),
            )
            entries.append(
                SequenceEntry(
                    id=f"{split}-{number:02}",
                    split=split,
                    family=f"{split}-{number:02}",
                    rows=length,
                    gen_start=128,
                    file=FileEntry.of(folder, path),
                )
            )
            total += length
    Manifest(namespace="benchmark", dim=DIM, vocab_size=64, n_taps=3, target={}, sequences=tuple(entries)).write(
        folder / "MANIFEST.json"
    )
    return total
