"""The drafter's sizes and switches, under the field names of the DeepSeek-V4.1-Flash release."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from d2lib.drafter.config import DrafterConfig


class DeepseekConfig(DrafterConfig):
    """Every size of a DSpark drafter (arXiv 2607.05147); nothing in the arithmetic is hard-coded.

    Attention is multi-query: one shared KV head with K = V.
    """

    family: Literal["deepseek"] = "deepseek"
    n_stages: int = Field(gt=0)
    """Draft blocks, checkpoint prefixes `mtp.0 … mtp.{n_stages-1}`."""
    noise_token_id: int = Field(ge=0)
    """Placeholder id of slots 1 … K-1."""
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
    def head_inner(self) -> int:
        """Channels of all query heads together."""
        return self.n_heads * self.head_dim

    def context_rows(self, anchor: int) -> int:
        """See DrafterConfig: at most the window."""
        return min(anchor, self.window)

    def padded_rows(self, rows: int) -> int:
        """See DrafterConfig: always the window."""
        return self.window

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
