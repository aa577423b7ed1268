"""Rotary frequencies of dense drafters are those of transformers, by type, size and option; so are those of the oracle
and of the live loop."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_dense import SlowDense
from slow_dense import frequencies as slow_frequencies
from tiny_dense import dense_config, dense_weights, ropes
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

from d2lib.drafter.dense.config import DenseConfig, Rope
from d2lib.lab.decode_dense import LiveDense


def theirs(config: DenseConfig) -> Qwen3RotaryEmbedding:
    """transformers' rotary embedding of the same drafter: inv_freq [D/2] and attention_scaling."""
    rope = config.rope
    parameters = rope.model_dump(include=rope.model_fields_set - {"type", "theta"}, exclude_none=True)
    if rope.type == "yarn":
        parameters["original_max_position_embeddings"] = config.rope_original
    return Qwen3RotaryEmbedding(
        Qwen3Config(
            hidden_size=config.dim,
            num_attention_heads=config.n_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters={"rope_type": rope.type, "rope_theta": rope.theta, **parameters},
        )
    )


@given(rope=ropes(), half=st.integers(1, 40), positions=st.integers(16, 8192))
@settings(max_examples=150, deadline=None)
def test_frequencies_are_those_of_transformers(rope: Rope, half: int, positions: int) -> None:
    config = dense_config(rope=rope, head_dim=2 * half, max_position_embeddings=positions)
    expected = theirs(config)
    found, gain = slow_frequencies(config)
    torch.testing.assert_close(torch.tensor(found), expected.inv_freq, rtol=2e-5, atol=0)
    assert gain == pytest.approx(expected.attention_scaling, rel=1e-6)
    live = LiveDense(config, dense_weights(config), streams=1, rows=1)
    torch.testing.assert_close(torch.tensor(live.pace).float(), expected.inv_freq, rtol=2e-5, atol=0)
    assert live.gain == pytest.approx(expected.attention_scaling, rel=1e-6)


@given(rope=ropes(), half=st.integers(1, 8), position=st.integers(0, 300))
@settings(max_examples=30, deadline=None)
def test_rotation_is_that_of_transformers(rope: Rope, half: int, position: int) -> None:
    config = dense_config(rope=rope, head_dim=2 * half)
    x = torch.randn(1, 1, 1, 2 * half, generator=torch.Generator().manual_seed(position))
    cos, sin = theirs(config)(x, torch.tensor([[position]]))
    expected, _ = apply_rotary_pos_emb(x, x, cos, sin)
    slow = SlowDense(config, dense_weights(config)).rope(x.flatten().tolist(), position)
    torch.testing.assert_close(torch.tensor(slow), expected.flatten(), rtol=0, atol=1e-3)
