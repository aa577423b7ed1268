"""Batched REF of the dense family has REF's bits: every switch, width, selection and chunk, gradients or none."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_drafter_batched import assert_same_bits, bits
from tiny_dense import dense_adapter, dense_batch, dense_config, dense_configs, dense_weights

from d2lib.drafter import batched
from d2lib.drafter.batched import BatchedReference, padded_widths, select_rounds, self_check
from d2lib.drafter.dense.config import DenseConfig
from d2lib.drafter.dense.reference import DenseReference
from d2lib.drafter.family import reference_drafter

WIDE = {"dim": 48, "head_dim": 16, "n_heads": 6, "inter_dim": 64, "vocab_size": 300, "mask_token_id": 299}


def drafters(config: DenseConfig) -> tuple[DenseReference, BatchedReference]:
    weights, adapter = dense_weights(config), dense_adapter(config)
    reference = reference_drafter(config, weights, adapter)
    assert isinstance(reference, DenseReference)
    return reference, BatchedReference(config, weights, adapter)


@given(config=dense_configs(), rows=st.sampled_from([21, 50, 110]))
@settings(max_examples=25, deadline=None)
def test_same_bits_whatever_the_switches(config: DenseConfig, rows: int) -> None:
    assert_same_bits(*drafters(config), dense_batch(config, 9, rows=rows))


def test_same_bits_over_several_widths() -> None:
    config = dense_config(**WIDE, markov_head_type="rnn")
    batch = dense_batch(config, 24, rows=300)
    assert len(padded_widths(config, batch)) > 3
    reference, many = drafters(config)
    assert_same_bits(reference, many, batch)
    assert self_check(reference, batch)


def test_same_bits_without_any_context() -> None:
    config = dense_config()
    batch = dense_batch(config, 1)
    assert len(batch.positions) == 0
    assert_same_bits(*drafters(config), batch)


@given(data=st.data(), chunk=st.integers(1, 40))
@settings(max_examples=10, deadline=None)
def test_any_selection_order_and_chunk_gives_the_same_bits(data: st.DataObject, chunk: int) -> None:
    config = dense_config(layer_types=("sliding_attention", "full_attention"), sliding_window=9, causal=(True, False))
    _, many = drafters(config)
    batch = dense_batch(config, 40, rows=110)
    whole = many.run_batch(batch)
    order = torch.tensor(data.draw(st.lists(st.integers(0, 39), min_size=1, max_size=40)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batched, "_CHUNK_ROUNDS", chunk)
        part = many.run_batch(select_rounds(batch, order))
    for name in ("hidden", "logits", "confidence", "drafts"):
        assert torch.equal(bits(getattr(part, name)), bits(getattr(whole, name)[order]))


def test_gradients_do_not_change_the_bits_and_are_the_sum_of_the_rounds() -> None:
    config = dense_config()
    weights, adapter = dense_weights(config), dense_adapter(config)
    batch = dense_batch(config, 6, rows=50)
    with torch.no_grad():
        plain = BatchedReference(config, weights, adapter).forward_batch(batch)[1]
    for tensor in adapter.values():
        tensor.requires_grad_()
    logits = BatchedReference(config, weights, adapter).forward_batch(batch)[1]
    assert torch.equal(bits(logits.detach()), bits(plain))
    probe = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad((logits * probe).sum(), list(adapter.values()))
    one = reference_drafter(config, weights, adapter)
    alone = sum((one.forward(batch.round(index)).logits * probe[index]).sum() for index in range(6))
    for name, ours, expected in zip(adapter, found, torch.autograd.grad(alone, list(adapter.values())), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-4, msg=name)
        assert expected.abs().max() > 0


@pytest.mark.parametrize("rows", [0, 1, 32, 33, 64, 65, 96, 97, 128, 129, 4096, 5000])
def test_a_width_holds_its_rows_and_wastes_half_at_most(rows: int) -> None:
    width = dense_config().padded_rows(rows)
    assert rows <= width <= max(32, 2 * rows)
    assert dense_config().padded_rows(width) == width


def test_masked_rows_do_not_matter_whatever_they_hold() -> None:
    """Rows before a round's own are of other sequences or of none: what stands there never shows."""
    config = dense_config()
    reference, many = drafters(config)
    batch = dense_batch(config, 3, rows=21)
    assert not bool(batch.context_valid.all())
    noisy = torch.cat([1e3 * torch.randn(40, batch.taps.shape[1]).bfloat16(), batch.taps])
    shifted = type(batch)(
        **{
            **vars(batch),
            "taps": noisy,
            "positions": torch.cat([torch.arange(40), batch.positions]),
            "context": torch.where(batch.context_valid, batch.context + 40, 0),
        }
    )
    assert_same_bits(reference, many, shifted)
    assert torch.equal(bits(many.run_batch(shifted).logits), bits(many.run_batch(batch).logits))


def test_self_check_sees_a_bank_whose_bits_depend_on_the_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    from d2lib.drafter.dense import reference as module

    config = dense_config()
    reference, _ = drafters(config)
    honest = module.paired_products

    def by_count(left: list[torch.Tensor], right: list[torch.Tensor]) -> torch.Tensor:
        product = honest(left, right)
        return torch.nextafter(product, product + 1) if len(left) > config.n_kv_heads else product

    monkeypatch.setattr(module, "paired_products", by_count)
    assert not self_check(reference, dense_batch(config, 12, rows=50))
