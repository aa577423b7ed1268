"""Dense drafters through DeepSpec's, SpecForge's and speculators' folders and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from dense_case import DEPTH, DIM, VOCAB, dense_config, dense_weights, edit, rename, stored, write_target
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save

from d2lib.drafter.dense.checkpoint import DType, read_dense, write_dense
from d2lib.drafter.dense.config import DenseConfig, Rope, lora_targets, shapes
from d2lib.drafter.dense.source import Store, open_source
from d2lib.drafter.dense.target import read_target
from d2lib.errors import Refused
from d2lib.files import read_json

STORES: tuple[Store, ...] = get_args(Store)
ROPES = (
    Rope(theta=10000.0),
    Rope(type="linear", theta=1e6, factor=2.0),
    Rope(
        type="llama3",
        theta=5e5,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    ),
    Rope(type="yarn", theta=1e4, factor=4.0, original_max_position_embeddings=64, truncate=False, mscale=1.0),
    Rope(type="yarn", theta=1e4, factor=4.0, attention_factor=1.25, beta_fast=16.0, beta_slow=2.0),
)


@st.composite
def configs(draw: st.DrawFn) -> DenseConfig:
    """Whatever all three layouts can say."""
    layers = draw(st.integers(1, 3))
    layout = draw(st.sampled_from(["anchor_first", "one_plus_n"]))
    rank = draw(st.sampled_from([0, 3]))
    kinds = ["vanilla", "gated"] + (["rnn"] if layout == "anchor_first" else [])
    confidence = draw(st.booleans())
    types = draw(st.lists(st.sampled_from(["full_attention", "sliding_attention"]), min_size=layers, max_size=layers))
    causal = [kind == "sliding_attention" for kind in types]
    if all(causal) and draw(st.booleans()):
        causal = [False] * layers
    heads = draw(st.sampled_from([(4, 2), (3, 3), (2, 1)]))
    return dense_config(
        n_layers=layers,
        layer_types=types,
        causal=causal,
        sliding_window=draw(st.integers(6, 40)) if "sliding_attention" in types else None,
        n_heads=heads[0],
        n_kv_heads=heads[1],
        attention_bias=draw(st.booleans()),
        norm_eps=draw(st.sampled_from([1e-6, 1e-5])),
        rope=draw(st.sampled_from(ROPES)),
        layout=layout,
        block_size=draw(st.integers(1, 5)),
        mask_token_id=draw(st.integers(0, VOCAB - 1)),
        target_layer_ids=sorted(draw(st.sets(st.integers(0, DEPTH - 1), min_size=1, max_size=3))),
        markov_rank=rank,
        markov_head_type=draw(st.sampled_from(kinds)) if rank else "vanilla",
        confidence=confidence,
        confidence_with_markov=confidence and rank > 0 and draw(st.booleans()),
    )


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(config=configs(), store=st.sampled_from(STORES), dtype=st.sampled_from(get_args(DType)), seed=st.integers(0, 9))
def test_every_layout_keeps_configuration_and_weights(
    config: DenseConfig, store: Store, dtype: DType, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("layouts")
    weights = dense_weights(config, seed)
    target = write_target(folder / "target", weights)
    write_dense(folder / "draft", config, weights, store=store, dtype=dtype)
    found = read_dense(folder / "draft", target)
    assert (found.store, found.config) == (store, config)
    assert found.weights.keys() == weights.keys()
    for name, value in found.weights.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, weights[name]), name


@pytest.mark.parametrize("layout", ["anchor_first", "one_plus_n"])
@pytest.mark.parametrize("store", STORES)
def test_taps_and_slots_are_numbered_as_the_layout_does(store: Store, layout: str, tmp_path: Path) -> None:
    config = dense_config(layout=layout, block_size=4, target_layer_ids=[0, 2, 5])
    write_dense(tmp_path / "draft", config, dense_weights(config), store=store, dtype="float32")
    fields = read_json(tmp_path / "draft" / "config.json")
    own = fields.get("dflash_config", fields)
    if store == "speculators":
        assert fields["aux_hidden_state_layer_ids"] == [0, 2, 5]
        assert fields["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
        assert "target_layer_ids" not in fields
    else:
        assert own["target_layer_ids"] == [-1, 1, 4]
    assert fields["block_size"] == (4 if layout == "anchor_first" else 5)
    if store == "specforge":
        assert own["projector_type"] == ("dspark" if layout == "anchor_first" else "dflash")
    else:
        assert fields["sample_from_anchor"] is (layout == "anchor_first")
    with safe_open(tmp_path / "draft" / "model.safetensors", "pt") as stored:
        assert ("lm_head.weight" in stored.keys()) is (store == "deepspec")  # noqa: SIM118


def test_shards_hold_what_one_file_holds(tmp_path: Path) -> None:
    config, weights = stored(tmp_path)
    write_dense(tmp_path / "many", config, weights, store="deepspec", dtype="float32", shard_bytes=2000)
    names = sorted(path.name for path in (tmp_path / "many").iterdir())
    assert "model.safetensors.index.json" in names
    assert "model.safetensors" not in names
    assert len(names) > 4
    one, many = (read_dense(tmp_path / name, tmp_path / "target") for name in ("draft", "many"))
    assert one.config == many.config == config
    assert all(torch.equal(one.weights[name], many.weights[name]) for name in shapes(config))


def test_prefixes_and_former_names_are_stripped(tmp_path: Path) -> None:
    config, weights = stored(tmp_path, "specforge")

    def former(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        heads = ("markov_head.", "confidence_head.")
        return {f"{'logit_head.' if name.startswith(heads) else 'model.'}{name}": t for name, t in tensors.items()}

    rename(tmp_path / "draft", former)
    found = read_dense(tmp_path / "draft", tmp_path / "target")
    assert found.config == config
    assert all(torch.equal(found.weights[name], weights[name]) for name in weights)


def test_speculators_may_store_the_targets_and_a_map_of_all_tokens(tmp_path: Path) -> None:
    config, weights = stored(tmp_path, "speculators")
    extra = {
        "verifier_norm.weight": torch.ones(DIM),
        "verifier_lm_head.weight": weights["lm_head.weight"],
        "embed_tokens.weight": weights["embed_tokens.weight"],
        "d2t": torch.zeros(VOCAB, dtype=torch.int64),
        "t2d": torch.ones(VOCAB, dtype=torch.bool),
    }
    rename(tmp_path / "draft", lambda tensors: tensors | extra)
    assert read_dense(tmp_path / "draft", tmp_path / "target").config == config
    moved = torch.zeros(VOCAB, dtype=torch.int64)
    moved[3] = 1
    rename(tmp_path / "draft", lambda tensors: tensors | {"d2t": moved})
    with pytest.raises(Refused, match="moves or drops tokens"):
        read_dense(tmp_path / "draft", tmp_path / "target")


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
def test_one_element_beside_the_targets_is_refused(name: str, tmp_path: Path) -> None:
    """One unit in the last place of bf16, in one element; -0.0 for 0.0 is another bit, too."""
    stored(tmp_path)

    def nudge(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors[name][5, 3] += 2**-8
        return tensors

    rename(tmp_path / "draft", nudge)
    with pytest.raises(Refused, match=rf"not the target's.*1 of {VOCAB * DIM} values differ"):
        read_dense(tmp_path / "draft", tmp_path / "target")


def test_a_copy_is_compared_in_its_own_type(tmp_path: Path) -> None:
    """An fp32 target and a bf16 copy of it, which is the target's after the cast; the target's values are used."""
    config = dense_config()
    weights = {name: torch.randn(value.shape) for name, value in dense_weights(config).items()}
    write_target(tmp_path / "target", weights, dtype=torch.float32)
    write_dense(tmp_path / "draft", config, weights, store="deepspec", dtype="bfloat16")
    found = read_dense(tmp_path / "draft", tmp_path / "target").weights
    assert torch.equal(found["lm_head.weight"], weights["lm_head.weight"])
    assert torch.equal(found["fc.weight"], weights["fc.weight"].bfloat16().float())


def test_padding_rows_are_cut_and_fewer_rows_refused(tmp_path: Path) -> None:
    _config, weights = stored(tmp_path)
    padded = {
        name: torch.cat([weights[name], torch.ones(3, DIM)]) for name in ("embed_tokens.weight", "lm_head.weight")
    }
    write_target(tmp_path / "wide", padded, vocab_size=VOCAB)
    rename(tmp_path / "draft", lambda tensors: tensors | padded)
    found = read_dense(tmp_path / "draft", tmp_path / "wide")
    assert torch.equal(found.weights["lm_head.weight"], weights["lm_head.weight"])
    write_target(tmp_path / "narrow", {name: value[:-4] for name, value in padded.items()}, vocab_size=VOCAB)
    with pytest.raises(Refused, match=f"at least {VOCAB} × {DIM}"):
        read_dense(tmp_path / "draft", tmp_path / "narrow")


def test_a_tied_targets_head_is_its_embedding(tmp_path: Path) -> None:
    _config, weights = stored(tmp_path, "specforge")
    write_target(tmp_path / "tied", weights, tie_word_embeddings=True)
    rename(tmp_path / "tied", lambda tensors: {k: v for k, v in tensors.items() if k != "lm_head.weight"})
    found = read_dense(tmp_path / "draft", tmp_path / "tied").weights
    assert torch.equal(found["lm_head.weight"], weights["embed_tokens.weight"])
    edit(tmp_path / "tied", lambda fields: fields.update(tie_word_embeddings=False))
    with pytest.raises(Refused, match=r"lacks a tensor.*lm_head.weight"):
        read_dense(tmp_path / "draft", tmp_path / "tied")


def test_a_target_in_a_larger_model_is_found(tmp_path: Path) -> None:
    _, weights = stored(tmp_path)
    target = tmp_path / "target"
    prefix = "model.language_model."
    rename(target, lambda t: {name.replace("model.", prefix): value for name, value in t.items()})
    edit(target, lambda fields: fields.update(text_config={n: fields.pop(n) for n in ("vocab_size", "hidden_size")}))
    assert read_target(target).embed.name == f"{prefix}embed_tokens.weight"
    assert torch.equal(read_target(target).read()[0].float(), weights["embed_tokens.weight"])


def test_what_a_layout_has_no_field_for_is_not_written(tmp_path: Path) -> None:
    kinds = ["full_attention", "sliding_attention"]
    config = dense_config(layer_types=kinds, sliding_window=9, causal=[False, False])
    weights = dense_weights(config)
    write_dense(tmp_path / "speculators", config, weights, store="speculators", dtype="float32")
    write_dense(tmp_path / "specforge", config, weights, store="specforge", dtype="float32")
    assert read_json(tmp_path / "specforge" / "config.json")["dflash_config"]["causal"] is False
    reverse = dense_config(layer_types=kinds, sliding_window=9, causal=[True, False])
    for store in STORES:
        with pytest.raises(Refused, match="no field for which layers are causal"):
            write_dense(tmp_path / "reverse", reverse, weights, store=store, dtype="float32")
    assert not (tmp_path / "reverse").exists()


def test_nothing_is_overwritten_or_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, weights = stored(tmp_path)
    before = (tmp_path / "draft" / "config.json").read_bytes()
    with pytest.raises(Refused, match="never overwritten"):
        write_dense(tmp_path / "draft", dense_config(block_size=2), weights, store="deepspec", dtype="float32")
    assert (tmp_path / "draft" / "config.json").read_bytes() == before
    large = weights | {"fc.weight": torch.full_like(weights["fc.weight"], 1e6)}
    with pytest.raises(Refused, match=r"not finite.*float16"):
        write_dense(tmp_path / "new", config, large, store="deepspec", dtype="float16")
    with pytest.raises(Refused, match="missing or misshapen"):
        write_dense(tmp_path / "new", config, {}, store="deepspec", dtype="float32")

    real = save
    calls: list[int] = []

    def fails(*arguments: Any, **options: Any) -> bytes:
        calls.append(1)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return real(*arguments, **options)

    monkeypatch.setattr("d2lib.drafter.dense.checkpoint.save", fails)
    with pytest.raises(Exception, match="No space left"):
        write_dense(tmp_path / "new", config, weights, store="deepspec", dtype="float32", shard_bytes=2000)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft", "target"]


def test_names_and_targets_of_a_drafter() -> None:
    """The tensors of the serving stacks, by name; and the modules that are adapted, seven a layer and the taps' one."""
    config = dense_config(attention_bias=True, markov_head_type="gated")
    table = shapes(config)
    assert table["fc.weight"] == (DIM, 3 * DIM)
    assert table["layers.1.self_attn.k_proj.weight"] == (12, DIM)
    assert table["layers.1.self_attn.o_proj.bias"] == (DIM,)
    assert table["markov_head.gate_proj.weight"] == (3, DIM + 3)
    assert table["confidence_head.proj.weight"] == (1, DIM + 3)
    assert shapes(dense_config(markov_head_type="rnn"))["markov_head.joint_proj.weight"] == (9, 6 + DIM)
    assert "confidence_head.proj.bias" in table
    assert "markov_head.markov_w2.bias" not in table
    targets = lora_targets(config)
    assert len(targets) == 15
    assert all(len(table[f"{name}.weight"]) == 2 for name in targets)


def test_headers_alone_are_read_to_open_a_source(tmp_path: Path) -> None:
    """Values are not looked at: a NaN is refused by the reader, not by the opening."""
    _config, _ = stored(tmp_path)
    rename(tmp_path / "draft", lambda tensors: tensors | {"norm.weight": torch.full((DIM,), float("nan")).bfloat16()})
    assert open_source(tmp_path / "draft", tmp_path / "target").tensors["norm.weight"].dtype == "BF16"
    with pytest.raises(Refused, match=r"norm.weight is not finite.*8 of 8"):
        read_dense(tmp_path / "draft", tmp_path / "target")
