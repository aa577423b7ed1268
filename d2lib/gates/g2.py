"""G2: the gates on a split's full population, and the verdict that binds the three splits.

The table below is the whole of it. Gains are ratios of sums, Σ(accepted candidate - accepted baseline) / rounds, in
accepted draft tokens per round, bonus excluded; divergences are means over rounds in nats. What is not finite, not
complete or not paired gives no verdict at all: it is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from d2lib.errors import ExitStatus, Refused
from d2lib.files import Record, canonical_json, sha256_bytes
from d2lib.gates.bootstrap import Bootstrap, paired_request_bootstrap
from d2lib.gates.gate import Comparison, Gate, digest_field, judged, validated
from d2lib.gates.journal import Contract, Identities, ScoredSplit
from d2lib.gates.request import ArmScore, RequestScore
from d2lib.strict import differences

Word = Literal["PASS", "FAIL"]

TOKENS = "accepted draft tokens per round, bonus excluded"


@dataclass(frozen=True)
class GateSpec:
    """One split's gates; all must hold. None: the split has no such gate.

    requests: how many requests, by `requests_comparison`. gain, floor: the split's gain is at least this.
    lower_bound: the bootstrap's 95% lower bound is above this. request_gain: every request's gain is at least this.
    Divergence is strictly lower at every slot of every split.
    """

    requests: int
    requests_comparison: Comparison
    gain: float | None
    lower_bound: float | None
    floor: float | None
    request_gain: float = -0.2


SPECS: dict[ScoredSplit, GateSpec] = {
    "heldout_legal": GateSpec(requests=20, requests_comparison=">=", gain=0.15, lower_bound=0.0, floor=-0.01),
    "dev": GateSpec(requests=30, requests_comparison="==", gain=None, lower_bound=None, floor=-0.01),
    "heldout_general": GateSpec(requests=10, requests_comparison=">=", gain=-0.03, lower_bound=None, floor=None),
}


class SplitVerdict(Record):
    """One split's verdict: PASS when every gate holds.

    totals: sums over the population, exact where they are counts. bootstrap: of the gain, on every split.
    """

    split: ScoredSplit
    verdict: Word
    gates: list[Gate]
    totals: dict[str, Any]
    bootstrap: dict[str, Any]

    @property
    def exit_status(self) -> ExitStatus:
        """0 for PASS, 1 for FAIL."""
        return ExitStatus.DONE if self.verdict == "PASS" else ExitStatus.VERDICT


class SplitPart(Record):
    """SPLIT.json: a split's verdict, what it was judged from, and what all of it hangs on."""

    schema_version: Literal[1] = 1
    contract: Contract
    requests: list[RequestScore]
    judgement: SplitVerdict

    @property
    def digest(self) -> str:
        """Digest of the part's file."""
        return str(sha256_bytes(canonical_json(self.model_dump()) + b"\n"))


class PartReference(Record):
    """How g2.json names a part."""

    part: str = digest_field()
    k2: str = digest_field()
    verdict: Word
    requests: int
    rounds: int
    gain: float
    gates: list[Gate]


class G2(Record):
    """g2.json: three parts of one run, and the verdict."""

    schema_version: Literal[1] = 1
    verdict: Word
    identities: Identities
    block_size: int
    parts: dict[ScoredSplit, PartReference]

    @property
    def exit_status(self) -> ExitStatus:
        """0 for PASS, 1 for FAIL."""
        return ExitStatus.DONE if self.verdict == "PASS" else ExitStatus.VERDICT


def split_bootstrap(requests: Iterable[RequestScore]) -> Bootstrap:
    """The paired request bootstrap of the split's gain, with its resamples (for plots)."""
    scores = list(requests)
    return paired_request_bootstrap([score.gain_sum for score in scores], [score.rounds for score in scores])


def judge(split: ScoredSplit, requests: Iterable[RequestScore]) -> SplitVerdict:
    """A split's gates on its requests' scores; a pure function.

    Raises Refused: a score is malformed or not finite, a request stands twice, slots differ between requests, or
        there are fewer than two requests.
    """
    scores = sorted((_sound(score) for score in requests), key=lambda score: score.request)
    names = [score.request for score in scores]
    if len(set(names)) != len(names):
        raise Refused("a request stands twice", found=next(n for n in names if names.count(n) > 1), where=split)
    slots = {len(score.pairs) - 1 for score in scores}
    if len(slots) > 1:
        raise Refused("requests differ in their slots", found=sorted(slots), where=split)
    spec, bootstrap = SPECS[split], split_bootstrap(scores)
    worst = min(scores, key=lambda score: score.gain)
    over = f"{bootstrap.rounds:,} rounds of {len(scores)} requests"
    gates = [
        judged(
            "requests",
            len(scores),
            spec.requests_comparison,
            spec.requests,
            unit="requests",
            denominator=f"all of {split}",
        )
    ]
    on_gain: list[tuple[str, float, Comparison, float | None]] = [
        ("gain", bootstrap.estimate, ">=", spec.gain),
        ("gain, bootstrap lower bound", bootstrap.lower, ">", spec.lower_bound),
        ("gain, no-native-regression floor", bootstrap.estimate, ">=", spec.floor),
    ]
    for name, value, comparison, threshold in on_gain:
        if threshold is not None:
            gates.append(judged(name, value, comparison, threshold, unit=TOKENS, denominator=over))
    gates.append(
        judged(
            "every request's gain",
            worst.gain,
            ">=",
            spec.request_gain,
            unit=TOKENS,
            denominator=f"{worst.rounds:,} rounds of {worst.request}, the lowest of {len(scores)} requests",
        )
    )
    totals = _totals(scores)
    for slot, (candidate, baseline) in enumerate(
        zip(totals["candidate"]["kl_mean"], totals["baseline"]["kl_mean"], strict=True), 1
    ):
        gates.append(
            judged(f"KL at slot {slot} below the baseline's", candidate, "<", baseline, unit="nats", denominator=over)
        )
    return SplitVerdict(
        split=split,
        verdict="PASS" if all(gate.holds for gate in gates) else "FAIL",
        gates=gates,
        totals=totals,
        bootstrap=bootstrap.as_dict(),
    )


