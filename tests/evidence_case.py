"""Notebooks and runs for the evidence tests: tiny, standard library only, no kernel unless a test starts one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import nbformat
from papermill.iorw import load_notebook_node

from d2lib.evidence import engine, notebook
from d2lib.evidence.engine import Source, open_attempt, set_parameters
from d2lib.evidence.environment import describe_environment
from d2lib.evidence.kernel import Progress
from d2lib.evidence.layout import JOURNAL, NOTEBOOK, Attempt, parse_output
from d2lib.evidence.receipts import Receipt, record_input
from d2lib.evidence.seal import judge, publish_receipt
from d2lib.files import canonical_json

BEGIN = """from d2lib.evidence.phase import Phase
from d2lib.params import {schema}
phase = Phase.begin("{phase}", {schema}, globals())"""
SCHEMAS = {
    "admission": "AdmissionParams",
    "cost_sheet": "CostSheetParams",
    "finish": "FinishParams",
    "g2": "G2Params",
    "train": "TrainParams",
}
DEFAULTS = {
    "admission": "run = 'runs/demo'",
    "cost_sheet": "run = 'runs/demo'\ninputs = {}",
    "finish": "run = 'runs/demo'",
    "g2": "run = 'runs/demo'\nsplit = 'dev'",
    "train": "run = 'runs/demo'",
}


_environment = functools.cache(describe_environment)


def write_notebook(path: Path, phase: str, cells: Sequence[str]) -> Path:
    """A phase's notebook: a heading, the parameters cell, Phase.begin, and these cells (`# …` ones are markdown)."""
    nb = nbformat.v4.new_notebook()
    nb.metadata = nbformat.from_dict(
        {"d2": {"phase": phase}, "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    )
    parameters = nbformat.v4.new_code_cell(DEFAULTS[phase], metadata={"tags": ["parameters"]})
    begin = nbformat.v4.new_code_cell(BEGIN.format(phase=phase, schema=SCHEMAS[phase]))
    rest = [
        nbformat.v4.new_markdown_cell(cell) if cell.startswith("#") else nbformat.v4.new_code_cell(cell)
        for cell in cells
    ]
    nb.cells = [nbformat.v4.new_markdown_cell(f"# {phase}"), parameters, begin, *rest]
    for number, cell in enumerate(nb.cells):
        cell["id"] = f"cell-{number}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(notebook.to_text(nb), encoding="utf-8")
    return path


def make_receipt(
    root: Path,
    phase: str,
    number: int,
    *,
    job: str | None = None,
    parameters: Mapping[str, Any] | None = None,
    inputs: Mapping[str, str] | None = None,
    outputs: Mapping[str, str] | None = None,
    result: Mapping[str, Any] | None = None,
    verdict: str | None = None,
    progress: Progress | None = None,
    stopped: bool = False,
    edit: Callable[[Any], None] = lambda _: None,
) -> tuple[Receipt, Attempt]:
    """A receipt as the engine makes it, of a notebook whose cells did not run but look as if they had."""
    name = phase if job is None else f"{phase}-{job}"
    source = write_notebook(root.parent.parent / "notebooks" / f"{phase}.ipynb", phase, ["phase.record({'x': 1})"])
    output = root / name / f"attempt-{number}" / NOTEBOOK
    attempt = parse_output(output, phase)
    nb = load_notebook_node(str(source))
    values = dict(parameters or {"run": str(root)})
    nb.metadata.papermill.update(input_path=str(source), output_path=str(output))
    attempt.phase_folder.mkdir(parents=True, exist_ok=True)
    read = Source.read(nb)
    nb = set_parameters(nb, values)
    engine.check_place(attempt)
    with patch.object(engine, "describe_environment", return_value=_environment()):
        opening = open_attempt(nb, attempt, read, values)
    entries = [{"output": {"label": label, "path": path}} for label, path in (outputs or {}).items()]
    entries += [
        {"input": record_input(label, root / path, path).model_dump(mode="json")}
        for label, path in (inputs or {}).items()
    ]
    attempt.file(JOURNAL).write_bytes(b"".join(canonical_json(entry) + b"\n" for entry in entries))
    code = [cell for cell in nb.cells if notebook.is_code(cell)]
    progress = progress or Progress(completed=len(code))
    for count, cell in enumerate(code[: progress.completed], 1):
        cell["execution_count"] = count
    if result is not None:
        data = {notebook.RESULT_MIME: {"result": dict(result), "verdict": verdict}, "text/plain": "recorded"}
        code[-1]["outputs"] = [nbformat.v4.new_output("display_data", data=data)]
    edit(nb)
    outcome = judge(nb, attempt, progress, stopped, None)
    return publish_receipt(nb, attempt, opening, outcome, 1.5), attempt


def make_run(root: Path) -> Path:
    """A small run: capture-like, an interrupted attempt, its resumption, and a verdict; every kind of file once."""
    root.mkdir(parents=True)
    (root / "assembly").mkdir()
    (root / "assembly" / "MANIFEST.json").write_text('{"rows":3}\n')
    (root / "assembly" / "shard.bin").write_bytes(bytes(range(256)) * 9)
    (root / "assembly" / "empty.bin").write_bytes(b"")
    make_receipt(root, "cost_sheet", 1, outputs={"assembly": "assembly"}, result={"sequences": 1})
    (root / "full").mkdir()
    (root / "full" / "log.txt").write_text("update 1\n")
    inputs = {"assembly": "assembly", "receipt of cost_sheet": "cost_sheet/attempt-1/receipt.json"}
    made = {"log": "full/log.txt", "dev": "full/dev.json"}
    stopped = Progress(completed=2, stopped_before=3)
    make_receipt(root, "g2", 1, job="dev", inputs=inputs, outputs=made, progress=stopped, stopped=True)
    (root / "full" / "log.txt").write_text("update 1\nupdate 2\n")
    (root / "full" / "dev.json").write_text('{"gain":0.25}\n')
    make_receipt(root, "g2", 2, job="dev", inputs=inputs, outputs=made, result={"gain": 0.25}, verdict="PASS")
    make_receipt(root, "finish", 1, inputs={"dev": "full/dev.json"}, result={"splits": {}}, verdict="FAIL")
    return root
