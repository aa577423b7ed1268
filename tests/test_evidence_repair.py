"""Writers that die: what they leave, what the next attempt and `d2 repair` make of it, and that nothing final moves."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import faults
import pytest
from evidence_case import make_receipt, make_run
from hypothesis import given, settings
from hypothesis import strategies as st

from d2lib.cli import main
from d2lib.errors import Refused
from d2lib.evidence import engine, kernel
from d2lib.evidence.ledger import locked, read_ledger
from d2lib.evidence.phase import append_journal, read_journal
from d2lib.evidence.repair import repair
from d2lib.evidence.run import done_status
from d2lib.evidence.verify import verify
from d2lib.files import Hashed, is_unfinished, remove_abandoned, write_exclusive, write_json, write_once

PART = ".g2.json.0123456789ab.part"


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(engine, "library_sha256", lambda: Hashed("sha256", "5" * 64))
    return tmp_path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "runs" / "demo")


def snapshot(root: Path) -> dict[str, tuple[int, bytes]]:
    return {str(p.relative_to(root)): (p.stat().st_ino, p.read_bytes()) for p in root.rglob("*") if p.is_file()}


# -------------------------------------------------------------------------------------------- one file


def test_a_product_is_created_or_found_the_same_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "g2.json"
    digest = write_json(path, {"verdict": "PASS"}, mode=0o600, once=True)
    inode = path.stat().st_ino
    assert write_json(path, {"verdict": "PASS"}, mode=0o600, once=True) == digest
    assert path.stat().st_ino == inode
    with pytest.raises(Refused, match=r"g2\.json exists already and is not what is made now") as refused:
        write_json(path, {"verdict": "FAIL"}, once=True)
    assert (str(refused.value.found), refused.value.where) == (str(digest), path)
    with pytest.raises(Refused, match="never overwritten"):
        write_json(path, {"verdict": "PASS"})
    assert (path.stat().st_ino, path.read_bytes()) == (inode, b'{"verdict":"PASS"}\n')


def test_a_link_to_the_same_bytes_is_no_product(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"same")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Refused, match="cannot be opened"):
        write_once(tmp_path / "link", b"same")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(Refused):
        write_once(tmp_path / "dangling", b"same")
    assert not (tmp_path / "nowhere").exists()


def test_only_the_working_files_of_dead_writers_are_removed(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom d2lib.files import _open_working\n"
        "print(_open_working(Path(sys.argv[1]))[1], flush=True)\nsys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "alive.json")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        alive = Path(writer.stdout.readline().strip())
        write_exclusive(tmp_path / "g2.json", b"published")
        os.link(tmp_path / "g2.json", tmp_path / PART)
        (tmp_path / "deep").mkdir()
        (tmp_path / "deep" / ".x.ffffffffffff.part").write_bytes(b"ha")
        for name in (".x.part", ".x.ABCDEFABCDEF.part", "x.0123456789ab.part"):  # not of a writer's making
            (tmp_path / name).write_bytes(b"")
        (tmp_path / ".link.0123456789ab.part").symlink_to(tmp_path / "g2.json")
        (tmp_path / "deep" / ".folder.ffffffffffff.part" / "of").mkdir(parents=True)
        dead = [tmp_path / PART, tmp_path / "deep" / ".folder.ffffffffffff.part"]
        dead += [tmp_path / "deep" / ".x.ffffffffffff.part"]
        assert remove_abandoned(tmp_path, remove=False) == dead
        assert all(path.exists() for path in dead)
        assert remove_abandoned(tmp_path) == dead
        assert alive.exists()
        assert ((tmp_path / "g2.json").read_bytes(), (tmp_path / "g2.json").stat().st_nlink) == (b"published", 1)
        writer.kill()
    assert remove_abandoned(tmp_path) == [alive]
    assert len(list(tmp_path.rglob("*"))) == 6


def test_a_writer_whose_file_is_taken_for_abandoned_begins_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, taken = os.open, list[Path]()

    def open_and_lose(path: Any, *arguments: Any, **options: Any) -> int:
        descriptor = opened(path, *arguments, **options)
        if str(path).endswith(".part") and not taken:
            taken.append(Path(path))
            taken[0].unlink()
        return descriptor

    monkeypatch.setattr(os, "open", open_and_lose)
    write_exclusive(tmp_path / "x.json", b"1")
    assert taken
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


@pytest.mark.parametrize(
    ("name", "unfinished"),
    [(PART, True), ("assembly/.pretraining.part/shards/a", True), ("a.part", False), (".x", False), ("a/b", False)],
)
def test_what_counts_as_unfinished(name: str, unfinished: bool) -> None:
    assert is_unfinished(name) is unfinished


# ------------------------------------------------------------------------------------------- the journal

TEXTS = st.lists(st.text(max_size=9), max_size=5)


@settings(max_examples=150, deadline=None)
@given(TEXTS, TEXTS, st.integers(0, 80))
def test_a_journal_torn_anywhere_keeps_what_was_whole_and_goes_on(first: list[str], then: list[str], cut: int) -> None:
    path = Path("journal.jsonl")
    path.write_bytes(b"")
    entries = [{"number": number, "text": text} for number, text in enumerate([*first, *then])]
    ends = []
    for entry in entries[: len(first)]:
        append_journal(path, entry)
        ends.append(path.stat().st_size - 1)
    size = max(0, path.stat().st_size - cut)
    os.truncate(path, size)
    whole = [entry for entry, end in zip(entries, ends, strict=False) if end <= size]
    assert read_journal(path) == whole
    for entry in entries[len(first) :]:
        append_journal(path, entry)
    assert read_journal(path) == whole + entries[len(first) :]


def test_lines_of_a_journal_that_are_no_entries_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "working.jsonl"
    path.write_text("[" * 5000 + "]" * 5000 + '\n[1]\n3\n{"a":1,"a":2}\n{"kernel":7}\n')
    assert read_journal(path) == [{"kernel": 7}]


def test_a_journal_on_a_full_disk_is_torn_and_later_entries_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    path, write, calls = Path("journal.jsonl"), os.write, list[int]()
    append_journal(path, {"kernel": 1})

    def short(descriptor: int, data: bytes) -> int:
        calls.append(len(data))
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return write(descriptor, data[:5])

    with monkeypatch.context() as full:
        full.setattr(os, "write", short)
        with pytest.raises(OSError, match="No space"):
            append_journal(path, {"output": "assembly"})
    append_journal(path, {"error": "no space"})
    assert path.read_bytes() == b'{"kernel":1}\n{"out\n{"error":"no space"}\n'
    assert read_journal(path) == [{"kernel": 1}, {"error": "no space"}]


# ------------------------------------------------------------------------------------------------ a run


def test_leftovers_are_named_by_verify_and_removed_by_repair(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = snapshot(run)
    os.link(run / "full" / "dev.json", run / "full" / ".dev.json.0123456789ab.part")
    (run / "full" / ".folder.0123456789ab.part").mkdir()
    (run / "full" / ".folder.0123456789ab.part" / "half").write_bytes(b"half")
    (run / "finish" / "attempt-1" / "working.jsonl").write_bytes(b"{}\n")
    (run / "finish" / "attempt-1" / ".receipt.json.0123456789ab.part").write_bytes(b"{")
    (run / "finish" / "attempt-2").mkdir()
    (run / "finish" / "attempt-2" / "working.ipynb").write_bytes(b"{}")  # killed before anything was opened
    report = verify(run)
    left = {row.where for row in report.rows if not row.holds}
    assert left == {
        "full/.folder.0123456789ab.part",
        "full/.dev.json.0123456789ab.part",
        "finish/attempt-1/working.jsonl",
        "finish/attempt-1/.receipt.json.0123456789ab.part",
        "finish/attempt-2/working.ipynb",
    }
    assert {row.state for row in report.rows if not row.holds} == {"leftover"}
    assert main(["repair", str(run), "--dry-run"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert {line.removeprefix("would be removed: ") for line in said[:-1]} == left
    assert verify(run) == report
    assert main(["repair", str(run)]) == 0
    assert {line.removeprefix("removed: ") for line in capsys.readouterr().out.splitlines()[:-1]} == left
    assert verify(run).holds
    after = snapshot(run)
    assert {name: after[name] for name in before} == before
    assert {name for name in after.keys() - before.keys() if not name.endswith(".lock")} == set()
    assert repair(run) == []


def test_repair_leaves_what_runs_and_what_waits_for_its_receipt(run: Path) -> None:
    folder = run / "finish" / "attempt-2"
    folder.mkdir()
    (folder / "working.json").write_bytes(b"{}")
    (folder / "working.ipynb").write_bytes(b"{}")
    assert repair(run) == []
    (folder / "working.json").unlink()
    with locked(run / "finish" / ".lock", wait=False):
        assert repair(run) == []
        assert repair(run, held=run / "finish", remove=False) == [folder / "working.ipynb"]
    assert repair(run) == [folder / "working.ipynb"]


def test_repair_needs_a_sound_run(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["repair", str(tmp_path / "nowhere")]) == 2
    (tmp_path / "link").symlink_to(run)
    assert main(["repair", str(tmp_path / "link")]) == 2
    (run / "LEDGER.jsonl").write_bytes((run / "LEDGER.jsonl").read_bytes().replace(b"PASS", b"FAIL", 1))
    (run / "full" / PART).write_bytes(b"")
    assert main(["repair", str(run)]) == 2
    assert "remedy" not in capsys.readouterr().out
    assert (run / "full" / PART).exists()


def test_scratch_is_no_output_and_no_input_and_may_go(tmp_path: Path) -> None:
    root = tmp_path / "runs" / "demo"
    scratch = root / "assembly" / ".pretraining.part"
    scratch.mkdir(parents=True)
    (scratch / "native.pt").write_bytes(b"boundary")
    (root / "assembly" / "target").write_bytes(b"made")
    stopped = kernel.Progress(completed=2, stopped_before=3)
    made, _ = make_receipt(root, "cost_sheet", 1, outputs={"assembly": "assembly"}, progress=stopped, stopped=True)
    assert [output.path for output in made.outputs] == ["assembly/target"]
    report = verify(root)
    assert report.holds, report.render_text()
    assert [row.where for row in report.rows if row.state == "scratch"] == ["assembly/.pretraining.part"]
    (scratch / "native.pt").unlink()
    scratch.rmdir()
    read, _ = make_receipt(root, "cost_sheet", 2, inputs={"assembly": "assembly"}, result={})
    assert list(read.inputs[0].files or {}) == ["target"]
    assert verify(root).holds


# ----------------------------------------------------------------- between the last product and the receipt


def finish(root: Path, number: int) -> None:
    """A phase's end: its product, then its receipt. What `train`, `g2` or `finish` do, without a kernel."""
    write_json(root / "full" / "g2.json", {"verdict": "FAIL"}, mode=0o600, once=True)
    make_receipt(root, "finish", number, outputs={"g2": "full/g2.json"}, result={"x": 1}, verdict="FAIL")


