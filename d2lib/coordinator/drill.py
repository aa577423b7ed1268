"""`d2 drill`: the coordinator's whole procedure on this machine, with what can go wrong in it.

Two full runs from one pilot: one undisturbed, one with interruptions, kills and changed files. Every step says what it
did, what the rules expect and what happened; in the end both runs must have the same bits. Everything is made in a
folder of its own (a git checkout, copies of the inputs, a private tmux server), and nothing of it is left running.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from d2lib.coordinator import sessions
from d2lib.coordinator.contract import JOBS
from d2lib.coordinator.jobs import PRODUCTS
from d2lib.coordinator.lease import hold
from d2lib.coordinator.profile import Job
from d2lib.coordinator.rehearsal import (
    Run,
    asked_of,
    changed,
    make_checkout,
    pilots_threads,
    power_logger,
    private_tmux,
    wait_for,
)
from d2lib.coordinator.stop import stop_job
from d2lib.errors import D2Error, ExitStatus, Refused
from d2lib.evidence.ledger import read_ledger
from d2lib.files import sha256_file


@dataclass(frozen=True)
class Row:
    """One step of the drill."""

    step: str
    expected: str
    happened: str
    holds: bool
    seconds: float


@dataclass
class Report:
    """What the drill did."""

    rows: list[Row] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether everything happened as expected."""
        return bool(self.rows) and all(row.holds for row in self.rows)

    def render_text(self) -> str:
        """A table for the terminal."""
        width = max(len(row.step) for row in self.rows)
        other = max(len(row.expected) for row in self.rows)
        lines = [f"   {'step':<{width}}  {'expected':<{other}}  happened"]
        for row in self.rows:
            mark = "ok" if row.holds else "NO"
            happened = row.happened if len(row.happened) <= 90 or not row.holds else f"{row.happened[:87]}..."
            lines.append(f"{mark} {row.step:<{width}}  {row.expected:<{other}}  {happened} ({row.seconds:.1f} s)")
        failed = sum(not row.holds for row in self.rows)
        lines.append(f"{len(self.rows)} steps, {failed} not as expected")
        return "\n".join(lines)


Typed = tuple[int, str]
"""A command's exit status and what it said."""


class Drill:
    """The steps and their report."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.report = Report()
        self._say = say

    def step(self, text: str, expected: str, act: Callable[[], str]) -> None:
        """Do one step; what happened must hold the expected words."""
        began = time.monotonic()
        try:
            happened = " ".join(act().split())
            holds = expected in happened
        except (D2Error, OSError, KeyError, ValueError) as error:
            happened, holds = f"{type(error).__name__}: {error}", False
        self._add(Row(text, expected, happened, holds, time.monotonic() - began))

    def types(self, text: str, status: int, words: str, act: Callable[[], Typed]) -> None:
        """Type a command; it must end with this status and say these words."""
        began = time.monotonic()
        found, said = act()
        lines = said.strip().splitlines() or [""]
        line = next((line for line in lines if words and words in line), lines[-1])
        holds = found == status and words in line
        expected = f"exit {status}: {words}" if words else f"exit {status}"
        self._add(Row(text, expected, f"exit {found}: {line}", holds, time.monotonic() - began))

    def _add(self, row: Row) -> None:
        self.report.rows.append(row)
        self._say(f"{'ok' if row.holds else 'NO'} {row.step}: {row.happened if row.holds else row}")


def run_drill(root: Path, checkout: Path, folder: Path, say: Callable[[str], None] = print) -> Report:
    """Run the drill.

    Args:
        root: a run root whose chain has come to a PASS of its pilot; it is copied and not touched.
        checkout: the tree that runs, with notebooks/ and params/.
        folder: a new folder with a short path.
        say: takes a line for every step.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with private_tmux(folder / "t"):
        commit = make_checkout(checkout, folder / "source", asked_of(root), pilots_threads(root))
        pilot = folder / "pilot" / root.name
        shutil.copytree(root, pilot, symlinks=True)
        calm = Run(folder / "calm", folder / "source", commit, pilot)
        rough = Run(folder / "rough", folder / "source", commit, pilot)
        drill = Drill(say)
        try:
            _calm(drill, calm)
            _before_the_start(drill, rough)
            _training(drill, rough)
            _scoring(drill, rough)
            _compare(drill, calm, rough)
        finally:
            _end_everything(calm, rough)
    return drill.report


