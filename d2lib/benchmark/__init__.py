"""Speed and memory of the parts that this project exists for, as ratios of two sides in one run."""

from d2lib.benchmark.run import Results, Scale, benchmark

__all__ = ["Results", "Scale", "benchmark"]
