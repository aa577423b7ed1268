"""Dense drafters: DSpark and DFlash with Qwen3-style blocks over a target's hidden states."""

from d2lib.drafter.dense.card import inspect
from d2lib.drafter.dense.config import DenseConfig, lora_targets, shapes
from d2lib.drafter.dense.fast import DenseFast
from d2lib.drafter.dense.reference import DenseReference
from d2lib.drafter.dense.weights import EMBED, HEAD, fresh, projections
from d2lib.drafter.family import Family

FAMILY = Family(
    config=DenseConfig,
    embed=EMBED,
    head=HEAD,
    shapes=shapes,
    fresh=fresh,
    lora_targets=lora_targets,
    projections=projections,
    inspect=inspect,
    reference=DenseReference,
    fast=DenseFast,
)
