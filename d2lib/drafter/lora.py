"""LoRA of a drafter (Hu et al., arXiv 2106.09685): targets, initialization, identity, merge, one file in and out.

An adapted projection is y = x·Wᵀ + (x·Aᵀ)·Bᵀ with A [rank, in] and B [out, rank]; alpha equals the rank, so the scale
is 1. B starts at zero, so the adapted drafter starts equal to the native one, bit for bit.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from d2lib.drafter.config import DrafterConfig
from d2lib.drafter.family import family_of
from d2lib.drafter.weights import Weights, expected_shapes, read_tensors, write_tensors
from d2lib.errors import Refused
from d2lib.files import Hashed

Adapter: TypeAlias = dict[str, Tensor]
"""`NAME.lora_A` [rank, in] and `NAME.lora_B` [out, rank] for every adapted module NAME, fp32."""


def lora_targets(config: DrafterConfig) -> list[str]:
    """Names of the adapted modules; everything else stays frozen."""
    return family_of(config).lora_targets(config)


def adapter_shapes(config: DrafterConfig, rank: int) -> dict[str, tuple[int, ...]]:
    """Every adapter tensor with its shape; in a grouped projection A is shared and B's rows belong to the groups."""
    weights = expected_shapes(config)
    shapes: dict[str, tuple[int, ...]] = {}
    for name in lora_targets(config):
        out, inner = weights[f"{name}.weight"]
        shapes |= {f"{name}.lora_A": (rank, inner), f"{name}.lora_B": (out, rank)}
    return shapes


def initialize_adapter(config: DrafterConfig, rank: int, seed: int) -> Adapter:
    """A fresh adapter, drawn from its own seed before any model exists: A as in PEFT's default, B zero.

    A is uniform on ±1/sqrt(in), which is Kaiming's uniform bound for a = sqrt(5).

    Args:
        rank: rank of every module's update, and alpha.
        seed: of a generator that draws the A matrices in the order of `lora_targets`, on CPU.
    """
    if rank < 1:
        raise Refused("the LoRA rank must be at least 1", expected="rank >= 1", found=rank)
    generator = torch.Generator().manual_seed(seed)
    adapter: Adapter = {}
    for name, shape in adapter_shapes(config, rank).items():
        if name.endswith("lora_A"):
            bound = 1 / math.sqrt(shape[1])
            adapter[name] = torch.empty(shape).uniform_(-bound, bound, generator=generator)
        else:
            adapter[name] = torch.zeros(shape)
    return adapter


def initialization_sha256(adapter: Mapping[str, Tensor]) -> Hashed:
    """SHA-256 over (name, dtype, shape, bytes) of all tensors in name order.

    Every field is preceded by its length in eight little-endian bytes, so that no two adapters share a stream: the
    name and the dtype (as `float32`) in UTF-8, the shape as eight little-endian bytes per axis, the data in row-major
    little-endian order.
    """
    digest = hashlib.sha256()
    for name in sorted(adapter):
        tensor = adapter[name].detach().cpu().contiguous()
        fields = (
            name.encode(),
            str(tensor.dtype).removeprefix("torch.").encode(),
            b"".join(size.to_bytes(8, "little") for size in tensor.shape),
            tensor.flatten().view(torch.uint8).numpy().tobytes(),
        )
        for data in fields:
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
    return Hashed("sha256", digest.hexdigest())


def adapter_rank(adapter: Mapping[str, Tensor], config: DrafterConfig, *, where: object = None) -> int:
    """The rank of a complete and finite adapter of this drafter; anything else is refused, and named."""
    first = f"{lora_targets(config)[0]}.lora_A"
    if first not in adapter or adapter[first].ndim != 2:
        raise Refused("an adapter tensor is missing", expected=first, where=where)
    rank = int(adapter[first].shape[0])
    expected = adapter_shapes(config, rank)
    for name in sorted(expected.keys() - adapter.keys()):
        raise Refused("an adapter tensor is missing", expected=f"{name} {list(expected[name])}", where=where)
    for name in sorted(adapter.keys() - expected.keys()):
        raise Refused("a tensor does not belong to this adapter", found=name, where=where)
    for name, shape in expected.items():
        if tuple(adapter[name].shape) != shape:
            raise Refused(
                f"the adapter tensor {name} has a wrong shape",
                expected=list(shape),
                found=list(adapter[name].shape),
                where=where,
            )
        if not adapter[name].is_floating_point() or not bool(torch.isfinite(adapter[name]).all()):
            raise Refused(f"the adapter tensor {name} is not finite", expected="finite numbers", where=where)
    return rank


def merge(weights: Mapping[str, Tensor], adapter: Mapping[str, Tensor], config: DrafterConfig) -> Weights:
    """Weights with W + B·A in place of every adapted W; the others are shared, not copied."""
    adapter_rank(adapter, config)
    merged = dict(weights)
    for name in lora_targets(config):
        update = adapter[f"{name}.lora_B"] @ adapter[f"{name}.lora_A"]
        merged[f"{name}.weight"] = weights[f"{name}.weight"] + update
    return merged


def save_adapter(path: Path, adapter: Mapping[str, Tensor], config: DrafterConfig) -> None:
    """Create one safetensors file of an adapter; never overwrites, and refuses an incomplete one."""
    adapter_rank(adapter, config, where=path)
    write_tensors(path, adapter)


def load_adapter(path: Path, config: DrafterConfig) -> Adapter:
    """An adapter of this drafter from one safetensors file, in fp32; anything else is refused."""
    stored = read_tensors(path)
    rank = adapter_rank(stored, config, where=path)
    return {name: stored[name].to(torch.float32, copy=True) for name in adapter_shapes(config, rank)}
