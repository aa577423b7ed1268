"""REF against scalar loops written from the formulas, and what must hold of a round whatever the weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from slow_drafter import SlowDrafter
from tiny import random_batch, tiny_adapter, tiny_config, tiny_weights

from d2lib.drafter.batch import Round
from d2lib.drafter.deepseek.config import DeepseekConfig
from d2lib.drafter.family import reference_drafter
from d2lib.drafter.lora import initialize_adapter
from d2lib.drafter.reference import Reference, teacher_logits
from d2lib.errors import Refused

TOLERANCE = 5e-5
VARIANTS = {
    "v41": tiny_config(),
    "v4": tiny_config(hc_form="per_motion", q_head_norm=True),
    "quantized": tiny_config(kv_quant="e4m3_ue8m0_64", head_dim=132, n_heads=2),
    "one_stage": tiny_config(n_stages=1, hc_mult=3, n_activated=5, norm_topk_prob=False, target_layer_ids=(1,)),
    "small_eps": tiny_config(hc_eps=1e-6, norm_eps=1e-20, hc_sinkhorn_iters=20),
    "one_slot": tiny_config(block_size=1, hc_mult=1, hc_sinkhorn_iters=1, hc_form="per_motion"),
}


def round_at(config: DeepseekConfig, anchor: int, seed: int = 0) -> Round:
    batch = random_batch(config, 40, seed)
    return batch.round(batch.anchor.tolist().index(anchor))


def furthest(reference: Reference, slow: SlowDrafter, round: Round) -> float:
    """The largest error of hidden, logits and confidence, relative to one plus the true value."""
    output, expected = reference.forward(round), slow.forward(round)
    errors = []
    for found, true in zip((output.hidden, output.logits, output.confidence), expected, strict=True):
        truth = torch.tensor(true, dtype=torch.float64)
        errors.append(float(((found - truth).abs() / (1 + truth.abs())).max()))
    return max(errors)


@pytest.mark.parametrize("adapted", [False, True], ids=["native", "adapted"])
@pytest.mark.parametrize("name", VARIANTS)
def test_reference_is_the_scalar_loop(name: str, adapted: bool) -> None:
    config = VARIANTS[name]
    weights, adapter = tiny_weights(config), tiny_adapter(config) if adapted else None
    reference, slow = reference_drafter(config, weights, adapter), SlowDrafter(config, weights, adapter)
    batch = random_batch(config, 5, seed=3)
    for index in range(len(batch)):
        round = batch.round(index)
        assert furthest(reference, slow, round) < TOLERANCE
        assert reference.draft(round).tolist() == slow.draft(round)


@pytest.mark.parametrize(
    "change",
    [
        {"hc_form": "per_motion"},
        {"q_head_norm": True},
        {"rope_theta": 100.0},
        {"swiglu_limit": 10.0},
        {"hc_sinkhorn_iters": 2},
        {"routed_scaling_factor": 1.0},
        {"n_activated": 3},
        {"norm_topk_prob": False},
        {"norm_eps": 1e-20},
        {"hc_eps": 1e-6},
        {"noise_token_id": 3},
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_scalar_loop_notices_every_switch(change: dict[str, object]) -> None:
    """Negative control: an oracle with one switch set otherwise disagrees far beyond the tolerance."""
    config = tiny_config()
    other = tiny_config(**change)
    weights = tiny_weights(other)
    native = {name: weights[name] for name in tiny_weights(config)}
    assert (
        furthest(reference_drafter(config, native), SlowDrafter(other, weights), round_at(config, 1)) > 20 * TOLERANCE
    )


def test_quantization_matters() -> None:
    config = VARIANTS["quantized"]
    weights = tiny_weights(config)
    off = SlowDrafter(config.model_copy(update={"kv_quant": "off"}), weights)
    assert furthest(reference_drafter(config, weights), off, round_at(config, 1)) > 20 * TOLERANCE


def test_drafts_are_the_argmax_of_the_logits_that_they_condition() -> None:
    config = tiny_config(block_size=5)
    reference = reference_drafter(config, tiny_weights(config), tiny_adapter(config))
    for index in range(6):
        round = random_batch(config, 6).round(index)
        drafts = reference.draft(round)
        forced = replace(round, previous=torch.cat([torch.tensor([round.anchor_token]), drafts[:-1]]))
        assert torch.equal(reference.forward(forced).logits.argmax(-1), drafts)
        assert torch.equal(reference.draft(round, 2), drafts[:2])


def test_a_tie_goes_to_the_lowest_token() -> None:
    config = tiny_config()
    weights = tiny_weights(config)
    weights["head.weight"] = torch.zeros_like(weights["head.weight"])
    weights["mtp.1.markov_head.head.weight"] = torch.zeros_like(weights["mtp.1.markov_head.head.weight"])
    assert reference_drafter(config, weights).draft(round_at(config, 1)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("k", [0, 4, -1])
def test_an_impossible_number_of_drafts_is_refused(k: int) -> None:
    config = tiny_config()
    with pytest.raises(Refused, match="1 … 3"):
        reference_drafter(config, tiny_weights(config)).draft(round_at(config, 1), k)


def test_only_relative_positions_count() -> None:
    """Rotary scores depend on differences, and the output is turned back: shifting a sequence changes nothing."""
    config = tiny_config()
    reference = reference_drafter(config, tiny_weights(config))
    round = random_batch(config, 9).round(8)
    shifted = replace(round, anchor=round.anchor + 5000, positions=round.positions + 5000)
    assert len(round.positions) == config.window
    torch.testing.assert_close(reference.forward(round).hidden, reference.forward(shifted).hidden, atol=1e-4, rtol=1e-4)
    moved = replace(round, anchor=round.anchor + 2)
    assert (reference.forward(round).hidden - reference.forward(moved).hidden).abs().max() > 0.01


def test_the_oldest_row_and_the_last_slot_are_seen_by_every_slot() -> None:
    config = tiny_config()
    reference = reference_drafter(config, tiny_weights(config))
    round = random_batch(config, 9).round(8)
    hidden = reference.forward(round).hidden
    taps = round.taps.clone()
    taps[0] += 1
    assert (reference.forward(replace(round, taps=taps)).hidden - hidden).abs().amax(-1).min() > 1e-4
    # Only the last slot's token differs; the first slot can tell through attention alone.
    weights = tiny_weights(config)
    narrow = tiny_config(block_size=2)
    fewer = reference_drafter(narrow, weights).forward(replace(round, previous=round.previous[:2])).hidden
    assert (fewer - hidden[:2]).abs().amax(-1).min() > 1e-4


def test_a_zero_b_leaves_every_bit() -> None:
    config = tiny_config()
    weights, adapter = tiny_weights(config), initialize_adapter(config, 3, seed=23)
    for index in range(4):
        round = random_batch(config, 4).round(index)
        native, adapted = (
            reference_drafter(config, weights).forward(round),
            reference_drafter(config, weights, adapter).forward(round),
        )
        assert torch.equal(native.hidden, adapted.hidden)
        assert torch.equal(native.logits, adapted.logits)
        assert torch.equal(native.confidence, adapted.confidence)


def test_padding_is_not_an_attended_row() -> None:
    """A round with no context equals a round whose window is so far away in mass that it cannot matter."""
    config = tiny_config(window=1)
    wide = tiny_config(window=7)
    weights = tiny_weights(config)
    round = round_at(wide, 0)
    assert len(round.positions) == 0
    torch.testing.assert_close(
        reference_drafter(config, weights).forward(round).hidden, reference_drafter(wide, weights).forward(round).hidden
    )


def test_gradients_are_the_slope() -> None:
    """The directional derivative by autograd is the difference quotient, for adapter and weights together."""
    config = tiny_config(swiglu_limit=10.0)
    weights, adapter = tiny_weights(config), tiny_adapter(config)
    round = random_batch(config, 9).round(8)
    moving = {name: weights[name] for name in ("mtp.0.hc_attn_fn", "mtp.1.attn.attn_sink", "mtp.0.ffn.gate.weight")}
    moving |= {name: adapter[name] for name in adapter if "wo_a" in name or "main_proj" in name}
    generator = torch.Generator().manual_seed(5)
    direction = {name: torch.randn(t.shape, generator=generator) / t.numel() ** 0.5 for name, t in moving.items()}
    probe = torch.randn(config.block_size, config.vocab_size, generator=generator)

    def value(step: float | torch.Tensor) -> torch.Tensor:
        moved = {name: moving[name] + step * direction[name] for name in moving}
        reference = reference_drafter(
            config,
            weights | {n: t for n, t in moved.items() if n in weights},
            adapter | {n: t for n, t in moved.items() if n in adapter},
        )
        return (reference.forward(round).logits * probe).sum()

    step = torch.zeros((), requires_grad=True)
    (slope,) = torch.autograd.grad(value(step), step)
    with torch.no_grad():
        quotient = (value(2e-3) - value(-2e-3)) / 4e-3
    torch.testing.assert_close(slope, quotient, rtol=2e-2, atol=1e-2)
    assert slope.abs() > 0.1


def test_the_teacher_is_the_head_on_the_final_hidden() -> None:
    generator = torch.Generator().manual_seed(0)
    head, hidden = torch.randn(50, 16, generator=generator), torch.randn(2, 3, 16, generator=generator).bfloat16()
    torch.testing.assert_close(teacher_logits(head, hidden), hidden.float() @ head.T)
    assert teacher_logits(head, hidden).dtype == torch.float32


def test_a_bad_drafter_is_refused_before_it_computes() -> None:
    config = tiny_config()
    weights, adapter = tiny_weights(config), tiny_adapter(config)
    with pytest.raises(Refused, match=r"mtp\.1\.attn\.wkv\.weight"):
        reference_drafter(config, {n: t for n, t in weights.items() if n != "mtp.1.attn.wkv.weight"})
    with pytest.raises(Refused, match=r"mtp\.1\.attn\.wkv\.lora_B"):
        reference_drafter(config, weights, {n: t for n, t in adapter.items() if n != "mtp.1.attn.wkv.lora_B"})
