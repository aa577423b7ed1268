"""Adapt a speculative-decoding drafter to your own traffic, and decide by evidence whether it is better."""

__version__ = "0.1.0"
