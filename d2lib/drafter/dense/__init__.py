"""Dense drafters: DSpark and DFlash with Qwen3-style blocks over a target's hidden states."""

from d2lib.drafter.dense.card import inspect
from d2lib.drafter.dense.checkpoint import stored
from d2lib.drafter.dense.config import DenseConfig, lora_targets, peft_modules, shapes
from d2lib.drafter.dense.fast import DenseFast, activations
from d2lib.drafter.dense.notes import NOTES
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
    reference=DenseReference,
    fast=DenseFast,
    activations=activations,
    peft_modules=peft_modules,
    notes=NOTES,
    inspect=inspect,
    stored=stored,
)
