"""What admission reads of the phases before it: the G1 receipt and the pilot's receipt, strictly typed.

The phases write these records and nobody else does; admission believes them only as far as it can recompute or re-hash
what they say.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from pydantic import Field, model_validator

from d2lib.data.check import CheckRow
from d2lib.data.manifest import Digest
from d2lib.data.sample import FrozenSample
from d2lib.files import Hashed, Record, read_json, write_json
from d2lib.gates.journal import ScoredSplit

SCORED: tuple[ScoredSplit, ...] = get_args(ScoredSplit)

Kind = TypeVar("Kind", bound=Record)


class Replay(Record):
    """G1(b): every sequence of dev went through the target again and gave the captured tokens and rows exactly."""

    split: Literal["dev"] = "dev"
    exact: bool
    positions: int = Field(gt=0)
    """Generated positions that were replayed."""
    sequences: dict[str, Digest]
    """Sequence → digest of the sidecar that it was compared with."""
    target: Digest
    """Digest of the target's weights."""


class Parity(Record):
    """The reference drafter against the live K2 drafts of one file.

    A draft differs when the reference's logit of the live token is more than `tolerance` below its own choice's;
    within it the two are a near tie that rounding decides.
    """

    k2: Digest
    native: Digest
    rounds: int = Field(gt=0)
    drafts: int = Field(gt=0)
    differing: int = Field(ge=0)
    near_ties: int = Field(ge=0)
    tolerance: float = Field(ge=0, le=0.01)


class LiveSource(Record):
    """A file of the assembly that the live run made or used, by its path in the assembly.

    VALID: the live run's own headers name these bytes, or it is a trajectory that the reference drafts again.
    """

    name: str = Field(min_length=1)
    status: Literal["VALID", "WITHDRAWN"]
    sha256: Digest


class _Genuine(Record):
    """A record that may say `synthetic: false`, as those of earlier versions did, and nothing else about it."""

    @model_validator(mode="before")
    @classmethod
    def _not_synthetic(cls, value: Any) -> Any:
        if not isinstance(value, dict) or "synthetic" not in value:
            return value
        if value["synthetic"] is not False:
            raise ValueError(f"synthetic inputs are refused, found synthetic: {value['synthetic']!r}")
        return {name: field for name, field in value.items() if name != "synthetic"}


class G1Receipt(_Genuine):
    """g1.json: the data are what they say they are, and the reference drafter is the live one."""

    schema_version: Literal[1] = 1
    namespace: str = Field(min_length=1)
    """The manifest's."""
    manifest_sha256: Digest
    k2: dict[ScoredSplit, Digest]
    rows: list[CheckRow] = Field(min_length=1)
    """Every row of G1(a), G1(b), coverage and parity, as the phase showed them."""
    replay: Replay
    parity: dict[ScoredSplit, Parity]
    live_sources: list[LiveSource]


class PilotArm(Record):
    """One arm: its adapter's file beside the receipt, and what its training took."""

    checkpoint: str = Field(min_length=1)
    sha256: Digest
    updates: int = Field(gt=0)
    seconds: float = Field(gt=0)


class PilotArms(Record):
    """Both arms."""

    fast: PilotArm
    ref: PilotArm


class SampleRecord(Record):
    """The frozen sample as a receipt keeps it (see d2lib.data.sample.FrozenSample.as_dict)."""

    namespace: str
    seed: Digest
    identity: Digest
    size: int = Field(gt=0)
    population_rounds: dict[str, int]
    rounds: dict[str, int]
    whole: dict[str, bool]

    @classmethod
    def of(cls, sample: FrozenSample) -> SampleRecord:
        """The record of a drawn sample."""
        return cls.model_validate(sample.as_dict())


class ScoresFile(Record):
    """The raw per-round scores beside the receipt."""

    file: str = Field(min_length=1)
    sha256: Digest


class Arithmetic(Record):
    """What decides the last bits of a training beside its code: full training has to have the pilot's."""

    precision: Literal["fp32", "bf16"]
    """Of FAST's large products."""
    device: Literal["cpu", "cuda"]
    torch: str = Field(min_length=1)
    """Version with its build."""
    threads: int = Field(gt=0)
    """Of torch."""


class PilotReceipt(_Genuine):
    """receipt.json of the pilot: what was trained and scored, the verdict, and everything that it hangs on."""

    schema_version: Literal[1] = 1
    namespace: str = Field(min_length=1)
    verdict: Literal["PASS", "FAIL", "INCONCLUSIVE"]
    recipe: dict[str, Any]
    """The complete recipe that this pilot qualifies; full training takes it from here and from nowhere else."""
    arithmetic: Arithmetic | None = None
    """None in a receipt from before it was recorded; then full training has nothing to compare."""
    manifest_sha256: Digest
    k2: dict[ScoredSplit, Digest]
    g1_sha256: Digest
    initialization_sha256: Digest
    sample: SampleRecord
    arms: PilotArms
    source_map_sha256: Digest
    scores: ScoresFile
    statistics: dict[str, Any]
    """The whole verdict as it was computed (see d2lib.gates.pilot.PilotVerdict)."""


def load_record(kind: type[Kind], path: Path) -> Kind:
    """A record from its JSON file; raises Refused that names the file and the field which is wrong."""
    return parse_record(kind, read_json(path), path)


def parse_record(kind: type[Kind], value: Any, where: object) -> Kind:
    """A record from plain data; raises Refused that names the field which is wrong."""
    return kind.parse(value, where, message=f"not a {kind.__name__}")


def write_record(path: Path, record: Record) -> Hashed:
    """Create a record's file in canonical JSON, or find the same bytes there; returns the file's digest."""
    return write_json(path, record.model_dump(mode="json"), once=True)