def operations(root: Path, plan: Path) -> list[str]:
    """Run a phase's end in a child with a plan; returns the child's operations."""
    pid = os.fork()
    if not pid:
        try:
            faults.install(plan, "engine")
            finish(root, 1)
        finally:
            os._exit(0)  # also after an injected error: what matters is on disk
    os.waitpid(pid, 0)
    return faults.read_log(plan, "engine")


def test_killed_or_failed_at_any_operation_the_next_attempt_completes_the_phase(tmp_path: Path) -> None:
    """Every operation, every kind of fault; the phase's product is made once, whatever happens."""

    def fresh(name: str) -> tuple[Path, Path]:
        root = tmp_path / name / "runs" / "demo"
        (root / "full").mkdir(parents=True)
        make_receipt(root, "cost_sheet", 1, result={})
        return root, tmp_path / name / "plan"

    root, plan = fresh("whole")
    whole = operations(root, faults.write_plan(plan, root))
    assert verify(root).holds
    assert len(whole) > 20
    assert {line.split()[0] for line in whole} == set(faults.KINDS)
    for number, line in enumerate(whole, 1):
        for kind in faults.KINDS[line.split()[0]]:
            if kind in ("term", "kill both"):  # need an engine and a kernel: see the campaign
                continue
            case = f"{number} {kind}: {line}"
            root, plan = fresh(f"{number}-{kind.replace(', ', '-').replace(' ', '-')}")
            operations(root, faults.write_plan(plan, root, role="engine", number=number, kind=kind))
            assert faults.fired(plan), case
            product = root / "full" / "g2.json"
            made = product.stat().st_ino if product.exists() else None
            attempt = engine.parse_output(root / "finish" / f"attempt-{next_number(root)}" / "receipt.ipynb", "finish")
            attempt.phase_folder.mkdir(exist_ok=True)
            done = [line for line in read_ledger(root) if (line.name, line.status) == ("finish", "done")]
            if done:
                with pytest.raises(Refused, match="a completed job never runs again"):
                    engine.check_place(attempt, once=True)
            elif completed := engine.check_place(attempt, once=True):  # only its line was missing
                assert (completed.exit_status, completed.attempt) == (1, 1), case
            else:
                finish(root, attempt.number)
            done = [line for line in read_ledger(root) if (line.name, line.status) == ("finish", "done")]
            assert len(done) == 1, case
            assert done_status(root.parent, "demo", "finish") == 1, case
            assert made in (None, product.stat().st_ino), case
            report = verify(root)
            assert report.holds, f"{case}\n{report.render_text()}"
            shutil.rmtree(root.parent.parent)


def next_number(root: Path) -> int:
    from d2lib.evidence.run import next_attempt

    return next_attempt(root / "finish")


# --------------------------------------------------------------------------------- a kernel's temporary folder


def test_a_dead_engines_kernel_folder_goes_and_a_living_ones_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "t"))
    code = "import sys\nfrom d2lib.evidence.kernel import scratch_folder\n"
    code += "with scratch_folder() as folder:\n    print(folder, flush=True)\n    sys.stdin.read()"
    engines = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=os.environ | {"TMPDIR": str(tmp_path / "t")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    alive, dead = (Path(engine.stdout.readline().strip()) for engine in engines if engine.stdout)
    foreign = tmp_path / "t" / "d2-kernel-made-by-others"
    foreign.mkdir()
    engines[1].send_signal(signal.SIGKILL)
    engines[1].communicate()
    with monkeypatch.context() as other:
        other.setattr(os, "getuid", lambda: 12345)
        with kernel.scratch_folder():
            assert dead.exists()  # another user's
    with kernel.scratch_folder() as own:
        assert (alive.exists(), dead.exists(), foreign.exists()) == (True, False, True)
    assert not Path(own).exists()
    engines[0].communicate("")
    assert not alive.exists()
