"""Every figure: same bytes twice, no text over another or outside, honest axes, and the numbers that it was given."""

from __future__ import annotations

from collections.abc import Callable
from html.parser import HTMLParser
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.text import Text

from d2lib import plots
from d2lib.gates.gate import judged
from d2lib.show import svg, table_html

RNG = np.random.default_rng(5)
GAINS = {f"heldout_legal-{i:03}": float(gain) for i, gain in enumerate(RNG.normal(0.15, 0.2, 30))}
RESAMPLES = RNG.normal(0.2, 0.02, 10_000)
PILOT = [
    {"name": "legal_gain", "split": "heldout_legal", "value": 0.19, "lower": 0.12, "upper": 0.26,
     "condition": "gain >= 0.15", "state": "holds"},
    {"name": "dev_floor", "split": "dev", "value": -0.02, "lower": -0.05, "upper": 0.01,
     "condition": "gain >= -0.01", "state": "undecided"},
    {"name": "agreement_heldout_legal", "split": "heldout_legal", "value": 0.08, "lower": 0.06, "upper": 0.1,
     "condition": "interval within ±0.05", "state": "fails"},
]  # fmt: skip
POWER = [
    {"true_gain": g / 20, "passes": g / 10, "gain": g / 10, "lower_bound": 1.0, "every_request": 0.9} for g in range(9)
]
COVERAGE = [
    {"requests": size, "method": method, "coverage": 0.93, "standard_error": 0.008}
    for size in (12, 24, 30)
    for method in ("percentile", "BCa", "cluster t")
]
HOURS = {"FAST training": 2.701, "G2 dev": 25.233, "G2 legal": 21.653, "G2 general": 4.062}
TASKS = [
    ("solo A", "full FAST", 0.0, 2.701),
    ("solo A", "G2 dev", 2.701, 25.233),
    ("solo B", "G2 legal", 2.701, 21.653),
    ("solo B", "G2 general", 24.354, 4.062),
]
FAMILIES = [("train", f"f{i % 9}", 7000 + i) for i in range(65)] + [
    ("heldout_general", f"g{i}", 300) for i in range(12)
]

FIGURES: dict[str, Callable[[], Figure]] = {
    "accepted_by_slot": lambda: plots.accepted_by_slot([90, 60, 30, 20, 5], [95, 70, 50, 30, 9], 100, split="dev"),
    "request_gains": lambda: plots.request_gains(GAINS, 0.15, threshold=0.15, split="heldout_legal"),
    "bootstrap_distribution": lambda: plots.bootstrap_distribution(
        RESAMPLES, 0.2, 0.16, 0.24, gates={"gain at least": 0.15, "lower bound above": 0.0},
        requests=24, split="heldout_legal"
    ),
    "kl_by_slot": lambda: plots.kl_by_slot([0.5, 0.7, 0.8, 0.9, 1.0], [0.4, 0.6, 0.8, 0.7, 1.1], 77_949),
    "pilot_intervals": lambda: plots.pilot_intervals(PILOT),
    "run_gains": lambda: plots.run_gains(
        [
            {"split": split, "run": run, "gain": gain, "lower": gain - 0.05, "upper": gain + 0.08, "verdict": verdict}
            for split, run, gain, verdict in (
                ("dev", "demo", 0.02, "PASS"), ("dev", "demo-null", 0.0, "FAIL"),
                ("heldout_legal", "demo", 0.41, "PASS"), ("heldout_legal", "demo-null", 0.0, "INCONCLUSIVE"),
            )
        ]
    ),
    "power_curve": lambda: plots.power_curve(POWER, threshold=0.15, estimate=0.2),
    "interval_coverage": lambda: plots.interval_coverage(COVERAGE),
    "training_curves": lambda: plots.training_curves(
        np.linspace(2, 1, 390).tolist(), np.linspace(2e-4, 0, 390).tolist(), np.linspace(3, 0.5, 390).tolist(), clip=1.0
    ),
    "training_curves_short": lambda: plots.training_curves([2.0], [1e-4], [0.5]),
    "cost_bars": lambda: plots.cost_bars({"all": HOURS, "training only": {"FAST training": 2.701}}, title="Cost"),
    "gantt": lambda: plots.gantt(TASKS, title="ESTIMATED: training and full G2 take about 28.416 h on two solos"),
    "supply_and_need": lambda: plots.supply_and_need([("blocks", 488_031, 1e6), ("tokens", 1.2e6, 1e6)], title="Data"),
    "benchmark_ratios": lambda: plots.benchmark_ratios(
        [("batched REF over REF, rounds per second", 25.3, 4.0), ("FAST's memory", 0.8, 2.0), ("loading", 1.4, None)],
        title="Two of three measures reach their requirement",
    ),
    "data_card": lambda: plots.data_card(FAMILIES),
}  # fmt: skip


