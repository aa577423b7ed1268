"""Which prompts a case is made of: windows of text, and whole families given to one split each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from d2lib.errors import Refused
from d2lib.lab.corpus import Corpus, Kind, split_families
from d2lib.lab.sampling import derive_seed

Group: TypeAlias = str
"""A split, or `pretraining`: the families that the native drafter learns from."""

PRETRAINING: Group = "pretraining"


@dataclass(frozen=True)
class Prompt:
    """One sequence's beginning: id, the split that it belongs to, its text's kind and family, [gen_start] bytes."""

    id: str
    group: Group
    kind: Kind
    family: str
    tokens: Tensor


def draw_prompts(
    corpus: Corpus, counts: Mapping[Group, Mapping[Kind, int]], length: int, seed: int
) -> dict[Group, list[Prompt]]:
    """Give every family of either kind to one group and draw prompts from it.

    Families get bytes in proportion to the prompts that a group needs; within a group, prompts go round its families
    and never overlap.

    Args:
        counts: group → kind → how many prompts.
        length: bytes of a prompt.
        seed: of the order in which a family's windows are taken.

    Raises:
        Refused: a group's families do not hold enough text.
    """
    prompts: dict[Group, list[Prompt]] = {group: [] for group in counts}
    for kind in ("legal", "general"):
        families: Mapping[str, Sequence[bytes]] = getattr(corpus, kind)
        wanted = {group: float(count[kind]) for group, count in counts.items() if count.get(kind)}
        if not wanted:
            continue
        for group, names in split_families(families, wanted).items():
            windows = _round_robin([(name, _windows(families[name], length, seed, name)) for name in names])
            number = counts[group][kind]
            if len(windows) < number:
                raise Refused(
                    f"there is too little {kind} text for {group}",
                    expected=f"{number} prompts of {length} bytes",
                    found=f"{len(windows)} in {len(names)} families",
                )
            prompts[group] += [
                Prompt(f"{group}-{kind}-{place:03d}", group, kind, f"{kind}/{name}", tokens)
                for place, (name, tokens) in enumerate(windows[:number])
            ]
    return prompts


def _windows(passages: Sequence[bytes], length: int, seed: int, name: str) -> list[Tensor]:
    """A family's windows, none overlapping another, in an order drawn from the seed and the family's name."""
    found = [passage[i : i + length] for passage in passages for i in range(0, len(passage) - length + 1, length)]
    generator = torch.Generator().manual_seed(derive_seed(seed, "windows", name))
    order = torch.randperm(len(found), generator=generator).tolist()
    return [torch.tensor(list(found[place])) for place in order]


def _round_robin(families: list[tuple[str, list[Tensor]]]) -> list[tuple[str, Tensor]]:
    """One window of each family, then the next of each, until none is left."""
    longest = max((len(windows) for _, windows in families), default=0)
    return [(name, windows[turn]) for turn in range(longest) for name, windows in families if turn < len(windows)]
