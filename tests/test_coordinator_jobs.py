"""Sessions and the order of jobs, with real tmux and stand-ins for the notebooks that leave real receipts."""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from coordinator_case import PROFILE, Case, commit, is_gone, make_case, private_tmux, tmux, wait_until

from d2lib.coordinator import jobs, sessions
from d2lib.coordinator.command import main, parser, plan_of
from d2lib.coordinator.jobs import check_coordinator
from d2lib.coordinator.lease import hold, lock_path, read_holder
from d2lib.coordinator.profile import Job
from d2lib.errors import Refused
from d2lib.evidence.ledger import read_ledger
from d2lib.evidence.status import status
from d2lib.strict import read_yaml

PHASE: dict[Job, str] = {
    "full-fast": "full-train",
    "g2-dev": "full-g2",
    "g2-legal": "full-g2",
    "g2-general": "full-g2",
    "g2-finish": "finish",
}


class Host:
    """The coordinator at a staged case: types commands, and looks at what came of them."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def type(self, *more: str, who: str | None = "test/coordinator") -> tuple[int, str]:
        """The command from the reviewed checkout, in this process: (exit status, what it said)."""
        said = io.StringIO()
        mask = os.umask(0o022)
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(said), redirect_stderr(said):
            for module in ("d2lib.coordinator.stage", "d2lib.evidence.environment"):
                patch.setattr(f"{module}.library_folder", lambda: self.case.source / "d2lib")
            patch.setattr(jobs, "trained_updates", lambda plan: 3)  # of a checkpoint that is none here
            patch.setenv("GIT_DIR", "/leak")
            patch.delenv("D2_COORDINATOR", raising=False)
            if who is not None:
                patch.setenv("D2_COORDINATOR", who)
            status = main(self.case.flags(*more))
        os.umask(mask)
        return status, said.getvalue()

    def type_in_a_shell(self, *more: str) -> tuple[int, str]:
        """The same as `python -m d2lib.full_stage`, with the checkout's own library."""
        environment = os.environ | {"PYTHONPATH": str(self.case.source), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "d2lib.full_stage", *self.case.flags(*more)],
            cwd=self.case.source,
            env=environment | {"D2_COORDINATOR": "test/coordinator", "GIT_DIR": "/leak"},
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout + done.stderr

    def start(self, job: Job, *more: str) -> tuple[int, str]:
        return self.type("--execute", "--phase", PHASE[job], "--job", job, *more)

    def name(self, job: str) -> str:
        return f"d2full-pilot-1-full-{job}"

    def log(self, job: str) -> str:
        return (self.case.snapshot / "logs" / f"{self.name(job)}.coordinator.log").read_text()

    def child_log(self, name: str) -> str:
        path = self.case.snapshot / "logs" / name
        return path.read_text() if path.exists() else ""

    def wait(self, job: str) -> str:
        """Wait for a job's session to end; returns the coordinator's log."""
        wait_until(lambda: not sessions.exists(self.name(job)), 60)
        return self.log(job)

    def done(self, job: Job) -> None:
        status, said = self.start(job)
        assert status == 0, said
        assert "ended: exit 0" in self.wait(job)


@pytest.fixture
def socket() -> Iterator[Path]:
    with private_tmux() as folder:
        yield folder


@pytest.fixture
def host(tmp_path: Path, socket: Path) -> Host:
    made = Host(make_case(tmp_path))
    status, said = made.type("--check-inputs")
    assert status == 0, said
    status, said = made.type("--execute", "--phase", "stage")
    assert status == 0, said
    assert "STAGED.json sha256:" in said
    return made


