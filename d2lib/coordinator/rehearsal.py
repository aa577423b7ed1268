"""The drill's props: a checkout, a power logger, a tmux server, and full runs to type commands at."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from d2lib.coordinator import sessions
from d2lib.coordinator.children import clean_environment, run
from d2lib.coordinator.contract import JOBS, K2_FLAGS, PROFILE, SUFFIX, Paths, Plan, git_command
from d2lib.coordinator.lease import lock_path, read_holder
from d2lib.coordinator.profile import Job, load_profile
from d2lib.coordinator.receipts import done_receipt
from d2lib.errors import Refused, Unexpected
from d2lib.evidence.environment import COORDINATOR
from d2lib.files import read_json
from d2lib.params import PilotDemands

WHO = "drill/coordinator"
LOGGER = "drill-powerlog"
PATIENCE = 900.0
"""Seconds that any one step may take."""
_NEEDED = ("d2lib", "notebooks", "params")


class Run:
    """One full run of the drill: its folders, and the coordinator who types commands at it."""

    def __init__(self, folder: Path, source: Path, commit: str, pilot: Path) -> None:
        self.folder = folder
        self.source = source
        namespace = pilot.name + SUFFIX
        self.snapshot = folder / "snapshots" / namespace
        self.output = folder / "runs" / namespace
        self.inputs = set_apart(find_inputs(pilot), folder / "inputs")
        for made in (self.snapshot.parent, self.output.parent):
            made.mkdir(parents=True)
        paths = Paths(source=source, commit=commit, snapshot=self.snapshot, output=self.output, **self.inputs)
        self.plan = Plan(paths, load_profile(source / PROFILE), PROFILE)

    def type(self, *more: str, who: str | None = WHO) -> tuple[int, str]:
        """`python -m d2lib.full_stage` with this run's paths; returns its exit status and what it said."""
        paths = self.plan.paths
        flags = {"source": self.source, "commit": paths.commit, "snapshot": self.snapshot, "output": self.output}
        named = [part for name, value in (flags | self.inputs).items() for part in (_flag(name), str(value))]
        environment = clean_environment() | {"PYTHONPATH": str(self.source), "PYTHONDONTWRITEBYTECODE": "1"}
        if who is not None:
            environment[COORDINATOR] = who
        done = subprocess.run(
            [sys.executable, "-m", "d2lib.full_stage", *named, *more],
            cwd=self.source,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    def start(self, job: Job, attempt: int = 0) -> tuple[int, str]:
        """--execute one job, resumed when `attempt` is not 0."""
        resume = ("--resume", "--attempt", str(attempt)) if attempt else ()
        return self.type("--execute", "--phase", JOBS[job].phase, "--job", job, *resume)

    def stop(self, job: Job) -> tuple[int, str]:
        """--execute --stop one job."""
        return self.type("--execute", "--stop", "--job", job)

    def holder(self, job: Job) -> dict[str, Any]:
        """Who holds the job's solo: runner and child."""
        solo = self.plan.profile.jobs[job]
        return read_holder(lock_path(self.plan.profile.locks, solo)) or {}

    def ended(self, job: Job, attempt: int = 0) -> str:
        """Wait for a job's session to end; returns its log's last line after the job's name."""
        session = self.plan.session(job, attempt)
        wait_for(lambda: not sessions.exists(session), f"the end of {session}")
        lines = (self.plan.logs / f"{session}.coordinator.log").read_text().splitlines()
        return lines[-1].split(" ", 2)[2] if lines else "nothing"

    def whole(self, job: Job, attempt: int = 0) -> str:
        """Start a job and wait for its end; returns what came of it."""
        status, said = self.start(job, attempt)
        return self.done(job, self.ended(job, attempt)) if status == 0 else f"exit {status}: {said}"

    def done(self, job: Job, happened: str) -> str:
        """What happened, with the words `a done receipt` before it when there is one."""
        found = done_receipt(self.output, JOBS[job].receipts)
        return happened if found is None else f"a done receipt; {happened}"

    def checkpoints(self) -> list[Path]:
        """Training's saved boundaries, in order."""
        return sorted((self.output / "full-fast.checkpoints").glob("step-*.pt"))

    def requests(self, split: str) -> list[Path]:
        """A split's completed requests."""
        found = sorted((self.output / f"{split}.requests").glob("*.json"))
        return [path for path in found if path.name != "contract.json" and not path.name.startswith(".")]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def wait_for(condition: Callable[[], Any], what: str, patience: float = PATIENCE) -> Any:
    """The condition's first true value; raises Unexpected when it does not come."""
    until = time.monotonic() + patience
    while not (value := condition()):
        if time.monotonic() > until:
            raise Unexpected(f"{what} did not come", expected=f"within {patience:g} s")
        time.sleep(0.02)
    return value


def find_inputs(pilot: Path) -> dict[str, Path]:
    """The coordinator's inputs in a run root of the chain (capture, g1, pilot); raises Refused when one is missing."""
    if done_receipt(pilot, "pilot") is None:
        raise Refused("the run has no pilot", expected="a receipt of pilot with status done", where=pilot)
    places = {
        "assembly": pilot / "assembly",
        "pilot_source": pilot / "pilot" / "repo",
        "pilot_receipt": pilot / "pilot" / "receipt.json",
        "g1": pilot / "g1" / "g1.json",
        **{flag: pilot / "assembly" / "k2" / f"{split}.k2_drafts.jsonl" for split, flag in K2_FLAGS.items()},
    }
    for name, path in places.items():
        if not path.exists():
            raise Refused(f"the run has no {name}", where=path, remedy="run the chain up to the pilot first")
    return places


def set_apart(places: dict[str, Path], folder: Path) -> dict[str, Path]:
    """Copy the pilot's source and, beside G1, the trajectories to where only the command line says, as on the host."""
    moved = {}
    for name in ("pilot_source", "g1", "k2_dev", "k2_legal", "k2_general"):
        place = folder / ("source" if name == "pilot_source" else "g1") / places[name].name
        place.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if places[name].is_dir() else shutil.copy)(places[name], place)
        moved[name] = place
    return places | moved


