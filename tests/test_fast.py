"""FAST against REF: logits, losses, gradients; the fused head against plain autograd; negative controls."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from d2lib.drafter.batch import BlockBatch
from d2lib.drafter.deepseek.config import DeepseekConfig
from d2lib.drafter.family import fast_drafter, reference_drafter
from d2lib.drafter.head_loss import fused_head_loss
from d2lib.drafter.objectives import OBJECTIVES, Objective, SlotStatistics, deepspec_mixture
from d2lib.drafter.reference import Reference, teacher_logits
from tests.tiny import random_batch, tiny_adapter, tiny_config, tiny_weights

ALL: dict[str, Objective] = {**OBJECTIVES, "mixture": deepspec_mixture}
TOLERANCE = 1e-5


def relative(found: Tensor, expected: Tensor) -> float:
    """‖found - expected‖ / ‖expected‖ in float64."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def plain_statistics(logits: Tensor, teacher: Tensor, target: Tensor) -> SlotStatistics:
    """The statistics from whole logit tensors, in float64."""
    log_q, log_p = logits.double().log_softmax(-1), teacher.double().log_softmax(-1)
    p = log_p.exp()
    return SlotStatistics(
        (p * (log_p - log_q)).sum(-1),
        (p - log_q.exp()).abs().sum(-1) / 2,
        -log_q.gather(-1, target.unsqueeze(-1)).squeeze(-1),
    )


def reference_loss(reference: Reference, batch: BlockBatch, objective: Objective) -> Tensor:
    """Mean over the batch of REF's block losses, one round at a time."""
    losses = []
    for index in range(len(batch)):
        round_ = batch.round(index)
        teacher = teacher_logits(reference.weights["head.weight"], round_.teacher_hidden)
        teacher = torch.where(round_.valid.unsqueeze(-1), teacher, 0.0)
        target = torch.where(round_.valid, round_.target, 0)
        statistics = plain_statistics(reference.forward(round_).logits, teacher, target)
        one = SlotStatistics(*(value.unsqueeze(0) for value in (statistics.kl, statistics.tv, statistics.ce)))
        losses.append(objective(one, round_.valid.unsqueeze(0)))
    return torch.cat(losses).mean()


def gradients(loss: Tensor, leaves: dict[str, Tensor]) -> Tensor:
    parts = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return torch.cat(
        [
            (torch.zeros_like(leaf) if g is None else g).flatten().double()
            for g, leaf in zip(parts, leaves.values(), strict=True)
        ]
    )


def leaves_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}


FORMS = [
    {},
    {"hc_form": "per_motion"},
    {"q_head_norm": True},
]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("name", ALL)
def test_losses_and_adapter_gradients_are_the_references(name: str, form: dict[str, object]) -> None:
    config = tiny_config(**form)
    weights, batch = tiny_weights(config, 1), random_batch(config, 9, seed=2)
    adapter = leaves_of(tiny_adapter(config))
    slow = reference_loss(reference_drafter(config, weights, adapter), batch, ALL[name])
    fast = fast_drafter(config, weights, adapter).loss(batch, ALL[name])
    assert relative(fast.loss.detach(), slow.detach()) <= TOLERANCE
    assert relative(gradients(fast.loss, adapter), gradients(slow, adapter)) <= TOLERANCE


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_logits_confidence_and_weight_gradients_are_the_references(form: dict[str, object]) -> None:
    config = tiny_config(**form)
    weights, batch = leaves_of(tiny_weights(config, 3)), random_batch(config, 7, seed=4)
    fast, slow = fast_drafter(config, weights), reference_drafter(config, weights)
    hidden = fast.hidden(batch)
    outputs = [slow.forward(batch.round(i)) for i in range(len(batch))]
    logits, confidence = fast.logits(hidden, batch), fast.confidence(hidden, batch.previous)
    expected = torch.stack([o.logits for o in outputs])
    assert relative(logits.detach(), expected.detach()) <= TOLERANCE
    assert relative(confidence.detach(), torch.stack([o.confidence for o in outputs]).detach()) <= TOLERANCE
    probe = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
    assert relative(gradients((logits * probe).mean(), weights), gradients((expected * probe).mean(), weights)) <= 2e-5


@pytest.mark.parametrize("change", ["tap", "position", "anchor"])
def test_a_shifted_input_is_noticed(change: str) -> None:
    config = tiny_config()
    weights, batch = tiny_weights(config, 1), random_batch(config, 6, seed=2)
    wrong = {
        "tap": replace(batch, taps=batch.taps.roll(1, 0)),
        "position": replace(batch, positions=batch.positions + 1),
        "anchor": replace(batch, anchor=batch.anchor + 1),
    }[change]
    fast = fast_drafter(config, weights)
    expected = torch.stack(
        [reference_drafter(config, weights).forward(batch.round(i)).logits for i in range(len(batch))]
    )
    assert relative(fast.logits(fast.hidden(wrong), wrong), expected) > 100 * TOLERANCE


