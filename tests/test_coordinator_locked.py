"""The locked runner with real children: pinned, bounded, watched, stopped at a boundary, never left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from coordinator_case import LIBRARY, PROFILE, is_gone, private_tmux, tmux, wait_until
from recorded_cards import RecordedCards

from d2lib.benchmark.cases import drafter_config
from d2lib.coordinator.cards import NvmlCards, find_card
from d2lib.coordinator.children import NoAnswer
from d2lib.coordinator.conditions import card_memory
from d2lib.coordinator.lease import check_free, hold
from d2lib.coordinator.locked import job_environment, judge
from d2lib.coordinator.processes import Usage, reap, usage
from d2lib.coordinator.swap import SwapRule, computing, find_scope, own_swap_limit
from d2lib.coordinator.watch import Watch
from d2lib.data.manifest import FileEntry, Manifest, SequenceEntry
from d2lib.errors import Refused
from d2lib.train.memory import training_bytes

CARD = "GPU-240876ad-1111-2222-3333-444444444444"
STAMP = r"^20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ full-fast "
DIGEST = "sha256:" + 64 * "0"
OTHER = "GPU-bc62df2a-1111-2222-3333-444444444444"


class Runner:
    """One runner process over a profile of the test's own."""

    def __init__(self, folder: Path, **profile: Any) -> None:
        self.folder = folder
        self.locks = folder / "locks"
        self.log = folder / "child.log"
        self.profile = folder / "coordinator.yaml"
        self.profile.write_text(yaml.safe_dump(PROFILE | {"lock_folder": str(self.locks)} | profile))
        self.module: tuple[str, ...] = ("-m", "d2lib.coordinator.locked")
        self.process: subprocess.Popen[str] | None = None

    def start(
        self, *command: str, solo: str = "slot-a", more: tuple[str, ...] = (), stdout: Any = subprocess.PIPE
    ) -> subprocess.Popen[str]:
        arguments = ("--profile", str(self.profile), "--solo", solo, "--job", "full-fast", "--log", str(self.log))
        self.process = subprocess.Popen(
            (sys.executable, *self.module, *arguments, *more, "--", *command),
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(LIBRARY.parent), "GIT_DIR": "/leak", "CUDA_VISIBLE_DEVICES": "7"},
            stdout=stdout,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return self.process

    def run(self, *command: str, solo: str = "slot-a", more: tuple[str, ...] = ()) -> tuple[int, str]:
        said, _ = self.start(*command, solo=solo, more=more).communicate(timeout=60)
        assert self.process is not None
        return self.process.returncode, said

    def end(self) -> tuple[int, str]:
        assert self.process is not None
        said, _ = self.process.communicate(timeout=60)
        return self.process.returncode, said


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runner]:
    made = Runner(tmp_path)
    yield made
    if made.process is not None and made.process.poll() is None:
        made.process.kill()
        made.process.communicate()


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def touch_and_sleep(folder: Path, more: str = "", then: str = "") -> tuple[str, ...]:
    """A child that says that it runs, with its pid, and sleeps; `more` comes before that, `then` instead of it."""
    return python(
        f"import os,signal,sys,time\n{more}\nopen({str(folder / 'tmp')!r},'w').write(str(os.getpid()))\n"
        f"os.rename({str(folder / 'tmp')!r},{str(folder / 'pid')!r})\n{then or 'while True: time.sleep(0.05)'}"
    )


def until_exists(path: Path) -> str:
    """Code that waits for a file."""
    return f"while not os.path.exists({str(path)!r}): time.sleep(0.05)\n"


def pid_of(folder: Path) -> int:
    wait_until((folder / "pid").exists)
    return int((folder / "pid").read_text())


# --- exit statuses


@pytest.mark.parametrize("status", [0, 1, 2, 3, 4])
def test_the_childs_exit_status_is_kept(status: int) -> None:
    assert judge(status, None)[0] == status


