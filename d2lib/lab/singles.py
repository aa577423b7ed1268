"""Single precision in numpy, for the live drafters."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]


def floats(x: NDArray[np.floating]) -> Floats:
    """Single precision, whatever numpy promoted to."""
    return x.astype(np.float32, copy=False)


def logistic(x: Floats) -> Floats:
    """1 / (1 + e^-x), without overflow."""
    return floats(1 / (1 + np.exp(-np.clip(x, -80, 80))))


def scaled(x: Floats, weight: Floats, eps: float) -> Floats:
    """RMSNorm over the last axis."""
    return floats(x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps)) * weight)
