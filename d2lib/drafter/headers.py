"""What safetensors files hold, by their headers alone: one file, or an index with its shards.

The headers are the safetensors library's to parse and to check against a file's length; no value is read here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from d2lib.errors import Refused
from d2lib.files import inside, read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as a file's header states it."""

    name: str
    dtype: str
    """The format's name: F8_E4M3, BF16, I8 (two FP4 values a byte), …"""
    shape: tuple[int, ...]
    size: int
    """Bytes."""
    shard: str
    """The file that holds it."""


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors that a safetensors file's header states.

    Raises:
        Refused: missing, no safetensors file, of a type that is not known, or shorter or longer than its header says.
    """
    if not path.is_file():
        raise Refused("a file is missing", expected="a safetensors file", where=path)
    tensors = {}
    try:
        with safe_open(path, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118 (not a mapping)
                entry = stored.get_slice(name)
                dtype, shape = entry.get_dtype(), tuple(entry.get_shape())
                if dtype not in _BYTES:
                    raise Refused(
                        "a tensor has a type that is not known",
                        expected=", ".join(_BYTES),
                        found=dtype,
                        where=f"{path}: {name}",
                    )
                tensors[name] = StoredTensor(name, dtype, shape, math.prod(shape) * _BYTES[dtype], path.name)
    except (SafetensorError, OSError) as error:
        raise Refused("not a whole safetensors file", found=str(error), where=path) from None
    return tensors


def read_folder_headers(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a model's folder: of model.safetensors, or of the shards that its index names.

    Raises:
        Refused: neither or both are there, the index names a file that is not there or that lies elsewhere, index and
            shards disagree about a tensor's place, or `read_header` refuses a file.
    """
    single, index = inside(folder, SINGLE), inside(folder, INDEX)
    if single.is_file() and index.is_file():
        raise Refused(
            "a folder holds two sets of weights",
            expected=f"{SINGLE} or {INDEX}",
            found="both",
            where=folder,
            remedy="remove the one that is not meant",
        )
    if single.is_file():
        return read_header(single)
    if not index.is_file():
        others = sorted(
            path.name for path in folder.glob("*") if path.suffix in (".bin", ".pt", ".pth", ".safetensors")
        )
        raise Refused(
            "a folder holds no weights that can be read",
            expected=f"{SINGLE} or {INDEX}",
            found=", ".join(others[:5]) or "no weights",
            where=folder,
            remedy="save the weights as safetensors under one of these names; pickled weights are not read",
        )
    placed = weight_map(index)
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(placed.values())):
        path = inside(folder, shard)
        if not path.is_file():
            raise Refused(
                "the index names a shard that is not there",
                expected=shard,
                found=f"no file; it should hold {sum(1 for name in placed.values() if name == shard)} tensors",
                where=index,
                remedy="fetch the checkpoint again, whole",
            )
        header = read_header(path)
        for name in sorted(header.keys() ^ {name for name in placed if placed[name] == shard}):
            raise Refused(
                "index and shards disagree about a tensor's place",
                expected=placed.get(name, "an entry in the index"),
                found=shard if name in header else f"not in {shard}",
                where=f"{index}: {name}",
                remedy="fetch the checkpoint again, whole",
            )
        tensors |= header
    return tensors


def weight_map(path: Path) -> dict[str, str]:
    """A checkpoint's index: tensor → shard; raises Refused when the file is none."""
    index = read_json(path)
    placed = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(placed, dict) or not placed or not all(isinstance(shard, str) for shard in placed.values()):
        raise Refused("not a safetensors index", expected="weight_map: tensor name → shard", where=path)
    return placed


def read_stored(folder: Path, tensor: StoredTensor) -> Tensor:
    """One tensor's values, as stored."""
    path = inside(folder, tensor.shard)
    try:
        with safe_open(path, framework="pt") as stored:
            value: Tensor = stored.get_tensor(tensor.name)
    except (SafetensorError, OSError) as error:
        raise Refused("a tensor cannot be read", found=str(error), where=f"{path}: {tensor.name}") from None
    return value


def require_finite(value: Tensor, name: str, where: object) -> None:
    """Refuse NaN and infinities, and name their tensor."""
    finite = torch.isfinite(value)
    if not bool(finite.all()):
        raise Refused(
            f"the tensor {name} is not finite",
            expected="finite numbers",
            found=f"{int((~finite).sum())} of {value.numel()} are not",
            where=where,
            remedy="take the checkpoint of another step, or fetch this one again",
        )
