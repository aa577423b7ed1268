"""Batched REF has REF's bits: any batch size, tail, order, chunk and number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import random_batch, tiny_adapter, tiny_config, tiny_weights

from d2lib.benchmark.cases import drafter_config
from d2lib.drafter import batched, reference
from d2lib.drafter.batch import BlockBatch
from d2lib.drafter.batched import BatchedReference, select_rounds, self_check
from d2lib.drafter.deepseek.config import DeepseekConfig
from d2lib.drafter.family import reference_drafter
from d2lib.drafter.reference import Reference
from d2lib.train.arms import ReferenceArm
from d2lib.train.recipe import RECIPES

WIDE = {"dim": 96, "head_dim": 32, "rope_head_dim": 16, "moe_inter_dim": 80, "vocab_size": 300, "noise_token_id": 299}
CONFIGS = {
    "v41": tiny_config(),
    "v4_quantized": tiny_config(hc_form="per_motion", q_head_norm=True, kv_quant="e4m3_ue8m0_64", head_dim=68),
    "wide": tiny_config(**WIDE, window=40, block_size=5, q_lora_rank=48, o_lora_rank=32, markov_rank=32),
}


@pytest.fixture
def threads() -> Iterator[None]:
    """Put the number of threads back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def drafter(config: DeepseekConfig, adapted: bool = True) -> tuple[Reference, BatchedReference]:
    weights, adapter = tiny_weights(config), tiny_adapter(config) if adapted else None
    return reference_drafter(config, weights, adapter), BatchedReference(config, weights, adapter)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int32) if tensor.is_floating_point() else tensor


def assert_same_bits(one_by_one: Reference, many: BatchedReference, batch: BlockBatch) -> None:
    with torch.no_grad():
        hidden, logits, confidence = many.forward_batch(batch)
        drafts, everything = many.draft_batch(batch), many.run_batch(batch)
        for index in range(len(batch)):
            round = batch.round(index)
            output, drafted = one_by_one.forward(round), one_by_one.draft(round)
            for expected, found, again in (
                (output.hidden, hidden, everything.hidden),
                (output.logits, logits, everything.logits),
                (output.confidence, confidence, everything.confidence),
                (drafted, drafts, everything.drafts),
            ):
                if expected is None:  # no confidence head
                    assert found is None
                    assert again is None
                    continue
                assert torch.equal(bits(expected), bits(found[index]))
                assert torch.equal(bits(expected), bits(again[index]))


@pytest.mark.parametrize(
    ("name", "count", "rounds"),
    [("v41", 1, 13), ("v4_quantized", 1, 8), ("wide", 1, 8), ("wide", 2, 4)],
    ids=lambda value: str(value),
)
def test_same_bits(name: str, count: int, rounds: int, threads: None) -> None:
    torch.set_num_threads(count)
    config = CONFIGS[name]
    assert_same_bits(*drafter(config, adapted=name != "wide"), random_batch(config, rounds, seed=count))


SHARED = drafter_config(
    dim=32,
    vocab_size=256,
    n_stages=2,
    target_layer_ids=(0, 1),
    window=16,
    n_heads=2,
    head_dim=16,
    rope_head_dim=8,
    q_lora_rank=16,
    o_lora_rank=16,
    moe_inter_dim=32,
    hc_mult=2,
    hc_sinkhorn_iters=3,
)
"""Sizes at which the library shares a product between two threads, and orders its sums otherwise then."""


@pytest.mark.parametrize("config", [CONFIGS["wide"], SHARED], ids=["wide", "shared"])
def test_the_number_of_threads_does_not_change_a_bit(config: DeepseekConfig, threads: None) -> None:
    _, many = drafter(config)
    outputs, alone, gradients = [], [], []
    for count in (1, 2):
        torch.set_num_threads(count)
        batch = random_batch(config, 70)
        outputs.append(many.run_batch(batch))
        alone.append(many.reference.forward(batch.round(3)).logits)
        adapter = {name: tensor.detach().clone().requires_grad_() for name, tensor in tiny_adapter(config).items()}
        ReferenceArm(config, tiny_weights(config), adapter, RECIPES["KL"]).accumulate(random_batch(config, 20))
        gradients.append(torch.cat([tensor.grad.flatten() for _, tensor in sorted(adapter.items())]))
        assert torch.get_num_threads() == count  # and it is put back
    for name in ("hidden", "logits", "confidence", "drafts"):
        assert torch.equal(bits(getattr(outputs[0], name)), bits(getattr(outputs[1], name)))
    assert torch.equal(bits(alone[0]), bits(alone[1]))
    assert torch.equal(bits(gradients[0]), bits(gradients[1]))


