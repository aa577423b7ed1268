"""The locked runner: one command on one solo, under its lock and limits, supervised to its end.

    python -m d2lib.coordinator.locked --profile FILE --solo NAME --job JOB --log FILE [--receipt FILE] -- COMMAND ...

It says on stdout, line by line with UTC time and job, that the child started, why it was stopped, and how it ended. The
child's own output goes to --log. Exit statuses are those of every command; a child that a signal killed is 4.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from d2lib.coordinator.cards import Cards, open_cards
from d2lib.coordinator.children import clean_environment
from d2lib.coordinator.conditions import check_start, check_watched
from d2lib.coordinator.lease import hold, utc_now
from d2lib.coordinator.processes import (
    Usage,
    adopt_orphans,
    before_exec,
    descendants,
    end_leftovers,
    forbid_swap,
    kill_all,
    reap,
    usage,
)
from d2lib.coordinator.profile import GIB, Profile, load_profile
from d2lib.entry import run_command
from d2lib.errors import D2Error, ExitStatus, Interrupted, Refused
from d2lib.evidence.environment import child_environment, library_folder

STARTED, REFUSED, ENDED = "started:", "refused:", "ended:"
"""First words of the runner's lines that the coordinator's command looks for."""
_WORDS = {
    ExitStatus.DONE: "done",
    ExitStatus.VERDICT: "a verdict of FAIL or INCONCLUSIVE",
    ExitStatus.REFUSED: "refused",
    ExitStatus.INTERRUPTED: "interrupted at a saved boundary; can be resumed",
    ExitStatus.UNEXPECTED: "unexpected",
}


@dataclass
class StopRequest:
    """SIGTERM, SIGINT or SIGHUP to the runner, remembered until it is handed on."""

    number: int | None = None

    @contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Take the signals over, and give them back."""
        taken = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        before = {number: signal.signal(number, self._take) for number in taken}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _take(self, number: int, _frame: object) -> None:
        if self.number is None:
            self.number = number


@dataclass(frozen=True)
class Work:
    """What is run, and where its words go."""

    job: str
    solo: str
    log: Path
    command: tuple[str, ...]
    receipt: Path | None = None
    """What the command leaves when it comes to an end of its own; without it a status 0, 1 or 3 is not believed."""


def run_locked(profile: Profile, work: Work, cards: Cards | None, say: Callable[[str], None]) -> ExitStatus:
    """Take the solo, check the host, run the command and supervise it.

    Args:
        cards: NVML's answers; None lets the profile decide.
        say: takes the runner's lines.

    Raises:
        Refused: the solo is taken or a condition does not hold; nothing was started.
    """
    solo = profile.solos.get(work.solo)
    if solo is None:
        raise Refused("an unknown solo", expected=f"one of {', '.join(profile.solos)}", found=work.solo)
    if solo.card is not None and cards is None:
        cards = open_cards(profile.recorded_cards)
        if profile.recorded_cards is not None:
            say(f"the card's state comes from a recording, not from NVML: {profile.recorded_cards}")
    adopt_orphans()
    with StopRequest().listening() as request, hold(profile.locks, work.solo, work.job) as lease:
        uuid = check_start(profile, solo, cards)
        where = "CPU" if uuid is None else uuid
        say(f"holds {work.solo} ({where}), lock {lease.path}; at most {profile.memory_limit_gib:g} GiB resident")
        if request.number is not None:
            raise Interrupted(f"stopped by {signal.Signals(request.number).name} before the child was started")
        # The lock's descriptor is close-on-exec and every child closes what it is not given.
        with _logging(work) as (output, stamp):
            child = subprocess.Popen(
                work.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=job_environment(uuid),
                start_new_session=True,
                preexec_fn=before_exec(solo.cpus, os.getpid()),
            )
            group = None
            try:
                lease.note_child(child.pid)
                group = forbid_swap(child.pid, f"d2-{work.job}-{child.pid}")
                swap = "forbidden" if group is not None else "watched"
                say(f"{STARTED} pid {child.pid}, swap {swap}: {shlex.join(work.command)}")
                reason = supervise(profile, child, request, stamp, say, lambda: check_watched(profile, uuid, cards))
            finally:  # whatever happened here, the lock is not given up before the job is gone
                end_leftovers(profile.grace_seconds, child, but=stamp, say=say)
            if group is not None:
                with suppress(OSError):
                    group.rmdir()
    status, text = judge(child.returncode, reason, work.receipt)
    say(f"{ENDED} exit {int(status)} ({text})")
    return status


