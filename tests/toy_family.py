"""A third family of drafters, as small as one can be: hidden_i = mix·taps of the row before the anchor + embedding of
the anchor's token + a row of its own for slot i. No Markov head, no confidence head."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from d2lib.drafter.batch import Context
from d2lib.drafter.config import DrafterConfig
from d2lib.drafter.family import Family, Shapes
from d2lib.drafter.fast import FastDrafter
from d2lib.drafter.reference import Reference


class ToyConfig(DrafterConfig):
    family: Literal["toy"] = "toy"

    def context_rows(self, anchor: int) -> int:
        return min(anchor, 1)

    def padded_rows(self, rows: int) -> int:
        return 1


class ToyReference(Reference):
    def context(self, taps: Tensor, positions: Tensor) -> list[Tensor]:
        return [self._project("mix", taps.float())]

    def backbone(self, anchor_token: Tensor, anchor: Tensor, context: Context) -> Tensor:
        before = context.gathered()[0][:, -1].masked_fill(~context.valid[:, -1:], 0.0)
        return (before + self.embed[anchor_token]).unsqueeze(1) + self.weights["slots.weight"]

    def head_rows(self, hidden: Tensor) -> Tensor:
        return hidden

    def markov_head(self) -> None:
        return None

    def confidence_head(self) -> None:
        return None


class ToyFast(FastDrafter, ToyReference):
    pass


def shapes(c: ToyConfig) -> Shapes:
    return {
        "token.weight": (c.vocab_size, c.dim),
        "out.weight": (c.vocab_size, c.dim),
        "mix.weight": (c.dim, c.n_taps * c.dim),
        "slots.weight": (c.block_size, c.dim),
    }


FAMILY = Family(
    config=ToyConfig,
    embed="token.weight",
    head="out.weight",
    shapes=shapes,
    fresh=lambda c, name, shape, generator: torch.randn(shape, generator=generator) / shape[-1] ** 0.5,
    lora_targets=lambda c: ["mix"],
    projections=lambda c: ["mix.weight"],
    activations=lambda c, blocks, seen: blocks * (seen + c.block_size) * c.dim,
    reference=ToyReference,
    fast=ToyFast,
)
