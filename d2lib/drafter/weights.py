"""A drafter's tensors under its family's names: shapes, random initialization, one file in and out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
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

MAPPED = 1 << 28
"""Bytes of a file that stay mapped at most, but for a tensor that is larger."""


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
    _check_names(weights.keys(), expected, where)
    for name, shape in expected.items():
        _check_tensor(name, weights[name], shape, where)


def _check_names(found: Iterable[str], expected: Shapes, where: object) -> None:
    names = set(found)
    for name in sorted(expected.keys() - names):
        raise Refused("a drafter tensor is missing", expected=f"{name} {list(expected[name])}", where=where)
    for name in sorted(names - expected.keys()):
        raise Refused("a tensor does not belong to this drafter", found=name, where=where)


def _check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...], where: object) -> None:
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


def kept_dtypes(config: DrafterConfig, projections: torch.dtype) -> dict[str, torch.dtype]:
    """Name → the type in which a tensor is kept: that of the large products for projections, fp32 for all others."""
    large = set(family_of(config).projections(config))
    return {name: projections if name in large else torch.float32 for name in expected_shapes(config)}


def load_weights(
    path: Path, config: DrafterConfig, *, device: str = "cpu", projections: torch.dtype = torch.float32
) -> Weights:
    """A drafter from one float safetensors file, tensor by tensor into place.

    Beyond the result, one stored tensor and its conversion are in host memory, or as many small ones as make
    `MAPPED` bytes.

    Args:
        device: where the tensors are put.
        projections: the type in which the family's projections are kept. FAST, whose large products are in bf16, gives
            the same bits with projections in bf16; REF needs fp32.

    Raises:
        Refused: the file is missing or damaged, or `check_weights` refuses what is in it.
    """
    expected, kept = expected_shapes(config), kept_dtypes(config, projections)
    loaded: Weights = {}
    for name, tensor in stored_tensors(path, lambda names: _check_names(names, expected, path)):
        _check_tensor(name, tensor, expected[name], path)
        loaded[name] = tensor.to(device, kept[name], copy=True)
    return {name: loaded[name] for name in expected}


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


def stored_tensors(path: Path, check: Callable[[list[str]], object] = lambda _: None) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor as stored) in the file's order, each valid until the next is asked for.

    A tensor is a view of the mapped file, and a page once read counts as resident memory until the map is gone. So the
    file is mapped anew after `MAPPED` bytes.

    Args:
        check: called once with all names, before a tensor is read.

    Raises:
        Refused: the file is missing or damaged.
    """
    if not path.is_file():
        raise Refused("a file is missing", expected="a safetensors file", where=path)
    names: list[str] | None = None
    done = 0
    try:
        while names is None or done < len(names):
            with safe_open(path, framework="pt") as stored:
                if names is None:
                    names = list(stored.offset_keys())
                    check(names)
                mapped = 0
                while done < len(names) and (mapped == 0 or mapped < MAPPED):
                    tensor = stored.get_tensor(names[done])
                    mapped += tensor.nbytes
                    done += 1
                    yield names[done - 1], tensor
                    del tensor
    except (SafetensorError, OSError) as error:
        raise Refused("not a readable safetensors file", found=str(error), where=path) from None


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Create a safetensors file of contiguous copies of the tensors; never overwrites."""
    write_exclusive(path, save({name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}))
