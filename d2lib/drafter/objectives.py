"""Training objectives: one pure function per loss, all with the same signature.

Each takes the statistics of every slot and says what one block costs; the head loss differentiates it. p is the
target's distribution of a slot's token, q the drafter's, α = Σ min(p, q) = 1 - TV the chance that the slot is accepted
(Leviathan et al., arXiv 2211.17192).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor


@dataclass(frozen=True)
class SlotStatistics:
    """What the objectives are made of, each [B, K].

    kl: KL(p‖q) in nats. tv: ½‖p - q‖₁, in 0 … 1. ce: -log q of the committed token, in nats.
    """

    kl: Tensor
    tv: Tensor
    ce: Tensor


Objective: TypeAlias = Callable[[SlotStatistics, Tensor], Tensor]
"""(statistics, valid [B, K] bool) → the loss of every block [B]. Slots that are not valid cost nothing."""


def _mean_over_valid(values: Tensor, valid: Tensor) -> Tensor:
    return torch.where(valid, values, 0.0).sum(1) / valid.sum(1).clamp(min=1)


def kl(statistics: SlotStatistics, valid: Tensor) -> Tensor:
    """Mean over valid slots of KL(p‖q): the drafter learns the target's whole distribution."""
    return _mean_over_valid(statistics.kl, valid)


def tvd(statistics: SlotStatistics, valid: Tensor) -> Tensor:
    """Mean over valid slots of ½‖p - q‖₁ = 1 - α: the chance that a slot, seen alone, is refused."""
    return _mean_over_valid(statistics.tv, valid)


def ace(statistics: SlotStatistics, valid: Tensor) -> Tensor:
    """Accepted-chain expectation: 1 - (1/n)·Σ_k Π_{i≤k} α_i over the n valid slots.

    Σ_k Π_{i≤k} α_i is the expected number of accepted draft tokens when each is verified by the target's sampling.
    """
    alpha = torch.where(valid, 1 - statistics.tv, 0.0)
    return 1 - alpha.cumprod(1).sum(1) / valid.sum(1).clamp(min=1)


def deepspec_mixture(statistics: SlotStatistics, valid: Tensor) -> Tensor:
    """0.1·CE + 0.9·TV, mean over valid slots: DeepSpec's mixture, with which native drafters are pre-trained."""
    return _mean_over_valid(0.1 * statistics.ce + 0.9 * statistics.tv, valid)


OBJECTIVES: Mapping[str, Objective] = {"KL": kl, "TVD": tvd, "LR": kl, "ACE": ace}
"""Recipe name → its loss. LR is the KL loss under another schedule."""
