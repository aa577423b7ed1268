"""FAST of the dense drafter."""

from __future__ import annotations

from d2lib.drafter.dense.reference import DenseReference
from d2lib.drafter.fast import FastDrafter


class DenseFast(FastDrafter, DenseReference):
    """The training path; arguments as `FastDrafter`."""
