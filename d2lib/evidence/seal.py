"""From what a kernel left to a receipt: judged, published in one step, and given its line in the ledger."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from d2lib.errors import Refused
from d2lib.evidence.layout import (
    JOURNAL,
    NOTEBOOK,
    OPENING,
    RECEIPT,
    WORKING_NAMES,
    WORKING_NOTEBOOK,
    Attempt,
    split_attempt,
)
from d2lib.evidence.ledger import ledger_lock, read_ledger, settle
from d2lib.evidence.phase import RESULT_MIME, read_journal
from d2lib.evidence.receipts import (
    MAX_NOTEBOOK_BYTES,
    CellCounts,
    FinalNotebook,
    InputRecord,
    Opening,
    OutputRecord,
    ParentRecord,
    Receipt,
    Status,
    Verdict,
    exit_status,
    files_of,
    folder_files,
    now,
    read_receipt,
    to_bytes,
)
from d2lib.files import canonical_json, parse_json, record_file, sha256_bytes, write_exclusive

if TYPE_CHECKING:
    from d2lib.evidence.kernel import Progress

KERNEL_GRACE = 15.0
"""Seconds that a killed papermill's kernel has to notice that it is alone."""


@dataclass(frozen=True)
class Outcome:
    """What came of an attempt, before it is written down."""

    status: Status
    message: str | None
    cells: CellCounts
    verdict: Verdict | None = None
    result: dict[str, Any] | None = None
    inputs: list[InputRecord] = field(default_factory=list)
    outputs: list[OutputRecord] = field(default_factory=list)

    def failed(self, message: str) -> Outcome:
        """The same outcome, failed after all."""
        return replace(self, status="failed", message=message, verdict=None, result=None)


def judge(nb: Any, attempt: Attempt, progress: Progress, stopped: bool, refusal: Refused | None) -> Outcome:
    """What came of an execution, from the cells and the journal; papermill's own status fields are not read."""
    journal = read_journal(attempt.file(JOURNAL))
    code = [cell for cell in nb.cells if cell.cell_type == "code" and cell.source.strip()]
    errors = sum(any(output.output_type == "error" for output in cell.outputs) for cell in code)
    outcome = Outcome(
        "done",
        None,
        CellCounts(code=len(code), ran=progress.completed, errors=errors),
        inputs=[InputRecord.model_validate_json(canonical_json(e["input"])) for e in journal if "input" in e],
    )
    try:
        outcome = replace(outcome, outputs=hash_outputs(attempt, journal))
    except Refused as error:
        outcome = outcome.failed(str(error))
    raised = next((entry["error"] for entry in reversed(journal) if "error" in entry), None)
    if refusal is not None:
        return replace(outcome, status="refused", message=str(refusal))
    if progress.trouble is not None:
        return outcome.failed(progress.trouble)
    if progress.died_in is not None:
        left = len(code) - progress.completed - 1
        return outcome.failed(f"the kernel died in cell {progress.died_in} of {len(code)}; {left} never ran")
    if progress.error is not None:
        kind, message = "failed", ": ".join(part for part in progress.error if part)
        if raised is not None and raised["class"] == progress.error[0]:
            kind, message = raised["kind"], raised["message"]
        elif progress.error[0] == "KeyboardInterrupt":
            kind = "keyboard"
        if kind == "keyboard":
            kind, message = ("interrupted", "stopped on request") if stopped else ("failed", "KeyboardInterrupt")
        if kind == "refused":
            return replace(outcome, status="refused", message=message)
        if kind == "interrupted":
            return replace(outcome, status="interrupted", message=f"in cell {progress.error_in}: {message}")
        return outcome.failed(f"in cell {progress.error_in}: {message}")
    if progress.stopped_before is not None:
        return replace(outcome, status="interrupted", message=f"stopped before cell {progress.stopped_before}")
    if outcome.status == "failed":
        return outcome
    if errors or progress.completed != len(code) or any(cell.execution_count is None for cell in code):
        return outcome.failed(f"{progress.completed} of {len(code)} code cells ran, {errors} with an error")
    made = {output.label for output in outcome.outputs}
    for entry in journal:
        if "output" in entry and entry["output"]["label"] not in made:
            place = attempt.root / entry["output"]["path"]
            if not place.is_dir():
                return outcome.failed(f"the output {entry['output']['label']} was not made; where: {place}")
    return _with_result(outcome, code)


