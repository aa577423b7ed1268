"""Verification finds every kind of damage: each has its own test, and so has each byte that could flip."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from evidence_case import make_receipt, make_run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from d2lib.errors import Refused
from d2lib.evidence import notebook
from d2lib.evidence.ledger import LedgerLine, genesis, locked, make_line, read_ledger
from d2lib.evidence.receipts import Receipt, hash_prefixes, parse_receipt, read_receipt, to_bytes
from d2lib.evidence.report import Report
from d2lib.evidence.verify import verify
from d2lib.files import canonical_json, sha256_bytes


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("sound") / "runs" / "demo")


@pytest.fixture
def run(sound: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage; a copy elsewhere is as good as the original."""
    return Path(shutil.copytree(sound, tmp_path / "copied" / "demo"))


def overwrite(path: Path, data: bytes) -> None:
    path.chmod(0o644)
    path.write_bytes(data)


def states(report: Report, where: str) -> set[str]:
    return {row.state for row in report.rows if row.where == where and not row.holds}


def broken(report: Report) -> set[str]:
    return {row.where for row in report.rows if not row.holds}


def test_a_sound_run_holds_also_as_a_copy(sound: Path, run: Path) -> None:
    for root in (sound, run):
        report = verify(root)
        assert report.holds, report.render_text()
        assert report.receipts == 4
        assert report.as_dict()["holds"] is True
        assert report.render_text().endswith("everything holds")
    assert {row.where for row in report.rows} == {
        "LEDGER.jsonl",
        "cost_sheet/attempt-1",
        "g2-dev/attempt-1",
        "g2-dev/attempt-2",
        "finish/attempt-1",
    }


def test_verification_changes_nothing(run: Path) -> None:
    before = {path: (path.stat().st_mtime_ns, path.stat().st_mode) for path in run.rglob("*")}
    verify(run)
    assert {path: (path.stat().st_mtime_ns, path.stat().st_mode) for path in run.rglob("*")} == before