def test_statuses_through_a_real_runner(runner: Runner) -> None:
    status, said = runner.run("/bin/sh", "-c", "echo one; echo two >&2; exit 3")
    assert status == 3
    lines = said.splitlines()
    assert re.fullmatch(
        r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ full-fast started: pid \d+, swap \w+ .*: /bin/sh -c .*", lines[1]
    )
    assert lines[-1].endswith("full-fast ended: exit 3 (interrupted at a saved boundary; can be resumed)")
    log = runner.log.read_text().splitlines()
    assert [re.sub(STAMP, "", line) for line in log] == ["one", "two"]
    runner.run("/bin/sh", "-c", "printf 'three\\rfour'")
    assert [line.split()[-1] for line in runner.log.read_text().splitlines()] == ["one", "two", "three", "four"]


@pytest.mark.parametrize("status", [5, 42, 130, 137, 143, 255])
def test_no_foreign_status_gets_through(status: int) -> None:
    assert judge(status, None) == (4, f"the child's exit status {status} means nothing here")


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGSEGV"])
def test_a_child_that_a_signal_killed_is_unexpected_and_named(name: str) -> None:
    status, text = judge(-int(getattr(signal, name)), "why")
    assert (status, text) == (4, f"the child was killed by {name}, after: why")


def test_a_status_without_its_receipt_is_not_believed(runner: Runner) -> None:
    """Python ends with 1 on a traceback, and 1 is a verdict here."""
    receipt = runner.folder / "receipt.json"
    status, said = runner.run(*python("raise ValueError"), more=("--receipt", str(receipt)))
    assert status == 4
    assert "the child ended with 1 and left no receipt" in said
    assert "ValueError" in runner.log.read_text()
    receipt.touch()
    assert judge(1, None, receipt)[0] == 1
    assert judge(2, None, runner.folder / "absent")[0] == 2


def test_a_command_that_is_not_there_fails(runner: Runner) -> None:
    status, said = runner.run("/nowhere/program")
    assert status == 4
    assert "unexpected: No such file or directory (ENOENT)" in said
    check_free(runner.locks, "slot-a")


# --- what the child gets


def test_a_cpu_slot_has_no_card_and_a_clean_environment(runner: Runner) -> None:
    cpu = sorted(os.sched_getaffinity(0))[-1]
    runner = Runner(runner.folder, solos={"slot-a": {"cpus": [cpu]}, "slot-b": {}})
    wanted = "[dict(os.environ), sorted(os.sched_getaffinity(0)), os.listdir('/proc/self/fd')]"
    code = f"import os, json; print(json.dumps({wanted}))"
    status, _ = runner.run(*python(code))
    assert status == 0
    environment, cpus, descriptors = json.loads(runner.log.read_text().split(" ", 2)[2])
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert "GIT_DIR" not in environment
    assert cpus == [cpu]
    assert len(descriptors) == 4  # 0, 1, 2 and the listing's own: no lock


def recorded(folder: Path, watts: float = 225.0, free: int = 1 << 34, pids: tuple[int, ...] = ()) -> str:
    path = folder / "cards.json"
    card = {"enforced_power_limit_watts": watts, "free_memory_bytes": free, "compute_processes": list(pids)}
    working = folder / "cards.part"
    working.write_text(json.dumps({"cards": {CARD: card, OTHER: card}}))
    working.rename(path)
    return str(path)


def card_runner(folder: Path, **profile: Any) -> Runner:
    solos = {"slot-a": {"card": "GPU-240876ad"}, "slot-b": {"card": "GPU-bc62df2a"}}
    values: dict[str, Any] = {"solos": solos, "power_limit_watts": 225.0}
    runner = Runner(folder, **(values | profile))
    runner.module = (str(Path(__file__).with_name("recorded_cards.py")), recorded(folder))
    return runner


def test_the_card_is_pinned_by_its_whole_uuid(tmp_path: Path) -> None:
    runner = card_runner(tmp_path)
    status, said = runner.run("/bin/sh", "-c", "echo $CUDA_VISIBLE_DEVICES", solo="slot-b")
    assert status == 0, said
    assert runner.log.read_text().split()[-1] == OTHER
    assert job_environment(CARD, {"CUDA_VISIBLE_DEVICES": "0"})["CUDA_VISIBLE_DEVICES"] == CARD


