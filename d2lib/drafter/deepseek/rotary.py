"""Rotary position embedding (RoFormer, arXiv 2104.09864) on the last channels of a head, in interleaved pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from d2lib.drafter.deepseek.config import DeepseekConfig


def rotary_angles(positions: Tensor, config: DeepseekConfig) -> tuple[Tensor, Tensor]:
    """Cosine and sine, [..., rope_head_dim / 2] fp32, of positions [...] int64; the angles are computed in fp64."""
    pairs = torch.arange(0, config.rope_head_dim, 2, dtype=torch.float64, device=positions.device)
    frequency = config.rope_theta ** (-pairs / config.rope_head_dim)
    angles = positions.double().unsqueeze(-1) * frequency
    return torch.cos(angles).float(), torch.sin(angles).float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
    """Turn channel pairs (2i, 2i+1) of the rotary part by their angles; the channels before it stay.

    Args:
        x: [..., head_dim]; its last 2·n channels turn.
        cos, sin: broadcastable to [..., n].
        inverse: turn back.
    """
    width = 2 * cos.shape[-1]
    plain, turning = x[..., :-width], x[..., -width:]
    even, odd = turning[..., 0::2], turning[..., 1::2]
    if inverse:
        sin = -sin
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)
    return torch.cat([plain, turned], dim=-1)
