"""`python -m d2lib.full_stage`: the coordinator's command line.

Without --check-inputs and --execute it renders: it reads the profile and nothing else, and it starts nothing. What the
other two need is imported only when they run.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from d2lib.coordinator.contract import INPUTS, JOBS, PHASES, PROFILE, Paths, Plan, absolute
from d2lib.coordinator.profile import Job, load_profile
from d2lib.entry import run_command
from d2lib.errors import ExitStatus, Refused

if TYPE_CHECKING:
    from d2lib.coordinator.contract import Start
    from d2lib.coordinator.stop import Asked

CHECKOUT = Path(__file__).resolve().parent.parent.parent
"""The checkout that this runs from."""

_HELP = {
    "source": "the reviewed checkout, clean",
    "commit": "its commit, 40 hex digits",
    "snapshot": "new folder for the staged source, named PILOT-NAMESPACE-full",
    "output": "the run root of the full run, named like the snapshot",
    "assembly": "folder with MANIFEST.json",
    "pilot_source": "the pilot's own source tree",
    "pilot_receipt": "the pilot's receipt.json",
    "g1": "the receipt or result of G1",
    "k2_dev": "dev.k2_drafts.jsonl",
    "k2_legal": "heldout_legal.k2_drafts.jsonl",
    "k2_general": "heldout_general.k2_drafts.jsonl",
}


def parser() -> argparse.ArgumentParser:
    """The flags. There is none for the recipe: full training takes it from the admitted pilot."""
    top = argparse.ArgumentParser(
        prog="python -m d2lib.full_stage",
        description="The coordinator's procedure for full training and full G2. Without --check-inputs or --execute it "
        "prints every command that would run, and touches nothing.",
        epilog="exit statuses: 0 done or started; 1 a verdict of FAIL or INCONCLUSIVE; 2 refused, or bad input; "
        "3 interrupted; 4 anything unexpected",
        allow_abbrev=False,
    )
    for name, text in _HELP.items():
        top.add_argument(f"--{name.replace('_', '-')}", required=True, help=text, metavar=name.upper())
    top.add_argument(
        "--profile", type=Path, help=f"another than the commit's {PROFILE}, to render or to try --check-inputs with"
    )
    action = top.add_mutually_exclusive_group()
    action.add_argument("--check-inputs", action="store_true", help="CPU admission; no GPU, no session")
    action.add_argument("--execute", action="store_true", help="really do --phase; only as the coordinator")
    top.add_argument("--phase", choices=PHASES)
    top.add_argument("--job", choices=get_args(Job))
    top.add_argument("--stop", action="store_true", help="ask --job to save a boundary and end; kills nothing")
    top.add_argument("--resume", action="store_true", help="go on with an interrupted job")
    top.add_argument("--attempt", type=int, metavar="N", help="1 for the first resumption, then 2, ...")
    return top


def plan_of(options: argparse.Namespace) -> Plan:
    """Flags and profile; raises Refused when they do not go together.

    What is executed or recorded goes by the profile of the reviewed source, which is part of its commit. Another one
    can be rendered and tried, and no more.
    """
    paths = Paths(
        commit=options.commit,
        **{name: absolute(getattr(options, name)) for name in ("source", "snapshot", "output", *INPUTS)},
    )
    if options.profile is None:
        source = paths.source if options.execute or options.check_inputs else CHECKOUT
        return Plan(paths, load_profile(source / PROFILE), PROFILE)
    if options.execute:
        raise Refused(
            "--profile does not go with --execute",
            expected=f"the reviewed commit's own {PROFILE}",
            found=options.profile,
            remedy="put another host's values there, in a commit that is reviewed",
        )
    profile = absolute(str(options.profile))
    for folder in (paths.source, CHECKOUT):
        if folder in profile.parents:
            return Plan(paths, load_profile(profile), profile.relative_to(folder).as_posix())
    raise Refused("the profile is not part of the source", expected=f"a file in {paths.source}", found=profile)


def resume_number(options: argparse.Namespace) -> int:
    """0 for a first start, N for --resume --attempt N; raises Refused when the flags do not fit the phase."""
    if not options.execute:
        given = [name for name in ("phase", "job", "stop", "resume", "attempt") if getattr(options, name)]
        if given:
            raise Refused(f"--{given[0]} needs --execute")
        return 0
    if options.stop:
        if options.job is None or options.resume or options.attempt is not None:
            raise Refused("--stop goes with --job alone", expected=f"--execute --stop --job {'|'.join(JOBS)}")
        if options.phase not in (None, JOBS[options.job].phase):
            raise Refused(f"{options.job} is no job of --phase {options.phase}", expected=JOBS[options.job].phase)
        return 0
    if options.phase is None:
        raise Refused("--execute needs --phase", expected=", ".join(PHASES))
    jobs = [job for job, spec in JOBS.items() if spec.phase == options.phase]
    if options.phase == "stage" and (options.job or options.resume or options.attempt is not None):
        raise Refused("stage has no job and is not resumed")
    if options.phase != "stage" and options.job not in jobs:
        raise Refused(f"--phase {options.phase} needs its --job", expected=" or ".join(jobs), found=options.job)
    if options.resume != (options.attempt is not None) or (options.resume and options.attempt < 1):
        raise Refused("--resume and --attempt go together", expected="--resume --attempt N, N from 1 on")
    return options.attempt if options.resume else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status; a refusal is one clear line."""
    try:
        options = parser().parse_args(arguments)
    except SystemExit as error:  # argparse has said why
        return int(error.code or 0)
    return run_command("full_stage", lambda: int(_run(options)))


