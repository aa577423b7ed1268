"""What a phase's notebook uses: its parameters, its inputs and outputs, and one recorded result.

    from d2lib.evidence.phase import Phase
    phase = Phase.begin("g1", G1Params, globals())
    assembly = phase.input("assembly", phase.params.assembly)
    path = phase.output("g1", "g1/g1.json")
    ...
    phase.record({"splits": 4}, "PASS")

Under the papermill engine `d2` this makes a receipt. In plain Jupyter the same cells are a preview: inputs are read
from the run that the parameters name, outputs go to a temporary folder, and nothing is recorded.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

import psutil
from pydantic import ValidationError

from d2lib.errors import D2Error, Interrupted, Refused
from d2lib.evidence.environment import library_folder
from d2lib.evidence.layout import FINAL_NAMES, JOURNAL, LEDGER, LOCK, RECEIPT, RESULT_MIME, WORKING_NAMES, split_attempt
from d2lib.evidence.ledger import read_ledger
from d2lib.evidence.receipts import InputRecord, Receipt, Verdict, read_receipt, record_input
from d2lib.files import Record, canonical_json, inside, sha256_bytes
from d2lib.progress import bar
from d2lib.strict import parse_json

CONTEXT = "D2_PHASE_CONTEXT"
_BAR_FROM = 256 << 20

P = TypeVar("P", bound=Record)
Name = TypeVar("Name", bound=str)


class Context(Record):
    """What the engine tells the notebook, in the environment variable D2_PHASE_CONTEXT."""

    namespace: str
    phase: str
    job: str | None
    attempt: int
    root: str
    attempt_dir: str
    library: str
    parameters_sha256: str


def validate_parameters(schema: type[P], values: Mapping[str, Any], *, where: object = None) -> P:
    """Parameters against a phase's schema: complete, typed, finite, no unknown name.

    Raises:
        Refused: names the parameter, what was expected and what was found.
    """
    for name, value in values.items():
        if name not in schema.model_fields:
            known = ", ".join(schema.model_fields)
            raise Refused("an unknown parameter", expected=f"one of {known}", found=name, where=where)
        try:
            canonical_json(value)
        except Refused as error:
            raise Refused(
                f"the parameter {name} is not a plain value",
                expected=error.expected,
                found=repr(value),
                where=where,
                remedy="quote it in a YAML file; papermill's -p turns 7e1234567 into infinity and 007 into 7",
            ) from None
    try:
        return schema.model_validate_json(canonical_json(dict(values)))
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in problem["loc"]) or "the parameters"
        if problem["type"] == "missing":
            raise Refused(f"the parameter {name} is missing", where=where) from None
        raise Refused(
            f"the parameter {name} is wrong", expected=problem["msg"], found=repr(problem["input"]), where=where
        ) from None


class Phase(Generic[P]):
    """One execution of one phase's notebook. Made by `begin`; a notebook has one."""

    def __init__(self, name: str, params: P, root: Path, attempt_dir: Path, context: Context | None) -> None:
        self.name = name
        self.params = params
        self.root = root
        """The run root, runs/NAMESPACE: what earlier phases made lies under it."""
        self.attempt_dir = attempt_dir
        """A folder of this attempt's own (logs, tables): in a preview, a temporary one."""
        self.context = context
        self._inputs: dict[str, tuple[Path, InputRecord]] = {}
        self._outputs: dict[str, Path] = {}
        self._recorded = False

    @classmethod
    def begin(cls, name: str, schema: type[P], variables: Mapping[str, Any]) -> Phase[P]:
        """Start a phase from a notebook.

        Args:
            name: the phase; under the engine it must be the one that the notebook's metadata names.
            schema: the parameters' schema.
            variables: the notebook's `globals()`, where the parameters stand under their own names.

        Raises:
            Refused: a parameter is missing, ill-typed or was changed in the notebook, or the notebook runs with
                another d2lib than its engine.
        """
        values = {field: variables[field] for field in schema.model_fields if field in variables}
        params = validate_parameters(schema, values, where=f"the notebook of {name}")
        text = os.environ.pop(CONTEXT, None)  # children of the notebook are no phase
        if text is None:
            return cls(name, params, preview_root(params), Path(tempfile.mkdtemp(prefix=f"d2-preview-{name}-")), None)
        context = Context.model_validate_json(text)
        if context.phase != name:
            raise Refused("the notebook's metadata names another phase", expected=name, found=context.phase)
        if parameters_sha256(params) != context.parameters_sha256:
            raise Refused(
                "a parameter was changed in the notebook",
                expected=f"parameters with {context.parameters_sha256}",
                found=f"parameters with {parameters_sha256(params)}",
                remedy="give parameters to papermill; no cell may set them again",
            )
        if str(library_folder()) != context.library:
            raise Refused(
                "the notebook imported another d2lib than its engine",
                expected=context.library,
                found=library_folder(),
                remedy="run papermill with the Python and the PYTHONPATH that the kernel gets",
            )
        phase = cls(name, params, Path(context.root), Path(context.attempt_dir), context)
        phase._watch()
        return phase

    @property
    def preview(self) -> bool:
        """Whether nothing is recorded because the notebook runs outside the engine."""
        return self.context is None

    def input(self, label: str, path: str | Path) -> Path:
        """Declare what the phase reads, and hash it now; it is hashed again when the result is recorded.

        Args:
            label: what it is to this phase; unique.
            path: a file or folder, from the run root or absolute.

        Returns: the path to read.
        Raises:
            Refused: it is missing, or it is or holds a link.
        """
        self._new(label, self._inputs)
        place = Path(os.path.normpath(self.root / path))
        record = self._hash(label, place)
        self._inputs[label] = (place, record)
        self._note({"input": record.model_dump(mode="json")})
        return place

    def inputs(self, label: str, paths: Mapping[Name, str]) -> dict[Name, Path]:
        """Declare several inputs of one kind, as LABEL_NAME; returns name → the path to read."""
        return {name: self.input(f"{label}_{name}", path) for name, path in paths.items()}

    def output(self, label: str, path: str | Path) -> Path:
        """Declare what the phase makes, before it is made, so that a killed phase's outputs are known too.

        Args:
            label: what it is; unique.
            path: a file or folder, from the run root or absolute under it (as under attempt_dir).

        Returns: the path to write, its folder made; in a preview it lies in a temporary folder.
        Raises:
            Refused: the path leaves the run root, or is a receipt's.
        """
        self._new(label, self._outputs)
        within = self.attempt_dir if self.preview and Path(path).is_relative_to(self.attempt_dir) else self.root
        relative = output_name(within, path)
        if split_attempt(self.root / relative) or any(
            split_attempt(parent) and parent != self.attempt_dir for parent in (self.root / relative).parents
        ):
            raise Refused("an output lies in another attempt's folder", found=path, remedy="use phase.attempt_dir")
        place = (self.attempt_dir if self.preview else self.root) / relative
        place.parent.mkdir(parents=True, exist_ok=True)
        self._outputs[label] = place
        self._note({"output": {"label": label, "path": relative}})
        return place

    def receipt(self, step: str) -> Receipt:
        """The newest receipt of an earlier step (PHASE or PHASE-JOB) with status done, declared as an input.

        Raises:
            Refused: there is none, or the ledger or the receipt is not sound.
        """
        for line in reversed(read_ledger(self.root)):
            if line.name == step and line.status == "done":
                path = self.input(f"receipt of {step}", f"{step}/attempt-{line.attempt}/{RECEIPT}")
                if self._inputs[f"receipt of {step}"][1].sha256 != line.receipt_json_sha256:
                    raise Refused("a receipt is not the one in the ledger", where=path)
                return read_receipt(path)
        raise Refused(f"{step} is not done", expected="a receipt with status done", where=self.root / LEDGER)

    def product(self, step: str, label: str) -> Path:
        """What the newest done attempt of an earlier step made under a label, declared as an input of that label.

        Returns: the path to read.
        Raises:
            Refused: as `receipt`; or the receipt names no such output, or the file is not the one that it names.
        """
        receipt = self.receipt(step)
        made = next((output for output in receipt.outputs if output.label == label), None)
        if made is None:
            raise Refused(f"the receipt of {step} names no {label}", where=f"{step}/attempt-{receipt.attempt}")
        path = self.input(label, made.path)
        found = self._inputs[label][1].sha256
        if found != made.sha256:
            raise Refused(f"{label} is not what {step} made", expected=made.sha256, found=found, where=path)
        return path

    def record(self, result: Mapping[str, Any], verdict: Verdict | None = None) -> None:
        """Record the phase's one result, after hashing every input again.

        Args:
            result: plain finite values; what the next phases and the site read.
            verdict: where the phase judges.

        Raises:
            Refused: a second result, a value that is not finite or plain, an input that changed, a missing output.
        """
        if self._recorded:
            raise Refused("a phase records one result", found="a second one")
        if verdict not in (None, "PASS", "FAIL", "INCONCLUSIVE"):
            raise Refused("no such verdict", expected="PASS, FAIL, INCONCLUSIVE or None", found=verdict)
        if not isinstance(result, Mapping):
            raise Refused("a result is not a mapping", expected="names and plain values", found=type(result).__name__)
        digest = sha256_bytes(canonical_json(dict(result)))
        for label, (place, before) in self._inputs.items():
            after = self._hash(label, place)
            if after != before:
                raise Refused(
                    f"the input {label} changed while the phase ran",
                    expected=before.sha256,
                    found=after.sha256,
                    where=place,
                )
        for label, place in self._outputs.items():
            if not place.exists():
                raise Refused(f"the output {label} was not made", where=place)
        self._recorded = True
        plain = "preview: nothing was recorded" if self.preview else f"result {digest}"
        if verdict is not None:
            plain = f"{verdict}; {plain}"
        _display({RESULT_MIME: {"result": dict(result), "verdict": verdict}, "text/plain": plain})

    def _new(self, label: str, known: Mapping[str, Any]) -> None:
        if self._recorded:
            raise Refused("the result is recorded already", found=f"{label} after it")
        if label in known:
            raise Refused("a label stands twice", found=label)

    def _hash(self, label: str, place: Path) -> InputRecord:
        try:
            shown = place.relative_to(self.root).as_posix()
        except ValueError:
            shown = str(place)
        with _bar(place) as progress:
            return record_input(label, place, shown, progress=progress)

    def _note(self, entry: Mapping[str, Any]) -> None:
        """Append to the attempt's journal, durable on return: what a killed phase leaves of its declarations."""
        if self.preview:
            return
        append_journal(self.attempt_dir / JOURNAL, entry)

    def _watch(self) -> None:
        """Note this process, and any error that ends a cell, for the engine; show refusals as one clear line."""
        self._note({"kernel": {"pid": os.getpid(), "created": psutil.Process().create_time()}})
        shell = _shell()
        if shell is None:
            return

        def after_cell(outcome: Any) -> None:
            error = outcome.error_in_exec
            if error is not None:
                self._note({"error": describe_error(error)})

        def one_line(shell: Any, kind: type[BaseException], error: BaseException, trace: Any, tb_offset: Any) -> None:
            shell._showtraceback(kind, error, [f"{kind.__name__}: {error}"])

        shell.events.register("post_run_cell", after_cell)
        shell.set_custom_exc((Refused, Interrupted), one_line)