def test_the_whole_procedure(host: Host) -> None:
    """Stage to verdict, with what refuses on the way: out of turn, twice, and what is done."""
    case = host.case
    jobs: tuple[Job, ...] = ("g2-dev", "g2-finish")
    for job in jobs:
        status, said = host.start(job)
        assert (status, "full-fast is not done" in said) == (2, True), said
    status, said = host.type_in_a_shell("--execute", "--phase", "full-train", "--job", "full-fast")
    assert (status, said.splitlines()[0]) == (0, f"started {host.name('full-fast')}"), said
    assert "ended: exit 0" in host.wait("full-fast")
    assert (case.output / "full-fast.pt").read_text() == "weights"
    script = case.snapshot / f"{host.name('full-fast')}.sh"
    assert stat.S_IMODE(script.stat().st_mode) == 0o500
    child = (case.snapshot / "logs" / "full-fast.log").read_text()
    assert "full-fast cuda '' git []" in child  # no card on a CPU slot, nothing of git's
    status, said = host.start("full-fast")
    assert status == 2
    assert "full-fast is done and never reruns" in said
    status, said = host.start("full-fast", "--resume", "--attempt", "1")
    assert (status, "full-fast is done and never reruns" in said) == (2, True)

    status, said = host.start("g2-general")
    assert (status, "g2-legal is not done; expected: heldout_legal.json" in said) == (2, True), said
    case.control("g2-legal", seconds=60, files={"heldout_legal.json": "x"}, verdict="FAIL")
    assert host.start("g2-legal")[0] == 0
    status, said = host.start("g2-general")
    assert status == 2
    assert "g2-legal holds the solo that g2-general needs" in said
    host.done("g2-dev")  # meanwhile, on the other slot
    holder = read_holder(lock_path(case.folder / "locks", "slot-b"))
    assert holder is not None
    wait_until(lambda: "cuda" in host.child_log("full-g2-heldout_legal.log"))
    os.kill(holder["pid"], signal.SIGTERM)
    assert "ended: exit 3 (interrupted at a saved boundary; can be resumed, after: SIGTERM" in host.wait("g2-legal")
    status, said = host.start("g2-general")
    assert (status, "g2-legal is not done" in said) == (2, True), said
    case.control("g2-legal", files={"heldout_legal.json": "x"}, verdict="FAIL")
    status, said = host.start("g2-legal")
    assert status == 2
    assert "the job was started before under this name" in said
    assert "--resume --attempt 1" in said
    status, said = host.start("g2-legal", "--resume", "--attempt", "1")
    assert status == 0, said
    assert "ended: exit 1 (a verdict of FAIL or INCONCLUSIVE)" in host.wait("g2-legal-attempt-1")
    assert (case.output / "g2-legal" / "attempt-2" / "receipt.json").exists()

    status, said = host.start("g2-finish")
    assert (status, "g2-general is not done" in said) == (2, True)
    # What a runner leaves that is killed between g2-legal's receipt and its own end.
    lock_path(case.folder / "locks", "slot-b").write_text(json.dumps(holder))
    host.done("g2-general")
    host.done("g2-finish")
    assert [(line.name, line.attempt, line.status) for line in read_ledger(case.output)] == [
        ("admission", 1, "done"),
        ("stage", 1, "done"),
        ("train-full-fast", 1, "done"),
        ("g2-dev", 1, "done"),
        ("g2-legal", 1, "interrupted"),
        ("g2-legal", 2, "done"),
        ("g2-general", 1, "done"),
        ("finish-g2-finish", 1, "done"),
    ]
    assert not list(case.snapshot.rglob("__pycache__"))


def test_starting_twice_and_resuming_in_the_wrong_order_refuse(host: Host) -> None:
    case = host.case
    status, said = host.start("full-fast", "--resume", "--attempt", "1")
    assert status == 2
    assert "there is nothing to resume; expected: a start without --resume" in said
    case.control("train-full-fast", seconds=60)
    assert host.start("full-fast")[0] == 0
    status, said = host.start("full-fast")
    assert (status, "the job was started before under this name" in said) == (2, True)
    status, said = host.start("full-fast", "--resume", "--attempt", "1")
    assert status == 2
    assert f"the session exists already and is not touched; found: {host.name('full-fast')}" in said
    status, said = host.start("full-fast", "--resume", "--attempt", "2")
    assert (status, "expected: a start as --attempt 1" in said) == (2, True)

    # The coordinator's own kill, the hard way: the session dies with its runner, and nothing is left.
    holder = read_holder(lock_path(case.folder / "locks", "slot-a"))
    assert holder is not None
    wait_until(lambda: "cuda" in host.child_log("full-fast.log"))
    tmux("kill-session", "-t", f"={host.name('full-fast')}")
    wait_until(lambda: is_gone(holder["pid"]) and is_gone(holder["child"]["pid"]))
    assert "stopping: SIGHUP to the runner; SIGTERM" in host.log("full-fast")
    case.control("train-full-fast", files={"full-fast.pt": "w"}, result={"updates": 2, "total_updates": 3})
    assert host.start("full-fast", "--resume", "--attempt", "1")[0] == 0
    assert "ended: exit 0" in host.wait("full-fast-attempt-1")
    assert read_yaml(case.snapshot / "parameters" / "full-fast.resume.yaml")["resume"] is True
    assert json.loads((case.output / "train-full-fast/attempt-2/receipt.json").read_bytes())["parameters"]["resume"]
    status, said = host.start("g2-dev")
    assert (status, "says something else than its checkpoint; expected: 3 updates; found: 2" in said) == (2, True)


