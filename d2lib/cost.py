"""The cost and scope sheet: what a full run costs and whether the data suffice, from measured rates and counts.

Pure functions of `CostInputs`. Every row is labelled MEASURED (an input, with its source), COMPUTED (counted from
inputs) or ESTIMATED (a measured rate times a count that was not run). Arithmetic is exact, on fractions of the decimal
numbers that stand in the file; rounding, half up, happens once, in the text. A count that is an upper bound makes every
figure that contains it one, shown with `<=`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any, Literal

from d2lib.cost_inputs import SCORED, Captured, CostInputs, Rate, RoundCount, Scored, Supply, load_inputs, parse_inputs
from d2lib.data.manifest import Counts
from d2lib.errors import Refused

__all__ = ["CostInputs", "CostRow", "CostSheet", "cost_sheet", "load_inputs", "parse_inputs", "render_text"]

Label = Literal["MEASURED", "COMPUTED", "ESTIMATED"]

_SHORT: dict[Scored, str] = {"dev": "dev", "heldout_legal": "legal", "heldout_general": "general"}
_HOUR = 3600


@dataclass(frozen=True)
class Amount:
    """An exact number, and whether it is only an upper bound."""

    value: Fraction
    upper: bool = False

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.value + other.value, self.upper or other.upper)

    def times(self, factor: Fraction | int) -> Amount:
        """A multiple; the bound stays."""
        return Amount(self.value * factor, self.upper)

    def text(self, digits: int) -> str:
        """`<=4.062`: rounded half up, thousands separated."""
        return f"{'<=' if self.upper else ''}{rounded(self.value, digits)}"


@dataclass(frozen=True)
class CostRow:
    """One line of the sheet.

    value: unrounded. text: as it is printed, with `<=` where it is an upper bound. wall: wall time in words, for work.
    how: the source of a measured value, the formula of another.
    """

    section: Literal["rates", "counts", "cost", "data"]
    name: str
    value: float
    text: str
    unit: str
    label: Label
    how: str
    upper_bound: bool = False
    wall_hours: float | None = None
    wall: str = ""


@dataclass(frozen=True)
class CostSheet:
    """The rows, and the same figures as the plots take them.

    bars: bar → part → hours. tasks: (solo, task, start, hours) of training followed by scoring. supply: (what, have,
    need).
    """

    rows: tuple[CostRow, ...]
    bars: dict[str, dict[str, float]]
    tasks: tuple[tuple[str, str, float, float], ...]
    supply: tuple[tuple[str, float, float], ...]
    notes: tuple[str, ...]
    unit: str

    def row(self, name: str) -> CostRow:
        """The row with this name."""
        for row in self.rows:
            if row.name == name:
                return row
        raise Refused("the sheet has no such row", expected=[row.name for row in self.rows], found=name)

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "rows": [asdict(row) for row in self.rows],
            "bars": self.bars,
            "tasks": [list(task) for task in self.tasks],
            "supply": [list(line) for line in self.supply],
            "notes": list(self.notes),
            "unit": self.unit,
        }


def rounded(value: Fraction, digits: int) -> str:
    """A number that is not negative in decimal: rounded half up, as people round, thousands separated."""
    scaled = value * 10**digits
    nearest = (2 * scaled.numerator + scaled.denominator) // (2 * scaled.denominator)
    return f"{Decimal(nearest).scaleb(-digits):,.{digits}f}"


def cost_sheet(inputs: CostInputs) -> CostSheet:
    """Compute the sheet.

    Raises:
        Refused: the inputs hold no counts, neither of their own nor from a manifest or K2 files.
    """
    if inputs.captured is None or inputs.rounds is None:
        raise Refused(
            "the cost sheet has no counts",
            expected="captured splits and rounds",
            found="neither" if inputs.captured is None and inputs.rounds is None else "one of them",
            remedy="give them in the inputs, or a manifest and K2 files",
        )
    counts = inputs.captured.counts()
    updates = counts.updates(inputs.training.epochs, inputs.training.batch)
    fast, ref = (_hours(rate, updates) for rate in (inputs.rates.fast, inputs.rates.ref))
    scoring = {
        split: _hours(inputs.rates.evaluation, count.rounds * inputs.passes, upper=count.upper_bound)
        for split, count in inputs.rounds.items()
    }
    lanes = {solo: _total(scoring[split] for split in splits) for solo, splits in inputs.schedule.items()}
    full = _total(scoring[split] for split in SCORED)
    wall = Amount(max(lane.value for lane in lanes.values()), any(lane.upper for lane in lanes.values()))
    rows = [*_rate_rows(inputs), *_count_rows(inputs, inputs.captured, counts, updates, inputs.rounds)]
    rows += _cost_rows(inputs, fast, ref, scoring, full, wall)
    supply: tuple[tuple[str, float, float], ...] = ()
    if inputs.supply is not None:
        rows += _data_rows(inputs.supply, counts)
        supply = (
            ("unique training blocks", float(counts.blocks), float(inputs.supply.wanted_blocks)),
            ("generated tokens", float(inputs.supply.generated_tokens), float(inputs.supply.wanted_tokens)),
        )
    parts = {"FAST training": float(fast.value)} | {f"G2 {_SHORT[s]}": float(scoring[s].value) for s in SCORED}
    tasks = [(f"solo {inputs.training.solo}", "FAST training", 0.0, float(fast.value))]
    for solo, splits in inputs.schedule.items():
        start = fast.value
        for split in splits:
            tasks.append((f"solo {solo}", f"G2 {_SHORT[split]}", float(start), float(scoring[split].value)))
            start += scoring[split].value
    return CostSheet(
        rows=tuple(rows),
        bars={
            "training and G2": parts,
            "REF training (comparison only)": {"REF training": float(ref.value)},
        },
        tasks=tuple(tasks),
        supply=supply,
        notes=(
            "Estimates omit startup, I/O, validation, checkpoint writes, interruptions and queueing.",
            *(("<= marks a planning upper bound and every sum that contains one.",) if full.upper else ()),
            *inputs.notes,
        ),
        unit=inputs.unit,
    )


def _hours(rate: Rate, count: int, *, upper: bool = False) -> Amount:
    return Amount(_exact(rate.seconds) * count / _HOUR, upper)


def _exact(value: float) -> Fraction:
    """The decimal number that a person wrote, not the binary one next to it."""
    return Fraction(repr(value))


def _total(amounts: Iterable[Amount]) -> Amount:
    total = Amount(Fraction(0))
    for amount in amounts:
        total += amount
    return total


def _rate_rows(inputs: CostInputs) -> list[CostRow]:
    rows = []
    for name, rate, unit in (
        ("FAST", inputs.rates.fast, f"s per B{inputs.training.batch} update"),
        ("REF", inputs.rates.ref, f"s per B{inputs.training.batch} update"),
        ("reference evaluation", inputs.rates.evaluation, "s per round per pass"),
    ):
        how = rate.source if rate.replaces is None else f"measured by this run: {rate.source}; replaces {rate.replaces}"
        rows.append(CostRow("rates", name, rate.seconds, f"{rate.seconds:.6g}", unit, "MEASURED", how))
    return rows


def _count_rows(
    inputs: CostInputs, captured: Captured, counts: Counts, updates: int, rounds: Mapping[Scored, RoundCount]
) -> list[CostRow]:
    epochs, batch = inputs.training.epochs, inputs.training.batch

    def row(name: str, value: int, unit: str, label: Label, how: str, *, upper: bool = False) -> CostRow:
        return CostRow("counts", name, value, Amount(Fraction(value), upper).text(0), unit, label, how, upper)

    rows = [
        row(f"captured rows, {name}", split.rows, f"rows of {split.sequences} sequences", "MEASURED", captured.source)
        for name, split in counts.splits.items()
    ]
    rows += [
        row("captured rows", counts.rows, "rows, context included", "COMPUTED", "sum of the splits"),
        row(
            "generated span positions",
            counts.span_positions,
            "positions",
            "COMPUTED",
            f"rows - {counts.rows - counts.span_positions} context rows"
            if captured.gen_start is None
            else f"rows - {captured.gen_start} context rows x {counts.sequences} sequences",
        ),
        row("training span positions", counts.training_positions, "positions", "COMPUTED", "the same of train"),
        row("unique training blocks", counts.blocks, "blocks", "COMPUTED", "L - gen_start - 1 per train sequence"),
        row("updates", updates, "updates", "COMPUTED", f"{epochs} x ceil({counts.blocks} / {batch})"),
        row("presented blocks", counts.presented(epochs), "blocks", "COMPUTED", f"{epochs} epochs, repeats included"),
    ]
    for split in SCORED:
        count = rounds[split]
        how = f"{count.source}{' (upper bound: incomplete tails included)' if count.upper_bound else ''}"
        rows.append(
            row(f"rounds, {_SHORT[split]}", count.rounds, "complete rounds", "MEASURED", how, upper=count.upper_bound)
        )
    return rows


def _cost_rows(
    inputs: CostInputs, fast: Amount, ref: Amount, scoring: Mapping[Scored, Amount], full: Amount, wall: Amount
) -> list[CostRow]:
    def row(name: str, hours: Amount, elapsed: Amount, words: str, how: str) -> CostRow:
        return CostRow(
            "cost",
            name,
            float(hours.value),
            hours.text(3),
            inputs.unit,
            "ESTIMATED",
            how,
            hours.upper,
            float(elapsed.value),
            words,
        )

    def alone(hours: Amount) -> str:
        return f"{hours.text(3)} h"

    per_update = "updates x seconds per update"
    epochs = f"{inputs.training.epochs} epochs"
    rows = [
        row(f"full FAST training, {epochs}, one solo", fast, fast, alone(fast), per_update),
        row("the same in REF (comparison only, not scheduled)", ref, ref, alone(ref), per_update),
    ]
    for split in SCORED:
        solo = next(solo for solo, splits in inputs.schedule.items() if split in splits)
        before = inputs.schedule[solo][: inputs.schedule[solo].index(split)]
        place = f" on solo {solo}" + (f" after {' and '.join(_SHORT[s] for s in before)}" if before else "")
        hours = scoring[split]
        how = f"rounds x {inputs.passes} passes x seconds per round"
        rows.append(row(f"full {_SHORT[split]}, baseline and candidate", hours, hours, alone(hours) + place, how))
    solos = {1: "one solo", 2: "two solos"}.get(len(inputs.schedule), f"{len(inputs.schedule)} solos")
    both, elapsed = fast + full, fast + wall

    def about(hours: Amount) -> str:
        return f"about {rounded(hours.value, 3)} h with {solos}"

    rows += [
        row("full G2, three splits", full, wall, about(wall), "sum of the splits; wall: the longest solo"),
        row("FAST training, then full G2", both, elapsed, about(elapsed) + " for G2", "training + full G2"),
    ]
    return rows


def _data_rows(supply: Supply, counts: Counts) -> list[CostRow]:
    rate = Fraction(supply.generated_tokens) / _exact(supply.hours)
    share = Fraction(counts.training_positions, counts.span_positions)
    blocks = max(0, supply.wanted_blocks - counts.blocks)
    tokens = max(0, supply.wanted_tokens - supply.generated_tokens)

    def row(name: str, value: Fraction, digits: int, unit: str, label: Label, how: str) -> CostRow:
        return CostRow("data", name, float(value), rounded(value, digits), unit, label, how)

    wanted, hours = f"{supply.wanted_blocks:,} unique training blocks", supply.unit
    return [
        row("generated tokens", Fraction(supply.generated_tokens), 0, "tokens", "MEASURED", supply.source),
        row("generation time", _exact(supply.hours), 1, hours, "MEASURED", supply.source),
        row("generation rate", rate, 0, f"tokens per {hours.removesuffix('s')}", "COMPUTED", "tokens / time"),
        row("deficit of training blocks", Fraction(blocks), 0, "blocks", "COMPUTED", f"to {wanted}"),
        row("generation, all new families in train", blocks / rate, 2, hours, "ESTIMATED", "deficit / rate"),
        row("train's share of generated positions", share * 100, 1, "%", "COMPUTED", "training / all span positions"),
        row("generation at that share", blocks / (rate * share), 2, hours, "ESTIMATED", "deficit / (rate x share)"),
        row("deficit of generated tokens", Fraction(tokens), 0, "tokens", "COMPUTED", f"to {supply.wanted_tokens:,}"),
        row("generation of those tokens", tokens / rate, 3, hours, "ESTIMATED", "deficit / rate; not training blocks"),
    ]


def render_text(sheet: CostSheet) -> str:
    """The sheet as a table for a terminal."""
    titles = {
        "rates": "Rates",
        "counts": "Counts",
        "cost": f"Cost in {sheet.unit}",
        "data": "Data sufficiency",
    }
    lines: list[str] = []
    for section, title in titles.items():
        rows = [row for row in sheet.rows if row.section == section]
        if not rows:
            continue
        cells = [
            (row.name, row.text, row.wall or row.unit, row.label, "" if section == "cost" else row.how) for row in rows
        ]
        head = (title, "hours" if section == "cost" else "value", "wall time" if section == "cost" else "unit", "", "")
        lines += ["", *_aligned([head, *cells])] if lines else _aligned([head, *cells])
    lines += ["", *sheet.notes]
    return "\n".join(lines)


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.rjust(width) if column == 1 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return [lines[0], "-" * max(len(line) for line in lines[:1]), *lines[1:]]
