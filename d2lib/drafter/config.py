"""The drafter's sizes and switches, under the field names of the DeepSeek-V4.1-Flash release."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from d2lib.files import Record, read_json


class DrafterConfig(Record):
    """Every size of a DSpark drafter (arXiv 2607.05147); nothing in the arithmetic is hard-coded.

    `dim` and `vocab_size` are the target's. Attention is multi-query: one shared KV head with K = V.
    """

    dim: int = Field(gt=0)
    vocab_size: int = Field(gt=1)
    n_stages: int = Field(gt=0)
    """Draft blocks, checkpoint prefixes `mtp.0 … mtp.{n_stages-1}`."""
    block_size: int = Field(gt=0)
    """K: draft slots per round."""
    noise_token_id: int = Field(ge=0)
    """Placeholder id of slots 1 … K-1."""
    target_layer_ids: tuple[int, ...] = Field(min_length=1, strict=False)
    """Target layers whose input residual is tapped, in the order of concatenation."""
    window: int = Field(gt=0)
    """Context rows that a round can see."""
    n_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    rope_head_dim: int = Field(gt=0)
    q_lora_rank: int = Field(gt=0)
    o_lora_rank: int = Field(gt=0)
    o_groups: int = Field(gt=0)
    n_routed_experts: int = Field(gt=0)
    n_activated: int = Field(gt=0)
    n_shared: int = Field(default=1, ge=1, le=1)
    moe_inter_dim: int = Field(gt=0)
    score: Literal["sqrtsoftplus"] = "sqrtsoftplus"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = Field(default=1.5, gt=0)
    swiglu_limit: float = Field(default=10.0, gt=0)
    hc_mult: int = Field(gt=0)
    hc_sinkhorn_iters: int = Field(default=20, gt=0)
    hc_eps: float = Field(default=1e-6, gt=0)
    hc_form: Literal["single_pass", "per_motion"] = "single_pass"
    """`single_pass` (V4.1): the read-in weights come from the motion before. `per_motion` (V4): each its own."""
    norm_eps: float = Field(default=1e-20, gt=0)
    rope_theta: float = Field(default=10000.0, gt=0)
    markov_rank: int = Field(gt=0)
    q_head_norm: bool = False
    kv_quant: Literal["off", "e4m3_ue8m0_64"] = "off"

    @property
    def n_taps(self) -> int:
        """Tapped layers; raw taps have `n_taps * dim` channels."""
        return len(self.target_layer_ids)

    @property
    def head_inner(self) -> int:
        """Channels of all query heads together."""
        return self.n_heads * self.head_dim

    @model_validator(mode="after")
    def _divisible(self) -> Self:
        if self.rope_head_dim % 2 or self.rope_head_dim > self.head_dim:
            raise ValueError(f"rope_head_dim must be even and at most head_dim; found {self.rope_head_dim}")
        if self.n_heads % self.o_groups:
            raise ValueError(f"n_heads ({self.n_heads}) must be a multiple of o_groups ({self.o_groups})")
        if self.n_activated > self.n_routed_experts:
            raise ValueError(f"n_activated ({self.n_activated}) exceeds n_routed_experts ({self.n_routed_experts})")
        if self.noise_token_id >= self.vocab_size:
            raise ValueError(f"noise_token_id ({self.noise_token_id}) is not in the vocabulary ({self.vocab_size})")
        if self.kv_quant == "e4m3_ue8m0_64" and (self.head_dim - self.rope_head_dim) % 64:
            raise ValueError("kv_quant needs head_dim - rope_head_dim to be a multiple of 64")
        return self


def parse_config(value: Any, *, where: object = None) -> DrafterConfig:
    """A configuration from a JSON value; raises Refused and names the field that is wrong."""
    return DrafterConfig.parse(value, where, message="the drafter's configuration is wrong")


def load_config(path: Path) -> DrafterConfig:
    """The configuration in a drafter.json; raises Refused when it is missing or wrong."""
    return parse_config(read_json(path), where=path)