def asked_of(pilot: Path) -> PilotDemands:
    """What a run's pilot was asked for, from its receipt in the ledger: the drill's profile asks for the same."""
    found = done_receipt(pilot, "pilot")
    if found is None:
        raise Refused("the run has no pilot", expected="a receipt of pilot with status done", where=pilot)
    sequences = read_json(pilot / "assembly" / "MANIFEST.json")["sequences"]
    return PilotDemands(
        presented_blocks=found[1].parameters["presented_blocks"],
        sample_size=found[1].parameters["sample_size"],
        sequences=Counter(entry["split"] for entry in sequences),
    )


def pilots_threads(root: Path) -> int:
    """The threads that a run's pilot computed with, which full training has to have; 1 where none are recorded."""
    value = read_json(root / "pilot" / "receipt.json")
    return int((value.get("arithmetic") or {}).get("threads", 1))


def make_checkout(checkout: Path, folder: Path, demands: PilotDemands, threads: int = 1) -> str:
    """A clean git checkout of the running tree with the drill's own profile in the place of the production's; returns
    its commit."""
    folder.mkdir()
    for name in _tracked(checkout):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(checkout / name, folder / name)
    profile: dict[str, Any] = {
        "host": "localhost",
        "coordinator": WHO,
        "assembly": None,
        "session_prefix": "d2full",
        "lock_folder": str(folder.parent / "locks"),
        "solos": {"slot-a": {}, "slot-b": {}},
        "jobs": {job: "slot-b" if job in ("g2-legal", "g2-general") else "slot-a" for job in JOBS},
        "power_logger": LOGGER,
        "memory_limit_gib": 8.0,
        "minimum_free_memory_gib": 0.5,
        "grace_seconds": 120.0,
        "sample_seconds": 0.2,
        "watch_seconds": 0.5,
        "save_every": 0.5,
        "threads": threads,
        "admission": {"demands": demands.model_dump(mode="json")},
    }
    (folder / PROFILE).parent.mkdir(parents=True, exist_ok=True)
    (folder / PROFILE).write_text(yaml.safe_dump(profile))
    git = ("git", "-C", str(folder), "-c", "user.name=drill", "-c", "user.email=drill@localhost")
    for command in (
        (*git, "init", "-q", "--template="),
        (*git, "add", "--all", "--force"),
        (*git, "-c", "commit.gpgsign=false", "commit", "-q", "-m", "the reviewed commit"),
    ):
        _must(command)
    return _must((*git, "rev-parse", "HEAD"))


def _tracked(checkout: Path) -> list[str]:
    """The files that git tracks, as they are now; without git, those of the folders that a run needs."""
    listed = run(git_command(checkout, "ls-files", "-z"))
    if listed.returncode == 0:
        names = [name for name in listed.stdout.decode().split("\0") if name]
    else:
        files = [path for name in _NEEDED for path in sorted((checkout / name).rglob("*"))]
        names = [path.relative_to(checkout).as_posix() for path in files if "__pycache__" not in path.parts]
    return [name for name in names if (checkout / name).is_file()]


def _must(command: Sequence[str]) -> str:
    result = run(command)
    if result.returncode:
        raise Unexpected(f"{shlex.join(command)} failed", found=result.stderr.decode("utf-8", "replace").strip())
    return result.stdout.decode().strip()


def power_logger(present: bool) -> None:
    """Start or end the stand-in for the power logger, on the drill's own tmux server."""
    if present:
        _must(("tmux", "new-session", "-d", "-s", LOGGER, "--", "sleep", "86400"))
    else:
        _must(("tmux", "kill-session", "-t", f"={LOGGER}"))
        wait_for(lambda: not sessions.exists(LOGGER), "the power logger's end", 10)


@contextmanager
def changed(path: Path) -> Iterator[None]:
    """A file with one byte more for a while; put back with its mode."""
    before, mode = path.read_bytes(), path.stat().st_mode
    path.chmod(0o600)
    path.write_bytes(before + b" ")
    try:
        yield
    finally:
        path.write_bytes(before)
        path.chmod(mode)


@contextmanager
def private_tmux(folder: Path) -> Iterator[None]:
    """A tmux server of the drill's own, ended with everything in it when the drill ends."""
    folder.mkdir()
    before = os.environ.get("TMUX_TMPDIR")
    os.environ["TMUX_TMPDIR"] = str(folder)
    sessions.check_socket()
    try:
        yield
    finally:
        run(("tmux", "kill-server"))
        if before is None:
            del os.environ["TMUX_TMPDIR"]
        else:
            os.environ["TMUX_TMPDIR"] = before
