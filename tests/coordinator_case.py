"""A small case for the coordinator: a reviewed checkout in git, inputs, a profile, and stand-ins for the notebooks.

The checkout holds this d2lib and a module `papermill` of its own that does what each test's control file says and
leaves real receipts, so that staging, sessions and the order of jobs are tested without any arithmetic.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

import d2lib
from d2lib.coordinator.command import parser, plan_of
from d2lib.coordinator.contract import PROFILE as COMMITTED
from d2lib.coordinator.contract import Plan
from d2lib.coordinator.profile import Profile

LIBRARY = Path(d2lib.__file__).resolve().parent
PROFILE: dict[str, Any] = {
    "host": "localhost",
    "coordinator": "test/coordinator",
    "assembly": None,
    "session_prefix": "d2full",
    "lock_folder": "SET",
    "solos": {"slot-a": {}, "slot-b": {}},
    "jobs": {
        "full-fast": "slot-a",
        "g2-dev": "slot-a",
        "g2-legal": "slot-b",
        "g2-general": "slot-b",
        "g2-finish": "slot-a",
    },
    "memory_limit_gib": 2.0,
    "minimum_free_memory_gib": 0.0,
    "grace_seconds": 20.0,
    "sample_seconds": 0.05,
    "watch_seconds": 0.2,
    "confirm_seconds": 30.0,
    "threads": 1,
    "admission": {
        "demands": {
            "presented_blocks": 128,
            "sample_size": 10,
            "sequences": {"train": 2, "dev": 2, "heldout_legal": 2, "heldout_general": 2},
        }
    },
}

PAPERMILL = """
import json, os, signal, sys, time
from pathlib import Path
import yaml
from d2lib.evidence.layout import parse_output
from d2lib.evidence.ledger import ledger_lock, settle
from d2lib.evidence.receipts import *
from d2lib.evidence.receipts import FinalNotebook, OutputRecord, CellCounts, InputRecord, record_input
from d2lib.evidence.environment import library_sha256
from d2lib.files import canonical_json, sha256_bytes, sha256_file, write_exclusive, record_file

arguments = sys.argv[1:]
notebook, output = [a for a in arguments[:arguments.index("-f")] if a.endswith(".ipynb")]
values = yaml.safe_load(Path(arguments[arguments.index("-f") + 1]).read_text())
phase = Path(notebook).stem
attempt = parse_output(output, phase)
control = Path(values["run"]).parent / "control" / f"{attempt.name}.json"
do = json.loads(control.read_text()) if control.exists() else {}
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
leaked = [name for name in os.environ if name.startswith("GIT")]
print("cuda", repr(os.environ.get("CUDA_VISIBLE_DEVICES")), "git", leaked, flush=True)
until = time.monotonic() + do.get("seconds", 0)
trail = [attempt.root / name for name in do.get("trail", [])]
while (time.monotonic() < until or not all(map(Path.exists, trail))) and not stopped:
    time.sleep(0.02)
    if missing := [path for path in trail if not path.exists()]:
        missing[0].parent.mkdir(exist_ok=True)
        missing[0].touch()
        time.sleep(0.1)
status, message, result = "interrupted" if stopped else "done", None, do.get("result", {})
if phase == "stage" and status == "done":
    from d2lib.coordinator.stage import plan_of, stage
    from d2lib.errors import Refused
    from d2lib.params import StageParams

    try:
        result = {"staged": stage(plan_of(StageParams.model_validate(values), attempt.root))}
    except Refused as error:
        status, message = "refused", str(error)
        print(f"refused: {error}", file=sys.stderr)
made = []
inputs = []
if status == "done":
    for label, text in do.get("files", {}).items():
        name = label.replace("ATTEMPT", f"{attempt.name}/attempt-{attempt.number}")
        label = "admission" if label == "ATTEMPT/admitted.json" else name
        path = attempt.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_exclusive(path, text.encode())
        record = record_file(path)
        made.append(OutputRecord(label=label, path=name, size=record.size, sha256=str(record.sha256)))
    if phase == "admission":
        inputs = [record_input(name, Path(values[name]), values[name]) for name in ("assembly", "pilot")]