def test_one_flipped_byte_in_any_file_is_found_and_the_file_named(run: Path) -> None:
    files = [path for path in sorted(run.rglob("*")) if path.is_file() and path.stat().st_size]
    assert len(files) == 4 * 2 + 1 + 2 + 2  # receipts and pages, the ledger, assembly, full
    for path in files:
        data = path.read_bytes()
        name = path.relative_to(run).as_posix()
        for position in {0, len(data) // 2, len(data) - 1}:
            overwrite(path, data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
            report = verify(run)
            assert any(where.split(":")[0] == name for where in broken(report)), (name, position)
        overwrite(path, data)
    assert verify(run).holds


@pytest.mark.parametrize("name", ["assembly/shard.bin", "full/dev.json", "finish/attempt-1/receipt.ipynb"])
def test_a_removed_file_is_missing(run: Path, name: str) -> None:
    (run / name).unlink()
    assert states(verify(run), name) == {"missing"}


def test_a_removed_receipt_is_missing(run: Path) -> None:
    (run / "finish/attempt-1/receipt.json").unlink()
    assert "missing" in states(verify(run), "finish/attempt-1/receipt.json")


@pytest.mark.parametrize("name", ["note.txt", "assembly/more.bin", "g2-dev/attempt-2/table.csv", "assembly/.lock"])
def test_a_file_that_no_receipt_lists_is_extra(run: Path, name: str) -> None:
    (run / name).write_bytes(b"x")
    report = verify(run)
    assert broken(report) == {name}
    assert states(report, name) == {"extra"}


def test_a_lock_that_holds_bytes_is_extra(run: Path) -> None:
    (run / ".lock").write_bytes(b"x")
    assert states(verify(run), ".lock") == {"extra"}


def test_a_file_replaced_by_a_link_to_its_own_bytes_is_found(run: Path, tmp_path: Path) -> None:
    path = run / "assembly/shard.bin"
    path.rename(tmp_path / "elsewhere.bin")
    path.symlink_to(tmp_path / "elsewhere.bin")
    assert states(verify(run), "assembly/shard.bin") == {"link"}


def test_a_hard_link_is_found(run: Path, tmp_path: Path) -> None:
    os.link(run / "assembly/shard.bin", tmp_path / "second name")
    assert states(verify(run), "assembly/shard.bin") == {"link"}


def test_a_folder_replaced_by_a_link_is_found(run: Path, tmp_path: Path) -> None:
    (run / "assembly").rename(tmp_path / "assembly")
    (run / "assembly").symlink_to(tmp_path / "assembly")
    assert states(verify(run), "assembly") == {"link"}
    assert "assembly/shard.bin" in broken(verify(run))


def test_a_root_that_is_a_link_is_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "demo").symlink_to(run)
    with pytest.raises(Refused, match="not a run root"):
        verify(tmp_path / "demo")


# ------------------------------------------------------------------------------------------------- the ledger


def edit_ledger(run: Path, edit: Callable[[list[bytes]], list[bytes]]) -> Report:
    path = run / "LEDGER.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(edit(lines)))
    return verify(run)


def test_a_changed_ledger_line_breaks_the_chain_after_it(run: Path) -> None:
    report = edit_ledger(run, lambda lines: [lines[0].replace(b'"verdict":null', b'"verdict":"PASS"'), *lines[1:]])
    assert "LEDGER.jsonl:2" in broken(report)
    assert "cost_sheet/attempt-1/receipt.json" in broken(report)


def test_a_removed_ledger_line_is_found(run: Path) -> None:
    report = edit_ledger(run, lambda lines: [*lines[:1], *lines[2:]])
    assert {"LEDGER.jsonl:2", "g2-dev/attempt-1/receipt.json"} <= broken(report)


def test_a_removed_last_line_leaves_a_receipt_without_a_line(run: Path) -> None:
    report = edit_ledger(run, lambda lines: lines[:-1])
    assert states(report, "finish/attempt-1/receipt.json") == {"foreign"}


def test_a_removed_last_receipt_with_its_line_shows_in_the_head(run: Path) -> None:
    before = verify(run).head
    shutil.rmtree(run / "finish")
    report = edit_ledger(run, lambda lines: lines[:-1])
    assert report.holds  # nothing inside the run can tell; the head, kept elsewhere, can
    assert report.head != before


def test_reordered_ledger_lines_are_found(run: Path) -> None:
    report = edit_ledger(run, lambda lines: [lines[1], lines[0], *lines[2:]])
    assert {"LEDGER.jsonl:1", "LEDGER.jsonl:2"} <= broken(report)


def test_a_line_appended_by_hand_without_the_chain_is_found(run: Path) -> None:
    report = edit_ledger(run, lambda lines: [*lines, lines[-1]])
    assert "LEDGER.jsonl:5" in broken(report)


def test_a_well_chained_line_for_a_receipt_that_is_not_there_is_found(run: Path) -> None:
    line = read_ledger(run)[-1]
    last = (run / "LEDGER.jsonl").read_bytes().splitlines(keepends=True)[-1]
    forged = line.model_copy(update={"seq": 5, "attempt": 2, "previous": str(sha256_bytes(last)), "verdict": "PASS"})
    report = edit_ledger(run, lambda lines: [*lines, to_bytes(forged)])
    assert states(report, "finish/attempt-2/receipt.json") == {"missing"}


def test_a_torn_last_line_is_found(run: Path) -> None:
    report = edit_ledger(run, lambda lines: [*lines[:-1], lines[-1][:40]])
    assert "LEDGER.jsonl:4" in broken(report)


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        (b'{"attempt":1,', b'{"attempt":1,"attempt":1,', "strict JSON"),
        (b'"seq":1,', b'"seq":1,"z":NaN,', "strict JSON"),
        (b'{"attempt":1,', b'{ "attempt":1,', "canonical"),
        (b'"seq":1,', b'"seq":1,"more":2,', "malformed"),
    ],
)
def test_a_ledger_line_that_is_not_strict_is_found(run: Path, old: bytes, new: bytes, word: str) -> None:
    report = edit_ledger(run, lambda lines: [lines[0].replace(old, new, 1), *lines[1:]])
    assert any(row.where == "LEDGER.jsonl:1" and word in row.message for row in report.rows)


def test_no_ledger_at_all_is_found(run: Path) -> None:
    (run / "LEDGER.jsonl").unlink()
    assert states(verify(run), "LEDGER.jsonl") == {"missing"}


def test_another_namespaces_ledger_is_found(run: Path) -> None:
    renamed = run.rename(run.with_name("other"))
    report = verify(renamed)
    assert "LEDGER.jsonl:1" in broken(report)
    assert states(report, "finish/attempt-1/receipt.json") == {"foreign"}


# --------------------------------------------------------------------------------------------- the receipts


