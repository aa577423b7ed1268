"""Rotary position embedding (RoFormer, arXiv 2104.09864) over all channels of a head, in pairs half a head apart.

Frequencies and angles are computed in fp32 in the order of transformers, which trainers and servers follow. Scaling:
`linear` (position interpolation, arXiv 2306.15595), `llama3` (Llama 3.1, arXiv 2407.21783), `yarn` (arXiv 2309.00071).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from d2lib.drafter.dense.config import DenseConfig


def rotary_angles(positions: Tensor, config: DenseConfig) -> tuple[Tensor, Tensor]:
    """Cosine and sine, [..., head_dim / 2] fp32, of positions [...] int64, times yarn's attention factor."""
    angles = positions.float().unsqueeze(-1) * frequencies(config).to(positions.device)
    scale = attention_factor(config)
    return torch.cos(angles) * scale, torch.sin(angles) * scale


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn channel pairs (m, m + D/2) of x [..., D] by their angles; cos and sin broadcast to [..., D/2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def frequencies(config: DenseConfig) -> Tensor:
    """[head_dim / 2] fp32 radians a row."""
    rope, width, original = config.rope, config.head_dim, config.rope_original
    plain = 1 / rope.theta ** (torch.arange(0, width, 2).float() / width)
    scaled = plain / rope.factor
    if rope.type == "default":
        return plain
    if rope.type == "linear":
        return scaled
    if rope.type == "llama3":
        wavelength = 2 * math.pi / plain
        low, high = rope.low_freq_factor, rope.high_freq_factor
        share = (original / wavelength - low) / (high - low)
        between = (1 - share) * scaled + share * plain
        long, short = wavelength > original / low, wavelength < original / high
        return torch.where(long, scaled, torch.where(short, plain, between))

    def channel(turns: float) -> float:
        """The pair that turns so often over the original positions."""
        return width * math.log(original / (2 * math.pi * turns)) / (2 * math.log(rope.theta))

    first, last = channel(rope.beta_fast), channel(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    if first == last:
        last += 0.001
    ramp = ((torch.arange(width // 2).float() - first) / (last - first)).clamp(0, 1)
    return (1 - ramp) * plain + ramp * scaled


def attention_factor(config: DenseConfig) -> float:
    """What cosine and sine are multiplied by: 1 but for yarn."""
    rope = config.rope
    if rope.type != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor

    def grown(scale: float) -> float:
        return 0.1 * scale * math.log(rope.factor) + 1 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return grown(rope.mscale) / grown(rope.mscale_all_dim)
    return grown(1.0)
