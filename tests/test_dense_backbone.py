"""What must hold of a dense drafter's backbone whatever its weights: context, positions, masks, layouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_dense import SlowDense, Vector
from tiny_dense import ROPES, dense_config, dense_configs, dense_round, dense_sequence, dense_weights, round_of
from torch import Tensor

from d2lib.drafter.batch import Round
from d2lib.drafter.dense.config import DenseConfig
from d2lib.drafter.family import reference_drafter as reference

SLIDING: dict[str, Any] = {"layer_types": ("sliding_attention",) * 2, "sliding_window": 6}
MIXED: dict[str, Any] = {"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 6}


def hidden(config: DenseConfig, weights: dict[str, Tensor], round: Round) -> Tensor:
    with torch.no_grad():
        return reference(config, weights).forward(round).hidden


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def assert_far(found: Tensor, expected: Tensor) -> None:
    assert float((found - expected).abs().max()) > 0.02


# --- context rows and taps


@given(seed=st.integers(0, 99), rows=st.integers(2, 12))
@settings(max_examples=10, deadline=None)
def test_context_rows_are_a_set_of_rows_with_positions(seed: int, rows: int) -> None:
    config = dense_config()
    weights, round = dense_weights(config, seed), dense_round(config, rows, seed=seed)
    order = torch.arange(rows).roll(1)
    permuted = replace(round, taps=round.taps[order], positions=round.positions[order])
    assert_close(hidden(config, weights, permuted), hidden(config, weights, round))
    assert_far(hidden(config, weights, replace(round, taps=round.taps[order])), hidden(config, weights, round))


def test_taps_are_concatenated_in_the_order_of_fc() -> None:
    config = dense_config(target_layer_ids=(0, 2, 3))
    weights, round = dense_weights(config), dense_round(config, 6)

    def exchanged(x: Tensor) -> Tensor:
        first, second, third = x.split(config.dim, dim=-1)
        return torch.cat([first, third, second], dim=-1)

    other_round, other_fc = replace(round, taps=exchanged(round.taps)), {"fc.weight": exchanged(weights["fc.weight"])}
    assert_close(hidden(config, weights | other_fc, other_round), hidden(config, weights, round))
    assert_far(hidden(config, weights, other_round), hidden(config, weights, round))


def test_context_keys_ignore_the_input_norm_and_slot_keys_do_not() -> None:
    """Slots differ in the last half of the channels alone, and only keys read that half: not values, not queries."""
    config = dense_config(n_layers=1, attention_bias=True)
    weights, half = dense_weights(config), config.dim // 2
    attn = "layers.0.self_attn"
    weights["hidden_norm.weight"][half:] = 0
    weights["layers.0.input_layernorm.weight"][:half] = 0
    weights[f"{attn}.v_proj.weight"][:, half:] = 0
    weights[f"{attn}.q_proj.weight"][:] = 0
    changed = dict(weights)
    changed["layers.0.input_layernorm.weight"] = -weights["layers.0.input_layernorm.weight"].roll(1)
    changed["layers.0.input_layernorm.weight"][:half] = 0
    round = dense_round(config, 8)
    assert_far(hidden(config, changed, round), hidden(config, weights, round))
    # Without slot keys of their own the change does not show: nothing else reads what the norm gives.
    for found in (weights, changed):
        found[f"{attn}.k_proj.weight"] = found[f"{attn}.k_proj.weight"].clone()
        found[f"{attn}.k_proj.weight"][:, half:] = 0
    assert torch.equal(hidden(config, changed, round), hidden(config, weights, round))


# --- positions


@pytest.mark.parametrize("layers", [{}, SLIDING, MIXED], ids=["full", "sliding", "mixed"])
@pytest.mark.parametrize("rope", ROPES)
def test_only_relative_positions_count(rope: str, layers: dict[str, Any]) -> None:
    config = dense_config(rope=ROPES[rope], **layers)
    weights, round = dense_weights(config), dense_round(config, 9)
    shifted = replace(round, anchor=round.anchor + 300, positions=round.positions + 300)
    assert_close(hidden(config, weights, shifted), hidden(config, weights, round))
    if not layers:
        moved = replace(round, positions=round.positions - 2)
        assert_far(hidden(config, weights, moved), hidden(config, weights, round))


class NormAfterRotation(SlowDense):
    """Queries and keys turned first and given their gains after: what a drafter does not do."""

    def norm(self, x: Vector, name: str) -> Vector:
        normed = super().norm(x, name)
        if not name.endswith(("q_norm", "k_norm")):
            return normed
        self.gains = self.w[f"{name}.weight"]
        return [v / g for v, g in zip(normed, self.gains, strict=True)]

    def rope(self, u: Vector, position: int) -> Vector:
        return [v * g for v, g in zip(super().rope(u, position), self.gains, strict=True)]


@pytest.mark.parametrize("paired", [True, False])
def test_queries_and_keys_are_normed_before_they_are_turned(paired: bool) -> None:
    """A rotation keeps a vector's size, so the order shows through the gains alone, where a pair's two differ."""
    config = dense_config()
    weights = dense_weights(config)
    if paired:
        for name in [name for name in weights if name.endswith(("q_norm.weight", "k_norm.weight"))]:
            weights[name] = weights[name][: config.head_dim // 2].repeat(2)
    round = dense_round(config, 7)
    swapped = torch.tensor(NormAfterRotation(config, weights).forward(round)[0])
    (assert_close if paired else assert_far)(hidden(config, weights, round), swapped)


# --- heads and biases


@given(config=dense_configs(n_kv_heads=2, n_heads=6), anchor=st.integers(0, 9))
@settings(max_examples=10, deadline=None)
def test_grouped_queries_are_heads_with_copied_keys(config: DenseConfig, anchor: int) -> None:
    weights = dense_weights(config)
    copied = dict(weights)
    for name, tensor in weights.items():
        if ".k_proj." in name or ".v_proj." in name:
            heads = tensor.view(config.n_kv_heads, config.head_dim, *tensor.shape[1:])
            copied[name] = heads.repeat_interleave(3, dim=0).flatten(0, 1)
    many = config.model_copy(update={"n_kv_heads": config.n_heads})
    round = dense_round(config, anchor)
    assert_close(hidden(many, copied, round), hidden(config, weights, round))


def test_a_zero_bias_is_none() -> None:
    config, without = dense_config(attention_bias=True), dense_config()
    weights, round = dense_weights(config), dense_round(config, 7)
    biases = {name for name in weights if name.endswith("_proj.bias") and "self_attn" in name}
    assert len(biases) == 8
    plain = {name: tensor for name, tensor in weights.items() if name not in biases}
    zeroed = weights | {name: torch.zeros_like(weights[name]) for name in biases}
    expected = hidden(without, plain, round)
    assert_close(hidden(config, zeroed, round), expected)
    for name in biases:
        other = hidden(config, zeroed | {name: weights[name]}, round)
        assert float((other - expected).abs().max()) > (1e-5 if "k_proj" in name else 1e-3), name


# --- masks inside the block


@pytest.mark.parametrize("layout", ["anchor_first", "one_plus_n"])
@pytest.mark.parametrize("layers", [{}, SLIDING, MIXED], ids=["full", "sliding", "mixed"])
def test_a_causal_blocks_first_slots_are_those_of_a_shorter_block(layout: str, layers: dict[str, Any]) -> None:
    long = dense_config(layout=layout, block_size=5, causal=(True, True), **layers)
    weights = dense_weights(long)
    for slots in (1, 3, 4):
        short = long.model_copy(update={"block_size": slots})
        found = hidden(short, weights, dense_round(short, 9, rows=30))
        assert_close(found, hidden(long, weights, dense_round(long, 9, rows=30))[:slots])


@pytest.mark.parametrize("causal", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("layers", [{}, SLIDING, MIXED], ids=["full", "sliding", "mixed"])
def test_a_block_that_is_not_causal_sees_its_later_rows(causal: tuple[bool, bool], layers: dict[str, Any]) -> None:
    long = dense_config(block_size=4, causal=causal, **layers)
    short, weights = long.model_copy(update={"block_size": 3}), dense_weights(long)
    whole = hidden(long, weights, dense_round(long, 9, rows=30))
    fewer = hidden(short, weights, dense_round(short, 9, rows=30))
    assert float((whole[:3] - fewer).abs().amax(-1).min()) > 1e-3


@given(config=dense_configs(layout="one_plus_n", markov_rank=0), anchor=st.integers(0, 12))
@settings(max_examples=15, deadline=None)
def test_one_plus_n_is_an_anchor_first_block_of_one_more_row(config: DenseConfig, anchor: int) -> None:
    longer = config.model_copy(update={"layout": "anchor_first", "block_size": config.block_size + 1})
    weights = dense_weights(config)
    rows = hidden(longer, weights, dense_round(longer, anchor, rows=30))
    assert_close(hidden(config, weights, dense_round(config, anchor, rows=30)), rows[1:])


# --- sliding layers


@given(config=dense_configs(sliding_window=5, block_size=3), anchor=st.integers(0, 12), more=st.integers(0, 3))
@settings(max_examples=20, deadline=None)
def test_a_sliding_layer_that_reaches_everything_is_full(config: DenseConfig, anchor: int, more: int) -> None:
    sliding = config.model_copy(
        update={
            "layer_types": ("sliding_attention",) * config.n_layers,
            "sliding_window": anchor + config.n_rows + more,
        }
    )
    full = config.model_copy(update={"layer_types": ("full_attention",) * config.n_layers})
    weights, round = dense_weights(config), dense_round(config, anchor)
    assert_close(hidden(sliding, weights, round), hidden(full, weights, round))


def test_a_sliding_layers_rows_end_where_its_width_does() -> None:
    """Query row r sees rows from a + r - (w - 1) on; in one layer nothing else can bring it an older one."""
    config = dense_config(n_layers=1, layer_types=("sliding_attention",), sliding_window=6, causal=(True,))
    weights, anchor, width = dense_weights(config), 12, 6
    tokens, taps, teacher = dense_sequence(config, 20)
    before = hidden(config, weights, round_of(config, tokens, taps, teacher, anchor))
    for row in range(anchor):
        changed = taps.clone()
        changed[row] *= -1
        moved = (hidden(config, weights, round_of(config, tokens, changed, teacher, anchor)) - before).abs().amax(-1)
        seen = [row >= anchor + r - (width - 1) for r in range(config.n_rows)]
        assert [bool(value > 0) for value in moved] == seen, row


@given(config=dense_configs(sliding_window=5, block_size=3), anchor=st.integers(0, 14))
@settings(max_examples=20, deadline=None)
def test_a_sliding_drafters_round_needs_its_last_rows_alone(config: DenseConfig, anchor: int) -> None:
    config = config.model_copy(update={"layer_types": ("sliding_attention",) * config.n_layers})
    weights, whole = dense_weights(config), dense_round(config, anchor)
    kept = min(anchor, 4)
    last = replace(whole, taps=whole.taps[anchor - kept :], positions=whole.positions[anchor - kept :])
    assert_close(hidden(config, weights, last), hidden(config, weights, whole))
    if anchor > 4 and config.layout == "anchor_first":  # in one plus n no slot's own row sees the oldest
        fewer = replace(whole, taps=whole.taps[anchor - 3 :], positions=whole.positions[anchor - 3 :])
        assert float((hidden(config, weights, fewer) - hidden(config, weights, whole)).abs().max()) > 1e-4


@given(config=dense_configs(), anchor=st.integers(0, 14), wider=st.integers(0, 9))
@settings(max_examples=15, deadline=None)
def test_padding_is_no_row(config: DenseConfig, anchor: int, wider: int) -> None:
    """However many rows a context is padded with (to a multiple of 16, as kernels want), nothing of them is seen."""
    weights, round = dense_weights(config), dense_round(config, anchor)
    expected = hidden(config, weights, round)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DenseConfig, "padded_rows", lambda self, rows: max(1, rows + wider))  # a column at least
        assert_close(hidden(config, weights, round), expected)
