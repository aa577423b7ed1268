"""The papermill engine with real kernels: what runs, what is refused, what is killed, and the receipt of each."""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner
from evidence_case import make_receipt, write_notebook

from d2lib.chain import read_parameters
from d2lib.errors import ExitStatus
from d2lib.evidence import engine
from d2lib.evidence.ledger import locked, read_ledger
from d2lib.evidence.receipts import Receipt, read_receipt
from d2lib.evidence.run import done_status, run_phase
from d2lib.evidence.seal import Outcome
from d2lib.evidence.status import status
from d2lib.evidence.verify import verify
from d2lib.files import Hashed, sha256_file

COST: dict[str, Any] = {"run": "runs/demo", "inputs": {"rate": 0.85}}


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder of its own; the library's digest is a constant, so that editing it disturbs no test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(engine, "library_sha256", lambda: Hashed("sha256", "5" * 64))
    return tmp_path


def start(cells: list[str], phase: str = "cost_sheet", parameters: dict[str, Any] = COST, **options: Any) -> ExitStatus:
    write_notebook(Path(f"notebooks/{phase}.ipynb"), phase, cells)
    return run_phase(Path(f"notebooks/{phase}.ipynb"), parameters, Path("runs"), "demo", **options)


def receipt(name: str = "cost_sheet", attempt: int = 1) -> Receipt:
    return read_receipt(Path(f"runs/demo/{name}/attempt-{attempt}/receipt.json"))


def papermill(*arguments: str) -> tuple[int, str]:
    """Plain papermill's command line, in this process."""
    from papermill.cli import papermill as command

    outcome = CliRunner().invoke(command, ["--engine", "d2", "--no-progress-bar", *arguments])
    return outcome.exit_code, outcome.stderr


def refuse_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*arguments: object) -> None:
        raise AssertionError("a kernel was started")

    monkeypatch.setattr(engine, "run_cells", started)


# ------------------------------------------------------------------------------------------------ what runs


