"""The locked runner: one command on one solo, under its lock and limits, supervised to its end.

    python -m d2lib.coordinator.locked --profile FILE --solo NAME --job JOB --log FILE [--receipt FILE]
        [--assembly FOLDER] -- COMMAND ...

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from d2lib.coordinator.cards import Cards, NvmlCards
from d2lib.coordinator.children import clean_environment
from d2lib.coordinator.conditions import card_memory, check_start, check_watched
from d2lib.coordinator.lease import hold, hold_further, utc_now
from d2lib.coordinator.processes import adopt_orphans, before_exec, end_leftovers
from d2lib.coordinator.profile import Profile, load_profile
from d2lib.coordinator.supervise import StopRequest, supervise
from d2lib.coordinator.swap import find_scope
from d2lib.coordinator.watch import Watch
from d2lib.entry import run_command
from d2lib.errors import ExitStatus, Interrupted, Refused
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


@dataclass(frozen=True)
class Work:
    """What is run, and where its words go."""

    job: str
    solo: str
    log: Path
    command: tuple[str, ...]
    receipt: Path | None = None
    """What the command leaves when it comes to an end of its own; without it a status 0, 1 or 3 is not believed."""
    assembly: Path | None = None
    """The assembly whose drafter says how much card memory is needed."""


def run_locked(profile: Profile, work: Work, cards: Cards | None, say: Callable[[str], None]) -> ExitStatus:
    """Take the solo, check the host, run the command and supervise it.

    Args:
        cards: what answers about cards; by default NVML, asked when the solo is a card.
        say: takes the runner's lines.

    Raises:
        Refused: the solo is taken or a condition does not hold; nothing was started.
    """
    solo = profile.solos.get(work.solo)
    if solo is None:
        raise Refused("an unknown solo", expected=f"one of {', '.join(profile.solos)}", found=work.solo)
    if solo.card is not None and cards is None:
        cards = NvmlCards()
    adopt_orphans()
    with (
        StopRequest().listening() as request,
        hold(profile.locks, work.solo, work.job) as lease,
        hold_further(solo.further_locks) as further,
    ):
        needed = card_memory(work.job, work.assembly) if solo.card is not None and work.assembly is not None else 0
        uuid = check_start(profile, solo, cards, needed)
        where = "CPU" if uuid is None else uuid
        say(f"holds {work.solo} ({where}), lock {lease.path}; at most {profile.memory_limit_gib:g} GiB resident")
        if request.number is not None:
            raise Interrupted(f"stopped by {signal.Signals(request.number).name} before the child was started")
        scope = find_scope()
        # Our lock's descriptor is close-on-exec, and every child closes what it is not given.
        with _logging(work) as (output, stamp):
            child = subprocess.Popen(
                (*scope.prefix, *work.command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=job_environment(uuid) | dict(scope.environment),
                start_new_session=True,
                pass_fds=further,
                preexec_fn=before_exec(solo.cpus, os.getpid()),
            )
            try:
                lease.note_child(child.pid)
                say(f"{STARTED} pid {child.pid}, swap {scope.text}: {shlex.join(work.command)}")
                with Watch(
                    lambda: check_watched(profile, uuid, cards),
                    every=profile.watch_seconds,
                    patience=profile.answer_seconds,
                ) as watch:
                    reason = supervise(profile, child, request, watch, stamp=stamp, say=say)
            finally:  # whatever happened here, the lock is not given up before the job is gone
                end_leftovers(profile.grace_seconds, child, but=stamp, say=say)
    status, text = judge(child.returncode, reason, work.receipt)
    say(f"{ENDED} exit {int(status)} ({text})")
    return status


def job_environment(uuid: str | None, source: Mapping[str, str] | None = None) -> dict[str, str]:
    """A job's environment: the allowlist, and the one card by its UUID, or no card at all."""
    return child_environment({"CUDA_VISIBLE_DEVICES": uuid or ""}, source=source)


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
    parser.add_argument("--assembly", type=Path, help="whose drafter says how much card memory is needed")
    parser.add_argument("command", nargs="+", metavar="COMMAND")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None, cards: Cards | None = None) -> int:
    """Run the command line; one line for every refusal. No flag and no profile can say what answers about cards."""
    options = _arguments(sys.argv[1:] if arguments is None else arguments)

    def say(text: str) -> None:
        with suppress(OSError):  # a full disk or a reader that is gone must not end the supervision of a job
            os.write(1, f"{utc_now()} {options.job} {text}\n".encode(errors="replace"))

    def run() -> int:
        here = Path.cwd() / "d2lib"
        if here.is_dir() and os.path.realpath(here) != str(library_folder()):
            raise Refused("the runner runs another d2lib than its folder's", expected=here, found=library_folder())
        work = Work(options.job, options.solo, options.log, tuple(options.command), options.receipt, options.assembly)
        return int(run_locked(load_profile(options.profile), work, cards, say))

    return run_command("locked", run, say)


if __name__ == "__main__":
    raise SystemExit(main())