attempt.folder.mkdir(parents=True, exist_ok=True)
data = b"{}"
digest = str(sha256_bytes(data))
write_exclusive(attempt.file("receipt.ipynb"), data)
verdict = do.get("verdict") if status == "done" else None
receipt = Receipt(
    namespace=attempt.namespace, phase=phase, job=attempt.job, attempt=attempt.number, started=now(), ended=now(),
    notebook=FinalNotebook(path=notebook, source_sha256=str(sha256_file(Path(notebook))), cells_sha256=digest,
                           receipt_sha256=digest),
    parameters=values, parameters_sha256=str(sha256_bytes(canonical_json(values))), d2lib_version="0",
    d2lib_sha256=str(library_sha256()), environment={}, environment_sha256=digest, seconds=0.0, status=status,
    verdict=verdict, exit_status=int(exit_status(status, verdict)), message=message,
    cells=CellCounts(code=1, ran=1, errors=0), inputs=inputs, outputs=made, parents=[],
    result=result if status == "done" else None,
)
with ledger_lock(attempt.root):
    write_exclusive(attempt.file("receipt.json"), to_bytes(receipt))
    settle(attempt.root)
raise SystemExit(receipt.exit_status)
"""


def git(folder: Path, *arguments: str) -> str:
    """Run git in a test's repository."""
    done = subprocess.run(
        (
            "git",
            "-C",
            str(folder),
            "-c",
            "user.name=t",
            "-c",
            "user.email=t@t",
            "-c",
            "commit.gpgsign=false",
            *arguments,
        ),
        env={"PATH": os.environ["PATH"], "HOME": str(folder)},
        capture_output=True,
        check=True,
    )
    return done.stdout.decode().strip()


def commit(folder: Path, message: str = "a commit") -> str:
    """Commit everything; returns the commit's id."""
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", message)
    return git(folder, "rev-parse", "HEAD")


def make_source(folder: Path, profile: dict[str, Any], *, library: bool = True) -> str:
    """A new repository with d2lib, stand-in notebooks, papermill and the profile; returns its commit."""
    folder.mkdir(parents=True)
    git(folder, "init", "-q", "-b", "main", "--template=")
    if library:
        for path in (
            path
            for kind in ("", "evidence/", "coordinator/", "admission/", "data/", "gates/", "train/")
            for path in LIBRARY.glob(f"{kind}*.py")
        ):
            place = folder / "d2lib" / path.relative_to(LIBRARY)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, place)
    else:
        (folder / "d2lib").mkdir()
        (folder / "d2lib" / "__init__.py").write_text("")
    (folder / ".gitignore").write_text("__pycache__/\n")
    (folder / "papermill").mkdir()
    (folder / "papermill" / "__init__.py").write_text("")
    (folder / "papermill" / "__main__.py").write_text(PAPERMILL)
    (folder / "notebooks").mkdir()
    for name in ("admission", "stage", "train", "g2", "finish"):
        (folder / "notebooks" / f"{name}.ipynb").write_text("{}")
    (folder / COMMITTED).parent.mkdir(parents=True)
    (folder / COMMITTED).write_text(yaml.safe_dump(profile))
    run = folder / "run.sh"
    run.write_text("#!/bin/sh\n")
    run.chmod(0o755)
    made = commit(folder)
    git(folder, "gc", "-q")
    return made


