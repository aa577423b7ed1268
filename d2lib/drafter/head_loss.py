"""LM head and loss in one piece, forward and backward, that never holds a [blocks, K, vocab] tensor.

A tile of whole blocks is taken through student logits, teacher logits, statistics, the objective's derivatives and the
gradient of the hidden states at once, so that three large matrix products are all there is, and the two logit tiles
are the only large memory. The vocabulary is taken in chunks: a chunk's share of a product and the element-wise passes
next to it run while its logits are in cache, in place, each chunk with a maximum of its own (online softmax, Milakov
and Gimelshein, arXiv 1805.02867). What concerns one token of the vocabulary, the committed one, never touches a tile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from d2lib.drafter.objectives import Objective, SlotStatistics

TILE_BYTES = 230_000_000
"""Of the two logit tiles together."""

CHUNK, GPU_CHUNK = 2048, 32768
"""Vocabulary entries taken at once: on a CPU few enough for its caches, on a GPU enough to fill it."""


@dataclass(frozen=True)
class HeadLoss:
    """The loss of a batch and what it was made of.

    loss: scalar, mean over blocks, differentiable. loss_sum / blocks is the same number as (sum, count).
    kl, tv, ce: [K] sums over the blocks' valid slots; count: [K] how many those are. alpha: [B, K] the chance 1 - TV
    that a slot is accepted, 0 where it is not valid.
    """

    loss: Tensor
    loss_sum: float
    blocks: int
    kl: Tensor
    tv: Tensor
    ce: Tensor
    count: Tensor
    alpha: Tensor

    @property
    def accepted(self) -> float:
        """Expected accepted draft tokens (Σ_k Π_{i≤k} α_i), summed over blocks."""
        return float(self.alpha.cumprod(1).sum())


def fused_head_loss(
    x: Tensor,
    head: Tensor,
    markov_rows: Tensor,
    markov_head: Tensor,
    teacher_hidden: Tensor,
    target: Tensor,
    valid: Tensor,
    objective: Objective,
    *,
    tile_blocks: int | None = None,
    chunk: int | None = None,
) -> HeadLoss:
    """Loss of B blocks under an objective; its gradient reaches x, markov_rows and markov_head (the head is frozen).

    Args:
        x: [B, K, dim] normed hidden states, fp32.
        head: [V, dim] the LM head. markov_rows: [B, K, rank] embeddings of the previous tokens. markov_head: [V, rank].
        teacher_hidden: [B, K, dim] the target's final hidden states, any float dtype.
        target: [B, K] committed tokens. valid: [B, K] bool.
        objective: the loss of a block from its slots' statistics.
        tile_blocks: blocks taken at once; by default equal tiles as large as `TILE_BYTES` allow.
        chunk: vocabulary entries taken at once; by default what suits x's device.
    """
    blocks, slots, _ = x.shape
    if tile_blocks is None:
        tiles = math.ceil(8 * blocks * slots * head.shape[0] / TILE_BYTES)
        tile_blocks = math.ceil(blocks / min(tiles, blocks))
    if chunk is None:
        chunk = CHUNK if x.device.type == "cpu" else GPU_CHUNK
    loss_sum, kl, tv, ce = _Fused.apply(  # type: ignore[no-untyped-call]
        x, head, markov_rows, markov_head, teacher_hidden, target, valid, objective, tile_blocks, chunk
    )
    mask = valid.to(kl.dtype)
    return HeadLoss(
        loss=loss_sum / blocks,
        loss_sum=float(loss_sum.detach()),
        blocks=blocks,
        kl=(kl * mask).sum(0),
        tv=(tv * mask).sum(0),
        ce=(ce * mask).sum(0),
        count=valid.sum(0),
        alpha=torch.where(valid, 1 - tv, 0.0),
    )


class _Fused(torch.autograd.Function):
    """(loss sum, kl, tv, ce); the backward pass only scales the gradients that the forward pass made."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        head, markov_rows, markov_head, teacher_hidden, target, valid, objective, tile_blocks, chunk = arguments
        blocks, slots, dim = x.shape
        wanted = {"x": (0, x), "markov": (2, markov_rows), "markov_head": (3, markov_head)}
        made = {n: torch.zeros_like(value) for n, (index, value) in wanted.items() if ctx.needs_input_grad[index]}
        size = min(tile_blocks, blocks) * slots * head.shape[0]
        tiles = x.new_empty(size), x.new_empty(size)
        parts, loss_sum = [], x.new_zeros((), dtype=torch.float64)
        for start in range(0, blocks, tile_blocks):
            tile = slice(start, min(start + tile_blocks, blocks))
            ok = valid[tile]
            rows = _Rows(
                x[tile].reshape(-1, dim),
                markov_rows[tile].flatten(0, 1),
                torch.where(ok.unsqueeze(-1), teacher_hidden[tile].float(), 0.0).flatten(0, 1),
                torch.where(ok, target[tile], 0).flatten(),
                head,
                markov_head,
            )
            chunks = _chunks(tiles, len(rows.x), head.shape[0], chunk)
            statistics, signed = _statistics(rows, chunks)
            leaves = SlotStatistics(*(value.view(ok.shape).to(x.dtype).requires_grad_() for value in statistics))
            with torch.enable_grad():
                loss = objective(leaves, ok).sum()
            loss_sum += loss.detach().double()
            parts.append([leaf.detach() for leaf in (leaves.kl, leaves.tv, leaves.ce)])
            if made:
                slopes = torch.autograd.grad(loss, (leaves.kl, leaves.tv, leaves.ce), allow_unused=True)
                out = {n: g if n == "markov_head" else g[tile].flatten(0, 1) for n, g in made.items()}
                _gradients(out, rows, chunks, signed, slopes)
        ctx.save_for_backward(*(made.get(name) for name in wanted))
        kl, tv, ce = (torch.cat(values) for values in zip(*parts, strict=True))
        ctx.mark_non_differentiable(kl, tv, ce)
        return loss_sum.to(x.dtype), kl, tv, ce

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        x, markov, markov_head = (None if made is None else made * upstream[0] for made in ctx.saved_tensors)
        return x, None, markov, markov_head, *([None] * 6)


