"""Every gate and every refusal of G2, each in a case in which it alone says no."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
from gates_cases import K, anchors, contract, digest, identities, names, part, scored, scores
from pydantic import ValidationError

from d2lib.errors import Refused
from d2lib.files import read_json, sha256_file, write_json
from d2lib.gates.g2 import SPECS, SplitPart, bind, build_part, check_admitted, judge
from d2lib.gates.gate import Gate, holds, judged
from d2lib.gates.journal import Contract, ScoredSplit
from d2lib.gates.remaining import remaining_html, remaining_text
from d2lib.gates.request import ArmScore, RequestScore

SPLITS: list[ScoredSplit] = ["heldout_legal", "dev", "heldout_general"]
NAN, INF = float("nan"), float("inf")


def failing(split: ScoredSplit, requests: list[RequestScore]) -> list[str]:
    verdict = judge(split, requests)
    assert verdict.verdict == ("PASS" if all(gate.holds for gate in verdict.gates) else "FAIL")
    assert int(verdict.exit_status) == (0 if verdict.verdict == "PASS" else 1)
    return [gate.name for gate in verdict.gates if not gate.holds]


# --- the table


def test_table_is_the_published_one() -> None:
    legal, dev, general = (SPECS[split] for split in SPLITS)
    assert (legal.requests_comparison, legal.requests, legal.gain, legal.lower_bound) == (">=", 20, 0.15, 0.0)
    assert (dev.requests_comparison, dev.requests, dev.gain, dev.lower_bound) == ("==", 30, None, None)
    assert (general.requests_comparison, general.requests, general.gain) == (">=", 10, -0.03)
    assert (legal.floor, dev.floor, general.floor) == (-0.01, -0.01, None)
    assert {spec.request_gain for spec in SPECS.values()} == {-0.2}


@pytest.mark.parametrize(("split", "rows"), [("heldout_legal", 5 + K), ("dev", 3 + K), ("heldout_general", 3 + K)])
def test_a_clear_gain_passes_with_every_row_present(split: ScoredSplit, rows: int) -> None:
    verdict = judge(split, scores(split))
    assert failing(split, scores(split)) == []
    assert len(verdict.gates) == rows
    assert all(gate.unit and gate.denominator for gate in verdict.gates)
    assert verdict.totals["rounds"] == 40 * len(names(split))
    assert verdict.totals["baseline"]["accepted_per_round"] == 2.0
    assert verdict.totals["candidate"]["accepted_per_round"] == 2.2
    assert verdict.bootstrap["estimate"] == 0.2
    assert (verdict.bootstrap["resamples"], verdict.bootstrap["seed"]) == (10_000, 23)


# --- each gate alone


@pytest.mark.parametrize(
    ("split", "count", "fails"),
    [
        ("heldout_legal", 19, True),
        ("heldout_legal", 20, False),
        ("heldout_legal", 24, False),
        ("dev", 29, True),
        ("dev", 30, False),
        ("dev", 31, True),
        ("heldout_general", 9, True),
        ("heldout_general", 10, False),
        ("heldout_general", 12, False),
    ],
)
def test_number_of_requests_alone_says_no(split: ScoredSplit, count: int, fails: bool) -> None:
    assert failing(split, scores(split, count=count)) == (["requests"] if fails else [])


def test_legal_gain_alone_says_no() -> None:
    exact = scores("heldout_legal", plus=6)  # 6/40 = 0.15
    assert failing("heldout_legal", exact) == []
    assert failing("heldout_legal", [*exact[:-1], scored(exact[-1].request, 5)]) == ["gain"]


def test_lower_bound_alone_says_no() -> None:
    """Two requests carry the whole gain; without them there is none, and the bootstrap sees that."""
    legal = names("heldout_legal")
    few = [scored(name, 200, rounds=200) for name in legal[:2]] + [scored(name, -8) for name in legal[2:]]
    verdict = judge("heldout_legal", few)
    assert verdict.bootstrap["estimate"] >= 0.15
    assert failing("heldout_legal", few) == ["gain, bootstrap lower bound"]


def test_lower_bound_of_exactly_zero_says_no() -> None:
    """The comparison is strict: most requests unchanged, few with a large gain, so that the 2.5% point is 0."""
    case = [scored(name, 40 if i < 3 else 0) for i, name in enumerate(names("heldout_legal"))]
    assert judge("heldout_legal", case).bootstrap["lower"] == 0.0
    assert failing("heldout_legal", case) == ["gain, bootstrap lower bound"]


@pytest.mark.parametrize("split", SPLITS)
def test_one_request_alone_says_no(split: ScoredSplit) -> None:
    case = scores(split, plus=10)
    assert failing(split, [scored(case[0].request, -8), *case[1:]]) == []  # -8/40 = -0.2 exactly
    assert failing(split, [scored(case[0].request, -9), *case[1:]]) == ["every request's gain"]
    row = next(g for g in judge(split, [scored(case[0].request, -9), *case[1:]]).gates if not g.holds)
    assert (row.value, row.threshold) == (-9 / 40, -0.2)
    assert case[0].request in row.denominator


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("slot", range(K))
def test_divergence_of_one_slot_alone_says_no(split: ScoredSplit, slot: int) -> None:
    equal = [0.4] * K
    equal[slot] = 0.5
    case = [scored(name, 8, kl=([0.5] * K, equal)) for name in names(split)]
    assert failing(split, case) == [f"KL at slot {slot + 1} below the baseline's"]
    equal[slot] = math.nextafter(0.5, 0)
    case = [scored(name, 8, kl=([0.5] * K, equal)) for name in names(split)]
    assert failing(split, case) == []


def test_floor_of_dev_alone_says_no() -> None:
    case = scores("dev", plus=0)
    losing = [scored(name, -1 if i < 12 else 0) for i, name in enumerate(names("dev"))]  # -12/1200 = -0.01
    assert failing("dev", case) == failing("dev", losing) == []
    losing[20] = scored(losing[20].request, -1)
    assert failing("dev", losing) == ["gain, no-native-regression floor"]


def test_floor_of_legal_says_no() -> None:
    """Legal's own gain gate lies above its floor, so the floor never says no alone; its row still does."""
    low = [scored(name, -1) for name in names("heldout_legal")]
    assert "gain, no-native-regression floor" in failing("heldout_legal", low)
    assert "gain, no-native-regression floor" not in failing("heldout_legal", scores("heldout_legal", plus=0))


