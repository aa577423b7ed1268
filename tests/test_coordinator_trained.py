"""What the coordinator believes of a finished training: the checkpoint itself, and not what its notebook said."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from coordinator_case import PROFILE
from data_case import write_dataset, write_trajectory
from evidence_case import make_receipt
from tiny import tiny_config, tiny_weights

from d2lib.coordinator.contract import K2_FLAGS, Paths, Plan
from d2lib.coordinator.jobs import check_trained, trained_updates
from d2lib.coordinator.profile import Profile
from d2lib.data.assembly import K2_NAMES, SCORED, Assembly
from d2lib.drafter.lora import initialization_sha256, initialize_adapter
from d2lib.drafter.weights import save_weights
from d2lib.errors import Refused
from d2lib.files import read_json, write_json
from d2lib.train import checkpoint
from d2lib.train.full import Admitted, full_training
from d2lib.train.loop import arithmetic
from d2lib.train.recipe import to_qualify

RECIPE = to_qualify("KL", 1e-3)
CONFIG = tiny_config()
UPDATES = 3  # one update an epoch


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An assembly, an admission in the ledger, and a run of full training with its receipt."""
    folder = tmp_path_factory.mktemp("trained")
    data = folder / "assembly"
    data.mkdir()
    manifest = write_dataset(data, CONFIG)
    save_weights(data / "native.safetensors", tiny_weights(CONFIG), CONFIG)
    write_json(data / "drafter.json", CONFIG.model_dump(mode="json"))
    for split in SCORED:
        write_trajectory(data, manifest, split, data / K2_NAMES[split], block_size=CONFIG.block_size)
    fresh = initialize_adapter(CONFIG, RECIPE.rank, RECIPE.seed)
    identities = Assembly(data).identities | {
        "namespace": "pilot-1",
        "recipe": str(RECIPE.sha256),
        "initialization": str(initialization_sha256(fresh)),
    }
    root = folder / "runs" / "pilot-1-full"
    path = root / "admission" / "attempt-1" / "admitted.json"
    path.parent.mkdir(parents=True)
    computed = arithmetic("fp32", "cpu", torch.get_num_threads())
    value = {"admitted": True, "recipe": RECIPE.model_dump(mode="json"), "identities": identities}
    value |= {"arithmetic": computed}
    write_json(path, value)
    make_receipt(root, "admission", 1, outputs={"admission": "admission/attempt-1/admitted.json"}, result={"held": 1})
    full_training(Assembly(data), Admitted(path), root, resume=False, save_every=300.0)
    outputs = {"adapter": "full-fast.pt"}
    make_receipt(root, "train", 1, job="full-fast", outputs=outputs, result={"updates": UPDATES})
    return folder


@pytest.mark.parametrize("name", ["precision", "device", "torch", "threads"])
def test_full_training_refuses_another_arithmetic_than_its_pilots(trained: Path, tmp_path: Path, name: str) -> None:
    """Nothing is trained; without a record, as in older receipts, there is nothing to compare."""
    here = arithmetic("fp32", "cpu", torch.get_num_threads())
    other = here | {name: {"precision": "bf16", "device": "cuda", "torch": "2.0.0+cpu", "threads": 64}[name]}
    value = read_json(trained / "runs" / "pilot-1-full" / "admission" / "attempt-1" / "admitted.json")
    write_json(tmp_path / "admitted.json", value | {"arithmetic": other})
    with pytest.raises(Refused, match=f"another {name} than its pilot; expected: {re.escape(str(other[name]))}"):
        full_training(
            Assembly(trained / "assembly"),
            Admitted(tmp_path / "admitted.json"),
            tmp_path,
            resume=False,
            save_every=300.0,
        )
    assert [path.name for path in tmp_path.iterdir()] == ["admitted.json"]
    write_json(tmp_path / "older.json", {key: value[key] for key in value if key != "arithmetic"})
    Admitted(tmp_path / "older.json").check_arithmetic("bf16", "cpu", 64)


