"""Sampling from the target: batched, with a key-value cache, each sequence from a generator of its own.

Sequences go through the target in tiles of a fixed size, so that a sequence's tokens depend on its prompt and its seed
and not on what is sampled beside it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from d2lib.errors import Interrupted, Refused
from d2lib.lab.model import LanguageModel


def derive_seed(seed: int, *names: object) -> int:
    """A 63-bit seed for one purpose, from a run's seed and the purpose's names (SHA-256)."""
    digest = hashlib.sha256("\x1f".join(map(str, (seed, *names))).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


@torch.no_grad()
def sample(
    target: LanguageModel,
    prompts: Tensor,
    seeds: Sequence[int],
    *,
    rows: int,
    temperature: float,
    tile: int,
    progress: Callable[[int], object] | None = None,
    stop: Callable[[], bool] | None = None,
    stop_tokens: Sequence[int] = (),
    least: int = 0,
) -> Tensor:
    """Continue prompts to `rows` tokens each.

    Args:
        prompts: [N, P] int64.
        seeds: [N] one per sequence.
        rows: length of the result, more than P.
        temperature: of the softmax that tokens are drawn from.
        tile: sequences that run together; the last tile is filled up.
        progress: called with the tokens drawn since the last call.
        stop: asked before every token; when it says yes, Interrupted is raised.
        stop_tokens: tokens that end a sequence. What stands after the first of them means nothing.
        least: rows that a sequence has at least: a stop token is not drawn before row `least` - 1.

    Returns: [N, rows] int64, the prompts first.
    """
    count, length = prompts.shape
    if not (0 < length < rows and temperature > 0 and tile > 0 and len(seeds) == count):
        raise Refused(
            "these prompts cannot be continued",
            expected="rows beyond the prompts, a positive temperature and tile, one seed a prompt",
            found=f"{list(prompts.shape)} prompts, {rows} rows, temperature {temperature}, {len(seeds)} seeds",
        )
    draws = torch.stack(
        [
            torch.rand(rows - length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            for seed in seeds
        ]
    )
    ends = torch.tensor(list(stop_tokens), dtype=torch.int64)
    finished = []
    for start in range(0, count, tile):
        members = torch.arange(start, start + tile).clamp(max=count - 1)
        tokens = torch.cat([prompts[members], torch.zeros(tile, rows - length, dtype=torch.int64)], dim=1)
        cache = target.cache(tile, rows)
        ended = torch.zeros(tile, dtype=torch.bool)
        hidden = target(tokens[:, :length], cache).hidden[:, -1]
        for row in range(length, rows):
            if stop is not None and stop():
                raise Interrupted("sampling was stopped", where=f"row {row} of {rows}")
            logits = target.logits(hidden)
            if row < least - 1 and len(ends):
                logits = logits.index_fill(-1, ends, -torch.inf)
            chance = torch.softmax(logits.double() / temperature, dim=-1).cumsum(-1)
            wanted = draws[members, row - length, None] * chance[:, -1:]
            tokens[:, row] = (chance <= wanted).sum(-1).clamp(max=chance.shape[-1] - 1)
            ended |= torch.isin(tokens[:, row], ends)
            last = row + 1 == rows or bool(ended.all())
            if progress is not None:
                progress(min(tile, count - start) * (rows - row if last else 1))
            if last:
                break
            hidden = target(tokens[:, row : row + 1], cache).hidden[:, 0]
        finished.append(tokens[: count - start])
    return torch.cat(finished)


def ended_rows(tokens: Tensor, gen_start: int, stop_tokens: Sequence[int]) -> int:
    """Rows of a sampled sequence [L] up to its first stop token after the context, that one included."""
    ends = torch.isin(tokens[gen_start:], torch.tensor(list(stop_tokens), dtype=tokens.dtype)).nonzero()
    return gen_start + int(ends[0]) + 1 if len(ends) else len(tokens)