def test_gain_of_general_alone_says_no() -> None:
    losing = [scored(name, -1 if i < 2 else 0, rounds=40) for i, name in enumerate(names("heldout_general"))]
    losing[2] = scored(losing[2].request, -8)
    losing[3] = scored(losing[3].request, -2)  # -12/400 = -0.03
    assert failing("heldout_general", losing) == []
    losing[4] = scored(losing[4].request, -1)
    assert failing("heldout_general", losing) == ["gain"]


# --- one comparison


@pytest.mark.parametrize("comparison", [">=", ">", "<=", "<", "=="])
@pytest.mark.parametrize(("value", "threshold"), [(NAN, 0.0), (0.0, NAN), (INF, 0.0), (-INF, 0.0), (INF, INF)])
def test_what_is_not_finite_never_holds(comparison: Any, value: float, threshold: float) -> None:
    assert not holds(value, comparison, threshold)
    with pytest.raises(Refused):
        judged("g", value, comparison, threshold, unit="u", denominator="d")
    with pytest.raises(ValidationError):
        Gate(name="g", value=value, comparison=comparison, threshold=threshold, holds=True, unit="u", denominator="d")


@pytest.mark.parametrize(
    ("comparison", "truth"),
    [
        (">=", (False, True, True)),
        (">", (False, False, True)),
        ("<", (True, False, False)),
        ("<=", (True, True, False)),
        ("==", (False, True, False)),
    ],
)
def test_comparisons_mean_what_they_say(comparison: Any, truth: tuple[bool, ...]) -> None:
    assert tuple(holds(value, comparison, 1.0) for value in (0.0, 1.0, 2.0)) == truth


def test_a_row_that_contradicts_its_numbers_is_refused() -> None:
    row = judged("g", 0.1, ">=", 0.15, unit="u", denominator="d").model_dump()
    with pytest.raises(ValidationError, match="contradicts"):
        Gate.model_validate({**row, "holds": True})


# --- refusals of a split


@pytest.mark.parametrize("value", [NAN, INF, -INF, -0.5, None, "0.4"])
@pytest.mark.parametrize("arm", ["baseline", "candidate"])
def test_a_divergence_that_is_none_refuses(value: Any, arm: str) -> None:
    """Even past the schema: model_construct checks nothing, the judge checks again."""
    case = scores("dev")
    good: ArmScore = getattr(case[3], arm)
    bad = ArmScore.model_construct(**{**good.__dict__, "kl_sum": [*good.kl_sum[:-1], value]})
    case[3] = RequestScore.model_construct(**{**case[3].__dict__, arm: bad})
    with pytest.raises(Refused, match="dev-003"):
        judge("dev", case)


