"""LoRA: targets, initialization and identity; its arithmetic against PEFT."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from test_drafter_weights import V41_FLASH
from tiny import random_batch, tiny_adapter, tiny_config, tiny_weights
from torch import Tensor, nn

from d2lib.drafter.deepseek.reference import DeepseekReference
from d2lib.drafter.family import reference_drafter
from d2lib.drafter.lora import (
    Adapter,
    adapter_shapes,
    initialization_sha256,
    initialize_adapter,
    load_adapter,
    lora_targets,
    merge,
    save_adapter,
)
from d2lib.errors import Refused

CONFIG = tiny_config()


def test_targets() -> None:
    names = lora_targets(CONFIG)
    assert names[0] == "mtp.0.main_proj"
    assert len(names) == len(set(names)) == 1 + 8 * CONFIG.n_stages
    assert {name.split(".", 2)[2] for name in names if name.startswith("mtp.1.")} == {
        *(f"attn.{part}" for part in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b")),
        *(f"ffn.shared_experts.{part}" for part in ("w1", "w2", "w3")),
    }


def test_size_of_the_release_adapter() -> None:
    """Rank · (in + out) of every target, summed by hand."""
    attention = (5120 + 1280) + (1280 + 32768) + (5120 + 512) + (4096 + 8192) + (8192 + 5120)
    shared = 3 * (5120 + 2304)
    total = sum(math.prod(shape) for shape in adapter_shapes(V41_FLASH, 32).values())
    assert total == 32 * ((15360 + 5120) + 3 * (attention + shared))


def test_initialization_is_kaimings_and_b_is_zero() -> None:
    adapter = initialize_adapter(CONFIG, 3, seed=23)
    generator = torch.Generator().manual_seed(23)
    for name, shape in adapter_shapes(CONFIG, 3).items():
        assert tuple(adapter[name].shape) == shape
        if name.endswith("lora_A"):
            expected = nn.init.kaiming_uniform_(torch.empty(shape), a=math.sqrt(5), generator=generator)
            torch.testing.assert_close(adapter[name], expected)
        else:
            assert not adapter[name].any()


def test_initialization_neither_reads_nor_moves_the_global_generator() -> None:
    torch.manual_seed(1)
    first = initialize_adapter(CONFIG, 3, seed=23)
    state = torch.get_rng_state()
    torch.manual_seed(2)
    second = initialize_adapter(CONFIG, 3, seed=23)
    assert all(torch.equal(first[name], second[name]) for name in first)
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_identity_is_its_formula() -> None:
    adapter = initialize_adapter(CONFIG, 3, seed=23)
    stream = b""
    for name in sorted(adapter):
        tensor = adapter[name]
        data = struct.pack(f"<{tensor.numel()}f", *tensor.flatten().tolist())
        for field in (name.encode(), b"float32", struct.pack("<2q", *tensor.shape), data):
            stream += struct.pack("<q", len(field)) + field
    assert initialization_sha256(adapter).digest == hashlib.sha256(stream).hexdigest()


def test_the_identity_sees_every_field() -> None:
    adapter = initialize_adapter(CONFIG, 3, seed=23)
    name = "mtp.0.attn.wkv.lora_A"
    bit = adapter[name].clone()
    bit[0, 0] = torch.nextafter(bit[0, 0], torch.tensor(9.0))
    renamed = {("x" if key == name else key): tensor for key, tensor in adapter.items()}
    changed = [
        adapter | {name: bit},
        adapter | {name: adapter[name].reshape(-1, 3)},
        adapter | {name: adapter[name].view(torch.int32)},
        renamed,
        initialize_adapter(CONFIG, 3, seed=24),
        initialize_adapter(CONFIG, 4, seed=23),
    ]
    digests = {initialization_sha256(other).digest for other in [adapter, *changed]}
    assert len(digests) == 1 + len(changed)
    backwards = dict(reversed(list(adapter.items())))
    assert initialization_sha256(backwards) == initialization_sha256(adapter)
    transposed = adapter | {name: adapter[name].T.contiguous().T}
    assert initialization_sha256(transposed) == initialization_sha256(adapter)


@pytest.mark.parametrize("rank", [0, -1])
def test_a_rank_below_one_is_refused(rank: int) -> None:
    with pytest.raises(Refused, match="rank"):
        initialize_adapter(CONFIG, rank, seed=23)


class ByModules(DeepseekReference):
    """REF whose adapted projections are computed by a tree of modules."""

    modules: dict[str, nn.Module]

    def _project(self, name: str, x: Tensor) -> Tensor:
        return self.modules[name](x)

    def _project_groups(self, name: str, x: Tensor) -> Tensor:
        rank, groups = self.config.o_lora_rank, self.config.o_groups
        parts = x.chunk(groups, dim=-1)
        return torch.cat(
            [self.modules[name](part)[..., g * rank : (g + 1) * rank] for g, part in enumerate(parts)], dim=-1
        )


def module_tree(weights: dict[str, Tensor]) -> nn.Module:
    """Linear modules at the drafter's names, the ones that are no target included."""
    root = nn.Module()
    names = [*lora_targets(CONFIG), "mtp.0.ffn.experts.0.w1", "mtp.1.ffn.gate"]
    for name in names:
        *path, leaf = name.split(".")
        parent = root
        for part in path:
            if part not in dict(parent.named_children()):
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        weight = weights[f"{name}.weight"]
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        linear.weight.data = weight.clone()
        parent.add_module(leaf, linear)
    return root


