"""The two arms: one objective's gradient by the adapter, through FAST or through the reference's own arithmetic.

A pilot trains both on the same blocks in the same order from the same start. They share nothing between the batch and
the loss, so that their agreement says something: FAST goes through its fused head, REF through full logits and plain
autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, Protocol

import torch
from torch import Tensor

from d2lib.drafter.batch import BlockBatch
from d2lib.drafter.batched import BatchedReference
from d2lib.drafter.config import DrafterConfig
from d2lib.drafter.family import fast_drafter
from d2lib.drafter.head_loss import HeadLoss
from d2lib.drafter.kernels import one_thread
from d2lib.drafter.lora import Adapter
from d2lib.drafter.objectives import OBJECTIVES, SlotStatistics
from d2lib.drafter.reference import teacher_logits
from d2lib.drafter.weights import kept_dtypes
from d2lib.errors import Refused
from d2lib.train.recipe import Recipe

Backend = Literal["fast", "ref"]
Precision = Literal["fp32", "bf16"]
DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Precision → the type of FAST's large products, and of the frozen weights that only they read."""


class Arm(Protocol):
    """One way to compute a batch's loss and its gradient."""

    def accumulate(self, batch: BlockBatch) -> HeadLoss:
        """Add the gradient of the batch's loss (a mean over blocks) to the adapter's `.grad`; returns what it saw."""


class FastArm:
    """FAST: the training path."""

    def __init__(
        self,
        config: DrafterConfig,
        weights: Mapping[str, Tensor],
        adapter: Adapter,
        recipe: Recipe,
        precision: Precision = "fp32",
    ) -> None:
        dtype = DTYPES[precision]
        kept = kept_dtypes(config, dtype)
        # Once instead of in every update, to the same bits; nothing is copied that was loaded so.
        weights = {name: tensor.to(kept[name]) for name, tensor in weights.items()}
        self.drafter = fast_drafter(config, weights, adapter, dtype)
        self.objective = OBJECTIVES[recipe.objective]

    def accumulate(self, batch: BlockBatch) -> HeadLoss:
        """See Arm."""
        measured = self.drafter.loss(batch, self.objective)
        measured.loss.backward()  # type: ignore[no-untyped-call]
        return measured


class ReferenceArm:
    """REF, in its batched form, which has the same bits; the loss from full logits."""

    def __init__(
        self,
        config: DrafterConfig,
        weights: Mapping[str, Tensor],
        adapter: Adapter,
        recipe: Recipe,
        precision: Precision = "fp32",
    ) -> None:
        if precision != "fp32":
            raise Refused("the reference computes in fp32 only", expected="fp32", found=precision)
        self.drafter = BatchedReference(config, weights, adapter)
        self.head = self.drafter.reference.head
        self.objective = OBJECTIVES[recipe.objective]

    @one_thread()
    def accumulate(self, batch: BlockBatch) -> HeadLoss:
        """See Arm."""
        valid = batch.valid
        _, logits, _ = self.drafter.forward_batch(batch)
        hidden = torch.where(valid.unsqueeze(-1), batch.teacher_hidden[batch.teacher].float(), 0.0)
        statistics = slot_statistics(logits, teacher_logits(self.head, hidden), torch.where(valid, batch.target, 0))
        losses = self.objective(statistics, valid)
        loss = losses.mean()
        loss.backward()  # type: ignore[no-untyped-call]
        kl, tv, ce = (torch.where(valid, v.detach(), 0.0) for v in (statistics.kl, statistics.tv, statistics.ce))
        return HeadLoss(
            loss=loss.detach(),
            loss_sum=float(losses.detach().sum()),
            blocks=len(batch),
            kl=kl.sum(0),
            tv=tv.sum(0),
            ce=ce.sum(0),
            count=valid.sum(0),
            alpha=torch.where(valid, 1 - tv, 0.0),
        )


def slot_statistics(logits: Tensor, teacher: Tensor, target: Tensor) -> SlotStatistics:
    """Every slot's KL(p‖q), ½‖p - q‖₁ and -log q[target] from full logits.

    Args:
        logits: [B, K, V] the drafter's; the results are differentiable by them.
        teacher: [B, K, V] the target's. target: [B, K] int64.
    """
    log_q, log_p = logits.log_softmax(-1), teacher.log_softmax(-1)
    p = log_p.exp()
    return SlotStatistics(
        kl=(p * (log_p - log_q)).sum(-1),
        tv=0.5 * (p - log_q.exp()).abs().sum(-1),
        ce=-log_q.gather(-1, target.unsqueeze(-1)).squeeze(-1),
    )


ARMS: dict[Backend, Callable[[DrafterConfig, Mapping[str, Tensor], Adapter, Recipe, Precision], Arm]] = {
    "fast": FastArm,
    "ref": ReferenceArm,
}
"""Backend → how its arm is made."""
