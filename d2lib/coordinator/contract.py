"""The command contract: from the coordinator's flags and the profile to every name, file and command of a full run.

Pure: this module reads nothing and starts nothing. What it renders is printed by the dry render, stands in STAGED.json,
and is rendered again and compared before any later phase starts.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from d2lib.coordinator.profile import Job, Profile
from d2lib.errors import Refused
from d2lib.evidence.layout import RECEIPT
from d2lib.params import Split

Phase = Literal["stage", "full-train", "full-g2", "finish"]
PHASES: tuple[Phase, ...] = get_args(Phase)
Foreground = Literal["admission", "stage"]
SUFFIX = "-full"
PROFILE = "params/dsv41/coordinator.yaml"
"""The coordinator's profile of a commit, by its path in it. What is recorded or started goes by it and by no other."""
K2_FLAGS: dict[Split, str] = {"dev": "k2_dev", "heldout_legal": "k2_legal", "heldout_general": "k2_general"}
"""Split → the flag that names its live trajectory."""
INPUTS = ("assembly", "pilot_source", "pilot_receipt", "g1", *K2_FLAGS.values())
"""The flags that name inputs, in the order of the command line."""
_NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class JobSpec:
    """One job: the phase that it belongs to, its notebook, and the split that it scores."""

    phase: Phase
    notebook: str
    receipts: str
    """The folder of its receipts under the run root, PHASE-JOB."""
    split: str | None
    child_log: str


JOBS: dict[Job, JobSpec] = {
    "full-fast": JobSpec("full-train", "train", "train-full-fast", None, "full-fast.log"),
    "g2-dev": JobSpec("full-g2", "g2", "g2-dev", "dev", "full-g2-dev.log"),
    "g2-legal": JobSpec("full-g2", "g2", "g2-legal", "heldout_legal", "full-g2-heldout_legal.log"),
    "g2-general": JobSpec("full-g2", "g2", "g2-general", "heldout_general", "full-g2-heldout_general.log"),
    "g2-finish": JobSpec("finish", "finish", "finish-g2-finish", None, "finish.log"),
}
"""Every job of a full run, in the order in which the coordinator starts them."""


@dataclass(frozen=True)
class Paths:
    """What the command line names; every path absolute."""

    source: Path
    commit: str
    snapshot: Path
    output: Path
    assembly: Path
    pilot_source: Path
    pilot_receipt: Path
    g1: Path
    k2_dev: Path
    k2_legal: Path
    k2_general: Path

    def __post_init__(self) -> None:
        if not _COMMIT.fullmatch(self.commit):
            raise Refused(
                "--commit is not a full commit id",
                expected="40 lower-case hex digits",
                found=self.commit,
                remedy="give what `git rev-parse HEAD` prints in the reviewed checkout",
            )
        for name in ("source", "snapshot", "output", *INPUTS):
            if any(ord(character) < 32 or ord(character) == 127 for character in str(getattr(self, name))):
                raise Refused(f"--{name.replace('_', '-')} has a control character", found=repr(getattr(self, name)))
        if self.pilot_receipt.name != RECEIPT:
            raise Refused("--pilot-receipt is no receipt", expected=f"a file named {RECEIPT}", found=self.pilot_receipt)
        name = self.output.name
        if self.snapshot.name != name or not name.endswith(SUFFIX) or name == SUFFIX:
            raise Refused(
                "--snapshot and --output are not named after the pilot",
                expected=f"both end in the pilot's namespace + {SUFFIX}",
                found=f"{self.snapshot.name} and {name}",
            )
        if not _NAMESPACE.fullmatch(name):
            raise Refused(
                "a namespace that tmux would change in session names",
                expected="letters, digits, dashes and underscores",
                found=name,
            )
        for one, other in (("snapshot", "output"), ("output", "snapshot")):
            if self._within(one, other):
                raise Refused(f"--{one} lies in --{other}", expected="two separate folders", found=getattr(self, one))
        for place in ("snapshot", "output"):
            for kept in INPUTS:
                if self._within(place, kept):
                    raise Refused(
                        f"--{place} lies in --{kept.replace('_', '-')}",
                        expected="a folder outside every input",
                        found=getattr(self, place),
                    )

    def _within(self, one: str, other: str) -> bool:
        inner, outer = getattr(self, one), getattr(self, other)
        return bool(inner == outer or outer in inner.parents)

    @property
    def namespace(self) -> str:
        """The full run's namespace: the pilot's + `-full`."""
        return self.output.name

    @property
    def pilot_namespace(self) -> str:
        """The namespace that the pilot's receipt must have."""
        return self.namespace.removesuffix(SUFFIX)

    @property
    def inputs(self) -> dict[str, Path]:
        """Flag → path of every input."""
        return {name: getattr(self, name) for name in INPUTS}