def reseal(run: Path, receipt: Receipt, data: bytes | None = None) -> None:
    """Put a changed last receipt in place with the ledger line that goes with it: what a careful forger would do."""
    folder = run / receipt.name / f"attempt-{receipt.attempt}"
    overwrite(folder / "receipt.json", to_bytes(receipt) if data is None else data)
    path = run / "LEDGER.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    line = make_line(receipt, len(lines), sha256_bytes(lines[-2]))
    if data is not None:
        changed = LedgerLine.model_validate_json(line).model_copy(
            update={"receipt_json_sha256": str(sha256_bytes(data))}
        )
        line = to_bytes(changed)
    path.write_bytes(b"".join(lines[:-1]) + line)


def last(run: Path) -> Receipt:
    return read_receipt(run / "finish/attempt-1/receipt.json")


def test_a_resealed_receipt_that_was_not_changed_holds(run: Path) -> None:
    reseal(run, last(run))
    assert verify(run).holds


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"parameters": {"run": "another"}}, "parameters"),
        ({"verdict": "PASS", "exit_status": 0}, "another result"),
        ({"result": {"splits": {"dev": 1}}}, "another result"),
        ({"d2lib_sha256": "sha256:" + "0" * 64}, "belongs to another receipt"),
        ({"environment": {"python": "3.0"}}, "environment"),
        ({"namespace": "other"}, "namespace"),
    ],
)
def test_a_receipt_that_was_changed_and_resealed_disagrees_with_its_notebook(
    run: Path, change: dict[str, object], word: str
) -> None:
    reseal(run, last(run).model_copy(update=change))
    report = verify(run)
    assert any(word in row.message for row in report.rows if not row.holds), report.render_text()


def test_a_parent_that_is_not_in_the_ledger_is_found(run: Path) -> None:
    receipt = last(run)
    assert [parent.phase for parent in receipt.parents] == ["g2"]
    strange = receipt.parents[0].model_copy(update={"receipt_json_sha256": "sha256:" + "1" * 64})
    reseal(run, receipt.model_copy(update={"parents": [strange]}))
    assert any("parent" in row.message for row in verify(run).rows)


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"", "empty"),
        (b'{"schema_version":2}\n', "newer version"),
        (b'{"schema_version":1,"schema_version":1}\n', "twice"),
        (b'{"schema_version":1,"x":Infinity}\n', "not finite"),
        (b'{"schema_version":1,"x":1e999}\n', "not finite"),
        (b'{"schema_version":1}\n', "malformed"),
        (b"not json", "not valid JSON"),
        (b"[]\n", "not a receipt"),
    ],
)
def test_a_receipt_that_is_none_is_found_even_with_its_ledger_line(run: Path, data: bytes, word: str) -> None:
    reseal(run, last(run), data)
    report = verify(run)
    rows = [row for row in report.rows if row.where == "finish/attempt-1/receipt.json"]
    assert any(word in row.message for row in rows), report.render_text()
    with pytest.raises(Refused, match=word):
        parse_receipt(data)


def test_a_receipt_in_another_form_is_refused(run: Path) -> None:
    value = json.loads((run / "finish/attempt-1/receipt.json").read_bytes())
    with pytest.raises(Refused, match="canonical form"):
        parse_receipt(json.dumps(value, indent=1).encode())
    with pytest.raises(Refused, match="malformed"):
        parse_receipt(canonical_json({**value, "surprise": 1}) + b"\n")
    with pytest.raises(Refused, match="malformed"):
        parse_receipt(canonical_json({**value, "exit_status": 0}) + b"\n")