def _calm(drill: Drill, run: Run) -> None:
    power_logger(True)
    drill.types("undisturbed: --check-inputs", 0, "", lambda: run.type("--check-inputs"))
    drill.types("undisturbed: stage", 0, "staged", lambda: run.type("--execute", "--phase", "stage"))
    for job in JOBS:
        _whole(drill, run, job, f"undisturbed: {job}")


def _whole(drill: Drill, run: Run, job: Job, text: str) -> None:
    drill.step(text, "a done receipt", lambda: run.whole(job))


def _before_the_start(drill: Drill, run: Run) -> None:
    stage = ("--execute", "--phase", "stage")
    drill.types("dry render", 0, "nothing was read, started or changed", lambda: run.type(who=None))
    drill.types("stage without identity", 2, "only the coordinator executes", lambda: run.type(*stage, who=None))
    other = ("--profile", str(run.source / "params" / "demo" / "coordinator.yaml"))
    drill.types("stage with another profile", 2, "does not go with --execute", lambda: run.type(*stage, *other))

    def by_anyone() -> Typed:
        status, said = run.type("--check-inputs", who=None)
        return status, f"{said}\n{len(list(run.output.rglob('*')))} files in the output"

    drill.types("--check-inputs by anyone", 0, "0 files in the output", by_anyone)
    drill.types("stage, which admits first", 0, "staged", lambda: run.type(*stage))
    drill.types("--check-inputs again", 0, "", lambda: run.type("--check-inputs"))
    drill.types("stage again", 2, "never overwritten", lambda: run.type(*stage))
    drill.types("G2 before training", 2, "full-fast is not done", lambda: run.start("g2-dev"))

    def with_changed(path: Path) -> Typed:
        with changed(path):
            return run.start("full-fast")

    source = run.plan.repo / "d2lib" / "files.py"
    shard, k2 = min((run.inputs["assembly"] / "shards").iterdir()), run.inputs["k2_legal"]
    parameters = run.plan.parameters_file("full-fast", False)
    drill.types("a changed source file", 2, "d2lib/files.py has other bytes", lambda: with_changed(source))
    drill.types("a changed input", 2, f"{shard.name} has other bytes", lambda: with_changed(shard))
    drill.types("a changed trajectory", 2, f"{k2.name} has other bytes", lambda: with_changed(k2))
    drill.types("a changed parameter file", 2, "a staged parameter file differs", lambda: with_changed(parameters))

    def with_lock() -> Typed:
        with hold(run.plan.profile.locks, run.plan.profile.jobs["full-fast"], "another"):
            return run.start("full-fast")

    def without_logger() -> Typed:
        power_logger(False)
        try:
            return run.start("full-fast")
        finally:
            power_logger(True)

    drill.types("a held lock", 2, "is taken", with_lock)
    drill.types("no power logger", 2, "the power logger is not there", without_logger)


def _training(drill: Drill, run: Run) -> None:
    drill.types("start training", 0, "started", lambda: run.start("full-fast"))
    drill.types("start it twice", 2, "was started before", lambda: run.start("full-fast"))
    drill.types("resume it while it runs", 2, "the session exists already", lambda: run.start("full-fast", 1))

    def stopped() -> str:
        wait_for(run.checkpoints, "a checkpoint")
        stop_job(run.plan, "full-fast")  # what --stop does, without the seconds in which the command starts
        return f"{run.ended('full-fast')}; {run.checkpoints()[-1].name}"

    drill.step("a stop in mid-training", "ended: exit 3", stopped)
    drill.types("--stop once it has ended", 2, "full-fast does not run", lambda: run.stop("full-fast"))
    drill.types("start instead of resume", 2, "--resume --attempt 1", lambda: run.start("full-fast"))
    drill.types("resume", 0, "started", lambda: run.start("full-fast", 1))
    before = len(run.checkpoints())

    def lost_logger() -> str:
        wait_for(lambda: len(run.checkpoints()) > before, "another checkpoint")
        power_logger(False)
        try:
            return run.ended("full-fast", 1)
        finally:
            power_logger(True)

    drill.step("the power logger is lost in mid-training", "ended: exit 3", lost_logger)
    drill.step("resume again, to the end", "a done receipt", lambda: run.whole("full-fast", 2))
    drill.types("train once more", 2, "never reruns", lambda: run.start("full-fast", 3))


