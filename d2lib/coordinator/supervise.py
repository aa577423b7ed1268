"""Supervision: a job's child is watched to its end, and stopped when it or the host breaks a rule."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from d2lib.coordinator.processes import descendants, kill_all, reap, usage
from d2lib.coordinator.profile import GIB, MIB, Profile
from d2lib.coordinator.swap import SwapRule, computing
from d2lib.coordinator.watch import Watch


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


def supervise(
    profile: Profile,
    child: subprocess.Popen[bytes],
    request: StopRequest,
    watch: Watch,
    *,
    stamp: int,
    say: Callable[[str], None],
) -> str | None:
    """Watch a child to its end; returns why it was stopped, or None when it ended by itself.

    A stop is SIGTERM (or the signal that the runner got), the grace time, and only then SIGKILL of the whole tree.
    Memory is sampled whatever the watch waits for.

    Args:
        watch: asks about the host. stamp: pid of the descendant that stamps the log and stays.
    """
    swap = SwapRule(int(profile.swap_allowance_mib * MIB), profile.swap_samples)
    reason: str | None = None
    trouble: str | None = None
    deadline = 0.0
    while True:
        with suppress(subprocess.TimeoutExpired):
            child.wait(profile.sample_seconds)
            return reason
        reap(but=(child.pid, stamp))
        found = watch.trouble()
        if (found is None) != (trouble is None):
            say(found or f"answered again; questions without an answer so far: {watch.unanswered}")
            trouble = found
        if reason is None:
            number = signal.SIGTERM
            if request.number is not None:
                number = signal.SIGINT if request.number == signal.SIGINT else signal.SIGTERM
                reason = f"{signal.Signals(request.number).name} to the runner"
            else:
                reason = _over_memory(profile, swap, child.pid, stamp) or watch.reason()
            if reason is not None:
                deadline = time.monotonic() + profile.grace_seconds
                say(f"stopping: {reason}; {signal.Signals(number).name}, then {profile.grace_seconds:g} s of grace")
                child.send_signal(number)
        elif deadline and time.monotonic() >= deadline:
            say(f"SIGKILL: the child did not end within {profile.grace_seconds:g} s")
            kill_all(descendants(but=stamp))
            deadline = 0.0


def _over_memory(profile: Profile, swap: SwapRule, child: int, stamp: int) -> str | None:
    """Why the job's memory stops it, or None; one sample."""
    processes = descendants(but=stamp)
    resident = usage(processes).resident / GIB
    if resident > profile.memory_limit_gib:
        return f"the job's resident memory is {resident:.2f} GiB, the limit is {profile.memory_limit_gib:g} GiB"
    return swap.broken(usage(computing(processes, child)).swapped)