def make_inputs(folder: Path, namespace: str = "pilot-1") -> dict[str, Path]:
    """Small files in the place of the inputs."""
    places = {
        "assembly": folder / "assembly",
        "pilot_source": folder / "pilot" / "repo",
        "pilot_receipt": folder / "pilot" / "receipt.json",
        "g1": folder / "g1.json",
        "k2_dev": folder / "k2" / "dev.k2_drafts.jsonl",
        "k2_legal": folder / "k2" / "heldout_legal.k2_drafts.jsonl",
        "k2_general": folder / "k2" / "heldout_general.k2_drafts.jsonl",
    }
    for name, path in places.items():
        if name in ("assembly", "pilot_source"):
            (path / "shards").mkdir(parents=True)
            (path / "MANIFEST.json").write_text("{}")
            (path / "shards" / "a.safetensors").write_bytes(b"rows of a")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{name}\n")
    places["pilot_receipt"].write_text(f'{{"namespace": "{namespace}"}}')
    return places


@dataclass
class Case:
    """One case on disk: its flags and where things are."""

    folder: Path
    source: Path
    commit: str
    inputs: dict[str, Path]
    namespace: str = "pilot-1"

    @property
    def snapshot(self) -> Path:
        return self.folder / "snapshots" / f"{self.namespace}-full"

    @property
    def output(self) -> Path:
        return self.folder / "runs" / f"{self.namespace}-full"

    @property
    def profile(self) -> Path:
        return self.source / COMMITTED

    def flags(self, *more: str) -> list[str]:
        """The command line."""
        places = {"source": self.source, "snapshot": self.snapshot, "output": self.output, **self.inputs}
        named = [part for name, path in places.items() for part in (f"--{name.replace('_', '-')}", str(path))]
        return [*named, "--commit", self.commit, *more]

    def plan(self) -> Plan:
        return plan_of(parser().parse_args(self.flags("--check-inputs")))

    def control(self, step: str, **what: Any) -> None:
        """What the stand-in of PHASE-JOB does at its next run."""
        import json

        folder = self.output.parent / "control"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{step}.json").write_text(json.dumps(what))


def make_case(folder: Path, profile: dict[str, Any] | None = None, *, library: bool = True) -> Case:
    """Checkout, inputs and control files; nothing is staged."""
    values = PROFILE | {"lock_folder": str(folder / "locks")} | (profile or {})
    Profile.model_validate(values)
    source = folder / "source"
    case = Case(folder, source, make_source(source, values, library=library), make_inputs(folder / "inputs"))
    (folder / "snapshots").mkdir()
    case.control("admission", files={"ATTEMPT/admitted.json": '{"identities":{},"recipe":{"objective":"ACE"}}\n'})
    updates = {"updates": 3, "total_updates": 3}
    case.control("train-full-fast", files={"full-fast.pt": "weights"}, result=updates)
    for job, split in (("dev", "dev"), ("legal", "heldout_legal"), ("general", "heldout_general")):
        case.control(f"g2-{job}", files={f"{split}.json": split}, verdict="PASS")
    case.control("finish-g2-finish", files={"g2.json": "g2"}, verdict="PASS")
    return case


def wait_until(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    """The condition's first true value; fails the test when it does not come."""
    until = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > until:
            raise AssertionError(f"did not happen within {seconds} s: {condition}")
        time.sleep(0.02)
    return value


def is_gone(pid: int) -> bool:
    """Whether a process has ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@contextmanager
def private_tmux() -> Iterator[Path]:
    """A tmux of the test's own, on a socket with a short path; nothing of it is left afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="d2t", dir="/tmp"))
    before = os.environ.get("TMUX_TMPDIR")
    os.environ["TMUX_TMPDIR"] = str(folder)
    try:
        yield folder
    finally:
        tmux("kill-server")
        if before is None:
            del os.environ["TMUX_TMPDIR"]
        else:
            os.environ["TMUX_TMPDIR"] = before
        shutil.rmtree(folder)


def tmux(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Run tmux on the test's socket."""
    environment = {"PATH": os.environ["PATH"], "TMUX_TMPDIR": os.environ["TMUX_TMPDIR"]}
    return subprocess.run(("tmux", *arguments), env=environment, capture_output=True, check=False)