@dataclass(frozen=True)
class Start:
    """One start of one job: everything that will be on disk and on the command line."""

    job: Job
    resume: int
    """0 for the first start, N for --resume --attempt N."""
    attempt: int
    """The receipt's number. A start that left no receipt (it never got as far) uses up none, so attempt ≤ resume+1."""
    session: str
    script: Path
    script_text: str
    coordinator_log: Path
    child_log: Path
    parameters: Path
    receipt: Path
    runner: tuple[str, ...]
    """The locked runner and, after `--`, the command that it runs."""

    @property
    def tmux(self) -> tuple[str, ...]:
        """Starts the session; tmux executes what stands after `--` itself, without a shell. When it really runs,
        `env -i NAME=VALUE…` with the coordinator's allowlisted variables is put before the script, because a tmux
        server gives its sessions the environment in which the server was once started."""
        folder = str(self.script.parent)
        return ("tmux", "new-session", "-d", "-s", self.session, "-c", folder, "--", "/bin/sh", str(self.script))


@dataclass(frozen=True)
class Plan:
    """Flags and profile together."""

    paths: Paths
    profile: Profile
    profile_name: str
    """The profile's path inside the source, POSIX."""
    python: str = sys.executable

    @property
    def repo(self) -> Path:
        """The commit's files in the snapshot."""
        return self.paths.snapshot / "repo"

    @property
    def logs(self) -> Path:
        """The snapshot's logs."""
        return self.paths.snapshot / "logs"

    @property
    def staged(self) -> Path:
        """STAGED.json of the snapshot."""
        return self.paths.snapshot / "STAGED.json"

    def known(self, source: Path) -> dict[str, str]:
        """`pins` and `policy` → the file's path in a source tree, where the profile names one."""
        names = {"pins": self.profile.pins, "policy": self.profile.policy}
        return {name: str(source / path) for name, path in names.items() if path is not None}

    def session(self, job: Job, resume: int = 0) -> str:
        """The session's exact name, which is the script's and the log's too."""
        name = f"{self.profile.session_prefix}-{self.paths.namespace}-{job}"
        return name if resume == 0 else f"{name}-attempt-{resume}"

    def parameters_file(self, job: Job, resume: bool) -> Path:
        """Where a job's parameters stand in the snapshot; only training is told that it is resumed."""
        resume = resume and JOBS[job].notebook == "train"
        return self.paths.snapshot / "parameters" / f"{job}{'.resume' if resume else ''}.yaml"

    def parameter_files(self) -> dict[str, str]:
        """Path from the snapshot → text of every parameter file."""
        return {
            self.parameters_file(job, resume).relative_to(self.paths.snapshot).as_posix(): parameters_text(
                job_parameters(self, job, resume=resume)
            )
            for job in JOBS
            for resume in (False, True)
        }

    def start(self, job: Job, resume: int = 0, attempt: int | None = None) -> Start:
        """One start of a job; `attempt` is the receipt's number, by default resume + 1."""
        spec = JOBS[job]
        attempt = resume + 1 if attempt is None else attempt
        session = self.session(job, resume)
        solo = self.profile.jobs[job]
        receipt = self.paths.output / spec.receipts / f"attempt-{attempt}" / "receipt.ipynb"
        parameters = self.parameters_file(job, resume > 0)
        child_log = self.logs / spec.child_log
        runner = (
            *(self.python, "-m", "d2lib.coordinator.locked"),
            *("--profile", str(self.repo / self.profile_name)),
            *("--solo", solo),
            *("--job", job),
            *("--log", str(child_log)),
            *("--receipt", str(receipt.with_name("receipt.json"))),
            *("--assembly", str(self.paths.assembly)),
            "--",
            *notebook_command(self.python, self.repo, spec.notebook, receipt, parameters),
        )
        script = self.paths.snapshot / f"{session}.sh"
        log = self.logs / f"{session}.coordinator.log"
        return Start(
            job,
            resume,
            attempt,
            session,
            script,
            self._script(session, log, runner),
            log,
            child_log,
            parameters,
            receipt,
            runner,
        )

    def _script(self, session: str, log: Path, runner: tuple[str, ...]) -> str:
        repo = str(self.repo)
        exports = {
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "OMP_NUM_THREADS": str(self.profile.threads),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": repo,
            "PYTHONUNBUFFERED": "1",
        }
        lines = [
            "#!/bin/sh",
            f"# {session}: commit {self.paths.commit}",
            "set -eu",
            "umask 077",
            "# stdin stays the terminal: tmux ends a session in which nothing holds it",
            f"exec >>{shlex.quote(str(log))} 2>&1",
            f"cd {shlex.quote(repo)}",
            *(f"export {name}={shlex.quote(value)}" for name, value in exports.items()),
            f"exec {shlex.join(runner)}",
        ]
        return "\n".join(lines) + "\n"

    def foreground(self, phase: Foreground, attempt: int, parameters: Path) -> tuple[str, ...]:
        """The command of a phase that runs in the foreground from the reviewed checkout, on the CPU."""
        receipt = self.paths.output / phase / f"attempt-{attempt}" / "receipt.ipynb"
        return notebook_command(self.python, self.paths.source, phase, receipt, parameters)

    def contract(self) -> dict[str, Any]:
        """The contract as STAGED.json holds it: every name, parameter and command, plain JSON."""
        jobs: dict[str, Any] = {}
        for job, spec in JOBS.items():
            starts = {"first": self.start(job), "resume": self.start(job, 1)}
            jobs[job] = {
                "phase": spec.phase,
                "solo": self.profile.jobs[job],
                "child_log": spec.child_log,
                **{
                    name: {
                        "session": start.session,
                        "receipt": str(start.receipt),
                        "parameters": str(start.parameters),
                        "command": list(start.runner),
                        "tmux": list(start.tmux),
                        "script": start.script_text,
                    }
                    for name, start in starts.items()
                },
            }
        return {
            "arguments": {
                "source": str(self.paths.source),
                "commit": self.paths.commit,
                "snapshot": str(self.paths.snapshot),
                "output": str(self.paths.output),
                **{name: str(path) for name, path in self.paths.inputs.items()},
            },
            "profile": {"path": self.profile_name, **self.profile.model_dump(mode="json")},
            "python": self.python,
            "parameters": self.parameter_files(),
            "jobs": jobs,
        }


