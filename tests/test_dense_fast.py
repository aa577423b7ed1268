"""FAST of the dense family against REF: logits, losses, gradients, for every switch; what it refuses; what it holds."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from d2lib.drafter.batch import BlockBatch
from d2lib.drafter.batched import BatchedReference
from d2lib.drafter.dense import attention
from d2lib.drafter.dense.config import DenseConfig
from d2lib.drafter.dense.fast import DenseFast, context_spans
from d2lib.drafter.objectives import OBJECTIVES, deepspec_mixture
from d2lib.errors import Refused
from d2lib.train.arms import slot_statistics
from tests.test_dense_attention import Held
from tests.test_fast import gradients, leaves_of, relative
from tests.tiny_dense import ROPES, dense_adapter, dense_batch, dense_config, dense_weights

TOLERANCE = 1e-5

LAYERS = {
    "full": ("full_attention", "full_attention"),
    "sliding": ("sliding_attention", "sliding_attention"),
    "mixed": ("full_attention", "sliding_attention"),
}
HEADS: dict[str, dict[str, Any]] = {
    "none": {"markov_rank": 0},
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
}


def join(parts: list[BlockBatch]) -> BlockBatch:
    """One batch over the sequences of several."""
    width = max(part.context.shape[1] for part in parts)
    fields: dict[str, list[Tensor]] = {name: [] for name in BlockBatch.__dataclass_fields__}
    rows = taught = 0
    for part in parts:
        missing = width - part.context.shape[1]
        context = F.pad(torch.where(part.context_valid, part.context + rows, 0), (missing, 0))
        shifted = {
            "context": context,
            "context_valid": F.pad(part.context_valid, (missing, 0)),
            "teacher": part.teacher + taught,
        }
        for name, values in fields.items():
            values.append(shifted.get(name, getattr(part, name)))
        rows, taught = rows + len(part.positions), taught + len(part.teacher_hidden)
    return BlockBatch(**{name: torch.cat(values) for name, values in fields.items()})


def batch_of(config: DenseConfig) -> BlockBatch:
    """Three sequences of differing lengths: blocks without context, short tails, and the blocks out of order."""
    return join(
        [dense_batch(config, blocks, seed, rows=rows) for blocks, seed, rows in ((5, 1, 21), (3, 2, 6), (4, 3, 12))]
    )


def reference_loss(reference: BatchedReference, batch: BlockBatch, name: str) -> Tensor:
    """Mean over blocks, from REF's full logits and autograd."""
    _, logits, _ = reference.forward_batch(batch)
    hidden = torch.where(batch.valid.unsqueeze(-1), batch.teacher_hidden[batch.teacher].float(), 0.0)
    teacher = (hidden @ reference.reference.head.T).double()
    statistics = slot_statistics(logits.double(), teacher, torch.where(batch.valid, batch.target, 0))
    return OBJECTIVES[name](statistics, batch.valid).mean()


COMBINATIONS = [
    pytest.param(layout, head, layers, causal, id=f"{layout}-{head}-{layers}-{'causal' if causal else 'both ways'}")
    for layout, head, layers, causal in product(("anchor_first", "one_plus_n"), HEADS, LAYERS, (False, True))
    if (layout, head) != ("one_plus_n", "rnn")  # is no drafter
]


@pytest.mark.parametrize(("layout", "head", "layers", "causal"), COMBINATIONS)
def test_logits_losses_and_adapter_gradients_are_the_references(
    layout: str, head: str, layers: str, causal: bool
) -> None:
    config = dense_config(
        layout=layout, layer_types=LAYERS[layers], causal=(causal,) * 2, sliding_window=5, **HEADS[head]
    )
    weights, batch, adapter = dense_weights(config, 1), batch_of(config), leaves_of(dense_adapter(config))
    fast, slow = DenseFast(config, weights, adapter), BatchedReference(config, weights, adapter)
    expected, logits, confidence = slow.forward_batch(batch)
    hidden = fast.hidden(batch)
    assert relative(hidden.detach(), expected.detach()) <= TOLERANCE
    assert relative(fast.logits(hidden, batch).detach(), logits.detach()) <= TOLERANCE
    guessed = fast.confidence(hidden, batch.previous)
    assert guessed is not None
    assert confidence is not None
    assert relative(guessed.detach(), confidence.detach()) <= TOLERANCE
    for name in ("KL", "ACE"):
        ours, theirs = fast.loss(batch, OBJECTIVES[name]).loss, reference_loss(slow, batch, name)
        assert relative(ours.detach(), theirs.detach()) <= TOLERANCE
        assert relative(gradients(ours, adapter), gradients(theirs, adapter)) <= TOLERANCE


SWITCHES: list[dict[str, Any]] = [
    {"attention_bias": True},
    *({"rope": ROPES[kind]} for kind in ("linear", "llama3", "yarn")),
    {"n_heads": 2, "n_kv_heads": 2, "confidence": False, "confidence_with_markov": False},
]


