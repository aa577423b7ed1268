"""Parameters, the in-notebook interface outside the engine, streams, and the environment that children get."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from evidence_case import make_receipt, make_run
from hypothesis import given, settings
from hypothesis import strategies as st

from d2lib.errors import ExitStatus, Interrupted, Refused
from d2lib.evidence import environment, notebook
from d2lib.evidence.engine import plain
from d2lib.evidence.environment import child_environment, describe_environment, library_path
from d2lib.evidence.kernel import Progress, Stop, append_stream
from d2lib.evidence.layout import is_receipts_own, parse_output
from d2lib.evidence.phase import CONTEXT, Context, Phase, describe_error, validate_parameters
from d2lib.evidence.receipts import exit_status, record_input
from d2lib.evidence.verify import verify
from d2lib.files import Record, canonical_json, record_tree


class Params(Record):
    run: str
    rate: float
    steps: int = 3
    sizes: tuple[int, ...] = (1, 2)


GOOD: dict[str, Any] = {"run": "runs/demo", "rate": 0.5}


# ------------------------------------------------------------------------------------------------ parameters


def test_parameters_as_yaml_gives_them_are_taken(tmp_path: Path) -> None:
    params = validate_parameters(Params, {**GOOD, "rate": 1, "sizes": [4, 5]})
    assert params == Params(run="runs/demo", rate=1.0, steps=3, sizes=(4, 5))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"speed": 1}, "an unknown parameter; expected: one of run, rate, steps, sizes; found: speed"),
        ({"rate": "fast"}, "the parameter rate is wrong"),
        ({"rate": float("inf")}, "the parameter rate is not a plain value"),
        ({"rate": float("nan")}, "the parameter rate is not a plain value"),
        ({"steps": 1.5}, "the parameter steps is wrong"),
        ({"steps": "3"}, "the parameter steps is wrong"),
        ({"steps": True}, "the parameter steps is wrong"),
        ({"steps": 2**60}, "the parameter steps is not a plain value"),
        ({"run": 7}, "the parameter run is wrong"),
        ({"sizes": [1, "2"]}, "the parameter sizes.1 is wrong"),
        ({"run": {1, 2}}, "the parameter run is not a plain value"),
    ],
)
def test_parameters_that_are_not_exactly_right_are_refused_by_name(change: dict[str, Any], words: str) -> None:
    with pytest.raises(Refused, match=words.split(";")[0].replace(".", r"\.")) as caught:
        validate_parameters(Params, {**GOOD, **change})
    assert str(caught.value).startswith(words)


def test_a_missing_parameter_is_named() -> None:
    with pytest.raises(Refused, match="the parameter rate is missing"):
        validate_parameters(Params, {"run": "x"})


def test_refused_parameters_are_kept_as_their_repr() -> None:
    value = plain({"a": float("inf"), "b": [1, {2, 3}], 4: None})
    assert value == {"a": "inf", "b": [1, "{2, 3}"], "4": None}
    canonical_json(value)


# --------------------------------------------------------------------------------------------------- preview


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("sound") / "runs" / "demo")


@pytest.fixture
def run(sound: Path, tmp_path: Path) -> Path:
    (tmp_path / "notebooks").mkdir()
    return Path(shutil.copytree(sound, tmp_path / "runs" / "demo"))


def begin(**variables: Any) -> Phase[Params]:
    return Phase.begin("cost_sheet", Params, {**GOOD, "other": 1, **variables})


def test_a_product_is_the_newest_done_attempts_and_exactly_what_its_receipt_names(run: Path) -> None:
    (run / "full" / "dev.json").chmod(0o644)
    phase = begin(run=str(run))
    assert phase.product("g2-dev", "dev") == run / "full" / "dev.json"
    phase = begin(run=str(run))
    with pytest.raises(Refused, match="the receipt of g2-dev names no admission"):
        phase.product("g2-dev", "admission")
    with pytest.raises(Refused, match="admission is not done"):
        phase.product("admission", "admission")
    (run / "full" / "dev.json").write_text('{"gain":0.75}\n')
    with pytest.raises(Refused, match="dev is not what g2-dev made"):
        begin(run=str(run)).product("g2-dev", "dev")


def test_an_admission_of_the_old_layout_is_found_by_its_receipt(run: Path) -> None:
    """Where its product lay once, beside the attempts."""
    make_receipt(run, "admission", 1, outputs={}, result={"held": 1})
    (run / "admission" / "admitted.json").write_text("{}")
    made = {"admission": "admission/admitted.json"}
    make_receipt(run, "admission", 2, outputs=made, result={"held": 1})
    assert begin(run=str(run)).product("admission", "admission") == run / "admission" / "admitted.json"


def test_outside_the_engine_a_phase_reads_the_run_and_writes_elsewhere(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = record_tree(run)
    notebooks = run.parent.parent / "notebooks"
    monkeypatch.chdir(notebooks)  # where Jupyter starts; the run is found from there upwards
    phase = begin()
    assert phase.preview
    assert phase.root == run
    assert phase.params.rate == 0.5
    assert phase.input("assembly", "assembly") == run / "assembly"
    assert phase.receipt("finish").verdict == "FAIL"
    table = phase.output("table", phase.attempt_dir / "table.csv")
    assert table == phase.attempt_dir / "table.csv"
    for path in (phase.output("sheet", "cost/sheet.txt"), table):
        path.write_text("x")
        assert not path.is_relative_to(run)
    phase.record({"x": 1}, "PASS")
    assert record_tree(run) == before


@pytest.mark.parametrize(
    "path",
    [
        "../elsewhere",
        "/etc/passwd",
        "",
        "LEDGER.jsonl",
        "cost/.lock",
        "cost/receipt.json",
        "g2-dev/attempt-1",
        "g2-dev/attempt-1/x.txt",
    ],
)
def test_an_output_that_leaves_the_run_or_is_evidence_is_refused(
    run: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent.parent)
    with pytest.raises(Refused):
        begin().output("x", path)


def test_an_output_through_a_link_is_refused(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (run / "out").symlink_to(tmp_path)
    with pytest.raises(Refused, match="a link is not allowed here"):
        begin().output("x", "out/x.txt")


def test_a_phase_records_one_sound_result(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent.parent)
    phase = begin()
    made = phase.output("made", "made.txt")
    phase.input("log", "full/log.txt")
    with pytest.raises(Refused, match="a label stands twice"):
        phase.input("log", "full/log.txt")
    for result, verdict, words in (
        ({"x": float("nan")}, None, "no canonical JSON"),
        ({"x": {1}}, None, "no canonical JSON"),
        ([], None, "not a mapping"),
        ({}, "pass", "no such verdict"),
        ({}, None, "the output made was not made"),
    ):
        with pytest.raises(Refused, match=words):
            phase.record(result, verdict)  # type: ignore[arg-type]
    made.write_text("x")
    log = run / "full/log.txt"
    kept = log.read_bytes()
    log.write_bytes(kept + b"more")
    with pytest.raises(Refused, match="the input log changed while the phase ran"):
        phase.record({})
    log.write_bytes(kept)
    phase.record({})
    with pytest.raises(Refused, match="one result"):
        phase.record({})
    with pytest.raises(Refused, match="recorded already"):
        phase.input("late", "full/log.txt")


def test_a_folder_that_gains_a_file_is_a_changed_input(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent.parent)
    phase = begin()
    phase.input("assembly", "assembly")
    (run / "assembly" / "new.bin").write_bytes(b"")
    with pytest.raises(Refused, match="the input assembly changed"):
        phase.record({})


def context(root: Path, **changes: Any) -> str:
    values = {
        "namespace": "demo",
        "phase": "cost_sheet",
        "job": None,
        "attempt": 1,
        "root": str(root),
        "attempt_dir": str(root),
        "library": str(environment.library_folder()),
        "parameters_sha256": "sha256:" + "0" * 64,
    }
    return Context.model_validate({**values, **changes}).model_dump_json()


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"phase": "train"}, "names another phase"), ({}, "a parameter was changed in the notebook")],
)
def test_a_notebook_that_is_not_what_its_engine_started_is_refused(
    run: Path, changes: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CONTEXT, context(run, **changes))
    with pytest.raises(Refused, match=words):
        begin()
    assert CONTEXT not in os.environ


def test_an_input_folders_record_names_every_file_and_no_receipt(run: Path) -> None:
    record = record_input("all", run / "g2-dev", "g2-dev")
    assert record.files == {}
    record = record_input("assembly", run / "assembly", "assembly")
    assert record.files is not None
    assert {name: size for name, (size, _) in record.files.items()} == {
        "MANIFEST.json": 11,
        "empty.bin": 0,
        "shard.bin": 2304,
    }
    assert record.size == 2315


# --------------------------------------------------------------------------------- judging, without a kernel


@pytest.mark.parametrize(
    ("progress", "stopped", "status", "words"),
    [
        (Progress(completed=2, stopped_before=3), True, "interrupted", "stopped on request before cell 3"),
        (Progress(completed=2, error_in=3, error=("KeyboardInterrupt", "")), True, "interrupted", "in cell 3: stopped"),
        (Progress(completed=2, error_in=3, error=("KeyboardInterrupt", "")), False, "failed", "KeyboardInterrupt"),
        (Progress(completed=2, error_in=3, error=("Refused", "by another class")), False, "failed", "Refused: by"),
        (Progress(completed=2, died_in=3), False, "failed", "the kernel died in cell 3 of 4; 1 never ran"),
        (Progress(trouble="the kernel could not be run: no"), False, "failed", "could not be run"),
        (Progress(completed=2), False, "failed", "2 of 4 code cells ran"),
        (Progress(completed=4), True, "failed", "exactly one result; found: 0"),
    ],
)
def test_what_came_of_an_execution(tmp_path: Path, progress: Progress, stopped: bool, status: str, words: str) -> None:
    root = tmp_path / "runs" / "demo"
    receipt, _ = make_receipt(root, "finish", 1, progress=progress, stopped=stopped)
    assert receipt.status == status
    assert words in str(receipt.message)
    assert receipt.exit_status == {"interrupted": 3, "failed": 4}[status]


def test_a_declared_output_that_was_not_made_fails(tmp_path: Path) -> None:
    receipt, _ = make_receipt(tmp_path / "runs" / "demo", "finish", 1, outputs={"x": "x.txt"}, result={})
    assert (receipt.status, receipt.message) == ("failed", "the output x was not made")


def test_a_notebook_that_cannot_be_evidence_fails_without_its_outputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put_nan(nb: Any) -> None:
        nb.cells[-1].outputs[0].data["application/vnd.plot+json"] = {"y": [float("nan")]}

    receipt, _ = make_receipt(tmp_path / "runs" / "nan", "finish", 1, result={}, edit=put_nan)
    assert receipt.status == "failed"
    assert "not strict JSON" in str(receipt.message)
    monkeypatch.setattr(notebook, "MAX_BYTES", 4000)
    receipt, attempt = make_receipt(tmp_path / "runs" / "large", "finish", 1, result={"x": "x" * 4000})
    assert receipt.status == "failed"
    assert "its outputs were dropped" in str(receipt.message)
    assert attempt.file("receipt.ipynb").stat().st_size < 4000
    assert verify(tmp_path / "runs" / "large").holds


def test_a_stop_waits_for_the_kernel_to_execute_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    before = signal.getsignal(signal.SIGINT)  # a job in a shell's background starts with SIGINT ignored
    with Stop().listening() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert (stop.requested, sent) == (True, [])  # an idle kernel would ignore it
        stop.pid = 17
        stop.deliver()
        stop.deliver()
        assert sent == [(17, signal.SIGINT)]
        signal.raise_signal(signal.SIGINT)
        assert sent == [(17, signal.SIGINT)] * 2
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (Refused("no"), "refused"),
        (Interrupted("later"), "interrupted"),
        (KeyboardInterrupt(), "keyboard"),
        (ValueError("no"), "failed"),
        (type("Refused", (Exception,), {})("another of that name"), "failed"),
    ],
)
def test_an_exceptions_kind_is_its_class_and_not_its_name(error: BaseException, kind: str) -> None:
    assert describe_error(error)["kind"] == kind


def test_exit_statuses() -> None:
    assert exit_status("done", None) is exit_status("done", "PASS") is ExitStatus.DONE
    assert exit_status("done", "FAIL") is exit_status("done", "INCONCLUSIVE") is ExitStatus.VERDICT
    assert [int(exit_status(status, None)) for status in ("refused", "interrupted", "failed")] == [2, 3, 4]


# --------------------------------------------------------------------------------- streams, places, environment


def terminal(text: str) -> str:
    """An independent, literal reading: a carriage return goes to the line's start, and the next text wipes the line."""
    lines, line, returned = [], "", False
    for character in text:
        if character == "\n":
            lines.append(line)
            line, returned = "", False
        elif character == "\r":
            returned = True
        else:
            line, returned = ("" if returned else line) + character, False
    return "\n".join([*lines, line + ("\r" if returned else "")])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(alphabet="ab\r\n", max_size=6), max_size=8))
