"""The data card: a release of the production's size in sparse files, ours, and everything that can be wrong."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_drafter_release import Release
from test_drafter_weights import V41_FLASH
from tiny import tiny_config, tiny_weights

from d2lib.cli import main
from d2lib.drafter.deepseek.release import FORMS, Form, scale_name, scale_shape, stored_name
from d2lib.drafter.deepseek.release_config import read_config
from d2lib.drafter.headers import INDEX, read_header
from d2lib.drafter.weights import expected_shapes, save_weights
from d2lib.drafter.weights_card import inspect_weights
from d2lib.errors import Refused

V41_TEXT: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "hidden_size": 5120,
    "vocab_size": 129280,
    "num_hidden_layers": 40,
    "num_nextn_predict_layers": 3,
    "compress_ratios": [0, 0, *[2] * 18, *[1] * 20, 0, 0, 0],
    "dspark_block_size": 5,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [37, 38, 39],
    "dspark_markov_rank": 256,
    "dspark_n_routed_experts": 128,
    "dspark_num_experts_per_tok": 3,
    "sliding_window": 128,
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1280,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "n_routed_experts": 384,
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2304,
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-20,
    "rope_theta": 10000,
}
"""The drafter's part of the release's config.json, beside the target's."""


def release_config(form: Form = "deepseek_v41", **changed: Any) -> dict[str, Any]:
    block = FORMS[form].block
    return {
        "model_type": form,
        "quantization_config": {"weight_block_size": [block, block]},
        "text_config": {name: value for name, value in {**V41_TEXT, **changed}.items() if value is not None},
    }


def write_config(folder: Path, value: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(value))
    return path


def test_the_release_config_is_the_drafters(tmp_path: Path) -> None:
    form, config = read_config(write_config(tmp_path, release_config()))
    assert (form, config) == ("deepseek_v41", V41_FLASH)


def test_v4_has_its_own_forms_and_no_number_of_stages(tmp_path: Path) -> None:
    """V4's fields stand at the top; its drafter shares the target's expert counts, and `num_nextn…` says 1 for 3."""
    value = release_config("deepseek_v4", num_nextn_predict_layers=1, n_routed_experts=256)
    text = {name: part for name, part in value.pop("text_config").items() if not name.startswith("dspark_n")}
    text |= {"dspark_noise_token_id": 128799, "model_type": "deepseek_v4"}
    form, config = read_config(write_config(tmp_path, {**text, **value}))
    assert form == "deepseek_v4"
    assert (config.hc_form, config.q_head_norm, config.n_stages) == ("per_motion", True, 3)
    assert (config.n_routed_experts, config.n_activated) == (256, 6)
    assert "mtp.2.hc_head_fn" in expected_shapes(config)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (release_config(hidden_size=None), "lacks a field.*hidden_size or dim"),
        (release_config(rms_norm_eps=None), "lacks a field.*rms_norm_eps"),
        (release_config(dspark_noise_token_id=200000), "noise_token_id"),
        (release_config(hc_mult="4"), "integer.*config.json: hc_mult"),
        (release_config(compress_ratios=None, num_nextn_predict_layers=None), "how many draft stages"),
        (release_config() | {"model_type": "llama"}, "deepseek_v41 or deepseek_v4.*llama.*--form"),
        (release_config() | {"quantization_config": {"weight_block_size": [128, 128]}}, "FP8 blocks"),
        (release_config() | {"text_config": 3}, "text_config"),
        ([], "not an object"),
        (V41_FLASH.model_dump(mode="json") | {"dim": 0}, "configuration is wrong.*greater than 0.*dim"),
    ],
)
def test_a_wrong_configuration_is_refused_by_name(value: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=message):
        read_config(write_config(tmp_path, value))


def sparse(path: Path, tensors: dict[str, tuple[str, int, tuple[int, ...]]]) -> None:
    """A safetensors file with a true header and a hole in place of its data."""
    header, end = {}, 0
    for name, (dtype, width, shape) in tensors.items():
        size = width * int(torch.tensor(shape).prod())
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    with path.open("r+b") as stream:
        stream.truncate(8 + len(text) + end)