@pytest.mark.parametrize(("name", "message"), [("GPU-ffffffff", "no such card"), ("GPU-", "several cards")])
def test_a_name_that_is_not_one_card_refuses(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(Refused, match=message):
        find_card(RecordedCards(Path(recorded(tmp_path))), name)


class Driver(types.ModuleType):
    """A driver's library with two cards; NVML counts in milliwatts and bytes."""

    NVMLError = type("NVMLError", (Exception,), {})
    lost = False

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, number: int) -> str:
        return (CARD, OTHER)[number]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if self.lost:
            raise self.NVMLError("GPU is lost")
        return uuid

    def nvmlDeviceGetUUID(self, handle: str) -> bytes:
        return handle.encode()

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:
        return {CARD: 225_000, OTHER: 300_500}[handle]

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(free=7 << 30)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[types.SimpleNamespace]:
        return [types.SimpleNamespace(pid=pid, usedGpuMemory=1) for pid in {CARD: (), OTHER: (31, 7)}[handle]]


def test_nvmls_answers_are_read_in_their_units(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver("pynvml")
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    cards = NvmlCards()
    assert find_card(cards, "GPU-bc62df2a") == OTHER
    assert (cards.enforced_power_limit_watts(CARD), cards.enforced_power_limit_watts(OTHER)) == (225.0, 300.5)
    assert cards.free_memory_bytes(CARD) == 7 << 30
    assert (cards.compute_processes(CARD), cards.compute_processes(OTHER)) == ([], [7, 31])
    driver.lost = True
    with pytest.raises(Refused, match="NVML gives no answer; found: nvmlDeviceGetHandleByUUID: GPU is lost"):
        cards.enforced_power_limit_watts(CARD)


def test_without_a_driver_nvml_refuses() -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this host has a driver")
    with pytest.raises(Refused, match="NVML does not answer"):
        NvmlCards()


def test_no_profile_and_no_flag_can_stand_in_for_the_driver(tmp_path: Path) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this host has a driver")
    runner = card_runner(tmp_path)
    runner.module = ("-m", "d2lib.coordinator.locked")
    status, said = runner.run("touch", str(tmp_path / "ran"))
    assert (status, "NVML does not answer" in said, (tmp_path / "ran").exists()) == (2, True, False), said
    runner = card_runner(tmp_path, recorded_cards=recorded(tmp_path))
    status, said = runner.run("touch", str(tmp_path / "ran"))
    assert (status, "recorded_cards" in said, (tmp_path / "ran").exists()) == (2, True, False), said


# --- conditions


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        ({"minimum_free_memory_gib": 1e6}, "refused: too little free memory; expected: at least 1e+06 GiB"),
        ({"power_limit_watts": 300.0}, "the card's power limit is another one; expected: 300 W enforced; found: 225 W"),
        ({"solos": {"slot-a": {"card": "GPU-00000000"}, "slot-b": {}}}, "refused: no such card"),
    ],
)
def test_a_condition_that_does_not_hold_refuses_before_the_start(
    tmp_path: Path, profile: dict[str, Any], message: str
) -> None:
    runner = card_runner(tmp_path, **profile)
    status, said = runner.run("touch", str(tmp_path / "ran"))
    assert status == 2
    assert message in said
    assert not (tmp_path / "ran").exists()


def test_a_card_on_which_somebody_computes_refuses(tmp_path: Path) -> None:
    runner = card_runner(tmp_path)
    recorded(tmp_path, pids=(4711, 4712))
    status, said = runner.run("touch", str(tmp_path / "ran"))
    assert (status, "another process computes on the card; expected: none before a start" in said) == (2, True), said
    assert "found: pid 4711, 4712" in said
    assert not (tmp_path / "ran").exists()
    check_free(runner.locks, "slot-a")


