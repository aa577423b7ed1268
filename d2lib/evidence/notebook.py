"""Notebooks as files and as evidence: text and bytes, cells that must run, recorded results.

nbformat is imported where a notebook is written or read to be executed, and nowhere else: it takes two seconds, which
neither a kernel nor verification should wait for.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from d2lib.errors import Refused
from d2lib.evidence.layout import RESULT_MIME
from d2lib.evidence.receipts import Opening, Receipt, Status, Verdict
from d2lib.files import canonical_json, naming, parse_json, sha256_bytes

MAX_BYTES = 100 * 1024 * 1024


def to_text(nb: Any) -> str:
    """A notebook as its file's text."""
    import nbformat

    return str(nbformat.writes(nb, version=nbformat.NO_CONVERT))  # type: ignore[no-untyped-call]


def from_bytes(data: bytes) -> Any:
    """A notebook from its file's bytes; raises ValueError when they are not one."""
    import nbformat

    try:
        return nbformat.reads(data.decode("utf-8"), as_version=4)  # type: ignore[no-untyped-call]
    except Exception as error:  # nbformat raises several kinds; all mean that the bytes are no notebook
        raise ValueError(f"not a notebook: {' '.join(str(error).split())[:200]}") from None


def save(path: Path, text: str) -> None:
    """Replace a working notebook in one step; a reader never sees half of it."""
    part = path.with_name(f".{path.name}.part")
    with naming(path):
        with open(part, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(part, path)


def is_code(cell: Any) -> bool:
    """Whether a cell is one that must run: code, and not blank."""
    return bool(cell["cell_type"] == "code" and text_of(cell).strip())


def text_of(cell: Any) -> str:
    """A cell's text, which a file may hold as lines."""
    return "".join(cell["source"])


def has_error(cell: Any) -> bool:
    """Whether a cell raised."""
    return any(output["output_type"] == "error" for output in cell.get("outputs", []))


def results(cells: Iterable[Any]) -> list[Any]:
    """Every recorded result among the outputs of cells."""
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    return [output["data"][RESULT_MIME] for output in outputs if RESULT_MIME in output.get("data", {})]


def cells_sha256(cells: Iterable[Any]) -> str:
    """Digest of cells as (type, text), without the parameters that papermill puts in."""
    kept = [cell for cell in cells if "injected-parameters" not in cell["metadata"].get("tags", [])]
    return str(sha256_bytes(canonical_json([[cell["cell_type"], text_of(cell)] for cell in kept])))


def binding(opening: Opening, status: Status, verdict: Verdict | None) -> dict[str, Any]:
    """What a receipt's notebook carries in its metadata, so that the two files belong together."""
    return {
        "namespace": opening.namespace,
        "phase": opening.phase,
        "job": opening.job,
        "attempt": opening.attempt,
        "started": opening.started,
        "status": status,
        "verdict": verdict,
        "source_sha256": opening.notebook.source_sha256,
        "parameters_sha256": opening.parameters_sha256,
        "d2lib_sha256": opening.d2lib_sha256,
        "environment_sha256": opening.environment_sha256,
    }


def check(data: bytes, receipt: Receipt) -> Iterator[tuple[str, object, object]]:
    """What in a receipt's notebook disagrees with the receipt: (message, expected, found)."""
    try:
        yield from _disagreements(parse_json(data), receipt)
    except Refused as error:
        yield "the notebook is not strict JSON", error.expected, error.found or error.message
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        yield "not a receipt's notebook", "a notebook with a receipt's metadata", f"{type(error).__name__}: {error}"


def _disagreements(nb: Any, receipt: Receipt) -> Iterator[tuple[str, object, object]]:
    """As `check`, of a JSON value; raises what Python raises where it is not a notebook."""
    bound = dict(nb["metadata"]["d2"]["receipt"])
    shown = dict(nb["metadata"]["papermill"]["parameters"])
    code = [cell for cell in nb["cells"] if is_code(cell)]
    digest, raised, found = cells_sha256(nb["cells"]), [has_error(cell) for cell in code], results(code)
    expected = binding(receipt, receipt.status, receipt.verdict)
    if bound != expected:
        wrong = sorted(name for name in expected.keys() | bound.keys() if expected.get(name) != bound.get(name))
        yield "the notebook belongs to another receipt", f"the receipt's {', '.join(wrong)}", "others"
    if canonical_json(shown) != canonical_json(receipt.parameters):
        yield "the notebook shows other parameters", receipt.parameters, shown
    if digest != receipt.notebook.cells_sha256:
        yield "the notebook shows other cells than its source had", receipt.notebook.cells_sha256, "others"
    if len(code) != receipt.cells.code:
        yield "the notebook has another number of code cells", receipt.cells.code, len(code)
    if receipt.status != "done":
        return
    for number, cell in enumerate(code, 1):
        if cell.get("execution_count") is None:
            yield f"code cell {number} did not run", "an execution_count", "none"
        if raised[number - 1]:
            yield f"code cell {number} raised", "no error", "an error output"
    if len(found) != 1:
        yield "the notebook does not record exactly one result", 1, len(found)
    elif canonical_json(found[0]) != canonical_json({"result": receipt.result, "verdict": receipt.verdict}):
        yield (
            "the notebook records another result than the receipt",
            receipt.verdict,
            (found[0].get("verdict") if isinstance(found[0], dict) else type(found[0]).__name__),
        )
