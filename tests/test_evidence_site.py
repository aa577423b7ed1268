"""The site: what its pages say, and what it refuses."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import nbformat
import pytest
from evidence_case import make_receipt, make_run

from d2lib.cli import main
from d2lib.errors import Refused
from d2lib.evidence import notebook
from d2lib.evidence.graph import rails
from d2lib.evidence.kernel import Progress
from d2lib.evidence.site import build_site, compared, costs, differences, edges, flat, read_runs
from d2lib.files import canonical_json, parse_json
from d2lib.plots import checklist_html, gate_table_html
from d2lib.show import verdict_html

SPLIT = {
    "verdict": "PASS", "gain": 0.25, "lower": 0.125, "upper": 0.5, "requests": 24, "rounds": 1296,
    "kl_baseline": 5.0, "kl_candidate": 3.5,
}  # fmt: skip


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_run(tmp_path / "runs" / "demo")


class Rows(HTMLParser):
    """Every table's rows, each cell's text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.inside = True

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.rows[-1][-1] += data


def pages(root: Path, out: Path) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in build_site(root.parent, out)}


def shows(*fragments: str) -> Callable[[Any], None]:
    """An edit that lets the second code cell show HTML fragments."""

    def edit(nb: Any) -> None:
        code = [cell for cell in nb.cells if cell["cell_type"] == "code"]
        code[1]["outputs"] = [nbformat.v4.new_output("display_data", data={"text/html": text}) for text in fragments]

    return edit


def test_the_index_has_a_row_for_every_attempt(root: Path, tmp_path: Path) -> None:
    site = pages(root, tmp_path / "site")
    assert set(site) == {
        "index.html", "compare.html", "demo.cost_sheet.1.html", "demo.g2-dev.1.html", "demo.g2-dev.2.html",
        "demo.finish.1.html",
    }  # fmt: skip
    rows = [row for row in Rows(site["index.html"]).rows if len(row) == 8]
    assert rows[0] == ["phase", "job", "attempt", "verdict", "started (UTC)", "duration", "receipt", "made from"]
    entries = read_runs(root).entries
    assert [row[:4] for row in rows[1:]] == [
        ["cost_sheet attempt 1", "–", "1", "done"],
        ["g2 dev attempt 1", "dev", "1", "interrupted"],
        ["g2 dev attempt 2", "dev", "2", "PASS"],
        ["finish attempt 1", "–", "1", "FAIL"],
    ]
    assert [row[6] for row in rows[1:]] == [entry.short for entry in entries]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", row[4]) for row in rows[1:])
    assert [row[7] for row in rows[1:]] == ["–", "cost_sheet 1", "cost_sheet 1", "g2-dev 2"]


