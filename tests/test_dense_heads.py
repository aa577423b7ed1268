"""What must hold of a dense drafter's heads, its previous tokens and its adapter whatever the weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_dense import dense_adapter, dense_batch, dense_config, dense_configs, dense_round, dense_weights
from torch import Tensor

from d2lib.drafter.batch import Round
from d2lib.drafter.batched import BatchedReference
from d2lib.drafter.dense.config import DenseConfig
from d2lib.drafter.family import fast_drafter as fast
from d2lib.drafter.family import reference_drafter as reference
from d2lib.drafter.lora import initialize_adapter, merge
from d2lib.drafter.objectives import kl
from d2lib.drafter.reference import RoundOutput, teacher_logits
from d2lib.gates.scoring import log_softmax, measure

HEADS = ["vanilla", "gated", "rnn"]
W1, W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"


def run(config: DenseConfig, weights: dict[str, Tensor], round: Round) -> RoundOutput:
    with torch.no_grad():
        return reference(config, weights).forward(round)


def base(config: DenseConfig, weights: dict[str, Tensor], output: RoundOutput) -> Tensor:
    """LM head on the hidden rows, which are normed already."""
    return output.hidden @ weights["lm_head.weight"].T


def another(tokens: Tensor, place: int, config: DenseConfig) -> Tensor:
    changed = tokens.clone()
    changed[place] = (changed[place] + 5) % config.vocab_size
    return changed


# --- Markov head


@pytest.mark.parametrize("kind", HEADS)
def test_without_its_second_matrix_a_markov_head_adds_nothing(kind: str) -> None:
    config = dense_config(markov_head_type=kind)
    weights, round = dense_weights(config), dense_round(config, 6)
    output = run(config, weights | {W2: torch.zeros_like(weights[W2])}, round)
    torch.testing.assert_close(output.logits, base(config, weights, output))
    assert (run(config, weights, round).logits - output.logits).abs().max() > 0.1


def test_dflash_is_the_lm_head_alone() -> None:
    config = dense_config(markov_rank=0)
    weights = dense_weights(config)
    output = run(config, weights, dense_round(config, 6))
    torch.testing.assert_close(output.logits, base(config, weights, output))


def test_a_gate_of_one_half_is_half_a_vanilla_head() -> None:
    gated, vanilla = dense_config(markov_head_type="gated"), dense_config()
    weights, round = dense_weights(gated), dense_round(gated, 6)
    gate = {name: torch.zeros_like(weights[name]) for name in weights if "gate_proj" in name and "markov" in name}
    assert len(gate) == 2
    plain = {name: tensor for name, tensor in weights.items() if name not in gate}
    halved = run(vanilla, plain | {W2: weights[W2] / 2}, round).logits
    torch.testing.assert_close(run(gated, weights | gate, round).logits, halved)
    assert (run(gated, weights, round).logits - halved).abs().max() > 0.1


@pytest.mark.parametrize("connected", [True, False])
def test_an_rnn_head_remembers_through_its_state_columns_alone(connected: bool) -> None:
    config = dense_config(markov_head_type="rnn", block_size=5)
    weights, round = dense_weights(config), dense_round(config, 6, rows=20)
    if not connected:
        weights["markov_head.joint_proj.weight"][:, : config.markov_rank] = 0
    before = run(config, weights, round).logits
    for slot in range(config.block_size):
        after = run(config, weights, replace(round, previous=another(round.previous, slot, config))).logits
        moved = (after - before).abs().amax(-1)
        assert float(moved[:slot].max() if slot else 0) == 0
        assert moved[slot] > 1e-3
        assert bool((moved[slot + 1 :] > 1e-5).all()) if connected else float(moved[slot + 1 :].sum()) == 0


@pytest.mark.parametrize("kind", HEADS)
def test_one_wide_head_is_the_sum_of_two(kind: str) -> None:
    """[lm_head | W2]·[y; latent], from the latents that the drafter itself says it has."""
    config = dense_config(markov_head_type=kind)
    weights, round = dense_weights(config), dense_round(config, 6)
    drafter, output = reference(config, weights), run(config, weights, round)
    with torch.no_grad():
        latents = drafter.latents(output.hidden, round.previous)
    assert latents is not None
    wide = torch.cat([weights["lm_head.weight"], weights[W2]], dim=1)
    torch.testing.assert_close(torch.cat([output.hidden, latents], dim=1) @ wide.T, output.logits, atol=1e-4, rtol=1e-4)


@given(seed=st.integers(0, 99))
@settings(max_examples=8, deadline=None)
def test_a_vanilla_bias_knows_the_previous_token_alone(seed: int) -> None:
    config = dense_config(block_size=4)
    weights = dense_weights(config, seed)
    biases = []
    for anchor in (3, 9):
        round = dense_round(config, anchor, seed=seed)
        output = run(config, weights, replace(round, previous=torch.tensor([7, 7, 11, 7])))
        biases.append(output.logits - base(config, weights, output))
    torch.testing.assert_close(biases[0], biases[1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(biases[0][0], biases[0][3], atol=1e-4, rtol=1e-4)
    assert (biases[0][2] - biases[0][0]).abs().max() > 0.1


# --- the previous token


@given(config=dense_configs(block_size=4), slot=st.integers(0, 2))
@settings(max_examples=25, deadline=None)
def test_a_slots_own_token_shows_in_the_next_slot_only(config: DenseConfig, slot: int) -> None:
    """t_{a+1+i} is slot i's target and slot i+1's previous token."""
    weights, round = dense_weights(config), dense_round(config, 8)
    target = int(round.target[slot])
    assert int(round.previous[slot + 1]) == target
    before = run(config, weights, round).logits
    after = run(config, weights, replace(round, previous=another(round.previous, slot + 1, config))).logits
    moved = (after - before).abs().amax(-1)
    assert float(moved[: slot + 1].max()) == 0
    assert bool(moved[slot + 1] > 1e-4) == (config.markov_rank > 0)


@given(config=dense_configs(), anchor=st.integers(0, 12), adapted=st.booleans())
@settings(max_examples=25, deadline=None)
def test_drafts_are_the_argmax_of_the_logits_that_they_condition(
    config: DenseConfig, anchor: int, adapted: bool
) -> None:
    drafter = reference(config, dense_weights(config), dense_adapter(config) if adapted else None)
    round = dense_round(config, anchor)
    drafts = drafter.draft(round)
    forced = replace(round, previous=torch.cat([torch.tensor([round.anchor_token]), drafts[:-1]]))
    with torch.no_grad():
        assert torch.equal(drafter.forward(forced).logits.argmax(-1), drafts)
    for k in range(1, config.block_size):
        assert torch.equal(drafter.draft(round, k), drafts[:k])


# --- confidence


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("with_markov", [True, False])
def test_confidence_reads_the_normed_output_and_the_bare_embedding(kind: str, with_markov: bool) -> None:
    config = dense_config(markov_head_type=kind, confidence_with_markov=with_markov)
    weights, round = dense_weights(config), dense_round(config, 6)

    def confidence(changed: dict[str, Tensor], of: Round = round) -> Tensor:
        found = run(config, weights | changed, of).confidence
        assert found is not None
        return found

    before = confidence({})
    assert (confidence({"norm.weight": weights["norm.weight"].roll(1)}) - before).abs().min() > 1e-3
    moved = (confidence({}, replace(round, previous=another(round.previous, 1, config))) - before).abs()
    assert (moved > 1e-4).tolist() == [False, with_markov, False]
    mix = {name: -weights[name] for name in weights if name.startswith("markov_head.") and name not in (W1, W2)}
    assert torch.equal(confidence({W2: -weights[W2]} | mix), before)
    shift = {"confidence_head.proj.bias": weights["confidence_head.proj.bias"] + 1}
    torch.testing.assert_close(confidence(shift), before + 1)


# --- acceptance


@given(config=dense_configs(markov_rank=0), seed=st.integers(0, 99))
@settings(max_examples=10, deadline=None)
def test_a_drafter_that_says_what_the_teacher_says_is_always_accepted(config: DenseConfig, seed: int) -> None:
    """The teacher's final hidden rows are the drafter's own: α = 1 and KL = 0 in every slot; not so of other rows."""
    weights = dense_weights(config, seed)
    batch = dense_batch(config, 5, seed, rows=16)
    drafter = fast(config, weights)
    with torch.no_grad():
        hidden = drafter.hidden(batch)
        own = torch.arange(hidden[..., 0].numel()).view(hidden.shape[:2])
        mine = replace(batch, teacher_hidden=hidden.flatten(0, 1), teacher=own)
        shifted = replace(mine, teacher=own.flatten().roll(1).view_as(own))
        alpha = drafter.head_loss(hidden, mine, kl).alpha
        other = drafter.head_loss(hidden, shifted, kl).alpha
        teacher = log_softmax(teacher_logits(weights["lm_head.weight"], mine.teacher_hidden)[mine.teacher])
        _, divergence = measure(BatchedReference(config, weights).forward_batch(batch)[1], teacher, batch.target)
    torch.testing.assert_close(alpha, batch.valid.float(), atol=1e-4, rtol=0)
    assert other[batch.valid].min() < 0.99
    assert divergence.abs().max() < 1e-5


# --- the adapter


@given(config=dense_configs(), anchor=st.integers(0, 9), rank=st.integers(1, 4))
@settings(max_examples=10, deadline=None)
def test_a_zero_b_leaves_every_bit(config: DenseConfig, anchor: int, rank: int) -> None:
    weights, adapter = dense_weights(config), initialize_adapter(config, rank, seed=23)
    round = dense_round(config, anchor)
    with torch.no_grad():
        native, adapted = run(config, weights, round), reference(config, weights, adapter).forward(round)
    assert torch.equal(native.hidden, adapted.hidden)
    assert torch.equal(native.logits, adapted.logits)
    if native.confidence is not None and adapted.confidence is not None:
        assert torch.equal(native.confidence, adapted.confidence)


@given(config=dense_configs(), anchor=st.integers(1, 9), rank=st.integers(1, 4))
@settings(max_examples=10, deadline=None)
def test_merged_is_unmerged(config: DenseConfig, anchor: int, rank: int) -> None:
    weights, adapter = dense_weights(config), dense_adapter(config, rank)
    round = dense_round(config, anchor)
    with torch.no_grad():
        merged = run(config, merge(weights, adapter, config), round).logits
        unmerged = reference(config, weights, adapter).forward(round).logits
    torch.testing.assert_close(merged, unmerged, atol=2e-3, rtol=2e-3)
    assert (unmerged - run(config, weights, round).logits).abs().max() > 0.01


MODULES = (
    "fc",
    *(f"self_attn.{part}_proj" for part in "qkvo"),
    *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
)


@pytest.mark.parametrize("leaf", MODULES)
def test_every_adapted_module_counts(leaf: str) -> None:
    """Each module's own update changes the logits, so none is adapted in name only."""
    config = dense_config()
    weights, adapter, round = dense_weights(config), dense_adapter(config), dense_round(config, 7)
    names = {name for name in adapter if f"{leaf}." in name}
    assert len(names) == (2 if leaf == "fc" else 2 * config.n_layers)
    only = {
        name: tensor if name in names or name.endswith("lora_A") else torch.zeros_like(tensor)
        for name, tensor in adapter.items()
    }
    with torch.no_grad():
        found = reference(config, weights, only).forward(round).logits
    assert (found - run(config, weights, round).logits).abs().max() > 0.01