def _with_result(outcome: Outcome, code: Iterable[Any]) -> Outcome:
    found = results(code)
    if len(found) != 1:
        return outcome.failed(f"a phase records exactly one result; found: {len(found)}")
    try:
        canonical_json(found[0])
        result, verdict = found[0]["result"], found[0]["verdict"]
    except (Refused, KeyError, TypeError) as error:
        return outcome.failed(f"the recorded result does not parse: {error}")
    if not isinstance(result, dict) or verdict not in (None, "PASS", "FAIL", "INCONCLUSIVE"):
        return outcome.failed("the recorded result does not parse: no mapping, or no such verdict")
    return replace(outcome, result=result, verdict=verdict)


def results(code: Iterable[Any]) -> list[Any]:
    """Every recorded result among the outputs of cells."""
    outputs = [output for cell in code for output in cell.get("outputs", [])]
    return [output["data"][RESULT_MIME] for output in outputs if RESULT_MIME in output.get("data", {})]


def hash_outputs(attempt: Attempt, journal: Iterable[dict[str, Any]]) -> list[OutputRecord]:
    """Every file that the declared outputs hold now, by path.

    Raises:
        Refused: a link or device among them, or a file of an earlier receipt whose recorded bytes changed.
    """
    found: dict[str, OutputRecord] = {}
    for entry in journal:
        if "output" not in entry:
            continue
        label, path = entry["output"]["label"], entry["output"]["path"]
        place = attempt.root / path
        if place.is_dir() and not place.is_symlink():
            files = [(f"{path}/{name}", file) for name, file in folder_files(place)]
        else:
            files = [(path, place)] if os.path.lexists(place) else []
        for name, file in files:
            record = record_file(file)
            found.setdefault(name, OutputRecord(label=label, path=name, size=record.size, sha256=str(record.sha256)))
    return [found[name] for name in sorted(found)]


def find_parents(root: Path, inputs: Iterable[InputRecord]) -> list[ParentRecord]:
    """The receipts that inputs come from: those that list a file with the same path and digest, and receipts read."""
    makers: dict[tuple[str, str], ParentRecord] = {}
    for line in read_ledger(root):
        path = root / line.name / f"attempt-{line.attempt}" / RECEIPT
        receipt = read_receipt(path)
        parent = _parent("", receipt, line.receipt_json_sha256)
        for output in receipt.outputs:
            makers[output.path, output.sha256] = parent
        makers[path.relative_to(root).as_posix(), line.receipt_json_sha256] = parent
    found: dict[tuple[str, str], ParentRecord] = {}
    for record in inputs:
        for name, file in files_of(record).items():
            maker = makers.get((name, str(file.sha256)))
            path = root / name
            if maker is None and path.name == RECEIPT and split_attempt(path.parent) is not None:
                maker = _parent("", read_receipt(path), str(file.sha256))  # another run's
            if maker is not None:
                parent = maker.model_copy(update={"label": record.label})
                found[record.label, parent.receipt_json_sha256] = parent
    return list(found.values())


def _parent(label: str, receipt: Receipt, digest: str) -> ParentRecord:
    return ParentRecord(
        label=label,
        namespace=receipt.namespace,
        phase=receipt.phase,
        job=receipt.job,
        attempt=receipt.attempt,
        receipt_json_sha256=digest,
    )


def save_notebook(attempt: Attempt, nb: Any) -> bytes:
    """Replace the attempt's working notebook in one step; returns its bytes."""
    from d2lib.evidence.kernel import notebook_text, save_working

    text = notebook_text(nb)
    save_working(attempt.file(WORKING_NOTEBOOK), text)
    return text.encode("utf-8")


