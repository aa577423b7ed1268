"""The benchmark's own instruments: bounds, medians, slopes, children, memory. Nothing here looks at speed."""

from __future__ import annotations

import math
from itertools import product

import psutil
import pytest
import torch

from d2lib.benchmark import measure
from d2lib.benchmark.cases import drafter_config, random_adapter, random_blocks, random_weights
from d2lib.benchmark.drafting import BF16_TOLERANCE, TOLERANCES, fast_update, measure_update, reference_update, slope
from d2lib.benchmark.head import LOSSES, HeadCase
from d2lib.benchmark.measure import Place, Row, in_child, medians
from d2lib.benchmark.threads import rates
from d2lib.benchmark.turns import Peak
from d2lib.drafter.family import fast_drafter, reference_drafter
from d2lib.errors import Unexpected


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