def head_case(blocks: int, slots: int, dim: int, vocabulary: int, seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    valid = torch.arange(slots) < torch.randint(1, slots + 1, (blocks, 1), generator=g)
    teacher = normal(blocks, slots, dim)
    teacher[~valid] = float("nan")  # rows past the end hold anything
    return {
        "x": normal(blocks, slots, dim),
        "head": normal(vocabulary, dim) / dim**0.5,
        "markov_rows": normal(blocks, slots, 4),
        "markov_head": normal(vocabulary, 4) / 4,
        "teacher_hidden": teacher,
        "target": torch.randint(vocabulary, (blocks, slots), generator=g),
        "valid": valid,
    }


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("tile", "chunk"), [(1, 7), (3, 64), (100, 4096)])
def test_the_fused_head_is_plain_autograd(name: str, tile: int, chunk: int) -> None:
    case = head_case(8, 5, 16, 50)
    trained = {key: case[key].clone().requires_grad_() for key in ("x", "markov_rows", "markov_head")}
    fused = fused_head_loss(**{**case, **trained}, objective=ALL[name], tile_blocks=tile, chunk=chunk)
    y, rows, head = (case[key].double().requires_grad_() for key in trained)
    logits = y @ case["head"].double().t() + rows @ head.t()
    teacher = torch.where(case["valid"].unsqueeze(-1), case["teacher_hidden"], 0.0).double() @ case["head"].double().t()
    loss = ALL[name](plain_statistics(logits, teacher, case["target"]), case["valid"]).mean()
    assert relative(fused.loss.detach(), loss.detach()) <= TOLERANCE
    found, expected = torch.autograd.grad(fused.loss, trained.values()), torch.autograd.grad(loss, (y, rows, head))
    for one, other in zip(found, expected, strict=True):
        assert relative(one, other) <= TOLERANCE
    assert not found[0][~case["valid"]].any()
    x = case["x"].clone().requires_grad_()  # as in training, where the Markov tables are frozen
    frozen = fused_head_loss(**{**case, "x": x}, objective=ALL[name], tile_blocks=tile, chunk=chunk)
    assert torch.equal(torch.autograd.grad(frozen.loss, x)[0], found[0])
    assert fused.count.tolist() == case["valid"].sum(0).tolist()


def test_a_perfect_drafter_costs_nothing() -> None:
    case = head_case(4, 5, 8, 30)
    case["valid"] = torch.ones(4, 5, dtype=torch.bool)
    case["teacher_hidden"] = case["x"].clone()
    case["markov_head"].zero_()
    for name, cost in {"KL": 0.0, "TVD": 0.0, "ACE": 0.0}.items():
        assert fused_head_loss(**case, objective=ALL[name]).loss.item() == pytest.approx(cost, abs=1e-6)


def test_ace_is_one_minus_the_expected_accepted_share() -> None:
    alpha = torch.tensor([[0.5, 0.5, 1.0], [0.9, 0.0, 0.7]], dtype=torch.float64)
    zero = torch.zeros_like(alpha)
    statistics = SlotStatistics(zero, 1 - alpha, zero)
    whole = torch.ones(2, 3, dtype=torch.bool)
    assert ALL["ACE"](statistics, whole).tolist() == pytest.approx([1 - (0.5 + 0.25 + 0.25) / 3, 1 - 0.9 / 3])
    short = torch.tensor([[True, True, False], [True, False, False]])
    assert ALL["ACE"](statistics, short).tolist() == pytest.approx([1 - 0.75 / 2, 1 - 0.9])


class Largest(TorchDispatchMode):
    """Records the largest tensor that an operation made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.numel = max(self.numel, leaf.numel())
        return result


def test_the_head_never_holds_all_logits() -> None:
    sizes = []
    for blocks in (16, 64):
        case = head_case(blocks, 5, 8, 3000)
        case["x"].requires_grad_()
        with Largest() as largest:
            fused_head_loss(**case, objective=deepspec_mixture, tile_blocks=4).loss.backward()
        sizes.append(largest.numel)
    assert sizes[0] == sizes[1] == 4 * 5 * 3000


def test_masked_slots_hold_anything() -> None:
    config: DeepseekConfig = tiny_config()
    weights, batch = tiny_weights(config, 1), random_batch(config, 6, seed=5)
    valid = torch.arange(config.block_size) < torch.tensor([[1], [2], [3], [config.block_size], [1], [2]])
    batch = replace(batch, valid=valid)
    other = replace(batch, target=torch.where(valid, batch.target, 0))
    drafter = fast_drafter(config, weights)
    assert torch.equal(drafter.loss(batch, ALL["ACE"]).loss, drafter.loss(other, ALL["ACE"]).loss)
