"""The cost sheet: the production's published figures to the last digit, exact arithmetic, bounds, and bad inputs."""

from __future__ import annotations

import copy
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml
from data_case import manifest_of, production_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from d2lib import plots
from d2lib.cost import CostInputs, CostSheet, cost_sheet, load_inputs, parse_inputs, render_text, rounded
from d2lib.errors import Refused

FILE = Path(__file__).parents[1] / "params/dsv41/cost_sheet.yaml"


@pytest.fixture(scope="module")
def production() -> CostInputs:
    return load_inputs(FILE)


@pytest.fixture(scope="module")
def sheet(production: CostInputs) -> CostSheet:
    return cost_sheet(production)


# name of the row, what it prints, its label
PUBLISHED = [
    ("captured rows", "990,940", "COMPUTED"),
    ("generated span positions", "974,172", "COMPUTED"),
    ("training span positions", "488,096", "COMPUTED"),
    ("unique training blocks", "488,031", "COMPUTED"),
    ("updates", "11,439", "COMPUTED"),
    ("presented blocks", "1,464,093", "COMPUTED"),
    ("rounds, dev", "90,837", "MEASURED"),
    ("rounds, legal", "77,949", "MEASURED"),
    ("rounds, general", "<=14,624", "MEASURED"),
    ("full FAST training, 3 epochs, one solo", "2.701", "ESTIMATED"),
    ("the same in REF (comparison only, not scheduled)", "127.100", "ESTIMATED"),
    ("full dev, baseline and candidate", "25.233", "ESTIMATED"),
    ("full legal, baseline and candidate", "21.653", "ESTIMATED"),
    ("full general, baseline and candidate", "<=4.062", "ESTIMATED"),
    ("full G2, three splits", "<=50.947", "ESTIMATED"),
    ("FAST training, then full G2", "<=53.648", "ESTIMATED"),
    ("deficit of training blocks", "511,969", "COMPUTED"),
    ("generation rate", "324,768", "COMPUTED"),
    ("generation, all new families in train", "1.58", "ESTIMATED"),
    ("train's share of generated positions", "50.1", "COMPUTED"),
    ("generation at that share", "3.15", "ESTIMATED"),
    ("deficit of generated tokens", "25,697", "COMPUTED"),
    ("generation of those tokens", "0.079", "ESTIMATED"),
]


@pytest.mark.parametrize(("name", "text", "label"), PUBLISHED)
def test_the_published_figures(sheet: CostSheet, name: str, text: str, label: str) -> None:
    row = sheet.row(name)
    assert (row.text, row.label) == (text, label)
    assert row.upper_bound == text.startswith("<=")
    (line,) = (line for line in render_text(sheet).splitlines() if line.startswith(f"{name}  "))
    assert f" {text} " in line
    assert label in line


@pytest.mark.parametrize(
    ("name", "wall"),
    [
        ("full FAST training, 3 epochs, one solo", "2.701 h"),
        ("the same in REF (comparison only, not scheduled)", "127.100 h"),
        ("full dev, baseline and candidate", "25.233 h on solo A"),
        ("full legal, baseline and candidate", "21.653 h on solo B"),
        ("full general, baseline and candidate", "<=4.062 h on solo B after legal"),
        ("full G2, three splits", "about 25.715 h with two solos"),
        ("FAST training, then full G2", "about 28.416 h with two solos for G2"),
    ],
)
def test_the_published_wall_times(sheet: CostSheet, name: str, wall: str) -> None:
    assert sheet.row(name).wall == wall
    assert wall in render_text(sheet)


def test_labels_follow_from_where_a_number_comes_from(sheet: CostSheet) -> None:
    def labels(section: str, unit: str = "") -> list[str]:
        return [row.label for row in sheet.rows if row.section == section and row.unit.endswith(unit)]

    assert set(labels("rates")) == {"MEASURED"}
    assert labels("counts") == ["MEASURED"] * 4 + ["COMPUTED"] * 6 + ["MEASURED"] * 3
    assert set(labels("cost")) == {"ESTIMATED"}
    assert labels("data", "Spark-hours") == ["MEASURED"] + ["ESTIMATED"] * 3
    assert all(row.how for row in sheet.rows)


def test_plain_data_has_the_same_numbers(sheet: CostSheet) -> None:
    found = sheet.as_dict()
    assert len(found["rows"]) == len(sheet.rows)
    by_name = {row["name"]: row for row in found["rows"]}
    assert by_name["full G2, three splits"]["value"] == pytest.approx((90837 + 77949 + 14624) / 3600)
    assert by_name["full G2, three splits"]["upper_bound"] is True
    assert by_name["full dev, baseline and candidate"]["upper_bound"] is False
    assert by_name["FAST training, then full G2"]["wall_hours"] == pytest.approx(11439 * 0.85 / 3600 + 92573 / 3600)


