"""Where a run stands: one step after the other, what may come next, and why the rest may not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from evidence_case import make_receipt

from d2lib.errors import Refused
from d2lib.evidence.kernel import Progress
from d2lib.evidence.ledger import locked
from d2lib.evidence.status import Row, Step, as_dicts, render_text, status

TWO = (
    Step("cost_sheet"),
    Step("stage", needs=(("cost_sheet", "pass"),), optional=True),
    Step("g2", "dev", needs=(("cost_sheet", "pass"), ("stage", "pass"))),
    Step("finish", needs=(("g2-dev", "done"),)),
)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("runs/demo").mkdir(parents=True)
    return Path("runs/demo")


def rows(root: Path) -> dict[str, Row]:
    return {row.step: row for row in status(root.parent, chain=TWO)}


def test_the_real_chain_starts_with_capture_and_names_what_each_step_waits_for(root: Path) -> None:
    found = status(root.parent)
    assert [row.step for row in found if row.ready] == ["capture"]
    assert found[0].command == (
        "papermill --engine d2 notebooks/capture.ipynb runs/demo/capture/attempt-1/receipt.ipynb "
        "-f params/demo/capture.yaml"
    )
    reasons = {row.step: row.why_not for row in found}
    assert reasons["admission"] == "needs capture, which is not done"
    assert reasons["train"] == "needs admission, which is not done"
    assert reasons["finish"] == "needs g2-dev, which is not done"
    assert "stage" not in reasons  # only a run that has one waits for it
    assert [row.step for row in found] == (
        ["capture", "g1", "pilot", "cost_sheet", "admission", "train", "g2-dev", "g2-legal", "g2-general", "finish"]
    )


def test_a_run_from_its_start_to_its_verdict(root: Path) -> None:
    whole = root.resolve()
    assert [name for name, row in rows(root).items() if row.ready] == ["cost_sheet"]
    stopped = Progress(completed=1, stopped_before=2)
    make_receipt(whole, "cost_sheet", 1, progress=stopped, stopped=True)
    row = rows(root)["cost_sheet"]
    assert (row.state, row.attempt, row.ready) == ("interrupted", 1, True)
    assert row.command is not None
    assert "cost_sheet/attempt-2/receipt.ipynb" in row.command
    assert row.detail == "stopped on request before cell 2"
    assert rows(root)["g2-dev"].why_not == "needs cost_sheet, which is interrupted"

    make_receipt(whole, "cost_sheet", 2, result={}, verdict="FAIL")
    assert rows(root)["cost_sheet"].state == "verdict"
    assert rows(root)["cost_sheet"].why_not == "it is done; another attempt may be made"
    assert rows(root)["g2-dev"].why_not == "needs cost_sheet to pass, and its verdict is FAIL"

    make_receipt(whole, "cost_sheet", 3, result={}, verdict="PASS")
    assert [name for name, row in rows(root).items() if row.ready] == ["g2-dev"]
    inputs = {"receipt": "cost_sheet/attempt-3/receipt.json"}
    make_receipt(whole, "g2", 1, job="dev", inputs=inputs, result={}, verdict="FAIL")
    assert [name for name, row in rows(root).items() if row.ready] == ["finish"]  # it needs the part, not its PASS
    assert rows(root)["g2-dev"].detail == ""

    make_receipt(whole, "cost_sheet", 4, result={}, verdict="PASS")
    assert rows(root)["g2-dev"].detail == "made from cost_sheet attempt 3, and attempt 4 is newer"
    text = render_text(list(rows(root).values()))
    assert "g2-dev       FAIL          attempt 1" in text
    assert text.splitlines()[-1].strip().startswith("papermill --engine d2 notebooks/finish.ipynb")
    json.dumps(as_dicts(list(rows(root).values())))


def test_what_runs_and_what_was_killed(root: Path) -> None:
    folder = root / "cost_sheet" / "attempt-1"
    folder.mkdir(parents=True)
    (folder / "working.json").write_text('{"started":"2026-01-01T00:00:00Z"}')
    row = rows(root)["cost_sheet"]
    assert (row.state, row.ready) == ("killed", True)
    assert row.command is not None
    assert "attempt-2" in row.command
    with locked(root / "cost_sheet" / ".lock", wait=False):
        assert rows(root)["cost_sheet"].detail == "starting"
        began = {"papermill": {"start_time": "2026-01-01T00:00:01"}}
        streams = [{"output_type": "stream", "name": "stderr", "text": ["before\n", " 40%|####      | 4/10\n"]}]
        cells = [
            {"cell_type": "markdown", "source": "# x", "metadata": {}},
            {"cell_type": "code", "source": ["x = 1"], "metadata": began, "outputs": []},
            {"cell_type": "code", "source": ["run()"], "metadata": began, "outputs": streams},
            {"cell_type": "code", "source": ["end()"], "metadata": {}, "outputs": []},
        ]
        (folder / "working.ipynb").write_text(json.dumps({"cells": cells}))
        row = rows(root)["cost_sheet"]
        assert (row.state, row.ready, row.when) == ("running", False, "2026-01-01T00:00:00Z")
        assert row.detail.startswith("cell 2 of 3, saved ")
        assert row.detail.endswith(" s ago: 40%|####      | 4/10")
        assert row.why_not == "attempt 1 is running"


@pytest.mark.parametrize("text", ["[" * 5000 + "]" * 5000, "[1]", '{"a":1,"a":2}', "\ufeff{}"])
def test_damaged_working_files_are_no_end_of_the_status(root: Path, text: str) -> None:
    folder = root / "cost_sheet" / "attempt-1"
    folder.mkdir(parents=True)
    for name in ("working.json", "working.jsonl", "working.ipynb"):
        (folder / name).write_text(text)
    assert rows(root)["cost_sheet"].state == "killed"
    with locked(root / "cost_sheet" / ".lock", wait=False):
        assert rows(root)["cost_sheet"].state == "running"


def test_a_stage_that_was_begun_is_waited_for(root: Path) -> None:
    make_receipt(root.resolve(), "cost_sheet", 1, result={})
    folder = root / "stage" / "attempt-1"
    folder.mkdir(parents=True)
    (folder / "working.json").write_text("{}")
    assert rows(root)["g2-dev"].why_not == "needs stage, which is killed"


def test_a_broken_ledger_lets_nothing_start(root: Path) -> None:
    make_receipt(root.resolve(), "cost_sheet", 1, result={})
    with (root / "LEDGER.jsonl").open("a") as ledger:
        ledger.write("{}\n")
    found = status(root, chain=TWO)
    assert not any(row.ready for row in found)
    assert all("see d2 verify runs/demo" in str(row.why_not) for row in found)


def test_no_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="no runs here"):
        status(tmp_path / "none")
