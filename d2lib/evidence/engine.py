"""The papermill engine `d2`: papermill executes a phase's notebook, and what comes out is a receipt.

    papermill --engine d2 notebooks/g1.ipynb runs/demo/g1/attempt-1/receipt.ipynb -f params/demo/g1.yaml

Before: the output's place, the parameters, the notebook's source, d2lib and the environment are checked and hashed.
While it runs: a working notebook, a journal of declared inputs and outputs, and a lock on the phase.
After: whatever came of it is published read-only and gets its line in the ledger; papermill's exit status is the
receipt's.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from d2lib import __version__
from d2lib.entry import describe, storage_failure
from d2lib.errors import D2Error, ExitStatus, Refused, one_line
from d2lib.evidence import notebook
from d2lib.evidence.environment import (
    child_environment,
    describe_environment,
    library_folder,
    library_path,
    library_sha256,
    who_executes,
)
from d2lib.evidence.layout import NOTEBOOK, OPENING, RECEIPT, WORKING_NOTEBOOK, Attempt, numbers, parse_output
from d2lib.evidence.ledger import locked, read_ledger
from d2lib.evidence.parameters import read_again
from d2lib.evidence.phase import CONTEXT, Context, validate_parameters
from d2lib.evidence.receipts import NotebookRecord, Opening, Receipt, now, read_receipt, to_bytes
from d2lib.evidence.repair import complete
from d2lib.evidence.seal import Outcome, judge, publish_receipt, save_notebook, seal_abandoned
from d2lib.files import Record, canonical_json, sha256_bytes, sha256_file, write_exclusive
from d2lib.progress import TERMINAL

if TYPE_CHECKING:
    from d2lib.evidence.kernel import Progress, Stop

SCHEMAS = "d2lib.params:SCHEMAS"
"""Where the phases' parameter schemas are: module:name of a dict, phase → Record. Imported when a notebook runs."""


KEPT = "what was written before it is kept, and the next attempt records this one"


class PhaseExit(SystemExit):
    """Ends papermill with a phase's exit status once its receipt is written (or the start was refused)."""

    def __init__(self, status: ExitStatus) -> None:
        super().__init__(int(status))


class D2Engine:
    """The engine that the entry point `papermill.engine` names.

    It does not inherit from papermill's Engine, because papermill imports this module while it imports itself; it has
    the three methods that papermill calls.
    """

    @classmethod
    def nb_kernel_name(cls, nb: Any, name: str | None = None) -> str:
        """The one kernel: Python 3, this interpreter."""
        if name not in (None, "python3"):
            _leave(Refused("another kernel was asked for", expected="python3", found=name, remedy="leave -k out"))
        return "python3"

    @classmethod
    def nb_language(cls, nb: Any, language: str | None = None) -> str:
        """The one language."""
        if language not in (None, "python"):
            _leave(Refused("another language was asked for", expected="python", found=language))
        return "python"

    @classmethod
    def execute_notebook(cls, nb: Any, kernel_name: str, output_path: str | None = None, **options: Any) -> Any:
        """Execute a parameterized notebook into a receipt.

        Args:
            nb: the notebook, with papermill's injected parameters.
            kernel_name: python3.
            output_path: where papermill would write; see d2lib.evidence.layout.
            options: papermill's own (progress_bar, log_output, autosave_cell_every, start_timeout, ...).

        Returns: the receipt's notebook, when the exit status is 0.
        Raises:
            PhaseExit: with every other exit status, after the receipt is written.
        """
        try:
            receipt, attempt = execute(nb, str(nb.metadata.papermill["output_path"]), options)
        except D2Error as error:
            _leave(error)
        except OSError as error:
            _leave(storage_failure(error, KEPT))
        except Exception:
            traceback.print_exc()
            raise PhaseExit(ExitStatus.UNEXPECTED) from None
        print(final_line(receipt, attempt), file=sys.stderr, flush=True)
        if receipt.exit_status:
            raise PhaseExit(ExitStatus(receipt.exit_status))
        from papermill.iorw import papermill_io

        papermill_io.register(str(nb.metadata.papermill["output_path"]), Published(papermill_io.get_handler("local")))
        return notebook.from_bytes(attempt.file(NOTEBOOK).read_bytes())


def final_line(receipt: Receipt, attempt: Attempt) -> str:
    """What the terminal says in the end: what came of it, how long it took, where the receipt is."""
    word = receipt.verdict or receipt.status
    text = f"d2: {receipt.name} attempt {receipt.attempt}: {word} after {receipt.seconds:.1f} s"
    if receipt.message:
        text += f": {one_line(receipt.message)[:600]}"
    return f"{text}\nd2: receipt {os.path.relpath(attempt.file(RECEIPT), from_start('.'))}"


def _leave(error: D2Error) -> None:
    print(f"d2: {describe(error)}", file=sys.stderr, flush=True)
    raise PhaseExit(error.exit_status)


