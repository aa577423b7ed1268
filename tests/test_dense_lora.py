"""LoRA of a dense drafter: a judged adapter in PEFT's hands, merged and active, and as merged projections."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from export_case import GAINING, RECIPE, Drafter, make_judged
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from tiny_dense import dense_adapter, dense_config, dense_round, dense_weights
from torch import Tensor, nn

from d2lib.drafter.dense.config import lora_targets, peft_modules
from d2lib.drafter.dense.reference import DenseReference
from d2lib.drafter.lora import initialize_adapter, merge
from d2lib.export.write import export_adapter, merge_adapter
from d2lib.files import read_json

CONFIG = dense_config(attention_bias=True, markov_head_type="gated")
WEIGHTS = dense_weights(CONFIG)
ADAPTER = dense_adapter(CONFIG, rank=RECIPE.rank)


class ByModules(DenseReference):
    """REF whose projections are computed by a tree of modules."""

    modules: dict[str, nn.Module]

    def _project(self, name: str, x: Tensor) -> Tensor:
        return self.modules[name](x)


def module_tree() -> nn.Module:
    """Linear modules at the drafter's names, and the heads that share a last part with adapted ones."""
    root = nn.Module()
    for name in [*lora_targets(CONFIG), "markov_head.gate_proj", "confidence_head.proj"]:
        *path, leaf = name.split(".")
        parent = root
        for part in path:
            if part not in dict(parent.named_children()):
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        weight, bias = WEIGHTS[f"{name}.weight"], WEIGHTS.get(f"{name}.bias")
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
        linear.weight.data = weight.clone()
        if bias is not None:
            linear.bias.data = bias.clone()
        parent.add_module(leaf, linear)
    return root


@pytest.fixture(scope="module")
def passed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    drafter = Drafter(CONFIG, WEIGHTS, ADAPTER)
    return make_judged(tmp_path_factory.mktemp("a") / "work" / "runs" / "demo", GAINING, drafter=drafter)


def test_peft_reads_the_folder_and_computes_what_we_compute(passed: Path, tmp_path: Path) -> None:
    """The same logits from PEFT's modules as from the active adapter and from merged weights, to fp32 rounding."""
    export_adapter(passed, tmp_path / "adapter")
    model = PeftModel.from_pretrained(module_tree(), str(tmp_path / "adapter"))
    base = model.base_model.model
    tree = ByModules(CONFIG, WEIGHTS)
    tree.modules = {name: base.get_submodule(name) for name in lora_targets(CONFIG)}
    merged = merge(WEIGHTS, ADAPTER, CONFIG)
    active, plain = DenseReference(CONFIG, WEIGHTS, ADAPTER), DenseReference(CONFIG, merged)
    native = DenseReference(CONFIG, WEIGHTS)
    with torch.no_grad():
        for anchor in (0, 1, 9, 30):
            round = dense_round(CONFIG, anchor)
            logits = active.forward(round).logits
            torch.testing.assert_close(tree.forward(round).logits, logits, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(plain.forward(round).logits, logits, rtol=1e-4, atol=1e-4)
            assert (native.forward(round).logits - logits).abs().max() > 0.1
        x = torch.randn(3, CONFIG.dim + CONFIG.markov_rank)
        gate = base.get_submodule("markov_head.gate_proj")
        weight, bias = (WEIGHTS[f"markov_head.gate_proj.{part}"] for part in ("weight", "bias"))
        torch.testing.assert_close(gate(x), x @ weight.T + bias)  # wrapped by its last part, and not changed
        unloaded = model.merge_and_unload()
    for name in lora_targets(CONFIG):
        torch.testing.assert_close(unloaded.get_submodule(name).weight.data, merged[f"{name}.weight"])


def test_the_folder_is_what_servers_take(passed: Path, tmp_path: Path) -> None:
    """Keys and last parts as the serving stacks want them; every other setting is PEFT's default."""
    export_adapter(passed, tmp_path / "adapter")
    settings = read_json(tmp_path / "adapter" / "adapter_config.json")
    leaves = ["down_proj", "fc", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert settings["target_modules"] == peft_modules(CONFIG) == leaves
    assert settings["r"] == settings["lora_alpha"] == RECIPE.rank
    defaults = LoraConfig().to_dict()
    own = {"r", "lora_alpha", "target_modules", "inference_mode"}
    assert {name: settings[name] for name in settings.keys() - own} == {
        name: defaults[name] for name in settings.keys() - own
    }
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert stored.keys() == {
        f"base_model.model.{name}.lora_{side}.weight" for name in lora_targets(CONFIG) for side in "AB"
    }
    for name in lora_targets(CONFIG):
        out, inner = WEIGHTS[f"{name}.weight"].shape
        assert stored[f"base_model.model.{name}.lora_A.weight"].shape == (RECIPE.rank, inner)
        assert stored[f"base_model.model.{name}.lora_B.weight"].shape == (out, RECIPE.rank)
    page = (tmp_path / "adapter" / "README.md").read_text()
    assert "Adapted: `fc`, and every layer's" in page
    assert "wo_a" not in page


def test_merged_projections_replace_their_tensors(passed: Path, tmp_path: Path) -> None:
    merge_adapter(passed, tmp_path / "merged.safetensors")
    stored = load_file(tmp_path / "merged.safetensors")
    assert stored.keys() == {f"{name}.weight" for name in lora_targets(CONFIG)}
    for name in lora_targets(CONFIG):
        update = ADAPTER[f"{name}.lora_B"].double() @ ADAPTER[f"{name}.lora_A"].double()
        exact = WEIGHTS[f"{name}.weight"].double() + update
        torch.testing.assert_close(stored[f"{name}.weight"].double(), exact, rtol=1e-6, atol=1e-6)


def test_a_fresh_adapter_changes_no_bit() -> None:
    fresh = initialize_adapter(CONFIG, 4, seed=3)
    for anchor in (0, 7, 40):
        round = dense_round(CONFIG, anchor)
        ours, native = (DenseReference(CONFIG, WEIGHTS, adapter).forward(round) for adapter in (fresh, None))
        assert torch.equal(ours.logits, native.logits)
        assert torch.equal(ours.hidden, native.hidden)


def test_context_rows_are_adapted_as_slot_rows_are() -> None:
    """An adapter of fc or of one layer's k_proj alone changes what a round computes; the last layer's too."""
    round = dense_round(CONFIG, 12)
    native = DenseReference(CONFIG, WEIGHTS).forward(round).logits
    for name in ("fc", *(f"layers.1.self_attn.{part}" for part in ("k_proj", "v_proj"))):
        alone = {key: value * key.startswith(f"{name}.") for key, value in ADAPTER.items()}
        changed = DenseReference(CONFIG, WEIGHTS, alone)
        assert (changed.forward(round).logits - native).abs().max() > 1e-3
        rows = [d.context(round.taps, round.positions) for d in (DenseReference(CONFIG, WEIGHTS), changed)]
        assert any(not torch.equal(one, other) for one, other in zip(*rows, strict=True))
