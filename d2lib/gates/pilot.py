"""The pilot's verdict: is this recipe worth a full run, judged on the frozen samples of dev and heldout_legal.

Two arms, FAST and REF, were trained on the same blocks; the same rounds were then scored without an adapter and with
each arm's. Per round only the accepted draft tokens count (bonus excluded). A gain is Σ(arm - baseline) / rounds, with
the paired request bootstrap's 95% interval [l, u].

Each gate is in one of three states; *undecided* means that its interval straddles its threshold:

    gate                     on             holds                 undecided              fails
    legal_gain               gain g, [l,u]  g >= 0.15             g < 0.15 <= u          u < 0.15
    legal_lower_bound        [l, u]         l > 0                 l <= 0 <= u            u < 0
    dev_floor                gain g, [l,u]  g >= -0.01            g < -0.01 <= u         u < -0.01
    agreement_dev            FAST - REF     -0.05 <= l, u <= 0.05 anything between       l > 0.05 or u < -0.05
    agreement_heldout_legal  FAST - REF     -0.05 <= l, u <= 0.05 anything between       l > 0.05 or u < -0.05

    verdict   PASS: every gate holds.  FAIL: some gate fails.  INCONCLUSIVE: none fails, some gate is undecided.

The gates on gains are judged on FAST, the arm that the full run uses; the agreement gates tie REF to it. Accepted
tokens are integers by schema, so no NaN can enter, and a comparison with NaN would hold nowhere.

This module needs no torch: `python -m d2lib.gates.pilot SCORES.json` recomputes a verdict from a source snapshot alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from d2lib.entry import run_command
from d2lib.errors import ExitStatus
from d2lib.files import Record, canonical_json, read_json, sha256_bytes
from d2lib.gates.bootstrap import Bootstrap, paired_request_bootstrap
from d2lib.gates.gate import digest_field, holds, validated

PilotSplit = Literal["dev", "heldout_legal"]
State = Literal["holds", "undecided", "fails"]
Verdict = Literal["PASS", "FAIL", "INCONCLUSIVE"]

SPLITS: tuple[PilotSplit, ...] = ("dev", "heldout_legal")
LEGAL_GAIN = 0.15
LEGAL_LOWER_BOUND = 0.0
DEV_FLOOR = -0.01
AGREEMENT = 0.05


class SampledRounds(Record):
    """One request's sampled rounds: accepted draft tokens, bonus excluded, of three drafters on the same anchors."""

    anchors: list[int] = Field(min_length=1)
    baseline: list[int]
    fast: list[int]
    ref: list[int]

    @model_validator(mode="after")
    def _paired(self) -> Self:
        if any(later <= earlier for earlier, later in pairwise(self.anchors)) or self.anchors[0] < 0:
            raise ValueError("anchors must rise strictly from 0 or more")
        for arm in ("baseline", "fast", "ref"):
            if len(getattr(self, arm)) != len(self.anchors):
                raise ValueError(f"{arm} has {len(getattr(self, arm))} rounds, anchors {len(self.anchors)}")
        return self


class PilotAdapters(Record):
    """Which adapters were scored: digests of the two arms' adapter files."""

    fast: str = digest_field()
    ref: str = digest_field()


class PilotScores(Record):
    """What the pilot measured on the frozen samples: split → request → rounds. The verdict follows from this alone."""

    schema_version: Literal[1] = 1
    namespace: str = Field(min_length=1)
    sample_identity: str = digest_field()
    """Digest of the frozen sample that names these rounds."""
    adapters: PilotAdapters
    block_size: int = Field(gt=0)
    """K: no round accepts more draft tokens."""
    splits: dict[PilotSplit, dict[str, SampledRounds]]

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if set(self.splits) != set(SPLITS):
            raise ValueError(f"splits must be {', '.join(SPLITS)}; found {', '.join(sorted(self.splits))}")
        for split, requests in self.splits.items():
            for name, rounds in requests.items():
                for arm in ("baseline", "fast", "ref"):
                    values: list[int] = getattr(rounds, arm)
                    if min(values) < 0 or max(values) > self.block_size:
                        raise ValueError(f"{split} {name} {arm}: accepted must lie in 0 … {self.block_size}")
        return self


class PilotGate(Record):
    """One gate of the table above. `value`, `lower`, `upper` in accepted draft tokens per round, bonus excluded."""

    name: str
    split: PilotSplit
    value: float
    lower: float
    upper: float
    condition: str
    state: State