def test_a_stop_asks_the_runner_and_the_job_can_be_resumed(host: Host) -> None:
    case = host.case
    stop = ("--execute", "--stop", "--job", "full-fast")
    status, said = host.type(*stop)
    assert (status, "full-fast does not run, so there is nothing to stop" in said) == (2, True), said
    assert "found: no start of this job" in said
    case.control("train-full-fast", seconds=60)
    assert host.start("full-fast")[0] == 0
    wait_until(lambda: "cuda" in host.child_log("full-fast.log"))
    status, said = host.type("--execute", "--stop", "--job", "g2-dev")  # the same solo, another job
    assert (status, "g2-dev does not run" in said) == (2, True), said
    status, said = host.type(*stop, who=None)
    assert (status, "only the coordinator executes" in said) == (2, True)
    manifest = case.inputs["assembly"] / "MANIFEST.json"
    manifest.write_text("changed")  # no reason to let a job run on
    status, said = host.type(*stop)
    assert status == 0, said
    holder = read_holder(lock_path(case.folder / "locks", "slot-a"))
    assert holder is None or f"full-fast's runner (pid {holder['pid']}, since" in said
    assert f"tail -f {case.snapshot}/logs/{host.name('full-fast')}.coordinator.log" in said
    assert "--phase full-train --job full-fast --resume --attempt 1" in said
    log = host.wait("full-fast")
    assert "stopping: SIGTERM to the runner" in log
    assert "ended: exit 3 (interrupted at a saved boundary; can be resumed" in log.splitlines()[-1]
    status, said = host.type(*stop)
    assert (status, f"found: {host.name('full-fast')}, which has ended" in said) == (2, True), said
    manifest.write_text("{}")
    case.control("train-full-fast", seconds=60)
    assert host.start("full-fast", "--resume", "--attempt", "1")[0] == 0
    wait_until(lambda: host.child_log("full-fast.log").count("cuda") == 2)
    status, said = host.type(*stop, "--phase", "full-train")
    assert (status, "--resume --attempt 2" in said) == (0, True), said
    assert "ended: exit 3" in host.wait("full-fast-attempt-1")


