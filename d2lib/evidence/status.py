"""Where a run stands: what ran, what runs now, what may come next with its exact command, and why the rest may not.

The chain is data: a step, the steps that it needs, and whether they must have passed or only ended. Nothing is written.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from d2lib.errors import Refused, one_line
from d2lib.evidence.engine import find_schema, is_once
from d2lib.evidence.layout import LEDGER, NOTEBOOK, OPENING, RECEIPT, WORKING_NOTEBOOK, Attempt, numbers, split_attempt
from d2lib.evidence.ledger import LedgerLine, is_held, read_ledger
from d2lib.evidence.notebook import is_code
from d2lib.evidence.receipts import Receipt, read_receipt
from d2lib.strict import parse_json, read_json

Need = Literal["done", "pass"]
State = Literal["done", "verdict", "running", "killed", "interrupted", "refused", "failed", "absent"]


@dataclass(frozen=True)
class Step:
    """One step of the chain and what must be there before it."""

    phase: str
    job: str | None = None
    needs: tuple[tuple[str, Need], ...] = ()
    """(step, "done" whatever its verdict, or "pass")."""
    optional: bool = False
    """Only part of some runs; nothing waits for it unless it was begun."""

    @property
    def name(self) -> str:
        """PHASE or PHASE-JOB."""
        return self.phase if self.job is None else f"{self.phase}-{self.job}"


CHAIN: tuple[Step, ...] = (
    Step("capture"),
    Step("g1", needs=(("capture", "pass"),)),
    Step("pilot", needs=(("capture", "pass"), ("g1", "pass"))),
    Step("cost_sheet", needs=(("capture", "pass"),)),
    Step("admission", needs=(("capture", "pass"), ("g1", "pass"), ("pilot", "pass"), ("cost_sheet", "done"))),
    Step("stage", needs=(("admission", "pass"),), optional=True),
    Step("train", needs=(("admission", "pass"), ("stage", "pass"))),
    Step("g2", "dev", needs=(("train", "pass"),)),
    Step("g2", "legal", needs=(("train", "pass"),)),
    Step("g2", "general", needs=(("train", "pass"),)),
    Step("finish", needs=(("g2-dev", "done"), ("g2-legal", "done"), ("g2-general", "done"))),
)


FULL_CHAIN: tuple[Step, ...] = (
    Step("admission"),
    Step("stage", needs=(("admission", "pass"),)),
    Step("train", "full-fast", needs=(("stage", "pass"),)),
    Step("g2", "dev", needs=(("train-full-fast", "pass"),)),
    Step("g2", "legal", needs=(("train-full-fast", "pass"),)),
    Step("g2", "general", needs=(("train-full-fast", "pass"), ("g2-legal", "done"))),
    Step("finish", "g2-finish", needs=(("g2-dev", "done"), ("g2-legal", "done"), ("g2-general", "done"))),
)
"""The chain of a coordinator's full run (see d2lib.coordinator); its run root is named PILOT-NAMESPACE-full."""

_FULL = "-full"
_FULL_JOBS = {
    "train-full-fast": ("full-train", "full-fast"),
    "g2-dev": ("full-g2", "g2-dev"),
    "g2-legal": ("full-g2", "g2-legal"),
    "g2-general": ("full-g2", "g2-general"),
    "finish-g2-finish": ("finish", "g2-finish"),
}


@dataclass(frozen=True)
class Row:
    """One step of one run."""

    namespace: str
    step: str
    state: State
    attempt: int
    """The newest attempt, 0 when there is none."""
    verdict: str | None
    when: str | None
    """When the newest attempt ended, or when a running one started."""
    detail: str
    """A receipt's message, or a running attempt's progress."""
    ready: bool
    """Whether the step may run now."""
    command: str | None
    """The exact command, when it may."""
    why_not: str | None
    """What stands in the way, when it may not."""


@dataclass(frozen=True)
class _Known:
    """What a run's evidence says of one step."""

    state: State
    attempt: int = 0
    verdict: str | None = None
    when: str | None = None
    detail: str = ""
    receipt: Receipt | None = None