def test_a_stream_keeps_what_a_terminal_would_show(pieces: list[str]) -> None:
    text = ""
    for piece in pieces:
        text = append_stream(text, piece)
    assert terminal(text).rstrip("\r") == terminal("".join(pieces)).rstrip("\r")
    assert "\r" not in text[:-1]


def test_a_bar_of_many_updates_stays_one_line() -> None:
    text = ""
    for step in range(1000):
        text = append_stream(text, f"\r{step:4d}/1000")
    assert text == " 999/1000"


@pytest.mark.parametrize(
    ("output", "phase", "job"),
    [("runs/demo/g2-dev/attempt-12/receipt.ipynb", "g2", "dev"), ("a/b/train/attempt-1/receipt.ipynb", "train", None)],
)
def test_an_output_names_its_attempt(tmp_path: Path, output: str, phase: str, job: str | None) -> None:
    attempt = parse_output(tmp_path / output, phase)
    assert (attempt.phase, attempt.job) == (phase, job)
    assert attempt.folder == tmp_path / Path(output).parent
    assert attempt.namespace == Path(output).parts[1]


def test_receipts_in_a_folder_are_never_part_of_it() -> None:
    assert is_receipts_own("attempt-1/receipt.json")
    assert is_receipts_own("x/attempt-3/y/z")
    assert is_receipts_own(".lock")
    assert not is_receipts_own("attempt-1")
    assert not is_receipts_own("attempt-x/receipt.json")


