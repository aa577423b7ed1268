"""Starting one job: who may, whether it may now, and the detached session in which it runs."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from d2lib.coordinator import sessions
from d2lib.coordinator.cards import NvmlCards
from d2lib.coordinator.children import NoAnswer
from d2lib.coordinator.conditions import card_memory, check_start
from d2lib.coordinator.contract import JOBS, K2_FLAGS, Plan, Start
from d2lib.coordinator.lease import check_free, hold_further, lock_path, read_holder
from d2lib.coordinator.locked import ENDED, REFUSED, STARTED
from d2lib.coordinator.profile import ANY_HOST, Job
from d2lib.coordinator.receipts import check_output, done_receipt, product
from d2lib.coordinator.stage import check_recorded, revalidate
from d2lib.errors import Refused, Unexpected
from d2lib.evidence.environment import COORDINATOR
from d2lib.evidence.receipts import Receipt
from d2lib.evidence.run import next_attempt
from d2lib.files import write_exclusive

PRODUCTS: dict[Job, str] = {
    "full-fast": "full-fast.pt",
    "g2-dev": "dev.json",
    "g2-legal": "heldout_legal.json",
    "g2-general": "heldout_general.json",
    "g2-finish": "g2.json",
}
"""Job → the file that it makes, from the run root."""


def check_coordinator(plan: Plan, environment: Mapping[str, str] | None = None, host: str | None = None) -> None:
    """Only the coordinator executes, on the profile's host, with the profile's assembly; raises Refused."""
    profile = plan.profile
    who = (os.environ if environment is None else environment).get(COORDINATOR)
    if who != profile.coordinator:
        raise Refused(
            "only the coordinator executes",
            expected=f"{COORDINATOR}={profile.coordinator}",
            found=f"{COORDINATOR}={who}" if who is not None else f"no {COORDINATOR}",
        )
    host = socket.gethostname() if host is None else host
    if profile.host not in (ANY_HOST, host, host.split(".")[0]):
        raise Refused("this is another host than the profile's", expected=profile.host, found=host)
    if profile.assembly is not None and str(plan.paths.assembly) != profile.assembly:
        raise Refused("--assembly is not the profile's", expected=profile.assembly, found=plan.paths.assembly)


def start_job(plan: Plan, job: Job, resume: int) -> Start:
    """Check everything again, then start a job's detached session and return once its runner confirms.

    Args:
        resume: 0 for the first start, N for --resume --attempt N.

    Raises:
        Refused: something changed since staging, the job is done, running or not its turn, or the host is not ready.
        Unexpected: the session was started and its runner does not confirm.
    """
    revalidate(plan)
    check_recorded(plan)
    check_turn(plan, job)
    start = next_start(plan, job, resume)
    name, solo = plan.profile.solo_of(job)
    sessions.check_socket()
    for earlier in range(resume + 1):
        session = plan.session(job, earlier)
        if sessions.exists(session):
            raise Refused("the session exists already and is not touched", found=session)
    check_free(plan.profile.locks, name)
    with hold_further(solo.further_locks):
        pass
    if solo.card is None:
        check_start(plan.profile, solo, None)
    else:
        check_start(plan.profile, solo, NvmlCards(), card_memory(job, plan.paths.assembly))
    write_exclusive(start.script, start.script_text.encode(), mode=0o500)
    offset = start.coordinator_log.stat().st_size if start.coordinator_log.exists() else 0
    try:
        sessions.start_session(start)
    except (Refused, Unexpected):
        start.script.unlink()  # it never ran
        raise
    confirm(plan, start, offset)
    return start


def next_start(plan: Plan, job: Job, resume: int) -> Start:
    """The start that comes next; raises Refused when it is another one or there is nothing to resume."""
    attempt = next_attempt(plan.paths.output / JOBS[job].receipts)
    start = plan.start(job, resume, attempt)
    if start.script.exists():
        raise Refused(
            "the job was started before under this name",
            expected="a script that does not exist yet",
            found=start.script.name,
            where=plan.paths.snapshot,
            remedy=f"if it was interrupted: --resume --attempt {resume + 1}",
        )
    if resume > 0 and not plan.start(job, resume - 1).script.exists():
        before = "without --resume" if resume == 1 else f"as --attempt {resume - 1}"
        raise Refused("there is nothing to resume", expected=f"a start {before}", where=plan.paths.snapshot)
    if resume == 0 and attempt > 1:
        raise Refused(
            "the output holds an attempt that this snapshot did not start",
            found=f"attempt-{attempt - 1}",
            where=plan.paths.output / JOBS[job].receipts,
        )
    if resume == 0 and os.path.lexists(plan.paths.output / PRODUCTS[job]):
        raise Refused("the output exists, and no receipt speaks of it", where=plan.paths.output / PRODUCTS[job])
    return start


def check_turn(plan: Plan, job: Job) -> None:
    """It is this job's turn: it is not done, and what it needs is; raises Refused."""
    root = plan.paths.output
    if (found := done_receipt(root, JOBS[job].receipts)) is not None:
        raise Refused(f"{job} is done and never reruns", where=found[0])
    if job == "full-fast":
        return
    check_trained(plan)
    if job == "g2-general":
        _check_legal(plan)
    if job == "g2-finish":
        for other, spec in JOBS.items():
            if spec.phase == "full-g2":
                _check_done(root, other)


