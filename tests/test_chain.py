"""The chain's order and the command line: what goes on, what stops, and the exit statuses."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
from evidence_case import make_run

from d2lib.chain import CHAIN, read_parameters, run_chain, run_root
from d2lib.cli import main
from d2lib.errors import ExitStatus, Refused

ROOT = Path(__file__).resolve().parent.parent
DONE, VERDICT, REFUSED, INTERRUPTED = (
    ExitStatus.DONE,
    ExitStatus.VERDICT,
    ExitStatus.REFUSED,
    ExitStatus.INTERRUPTED,
)


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    for step in CHAIN:
        (tmp_path / f"{step.name}.yaml").write_text("run: runs/case\n")
    return tmp_path


class Phases:
    """Stands for papermill: says what it was asked to run, and ends each step with a given status."""

    def __init__(self, **status: ExitStatus) -> None:
        self.status, self.ran = status, list[str]()

    def __call__(
        self, notebook: Path, parameters: dict[str, Any], runs: Path, namespace: str, *, job: str | None
    ) -> Any:
        name = notebook.stem if job is None else f"{notebook.stem}-{job}"
        assert (parameters, runs, namespace) == ({"run": "runs/case"}, Path("runs"), "case")
        self.ran.append(name)
        return self.status.get(name.replace("-", "_"), DONE)


NAMES = [step.name for step in CHAIN]


@pytest.mark.parametrize(
    ("status", "expected", "ran"),
    [
        ({}, DONE, NAMES),
        ({"g2_dev": VERDICT}, DONE, NAMES),  # the last phase decides; finish says FAIL by itself
        ({"finish": VERDICT}, VERDICT, NAMES),
        ({"pilot": VERDICT, "admission": REFUSED}, REFUSED, NAMES[:5]),
        ({"g1": VERDICT}, VERDICT, NAMES[:2]),
        ({"capture": INTERRUPTED}, INTERRUPTED, NAMES[:1]),
        ({"train": ExitStatus.UNEXPECTED}, ExitStatus.UNEXPECTED, NAMES[:6]),
    ],
)
def test_what_a_status_does_to_the_chain(
    profile: Path, status: dict[str, ExitStatus], expected: ExitStatus, ran: list[str]
) -> None:
    phases = Phases(**status)
    assert run_chain(profile, Path("notebooks"), phases) is expected
    assert phases.ran == ran


def test_done_steps_are_not_run_again(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    phases = Phases()
    done = {"capture": DONE, "g1": DONE, "pilot": VERDICT}
    run_chain(profile, Path("notebooks"), phases, is_done=lambda runs, namespace, step: done.get(step))
    assert phases.ran == NAMES[3:]
    assert "capture: done before" in capsys.readouterr().err


def test_all_parameters_are_read_before_anything_runs(profile: Path) -> None:
    (profile / "finish.yaml").unlink()
    phases = Phases()
    with pytest.raises(Refused, match=r"a parameter file cannot be read.*finish\.yaml"):
        run_chain(profile, Path("notebooks"), phases)
    assert phases.ran == []


@pytest.mark.parametrize(
    ("text", "words"),
    [("[1]", "not a mapping"), ("a: [", "not valid YAML"), ("1: 2", "a YAML key is not text"), ("", "not a mapping")],
)
def test_a_parameter_file_that_is_none(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(Refused, match=words):
        read_parameters(path)


@pytest.mark.parametrize("run", [None, 3, "", "/", "."])
def test_parameters_without_a_run_root(run: Any) -> None:
    with pytest.raises(Refused, match="no run root"):
        run_root({"run": run}, Path("x.yaml"))


# --- the command line


def test_help_names_every_command_and_the_exit_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for name in (
        "chain",
        "run",
        "verify",
        "status",
        "cost-sheet",
        "site",
        "sign",
        "keygen",
        "drill",
        "full",
        "adapter",
    ):
        assert f"\n    {name}" in text, name
    assert "refused, or bad input" in text


def test_the_cost_sheet_in_a_terminal_and_as_data(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(ROOT / "params" / "dsv41" / "cost_sheet.yaml")
    assert main(["cost-sheet", "-f", path]) == 0
    text = capsys.readouterr().out
    for figure in ("2.701", "127.100", "25.233", "21.653", "4.062", "50.947", "25.715", "53.648", "28.416", "511,969"):
        assert figure in text, figure
    assert main(["cost-sheet", "-f", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("status", "plain", "any_verdict"),
    [(0, 0, 0), (1, 1, 0), (2, 2, 2), (3, 3, 3), (4, 4, 4), (ZeroDivisionError("crash"), 4, 4)],
)
def test_a_verdict_is_a_finding_when_that_is_asked_for_and_a_crash_never(
    status: int | Exception, plain: int, any_verdict: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*_: object, **__: object) -> ExitStatus:
        if isinstance(status, Exception):
            raise status
        return ExitStatus(status)

    monkeypatch.setattr("d2lib.chain.run_chain", ended)
    assert main(["chain", "params/fixture"]) == plain
    assert main(["chain", "params/fixture", "--any-verdict"]) == any_verdict


def test_the_makefile_reads_no_exit_status() -> None:
    """A crash of Python itself ends with 1 like a verdict: who wants any verdict must ask d2 for it."""
    recipes = [line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("\t")]
    assert not [line for line in recipes if "$$?" in line]
    assert len([line for line in recipes if "chain" in line and "--any-verdict" in line]) == 3


def test_verify_says_what_is_broken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = make_run(tmp_path / "runs" / "case")
    assert main(["verify", str(root)]) == 0
    path = root / "assembly" / "shard.bin"
    path.chmod(0o644)
    path.write_bytes(b"x" + path.read_bytes()[1:])
    assert main(["verify", str(root), "--json"]) == 2
    assert "assembly/shard.bin" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["verify", "nowhere"],
        ["verify", "."],
        ["status", "nowhere"],
        ["site", "nowhere", "--out", "out"],
        ["cost-sheet", "-f", "nowhere.yaml"],
        ["run", "nowhere.ipynb", "-f", "nowhere.yaml"],
        ["chain", "nowhere"],
        ["sign", "nowhere", "--key", "nowhere.pem"],
        ["drill", "nowhere"],
        ["full", "--source", "x"],
        ["adapter", "export", "nowhere", "--to", "out"],
        ["weights", "inspect", "nowhere"],
    ],
    ids=" ".join,
)
def test_a_users_mistake_is_one_clear_line_and_status_2(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert captured.err.strip() or captured.out.strip()
    assert list(tmp_path.iterdir()) == []


def test_keys_signatures_and_a_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = make_run(tmp_path / "runs" / "case")
    private, public = tmp_path / "key.pem", tmp_path / "key.json"
    assert main(["keygen", str(private), str(public)]) == 0
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    keyid = capsys.readouterr().out.split()[1]
    policy = tmp_path / "policy.yaml"
    policy.write_text(
        json.dumps({"keys": [json.loads(public.read_text())], "phases": {"finish": {"keys": [keyid], "threshold": 1}}})
    )
    assert main(["verify", str(root), "--policy", str(policy)]) == 2
    assert "finish" in capsys.readouterr().out
    assert main(["sign", str(root / "finish" / "attempt-1"), "--key", str(private)]) == 0
    assert main(["verify", str(root), "--policy", str(policy)]) == 0
    assert main(["sign", str(root / "finish" / "attempt-1"), "--key", str(private)]) == 2  # once


def test_status_gives_the_next_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = make_run(tmp_path / "runs" / "case")
    assert main(["status", str(root)]) == 0
    text = capsys.readouterr().out
    assert f"papermill --engine d2 notebooks/capture.ipynb {root}/capture/attempt-1/receipt.ipynb" in text
    assert main(["status", str(root), "--json"]) == 0
    assert {row["step"] for row in json.loads(capsys.readouterr().out)} >= {"capture", "g2-dev", "finish"}
