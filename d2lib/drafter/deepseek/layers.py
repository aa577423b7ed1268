"""The drafter's pieces as pure functions over rows, fp32, one formula each.

Rows (slots, context rows) are the leading axis N. Everything is computed by `kernels`, so that a row's result does not
depend on its neighbours. All functions are differentiable.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from d2lib.drafter.kernels import align, fold, linear, paired_products, sigmoid, silu, softplus

_E4M3_MAX = 448.0
_AMAX_FLOOR = 1e-4
_QUANT_GROUP = 64


class Mixes(NamedTuple):
    """What a motion reads and writes its streams with: pre [N, hc], post [N, hc], comb [N, source, destination]."""

    pre: Tensor
    post: Tensor
    comb: Tensor


def mixes(
    x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, sinkhorn_iters: int, hc_eps: float, norm_eps: float
) -> Mixes:
    """Hyper-connection weights of a motion (manifold-constrained hyper-connections, arXiv 2512.24880).

    With f the flattened streams and m = fn·f / sqrt(mean f² + norm_eps): pre = σ(m₀·scale₀ + base₀) + hc_eps,
    post = 2σ(m₁·scale₁ + base₁), comb = Sinkhorn of (m₂·scale₂ + base₂).

    Args:
        x: [N, hc, dim]. fn: [(2+hc)·hc, hc·dim]. base: [(2+hc)·hc]. scale: [3].
    """
    rows, hc, _ = x.shape
    m = normed_projection(x, fn, norm_eps).T  # [(2+hc)·hc, N]: rows last, so that the small axes lead
    pre = sigmoid(m[:hc] * scale[0] + base[:hc, None]) + hc_eps
    post = 2 * sigmoid(m[hc : 2 * hc] * scale[1] + base[hc : 2 * hc, None])
    comb = sinkhorn(
        (m[2 * hc :] * scale[2] + base[2 * hc :, None]).reshape(hc, hc, rows), iters=sinkhorn_iters, eps=hc_eps
    )
    return Mixes(pre.T, post.T, comb.permute(2, 0, 1))


def normed_projection(x: Tensor, fn: Tensor, norm_eps: float) -> Tensor:
    """fn·f / sqrt(mean f² + norm_eps) of the flattened streams f: [N, hc, dim] and [m, hc·dim] to [N, m]."""
    f = x.flatten(1)
    return linear(f, fn) / torch.sqrt(fold(f * f, keepdim=True) / f.shape[-1] + norm_eps)


def sinkhorn(logits: Tensor, *, iters: int, eps: float) -> Tensor:
    """Nearly doubly stochastic matrices from logits [source, destination, N] (Sinkhorn and Knopp 1967).

    Softmax over destinations, + eps, divided by (column sums + eps); then iters - 1 times rows, then columns.
    """
    exponent = torch.exp(logits - logits.amax(1, keepdim=True).detach())
    comb = exponent / fold(exponent, 1, keepdim=True) + eps
    comb = comb / (fold(comb, 0, keepdim=True) + eps)
    for _ in range(iters - 1):
        comb = comb / (fold(comb, 1, keepdim=True) + eps)
        comb = comb / (fold(comb, 0, keepdim=True) + eps)
    return comb


def read_streams(x: Tensor, pre: Tensor) -> Tensor:
    """Σ_s pre[s]·x[s]: [N, hc, dim] and [N, hc] to [N, dim]."""
    return fold(pre.unsqueeze(-1) * x, 1)


def write_streams(x: Tensor, h: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """x[s] ← post[s]·h + Σ_r comb[r, s]·x[r]: the streams [N, hc, dim] after a sublayer gave h [N, dim]."""
    written = post.unsqueeze(-1) * h.unsqueeze(1)
    for source in range(x.shape[1]):
        written = written + comb[:, source, :, None] * x[:, source, None, :]
    return written


def quantize_kv(kv: Tensor, rope_head_dim: int) -> Tensor:
    """Fake-quantise the non-rotary channels of KV rows [..., head_dim] to FP8 E4M3 in groups of 64.

    A group's scale is the least power of two (UE8M0) that brings its largest magnitude within E4M3's ±448. The
    gradient passes straight through.
    """
    plain, turning = kv[..., :-rope_head_dim], kv[..., -rope_head_dim:]
    groups = plain.detach().reshape(*plain.shape[:-1], plain.shape[-1] // _QUANT_GROUP, _QUANT_GROUP)
    mantissa, exponent = torch.frexp(groups.abs().amax(-1, keepdim=True).clamp(min=_AMAX_FLOOR) / _E4M3_MAX)
    scale = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())
    stored = (groups / scale).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).float()
    quantized = (stored * scale).flatten(-2) + (plain - plain.detach())
    return torch.cat([quantized, turning], dim=-1)


def sink_attention(q: Tensor, bank: Tensor, bank_valid: Tensor, sink: Tensor) -> Tensor:
    """Multi-query attention of each round's slots over its bank, both directions, with a sink logit per head.

    softmax over (scores, sink); the sink takes mass and gives no value. Scores are q·k / sqrt(head_dim); keys and
    values are the same rows.

    Args:
        q: [B, K, heads, head_dim]. bank: [B, n, head_dim]. bank_valid: [B, n] bool. sink: [heads].

    Returns:
        [B, K, heads, head_dim].
    """
    rounds, slots, heads, width = q.shape
    bank, bank_valid = align(align(bank), 1), align(bank_valid)
    scores = (
        paired_products(align(q).reshape(rounds, slots * heads, -1).unbind(), bank.transpose(1, 2).unbind())
        * width**-0.5
    )
    scores = scores.view(rounds, slots, heads, -1).masked_fill(~bank_valid[:, None, None, :], float("-inf"))
    top = torch.maximum(scores.amax(-1), sink).detach()
    exponent = torch.exp(scores - top.unsqueeze(-1))
    mass = fold(exponent) + torch.exp(sink - top)
    attended = exponent / mass.unsqueeze(-1)
    return paired_products(attended.reshape(rounds, slots * heads, -1).unbind(), bank.unbind())[..., :width].reshape(
        q.shape
    )


def route(
    h: Tensor, gate: Tensor, bias: Tensor, *, n_activated: int, norm_topk_prob: bool, scaling: float
) -> tuple[Tensor, Tensor]:
    """Pick experts by score + bias, weight them by score: s = sqrt(softplus(gate·h)).

    Weights are s of the picked / (their sum + 1e-20) · scaling. Equal scores go to the lower index.

    Args:
        h: [N, dim]. gate: [experts, dim]. bias: [experts], enters the choice only.

    Returns:
        (picked [N, n_activated] int64, best first; weights [N, n_activated]).
    """
    score = torch.sqrt(softplus(linear(h, gate)))
    picked = torch.sort(score.detach() + bias, dim=-1, descending=True, stable=True).indices[:, :n_activated]
    weight = score.gather(1, picked)
    if norm_topk_prob:
        weight = weight / (fold(weight, keepdim=True) + 1e-20)
    return picked, weight * scaling


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(min(gate, limit)) · clamp(up, ±limit)."""
    return silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def expert(h: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, limit: float) -> Tensor:
    """w2·swiglu(w1·h, w3·h): [N, dim] to [N, dim]."""
    return linear(swiglu(linear(h, w1), linear(h, w3), limit), w2)