def test_a_stop_reaches_only_this_runs_runner(host: Host) -> None:
    """The lock names a living process that is no runner, another run's runner, and a child without its runner."""
    case = host.case
    plan = case.plan()
    start = plan.start("full-fast")
    start.script.write_text("")
    log = str(plan.logs / "full-fast.log")
    runner = ("-m", "d2lib.coordinator.locked", "--job", "full-fast", "--log")
    sleeper = "import time; time.sleep(100)"
    asked = "asked to stop at that moment and is still there"
    for words, child, message in (
        ((), False, "does not run"),
        ((*runner, log.replace("pilot-1", "pilot-2"), "--"), False, "does not run"),
        (("--", *runner, log), False, "does not run"),  # what a runner runs is no runner
        ((), True, asked),
    ):
        other = subprocess.Popen((sys.executable, "-c", sleeper, *words))
        try:
            with hold(case.folder / "locks", "slot-a", "full-fast") as lease:
                path = lock_path(case.folder / "locks", "slot-a")
                if child:
                    lease.note_child(other.pid)
                record = (read_holder(path) or {}) | {"pid": other.pid if not child else 2**22 - 1}
                path.write_text(json.dumps(record))
                status, said = host.type("--execute", "--stop", "--job", "full-fast")
            assert (status, message in said) == (2, True), said
            assert other.poll() is None
        finally:
            other.kill()
            other.wait()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--stop", "--job", "full-fast"), "needs --execute"),
        (("--execute", "--stop"), "--stop goes with --job alone"),
        (("--execute", "--stop", "--job", "g2-dev", "--resume", "--attempt", "1"), "--stop goes with --job alone"),
        (("--execute", "--stop", "--job", "g2-dev", "--phase", "finish"), "g2-dev is no job of --phase finish"),
    ],
)
def test_flags_that_do_not_go_with_a_stop_refuse(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    status, said = Host(make_case(tmp_path, library=False)).type(*arguments)
    assert (status, message in said) == (2, True), said


def test_what_changed_since_staging_refuses_before_a_session(host: Host) -> None:
    path = host.case.snapshot / "repo" / "notebooks" / "train.ipynb"
    path.chmod(0o644)
    path.write_text("[]")
    status, said = host.start("full-fast")
    assert status == 2
    assert "the snapshot's source differs from the commit; found: notebooks/train.ipynb has other bytes" in said
    assert said.count("\n") == 1
    assert tmux("list-sessions").returncode != 0
    assert list(host.case.snapshot.glob("*.sh")) == []


def test_status_gives_the_very_command_that_comes_next(host: Host) -> None:
    rows = status(host.case.output)
    ready = [row for row in rows if row.ready]
    assert [row.step for row in ready] == ["train-full-fast"]
    words = shlex.split(str(ready[0].command))
    assert words[:3] == ["python", "-m", "d2lib.full_stage"]
    options = parser().parse_args(words[3:])
    assert (options.execute, options.phase, options.job, options.resume) == (True, "full-train", "full-fast", False)
    assert plan_of(options) == host.case.plan()
    host.done("full-fast")
    assert [row.step for row in status(host.case.output) if row.ready] == ["g2-dev", "g2-legal"]
    reasons = {row.step: row.why_not for row in status(host.case.output)}
    assert reasons["g2-general"] == "needs g2-legal, which is not done"


def test_a_stage_that_its_receipt_does_not_speak_of_refuses(host: Host) -> None:
    """STAGED.json rewritten with the same meaning and other bytes; then no receipt of a stage at all."""
    path = host.case.snapshot / "STAGED.json"
    path.chmod(0o644)
    path.write_bytes(path.read_bytes() + b"\n")
    status, said = host.start("full-fast")
    assert (status, "STAGED.json is not what was staged" in said) == (2, True), said
    path.write_bytes(path.read_bytes()[:-1])
    ledger = host.case.output / "LEDGER.jsonl"
    lines = ledger.read_bytes().splitlines(keepends=True)
    ledger.chmod(0o644)
    ledger.write_bytes(b"".join(line for line in lines if b'"stage"' not in line))
    status, said = host.start("full-fast")
    assert (status, "no receipt says that the snapshot was staged" in said) == (2, True), said


def test_a_session_of_that_name_and_a_taken_solo_refuse(host: Host) -> None:
    with hold(host.case.folder / "locks", "slot-a", "g2-dev"):
        status, said = host.start("full-fast")
    assert (status, "slot-a is taken" in said) == (2, True)
    tmux("new-session", "-d", "-s", host.name("full-fast") + "-more", "sleep 100")  # a longer name is no obstacle
    tmux("new-session", "-d", "-s", host.name("full-fast"), "sleep 100")
    status, said = host.start("full-fast")
    assert (status, "the session exists already and is not touched" in said) == (2, True)
    assert sessions.exists(host.name("full-fast"))
    tmux("kill-session", "-t", f"={host.name('full-fast')}")
    assert not sessions.exists(host.name("full-fast"))
    assert list(host.case.snapshot.glob("*.sh")) == []
    host.done("full-fast")
    assert sessions.exists(host.name("full-fast") + "-more")


def test_a_refused_runner_is_reported_and_the_start_can_be_repeated(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The solo is taken between the check and the runner: the runner's own refusal comes back to the coordinator."""
    case = host.case
    monkeypatch.setattr(jobs, "revalidate", lambda _: None)
    monkeypatch.setattr(jobs, "check_free", lambda *_: None)
    with (
        hold(case.folder / "locks", "slot-a", "g2-dev"),
        pytest.raises(Refused, match=r"the runner refused: slot-a is taken.*job g2-dev"),
    ):
        jobs.start_job(case.plan(), "full-fast", 0)
    host.wait("full-fast")
    host.done("full-fast")


def test_outputs_that_no_receipt_speaks_of_refuse(host: Host) -> None:
    (host.case.output / "full-fast.pt").write_text("from elsewhere")
    status, said = host.start("full-fast")
    assert (status, "the output exists, and no receipt speaks of it" in said) == (2, True)


def test_a_changed_checkpoint_refuses_g2(host: Host) -> None:
    host.done("full-fast")
    path = host.case.output / "full-fast.pt"
    path.chmod(0o644)
    path.write_text("other weights")
    status, said = host.start("g2-dev")
    assert (status, "full-fast.pt is not what train-full-fast made" in said) == (2, True)


# --- without a staged case


def test_a_socket_path_that_is_too_long_says_what_to_set() -> None:
    folder = "/tmp/" + "x" * 90
    with pytest.raises(Refused, match=r"too long; expected: at most 108 bytes.*do: set TMUX_TMPDIR to a short"):
        sessions.check_socket({"TMUX_TMPDIR": folder})
    exact = 108 - 1 - len(f"/tmux-{os.getuid()}/default")
    with pytest.raises(Refused, match="tmux's folder is missing"):  # long enough by one byte, and not there
        sessions.check_socket({"TMUX_TMPDIR": "/" + "x" * (exact - 1)})
    with pytest.raises(Refused, match="too long"):
        sessions.check_socket({"TMUX_TMPDIR": "/" + "x" * exact})
    sessions.check_socket({"TMUX_TMPDIR": "/tmp"})
    assert sessions.socket_path({}) == Path(f"/tmp/tmux-{os.getuid()}/default")


def test_names_are_exact(socket: Path) -> None:
    assert not sessions.exists("d2full-a")  # no server at all
    tmux("new-session", "-d", "-s", "d2full-ab", "sleep 100")
    assert tmux("has-session", "-t", "d2full-a").returncode == 0  # what tmux itself takes for it
    assert not sessions.exists("d2full-a")
    assert sessions.exists("d2full-ab")


@pytest.mark.parametrize("who", [None, "", "Deepseek", "test/coordinator2"])
def test_only_the_coordinator_executes(tmp_path: Path, who: str | None) -> None:
    plan = make_case(tmp_path, library=False).plan()
    environment = {} if who is None else {"D2_COORDINATOR": who}
    with pytest.raises(Refused, match="only the coordinator executes; expected: D2_COORDINATOR=test/coordinator"):
        check_coordinator(plan, environment)
    check_coordinator(plan, {"D2_COORDINATOR": "test/coordinator"})


def test_only_on_the_profiles_host_and_assembly(tmp_path: Path) -> None:
    me = {"D2_COORDINATOR": "test/coordinator"}
    plan = make_case(tmp_path / "one", {"host": "x86host"}, library=False).plan()
    for host in ("x86host2", "other", "x86host-b.local"):
        with pytest.raises(Refused, match="another host than the profile's; expected: x86host"):
            check_coordinator(plan, me, host)
    check_coordinator(plan, me, "x86host")
    check_coordinator(plan, me, "x86host.example.org")
    plan = make_case(tmp_path / "two", {"assembly": "/opt/assembly"}, library=False).plan()
    with pytest.raises(Refused, match="--assembly is not the profile's; expected: /opt/assembly"):
        check_coordinator(plan, me)


def test_execute_without_identity_touches_nothing(tmp_path: Path) -> None:
    host = Host(make_case(tmp_path))
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    for arguments in (("--phase", "stage"), ("--phase", "full-train", "--job", "full-fast")):
        status, said = host.type("--execute", *arguments, who=None)
        assert (status, "only the coordinator executes" in said) == (2, True), said
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


def test_a_job_before_the_stage_refuses(tmp_path: Path) -> None:
    status, said = Host(make_case(tmp_path)).start("full-fast")
    assert (status, "nothing is staged here" in said) == (2, True), said


def test_anyones_check_inputs_leaves_nothing_and_stage_admits_by_itself(tmp_path: Path, socket: Path) -> None:
    case = make_case(tmp_path)
    other = str(shutil.copy(case.profile, case.source / "other.yaml"))
    host = Host(Case(case.folder, case.source, commit(case.source), case.inputs))
    for more, who in (
        (("--check-inputs",), None),
        (("--check-inputs",), "someone"),
        (("--check-inputs", "--profile", other), "test/coordinator"),
    ):
        status, said = host.type(*more, who=who)
        assert status == 0, said
        assert "a trial, of which nothing is kept" in said
        assert not host.case.output.exists()
    status, said = host.type("--execute", "--phase", "stage", who=None)
    assert (status, host.case.output.exists()) == (2, False), said
    status, said = host.type("--execute", "--phase", "stage")
    assert status == 0, said
    assert "admission first: the inputs are not admitted" in said
    assert [(line.name, line.status) for line in read_ledger(host.case.output)] == [
        ("admission", "done"),
        ("stage", "done"),
    ]


def test_another_profile_with_the_productions_paths_gets_nowhere(tmp_path: Path) -> None:
    """The commit's profile names a host, an assembly and a coordinator; none of them can be set aside by a flag."""
    host = Host(make_case(tmp_path, {"host": "x86host"}))
    demo = str(Path(__file__).resolve().parent.parent / "params" / "demo" / "coordinator.yaml")
    for job in ((), ("--job", "full-fast")):
        phase = "full-train" if job else "stage"
        status, said = host.type("--execute", "--phase", phase, *job, "--profile", demo, who="demo/coordinator")
        assert (status, host.case.output.exists(), host.case.snapshot.exists()) == (2, False, False)
        assert "--profile does not go with --execute" in said
    status, said = host.type("--execute", "--phase", "stage")
    assert status == 2
    assert "another host than the profile's" in said


def test_the_profile_of_these_tests_is_whole() -> None:
    assert set(PROFILE["jobs"]) == set(PHASE)