def _scoring(drill: Drill, run: Run) -> None:
    drill.types("finish before G2", 2, "g2-dev is not done", lambda: run.start("g2-finish"))
    drill.types("general before legal", 2, "g2-legal is not done", lambda: run.start("g2-general"))
    drill.types("start dev", 0, "started", lambda: run.start("g2-dev"))

    def sigkill() -> str:
        wait_for(lambda: run.requests("dev"), "a completed request")
        os.kill(int(run.holder("g2-dev")["child"]["pid"]), signal.SIGKILL)
        return f"{run.ended('g2-dev')}; {len(run.requests('dev'))} requests are kept"

    drill.step("SIGKILL of the scoring child in mid-request", "killed by SIGKILL", sigkill)
    kept = {path.name: path.stat().st_ino for path in run.requests("dev")}
    drill.types("start legal", 0, "started", lambda: run.start("g2-legal"))

    def general_early() -> Typed:
        child = int(run.holder("g2-legal")["child"]["pid"])
        os.kill(child, signal.SIGSTOP)  # it cannot end before general has been refused
        try:
            return run.start("g2-general")
        finally:
            os.kill(child, signal.SIGCONT)

    drill.types("general while legal runs", 2, "g2-legal holds the solo", general_early)

    def resumed() -> str:
        happened = run.whole("g2-dev", 1)
        same = sum(kept.get(path.name) == path.stat().st_ino for path in run.requests("dev"))
        return f"{same} of {len(kept)} reused; {happened}"

    drill.step("resume dev, to the end", f"{len(kept)} of {len(kept)} reused; a done receipt", resumed)
    drill.step("legal, to the end", "a done receipt", lambda: run.done("g2-legal", run.ended("g2-legal")))
    _whole(drill, run, "g2-general", "general")
    _whole(drill, run, "g2-finish", "finish")


def _compare(drill: Drill, calm: Run, rough: Run) -> None:
    def same(name: str) -> str:
        one, other = (sha256_file(each.output / name) for each in (calm, rough))
        return f"the same bytes: {one.short}" if one == other else f"{one.short} and {other.short}"

    def compare(name: str) -> None:
        drill.step(f"{name} of both runs", "the same bytes", lambda: same(name))

    for product in PRODUCTS.values():
        compare(product)

    def history() -> str:
        return ", ".join(f"{line.name}/{line.attempt} {line.status}" for line in read_ledger(rough.output))

    def left() -> str:
        names = [each.plan.session(job, number) for each in (calm, rough) for job in JOBS for number in range(3)]
        return f"left: {[name for name in names if sessions.exists(name)] + _processes(calm, rough)}"

    drill.step("the disturbed run's ledger", "train-full-fast/1 interrupted", history)
    drill.step("sessions and processes", "left: []", left)


def _processes(*runs: Run) -> list[int]:
    """The processes that name one of the runs' folders on their command line."""
    found = []
    for process in psutil.process_iter(["cmdline", "pid"]):
        words = " ".join(process.info["cmdline"] or [])
        if process.pid != os.getpid() and any(str(each.snapshot) in words for each in runs):
            found.append(process.pid)
    return found


def _end_everything(*runs: Run) -> None:
    """After a step that failed: stop at its boundary what still runs, before the tmux server goes."""
    for each in runs:
        for job in JOBS:
            runner = int(each.holder(job).get("pid", 0))
            if runner in _processes(each):
                os.kill(runner, signal.SIGTERM)
    wait_for(lambda: not _processes(*runs), "the end of the drill's processes", 150)


def drill(root: Path) -> ExitStatus:
    """`d2 drill RUN`: print a line a step and the table; DONE when everything happened as expected."""
    if not (root / "pilot" / "receipt.json").is_file():
        raise Refused("a drill needs a run with a pilot", expected="pilot/receipt.json", where=root, remedy="make demo")
    checkout = Path(__file__).resolve().parent.parent.parent
    with tempfile.TemporaryDirectory(prefix="d2drill", dir="/tmp") as folder:
        report = run_drill(
            root.resolve(), checkout, Path(folder), lambda text: print(text, file=sys.stderr, flush=True)
        )
    print(report.render_text())
    return ExitStatus.DONE if report.holds else ExitStatus.VERDICT
