"""Crashes, one after the other: the same command again must end in the same products, and the run must verify.

    python tests/crash_campaign.py --count 60 --seed 23 --minutes 30      (make crash)

On the fixture, each case takes a phase that is about to start and disturbs it once: a SIGKILL or SIGTERM at a random
moment to engine, kernel or both, or a fault at a chosen write, fsync, link, rename or unlink of engine or kernel (see
faults.py). Then the same command is run again until the phase is done, or `d2 repair` where it is done already, and
`d2 verify` must hold. `--window` instead walks through every operation between a phase's last product and its receipt.

Counted as wrong: an exit status that is not the receipt's; a product that is not bit-equal to the undisturbed one; a
final file that was replaced or changed; a process or temporary folder left behind; a phase that no rerun completes (a
dead end); a run that does not verify. The exit status is 0 when none of it happened.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import faults
import psutil

from d2lib.chain import CHAIN, Step
from d2lib.evidence.environment import library_sha256
from d2lib.evidence.layout import RECEIPT
from d2lib.evidence.ledger import LedgerLine, read_ledger
from d2lib.evidence.receipts import Receipt, read_receipt
from d2lib.files import is_unfinished, sha256_file

REPOSITORY = Path(__file__).resolve().parent.parent
STEPS = {step.name: step for step in CHAIN}
WEIGHTS = {
    "finish": 4,
    "g2-general": 4,
    "cost_sheet": 2,
    "train": 3,
    "admission": 2,
    "g1": 2,
    "g2-dev": 1,
    "pilot": 1,
    "capture": 1,
}
"""Step → how often it is drawn; the cheap ones mostly."""
MEASURED = re.compile(r"pilot/receipt\.json|.*\.checkpoints/.*|.*attempt-\d+/.*")
"""Products that hold measured seconds, or an attempt's own."""
TRIES = 4
TIMEOUT = 300.0
WRONG = ("untruthful", "differing", "overwritten", "left behind", "dead end", "never verifies")


@dataclass
class Case:
    """One disturbance of one step, and what came of it."""

    step: Step
    what: str
    """What happens, in words; the first word is the kind of the table."""
    disturbed: bool = True
    runs: list[int] = field(default_factory=list)
    wrong: dict[str, str] = field(default_factory=dict)
    tracebacks: int = 0
    seconds: float = 0.0
    """Of the first run."""


