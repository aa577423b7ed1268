"""The benchmark's own instruments: bounds, medians, slopes, children, memory. Nothing here looks at speed."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from itertools import product
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from d2lib.benchmark import measure
from d2lib.benchmark.cases import (
    blocks_at,
    dense_config,
    drafter_config,
    random_adapter,
    random_blocks,
    random_weights,
)
from d2lib.benchmark.drafting import BF16_TOLERANCE, TOLERANCES, fast_update, measure_update, reference_update, slope
from d2lib.benchmark.head import LOSSES, HeadCase
from d2lib.benchmark.measure import Place, Row, in_child, medians
from d2lib.benchmark.step import decayed_kl, measure_training_step, run_sides, write_case
from d2lib.benchmark.threads import rates
from d2lib.benchmark.turns import Peak
from d2lib.drafter.family import fast_drafter, reference_drafter
from d2lib.errors import Refused, Unexpected


@pytest.mark.parametrize(
    ("sense", "value", "met"),
    [("<=", 1.0, True), ("<=", 1.1, False), (">=", 1.0, True), (">=", 0.9, False), (None, 5.0, None)],
)
def test_a_bound(sense: str | None, value: float, met: bool | None) -> None:
    row = Row("x", "at", "y", value, "times", sense, 1.0)  # type: ignore[arg-type]
    assert row.met is met
    assert Row("x", "at", "y", math.nan, "times", sense, 1.0).met in (False, None)  # type: ignore[arg-type]


def test_the_sides_take_turns_and_the_first_turn_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    clock = [0.0]
    pace = iter([100.0, 100.0, 1.0, 5.0, 3.0, 6.0, 2.0, 4.0])

    def side(name: str) -> None:
        order.append(name)
        clock[0] += next(pace)

    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock[0])
    assert medians({"a": lambda: side("a"), "b": lambda: side("b")}, 3) == {"a": 2.0, "b": 5.0}
    assert order == ["a", "b"] * 4


def test_slope_is_the_exponent_at_the_upper_end() -> None:
    assert slope([(1, 5.0), (8, 64.0), (2, 5.0), (4, 16.0)]) == pytest.approx(2)


def test_a_childs_failure_is_said() -> None:
    with pytest.raises(Unexpected, match=r"a measurement failed.*KeyError.*where: nonsense"):
        in_child("nonsense")


def test_peak_memory_sees_what_was_held_for_a_moment() -> None:
    with Peak() as peak:
        held = torch.ones(40_000_000)  # 160 MB
        del held
    assert 150 < peak.extra < 250


def test_both_sides_of_the_head_compute_the_same() -> None:
    case = HeadCase.random(3, vocabulary=500, dim=16, rank=4)
    for objective in LOSSES.values():
        torch.testing.assert_close(case.fused(objective).clone(), case.plain(objective), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("stretch", [1, 4])
def test_both_sides_of_an_update_compute_the_same(stretch: int) -> None:
    config = drafter_config(dim=32, vocab_size=64, window=8, n_heads=2, q_lora_rank=8, o_lora_rank=4)
    weights, adapter = random_weights(config), random_adapter(config, rank=2)
    batch = random_blocks(config, 8, stretch=stretch, rows=120)
    assert (batch.anchor.view(-1, stretch).diff(dim=1) == 1).all()
    losses = fast_update(fast_drafter(config, weights, adapter), batch, "ACE")
    assert losses == pytest.approx(
        reference_update(reference_drafter(config, weights, adapter), batch, "ACE"), rel=1e-5
    )
    assert all(tensor.grad is not None for tensor in adapter.values())


def test_in_bf16_only_the_tolerances_are_bounds() -> None:
    sizes = {"dim": 32, "vocab_size": 64, "window": 8, "n_heads": 2, "q_lora_rank": 8, "o_lora_rank": 4}
    rows = measure_update(drafter_config(**sizes), blocks=8, repeats=1, place=Place.of("cpu", "bf16"))
    speed = [row for row in rows if row.unit == "times faster"]
    errors = [row for row in rows if row.unit == "relative error"]
    assert [row.met for row in speed] == [None, None]
    assert len(errors) == 2 * len(TOLERANCES)
    assert all(row.bound == BF16_TOLERANCE and 1e-3 < row.value < 0.3 for row in errors), errors  # bf16 indeed
    assert Place.of("cpu", None).bounded
    assert str(Place.of("cpu", None)) == "fp32 on cpu"


def test_rates_are_measured_alone_and_beside_a_process_that_ends() -> None:
    before = torch.get_num_threads()
    try:
        found = rates(dim=32, vocab_size=64, seconds=0.0)
    finally:
        torch.set_num_threads(before)
    names = {(*name.split(", "),) for name in found}
    assert names == set(product(("REF scoring", "FAST update"), ("1", "2"), ("alone", "beside a busy process")))
    assert all(rate > 0 for rate in found.values())
    busy = [process for process in psutil.Process().children() if "while True: pass" in process.cmdline()]
    assert not busy


def test_the_sides_of_a_training_step_are_processes_that_take_turns(tmp_path: Path) -> None:
    config = dense_config(dim=32, vocab_size=64, n_layers=1, head_dim=8)
    write_case(tmp_path / "case.safetensors", config, rows=40, blocks=4)
    given = {
        "case": str(tmp_path / "case.safetensors"),
        "sizes": config.model_dump(mode="json"),
        "threads": 1,
        "device": "cpu",
    }
    command = [sys.executable, "-m", "d2lib.benchmark.step"]
    found = run_sides(
        {learns: [*command, json.dumps(given | {"learns": learns})] for learns in ("adapter", "weights")}, 1
    )
    stored = load_file(tmp_path / "case.safetensors")
    weights = {name.removeprefix("weights."): value for name, value in stored.items() if name.startswith("weights.")}
    batch = blocks_at(config, *(stored[name] for name in ("anchor", "tokens", "taps", "hidden")))
    loss = float(fast_drafter(config, weights).loss(batch, decayed_kl).loss)
    for side in found.values():
        assert side.loss == pytest.approx(loss, rel=1e-5)  # an adapter starts at nothing
        assert side.seconds > 0


def test_a_peer_that_does_not_run_is_refused() -> None:
    with pytest.raises(Refused, match="an interpreter does not start"):
        measure_training_step("/no/such/python", repeats=1, threads=1, rows=40, blocks=4, dim=32, vocab_size=64)
    with pytest.raises(Refused, match="does not run"):
        run_sides({"peer": [sys.executable, "-c", "raise SystemExit('no such package')"]}, 1)
    assert measure_training_step(None, repeats=1, threads=1, rows=40, blocks=4) == []


def test_the_peers_child_needs_torch_alone() -> None:
    code = "import sys, d2lib.benchmark.peer, d2lib.benchmark.turns; print('pydantic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_dense_update_is_measured_like_the_other_familys() -> None:
    config = dense_config(dim=32, vocab_size=64, n_layers=1, head_dim=8)
    rows = measure_update(config, blocks=8, repeats=1, rows=64)
    assert [row.met for row in rows if row.unit == "relative error"] == [True] * 2 * len(TOLERANCES)
    assert all(row.what.startswith("dense FAST update") and "1 full layers" in row.at for row in rows)