@dataclass(frozen=True)
class Source:
    """The notebook's source: where it is, and its digest before anything ran."""

    path: Path
    sha256: str
    cells_sha256: str

    @classmethod
    def read(cls, nb: Any) -> Source:
        """Hash the input notebook; raises Refused unless it is the one that papermill loaded."""
        path = from_start(nb.metadata.papermill["input_path"])
        try:
            data = path.read_bytes()
            loaded = notebook.from_bytes(data)
        except (OSError, ValueError, AttributeError) as error:
            raise Refused(
                "the notebook cannot be read", expected="a file", found=str(error)[:200], where=path
            ) from None
        if "papermill" in loaded.metadata:  # its old parameters would pass for this execution's
            raise Refused(
                "the notebook is a receipt and no source",
                expected="a notebook that papermill has not executed",
                where=path,
                remedy="use the one in notebooks/",
            )
        digest = notebook.cells_sha256(loaded.cells)
        if digest != notebook.cells_sha256(nb.cells):
            raise Refused("the notebook changed while it was loaded", where=path, remedy="start again")
        return cls(path, str(sha256_bytes(data)), digest)


def find_schema(phase: str) -> type[Record]:
    """The schema of a phase's parameters; raises Refused for a phase that has none."""
    module, _, name = SCHEMAS.partition(":")
    schemas: Mapping[str, type[Record]] = getattr(importlib.import_module(module), name)
    if phase not in schemas:
        raise Refused("an unknown phase", expected=f"one of {', '.join(schemas)}", found=phase)
    return schemas[phase]


def is_once(schema: type[Record]) -> bool:
    """Whether a phase, once done, never runs again; its schema says so."""
    return bool(getattr(schema, "once", False))


def execute(nb: Any, output: str, options: Mapping[str, Any]) -> tuple[Receipt, Attempt]:
    """Execute a notebook into a receipt; raises Refused, with nothing written, when the attempt has no place."""
    from d2lib.evidence.kernel import Progress, Stop

    phase = (nb.metadata.get("d2") or {}).get("phase")
    if not isinstance(phase, str):
        raise Refused("the notebook names no phase", expected='"d2": {"phase": NAME} in its metadata', found=phase)
    schema = find_schema(phase)
    attempt = parse_output(from_start(output), phase)
    began = time.monotonic()
    with Stop().listening() as stop:
        attempt.phase_folder.mkdir(parents=True, exist_ok=True)
        with locked(attempt.lock, wait=False):
            source = Source.read(nb)
            completed = check_place(attempt, once=is_once(schema))
            if completed is not None:
                return completed, replace(attempt, number=completed.attempt)
            given = dict(nb.metadata.papermill.get("parameters") or {})
            refusal: Refused | None = None
            try:
                given = read_again(given, from_start)
                params = validate_parameters(schema, given)
                check_run(params, attempt)
                values = params.model_dump(mode="json")
                nb = set_parameters(nb, values)
            except Refused as error:
                refusal, values = error, plain(given)
                nb.metadata.papermill["parameters"] = values
            opening = open_attempt(nb, attempt, source, values)
            progress = Progress() if refusal else run_cells(nb, attempt, opening, stop, options)
            outcome = judge(nb, attempt, progress, stop.requested, refusal)
            if outcome.status == "done":
                outcome = recheck(outcome, opening, source)
            return publish_receipt(nb, attempt, opening, outcome, time.monotonic() - began), attempt


def from_start(path: str) -> Path:
    """A path as papermill means it: from the folder in which papermill was started, also under --cwd."""
    from papermill.iorw import papermill_io

    handler = papermill_io.get_handler("local")
    start = handler.cwd(None)
    handler.cwd(start)
    return Path(start or os.getcwd(), path)


def check_place(attempt: Attempt, *, once: bool = False) -> Receipt | None:
    """The attempt is the next one, and the ledger is sound; what killed attempts left is completed or removed first.

    Args:
        once: whether the phase, once done, never runs again.

    Returns: the receipt of a done attempt of a `once` phase that lacked its line until now: there is nothing to run.
    Raises:
        Refused: another number is next, the ledger is broken, a killed attempt's kernel still runs, or the phase is
            done and is one that never runs again.
    """
    earlier = numbers(attempt.phase_folder)
    following = earlier[-1] + 1 if earlier else 1
    if attempt.number != following:
        what = "exists already and is never overwritten" if attempt.number in earlier else "is not the next one"
        raise Refused(
            f"attempt {attempt.number} of {attempt.name} {what}",
            expected=f"attempt-{following}",
            where=attempt.folder,
        )
    before = read_ledger(attempt.root)
    complete(attempt.root, held=attempt.phase_folder)
    for number in earlier:
        seal_abandoned(replace(attempt, number=number), attempt.number)
    done = [line for line in read_ledger(attempt.root) if line.name == attempt.name and line.status == "done"]
    if not once or not done:
        return None
    receipt = replace(attempt, number=done[-1].attempt).file(RECEIPT)
    if done[-1] not in before:
        return read_receipt(receipt)
    raise Refused(
        f"{attempt.name} is done, and a completed job never runs again",
        found=f"attempt {done[-1].attempt}{f', {done[-1].verdict}' if done[-1].verdict else ''}",
        where=receipt,
        remedy="another case is another run",
    )