def parameters_sha256(params: Record) -> str:
    """Digest of the complete parameters in canonical JSON."""
    return str(sha256_bytes(canonical_json(params.model_dump(mode="json"))))


def output_name(root: Path, path: str | Path) -> str:
    """An output's path from the run root; raises Refused when it leaves it, or is or holds the evidence itself."""
    relative = Path(path)
    if relative.is_absolute():
        try:
            relative = relative.relative_to(root)
        except ValueError:
            raise Refused("an output leaves the run root", expected=f"a path under {root}", found=path) from None
    inside(root, relative)
    parts = relative.parts
    if not parts or parts[-1] in FINAL_NAMES | WORKING_NAMES | {LEDGER, LOCK} or "\n" in str(path):
        raise Refused("an output has an evidence file's name", found=path, remedy="choose another name")
    return relative.as_posix()


def describe_error(error: BaseException) -> dict[str, str]:
    """What the engine and the receipt need of an exception: its kind, its class and its message."""
    if isinstance(error, Refused):
        kind = "refused"
    elif isinstance(error, Interrupted):
        kind = "interrupted"
    elif isinstance(error, KeyboardInterrupt):
        kind = "keyboard"
    else:
        kind = "failed"
    text = str(error) if isinstance(error, D2Error) else f"{type(error).__name__}: {error}".rstrip(": ")
    return {"kind": kind, "class": type(error).__name__, "message": text}