def status(
    runs: Path,
    *,
    chain: Sequence[Step] | None = None,
    params: Path = Path("params"),
    notebooks: Path = Path("notebooks"),
) -> list[Row]:
    """The rows of every run under a folder of runs, or of one run.

    Args:
        runs: the folder of runs, or a run root.
        chain: the steps in order; by default the coordinator's for a root named NAME-full, else the profiles'.
        params: folder of profiles; a run's own is the one with its name.
        notebooks: folder of the phases' notebooks.

    Raises:
        Refused: there is no such folder.
    """
    if not runs.is_dir():
        raise Refused("no runs here", expected="a folder of runs, or runs/NAMESPACE", where=runs)
    one = (runs / LEDGER).exists() or any(split_attempt(path) for path in runs.glob("*/attempt-*"))
    roots = [runs] if one else sorted(path for path in runs.iterdir() if path.is_dir())
    return [row for root in roots for row in run_status(root, chain or chain_of(root), params, notebooks)]


def chain_of(root: Path) -> Sequence[Step]:
    """The chain that a run root's name says."""
    return FULL_CHAIN if root.name.endswith(_FULL) else CHAIN


def run_status(root: Path, chain: Sequence[Step], params: Path, notebooks: Path) -> list[Row]:
    """The rows of one run, in the order of its chain."""
    broken: str | None = None
    try:
        lines = read_ledger(root)
    except Refused as error:
        lines, broken = [], f"{error.message} ({error.where}); see d2 verify {root}"
    newest = {line.name: line for line in lines}
    known = {step.name: _known(root, step, newest.get(step.name)) for step in chain}
    rows = []
    for step in chain:
        here = known[step.name]
        if step.optional and here.state == "absent":
            continue
        why = broken or _why_not(step, here, known, chain)
        detail = here.detail
        stale = _stale(here, known) if here.state in ("done", "verdict") else None
        if stale is not None:
            detail = f"{detail}; {stale}" if detail else stale
        rows.append(
            Row(
                namespace=root.name,
                step=step.name,
                state=here.state,
                attempt=here.attempt,
                verdict=here.verdict,
                when=here.when,
                detail=detail,
                ready=why is None,
                command=None if why else _next(root, step, known, params, notebooks),
                why_not=why,
            )
        )
    return rows


def _next(root: Path, step: Step, known: Mapping[str, _Known], params: Path, notebooks: Path) -> str:
    if not root.name.endswith(_FULL):
        return command(root, step, params, notebooks)
    staged = known["stage"].receipt
    flags = "--source … (the flags of the run)" if staged is None else full_flags(root, staged)
    if step.name in _FULL_JOBS:
        phase, job = _FULL_JOBS[step.name]
        flags += f" --execute --phase {phase} --job {job}"
        if begun := max(numbers(root / step.name), default=0):
            flags += f" --resume --attempt {begun}"
    else:
        flags += " --check-inputs" if step.phase == "admission" else " --execute --phase stage"
    return f"python -m d2lib.full_stage {flags}"


def full_flags(root: Path, staged: Receipt) -> str:
    """The flags with which a full run was staged, for the shell."""
    given = {name: value for name, value in staged.parameters.items() if name not in ("run", "profile")}
    named = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    return shlex.join([*named, "--output", str(root)])


def command(root: Path, step: Step, params: Path, notebooks: Path) -> str:
    """The papermill command of a step's next attempt."""
    following = max(numbers(root / step.name), default=0) + 1
    return shlex.join(
        [
            "papermill",
            "--engine",
            "d2",
            str(notebooks / f"{step.phase}.ipynb"),
            str(root / step.name / f"attempt-{following}" / NOTEBOOK),
            "-f",
            str(params / root.name / f"{step.name}.yaml"),
        ]
    )