def test_the_plots_take_the_sheet(sheet: CostSheet) -> None:
    figures = [
        plots.cost_bars(sheet.bars, title="cost", unit=sheet.unit),
        plots.gantt(sheet.tasks, title="two solos"),
        plots.supply_and_need(sheet.supply, title="data"),
    ]
    assert len(figures) == 3
    assert sum(sheet.bars["training and G2"].values()) == pytest.approx(53.648, abs=5e-4)
    lanes: dict[str, float] = {}
    for solo, _, start, hours in sheet.tasks:
        assert start >= lanes.get(solo, 0.0) - 1e-12  # no solo does two things at once
        lanes[solo] = start + hours
    assert max(lanes.values()) == pytest.approx(28.416, abs=5e-4)
    assert [task[1] for task in sheet.tasks if task[0] == "solo B"] == ["G2 legal", "G2 general"]


def test_one_solo_does_one_thing_after_the_other(production: CostInputs) -> None:
    value = production.model_dump()
    value["schedule"] = {"A": ["heldout_general", "dev", "heldout_legal"]}
    found = cost_sheet(parse_inputs(value))
    assert found.row("full G2, three splits").wall == "about 50.947 h with one solo"
    assert found.row("full legal, baseline and candidate").wall == "21.653 h on solo A after general and dev"


def test_a_bound_goes_only_where_it_belongs(production: CostInputs) -> None:
    value = production.model_dump()
    value["rounds"]["heldout_general"]["upper_bound"] = False
    found = cost_sheet(parse_inputs(value))
    assert [row.name for row in found.rows if row.upper_bound] == []
    assert "<=" not in render_text(found)
    value["rounds"]["dev"]["upper_bound"] = True
    bound = [row.name for row in cost_sheet(parse_inputs(value)).rows if row.upper_bound]
    assert bound == [
        "rounds, dev",
        "full dev, baseline and candidate",
        "full G2, three splits",
        "FAST training, then full G2",
    ]


RECEIPT = {
    "recipe": {"objective": "ACE", "batch": 128, "epochs": 2},
    "arms": {"fast": {"updates": 159, "seconds": 159 * 1.25}, "ref": {"updates": 159, "seconds": 159 * 50.0}},
}


def test_a_measured_rate_replaces_a_historical_one_and_says_so(production: CostInputs) -> None:
    found = cost_sheet(production.with_pilot(RECEIPT, "pilot/receipt.json"))
    fast = found.row("FAST")
    assert fast.text == "1.25"
    assert fast.label == "MEASURED"
    assert fast.how == (
        "measured by this run: ACE in FAST, 159 updates of the pilot, pilot/receipt.json; "
        "replaces 0.85 s (first pilot, KL objective, 159 updates per arm, 225 W solo card)"
    )
    assert found.row("REF").text == "50"
    assert found.row("full FAST training, 2 epochs, one solo").text == rounded(Fraction(7626 * 5, 4 * 3600), 3)
    assert found.row("reference evaluation").how == production.rates.evaluation.source


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arms": {}}, "gives no rates"),
        ({"recipe": {}}, "gives no rates"),
        ({"arms": {"fast": {"updates": 0, "seconds": 1.0}, "ref": {"updates": 1, "seconds": 1.0}}}, "gives no rates"),
        ({"arms": {"fast": {"updates": 1, "seconds": -1.0}, "ref": {"updates": 1, "seconds": 1.0}}}, "seconds"),
        ({"recipe": {"objective": "ACE", "batch": 64, "epochs": 3}}, "of another batch"),
    ],
)
def test_a_pilot_without_usable_rates_is_refused(production: CostInputs, change: Any, message: str) -> None:
    with pytest.raises(Refused, match=message):
        production.with_pilot(RECEIPT | change, "receipt")


def test_counts_come_from_a_manifest(production: CostInputs) -> None:
    counts = manifest_of(production_rows()).counts()
    assert production.captured is not None
    bare = production.model_copy(update={"captured": None, "rounds": None})
    with pytest.raises(Refused, match=r"no counts.*neither"):
        cost_sheet(bare)
    again = bare.with_counts(counts, 128, "MANIFEST.json").with_rounds(
        {"dev": 90_837, "heldout_legal": 77_949, "heldout_general": 14_000}, "K2 files"
    )
    assert again.captured is not None
    assert again.captured.splits == production.captured.splits
    assert cost_sheet(again).row("full G2, three splits").text == "50.774"
    with pytest.raises(Refused, match="begin their spans at different rows"):
        bare.with_counts(counts, 127, "MANIFEST.json")
    with pytest.raises(Refused, match="rounds"):
        bare.with_rounds({"dev": 0, "heldout_legal": 1, "heldout_general": 1}, "K2 files")


