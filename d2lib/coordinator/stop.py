"""Stopping a job: its locked runner is asked to save a boundary and end. No session and no process is killed."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import psutil

from d2lib.coordinator import sessions
from d2lib.coordinator.contract import JOBS, Plan, Start
from d2lib.coordinator.lease import living_child, lock_path, read_holder
from d2lib.coordinator.profile import Job
from d2lib.errors import Refused


@dataclass(frozen=True)
class Asked:
    """Whom a stop asked: the job's newest start, and the runner's process."""

    start: Start
    runner: int
    since: str


def stop_job(plan: Plan, job: Job) -> Asked:
    """Ask a running job's locked runner (SIGTERM) to stop at the next boundary; returns at once.

    Asking again changes nothing. Nothing is revalidated first: a job can be stopped whatever has changed around it.

    Raises:
        Refused: the job does not run, another run's job holds its solo, or the job's runner is gone.
    """
    solo = plan.profile.jobs[job]
    path = lock_path(plan.profile.locks, solo)
    holder = read_holder(path)
    start = newest_start(plan, job)
    runner = None if holder is None else _runner(plan, job, holder)
    if holder is not None and runner is not None and start is not None:
        with suppress(psutil.NoSuchProcess):  # psutil signals no other process that got the same pid
            runner.terminate()
            return Asked(start, runner.pid, holder["since"])
    if start is not None and sessions.exists(start.session):
        raise Refused(
            f"{job} has a session, and its runner does not hold {solo}: it is starting or ending",
            where=start.coordinator_log,
            remedy="read the log; ask again if the job goes on",
        )
    left = living_child(path)
    if left is not None and left["job"] == job and start is not None:
        raise Refused(
            f"{job}'s runner is gone; its process was asked to stop at that moment and is still there",
            found=f"pid {left['child']['pid']}",
            where=start.child_log,
            remedy="wait until it has saved and ended",
        )
    raise Refused(
        f"{job} does not run, so there is nothing to stop",
        expected=f"its runner on {solo}",
        found="no start of this job" if start is None else f"{start.session}, which has ended",
        where=None if start is None else start.coordinator_log,
    )


def newest_start(plan: Plan, job: Job) -> Start | None:
    """The job's last start, which its script in the snapshot stands for; None before the first."""
    found, number = None, 0
    while (start := plan.start(job, number)).script.exists():
        found, number = start, number + 1
    return found


def _runner(plan: Plan, job: Job, holder: dict[str, Any]) -> psutil.Process | None:
    """The holder's process when it is this run's runner of this job: its command line names the job and the log."""
    wanted = (("-m", "d2lib.coordinator.locked"), ("--job", job), ("--log", str(plan.logs / JOBS[job].child_log)))
    try:
        process = psutil.Process(int(holder["pid"]))
        words = process.cmdline()
    except (psutil.Error, ValueError, TypeError, OverflowError):
        return None
    words = words[: words.index("--")] if "--" in words else words
    pairs = list(pairwise(words))
    return process if all(pair in pairs for pair in wanted) else None
