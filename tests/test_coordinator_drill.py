"""The drill's own bookkeeping: it must be able to say no, and to put back what it changed."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

import pytest
from coordinator_case import PROFILE as CASE_PROFILE
from coordinator_case import git, make_case

from d2lib.coordinator.drill import Drill, Report
from d2lib.coordinator.profile import Profile, load_profile
from d2lib.coordinator.rehearsal import PROFILE, changed, find_inputs, make_checkout, wait_for
from d2lib.errors import Refused, Unexpected


def drill() -> Drill:
    return Drill(lambda _: None)


def test_a_step_that_goes_as_expected_holds() -> None:
    made = drill()
    made.step("one", "a receipt", lambda: "left\na receipt")
    made.types("two", 2, "taken", lambda: (2, "first\nrefused: slot is taken\n"))
    made.types("three", 0, "", lambda: (0, ""))
    assert made.report.holds
    assert "3 steps, 0 not as expected" in made.report.render_text()


@pytest.mark.parametrize(
    "typed", [(0, "refused: taken"), (2, "refused: another thing"), (4, "taken")], ids=["status", "words", "both"]
)
def test_a_command_that_goes_otherwise_does_not_hold(typed: tuple[int, str]) -> None:
    made = drill()
    made.types("one", 2, "taken", lambda: typed)
    made.step("two", "x", lambda: "x")
    assert [row.holds for row in made.report.rows] == [False, True]
    assert not made.report.holds
    assert "NO one" in made.report.render_text()


def test_a_step_that_fails_is_a_row_and_the_drill_goes_on() -> None:
    made = drill()
    for error in (Refused("no"), FileNotFoundError("gone"), KeyError("pid")):

        def act(error: Exception = error) -> str:
            raise error

        made.step("one", "", act)
    assert [row.holds for row in made.report.rows] == [False, False, False]
    assert "FileNotFoundError: gone" in made.report.rows[1].happened


def test_a_drill_of_no_steps_does_not_hold() -> None:
    assert not Report().holds


def test_a_changed_file_is_put_back(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one")
    path.chmod(0o444)

    def fail() -> None:
        with changed(path):
            assert path.read_bytes() == b"one "
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert path.read_bytes() == b"one"
    assert stat.S_IMODE(path.stat().st_mode) == 0o444


def test_waiting_ends() -> None:
    assert wait_for(lambda: 7, "seven") == 7
    with pytest.raises(Unexpected, match="nothing did not come"):
        wait_for(lambda: 0, "nothing", 0.05)


@pytest.mark.parametrize("with_git", [True, False])
def test_the_drills_checkout_is_the_running_tree_with_its_profile(tmp_path: Path, with_git: bool) -> None:
    case = make_case(tmp_path / "case", library=False)
    (case.source / "notebooks" / "g2.ipynb").write_text("changed and not committed")
    (case.source / "untracked.py").write_text("")
    if not with_git:
        shutil.rmtree(case.source / ".git")
    demands = Profile.model_validate(CASE_PROFILE).admission.demands
    commit = make_checkout(case.source, tmp_path / "source", demands)
    assert commit == git(tmp_path / "source", "rev-parse", "HEAD")
    assert git(tmp_path / "source", "status", "--porcelain") == ""
    assert (tmp_path / "source" / "notebooks" / "g2.ipynb").read_text() == "changed and not committed"
    assert not (tmp_path / "source" / "untracked.py").exists()
    profile = load_profile(tmp_path / "source" / PROFILE)
    assert (profile.power_logger, profile.admission.demands) == ("drill-powerlog", demands)


def test_a_run_without_a_pilot_refuses(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="the run has no pilot"):
        find_inputs(tmp_path)