def _known(root: Path, step: Step, line: LedgerLine | None) -> _Known:
    begun = max(numbers(root / step.name), default=0)
    attempt = Attempt(root, step.phase, step.job, begun)
    if begun and not attempt.file(RECEIPT).exists():
        if is_held(attempt.lock):
            return _Known("running", begun, when=_started(attempt), detail=progress(attempt))
        return _Known("killed", begun, when=_started(attempt), detail="papermill was killed; the next attempt goes on")
    if begun and (line is None or line.attempt < begun):
        return _Known("killed", begun, when=_started(attempt), detail="its receipt waits for its line in the ledger")
    if line is None:
        return _Known("absent")
    try:
        receipt = read_receipt(root / step.name / f"attempt-{line.attempt}" / RECEIPT)
    except Refused as error:
        return _Known("failed", line.attempt, when=line.time, detail=f"its receipt is not sound: {error.message}")
    state: State = receipt.status
    if receipt.status == "done" and receipt.exit_status:
        state = "verdict"
    return _Known(state, line.attempt, receipt.verdict, receipt.ended, receipt.message or "", receipt)


def _why_not(step: Step, here: _Known, known: Mapping[str, _Known], chain: Sequence[Step]) -> str | None:
    if here.state == "running":
        return f"attempt {here.attempt} is running"
    if here.state in ("done", "verdict"):
        once = is_once(find_schema(step.phase))
        return f"it is done{', and a completed job never runs again' if once else '; another attempt may be made'}"
    optional = {one.name for one in chain if one.optional}
    for name, need in step.needs:
        there = known.get(name)
        if there is None or (there.state == "absent" and name in optional):
            continue
        if there.state not in ("done", "verdict"):
            return f"needs {name}, which is {'not done' if there.state == 'absent' else there.state}"
        if need == "pass" and there.state == "verdict":
            return f"needs {name} to pass, and its verdict is {there.verdict}"
    return None


def _stale(here: _Known, known: Mapping[str, _Known]) -> str | None:
    """Whether a step was made from an attempt that is not its parent's newest any more."""
    for parent in here.receipt.parents if here.receipt is not None else ():
        name = parent.phase if parent.job is None else f"{parent.phase}-{parent.job}"
        newest = known.get(name)
        if newest is not None and newest.state in ("done", "verdict") and newest.attempt > parent.attempt:
            return f"made from {name} attempt {parent.attempt}, and attempt {newest.attempt} is newer"
    return None


def _started(attempt: Attempt) -> str | None:
    try:
        return str(read_json(attempt.file(OPENING))["started"])
    except (Refused, KeyError, TypeError):
        return None


def progress(attempt: Attempt) -> str:
    """How far a running attempt is: cells begun, the last line that it printed, and how long ago it was saved."""
    path = attempt.file(WORKING_NOTEBOOK)
    try:
        age = time.time() - path.stat().st_mtime
        return _cells_begun(parse_json(path.read_bytes())["cells"], age)
    except (OSError, Refused, KeyError):
        return "starting"
    except (TypeError, AttributeError):
        return "its working notebook is damaged"


def _cells_begun(cells: list[dict[str, Any]], age: float) -> str:
    code = [cell for cell in cells if is_code(cell)]
    begun = sum(cell.get("metadata", {}).get("papermill", {}).get("start_time") is not None for cell in code)
    text = f"cell {begun} of {len(code)}, saved {age:.0f} s ago"
    for cell in reversed(code):
        for output in reversed(cell.get("outputs", [])):
            printed = "".join(output.get("text", "")).rstrip().rpartition("\n")[2]
            if printed:
                return f"{text}: {printed.strip()[:100]}"
    return text


def render_text(rows: Sequence[Row]) -> str:
    """The rows for a terminal: one line a step, then the commands that may come next."""
    lines, ready = [], [row for row in rows if row.ready]
    for namespace in dict.fromkeys(row.namespace for row in rows):
        lines.append(one_line(namespace))
        for row in rows:
            if row.namespace == namespace:
                word = row.verdict or row.state
                text = "; ".join(part for part in (row.detail, "" if row.ready else row.why_not or "") if part)
                attempt = f"attempt {row.attempt}" if row.attempt else ""
                lines.append(one_line(f"  {row.step:<12} {word:<13} {attempt:<11} {text}").rstrip())
    if ready:
        lines += ["", "may come next:", *(one_line(f"  {row.command}") for row in ready)]
    return "\n".join(lines)


def as_dicts(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows as plain data."""
    return [asdict(row) for row in rows]