@dataclass(frozen=True)
class _Rows:
    """A tile's slots as rows. x, teacher: [n, dim]; markov: [n, rank]; target: [n]; head, markov_head: all of them."""

    x: Tensor
    markov: Tensor
    teacher: Tensor
    target: Tensor
    head: Tensor
    markov_head: Tensor


@dataclass(frozen=True)
class _Chunk:
    """A part of the vocabulary and its contiguous [n, width] places in the two tiles and in a scratch space."""

    span: slice
    q: Tensor
    p: Tensor
    space: Tensor


def _chunks(tiles: tuple[Tensor, Tensor], rows: int, vocabulary: int, chunk: int) -> list[_Chunk]:
    scratch = tiles[0].new_empty(rows * min(chunk, vocabulary))
    found = []
    for start in range(0, vocabulary, chunk):
        span = slice(start, min(start + chunk, vocabulary))
        width = span.stop - start
        q, p = (tile[rows * start : rows * span.stop].view(rows, width) for tile in tiles)
        found.append(_Chunk(span, q, p, scratch[: rows * width].view(rows, width)))
    return found


def _statistics(rows: _Rows, chunks: list[_Chunk]) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Fill the tiles: q with the student's distribution, p with q - p.

    Returns ((kl, tv, ce), Σ_v q_v·sign(q_v - p_v)), each [n] float64. The totals are taken in float64: KL is a small
    difference of large numbers.
    """
    found = []
    for part in chunks:
        head, q, p = rows.head[part.span], part.q, part.p
        torch.mm(rows.x, head.t(), out=q)
        q.addmm_(rows.markov, rows.markov_head[part.span].t())
        torch.mm(rows.teacher, head.t(), out=p)
        top_q, top_p = q.amax(1, keepdim=True), p.amax(1, keepdim=True)
        p.sub_(top_p)
        q.sub_(top_q)
        torch.sub(p, q, out=part.space)
        mass_q, mass_p = q.exp_().sum(1), p.exp_().sum(1)
        found.append((top_q[:, 0], top_p[:, 0], mass_q, mass_p, part.space.mul_(p).sum(1)))
    top_q, top_p, mass_q, mass_p, cross = (torch.stack(values).double() for values in zip(*found, strict=True))
    log_q, log_p = ((top + mass.log()).logsumexp(0) for top, mass in ((top_q, mass_q), (top_p, mass_p)))
    scale_q, scale_p = (top_q - log_q).exp(), (top_p - log_p).exp()
    kl = (scale_p * (cross + (top_p - top_q) * mass_p)).sum(0) - log_p + log_q
    tv, signed = torch.zeros_like(kl), torch.zeros_like(kl)
    for part, by_q, by_p in zip(reversed(chunks), scale_q.float().flip(0), scale_p.float().flip(0), strict=True):
        part.q.mul_(by_q.unsqueeze(1))
        torch.addcmul(part.q, part.p, by_p.unsqueeze(1), value=-1, out=part.p)
        tv += torch.abs(part.p, out=part.space).sum(1)
        signed += torch.sign(part.p, out=part.space).mul_(part.q).sum(1)
    chosen = (rows.x * rows.head[rows.target]).sum(1, dtype=torch.float64)
    chosen += (rows.markov * rows.markov_head[rows.target]).sum(1, dtype=torch.float64)
    return (kl, tv / 2, log_q - chosen), signed


def _gradients(
    out: Mapping[str, Tensor], rows: _Rows, chunks: list[_Chunk], signed: Tensor, slopes: tuple[Tensor | None, ...]
) -> None:
    """The loss's derivatives, added to what `out` holds: x [n, dim], markov [n, rank], markov_head [V, rank].

    The tiles are used up. By the student's logits: d KL = q - p; d TV = ½·q·(sign(q - p) - Σ q·sign(q - p));
    d CE = q - onehot(target); each times its slope.
    """
    by_kl, by_tv, by_ce = (None if slope is None or not bool(slope.any()) else slope.reshape(-1, 1) for slope in slopes)
    own = signed.new_zeros(len(signed), 1, dtype=rows.x.dtype)
    if by_ce is not None:
        own = own + by_ce
    if by_tv is not None:
        own = own - 0.5 * by_tv * signed.to(own.dtype).unsqueeze(1)
    for part in chunks:
        q, difference = part.q, part.p
        if by_tv is not None:
            q.mul_(torch.addcmul(own, torch.sign(difference, out=part.space), by_tv, value=0.5, out=part.space))
        elif by_ce is not None:
            q.mul_(own)
        if by_kl is not None and by_tv is None and by_ce is None:
            q = difference.mul_(by_kl)
        elif by_kl is not None:
            q.addcmul_(difference, by_kl)
        if "x" in out:
            out["x"].addmm_(q, rows.head[part.span])
        if "markov" in out:
            out["markov"].addmm_(q, rows.markov_head[part.span])
        if "markov_head" in out:
            out["markov_head"][part.span].addmm_(q.t(), rows.markov)
    if by_ce is not None:
        if "x" in out:
            out["x"].sub_(by_ce * rows.head[rows.target])
        if "markov" in out:
            out["markov"].sub_(by_ce * rows.markov_head[rows.target])
        if "markov_head" in out:
            out["markov_head"].index_add_(0, rows.target, by_ce * rows.markov, alpha=-1)