def test_peft_agrees() -> None:
    """The same weights in PEFT: the same modules adapted, the same logits while active and after merging."""
    weights, adapter = tiny_weights(CONFIG), tiny_adapter(CONFIG)
    settings = LoraConfig(r=3, lora_alpha=3, lora_dropout=0.0, bias="none", target_modules=lora_targets(CONFIG))
    model = get_peft_model(module_tree(weights), settings)
    theirs = {name: p for name, p in model.named_parameters() if "lora_" in name}
    assert len(theirs) == len(adapter)
    with torch.no_grad():
        for name, tensor in adapter.items():
            parameter = theirs[f"base_model.model.{name}.default.weight"]
            assert parameter.shape == tensor.shape
            parameter.copy_(tensor)

    tree = ByModules(CONFIG, weights)
    tree.modules = {name: model.base_model.model.get_submodule(name) for name in lora_targets(CONFIG)}
    active = reference_drafter(CONFIG, weights, adapter)
    native = reference_drafter(CONFIG, weights)
    merged = merge(weights, adapter, CONFIG)
    rounds = [random_batch(CONFIG, 4).round(index) for index in range(4)]
    with torch.no_grad():
        for round in rounds:
            ours = active.forward(round).logits
            torch.testing.assert_close(ours, tree.forward(round).logits, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(
                ours, reference_drafter(CONFIG, merged).forward(round).logits, rtol=1e-3, atol=1e-3
            )
            assert (ours - native.forward(round).logits).abs().max() > 0.1

        plain = model.merge_and_unload()
    for name in lora_targets(CONFIG):
        torch.testing.assert_close(merged[f"{name}.weight"], plain.get_submodule(name).weight.data)
    untouched = [name for name in weights if name.removesuffix(".weight") not in lora_targets(CONFIG)]
    assert all(merged[name] is weights[name] for name in untouched)


def test_round_trip(tmp_path: Path) -> None:
    adapter = tiny_adapter(CONFIG)
    save_adapter(tmp_path / "adapter.safetensors", adapter, CONFIG)
    loaded = load_adapter(tmp_path / "adapter.safetensors", CONFIG)
    assert initialization_sha256(loaded) == initialization_sha256(adapter)
    with pytest.raises(Refused, match="never overwritten"):
        save_adapter(tmp_path / "adapter.safetensors", adapter, CONFIG)


NAME = "mtp.1.attn.wo_a.lora_B"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda a: {name: tensor for name, tensor in a.items() if name != NAME}, "missing"),
        (lambda a: {name: tensor for name, tensor in a.items() if "main_proj" not in name}, "missing.*main_proj"),
        (lambda a: a | {NAME: a[NAME][:, :2].clone()}, "wrong shape"),
        (lambda a: a | {NAME: a[NAME] / 0}, "not finite"),
        (lambda a: a | {"mtp.0.ffn.gate.lora_A": torch.zeros(3, 24)}, "does not belong.*gate"),
    ],
    ids=["missing", "no_rank", "rank", "not_finite", "extra"],
)
def test_a_bad_adapter_tensor_is_named(spoil: Callable[[Adapter], Adapter], message: str, tmp_path: Path) -> None:
    bad = spoil(tiny_adapter(CONFIG))
    path = tmp_path / "bad.safetensors"
    save_file(bad, path)
    for attempt in (
        lambda: load_adapter(path, CONFIG),
        lambda: save_adapter(tmp_path / "other.safetensors", bad, CONFIG),
        lambda: merge(tiny_weights(CONFIG), bad, CONFIG),
    ):
        with pytest.raises(Refused, match=message):
            attempt()
    assert not (tmp_path / "other.safetensors").exists()