def test_other_tools_locks_are_held_as_long_as_the_job_lives(tmp_path: Path) -> None:
    """Taken: nothing starts. Free: the other tool finds it taken, even while only the child is left."""
    lock = tmp_path / "pilot.lock"
    runner = Runner(tmp_path, solos={"slot-a": {"further_locks": [str(lock)]}, "slot-b": {}})
    status, said = runner.run("true")
    assert (status, "a further lock cannot be opened; expected: an existing file" in said) == (2, True), said
    lock.write_text("the tool's own words")

    def taken() -> bool:
        done = subprocess.run(("flock", "-n", "-E", "99", str(lock), "true"), check=False)  # as its own tool asks
        assert done.returncode in (0, 99)
        return done.returncode == 99

    other = subprocess.Popen(("flock", str(lock), "sleep", "100"), start_new_session=True)
    try:
        wait_until(taken)
        status, said = runner.run("touch", str(tmp_path / "ran"))
        assert (status, "a further lock is taken: another tool uses the solo" in said) == (2, True), said
        assert not (tmp_path / "ran").exists()
    finally:
        os.killpg(other.pid, signal.SIGKILL)
        other.wait()
    wait_until(lambda: not taken())
    more = f"def save(*_):\n    {until_exists(tmp_path / 'go').strip()}\n    sys.exit(3)\nsignal.signal(15, save)"
    process = runner.start(*touch_and_sleep(tmp_path, more))
    child = pid_of(tmp_path)
    assert taken()
    process.kill()
    process.wait()
    assert taken()
    (tmp_path / "go").touch()
    wait_until(lambda: is_gone(child))
    wait_until(lambda: not taken())
    assert lock.read_text() == "the tool's own words"


def test_a_card_with_too_little_memory_for_the_drafter_refuses(tmp_path: Path) -> None:
    """The bound comes from the assembly's drafter: a byte less than it needs refuses, as much as it needs starts."""
    assembly = tmp_path / "assembly"
    assembly.mkdir()
    config = drafter_config()
    (assembly / "drafter.json").write_text(config.model_dump_json())
    entry = SequenceEntry(
        id="a", split="train", family="a", rows=500, gen_start=128, file=FileEntry(path="a", size=1, sha256=DIGEST)
    )
    sizes = {"dim": config.dim, "vocab_size": config.vocab_size, "n_taps": config.n_taps}
    Manifest(namespace="n", target={}, sequences=(entry,), **sizes).write(assembly / "MANIFEST.json")
    needed = training_bytes(config, batch=128, rank=32, anchor=500)
    assert card_memory("full-fast", assembly) == needed
    assert 0 < card_memory("g2-dev", assembly) != needed
    assert card_memory("g2-finish", assembly) == 0
    runner = card_runner(tmp_path)
    recorded(tmp_path, free=needed - 1)
    status, said = runner.run("touch", str(tmp_path / "ran"), more=("--assembly", str(assembly)))
    assert (status, f"too little free card memory; expected: at least {needed / 2**30:.1f} GiB" in said) == (2, True)
    assert not (tmp_path / "ran").exists()
    recorded(tmp_path, free=needed)
    assert runner.run("true", more=("--assembly", str(assembly)))[0] == 0


def test_a_taken_solo_and_an_unknown_one_refuse(runner: Runner) -> None:
    with hold(runner.locks, "slot-a", "g2-dev"):
        status, said = runner.run("true")
    assert status == 2
    assert f"refused: slot-a is taken; expected: a free lock; found: job g2-dev, pid {os.getpid()}" in said
    status, said = runner.run("true", solo="slot-z")
    assert status == 2
    assert "an unknown solo; expected: one of slot-a, slot-b; found: slot-z" in said


def test_a_power_limit_that_changes_stops_the_job(tmp_path: Path) -> None:
    runner = card_runner(tmp_path)
    runner.start(*touch_and_sleep(tmp_path, "signal.signal(15, lambda *_: sys.exit(3))"))
    pid_of(tmp_path)
    recorded(tmp_path, watts=300.0)
    status, said = runner.end()
    assert status == 3  # the child saved its boundary, so it can be resumed
    assert "stopping: the card's power limit is another one" in said


