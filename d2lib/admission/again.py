"""Admission's checks that compute a drawn part again: the replay of dev, the live drafts, the pilot's scores.

Which part is drawn when admission runs (see d2lib.admission.drawn), so that a receipt cannot be right about that part
alone.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from d2lib.admission.case import ARM_NAMES, Case, same
from d2lib.admission.drawn import detection
from d2lib.admission.records import SCORED
from d2lib.data.assembly import ScoredSplit
from d2lib.data.check import thousands
from d2lib.data.sample import SAMPLED
from d2lib.drafter.batch import Round
from d2lib.drafter.batched import BatchedReference
from d2lib.drafter.family import reference_drafter
from d2lib.drafter.reference import Reference
from d2lib.errors import Refused
from d2lib.files import sha256_file
from d2lib.gates.parity import MARGIN, compare_drafts
from d2lib.gates.scoring import Scorer

_PROBE = 3
"""Rounds on which batched arithmetic must have the bits of single rounds, else rounds go one by one."""


def check_replay(case: Case) -> str:
    """G1(b): dev was replayed exactly, every sequence of it, on the very files that are here; a drawn part of it goes
    through the target again."""
    replay, where = case.g1.replay, case.inputs.g1
    if not replay.exact:
        raise Refused("the replay of dev was not exact", expected="exact", found="not exact", where=where)
    entries = case.assembly.manifest.split("dev")
    wanted = {entry.id: entry.file.sha256 for entry in entries}
    for name in sorted(wanted.keys() | replay.sequences.keys()):
        same(f"the replayed sidecar of {name}", replay.sequences.get(name), wanted.get(name), where)
    positions = sum(entry.span_positions for entry in entries)
    same("the replayed positions", positions, replay.positions, where)
    same("the target", case.assembly.manifest.target.get("sha256"), replay.target, where)
    recorded = f"recorded as exact: {thousands(len(wanted), 'sequence')}, {positions:,} positions"
    drawn = case.draw("replay", sorted(wanted), case.inputs.replayed_sequences)
    if case.replay is None or not drawn:
        return f"{recorded}; none replayed again here, the target does not run"
    for row in case.replay(case.inputs.assembly, case.assembly.manifest, drawn):
        if not row.holds:
            raise Refused(
                f"{row.name} is not exact", expected=row.expected, found=row.found, where=case.inputs.assembly
            )
    return f"{recorded}; {thousands(len(drawn), 'sequence')} replayed again, exact: {', '.join(drawn)}"


def check_parity(case: Case) -> str:
    """The reference drafter drafts what the live one did: all rounds by the receipt, drawn ones by drafting again."""
    native = str(sha256_file(case.assembly.native))
    again = ties = 0
    for split in SCORED:
        parity, where = case.g1.parity.get(split), f"{case.inputs.g1}: {split}"
        if parity is None:
            raise Refused("parity was not measured", expected=split, where=where)
        file = case.k2(split)
        same("K2", parity.k2, str(file.sha256), where)
        same("the native drafter", parity.native, native, where)
        same("the rounds", sum(map(len, file.rounds.values())), parity.rounds, where)
        if parity.differing:
            raise Refused(
                "the reference drafter differs from the live one", expected=0, found=parity.differing, where=where
            )
        drafted, near = _draft_again(case, split)
        again, ties = again + drafted, ties + near
    return f"no draft differs; {thousands(again, 'drawn round')} drafted again, {thousands(ties, 'near tie')}"


def _draft_again(case: Case, split: ScoredSplit) -> tuple[int, int]:
    """Draft drawn rounds of a K2 file with the reference; returns how many, and how many of them are near ties."""
    file = case.k2(split)
    pairs = [(request, place) for request, chain in file.rounds.items() for place in range(len(chain))]
    drawn = case.draw(f"parity {split}", pairs, case.inputs.parity_rounds)
    if not drawn:
        return 0, 0
    rounds = {
        request: [file.rounds[request][place] for name, place in drawn if name == request]
        for request in dict.fromkeys(name for name, _ in drawn)
    }
    drafter = case.once("native", lambda: BatchedReference(case.config, case.assembly.weights))
    found = compare_drafts(drafter, case.assembly.blocks(split), replace(file, rounds=rounds))
    if found.differences:
        worst = max(found.differences, key=lambda other: other.margin)
        raise Refused(
            "the reference drafter differs from the live one",
            expected=f"the live {worst.live} in slot {worst.slot}, or a tie within {MARGIN:g}",
            found=f"{worst.reference}, margin {worst.margin:.1e}; {len(found.differences)} of {found.rounds} rounds",
            where=f"{split} {worst.request}, anchor {worst.anchor}",
        )
    return found.rounds, len(found.near_ties)


def check_rescored(case: Case) -> str:
    """Drawn rounds of the frozen sample, scored again in reference arithmetic with the native drafter and both arms'
    adapters, accept exactly what is recorded.

    A round may differ where a slot's two best tokens are as good as tied, since another device rounds otherwise.
    """
    scored = [
        (split, request, anchor)
        for split in SAMPLED
        for request, rounds in sorted(case.scores.splits[split].items())
        for anchor in rounds.anchors
    ]
    drawn = case.draw("scores", scored, case.inputs.rescored_rounds)
    if not drawn:
        return "none scored again"
    arms = {"baseline": reference_drafter(case.config, case.assembly.weights)}
    arms |= {arm: reference_drafter(case.config, case.assembly.weights, case.adapter(arm)) for arm in ARM_NAMES}
    scorer: Scorer | None = None
    ties = 0
    for split in SAMPLED:
        blocks = case.assembly.blocks(split)
        for request in dict.fromkeys(name for part, name, _ in drawn if part == split):
            anchors = [anchor for part, name, anchor in drawn if (part, name) == (split, request)]
            if scorer is None:
                scorer = Scorer(arms, blocks.rounds_batch(request, anchors[:_PROBE]))
            again = scorer.rounds(blocks, request, anchors)
            recorded = case.scores.splits[split][request]
            for place, anchor in enumerate(anchors):
                for arm, reference in arms.items():
                    was = getattr(recorded, arm)[recorded.anchors.index(anchor)]
                    found = again[arm].accepted[place]
                    if was == found:
                        continue
                    if not may_accept(reference, blocks.rounds_batch(request, [anchor]).round(0), was):
                        raise Refused(
                            "a recorded score is not what the drafter does",
                            expected=f"{was} accepted draft tokens (recorded)",
                            found=f"{found} scored again",
                            where=f"{split} {request}, anchor {anchor}, {arm}",
                        )
                    ties += 1
    one, ten = (detection(len(scored), len(drawn), share) for share in (0.01, 0.1))
    return (
        f"{thousands(len(drawn), 'drawn round')} of {len(scored):,} scored again with {len(arms)} drafters, as recorded"
        f" ({thousands(ties, 'near tie')}); had 1% of the rounds an invented score, this finds one with {one:.1%}, had"
        f" 10%, with {ten:.1%}"
    )


@torch.no_grad()
def may_accept(reference: Reference, round: Round, accepted: int) -> bool:
    """Whether a round may accept so many drafts when slots whose two best tokens are nearly tied go either way."""
    logits = reference.forward(round).logits
    best = logits.topk(2)
    near = best.values[:, 0] - logits.gather(-1, round.target[:, None])[:, 0] <= MARGIN * logits.abs().amax(-1)
    alone = best.values[:, 0] - best.values[:, 1] > MARGIN * logits.abs().amax(-1)
    may_match = near.tolist()
    may_miss = (~(near & alone)).tolist()
    slots = len(may_match)
    return all(may_match[:accepted]) and (accepted == slots or may_miss[accepted])
