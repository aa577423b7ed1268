"""The short form of papermill: one phase's notebook into its next receipt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from d2lib.errors import ExitStatus, Refused
from d2lib.evidence.layout import NOTEBOOK, RECEIPT, numbers
from d2lib.evidence.ledger import read_ledger
from d2lib.evidence.receipts import exit_status, read_receipt
from d2lib.evidence.repair import complete
from d2lib.files import read_json, sha256_file


def run_phase(
    notebook: Path,
    parameters: dict[str, Any],
    runs: Path,
    namespace: str,
    *,
    job: str | None = None,
    attempt: int | None = None,
) -> ExitStatus:
    """Execute a phase's notebook with the papermill engine `d2`; progress and the last line go to stderr.

    Args:
        notebook: the phase's notebook.
        parameters: its parameters, complete.
        runs: the folder of runs.
        namespace: the run's name under it.
        job: the job, where the phase has several.
        attempt: the attempt's number; by default the next one.

    Returns: the receipt's exit status, or that of a refused start.
    """
    import papermill  # before d2lib.evidence.engine: papermill imports the engine while it imports itself
    from papermill.engines import papermill_engines

    from d2lib.evidence.engine import D2Engine, PhaseExit

    papermill_engines.register("d2", D2Engine)  # this d2lib's, whichever is installed
    folder = runs / namespace / step_name(notebook, job)
    if attempt is None:
        attempt = next_attempt(folder)
    try:
        papermill.execute_notebook(
            str(notebook).replace("{", "{{").replace("}", "}}"),
            str(folder / f"attempt-{attempt}" / NOTEBOOK).replace("{", "{{").replace("}", "}}"),
            parameters,
            engine_name="d2",
            progress_bar=False,
            log_output=True,
        )
    except PhaseExit as error:
        return ExitStatus(int(error.code or 0))
    return ExitStatus.DONE


def step_name(notebook: Path, job: str | None) -> str:
    """PHASE or PHASE-JOB of a notebook; raises Refused when it is none or names no phase."""
    value = read_json(notebook)
    metadata = value.get("metadata") if isinstance(value, dict) else None
    phase = ((metadata or {}).get("d2") or {}).get("phase")
    if not isinstance(phase, str):
        raise Refused(
            "the notebook names no phase", expected='"d2": {"phase": NAME} in its metadata', found=phase, where=notebook
        )
    return phase if job is None else f"{phase}-{job}"


def done_status(runs: Path, namespace: str, step: str) -> ExitStatus | None:
    """The exit status of a step's newest receipt with status done, or None when it is not done.

    What a killed attempt left is completed or removed first.

    Raises:
        Refused: the ledger is broken, or the receipt is not the one in the ledger.
    """
    root = runs / namespace
    complete(root)
    for line in reversed(read_ledger(root)):
        if line.name == step and line.status == "done":
            path = root / step / f"attempt-{line.attempt}" / RECEIPT
            if str(sha256_file(path)) != line.receipt_json_sha256:
                raise Refused("a receipt is not the one in the ledger", where=path, remedy=f"see d2 verify {root}")
            return exit_status(read_receipt(path).status, line.verdict)
    return None


def next_attempt(folder: Path) -> int:
    """The number of the attempt that may start in a phase's folder."""
    return max(numbers(folder), default=0) + 1