class Campaign:
    """Where cases are played: a finished run to rewind, and a folder for copies."""

    def __init__(self, run: Path, work: Path, keep: bool = False) -> None:
        self.run, self.work, self.keep = run, work, keep
        self.lines = read_ledger(run)
        self.seconds: dict[str, float] = {}
        self.logs: dict[tuple[str, str], list[str]] = {}
        self.known: list[LedgerLine] = []
        self.number = 0

    # ------------------------------------------------------------------------------------------- one case

    def stage(self, step: Step) -> Path:
        """A new working folder with the run as it was before a step."""
        self.number += 1
        case = self.work / str(self.number)
        (case / "t").mkdir(parents=True)
        root = case / "runs" / self.run.name
        shutil.copytree(self.run, root, symlinks=True)
        rewind(root, step.name)
        return case

    def record(self, step: Step) -> None:
        """Run a step undisturbed, once: how long it takes, and which operations it makes."""
        if step.name not in self.seconds:
            case = self.stage(step)
            plan = faults.write_plan(case / "plan", case / "runs")
            found = Case(step, "nothing", disturbed=False)
            self.play(case, found, plan)
            self.seconds[step.name] = found.seconds
            for role in ("engine", "kernel"):
                self.logs[step.name, role] = faults.read_log(plan, role)
            if found.wrong or found.runs not in ([0], [1]):
                raise SystemExit(f"{step.name} undisturbed: exit statuses {found.runs}, {found.wrong}; see {case}")
            shutil.rmtree(case)

    def fault(self, step: Step, role: str, number: int, kind: str, place: str = "") -> Case:
        """A fault at an operation of a step: the n-th (from 1), or the first at a place (see faults.py)."""
        if not place:
            self.record(step)
        operation = place or self.logs[step.name, role][number - 1].replace(f"{self.work}/", "")
        found = Case(step, f"{kind} at {role} operation {number or ''}: {operation}")
        case = self.stage(step)
        plan = faults.write_plan(case / "plan", case / "runs", role=role, number=number, place=place, kind=kind)
        self.play(case, found, plan)
        found.disturbed = faults.fired(plan)
        return self.close(case, found)

    def kill(self, step: Step, who: str, sign: signal.Signals, share: float) -> Case:
        """A signal to engine, kernel or both after a share of the step's time."""
        self.record(step)
        found = Case(step, f"{sign.name} to {who} at {share:.0%}")
        case = self.stage(step)
        rest = 1.0 if who == "engine" else 0.5  # a kernel appears half-way
        self.play(case, found, None, who, sign, share * rest * self.seconds[step.name])
        found.disturbed = len(found.runs) > 1 or found.runs[0] not in (0, 1)
        return self.close(case, found)

    def close(self, case: Path, found: Case) -> Case:
        """Remove a case's folder, unless it is wanted."""
        if not (found.wrong and self.keep):
            shutil.rmtree(case, ignore_errors=True)
        return found

    def play(
        self,
        case: Path,
        found: Case,
        plan: Path | None,
        who: str = "",
        sign: signal.Signals = signal.SIGKILL,
        after: float = 0.0,
    ) -> None:
        """Run the step, disturbed, then again until it is done; then verify and compare."""
        root, step = case / "runs" / self.run.name, found.step
        self.known, began = read_ledger(root), time.monotonic()
        process = self.start(case, step, plan)
        while (
            who in ("kernel", "both") and process.poll() is None and not list((case / "t").glob("d2-kernel-*/kernel*"))
        ):
            time.sleep(0.05)
        if who:
            time.sleep(after)
            signal_to(process, who, sign)
        self.end(found, process, root)
        found.seconds = time.monotonic() - began
        final = final_files(root)
        while not (done := is_done(root, step)) and len(found.runs) <= TRIES:
            self.end(found, self.start(case, step, plan), root)
        if not done:
            found.wrong["dead end"] = f"exit statuses {found.runs}"
        elif len(found.runs) == 1 and found.disturbed:  # done all the same: what was left is for `repair`
            self.command(case, "repair", f"runs/{root.name}")
        verified = self.command(case, "verify", f"runs/{root.name}")
        if done and verified.returncode:
            bad = [line for line in verified.stdout.splitlines() if line.startswith("  ") and "  holds " not in line]
            found.wrong["never verifies"] = "; ".join(bad)[:600]
        for path, known in final.items():
            if not path.exists() or identity(path) != known:
                found.wrong["overwritten"] = str(path.relative_to(root))
        if done:
            for name in self.products(step):
                if not (root / name).exists() or content(root, name) != content(self.run, name):
                    found.wrong["differing"] = name
        left = [*processes_in(case), *(case / "t").glob("d2-kernel-*")]
        if left:
            found.wrong["left behind"] = ", ".join(map(str, left))

    def start(self, case: Path, step: Step, plan: Path | None) -> subprocess.Popen[str]:
        """The step's command, `d2 run`, always the same."""
        arguments = [str(REPOSITORY / "notebooks" / f"{step.phase}.ipynb")]
        arguments += ["-f", str(REPOSITORY / "params" / "fixture" / f"{step.name}.yaml")]
        arguments += ["--job", step.job] if step.job else []
        return subprocess.Popen(
            [sys.executable, "-m", "d2lib.cli", "run", *arguments],
            cwd=case,
            env=environment(case, plan),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def command(self, case: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Another d2 command in a case's folder, to its end."""
        command = [sys.executable, "-m", "d2lib.cli", *arguments]
        return subprocess.run(command, cwd=case, env=environment(case, None), capture_output=True, text=True)

    def end(self, found: Case, process: subprocess.Popen[str], root: Path) -> None:
        """Wait for a run's end, note its exit status, and compare it with what the evidence says."""
        before = {line.seq for line in self.known}
        try:
            said = process.communicate(timeout=TIMEOUT)[1]
        except subprocess.TimeoutExpired:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
            said = process.communicate()[1]
            found.wrong["dead end"] = f"no end within {TIMEOUT:.0f} s"
        status = process.returncode
        found.runs.append(status)
        found.tracebacks += "Traceback (most recent call last)" in said
        self.known = read_ledger(root)
        new = [line for line in self.known if line.seq not in before and line.name == found.step.name]
        receipts = [receipt_of(root, line) for line in new]
        done = is_done(root, found.step)
        if status < 0 or status == 4:  # killed, or said to be unexpected: whatever stands there is true
            truthful = True
        elif status in (0, 1):
            truthful = done is not None and done.exit_status == status
        elif status in (2, 3) and not new:  # refused, or stopped, before an attempt was opened
            truthful = all((attempt / RECEIPT).exists() for attempt in (root / found.step.name).glob("attempt-*"))
        else:
            truthful = bool(receipts) and receipts[-1].exit_status == status
        if not truthful:
            found.wrong["untruthful"] = f"exit status {status}; new receipts: {[r.exit_status for r in receipts]}"

    def products(self, step: Step) -> list[str]:
        """What the undisturbed run's receipt of a step lists, but for what was measured."""
        line = next(line for line in self.lines if line.name == step.name and line.status == "done")
        outputs = receipt_of(self.run, line).outputs
        return [output.path for output in outputs if not MEASURED.fullmatch(output.path)]

    # ------------------------------------------------------------------------------------------- what to play

    def draw(self, random_: random.Random, names: list[str]) -> Case:
        """A random case: a third signals, the rest faults."""
        step = STEPS[random_.choices(names, [WEIGHTS.get(name, 1) for name in names])[0]]
        self.record(step)
        if random_.random() < 1 / 3:
            sign = random_.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
            who = "engine" if sign == signal.SIGTERM else random_.choice(["engine", "kernel", "both"])
            return self.kill(step, who, sign, random_.uniform(0.05, 1.0))
        role = random_.choice(["engine", "kernel"] if self.logs[step.name, "kernel"] else ["engine"])
        operations = [line.split(" ", 1)[0] for line in self.logs[step.name, role]]
        operation = random_.choice(sorted(set(operations)))
        number = random_.choice([n for n, found in enumerate(operations, 1) if found == operation])
        return self.fault(step, role, number, random_.choice(faults.KINDS[operation]))

    def window(self, step: Step) -> list[tuple[str, int]]:
        """(role, number) of every operation after the one that finished the step's last product."""
        self.record(step)
        products = {f"/runs/{self.run.name}/{name}" for name in self.products(step)}
        kernel, engine = self.logs[step.name, "kernel"], self.logs[step.name, "engine"]
        made = [n for n, line in enumerate(kernel, 1) if any(line.endswith(name) for name in products)]
        last = max(made, default=len(kernel))
        opened = next(n for n, line in enumerate(engine, 1) if line.startswith("link") and "working.json" in line)
        return [("kernel", n) for n in range(last + 1, len(kernel) + 1)] + [
            ("engine", n) for n in range(opened + 1, len(engine) + 1)
        ]


def rewind(root: Path, name: str) -> None:
    """Take a finished run back to where a step had not begun: its ledger's lines, receipts and products go."""
    lines = read_ledger(root)
    keep = next(number for number, line in enumerate(lines) if line.name == name)
    kept = {output.path for line in lines[:keep] for output in receipt_of(root, line).outputs}
    gone = {output.path for line in lines[keep:] for output in receipt_of(root, line).outputs} - kept
    for path in gone:
        (root / path).unlink(missing_ok=True)
    for line in lines[keep:]:
        shutil.rmtree(root / line.name / f"attempt-{line.attempt}")
    for folder, _, _ in os.walk(root, topdown=False):
        for lock in Path(folder).glob(".lock"):
            if len(os.listdir(folder)) == 1 and folder != str(root):
                lock.unlink()
        if not os.listdir(folder):
            os.rmdir(folder)
    data = (root / "LEDGER.jsonl").read_bytes().splitlines(keepends=True)
    (root / "LEDGER.jsonl").write_bytes(b"".join(data[:keep]))
    if not keep:
        (root / "LEDGER.jsonl").unlink()


def receipt_of(root: Path, line: LedgerLine) -> Receipt:
    """A ledger line's receipt."""
    return read_receipt(root / line.name / f"attempt-{line.attempt}" / RECEIPT)


def is_done(root: Path, step: Step) -> Receipt | None:
    """The step's done receipt, when the ledger has one."""
    lines = read_ledger(root) if root.exists() else []
    return next((receipt_of(root, line) for line in lines if line.name == step.name and line.status == "done"), None)


def final_files(root: Path) -> dict[Path, tuple[int, str]]:
    """Every file that has its final name by now, with its identity."""
    found = {}
    for path in root.rglob("*"):
        name = path.relative_to(root).as_posix()
        if path.is_file() and not is_unfinished(name) and not path.name.startswith(("working.", "LEDGER", ".lock")):
            found[path] = identity(path)
    return found


def identity(path: Path) -> tuple[int, str]:
    """A file's inode and digest."""
    return path.stat().st_ino, str(sha256_file(path))


def content(root: Path, name: str) -> bytes:
    """A product's bytes, wherever its run lies."""
    return (root / name).read_bytes().replace(os.fsencode(root), b"RUN")


def environment(case: Path, plan: Path | None) -> dict[str, str]:
    """A run's environment: temporary files in the case's folder, the plan's sitecustomize first on the path."""
    own = {"TMPDIR": str(case / "t"), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    path = [*([] if plan is None else [str(plan)]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | own | ({"PYTHONPATH": os.pathsep.join(path)} if path else {})


def signal_to(process: subprocess.Popen[str], who: str, sign: signal.Signals) -> None:
    """Send a signal to a run's engine, its kernel, or both, if they are there."""
    with suppress(psutil.Error):
        kernels = [p for p in psutil.Process(process.pid).children() if "ipykernel_launcher" in " ".join(p.cmdline())]
        for one in [*(kernels if who != "engine" else []), *([psutil.Process(process.pid)] if who != "kernel" else [])]:
            one.send_signal(sign)


def processes_in(case: Path, patience: float = 20.0) -> list[str]:
    """Processes that still work in a case's folder, once they have had time to notice that they are alone."""
    deadline = time.monotonic() + patience
    while True:
        left = []
        for process in psutil.process_iter():
            try:
                if process.cwd().startswith(f"{case}/") or process.cwd() == str(case):
                    left.append(f"process {process.pid} {' '.join(process.cmdline())[:80]}")
            except psutil.Error:
                continue
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.2)


def make_fixture(work: Path) -> Path:
    """The fixture's whole chain, undisturbed."""
    command = [sys.executable, "-m", "d2lib.cli", "chain", str(REPOSITORY / "params" / "fixture")]
    command += ["--notebooks", str(REPOSITORY / "notebooks")]
    (work / "base" / "t").mkdir(parents=True)
    made = subprocess.run(command, cwd=work / "base", env=environment(work / "base", None), capture_output=True)
    if made.returncode not in (0, 1):
        raise SystemExit(f"the fixture cannot be made: {made.stderr.decode()[-2000:]}")
    return work / "base" / "runs" / "fixture"


def is_current(run: Path) -> bool:
    """Whether a finished run was made by this very d2lib."""
    lines = read_ledger(run) if run.is_dir() else []
    today = str(library_sha256())
    names = {line.name for line in lines if line.status == "done"}
    return names == set(STEPS) and all(receipt_of(run, line).d2lib_sha256 == today for line in lines)


def render(cases: list[Case]) -> str:
    """The table: one row a kind of disturbance."""
    rows: dict[str, Counter[str]] = {}
    for case in cases:
        kind = case.what.split(" at ")[0]
        for name in (kind, "together"):
            row = rows.setdefault(name, Counter())
            row["cases"] += 1
            row["happened"] += case.disturbed
            row["run again"] += len(case.runs) > 1
            row["tracebacks"] += bool(case.tracebacks)
            row.update(case.wrong.keys())
    columns = ("cases", "happened", "run again", "tracebacks", *WRONG)
    lines = ["".join([f"{'disturbance':<22}", *(f"{column:>15}" for column in columns)])]
    for name in sorted(rows, key=lambda name: (name == "together", name)):
        lines.append("".join([f"{name:<22}", *(f"{rows[name][column]:>15}" for column in columns)]))
    return "\n".join(lines)


def main() -> int:
    """Play the cases; prints each one, then the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=40, help="random cases")
    parser.add_argument("--seed", type=int, default=23)
    parser.add_argument("--minutes", type=float, default=60.0, help="no case is begun after so many")
    parser.add_argument("--phases", nargs="+", choices=STEPS, default=list(WEIGHTS), help="steps to disturb")
    parser.add_argument("--window", action="store_true", help="walk through every step before the receipt instead")
    parser.add_argument("--run", type=Path, help="a finished fixture, made by this d2lib; by default one is made")
    parser.add_argument("--keep", action="store_true", help="keep the folders of cases in which something was wrong")
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    work = Path(tempfile.mkdtemp(prefix="crash-"))
    if options.run is not None and not is_current(options.run):
        raise SystemExit(f"{options.run} was not made by this d2lib, or is not finished")
    campaign = Campaign(options.run.resolve() if options.run else make_fixture(work), work, options.keep)
    cases: list[Case] = []

    def play(case: Case) -> None:
        cases.append(case)
        wrong = "; ".join(f"{name.upper()} ({text})" for name, text in case.wrong.items())
        print(f"[{len(cases)}] {case.step.name}: {case.what}: exit {case.runs}: {wrong or 'well'}", flush=True)

    try:
        print(f"seed {options.seed}; {'the window' if options.window else f'{options.count} cases'}; in {work}")
        random_ = random.Random(options.seed)
        if options.window:
            for name in options.phases:
                for role, number in campaign.window(STEPS[name]):
                    for kind in ("kill", "term"):
                        if time.monotonic() < deadline:
                            play(campaign.fault(STEPS[name], role, number, kind))
        else:
            while len(cases) < options.count and time.monotonic() < deadline:
                play(campaign.draw(random_, options.phases))
    finally:
        if not (options.keep and any(case.wrong for case in cases)):
            shutil.rmtree(work, ignore_errors=True)
    print(render(cases))
    return int(any(case.wrong for case in cases))


if __name__ == "__main__":
    raise SystemExit(main())