def test_arms_that_cover_different_rounds_refuse() -> None:
    whole, short = scored("dev-003", 8), scored("dev-003", 8, rounds=39)
    mixed = {**whole.model_dump(), "candidate": short.candidate.model_dump()}
    with pytest.raises(ValidationError, match="candidate covers 39 rounds, the request has 40"):
        RequestScore.model_validate(mixed)
    case = scores("dev")
    case[3] = RequestScore.model_construct(**{**whole.__dict__, "candidate": short.candidate})
    with pytest.raises(Refused, match="candidate covers 39 rounds"):
        judge("dev", case)


@pytest.mark.parametrize(
    "change",
    [
        {"accepted_sum": 81},
        {"accepted_by_slot": [40, 40, 0, 0, 1]},
        {"accepted_by_slot": [41, 39, 0, 0, 0]},
        {"accepted_by_slot": [40, 39, 1, 0, 0]},  # a shape that pairs contradict
        {"kl_sum": [1.0] * 4},
        {"rounds": 0},
        {"accepted_sum": 80.0},
        {"extra": 1},
    ],
)
def test_sums_that_contradict_each_other_are_refused(change: dict[str, Any]) -> None:
    score = scored("dev-000", 0).model_dump()
    score["baseline"] |= change
    with pytest.raises(ValidationError):
        RequestScore.model_validate(score)


def test_a_request_that_stands_twice_refuses() -> None:
    case = scores("dev")
    with pytest.raises(Refused, match="stands twice"):
        judge("dev", [*case[:-1], case[0]])


def test_requests_with_other_slots_refuse() -> None:
    other = RequestScore.of("dev-029", [128], ([1], [1]), ([[0.1] * 3], [[0.1] * 3]))
    with pytest.raises(Refused, match="slots"):
        judge("dev", [*scores("dev")[:-1], other])


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_requests_for_an_interval_refuse(count: int) -> None:
    with pytest.raises(Refused):
        judge("heldout_general", scores("heldout_general", count=count))


def test_coverage_must_be_the_population_exactly() -> None:
    base, case = contract("dev"), scores("dev")
    assert build_part(base, reversed(case)) == build_part(base, case)
    with pytest.raises(Refused, match="1 missing: dev-029"):
        build_part(base, case[:-1])
    with pytest.raises(Refused, match="not in the population"):
        build_part(base, [*case, scored("dev-030", 8)])
    with pytest.raises(Refused, match="stands twice"):
        build_part(base, [*case, case[0]])
    with pytest.raises(Refused, match="dev-029: rounds"):
        build_part(base, [*case[:-1], scored("dev-029", 8, rounds=39)])
    moved = RequestScore.model_validate({**case[-1].model_dump(), "anchors": digest("f")})
    with pytest.raises(Refused, match="dev-029: anchors"):
        build_part(base, [*case[:-1], moved])
    narrow = RequestScore.of("dev-029", anchors(), ([1] * 40, [1] * 40), ([[0.1] * 3] * 40, [[0.1] * 3] * 40))
    with pytest.raises(Refused, match="slots of baseline"):
        build_part(base, [*case[:-1], narrow])


def test_population_without_rounds_or_with_unusable_names_refuses() -> None:
    for population in ({"a": []}, {"../a": [128]}, {"": [128]}, {".a": [128]}, {"contract": [128]}, {"a/b": [128]}):
        with pytest.raises(Refused):
            Contract.of("dev", K, digest("c"), identities(), population)
    with pytest.raises(ValidationError):
        Contract.of("dev", K, digest("c"), identities(), {})


# --- binding


def parts(plus: int = 8) -> dict[str, SplitPart]:
    return {split: part(split, plus) for split in SPLITS}


def test_three_passing_parts_pass(tmp_path: Path) -> None:
    whole = parts()
    result = bind(whole)
    assert (result.verdict, int(result.exit_status)) == ("PASS", 0)
    assert result.identities == identities()
    for split, value in whole.items():
        write_json(tmp_path / f"{split}.json", value.model_dump())
        assert str(sha256_file(tmp_path / f"{split}.json")) == result.parts[split].part  # type: ignore[index]
    assert bind({split: read_json(tmp_path / f"{split}.json") for split in SPLITS}) == result


@pytest.mark.parametrize("split", SPLITS)
def test_one_failing_split_alone_fails_all(split: ScoredSplit) -> None:
    """And the other two, general among them, cannot rescue it."""
    result = bind({**parts(), split: part(split, plus=-8)})
    assert (result.verdict, int(result.exit_status)) == ("FAIL", 1)
    assert [name for name, value in result.parts.items() if value.verdict == "FAIL"] == [split]


@pytest.mark.parametrize("split", SPLITS)
def test_a_missing_part_refuses(split: ScoredSplit) -> None:
    whole = parts()
    del whole[split]
    with pytest.raises(Refused, match="exactly its three parts"):
        bind(whole)


