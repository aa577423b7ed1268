"""The canonical forward of the target, which capture stores and G1(b) runs again to find the same bits.

A sequence's tokens are sampled with a cache; what is stored comes from one full forward over the finished sequence,
alone, on one thread: its shapes depend on nothing but the sequence's length, so any machine of the same kind computes
the same bits again, however many threads it otherwise uses.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from d2lib.data.check import CheckRow, thousands
from d2lib.data.manifest import Manifest, Split
from d2lib.data.sidecar import TOP, Sidecar, TensorName
from d2lib.drafter.kernels import one_thread
from d2lib.drafter.reference import teacher_logits
from d2lib.lab.model import LanguageModel, load_model

_BITS = {2: torch.int16, 4: torch.int32}


@torch.no_grad()
def canonical_rows(target: LanguageModel, tokens: Tensor) -> dict[TensorName, Tensor]:
    """Everything that a sidecar stores of a sequence of tokens [L], in the stored types.

    The top 20 come from the hidden state as stored (bf16): that is the teacher of every gate.
    """
    with one_thread():
        output = target(tokens.long().unsqueeze(0))
        hidden = output.hidden[0].bfloat16()
        logprobs, ids = likeliest(torch.log_softmax(teacher_logits(target.head, hidden), dim=-1))
        return {
            "tokens": tokens.int(),
            "taps": output.taps[0].bfloat16(),
            "hidden": hidden,
            "top20_ids": ids.int().contiguous(),
            "top20_logprobs": logprobs.contiguous(),
        }


def likeliest(logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """The TOP largest of [L, V] and their ids, falling; among equals the lower id comes first.

    What a stable sort of the whole vocabulary gives, without one: as many are taken as reach the last place in any row.
    """
    least = logprobs.topk(TOP).values[:, -1:]
    reach = int((logprobs >= least).sum(-1).max())
    ids = logprobs.topk(reach).indices.sort(-1).values
    values, order = logprobs.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return values[:, :TOP], ids.gather(-1, order)[:, :TOP]


def replay_rows(
    target: LanguageModel,
    manifest: Manifest,
    folder: Path,
    split: Split,
    *,
    only: Collection[str] | None = None,
    progress: Callable[[int], object] | None = None,
) -> list[CheckRow]:
    """G1(b): run the target again on a split's stored tokens and compare bit for bit; one check per stored tensor.

    Args:
        folder: the manifest's folder.
        only: of the split's sequences, these; by default all.
        progress: called with the rows of each sequence that was replayed.
    """
    entries = [entry for entry in manifest.split(split) if only is None or entry.id in only]
    problems: dict[TensorName, list[str]] = {name: [] for name in get_args(TensorName) if name != "tokens"}
    for entry in entries:
        sidecar = Sidecar.open(folder, entry, manifest)
        again = canonical_rows(target, sidecar.tensor("tokens"))
        for name, found in problems.items():
            if problem := _difference(sidecar.tensor(name), again[name]):
                found.append(f"{entry.id} {problem}")
        if progress is not None:
            progress(entry.rows)
    rows = sum(entry.rows for entry in entries)
    return [
        CheckRow(
            name=f"replay of {name}, {split}",
            expected=f"the stored bits in every one of {thousands(rows, 'row')}",
            found=f"{thousands(rows, 'row')} of {thousands(len(entries), 'sequence')} replayed"
            + (f"; {thousands(len(found), 'sequence')} differ; the first: {found[0]}" if found else ", all equal"),
            where=split,
            holds=bool(entries) and not found,
        )
        for name, found in problems.items()
    ]


def replay_again(folder: Path, manifest: Manifest, sequences: Collection[str]) -> list[CheckRow]:
    """`replay_rows` of some sequences of dev, with the assembly's own target, for admission."""
    return replay_rows(load_model(folder), manifest, folder, "dev", only=sequences)


def _difference(stored: Tensor, again: Tensor) -> str | None:
    """Where two tensors [L, …] first differ in a bit, and by how much at most."""
    if stored.shape != again.shape or stored.dtype != again.dtype:
        return f"has other shapes: {list(stored.shape)} and {list(again.shape)}"
    bits = _BITS[stored.element_size()]
    differs = (stored.view(bits) != again.view(bits)).flatten(1).any(1)
    if not bool(differs.any()):
        return None
    largest = float((stored.double() - again.double()).abs().max())
    return f"row {int(differs.nonzero()[0])}: {int(differs.sum())} rows differ, by {largest:.3g} at most"