def test_two_phases_with_plain_papermill_and_the_short_form_make_a_run_that_verifies(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("A_SECRET", "do not pass on")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (workplace / "prices.json").write_text("{}")
    write_notebook(
        Path("notebooks/cost_sheet.ipynb"),
        "cost_sheet",
        [
            "# The sheet",
            "import os, sys\nprices = phase.input('prices', '../../prices.json')",
            "sheet = phase.output('sheet', 'cost/sheet.txt')\nsheet.write_text(f'rate {inputs[\"rate\"]}')",
            "for step in range(3):\n    print(f'\\r{step} of 2', end='', file=sys.stderr, flush=True)",
            "phase.record({'seen': sorted(os.environ), 'pilot': pilot, 'root': str(phase.root)})",
            "   ",
        ],
    )
    Path("cost.yaml").write_text("run: runs/demo\ninputs: {rate: 0.85}\n")
    output = "runs/demo/cost_sheet/attempt-1/receipt.ipynb"
    code, err = papermill("notebooks/cost_sheet.ipynb", output, "-f", "cost.yaml")
    assert code == 0, err
    made = receipt()
    assert (made.status, made.verdict, made.exit_status, made.cells.ran) == ("done", None, 0, 7)
    assert made.parameters == {**COST, "pilot": None, "assembly": None}
    assert made.result is not None
    assert made.result["root"] == str(workplace / "runs/demo")
    assert "A_SECRET" not in made.result["seen"]
    assert "D2_PHASE_CONTEXT" not in made.result["seen"]
    assert "OMP_NUM_THREADS" in made.result["seen"]
    assert made.environment["variables"]["OMP_NUM_THREADS"] == "1"
    assert made.environment["distributions"]["papermill"] == "2.7.0"
    assert [(one.label, one.kind, one.size) for one in made.inputs] == [("prices", "file", 2)]
    assert [(one.path, one.sha256) for one in made.outputs] == [
        ("cost/sheet.txt", str(sha256_file(Path("runs/demo/cost/sheet.txt"))))
    ]
    folder = Path(output).parent
    assert sorted(path.name for path in folder.iterdir()) == ["receipt.ipynb", "receipt.json"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o444}
    streams = [o for c in json.loads(Path(output).read_bytes())["cells"] for o in c.get("outputs", []) if "name" in o]
    assert ["".join(stream["text"]) for stream in streams] == ["2 of 2"]

    cells = ["before = phase.receipt('cost_sheet')", "phase.record({'rate': before.parameters['inputs']}, 'FAIL')"]
    assert start(cells, "finish", {"run": "runs/demo"}) is ExitStatus.VERDICT
    second = receipt("finish")
    assert (second.status, second.verdict, second.exit_status) == ("done", "FAIL", 1)
    assert [(parent.phase, parent.attempt) for parent in second.parents] == [("cost_sheet", 1)]
    assert second.parents[0].receipt_json_sha256 == str(sha256_file(folder / "receipt.json"))
    shown = capfd.readouterr().err
    assert "d2: finish attempt 1: FAIL after" in shown
    assert "receipt runs/demo/finish/attempt-1/receipt.json" in shown

    report = verify(Path("runs/demo"))
    assert report.holds, report.render_text()
    assert done_status(Path("runs"), "demo", "cost_sheet") is ExitStatus.DONE
    assert done_status(Path("runs"), "demo", "finish") is ExitStatus.VERDICT
    assert done_status(Path("runs"), "demo", "train") is None


# --------------------------------------------------------------------------------- what ends badly in a cell


KILL = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"
CHANGE = "path = phase.input('notes', 'notes.txt')\npath.write_text('two')\nphase.record({})"


@pytest.mark.parametrize(
    ("cells", "status", "words"),
    [
        (["1 / 0", "phase.record({})"], "failed", "in cell 4: ZeroDivisionError: division by zero"),
        (
            ["from d2lib.errors import Refused\nraise Refused('no such thing', expected=1, found=2)"],
            "refused",
            "no such thing; expected: 1; found: 2",
        ),
        ([KILL, "x = 1", "phase.record({})"], "failed", "the kernel died in cell 4 of 6; 2 never ran"),
        ([CHANGE], "refused", "the input notes changed while the phase ran"),
    ],
    ids=["exception", "refused", "killed", "input changed"],
)
def test_a_cell_that_ends_badly_leaves_a_receipt(cells: list[str], status: str, words: str) -> None:
    Path("runs/demo").mkdir(parents=True)
    Path("runs/demo/notes.txt").write_text("one")
    kept = "kept = phase.output('kept', 'kept.txt')\nkept.write_text('kept')"
    cells = [cells[0].replace("\n", f"\n{kept}\n", 1) if "\n" in cells[0] else f"{kept}\n{cells[0]}", *cells[1:]]
    assert start(cells) == (ExitStatus.REFUSED if status == "refused" else ExitStatus.UNEXPECTED)
    made = receipt()
    assert made.status == status
    assert made.message is not None
    assert words in made.message
    assert (made.result, made.verdict) == (None, None)
    assert made.cells.ran == 3
    assert made.cells.code == 3 + len(cells)
    assert sorted(os.listdir("runs/demo/cost_sheet/attempt-1")) == ["receipt.ipynb", "receipt.json"]
    assert [one.path for one in made.outputs] == ["kept.txt"]
    assert [line.status for line in read_ledger(Path("runs/demo"))] == [status]
    assert {row.where for row in verify(Path("runs/demo")).rows if not row.holds} == {"notes.txt"}  # put by hand
    page = json.loads(Path("runs/demo/cost_sheet/attempt-1/receipt.ipynb").read_bytes())
    errors = [output for cell in page["cells"] for output in cell.get("outputs", []) if "ename" in output]
    if status == "refused":  # one clear line and no traceback
        assert [error["traceback"] for error in errors] == [[f"Refused: {made.message}"]]


def test_the_library_or_the_source_changing_while_a_phase_runs_fails_it(workplace: Path) -> None:
    path = write_notebook(Path("notebooks/cost_sheet.ipynb"), "cost_sheet", [])
    root = workplace / "runs" / "demo"
    made, _ = make_receipt(root, "finish", 1, result={})
    outcome = Outcome("done", None, made.cells, result={})
    source = engine.Source(path, str(sha256_file(path)), made.notebook.cells_sha256)
    opening = made.model_copy(
        update={
            "d2lib_sha256": "sha256:" + "5" * 64,
            "notebook": made.notebook.model_copy(update={"source_sha256": source.sha256}),
        }
    )
    assert engine.recheck(outcome, opening, source).status == "done"
    changed = engine.recheck(outcome, opening.model_copy(update={"d2lib_sha256": made.environment_sha256}), source)
    assert (changed.status, changed.result) == ("failed", None)
    assert "d2lib changed while the phase ran" in str(changed.message)
    path.write_text(path.read_text() + " ")
    assert "the notebook's source changed" in str(engine.recheck(outcome, opening, source).message)


# -------------------------------------------------------------------------------------- what is refused before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["-p", "colour", "blue"],
            "an unknown parameter; expected: one of run, inputs, pilot, assembly; found: colour",
        ),
        (["-p", "pilot", "7e1234567"], "the parameter pilot is not a plain value"),
        (["-p", "pilot", "007"], "the parameter pilot is wrong; expected: Input should be a valid string; found: 7"),
        (["-y", "inputs: null"], "the parameter inputs is wrong"),
        (["-y", "inputs: {rate: .nan}"], "a YAML number is not finite; expected: a finite number; found: .nan"),
        (["-y", "inputs: {}\ninputs: {a: 2}"], "a YAML key stands twice; found: inputs; where: -y, line 1"),
        (["-y", "inputs: &x {}\npilot: *x"], "an anchor in YAML is not allowed"),
        (["-y", "[[pilot, b]]"], "parameters are not a mapping"),
        (["-f", "twice.yaml"], "a YAML key stands twice; found: pilot"),
        (["-b", "cGlsb3Q6IGEKcGlsb3Q6IGIK"], "a YAML key stands twice; found: pilot; where: -b, line 1"),
        (["-r", "run", "elsewhere/demo"], "the parameter run and the output disagree"),
    ],
)
def test_parameters_that_papermill_would_let_pass_are_refused_with_a_receipt(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_kernels(monkeypatch)
    write_notebook(Path("notebooks/cost_sheet.ipynb"), "cost_sheet", ["phase.record({})"])
    Path("twice.yaml").write_text("assembly: a\npilot: b\npilot: c\n")
    base = ["-r", "run", "runs/demo", "-y", "inputs: {a: 1}"]
    code, err = papermill(
        "notebooks/cost_sheet.ipynb", "runs/demo/cost_sheet/attempt-1/receipt.ipynb", *base, *arguments
    )
    assert code == 2
    assert "Traceback" not in err
    made = receipt()
    assert (made.status, made.cells.ran) == ("refused", 0)
    assert words in str(made.message)
    assert verify(Path("runs/demo")).holds


def test_papermill_and_the_short_form_come_to_the_same_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_kernels(monkeypatch)
    write_notebook(Path("notebooks/cost_sheet.ipynb"), "cost_sheet", ["phase.record({})"])
    text = "run: runs/demo\ninputs: {rate: 1e-3, word: no, count: 012, day: 2026-01-01}\ncolour: blue\n"
    Path("cost.yaml").write_text(text)
    papermill("notebooks/cost_sheet.ipynb", "runs/demo/cost_sheet/attempt-1/receipt.ipynb", "-f", "cost.yaml")
    start(["phase.record({})"], parameters=read_parameters(Path("cost.yaml")), attempt=2)
    one, other = receipt(), receipt(attempt=2)
    assert one.parameters == other.parameters
    assert one.parameters["inputs"] == {"rate": 0.001, "word": "no", "count": "012", "day": "2026-01-01"}
    assert one.message == other.message


def test_a_parameter_on_the_command_line_wins_over_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_kernels(monkeypatch)
    write_notebook(Path("notebooks/cost_sheet.ipynb"), "cost_sheet", ["phase.record({})"])
    Path("cost.yaml").write_text("run: elsewhere/demo\ninputs: {}\ncolour: blue\npilot: a\n")
    more = ["-f", "cost.yaml", "-y", "pilot: b", "-p", "assembly", "1.5", "-r", "run", "runs/demo"]
    papermill("notebooks/cost_sheet.ipynb", "runs/demo/cost_sheet/attempt-1/receipt.ipynb", *more)
    shown = {"run": "runs/demo", "inputs": {}, "colour": "blue", "pilot": "b", "assembly": 1.5}
    assert receipt().parameters == shown


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize(
    ("call", "name"),
    [
        ("d2lib.evidence.notebook.os.replace", "working.ipynb"),
        ("d2lib.files.os.link", "working.json"),
        ("d2lib.files.os.fsync", "working.ipynb"),  # the first thing that is made durable
        ("d2lib.evidence.ledger._write", "LEDGER.jsonl"),
        ("d2lib.evidence.seal.write_exclusive", ""),
        ("d2lib.evidence.engine.describe_environment", ""),
    ],
)
def test_a_full_or_broken_disk_is_one_line_and_the_next_attempt_goes_on(
    call: str, name: str, code: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    refuse_kernels(monkeypatch)
    words = ["phase.record({})"]

    def broken(*arguments: object, **_: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(call, broken)
        assert start(words, parameters={"run": "runs/demo"}) is ExitStatus.UNEXPECTED
    lines = capfd.readouterr().err.splitlines()
    assert len([line for line in lines if "unexpected" in line]) == 1
    assert lines[-1].startswith(f"d2: unexpected: {os.strerror(code)} ({errno.errorcode[code]}); {engine.KEPT}")
    assert "Traceback" not in "".join(lines)
    assert name in lines[-1]
    assert start(words, parameters={"run": "runs/demo"}) is ExitStatus.REFUSED
    assert verify(Path("runs/demo")).holds


def test_a_missing_parameter_is_refused_although_the_notebook_has_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_kernels(monkeypatch)
    assert start(["phase.record({})"], parameters={"run": "runs/demo"}) is ExitStatus.REFUSED
    assert receipt().message == "the parameter inputs is missing"


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("runs/demo/cost_sheet/attempt-2/receipt.ipynb", "attempt 2 of cost_sheet is not the next one"),
        ("runs/demo/cost_sheet/attempt-0/receipt.ipynb", "no place among the receipts"),
        ("runs/demo/cost_sheet/attempt-01/receipt.ipynb", "no place among the receipts"),
        ("runs/demo/cost_sheet/attempt-1/out.ipynb", "no place among the receipts"),
        ("runs/demo/train/attempt-1/receipt.ipynb", "belongs to another phase"),
        ("runs/demo/cost_sheet-/attempt-1/receipt.ipynb", "belongs to another phase"),
        ("runs/.demo/cost_sheet/attempt-1/receipt.ipynb", "not a namespace"),
        ("receipt.ipynb", "no place among the receipts"),
        ("linked/cost_sheet/attempt-1/receipt.ipynb", "a link is not allowed here"),
    ],
)
def test_an_output_elsewhere_is_refused_and_nothing_is_written(
    output: str, words: str, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_kernels(monkeypatch)
    (workplace / "linked").symlink_to(workplace / "real")
    write_notebook(Path("notebooks/cost_sheet.ipynb"), "cost_sheet", [])
    code, err = papermill("notebooks/cost_sheet.ipynb", output, "-y", "{run: runs/demo, inputs: {}}")
    assert code == 2
    assert f"d2: refused: {words}" in err or words in err
    assert not list(workplace.rglob("receipt.*"))


def test_an_existing_receipt_is_never_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    start([], parameters={})  # refused, with a receipt
    refuse_kernels(monkeypatch)
    before = Path("runs/demo/cost_sheet/attempt-1/receipt.ipynb").read_bytes()
    assert start([], attempt=1) is ExitStatus.REFUSED
    assert Path("runs/demo/cost_sheet/attempt-1/receipt.ipynb").read_bytes() == before
    assert len(read_ledger(Path("runs/demo"))) == 1


def test_a_job_that_is_done_never_runs_again_and_status_says_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    source = write_notebook(Path("notebooks/train.ipynb"), "train", ["phase.record({'updates': 3})"])
    train: dict[str, Any] = {"run": "runs/demo"}
    assert run_phase(source, train, Path("runs"), "demo") is ExitStatus.DONE
    before = Path("runs/demo/LEDGER.jsonl").read_bytes()
    refuse_kernels(monkeypatch)
    assert run_phase(source, train, Path("runs"), "demo") is ExitStatus.REFUSED
    said = capfd.readouterr().err.strip().splitlines()[-1]
    assert "refused: train is done, and a completed job never runs again; found: attempt 1" in said
    assert Path("runs/demo/LEDGER.jsonl").read_bytes() == before
    assert sorted(path.name for path in Path("runs/demo/train").iterdir()) == [".lock", "attempt-1"]
    row = next(row for row in status(Path("runs/demo")) if row.step == "train")
    assert (row.ready, row.why_not) == (False, "it is done, and a completed job never runs again")


def test_a_receipt_whose_line_is_missing_is_completed_and_nothing_runs(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    source = write_notebook(Path("notebooks/train.ipynb"), "train", ["phase.record({'updates': 3})"])
    train: dict[str, Any] = {"run": "runs/demo"}
    assert run_phase(source, train, Path("runs"), "demo") is ExitStatus.DONE
    folder = Path("runs/demo/train/attempt-1")
    (folder / "receipt.ipynb").rename(folder / "working.ipynb")
    Path("runs/demo/LEDGER.jsonl").unlink()
    row = next(row for row in status(Path("runs/demo")) if row.step == "train")
    assert (row.state, row.detail) == ("killed", "its receipt waits for its line in the ledger")
    refuse_kernels(monkeypatch)
    assert run_phase(source, train, Path("runs"), "demo") is ExitStatus.DONE
    assert "train attempt 1: done" in capfd.readouterr().err
    assert [(line.name, line.attempt) for line in read_ledger(Path("runs/demo"))] == [("train", 1)]
    assert verify(Path("runs/demo")).holds
    assert sorted(path.name for path in Path("runs/demo/train").iterdir()) == [".lock", "attempt-1"]


def test_a_broken_ledger_refuses_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    start([], parameters={})
    refuse_kernels(monkeypatch)
    with open("runs/demo/LEDGER.jsonl", "a") as ledger:
        ledger.write('{"seq":2}\n')
    assert start([]) is ExitStatus.REFUSED
    assert sorted(os.listdir("runs/demo/cost_sheet")) == [".lock", "attempt-1"]


def test_a_receipt_is_no_source(monkeypatch: pytest.MonkeyPatch) -> None:
    start([], parameters={})
    refuse_kernels(monkeypatch)
    made = Path("runs/demo/cost_sheet/attempt-1/receipt.ipynb")
    assert run_phase(made, COST, Path("runs"), "demo") is ExitStatus.REFUSED
    assert not Path("runs/demo/cost_sheet/attempt-2").exists()


@pytest.mark.parametrize("option", [["-k", "julia"], ["-l", "R"]])
def test_another_kernel_is_refused(option: list[str]) -> None:
    write_notebook(Path("notebooks/cost_sheet.ipynb"), "cost_sheet", [])
    output = "runs/demo/cost_sheet/attempt-1/receipt.ipynb"
    code, err = papermill("notebooks/cost_sheet.ipynb", output, "-y", "{run: a, inputs: {}}", *option)
    assert code == 2
    assert "was asked for" in err


def test_a_phase_that_runs_already_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_kernels(monkeypatch)
    Path("runs/demo/cost_sheet").mkdir(parents=True)
    with locked(Path("runs/demo/cost_sheet/.lock"), wait=False):
        assert start([]) is ExitStatus.REFUSED
    assert not Path("runs/demo/cost_sheet/attempt-1").exists()


# ----------------------------------------------------------------------------------------- stops and kills


@pytest.fixture
def child(workplace: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts papermill as its own process, the digest of the library held still there too."""
    started: list[subprocess.Popen[str]] = []
    code = (
        "import sys; sys.modules['rfc3987_syntax'] = None  # two seconds that no test needs\n"
        "from papermill.cli import papermill; from d2lib.evidence import engine; "
        "from d2lib.files import Hashed; engine.library_sha256 = lambda: Hashed('sha256', '5' * 64); papermill()"
    )

    def spawn(output: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, "--engine", "d2", "notebooks/cost_sheet.ipynb", output]
        command += ["-y", json.dumps(COST), "--no-progress-bar"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield spawn
    for process in started:
        process.kill()
        process.communicate()


def wait_for(path: Path, process: subprocess.Popen[str]) -> str:
    for _ in range(600):
        if path.exists() and path.read_text():
            return path.read_text()
        if process.poll() is not None:
            raise AssertionError(process.communicate()[1])
        time.sleep(0.05)
    raise AssertionError(f"{path} did not appear")


LOOP = """import os, time
out = phase.output('steps', 'full/steps.txt')
try:
    for step in range(1200):
        out.open('a').write(f'{step}\\n')
        phase.root.parent.joinpath('pid').write_text(str(os.getpid()))
        time.sleep(0.05)
except KeyboardInterrupt:
    from d2lib.errors import Interrupted
    out.open('a').write('boundary\\n')
    raise Interrupted('stopped at a boundary', remedy='resume') from None"""


def test_sigterm_is_handed_on_and_leaves_an_interrupted_receipt(
    child: Callable[..., subprocess.Popen[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    write_notebook(Path("notebooks/cost_sheet.ipynb"), "cost_sheet", [LOOP, "phase.record({})"])
    process = child("runs/demo/cost_sheet/attempt-1/receipt.ipynb")
    wait_for(Path("runs/pid"), process)
    run = Path("runs/demo")
    rows = verify(run).rows
    assert [row.where for row in rows if row.state == "running"] == ["cost_sheet/attempt-1"]
    assert run_phase(Path("notebooks/cost_sheet.ipynb"), COST, Path("runs"), "demo") is ExitStatus.REFUSED
    assert "another process is at this already" in capfd.readouterr().err
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 3
    made = receipt()
    assert (made.status, made.exit_status, made.cells.ran) == ("interrupted", 3, 3)
    assert made.message == "in cell 4: stopped at a boundary; do: resume"
    assert [one.path for one in made.outputs] == ["full/steps.txt"]
    assert Path("runs/demo/full/steps.txt").read_text().endswith("boundary\n")
    assert verify(run).holds


def test_an_interrupt_that_leaves_a_cell_without_a_reply_stops_the_phase_all_the_same(
    child: Callable[..., subprocess.Popen[str]],
) -> None:
    """SIGINT just before a cell's own code: ipykernel catches it, is idle, and never answers."""
    swallow = """import os, signal
def swallowed(*arguments, **options):
    os.kill(os.getppid(), signal.SIGTERM)
    raise KeyboardInterrupt
get_ipython().kernel.do_execute = swallowed"""
    write_notebook(Path("notebooks/cost_sheet.ipynb"), "cost_sheet", [swallow, "1 + 1", "phase.record({})"])
    assert child("runs/demo/cost_sheet/attempt-1/receipt.ipynb").wait(60) == 3
    made = receipt()
    assert (made.status, made.message) == ("interrupted", "stopped on request before cell 5")
    assert verify(Path("runs/demo")).holds


def test_a_killed_papermill_takes_its_kernel_along_and_gets_its_receipt_from_the_next_attempt(
    child: Callable[..., subprocess.Popen[str]],
) -> None:
    write_notebook(Path("notebooks/cost_sheet.ipynb"), "cost_sheet", [LOOP, "phase.record({})"])
    process = child("runs/demo/cost_sheet/attempt-1/receipt.ipynb")
    kernel = int(wait_for(Path("runs/pid"), process))
    process.kill()
    process.wait()
    run = Path("runs/demo")
    assert [row.state for row in verify(run).rows if row.where == "cost_sheet/attempt-1"] == ["unfinished"]
    assert start([], attempt=1) is ExitStatus.REFUSED
    assert [path.name for path in run.rglob("receipt.*")] == []
    assert start([], parameters={}) is ExitStatus.REFUSED  # for its parameters, and with a receipt
    assert not psutil.pid_exists(kernel) or psutil.Process(kernel).status() == psutil.STATUS_ZOMBIE
    killed = receipt()
    assert (killed.status, killed.exit_status) == ("failed", 4)
    assert "papermill was killed; 3 of 5 cells or more had begun; recorded by attempt 2" in str(killed.message)
    assert [one.path for one in killed.outputs] == ["full/steps.txt"]
    assert [(line.attempt, line.status) for line in read_ledger(run)] == [(1, "failed"), (2, "refused")]
    assert verify(run).holds
