"""REF of dense drafters against scalar loops written from the formulas, over every switch; batched REF has its bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_dense import SlowDense
from tiny_dense import ROPES, dense_adapter, dense_batch, dense_config, dense_configs, dense_round, dense_weights
from torch import Tensor

from d2lib.drafter.batch import Round
from d2lib.drafter.batched import BatchedReference, BatchOutput
from d2lib.drafter.dense.config import DenseConfig
from d2lib.drafter.family import reference_drafter as reference
from d2lib.drafter.reference import Reference
from d2lib.errors import Refused

TOLERANCE = 1e-4
VARIANTS: dict[str, dict[str, Any]] = {
    "anchor first, vanilla": {},
    "one plus n, no markov": {"layout": "one_plus_n", "markov_rank": 0},
    "one plus n, gated": {"layout": "one_plus_n", "markov_head_type": "gated"},
    "rnn, sliding causal": {
        "markov_head_type": "rnn",
        "layer_types": ("sliding_attention",) * 2,
        "causal": (True, True),
        "sliding_window": 6,
    },
    "mixed, biases, yarn": {
        "layer_types": ("sliding_attention", "full_attention"),
        "causal": (True, False),
        "sliding_window": 5,
        "attention_bias": True,
        "rope": ROPES["yarn"],
    },
    "many slots, confidence alone": {"block_size": 7, "confidence_with_markov": False, "rope": ROPES["llama3"]},
}


def furthest(drafter: Reference, slow: SlowDense, round: Round) -> float:
    """The largest error of hidden, logits and confidence, relative to one plus the true value."""
    output, expected = drafter.forward(round), slow.forward(round)
    assert (output.confidence is None) == (expected[2] is None)
    errors = []
    for found, true in zip((output.hidden, output.logits, output.confidence), expected, strict=True):
        if found is not None:
            truth = torch.tensor(true, dtype=torch.float64)
            assert found.shape == truth.shape
            errors.append(float(((found - truth).abs() / (1 + truth.abs())).max()))
    return max(errors)


@given(config=dense_configs(), anchor=st.integers(0, 15), adapted=st.booleans(), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_reference_is_the_scalar_loop(config: DenseConfig, anchor: int, adapted: bool, seed: int) -> None:
    weights, adapter = dense_weights(config, seed), dense_adapter(config) if adapted else None
    drafter, slow = reference(config, weights, adapter), SlowDense(config, weights, adapter)
    round = dense_round(config, anchor, seed=seed)
    assert furthest(drafter, slow, round) < TOLERANCE
    assert drafter.draft(round).tolist() == slow.draft(round)


@pytest.mark.parametrize("name", VARIANTS)
def test_reference_is_the_scalar_loop_far_into_a_sequence(name: str) -> None:
    """Long contexts and the end of a sequence, where some targets do not exist."""
    config = dense_config(**VARIANTS[name])
    weights, adapter = dense_weights(config), dense_adapter(config)
    drafter, slow = reference(config, weights, adapter), SlowDense(config, weights, adapter)
    for anchor in (70, 90):
        assert furthest(drafter, slow, dense_round(config, anchor, rows=92)) < TOLERANCE


SWITCHES: list[dict[str, Any]] = [
    {"layout": "one_plus_n"},
    {"rope": ROPES["linear"]},
    {"rope": ROPES["llama3"]},
    {"rope": ROPES["yarn"]},
    {"rope": {"type": "default", "theta": 1000.0}},
    {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6},
    {"causal": (True, False)},
    {"causal": (False, True)},
    {"markov_rank": 0},
    {"markov_head_type": "gated"},
    {"markov_head_type": "rnn"},
    {"norm_eps": 1e-6},
    {"mask_token_id": 3},
    {"attention_bias": True},
    {"n_kv_heads": 4},
]


@pytest.mark.parametrize("change", SWITCHES, ids=str)
def test_the_scalar_loop_notices_every_switch(change: dict[str, Any]) -> None:
    """Negative control: an oracle with one switch set otherwise disagrees far beyond the tolerance."""
    config, other = (
        dense_config(confidence=False, confidence_with_markov=False),
        dense_config(confidence=False, confidence_with_markov=False, **change),
    )
    theirs = dense_weights(other)
    weights = dense_weights(config)
    theirs |= {name: tensor for name, tensor in weights.items() if tensor.shape == theirs.get(name, tensor).shape}
    round = dense_round(config, 19)
    assert furthest(reference(config, weights), SlowDense(other, theirs), round) > 20 * TOLERANCE


def test_the_trainers_sliding_rule_is_another() -> None:
    """The served rule is what is computed; the trainer's shows the later query rows up to r + 1 rows more."""
    config = dense_config(layer_types=("sliding_attention",) * 2, sliding_window=6, causal=(True, True))
    weights = dense_weights(config)
    trainer = SlowDense(config, weights, sliding_rule="trainer")
    drafter = reference(config, weights)
    assert furthest(drafter, trainer, dense_round(config, 12)) > 20 * TOLERANCE
    # as long as every row before the anchor is within reach of the last query row, the two are one rule
    assert furthest(drafter, trainer, dense_round(config, 3)) < TOLERANCE


