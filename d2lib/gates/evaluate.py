"""Full G2 of one split: every complete round of every request, baseline against candidate, through the journal."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from d2lib.data.assembly import Assembly
from d2lib.drafter.family import reference_drafter
from d2lib.errors import Refused
from d2lib.files import write_json
from d2lib.gates.g2 import SplitPart, build_part
from d2lib.gates.journal import Contract, Identities, Journal, ScoredSplit
from d2lib.gates.scoring import Scorer, score_population

PROBE_ROUNDS = 67
"""Two full tiles and a tail."""


@dataclass(frozen=True)
class Evaluation:
    """A split's part, how it was computed in words, and how many requests an earlier attempt had completed."""

    part: SplitPart
    scoring: str
    reused: int


def evaluate_split(
    assembly: Assembly,
    split: ScoredSplit,
    adapter: Mapping[str, Tensor],
    identities: Identities,
    out: Path,
    *,
    device: str = "cpu",
    stop: Callable[[], bool] = lambda: False,
    progress: Callable[[int], object] | None = None,
) -> Evaluation:
    """Score a split's whole population and create OUT/SPLIT.json; the journal is OUT/SPLIT.requests/.

    A SPLIT.json that an earlier attempt left, which ended before its receipt, is taken as it is when it is what its
    whole journal gives.

    Args:
        adapter: the candidate's. identities: what the score hangs on, the same for all splits of a run.
        device: what computes; on a GPU, too, in fp32 and in the same arithmetic, or one by one where its bits differ.
        stop: asked between batches of rounds; the interrupted request starts again next time.
        progress: called with the rounds done since the last call.

    Raises:
        Refused: SPLIT.json exists and its journal is not whole or gives another one, or the journal was begun under
            other identities or on another machine.
        Interrupted: stopped on request; completed requests are kept.
    """
    final = out / f"{split}.json"
    k2 = assembly.k2(split)
    population = k2.population(assembly.manifest, split)
    blocks = assembly.blocks(split)
    first = next(iter(population))
    weights, adapter = assembly.load_weights(device), {name: t.to(device) for name, t in adapter.items()}
    scorer = Scorer(
        {
            "baseline": reference_drafter(assembly.config, weights),
            "candidate": reference_drafter(assembly.config, weights, adapter),
        },
        blocks.rounds_batch(first, population[first][:PROBE_ROUNDS]),
    )
    contract = Contract.from_k2(k2, assembly.manifest, split, identities, scorer.computation)
    with Journal.open(out / f"{split}.requests", contract) as journal:
        reused = len(journal.completed)
        if journal.pending and os.path.lexists(final):
            raise Refused(
                "this split is scored and is never scored again",
                expected="every request in its journal",
                found=f"{len(journal.pending)} missing",
                where=final,
            )
        scores = score_population(scorer, blocks, population, journal, stop=stop, progress=progress)
    part = build_part(contract, scores)
    write_json(final, part.model_dump(mode="json"), mode=0o600, once=True)
    return Evaluation(part, scorer.note, reused)
