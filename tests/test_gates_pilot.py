"""The pilot's decision table, row by row, and what its scores file may not be."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from d2lib.errors import Refused
from d2lib.files import canonical_json, parse_json, write_json
from d2lib.gates.bootstrap import Bootstrap, paired_request_bootstrap
from d2lib.gates.pilot import (
    PilotScores,
    PilotVerdict,
    above,
    agrees,
    at_least,
    judge_pilot,
    load_scores,
    main,
)

ROUNDS = 40
DIGEST = "sha256:" + "ab" * 32


def rounds(plus: int) -> dict[str, list[int]]:
    """One request: baseline accepts 2 in every round; FAST and REF gain `plus`/40 (negative: lose)."""
    arm = [2 + int(math.copysign(1, plus))] * abs(plus) + [2] * (ROUNDS - abs(plus))
    return {"anchors": list(range(128, 128 + 3 * ROUNDS, 3)), "baseline": [2] * ROUNDS, "fast": arm, "ref": list(arm)}


def scores(legal: list[int], dev: list[int] | None = None) -> dict[str, Any]:
    """A scores file in which request i gains the i-th number of 40ths of a token per round."""
    splits = {"heldout_legal": legal, "dev": dev if dev is not None else [10] * 20}
    return {
        "schema_version": 1,
        "namespace": "demo",
        "sample_identity": DIGEST,
        "adapters": {"fast": DIGEST, "ref": DIGEST},
        "block_size": 5,
        "splits": {s: {f"{s}-{i:02}": rounds(p) for i, p in enumerate(v)} for s, v in splits.items()},
    }


def verdict(value: dict[str, Any]) -> PilotVerdict:
    return judge_pilot(PilotScores.model_validate(value))


def states(value: dict[str, Any]) -> dict[str, str]:
    return {gate.name: gate.state for gate in verdict(value).gates if gate.state != "holds"}


def shift_ref(value: dict[str, Any], split: str, plus: list[int]) -> dict[str, Any]:
    """Let REF accept one more token than FAST in the first `plus[i]` rounds of request i."""
    for request, extra in zip(value["splits"][split].values(), plus, strict=True):
        request["ref"] = [a + 1 for a in request["fast"][:extra]] + request["fast"][extra:]
    return value


def test_a_clear_gain_passes() -> None:
    result = verdict(scores([8] * 20))
    assert result.verdict == "PASS"
    assert [gate.name for gate in result.gates] == [
        "legal_gain",
        "legal_lower_bound",
        "dev_floor",
        "agreement_dev",
        "agreement_heldout_legal",
    ]
    assert result.intervals["heldout_legal.fast"]["estimate"] == 0.2
    assert result.intervals["heldout_legal.fast_minus_ref"]["estimate"] == 0.0
    assert int(result.exit_status) == 0


def test_threshold_of_the_legal_gain_is_inclusive() -> None:
    assert states(scores([6] * 20)) == {}  # 6/40 = 0.15 exactly
    below = scores([6] * 20)
    below["splits"]["heldout_legal"]["heldout_legal-00"]["fast"][0] = 2
    below["splits"]["heldout_legal"]["heldout_legal-00"]["ref"][0] = 2
    assert states(below) == {"legal_gain": "undecided"}


# every way out of PASS, each by one gate alone
ALONE = [
    ("legal_gain", "fails", "FAIL", scores([3] * 20)),
    ("legal_gain", "undecided", "INCONCLUSIVE", scores([2, 8] * 10)),
    ("legal_lower_bound", "undecided", "INCONCLUSIVE", scores([-40, -30, *[20] * 2, *[30] * 4])),
    ("dev_floor", "fails", "FAIL", scores([8] * 20, [-2] * 20)),
    ("dev_floor", "undecided", "INCONCLUSIVE", scores([8] * 20, [-4, 2] * 10)),
    ("agreement_dev", "fails", "FAIL", shift_ref(scores([8] * 20), "dev", [4] * 20)),
    ("agreement_dev", "undecided", "INCONCLUSIVE", shift_ref(scores([8] * 20), "dev", [0, 4] * 10)),
    ("agreement_heldout_legal", "fails", "FAIL", shift_ref(scores([8] * 20), "heldout_legal", [4] * 20)),
    ("agreement_heldout_legal", "undecided", "INCONCLUSIVE", shift_ref(scores([8] * 20), "heldout_legal", [0, 4] * 10)),
]


@pytest.mark.parametrize(("gate", "state", "word", "value"), ALONE)
def test_one_gate_alone_says_no(gate: str, state: str, word: str, value: dict[str, Any]) -> None:
    assert states(value) == {gate: state}
    assert verdict(value).verdict == word
    assert int(verdict(value).exit_status) == 1


@pytest.mark.parametrize(("split", "low", "high"), [("heldout_legal", 5, 7), ("dev", -1, 0)])
def test_gains_are_fasts_and_the_difference_is_fast_minus_ref(split: str, low: int, high: int) -> None:
    """One arm on either side of the gate, the two closer than they must agree: FAST decides."""
    plus = {"heldout_legal": [8] * 20, "dev": [10] * 20} | {split: [low] * 20}
    higher = {"heldout_legal": [8] * 20, "dev": [10] * 20} | {split: [high] * 20}
    fast_low = scores(plus["heldout_legal"], plus["dev"])
    ref_high = scores(higher["heldout_legal"], higher["dev"])
    for request, other in zip(fast_low["splits"][split].values(), ref_high["splits"][split].values(), strict=True):
        request["ref"], other["ref"] = other["ref"], request["ref"]
    gate = {"heldout_legal": "legal_gain", "dev": "dev_floor"}[split]
    assert states(fast_low) == {gate: "fails"}
    assert states(ref_high) == {}
    difference = verdict(fast_low).intervals[f"{split}.fast_minus_ref"]["estimate"]
    assert difference == pytest.approx((low - high) / ROUNDS)


def test_a_failing_gate_outweighs_an_undecided_one() -> None:
    assert states(scores([-8] * 20, [-4, 2] * 10)) == {
        "legal_gain": "fails",
        "legal_lower_bound": "fails",
        "dev_floor": "undecided",
    }
    assert verdict(scores([-8] * 20, [-4, 2] * 10)).verdict == "FAIL"


NUMBERS = paired_request_bootstrap([1, 2], [10, 10])


def interval(lower: float, estimate: float, upper: float) -> Bootstrap:
    return replace(NUMBERS, lower=lower, estimate=estimate, upper=upper, resamples=np.empty(0))


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("function", "numbers", "state"),
    [
        (lambda i: at_least(i, 0.15), (0.10, 0.15, 0.2), "holds"),
        (lambda i: at_least(i, 0.15), (0.10, 0.1499999, 0.15), "undecided"),
        (lambda i: at_least(i, 0.15), (0.10, 0.12, 0.1499999), "fails"),
        (above, (1e-9, 0.2, 0.3), "holds"),
        (above, (0.0, 0.2, 0.3), "undecided"),
        (above, (-0.1, -0.05, 0.0), "undecided"),
        (above, (-0.1, -0.05, -1e-9), "fails"),
        (agrees, (-0.05, 0.0, 0.05), "holds"),
        (agrees, (-0.0500001, 0.0, 0.05), "undecided"),
        (agrees, (-0.05, 0.0, 0.0500001), "undecided"),
        (agrees, (-0.2, 0.0, 0.2), "undecided"),
        (agrees, (0.05, 0.06, 0.07), "undecided"),
        (agrees, (0.0500001, 0.06, 0.07), "fails"),
        (agrees, (-0.07, -0.06, -0.0500001), "fails"),
        (lambda i: at_least(i, 0.15), (NAN, NAN, NAN), "undecided"),
        (lambda i: at_least(i, 0.15), (0.2, INF, INF), "undecided"),
        (above, (NAN, 0.2, 0.3), "undecided"),
        (above, (INF, INF, INF), "undecided"),
        (agrees, (NAN, 0.0, 0.01), "undecided"),
        (agrees, (-0.01, 0.0, NAN), "undecided"),
    ],
)
def test_table_of_states(function: Any, numbers: tuple[float, float, float], state: str) -> None:
    assert function(interval(*numbers)) == state


def test_verdict_is_a_function_of_the_scores_and_not_of_their_order() -> None:
    value = scores([8, 9, 3, 12] * 5)
    turned = {**value, "splits": {s: dict(reversed(r.items())) for s, r in reversed(value["splits"].items())}}
    assert canonical_json(verdict(value).model_dump()) == canonical_json(verdict(turned).model_dump())


def test_identities_follow_what_they_name() -> None:
    first = verdict(scores([8] * 20)).identities
    moved = scores([8] * 20)
    moved["splits"]["dev"]["dev-03"]["anchors"][-1] += 1
    changed = {key for key, value in verdict(moved).identities.items() if value != first[key]}
    assert changed == {"units_dev", "scores"}


def damage(path: str, value: Any) -> dict[str, Any]:
    """Valid scores with one field replaced (or removed, where the value is None)."""
    whole = scores([8] * 3, [8] * 3)
    *parents, last = path.split("/")
    place: Any = whole
    for part in parents:
        place = place[part]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return whole


LEGAL = "splits/heldout_legal/heldout_legal-01"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("schema_version", 2),
        ("namespace", ""),
        ("sample_identity", "ab" * 32),
        ("adapters", {"fast": DIGEST}),
        ("surprise", 1),
        ("splits/dev", None),
        ("splits/heldout_general", {}),
        (f"{LEGAL}/fast", None),
        (f"{LEGAL}/fast", [2] * (ROUNDS - 1)),
        (f"{LEGAL}/ref", [2.0] * ROUNDS),
        (f"{LEGAL}/ref", [NAN] * ROUNDS),
        (f"{LEGAL}/baseline", [True] * ROUNDS),
        (f"{LEGAL}/baseline", [6] * ROUNDS),
        (f"{LEGAL}/baseline", [-1] * ROUNDS),
        (f"{LEGAL}/anchors", [128] * ROUNDS),
        (f"{LEGAL}/anchors", list(range(-1, ROUNDS - 1))),
        (LEGAL, {"anchors": [], "baseline": [], "fast": [], "ref": []}),
    ],
)
def test_malformed_scores_are_refused(path: str, value: Any, tmp_path: Path) -> None:
    file = tmp_path / "scores.json"
    file.write_text(json.dumps(damage(path, value)))
    with pytest.raises(Refused):
        load_scores(file)


@pytest.mark.parametrize("size", [0, 1])
def test_too_few_requests_give_no_verdict(size: int) -> None:
    with pytest.raises(Refused):
        verdict(scores([8] * size))


@pytest.mark.parametrize(("value", "status"), [(scores([8] * 20), 0), (scores([3] * 20), 1)])
def test_command_prints_the_verdict_as_canonical_json(value: dict[str, Any], status: int, tmp_path: Path) -> None:
    write_json(tmp_path / "scores.json", value)
    command = [sys.executable, "-m", "d2lib.gates.pilot", str(tmp_path / "scores.json")]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (status, b"")
    assert done.stdout == canonical_json(verdict(value).model_dump()) + b"\n"
    assert PilotVerdict.model_validate(parse_json(done.stdout)) == verdict(value)


def test_command_refuses_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert int(main([str(tmp_path / "absent.json")])) == 2
    assert int(main([])) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 2


def test_verdict_needs_no_torch() -> None:
    code = "import sys, d2lib.gates.pilot; sys.exit(any(m in sys.modules for m in ('torch', 'matplotlib', 'scipy')))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
