"""What pages and cards say of a verdict's numbers: which number, of what, on what."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from gates_cases import digest, part
from hypothesis import given
from hypothesis import strategies as st

from d2lib.gates.words import TRAJECTORY, headline, judged_on, judged_on_html, judged_on_rows, signed, summary

ROOT = Path(__file__).resolve().parent.parent
PARTS = {split: part(split) for split in ("dev", "heldout_legal", "heldout_general")}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.634, "+0.634"),
        (1.054, "+1.054"),
        (-0.297, "-0.297"),
        (12.3456, "+12.346"),
        (0.0123456, "+0.0123"),
        (-0.000123456, "-0.000123"),
        (0.0, "+0.000"),
    ],
)
def test_gains_are_shown_with_sign_and_three_digits(value: float, text: str) -> None:
    assert signed(value) == text


@given(st.floats(1e-6, 1e3) | st.floats(-1e3, -1e-6))
def test_what_is_shown_is_right_to_three_digits(value: float) -> None:
    assert math.isclose(float(signed(value)), value, rel_tol=5.01e-3)
    assert re.fullmatch(r"[+-]\d+\.\d{3,9}", signed(value))


def test_the_headline_says_what_the_number_is() -> None:
    """Eight of forty rounds gain one token in every one of 20 requests: 0.2, whichever requests are drawn."""
    assert headline(PARTS["heldout_legal"].judgement) == (
        "gain +0.200 accepted draft tokens per round, bonus excluded, 95% interval [+0.200, +0.200], 20 requests, "
        "800 rounds"
    )


def test_the_summary_names_every_split_and_its_interval() -> None:
    judged = {split: one.judgement for split, one in PARTS.items()}
    text = summary(judged)
    for words in ("accepted draft tokens per round", "bonus excluded", "95% interval"):
        assert text.count(words) == 1
    for split, one in judged.items():
        population = f"{one.totals['requests']} requests, {one.totals['rounds']:,} rounds"
        assert f"{split} {one.verdict} +0.200 [+0.200, +0.200], {population}" in text


def test_what_a_verdict_was_judged_on_is_complete() -> None:
    target = {"name": "case", "config": digest("e"), "sha256": digest("f")}
    facts = judged_on(PARTS, target)
    assert facts["splits"]["dev"] == {"requests": 30, "rounds": 1200, "k2": digest("c")}
    assert facts["identities"] == PARTS["dev"].contract.identities.model_dump()
    rows = {row["judged on"]: row["which"] for row in judged_on_rows(facts)}
    assert rows["heldout_general"] == f"10 requests, 400 rounds; K2 {digest('c')}"
    assert rows["target"] == f"name case; config {digest('e')}; sha256 {digest('f')}"
    assert rows["data (manifest)"] == digest("0")
    page = judged_on_html(facts)
    assert TRAJECTORY.replace("'", "&#x27;") in page
    assert all(which in page for which in rows.values())
    assert "manifest" in {row["judged on"]: row["which"] for row in judged_on_rows(judged_on(PARTS))}["target"]


def test_names_from_outside_are_escaped() -> None:
    page = judged_on_html(judged_on(PARTS, {"name": "<script>alert(1)</script>"}))
    assert "<script>" not in page


@pytest.mark.parametrize("name", ["g2", "finish"])
def test_the_pages_show_it(name: str) -> None:
    cells = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    assert "judged_on_html(facts)" in code
    assert '"judged_on": facts' in code
    assert ("headline(judgement)" if name == "g2" else "summary(judged)") in code