def check_trained(plan: Plan) -> None:
    """Training is finished: its receipt is done, full-fast.pt is that receipt's, and it holds all updates of all epochs
    of what was admitted, as the receipt says."""
    receipt = _check_done(plan.paths.output, "full-fast")
    done, held = (receipt.result or {}).get("updates"), trained_updates(plan)
    if done != held:
        raise Refused(
            "the receipt of training says something else than its checkpoint",
            expected=f"{held} updates",
            found=f"{done}",
            where=plan.paths.output / JOBS["full-fast"].receipts,
        )


def trained_updates(plan: Plan) -> int:
    """The updates in full-fast.pt, compared with admission, assembly and pins; raises Refused."""
    from d2lib.data.assembly import Assembly  # when it is needed: the coordinator knows no arithmetic
    from d2lib.train.full import Admitted, completed
    from d2lib.train.pins import read_pins

    found = done_receipt(plan.paths.output, "admission")
    if found is None:
        raise Refused("admission is not done", where=plan.paths.output)
    admitted = Admitted(plan.paths.output / product(found[1], "admission"))
    k2 = {split: getattr(plan.paths, flag) for split, flag in K2_FLAGS.items()}
    assembly = Assembly(plan.paths.assembly, k2)
    admitted.check(assembly)
    updates = completed(assembly, admitted, plan.paths.output).updates
    known = plan.known(plan.repo)
    if "pins" in known:
        read_pins(Path(known["pins"])).compare(plan.paths.output / PRODUCTS["full-fast"], updates=updates)
    return updates


def _check_legal(plan: Plan) -> None:
    solo = plan.profile.jobs["g2-general"]
    try:
        check_free(plan.profile.locks, solo)
    except Refused:  # a record alone says nothing: a killed runner leaves its own behind
        holder = read_holder(lock_path(plan.profile.locks, solo))
        if holder is not None and holder["job"] == "g2-legal":
            raise Refused(
                "g2-legal holds the solo that g2-general needs",
                expected=f"{solo} free, after g2-legal is done",
                found=f"g2-legal, pid {holder['pid']}, since {holder['since']}",
                remedy="wait until it has ended",
            ) from None
    _check_done(plan.paths.output, "g2-legal")


def _check_done(root: Path, job: Job) -> Receipt:
    found = done_receipt(root, JOBS[job].receipts)
    if found is None:
        raise Refused(
            f"{job} is not done",
            expected=f"{PRODUCTS[job]} and a receipt with status done",
            where=root / JOBS[job].receipts,
            remedy=f"--execute --phase {JOBS[job].phase} --job {job}",
        )
    check_output(root, found[1], PRODUCTS[job])
    return found[1]


def confirm(plan: Plan, start: Start, offset: int) -> None:
    """Wait for the runner's word that the child runs; raises Refused with its own words when it refused."""
    until = time.monotonic() + plan.profile.confirm_seconds
    gone = False
    while True:
        text = _read_from(start.coordinator_log, offset)
        for line in text.splitlines():
            words = line.split(" ", 3)
            if len(words) == 4 and words[1] == start.job:
                if words[2] in (STARTED, ENDED):
                    return
                if words[2] == REFUSED:
                    start.script.unlink()  # the runner started nothing; the same start may be tried again
                    raise Refused(f"the runner refused: {words[3]}")
        if gone or time.monotonic() > until:
            raise Unexpected(
                "the session has ended and its runner said nothing" if gone else "the runner does not confirm",
                found=text.splitlines()[-1] if text else "an empty log",
                where=start.coordinator_log,
            )
        with suppress(NoAnswer):  # the session may be there all the same
            gone = not sessions.exists(start.session)  # then one last look at the log
        time.sleep(0.1)


def _read_from(path: Path, offset: int) -> str:
    try:
        with open(path, "rb") as stream:
            stream.seek(offset)
            return stream.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
