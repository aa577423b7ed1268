"""The drafter's tensors under their release names: shapes, fresh values, and which modules are adapted."""

from __future__ import annotations

import math
import re

import torch
from torch import Tensor

from d2lib.drafter.deepseek.config import DeepseekConfig
from d2lib.drafter.family import Shapes

EMBED, HEAD = "embed.weight", "head.weight"

_RESIDUAL_OUTPUTS = (".attn.wo_b.weight", ".w2.weight")
_ZERO = ("attn_sink", "gate.bias", "markov_head.head.weight", "confidence_head.proj.weight")
_PROJECTION = re.compile(r"\.(main_proj|w[a-z0-9_]+)\.weight$")
_STAGE_TARGETS = (
    "attn.wq_a",
    "attn.wq_b",
    "attn.wkv",
    "attn.wo_a",
    "attn.wo_b",
    "ffn.shared_experts.w1",
    "ffn.shared_experts.w2",
    "ffn.shared_experts.w3",
)


def shapes(config: DeepseekConfig) -> Shapes:
    """Every tensor of a drafter with its shape, the target's `embed.weight` and `head.weight` included."""
    c = config
    mix = (2 + c.hc_mult) * c.hc_mult
    stream = c.hc_mult * c.dim
    table: Shapes = {
        EMBED: (c.vocab_size, c.dim),
        HEAD: (c.vocab_size, c.dim),
        "mtp.0.main_proj.weight": (c.dim, c.n_taps * c.dim),
        "mtp.0.main_norm.weight": (c.dim,),
    }
    for stage in range(c.n_stages):
        prefix = f"mtp.{stage}"
        table |= {
            f"{prefix}.attn_norm.weight": (c.dim,),
            f"{prefix}.attn.wq_a.weight": (c.q_lora_rank, c.dim),
            f"{prefix}.attn.q_norm.weight": (c.q_lora_rank,),
            f"{prefix}.attn.wq_b.weight": (c.head_inner, c.q_lora_rank),
            f"{prefix}.attn.wkv.weight": (c.head_dim, c.dim),
            f"{prefix}.attn.kv_norm.weight": (c.head_dim,),
            f"{prefix}.attn.attn_sink": (c.n_heads,),
            f"{prefix}.attn.wo_a.weight": (c.o_groups * c.o_lora_rank, c.head_inner // c.o_groups),
            f"{prefix}.attn.wo_b.weight": (c.dim, c.o_groups * c.o_lora_rank),
            f"{prefix}.ffn_norm.weight": (c.dim,),
            f"{prefix}.ffn.gate.weight": (c.n_routed_experts, c.dim),
            f"{prefix}.ffn.gate.bias": (c.n_routed_experts,),
        }
        for motion in ("attn", "ffn"):
            table |= {
                f"{prefix}.hc_{motion}_fn": (mix, stream),
                f"{prefix}.hc_{motion}_base": (mix,),
                f"{prefix}.hc_{motion}_scale": (3,),
            }
        experts = [f"experts.{expert}" for expert in range(c.n_routed_experts)]
        for name in [*experts, "shared_experts"]:
            table |= {
                f"{prefix}.ffn.{name}.w1.weight": (c.moe_inter_dim, c.dim),
                f"{prefix}.ffn.{name}.w2.weight": (c.dim, c.moe_inter_dim),
                f"{prefix}.ffn.{name}.w3.weight": (c.moe_inter_dim, c.dim),
            }
    last = f"mtp.{c.n_stages - 1}"
    table |= {
        f"{last}.norm.weight": (c.dim,),
        f"{last}.markov_head.embed.weight": (c.vocab_size, c.markov_rank),
        f"{last}.markov_head.head.weight": (c.vocab_size, c.markov_rank),
        f"{last}.confidence_head.proj.weight": (1, c.dim + c.markov_rank),
    }
    if c.hc_form == "per_motion":
        table |= {
            f"{last}.hc_head_fn": (c.hc_mult, stream),
            f"{last}.hc_head_base": (c.hc_mult,),
            f"{last}.hc_head_scale": (1,),
        }
    return table


def fresh(config: DeepseekConfig, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """A new tensor of a drafter that is to be trained.

    Linear weights are normal with variance 1/in (projections back into the residual also divided by 2·n_stages);
    norms are one; sinks, router biases, the Markov head's output and the confidence head are zero. Hyper-connections
    start close to a plain residual: every stream is read with weight 1/hc_mult, written with weight 1 and mixed by a
    matrix close to the identity.
    """
    hc = config.hc_mult
    read = math.log(1 / (hc - 1)) if hc > 1 else 4.0
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    if name.endswith(_ZERO):
        return torch.zeros(shape)
    if name.endswith(("hc_attn_base", "hc_ffn_base")):
        return torch.cat([torch.full((hc,), read), torch.zeros(hc), 5.0 * torch.eye(hc).flatten()])
    if name.endswith("hc_head_base"):
        return torch.full(shape, read)
    if name.endswith("_scale"):
        return torch.full(shape, 0.1)
    value = torch.randn(shape, generator=generator) / math.sqrt(shape[-1])
    return value / math.sqrt(2 * config.n_stages) if name.endswith(_RESIDUAL_OUTPUTS) else value


def projections(config: DeepseekConfig) -> list[str]:
    """main_proj, wq_a, wq_b, wkv, wo_a, wo_b and the experts' w1, w2, w3: neither routers nor tables nor mixes."""
    return [name for name in shapes(config) if _PROJECTION.search(name)]


def lora_targets(config: DeepseekConfig) -> list[str]:
    """Names of the adapted modules: `main_proj`, and every stage's attention projections and shared expert.

    Routed experts, norms, router, hyper-connections and heads stay frozen. `wo_a` is grouped: A is shared by the
    groups, B's rows belong to them.
    """
    return ["mtp.0.main_proj"] + [f"mtp.{stage}.{name}" for stage in range(config.n_stages) for name in _STAGE_TARGETS]
