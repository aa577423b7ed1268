"""LM head and loss in one piece, forward and backward, that never holds a [blocks, K, vocab] tensor.

A tile of whole blocks is taken through student logits, teacher logits, statistics, the objective's derivatives and the
gradient of the hidden states at once, so that three large matrix products are all there is, and the two logit tiles
are the only large memory. Everything between the products works in place on vocabulary chunks that stay in cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from d2lib.drafter.objectives import Objective, SlotStatistics

TILE_BYTES = 200 << 20
"""Of the two logit tiles together."""

CHUNK = 4096
"""Vocabulary entries that the element-wise passes take at a time."""


@dataclass(frozen=True)
class HeadLoss:
    """The loss of a batch and what it was made of.

    loss: scalar, mean over blocks, differentiable. loss_sum / blocks is the same number as (sum, count).
    kl, tv, ce: [K] sums over the blocks' valid slots; count: [K] how many those are. accepted: expected accepted draft
    tokens (Σ_k Π_{i≤k} α_i), summed over blocks.
    """

    loss: Tensor
    loss_sum: float
    blocks: int
    kl: Tensor
    tv: Tensor
    ce: Tensor
    count: Tensor
    accepted: float


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
    chunk: int = CHUNK,
) -> HeadLoss:
    """Loss of B blocks under an objective; the gradient reaches `x` only (head and Markov head are frozen).

    Args:
        x: [B, K, dim] normed hidden states, fp32.
        head: [V, dim] the LM head. markov_rows: [B, K, rank] embeddings of the previous tokens. markov_head: [V, rank].
        teacher_hidden: [B, K, dim] the target's final hidden states, any float dtype.
        target: [B, K] committed tokens. valid: [B, K] bool.
        objective: the loss of a block from its slots' statistics.
        tile_blocks: blocks taken at once; by default as many as `TILE_BYTES` hold.
        chunk: vocabulary entries of an element-wise pass.
    """
    blocks, slots, _ = x.shape
    if tile_blocks is None:
        tile_blocks = max(1, TILE_BYTES // (8 * slots * head.shape[0]))
    loss_sum, kl, tv, ce = _Fused.apply(  # type: ignore[no-untyped-call]
        x, head, markov_rows, markov_head, teacher_hidden, target, valid, objective, tile_blocks, chunk
    )
    mask = valid.to(kl.dtype)
    alpha = torch.where(valid, 1 - tv, 0.0)
    return HeadLoss(
        loss=loss_sum / blocks,
        loss_sum=float(loss_sum.detach()),
        blocks=blocks,
        kl=(kl * mask).sum(0),
        tv=(tv * mask).sum(0),
        ce=(ce * mask).sum(0),
        count=valid.sum(0),
        accepted=float(alpha.cumprod(1).sum()),
    )


class _Fused(torch.autograd.Function):
    """(loss sum, kl, tv, ce); the backward pass only scales the gradient that the forward pass made."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        head, markov_rows, markov_head, teacher_hidden, target, valid, objective, tile_blocks, chunk = arguments
        blocks, slots, dim = x.shape
        gradient = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        rows = min(tile_blocks, blocks) * slots
        student = x.new_empty(rows, head.shape[0])
        teacher = x.new_empty(rows, head.shape[0])
        parts, loss_sum = [], x.new_zeros((), dtype=torch.float64)
        for start in range(0, blocks, tile_blocks):
            tile = slice(start, min(start + tile_blocks, blocks))
            ok = valid[tile]
            count = ok.numel()
            q, difference = student[:count], teacher[:count]
            torch.mm(x[tile].reshape(count, dim), head.t(), out=q)
            q.addmm_(markov_rows[tile].reshape(count, -1), markov_head.t())
            own = torch.where(ok.unsqueeze(-1), teacher_hidden[tile].float(), 0.0).reshape(count, dim)
            torch.mm(own, head.t(), out=difference)
            statistics, signed = _statistics(q, difference, torch.where(ok, target[tile], 0).reshape(count), chunk)
            leaves = SlotStatistics(*(value.view(ok.shape).to(x.dtype).requires_grad_() for value in statistics))
            with torch.enable_grad():
                loss = objective(leaves, ok).sum()
            loss_sum += loss.detach().double()
            parts.append([leaf.detach() for leaf in (leaves.kl, leaves.tv, leaves.ce)])
            if gradient is not None:
                slopes = torch.autograd.grad(loss, (leaves.kl, leaves.tv, leaves.ce), allow_unused=True)
                _logit_gradient(q, difference, signed, target[tile].reshape(count), ok.reshape(count), slopes, chunk)
                torch.mm(q, head, out=gradient[tile].view(count, dim))
        ctx.save_for_backward(gradient)
        kl, tv, ce = (torch.cat(values) for values in zip(*parts, strict=True))
        ctx.mark_non_differentiable(kl, tv, ce)
        return loss_sum.to(x.dtype), kl, tv, ce

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        (gradient,) = ctx.saved_tensors
        return (None if gradient is None else gradient * upstream[0], *([None] * 9))


