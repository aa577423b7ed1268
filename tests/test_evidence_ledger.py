"""The ledger's chain, its locks, and what a writer that dies at any point leaves behind."""

from __future__ import annotations

import fcntl
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from evidence_case import make_receipt, make_run

from d2lib.errors import Refused
from d2lib.evidence import seal
from d2lib.evidence.ledger import check_lines, genesis, is_held, locked, read_ledger, settle
from d2lib.evidence.receipts import read_receipt
from d2lib.evidence.run import done_status
from d2lib.evidence.verify import verify
from d2lib.files import sha256_bytes


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("sound") / "runs" / "demo")


@pytest.fixture
def run(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "demo"))


def test_each_line_carries_the_digest_of_the_line_before(run: Path) -> None:
    lines = (run / "LEDGER.jsonl").read_bytes().splitlines(keepends=True)
    previous = [line.previous for line in read_ledger(run)]
    assert previous == [str(genesis("demo")), *(str(sha256_bytes(line)) for line in lines[:-1])]
    assert [line.seq for line in read_ledger(run)] == [1, 2, 3, 4]
    assert [line.name for line in read_ledger(run)] == ["cost_sheet", "g2-dev", "g2-dev", "finish"]


def test_a_line_torn_at_any_byte_is_completed_to_the_very_same_ledger(run: Path) -> None:
    path = run / "LEDGER.jsonl"
    whole = path.read_bytes()
    last = whole[whole.rfind(b"\n", 0, -1) + 1 :]
    for cut in {0, 1, 2, *range(3, len(last), 29), len(last) - 1, len(last)}:
        path.write_bytes(whole[: len(whole) - cut])
        settle(run)
        assert path.read_bytes() == whole, cut


def test_an_empty_ledger_is_written_again_from_the_receipts(run: Path) -> None:
    path = run / "LEDGER.jsonl"
    whole = path.read_bytes()
    path.unlink()
    settle(run)
    assert path.read_bytes() == whole


def test_a_torn_end_that_belongs_to_no_receipt_is_refused_and_left(run: Path) -> None:
    path = run / "LEDGER.jsonl"
    path.write_bytes(path.read_bytes() + b'{"attempt":9')
    before = path.read_bytes()
    with pytest.raises(Refused, match="belongs to no receipt"):
        settle(run)
    assert path.read_bytes() == before


def test_a_receipt_in_anothers_place_gets_no_line(run: Path) -> None:
    shutil.copytree(run / "finish" / "attempt-1", run / "finish" / "attempt-2")
    with pytest.raises(Refused, match="another's place"):
        settle(run)


