"""What a drafter reads: one round, and a batch of rounds whose context rows are shared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Round:
    """One round, anchor at row a of a sequence; C context rows, as many as `DrafterConfig.context_rows` says.

    taps: [C, n_taps·dim] raw taps of rows a-C … a-1, oldest first, any float dtype.
    positions: [C] int64, the rows' indices j.
    anchor: a. anchor_token: t_a.
    previous: [K] int64, teacher-forced previous tokens t_{a+i} (past the end: the last token that exists).
    target: [K] int64, tokens t_{a+1+i}; undefined where not `valid`.
    valid: [K] bool, whether the target exists; a prefix of True.
    teacher_hidden: [K, dim] the target's final hidden of rows a+i, any float dtype; undefined where not `valid`.
    """

    taps: Tensor
    positions: Tensor
    anchor: int
    anchor_token: int
    previous: Tensor
    target: Tensor
    valid: Tensor
    teacher_hidden: Tensor


@dataclass(frozen=True)
class BlockBatch:
    """B rounds over R distinct context rows and H distinct teacher rows.

    taps: [R, n_taps·dim] raw taps, each distinct (sequence, row) once.
    positions: [R] int64, each row's index in its sequence.
    context: [B, W] int64 indices into R; the last C entries are used, neighbours, oldest first; the others are 0. W is
        any width that holds the batch's longest context.
    context_valid: [B, W] bool; a suffix of True.
    anchor, anchor_token: [B] int64.
    previous, target: [B, K] int64. valid: [B, K] bool, a prefix of True in each row.
    teacher_hidden: [H, dim], each distinct (sequence, row) once. teacher: [B, K] int64 indices into H.
    """

    taps: Tensor
    positions: Tensor
    context: Tensor
    context_valid: Tensor
    anchor: Tensor
    anchor_token: Tensor
    previous: Tensor
    target: Tensor
    valid: Tensor
    teacher_hidden: Tensor
    teacher: Tensor

    def __len__(self) -> int:
        return int(self.anchor.shape[0])

    def round(self, index: int) -> Round:
        """The batch's round number `index`, standing alone."""
        rows = self.context[index][self.context_valid[index]]
        return Round(
            taps=self.taps[rows],
            positions=self.positions[rows],
            anchor=int(self.anchor[index]),
            anchor_token=int(self.anchor_token[index]),
            previous=self.previous[index],
            target=self.target[index],
            valid=self.valid[index],
            teacher_hidden=self.teacher_hidden[self.teacher[index]],
        )

    def to(self, device: torch.device | str) -> BlockBatch:
        """The same batch on a device."""
        return BlockBatch(**{name: getattr(self, name).to(device) for name in self.__dataclass_fields__})


@dataclass(frozen=True)
class Context:
    """What B rounds see of R context rows.

    parts: tensors [R, ...], as `Reference.context` makes them.
    index: [B, W] int64 indices into R; a round's rows are neighbours, oldest first, ending in the last column.
    valid: [B, W] bool, a suffix of True; what stands in the other columns means nothing.
    """

    parts: list[Tensor]
    index: Tensor
    valid: Tensor

    def gathered(self) -> list[Tensor]:
        """Every part by rounds, copied: [B, W, ...]."""
        rows, shape = self.index.flatten(), self.index.shape
        parts = self.parts
        if parts and not len(parts[0]):  # no round sees any row, yet the padding points at one
            parts = [part.new_zeros(1, *part.shape[1:]) for part in parts]
        return [part.index_select(0, rows).view(*shape, *part.shape[1:]) for part in parts]

    def windows(self, part: Tensor) -> Sequence[Tensor]:
        """Every round's [W, ...] of a part: views of the shared rows, or copies where a gradient is wanted."""
        width = self.index.shape[1]
        if part.requires_grad:
            return Context([part], self.index, self.valid).gathered()[0].unbind()
        ends = self.ends
        missing = max(0, width - min(ends))
        if missing:
            part = torch.cat([part.new_zeros(missing, *part.shape[1:]), part])
        return [part[end + missing - width : end + missing] for end in ends]

    @cached_property
    def ends(self) -> list[int]:
        """Where each round's rows end in R (exclusive); 0 for a round that sees none."""
        if not self.index.shape[1]:
            return [0] * len(self.index)
        return torch.where(self.valid[:, -1], self.index[:, -1] + 1, 0).tolist()
