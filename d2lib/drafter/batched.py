"""Batched REF: many rounds at once, with the same bits as REF one by one.

The steps are `Reference`'s own, over many rounds. A step's result for a row does not depend on the rows beside it
(`kernels` says why), so rounds may be stacked in any number and order, and the key-value rows of a context row that
many rounds see may be computed once. Where the platform's library breaks this, `self_check` says so; then use
`Reference`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from d2lib.drafter.batch import BlockBatch
from d2lib.drafter.deepseek.config import DrafterConfig
from d2lib.drafter.deepseek.reference import Reference

_CHUNK_ROUNDS = 256
_CHUNK_LOGITS = 1 << 25
"""Rounds are stacked up to the first number, fewer where their logits would exceed the second."""

_PROBES = 8


@dataclass(frozen=True)
class BatchOutput:
    """B rounds: hidden [B, K, dim], teacher-forced logits [B, K, V], confidence [B, K], greedy drafts [B, K] int64."""

    hidden: Tensor
    logits: Tensor
    confidence: Tensor
    drafts: Tensor


class BatchedReference:
    """A drafter that computes many rounds at once; every result is bit-equal to `Reference`'s.

    Args:
        config: sizes and switches.
        weights: fp32 tensors under their release names.
        adapter: LoRA of those weights, or None for the native drafter.
    """

    def __init__(
        self, config: DrafterConfig, weights: Mapping[str, Tensor], adapter: Mapping[str, Tensor] | None = None
    ) -> None:
        self.reference = Reference(config, weights, adapter)

    def forward_batch(self, batch: BlockBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden [B, K, dim], teacher-forced logits [B, K, V] and confidence [B, K]; differentiable."""
        reference = self.reference
        parts = []
        for rounds, hidden in self.hidden_parts(batch):
            previous = batch.previous[rounds]
            logits = reference.base_logits(hidden) + reference.markov_bias(previous)
            parts.append((hidden, logits, reference.confidence(hidden, previous)))
        hiddens, logits_, confidences = zip(*parts, strict=True)
        return torch.cat(hiddens), torch.cat(logits_), torch.cat(confidences)

    @torch.no_grad()
    def draft_batch(self, batch: BlockBatch, k: int | None = None) -> Tensor:
        """The first k (all by default) drafted tokens of every round, greedy: [B, k] int64."""
        reference = self.reference
        drafts = [
            reference.greedy(reference.base_logits(hidden), batch.anchor_token[rounds], k)
            for rounds, hidden in self.hidden_parts(batch)
        ]
        return torch.cat(drafts)

    @torch.no_grad()
    def run_batch(self, batch: BlockBatch) -> BatchOutput:
        """Teacher-forced results and drafts from one pass of the backbone."""
        reference = self.reference
        parts = []
        for rounds, hidden in self.hidden_parts(batch):
            previous, base = batch.previous[rounds], reference.base_logits(hidden)
            drafts = reference.greedy(base, batch.anchor_token[rounds], None)
            logits = base + reference.markov_bias(previous)
            parts.append((hidden, logits, reference.confidence(hidden, previous), drafts))
        return BatchOutput(*(torch.cat(part) for part in zip(*parts, strict=True)))

    def hidden_parts(self, batch: BlockBatch) -> Iterator[tuple[slice, Tensor]]:
        """Chunks of rounds and their y [chunk, K, dim]; a context row's keys and values are computed once."""
        reference = self.reference
        rows = reference.context_kv(reference.main_x(batch.taps), batch.positions)
        if not len(batch.positions):  # no round sees any row, yet the padding points at one
            rows = [kv.new_zeros(1, kv.shape[1]) for kv in rows]
        c = reference.config
        chunk = max(1, min(_CHUNK_ROUNDS, _CHUNK_LOGITS // (c.block_size * c.vocab_size)))
        for start in range(0, len(batch), chunk):
            rounds = slice(start, min(start + chunk, len(batch)))
            seen = batch.context[rounds]
            context = [kv.index_select(0, seen.flatten()).view(*seen.shape, -1) for kv in rows]
            yield (
                rounds,
                reference.backbone(
                    batch.anchor_token[rounds], batch.anchor[rounds], context, batch.context_valid[rounds]
                ),
            )


@torch.no_grad()
def self_check(reference: Reference, batch: BlockBatch) -> bool:
    """Whether batched REF gives REF's bits on this machine, for this drafter and these rounds.

    Rounds spread over the batch are computed one by one; then within the whole batch, within the batch in another
    order, within a short tail and alone. Hidden states, logits, confidences and drafts must agree in every bit.

    Args:
        reference: the drafter.
        batch: rounds of the kind that will be scored, at least one.
    """
    drafter = BatchedReference(reference.config, reference.weights, reference.adapter or None)
    count = len(batch)
    probes = torch.linspace(0, count - 1, min(_PROBES, count)).long()
    rounds = [batch.round(int(probe)) for probe in probes]
    outputs = [reference.forward(round) for round in rounds]
    expected = BatchOutput(
        torch.stack([output.hidden for output in outputs]),
        torch.stack([output.logits for output in outputs]),
        torch.stack([output.confidence for output in outputs]),
        torch.stack([reference.draft(round) for round in rounds]),
    )
    other_order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    for order in (torch.arange(count), other_order, probes.flip(0), probes[-1:]):
        found = drafter.run_batch(select_rounds(batch, order))
        for place, probe in enumerate(order.tolist()):
            for index in (probes == probe).nonzero().flatten().tolist():
                if not all(
                    _same_bits(getattr(found, name)[place], getattr(expected, name)[index])
                    for name in ("hidden", "logits", "confidence", "drafts")
                ):
                    return False
    return True


def select_rounds(batch: BlockBatch, rounds: Tensor) -> BlockBatch:
    """The rounds at these indices, in this order; their rows stay shared."""
    per_round = ("context", "context_valid", "anchor", "anchor_token", "previous", "target", "valid", "teacher")
    return replace(batch, **{name: getattr(batch, name)[rounds] for name in per_round})


def _same_bits(left: Tensor, right: Tensor) -> bool:
    bits = torch.int32 if left.dtype == torch.float32 else left.dtype
    return torch.equal(left.contiguous().view(bits), right.contiguous().view(bits))
