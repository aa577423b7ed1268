"""Figures and tables of the receipts. Plain data in, a matplotlib Figure or an HTML fragment out; nothing is computed.

Every figure is drawn for the width of a phone, in colours that colour-blind readers tell apart (Okabe & Ito 2008) and
never by colour alone, with axes that start at zero where lengths are compared. The title says what one sees; units and
denominators stand on the axes. No pyplot, so no global state: a figure is the same bytes each time.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from d2lib.show import number, verdict_html

Row = Mapping[str, Any]

BASELINE, CANDIDATE, GATE, GOOD, SOFT = "#6e6e6e", "#0072b2", "#d55e00", "#007a5a", "#c8d6e5"
PARTS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#f0e442", "#999999")
WIDTH = 4.3  # inches; its type is legible where the figure is 340 CSS pixels wide
TOKENS = "accepted draft tokens per round\n(bonus excluded)"

_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#555555",
    "axes.labelsize": 9.5,
    "axes.axisbelow": True,
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.8,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "figure.dpi": 120,
    "figure.facecolor": "white",
    "path.simplify": True,
}


# --- scores and gates


def accepted_by_slot(baseline: Sequence[int], candidate: Sequence[int], rounds: int, *, split: str = "") -> Figure:
    """How far drafts survive: per slot the share of rounds whose accepted prefix reaches it.

    Args:
        baseline, candidate: [K] rounds in which slot k was accepted. Their sums are the accepted tokens.
        rounds: the population's rounds.
    """
    means = [sum(arm) / rounds for arm in (baseline, candidate)]
    title = f"{_of(split)}The candidate gets {means[1]:.2f} draft tokens a round accepted, the baseline {means[0]:.2f}"
    with _figure(title, 3.3) as (figure, axes):
        slots = np.arange(1, len(baseline) + 1)
        for name, arm, mean, colour, mark in (
            ("baseline", baseline, means[0], BASELINE, "s--"),
            ("candidate", candidate, means[1], CANDIDATE, "o-"),
        ):
            axes.plot(slots, np.asarray(arm) / rounds, mark, color=colour, label=f"{name} {mean:.3f}")
        axes.set(xlabel="draft slot", ylabel="rounds that accept the slot", ylim=(0, 1), xticks=slots)
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.grid(axis="y")
        axes.legend(
            loc="upper right", title=f"accepted a round, bonus excluded\n(mean of {rounds:,} rounds)", title_fontsize=9
        )
    return figure


def request_gains(
    gains: Mapping[str, float], gain: float, *, floor: float = -0.2, threshold: float | None = None, split: str = ""
) -> Figure:
    """Every request's gain, sorted, with the floor that none may fall below and the split's own gain.

    Args:
        gains: request → gain. gain: the split's. floor: of each request. threshold: of the split, where it has one.
    """
    ordered = sorted(gains.items(), key=lambda item: (item[1], item[0]))
    values = np.array([value for _, value in ordered])
    below = int((values < floor).sum())
    title = (
        f"{_of(split)}{below or 'None'} of {len(values)} requests {'falls' if below <= 1 else 'fall'} below "
        f"{_signed(floor)}; {int((values > 0).sum())} gain"
    )
    with _figure(title, 1.5 + 0.165 * len(values)) as (figure, axes):
        rows = np.arange(len(values))
        colours = [GATE if value < floor else CANDIDATE if value > 0 else BASELINE for value in values]
        axes.hlines(rows, 0, values, colors=colours, linewidth=1.6)
        axes.scatter(values, rows, c=colours, s=22, zorder=3)
        axes.set_yticks(rows, [name for name, _ in ordered], fontsize=7)
        axes.set_ylim(-0.8, len(values) - 0.2)
        axes.set_xlabel(f"gain, {TOKENS}")
        low, high = min(values.min(), floor), max(values.max(), gain, threshold or 0.0)
        axes.set_xlim(low - 0.06 * (high - low), high + 0.06 * (high - low))
        axes.axvline(0, color="#555555", linewidth=0.8)
        axes.axvline(floor, color=GATE, linestyle="--", linewidth=1.4, label=f"floor of each request {_signed(floor)}")
        if threshold is not None:
            axes.axvline(threshold, color=GATE, linestyle=":", linewidth=1.6, label=f"split's gate {threshold:g}")
        axes.axvline(gain, color=CANDIDATE, linestyle="-.", linewidth=1.4, label=f"split's gain {gain:+.3f}")
        axes.grid(axis="x")
        _legend_below(axes)
    return figure


def bootstrap_distribution(
    resamples: Any,
    estimate: float,
    lower: float,
    upper: float,
    *,
    gates: Mapping[str, float] | None = None,
    requests: int | None = None,
    split: str = "",
) -> Figure:
    """The resampled gains with their 95% interval and the thresholds that estimate and lower bound must clear.

    Args:
        resamples: [n] gains. estimate, lower, upper: of the bootstrap.
        gates: label → threshold, drawn as lines. requests: how many were resampled, for the axis.
    """
    title = f"{_of(split)}Gain {estimate:+.3f}, 95% interval [{lower:+.3f}, {upper:+.3f}]"
    with _figure(title, 3.4) as (figure, axes):
        values = np.asarray(resamples, dtype=float)
        counts, edges = np.histogram(values, bins=40)
        inside = (edges[:-1] >= lower) & (edges[1:] <= upper)
        axes.bar(edges[:-1], counts, np.diff(edges), align="edge", color=np.where(inside, "#9ecae8", SOFT).tolist())
        axes.axvspan(lower, upper, ymax=0.02, color=CANDIDATE, label="95% percentile interval")
        axes.axvline(estimate, color=CANDIDATE, linewidth=1.8, label=f"gain {estimate:+.3f}")
        for (name, threshold), style in zip((gates or {}).items(), ("--", ":", "-."), strict=False):
            axes.axvline(threshold, color=GATE, linestyle=style, linewidth=1.6, label=f"{name} {_signed(threshold)}")
        axes.set_xlabel(f"gain, {TOKENS}")
        axes.set_ylabel(f"of {len(values):,} resamples" + (f"\nof {requests} requests" if requests else ""))
        axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.margins(x=0.03)
        _legend_below(axes)
    return figure


def kl_by_slot(baseline: Sequence[float], candidate: Sequence[float], rounds: int, *, split: str = "") -> Figure:
    """Teacher divergence per slot, both arms, from zero; the change stands over each pair.

    Args:
        baseline, candidate: [K] mean KL(teacher || drafter) in nats over `rounds` rounds, teacher-forced.
    """
    lower = sum(after < before for before, after in zip(baseline, candidate, strict=True))
    title = f"{_of(split)}Divergence from the teacher is lower at {lower} of {len(baseline)} slots"
    with _figure(title, 3.3) as (figure, axes):
        slots = np.arange(1, len(baseline) + 1)
        axes.bar(slots - 0.2, baseline, 0.38, color=BASELINE, label="baseline")
        axes.bar(slots + 0.2, candidate, 0.38, color=CANDIDATE, label="candidate")
        for slot, before, after in zip(slots, baseline, candidate, strict=True):
            change = after / before - 1 if before > 0 else 0.0
            axes.annotate(
                f"{change:+.1%}",
                (slot, max(before, after)),
                xytext=(0, 3),
                textcoords="offset points",
                ha="center",
                fontsize=9,
                color=GATE if after >= before else "black",
            )
        axes.set(xlabel="draft slot", xticks=slots, ylim=(0, max(*baseline, *candidate) * 1.14))
        axes.set_ylabel(f"mean KL, nats per slot\n(over {rounds:,} rounds)")
        axes.grid(axis="y")
        _legend_below(axes, columns=2)
    return figure


def pilot_intervals(gates: Sequence[Row]) -> Figure:
    """The pilot's gates as intervals against their thresholds.

    Args:
        gates: rows with name, value, lower, upper, condition, state (see PilotGate).
    """
    held = sum(gate["state"] == "holds" for gate in gates)
    with _figure(f"{held} of the pilot's {len(gates)} gates hold", 1.4 + 0.5 * len(gates)) as (figure, axes):
        looks = {"holds": (GOOD, "o"), "undecided": ("#8a5a00", "D"), "fails": (GATE, "X")}
        for row, gate in enumerate(reversed(gates)):
            colour, mark = looks[gate["state"]]
            axes.hlines(row, gate["lower"], gate["upper"], colors=colour, linewidth=2.2)
            axes.plot(gate["value"], row, mark, color=colour, markersize=7)
            for threshold in _thresholds(gate["condition"]):
                axes.vlines(threshold, row - 0.32, row + 0.32, colors=GATE, linestyles="--", linewidth=1.6)
        names = [
            f"{gate['name'].replace('_', ' ')}\n{gate['condition'].replace('>=', '≥')}: {gate['state']}"
            for gate in reversed(gates)
        ]
        axes.set_yticks(range(len(gates)), names, fontsize=8)
        axes.set_ylim(-0.6, len(gates) - 0.4)
        axes.axvline(0, color="#555555", linewidth=0.8)
        axes.set_xlabel("tokens per round (bonus excluded),\n95% interval; dashes: threshold")
        axes.grid(axis="x")
    return figure


def run_gains(rows: Sequence[Row]) -> Figure:
    """Runs compared: every split's gain with its 95% interval, one line a run.

    Args:
        rows: mappings with split, run, gain, lower, upper, verdict, a split's together.
    """
    above = sum(row["lower"] > 0 for row in rows)
    title = f"{above or 'None'} of {len(rows)} intervals {'lies' if above <= 1 else 'lie'} above zero"
    with _figure(title, 1.2 + 0.42 * len(rows)) as (figure, axes):
        looks = {"PASS": (GOOD, "o"), "INCONCLUSIVE": ("#8a5a00", "D")}
        for place, row in enumerate(reversed(rows)):
            colour, mark = looks.get(row["verdict"], ("#a4262c", "X"))
            axes.hlines(place, row["lower"], row["upper"], colors=colour, linewidth=2.2)
            axes.plot(row["gain"], place, mark, color=colour, markersize=7)
        names = [f"{row['split']}\n{textwrap.shorten(row['run'], 20)}: {row['verdict']}" for row in reversed(rows)]
        axes.set_yticks(range(len(rows)), names, fontsize=8.5)
        axes.set_ylim(-0.6, len(rows) - 0.4)
        axes.axvline(0, color="#555555", linewidth=0.8)
        axes.set_xlabel("gain, accepted draft tokens per round\n(bonus excluded), 95% interval")
        axes.grid(axis="x")
    return figure


# --- calibration


def power_curve(power: Sequence[Row], *, threshold: float | None = None, estimate: float | None = None) -> Figure:
    """How often a run with a given true gain passes the gates on gain.

    Args:
        power: rows with true_gain, passes, gain, lower_bound, every_request (rates).
        threshold: the split's gate. estimate: the run's own gain.
    """
    gains = [row["true_gain"] for row in power]
    nothing = next((row["passes"] for row in power if row["true_gain"] == 0), None)
    title = "How often a run passes, by its true gain"
    if nothing is not None:
        title = f"With no true gain {nothing:.1%} of simulated runs pass the gates on gain"
    with _figure(title, 3.6) as (figure, axes):
        for key, name, colour, style, width in (
            ("gain", "gain alone", "#e69f00", "--", 1.4),
            ("lower_bound", "lower bound alone", "#009e73", ":", 1.8),
            ("every_request", "every request alone", "#cc79a7", "-.", 1.4),
            ("passes", "all of them", CANDIDATE, "-", 2.4),
        ):
            axes.plot(gains, [row[key] for row in power], style, color=colour, linewidth=width, label=name)
        if threshold is not None:
            axes.axvline(threshold, color=GATE, linestyle=(0, (1, 2)), label=f"gate {threshold:g}")
        if estimate is not None:
            axes.axvline(estimate, color="black", linewidth=0.9, label=f"this run {estimate:+.3f}")
        axes.set(xlabel=f"true gain, {TOKENS}", ylabel="simulated runs that pass", ylim=(-0.02, 1.02))
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.grid()
        _legend_below(axes, columns=2)
    return figure


def interval_coverage(coverage: Sequence[Row], nominal: float = 0.95) -> Figure:
    """How often each kind of interval covers the true gain, by number of requests, with ±2 standard errors.

    Args:
        coverage: rows with requests, method, coverage, standard_error.
    """
    sizes = sorted({row["requests"] for row in coverage})
    methods = list(dict.fromkeys(row["method"] for row in coverage))
    first = [row["coverage"] for row in coverage if row["method"] == methods[0]]
    title = f"The {methods[0]} interval covers {min(first):.1%} to {max(first):.1%}, nominal {nominal:.0%}"
    with _figure(title, 3.3) as (figure, axes):
        for index, method in enumerate(methods):
            rows = sorted((r for r in coverage if r["method"] == method), key=lambda r: r["requests"])
            places = np.arange(len(rows)) + 0.18 * (index - (len(methods) - 1) / 2)
            axes.errorbar(
                places,
                [row["coverage"] for row in rows],
                [2 * row["standard_error"] for row in rows],
                fmt="osD^"[index],
                color=(CANDIDATE, "#e69f00", "#009e73", "#cc79a7")[index],
                capsize=3,
                label=method,
            )
        axes.axhline(nominal, color="black", linewidth=0.9, linestyle="--", label="nominal")
        low = min(row["coverage"] - 2 * row["standard_error"] for row in coverage)
        axes.set(ylabel="runs whose interval covers", xlabel="requests", ylim=(min(low, 0.9) - 0.01, 1.0))
        axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
        axes.set_xlim(-0.5, len(sizes) - 0.5)
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.grid(axis="y")
        _legend_below(axes, columns=len(methods) + 1)
    return figure


# --- training, cost, data


def training_curves(
    loss: Sequence[float], learning_rate: Sequence[float], gradient_norm: Sequence[float], *, clip: float | None = None
) -> Figure:
    """Loss, learning rate and gradient norm per update; a thick line is the mean of 1/50 of the run.

    Args:
        loss: [updates] mean over the update's blocks. gradient_norm: [updates] before clipping at `clip`.
    """
    span = max(1, len(loss) // 50)
    smooth = _moving_mean(loss, span)
    title = f"Loss goes from {smooth[0]:.3f} to {smooth[-1]:.3f} in {len(loss):,} updates"
    with _figure(title, 5.4, rows=3) as (figure, panels):
        updates = np.arange(1, len(loss) + 1)
        places = np.arange(len(smooth)) + (span + 1) / 2
        for axes, values, label in (
            (panels[0], loss, "loss\n(mean over blocks)"),
            (panels[1], learning_rate, "learning rate"),
            (panels[2], gradient_norm, "gradient norm\n(before clipping)"),
        ):
            noisy = axes is not panels[1]
            axes.plot(updates, values, color="#9ecae8" if noisy else CANDIDATE, linewidth=0.8 if noisy else 1.8)
            if noisy:
                axes.plot(places, _moving_mean(values, span), color=CANDIDATE, linewidth=1.8)
            axes.set_ylabel(label)
            axes.grid()
            axes.yaxis.set_major_locator(MaxNLocator(4))
        panels[1].set_ylim(bottom=0)
        panels[2].set_ylim(bottom=0)
        if clip is not None:
            panels[2].axhline(clip, color=GATE, linestyle="--", linewidth=1.4, label=f"clipped at {clip:g}")
            panels[2].legend(loc="upper right")
        panels[2].xaxis.set_major_locator(MaxNLocator(6, integer=True))
        panels[2].set_xlabel("update")
        figure.align_ylabels(panels)
    return figure


def cost_bars(bars: Mapping[str, Mapping[str, float]], *, title: str, unit: str = "solo GPU-hours") -> Figure:
    """Stacked hours: bar → part → hours. Parts keep their colour from bar to bar."""
    parts = list(dict.fromkeys(part for bar in bars.values() for part in bar))
    with _figure(title, 1.5 + 0.55 * len(bars)) as (figure, axes):
        longest = max(sum(bar.values()) for bar in bars.values())
        for row, bar in enumerate(reversed(list(bars.values()))):
            left = 0.0
            for part, hours in bar.items():
                index = parts.index(part) % len(PARTS)
                axes.barh(row, hours, 0.6, left, color=PARTS[index], edgecolor="white", label=part)
                text = _hours(hours, 1)
                if hours > 0.034 * len(text) * longest:
                    ink = "black" if PARTS[index] != CANDIDATE else "white"
                    axes.text(left + hours / 2, row, text, ha="center", va="center", fontsize=8, color=ink)
                left += hours
            axes.text(left, row, f" {_hours(left)} h", va="center", fontsize=9, fontweight="bold")
        axes.set_yticks(range(len(bars)), [textwrap.fill(name, 14) for name in reversed(list(bars))])
        axes.set(xlabel=unit, xlim=(0, longest * 1.28))
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.grid(axis="x")
        handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        handles = {part: handles[part] for part in parts}
        _legend_below(axes, columns=2, handles=handles)
    return figure


def gantt(tasks: Sequence[tuple[str, str, float, float]], *, title: str, unit: str = "hours of wall time") -> Figure:
    """Who works when: (lane, task, start, length) as bars on one row per lane."""
    lanes = list(dict.fromkeys(lane for lane, *_ in tasks))
    with _figure(title, 1.5 + 0.65 * len(lanes)) as (figure, axes):
        end = max(start + length for *_, start, length in tasks)
        for index, (lane, name, start, length) in enumerate(tasks):
            row, colour = len(lanes) - 1 - lanes.index(lane), PARTS[index % len(PARTS)]
            axes.barh(row, length, 0.55, start, color=colour, edgecolor="white", label=f"{name} {_hours(length)}")
            if length > 0.24 * end:
                ink = "black" if colour != CANDIDATE else "white"
                axes.text(start + length / 2, row, name, ha="center", va="center", fontsize=8.5, color=ink)
        axes.axvline(end, color="black", linewidth=0.9, linestyle=":")
        axes.annotate(_hours(end), (end, -0.55), xytext=(-3, 2), textcoords="offset points", ha="right", fontsize=8.5)
        axes.set_yticks(range(len(lanes)), list(reversed(lanes)))
        axes.set(xlabel=unit, xlim=(0, end * 1.03), ylim=(-0.6, len(lanes) - 0.4))
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.grid(axis="x")
        _legend_below(axes, columns=2)
    return figure


def supply_and_need(rows: Sequence[tuple[str, float, float]], *, title: str) -> Figure:
    """What the data hold as a share of what is needed: (what, have, need); the line is 100%."""
    with _figure(title, 1.2 + 0.75 * len(rows)) as (figure, axes):
        for row, (_, have, need) in enumerate(reversed(rows)):
            share = have / need
            axes.barh(row, 1, 0.5, color="white", edgecolor="#777777", linewidth=0.9, hatch="////", alpha=0.5)
            axes.barh(row, share, 0.5, color=CANDIDATE if share >= 1 else "#e69f00", edgecolor="white")
            axes.text(0.015, row, f"{have:,.0f} of {need:,.0f} ({share:.1%})", va="center", fontsize=9,
                      bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5})  # fmt: skip
        axes.axvline(1, color="black", linewidth=1.2, linestyle="--")
        axes.set_yticks(range(len(rows)), [textwrap.fill(what, 16) for what, *_ in reversed(rows)])
        axes.set(xlabel="share of the need", xlim=(0, max(1.08, *(have / need * 1.08 for _, have, need in rows))))
        axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.grid(axis="x")
    return figure


def benchmark_ratios(rows: Sequence[tuple[str, float, float | None]], *, title: str) -> Figure:
    """How many times better each measure is: (what, ratio, ratio that is required or None), on a doubling axis."""
    with _figure(title, 1.3 + 0.5 * len(rows)) as (figure, axes):
        for row, (_, ratio, required) in enumerate(reversed(rows)):
            held = required is None or ratio >= required
            axes.hlines(row, 1, ratio, colors=CANDIDATE if held else GATE, linewidth=2.2)
            axes.plot(ratio, row, "o" if held else "X", color=CANDIDATE if held else GATE, markersize=7)
            axes.annotate(f"{ratio:.2f}×", (max(ratio, 1), row), xytext=(8, 0), textcoords="offset points", va="center",
                          fontsize=9)  # fmt: skip
            if required is not None:
                axes.vlines(required, row - 0.3, row + 0.3, colors=GATE, linestyles="--", linewidth=1.6)
        values = [value for _, ratio, required in rows for value in (ratio, required or 1.0)]
        axes.set_xscale("log", base=2)
        axes.set_xlim(min(0.9, *values) / 1.15, max(2.0, *values) * 2.2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
        axes.axvline(1, color="#555555", linewidth=0.8)
        axes.set_yticks(range(len(rows)), [textwrap.fill(what, 22) for what, *_ in reversed(rows)], fontsize=8.5)
        axes.set_ylim(-0.6, len(rows) - 0.4)
        axes.set_xlabel("times better (right is better);\ndashes: required")
        axes.grid(axis="x")
    return figure


def cost_against(series: Mapping[str, Sequence[tuple[float, float]]], *, x: str, y: str, title: str) -> Figure:
    """Cost against size, one line a series, on doubling axes: a straight line is a power law.

    Args:
        series: name → (size, cost) points.
        x, y: what the axes show, with units.
    """
    with _figure(title, 3.6) as (figure, axes):
        colours = (CANDIDATE, "#e69f00", "#009e73", "#cc79a7")
        for index, (name, points) in enumerate(series.items()):
            ordered = sorted(points)
            axes.plot(
                [point[0] for point in ordered],
                [point[1] for point in ordered],
                "osD^"[index % 4] + "-",
                color=colours[index % 4],
                markersize=5,
                label=name,
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
        axes.set(xlabel=x, ylabel=y)
        axes.grid()
        if len(series) > 1:
            _legend_below(axes, columns=len(series))
    return figure


def data_card(rows: Sequence[tuple[str, str, int]]) -> Figure:
    """Rows per split, one segment per family, largest first.

    Args:
        rows: one (split, family, rows) per sequence.
    """
    splits: dict[str, dict[str, list[int]]] = {}
    for split, family, count in rows:
        splits.setdefault(split, {}).setdefault(family, []).append(count)
    families = [family for split in splits.values() for family in split]
    crossing = len({family for family in families if families.count(family) > 1})
    total = sum(count for _, _, count in rows)
    title = (
        f"{total:,} captured rows in {len(set(families))} families, of which "
        f"{crossing or 'none'} {'cross' if crossing > 1 else 'crosses'} splits"
    )
    with _figure(title, 1.3 + 0.7 * len(splits)) as (figure, axes):
        longest = max(sum(map(sum, split.values())) for split in splits.values())
        for row, split_families in enumerate(reversed(list(splits.values()))):
            left = 0
            for index, count in enumerate(sorted(map(sum, split_families.values()), reverse=True)):
                axes.barh(row, count, 0.5, left, color=(CANDIDATE, "#7fb6d9")[index % 2], linewidth=0)
                left += count
            sequences = sum(map(len, split_families.values()))
            in_families = _count(len(split_families), "famil", "ies", "y")
            label = f"{left:,} rows, {_count(sequences, 'sequence', 's')}, {in_families}"
            axes.text(longest * 0.012, row + 0.3, label, va="bottom", fontsize=8.5)
        axes.set_yticks(range(len(splits)), [name.replace("_", "\n") for name in reversed(list(splits))])
        axes.set(xlabel="captured rows (context included)", xlim=(0, longest * 1.04), ylim=(-0.5, len(splits) - 0.2))
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.grid(axis="x")
    return figure


# --- tables


def gate_table_html(gates: Sequence[Row], verdict: str, sentence: str = "") -> str:
    """A verdict and the gates that it follows from, failing gates marked by word and colour.

    Args:
        gates: rows of Gate (value, comparison, threshold, holds, unit, denominator) or PilotGate (value, lower, upper,
            condition, state), as mappings.
    """
    words = [_state(gate) for gate in gates]
    held = words.count("holds")
    cells = [
        (
            _mark(word),
            html.escape(str(gate["name"]).replace("_", " ")),
            f"<b>{html.escape(_figures(gate['value']))}</b>{_interval(gate)}",
            html.escape(
                gate["condition"] if "condition" in gate else f"{gate['comparison']} {_figures(gate['threshold'])}"
            ),
            html.escape("; ".join(str(gate[key]) for key in ("unit", "denominator", "split") if key in gate)),
        )
        for word, gate in zip(words, gates, strict=True)
    ]
    return verdict_html(verdict, sentence or f"{held} of {len(gates)} gates hold.") + _table(
        ("", "gate", "value", "must be", "unit; denominator"), cells, f"Gates: {held} of {len(gates)} hold"
    )


def checklist_html(rows: Sequence[Row], root: Path | None = None) -> str:
    """Checks as a list: rows with name, holds, expected, found, where (the last three may be absent).

    Paths under `root`, the run root, are shown from there.
    """
    prefix = f"{root}/"
    held = sum(bool(row["holds"]) for row in rows)
    cells = [
        (
            _mark("holds" if row["holds"] else "fails"),
            html.escape(str(row["name"])),
            *(html.escape(number(row.get(key)).replace(prefix, "")) for key in ("expected", "found", "where")),
        )
        for row in rows
    ]
    return _table(("", "check", "expected", "found", "where"), cells, f"{held} of {len(rows)} checks hold", "d2-words")


def _state(gate: Row) -> str:
    return str(gate["state"]) if "state" in gate else "holds" if gate["holds"] else "fails"


def _mark(word: str) -> str:
    colour, sign = {"holds": (GOOD, "✓"), "undecided": ("#8a5a00", "?")}.get(word, ("#a4262c", "✗"))
    return (
        f'<span style="background:{colour};color:#fff;padding:0 .45em;border-radius:.2em;white-space:nowrap">'
        f'<span aria-hidden="true">{sign}</span> {html.escape(word)}</span>'
    )


def _figures(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) >= 1 else f"{value:.6g}"


def _interval(gate: Row) -> str:
    return f" [{gate['lower']:.4f}, {gate['upper']:.4f}]" if "lower" in gate else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], caption: str, kind: str = "d2-gates") -> str:
    """A table that scrolls inside its own box, also by keyboard; cells are HTML already."""
    label = html.escape(caption)
    top = "".join(
        f'<th scope="col" role="columnheader" style="text-align:left">{html.escape(name) or "state"}</th>'
        for name in head
    )
    body = "".join(
        '<tr role="row">'
        + "".join(
            f'<th scope="row" role="rowheader" style="text-align:left;font-weight:600">{cell}</th>'
            if column == 1
            else f'<td role="cell" style="text-align:left">{cell}</td>'
            for column, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="d2-table {kind}" role="region" tabindex="0" aria-label="{label}" style="overflow-x:auto">'
        f'<table role="table"><caption>{label}</caption><thead role="rowgroup"><tr role="row">{top}</tr></thead>'
        f'<tbody role="rowgroup">{body}</tbody></table></div>'
    )


# --- drawing


@contextmanager
def _figure(title: str, height: float, rows: int = 1) -> Iterator[tuple[Figure, Any]]:
    """A styled figure with its title over the full width, wrapped to fit."""
    most = int(11.2 * WIDTH)  # characters of bold 11-point type
    lines = textwrap.wrap(title, most)
    lines = next(even for width in range(20, most + 1) if len(even := textwrap.wrap(title, width)) == len(lines))
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH, height + 0.2 * len(lines)), layout="constrained")
        figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=11, fontweight="bold")
        axes = figure.subplots(rows, 1, sharex=True)
        yield figure, axes


def _legend_below(axes: Axes, *, columns: int = 1, handles: Mapping[str, Any] | None = None) -> None:
    """A legend under the axes, where it can cover no mark."""
    figure = axes.figure
    entries = handles or dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(list(entries.values()), list(entries), loc="outside lower left", ncols=columns)


def _signed(value: float) -> str:
    """A short number with a true minus sign, as on the axes."""
    return f"{value:g}".replace("-", "−")


def _hours(hours: float, digits: int = 3) -> str:
    """Hours to the given decimals; small ones to two figures, because 0.000 says nothing."""
    return f"{hours:.{digits}f}" if hours == 0 or hours >= 0.1 else f"{hours:.2g}"


def _count(count: int, stem: str, many: str, one: str = "") -> str:
    return f"{count:,} {stem}{one if count == 1 else many}"


def _of(split: str) -> str:
    return f"{split}: " if split else ""


def _moving_mean(values: Sequence[float], span: int) -> Any:
    """[n - span + 1] means of `span` neighbours."""
    sums = np.cumsum(np.concatenate([[0.0], np.asarray(values, dtype=float)]))
    return (sums[span:] - sums[:-span]) / span


def _thresholds(condition: str) -> list[float]:
    """The numbers that a gate's condition names: `gain >= 0.15`, `lower > 0`, `interval within ±0.05`."""
    last = condition.split()[-1]
    return [-float(last[1:]), float(last[1:])] if last.startswith("±") else [float(last)]
