"""How commands end: no crash may look like a verdict, no name may write a line of its own."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d2lib import cli
from d2lib.coordinator import command as full_stage
from d2lib.entry import run_command, storage_failure
from d2lib.errors import ExitStatus, Interrupted, Refused, Unexpected, one_line

FULL = [f"--{name}=x" for name in ("source", "commit", "snapshot", "output", "assembly", "pilot-source")]
FULL += [f"--{name}=x" for name in ("pilot-receipt", "g1", "k2-dev", "k2-legal", "k2-general")]

ENDINGS: list[tuple[BaseException, int, str]] = [
    (Refused("no", where="here"), 2, "refused: no; where: here"),
    (Interrupted("stopped"), 3, "interrupted: stopped"),
    (Unexpected("odd"), 4, "unexpected: odd"),
    (KeyboardInterrupt(), 3, "interrupted"),
    (
        OSError(errno.ENOSPC, "No space left on device", "/a/b"),
        4,
        "No space left on device (ENOSPC); where: /a/b; do: make",
    ),
    (OSError(errno.EIO, "Input/output error"), 4, "(EIO); do: check that disk, then start the same command again"),
    (BrokenPipeError(), 4, "not complete"),
    (KeyError("x"), 4, "unexpected: KeyError: 'x'; this is no verdict"),
    (RecursionError("deep"), 4, "unexpected: RecursionError"),
    (MemoryError(), 4, "unexpected: MemoryError"),
    (AssertionError("a\n\x1b[2Kb"), 4, "AssertionError: a\\n\\x1b[2Kb"),
    (SystemExit(1), 4, "left with 1"),
    (SystemExit("text"), 4, "left with 'text'"),
    (SystemExit(True), 4, "left with True"),
    (SystemExit(0), 0, ""),
    (SystemExit(None), 0, ""),
    (SystemExit(2), 2, ""),
]


def raising(error: BaseException) -> Any:
    def command(*_: object, **__: object) -> NoReturn:
        raise error

    return command


@pytest.mark.parametrize(("error", "status", "words"), ENDINGS, ids=[repr(one[0]) for one in ENDINGS])
def test_an_error_ends_every_command_alike(
    error: BaseException, status: int, words: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_status", raising(error))
    monkeypatch.setattr(full_stage, "_run", raising(error))
    for main, arguments in ((cli.main, ["status"]), (cli.main, ["full", *FULL]), (full_stage.main, FULL)):
        assert main(arguments) == status
        said = capfd.readouterr().err
        assert words in (said.splitlines() or [""])[-1]
        if isinstance(error, Refused | Interrupted | OSError | KeyboardInterrupt):
            assert len(said.splitlines()) == 1


def test_a_returned_status_is_the_exit_status() -> None:
    assert [run_command("x", lambda status=status: status) for status in ExitStatus] == [0, 1, 2, 3, 4]
    assert run_command("x", lambda: 7) == 4  # a status that means nothing


@pytest.mark.parametrize(
    "module", ["d2lib.cli", "d2lib.full_stage", "d2lib.gates.pilot", "d2lib.benchmark.child", "d2lib.coordinator.stamp"]
)
def test_every_module_that_can_be_run_ends_with_4_when_it_breaks(module: str, tmp_path: Path) -> None:
    """The function that each of them calls is replaced by one that crashes, in a process of its own."""
    program = (
        "import runpy, sys, argparse, os, json, pathlib, torch\n"  # torch opens files of its own on some builds
        "def broken(*a, **k): raise ZeroDivisionError('broken')\n"
        "argparse.ArgumentParser.parse_args = lambda *a, **k: argparse.Namespace(command=broken)\n"
        "os.open = broken\njson.loads = broken\npathlib.Path.read_bytes = broken\n"
        "import d2lib.coordinator.command; d2lib.coordinator.command._run = broken\n"
        f"sys.argv = [{module!r}, 'head', '{{}}'][: 2 if {module!r} == 'd2lib.gates.pilot' else 3]\n"
        f"runpy.run_module({module!r}, run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 4, done.stderr
    assert "ZeroDivisionError: broken; this is no verdict" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_command_as_interrupted(number: signal.Signals) -> None:
    handler = "default_int_handler" if number is signal.SIGINT else "SIG_DFL"  # a shell's background job ignores some
    program = (
        f"import signal, time; signal.signal({int(number)}, signal.{handler})\n"
        "from d2lib.entry import run_command\n"
        "raise SystemExit(run_command('d2', lambda: print('ready', flush=True) or time.sleep(60)))"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    time.sleep(0.05)
    child.send_signal(number)
    _, err = child.communicate(timeout=30)
    assert (child.returncode, err) == (3, "d2: interrupted\n")


def test_output_that_cannot_be_written_is_no_success() -> None:
    program = "from d2lib.entry import run_command; raise SystemExit(run_command('d2', lambda: print('x' * 9) or 0))"
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 4
    assert done.stderr.splitlines()[0].startswith("d2: unexpected: No space left on device (ENOSPC)")
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    assert (done.returncode, len(done.stderr.splitlines())) == (4, 1)


def test_a_storage_failure_says_what_is_kept() -> None:
    found = str(storage_failure(OSError(errno.EIO, "Input/output error", "/x\n/y"), "the journal is kept"))
    assert found == (
        "Input/output error (EIO); the journal is kept; where: /x\\n/y; do: check that disk, then start the same "
        "command again"
    )


@given(st.text())
def test_one_line_is_one_line_and_leaves_plain_text_alone(text: str) -> None:
    shown = one_line(text)
    assert shown.isprintable()
    assert len(shown.splitlines()) <= 1
    shown.encode("utf-8")
    if text.isprintable():
        assert shown == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nb", "a\\nb"),
        ("\x1b[31m", "\\x1b[31m"),
        ("a\u202eb", "a\\u202eb"),
        ("\udcff", "\\udcff"),
        ("\x85\u2028", "\\x85\\u2028"),
        ("Zürich 日本 −1.5 µ", "Zürich 日本 −1.5 µ"),
    ],
)
def test_what_would_not_be_seen_is_written_out(text: str, shown: str) -> None:
    assert one_line(text) == shown
    assert str(Refused("x", found=text)) == f"x; found: {shown}"
