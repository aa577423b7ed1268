"""Execute every notebook on the fixture's run and commit-clean its outputs: python tests/refresh_notebooks.py [NAME…].

Standard error, timings and execution metadata are dropped; an output that names a folder of this machine is an error.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"
LARGEST = 600_000


def refresh(path: Path) -> None:
    """Execute one notebook in place."""
    notebook = nbformat.read(path, 4)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    NotebookClient(notebook, timeout=1200, kernel_name="python3", resources={"metadata": {"path": NOTEBOOKS}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [
                output for output in cell.outputs if not (output.output_type == "stream" and output.name == "stderr")
            ]
    notebook.metadata["language_info"] = {"name": "python"}
    text = nbformat.writes(notebook) + "\n"
    for private in (str(ROOT), str(Path.home()) + "/", "/tmp/"):
        if private in text:
            raise SystemExit(f"{path.name}: an output names {private}: {text[text.index(private) - 200 :][:400]}")
    if len(text) > LARGEST:
        raise SystemExit(f"{path.name}: {len(text):,} characters are too many to commit")
    path.write_text(text, encoding="utf-8")
    print(f"{path.name}: {len(text):,} characters", flush=True)


if __name__ == "__main__":
    for name in sys.argv[1:] or sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb")):
        refresh(NOTEBOOKS / f"{name}.ipynb")
