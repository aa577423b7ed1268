"""A drafter's tensors under its family's names: shapes, random initialization, one file in and out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from d2lib.drafter.config import DrafterConfig
from d2lib.drafter.family import Shapes, family_of
from d2lib.errors import Refused
from d2lib.files import write_exclusive

Weights: TypeAlias = dict[str, Tensor]
"""Name → fp32 tensor; linear weights are [out, in]."""


def expected_shapes(config: DrafterConfig) -> Shapes:
    """Every tensor of a drafter with its shape, the target's token embedding and LM head included."""
    return family_of(config).shapes(config)


def initialize(config: DrafterConfig, embed: Tensor, head: Tensor, generator: torch.Generator) -> Weights:
    """Random weights of a drafter that can be trained, around a target's embedding and LM head.

    Args:
        embed: [vocab_size, dim] the target's token embedding.
        head: [vocab_size, dim] the target's LM head.
        generator: the only source of randomness.
    """
    family = family_of(config)
    weights = {name: value.detach().float().clone() for name, value in ((family.embed, embed), (family.head, head))}
    for name, shape in expected_shapes(config).items():
        if name not in weights:
            weights[name] = family.fresh(config, name, shape, generator)
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
