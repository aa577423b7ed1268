"""The installation: what is refused before anything is downloaded, which torch is taken, what a failing pip says."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parent.parent
SUPPORTED = ["3.11.2", "3.11.5", "3.12.0", "3.13.0"]
"""Debian 12 has 3.11.2."""


@pytest.fixture(scope="module")
def install() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", ROOT / "install.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_pin_takes_every_python_that_the_project_takes() -> None:
    """Of the packages that are installed here, by their own metadata."""
    refusing, seen = [], 0
    for line in (ROOT / "requirements.lock").read_text().splitlines():
        name, _, version = line.partition("==")
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if found.version.partition("+")[0] == version.strip():
            seen += 1
            allowed = SpecifierSet(found.metadata.get("Requires-Python") or "")
            refusing += [f"{name} on {python}" for python in SUPPORTED if python not in allowed]
    assert seen > 100
    assert refusing == []


@pytest.mark.parametrize(
    ("version", "has_venv", "words"),
    [
        ((3, 10), True, "Python 3.11 to 3.13 is needed, found 3.10"),
        ((3, 14), True, "found 3.14"),
        ((4, 0), True, "found 4.0"),
        ((3, 11), False, "apt-get install python3.11-venv"),
        ((3, 11), True, None),
        ((3, 13), True, None),
    ],
)
def test_what_cannot_work_is_refused(
    install: ModuleType, version: tuple[int, int], has_venv: bool, words: str | None
) -> None:
    why = install.refusal(version, has_venv)
    assert (why is None) == (words is None)
    if words is not None:
        assert words in why
        assert "\n" not in why


def test_a_refused_python_downloads_and_makes_nothing(
    install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("something was started")

    for name in ("run", "Popen"):
        monkeypatch.setattr(install.subprocess, name, started)
    monkeypatch.setattr(install, "reachable", started)
    monkeypatch.setattr(install.sys, "version_info", (3, 10, 4))
    assert install.main([str(tmp_path / "venv")]) == 2
    assert len(capfd.readouterr().err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_torch_for_cpu_is_taken_where_there_is_no_driver(install: ModuleType) -> None:
    asked: list[str] = []

    def answers(url: str) -> bool:
        asked.append(url)
        return True

    assert install.torch_options(True, answers, [])[0] == []
    assert install.torch_options(False, answers, ["--index-url", "x"])[0] == []
    assert asked == []  # neither needs to know
    options, word = install.torch_options(False, answers, [])
    assert options == ["--extra-index-url", install.CPU_INDEX]
    assert "2 GB" in word
    options, word = install.torch_options(False, lambda _: False, [])
    assert options == []
    assert "cannot be reached" in word
    assert "5.6 GB" in word


def test_an_index_that_does_not_answer_costs_seconds(install: ModuleType) -> None:
    assert install.PROBE_SECONDS <= 10
    assert not install.reachable("http://127.0.0.1:9")
    assert not install.reachable("no url")


def test_pips_failure_is_a_few_readable_lines(install: ModuleType) -> None:
    ignored = "ERROR: Ignored the following versions that require a different python version: " + "1.0 " * 900
    lines = [
        "Collecting six\n",
        ignored + "\n",
        "ERROR: Could not find a version that satisfies the requirement x==2 (from versions: 1.0, 1.1"
        + ", 1" * 500
        + ")\n",
        "ERROR: No matching distribution found for x==2\n",
    ]
    assert install.complaint(lines) == [
        "ERROR: Could not find a version that satisfies the requirement x==2",
        "ERROR: No matching distribution found for x==2",
    ]
    assert install.complaint(["a\n", "b\n"]) == ["a", "b"]


@pytest.mark.parametrize("fails", [False, True])
def test_every_package_that_pip_comes_to_is_shown(
    install: ModuleType, fails: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\nshift 4\necho 'Collecting six==1.17.0'\necho '  Downloading torch-2.whl (190.5 MB)'\n"
        "echo 'Processing /opt/files/soupsieve-3.0.1-py3-none-any.whl'\necho 'Installing collected packages: six'\n"
        + ("echo 'ERROR: no room'\nexit 1\n" if fails else "exit 0\n")
    )
    python.chmod(0o755)
    said: list[str] = []
    with open(tmp_path / "log", "w") as log:
        status = install.run_pip(str(python), ["-r", "lock"], log, 142, said.append)
    assert status == int(fails)
    shown = [text for text in said if text]
    assert [text.split(" ")[0] for text in shown] == ["1", "Downloading", "2", "unpacking:"]
    assert [shown[0], shown[2]] == ["1 of 142 six", "2 of 142 soupsieve"]
    err = capfd.readouterr().err
    assert err == (f"ERROR: no room\npip failed; its whole text: {tmp_path / 'log'}\n" if fails else "")
    assert "Collecting six" in (tmp_path / "log").read_text()


def npm(folder: Path, script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """tests/browser/install.sh with an npm of ours."""
    (folder / "browser").mkdir()
    (folder / "bin").mkdir()
    for name in ("install.sh", "package.json", "package-lock.json"):
        source = ROOT / "tests" / "browser" / name
        (folder / "browser" / name).write_bytes(source.read_bytes())
        (folder / "browser" / name).chmod(0o755)
    (folder / "bin" / "npm").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "bin" / "npm").chmod(0o755)
    variables = {name: value for name, value in os.environ.items() if name != "CI"}
    variables |= {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", **environment}
    command = [str(folder / "browser" / "install.sh")]
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)


OFFLINE = "mkdir -p node_modules/half; echo 'npm error code ENOTFOUND' >&2; exit 1"


def test_without_npms_registry_the_browser_tests_are_skipped_with_one_line(tmp_path: Path) -> None:
    done = npm(tmp_path, OFFLINE)
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 1)
    assert "code ENOTFOUND" in done.stdout
    assert "skipped" in done.stdout
    assert not (tmp_path / "browser" / "node_modules").exists()


def test_in_ci_that_is_a_failure(tmp_path: Path) -> None:
    done = npm(tmp_path, OFFLINE, CI="true")
    assert done.returncode == 1
    assert "ENOTFOUND" in done.stderr


def test_with_the_registry_it_is_installed_once(tmp_path: Path) -> None:
    made = "mkdir -p node_modules; touch node_modules/.package-lock.json; echo ran >> ran"
    assert npm(tmp_path, made, CI="true").returncode == 0
    again = subprocess.run([str(tmp_path / "browser" / "install.sh")], capture_output=True, text=True, check=False)
    assert (again.returncode, again.stdout) == (0, "")
    assert (tmp_path / "browser" / "ran").read_text() == "ran\n"


def test_ci_says_that_it_is_ci() -> None:
    assert re.search(r"^export CI=true", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)


def test_the_readme_states_both_sizes() -> None:
    readme = (ROOT / "README.md").read_text()
    assert "about 2 GB" in readme
    assert "5.6 GB" in readme


def test_the_installer_is_read_by_older_pythons() -> None:
    """It must at least say which Python is needed: no syntax that came after 3.7."""
    import ast

    ast.parse((ROOT / "install.py").read_text(), feature_version=(3, 7))
    done = subprocess.run([sys.executable, "-S", "-c", "import install"], cwd=ROOT, check=False)
    assert done.returncode == 0  # the standard library alone