def build_part(contract: Contract, requests: Iterable[RequestScore]) -> SplitPart:
    """SPLIT.json from the contract and the journal's scores.

    Raises Refused when the scores are not exactly the contract's population, or for any reason of `judge`.
    """
    scores = sorted(requests, key=lambda score: score.request)
    for score in scores:
        contract.check(_sound(score))
    missing = sorted(contract.population.keys() - {score.request for score in scores})
    if missing:
        raise Refused(
            "requests of the population are not scored",
            expected=f"{len(contract.population)} requests",
            found=f"{len(missing)} missing: {', '.join(missing[:5])}",
            where=contract.split,
        )
    return SplitPart(contract=contract, requests=scores, judgement=judge(contract.split, scores))


def bind(parts: Mapping[str, Any]) -> G2:
    """g2.json from the three parts (SPLIT → SplitPart or the JSON value of SPLIT.json): PASS only when all pass.

    Every part is judged again from its own requests. Raises Refused when a part is missing, stands under another
    split's name, does not follow from its requests, or belongs to another run than the others.
    """
    if set(parts) != set(SPECS):
        raise Refused("G2 needs exactly its three parts", expected=", ".join(SPECS), found=", ".join(sorted(parts)))
    bound: dict[ScoredSplit, SplitPart] = {}
    for split in SPECS:
        value = parts[split]
        part = validated(SplitPart, value.model_dump() if isinstance(value, SplitPart) else value, f"{split}.json")
        if not part.contract.split == part.judgement.split == split:
            raise Refused("a part is of another split", expected=split, found=part.contract.split)
        again = build_part(part.contract, part.requests)
        if again != part:
            fields = [name for name, _, _ in differences(again.model_dump(), part.model_dump())]
            raise Refused(
                "a part does not follow from its own requests",
                expected="the same judgement when judged again",
                found=f"{len(fields)} fields differ: {', '.join(fields[:5])}",
                where=f"{split}.json",
            )
        bound[split] = part
    first = bound["heldout_legal"].contract
    for split, part in bound.items():
        for name, expected, found in (
            ("identities", first.identities.model_dump(), part.contract.identities.model_dump()),
            ("block_size", first.block_size, part.contract.block_size),
        ):
            if expected != found:
                raise Refused(
                    "the parts are not of one run",
                    found=", ".join(field for field, _, _ in differences(expected, found, name)),
                    where=f"{split}.json against heldout_legal.json",
                )
    return G2(
        verdict="PASS" if all(part.judgement.verdict == "PASS" for part in bound.values()) else "FAIL",
        identities=first.identities,
        block_size=first.block_size,
        parts={
            split: PartReference(
                part=part.digest,
                k2=part.contract.k2,
                verdict=part.judgement.verdict,
                requests=len(part.requests),
                rounds=sum(score.rounds for score in part.requests),
                gain=part.judgement.bootstrap["estimate"],
                gates=part.judgement.gates,
            )
            for split, part in bound.items()
        },
    )


def check_admitted(g2: G2, parts: Mapping[ScoredSplit, SplitPart], admitted: Mapping[str, str], adapter: str) -> None:
    """The verdict is on what was admitted and trained.

    Args:
        g2, parts: the verdict and the parts that it binds.
        admitted: the admission's identities: namespace, manifest, native, drafter, pilot, recipe, k2_SPLIT.
        adapter: digest of the completed adapter's file.

    Raises:
        Refused: names the identity that differs.
    """
    expected = {name: admitted.get(name) for name in ("namespace", "manifest", "native", "drafter", "pilot", "recipe")}
    found = {name: getattr(g2.identities, name) for name in (*expected, "adapter")}
    expected["adapter"] = adapter
    for split, part in parts.items():
        expected[f"k2_{split}"], found[f"k2_{split}"] = admitted.get(f"k2_{split}"), part.contract.k2
    for name, value in expected.items():
        if found[name] != value:
            raise Refused(
                f"the verdict is not on what was admitted and trained: {name} differs",
                expected=value or "an admitted one",
                found=found[name],
                where="g2.json",
            )


def _sound(score: RequestScore) -> RequestScore:
    """The score, checked again, however it was made."""
    return validated(RequestScore, score.model_dump(warnings=False), score.request)


def _totals(scores: list[RequestScore]) -> dict[str, Any]:
    rounds = sum(score.rounds for score in scores)
    return {
        "requests": len(scores),
        "rounds": rounds,
        "baseline": _arm_totals([score.baseline for score in scores], rounds),
        "candidate": _arm_totals([score.candidate for score in scores], rounds),
    }


def _arm_totals(arms: list[ArmScore], rounds: int) -> dict[str, Any]:
    """Sums and means of one arm; `math.fsum` is exact before its one rounding, so order does not matter."""
    slots = range(len(arms[0].kl_sum))
    return {
        "accepted_sum": sum(arm.accepted_sum for arm in arms),
        "accepted_per_round": sum(arm.accepted_sum for arm in arms) / rounds,
        "accepted_by_slot": [sum(arm.accepted_by_slot[k] for arm in arms) for k in slots],
        "kl_mean": [math.fsum(arm.kl_sum[k] for arm in arms) / rounds for k in slots],
    }
