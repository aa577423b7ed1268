"""Attention of many blocks to shared context rows, forward and backward, without a copy of a row per block.

Every block of a sequence sees a stretch of the same rows, so scores are taken tile by tile: some rows against the
queries of all the blocks that see them. A tile's share of the softmax is merged with what came before by its maximum
and mass (online softmax, Milakov and Gimelshein, arXiv 1805.02867); the block's own keys are the first share. The
backward pass makes the scores again (FlashAttention, arXiv 2205.14135), so memory grows with rows + blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

ROWS = 512
"""Most context rows of a tile."""

SCORES, GPU_SCORES = 1 << 19, 1 << 26
"""Most scores of a tile: on a CPU few enough for its caches, on a GPU enough to fill it."""

_FEWEST_ROWS = 64


@dataclass(frozen=True)
class SeenRows:
    """Which of R context rows the queries of B blocks see: query n of block b those from first[b, n] to last[b] - 1.

    first: [B, N] int64, or [B, 1] where a block's queries see the same. last: [B] int64, at most R.
    Any order of the blocks is right; in the order of `last`, blocks that share rows are taken together.
    """

    first: Tensor
    last: Tensor

    def tiles(self, heads: int, queries: int, scores: int) -> list[_Tile]:
        """The tiles that cover every visible pair, each trimmed to what some of its blocks see.

        Args:
            heads: KV heads. queries: of a block, for each KV head. scores: most scores of a tile.
        """
        first, latest = (values.cpu() for values in (self.first.amin(1), self.first.amax(1)))
        last = self.last.cpu()
        width = max(_FEWEST_ROWS, min(ROWS, int((last - first).max())))
        begin, found = int(first.min()), []
        for start in range(begin, int(last.max()), width):
            sees = ((first < start + width) & (last > start) & (first < last)).nonzero()[:, 0].tolist()
            if not sees:
                continue
            step = max(1, scores // (heads * queries * width))
            for left in range(sees[0], sees[-1] + 1, step):
                right = min(left + step, sees[-1] + 1)
                inside = slice(left, right)
                top = max(start, int(first[inside].min()))
                end = min(start + width, int(last[inside].max()))
                if top < end:
                    whole = bool((latest[inside] <= top).all() and (last[inside] >= end).all())
                    found.append(_Tile(slice(top, end), inside, whole))
        return found


@dataclass(frozen=True)
class _Tile:
    """Rows against blocks. whole: every query of the blocks sees every row."""

    rows: slice
    blocks: slice
    whole: bool


def block_attention(
    q: Tensor, keys: Tensor, values: Tensor, row_keys: Tensor, row_values: Tensor, seen: SeenRows, *, causal: bool
) -> Tensor:
    """softmax(q·k / sqrt(D))·v over a block's visible context rows and its own slots, grouped heads.

    Products are taken in the dtype of the arguments, the softmax in at least fp32. Query head h reads KV head
    ⌊h / (H/G)⌋. The same bits every time: no tile adds to another's place while it runs.

    Args:
        q: [B, N, H, D]. keys, values: [B, N, G, D], the blocks' own. row_keys, row_values: [R, G, D].
        seen: the rows that each query sees; there may be none.
        causal: whether query n sees only slots 0 … n of its block; else all N.

    Returns:
        [B, N, H, D], fp32 (fp64 for fp64).
    """
    blocks, slots, n_heads, width = q.shape
    groups = keys.shape[2]
    shared = n_heads // groups
    q = (q * width**-0.5).view(blocks, slots, groups, shared, width).permute(2, 0, 1, 3, 4)
    out: Tensor = _BlockAttention.apply(  # type: ignore[no-untyped-call]
        q.reshape(groups, blocks, slots * shared, width),
        *(own.permute(2, 0, 1, 3).contiguous() for own in (keys, values)),
        *(rows.transpose(0, 1).contiguous() for rows in (row_keys, row_values)),
        seen,
        causal,
    )
    return out.view(groups, blocks, slots, shared, width).permute(1, 2, 0, 3, 4).reshape(blocks, slots, n_heads, width)


class _BlockAttention(torch.autograd.Function):
    """q [G, B, M, D] scaled, M = N·H/G; keys and values [G, B, N, D], those of the rows [G, R, D] → [G, B, M, D]."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, keys: Tensor, values: Tensor, row_keys: Tensor, row_values: Tensor, *plan: Any
    ) -> Tensor:
        ctx.seen, ctx.causal = plan
        # 1. the block's own slots: every query sees one at least, so maximum and mass are finite from the start
        scores = _own_scores(q, keys, ctx.causal)
        top = scores.amax(-1, keepdim=True)
        mass = scores.sub_(top).exp_().sum(-1, keepdim=True)
        out = _times(scores, values)
        # 2. the context, tile by tile
        tiles = _Tiles(q, ctx.seen)
        for rows, blocks, scores in tiles.scores(q, row_keys):
            higher = torch.maximum(top[:, blocks], scores.amax(-1, keepdim=True))
            kept = torch.exp(top[:, blocks] - higher)
            top[:, blocks] = higher
            mass[:, blocks] = mass[:, blocks] * kept + scores.sub_(higher).exp_().sum(-1, keepdim=True)
            out[:, blocks] *= kept
            _add_product(out[:, blocks], scores, row_values[:, rows])
        out /= mass
        ctx.save_for_backward(q, keys, values, row_keys, row_values, out, top + mass.log())
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Any:
        q, keys, values, row_keys, row_values, out, log_mass = ctx.saved_tensors
        # d score = weight · (upstream·value - upstream·out)
        level = (upstream * out).sum(-1, keepdim=True)
        upstream = upstream.to(q.dtype).contiguous()
        # 1. the block's own slots
        weights = _own_scores(q, keys, ctx.causal).sub_(log_mass).exp_()
        slopes = _times(upstream, values.transpose(-1, -2)).sub_(level).mul_(weights)
        by_values = _times(weights.transpose(-1, -2), upstream)
        by_q, by_keys = _times(slopes, keys), _times(slopes.transpose(-1, -2), q)
        # 2. the context, tile by tile
        by_row_keys, by_row_values = (torch.zeros_like(kv, dtype=by_q.dtype) for kv in (row_keys, row_values))
        tiles = _Tiles(q, ctx.seen)
        for rows, blocks, scores in tiles.scores(q, row_keys):
            weights = scores.sub_(log_mass[:, blocks]).exp_()
            slopes = tiles.products(upstream[:, blocks], row_values[:, rows], 1).sub_(level[:, blocks]).mul_(weights)
            _add_product(by_q[:, blocks], slopes, row_keys[:, rows])
            for total, factor, queries in ((by_row_values, weights, upstream), (by_row_keys, slopes, q)):
                _add_product(total[:, rows], factor.flatten(1, 2).transpose(1, 2), queries[:, blocks].flatten(1, 2))
        made = (by_q, by_keys, by_values, by_row_keys, by_row_values)
        return *(gradient.to(q.dtype) for gradient in made), None, None


