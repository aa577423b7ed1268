"""What a drafter reads: one round, and a batch of rounds whose context rows are shared."""

from __future__ import annotations

from dataclasses import dataclass

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
    context: [B, W] int64 indices into R; the last C entries are used, oldest first, the others are 0. W is any width
        that holds the batch's longest context.
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


def gather_context(rows: list[Tensor], context: Tensor) -> list[Tensor]:
    """What each round sees of the distinct context rows: tensors [R, ...] and indices [B, W] to tensors [B, W, ...]."""
    if rows and not len(rows[0]):  # no round sees any row, yet the padding points at one
        rows = [part.new_zeros(1, *part.shape[1:]) for part in rows]
    return [part.index_select(0, context.flatten()).view(*context.shape, *part.shape[1:]) for part in rows]
