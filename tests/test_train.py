"""Training: recipes and schedules against oracles, exact resume from every boundary, real signals, refusals."""

from __future__ import annotations

import inspect
import math
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from d2lib.drafter.batch import BlockBatch
from d2lib.drafter.batched import select_rounds
from d2lib.drafter.lora import initialization_sha256, initialize_adapter
from d2lib.errors import Interrupted, Refused, Unexpected
from d2lib.files import Hashed
from d2lib.train import checkpoint
from d2lib.train.loop import TrainResult, finished, train
from d2lib.train.recipe import RECIPES, Recipe, from_receipt, to_qualify
from d2lib.train.schedule import learning_rate, total_updates
from d2lib.train.supervise import StopRequest
from tests.tiny import random_batch, tiny_config, tiny_weights

CONFIG = tiny_config()
BLOCKS = 300  # 128 + 128 + 44: the last batch of an epoch is short


class Data:
    """Blocks drawn once; a batch picks some of them."""

    def __init__(self, blocks: int = BLOCKS) -> None:
        self.all: BlockBatch = random_batch(CONFIG, blocks, seed=1)

    def __len__(self) -> int:
        return len(self.all)

    def batch(self, indices: Tensor) -> BlockBatch:
        return select_rounds(self.all, indices)

    def epoch_order(self, seed: int, epoch: int) -> Tensor:
        return torch.randperm(len(self), generator=torch.Generator().manual_seed(1000 * seed + epoch))


DATA, WEIGHTS = Data(), tiny_weights(CONFIG, 2)


def run(out: Path, recipe: Recipe, **options: Any) -> TrainResult:
    options = {"name": "run", "identity": {"data": "d"}, "progress": False, **options}
    return train(DATA, CONFIG, WEIGHTS, recipe, out, **options)


def stop_after(updates: int) -> Any:
    calls = iter(range(1, 10_000))
    return lambda: next(calls) >= updates


def same(left: TrainResult, right: TrainResult) -> bool:
    a, b = checkpoint.load(left.path), checkpoint.load(right.path)
    return all(
        one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)
        for one, other in ((getattr(a, part), getattr(b, part)) for part in ("adapter", "moments", "rng", "metrics"))
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TrainResult]:
    return {name: run(tmp_path_factory.mktemp(name), to_qualify(name, 1e-2, 3)) for name in ("LR", "ACE")}


@pytest.mark.parametrize("name", ["LR", "ACE"])
@pytest.mark.parametrize("stop", range(1, 9))
def test_resumed_anywhere_it_ends_with_the_same_bits(
    name: str, stop: int, whole: dict[str, TrainResult], tmp_path: Path
) -> None:
    recipe = to_qualify(name, 1e-2, 3)
    with pytest.raises(Interrupted, match=f"update {stop} of 9"):
        run(tmp_path, recipe, stop=stop_after(stop))
    assert checkpoint.latest(tmp_path / "run.checkpoints") == checkpoint.step_path(tmp_path / "run.checkpoints", stop)
    assert same(run(tmp_path, recipe, resume=True), whole[name])


def test_many_interruptions_and_timed_saves_change_nothing(whole: dict[str, TrainResult], tmp_path: Path) -> None:
    recipe = to_qualify("ACE", 1e-2, 3)
    now = iter(float(tick) for tick in range(100_000))
    for _ in range(4):
        with pytest.raises(Interrupted):
            run(tmp_path, recipe, resume=True, stop=stop_after(2), clock=lambda: next(now), save_every=1.0)
    assert same(run(tmp_path, recipe, resume=True), whole["ACE"])
    assert sorted(p.name for p in (tmp_path / "run.checkpoints").iterdir())[:2] == [
        "step-000000001.pt",
        "step-000000002.pt",
    ]


def test_checkpoints_cannot_be_written_to(whole: dict[str, TrainResult]) -> None:
    assert whole["ACE"].path.stat().st_mode & 0o777 == 0o444


def test_training_learns_and_a_rate_of_zero_does_not(whole: dict[str, TrainResult], tmp_path: Path) -> None:
    loss = whole["ACE"].metrics["loss_sum"] / whole["ACE"].metrics["blocks"]
    assert loss[-1] < loss[0]
    still = run(tmp_path, to_qualify("ACE", 0.0, 1))
    start = initialize_adapter(CONFIG, 32, 23)
    assert all(torch.equal(still.adapter[name], start[name]) for name in start)


def test_ref_and_fast_arms_take_the_same_steps(tmp_path: Path) -> None:
    recipe = to_qualify("KL", 1e-3, 1)
    fast = run(tmp_path / "f", recipe, limit_updates=2)
    ref = run(tmp_path / "r", recipe, limit_updates=2, backend="ref")
    assert torch.allclose(fast.metrics["loss_sum"], ref.metrics["loss_sum"], rtol=1e-5)
    assert torch.allclose(fast.metrics["grad_norm"], ref.metrics["grad_norm"], rtol=1e-4)