def plan_in(folder: Path, **profile: Any) -> Plan:
    data = folder / "assembly"
    places = {flag: data / K2_NAMES[split] for split, flag in K2_FLAGS.items()}
    paths = Paths(
        source=folder / "source",
        commit="0" * 40,
        snapshot=folder / "snapshots" / "pilot-1-full",
        output=folder / "runs" / "pilot-1-full",
        assembly=data,
        pilot_source=folder / "pilot" / "repo",
        pilot_receipt=folder / "pilot" / "receipt.json",
        g1=folder / "g1.json",
        **places,
    )
    return Plan(paths, Profile.model_validate(PROFILE | profile), "params/dsv41/coordinator.yaml")


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    shutil.copytree(trained, tmp_path / "case")
    return tmp_path / "case"


def test_a_finished_training_is_believed_for_its_checkpoint(trained: Path) -> None:
    plan = plan_in(trained)
    check_trained(plan)
    assert trained_updates(plan) == UPDATES


def respoil(folder: Path, change: Callable[[checkpoint.State], checkpoint.State]) -> None:
    """Another checkpoint in the place of full-fast.pt; its receipt is not asked here."""
    path = folder / "runs" / "pilot-1-full" / "full-fast.pt"
    state = checkpoint.load(path)
    path.unlink()
    checkpoint.save(path, change(state))


def shorter(state: checkpoint.State, *, complete: bool) -> checkpoint.State:
    done = UPDATES - 1
    metrics = {name: column[:done] for name, column in state.metrics.items()}
    total = done if complete else UPDATES
    update = {
        "update": done,
        "total": total,
        "presented": int(metrics["blocks"].sum()),
        "lr": float(metrics["lr"][-1]),
    }
    return replace(
        state,
        position=state.position.model_copy(update=update),
        metrics=metrics,
        complete=complete,
        identity={**state.identity, "total": total},
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: shorter(state, complete=False), "the run is not complete"),
        (lambda state: shorter(state, complete=True), "total differs"),
        (lambda state: replace(state, identity={**state.identity, "backend": "ref"}), "backend differs"),
        (lambda state: replace(state, identity={**state.identity, "namespace": "pilot-2"}), "namespace differs"),
        (
            lambda state: replace(state, identity={**state.identity, "recipe": RECIPE.model_dump() | {"lr": 1.0}}),
            r"recipe\.lr differs",
        ),
    ],
)
def test_a_checkpoint_that_is_not_the_admitted_run_refuses(
    folder: Path, change: Callable[[checkpoint.State], checkpoint.State], message: str
) -> None:
    respoil(folder, change)
    with pytest.raises(Refused, match=message):
        trained_updates(plan_in(folder))


def test_a_notebook_that_says_something_else_than_its_checkpoint_refuses(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("d2lib.coordinator.jobs.trained_updates", lambda plan: UPDATES + 1)
    with pytest.raises(Refused, match="says something else than its checkpoint; expected: 4 updates; found: 3"):
        check_trained(plan_in(trained))


def test_the_pinned_updates_are_compared(folder: Path) -> None:
    pins = {
        "source_commit": "d1dd41a",
        "source_map": None,
        "assembly": "assembly",
        "namespace": "pilot-1",
        "manifest": "sha256:" + "1" * 64,
        **{name: {"train": 1, "dev": 1, "heldout_legal": 1, "heldout_general": 1} for name in ("sequences", "rows")},
        "blocks": 1,
        "objective": "KL",
        "learning_rate": 1e-3,
        "epochs": 3,
        "sample_size": 10,
    }
    plan = plan_in(folder, pins="pins.yaml")
    plan.repo.mkdir(parents=True)
    (plan.repo / "pins.yaml").write_text(yaml.safe_dump(pins | {"updates": UPDATES}))
    assert trained_updates(plan) == UPDATES
    (plan.repo / "pins.yaml").write_text(yaml.safe_dump(pins | {"updates": 11_439}))
    with pytest.raises(Refused, match="updates is not the pinned one; expected: 11439; found: 3"):
        trained_updates(plan)
