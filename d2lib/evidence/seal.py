"""From what a kernel left to a receipt: judged, published in one step, and given its line in the ledger."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from d2lib.errors import Refused
from d2lib.evidence import notebook
from d2lib.evidence.layout import (
    JOURNAL,
    NOTEBOOK,
    OPENING,
    RECEIPT,
    WORKING_FILES,
    WORKING_NOTEBOOK,
    Attempt,
    split_attempt,
)
from d2lib.evidence.ledger import LedgerLine, ledger_lock, read_ledger, settle
from d2lib.evidence.phase import read_journal
from d2lib.evidence.receipts import (
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
    hash_prefixes,
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
    code = [cell for cell in nb.cells if notebook.is_code(cell)]
    errors = sum(notebook.has_error(cell) for cell in code)
    counts = CellCounts(code=len(code), ran=progress.completed, errors=errors)
    status, message = _status(code, counts, progress, journal, stopped, refusal)
    outcome = with_files(Outcome(status, message, counts), attempt, journal)
    return _with_result(outcome, code, attempt, journal) if outcome.status == "done" else outcome


def _status(
    code: list[Any],
    counts: CellCounts,
    progress: Progress,
    journal: list[dict[str, Any]],
    stopped: bool,
    refusal: Refused | None,
) -> tuple[Status, str | None]:
    if refusal is not None:
        return "refused", str(refusal)
    if progress.trouble is not None:
        return "failed", progress.trouble
    if progress.died_in is not None:
        left = counts.code - progress.died_in
        return "failed", f"the kernel died in cell {progress.died_in} of {counts.code}; {left} never ran"
    if progress.error is not None:
        return _raised(progress, journal, stopped)
    if progress.stopped_before is not None:
        return "interrupted", f"stopped on request before cell {progress.stopped_before}"
    if counts.errors or counts.ran != counts.code or any(cell.execution_count is None for cell in code):
        return "failed", f"{counts.ran} of {counts.code} code cells ran, {counts.errors} with an error"
    return "done", None


def _raised(progress: Progress, journal: list[dict[str, Any]], stopped: bool) -> tuple[Status, str]:
    """The status of an exception: by what the kernel noted of it, else by the class that its reply names."""
    name, message = progress.error or ("", "")
    noted = next((entry["error"] for entry in reversed(journal) if "error" in entry), None)
    if noted is not None and noted["class"] == name:
        kind, message = noted["kind"], noted["message"]
    else:
        kind, message = ("keyboard" if name == "KeyboardInterrupt" else "failed"), f"{name}: {message}".rstrip(": ")
    if kind == "refused":
        return "refused", message
    where = f"in cell {progress.error_in}: "
    if kind == "interrupted":
        return "interrupted", where + message
    if kind == "keyboard" and stopped:
        return "interrupted", where + "stopped on request"
    return "failed", where + message


def _with_result(outcome: Outcome, code: list[Any], attempt: Attempt, journal: list[dict[str, Any]]) -> Outcome:
    for entry in journal:
        if "output" in entry and not os.path.lexists(attempt.root / entry["output"]["path"]):
            return outcome.failed(f"the output {entry['output']['label']} was not made")
    found = notebook.results(code)
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


def with_files(outcome: Outcome, attempt: Attempt, journal: list[dict[str, Any]]) -> Outcome:
    """The outcome with the declared inputs, and the declared outputs as they are now.

    It fails when an output is or holds a link, or when bytes that an earlier receipt recorded are no longer there.
    """
    inputs = [InputRecord.model_validate_json(canonical_json(entry["input"])) for entry in journal if "input" in entry]
    outcome = replace(outcome, inputs=inputs)
    try:
        outcome = replace(outcome, outputs=hash_outputs(attempt, journal))
        changed = changed_outputs(attempt.root, outcome.outputs)
    except Refused as error:
        return outcome.failed(f"{error} (and: {outcome.message})" if outcome.message else str(error))
    return outcome if changed is None else outcome.failed(changed)


def hash_outputs(attempt: Attempt, journal: Iterable[dict[str, Any]]) -> list[OutputRecord]:
    """Every file that the declared outputs hold now, by path; raises Refused at a link or device."""
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


def changed_outputs(root: Path, outputs: Iterable[OutputRecord]) -> str | None:
    """What is wrong when a file that an earlier receipt recorded has other bytes now; growing is allowed."""
    current = {output.path: output for output in outputs}
    for _, receipt in ledger_receipts(root):
        for before in receipt.outputs:
            after = current.get(before.path)
            if after is None or (after.size, after.sha256) == (before.size, before.sha256):
                continue
            if hash_prefixes(root / before.path, [before.size])[1].get(before.size) != before.sha256:
                return f"{before.path} is not what {receipt.name} attempt {receipt.attempt} recorded"
    return None


def ledger_receipts(root: Path) -> Iterator[tuple[LedgerLine, Receipt]]:
    """Every line of the ledger with its receipt."""
    for line in read_ledger(root):
        yield line, read_receipt(root / line.name / f"attempt-{line.attempt}" / RECEIPT)


def find_parents(root: Path, inputs: Iterable[InputRecord]) -> list[ParentRecord]:
    """The receipts that inputs come from: those that list a file with the same path and digest, and receipts read."""
    makers: dict[tuple[str, str], ParentRecord] = {}
    for line, receipt in ledger_receipts(root):
        parent = _parent("", receipt, line.receipt_json_sha256)
        for output in receipt.outputs:
            makers[output.path, output.sha256] = parent
        makers[f"{line.name}/attempt-{line.attempt}/{RECEIPT}", line.receipt_json_sha256] = parent
    found: dict[tuple[str, str], ParentRecord] = {}
    for record in inputs:
        for name, file in files_of(record).items():
            maker = makers.get((name, str(file.sha256)))
            path = root / name
            if maker is None and path.name == RECEIPT and split_attempt(path.parent) is not None:
                with suppress(Refused):  # another run's; what it is worth is the phase's to judge
                    maker = _parent("", read_receipt(path), str(file.sha256))
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
    text = notebook.to_text(nb)
    notebook.save(attempt.file(WORKING_NOTEBOOK), text)
    return text.encode("utf-8")


def publish_receipt(nb: Any, attempt: Attempt, opening: Opening, outcome: Outcome, seconds: float) -> Receipt:
    """Write the receipt and its notebook, read-only and for good, and the ledger's line.

    receipt.json is the commit: whoever dies after it leaves everything that `settle` needs to finish the rest.
    """
    try:
        parents = find_parents(attempt.root, outcome.inputs)
    except Refused as error:
        parents, outcome = [], outcome.failed(f"an earlier receipt cannot be read: {error}")
    nb.metadata["d2"] = {
        **nb.metadata.get("d2", {}),
        "receipt": notebook.binding(opening, outcome.status, outcome.verdict),
    }
    data = save_notebook(attempt, nb)
    problem = None
    if len(data) > notebook.MAX_BYTES:
        problem = f"the notebook has {len(data) >> 20} MiB; at most {notebook.MAX_BYTES >> 20} are allowed"
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
        nb.metadata["d2"]["receipt"] = notebook.binding(opening, outcome.status, outcome.verdict)
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
    for name in WORKING_FILES:
        with suppress(OSError):  # the receipt stands; what is left here the next attempt removes, and `repair`
            attempt.file(name).unlink(missing_ok=True)
    return receipt


def seal_abandoned(attempt: Attempt, following: int) -> None:
    """Give an attempt whose papermill was killed its receipt: failed, with the notebook and outputs that it left.

    Args:
        attempt: an attempt that has begun; one that has its receipt is left alone.
        following: the number of the attempt that begins now.

    Raises:
        Refused: the killed attempt's kernel still runs, or the folder is not an attempt's.
    """
    if attempt.file(RECEIPT).exists():
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
    nb = notebook.from_bytes(attempt.file(WORKING_NOTEBOOK).read_bytes())
    code = [cell for cell in nb.cells if notebook.is_code(cell)]
    begun = sum(cell.execution_count is not None for cell in code)
    outcome = Outcome(
        "failed",
        f"papermill was killed; {begun} of {len(code)} cells or more had begun; recorded by attempt {following}",
        CellCounts(code=len(code), ran=max(begun - 1, 0), errors=0),
    )
    outcome = with_files(outcome, attempt, journal)
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