def test_one_update_is_torchs_adamw(tmp_path: Path) -> None:
    from d2lib.drafter.family import fast_drafter
    from d2lib.drafter.objectives import OBJECTIVES

    result = run(tmp_path, to_qualify("TVD", 1e-2, 1), limit_updates=1)
    leaves = {k: v.requires_grad_() for k, v in initialize_adapter(CONFIG, 32, 23).items()}
    oracle = torch.optim.AdamW(leaves.values(), lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    batch = DATA.batch(DATA.epoch_order(23, 0)[:128])
    fast_drafter(CONFIG, WEIGHTS, leaves).loss(batch, OBJECTIVES["TVD"]).loss.backward()
    torch.nn.utils.clip_grad_norm_(leaves.values(), 1.0)
    oracle.step()
    assert all(torch.equal(result.adapter[k], leaves[k].detach()) for k in leaves)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"identity": {"data": "other"}}, "data"),
        ({"identity": {"data": "d", "pilot": "p"}}, "pilot"),
        ({"backend": "ref"}, "backend"),
        ({"precision": "bf16"}, "precision"),
        ({"limit_updates": 8}, "total"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(change: dict[str, Any], field: str, tmp_path: Path) -> None:
    recipe = to_qualify("KL", 1e-3, 3)
    with pytest.raises(Interrupted):
        run(tmp_path, recipe, stop=stop_after(1))
    with pytest.raises(Refused, match=f"{field} differs"):
        run(tmp_path, recipe, resume=True, **change)


def test_a_checkpoint_of_another_recipe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        run(tmp_path, to_qualify("KL", 1e-3, 3), stop=stop_after(1))
    with pytest.raises(Refused, match=r"recipe\.lr differs"):
        run(tmp_path, to_qualify("KL", 2e-3, 3), resume=True)


def test_begun_and_complete_runs_are_refused(whole: dict[str, TrainResult], tmp_path: Path) -> None:
    recipe = to_qualify("KL", 1e-3, 3)
    with pytest.raises(Interrupted):
        run(tmp_path, recipe, stop=stop_after(1))
    with pytest.raises(Refused, match="begun before"):
        run(tmp_path, recipe)
    with pytest.raises(Refused, match="never run again"):
        run(whole["ACE"].path.parent, to_qualify("ACE", 1e-2, 3), resume=True)


def test_another_initialization_is_refused(tmp_path: Path) -> None:
    wrong = initialization_sha256(initialize_adapter(CONFIG, 32, 24))
    with pytest.raises(Refused, match="starts elsewhere"):
        run(tmp_path, to_qualify("KL"), expected_initialization=wrong)
    right: Hashed = initialization_sha256(initialize_adapter(CONFIG, 32, 23))
    assert run(tmp_path, to_qualify("KL"), expected_initialization=right, limit_updates=1).initialization == right


class _Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, ("exploded",)


@pytest.mark.parametrize("damage", ["truncated", "pickle", "stranger", "link"])
def test_damaged_checkpoints_are_refused_and_kept(damage: str, tmp_path: Path) -> None:
    recipe = to_qualify("KL", 1e-3, 3)
    with pytest.raises(Interrupted):
        run(tmp_path, recipe, stop=stop_after(2))
    path = checkpoint.latest(tmp_path / "run.checkpoints")
    assert path is not None
    if damage == "truncated":
        data = path.read_bytes()
        path.chmod(0o644)
        path.write_bytes(data[: len(data) // 2])
    elif damage == "pickle":
        checkpoint.step_path(path.parent, 3).write_bytes(pickle.dumps(_Bomb()))
    elif damage == "link":
        checkpoint.step_path(path.parent, 3).symlink_to(path)
    else:
        (path.parent / "best.pt").write_bytes(b"")
    with pytest.raises(Refused):
        run(tmp_path, recipe, resume=True)
    assert path.exists()
    assert not Path("exploded").exists()


def test_an_unfinished_save_is_not_a_boundary(whole: dict[str, TrainResult], tmp_path: Path) -> None:
    recipe = to_qualify("ACE", 1e-2, 3)
    with pytest.raises(Interrupted):
        run(tmp_path, recipe, stop=stop_after(2))
    (tmp_path / "run.checkpoints" / ".step-000000005.pt.abc.part").write_bytes(b"half")
    assert same(run(tmp_path, recipe, resume=True), whole["ACE"])


def test_numbers_that_are_not_finite_stop_the_run(tmp_path: Path) -> None:
    broken = dict(WEIGHTS)
    data = Data(130)
    data.all.teacher_hidden[:] = float("nan")
    with pytest.raises(Unexpected, match="not finite"):
        train(data, CONFIG, broken, to_qualify("KL"), tmp_path, name="run", identity={}, progress=False)
    assert not list((tmp_path / "run.checkpoints").iterdir())


def test_an_unfinished_run_has_no_result(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        run(tmp_path, to_qualify("KL", 1e-3, 3), stop=stop_after(1))
    with pytest.raises(Refused, match="not complete"):
        finished(checkpoint.step_path(tmp_path / "run.checkpoints", 1), CONFIG)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("total", [1, 9, 57])
def test_schedules_are_torchs(name: str, total: int) -> None:
    recipe = RECIPES[name]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=recipe.lr)
    warmup = math.ceil(recipe.warmup_fraction * total)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, total - warmup))
    rates = []
    if warmup:
        ramp = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda u: (u + 1) / warmup)
        for _ in range(warmup):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            ramp.step()
        optimizer.param_groups[0]["lr"] = recipe.lr
    for _ in range(total - warmup):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        cosine.step()
    assert [learning_rate(u, total, recipe) for u in range(total)] == pytest.approx(rates, rel=1e-9, abs=1e-15)


