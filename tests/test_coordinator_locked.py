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

from d2lib.coordinator.cards import NvmlCards, RecordedCards, find_card
from d2lib.coordinator.lease import check_free, hold
from d2lib.coordinator.locked import job_environment, judge
from d2lib.coordinator.processes import Usage, forbid_swap, usage
from d2lib.errors import Refused

CARD = "GPU-240876ad-1111-2222-3333-444444444444"
STAMP = r"^20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ full-fast "
OTHER = "GPU-bc62df2a-1111-2222-3333-444444444444"


class Runner:
    """One runner process over a profile of the test's own."""

    def __init__(self, folder: Path, **profile: Any) -> None:
        self.folder = folder
        self.locks = folder / "locks"
        self.log = folder / "child.log"
        self.profile = folder / "coordinator.yaml"
        self.profile.write_text(yaml.safe_dump(PROFILE | {"lock_folder": str(self.locks)} | profile))
        self.process: subprocess.Popen[str] | None = None

    def start(self, *command: str, solo: str = "slot-a", more: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        arguments = ("--profile", str(self.profile), "--solo", solo, "--job", "full-fast", "--log", str(self.log))
        self.process = subprocess.Popen(
            (sys.executable, "-m", "d2lib.coordinator.locked", *arguments, *more, "--", *command),
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(LIBRARY.parent), "GIT_DIR": "/leak", "CUDA_VISIBLE_DEVICES": "7"},
            stdout=subprocess.PIPE,
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


def touch_and_sleep(folder: Path, more: str = "") -> tuple[str, ...]:
    """A child that says that it runs, with its pid, and sleeps."""
    return python(
        f"import os,signal,sys,time\n{more}\nopen({str(folder / 'tmp')!r},'w').write(str(os.getpid()))\n"
        f"os.rename({str(folder / 'tmp')!r},{str(folder / 'pid')!r})\nwhile True: time.sleep(0.05)"
    )


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
        r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ full-fast started: pid \d+, swap \w+: /bin/sh -c .*", lines[1]
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


def recorded(folder: Path, watts: float = 225.0, free: int = 1 << 34) -> str:
    path = folder / "cards.json"
    card = {"enforced_power_limit_watts": watts, "free_memory_bytes": free}
    working = folder / "cards.part"
    working.write_text(json.dumps({"cards": {CARD: card, OTHER: card}}))
    working.rename(path)
    return str(path)


def card_runner(folder: Path, **profile: Any) -> Runner:
    solos = {"slot-a": {"card": "GPU-240876ad"}, "slot-b": {"card": "GPU-bc62df2a"}}
    values: dict[str, Any] = {"solos": solos, "power_limit_watts": 225.0, "recorded_cards": recorded(folder)}
    return Runner(folder, **(values | profile))


def test_the_card_is_pinned_by_its_whole_uuid(tmp_path: Path) -> None:
    runner = card_runner(tmp_path)
    status, said = runner.run("/bin/sh", "-c", "echo $CUDA_VISIBLE_DEVICES", solo="slot-b")
    assert status == 0
    assert runner.log.read_text().split()[-1] == OTHER
    assert "comes from a recording, not from NVML" in said
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


def test_nvmls_answers_are_read_in_their_units(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver("pynvml")
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    cards = NvmlCards()
    assert find_card(cards, "GPU-bc62df2a") == OTHER
    assert (cards.enforced_power_limit_watts(CARD), cards.enforced_power_limit_watts(OTHER)) == (225.0, 300.5)
    assert cards.free_memory_bytes(CARD) == 7 << 30
    driver.lost = True
    with pytest.raises(Refused, match="NVML gives no answer; found: nvmlDeviceGetHandleByUUID: GPU is lost"):
        cards.enforced_power_limit_watts(CARD)


def test_without_a_driver_nvml_refuses() -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this host has a driver")
    with pytest.raises(Refused, match="NVML does not answer"):
        NvmlCards()


# --- conditions


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        ({"minimum_free_memory_gib": 1e6}, "refused: too little free memory; expected: at least 1e+06 GiB"),
        ({"power_limit_watts": 300.0}, "the card's power limit is another one; expected: 300 W enforced; found: 225 W"),
        ({"minimum_free_card_memory_gib": 99.0}, "too little free card memory; expected: at least 99 GiB; found: 16.0"),
        ({"solos": {"slot-a": {"card": "GPU-00000000"}, "slot-b": {}}}, "refused: no such card"),
        ({"recorded_cards": "/nowhere.json"}, "the recorded cards cannot be read"),
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


def test_swap_is_forbidden_where_control_groups_are_ours(tmp_path: Path) -> None:
    """A folder in the place of the cgroup file system; the kernel would make the group's files."""
    own = tmp_path / "cgroup"
    own.write_text("0::/user/session\n")
    parent = tmp_path / "mount" / "user" / "session"
    parent.mkdir(parents=True)
    assert forbid_swap(1, "d2-x", mount=tmp_path / "mount", own=own) is None  # no controllers
    (parent / "cgroup.subtree_control").write_text("cpu memory\n")
    real = Path.mkdir

    def mkdir(self: Path, *arguments: Any, **options: Any) -> None:
        real(self, *arguments, **options)
        (self / "memory.swap.max").write_text("max\n")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "mkdir", mkdir)
        group = forbid_swap(1234, "d2-x", mount=tmp_path / "mount", own=own)
    assert group == parent / "d2-x"
    assert (group / "memory.swap.max").read_text().startswith("0")
    assert (group / "cgroup.procs").read_text() == "1234"
    own.write_text("4:memory:/v1\n")
    assert forbid_swap(1, "d2-y", mount=tmp_path / "mount", own=own) is None


def test_swapped_memory_stops_the_job() -> None:
    from d2lib.coordinator.locked import _over

    assert _over(Usage(1, 0), 10) is None
    assert "8 KiB of the job are in swap" in str(_over(Usage(1, 8192), 10))
    assert "resident memory" in str(_over(Usage(11, 0), 10))


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