@settings(max_examples=60, deadline=None)
@given(st.fractions(min_value=0, max_value=10**7, max_denominator=5000), st.integers(0, 4))
def test_rounding_is_half_up_and_exact(value: Fraction, digits: int) -> None:
    found = Fraction(rounded(value, digits).replace(",", ""))
    step = Fraction(1, 10**digits)
    assert -step / 2 < found - value <= step / 2
    assert (found / step).denominator == 1


def test_halves_go_up() -> None:
    """25.2325 and 21.6525 stand in the production's sheet; binary floating point would round one of them down."""
    assert rounded(Fraction(252325, 10000), 3) == "25.233"
    assert rounded(Fraction(216525, 10000), 3) == "21.653"
    assert rounded(Fraction(1234567), 0) == "1,234,567"


def set_path(value: dict[str, Any], path: str, new: Any) -> None:
    *way, last = path.split(".")
    for name in way:
        value = value[name]
    value[last] = new


def drop_path(value: dict[str, Any], path: str) -> None:
    *way, last = path.split(".")
    for name in way:
        value = value[name]
    del value[last]


@pytest.mark.parametrize(
    ("path", "new"),
    [
        ("rates.fast.seconds", -0.85),
        ("rates.fast.seconds", 0),
        ("rates.fast.seconds", "0.85"),
        ("rates.fast.seconds", True),
        ("rates.fast.label", "ESTIMATED"),
        ("rates.fast.source", ""),
        ("rates.fast.speed", 1),
        ("training.epochs", 0),
        ("training.epochs", 2.5),
        ("training.recipe", "ACE"),
        ("passes", 0),
        ("captured.splits.dev.rows", -1),
        ("captured.splits.dev.rows", 30 * 129),
        ("captured.splits.test", {"sequences": 1, "rows": 500}),
        ("rounds.dev.rounds", -1),
        ("rounds.dev.upper_bound", 1),
        ("rounds.train", {"rounds": 1, "source": "x"}),
        ("schedule", {"A": ["dev"], "B": ["heldout_legal"]}),
        ("schedule.A", ["dev", "heldout_legal"]),
        ("schedule.A", "dev"),
        ("supply.hours", 0.0),
        ("supply.generated_tokens", "974303"),
        ("discount", 0.1),
    ],
)
def test_a_bad_value_is_refused_by_name(path: str, new: Any, tmp_path: Path) -> None:
    value = yaml.safe_load(FILE.read_text())
    set_path(value["inputs"], path, new)
    file = tmp_path / "cost_sheet.yaml"
    file.write_text(yaml.safe_dump(value))
    with pytest.raises(Refused, match="the cost sheet's inputs are wrong") as caught:
        load_inputs(file)
    said = str(caught.value)
    assert str(file) in said
    assert path.split(".")[0] in said


@pytest.mark.parametrize("path", ["rates", "rates.ref", "rates.fast.source", "training.batch", "passes", "schedule",
                                  "captured.splits.dev", "rounds.heldout_general"])  # fmt: skip
def test_a_missing_value_is_refused_by_name(path: str, tmp_path: Path) -> None:
    value = yaml.safe_load(FILE.read_text())
    drop_path(value["inputs"], path)
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(value))
    with pytest.raises(Refused, match=path.split(".")[0]):
        load_inputs(tmp_path / "c.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("inputs: {passes: 1, passes: 2}", "a YAML key stands twice; found: passes"),
        ("inputs: [", "not valid YAML"),
        ("inputs: 3", "has no inputs"),
        ("[]", "has no inputs"),
        ("run: x", "has no inputs"),
        ("inputs: {rates: {fast: {seconds: .nan}}}", r"not finite.*c\.yaml, line 1"),
        ("inputs: {}\nrecipe: ACE", "unknown parameter"),
        ("inputs: {}\nmanifest: x", "unknown parameter"),
        ("inputs: !!python/object/apply:os.getcwd []", "a tag in YAML is not allowed"),
    ],
)
def test_a_bad_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(Refused, match=message):
        load_inputs(tmp_path / "c.yaml")
    with pytest.raises(Refused, match="cannot be read"):
        load_inputs(tmp_path / "none.yaml")


def test_inputs_are_not_changed_by_what_is_made_of_them(production: CostInputs) -> None:
    before = copy.deepcopy(production)
    cost_sheet(production.with_pilot(RECEIPT, "x"))
    assert production == before