def preview_root(params: Record) -> Path:
    """The run root of the `run` parameter, sought from the working folder upwards, as Jupyter starts in notebooks/."""
    run = Path(str(getattr(params, "run", ".")))
    for folder in (Path.cwd(), *Path.cwd().parents):
        if (folder / run).is_dir():
            return (folder / run).resolve()
    return run.absolute()


def _shell() -> Any:
    from IPython import get_ipython

    return get_ipython()


def _display(bundle: Mapping[str, Any]) -> None:
    from IPython.display import display

    display(dict(bundle), raw=True)  # type: ignore[no-untyped-call]


@contextmanager
def _bar(path: Path) -> Iterator[Callable[[int], None] | None]:
    """A bar over the bytes that are hashed, where they are many."""
    total = sum(file.stat().st_size for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file())
    if total < _BAR_FROM:
        yield None
        return
    with bar(total, f"hashing {path.name}", "B", unit_scale=True) as shown:

        def step(size: int) -> None:
            shown.update(size)

        yield step


def append_journal(path: Path, entry: Mapping[str, Any]) -> None:
    """Append an entry as a line of its own, durable on return, also after a line that was torn by a full disk."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        data = b"\n" * torn + canonical_json(dict(entry)) + b"\n"
        while data:
            data = data[os.write(descriptor, data) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_journal(path: Path) -> list[dict[str, Any]]:
    """The journal's entries. Torn lines are passed over: whoever wrote one died or failed before acting on it."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    entries = []
    for line in data.split(b"\n"):
        with suppress(Refused):  # a beginning of an object is never JSON
            entry = parse_json(line)
            if isinstance(entry, dict):
                entries.append(entry)
    return entries
