"""Batched REF: many rounds at once, with the same bits as REF one by one.

The steps are `Reference`'s own, over many rounds. A step's result for a row does not depend on the rows beside it
(`kernels` says why), so rounds may be stacked in any number and order, and what many rounds read of a context row may
be computed once. Rounds that REF pads to one width go together. Where the platform's library breaks this, `self_check`
says so; then use `Reference`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from d2lib.drafter.batch import BlockBatch, Context
from d2lib.drafter.config import DrafterConfig
from d2lib.drafter.family import reference_drafter
from d2lib.drafter.kernels import one_thread
from d2lib.drafter.reference import Reference

_CHUNK_ROUNDS = 256
_CHUNK_LOGITS = 1 << 25
_CHUNK_CONTEXT = 1 << 25
"""Rounds are stacked up to the first number, fewer where their logits or what they see of the context would exceed the
others (of fp32 numbers)."""

_PROBES = 8


@dataclass(frozen=True)
class BatchOutput:
    """B rounds: hidden [B, K, dim], teacher-forced logits [B, K, V], confidence [B, K] if any, greedy drafts [B, K]."""

    hidden: Tensor
    logits: Tensor
    confidence: Tensor | None
    drafts: Tensor


class BatchedReference:
    """A drafter that computes many rounds at once; every result is bit-equal to `Reference`'s.

    Args:
        config: sizes and switches.
        weights: fp32 tensors under the family's names.
        adapter: LoRA of those weights, or None for the native drafter.
    """

    def __init__(
        self, config: DrafterConfig, weights: Mapping[str, Tensor], adapter: Mapping[str, Tensor] | None = None
    ) -> None:
        self.reference = reference_drafter(config, weights, adapter)

    @one_thread()
    def forward_batch(self, batch: BlockBatch) -> tuple[Tensor, Tensor, Tensor | None]:
        """Hidden [B, K, dim], teacher-forced logits [B, K, V] and confidence [B, K], if any; differentiable."""
        reference, hiddens, logits, confidences = self.reference, [], [], []
        for rounds, hidden in self.hidden_parts(batch):
            previous = batch.previous[rounds]
            hiddens.append((rounds, hidden))
            latents = reference.latents(hidden, previous)
            logits.append((rounds, reference.add_markov(reference.base_logits(hidden), latents)))
            confidences.append((rounds, reference.confidence(hidden, previous)))
        return _in_order(hiddens), _in_order(logits), _in_order_if_any(confidences)

    @one_thread()
    @torch.no_grad()
    def draft_batch(self, batch: BlockBatch, k: int | None = None) -> Tensor:
        """The first k (all by default) drafted tokens of every round, greedy: [B, k] int64."""
        reference = self.reference
        return _in_order(
            [
                (rounds, reference.greedy(hidden, reference.base_logits(hidden), batch.anchor_token[rounds], k))
                for rounds, hidden in self.hidden_parts(batch)
            ]
        )

    @one_thread()
    @torch.no_grad()
    def run_batch(self, batch: BlockBatch) -> BatchOutput:
        """Teacher-forced results and drafts from one pass of the backbone."""
        reference, hiddens, logits, confidences, drafts = self.reference, [], [], [], []
        for rounds, hidden in self.hidden_parts(batch):
            previous, base = batch.previous[rounds], reference.base_logits(hidden)
            hiddens.append((rounds, hidden))
            drafts.append((rounds, reference.greedy(hidden, base, batch.anchor_token[rounds], None)))
            logits.append((rounds, reference.add_markov(base, reference.latents(hidden, previous))))
            confidences.append((rounds, reference.confidence(hidden, previous)))
        return BatchOutput(_in_order(hiddens), _in_order(logits), _in_order_if_any(confidences), _in_order(drafts))

    def hidden_parts(self, batch: BlockBatch) -> Iterator[tuple[Tensor, Tensor]]:
        """Numbers of rounds [chunk] and their hidden rows [chunk, K, dim]; a context row is computed once."""
        reference, c = self.reference, self.reference.config
        parts = reference.context(batch.taps, batch.positions)
        numbers = sum(part.shape[1:].numel() for part in parts)
        for width, together in padded_widths(c, batch).items():
            chunk = min(_CHUNK_ROUNDS, _CHUNK_LOGITS // (c.block_size * c.vocab_size))
            chunk = max(1, min(chunk, _CHUNK_CONTEXT // max(1, width * numbers)))
            for rounds in torch.split(together, chunk):
                context, valid = batch.context[rounds], batch.context_valid[rounds]
                missing = width - context.shape[1]  # negative: the batch is wider than these rounds need
                context, valid = F.pad(context, (missing, 0)), F.pad(valid, (missing, 0))
                seen = Context(parts, context, valid)
                yield rounds, reference.backbone(batch.anchor_token[rounds], batch.anchor[rounds], seen)


def padded_widths(config: DrafterConfig, batch: BlockBatch) -> dict[int, Tensor]:
    """Width that REF pads a context to → numbers of the batch's rounds that have it."""
    widths = [config.padded_rows(rows) for rows in batch.context_valid.sum(1).tolist()]
    return {
        width: torch.tensor([number for number, of in enumerate(widths) if of == width], device=batch.anchor.device)
        for width in sorted(set(widths))
    }