@pytest.mark.parametrize("point", ["write_exclusive", "settle"])
def test_a_writer_that_dies_while_it_publishes_is_finished_by_the_next(
    run: Path, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def die(*arguments: object, **named: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(seal, point, die)
        with pytest.raises(Killed):
            make_receipt(run, "g2", 1, job="legal", result={"gain": 0.2}, verdict="PASS")
    assert not verify(run).holds
    make_receipt(run, "g2", 2, job="legal", result={"gain": 0.3}, verdict="PASS")
    assert verify(run).holds, verify(run).render_text()
    first = read_receipt(run / "g2-legal/attempt-1/receipt.json")
    # before receipt.json the attempt counts as killed; after it, as what it was
    assert (first.status, first.verdict) == (("failed", None) if point == "write_exclusive" else ("done", "PASS"))
    assert len(read_ledger(run)) == 6


def test_a_full_disk_loses_nothing_and_the_next_attempt_goes_on(run: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(nb: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
        nb.cells[-1].outputs[0].data["text/plain"] = "x" * 300_000

    try:
        with pytest.raises(OSError, match="File too large"):
            make_receipt(run, "g2", 1, job="legal", result={"gain": 0.2}, verdict="PASS", edit=fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    make_receipt(run, "g2", 2, job="legal", result={"gain": 0.3}, verdict="PASS")
    assert [(line.attempt, line.status) for line in read_ledger(run)[4:]] == [(1, "failed"), (2, "done")]
    assert verify(run).holds, verify(run).render_text()


def test_an_output_that_is_a_link_fails(run: Path) -> None:
    (run / "full" / "swapped.bin").symlink_to("/etc/hostname")
    made, _ = make_receipt(run, "finish", 2, outputs={"swapped": "full/swapped.bin"}, result={})
    assert made.status == "failed"
    assert "a file cannot be opened; expected: a regular file, not a link" in str(made.message)


def test_outputs_of_an_earlier_receipt_may_grow_and_nothing_else(run: Path) -> None:
    log = run / "full/log.txt"
    log.write_text(log.read_text() + "update 3\n")
    grown, _ = make_receipt(run, "g2", 3, job="dev", outputs={"log": "full/log.txt"}, result={})
    assert grown.status == "done"
    log.write_text("update 0\nupdate 2\nupdate 3\nupdate 4\n")
    changed, _ = make_receipt(run, "g2", 4, job="dev", outputs={"log": "full/log.txt"}, result={})
    assert changed.status == "failed"
    assert changed.message == "full/log.txt is not what g2-dev attempt 1 recorded"


def test_done_status_is_that_of_the_newest_done_attempt_and_checks_its_receipt(run: Path) -> None:
    assert done_status(run.parent, "demo", "g2-dev") == 0
    assert done_status(run.parent, "demo", "finish") == 1
    assert done_status(run.parent, "demo", "g2-legal") is None
    assert done_status(run.parent, "nothing", "g2-legal") is None
    path = run / "finish/attempt-1/receipt.json"
    path.chmod(0o644)
    path.write_bytes(path.read_bytes().replace(b"FAIL", b"PASS"))
    with pytest.raises(Refused, match="not the one in the ledger"):
        done_status(run.parent, "demo", "finish")


def test_check_lines_goes_on_after_a_bad_line() -> None:
    lines, problems, torn = check_lines(b"not json\n{}\ntorn", "demo")
    assert lines == []
    assert [problem.line for problem in problems] == [1, 2]
    assert torn == b"torn"


# ---------------------------------------------------------------------------------------------------- locks


def test_a_lock_has_one_holder_and_is_never_removed(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with locked(path, wait=False):
        assert is_held(path)
        with pytest.raises(Refused, match="another process is at this already"), locked(path, wait=False):
            pass
    assert path.exists()
    assert not is_held(path)
    assert not is_held(tmp_path / "none")
    assert not (tmp_path / "none").exists()
    with locked(path, wait=False):
        pass


def test_a_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with locked(path, wait=False):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], close_fds=False)
    try:
        with locked(path, wait=False):
            pass
    finally:
        child.kill()
        child.wait()


def test_a_waiter_whose_file_was_removed_and_made_again_takes_the_new_one(tmp_path: Path) -> None:
    """Two holders of two files with one name: the waiter on the removed file must not believe that it holds it."""
    path = tmp_path / ".lock"
    old = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(old, fcntl.LOCK_EX)
    code = (
        "import sys; from pathlib import Path; from d2lib.evidence.ledger import locked\n"
        "with locked(Path(sys.argv[1]), wait=True): print('held', flush=True); sys.stdin.read()"
    )
    waiter = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        wait_until_blocked(waiter.pid)
        path.unlink()
        new = os.open(path, os.O_RDWR | os.O_CREAT)
        os.close(old)  # the waiter gets the removed file's lock, and must turn to the new file
        assert waiter.stdout is not None
        assert waiter.stdout.readline() == "held\n"
        with pytest.raises(BlockingIOError):
            fcntl.flock(new, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(new)
    finally:
        waiter.kill()
        waiter.communicate()


def wait_until_blocked(pid: int) -> None:
    """Until the process waits for a file lock (the kernel says so in /proc/locks)."""
    for _ in range(600):
        if any(f" {pid} " in line for line in Path("/proc/locks").read_text().splitlines() if "->" in line):
            return
        time.sleep(0.05)
    raise AssertionError("the process never waited")


def test_a_lock_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".lock").symlink_to(tmp_path / "other")
    with pytest.raises(Refused, match="cannot be opened"), locked(tmp_path / ".lock", wait=False):
        pass
    assert not (tmp_path / "other").exists()


def test_writers_in_several_processes_leave_one_unbroken_chain(tmp_path: Path) -> None:
    root = tmp_path / "runs" / "demo"
    code = (
        "import sys; sys.modules['rfc3987_syntax'] = None; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path; from evidence_case import make_receipt\n"
        "for n in range(1, 5): make_receipt(Path(sys.argv[2]), 'g2', n, job=sys.argv[3], result={})"
    )
    here = str(Path(__file__).parent)
    root.mkdir(parents=True)
    make_receipt(root, "cost_sheet", 1, result={})
    writers = [subprocess.Popen([sys.executable, "-c", code, here, str(root), job]) for job in ("a", "b")]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    assert len(read_ledger(root)) == 9
    assert verify(root).holds