def test_one_run_or_a_folder_of_runs_gives_the_same_receipts(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = read_runs(root.parent)
    assert read_runs(root) == whole
    monkeypatch.chdir(root)
    assert read_runs(Path(".")) == whole


def test_a_page_is_self_contained_and_says_the_verdict_first(root: Path, tmp_path: Path) -> None:
    for name, text in pages(root, tmp_path / "site").items():
        assert not re.search(r'(?:src|href)="(?!data:)[^"#]*[:/]', text), name
        assert "<script" not in text
        assert text.count("<h1>") == 1
        assert text.index('class="skip"') < text.index("<nav") < text.index('<main id="main"')
    page = (tmp_path / "site" / "demo.g2-dev.2.html").read_text()
    order = ['class="badge PASS"', "The notebook", ">Parameters</h2>", ">Inputs</h2>", "Environment and source"]
    assert [page.index(part) for part in order] == sorted(page.index(part) for part in order)
    digests = [item.sha256 for entry in read_runs(root).entries for item in entry.receipt.inputs if entry.attempt == 2]
    assert digests
    assert all(digest in page for digest in digests)


@pytest.mark.parametrize("apart", [False, True])
def test_verdict_and_gates_move_to_the_top_of_the_page(root: Path, tmp_path: Path, apart: bool) -> None:
    gate = {"name": "gain", "holds": True, "value": 0.2, "comparison": ">=", "threshold": 0.15}
    table = checklist_html([{"name": "parity", "holds": True}])
    fragments = (
        [verdict_html("PASS", "It <b> holds."), table] if apart else [gate_table_html([gate], "PASS", "It <b> holds.")]
    )
    make_receipt(root, "g2", 1, job="legal", result={}, verdict="PASS", edit=shows(*fragments, "<p>after</p>"))
    site = pages(root, tmp_path / "site")
    text = site["demo.g2-legal.1.html"]
    top, rest = text.split('aria-label="The notebook"')
    assert "It &lt;b&gt; holds." in top
    assert "✓" in top
    assert "✓" not in rest
    assert 'href="#verdict"' in rest
    assert "<p>after</p>" in rest
    assert "It &lt;b&gt; holds." in site["index.html"]


def test_printed_text_and_logs_come_in_one_piece_each_and_headings_go_down_one_level(
    root: Path, tmp_path: Path
) -> None:
    def edit(nb: Any) -> None:
        code = [cell for cell in nb.cells if cell["cell_type"] == "code"]
        code[1]["outputs"] = [
            nbformat.v4.new_output("stream", name=name, text=text)
            for name, text in (("stdout", "one\n"), ("stderr", "log 1\n"), ("stdout", "two\n"), ("stderr", "log 2\n"))
        ]

    make_receipt(root, "g2", 1, job="legal", result={}, verdict="PASS", edit=edit)
    text = pages(root, tmp_path / "site")["demo.g2-legal.1.html"]
    assert "one\ntwo\n</pre>" in text
    assert "log 1\nlog 2\n</pre></details>" in text
    assert re.search(r"<h2[^>]*>g2</h2>", text)


def test_a_figure_is_a_picture_with_its_alternative(root: Path, tmp_path: Path) -> None:
    def edit(nb: Any) -> None:
        cell = [cell for cell in nb.cells if cell["cell_type"] == "code"][1]
        data, alternative = {"image/svg+xml": "<svg/>", "text/plain": ""}, 'A "figure" & its <alternative>'
        metadata = {"image/svg+xml": {"alt": alternative}}
        cell["outputs"] = [nbformat.v4.new_output("display_data", data=data, metadata=metadata)]

    make_receipt(root, "g2", 1, job="legal", result={}, verdict="PASS", edit=edit)
    text = pages(root, tmp_path / "site")["demo.g2-legal.1.html"]
    picture = re.search(r"<img alt='([^']*)' src=\"data:image/svg\+xml;base64,([^\"]*)", text)
    assert picture
    assert picture.groups() == ('A "figure" &amp; its &lt;alternative&gt;', "PHN2Zy8+")


def test_figures_keep_their_numbers_and_their_cell_says_how_many_it_has(root: Path, tmp_path: Path) -> None:
    numbers = "<details><summary>The numbers of this figure</summary>7</details>"

    def figure(name: str) -> Any:
        metadata = {"image/svg+xml": {"alt": name}}
        return nbformat.v4.new_output("display_data", data={"image/svg+xml": "<svg/>"}, metadata=metadata)

    def shown(text: str) -> Any:
        return nbformat.v4.new_output("display_data", data={"text/html": text})

    def edit(nb: Any) -> None:
        first, second, third = [cell for cell in nb.cells if cell["cell_type"] == "code"][:3]
        first["outputs"] = [shown(numbers), figure("one"), shown("<p>between</p>"), shown(numbers)]
        second["outputs"] = [figure("two"), shown(numbers), figure("three"), shown(numbers)]
        third["outputs"] = [shown("<p>no figure</p>")]

    make_receipt(root, "g2", 1, job="legal", result={}, verdict="PASS", edit=edit)
    text = pages(root, tmp_path / "site")["demo.g2-legal.1.html"]
    assert text.count("celltag_one-figure") - text.count(".celltag_one-figure") == 1
    assert text.count("celltag_figures") - text.count(".celltag_figures") == 1
    assert text.count(numbers) == 4  # where they followed no figure they stay where they were
    for name in ("two", "three"):
        assert re.search(rf'alt="{name}".*\n<figcaption[^\n]*</figure>\n{re.escape(numbers)}', text)


def test_what_would_not_be_seen_is_written_out_on_the_pages(root: Path, tmp_path: Path) -> None:
    (root / "two\u202elines\x1b[2J.txt").write_text("x")
    make_receipt(root, "g2", 1, job="legal", result={}, outputs={"odd": "two\u202elines\x1b[2J.txt"})
    text = pages(root, tmp_path / "site")["demo.g2-legal.1.html"]
    assert "two\\u202elines\\x1b[2J.txt" in text
    assert not {"\u202e", "\x1b"} & set(text)


def test_differences_between_attempts(root: Path, tmp_path: Path) -> None:
    make_receipt(root, "g2", 3, job="dev", parameters={"run": str(root), "split": "dev"}, result={}, verdict="FAIL")
    entries = {(entry.name, entry.attempt): entry for entry in read_runs(root).entries}
    second, third = entries["g2-dev", 2], entries["g2-dev", 3]
    found = {name: (before, after) for name, before, after in differences(second, third)}
    assert found["parameters.split"] == ("–", "dev")
    assert found["verdict"] == ("PASS", "FAIL")
    assert found["inputs.assembly"] == (second.receipt.inputs[0].sha256, "–")
    assert not differences(third, third)
    assert "Against attempt 2" in pages(root, tmp_path / "site")["demo.g2-dev.3.html"]


def test_edges_are_the_hash_bound_inputs(root: Path, tmp_path: Path) -> None:
    entries = read_runs(root).entries
    found = [(e.maker.name, e.maker.attempt, e.reader.name, e.reader.attempt) for e in edges(entries)]
    assert found == [
        ("cost_sheet", 1, "g2-dev", 1),
        ("cost_sheet", 1, "g2-dev", 2),
        ("g2-dev", 2, "finish", 1),
    ]
    edge = edges(entries)[1]
    digests = {item.label: item.sha256 for item in edge.reader.receipt.inputs}
    assert dict(edge.inputs) == digests
    index = pages(root, tmp_path / "site")["index.html"]
    assert index.count('<path class="tip"') == 3
    rows = [row for row in Rows(index).rows if len(row) == 4]
    assert ["finish 1", "dev", "g2-dev 2", digests_of(entries[-1])["dev"]] in rows


def digests_of(entry: Any) -> dict[str, str]:
    return {item.label: item.sha256 for item in entry.receipt.inputs}


def test_a_copied_run_keeps_to_its_own_folder(root: Path, tmp_path: Path) -> None:
    (root.parent / "copy").mkdir()
    for path in root.glob("*/attempt-*/receipt.*"):
        target = root.parent / "copy" / path.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    site = pages(root, tmp_path / "site")
    assert {"copy.finish.1.html", "demo.finish.1.html"} < set(site)
    assert 'href="demo.' not in site["copy.g2-dev.2.html"]


def test_rails_never_share_a_place() -> None:
    spans = [(0, 9), (1, 3), (2, 4), (4, 5), (5, 6)]
    chosen = rails(spans)
    for i, (first, last) in enumerate(spans):
        for j, (start, end) in enumerate(spans[:i]):
            assert chosen[i] != chosen[j] or last < start or end < first
    assert max(chosen) == 2
    assert rails([]) == []


def test_comparison_shows_each_runs_latest_verdict_and_cost(root: Path, tmp_path: Path) -> None:
    other = root.parent / "null"
    worse = {**SPLIT, "verdict": "FAIL", "gain": -0.125, "lower": -0.25, "upper": 0.0}
    make_receipt(root, "finish", 2, result={"splits": {"dev": SPLIT, "heldout_legal": SPLIT}}, verdict="PASS")
    make_receipt(other, "finish", 1, result={"splits": {"dev": worse}}, verdict="FAIL")
    found = read_runs(root.parent)
    assert [(row["split"], row["run"], row["gain"]) for row in compared(found.entries)] == [
        ("dev", "demo", 0.25),
        ("dev", "null", -0.125),
        ("heldout_legal", "demo", 0.25),
    ]
    phases, rows = costs(found.groups())
    assert phases == ["cost_sheet", "g2", "finish"]
    assert [(row["entry"].run, row["receipts"], row["total"]) for row in rows] == [
        ("demo", 5, sum(entry.receipt.seconds for entry in found.entries if entry.run == "demo")),
        ("null", 1, found.entries[-1].receipt.seconds),
    ]
    text = pages(root, tmp_path / "site")["compare.html"]
    assert [
        "dev",
        "null",
        "FAIL",
        "-0.1250",
        "-0.2500 to +0.0000",
        "24",
        "1,296",
        "5.0000",
        "3.5000",
        "-1.5000",
    ] in Rows(text).rows
    assert 'src="data:image/svg+xml;base64,' in text


def test_without_a_verdict_there_is_nothing_to_compare(tmp_path: Path) -> None:
    make_receipt(tmp_path / "runs" / "demo", "cost_sheet", 1, result={})
    assert (
        "No run here has come to a verdict yet." in pages(tmp_path / "runs" / "demo", tmp_path / "site")["compare.html"]
    )


def test_flat_names_every_value() -> None:
    value = {"a": {"c": 1, "b": [1, 2]}, "d": None, "e": {}, "f": 0.5}
    assert list(flat(value)) == [("a.b", "[1, 2]"), ("a.c", "1"), ("d", "–"), ("e", "–"), ("f", "0.5")]


def test_text_from_receipts_is_escaped(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    root = tmp_path / "runs" / "demo"
    make_receipt(root, "cost_sheet", 1, parameters={"run": str(root), "inputs": {evil: evil}}, result={evil: evil})
    for text in pages(root, tmp_path / "site").values():
        assert evil not in text


# --- refusals


def refused(capsys: pytest.CaptureFixture[str], runs: Path, out: Path) -> str:
    """The one line that `d2 site` refuses with; nothing was written."""
    assert main(["site", str(runs), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("d2: refused: ")
    assert error.count("\n") == 1
    return error


def replace(path: Path, data: bytes) -> None:
    path.chmod(0o644)
    path.write_bytes(data)


def test_refuses_an_empty_or_missing_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "runs").mkdir()
    assert "no receipts here" in refused(capsys, tmp_path / "runs", tmp_path / "site")
    assert "no runs here" in refused(capsys, tmp_path / "nothing", tmp_path / "site")
    assert not (tmp_path / "site").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"", "a receipt is empty"),
        (lambda data: data[: len(data) // 2], "not valid JSON"),
        (lambda data: canonical_json({**parse_json(data), "schema_version": 2}) + b"\n", "written by a newer version"),
        (lambda data: canonical_json({**parse_json(data), "attempt": 7}) + b"\n", "a receipt lies in another's place"),
        (lambda data: b"[]\n", "not a receipt"),
    ],
)
def test_refuses_a_damaged_receipt(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Callable[[bytes], bytes], message: str
) -> None:
    path = root / "finish" / "attempt-1" / "receipt.json"
    replace(path, change(path.read_bytes()))
    error = refused(capsys, root, tmp_path / "site")
    assert message in error
    assert str(path.parent) in error
    assert not (tmp_path / "site").exists()


def test_refuses_a_huge_notebook_without_reading_it(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = root / "finish" / "attempt-1" / "receipt.ipynb"
    path.chmod(0o644)
    os.truncate(path, 200 << 20)  # sparse
    read = Path.read_bytes

    def reads(self: Path) -> bytes:
        assert self != path
        return read(self)

    monkeypatch.setattr(Path, "read_bytes", reads)
    error = refused(capsys, root, tmp_path / "site")
    assert "too large to show" in error
    assert f"at most {notebook.MAX_BYTES >> 20} MiB; found: 200 MiB" in error


def test_refuses_a_notebook_that_is_missing_changed_or_none(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = root / "finish" / "attempt-1" / "receipt.ipynb"
    data = path.read_bytes()
    replace(path, data.replace(b"finish", b"FINISH"))
    assert "notebook was changed" in refused(capsys, root, tmp_path / "site")
    path.unlink()
    assert "only half there" in refused(capsys, root, tmp_path / "site")


def test_shows_what_is_finished_and_names_what_is_not(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    working = root / "finish" / "attempt-2"
    working.mkdir()
    (working / "working.ipynb").write_text("{")
    assert "finish attempt 2 has no receipt: it runs, or was cut off." in pages(root, tmp_path / "site")["index.html"]

    other = tmp_path / "others" / "demo" / "finish" / "attempt-1"
    other.mkdir(parents=True)
    (other / "working.json").write_text("{}")
    error = refused(capsys, tmp_path / "others", tmp_path / "nothing")
    assert "attempts that run or were cut off: demo/finish/attempt-1" in error


def test_refuses_to_write_over_or_among_what_is_there(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("kept")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "index.html").write_text("kept")
    for out in (tmp_path / "file", tmp_path / "full"):
        assert "not empty" in refused(capsys, root, out)
    assert (tmp_path / "full" / "index.html").read_text() == "kept"
    assert "among the receipts" in refused(capsys, root, root / "site")
    assert "cannot be written" in refused(capsys, root, tmp_path / "file" / "site")
    (tmp_path / "empty").mkdir()
    assert main(["site", str(root), "--out", str(tmp_path / "empty")]) == 0


def test_an_attempt_that_did_not_finish_shows_its_state_and_message(tmp_path: Path) -> None:
    root = tmp_path / "runs" / "demo"
    stopped = Progress(completed=1, stopped_before=2)
    make_receipt(root, "cost_sheet", 1, progress=stopped, stopped=True)
    text = pages(root, tmp_path / "site")["demo.cost_sheet.1.html"]
    assert '<span class="badge interrupted">interrupted</span> stopped on request before cell 2' in text
    assert "Code (did not run)" in text


def test_refusals_are_errors_with_a_status() -> None:
    with pytest.raises(Refused, match="no runs here"):
        build_site(Path("/nonexistent"), Path("/nonexistent-site"))
