"""Datasets small enough for a test and consistent: top 20 from hidden and head, drafts from tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from d2lib.data.k2 import K2Header, K2Round, leading_matches, write_k2
from d2lib.data.manifest import FileEntry, Manifest, SequenceEntry, Split
from d2lib.data.sidecar import write_sidecar
from d2lib.drafter.config import DrafterConfig

NAMESPACE = "tiny"
LENGTHS: dict[Split, list[int]] = {
    "train": [31, 40, 24],
    "dev": [33, 29],
    "heldout_legal": [35, 28],
    "heldout_general": [30, 27],
}
GEN_START = 12


def write_dataset(
    folder: Path,
    config: DrafterConfig,
    *,
    head: Tensor | None = None,
    lengths: Mapping[Split, Sequence[int]] = LENGTHS,
    gen_start: int = GEN_START,
    namespace: str = NAMESPACE,
    target: str | None = None,
    seed: int = 0,
) -> Manifest:
    """Sidecars of random rows and their MANIFEST.json under `folder`; one family a sequence."""
    generator = torch.Generator().manual_seed(seed)
    head = torch.randn(config.vocab_size, config.dim, generator=generator) if head is None else head
    (folder / "shards").mkdir(parents=True)
    entries = []
    for split, rows in lengths.items():
        for number, length in enumerate(rows):
            name = f"{split}-{number:02}"
            hidden = torch.randn(length, config.dim, generator=generator).bfloat16()
            top = (hidden.float() @ head.T).log_softmax(-1).topk(20)
            write_sidecar(
                folder / f"shards/{name}.safetensors",
                tokens=torch.randint(config.vocab_size, (length,), generator=generator),
                taps=torch.randn(length, config.n_taps * config.dim, generator=generator),
                hidden=hidden,
                top20_ids=top.indices,
                top20_logprobs=top.values,
            )
            entries.append(
                SequenceEntry(
                    id=name,
                    split=split,
                    family=f"family-{name}",
                    rows=length,
                    gen_start=gen_start,
                    file=FileEntry.of(folder, f"shards/{name}.safetensors"),
                )
            )
    manifest = Manifest(
        namespace=namespace,
        dim=config.dim,
        vocab_size=config.vocab_size,
        n_taps=config.n_taps,
        target={"name": "random rows"} | ({} if target is None else {"sha256": target}),
        sequences=tuple(entries),
    )
    manifest.write(folder / "MANIFEST.json")
    return manifest


def live_rounds(
    tokens: Sequence[int], entry: SequenceEntry, vocabulary: int, generator: torch.Generator
) -> list[K2Round]:
    """Rounds of a drafter that is right about each of its two tokens with probability 2/3."""
    rounds, anchor = [], entry.gen_start
    while anchor <= entry.rows - 2:
        drafts = []
        for row in (anchor + 1, anchor + 2):
            right = row < entry.rows and float(torch.rand((), generator=generator)) < 2 / 3
            drafts.append(int(tokens[row]) if right else int(torch.randint(vocabulary, (), generator=generator)))
        accepted = leading_matches((drafts[0], drafts[1]), list(tokens), anchor)
        following = anchor + accepted + 1
        rounds.append(
            K2Round(
                request=entry.id,
                anchor=anchor,
                drafts=(drafts[0], drafts[1]),
                accepted=accepted,
                next_anchor=following,
            )
        )
        anchor = following
    return rounds


def write_trajectory(
    folder: Path, manifest: Manifest, split: Split, path: Path, *, block_size: int, seed: int = 5
) -> Path:
    """A split's K2 file, its rounds consistent with the sidecars' tokens."""
    from d2lib.data.sidecar import Sidecar

    generator = torch.Generator().manual_seed(seed)
    rounds: list[K2Round] = []
    for entry in manifest.split(split):
        tokens = Sidecar.open(folder, entry, manifest).tensor("tokens").tolist()
        rounds += live_rounds(tokens, entry, manifest.vocab_size, generator)
    header = K2Header(namespace=manifest.namespace, split=split, block_size=block_size, live={"drafter": "coin"})
    path.parent.mkdir(parents=True, exist_ok=True)
    write_k2(path, header, rounds)
    return path


def manifest_of(rows: Mapping[Split, Sequence[int]], *, gen_start: int = 128, **sizes: Any) -> Manifest:
    """A manifest alone, for counting: the files that it names do not exist."""
    entries = [
        SequenceEntry(
            id=f"{split}-{number:03}",
            split=split,
            family=f"{split}-{number}",
            rows=length,
            gen_start=gen_start,
            file=FileEntry(path=f"shards/{split}-{number:03}.safetensors", size=1, sha256="sha256:" + "0" * 64),
        )
        for split, lengths in rows.items()
        for number, length in enumerate(lengths)
    ]
    fields = {"namespace": "count", "dim": 8, "vocab_size": 64, "n_taps": 1, "target": {}} | sizes
    return Manifest(**fields, sequences=tuple(entries))


PRODUCTION: dict[Split, tuple[int, int]] = {
    "train": (65, 496_416),
    "dev": (30, 233_500),
    "heldout_legal": (24, 220_458),
    "heldout_general": (12, 40_566),
}
"""The production capture: split → sequences, rows."""


def production_rows() -> dict[Split, list[int]]:
    """The production's row counts, spread over its sequences."""
    return {
        split: [rows // count + (number < rows % count) for number in range(count)]
        for split, (count, rows) in PRODUCTION.items()
    }
