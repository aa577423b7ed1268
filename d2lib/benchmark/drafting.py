"""FAST against REF, context sharing, batched REF against REF one by one, and how an update's cost grows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from d2lib.benchmark.cases import random_adapter, random_blocks, random_weights
from d2lib.benchmark.measure import CPU, Place, Row, medians
from d2lib.drafter.batch import BlockBatch
from d2lib.drafter.batched import BatchedReference, select_rounds, self_check
from d2lib.drafter.config import DrafterConfig
from d2lib.drafter.deepseek.config import DeepseekConfig
from d2lib.drafter.dense.config import DenseConfig
from d2lib.drafter.family import fast_drafter, reference_drafter
from d2lib.drafter.fast import FastDrafter
from d2lib.drafter.lora import Adapter
from d2lib.drafter.objectives import OBJECTIVES
from d2lib.drafter.reference import Reference, teacher_logits
from d2lib.train.arms import slot_statistics

TOLERANCES = {"KL": 1e-5, "TVD": 2e-3, "LR": 1e-5, "ACE": 2e-3}
"""Relative error of losses and adapter gradients between FAST and REF in fp32. The gradient of TV jumps where p = q, so
that a last bit decides which side of a jump a vocabulary entry is on: with thousands of them, some are on the other."""

BF16_TOLERANCE = 0.1
"""The same with FAST's large products in bf16, which keeps 8 bits of every factor; 0.02 to 0.06 on a CPU."""


def fast_update(drafter: FastDrafter, batch: BlockBatch, objective: str) -> float:
    """Loss and adapter gradient of a batch, FAST."""
    measured = drafter.loss(batch, OBJECTIVES[objective])
    measured.loss.backward()  # type: ignore[no-untyped-call]
    return float(measured.loss.detach())


