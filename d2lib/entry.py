"""How every command ends: one clear line for what went wrong, and an exit status that means what ExitStatus says.

Python itself ends with 1 on an uncaught exception, which is the status of a verdict here; nothing that crashed may
look like one.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from d2lib.errors import D2Error, ExitStatus, Refused, Unexpected, one_line

_REMEDIES = {
    errno.ENOSPC: "make room on that disk",
    errno.EDQUOT: "make room in that quota",
    errno.EIO: "check that disk",
    errno.EROFS: "mount it writable",
    errno.EACCES: "give this user the right to it",
    errno.EPERM: "give this user the right to it",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENOMEM: "free memory",
}


def run_command(program: str, command: Callable[[], int], say: Callable[[str], None] | None = None) -> int:
    """Run a command and return its exit status, whatever happens in it.

    Args:
        program: the name that its lines begin with.
        command: the work; what it returns is the status.
        say: prints a line; by default to stderr.

    Returns: 0 done, 1 a verdict (only when `command` returned it), 2 refused, 3 interrupted by SIGINT, SIGTERM
        or SIGHUP, 4 anything else.
    """

    def tell(text: str) -> None:
        if say is not None:
            say(text)
        else:
            print(f"{program}: {text}", file=sys.stderr, flush=True)

    try:
        with _terminable():
            status = ExitStatus(command())
            sys.stdout.flush()
            return int(status)
    except D2Error as error:
        tell(describe(error))
        return int(error.exit_status)
    except KeyboardInterrupt:
        tell("interrupted")
        return int(ExitStatus.INTERRUPTED)
    except BrokenPipeError:
        _discard_output()
        tell("unexpected: whoever read the output has gone, so that it is not complete")
    except OSError as error:
        tell(describe(storage_failure(error)))
        _discard_output()
    except SystemExit as error:
        if error.code in (None, int(ExitStatus.DONE), int(ExitStatus.REFUSED)):  # argparse: help, bad arguments
            return int(error.code or 0)
        tell(f"unexpected: a part of the program left with {error.code!r}")
    except Exception as error:
        traceback.print_exc()
        tell(one_line(f"unexpected: {type(error).__name__}: {error}; this is no verdict but a fault of the program"))
    return int(ExitStatus.UNEXPECTED)


def _discard_output() -> None:
    """Drop what cannot be written: Python flushes once more when it ends, and would end with a status of its own."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def describe(error: D2Error) -> str:
    """An error as one line: its kind, then what it says."""
    return f"{'refused' if isinstance(error, Refused) else type(error).__name__.lower()}: {error}"


def storage_failure(error: OSError, kept: str | None = None) -> Unexpected:
    """An operating system's error as one that says which file it concerns and what to do.

    Args:
        error: from any call on files, processes or sockets.
        kept: what is safe although it failed, in words.
    """
    reason = error.strerror or str(error) or type(error).__name__
    code = errno.errorcode.get(error.errno or 0)
    remedy = _REMEDIES.get(error.errno or 0)
    again = "then start the same command again" if remedy else "mend that, then start the same command again"
    return Unexpected(
        f"{reason}{f' ({code})' if code else ''}{f'; {kept}' if kept else ''}",
        where=os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else error.filename,
        remedy=f"{remedy}, {again}" if remedy else again,
    )


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM and SIGHUP as Ctrl-C, where nobody has taken them over (nohup has)."""
    taken = []
    if threading.current_thread() is threading.main_thread():
        taken = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]
    for number in taken:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)
