"""Read a drafter out of a released checkpoint: only the shards that hold `mtp.*`, `embed.weight` and `head.weight`.

Storage: dense projections are FP8 E4M3 with a power-of-two scale (E8M0) per square block, routed experts two FP4
(E2M1) values a byte with a scale per 32 columns, the rest BF16 or FP32. A scale byte e means 2^(e-127).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from d2lib.drafter.config import DrafterConfig
from d2lib.drafter.weights import Weights, check_weights, expected_shapes
from d2lib.errors import Refused
from d2lib.files import inside, read_json

INDEX = "model.safetensors.index.json"

_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
_FP4_COLUMNS = 32
_E8M0_NAN = 255
_UNUSED = ".ffn.gate.bias_vl"  # the router's bias for image tokens


@dataclass(frozen=True)
class ReleaseForm:
    """How a model family stores its drafter: the FP8 block's side, and the Markov head's names by ours."""

    block: int
    markov: Mapping[str, str]


FORMS: dict[str, ReleaseForm] = {
    "deepseek_v41": ReleaseForm(block=32, markov={}),
    "deepseek_v4": ReleaseForm(
        block=128,
        markov={
            "markov_head.embed.weight": "markov_head.markov_w1.weight",
            "markov_head.head.weight": "markov_head.markov_w2.weight",
        },
    ),
}


def read_release(folder: Path, config: DrafterConfig, form: Literal["deepseek_v41", "deepseek_v4"]) -> Weights:
    """The drafter of a release, in fp32 under our names.

    Args:
        folder: holds the index and the shards that it names.
        config: the drafter's sizes.
        form: the release's model family.

    Raises:
        Refused: a tensor is missing, is extra under `mtp.`, has a wrong shape or type, or holds a NaN code.
    """
    placed: dict[str, str] = _weight_map(folder / INDEX)
    ours = {name: _stored_name(name, FORMS[form]) for name in expected_shapes(config)}
    wanted: set[str] = set()
    weights: Weights = {}
    with ExitStack() as stack:
        shards: dict[str, Any] = {}

        def stored(name: str) -> Tensor:
            if name not in placed:
                raise Refused("the release lacks a drafter tensor", expected=name, where=folder / INDEX)
            wanted.add(name)
            shard = placed[name]
            try:
                if shard not in shards:
                    shards[shard] = stack.enter_context(safe_open(inside(folder, shard), framework="pt"))
                tensor: Tensor = shards[shard].get_tensor(name)
            except (SafetensorError, OSError) as error:
                raise Refused(
                    "a tensor cannot be read from its shard", expected=name, found=str(error), where=folder / shard
                ) from None
            return tensor

        for name, shape in expected_shapes(config).items():
            data = stored(ours[name])
            if data.dtype in (torch.float8_e4m3fn, torch.int8, torch.uint8):
                scale = stored(ours[name].removesuffix("weight") + "scale")
                decode = decode_fp4 if data.dtype != torch.float8_e4m3fn else decode_fp8
                weights[name] = decode(data, scale, shape, block=FORMS[form].block, name=name)
            else:
                weights[name] = data.to(torch.float32, copy=True)
    for name in sorted(placed.keys() - wanted):
        if name.startswith("mtp.") and not name.endswith(_UNUSED):
            raise Refused("the release has a drafter tensor that we do not know", found=name, where=folder / INDEX)
    check_weights(weights, config, where=folder)
    return weights


def decode_fp8(data: Tensor, scale: Tensor, shape: tuple[int, ...], *, block: int, name: str) -> Tensor:
    """FP8 E4M3 [rows, cols] times the power of two of its block; blocks at the edges may be cut by the shape.

    Args:
        scale: E8M0 [ceil(rows / block), ceil(cols / block)].
    """
    blocks = tuple(math.ceil(size / block) for size in shape)
    _expect(f"{name} (FP8 E4M3)", data.shape, shape)
    _expect(f"scale of {name}", scale.shape, blocks)
    values = data.float()
    if bool(values.isnan().any()):
        raise Refused("an FP8 tensor holds a NaN code", where=name)
    rows, cols = shape
    return values * _powers(scale, name).repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :cols]


def decode_fp4(data: Tensor, scale: Tensor, shape: tuple[int, ...], *, block: int, name: str) -> Tensor:
    """FP4 E2M1 [rows, cols] from bytes [rows, cols / 2], low nibble first, times the power of two of its 32 columns.

    Args:
        scale: E8M0 [rows, ceil(cols / 32)].
        block: not used; FP4 has its own blocks.
    """
    rows, cols = shape
    _expect(f"{name} (FP4, two a byte)", data.shape, (rows, cols // 2))
    _expect(f"scale of {name}", scale.shape, (rows, math.ceil(cols / _FP4_COLUMNS)))
    codes = data.view(torch.uint8).int()
    values = _FP4[torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1)]
    return values * _powers(scale, name).repeat_interleave(_FP4_COLUMNS, 1)[:, :cols]


def _powers(scale: Tensor, name: str) -> Tensor:
    codes = scale.view(torch.uint8).int()
    if bool((codes == _E8M0_NAN).any()):
        raise Refused("a scale holds a NaN code", expected="E8M0 bytes 0 … 254", where=f"scale of {name}")
    return torch.ldexp(torch.ones_like(codes, dtype=torch.float32), codes - 127)


def _expect(what: str, found: torch.Size, shape: tuple[int, ...]) -> None:
    if tuple(found) != shape:
        raise Refused("a stored tensor has a wrong shape", expected=list(shape), found=list(found), where=what)


def _stored_name(name: str, form: ReleaseForm) -> str:
    for ours, theirs in form.markov.items():
        if name.endswith(ours):
            return name.removesuffix(ours) + theirs
    return name


def _weight_map(path: Path) -> dict[str, str]:
    index = read_json(path)
    placed = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(placed, dict) or not all(isinstance(shard, str) for shard in placed.values()):
        raise Refused("not a safetensors index", expected="weight_map: tensor name → shard", where=path)
    return placed