def test_a_release_of_full_size_is_read_by_its_headers(tmp_path: Path) -> None:
    """V4.1's 2,400 drafter tensors, gigabytes of holes: nothing behind a header could be read in this time."""
    write_config(tmp_path, release_config())
    tensors: dict[str, tuple[str, int, tuple[int, ...]]] = {"layers.0.attn.wq_a.weight": ("BF16", 2, (3,))}
    for name, shape in expected_shapes(V41_FLASH).items():
        if ".ffn.experts." in name:
            tensors[name] = ("I8", 1, (shape[0], shape[1] // 2))
            tensors[scale_name(name)] = ("F8_E8M0", 1, scale_shape(shape, "deepseek_v41", fp4=True))
        elif ".attn.w" in name or "shared_experts" in name or "main_proj" in name:
            tensors[name] = ("F8_E4M3", 1, shape)
            tensors[scale_name(name)] = ("F8_E8M0", 1, scale_shape(shape, "deepseek_v41", fp4=False))
        else:
            tensors[name] = ("F32", 4, shape) if "hc_" in name else ("BF16", 2, shape)
    sparse(tmp_path / "model-1.safetensors", tensors)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "model-1.safetensors")}))
    card = inspect_weights(tmp_path)
    assert card.holds
    assert card.config == V41_FLASH
    assert card.others == 1
    assert card.by("dtype")["I8"] == (3 * 128 * 3, 3 * 128 * 3 * 5120 * 2304 // 2)
    assert card.size > 8e9


@pytest.mark.parametrize("form", ["deepseek_v41", "deepseek_v4"])
def test_a_release_holds_as_read_release_reads_it(form: Form, tmp_path: Path) -> None:
    release = Release(tmp_path, form)
    release.write()
    (tmp_path / "drafter.json").write_text(release.config.model_dump_json())
    card = inspect_weights(tmp_path, form=form, config=tmp_path / "drafter.json")
    assert card.holds
    assert {tensor.name for tensor in card.tensors} == {n for n in release.stored if not n.startswith("layers.")}
    assert card.unused == (tuple(f"mtp.{stage}.ffn.gate.bias_vl" for stage in range(2)) if form.endswith("1") else ())
    markov = stored_name("mtp.1.markov_head.embed.weight", form)
    assert next(tensor for tensor in card.tensors if tensor.name == markov).dtype == "BF16"


FP8 = "mtp.1.attn.wkv"


@pytest.mark.parametrize(
    ("name", "value", "finding"),
    [
        (f"{FP8}.weight", None, ("missing", f"{FP8}.weight")),
        (f"{FP8}.scale", None, ("missing", f"{FP8}.scale")),
        ("mtp.3.norm.weight", torch.ones(3), ("extra", "mtp.3.norm.weight")),
        (f"{FP8}.scale", torch.zeros(1, 1).to(torch.float8_e8m0fnu), ("shape", f"{FP8}.scale")),
        (f"{FP8}.scale", torch.zeros(1, 2), ("type", f"{FP8}.scale")),
        (
            "mtp.0.ffn.experts.2.w1.weight",
            torch.zeros(34, 40).to(torch.int8),
            ("shape", "mtp.0.ffn.experts.2.w1.weight"),
        ),
        ("mtp.0.ffn_norm.weight", torch.zeros(40).to(torch.int8), ("type", "mtp.0.ffn_norm.weight")),
        ("embed.weight", torch.zeros(3, 40), ("shape", "embed.weight")),
    ],
)
def test_what_is_wrong_is_a_finding(
    name: str, value: torch.Tensor | None, finding: tuple[str, str], tmp_path: Path
) -> None:
    release = Release(tmp_path, "deepseek_v41")
    if value is None:
        del release.stored[name]
    else:
        release.stored[name] = value
    release.write()
    config = tmp_path / "drafter.json"
    config.write_text(release.config.model_dump_json())
    card = inspect_weights(tmp_path, form="deepseek_v41", config=config)
    assert not card.holds
    found = {(found.kind, found.name) for found in card.findings}
    assert finding in found
    assert found <= {finding, ("extra", f"{FP8}.scale")}


def test_an_absent_shard_is_one_finding(tmp_path: Path) -> None:
    release = Release(tmp_path, "deepseek_v41")
    release.write()
    (tmp_path / "b.safetensors").unlink()
    (tmp_path / "drafter.json").write_text(release.config.model_dump_json())
    card = inspect_weights(tmp_path, form="deepseek_v41", config=tmp_path / "drafter.json")
    assert [(finding.kind, finding.name) for finding in card.findings] == [("shard", "b.safetensors")]
    with pytest.raises(Refused, match=r"model family.*--form"):
        inspect_weights(tmp_path)


def test_a_file_of_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_config(hc_form="per_motion")
    path = tmp_path / "native.safetensors"
    save_weights(path, tiny_weights(config), config)
    assert inspect_weights(path).config is None
    (tmp_path / "drafter.json").write_text(config.model_dump_json())
    card = inspect_weights(path)
    assert card.holds
    assert card.config == config
    assert main(["weights", "inspect", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dtypes"]["F32"]["tensors"] == len(expected_shapes(config))
    (tmp_path / "other.json").write_text(tiny_config().model_dump_json())
    assert main(["weights", "inspect", str(path), "--config", str(tmp_path / "other.json")]) == 2
    out = capsys.readouterr().out
    assert "3 findings: this would be refused" in out
    assert "extra    mtp.1.hc_head_fn: expected no such tensor, found F32 [4, 96]" in out


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda data: b"", "not a whole safetensors file"),
        (lambda data: data[:20], "not a whole safetensors file"),
        (lambda data: data[:-1], "not a whole safetensors file.*not fully covered"),
        (lambda data: data + b"x", "not a whole safetensors file.*not fully covered"),
        (lambda data: b"\xff" * 7 + b"\x7f" + data[8:], "not a whole safetensors file.*header"),
        (lambda data: data.replace(b'"F32"', b'"F16"'), "not a whole safetensors file"),
        (lambda data: data.replace(b'"F32"', b'"X32"'), "not a whole safetensors file.*X32"),
        (lambda data: data.replace(b'"F32"', b'"C64"').replace(b"[2,2]", b"[1,2]"), "not known.*C64"),
        (lambda data: data.replace(b"[2,2]", b"[2,x]"), "not a whole safetensors file"),
        (lambda data: data.replace(b"[2,2]", b"[-2,2"), "not a whole safetensors file"),
        (lambda data: data.replace(b"[0,16]", b"[1,17]"), "not a whole safetensors file"),
        (lambda data: data.replace(b'"shape"', b'"shapE"'), "not a whole safetensors file"),
    ],
)
def test_a_damaged_header_is_refused(spoil: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.zeros(2, 2)}, path)
    assert read_header(path)["a"].shape == (2, 2)
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(Refused, match=message):
        read_header(path)
