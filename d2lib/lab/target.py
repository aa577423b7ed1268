"""The target: a small decoder LM over bytes, made on the spot so that a whole chain can run on real inputs.

Pre-norm blocks with RMSNorm (arXiv 1910.07467), rotary positions in interleaved pairs (arXiv 2104.09864), causal
attention and SwiGLU (arXiv 2002.05202); the LM head is untied. A forward also gives the taps, which are the *input*
residuals of chosen layers, and the final hidden state, of which the distribution is softmax(head · hidden).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self, cast

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from d2lib.drafter.weights import read_tensors, write_tensors
from d2lib.errors import Refused
from d2lib.files import Record, read_json, write_json


class TargetConfig(Record):
    """Sizes of the target. Heads are dim / n_heads wide; tokens are bytes."""

    vocab_size: int = Field(default=256, gt=1)
    dim: int = Field(gt=0)
    n_layers: int = Field(gt=0)
    n_heads: int = Field(gt=0)
    mlp_dim: int = Field(gt=0)
    tap_layers: tuple[int, ...] = Field(min_length=1, strict=False)
    """Layers whose input residual is tapped, in the order of concatenation."""
    norm_eps: float = Field(default=1e-6, gt=0)
    rope_theta: float = Field(default=10000.0, gt=0)

    @property
    def head_dim(self) -> int:
        """Channels of one head."""
        return self.dim // self.n_heads

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.dim % (2 * self.n_heads):
            raise ValueError(f"dim must be an even multiple of n_heads; found {self.dim} and {self.n_heads}")
        if not all(0 <= layer < self.n_layers for layer in self.tap_layers):
            raise ValueError(f"tap_layers must be in 0 … {self.n_layers - 1}; found {self.tap_layers}")
        return self


@dataclass
class KVCache:
    """Keys and values of the rows so far: per layer [B, n_heads, capacity, head_dim]; `length` rows are filled."""

    keys: list[Tensor]
    values: list[Tensor]
    length: int = 0

    @classmethod
    def empty(cls, config: TargetConfig, batch: int, capacity: int) -> Self:
        """Room for `capacity` rows of `batch` sequences."""
        shape = (batch, config.n_heads, capacity, config.head_dim)
        layers = range(config.n_layers)
        return cls([torch.zeros(shape) for _ in layers], [torch.zeros(shape) for _ in layers])

    def rewind(self, length: int) -> None:
        """Forget the rows from `length` on."""
        self.length = min(length, self.length)


@dataclass(frozen=True)
class TargetOutput:
    """taps: [B, L, len(tap_layers)·dim] raw input residuals. hidden: [B, L, dim] after the final norm."""

    taps: Tensor
    hidden: Tensor


class Layer(nn.Module):
    """The weights of one block; linear weights are [out, in]. qkv and up hold their parts stacked."""

    def __init__(self, config: TargetConfig, generator: torch.Generator) -> None:
        super().__init__()
        dim, residual = config.dim, 1 / math.sqrt(2 * config.n_layers)
        self.attn_norm = nn.Parameter(torch.ones(dim))
        self.qkv = _linear(3 * dim, dim, generator)
        self.out = _linear(dim, dim, generator, residual)
        self.mlp_norm = nn.Parameter(torch.ones(dim))
        self.up = _linear(2 * config.mlp_dim, dim, generator)
        self.down = _linear(dim, config.mlp_dim, generator, residual)


class Target(nn.Module):
    """The LM. Linear weights start normal with variance 1/in, those into the residual also divided by 2·n_layers."""

    def __init__(self, config: TargetConfig, generator: torch.Generator) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Parameter(torch.randn(config.vocab_size, config.dim, generator=generator) * 0.5)
        self.head = _linear(config.vocab_size, config.dim, generator)
        self.norm = nn.Parameter(torch.ones(config.dim))
        self.layers = nn.ModuleList(Layer(config, generator) for _ in range(config.n_layers))

    def forward(self, tokens: Tensor, cache: KVCache | None = None) -> TargetOutput:
        """Taps and final hidden states of tokens [B, L] int64.

        Args:
            cache: when given, the tokens follow the rows that are in it, and theirs are added.
        """
        c = self.config
        start = 0 if cache is None else cache.length
        cos, sin = _angles(start, tokens.shape[1], c)
        mask = (
            None if start == 0 else torch.ones(tokens.shape[1], start + tokens.shape[1], dtype=torch.bool).tril(start)
        )
        x = F.embedding(tokens, self.embed)
        taps: dict[int, Tensor] = {}
        for number, layer in enumerate(cast(Iterable[Layer], self.layers)):
            if number in c.tap_layers:
                taps[number] = x
            h = F.rms_norm(x, (c.dim,), layer.attn_norm, c.norm_eps)
            q, k, v = F.linear(h, layer.qkv).view(*tokens.shape, 3, c.n_heads, c.head_dim).permute(2, 0, 3, 1, 4)
            q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
            if cache is not None:
                end = start + tokens.shape[1]
                cache.keys[number][:, :, start:end], cache.values[number][:, :, start:end] = k, v
                k, v = cache.keys[number][:, :, :end], cache.values[number][:, :, :end]
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=start == 0)
            x = x + F.linear(mixed.transpose(1, 2).flatten(2), layer.out)
            gate, up = F.linear(F.rms_norm(x, (c.dim,), layer.mlp_norm, c.norm_eps), layer.up).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
        if cache is not None:
            cache.length = start + tokens.shape[1]
        taken = torch.cat([taps[number] for number in c.tap_layers], dim=-1)
        return TargetOutput(taken, F.rms_norm(x, (c.dim,), self.norm, c.norm_eps))

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """The tapped layers, in the order of concatenation."""
        return self.config.tap_layers

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """None: text in bytes does not end."""
        return ()

    def cache(self, batch: int, capacity: int) -> KVCache:
        """An empty cache for `batch` sequences of up to `capacity` rows."""
        return KVCache.empty(self.config, batch, capacity)

    def logits(self, hidden: Tensor) -> Tensor:
        """head · hidden: [..., dim] to [..., vocab_size]."""
        return F.linear(hidden, self.head)


def save_target(folder: Path, target: Target) -> None:
    """Create target.json (sizes) and target.safetensors (weights); never overwrites."""
    write_json(folder / "target.json", target.config.model_dump(mode="json"))
    write_tensors(folder / "target.safetensors", target.state_dict())


def load_target(folder: Path) -> Target:
    """The target that `save_target` wrote; refuses missing, extra or misshapen tensors."""
    target = Target(TargetConfig.parse(read_json(folder / "target.json"), folder / "target.json"), torch.Generator())
    path = folder / "target.safetensors"
    try:
        target.load_state_dict(read_tensors(path))
    except RuntimeError as error:
        raise Refused("the target's weights do not fit its sizes", found=str(error), where=path) from None
    return target.requires_grad_(False)


def _linear(out: int, inner: int, generator: torch.Generator, gain: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.randn(out, inner, generator=generator) * (gain / math.sqrt(inner)))


def _angles(start: int, length: int, config: TargetConfig) -> tuple[Tensor, Tensor]:
    pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float64)
    angle = torch.arange(start, start + length, dtype=torch.float64)[:, None] * config.rope_theta ** (
        -pairs / config.head_dim
    )
    return angle.cos().float(), angle.sin().float()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)
