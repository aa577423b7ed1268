"""FAST: the training path. The reference's steps over a whole batch, with the library's fastest kernels.

What makes it fast: what blocks read of a context row is computed once per batch, however many blocks see it; all
blocks run together; matrix products are as large as they come; head and loss never hold a [blocks, K, vocab] tensor
(`head_loss`). A family's `fast` module adds its backbone.

It means the same as `Reference` (losses, logits, gradients, to rounding) and has other bits. No verdict uses it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from d2lib.drafter.batch import BlockBatch, Context
from d2lib.drafter.config import DrafterConfig
from d2lib.drafter.head_loss import HeadLoss, fused_head_loss
from d2lib.drafter.objectives import Objective
from d2lib.drafter.reference import Reference


class FastDrafter(Reference):
    """A drafter over batches of blocks, differentiable by its adapter and by any weight that asks for a gradient.

    A family's FAST derives from this and from the family's `Reference`, in this order.

    Args:
        config: sizes and switches.
        weights: tensors under the family's names.
        adapter: LoRA of those weights, or None.
        compute_dtype: of the large products; norms, softmax, heads and the loss stay fp32.
    """

    def __init__(
        self,
        config: DrafterConfig,
        weights: Mapping[str, Tensor],
        adapter: Mapping[str, Tensor] | None = None,
        compute_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(config, weights, adapter)
        self.compute_dtype = compute_dtype

    def hidden(self, batch: BlockBatch) -> Tensor:
        """The backbone's hidden rows [B, K, dim] of every slot of the batch."""
        context = Context(self.context(batch.taps, batch.positions), batch.context, batch.context_valid)
        return self.backbone(batch.anchor_token, batch.anchor, context)

    def logits(self, hidden: Tensor, batch: BlockBatch) -> Tensor:
        """Teacher-forced logits [B, K, V] in full: for small vocabularies and for tests."""
        return self.add_markov(self.base_logits(hidden), self.latents(hidden, batch.previous))

    def loss(self, batch: BlockBatch, objective: Objective) -> HeadLoss:
        """The batch's loss: mean over blocks, differentiable by the adapter (the heads stay frozen)."""
        return self.head_loss(self.hidden(batch), batch, objective)

    def head_loss(self, hidden: Tensor, batch: BlockBatch, objective: Objective) -> HeadLoss:
        """The same from hidden [B, K, dim]; differentiable by it, by the last norm and by the Markov head."""
        y = self.head_rows(hidden)
        if self.markov is None:
            latents, markov_head = y.new_zeros(*y.shape[:-1], 0), self.head.new_zeros(len(self.head), 0)
        else:
            latents = self.markov.latents(y, batch.previous, self._linear_fp32)
            markov_head = self.markov.w2
        return fused_head_loss(
            y,
            self.head,
            latents,
            markov_head,
            batch.teacher_hidden[batch.teacher],
            batch.target,
            batch.valid,
            objective,
        )

    # The reference's kernels.

    def _linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x.to(self.compute_dtype), weight.to(self.compute_dtype)).float()

    def _linear_fp32(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    def _dot(self, x: Tensor, row: Tensor) -> Tensor:
        return x @ row

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return fast_rms_norm(x, self.config.norm_eps) * self.weights[f"{name}.weight"]


def fast_rms_norm(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean x² + eps) over the last axis, without a gain."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
