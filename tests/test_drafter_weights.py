"""Names, shapes and files of a drafter's tensors."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny import random_batch, tiny_adapter, tiny_config, tiny_weights

from d2lib.benchmark.cases import drafter_config
from d2lib.benchmark.turns import Peak
from d2lib.drafter import weights as drafter_weights
from d2lib.drafter.deepseek.config import DeepseekConfig
from d2lib.drafter.deepseek.layers import mixes
from d2lib.drafter.family import fast_drafter, reference_drafter
from d2lib.drafter.objectives import OBJECTIVES
from d2lib.drafter.weights import Weights, expected_shapes, initialize, kept_dtypes, load_weights, save_weights
from d2lib.errors import Refused

V41_FLASH = DeepseekConfig(
    dim=5120,
    vocab_size=129280,
    n_stages=3,
    block_size=5,
    noise_token_id=128799,
    target_layer_ids=(37, 38, 39),
    window=128,
    n_heads=64,
    head_dim=512,
    rope_head_dim=64,
    q_lora_rank=1280,
    o_lora_rank=1024,
    o_groups=8,
    n_routed_experts=128,
    n_activated=3,
    moe_inter_dim=2304,
    hc_mult=4,
    markov_rank=256,
)


def test_the_release_shapes() -> None:
    shapes = expected_shapes(V41_FLASH)
    assert shapes["mtp.0.main_proj.weight"] == (5120, 15360)
    assert shapes["mtp.1.attn.wq_a.weight"] == (1280, 5120)
    assert shapes["mtp.1.attn.wq_b.weight"] == (32768, 1280)
    assert shapes["mtp.1.attn.wkv.weight"] == (512, 5120)
    assert shapes["mtp.1.attn.wo_a.weight"] == (8192, 4096)
    assert shapes["mtp.1.attn.wo_b.weight"] == (5120, 8192)
    assert shapes["mtp.1.hc_ffn_fn"] == (24, 20480)
    assert shapes["mtp.2.markov_head.embed.weight"] == (129280, 256)
    assert shapes["mtp.2.confidence_head.proj.weight"] == (1, 5376)
    assert not any("hc_head" in name for name in shapes)
    per_stage = 8 + 2 + 2 + 6 + 3 * 129  # attention, norms, gate, hyper-connections, experts
    assert len(shapes) == 3 * per_stage + 2 + 4 + 2


def test_the_per_motion_form_has_its_own_collapse() -> None:
    single, own = (expected_shapes(tiny_config(hc_form=form)) for form in ("single_pass", "per_motion"))
    assert {name: shape for name, shape in own.items() if name not in single} == {
        "mtp.1.hc_head_fn": (4, 96),
        "mtp.1.hc_head_base": (4,),
        "mtp.1.hc_head_scale": (1,),
    }


def test_round_trip(tmp_path: Path) -> None:
    config = tiny_config(hc_form="per_motion")
    weights = tiny_weights(config)
    save_weights(tmp_path / "drafter.safetensors", weights, config)
    loaded = load_weights(tmp_path / "drafter.safetensors", config)
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    with pytest.raises(Refused, match="never overwritten"):
        save_weights(tmp_path / "drafter.safetensors", weights, config)


def test_other_float_types_become_fp32(tmp_path: Path) -> None:
    config = tiny_config()
    weights = {name: tensor.bfloat16() for name, tensor in tiny_weights(config).items()}
    save_weights(tmp_path / "drafter.safetensors", weights, config)
    loaded = load_weights(tmp_path / "drafter.safetensors", config)
    assert all(loaded[name].dtype == torch.float32 for name in weights)
    assert all(torch.equal(loaded[name], weights[name].float()) for name in weights)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("projections", [torch.float32, torch.bfloat16])
def test_loading_takes_the_result_and_one_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: torch.dtype, projections: torch.dtype
) -> None:
    """Resident memory of a drafter of 300 MB in fp32: neither a second copy nor the file's pages beside the result."""
    config = drafter_config(dim=512, vocab_size=8192, n_routed_experts=16, moe_inter_dim=1024)
    path = tmp_path / "drafter.safetensors"
    kept = kept_dtypes(config, projections)
    save_file({name: torch.zeros(shape, dtype=stored) for name, shape in expected_shapes(config).items()}, path)
    with monkeypatch.context() as patch:
        patch.setattr(drafter_weights, "MAPPED", 1)
        ctypes.CDLL(None).malloc_trim(0)  # what earlier tests freed
        with Peak() as peak:
            loaded = load_weights(path, config, projections=projections)
    result, largest = sum(tensor.nbytes for tensor in loaded.values()) / 1e6, 8192 * 512 * 4 / 1e6
    assert {name: tensor.dtype for name, tensor in loaded.items()} == kept
    assert result > (290 if projections == torch.float32 else 150)
    assert result * 0.9 < peak.extra < result + 4 * largest  # the libraries count too
    monkeypatch.setattr(drafter_weights, "MAPPED", 1 << 40)  # a file that stays mapped: the check can fail
    with Peak() as peak:
        again = load_weights(path, config, projections=projections)
    assert peak.extra > result + 0.8 * path.stat().st_size / 1e6
    assert again.keys() == loaded.keys()


