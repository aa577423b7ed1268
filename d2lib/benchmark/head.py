"""Head and loss: the fused form against the plain one and against its own floor, three matrix products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from d2lib.benchmark.measure import CPU, Place, Row, in_child, medians
from d2lib.drafter.head_loss import fused_head_loss
from d2lib.drafter.objectives import Objective, ace, deepspec_mixture, kl, tvd
from d2lib.errors import Unexpected
from d2lib.train.arms import slot_statistics

LOSSES: dict[str, Objective] = {"0.1 CE + 0.9 TV": deepspec_mixture, "KL": kl, "TVD": tvd, "ACE": ace}

TOLERANCES = {"0.1 CE + 0.9 TV": 2e-3, "TVD": 2e-3, "ACE": 2e-3}
"""Where it is not 1e-5: the gradient of TV jumps where p = q (see d2lib.benchmark.drafting)."""


@dataclass(frozen=True)
class HeadCase:
    """Random hidden states of B blocks of K slots, and the frozen heads that they meet."""

    x: Tensor
    head: Tensor
    markov_rows: Tensor
    markov_head: Tensor
    teacher_hidden: Tensor
    target: Tensor
    valid: Tensor

    @classmethod
    def random(
        cls, blocks: int, *, vocabulary: int, dim: int, slots: int = 5, rank: int = 64, device: str = "cpu"
    ) -> HeadCase:
        """Logits of a few nats' spread."""
        generator = torch.Generator().manual_seed(23)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        made = {
            "x": draw(blocks, slots, dim),
            "head": draw(vocabulary, dim).mul_(2 * dim**-0.5),
            "markov_rows": draw(blocks, slots, rank),
            "markov_head": draw(vocabulary, rank).mul_(rank**-0.5),
            "teacher_hidden": draw(blocks, slots, dim),
            "target": torch.randint(vocabulary, (blocks, slots), generator=generator),
            "valid": torch.ones(blocks, slots, dtype=torch.bool),
        }
        case = cls(**{name: tensor.to(device) for name, tensor in made.items()})
        case.x.requires_grad_()
        return case

    def fused(self, objective: Objective) -> Tensor:
        """The gradient by x, fused."""
        self.x.grad = None
        measured = fused_head_loss(
            self.x,
            self.head,
            self.markov_rows,
            self.markov_head,
            self.teacher_hidden,
            self.target,
            self.valid,
            objective,
        )
        measured.loss.backward()  # type: ignore[no-untyped-call]
        return _gradient(self.x)

    def plain(self, objective: Objective) -> Tensor:
        """The same through both logit tensors and autograd."""
        self.x.grad = None
        student = self.x @ self.head.T + self.markov_rows @ self.markov_head.T
        teacher = self.teacher_hidden @ self.head.T
        objective(slot_statistics(student, teacher, self.target), self.valid).mean().backward()  # type: ignore[no-untyped-call]
        return _gradient(self.x)

    @torch.no_grad()
    def products(self) -> Tensor:
        """The floor: the three products that no form can do without."""
        x, hidden = (values.flatten(0, 1) for values in (self.x.detach(), self.teacher_hidden))
        torch.mm(hidden, self.head.t())
        return torch.mm(torch.mm(x, self.head.t()), self.head)


def _gradient(x: Tensor) -> Tensor:
    if x.grad is None:
        raise Unexpected("a loss gave no gradient")
    return x.grad


def measure_head(
    *, vocabulary: int, dim: int, blocks: int, repeats: int, threads: int, place: Place = CPU
) -> list[Row]:
    """Time of every loss, its largest error against the plain form, and the memory in children of their own; fp32."""
    case = HeadCase.random(blocks, vocabulary=vocabulary, dim=dim, device=place.device)
    at = f"V {vocabulary:,}, dim {dim:,}, {blocks} blocks × 5 slots, fp32 on {place.device}"
    rows = []
    for name, objective in LOSSES.items():
        found, expected = case.fused(objective).clone(), case.plain(objective)
        error = float((found - expected).norm() / expected.norm())
        sides: dict[str, Callable[[], object]] = {
            "fused": lambda objective=objective: case.fused(objective),  # type: ignore[misc]
            "plain": lambda objective=objective: case.plain(objective),  # type: ignore[misc]
            "floor": case.products,
        }
        seconds = medians(sides, repeats)
        what = f"head + {name}"
        rows += [
            place.row(what, at, "plain form", seconds["fused"] / seconds["plain"], "of its time", "<=", 0.75),
            place.row(what, at, "three products", seconds["fused"] / seconds["floor"], "of their time", "<=", 1.3),
            Row(what, at, "plain form", error, "relative error of the gradient", "<=", TOLERANCES.get(name, 1e-5)),
        ]
    for factor in (1, 4):
        figures = in_child(
            "head", blocks=blocks * factor, vocabulary=vocabulary, dim=dim, threads=threads, device=place.device
        )
        row = f"{blocks * factor} blocks, else the same"
        rows.append(
            place.row("head + 0.1 CE + 0.9 TV", row, "before the call", figures["extra"], "MB at most", "<=", 300)
        )
    return rows