def test_a_receipt_of_another_namespace_copied_in_is_found(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "runs" / "other"
    make_receipt(other, "finish", 1, result={}, verdict="PASS")
    shutil.copytree(other / "finish" / "attempt-1", run / "finish" / "attempt-2")
    report = verify(run)
    assert states(report, "finish/attempt-2/receipt.json") == {"foreign"}
    assert any("another namespace" in row.message for row in report.rows)


def rewrite_notebook(run: Path, edit: Callable[[dict[str, object]], None]) -> Report:
    """Change the last receipt's notebook and reseal both files."""
    path = run / "finish/attempt-1/receipt.ipynb"
    value = json.loads(path.read_bytes())
    edit(value)
    data = json.dumps(value, indent=1).encode()
    overwrite(path, data)
    receipt = last(run)
    page = receipt.notebook.model_copy(update={"receipt_sha256": str(sha256_bytes(data))})
    reseal(run, receipt.model_copy(update={"notebook": page}))
    return verify(run)


def cell(value: dict[str, object], number: int) -> dict[str, object]:
    cells = value["cells"]
    assert isinstance(cells, list)
    found = [cell for cell in cells if cell["cell_type"] == "code"][number]
    assert isinstance(found, dict)
    return found


def test_a_rewritten_notebook_that_says_the_same_holds(run: Path) -> None:
    assert rewrite_notebook(run, lambda value: None).holds


@pytest.mark.parametrize(
    ("edit", "word"),
    [
        (lambda value: cell(value, 1).update(execution_count=None), "code cell 2 did not run"),
        (lambda value: cell(value, -1).update(outputs=[]), "exactly one result"),
        (lambda value: cell(value, -1).update(source="phase.record({'x': 2})"), "other cells"),
        (
            lambda value: cell(value, 0).update(
                outputs=[{"output_type": "error", "ename": "E", "evalue": "", "traceback": []}]
            ),
            "code cell 1 raised",
        ),
        (lambda value: cell(value, 0).update(metadata={"x": float("nan")}), "strict JSON"),
        (lambda value: value.pop("metadata"), "not a receipt's notebook"),
    ],
)
def test_a_notebook_that_does_not_bear_its_receipt_out_is_found(
    run: Path, edit: Callable[[dict[str, object]], None], word: str
) -> None:
    report = rewrite_notebook(run, edit)
    rows = [row.message for row in report.rows if row.where == "finish/attempt-1/receipt.ipynb"]
    assert any(word in message for message in rows), report.render_text()


def test_a_notebook_over_the_limit_is_found_without_reading_it(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook, "MAX_BYTES", 1000)
    assert any("too large" in row.message for row in verify(run).rows)


# ------------------------------------------------------------------------------------- unfinished and growing


def test_an_attempt_that_was_killed_is_unfinished_and_one_that_runs_is_running(run: Path) -> None:
    folder = run / "finish" / "attempt-2"
    folder.mkdir()
    (folder / "working.json").write_bytes(b"{}")
    (folder / "working.jsonl").write_bytes(b'{"output":{"label":"g2","path":"full/g2.json"}}\n{"torn')
    (run / "full" / "g2.json").write_bytes(b"half of i")
    report = verify(run)
    assert states(report, "finish/attempt-2") == {"unfinished"}
    assert states(report, "full/g2.json") == {"extra"}
    with locked(run / "finish" / ".lock", wait=False):
        report = verify(run)
    assert report.holds, report.render_text()
    assert [row.where for row in report.rows if row.state == "running"] == ["finish/attempt-2"]


@pytest.mark.parametrize(("data", "state"), [(b"update 1\nupdate 2\nmore", "changed"), (b"update 1\n", "changed")])
def test_a_file_longer_or_shorter_than_its_newest_record_is_changed(run: Path, data: bytes, state: str) -> None:
    (run / "full/log.txt").write_bytes(data)
    assert states(verify(run), "full/log.txt") == {state}


def test_a_grown_file_whose_beginning_changed_is_named_with_the_receipt_that_knew_it(run: Path) -> None:
    (run / "full/log.txt").write_bytes(b"update 9\nupdate 2\n")
    rows = [row for row in verify(run).rows if row.where == "full/log.txt"]
    assert any("g2-dev/attempt-1/receipt.json" in row.message for row in rows)


def test_an_input_outside_the_run_is_checked_where_it_is_there(tmp_path: Path) -> None:
    outside = tmp_path / "weights.bin"
    outside.write_bytes(b"weights")
    root = tmp_path / "runs" / "demo"
    make_receipt(root, "finish", 1, inputs={"weights": str(outside)}, result={})
    assert verify(root).holds
    outside.write_bytes(b"Weights")
    assert states(verify(root), str(outside)) == {"changed"}
    outside.unlink()
    report = verify(root)
    assert report.holds
    assert [row.state for row in report.rows if row.where == str(outside)] == ["elsewhere"]


def test_prefix_digests_are_those_of_the_prefixes(tmp_path: Path) -> None:
    data = os.urandom(3 << 20)
    (tmp_path / "file").write_bytes(data)
    sizes = [0, 1, 1 << 20, (1 << 20) + 1, len(data), len(data) + 1]
    size, found = hash_prefixes(tmp_path / "file", sizes)
    assert size == len(data)
    assert found == {n: str(sha256_bytes(data[:n])) for n in sizes if n <= len(data)}


def test_the_first_line_is_bound_to_the_namespace() -> None:
    assert genesis("demo") != genesis("demo-null")


# ------------------------------------------------------------------------------------------------- odd contents

ODD: list[Any] = [None, True, 0, -1, 2**70, 1.5, "", "x", "a\nb", "\0", "/dev/zero", "../up", [], [[]], {}, {"": None}]


def places(value: Any) -> list[tuple[Any, ...]]:
    """The path of every value inside a JSON value, the whole included."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [(), *((key, *rest) for key, child in children for rest in places(child))]


def put(value: Any, place: tuple[Any, ...], odd: Any) -> Any:
    if not place:
        return odd
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[place[0]] = put(copy[place[0]], place[1:], odd)
    return copy


@given(st.data())
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_stands_in_a_notebook_checking_it_says_what_is_wrong(sound: Path, data: st.DataObject) -> None:
    folder = sound / "finish" / "attempt-1"
    page, receipt = json.loads((folder / "receipt.ipynb").read_bytes()), read_receipt(folder / "receipt.json")
    assert list(notebook.check(canonical_json(page), receipt)) == []
    place, odd = data.draw(st.sampled_from(places(page))), data.draw(st.sampled_from(ODD))
    for row in notebook.check(json.dumps(put(page, place, odd)).encode(), receipt):
        assert len(row) == 3


@pytest.mark.parametrize("recorded", [[], ["x"], "x", 3, None, {"result": []}])
def test_a_recorded_result_that_is_no_mapping_is_said(sound: Path, recorded: Any) -> None:
    folder = sound / "finish" / "attempt-1"
    page, receipt = json.loads((folder / "receipt.ipynb").read_bytes()), read_receipt(folder / "receipt.json")
    for cell in page["cells"]:
        for output in cell.get("outputs", []):
            if notebook.RESULT_MIME in output.get("data", {}):
                output["data"][notebook.RESULT_MIME] = recorded
    assert [row[0] for row in notebook.check(json.dumps(page).encode(), receipt)] == [
        "the notebook records another result than the receipt"
    ]


@given(st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_stands_in_a_receipt_verification_ends_with_rows(
    sound: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """The ledger is made to fit the changed receipt, so that it is read to its end."""
    run = Path(shutil.copytree(sound, tmp_path_factory.mktemp("odd") / "demo"))
    path = run / "g2-dev" / "attempt-2" / "receipt.json"
    value = json.loads(path.read_bytes())
    place, odd = data.draw(st.sampled_from(places(value))), data.draw(st.sampled_from(ODD))
    changed = json.dumps(put(value, place, odd), sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    overwrite(path, changed + b"\n")
    lines = [json.loads(line) for line in (run / "LEDGER.jsonl").read_bytes().splitlines()]
    previous, out = str(genesis("demo")), b""
    for line in lines:
        if (line["phase"], line["attempt"]) == ("g2", 2):
            line["receipt_json_sha256"] = str(sha256_bytes(changed + b"\n"))
        raw = canonical_json({**line, "previous": previous}) + b"\n"
        previous, out = str(sha256_bytes(raw)), out + raw
    overwrite(run / "LEDGER.jsonl", out)
    report = verify(run)
    shutil.rmtree(run)
    assert report.holds == (put(value, place, odd) == value)
    rows = report.render_text().splitlines()
    assert len(rows) == len(report.rows) + 3


def test_a_name_cannot_write_a_row_of_its_own(run: Path) -> None:
    (run / "assembly" / "x: no receipt\n  holds      everything\x1b[1A\x1b[2K").write_text("")
    (run / "assembly" / os.fsdecode(b"\xff\xfe")).write_text("")
    report = verify(run)
    text = report.render_text()
    text.encode("utf-8")
    assert len(text.splitlines()) == len(report.rows) + 3
    assert "\x1b" not in text
    assert "x: no receipt\\n  holds      everything\\x1b[1A\\x1b[2K" in text
    assert not [line for line in text.splitlines() if line.startswith("  holds      everything")]


def test_deep_folders_and_pipes_end_in_rows(run: Path) -> None:
    place = run / "assembly"
    for _ in range(1200):
        place = place / "d"
        place.mkdir()
    (place / "x").write_text("")
    os.mkfifo(run / "pipe")
    try:
        rows = [row for row in verify(run).rows if not row.holds]
    finally:
        (place / "x").unlink()
        while place.name == "d":  # not by recursion, as pytest would
            place.rmdir()
            place = place.parent
    assert [(row.state, row.message) for row in rows] == [
        ("link", "not a plain file"),
        ("extra", "no receipt lists this file"),
    ]
