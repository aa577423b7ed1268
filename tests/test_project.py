"""The project as a whole: equal pins, commands that exist, notebooks and parameters that fit their schemas."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import nbformat
import pytest
import yaml
from data_case import PRODUCTION, manifest_of, production_rows
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from d2lib.chain import CHAIN
from d2lib.coordinator.profile import load_profile
from d2lib.cost import load_inputs
from d2lib.lab.capture import parse_profile
from d2lib.params import SCHEMAS
from d2lib.train.pins import read_pins
from d2lib.train.recipe import RECIPES

ROOT = Path(__file__).resolve().parent.parent
GATES_ASK = {"train": 65, "dev": 30, "heldout_legal": 24, "heldout_general": 12}
PROFILES = sorted(path for path in (ROOT / "params").iterdir() if (path / "capture.yaml").exists())
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def pins(lines: list[str]) -> dict[str, str]:
    """Canonical name → exact version, of the requirements that pin one."""
    found = {}
    for line in lines:
        requirement = Requirement(line)
        versions = [clause.version for clause in requirement.specifier if clause.operator == "=="]
        if versions:
            found[str(canonicalize_name(requirement.name))] = versions[0]
    return found


def test_pyproject_environment_and_lock_pin_the_same_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    lock = pins([line for line in lines if line and not line.startswith("#")])
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    conda = pins(next(part["pip"] for part in environment["dependencies"] if isinstance(part, dict)))
    ours = pins(project["dependencies"] + project["optional-dependencies"]["test"])
    assert len(ours) > 20
    assert {name: lock.get(name) for name in ours} == ours
    assert {name: version for name, version in ours.items() if conda.get(name) != version} == {}
    assert {name: lock.get(name) for name in conda} == conda


def test_every_make_target_that_the_readme_names_exists() -> None:
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    named = set(re.findall(r"`?make ([a-z][a-z0-9-]*)\b", readme)) - {"sure"}
    assert {"demo", "test"} <= named
    assert {name for name in named if not re.search(rf"^{name}:", makefile, re.MULTILINE)} == set()


def test_every_file_that_the_readme_links_to_exists() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text())
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_one_parameters_cell_with_its_schemas_fields(path: Path) -> None:
    notebook = nbformat.read(path, 4)
    assert notebook.metadata["d2"]["phase"] == path.stem
    cells = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    assert len(cells) == 1
    names = set(re.findall(r"^(\w+) = ", cells[0].source, re.MULTILINE))
    schema = SCHEMAS[path.stem]
    assert names <= set(schema.model_fields)
    assert {name for name, field in schema.model_fields.items() if field.is_required()} <= names


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_with_outputs_and_without_private_paths(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"/(home|root|tmp|Users|work)/", text)
    assert len(text) < 600_000
    code = [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
    assert any("NBVAL_CHECK_OUTPUT" in cell.source and cell.outputs for cell in code)
    assert not any(output.output_type == "error" for cell in code for output in cell.outputs)


def test_every_phase_of_the_chain_has_a_notebook() -> None:
    assert {step.phase for step in CHAIN} | {"stage"} <= {path.stem for path in NOTEBOOKS}


@pytest.mark.parametrize("profile", PROFILES, ids=lambda path: path.name)
def test_a_profiles_parameters_fit(profile: Path) -> None:
    for step in CHAIN:
        values: dict[str, Any] = yaml.safe_load((profile / f"{step.name}.yaml").read_text())
        params = SCHEMAS[step.phase].model_validate(values)
        assert params.run == f"runs/{profile.name}"
    capture = yaml.safe_load((profile / "capture.yaml").read_text())["profile"]
    assert parse_profile(capture).namespace == profile.name
    load_inputs(profile / "cost_sheet.yaml")


def test_no_parameter_of_full_training_is_a_recipe() -> None:
    recipe = {"objective", "learning_rate", "lr", "epochs", "rank", "batch", "recipe", "schedule", "weight_decay"}
    for phase in ("admission", "stage", "train", "g2", "finish"):
        assert not recipe & set(SCHEMAS[phase].model_fields), phase


def test_demo_null_is_the_demo_at_rate_zero() -> None:
    demo, null = ROOT / "params" / "demo", ROOT / "params" / "demo-null"
    one, other = (yaml.safe_load((folder / "capture.yaml").read_text())["profile"] for folder in (demo, null))
    assert one | {"namespace": ""} == other | {"namespace": ""}
    rates = [yaml.safe_load((folder / "pilot.yaml").read_text())["learning_rate"] for folder in (demo, null)]
    assert rates[0] > 0
    assert rates[1] == 0


def test_every_name_that_a_notebook_imports_exists() -> None:
    """Without running one: a name that moved is found here and not after the hours before its cell."""
    missing = []
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "d2lib":
                module = importlib.import_module(str(node.module))
                for name in (alias.name for alias in node.names):
                    if not hasattr(module, name) and not (
                        hasattr(module, "__path__") and importlib.util.find_spec(f"{node.module}.{name}")
                    ):
                        missing.append(f"{path.name}: {node.module}.{name}")
    assert missing == []


@pytest.mark.parametrize("profile", PROFILES, ids=lambda path: path.name)
def test_admission_demands_what_the_profile_asks_of_capture_and_pilot(profile: Path) -> None:
    """One profile, one set of numbers: otherwise admission would refuse its own pilot, or take a smaller one."""
    admission, pilot, capture = (
        yaml.safe_load((profile / f"{name}.yaml").read_text()) for name in ("admission", "pilot", "capture")
    )
    demands = SCHEMAS["admission"].model_validate(admission).demands
    assert (demands.presented_blocks, demands.sample_size) == (pilot["presented_blocks"], pilot["sample_size"])
    if "traffic" in capture["profile"]:  # whose files say how many there are
        assert demands.sequences == GATES_ASK
    else:
        wanted = capture["profile"]["sequences"].items()
        assert demands.sequences == {split: sum(kinds.values()) for split, kinds in wanted}


def test_the_productions_pins_are_the_source_documents_and_agree_with_each_other() -> None:
    pins = read_pins(ROOT / "params" / "dsv41" / "pins.yaml")
    assert pins.manifest == "sha256:450bb71653f3def68cd95ee9579a456c74c469d08a016940cceda24de48b4f30"
    assert (pins.source_commit, pins.assembly[-3:], pins.namespace) == ("d1dd41a", "-c2", "decode-d2pass2-r1-p2-ace")
    assert (pins.blocks, pins.updates, pins.objective, pins.learning_rate, pins.epochs, pins.sample_size) == (
        *(488_031, 11_439, "ACE", 2e-4, 3),
        1000,
    )
    assert {split: (pins.sequences[split], pins.rows[split]) for split in pins.rows} == PRODUCTION
    pins.compare_data("the production's row counts", manifest_of(production_rows()), RECIPES["ACE"])
    coordinator = load_profile(ROOT / "params" / "dsv41" / "coordinator.yaml")
    assert coordinator.pins == "params/dsv41/pins.yaml"
    assert Path(str(coordinator.assembly)).name == pins.assembly
    assert coordinator.admission.demands.sample_size == pins.sample_size
    assert coordinator.admission.demands.sequences == pins.sequences
    assert -(-coordinator.admission.demands.presented_blocks // RECIPES["ACE"].batch) == 159
