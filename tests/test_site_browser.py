"""The site as a browser shows it: every page opened in Chromium at two widths, light and dark, and by keyboard.

tests/browser/check.mjs does the looking; see there for what it reports.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from evidence_case import make_receipt, make_run
from test_plots import COVERAGE, FIGURES, GATES, PILOT

from d2lib.evidence.environment import library_sha256
from d2lib.evidence.site import build_site, read_runs
from d2lib.plots import checklist_html, gate_table_html
from d2lib.show import svg, table_html

HERE = Path(__file__).parent
FIXTURE = HERE.parent / "runs" / "fixture"
MISSING = [name for name in ("node", "npm", "chromium") if shutil.which(name) is None]

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed here: {', '.join(MISSING)}")


@pytest.fixture(scope="module")
def check() -> Callable[[Path], subprocess.CompletedProcess[str]]:
    """Runs the checker on a site."""
    folder = HERE / "browser"
    installed = subprocess.run([str(folder / "install.sh")], timeout=300, capture_output=True, text=True, check=False)
    assert installed.returncode == 0, installed.stderr  # in CI
    if not (folder / "node_modules").is_dir():
        pytest.skip(installed.stdout.strip())

    def run(site: Path) -> subprocess.CompletedProcess[str]:
        command = ["node", str(folder / "check.mjs"), str(site), str(shutil.which("chromium"))]
        return subprocess.run(command, timeout=900, capture_output=True, text=True, check=False)

    return run


def show_everything(nb: Any) -> None:
    """Lets a notebook show what the phases show: gates, checks, tables, figures, printed text, a log."""
    first, second = [cell for cell in nb.cells if cell["cell_type"] == "code"][:2]
    rows = [{"name": "parity", "holds": True, "expected": "sha256:" + 64 * "0", "found": "sha256:" + 64 * "1"}]
    tables = [
        gate_table_html([gate.model_dump() for gate in GATES], "FAIL", "gain +0.2000 over 10 rounds"),
        gate_table_html(PILOT, "INCONCLUSIVE"),
        checklist_html(rows),
        f"<details><summary>Numbers</summary>{table_html(COVERAGE, label='Numbers')}</details>",
        table_html(COVERAGE, "Coverage of the intervals"),
    ]
    first["outputs"] = [
        nbformat.v4.new_output("stream", name="stdout", text="x" * 300 + "\n"),
        nbformat.v4.new_output("stream", name="stderr", text="log " * 300 + "\n"),
        nbformat.v4.new_output("execute_result", data={"text/plain": "y" * 300}, execution_count=1),
        *(nbformat.v4.new_output("display_data", data={"text/html": text}) for text in tables),
    ]
    second["outputs"] = [
        nbformat.v4.new_output(
            "display_data",
            data={"image/svg+xml": svg(FIGURES[name]()), "text/plain": name},
            metadata={"image/svg+xml": {"alt": f"The figure {name}."}},
        )
        for name in ("accepted_by_slot", "cost_bars", "run_gains")
    ]


def test_a_site_has_nothing_to_report(
    check: Callable[[Path], subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    root = make_run(tmp_path / "runs" / "demo")
    split = {"verdict": "PASS", "gain": 0.25, "lower": 0.1, "upper": 0.5, "requests": 24, "rounds": 1296}
    result = {"splits": {"dev": {**split, "kl_baseline": 5.0, "kl_candidate": 3.5}}}
    make_receipt(root, "g2", 3, job="dev", result={"gain": 0.25}, verdict="FAIL", edit=show_everything)
    make_receipt(root, "finish", 2, inputs={"dev": "full/dev.json"}, result=result, verdict="PASS")
    (root / "finish" / "attempt-3").mkdir()
    (root / "finish" / "attempt-3" / "working.json").write_text("{}")
    build_site(root.parent, tmp_path / "site")
    done = check(tmp_path / "site")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "8 pages, 0 violations"
    assert "good demo.g2-dev.3.html" in done.stdout
    assert ", 3 plots, " in done.stdout


def test_the_fixtures_site_has_nothing_to_report(
    check: Callable[[Path], subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    if not any(FIXTURE.glob("*/attempt-*/receipt.json")):
        pytest.skip("there is no runs/fixture: make fixture")
    if {entry.receipt.d2lib_sha256 for entry in read_runs(FIXTURE).entries} != {str(library_sha256())}:
        pytest.skip("runs/fixture was made by another d2lib: remove it and make fixture")
    build_site(FIXTURE, tmp_path / "site")
    done = check(tmp_path / "site")
    assert done.returncode == 0, done.stdout + done.stderr


BROKEN = {
    '<img src="data:image/gif;base64,R0lGODlhAQABAAAAACw=">': "axe image-alt",
    '<a href="nowhere.html">gone</a>': "bad.html: broken link",
    '<a href="#nowhere">gone</a>': "bad.html: no such place",
    '<a href="../outside.html">gone</a>': "outside.html",
    '<img alt="far" src="https://example.org/far.png">': "request: https://example.org/far.png",
    '<img alt="beside" src="beside.png">': "not self-contained: beside.png",
    '<div style="width:60rem">wide</div>': "the page scrolls sideways",
    '<p style="color:#999">pale</p>': "axe color-contrast",
    "<h1>second</h1>": "not exactly one first heading",
    "<h4>deep</h4>": "jumps from level",
    '<script>console.error("loud")</script>': "console: loud",
    '<a href="index.html" style="outline:none">blind</a>': "does not show that it has the focus",
    '<style>figure.plot { background: #222 !important }</style><figure class="plot"></figure>': "white card",
}


def test_the_checker_reports_what_is_broken(
    check: Callable[[Path], subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    make_receipt(tmp_path / "runs" / "demo", "cost_sheet", 1, result={})
    site = tmp_path / "site"
    good = build_site(tmp_path / "runs", site)
    page = (site / "compare.html").read_text()
    policy = page[page.index("<meta http-equiv") : page.index('<meta name="color-scheme"')]
    (site / "bad.html").write_text(page.replace(policy, "").replace("</main>", "\n".join(BROKEN) + "</main>"))
    skip = '<a class="skip" href="#main">Skip to the content</a>'
    assert skip in page
    (site / "worse.html").write_text(page.replace(skip, "").replace('<html lang="en">', "<html>"))
    done = check(site)
    assert done.returncode == 1, done.stdout + done.stderr
    for wrong in [*BROKEN.values(), "the first Tab does not reach the skip link", "axe html-has-lang"]:
        assert wrong in done.stdout, wrong
    for path in good:
        assert f"good {path.name}" in done.stdout
    assert "bad  bad.html" in done.stdout


def test_the_checker_refuses_what_is_no_site(
    check: Callable[[Path], subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    assert check(tmp_path).returncode == 2
    assert check(tmp_path / "nothing").returncode == 2