def _run(options: argparse.Namespace) -> ExitStatus:
    resume = resume_number(options)
    plan = plan_of(options)
    if options.check_inputs:
        return _check_inputs(plan, tried=options.profile is not None)
    if not options.execute:
        from d2lib.coordinator.render import render

        print(render(plan), end="")
        return ExitStatus.DONE
    os.umask(0o077)
    from d2lib.coordinator.jobs import check_coordinator, start_job

    check_coordinator(plan)
    if options.stop:
        from d2lib.coordinator.stop import stop_job

        _tell_asked(stop_job(plan, options.job))
        return ExitStatus.DONE
    if options.phase == "stage":
        return _stage(plan)
    _tell(start_job(plan, options.job, resume))
    return ExitStatus.DONE


def _stage(plan: Plan) -> ExitStatus:
    """Stage what is admitted; admit first where nothing is yet, or something changed since."""
    from d2lib.coordinator.admit import admitted, check_namespace, run_foreground
    from d2lib.coordinator.inputs import record_inputs
    from d2lib.coordinator.stage import check_recorded, left_whole, refuse_existing, reviewed_tree

    if not left_whole(plan):
        refuse_existing(plan.paths.snapshot)
    reviewed_tree(plan)
    check_namespace(plan)
    try:
        admitted(plan, record_inputs(plan.paths.inputs))
    except Refused as error:
        print(f"admission first: {error}", file=sys.stderr)
        status = run_foreground(plan, "admission")
        if status is not ExitStatus.DONE:
            return status
    status = run_foreground(plan, "stage")
    if status is ExitStatus.DONE:
        print(f"staged {plan.paths.snapshot}: STAGED.json {check_recorded(plan)}")
    return status


def _check_inputs(plan: Plan, tried: bool) -> ExitStatus:
    """CPU admission. The coordinator's is recorded in the output; anyone else's is tried, and nothing of it is kept."""
    from d2lib.coordinator.admit import check_namespace, run_foreground, try_admission
    from d2lib.coordinator.jobs import check_coordinator
    from d2lib.coordinator.stage import reviewed_tree

    reviewed_tree(plan)
    check_namespace(plan)
    why = "with another profile than the commit's"
    if not tried:
        try:
            check_coordinator(plan)
        except Refused as error:
            why = str(error)
        else:
            return run_foreground(plan, "admission")
    print(f"a trial, of which nothing is kept: {why}", file=sys.stderr)
    return try_admission(plan)


def _tell(start: Start) -> None:
    print(f"started {start.session}")
    print(f"  log      {start.coordinator_log}")
    print(f"  output   {start.child_log}")
    print(f"  receipt  {start.receipt}")
    print(f"  watch    tmux attach -r -t '={start.session}'")


def _tell_asked(asked: Asked) -> None:
    start, job = asked.start, asked.start.job
    print(f"asked {job}'s runner (pid {asked.runner}, since {asked.since}) to save its next boundary and end")
    print(f"  watch    tail -f {shlex.quote(str(start.coordinator_log))}")
    print(
        "  ended    when that log's last line says `ended:` (exit 3: saved, can be resumed; exit 0: it was done before)"
    )
    print(f"           and `tmux ls` no longer names {start.session}")
    print(f"  go on    --execute --phase {JOBS[job].phase} --job {job} --resume --attempt {start.resume + 1}")