def publish_receipt(nb: Any, attempt: Attempt, opening: Opening, outcome: Outcome, seconds: float) -> Receipt:
    """Write the receipt and its notebook, read-only and for good, and the ledger's line.

    receipt.json is the commit: whoever dies after it leaves everything that `settle` needs to finish the rest.
    """
    try:
        parents = find_parents(attempt.root, outcome.inputs)
    except Refused as error:
        parents, outcome = [], outcome.failed(f"an earlier receipt cannot be read: {error}")
    nb.metadata["d2"] = {**nb.metadata.get("d2", {}), "receipt": shown_in_notebook(opening, outcome)}
    data = save_notebook(attempt, nb)
    problem = None
    if len(data) > MAX_NOTEBOOK_BYTES:
        problem = f"the notebook has {len(data) >> 20} MiB; at most {MAX_NOTEBOOK_BYTES >> 20} are allowed"
    else:
        try:
            parse_json(data)
        except Refused as error:
            problem = f"the notebook is not strict JSON: {error}"
    if problem is not None:
        outcome = outcome.failed(f"{problem}; its outputs were dropped")
        for cell in nb.cells:
            if cell.cell_type == "code":
                cell.outputs = []
        nb.metadata["d2"]["receipt"] = shown_in_notebook(opening, outcome)
        data = save_notebook(attempt, nb)
    receipt = Receipt(
        **{name: getattr(opening, name) for name in Opening.model_fields if name != "notebook"},
        notebook=FinalNotebook(**opening.notebook.model_dump(), receipt_sha256=str(sha256_bytes(data))),
        ended=now(),
        seconds=round(seconds, 3),
        status=outcome.status,
        verdict=outcome.verdict,
        exit_status=int(exit_status(outcome.status, outcome.verdict)),
        message=outcome.message,
        cells=outcome.cells,
        inputs=outcome.inputs,
        outputs=outcome.outputs,
        parents=parents,
        result=outcome.result,
    )
    with ledger_lock(attempt.root):
        write_exclusive(attempt.file(RECEIPT), to_bytes(receipt))
        settle(attempt.root)
    for name in WORKING_NAMES:
        attempt.file(name).unlink(missing_ok=True)
    return receipt


def shown_in_notebook(opening: Opening, outcome: Outcome) -> dict[str, Any]:
    """What the receipt's notebook carries in its metadata, so that the two files belong together."""
    return {
        "namespace": opening.namespace,
        "phase": opening.phase,
        "job": opening.job,
        "attempt": opening.attempt,
        "started": opening.started,
        "status": outcome.status,
        "verdict": outcome.verdict,
        "source_sha256": opening.notebook.source_sha256,
        "parameters_sha256": opening.parameters_sha256,
        "d2lib_sha256": opening.d2lib_sha256,
        "environment_sha256": opening.environment_sha256,
    }


def seal_abandoned(attempt: Attempt, following: int) -> None:
    """Give an attempt whose papermill was killed its receipt: failed, with the notebook and outputs that it left.

    Args:
        attempt: an attempt that has begun; one that has its receipt is left alone.
        following: the number of the attempt that begins now.

    Raises:
        Refused: the killed attempt's kernel still runs, or the folder is not an attempt's.
    """
    from d2lib.evidence.kernel import read_notebook

    if attempt.file(RECEIPT).exists():
        if attempt.file(OPENING).exists():  # killed after the receipt, before its line
            with ledger_lock(attempt.root):
                settle(attempt.root)
            for name in WORKING_NAMES:
                attempt.file(name).unlink(missing_ok=True)
        return
    if not attempt.file(OPENING).exists():
        raise Refused(
            "a folder has a notebook and no receipt",
            expected=f"{RECEIPT} beside {NOTEBOOK}",
            where=attempt.folder,
            remedy="move the folder away",
        )
    journal = read_journal(attempt.file(JOURNAL))
    for entry in journal:
        if "kernel" in entry:
            _wait_for_end(entry["kernel"], attempt)
    opening = Opening.model_validate_json(attempt.file(OPENING).read_bytes())
    nb = read_notebook(attempt.file(WORKING_NOTEBOOK).read_bytes())
    code = [cell for cell in nb.cells if cell.cell_type == "code" and cell.source.strip()]
    begun = sum(cell.execution_count is not None for cell in code)
    outcome = Outcome(
        "failed",
        f"papermill was killed around cell {max(begun, 1)} of {len(code)}; recorded when attempt {following} began",
        CellCounts(code=len(code), ran=max(begun - 1, 0), errors=0),
        inputs=[InputRecord.model_validate_json(canonical_json(e["input"])) for e in journal if "input" in e],
    )
    try:
        outcome = replace(outcome, outputs=hash_outputs(attempt, journal))
    except Refused as error:
        outcome = replace(outcome, message=f"{outcome.message}; its outputs: {error}")
    last = attempt.file(WORKING_NOTEBOOK).stat().st_mtime
    seconds = max(0.0, last - attempt.file(OPENING).stat().st_mtime)
    publish_receipt(nb, attempt, opening, outcome, seconds)


def _wait_for_end(kernel: dict[str, Any], attempt: Attempt) -> None:
    deadline = time.monotonic() + KERNEL_GRACE
    while True:
        try:
            process = psutil.Process(kernel["pid"])
            alive = process.create_time() == kernel["created"] and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return
        if not alive:
            return
        if time.monotonic() > deadline:
            raise Refused(
                f"the kernel of the killed attempt {attempt.number} still runs",
                found=f"process {kernel['pid']}",
                remedy="end it, then start again",
            )
        time.sleep(0.2)