def texts(figure: Figure) -> list[Text]:
    """What is written on a figure; labels of ticks beyond the axes' limits are not."""
    beyond = set()
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        slack = 1e-9 * (high - low)
        beyond |= {id(t.label1) for t in axis.get_major_ticks() if not low - slack <= t.get_loc() <= high + slack}
    found = figure.findobj(Text)
    return [text for text in found if text.get_visible() and text.get_text().strip() and id(text) not in beyond]


@pytest.mark.parametrize("name", FIGURES)
def test_no_text_covers_another_and_all_is_legible(name: str) -> None:
    figure = FIGURES[name]()
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    drawn = []
    for text in texts(figure):
        assert text.get_fontsize() >= 7, text
        drawn.append((text.get_text(), text.get_window_extent()))
    for (first, a), (second, b) in combinations(drawn, 2):
        overlap = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        assert not (overlap[0] > 1 and overlap[1] > 1), (first, second)
    width, height = canvas.get_width_height()
    for text, box in drawn:
        assert box.x0 >= -2, text
        assert box.x1 <= width + 2, text
        assert box.y0 >= -2, text
        assert box.y1 <= height + 2, text


@pytest.mark.parametrize("name", ["accepted_by_slot", "bootstrap_distribution", "pilot_intervals", "cost_bars"])
def test_figure_is_the_same_bytes_each_time(name: str) -> None:
    first, second = svg(FIGURES[name]()), svg(FIGURES[name]())
    assert first == second
    assert first.startswith("<svg")


@pytest.mark.parametrize("name", FIGURES)
def test_bars_start_at_zero(name: str) -> None:
    """A bar's length is its meaning, so an axis that bars grow along contains zero."""
    for axes in FIGURES[name]().axes:
        bars = [c for c in axes.containers if isinstance(c, BarContainer)]
        if bars:
            across = bars[0].orientation == "horizontal"
            low, high = axes.get_xlim() if across else axes.get_ylim()
            assert low <= 0 < high


def test_figures_touch_no_global_state() -> None:
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    before = dict(mpl.rcParams)
    for make in FIGURES.values():
        make()
    assert dict(mpl.rcParams) == before
    assert plt.get_fignums() == []


def lines(figure: Figure) -> dict[str, np.ndarray]:
    axes = figure.axes[0]
    return {str(line.get_label()): np.asarray(line.get_xydata()) for line in axes.lines}


def title(figure: Figure) -> str:
    return figure.get_suptitle().replace("\n", " ")


def test_slots_are_shares_of_rounds_and_their_sum_is_the_accepted_length() -> None:
    figure = plots.accepted_by_slot([90, 60, 30, 20, 5], [95, 70, 50, 30, 9], 100)
    marks = lines(figure)
    assert marks["baseline 2.050"].tolist() == [[1, 0.9], [2, 0.6], [3, 0.3], [4, 0.2], [5, 0.05]]
    assert marks["candidate 2.540"][:, 1].tolist() == [0.95, 0.7, 0.5, 0.3, 0.09]
    assert figure.axes[0].get_ylim() == (0, 1)
    assert title(figure) == "The candidate gets 2.54 draft tokens a round accepted, the baseline 2.05"


@pytest.mark.parametrize(
    ("gains", "said"),
    [
        ([0.1, 0.2, -0.1], "None of 3 requests falls below −0.2; 2 gain"),
        ([-0.2, 0.0, 0.1], "None of 3 requests falls below −0.2; 1 gain"),
        ([-0.3, 0.2, 0.1], "1 of 3 requests falls below −0.2; 2 gain"),
        ([-0.3, -0.21, 0.1], "2 of 3 requests fall below −0.2; 1 gain"),
    ],
)
def test_request_gains_are_sorted_and_counted(gains: list[float], said: str) -> None:
    figure = plots.request_gains({f"r{i}": gain for i, gain in enumerate(gains)}, 0.05, threshold=0.15)
    assert title(figure) == said
    dots = figure.axes[0].collections[1].get_offsets()
    assert np.asarray(dots)[:, 0].tolist() == sorted(gains)
    drawn = {label: values[0, 0] for label, values in lines(figure).items() if not label.startswith("_")}
    assert drawn == {"floor of each request −0.2": -0.2, "split's gate 0.15": 0.15, "split's gain +0.050": 0.05}
    low, high = figure.axes[0].get_xlim()
    assert low < -0.2
    assert high > 0.15


def test_every_resample_is_counted_and_thresholds_are_in_view() -> None:
    resamples = RNG.normal(0.2, 0.02, 5000)
    figure = plots.bootstrap_distribution(resamples, 0.2, 0.16, 0.24, gates={"lower bound above": 0.0})
    axes = figure.axes[0]
    assert sum(patch.get_height() for patch in axes.containers[0]) == 5000
    assert axes.get_xlim()[0] < 0
    assert title(figure) == "Gain +0.200, 95% interval [+0.160, +0.240]"


