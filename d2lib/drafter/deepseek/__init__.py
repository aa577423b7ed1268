"""The drafter of DeepSeek-V4 and V4.1: stages of multi-query attention and experts over hyper-connected streams."""

from d2lib.drafter.deepseek.card import inspect
from d2lib.drafter.deepseek.config import DeepseekConfig
from d2lib.drafter.deepseek.fast import DeepseekFast, activations
from d2lib.drafter.deepseek.notes import NOTES
from d2lib.drafter.deepseek.reference import DeepseekReference
from d2lib.drafter.deepseek.weights import EMBED, HEAD, fresh, lora_targets, projections, shapes
from d2lib.drafter.family import Family

FAMILY = Family(
    config=DeepseekConfig,
    embed=EMBED,
    head=HEAD,
    shapes=shapes,
    fresh=fresh,
    lora_targets=lora_targets,
    projections=projections,
    reference=DeepseekReference,
    fast=DeepseekFast,
    activations=activations,
    notes=NOTES,
    inspect=inspect,
)