@given(data=st.data(), chunk=st.integers(1, 40))
@settings(max_examples=12, deadline=None)
def test_any_selection_order_and_chunk_gives_the_same_bits(data: st.DataObject, chunk: int) -> None:
    config = CONFIGS["v41"]
    _, many = drafter(config)
    batch = random_batch(config, 40, seed=7)
    whole = many.run_batch(batch)
    order = torch.tensor(data.draw(st.lists(st.integers(0, 39), min_size=1, max_size=40)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batched, "_CHUNK_ROUNDS", chunk)
        part = many.run_batch(select_rounds(batch, order))
    for name in ("hidden", "logits", "confidence", "drafts"):
        assert torch.equal(bits(getattr(part, name)), bits(getattr(whole, name)[order]))


def test_rounds_without_any_context() -> None:
    config = tiny_config()
    one_by_one, many = drafter(config)
    batch = random_batch(config, 1)
    assert len(batch.positions) == 0
    assert_same_bits(one_by_one, many, batch)


def test_a_few_drafts_are_the_first() -> None:
    config = tiny_config()
    _, many = drafter(config)
    batch = random_batch(config, 5)
    assert torch.equal(many.draft_batch(batch, 2), many.draft_batch(batch)[:, :2])


def test_a_wide_vocabulary_makes_smaller_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config()
    one_by_one, many = drafter(config)
    monkeypatch.setattr(batched, "_CHUNK_LOGITS", 1)
    assert_same_bits(one_by_one, many, random_batch(config, 3))


def test_gradients_are_the_sum_of_the_rounds() -> None:
    config = tiny_config()
    weights, adapter = tiny_weights(config), tiny_adapter(config)
    for tensor in adapter.values():
        tensor.requires_grad_()
    batch = random_batch(config, 6)
    probe = torch.randn(6, config.block_size, config.vocab_size, generator=torch.Generator().manual_seed(1))
    together = (BatchedReference(config, weights, adapter).forward_batch(batch)[1] * probe).sum()
    found = torch.autograd.grad(together, list(adapter.values()))
    one_by_one = reference_drafter(config, weights, adapter)
    alone = sum((one_by_one.forward(batch.round(index)).logits * probe[index]).sum() for index in range(6))
    for name, ours, expected in zip(adapter, found, torch.autograd.grad(alone, list(adapter.values())), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-4, msg=name)
        assert expected.abs().max() > 0


class TestSelfCheck:
    @pytest.mark.parametrize("rounds", [1, 2, 30])
    def test_it_passes_here(self, rounds: int) -> None:
        config = CONFIGS["v41"]
        assert self_check(drafter(config)[0], random_batch(config, rounds))

    def test_it_sees_a_product_whose_bits_depend_on_the_neighbours(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Negative control: a library that picks another kernel for many rows is found out."""
        config = CONFIGS["v41"]
        honest = reference.linear

        def by_shape(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            product = honest(x, weight)
            return torch.nextafter(product, product + 1) if x.numel() // x.shape[-1] > 64 else product

        monkeypatch.setattr(reference, "linear", by_shape)
        assert not self_check(drafter(config)[0], random_batch(config, 30))

    @pytest.mark.parametrize("field", ["hidden", "logits", "confidence", "drafts"])
    def test_it_compares_every_output(self, field: str, monkeypatch: pytest.MonkeyPatch) -> None:
        config = CONFIGS["v41"]
        honest = BatchedReference.run_batch

        def changed(self: BatchedReference, batch: BlockBatch) -> batched.BatchOutput:
            output = honest(self, batch)
            value = getattr(output, field)
            if len(batch) == 30:
                value[-1, 0] = (
                    value[-1, 0] + 1 if field == "drafts" else torch.nextafter(value[-1, 0], 1 + value[-1, 0])
                )
            return output

        monkeypatch.setattr(BatchedReference, "run_batch", changed)
        assert not self_check(drafter(config)[0], random_batch(config, 30))