class _Tiles:
    """A call's tiles, and two places in which their scores are made one after another."""

    def __init__(self, q: Tensor, seen: SeenRows) -> None:
        groups, _, queries, _ = q.shape
        most = SCORES if q.device.type == "cpu" else GPU_SCORES
        self._seen, self._tiles = seen, seen.tiles(groups, queries, most)
        pairs = [(t.blocks.stop - t.blocks.start) * (t.rows.stop - t.rows.start) for t in self._tiles]
        self._places = q.new_empty(2, groups * queries * max(pairs, default=0), dtype=_wide(q))

    def scores(self, q: Tensor, row_keys: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
        """Each tile's rows and blocks with its scores [G, blocks, M, rows], -inf where a row is not seen."""
        for tile in self._tiles:
            scores = self.products(q[:, tile.blocks], row_keys[:, tile.rows], 0)
            if not tile.whole:
                row = torch.arange(tile.rows.start, tile.rows.stop, device=q.device)
                first, last = self._seen.first[tile.blocks], self._seen.last[tile.blocks]
                unseen = (row < first[:, :, None]) | (row >= last[:, None, None])  # [blocks, N or 1, rows]
                by_slot = scores.view(*scores.shape[:2], first.shape[1], -1, scores.shape[3])
                by_slot.masked_fill_(unseen[None, :, :, None], float("-inf"))
            yield tile.rows, tile.blocks, scores

    def products(self, queries: Tensor, rows: Tensor, place: int) -> Tensor:
        """[G, blocks, M, D] by [G, rows, D] to [G, blocks, M, rows], in one of the two places."""
        shape = (*queries.shape[:3], rows.shape[1])
        out = self._places[place, : math.prod(shape)].view(shape)
        flat = out.flatten(1, 2)
        if queries.dtype == out.dtype:
            torch.bmm(queries.flatten(1, 2), rows.transpose(1, 2), out=flat)
        else:
            flat.copy_(torch.bmm(queries.flatten(1, 2), rows.transpose(1, 2)))
        return out


def _own_scores(q: Tensor, keys: Tensor, causal: bool) -> Tensor:
    """[G, B, M, N]: every query's scores with its block's own slots, -inf where a slot is not seen."""
    scores = _times(q, keys.transpose(-1, -2))
    if causal:
        slot = torch.arange(keys.shape[2], device=q.device)
        scores.masked_fill_(slot > slot.repeat_interleave(q.shape[2] // len(slot)).unsqueeze(1), float("-inf"))
    return scores


def _times(left: Tensor, right: Tensor) -> Tensor:
    """A product for each group and block, in the narrower dtype of the two, as the softmax's."""
    narrow = left.dtype if left.dtype.itemsize < right.dtype.itemsize else right.dtype
    return torch.matmul(left.to(narrow), right.to(narrow)).to(_wide(left))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total [G, …, D] += left [G, …, n] · right [G, n, D], the product in the dtype of `right`."""
    total, left = (part.view(len(part), -1, part.shape[-1]) for part in (total, left))
    if right.dtype == total.dtype:
        total.baddbmm_(left, right)
    else:
        total += torch.bmm(left.to(right.dtype), right)


def _wide(x: Tensor) -> torch.dtype:
    """The dtype of scores, softmax and sums beside x."""
    return torch.promote_types(x.dtype, torch.float32)