def test_an_extra_or_misplaced_part_refuses() -> None:
    with pytest.raises(Refused, match="exactly its three parts"):
        bind({**parts(), "train": part("dev")})
    with pytest.raises(Refused, match="another split"):
        bind({**parts(), "dev": part("heldout_legal")})


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(
    "field", ["namespace", "manifest", "native", "drafter", "adapter", "pilot", "recipe", "source"]
)
def test_one_differing_identity_alone_refuses(split: ScoredSplit, field: str) -> None:
    other = "other" if field == "namespace" else digest("e")
    with pytest.raises(Refused, match=f"identities.{field}"):
        bind({**parts(), split: part(split, **{field: other})})


def test_another_number_of_slots_refuses() -> None:
    narrow = contract("dev").model_copy(update={"block_size": 3})
    case = [
        RequestScore.of(n, anchors(), ([1] * 40, [1] * 40), ([[0.2] * 3] * 40, [[0.1] * 3] * 40)) for n in names("dev")
    ]
    with pytest.raises(Refused, match="block_size"):
        bind({**parts(), "dev": build_part(narrow, case)})


def edit(path: str, value: Any) -> dict[str, Any]:
    """The three parts as JSON, with one field of dev replaced."""
    whole = copy.deepcopy({split: p.model_dump() for split, p in parts().items()})
    *parents, last = path.split("/")
    place: Any = whole["dev"]
    for name in parents:
        place = place[int(name) if name.isdigit() else name]
    place[int(last) if last.isdigit() else last] = value
    return whole


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("judgement/verdict", "FAIL"),
        ("judgement/gates", []),
        ("judgement/gates/0/value", 31.0),
        ("judgement/gates/1/threshold", -0.5),
        ("judgement/bootstrap/lower", 0.5),
        ("judgement/bootstrap/seed", 24),
        ("judgement/totals/rounds", 1),
        ("judgement/split", "heldout_general"),
        ("requests/0/rounds", 39),
        ("requests/0/candidate/kl_sum/0", 1.0),
        ("requests/0/candidate/kl_sum/0", NAN),
        ("contract/population/dev-000/rounds", 41),
        ("contract/k2", "none"),
        ("schema_version", 2),
        ("surprise", 1),
    ],
)
def test_an_edited_part_refuses(path: str, value: Any) -> None:
    bind(edit("schema_version", 1))
    with pytest.raises(Refused):
        bind(edit(path, value))


def test_the_last_words_say_what_the_procedure_says() -> None:
    """The procedure's own terms: what follows a PASS, what is forbidden after a FAIL, and what no verdict shows."""
    for page in (remaining_html, remaining_text):
        passed, failed = page("PASS"), page("FAIL")
        for words in ("public TEST families", "isolated real worker", "native adapter package", "V1", "G3", "GB10"):
            assert words in passed
            assert words not in failed
        for words in ("do not retune on the held-out splits", "the pilot's sample again", "keep this receipt"):
            assert words in failed.replace("&#x27;", "'")
        for words in ("development data", "committed-K2 trajectory, a proxy", "no checkpoint, package or service"):
            assert words in passed
            assert words in failed


ADMITTED = {
    **{name: getattr(identities(), name) for name in ("namespace", "manifest", "native", "drafter", "pilot", "recipe")},
    **{f"k2_{split}": digest("c") for split in SPECS},
    "g1": digest("9"),
}


@pytest.mark.parametrize("name", [*(name for name in ADMITTED if name != "g1"), "adapter"])
def test_the_verdict_is_on_what_was_admitted_and_trained(name: str) -> None:
    """One recipe, one manifest, one adapter in all three parts, but another than the admission's: only this says no."""
    parts = {split: part(split) for split in SPECS}
    g2 = bind(parts)
    check_admitted(g2, parts, ADMITTED, identities().adapter)
    other = "demo-other" if name == "namespace" else digest("f")
    admitted = ADMITTED | ({name: other} if name in ADMITTED else {})
    with pytest.raises(Refused, match=f"not on what was admitted and trained: {name} differs"):
        check_admitted(g2, parts, admitted, other if name == "adapter" else identities().adapter)
    if name in ADMITTED:
        with pytest.raises(Refused, match=f"{name} differs; expected: an admitted one"):
            check_admitted(g2, parts, {k: v for k, v in ADMITTED.items() if k != name}, identities().adapter)


def test_a_part_of_an_earlier_version_is_read_without_its_computation() -> None:
    value = part("dev").model_dump(mode="json")
    del value["contract"]["computation"]
    assert SplitPart.model_validate(value).contract.computation is None