def test_a_tie_goes_to_the_lowest_token() -> None:
    config = dense_config(markov_rank=0)
    weights = dense_weights(config)
    weights["lm_head.weight"] = torch.zeros_like(weights["lm_head.weight"])
    assert reference(config, weights).draft(dense_round(config, 4)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("k", [0, 4, -1])
def test_an_impossible_number_of_drafts_is_refused(k: int) -> None:
    config = dense_config()
    with pytest.raises(Refused, match="1 … 3"):
        reference(config, dense_weights(config)).draft(dense_round(config, 4), k)


def test_a_bad_drafter_is_refused_before_it_computes() -> None:
    config = dense_config(attention_bias=True)
    weights, adapter = dense_weights(config), dense_adapter(config)
    for name in ("layers.1.self_attn.k_proj.bias", "fc.weight", "confidence_head.proj.bias"):
        with pytest.raises(Refused, match=name.replace(".", r"\.")):
            reference(config, {n: t for n, t in weights.items() if n != name})
    with pytest.raises(Refused, match=r"layers\.1\.mlp\.down_proj\.lora_B"):
        reference(config, weights, {n: t for n, t in adapter.items() if n != "layers.1.mlp.down_proj.lora_B"})


# --- batched


FIELDS = ("hidden", "logits", "confidence", "drafts")


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int32) if tensor.is_floating_point() else tensor


def assert_same_bits(found: BatchOutput, place: int, drafter: Reference, round: Round) -> None:
    output = drafter.forward(round)
    expected = (output.hidden, output.logits, output.confidence, drafter.draft(round))
    for name, value in zip(FIELDS, expected, strict=True):
        other = getattr(found, name)
        assert (value is None) == (other is None)
        if value is not None:
            assert torch.equal(bits(value), bits(other[place])), name


@given(
    config=dense_configs(),
    adapted=st.booleans(),
    blocks=st.integers(1, 12),
    rows=st.integers(2, 40),
    seed=st.integers(0, 99),
)
@settings(max_examples=25, deadline=None)
def test_batched_reference_has_the_references_bits(
    config: DenseConfig, adapted: bool, blocks: int, rows: int, seed: int
) -> None:
    """Contexts of many lengths in one batch, hence of several padded widths; tails whose targets do not exist."""
    weights, adapter = dense_weights(config), dense_adapter(config) if adapted else None
    batch = dense_batch(config, blocks, seed, rows=rows)
    found = BatchedReference(config, weights, adapter).run_batch(batch)
    with torch.no_grad():
        for index in range(len(batch)):
            assert_same_bits(found, index, reference(config, weights, adapter), batch.round(index))


@pytest.mark.parametrize("name", VARIANTS)
def test_the_number_of_threads_does_not_change_a_bit(name: str) -> None:
    config = dense_config(**VARIANTS[name])
    many, batch = (
        BatchedReference(config, dense_weights(config), dense_adapter(config)),
        dense_batch(config, 30, rows=60),
    )
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(many.run_batch(batch))
    finally:
        torch.set_num_threads(before)
    for field in FIELDS:
        assert torch.equal(*(bits(getattr(output, field)) for output in found))


@pytest.mark.parametrize("name", VARIANTS)
def test_a_row_at_or_after_the_anchor_never_matters(name: str) -> None:
    """Other rounds of the batch read them; this round's bits do not change. The row before the anchor does matter."""
    config = dense_config(**VARIANTS[name])
    many = BatchedReference(config, dense_weights(config))
    batch = dense_batch(config, 8, seed=3, rows=30)
    whole = many.run_batch(batch).logits
    for index, anchor in enumerate(batch.anchor.tolist()):
        for at, same in ((anchor, True), (anchor - 1, False)):
            changed = torch.where((batch.positions >= at)[:, None], -batch.taps, batch.taps)
            found = many.run_batch(replace(batch, taps=changed)).logits
            if at >= 0:
                assert torch.equal(bits(found[index]), bits(whole[index])) == same


def test_gradients_are_the_sum_of_the_rounds() -> None:
    config = dense_config(**VARIANTS["mixed, biases, yarn"])
    weights, adapter = dense_weights(config), dense_adapter(config)
    for tensor in adapter.values():
        tensor.requires_grad_()
    batch = dense_batch(config, 6)
    probe = torch.randn(6, config.block_size, config.vocab_size, generator=torch.Generator().manual_seed(1))
    together = (BatchedReference(config, weights, adapter).forward_batch(batch)[1] * probe).sum()
    found = torch.autograd.grad(together, list(adapter.values()))
    one = reference(config, weights, adapter)
    alone = sum((one.forward(batch.round(index)).logits * probe[index]).sum() for index in range(6))
    for name, ours, expected in zip(adapter, found, torch.autograd.grad(alone, list(adapter.values())), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3, msg=name)
        assert expected.abs().max() > 0
