"""REF: a drafter's arithmetic, literally, fp32, one round at a time with no reuse between rounds.

Slow on purpose; every verdict is computed with it. Here is what all families do: context rows, the parallel backbone,
LM head with Markov head, confidence, greedy drafting. A family's `reference` module adds its backbone.

A round's context is padded in front with masked rows (`DrafterConfig.padded_rows`), so that rounds go through products
and sums of few shapes and `batched` can give the same bits for many rounds at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from d2lib.drafter.batch import Context, Round
from d2lib.drafter.config import DrafterConfig
from d2lib.drafter.family import family_of
from d2lib.drafter.heads import ConfidenceHead, MarkovHead
from d2lib.drafter.kernels import fold, linear, one_thread, rms_norm
from d2lib.drafter.lora import adapter_rank
from d2lib.drafter.weights import check_weights
from d2lib.errors import Refused


@dataclass(frozen=True)
class RoundOutput:
    """One round, teacher-forced.

    hidden: [K, dim] what the backbone gives. logits: [K, V]; slot i is about token a+1+i.
    confidence: [K] logits of the chance that the slot is accepted, or None where there is no such head.
    """

    hidden: Tensor
    logits: Tensor
    confidence: Tensor | None


def teacher_logits(head: Tensor, hidden: Tensor) -> Tensor:
    """The target's logits from its final hidden states: [V, dim] and [..., dim] of any float dtype to [..., V] fp32."""
    return linear(hidden.float(), head)


