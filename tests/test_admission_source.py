"""The child that recomputes a verdict, the snapshot it runs from, and the list of files that a verdict hangs on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from d2lib.admission.recompute import recompute_verdict
from d2lib.admission.source import NUMERICAL, check_numerical, check_source, numerical_files, snapshot_source
from d2lib.errors import Refused
from d2lib.evidence.environment import library_folder
from d2lib.files import read_json, sha256_file


def fake_source(folder: Path, program: str) -> Path:
    """A snapshot whose verdict module is this program."""
    (folder / "d2lib/gates").mkdir(parents=True)
    for name in ("__init__.py", "gates/__init__.py"):
        (folder / "d2lib" / name).write_text("")
    (folder / "d2lib/gates/pilot.py").write_text(program)
    return folder


REPORT = """
import json, os, sys
import d2lib, d2lib.gates
print(json.dumps({"environment": dict(os.environ), "path": sys.path, "arguments": sys.argv[1:], "cwd": os.getcwd(),
                  "stdin": sys.stdin.read(), "library": d2lib.__file__, "flags": [sys.flags.safe_path,
                  sys.flags.no_user_site]}))
"""


def test_the_child_runs_the_snapshot_in_an_environment_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "LD_PRELOAD", "PYTHONSTARTUP", "PYTHONINSPECT", "GIT_DIR", "D2_COORDINATOR"):
        monkeypatch.setenv(name, "/nowhere")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    source = fake_source(tmp_path / "a snapshot; $(touch x)", REPORT)
    scores = tmp_path / "scores; touch y.json"
    found = recompute_verdict(source, scores)
    assert found["library"] == str(source / "d2lib/__init__.py")
    assert found["path"][0] == str(source)
    assert found["arguments"] == [str(scores)]
    assert found["environment"]["PYTHONPATH"] == str(source)
    assert found["environment"]["CUDA_VISIBLE_DEVICES"] == ""
    assert not {"AWS_SECRET_ACCESS_KEY", "LD_PRELOAD", "PYTHONSTARTUP", "GIT_DIR", "D2_COORDINATOR"} & set(
        found["environment"]
    )
    assert found["stdin"] == ""
    assert found["cwd"] not in (os.getcwd(), str(tmp_path))
    assert found["flags"] == [True, 1]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a snapshot; $(touch x)"
    ]  # nothing went through a shell
    assert not list(source.rglob("__pycache__"))


@pytest.mark.parametrize("place", ["d2lib/__pycache__/files.cpython-311.pyc", "d2lib/gates.pyc"])
def test_byte_code_beside_the_source_is_refused(place: str, tmp_path: Path) -> None:
    source = fake_source(tmp_path / "s", "print('{}')")
    assert recompute_verdict(source, tmp_path / "scores.json") == {}
    (source / place).parent.mkdir(exist_ok=True)
    (source / place).write_bytes(b"")
    with pytest.raises(Refused, match="byte code"):
        recompute_verdict(source, tmp_path / "scores.json")


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import sys; sys.exit(2)", "gave no verdict.*exit status 2: no message"),
        ("raise ValueError('broken')", "exit status 1|not valid JSON"),
        ("import sys; print('refused: bad', file=sys.stderr); sys.exit(2)", "exit status 2: refused: bad"),
        ("import os; os.kill(os.getpid(), 9)", "exit status -9"),
        ("print('PASS')", "not valid JSON"),
        ("print('{\"a\": NaN}')", "not finite"),
        ("print('{}')\nprint('{}')", "not valid JSON"),
        ("", "not valid JSON"),
    ],
)
def test_a_child_without_a_verdict_is_refused(program: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=message):
        recompute_verdict(fake_source(tmp_path / "s", program), tmp_path / "scores.json")


def test_a_child_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("d2lib.admission.recompute._SECONDS", 0.5)
    with pytest.raises(Refused, match="did not finish"):
        recompute_verdict(fake_source(tmp_path / "s", "import time; time.sleep(60)"), tmp_path / "scores.json")


def test_a_path_that_would_be_two_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="cannot be searched for modules"):
        recompute_verdict(tmp_path / "a:b", tmp_path / "scores.json")


def test_a_snapshot_is_the_library_and_its_map(tmp_path: Path) -> None:
    digest = snapshot_source(tmp_path / "repo")
    files = check_source(tmp_path / "repo", digest)
    assert "d2lib/gates/pilot.py" in files
    assert not any("__pycache__" in name for name in files)
    assert check_numerical(tmp_path / "repo") > 15
    with pytest.raises(Refused, match="never overwritten"):
        snapshot_source(tmp_path / "repo")
    (tmp_path / "source").mkdir()
    (tmp_path / "source/link.py").symlink_to(tmp_path / "repo/SOURCE_MAP.json")
    with pytest.raises(Refused, match="a link is not allowed"):
        snapshot_source(tmp_path / "other", {"source": tmp_path / "source"})


@pytest.mark.parametrize(
    "value", [{}, [], {"d2lib/x.py": {"size": 1}}, {"d2lib/x.py": {"size": 1, "sha256": "x"}}, {"d2lib/x.py": 3}]
)
def test_a_bad_map_is_refused(value: object, tmp_path: Path) -> None:
    (tmp_path / "SOURCE_MAP.json").write_text(json.dumps(value))
    with pytest.raises(Refused, match="not a"):
        check_source(tmp_path, sha256_file(tmp_path / "SOURCE_MAP.json"))


def test_a_map_without_the_library_is_not_numerical(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source/a.py").write_text("x = 1\n")
    snapshot_source(tmp_path / "repo", {"docs": tmp_path / "source"})
    assert list(read_json(tmp_path / "repo/SOURCE_MAP.json")) == ["docs/a.py"]
    with pytest.raises(Refused, match="differ from the pilot's"):
        check_numerical(tmp_path / "repo")


def test_the_numerical_files_are_what_the_verdicts_modules_import() -> None:
    """Against the interpreter: whatever of d2lib a fresh process has loaded after importing them is in the list."""
    root = library_folder()
    found = numerical_files(root)
    wanted = {
        "gates/evaluate.py",
        "gates/g2.py",
        "gates/scoring.py",
        "train/full.py",
        "data/assembly.py",
        "data/blocks.py",
    }
    wanted |= {"gates/pilot.py", "gates/bootstrap.py", "gates/request.py", "train/loop.py", "train/checkpoint.py"}
    assert wanted <= found
    assert not {"plots.py", "cli.py", "evidence/engine.py", "coordinator/jobs.py"} & found
    modules = [
        "d2lib." + name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        for name in found
        if any(name == entry or name.startswith(entry) for entry in NUMERICAL)
    ]
    program = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "print(*sorted(m.__file__ for n, m in sys.modules.items() if n.split('.')[0] == 'd2lib'), sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = {Path(line).relative_to(root).as_posix() for line in done.stdout.splitlines()}
    assert loaded - found == set()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import d2lib.errors", {"errors.py"}),
        ("from d2lib import errors", {"errors.py"}),
        ("from d2lib.data import k2 as x", {"data/__init__.py", "data/k2.py"}),
        ("def f():\n    from d2lib.data.k2 import K2File", {"data/__init__.py", "data/k2.py"}),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import d2lib.errors", {"errors.py"}),
        ("from . import pilot", {"gates/pilot.py"}),
        ("from ..data.k2 import K2File", {"data/__init__.py", "data/k2.py"}),
        ("from .. import errors", {"errors.py"}),
        ("import d2library, os.path", set()),
        ("'import d2lib.errors'", set()),
    ],
)
def test_every_form_of_import_is_followed(tmp_path: Path, text: str, expected: set[str]) -> None:
    names = ("__init__.py", "errors.py", "data/__init__.py", "data/k2.py", "gates/__init__.py", "gates/pilot.py")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "gates/g2.py").write_text(text)
    assert numerical_files(tmp_path) == {"__init__.py", "gates/__init__.py", "gates/g2.py", "gates/pilot.py", *expected}


def test_an_import_of_an_import_belongs_too_and_broken_source_is_refused(tmp_path: Path) -> None:
    for name in ("__init__.py", "a.py", "b.py", "c.py", "gates/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "gates/g2.py").write_text("import d2lib.a")
    (tmp_path / "a.py").write_text("import d2lib.b")
    (tmp_path / "b.py").write_text("import d2lib.a")
    assert numerical_files(tmp_path) == {"__init__.py", "a.py", "b.py", "gates/__init__.py", "gates/g2.py"}
    (tmp_path / "b.py").write_text("import (")
    with pytest.raises(Refused, match="not Python"):
        numerical_files(tmp_path)
