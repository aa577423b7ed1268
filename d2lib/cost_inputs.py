"""What the cost and scope sheet is computed from: measured rates and counts, each with its source, strictly typed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, get_args

from pydantic import Field, model_validator

from d2lib.data.manifest import Counts, Split, SplitCounts
from d2lib.errors import Refused
from d2lib.files import Record
from d2lib.strict import read_yaml

Scored = Literal["dev", "heldout_legal", "heldout_general"]
SCORED: tuple[Scored, ...] = get_args(Scored)

Kind = TypeVar("Kind", bound=Record)


class Rate(Record):
    """Seconds that one unit of work takes."""

    seconds: float = Field(gt=0)
    source: str = Field(min_length=1)
    """Who measured it, on what, when."""
    label: Literal["MEASURED"] = "MEASURED"
    replaces: str | None = None
    """The historical rate that this run's own measurement replaces, in words."""


class Rates(Record):
    """fast, ref: per optimizer update of one batch. evaluation: per round and pass in reference arithmetic."""

    fast: Rate
    ref: Rate
    evaluation: Rate


class SplitSize(Record):
    """What was captured of a split; rows include the context."""

    sequences: int = Field(gt=0)
    rows: int = Field(gt=0)
    context: int | None = Field(default=None, gt=0)
    """Rows of context of all sequences together, where they differ in theirs."""


class Captured(Record):
    """The four splits' sizes, from a manifest."""

    source: str = Field(min_length=1)
    gen_start: int | None = Field(default=None, gt=0)
    """Rows of every sequence's context; None: each split says the sum of its own."""
    splits: dict[Split, SplitSize]

    @model_validator(mode="after")
    def _complete(self) -> Self:
        missing = set(get_args(Split)) - self.splits.keys()
        if missing:
            raise ValueError(f"splits are missing: {', '.join(sorted(missing))}")
        for name, split in self.splits.items():
            if (split.context is None) == (self.gen_start is None):
                raise ValueError(f"give gen_start, or the context of every split: {name}")
            if split.rows < self._context(split) + 2 * split.sequences:
                raise ValueError(f"{name} has sequences without a block: {split.rows} rows of {split.sequences}")
        return self

    def _context(self, split: SplitSize) -> int:
        return split.sequences * self.gen_start if self.gen_start is not None else split.context or 0

    def counts(self) -> Counts:
        """Positions and blocks, counted as from the manifest itself."""
        return Counts(
            {
                name: SplitCounts(
                    sequences=split.sequences,
                    rows=split.rows,
                    span_positions=split.rows - self._context(split),
                    blocks=split.rows - self._context(split) - split.sequences,
                )
                for name, split in self.splits.items()
            }
        )


class RoundCount(Record):
    """Complete rounds that a split's scoring covers, or a count that they cannot exceed."""

    rounds: int = Field(gt=0)
    source: str = Field(min_length=1)
    upper_bound: bool = False


class Training(Record):
    """The full training."""

    epochs: int = Field(gt=0)
    batch: int = Field(gt=0)
    solo: str = Field(min_length=1)


class Supply(Record):
    """What generating the data took, and what is wanted of it."""

    generated_tokens: int = Field(gt=0)
    hours: float = Field(gt=0)
    unit: str = Field(min_length=1)
    source: str = Field(min_length=1)
    wanted_blocks: int = Field(gt=0)
    """Unique training blocks of a larger data objective."""
    wanted_tokens: int = Field(gt=0)
    """Generated tokens of the whole dataset."""