def test_the_power_logger_is_needed_before_and_while(tmp_path: Path) -> None:
    with private_tmux():
        runner = Runner(tmp_path, power_logger="logger")
        status, said = runner.run("true")
        assert status == 2
        assert "the power logger is not there; expected: a tmux session named logger" in said
        tmux("new-session", "-d", "-s", "logger-2", "sleep 100")  # a longer name is another session
        assert runner.run("true")[0] == 2
        tmux("new-session", "-d", "-s", "logger", "sleep 100")
        runner.start(*touch_and_sleep(tmp_path))
        child = pid_of(tmp_path)
        tmux("kill-session", "-t", "=logger")
        status, said = runner.end()
        assert status == 4
        assert "stopping: the power logger is not there" in said
        assert "the child was killed by SIGTERM, after: the power logger is not there" in said
        assert is_gone(child)


# --- memory


def test_too_much_resident_memory_of_the_whole_tree_stops_the_job(tmp_path: Path) -> None:
    """Neither process is above the limit; together they are."""
    runner = Runner(tmp_path, memory_limit_gib=0.2)
    eat = "x = bytearray(120 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1\nimport time; time.sleep(60)"
    both = f"import subprocess,sys; p = subprocess.Popen([sys.executable, '-c', {eat!r}])\n{eat}"
    status, said = runner.run(*python(both))
    assert status == 4
    assert re.search(r"stopping: the job's resident memory is 0\.2\d GiB, the limit is 0\.2 GiB; SIGTERM", said)
    assert not [process for process in psutil.Process().children(recursive=True) if eat in process.cmdline()]


def test_usage_counts_resident_memory_as_proc_does() -> None:
    me = psutil.Process()
    found = usage([me])
    assert abs(found.resident - me.memory_info().rss) < 32 << 20
    assert found.swapped == 0
    assert usage([]) == Usage(0, 0)


