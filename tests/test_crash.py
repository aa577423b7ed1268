"""A share of the campaign of crashes: real phases, ended between their last product and their receipt."""

from __future__ import annotations

from pathlib import Path

import pytest
from crash_campaign import STEPS, Campaign, is_current, render

FIXTURE = Path(__file__).resolve().parent.parent / "runs" / "fixture"


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    if not FIXTURE.is_dir():
        pytest.skip("there is no runs/fixture: make fixture")
    if not is_current(FIXTURE):
        pytest.skip("runs/fixture was made by another d2lib: remove it and make fixture")
    return Campaign(FIXTURE, tmp_path_factory.mktemp("c"))


@pytest.mark.parametrize(
    ("name", "role", "place", "kind", "runs"),
    [
        ("train", "kernel", "link full/full-fast.pt", "late kill", [4, 0]),
        ("g2-general", "kernel", "link full/heldout_general.json", "late EIO", [4, 0]),
        ("finish", "kernel", "fsync full", "term", [3, 1]),
        ("finish", "engine", "link finish/attempt-1/receipt.json", "late kill", [-9, 1]),
    ],
)
def test_a_phase_that_ended_before_its_receipt_is_completed_by_the_same_command(
    campaign: Campaign, name: str, role: str, place: str, kind: str, runs: list[int]
) -> None:
    case = campaign.fault(STEPS[name], role, 0, kind, place)
    assert case.disturbed
    assert case.wrong == {}
    assert case.runs == runs
    assert "together" in render([case])