def job_environment(uuid: str | None, source: Mapping[str, str] | None = None) -> dict[str, str]:
    """A job's environment: the allowlist, and the one card by its UUID, or no card at all."""
    return child_environment({"CUDA_VISIBLE_DEVICES": uuid or ""}, source=source)


def supervise(
    profile: Profile,
    child: subprocess.Popen[bytes],
    request: StopRequest,
    stamp: int,
    say: Callable[[str], None],
    check: Callable[[], None],
) -> str | None:
    """Watch a child to its end; returns why it was stopped, or None when it ended by itself.

    A stop is SIGTERM (or the signal that the runner got), the grace time, and only then SIGKILL of the whole tree.
    """
    limit = int(profile.memory_limit_gib * GIB)
    reason: str | None = None
    deadline = 0.0
    watched = time.monotonic()
    while True:
        with suppress(subprocess.TimeoutExpired):
            child.wait(profile.sample_seconds)
            return reason
        reap(but=(child.pid, stamp))
        if reason is None:
            number = signal.SIGTERM
            if request.number is not None:
                number = signal.SIGINT if request.number == signal.SIGINT else signal.SIGTERM
                reason = f"{signal.Signals(request.number).name} to the runner"
            else:
                reason = _over(usage(descendants(but=stamp)), limit)
                if reason is None and time.monotonic() - watched >= profile.watch_seconds:
                    watched = time.monotonic()
                    try:
                        check()
                    except D2Error as error:
                        reason = str(error)
            if reason is not None:
                deadline = time.monotonic() + profile.grace_seconds
                say(f"stopping: {reason}; {signal.Signals(number).name}, then {profile.grace_seconds:g} s of grace")
                child.send_signal(number)
        elif deadline and time.monotonic() >= deadline:
            say(f"SIGKILL: the child did not end within {profile.grace_seconds:g} s")
            kill_all(descendants(but=stamp))
            deadline = 0.0


def _over(found: Usage, limit: int) -> str | None:
    if found.resident > limit:
        return f"the job's resident memory is {found.resident / GIB:.2f} GiB, the limit is {limit / GIB:g} GiB"
    if found.swapped:
        return f"{found.swapped >> 10} KiB of the job are in swap, where nothing of a job may be"
    return None


def judge(returncode: int, reason: str | None, receipt: Path | None = None) -> tuple[ExitStatus, str]:
    """A child's exit status as one of ours, and what to say of it; no 128+n and no foreign status gets through.

    Python ends with 1 on any uncaught exception, so that a verdict's status counts only with its receipt.
    """
    after = f", after: {reason}" if reason else ""
    if returncode < 0:
        return ExitStatus.UNEXPECTED, f"the child was killed by {signal.Signals(-returncode).name}{after}"
    if returncode not in list(ExitStatus):
        return ExitStatus.UNEXPECTED, f"the child's exit status {returncode} means nothing here{after}"
    status = ExitStatus(returncode)
    if status not in (ExitStatus.REFUSED, ExitStatus.UNEXPECTED) and receipt is not None and not receipt.exists():
        return ExitStatus.UNEXPECTED, f"the child ended with {returncode} and left no receipt{after}"
    return status, _WORDS[status] + after


@contextmanager
def _logging(work: Work) -> Iterator[tuple[int, int]]:
    """(a pipe's end for the child's output, pid of the process that stamps it into the log)."""
    reader, writer = os.pipe()
    stamp = subprocess.Popen(
        (sys.executable, "-m", "d2lib.coordinator.stamp", work.job, str(work.log)),
        stdin=reader,
        env=clean_environment(),
        start_new_session=True,
    )
    os.close(reader)
    try:
        yield writer, stamp.pid
    finally:
        os.close(writer)
        stamp.wait()


def _arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="d2lib.coordinator.locked", description=__doc__.splitlines()[0])
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--solo", required=True)
    parser.add_argument("--job", required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--receipt", type=Path, help="what the command must have written to be believed")
    parser.add_argument("command", nargs="+", metavar="COMMAND")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; one line for every refusal."""
    options = _arguments(sys.argv[1:] if arguments is None else arguments)

    def say(text: str) -> None:
        print(f"{utc_now()} {options.job} {text}", flush=True)

    def run() -> int:
        here = Path.cwd() / "d2lib"
        if here.is_dir() and os.path.realpath(here) != str(library_folder()):
            raise Refused("the runner runs another d2lib than its folder's", expected=here, found=library_folder())
        work = Work(options.job, options.solo, options.log, tuple(options.command), options.receipt)
        return int(run_locked(load_profile(options.profile), work, None, say))

    return run_command("locked", run, say)


if __name__ == "__main__":
    raise SystemExit(main())