def test_production_counts() -> None:
    assert total_updates(488_031, RECIPES["ACE"]) == 11_439
    assert math.ceil(RECIPES["LR"].warmup_fraction * 11_439) == 1_144
    assert {n: (r.lr, r.schedule) for n, r in RECIPES.items()} == {
        "KL": (2e-4, "cosine"),
        "TVD": (2e-4, "cosine"),
        "LR": (5e-5, "warmup_cosine"),
        "ACE": (2e-4, "cosine"),
    }


@given(total=st.integers(1, 400), name=st.sampled_from(sorted(RECIPES)))
@settings(max_examples=30, deadline=None)
def test_rates_stay_within_the_peak(total: int, name: str) -> None:
    rates = [learning_rate(u, total, RECIPES[name]) for u in range(total)]
    assert all(0 <= rate <= RECIPES[name].lr for rate in rates)


def test_a_recipe_comes_from_a_receipt_whole_or_not_at_all() -> None:
    recipe = to_qualify("LR", 3e-3, 2)
    assert from_receipt({"recipe": recipe.model_dump(mode="json")}) == recipe
    good = recipe.model_dump(mode="json")
    for name in good:
        with pytest.raises(Refused, match="not a known recipe"):
            from_receipt({"recipe": {k: v for k, v in good.items() if k != name}})
    for change in (
        {"objective": "MSE"},
        {"batch": 64},
        {"rank": 16},
        {"seed": 24},
        {"weight_decay": 0.0},
        {"clip": float("nan")},
        {"lr": float("nan")},
        {"lr": "2e-4"},
        {"schedule": "cosine"},
        {"warmup_fraction": 0.2},
        {"extra": 1},
    ):
        with pytest.raises(Refused):
            from_receipt({"recipe": good | change})
    with pytest.raises(Refused, match="no recipe"):
        from_receipt({})
    with pytest.raises(Refused, match="unknown objective"):
        to_qualify("MSE")


def test_full_training_has_no_recipe_option() -> None:
    from d2lib.params import TrainParams
    from d2lib.train.full import full_training

    names = set(TrainParams.model_fields) | set(inspect.signature(full_training).parameters)
    assert not names & (set(Recipe.model_fields) | {"recipe"})


def test_a_stop_request_only_sets_a_flag_and_puts_handlers_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        assert not stop()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop()
    assert signal.getsignal(signal.SIGTERM) is before


CHILD = """
import sys, torch
from pathlib import Path
torch.set_num_threads(1)
from tests.test_train import CONFIG, DATA, WEIGHTS
from d2lib.errors import Interrupted
from d2lib.train.loop import train
from d2lib.train.recipe import to_qualify
from d2lib.train.supervise import StopRequest
print("ready", flush=True)
try:
    with StopRequest() as stop:
        train(DATA, CONFIG, WEIGHTS, to_qualify("ACE", 1e-2, 30), Path(sys.argv[1]), name="run", identity={"data": "d"},
              resume=True, stop=stop, save_every=0.0, progress=False)
except Interrupted as error:
    print(error.message, flush=True)
    sys.exit(3)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_process_resumes_with_the_same_bits(number: signal.Signals, tmp_path: Path) -> None:
    root = Path(__file__).parent.parent
    command = [sys.executable, "-c", CHILD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as child:
        assert child.stdout is not None
        child.stdout.readline()
        while len(list(tmp_path.glob("run.checkpoints/step-*.pt"))) < 3:
            time.sleep(0.01)
        child.send_signal(number)
        said = child.stdout.read()
    assert child.returncode == (3 if number == signal.SIGTERM else -signal.SIGKILL)
    if number == signal.SIGTERM:
        assert "of 90" in said
    recipe = to_qualify("ACE", 1e-2, 30)
    resumed = run(tmp_path, recipe, resume=True)
    assert same(resumed, run(tmp_path / "whole", recipe))
