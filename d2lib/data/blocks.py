"""D2Blocks: one training block per anchor, and batches that read each row they need once.

All rows of a split stand on one line: row j of sequence s has the address base[s] + j. A batch's context rows are then
a few merged intervals of addresses, read as contiguous stretches, whatever order the blocks come in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from d2lib.data.manifest import Manifest, SequenceEntry, Split
from d2lib.data.sidecar import DTYPES, Sidecar, TensorName
from d2lib.drafter.batch import BlockBatch
from d2lib.drafter.config import DrafterConfig
from d2lib.errors import Refused


class Ranges:
    """The union of half-open address intervals, and where each of its addresses stands when they are laid end to end.

    start, stop: [m] int64, disjoint and rising, with a gap between any two. total: how many addresses.
    """

    def __init__(self, start: Tensor, stop: Tensor) -> None:
        order = start.argsort()
        start, reach = start[order], stop[order].cummax(0).values
        new = torch.ones(len(start), dtype=torch.bool)
        new[1:] = start[1:] > reach[:-1]
        self.start = start[new]
        last = torch.cat([new[1:], torch.ones(min(1, len(new)), dtype=torch.bool)])
        self.stop = reach[last]
        self._offset = (self.stop - self.start).cumsum(0) - (self.stop - self.start)
        self.total = int((self.stop - self.start).sum())

    def place(self, address: Tensor) -> Tensor:
        """Places of addresses that are in the union, any shape, int64. Neighbours in an interval stay neighbours."""
        found = torch.searchsorted(self.start, address, right=True) - 1
        return address - self.start[found] + self._offset[found]

    def lay(self, start: Tensor) -> Tensor:
        """[total] int64: each interval counted up from its own `start` [m], end to end."""
        return torch.arange(self.total) + (start - self._offset).repeat_interleave(self.stop - self.start)


class D2Blocks:
    """A split's blocks: one per anchor a in gen_start … L-2 of every sequence, with targets a+1 … min(a+K, L-1).

    Blocks are numbered through the sequences in the order of their ids. Opening reads the sidecars' headers only.

    Args:
        manifest: the dataset's.
        folder: the folder that its paths are relative to.
        split: which split.
        config: the drafter's; says how many context rows a round sees.

    Raises:
        Refused: the split is empty, the drafter has other sizes, or a sidecar is not as recorded.
    """

    def __init__(self, manifest: Manifest, folder: Path, split: Split, config: DrafterConfig) -> None:
        for name in ("dim", "vocab_size", "n_taps"):
            if getattr(config, name) != getattr(manifest, name):
                raise Refused(
                    "the drafter and the manifest disagree",
                    expected=f"{name} {getattr(manifest, name)}",
                    found=getattr(config, name),
                    where=manifest.namespace,
                )
        self.split = split
        self.config = config
        self.entries = manifest.split(split)
        if not self.entries:
            raise Refused("a split has no sequences", found=split, where=manifest.namespace)
        self.sidecars = [Sidecar.open(folder, entry, manifest) for entry in self.entries]
        self._number = {entry.id: number for number, entry in enumerate(self.entries)}
        self._rows = torch.tensor([entry.rows for entry in self.entries])
        self._gen_start = torch.tensor([entry.gen_start for entry in self.entries])
        self._base = self._rows.cumsum(0) - self._rows
        self._end = torch.tensor([entry.blocks for entry in self.entries]).cumsum(0)

    def __len__(self) -> int:
        return int(self._end[-1])

    def locate(self, index: int) -> tuple[int, int]:
        """(number of the sequence in `entries`, anchor) of a block."""
        sequence, anchor = self._locate(torch.tensor([index]))
        return int(sequence), int(anchor)

    def sequence(self, sequence_id: str) -> SequenceEntry:
        """A sequence of this split; raises Refused for another."""
        return self.entries[self._sequence_number(sequence_id)]

    def epoch_order(self, seed: int, epoch: int) -> Tensor:
        """[len] int64, the permutation in which an epoch presents the blocks; a function of (seed, epoch) alone."""
        digest = hashlib.sha256(f"d2 epoch order {seed} {epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return torch.randperm(len(self), generator=generator)

    def batch(self, indices: Tensor) -> BlockBatch:
        """The blocks with these numbers (int64 [B]), in this order."""
        return self._batch(*self._locate(indices))

    def rounds_batch(self, sequence_id: str, anchors: Sequence[int]) -> BlockBatch:
        """The rounds at these anchors of one sequence, in this order."""
        number = self._sequence_number(sequence_id)
        anchor = torch.tensor(list(anchors), dtype=torch.int64)
        entry = self.entries[number]
        if not len(anchor) or not entry.gen_start <= int(anchor.min()) <= int(anchor.max()) <= entry.rows - 2:
            raise Refused(
                "an anchor is outside the generated span",
                expected=f"{entry.gen_start} … {entry.rows - 2}",
                found=f"{int(anchor.min())} … {int(anchor.max())}" if len(anchor) else "no anchor",
                where=sequence_id,
            )
        return self._batch(torch.full_like(anchor, number), anchor)

    def _sequence_number(self, sequence_id: str) -> int:
        if sequence_id not in self._number:
            raise Refused("a sequence is not in this split", found=sequence_id, where=self.split)
        return self._number[sequence_id]

    def _locate(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        if not len(indices) or not 0 <= int(indices.min()) <= int(indices.max()) < len(self):
            raise Refused(
                "a block's number is out of range", expected=f"0 … {len(self) - 1}", found=indices.tolist()[:5]
            )
        sequence = torch.searchsorted(self._end, indices, right=True)
        first = torch.where(sequence > 0, self._end[(sequence - 1).clamp(min=0)], 0)
        return sequence, self._gen_start[sequence] + indices - first

    def _batch(self, sequence: Tensor, anchor: Tensor) -> BlockBatch:
        slots = self.config.block_size
        base, last = self._base[sequence], self._rows[sequence] - 1

        # the rows before the anchor that the drafter sees, right-aligned
        count = torch.tensor([self.config.context_rows(a) for a in anchor.tolist()])
        width = self.config.padded_rows(int(count.max()))
        first = anchor - count
        seen = Ranges(base + first, base + anchor)
        column = torch.arange(width) - (width - count)[:, None]
        context = torch.where(column >= 0, seen.place(base + first)[:, None] + column, 0)

        # slot i reads token a+i and predicts token a+i+1, of which row a+i's hidden state is the teacher
        slot = torch.arange(slots) + anchor[:, None]
        spoken = Ranges(base + anchor, base + torch.minimum(anchor + slots, last) + 1)
        tokens = self._read("tokens", spoken).long()
        place = spoken.place(base + anchor)
        row = torch.minimum(torch.arange(slots + 1), (last - anchor)[:, None]) + place[:, None]
        taught = Ranges(base + anchor, base + torch.minimum(anchor + slots, last))
        teacher = torch.minimum(torch.arange(slots), (last - 1 - anchor)[:, None])
        return BlockBatch(
            taps=self._read("taps", seen),
            positions=seen.lay(self._split(seen)[1]),
            context=context,
            context_valid=column >= 0,
            anchor=anchor,
            anchor_token=tokens[place],
            previous=tokens[row[:, :-1]],
            target=tokens[row[:, 1:]],
            valid=slot < last[:, None],
            teacher_hidden=self._read("hidden", taught),
            teacher=taught.place(base + anchor)[:, None] + teacher,
        )

    def _split(self, ranges: Ranges) -> tuple[Tensor, Tensor, Tensor]:
        """[m] each: an interval's sequence, first row and end row."""
        sequence = torch.searchsorted(self._base, ranges.start, right=True) - 1
        return sequence, ranges.start - self._base[sequence], ranges.stop - self._base[sequence]

    def _read(self, name: TensorName, ranges: Ranges) -> Tensor:
        """The rows of merged addresses, copied out of the maps in one pass."""
        sequence, start, stop = (values.tolist() for values in self._split(ranges))
        pieces = [self.sidecars[s].raw(name)[i:j] for s, i, j in zip(sequence, start, stop, strict=True)]
        return torch.from_numpy(np.concatenate(pieces)).view(DTYPES[name])
