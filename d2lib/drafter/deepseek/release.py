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
from typing import Any, Literal, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from d2lib.drafter.deepseek.config import DeepseekConfig
from d2lib.drafter.headers import INDEX, weight_map
from d2lib.drafter.weights import MAPPED, Weights, check_weights, expected_shapes
from d2lib.errors import Refused
from d2lib.files import inside

_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
_FP4_COLUMNS = 32
_E8M0_NAN = 255
_UNUSED = ".ffn.gate.bias_vl"  # the router's bias for image tokens

Form: TypeAlias = Literal["deepseek_v41", "deepseek_v4"]
"""A model family whose storage we know, by its name in config.json."""


@dataclass(frozen=True)
class ReleaseForm:
    """How a model family stores its drafter: the FP8 block's side, and the Markov head's names by ours."""

    block: int
    markov: Mapping[str, str]


FORMS: dict[Form, ReleaseForm] = {
    "deepseek_v41": ReleaseForm(block=32, markov={}),
    "deepseek_v4": ReleaseForm(
        block=128,
        markov={
            "markov_head.embed.weight": "markov_head.markov_w1.weight",
            "markov_head.head.weight": "markov_head.markov_w2.weight",
        },
    ),
}


def read_release(folder: Path, config: DeepseekConfig, form: Form) -> Weights:
    """The drafter of a release, in fp32 under our names.

    Goes shard by shard and tensor by tensor: beyond the result, one stored tensor and its decoding are in memory, and
    one shard is open (two, where a scale lies in another shard than its tensor).

    Args:
        folder: holds the index and the shards that it names.
        config: the drafter's sizes.
        form: the release's model family.

    Raises:
        Refused: a tensor is missing, is extra under `mtp.`, has a wrong shape or type, or holds a NaN code.
    """
    placed = weight_map(folder / INDEX)
    shapes = expected_shapes(config)
    ours = {name: stored_name(name, form) for name in shapes}
    decoded: Weights = {}
    used: set[str] = set()
    with ExitStack() as stack:
        shards = _Shards(folder, placed, stack)
        for name in sorted(shapes, key=lambda name: placed.get(ours[name], "")):
            decoded[name] = _read(shards, name, ours[name], shapes[name], form, used)
    for name in sorted(placed.keys() - used):
        if is_unknown(name):
            raise Refused("the release has a drafter tensor that we do not know", found=name, where=folder / INDEX)
    weights = {name: decoded[name] for name in shapes}
    check_weights(weights, config, where=folder)
    return weights


class _Shards:
    """The shard that is being read, and the one that holds its scales where that is another; no third is open.

    They are opened anew after `MAPPED` bytes, which gives back the memory of the pages that were read.
    """

    def __init__(self, folder: Path, placed: Mapping[str, str], stack: ExitStack) -> None:
        self.folder, self.placed, self.stack = folder, placed, stack
        self.opened: dict[str, Any] = {}
        self.mapped = 0

    def tensor(self, name: str) -> Tensor:
        """One stored tensor."""
        if name not in self.placed:
            raise Refused("the release lacks a drafter tensor", expected=name, where=self.folder / INDEX)
        shard = self.placed[name]
        try:
            if self.mapped >= MAPPED or (shard not in self.opened and len(self.opened) == 2):
                self.opened.clear()
                self.stack.close()
                self.mapped = 0
            if shard not in self.opened:
                self.opened[shard] = self.stack.enter_context(safe_open(inside(self.folder, shard), framework="pt"))
            tensor: Tensor = self.opened[shard].get_tensor(name)
            self.mapped += tensor.nbytes
        except (SafetensorError, OSError) as error:
            raise Refused(
                "a tensor cannot be read from its shard", expected=name, found=str(error), where=self.folder / shard
            ) from None
        return tensor


def _read(shards: _Shards, name: str, stored: str, shape: tuple[int, ...], form: Form, used: set[str]) -> Tensor:
    """One tensor in fp32, decoded with its scale where it has one; `used` takes the names that it was read from."""
    data = shards.tensor(stored)
    used.add(stored)
    if len(shape) == 2 and data.dtype in (torch.float8_e4m3fn, torch.int8, torch.uint8):
        scale = shards.tensor(scale_name(stored))
        used.add(scale_name(stored))
        decode = decode_fp4 if data.dtype != torch.float8_e4m3fn else decode_fp8
        return decode(data, scale, shape, block=FORMS[form].block, name=name)
    if data.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise Refused(
            "a stored tensor has a type that we cannot decode",
            expected="FP8 E4M3, FP4 pairs in I8, BF16, F16 or F32",
            found=data.dtype,
            where=name,
        )
    return data.to(torch.float32, copy=True)


def stored_name(name: str, form: Form) -> str:
    """The release's name of one of our tensors."""
    for ours, theirs in FORMS[form].markov.items():
        if name.endswith(ours):
            return name.removesuffix(ours) + theirs
    return name


def scale_name(stored: str) -> str:
    """The release's name of a stored tensor's scale."""
    return stored.removesuffix("weight") + "scale"


def scale_shape(shape: tuple[int, ...], form: Form, *, fp4: bool) -> tuple[int, ...]:
    """The shape of the E8M0 scale of a tensor of this shape: per square block for FP8, per 32 columns for FP4."""
    if fp4:
        return (shape[0], math.ceil(shape[1] / _FP4_COLUMNS))
    return tuple(math.ceil(size / FORMS[form].block) for size in shape)


def is_unknown(name: str) -> bool:
    """Whether a tensor that nothing expects is a reason to refuse: it is the drafter's, and not known to be unused."""
    return name.startswith("mtp.") and not name.endswith(_UNUSED)


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
