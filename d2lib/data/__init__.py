"""The captured data: manifest, memory-mapped sidecars, blocks, committed-K2 rounds, the frozen sample."""