@pytest.mark.parametrize("switch", SWITCHES, ids=str)
@pytest.mark.parametrize("kind", ["vanilla", "rnn"])
def test_gradients_by_every_weight_are_the_references(kind: str, switch: dict[str, Any]) -> None:
    config = dense_config(markov_head_type=kind, **switch)
    weights, batch = leaves_of(dense_weights(config, 3)), batch_of(config)
    fast, slow = DenseFast(config, weights), BatchedReference(config, weights)
    hidden = fast.hidden(batch)
    found, expected = fast.logits(hidden, batch), slow.forward_batch(batch)[1]
    probe = torch.randn(found.shape, generator=torch.Generator().manual_seed(0))
    assert relative(gradients((found * probe).mean(), weights), gradients((expected * probe).mean(), weights)) <= 2e-5


def test_the_trainers_sliding_rule_is_the_references() -> None:
    config = dense_config(layer_types=LAYERS["mixed"], causal=(False, True), sliding_window=5)
    weights, batch = dense_weights(config, 1), batch_of(config)
    fast, slow = DenseFast(config, weights), BatchedReference(config, weights)
    served = fast.hidden(batch)
    fast.sliding_rule = slow.reference.sliding_rule = "trainer"
    found = fast.hidden(batch)
    assert relative(found, slow.forward_batch(batch)[0]) <= TOLERANCE
    assert relative(found, served) > 100 * TOLERANCE


@pytest.mark.parametrize("change", ["rows", "channels", "tokens"])
def test_a_shifted_input_is_noticed(change: str) -> None:
    config = dense_config()
    weights, batch = dense_weights(config, 1), batch_of(config)
    wrong = {
        "rows": replace(batch, taps=batch.taps.roll(1, 0)),
        "channels": replace(batch, taps=batch.taps.roll(1, 1)),
        "tokens": replace(batch, anchor_token=batch.anchor_token.roll(1)),
    }[change]
    fast = DenseFast(config, weights)
    expected = BatchedReference(config, weights).forward_batch(batch)[1]
    assert relative(fast.logits(fast.hidden(wrong), wrong), expected) > 100 * TOLERANCE


def test_positions_count_only_by_their_differences() -> None:
    config = dense_config()
    weights, batch = dense_weights(config, 1), batch_of(config)
    fast = DenseFast(config, weights)
    later = replace(batch, positions=batch.positions + 40, anchor=batch.anchor + 40)
    assert relative(fast.hidden(later), fast.hidden(batch)) <= 5e-5


@pytest.mark.parametrize("change", ["order", "gap", "position"])
def test_rows_that_do_not_stand_side_by_side_are_refused(change: str) -> None:
    config = dense_config()
    batch = dense_batch(config, 6)
    block = int(batch.context_valid.sum(1).argmax())
    context, positions = batch.context.clone(), batch.positions.clone()
    if change == "order":
        context[block] = context[block].flip(0)
    elif change == "gap":
        context[block, -2] -= 1
    else:
        positions[-1] += 1
    with pytest.raises(Refused, match="do not stand side by side"):
        context_spans(replace(batch, context=context, positions=positions))


def test_a_batch_in_which_no_block_sees_a_row() -> None:
    config = dense_config()
    weights, batch = dense_weights(config, 1), dense_batch(config, 1)
    assert len(batch.positions) == 0
    expected = BatchedReference(config, weights).forward_batch(batch)[0]
    assert relative(DenseFast(config, weights).hidden(batch), expected) <= TOLERANCE


def test_bf16_products_stay_near() -> None:
    config = dense_config(attention_bias=True)
    weights, batch, adapter = dense_weights(config, 1), batch_of(config), leaves_of(dense_adapter(config))
    losses = [
        DenseFast(config, weights, adapter, dtype).loss(batch, deepspec_mixture).loss
        for dtype in (torch.bfloat16, torch.float32)
    ]
    assert 1e-5 < abs(float(losses[0].detach() / losses[1].detach()) - 1) < 0.05
    assert relative(*(gradients(loss, adapter) for loss in losses)) < 0.1


def test_an_updates_memory_grows_with_rows_plus_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SCORES", 1 << 13)
    config = dense_config(n_layers=1, n_kv_heads=1, head_dim=16)
    weights, adapter = dense_weights(config, 1), leaves_of(dense_adapter(config))
    fast = DenseFast(config, weights, adapter)

    def held(rows: int, blocks: int) -> int:
        batch = dense_batch(config, blocks, rows=rows)
        with Held() as most:
            fast.hidden(batch).sum().backward()  # type: ignore[no-untyped-call]
        return most.most

    a, b, c, d = (held(rows, blocks) for rows in (200, 600) for blocks in (6, 18))
    # a copy of a layer's keys and values for every block would take 2 · 16 · 4 bytes a row and block, at least twice
    assert (d - c - b + a) / (400 * 12) < 64
