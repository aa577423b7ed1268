"""Errors that a user can act on, and the exit statuses that every command and phase shares."""

from __future__ import annotations

from enum import IntEnum


class ExitStatus(IntEnum):
    """What a command or a phase returns to the shell."""

    DONE = 0
    """Done; where the phase judges, the verdict is PASS."""
    VERDICT = 1
    """Done, and the verdict is FAIL or INCONCLUSIVE."""
    REFUSED = 2
    """Bad input, or an action that the rules refuse."""
    INTERRUPTED = 3
    """Stopped at a boundary; the same job can be resumed."""
    UNEXPECTED = 4
    """Anything else."""


def one_line(value: object) -> str:
    """A text for one line of a terminal, a log or a page.

    Line ends, escape sequences and what else is not printed (direction marks, halves of surrogate pairs) become their
    backslash escapes: a file's name must not be able to write a line of its own.
    """
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii") for letter in str(value)
    )


class D2Error(Exception):
    """Base of the workbench's errors: what is wrong, and what to do about it.

    Args:
        message: one sentence that says what is wrong.
        expected: what would have been right.
        found: what was there instead.
        where: the file, field, tensor or row that it concerns.
        remedy: what the user can do.
    """

    exit_status: ExitStatus = ExitStatus.UNEXPECTED

    def __init__(
        self,
        message: str,
        *,
        expected: object = None,
        found: object = None,
        where: object = None,
        remedy: str | None = None,
    ) -> None:
        self.message = message
        self.expected = expected
        self.found = found
        self.where = where
        self.remedy = remedy
        super().__init__(str(self))

    def __str__(self) -> str:
        parts = [self.message]
        for label, value in (
            ("expected", self.expected),
            ("found", self.found),
            ("where", self.where),
            ("do", self.remedy),
        ):
            if value is not None:
                parts.append(f"{label}: {value}")
        return one_line("; ".join(parts))


class Refused(D2Error):
    """An input is bad, or the rules forbid the action. Nothing was changed."""

    exit_status = ExitStatus.REFUSED


class Interrupted(D2Error):
    """The work stopped at a saved boundary on request and can be resumed."""

    exit_status = ExitStatus.INTERRUPTED


class Unexpected(D2Error):
    """Something failed that is neither the user's input nor a request to stop."""

    exit_status = ExitStatus.UNEXPECTED
