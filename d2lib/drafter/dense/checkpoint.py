"""Dense drafters in and out of DeepSpec's, SpecForge's and speculators' folders: config.json and safetensors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from safetensors.torch import save
from torch import Tensor

from d2lib.drafter.dense.config import DenseConfig, shapes
from d2lib.drafter.dense.fields import write_fields
from d2lib.drafter.dense.refusals import SHARED, refusals
from d2lib.drafter.dense.source import Source, Store, open_source
from d2lib.drafter.dense.target import CONFIG, same_bits
from d2lib.drafter.family import Stored
from d2lib.drafter.headers import INDEX, SINGLE, read_stored, require_finite
from d2lib.errors import Refused
from d2lib.files import publish_folder

DType: TypeAlias = Literal["bfloat16", "float16", "float32"]

_SHARD = 5_000_000_000  # the size that Hugging Face's writers take


@dataclass(frozen=True)
class DenseCheckpoint:
    """A dense drafter in normal form: its configuration, and every tensor of `shapes(config)` in fp32."""

    store: Store
    config: DenseConfig
    weights: dict[str, Tensor]


def read_dense(folder: Path, target: Path) -> DenseCheckpoint:
    """The dense drafter in a folder of any layout, with the embedding and LM head of its target.

    Args:
        folder: holds config.json and model.safetensors, or its index and shards.
        target: the folder of the target, of which two tensors are read.

    Raises:
        Refused: for any reason of `refusals`; a value that is not finite; a copy of the target's embedding or head
            that is not the target's; a vocabulary map that is not one to one.
    """
    source = open_source(folder, target)
    config, reasons = refusals(source)
    if reasons or config is None:
        raise reasons[0].refused(source)
    _check_maps(source)
    weights = _shared(source)
    for name in shapes(config):
        if name not in weights:
            value = read_stored(folder, source.tensors[name])
            require_finite(value, name, folder)
            weights[name] = value.to(torch.float32, copy=True)
    return DenseCheckpoint(source.store, config, weights)


def stored(folder: Path, target: Path) -> Stored:
    """The dense drafter in a folder, by its configuration and headers.

    Raises:
        Refused: no layout of a dense drafter, or the first reason of `refusals`.
    """
    source = open_source(folder, target)
    config, reasons = refusals(source)
    if reasons or config is None:
        raise reasons[0].refused(source)
    return Stored(folder, source.store, config, lambda: read_dense(folder, target).weights)


def write_dense(
    folder: Path,
    config: DenseConfig,
    weights: Mapping[str, Tensor],
    *,
    store: Store,
    dtype: DType,
    shard_bytes: int = _SHARD,
) -> None:
    """Make a new folder with a dense drafter; what fits in one shard is one file, what does not has an index.

    Args:
        folder: must not exist; it appears whole or not at all.
        config: the drafter's.
        weights: every tensor of `shapes(config)`. DeepSpec's layout stores all, the others leave the target's out.
        store: the layout.
        dtype: of every stored tensor.
        shard_bytes: the most that a shard holds, unless one tensor is larger.

    Raises:
        Refused: the folder exists, a tensor is missing, misshapen or not finite in `dtype`, or the layout has no field
            for what the configuration says.
    """
    names = [name for name in shapes(config) if store == "deepspec" or name not in SHARED]
    fields = write_fields(config, store, dtype)
    stored = {name: _stored_as(weights, name, shapes(config)[name], getattr(torch, dtype)) for name in names}
    publish_folder(folder, _files(fields, stored, shard_bytes))


def _files(fields: Mapping[str, Any], stored: Mapping[str, Tensor], shard_bytes: int) -> Iterator[tuple[str, bytes]]:
    """The folder's files, a shard at a time."""
    yield CONFIG, (json.dumps(fields, indent=2) + "\n").encode()
    shards = _shards(stored, shard_bytes)
    files = [f"model-{index:05}-of-{len(shards):05}.safetensors" for index in range(1, len(shards) + 1)]
    if len(shards) == 1:
        files = [SINGLE]
    for file, shard in zip(files, shards, strict=True):
        yield file, save({name: stored[name] for name in shard}, metadata={"format": "pt"})
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in stored.values())},
            "weight_map": {name: file for file, shard in zip(files, shards, strict=True) for name in shard},
        }
        yield INDEX, (json.dumps(index, indent=2) + "\n").encode()


def _shards(stored: Mapping[str, Tensor], shard_bytes: int) -> list[list[str]]:
    """The tensors' names in order, in shards of at most `shard_bytes`, but for one that is larger by itself."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in stored.items():
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.nbytes
    return shards


def _stored_as(weights: Mapping[str, Tensor], name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if name not in weights or tuple(weights[name].shape) != shape:
        found = list(weights[name].shape) if name in weights else "nothing"
        raise Refused("a drafter tensor is missing or misshapen", expected=list(shape), found=found, where=name)
    value = weights[name].detach().cpu().to(dtype).clone().contiguous()
    require_finite(value, name, f"as {dtype}")
    return value


def _shared(source: Source) -> dict[str, Tensor]:
    """Embedding and LM head: the target's, in fp32; the drafter's copies must be the same."""
    if source.target is None:  # `read_dense` opens none without
        raise Refused("a dense drafter is read with its target", where=source.folder, remedy="name the target's folder")
    shared = {}
    for name, value in zip(SHARED, source.target.read(), strict=True):
        if name in source.tensors:
            copy = read_stored(source.folder, source.tensors[name])[: source.target.vocab_size]
            if not same_bits(copy, value):
                raise Refused(
                    "the drafter's copy of a target's tensor is not the target's: some servers use the one, some the "
                    "other",
                    expected=f"{source.target.folder}: {name}, bit for bit after the cast to {copy.dtype}",
                    found=_difference(copy, value),
                    where=f"{source.folder}: {name}",
                    remedy="name the target that it was trained for",
                )
        shared[name] = value.to(torch.float32, copy=True)
    return shared


def _difference(copy: Tensor, value: Tensor) -> str:
    if copy.shape != value.shape:
        return f"{list(copy.shape)} against {list(value.shape)}"
    return f"{int((copy != value.to(copy.dtype)).sum())} of {copy.numel()} values differ"


def _check_maps(source: Source) -> None:
    """A vocabulary map of all tokens must leave every token where it is."""
    for name, kept in (("d2t", 0), ("t2d", 1)):
        if name in source.dropped:
            value = read_stored(source.folder, source.dropped[name])
            if not bool((value == kept).all()):
                raise Refused(
                    "a vocabulary map moves or drops tokens",
                    expected=f"{name} of {'zeros' if kept == 0 else 'ones'}",
                    found=f"{int((value != kept).sum())} of {value.numel()} entries that are not",
                    where=f"{source.folder}: {name}",
                    remedy="train a drafter on the whole vocabulary",
                )