class Reference(ABC):
    """A drafter that computes one round at a time.

    The steps take a leading axis of rounds B, which here is always one; `BatchedReference` runs the same steps over
    many. FAST runs them with other kernels.

    Args:
        config: sizes and switches.
        weights: fp32 tensors under the family's names.
        adapter: LoRA of those weights, or None for the native drafter.
    """

    def __init__(
        self, config: DrafterConfig, weights: Mapping[str, Tensor], adapter: Mapping[str, Tensor] | None = None
    ) -> None:
        check_weights(weights, config)
        if adapter is not None:
            adapter_rank(adapter, config)
        self.config = config
        self.weights = weights
        self.adapter: Mapping[str, Tensor] = adapter or {}
        family = family_of(config)
        self.embed, self.head = weights[family.embed], weights[family.head]
        self.markov = self.markov_head()
        self._confidence = self.confidence_head()

    @one_thread()
    def forward(self, round: Round) -> RoundOutput:
        """The round's slots, each given the true previous token."""
        hidden, previous = self._hidden(round), round.previous
        logits = self.add_markov(self.base_logits(hidden), self.latents(hidden, previous))
        return RoundOutput(hidden, logits, self.confidence(hidden, previous))

    @one_thread()
    @torch.no_grad()
    def draft(self, round: Round, k: int | None = None) -> Tensor:
        """The first k (all by default) drafted tokens, greedy: [k] int64. The lowest index wins a tie."""
        hidden = self._hidden(round).unsqueeze(0)
        token = torch.tensor([round.anchor_token], device=hidden.device)
        return self.greedy(hidden, self.base_logits(hidden), token, k).squeeze(0)

    def _hidden(self, round: Round) -> Tensor:
        rows, device = len(round.positions), round.taps.device
        width = self.config.padded_rows(rows)
        parts = [
            torch.cat([part.new_zeros(width - rows, *part.shape[1:]), part])
            for part in self.context(round.taps, round.positions)
        ]
        column = torch.arange(width, device=device).unsqueeze(0)
        context = Context(parts, column, column >= width - rows)
        anchor = torch.tensor([round.anchor], device=device)
        token = torch.tensor([round.anchor_token], device=device)
        return self.backbone(token, anchor, context).squeeze(0)

    # A family's part.

    @abstractmethod
    def context(self, taps: Tensor, positions: Tensor) -> list[Tensor]:
        """What blocks read of context rows, each row by itself: raw taps [R, n_taps·dim] of any float dtype at
        positions [R] to tensors [R, ...], in the order in which `backbone` takes them."""

    @abstractmethod
    def backbone(self, anchor_token: Tensor, anchor: Tensor, context: Context) -> Tensor:
        """The parallel pass: hidden [B, K, dim] of every slot.

        Args:
            anchor_token, anchor: [B] int64.
            context: of W columns; of round b, column c is row anchor[b] - W + c of its sequence.
        """

    @abstractmethod
    def head_rows(self, hidden: Tensor) -> Tensor:
        """y, what LM head and Markov head read of the backbone's hidden rows: [..., dim] to [..., dim]."""

    @abstractmethod
    def markov_head(self) -> MarkovHead | None:
        """The drafter's Markov head, if it has one."""

    @abstractmethod
    def confidence_head(self) -> ConfidenceHead | None:
        """The drafter's confidence head, if it has one; it reads `hidden`."""

    # Heads.

    def base_logits(self, hidden: Tensor) -> Tensor:
        """lm_head·y: [..., dim] to [..., V]."""
        return self._linear_fp32(self.head_rows(hidden), self.head)

    def latents(self, hidden: Tensor, previous: Tensor) -> Tensor | None:
        """The Markov head's latents given the previous tokens: [..., K, dim] and [..., K] int64 to [..., K, r]."""
        if self.markov is None:
            return None
        return self.markov.latents(self.head_rows(hidden), previous, self._linear_fp32)

    def add_markov(self, base: Tensor, latents: Tensor | None) -> Tensor:
        """Base logits [..., V] plus what latents [..., r] add to them."""
        if self.markov is None or latents is None:
            return base
        return base + self._linear_fp32(latents, self.markov.w2)

    def confidence(self, hidden: Tensor, previous: Tensor) -> Tensor | None:
        """proj·[hidden; W1 row of the previous token] + bias: [..., dim] and [...] to [...]."""
        head = self._confidence
        if head is None:
            return None
        if head.with_markov and self.markov is not None:
            hidden = torch.cat([hidden, self.markov.w1[previous]], dim=-1)
        logit = self._dot(hidden, head.weight[0])
        return logit if head.bias is None else logit + head.bias

    def greedy(self, hidden: Tensor, base: Tensor, anchor_token: Tensor, k: int | None) -> Tensor:
        """Draft slot after slot, given the one before: [B, K, dim], base logits [B, K, V], tokens [B] to [B, k]."""
        slots = self.config.block_size if k is None else k
        if not 1 <= slots <= self.config.block_size:
            raise Refused("a round has no such number of slots", expected=f"1 … {self.config.block_size}", found=k)
        drafts: list[Tensor] = []
        y, previous, latent, state = self.head_rows(hidden), anchor_token.to(base.device), None, None
        for slot in range(slots):
            if self.markov is not None:
                latent, state = self.markov.step(y[:, slot], previous, state, self._linear_fp32)
            previous = self.add_markov(base[:, slot], latent).argmax(-1)
            drafts.append(previous)
        return torch.stack(drafts, dim=1)

    # Kernels, by module name.

    def _linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x·Wᵀ."""
        return linear(x, weight)

    def _linear_fp32(self, x: Tensor, weight: Tensor) -> Tensor:
        """x·Wᵀ of a head, which FAST too computes in fp32."""
        return linear(x, weight)

    def _dot(self, x: Tensor, row: Tensor) -> Tensor:
        return fold(x * row)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self.weights[f"{name}.weight"], self.config.norm_eps)

    def _project(self, name: str, x: Tensor) -> Tensor:
        """x·Wᵀ, plus (x·Aᵀ)·Bᵀ where the module is adapted, plus its bias where it has one."""
        y = self._linear(x, self.weights[f"{name}.weight"])
        if self.adapter:
            y = y + self._linear(self._linear(x, self.adapter[f"{name}.lora_A"]), self.adapter[f"{name}.lora_B"])
        return y if f"{name}.bias" not in self.weights else y + self.weights[f"{name}.bias"]
