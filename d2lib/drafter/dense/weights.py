"""Fresh values of a dense drafter's tensors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from d2lib.drafter.dense.config import DenseConfig, lora_targets

EMBED, HEAD = "embed_tokens.weight", "lm_head.weight"

_ZERO = (".bias", "markov_head.markov_w2.weight", "confidence_head.proj.weight")
_RESIDUAL_OUTPUTS = (".o_proj.weight", ".down_proj.weight")


def fresh(config: DenseConfig, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """A new tensor of a drafter that is to be trained.

    Linear weights are normal with variance 1/in (projections back into the residual also divided by 2·n_layers); norms
    are one; biases, the Markov head's output and the confidence head are zero.
    """
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    if name.endswith(_ZERO):
        return torch.zeros(shape)
    value = torch.randn(shape, generator=generator) / math.sqrt(shape[-1])
    return value / math.sqrt(2 * config.n_layers) if name.endswith(_RESIDUAL_OUTPUTS) else value


def projections(config: DenseConfig) -> list[str]:
    """`fc`, and every layer's attention and MLP projections."""
    return [f"{name}.weight" for name in lora_targets(config)]