def test_children_get_the_allowlist_and_nothing_else() -> None:
    source = {"PATH": "/bin", "LC_ALL": "C", "GIT_DIR": "/x", "AWS_SECRET": "s", "OMP_NUM_THREADS": "2", "D2_X": "1"}
    expected = {"PATH": "/bin", "LC_ALL": "C", "OMP_NUM_THREADS": "2", "MINE": "1"}
    assert child_environment({"MINE": "1"}, source=source) == expected | {"OMP_WAIT_POLICY": "PASSIVE"}
    assert child_environment(source={"OMP_WAIT_POLICY": "ACTIVE"}) == {"OMP_WAIT_POLICY": "ACTIVE"}


def test_the_environments_record_is_canonical_and_says_what_is_installed() -> None:
    record = describe_environment()
    canonical_json(record)
    assert record["distributions"]["papermill"] == "2.7.0"
    assert list(record["distributions"]) == sorted(record["distributions"])
    assert record["python"] == ".".join(map(str, sys.version_info[:3]))
    assert "HOME" not in record["variables"]


def test_the_librarys_digest_covers_every_source_and_no_byte_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.py").write_text("x = 1")
    monkeypatch.setattr(environment, "library_folder", lambda: tmp_path)
    first = environment.library_sha256()
    (tmp_path / "sub" / "__pycache__").mkdir()
    (tmp_path / "sub" / "__pycache__" / "a.pyc").write_bytes(b"x")
    assert environment.library_sha256() == first
    os.link(tmp_path / "sub" / "a.py", tmp_path / "b.py")  # as installers do
    second = environment.library_sha256()
    assert second != first
    (tmp_path / "b.py").write_text("x = 2")
    assert environment.library_sha256() not in (first, second)


def test_a_child_imports_the_library_that_runs() -> None:
    parent = str(environment.library_folder().parent)
    assert library_path(None) in (None, parent)
    assert library_path(f"/x{os.pathsep}{parent}") == f"/x{os.pathsep}{parent}"