def _statistics(q: Tensor, p: Tensor, target: Tensor, chunk: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """From logits, in place: q becomes the student's distribution, p becomes q - p.

    Returns ((kl, tv, ce), Σ_v q_v·sign(q_v - p_v)), each [rows] float64. The totals are taken in float64: KL is a small
    difference of large numbers.
    """
    rows, vocabulary = q.shape
    bounds = [(start, min(start + chunk, vocabulary)) for start in range(0, vocabulary, chunk)]
    picked = q.gather(1, target.unsqueeze(1)).squeeze(1).double()
    top_q, top_p = q.amax(1, keepdim=True), p.amax(1, keepdim=True)
    mass_q, mass_p, cross = (q.new_zeros(rows, dtype=torch.float64) for _ in range(3))
    scratch = q.new_empty(rows, min(chunk, vocabulary))
    for start, stop in bounds:
        qc, pc, space = q[:, start:stop], p[:, start:stop], scratch[:, : stop - start]
        qc.sub_(top_q)
        pc.sub_(top_p)
        torch.sub(pc, qc, out=space)
        pc.exp_()
        qc.exp_()
        mass_p += pc.sum(1)
        mass_q += qc.sum(1)
        cross += space.mul_(pc).sum(1)
    scale_q, scale_p = mass_q.reciprocal().float().unsqueeze(1), mass_p.reciprocal().float().unsqueeze(1)
    tv, signed = (q.new_zeros(rows, dtype=torch.float64) for _ in range(2))
    for start, stop in bounds:
        qc, pc, space = q[:, start:stop], p[:, start:stop], scratch[:, : stop - start]
        qc.mul_(scale_q)
        torch.addcmul(qc, pc, scale_p, value=-1, out=pc)
        tv += torch.abs(pc, out=space).sum(1)
        signed += torch.sign(pc, out=space).mul_(qc).sum(1)
    kl = cross / mass_p - mass_p.log() + mass_q.log()
    ce = mass_q.log() + top_q.squeeze(1).double() - picked
    return (kl, tv / 2, ce), signed


def _logit_gradient(
    q: Tensor,
    difference: Tensor,
    signed: Tensor,
    target: Tensor,
    valid: Tensor,
    slopes: tuple[Tensor | None, ...],
    chunk: int,
) -> None:
    """The loss's derivative by the student's logits, written over q.

    d KL = q - p; d TV = ½·q·(sign(q - p) - Σ q·sign(q - p)); d CE = q - onehot(target); each times its slope.
    """
    by_kl, by_tv, by_ce = (None if slope is None or not bool(slope.any()) else slope.reshape(-1, 1) for slope in slopes)
    own = q.new_zeros(q.shape[0], 1)
    if by_ce is not None:
        own = own + by_ce
    if by_tv is not None:
        own = own - 0.5 * by_tv * signed.float().unsqueeze(1)
    for start in range(0, q.shape[1], chunk):
        qc, dc = q[:, start : start + chunk], difference[:, start : start + chunk]
        if by_tv is None and by_ce is None:
            qc.copy_(dc) if by_kl is not None else qc.zero_()
            if by_kl is not None:
                qc.mul_(by_kl)
            continue
        if by_tv is None:
            qc.mul_(own)
        else:
            qc.mul_(torch.sign(dc).mul_(0.5 * by_tv).add_(own))
        if by_kl is not None:
            qc.addcmul_(dc, by_kl)
    if by_ce is not None:
        q.scatter_add_(1, torch.where(valid, target, 0).unsqueeze(1), -by_ce)
