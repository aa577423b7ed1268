"""A drafter's tensors under their release names: shapes, random initialization, one file in and out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from d2lib.drafter.deepseek.config import DrafterConfig
from d2lib.errors import Refused
from d2lib.files import write_exclusive

Weights: TypeAlias = dict[str, Tensor]
"""Release name → fp32 tensor; linear weights are [out, in]."""

_RESIDUAL_OUTPUTS = (".attn.wo_b.weight", ".w2.weight")


def expected_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a drafter with its shape, the target's `embed.weight` and `head.weight` included."""
    c = config
    mix = (2 + c.hc_mult) * c.hc_mult
    stream = c.hc_mult * c.dim
    shapes: dict[str, tuple[int, ...]] = {
        "embed.weight": (c.vocab_size, c.dim),
        "head.weight": (c.vocab_size, c.dim),
        "mtp.0.main_proj.weight": (c.dim, c.n_taps * c.dim),
        "mtp.0.main_norm.weight": (c.dim,),
    }
    for stage in range(c.n_stages):
        prefix = f"mtp.{stage}"
        shapes |= {
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
            shapes |= {
                f"{prefix}.hc_{motion}_fn": (mix, stream),
                f"{prefix}.hc_{motion}_base": (mix,),
                f"{prefix}.hc_{motion}_scale": (3,),
            }
        experts = [f"experts.{expert}" for expert in range(c.n_routed_experts)]
        for name in [*experts, "shared_experts"]:
            shapes |= {
                f"{prefix}.ffn.{name}.w1.weight": (c.moe_inter_dim, c.dim),
                f"{prefix}.ffn.{name}.w2.weight": (c.dim, c.moe_inter_dim),
                f"{prefix}.ffn.{name}.w3.weight": (c.moe_inter_dim, c.dim),
            }
    last = f"mtp.{c.n_stages - 1}"
    shapes |= {
        f"{last}.norm.weight": (c.dim,),
        f"{last}.markov_head.embed.weight": (c.vocab_size, c.markov_rank),
        f"{last}.markov_head.head.weight": (c.vocab_size, c.markov_rank),
        f"{last}.confidence_head.proj.weight": (1, c.dim + c.markov_rank),
    }
    if c.hc_form == "per_motion":
        shapes |= {
            f"{last}.hc_head_fn": (c.hc_mult, stream),
            f"{last}.hc_head_base": (c.hc_mult,),
            f"{last}.hc_head_scale": (1,),
        }
    return shapes


def initialize(config: DrafterConfig, embed: Tensor, head: Tensor, generator: torch.Generator) -> Weights:
    """Random weights of a drafter that can be trained, around a target's embedding and LM head.

    Linear weights are normal with variance 1/in (projections back into the residual also divided by 2·n_stages);
    norms are one; sinks, router biases, the Markov head's output and the confidence head are zero. Hyper-connections
    start close to a plain residual: every stream is read with weight 1/hc_mult, written with weight 1 and mixed by a
    matrix close to the identity.

    Args:
        embed: [vocab_size, dim] the target's token embedding.
        head: [vocab_size, dim] the target's LM head.
        generator: the only source of randomness.
    """
    hc = config.hc_mult
    read = math.log(1 / (hc - 1)) if hc > 1 else 4.0
    mix = torch.cat([torch.full((hc,), read), torch.zeros(hc), 5.0 * torch.eye(hc).flatten()])
    weights: Weights = {"embed.weight": embed.detach().float().clone(), "head.weight": head.detach().float().clone()}
    for name, shape in expected_shapes(config).items():
        if name in weights:
            continue
        if name.endswith("norm.weight"):
            value = torch.ones(shape)
        elif name.endswith(("attn_sink", "gate.bias", "markov_head.head.weight", "confidence_head.proj.weight")):
            value = torch.zeros(shape)
        elif name.endswith(("hc_attn_base", "hc_ffn_base")):
            value = mix.clone()
        elif name.endswith("hc_head_base"):
            value = torch.full(shape, read)
        elif name.endswith("_scale"):
            value = torch.full(shape, 0.1)
        else:
            value = torch.randn(shape, generator=generator) / math.sqrt(shape[-1])
            if name.endswith(_RESIDUAL_OUTPUTS):
                value /= math.sqrt(2 * config.n_stages)
        weights[name] = value
    check_weights(weights, config)
    return weights


def check_weights(weights: Mapping[str, Tensor], config: DrafterConfig, *, where: object = None) -> None:
    """Refuse a missing, extra, misshapen, non-float or non-finite tensor, and name it."""
    expected = expected_shapes(config)
    for name in sorted(expected.keys() - weights.keys()):
        raise Refused("a drafter tensor is missing", expected=f"{name} {list(expected[name])}", where=where)
    for name in sorted(weights.keys() - expected.keys()):
        raise Refused("a tensor does not belong to this drafter", found=name, where=where)
    for name, shape in expected.items():
        tensor = weights[name]
        if tuple(tensor.shape) != shape:
            raise Refused(
                f"the drafter tensor {name} has a wrong shape",
                expected=list(shape),
                found=list(tensor.shape),
                where=where,
            )
        if not tensor.is_floating_point():
            raise Refused(f"the drafter tensor {name} is not floating-point", found=tensor.dtype, where=where)
        finite = torch.isfinite(tensor)
        if not bool(finite.all()):
            raise Refused(
                f"the drafter tensor {name} is not finite",
                expected="finite numbers",
                found=f"{int((~finite).sum())} of {tensor.numel()} are not",
                where=where,
            )


def load_weights(path: Path, config: DrafterConfig) -> Weights:
    """A drafter from one float safetensors file, in fp32.

    Raises:
        Refused: the file is missing or damaged, or `check_weights` refuses what is in it.
    """
    weights = read_tensors(path)
    check_weights(weights, config, where=path)
    return {name: weights[name].to(torch.float32, copy=True) for name in expected_shapes(config)}


def save_weights(path: Path, weights: Mapping[str, Tensor], config: DrafterConfig) -> None:
    """Create one safetensors file of a drafter; never overwrites, and refuses what `check_weights` refuses."""
    check_weights(weights, config, where=path)
    write_tensors(path, weights)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a safetensors file, as stored; refuses a missing or damaged file."""
    if not path.is_file():
        raise Refused("a file is missing", expected="a safetensors file", where=path)
    try:
        with safe_open(path, framework="pt") as stored:
            return {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError) as error:
        raise Refused("not a readable safetensors file", found=str(error), where=path) from None


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Create a safetensors file of contiguous copies of the tensors; never overwrites."""
    write_exclusive(path, save({name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}))