def job_parameters(plan: Plan, job: Job | Foreground, *, resume: bool = False) -> dict[str, Any]:
    """The notebook parameters of a job: the one place where they are built.

    There is no recipe among them: full training takes it from the admitted pilot.
    """
    paths, profile = plan.paths, plan.profile
    run: dict[str, Any] = {"run": str(paths.output)}
    data = {
        "assembly": str(paths.assembly),
        "k2": {split: str(getattr(paths, flag)) for split, flag in K2_FLAGS.items()},
    }
    known = plan.known(paths.source if job in ("admission", "stage") else plan.repo)
    if job == "admission":
        pilot = {"pilot": str(paths.pilot_receipt.parent), "pilot_source": str(paths.pilot_source), "g1": str(paths.g1)}
        return run | data | pilot | profile.admission.model_dump(mode="json") | known
    if job == "stage":
        places = {name: str(getattr(paths, name)) for name in ("source", "commit", "snapshot", *INPUTS)}
        return run | places
    spec = JOBS[job]
    shared = run | {"output": "."} | {name: path for name, path in known.items() if name == "policy"}
    if spec.notebook == "finish":
        return shared
    device = "cpu" if profile.solo_of(job)[1].card is None else "cuda"
    shared |= data | {"threads": profile.threads, "device": device}
    if spec.notebook == "g2":
        return shared | {"split": spec.split}
    return shared | known | {"resume": resume, "save_every": profile.save_every}


class _Quoted(yaml.SafeDumper):
    """Writes every string in quotes: a commit such as 7e12… would otherwise be read as a number."""


_Quoted.add_representer(str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"'))


def parameters_text(parameters: dict[str, Any]) -> str:
    """The YAML of a parameter file, the same bytes every time; any version of YAML reads the same values from it."""
    return yaml.dump(parameters, Dumper=_Quoted, sort_keys=True, allow_unicode=True, default_flow_style=False)


def notebook_command(python: str, repo: Path, notebook: str, receipt: Path, parameters: Path) -> tuple[str, ...]:
    """Papermill's command line for one phase's notebook."""
    output = str(receipt).replace("{", "{{").replace("}", "}}")  # papermill formats its output's path
    return (
        *(python, "-m", "papermill", "--engine", "d2", "--log-output", "--no-progress-bar"),
        *(str(repo / "notebooks" / f"{notebook}.ipynb"), output),
        *("-f", str(parameters)),
    )


def git_command(source: Path, *arguments: str) -> tuple[str, ...]:
    """A git command on the source that runs no hook or monitor, writes no index and follows no replacement."""
    return (
        *("git", "-C", str(source), "--no-replace-objects", "--no-optional-locks", "--literal-pathspecs"),
        *("-c", "core.fsmonitor=false"),
        *arguments,
    )


def git_commands(paths: Paths) -> dict[str, tuple[str, ...]]:
    """Every git command of staging, by what it is for."""
    return {
        "top": git_command(paths.source, "rev-parse", "--show-toplevel"),
        "type": git_command(paths.source, "cat-file", "-t", paths.commit),
        "head": git_command(paths.source, "rev-parse", "--verify", "HEAD"),
        "status": git_command(
            paths.source, "status", "--porcelain=v1", "-z", "--untracked-files=all", "--ignore-submodules=none"
        ),
        "tree": git_command(paths.source, "ls-tree", "-r", "-z", "--full-tree", paths.commit),
        "archive": git_command(paths.source, "archive", "--format=tar", paths.commit),
    }


def absolute(path: str) -> Path:
    """A command line's path, absolute; nothing is read."""
    return Path(os.path.abspath(os.path.expanduser(path)))
