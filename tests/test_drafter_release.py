"""A released checkpoint's storage, written here byte by byte and decoded by scalar arithmetic."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny import tiny_config

from d2lib.drafter.deepseek import release as reading
from d2lib.drafter.deepseek.release import decode_fp4, decode_fp8, read_release
from d2lib.drafter.headers import INDEX
from d2lib.drafter.weights import Weights, expected_shapes
from d2lib.errors import Refused

DENSE = ("main_proj.weight", ".wq_a.weight", ".wq_b.weight", ".wkv.weight", ".wo_a.weight", ".wo_b.weight")
V4_NAMES = {"markov_head.embed": "markov_head.markov_w1", "markov_head.head": "markov_head.markov_w2"}


def fp8_value(code: int) -> float:
    """E4M3: sign, 4 exponent bits with bias 7, 3 mantissa bits; no infinities."""
    sign, exponent, mantissa = (-1.0) ** (code >> 7), (code >> 3) & 15, code & 7
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def fp4_value(code: int) -> float:
    """E2M1: sign, 2 exponent bits with bias 1, 1 mantissa bit."""
    sign, exponent, mantissa = (-1.0) ** (code >> 3), (code >> 1) & 3, code & 1
    return sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


def codes(generator: torch.Generator, *shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)


class Release:
    """A small release in two shards, and what its drafter must read as."""

    def __init__(self, folder: Path, form: str) -> None:
        self.folder, self.block = folder, 32 if form == "deepseek_v41" else 128
        self.config = tiny_config(
            dim=40,
            moe_inter_dim=34,
            n_routed_experts=3,
            target_layer_ids=(0, 1, 2, 3),
            hc_form="single_pass" if form == "deepseek_v41" else "per_motion",
        )
        self.stored: dict[str, torch.Tensor] = {"layers.0.attn.wq_a.weight": torch.zeros(2)}
        self.truth: Weights = {}
        generator = torch.Generator().manual_seed(0)
        for name, shape in expected_shapes(self.config).items():
            self.add(name, shape, generator, form)

    def add(self, name: str, shape: tuple[int, ...], generator: torch.Generator, form: str) -> None:
        if name.endswith(DENSE) or "shared_experts" in name:
            data = codes(generator, *shape)
            data[(data & 127) == 127] = 5
            scale = codes(generator, *(-(-size // self.block) for size in shape), low=118, high=130)
            self.stored[name] = data.view(torch.float8_e4m3fn)
            self.stored[name.removesuffix("weight") + "scale"] = scale.view(torch.float8_e8m0fnu)
            self.truth[name] = torch.tensor(
                [
                    [
                        fp8_value(code) * 2.0 ** (int(scale[i // self.block, j // self.block]) - 127)
                        for j, code in enumerate(row)
                    ]
                    for i, row in enumerate(data.tolist())
                ]
            )
        elif ".ffn.experts." in name:
            rows, cols = shape
            data = codes(generator, rows, cols // 2)
            scale = codes(generator, rows, -(-cols // 32), low=118, high=130)
            self.stored[name] = data.view(torch.int8)
            self.stored[name.removesuffix("weight") + "scale"] = scale.view(torch.float8_e8m0fnu)
            self.truth[name] = torch.tensor(
                [
                    [
                        fp4_value(row[j // 2] >> 4 if j % 2 else row[j // 2] & 15)
                        * 2.0 ** (int(scale[i, j // 32]) - 127)
                        for j in range(cols)
                    ]
                    for i, row in enumerate(data.tolist())
                ]
            )
        else:
            value = torch.randn(shape, generator=generator)
            exact = "hc_" in name or name.endswith(("attn_sink", "gate.bias"))
            self.truth[name] = value if exact else value.bfloat16().float()
            if form == "deepseek_v4":
                for ours, theirs in V4_NAMES.items():
                    name = name.replace(ours, theirs)
            self.stored[name] = value if exact else value.bfloat16()
            if name.endswith("gate.bias") and form == "deepseek_v41":
                self.stored[f"{name}_vl"] = torch.randn(shape, generator=generator)

    def write(self) -> None:
        shards: dict[str, dict[str, torch.Tensor]] = {"a.safetensors": {}, "b.safetensors": {}}
        for place, (name, tensor) in enumerate(self.stored.items()):
            shards["ab"[place % 2] + ".safetensors"][name] = tensor
        placed: dict[str, Any] = {name: shard for shard, tensors in shards.items() for name in tensors}
        for shard, tensors in shards.items():
            save_file(tensors, self.folder / shard)
        placed["layers.1.ffn.gate.weight"] = "c.safetensors"  # a shard that is not here and not needed
        (self.folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))


@pytest.mark.parametrize("form", ["deepseek_v41", "deepseek_v4"])
def test_a_release_is_read_exactly(form: Any, tmp_path: Path) -> None:
    release = Release(tmp_path, form)
    release.write()
    weights = read_release(tmp_path, release.config, form)
    assert weights.keys() == release.truth.keys()
    for name, truth in release.truth.items():
        assert weights[name].dtype == torch.float32
        assert torch.equal(weights[name], truth), name


FP8, FP4 = "mtp.1.attn.wkv.weight", "mtp.0.ffn.experts.2.w1.weight"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (FP8, None, "lacks.*mtp.1.attn.wkv.weight"),
        ("mtp.1.attn.wkv.scale", None, "lacks.*mtp.1.attn.wkv.scale"),
        ("mtp.3.norm.weight", torch.ones(3), "do not know.*mtp.3.norm.weight"),
        ("mtp.0.attn_norm.scale", torch.ones(3), "do not know.*mtp.0.attn_norm.scale"),
        (FP8, torch.zeros(10, 32).to(torch.float8_e4m3fn), r"wrong shape.*\[10, 40\].*\[10, 32\].*wkv"),
        (FP8, torch.full((10, 40), 255, dtype=torch.uint8).view(torch.float8_e4m3fn), "NaN code.*mtp.1.attn.wkv"),
        (
            "mtp.1.attn.wkv.scale",
            torch.full((1, 2), 255, dtype=torch.uint8).view(torch.float8_e8m0fnu),
            "NaN code.*mtp.1.attn.wkv",
        ),
        (FP4, torch.zeros(34, 40, dtype=torch.int8), r"wrong shape.*\[34, 20\].*experts.2.w1"),
        (
            "mtp.0.ffn.experts.2.w1.scale",
            torch.zeros(34, 1, dtype=torch.uint8).view(torch.float8_e8m0fnu),
            r"wrong shape.*\[34, 2\].*experts.2.w1",
        ),
        ("mtp.1.attn.attn_sink", torch.full((4,), torch.nan), "mtp.1.attn.attn_sink is not finite"),
        ("mtp.0.ffn_norm.weight", torch.ones(24).bfloat16(), "mtp.0.ffn_norm.weight has a wrong shape"),
        ("mtp.0.ffn_norm.weight", torch.ones(40).long(), "type that we cannot decode.*int64.*mtp.0.ffn_norm"),
        ("mtp.0.ffn_norm.weight", torch.ones(40).to(torch.float8_e4m3fn), "type that we cannot.*mtp.0.ffn_norm"),
        (FP8, torch.zeros(10, 40).to(torch.float8_e5m2), "type that we cannot decode.*e5m2.*mtp.1.attn.wkv"),
    ],
)
def test_what_is_wrong_is_named(name: str, value: torch.Tensor | None, message: str, tmp_path: Path) -> None:
    release = Release(tmp_path, "deepseek_v41")
    if value is None:
        del release.stored[name]
    else:
        release.stored[name] = value
    release.write()
    with pytest.raises(Refused, match=message):
        read_release(tmp_path, release.config, "deepseek_v41")


def test_a_shard_outside_the_folder_or_absent_is_refused(tmp_path: Path) -> None:
    release = Release(tmp_path, "deepseek_v41")
    release.write()
    index = json.loads((tmp_path / INDEX).read_text())
    for shard, message in (("../a.safetensors", "leaves its folder"), ("z.safetensors", "cannot be read")):
        index["weight_map"]["mtp.0.main_norm.weight"] = shard
        (tmp_path / INDEX).write_text(json.dumps(index))
        with pytest.raises(Refused, match=message):
            read_release(tmp_path, release.config, "deepseek_v41")
    (tmp_path / INDEX).write_text("[]")
    with pytest.raises(Refused, match="not a safetensors index"):
        read_release(tmp_path, release.config, "deepseek_v41")


def test_every_code() -> None:
    """All 254 finite E4M3 codes, all 16 E2M1 codes in both nibbles, and every scale that is a number."""
    finite = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)[None]
    one = torch.full((1, 2), 127, dtype=torch.uint8)
    found = decode_fp8(finite.view(torch.float8_e4m3fn), one, (1, 254), block=128, name="x")
    assert found[0].tolist() == [fp8_value(int(code)) for code in finite[0]]
    every = torch.arange(16, dtype=torch.uint8)[None]
    found = decode_fp4(every | ((15 - every) << 4), one[:, :1], (1, 32), block=0, name="x")
    assert found[0, 0::2].tolist() == [fp4_value(code) for code in range(16)]
    assert found[0, 1::2].tolist() == [fp4_value(15 - code) for code in range(16)]
    for code in range(255):
        scale = torch.full((1, 1), code, dtype=torch.uint8)
        found = decode_fp4(torch.full((1, 1), 0x22, dtype=torch.uint8), scale, (1, 2), block=0, name="x")
        assert found.tolist() == [[2.0 ** (code - 127)] * 2]


def test_every_fp8_code_under_scales_of_every_size() -> None:
    """254 codes × scales from 2^-120 to 2^110, exactly; the two NaN codes are refused."""
    finite = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)[None]
    for power in (7, 100, 127, 150, 237):
        scale = torch.full((1, 2), power, dtype=torch.uint8)
        found = decode_fp8(finite.view(torch.float8_e4m3fn), scale, (1, 254), block=128, name="x")
        assert found[0].tolist() == [fp8_value(int(code)) * 2.0 ** (power - 127) for code in finite[0]]
    for code in (127, 255):
        bad = torch.full((1, 1), code, dtype=torch.uint8).view(torch.float8_e4m3fn)
        with pytest.raises(Refused, match="NaN code"):
            decode_fp8(bad, torch.full((1, 1), 127, dtype=torch.uint8), (1, 1), block=32, name="x")


def test_loading_holds_one_stored_tensor_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a tensor is read, every stored tensor before it is gone, but for the one that its scale belongs to."""
    release = Release(tmp_path, "deepseek_v41")
    release.write()
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    reads: list[tuple[str, int]] = []
    opened: list[Path] = []
    real = reading.safe_open

    class Watched:
        def __init__(self, path: Path, framework: str) -> None:
            self.path, self.file = path, real(path, framework=framework)

        def __enter__(self) -> Watched:
            opened.append(self.path)
            return self

        def __exit__(self, *_: object) -> None:
            opened.remove(self.path)

        def get_tensor(self, name: str) -> torch.Tensor:
            reads.append((name, len(alive)))
            assert len(opened) <= 2
            tensor: torch.Tensor = self.file.get_tensor(name)
            alive.add(tensor)
            return tensor

    monkeypatch.setattr(reading, "safe_open", Watched)
    read_release(tmp_path, release.config, "deepseek_v41")
    assert all(held == (1 if name.endswith(".scale") else 0) for name, held in reads)
    assert len(reads) == len(set(reads)) > len(expected_shapes(release.config))
    assert opened == []