def check_run(params: Record, attempt: Attempt) -> None:
    """The parameter `run`, where a schema has it, names the run root that the output lies in."""
    run = getattr(params, "run", None)
    if isinstance(run, str) and os.path.realpath(from_start(run)) != str(attempt.root):
        raise Refused("the parameter run and the output disagree", expected=os.path.relpath(attempt.root), found=run)


def set_parameters(nb: Any, values: Mapping[str, Any]) -> Any:
    """Show every parameter in the injected cell, those with their schema's default too."""
    from papermill.parameterize import parameterize_notebook

    return parameterize_notebook(nb, dict(values), kernel_name="python3", language="python")


def plain(value: Any) -> Any:
    """A refused parameter as JSON can hold it: what is not plain and finite becomes its repr."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    try:
        canonical_json(value)
    except Refused:
        return repr(value)
    return value


def open_attempt(nb: Any, attempt: Attempt, source: Source, values: dict[str, Any]) -> Opening:
    """Make the attempt's folder, with the notebook as it starts and everything that is known by now."""
    environment = describe_environment()
    opening = Opening(
        namespace=attempt.namespace,
        phase=attempt.phase,
        job=attempt.job,
        attempt=attempt.number,
        started=now(),
        notebook=NotebookRecord(
            path=os.path.relpath(source.path), source_sha256=source.sha256, cells_sha256=source.cells_sha256
        ),
        parameters=values,
        parameters_sha256=str(sha256_bytes(canonical_json(values))),
        d2lib_version=__version__,
        d2lib_sha256=str(library_sha256()),
        environment=environment,
        environment_sha256=str(sha256_bytes(canonical_json(environment))),
    )
    attempt.folder.mkdir(exist_ok=True)
    save_notebook(attempt, nb)
    write_exclusive(attempt.file(OPENING), to_bytes(opening), mode=0o600)
    return opening


def run_cells(nb: Any, attempt: Attempt, opening: Opening, stop: Stop, options: Mapping[str, Any]) -> Progress:
    """Execute the notebook's cells in a kernel of this interpreter with an allowlisted environment."""
    from d2lib.evidence.kernel import Client, Progress, WorkingNotebook

    forward = bool(options.get("log_output")) or sys.stderr.isatty()
    manager = WorkingNotebook(
        nb,
        output_path=str(attempt.file(WORKING_NOTEBOOK)),
        progress_bar=bool(options.get("progress_bar", True)) and not forward,
        autosave_cell_every=options.get("autosave_cell_every", 30),
    )
    context = Context(
        namespace=attempt.namespace,
        phase=attempt.phase,
        job=attempt.job,
        attempt=attempt.number,
        root=str(attempt.root),
        attempt_dir=str(attempt.folder),
        library=str(library_folder()),
        parameters_sha256=opening.parameters_sha256,
    )
    terminal = {TERMINAL: "1"} if sys.stderr.isatty() else {}
    environment = child_environment({CONTEXT: context.model_dump_json()} | terminal | who_executes(opening.phase))
    path = library_path(environment.get("PYTHONPATH"))
    if path is not None:
        environment["PYTHONPATH"] = path
    manager.notebook_start()
    try:
        client = Client(
            manager,
            stop,
            forward,
            kernel_name="python3",
            timeout=options.get("execution_timeout"),
            startup_timeout=options.get("start_timeout", 60),
            stdout_file=options.get("stdout_file"),
            stderr_file=options.get("stderr_file"),
        )
        progress = client.run(environment)
    except Exception as error:
        progress = Progress(trouble=f"the kernel could not be run: {type(error).__name__}: {error}")
    manager.finish()
    return progress


def recheck(outcome: Outcome, opening: Opening, source: Source) -> Outcome:
    """A done outcome, failed when the library or the notebook's source is no longer what it was at the start."""
    for what, before, after in (
        ("the notebook's source", opening.notebook.source_sha256, sha256_file(source.path)),
        ("d2lib", opening.d2lib_sha256, library_sha256()),
    ):
        found = str(after)
        if found != before:
            return outcome.failed(f"{what} changed while the phase ran; expected: {before}; found: {found}")
    return outcome


class Published:
    """Papermill's handler of an output that is published already: its one last write passes by, the rest is local.

    Args:
        local: papermill's handler of local files.
    """

    def __init__(self, local: Any) -> None:
        self._local, self._passed = local, False

    def write(self, buf: str, path: str) -> None:
        """Let papermill's last write pass by: the receipt is read-only and final."""
        if self._passed:
            self._local.write(buf, path)
        self._passed = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._local, name)