class CostInputs(Record):
    """All that the sheet is computed from. Counts that a manifest or K2 files give may be left out of a file."""

    rates: Rates
    training: Training
    passes: int = Field(gt=0)
    """Scoring passes per round: baseline and candidate."""
    schedule: dict[str, tuple[Scored, ...]] = Field(min_length=1)
    """Solo → the splits that it scores, in order."""
    unit: str = "solo GPU-hours"
    captured: Captured | None = None
    rounds: dict[Scored, RoundCount] | None = None
    supply: Supply | None = None
    notes: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _scheduled(self) -> Self:
        scheduled = sorted(split for splits in self.schedule.values() for split in splits)
        if scheduled != sorted(SCORED):
            raise ValueError(f"the schedule must have each of {', '.join(SCORED)} once; found {', '.join(scheduled)}")
        if self.rounds is not None and set(self.rounds) != set(SCORED):
            raise ValueError(f"rounds must be given for {', '.join(SCORED)}; found {', '.join(sorted(self.rounds))}")
        return self

    def with_rate(self, name: Literal["fast", "ref", "evaluation"], seconds: float, source: str) -> CostInputs:
        """The same inputs with a rate that this run measured; the row will say what it replaces."""
        old: Rate = getattr(self.rates, name)
        new = _validated(
            Rate,
            {"seconds": seconds, "source": source, "replaces": f"{old.seconds:g} s ({old.source})"},
            f"the measured rate {name}",
        )
        return self.model_copy(update={"rates": self.rates.model_copy(update={name: new})})

    def with_pilot(self, receipt: Mapping[str, Any], source: str) -> CostInputs:
        """The same inputs with the training rates that a pilot's two arms measured, of the recipe that it qualified."""
        try:
            recipe, arms = receipt["recipe"], receipt["arms"]
            rates = {name: arms[name]["seconds"] / arms[name]["updates"] for name in ("fast", "ref")}
            batch, epochs, objective = int(recipe["batch"]), int(recipe["epochs"]), str(recipe["objective"])
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise Refused(
                "a pilot's receipt gives no rates",
                expected="recipe and arms with seconds and updates",
                found=repr(error),
                where=source,
            ) from None
        if batch != self.training.batch:
            raise Refused(
                "a pilot's rates are of another batch", expected=self.training.batch, found=batch, where=source
            )
        found = self
        for name, words in (("fast", "FAST"), ("ref", "REF")):
            how = f"{objective} in {words}, {arms[name]['updates']} updates of the pilot, {source}"
            found = found.with_rate(name, rates[name], how)  # type: ignore[arg-type]
        return found.model_copy(update={"training": self.training.model_copy(update={"epochs": epochs})})

    def with_counts(self, counts: Counts, gen_start: int | None, source: str) -> CostInputs:
        """The same inputs with the sizes that a manifest gives; gen_start is None where sequences differ in theirs."""
        splits = {
            name: {"sequences": s.sequences, "rows": s.rows}
            | ({"context": s.rows - s.span_positions} if gen_start is None else {})
            for name, s in counts.splits.items()
        }
        captured = _validated(Captured, {"source": source, "gen_start": gen_start, "splits": splits}, source)
        if captured.counts() != counts:
            raise Refused(
                "sequences begin their spans at different rows", expected=f"gen_start {gen_start} in all", where=source
            )
        return self.model_copy(update={"captured": captured})

    def with_rounds(self, rounds: Mapping[Scored, int], source: str) -> CostInputs:
        """The same inputs with the complete rounds that K2 files give."""
        found = {
            split: _validated(RoundCount, {"rounds": count, "source": source}, f"{source}: {split}")
            for split, count in rounds.items()
        }
        return CostInputs.model_validate(dict(self) | {"rounds": found})


def load_inputs(path: Path) -> CostInputs:
    """The cost sheet's inputs from a phase's parameter file, `inputs:` beside `run:` and the like.

    Raises:
        Refused: the file is no YAML, a key stands twice, is unknown or missing, or a number is negative, not finite or
            of another kind; the file and the field are named.
    """
    value = read_yaml(path)
    if not isinstance(value, dict) or not isinstance(value.get("inputs"), dict):
        raise Refused("the cost sheet's file has no inputs", expected="inputs: a mapping", where=path)
    unknown = sorted(value.keys() - {"run", "inputs", "pilot", "assembly"})
    if unknown:
        raise Refused("an unknown parameter", expected="run, inputs, pilot, assembly", found=unknown[0], where=path)
    return parse_inputs(value["inputs"], f"{path}: inputs")


def parse_inputs(value: Mapping[str, Any], where: object = "inputs") -> CostInputs:
    """The cost sheet's inputs from plain data; raises Refused that names the field which is wrong."""
    return _validated(CostInputs, dict(value), where)


def _validated(kind: type[Kind], value: Mapping[str, Any], where: object) -> Kind:
    return kind.parse(value, where, message="the cost sheet's inputs are wrong")