def _stack_if_any(results: list[Tensor | None]) -> Tensor | None:
    there = [result for result in results if result is not None]
    return torch.stack(there) if there else None


def _in_order(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Results of parts of a batch, put together in the batch's order."""
    rounds, results = torch.cat([numbers for numbers, _ in parts]), torch.cat([result for _, result in parts])
    return results if bool((rounds.diff() > 0).all()) else results[rounds.argsort()]


def _in_order_if_any(parts: list[tuple[Tensor, Tensor | None]]) -> Tensor | None:
    there = [(rounds, result) for rounds, result in parts if result is not None]
    return _in_order(there) if there else None


@torch.no_grad()
def self_check(reference: Reference, batch: BlockBatch) -> bool:
    """Whether batched REF gives REF's bits on this machine, for this drafter and these rounds.

    Rounds spread over the batch, of every width among them, are computed one by one; then within the whole batch,
    within the batch in another order, within a short tail and alone. Hidden states, logits, confidences and drafts
    must agree in every bit.

    Args:
        reference: the drafter.
        batch: rounds of the kind that will be scored, at least one.
    """
    drafter = BatchedReference(reference.config, reference.weights, reference.adapter or None)
    count = len(batch)
    spread = torch.linspace(0, count - 1, min(_PROBES, count)).long().tolist()
    last = [int(numbers[-1]) for numbers in padded_widths(reference.config, batch).values()]
    probes = torch.tensor(sorted({*spread, *last}))
    rounds = [batch.round(int(probe)) for probe in probes]
    outputs = [reference.forward(round) for round in rounds]
    expected = BatchOutput(
        torch.stack([output.hidden for output in outputs]),
        torch.stack([output.logits for output in outputs]),
        _stack_if_any([output.confidence for output in outputs]),
        torch.stack([reference.draft(round) for round in rounds]),
    )
    other_order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    for order in (torch.arange(count), other_order, probes.flip(0), probes[-1:]):
        found = drafter.run_batch(select_rounds(batch, order))
        for place, probe in enumerate(order.tolist()):
            for index in (probes == probe).nonzero().flatten().tolist():
                for name in ("hidden", "logits", "confidence", "drafts"):
                    ours, theirs = getattr(found, name), getattr(expected, name)
                    if ours is not None and not _same_bits(ours[place], theirs[index]):
                        return False
    return True


def select_rounds(batch: BlockBatch, rounds: Tensor) -> BlockBatch:
    """The rounds at these indices, in this order; their rows stay shared."""
    per_round = ("context", "context_valid", "anchor", "anchor_token", "previous", "target", "valid", "teacher")
    return replace(batch, **{name: getattr(batch, name)[rounds] for name in per_round})


def _same_bits(left: Tensor, right: Tensor) -> bool:
    bits = torch.int32 if left.dtype == torch.float32 else left.dtype
    return torch.equal(left.contiguous().view(bits), right.contiguous().view(bits))
