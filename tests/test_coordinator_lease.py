"""The lock of a solo: one holder, no inheritance, no second file, and no card given away under a living child."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from coordinator_case import wait_until

from d2lib.coordinator.lease import check_free, hold, lock_path, read_holder
from d2lib.errors import Refused


def test_one_holder_who_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "locks"
    with hold(folder, "solo-a", "full-fast"):
        with pytest.raises(Refused, match=rf"solo-a is taken.*job full-fast, pid {os.getpid()}, since 20"):
            hold(folder, "solo-a", "g2-dev").__enter__()
        with pytest.raises(Refused, match="solo-a is taken"):
            check_free(folder, "solo-a")
        with hold(folder, "solo-b", "g2-legal"):  # another solo is another lock
            pass
    check_free(folder, "solo-a")
    with hold(folder, "solo-a", "g2-dev"):
        pass
    assert read_holder(lock_path(folder, "solo-a")) is None
    assert lock_path(folder, "solo-a").exists()  # never unlinked


def test_a_killed_holder_frees_the_lock(tmp_path: Path) -> None:
    def holder() -> None:
        with hold(tmp_path / "locks", "solo-a", "full-fast"):
            (tmp_path / "held").touch()
            signal.pause()

    child = multiprocessing.get_context("fork").Process(target=holder)
    child.start()
    wait_until((tmp_path / "held").exists)
    with pytest.raises(Refused, match=f"pid {child.pid}"):
        check_free(tmp_path / "locks", "solo-a")
    child.kill()
    child.join()
    check_free(tmp_path / "locks", "solo-a")  # what the dead holder wrote does not count


def test_children_do_not_inherit_the_lock(tmp_path: Path) -> None:
    with hold(tmp_path / "locks", "solo-a", "full-fast") as lease:
        assert os.get_inheritable(lease.descriptor) is False
        code = (
            "import os; d = '/proc/self/fd'; print([os.path.realpath(f'{d}/{n}') for n in os.listdir(d)], flush=True)"
        )
        child = subprocess.Popen(
            [sys.executable, "-c", f"{code}; input()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            close_fds=False,
        )
        assert child.stdout is not None
        open_files = child.stdout.readline()
        assert open_files.count("pipe:") >= 2
        assert str(lease.path) not in open_files
    check_free(tmp_path / "locks", "solo-a")  # although the child still runs
    child.communicate("\n")


def test_a_lock_file_that_was_removed_and_made_again_has_one_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between opening and locking the file is replaced: the lock on the old inode must not count."""
    import fcntl

    folder = tmp_path / "locks"
    with hold(folder, "solo-a", "full-fast"):
        pass
    real, replaced = fcntl.flock, []

    def replace_first(descriptor: int, operation: int) -> None:
        if not replaced:
            replaced.append(True)
            lock_path(folder, "solo-a").unlink()
            lock_path(folder, "solo-a").touch()
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", replace_first)
    with hold(folder, "solo-a", "g2-dev") as lease:
        assert os.fstat(lease.descriptor).st_ino == lease.path.stat().st_ino
        monkeypatch.undo()
        with pytest.raises(Refused, match="solo-a is taken"):
            check_free(folder, "solo-a")


def test_a_living_child_of_a_killed_runner_keeps_the_solo(tmp_path: Path) -> None:
    child = subprocess.Popen(["sleep", "100"])
    try:

        def holder() -> None:
            with hold(tmp_path / "locks", "solo-a", "full-fast") as lease:
                lease.note_child(child.pid)
                os.kill(os.getpid(), signal.SIGKILL)

        runner = multiprocessing.get_context("fork").Process(target=holder)
        runner.start()
        runner.join()
        for ask in (check_free, lambda folder, solo: hold(folder, solo, "g2-dev").__enter__()):
            with pytest.raises(Refused, match=f"not free.*pid {child.pid}, job full-fast"):
                ask(tmp_path / "locks", "solo-a")
    finally:
        child.kill()
        child.wait()
    check_free(tmp_path / "locks", "solo-a")


def test_a_reused_pid_is_no_living_child(tmp_path: Path) -> None:
    folder = tmp_path / "locks"
    folder.mkdir(mode=0o700)
    path = lock_path(folder, "solo-a")
    path.write_text(f'{{"pid": 1, "job": "x", "since": "y", "child": {{"pid": {os.getpid()}, "created": 1.0}}}}')
    check_free(folder, "solo-a")


@pytest.mark.parametrize("pid", [-1, 2**63, 2**200, "x", [1]])
def test_a_child_that_no_process_can_be_is_not_living(tmp_path: Path, pid: object) -> None:
    (tmp_path / "locks").mkdir(mode=0o700)
    record = {"pid": pid, "job": "x", "since": "y", "child": {"pid": pid, "created": 1.0}}
    lock_path(tmp_path / "locks", "solo-a").write_text(json.dumps(record))
    check_free(tmp_path / "locks", "solo-a")


@pytest.mark.parametrize("text", ["", "not json", "[]", '{"pid": 1}', "\x00" * 100, "[" * 5000 + "]" * 5000])
def test_a_damaged_record_says_nothing_and_stops_nobody(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "locks"
    folder.mkdir(mode=0o700)
    lock_path(folder, "solo-a").write_text(text)
    assert read_holder(lock_path(folder, "solo-a")) is None
    with hold(folder, "solo-a", "full-fast"):
        pass


def test_a_folder_that_is_not_private_refuses(tmp_path: Path) -> None:
    folder = tmp_path / "locks"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(Refused, match=r"the lock folder is not private.*found: mode 0777"):
        hold(folder, "solo-a", "full-fast").__enter__()
    folder.chmod(0o700)
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(Refused, match="not private"):
        hold(tmp_path / "link", "solo-a", "full-fast").__enter__()


def test_a_link_in_the_locks_place_refuses(tmp_path: Path) -> None:
    folder = tmp_path / "locks"
    folder.mkdir(mode=0o700)
    lock_path(folder, "solo-a").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Refused, match="a lock cannot be opened"):
        hold(folder, "solo-a", "full-fast").__enter__()
    assert not (tmp_path / "elsewhere").exists()
