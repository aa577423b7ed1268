"""What the dense cases of `make fixture` print where the notebooks' committed outputs are compared for the first case.

The notebooks are committed with the outputs of the three-stage case. The receipts of the dense cases are executions of
the same notebooks, so the same cells (`NBVAL_CHECK_OUTPUT`) are compared here, with golden/dense-cases.json:
`python tests/test_dense_cases.py` prints it anew.
"""

from __future__ import annotations

import json
from pathlib import Path

import nbformat
import pytest

from d2lib.chain import CHAIN
from d2lib.evidence.ledger import read_ledger

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden" / "dense-cases.json"
CASES = ("fixture-dense", "fixture-dense-1n")


def compared(run: Path) -> dict[str, str]:
    """Step → what the compared cells of its newest done receipt print."""
    texts: dict[str, str] = {}
    for line in read_ledger(run):
        if line.status == "done":
            notebook = nbformat.read(run / line.name / f"attempt-{line.attempt}" / "receipt.ipynb", 4)
            outputs = [
                output.text
                for cell in notebook.cells
                if cell.cell_type == "code" and "NBVAL_CHECK_OUTPUT" in cell.source
                for output in cell.outputs
                if output.output_type == "stream" and output.name == "stdout"
            ]
            texts[line.name] = "".join(outputs)
    return texts


@pytest.mark.parametrize("case", CASES)
def test_a_dense_case_prints_what_it_printed(case: str) -> None:
    run = ROOT / "runs" / case
    if not run.is_dir():
        pytest.skip(f"there is no runs/{case}: make fixture")
    expected = json.loads(GOLDEN.read_text(encoding="utf-8"))[case]
    assert expected.keys() == {step.name for step in CHAIN}
    assert {name: text for name, text in compared(run).items() if name in expected} == expected


if __name__ == "__main__":
    steps = {step.name for step in CHAIN}
    found = {case: compared(ROOT / "runs" / case) for case in CASES}
    kept = {case: {name: text for name, text in texts.items() if name in steps} for case, texts in found.items()}
    print(json.dumps(kept, indent=1, sort_keys=True))