def test_divergence_that_is_not_lower_is_marked() -> None:
    figure = plots.kl_by_slot([0.5, 0.5], [0.4, 0.5], 10)
    assert title(figure) == "Divergence from the teacher is lower at 1 of 2 slots"
    notes = {text.get_text(): text.get_color() for text in figure.axes[0].texts}
    assert notes == {"-20.0%": "black", "+0.0%": plots.GATE}


def test_training_means_are_means() -> None:
    figure = plots.training_curves(list(range(100)), [0.0] * 100, [1.0] * 100)
    raw, smooth = figure.axes[0].lines
    assert raw.get_ydata().tolist() == list(range(100))  # type: ignore[union-attr]
    assert np.allclose(smooth.get_xdata() - 1, smooth.get_ydata())  # a straight line stays where it is
    assert title(figure) == "Loss goes from 0.500 to 98.500 in 100 updates"


def test_bars_stack_to_their_sum_and_parts_keep_their_colour() -> None:
    figure = plots.cost_bars({"all": HOURS, "dev": {"G2 dev": 25.233}}, title="t")
    patches = [patch for c in figure.axes[0].containers for patch in c]
    assert max(patch.get_x() + patch.get_width() for patch in patches) == pytest.approx(sum(HOURS.values()))
    assert "53.649 h" in {text.get_text().strip() for text in figure.axes[0].texts}
    colours = {patch.get_facecolor() for patch in patches if patch.get_width() == 25.233}
    assert len(colours) == 1


def test_supply_is_a_share_of_need() -> None:
    figure = plots.supply_and_need([("blocks", 488_031, 1_000_000)], title="t")
    assert "488,031 of 1,000,000 (48.8%)" in {text.get_text() for text in figure.axes[0].texts}


def test_data_card_counts_families_that_cross_splits() -> None:
    assert "77 captured" not in title(plots.data_card(FAMILIES))
    assert title(plots.data_card(FAMILIES)).endswith("21 families, of which none crosses splits")
    crossed = plots.data_card([*FAMILIES, ("dev", "f0", 5)])
    assert title(crossed).endswith("21 families, of which 1 crosses splits")
    labels = {text.get_text() for text in crossed.axes[0].texts}
    assert {"3,600 rows, 12 sequences, 12 families", "5 rows, 1 sequence, 1 family"} <= labels


class Outline(HTMLParser):
    """Collects cells, and fails on tags that do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.scopes: list[str | None] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "th":
            self.scopes.append(dict(attrs).get("scope"))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1] and {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data


GATES = [
    judged("gain", 0.2, ">=", 0.15, unit="tokens", denominator="10 rounds"),
    judged("requests", 24, ">=", 20, unit="requests", denominator="all of dev"),
    judged("KL at slot 1 below the baseline's", 0.5, "<", 0.5, unit="nats", denominator="10 rounds"),
]


def test_gate_table_says_the_verdict_first_and_each_gate_in_words() -> None:
    text = plots.gate_table_html([gate.model_dump() for gate in GATES], "FAIL")
    outline = Outline(text)
    assert text.index("FAIL") < text.index("<table")
    assert "2 of 3 gates hold." in text
    assert [row[0].split()[-1] for row in outline.rows] == ["state", "holds", "holds", "fails"]
    assert outline.rows[1][1:] == ["gain", "0.2", ">= 0.15", "tokens; 10 rounds"]
    assert outline.rows[2][2:4] == ["24", ">= 20"]
    assert set(outline.scopes) == {"col", "row"}


def test_gate_table_takes_the_pilots_gates() -> None:
    outline = Outline(plots.gate_table_html(PILOT, "FAIL", "No."))
    assert [row[0].split()[-1] for row in outline.rows[1:]] == ["holds", "undecided", "fails"]
    assert outline.rows[1][2] == "0.19 [0.1200, 0.2600]"


def test_checklist_counts_and_escapes() -> None:
    evil = "<script>alert('x')</script>"
    rows: list[dict[str, Any]] = [
        {"name": "parity", "holds": True, "expected": "1,000 rounds", "found": 1000, "where": "g1.json"},
        {"name": evil, "holds": False, "expected": evil, "found": evil},
    ]
    text = plots.checklist_html(rows)
    outline = Outline(text)
    assert "1 of 2 checks hold" in text
    assert "<script>" not in text
    assert outline.rows[1] == ["✓ holds", "parity", "1,000 rounds", "1,000", "g1.json"]
    assert outline.rows[2][4] == "–"


def test_gate_table_escapes() -> None:
    evil = dict(PILOT[0], name="<b>", condition="gain >= <i>", split="&")
    text = plots.gate_table_html([evil], "<PASS>", "<s>")
    for tag in ("<b><", "<i>", "<s>", "<PASS>"):
        assert tag not in text
    assert "&lt;i&gt;" in text


def test_a_table_without_rows_says_of_what_there_is_none() -> None:
    assert table_html([], "Rounds < 3") == "<p>Rounds &lt; 3: none.</p>"