class PilotVerdict(Record):
    """The verdict with all that it hangs on."""

    schema_version: Literal[1] = 1
    verdict: Verdict
    gates: list[PilotGate]
    intervals: dict[str, dict[str, Any]]
    """`SPLIT.fast`, `SPLIT.ref` (gain over baseline) and `SPLIT.fast_minus_ref`."""
    identities: dict[str, str]
    """namespace, sample, scores, units_dev, units_heldout_legal, adapter_fast, adapter_ref."""

    @property
    def exit_status(self) -> ExitStatus:
        """0 only for PASS."""
        return ExitStatus.DONE if self.verdict == "PASS" else ExitStatus.VERDICT


def judge_pilot(scores: PilotScores) -> PilotVerdict:
    """The pilot's verdict; a pure function of the scores.

    Raises Refused when a split has fewer than two requests: there is no interval then, so no verdict.
    """
    intervals = {
        f"{split}.{name}": _difference(scores.splits[split], first, second)
        for split in SPLITS
        for name, first, second in (
            ("fast", "fast", "baseline"),
            ("ref", "ref", "baseline"),
            ("fast_minus_ref", "fast", "ref"),
        )
    }
    legal, dev = intervals["heldout_legal.fast"], intervals["dev.fast"]
    gates = [
        _gate("legal_gain", "heldout_legal", legal, f"gain >= {LEGAL_GAIN}", at_least(legal, LEGAL_GAIN)),
        _gate("legal_lower_bound", "heldout_legal", legal, f"lower > {LEGAL_LOWER_BOUND:g}", above(legal)),
        _gate("dev_floor", "dev", dev, f"gain >= {DEV_FLOOR}", at_least(dev, DEV_FLOOR)),
    ]
    for split in SPLITS:
        difference = intervals[f"{split}.fast_minus_ref"]
        condition = f"interval within ±{AGREEMENT}"
        gates.append(_gate(f"agreement_{split}", split, difference, condition, agrees(difference)))
    states = {gate.state for gate in gates}
    verdict: Verdict = "PASS" if states == {"holds"} else "FAIL" if "fails" in states else "INCONCLUSIVE"
    units = {
        f"units_{split}": str(
            sha256_bytes(canonical_json({name: rounds.anchors for name, rounds in scores.splits[split].items()}))
        )
        for split in SPLITS
    }
    return PilotVerdict(
        verdict=verdict,
        gates=gates,
        intervals={name: interval.as_dict() for name, interval in intervals.items()},
        identities={
            "namespace": scores.namespace,
            "sample": scores.sample_identity,
            "scores": str(sha256_bytes(canonical_json(scores.model_dump()))),
            "adapter_fast": scores.adapters.fast,
            "adapter_ref": scores.adapters.ref,
            **units,
        },
    )


def at_least(interval: Bootstrap, threshold: float) -> State:
    """The gates on a point estimate: legal_gain and dev_floor."""
    if holds(interval.estimate, ">=", threshold):
        return "holds"
    return "fails" if holds(interval.upper, "<", threshold) else "undecided"


def above(interval: Bootstrap, threshold: float = LEGAL_LOWER_BOUND) -> State:
    """The gate on a lower bound: legal_lower_bound."""
    if holds(interval.lower, ">", threshold):
        return "holds"
    return "fails" if holds(interval.upper, "<", threshold) else "undecided"


def agrees(interval: Bootstrap, margin: float = AGREEMENT) -> State:
    """The equivalence gates: the whole interval within ±margin."""
    if holds(interval.lower, ">=", -margin) and holds(interval.upper, "<=", margin):
        return "holds"
    outside = holds(interval.lower, ">", margin) or holds(interval.upper, "<", -margin)
    return "fails" if outside else "undecided"


def _difference(requests: dict[str, SampledRounds], first: str, second: str) -> Bootstrap:
    rounds = [len(request.anchors) for request in requests.values()]
    sums = [sum(getattr(request, first)) - sum(getattr(request, second)) for request in requests.values()]
    return paired_request_bootstrap(sums, rounds)


def _gate(name: str, split: PilotSplit, interval: Bootstrap, condition: str, state: State) -> PilotGate:
    return PilotGate(
        name=name,
        split=split,
        value=interval.estimate,
        lower=interval.lower,
        upper=interval.upper,
        condition=condition,
        state=state,
    )


def load_scores(path: Path) -> PilotScores:
    """The scores in a JSON file; raises Refused that names the first field which is wrong."""
    return validated(PilotScores, read_json(path), path)


def main(arguments: Sequence[str]) -> int:
    """Print the verdict on a scores file as canonical JSON; exit status 0 PASS, 1 FAIL or INCONCLUSIVE, 2 refused."""
    if len(arguments) != 1:
        print("usage: python -m d2lib.gates.pilot SCORES.json", file=sys.stderr)
        return ExitStatus.REFUSED

    def judge() -> ExitStatus:
        verdict = judge_pilot(load_scores(Path(arguments[0])))
        print(canonical_json(verdict.model_dump()).decode())
        return verdict.exit_status

    return run_command("pilot", judge)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