def test_the_swap_limit_is_that_of_ones_own_control_group(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("0::/user/job.scope\n")
    group = tmp_path / "mount" / "user" / "job.scope"
    group.mkdir(parents=True)
    assert own_swap_limit(tmp_path / "mount", own) == ""  # no memory controller
    (group / "memory.swap.max").write_text("max\n")
    assert own_swap_limit(tmp_path / "mount", own) == "max"
    own.write_text("4:memory:/v1\n")
    assert own_swap_limit(tmp_path / "mount", own) == ""


SYSTEMD_RUN = """#!/bin/sh
# A stand-in: notes its arguments and its runtime folder, and executes what comes after --.
printf '%s\\n' "$*" "$XDG_RUNTIME_DIR" >>"{folder}/asked"
[ -e "{folder}/broken" ] && {{ echo "Failed to connect to bus: No medium found" >&2; exit 1; }}
while [ "$1" != -- ]; do shift; done
shift
case "$*" in *d2lib.coordinator.swap*) cat "{folder}/limit"; exit 0;; esac
exec "$@"
"""


def systemd_run(folder: Path, monkeypatch: pytest.MonkeyPatch, limit: str = "0") -> Path:
    """A lingering user and a systemd-run of the test's own; returns the folder of the former."""
    program = folder / "bin" / "systemd-run"
    program.parent.mkdir()
    program.write_text(SYSTEMD_RUN.format(folder=folder))
    program.chmod(0o755)
    (folder / "limit").write_text(f"{limit}\n")
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("LOGNAME", "somebody")
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    linger = folder / "linger"
    linger.mkdir()
    (linger / "somebody").touch()
    return linger


def test_a_scope_is_used_only_where_its_rule_is_in_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    linger = systemd_run(tmp_path, monkeypatch)
    scope = find_scope(linger)
    program = str(tmp_path / "bin" / "systemd-run")
    assert scope.prefix == (program, *["--user", "--scope", "--quiet", "--collect", "-p", "MemorySwapMax=0", "--"])
    assert scope.environment == {"XDG_RUNTIME_DIR": f"/run/user/{os.getuid()}"}
    assert scope.text.startswith("forbidden")
    assert (tmp_path / "asked").read_text().splitlines()[-1] == f"/run/user/{os.getuid()}"
    for limit in ("max", "4096", ""):
        (tmp_path / "limit").write_text(f"{limit}\n")
        scope = find_scope(linger)
        assert (scope.prefix, scope.text.startswith("watched")) == ((), True), limit
    (tmp_path / "broken").touch()
    assert "watched (Failed to connect to bus" in find_scope(linger).text
    (linger / "somebody").unlink()  # else the job would end with the last login
    asked = (tmp_path / "asked").read_text()
    assert "loginctl enable-linger somebody" in find_scope(linger).text
    assert (tmp_path / "asked").read_text() == asked
    monkeypatch.setenv("PATH", str(linger))
    assert find_scope(linger).text == "watched (there is no systemd-run)"


def test_a_job_in_a_scope_is_supervised_as_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in becomes the command, as systemd-run does: the same pid, stopped and judged as before."""
    linger = systemd_run(tmp_path, monkeypatch)
    code = (
        "import sys; from d2lib.coordinator import locked, swap; from pathlib import Path; "
        f"locked.find_scope = lambda: swap.find_scope(Path({str(linger)!r})); raise SystemExit(locked.main())"
    )
    runner = Runner(tmp_path)
    runner.module = ("-c", code)
    process = runner.start(*touch_and_sleep(tmp_path, "signal.signal(15, lambda *_: sys.exit(3))"))
    child = pid_of(tmp_path)
    process.terminate()
    status, said = runner.end()
    assert status == 3, said
    assert f"started: pid {child}, swap forbidden by a scope with MemorySwapMax=0: {sys.executable} -c" in said
    assert len((tmp_path / "asked").read_text().split("--scope")) == 3  # the probe and the job


def test_only_swap_above_the_allowance_in_several_samples_in_a_row_stops_a_job() -> None:
    rule = SwapRule(allowance=1 << 20, samples=3)
    above, below = (1 << 20) + 4096, 1 << 20
    assert [rule.broken(n) for n in (above, above, below, above, above)] == [None] * 5
    assert "1028 KiB of the processes that compute are in swap, 3 samples in a row above" in str(rule.broken(above))
    strict = SwapRule(allowance=0, samples=1)
    assert strict.broken(0) is None
    assert strict.broken(4096) is not None


def test_the_waiting_parent_does_not_count_as_computing() -> None:
    me, other = psutil.Process(), psutil.Process(os.getppid())
    assert computing([me, other], me.pid) == [other]
    assert computing([me], me.pid) == [me]
    assert computing([], me.pid) == []


# --- questions without an answer


TMUX = """#!/bin/sh
echo asked >>"{folder}/questions"
[ -e "{folder}/hang" ] && exec sleep 100
[ -e "{folder}/broken" ] && {{ echo "no reason at all" >&2; exit 1; }}
echo logger
"""


def tmux_runner(folder: Path, monkeypatch: pytest.MonkeyPatch, **profile: Any) -> Runner:
    """A runner whose tmux is the test's own: it names the logger, fails, or hangs."""
    program = folder / "bin" / "tmux"
    program.parent.mkdir()
    program.write_text(TMUX.format(folder=folder))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return Runner(folder, power_logger="logger", **({"watch_seconds": 0.05} | profile))


def test_a_failing_tmux_stops_nothing_when_it_answers_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = tmux_runner(tmp_path, monkeypatch, answer_seconds=60.0)
    runner.start(*touch_and_sleep(tmp_path, then=until_exists(tmp_path / "go")))
    pid_of(tmp_path)
    (tmp_path / "broken").touch()
    before = (tmp_path / "questions").stat().st_size
    wait_until(lambda: (tmp_path / "questions").stat().st_size > before + 20 * len("asked\n"))
    (tmp_path / "broken").unlink()
    before = (tmp_path / "questions").stat().st_size
    wait_until(lambda: (tmp_path / "questions").stat().st_size > before + 3 * len("asked\n"))
    (tmp_path / "go").touch()
    status, said = runner.end()
    assert status == 0, said
    assert "no answer, asked again for 60 s: tmux does not say which sessions are there; found: no reason" in said
    assert re.search(r"answered again; questions without an answer so far: [1-9]", said)
    assert "stopping" not in said
    assert "left behind" not in said  # the runner's own questions are none of the job's processes


@pytest.mark.parametrize("how", ["broken", "hang"])
def test_a_tmux_that_never_answers_again_stops_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    runner = tmux_runner(tmp_path, monkeypatch, answer_seconds=1.0)
    runner.start(*touch_and_sleep(tmp_path, "signal.signal(15, lambda *_: sys.exit(3))"))
    pid_of(tmp_path)
    (tmp_path / how).touch()
    status, said = runner.end()
    assert status == 3, said
    assert re.search(r"stopping: no answer for 1 s, \d+ questions failed in a row", said), said


def test_memory_is_sampled_while_a_question_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = tmux_runner(tmp_path, monkeypatch, answer_seconds=4.0, memory_limit_gib=0.2)
    hang = tmp_path / "hang"
    eat = "x = bytearray(300 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1\ntime.sleep(60)"
    runner.start(*touch_and_sleep(tmp_path, then=until_exists(hang) + eat))
    pid_of(tmp_path)
    hang.touch()
    status, said = runner.end()
    assert status == 4
    assert "stopping: the job's resident memory is" in said


def test_a_start_refuses_when_tmux_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = tmux_runner(tmp_path, monkeypatch)
    (tmp_path / "broken").touch()
    status, said = runner.run("true")
    assert (status, "refused: tmux does not say which sessions are there; found: no reason at all" in said) == (2, True)


def test_a_question_that_dies_of_anything_is_asked_again_and_a_broken_rule_is_not() -> None:
    answers: list[Exception | None] = [RuntimeError("x"), NoAnswer("y"), None, Refused("the limit is another one")]

    def check() -> None:
        if (error := answers.pop(0)) is not None:
            raise error

    with Watch(check, every=0.001, patience=100.0) as watch:
        wait_until(watch.reason)
    assert (watch.reason(), watch.unanswered, answers) == ("the limit is another one", 2, [])


def test_the_runners_own_questions_keep_their_exit_status() -> None:
    """Reaping the job's orphans must not take the status of a tmux that another thread waits for."""
    question = subprocess.Popen(("/bin/sh", "-c", "exit 7"))
    job = subprocess.Popen(("/bin/true",), start_new_session=True)
    for process in (question, job):
        wait_until(lambda process=process: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)
    reap(but=())
    assert question.wait() == 7
    with pytest.raises(ChildProcessError):
        os.waitpid(job.pid, 0)
    job.returncode = 0  # taken above


# --- stopping


@pytest.mark.parametrize(
    ("sent", "got"), [(signal.SIGTERM, 15), (signal.SIGINT, 2), (signal.SIGHUP, 15)], ids=["TERM", "INT", "HUP"]
)
def test_a_stop_is_handed_on_and_awaited(runner: Runner, sent: int, got: int) -> None:
    saved = runner.folder / "saved"
    handler = f"lambda n, _: (time.sleep(0.5), open({str(saved)!r}, 'w').write(str(n)), sys.exit(3))"
    more = f"signal.signal({got}, {handler})"
    process = runner.start(*touch_and_sleep(runner.folder, more))
    pid_of(runner.folder)
    process.send_signal(sent)
    status, said = runner.end()
    assert status == 3
    assert saved.read_text() == str(got)
    assert f"stopping: {signal.Signals(sent).name} to the runner; {signal.Signals(got).name}" in said
    assert "SIGKILL" not in said
    check_free(runner.locks, "slot-a")


def test_a_runner_whose_words_go_nowhere_still_supervises(tmp_path: Path) -> None:
    """Its log's disk is full: the job is stopped at its boundary as ever, and nothing of it is left."""
    runner = Runner(tmp_path, memory_limit_gib=0.2)
    eat = "x = bytearray(300 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1\ntime.sleep(60)"
    with open("/dev/full", "w", encoding="utf-8") as full:
        stop = "signal.signal(15, lambda *_: sys.exit(3))"
        process = runner.start(*touch_and_sleep(tmp_path, stop, then=eat), stdout=full)
        child = pid_of(tmp_path)
        assert process.wait(30) == 3
    assert is_gone(child)
    check_free(runner.locks, "slot-a")


def test_a_child_that_will_not_stop_is_killed_after_its_grace_with_its_tree(tmp_path: Path) -> None:
    runner = Runner(tmp_path, grace_seconds=0.7)
    grandchild = "import signal,time\nsignal.signal(15, signal.SIG_IGN)\ntime.sleep(100)"
    more = (
        "signal.signal(15, signal.SIG_IGN)\nimport subprocess\n"
        f"p = subprocess.Popen([sys.executable, '-c', {grandchild!r}], start_new_session=True)\n"
        f"open({str(tmp_path / 'grandchild')!r}, 'w').write(str(p.pid))"
    )
    process = runner.start(*touch_and_sleep(tmp_path, more))
    child = pid_of(tmp_path)
    process.terminate()
    status, said = runner.end()
    assert status == 4
    assert said.index("stopping: SIGTERM") < said.index("SIGKILL: the child did not end within 0.7 s")
    assert "the child was killed by SIGKILL, after: SIGTERM to the runner" in said
    assert is_gone(child)
    assert is_gone(int((tmp_path / "grandchild").read_text()))


def test_what_a_killed_child_leaves_behind_is_ended_before_the_lock_is_free(runner: Runner) -> None:
    """As when papermill is killed and its kernel, in a session of its own, goes on."""
    grandchild = "import time; time.sleep(100)"
    more = (
        "import subprocess\n"
        f"p = subprocess.Popen([sys.executable, '-c', {grandchild!r}], start_new_session=True)\n"
        f"open({str(runner.folder / 'grandchild')!r}, 'w').write(str(p.pid))"
    )
    runner.start(*touch_and_sleep(runner.folder, more))
    os.kill(pid_of(runner.folder), signal.SIGKILL)
    status, said = runner.end()
    left = int((runner.folder / "grandchild").read_text())
    assert status == 4
    assert f"left behind by the job, SIGTERM: {left}" in said
    assert said.endswith("ended: exit 4 (the child was killed by SIGKILL)\n")
    assert is_gone(left)


def test_a_killed_runner_stops_its_child_and_the_solo_waits_for_it(runner: Runner) -> None:
    """The kernel takes the lock away with the runner; the child is told to stop and keeps the solo until it has."""
    go = runner.folder / "go"
    more = (
        "def save(*_):\n"
        f"    while not os.path.exists({str(go)!r}): time.sleep(0.05)\n"
        "    print('saved', flush=True)\n"
        "    sys.exit(3)\n"
        "signal.signal(15, save)"
    )
    process = runner.start(*touch_and_sleep(runner.folder, more))
    child = pid_of(runner.folder)
    process.kill()
    process.wait()
    second = Runner(runner.folder)
    status, said = second.run("true")
    assert status == 2
    assert (
        f"its last job's process still runs though its runner is gone; expected: no process; found: pid {child}" in said
    )
    go.touch()
    wait_until(lambda: is_gone(child))
    wait_until(lambda: "saved" in runner.log.read_text())  # its words still reached the log
    assert second.run("true")[0] == 0


def test_the_runner_refuses_to_run_another_library_than_its_folders(runner: Runner) -> None:
    (runner.folder / "d2lib").mkdir()
    status, said = runner.run("true")
    assert status == 2
    assert "the runner runs another d2lib than its folder's" in said
