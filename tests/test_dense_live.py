"""The live loop of dense drafters drafts what the scalar loops draft, over every round of several streams."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_dense import SlowDense
from tiny_dense import ROPES, dense_config, dense_configs, dense_sequence, dense_weights, round_of

from d2lib.drafter.dense.config import DenseConfig
from d2lib.lab.decode import Stream, decode_live


def served(config: DenseConfig, rows: tuple[int, ...], prompt: int) -> list[Stream]:
    """Streams of these lengths, decoded by the live loop to their ends."""
    streams = []
    for number, length in enumerate(rows):
        tokens, taps, _ = dense_sequence(config, length, seed=number)
        streams.append(Stream(str(number), tokens.numpy(), taps.float().numpy(), prompt))
    return decode_live(config, dense_weights(config), streams)


def assert_drafted_by_the_slow_one(config: DenseConfig, streams: list[Stream], prompt: int) -> int:
    """How many rounds were compared."""
    slow, compared = SlowDense(config, dense_weights(config)), 0
    for number, stream in enumerate(streams):
        sequence, anchor = dense_sequence(config, len(stream.tokens), seed=number), prompt
        for found in stream.rounds:
            assert found.anchor == anchor
            assert list(found.drafts) == slow.draft(round_of(config, *sequence, anchor))[:2]
            anchor, compared = found.next_anchor, compared + 1
        assert anchor >= len(stream.tokens) - 1
    return compared


@given(config=dense_configs(block_size=3, vocab_size=7, mask_token_id=6), prompt=st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_the_live_loop_drafts_what_the_scalar_loops_draft(config: DenseConfig, prompt: int) -> None:
    """A vocabulary this small lets drafts be accepted, so that anchors advance by one, two and three.

    The streams go on for 5 and 2 tokens: three rounds at least.
    """
    assert assert_drafted_by_the_slow_one(config, served(config, (prompt + 6, prompt + 3), prompt), prompt) >= 3


def test_a_ring_that_wraps_and_a_prompt_longer_than_it() -> None:
    config = dense_config(
        n_layers=3,
        layer_types=("sliding_attention", "full_attention", "sliding_attention"),
        causal=(True, False, False),
        sliding_window=4,
        rope=ROPES["yarn"],
    )
    assert assert_drafted_by_the_slow_one(config, served(config, (26, 17), 11), 11) >= 10


@pytest.mark.parametrize("change", [{"sliding_window": 6}, {"causal": (True, True)}, {"rope": ROPES["linear"]}])
def test_another_switch_drafts_other_tokens(change: dict[str, object]) -> None:
    """Negative control: the comparison notices a switch."""
    fields = {"layer_types": ("sliding_attention",) * 2, "sliding_window": 4}
    streams = served(dense_config(**(fields | change)), (40,), 12)
    with pytest.raises(AssertionError):
        assert_drafted_by_the_slow_one(dense_config(**fields), streams, 12)