def reference_update(reference: Reference, batch: BlockBatch, objective: str, rounds: range | None = None) -> float:
    """The same in REF's literal arithmetic, one block after another."""
    total = 0.0
    for index in range(len(batch)) if rounds is None else rounds:
        block = batch.round(index)
        valid = block.valid.unsqueeze(0)
        teacher = teacher_logits(reference.head, block.teacher_hidden.float())
        statistics = slot_statistics(
            reference.forward(block).logits.unsqueeze(0), teacher.unsqueeze(0), block.target.unsqueeze(0)
        )
        loss = OBJECTIVES[objective](statistics, valid).sum() / len(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    return total


def _drafters(config: DrafterConfig, place: Place) -> tuple[Reference, FastDrafter, Adapter]:
    """Both drafters of one adapter, which asks for gradients."""
    weights = {name: tensor.to(place.device) for name, tensor in random_weights(config).items()}
    adapter = {n: t.detach().to(place.device).requires_grad_() for n, t in random_adapter(config).items()}
    return reference_drafter(config, weights, adapter), fast_drafter(config, weights, adapter, place.dtype), adapter


def measure_update(
    config: DrafterConfig,
    *,
    blocks: int,
    repeats: int,
    rows: int = 8192,
    literal: int | None = None,
    place: Place = CPU,
) -> list[Row]:
    """FAST's update against REF's on the same blocks: time, losses and gradients, for both ways to choose blocks.

    What bounds a dense drafter's ratio is attention: a block's scores with its own context are nobody else's.

    Args:
        literal: REF takes so many of the blocks, spread over them, and its time is scaled to all; losses and gradients
            are compared on those. None: all.
    """
    reference, fast, adapter = _drafters(config, place)
    found = []
    for stretch, how in ((1, "drawn one by one"), (min(32, blocks), "in stretches of 32")):
        batch = random_blocks(config, blocks, stretch=stretch, rows=rows).to(place.device)
        at = f"{blocks} blocks {how}, {len(batch.positions):,} rows, {_sizes(config)}, {place}"
        few = batch
        if literal is not None:
            few = select_rounds(batch, torch.arange(0, blocks, blocks // literal, device=batch.anchor.device))
        seconds = medians(
            {
                "fast": lambda batch=batch: fast_update(fast, batch, "KL"),  # type: ignore[misc]
                "ref": lambda few=few: reference_update(reference, few, "KL"),  # type: ignore[misc]
            },
            repeats,
        )
        ratio = seconds["ref"] / len(few) * blocks / seconds["fast"]
        # On a GPU, the ratio of the user's own procedure.
        gpu_bound = 47 if config.family == "deepseek" else None
        found.append(
            place.row(f"{_kind(config)}FAST update", at, "REF update", ratio, "times faster", ">=", 30, gpu_bound)
        )
        tolerances = TOLERANCES if place.dtype == torch.float32 else dict.fromkeys(TOLERANCES, BF16_TOLERANCE)
        for objective, tolerance in tolerances.items():
            error = _disagreement(reference, fast, few, adapter, objective)
            found.append(
                Row(
                    f"{_kind(config)}FAST update, {objective}",
                    at,
                    "REF update",
                    error,
                    "relative error",
                    "<=",
                    tolerance,
                )
            )
    return found


def _disagreement(
    reference: Reference, fast: FastDrafter, batch: BlockBatch, adapter: Adapter, objective: str
) -> float:
    """The larger of the relative errors of the loss and of the whole adapter gradient."""
    losses, gradients = [], []
    for side in ("ref", "fast"):
        for tensor in adapter.values():
            tensor.grad = None
        losses.append(
            reference_update(reference, batch, objective) if side == "ref" else fast_update(fast, batch, objective)
        )
        gradients.append(torch.cat([_gradient(tensor).flatten() for tensor in adapter.values()]))
    error = float((gradients[1] - gradients[0]).norm() / gradients[0].norm())
    return max(error, abs(losses[1] / losses[0] - 1))


def _gradient(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def measure_sharing(config: DrafterConfig, *, blocks: int, repeats: int, place: Place = CPU) -> list[dict[str, float]]:
    """Milliseconds a block of FAST's update as stretches grow from one block to `blocks`."""
    _, fast, _ = _drafters(config, place)
    stretches = [2**power for power in range(int(math.log2(blocks)) + 1)]
    batches = {str(stretch): random_blocks(config, blocks, stretch=stretch).to(place.device) for stretch in stretches}
    seconds = medians(
        {name: lambda batch=batch: fast_update(fast, batch, "KL") for name, batch in batches.items()},  # type: ignore[misc]
        repeats,
    )
    return [
        {
            "blocks per stretch": int(name),
            "context rows": len(batches[name].positions),
            "ms per block": 1000 * value / blocks,
        }
        for name, value in seconds.items()
    ]


def measure_scoring(
    config: DrafterConfig,
    *,
    rounds: int,
    literal: int,
    repeats: int,
    bound: float,
    rows: int = 8192,
    place: Place = CPU,
) -> list[Row]:
    """Batched REF over consecutive rounds against REF one by one: drafts and teacher-forced logits of every round.

    REF is timed on `literal` of the rounds, spread over them, and compared in bits on all of them.
    """
    weights = {name: tensor.to(place.device) for name, tensor in random_weights(config).items()}
    batched, reference = BatchedReference(config, weights), reference_drafter(config, weights)
    batch = random_blocks(config, rounds, stretch=min(50, rounds), rows=rows).to(place.device)

    def one_by_one(count: int) -> list[tuple[Tensor, Tensor]]:
        with torch.no_grad():
            blocks = [batch.round(index) for index in range(0, rounds, rounds // count)]
            return [(reference.forward(block).logits, reference.draft(block)) for block in blocks]

    seconds = medians({"batched": lambda: batched.run_batch(batch), "ref": lambda: one_by_one(literal)}, repeats)
    found, expected = batched.run_batch(batch), one_by_one(rounds)
    equal = sum(
        torch.equal(found.logits[index].view(torch.int32), logits.view(torch.int32))
        and torch.equal(found.drafts[index], drafts)
        for index, (logits, drafts) in enumerate(expected)
    )
    at = f"{rounds:,} rounds, {len(batch.positions):,} rows, {_sizes(config)}, fp32 on {place.device}"
    ratio = (seconds["ref"] / literal) / (seconds["batched"] / rounds)
    return [
        place.row(f"{_kind(config)}batched REF scoring", at, "REF one by one", ratio, "times faster", ">=", bound),
        place.row(
            f"{_kind(config)}batched REF scoring",
            at,
            "REF one by one",
            equal / rounds,
            "of rounds bit-equal",
            ">=",
            1.0,
        ),
        place.row(
            f"{_kind(config)}batched REF's self-check",
            at,
            "REF one by one",
            float(self_check(reference, batch)),
            "passes",
            ">=",
            1.0,
        ),
    ]


GROWTH: Mapping[str, tuple[int, ...]] = {
    "vocabulary": (1_000, 4_000, 16_000, 64_000, 130_000),
    "blocks": (32, 64, 128, 256, 512),
    "rows": (128, 512, 2_048, 8_192),
}

DENSE_GROWTH: Mapping[str, tuple[int, ...]] = {
    "vocabulary": (1_000, 4_000, 16_000, 64_000, 150_000),
    "blocks": (32, 64, 128, 256),
    "rows": (512, 1_024, 2_048, 4_096),
}


def measure_growth(
    make: Callable[..., DrafterConfig],
    *,
    repeats: int,
    growth: Mapping[str, tuple[int, ...]] = GROWTH,
    name: str = "",
    rows: int = 8192,
    place: Place = CPU,
) -> list[dict[str, float | str]]:
    """Seconds of one FAST update as one size grows and the others stay; rows are those of the sequence drawn from.

    Args:
        make: the drafter's configuration, given fields to change.
        name: what the sizes are called before their own names.
        rows: of the sequence while they stay.
    """
    points: list[dict[str, float | str]] = []
    for what, values in growth.items():
        sides = {}
        for value in values:
            config = make(vocab_size=value) if what == "vocabulary" else make()
            length = max(value, 300) if what == "rows" else rows
            _, fast, _ = _drafters(config, place)
            batch = random_blocks(config, value if what == "blocks" else 128, rows=length).to(place.device)
            sides[str(value)] = lambda fast=fast, batch=batch: fast_update(fast, batch, "KL")
        seconds = medians(sides, repeats)
        points += [{"size": f"{name}{what}", "value": int(v), "seconds": took} for v, took in seconds.items()]
    return points


def slope(points: list[tuple[float, float]]) -> float:
    """Exponent of cost against size over the largest two points: 1 where doubling the size doubles the cost."""
    (x1, y1), (x2, y2) = sorted(points)[-2:]
    return math.log(y2 / y1) / math.log(x2 / x1)


def _kind(config: DrafterConfig) -> str:
    """What a measure's name starts with: the family, but for the first."""
    return "" if isinstance(config, DeepseekConfig) else f"{config.family} "


def _sizes(config: DrafterConfig) -> str:
    kind = config.family
    if isinstance(config, DeepseekConfig):
        kind = f"window {config.window}, {config.n_stages} stages"
    elif isinstance(config, DenseConfig):
        kind = f"{config.n_layers} full layers, {config.block_size} slots"
    return f"{kind}, dim {config.dim}, V {config.vocab_size:,}"