def test_projections_kept_in_bf16_give_fast_the_same_bits(tmp_path: Path) -> None:
    config = tiny_config()
    path = tmp_path / "drafter.safetensors"
    save_weights(path, tiny_weights(config), config)
    outcomes = []
    for projections in (torch.float32, torch.bfloat16):
        weights = load_weights(path, config, projections=projections)
        adapter = {name: tensor.detach().clone().requires_grad_() for name, tensor in tiny_adapter(config).items()}
        drafter = fast_drafter(config, weights, adapter, torch.bfloat16)
        measured = drafter.loss(random_batch(config, 6), OBJECTIVES["KL"])
        measured.loss.backward()
        outcomes.append([measured.loss.detach(), *(adapter[name].grad for name in sorted(adapter))])
    assert all(torch.equal(one, other) for one, other in zip(*outcomes, strict=True))


NAME = "mtp.1.ffn.experts.3.w2.weight"


def without(weights: Weights) -> Weights:
    return {name: tensor for name, tensor in weights.items() if name != NAME}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without, "missing"),
        (lambda w: w | {"mtp.2.norm.weight": torch.ones(24)}, "does not belong.*mtp.2.norm.weight"),
        (lambda w: w | {NAME: w[NAME].T.contiguous()}, r"wrong shape.*\[24, 18\].*\[18, 24\]"),
        (lambda w: w | {NAME: w[NAME].where(w[NAME] < w[NAME].max(), torch.nan)}, "not finite.*1 of 432"),
        (lambda w: w | {NAME: w[NAME] / 0}, "not finite"),
        (lambda w: w | {NAME: w[NAME].long()}, "not floating-point"),
    ],
    ids=["missing", "extra", "shape", "nan", "infinity", "integer"],
)
def test_a_bad_tensor_is_named(spoil, message: str, tmp_path: Path) -> None:
    config = tiny_config()
    bad = spoil(tiny_weights(config))
    path = tmp_path / "bad.safetensors"
    save_file(bad, path)
    with pytest.raises(Refused, match=message) as refused:
        load_weights(path, config)
    assert "mtp.2.norm.weight" in str(refused.value) or NAME in str(refused.value)
    assert str(path) in str(refused.value)
    with pytest.raises(Refused, match=message):
        save_weights(tmp_path / "other.safetensors", bad, config)
    assert not (tmp_path / "other.safetensors").exists()


def test_a_damaged_or_missing_file_is_refused(tmp_path: Path) -> None:
    config = tiny_config()
    with pytest.raises(Refused, match="missing"):
        load_weights(tmp_path / "none.safetensors", config)
    path = tmp_path / "drafter.safetensors"
    save_weights(path, tiny_weights(config), config)
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(Refused, match="not a readable safetensors file"):
        load_weights(cut, config)


@pytest.mark.parametrize("form", ["single_pass", "per_motion"])
def test_initialization(form: str) -> None:
    config = tiny_config(hc_form=form, dim=64)
    target = tiny_weights(config)
    embed, head = target["embed.weight"], target["head.weight"]

    def make(seed: int) -> Weights:
        return initialize(config, embed, head, torch.Generator().manual_seed(seed))

    weights = make(0)
    assert all(torch.equal(weights[name], again) for name, again in make(0).items())
    assert not torch.equal(weights["mtp.0.main_proj.weight"], make(1)["mtp.0.main_proj.weight"])
    assert torch.equal(weights["embed.weight"], embed)
    assert weights["embed.weight"].data_ptr() != embed.data_ptr()
    assert weights["mtp.0.main_proj.weight"].std() == pytest.approx(128**-0.5, rel=0.1)

    x = torch.randn(9, 4, 64, generator=torch.Generator().manual_seed(1))
    mix = mixes(
        x,
        *(weights[f"mtp.0.hc_attn_{part}"] for part in ("fn", "base", "scale")),
        sinkhorn_iters=20,
        hc_eps=1e-6,
        norm_eps=1e-20,
    )
    assert mix.pre.mean() == pytest.approx(0.25, abs=0.05)
    assert mix.post.mean() == pytest.approx(1.0, abs=0.1)
    assert mix.comb.diagonal(dim1=1, dim2=2).min() > 0.9
    output = reference_drafter(config, weights).forward(random_batch(config, 3).round(2))
    assert bool(torch.isfinite(output.logits).all())
    assert 0.1 < output.hidden.std() < 10
    assert not output.confidence.any()
