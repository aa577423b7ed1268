"""The parameters of every phase: typed, complete, unknown names refused.

A path is taken from the run root when it is relative, so that one file of parameters works for a laptop's run and for
a coordinator's, whose inputs lie elsewhere. There is no recipe here: full training takes its recipe from the admitted
pilot and from nowhere else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from d2lib.files import Record

Split = Literal["dev", "heldout_legal", "heldout_general"]
RESCORED_ROUNDS = 459
"""ceil(ln 0.01 / ln 0.99): so many drawn rounds hold an invented score with 99% when 1% of all rounds have one."""


class PhaseParams(Record):
    """What every phase takes."""

    once: ClassVar[bool] = False
    """Whether the phase, once done, never runs again. Others may: they find the same, or judge anew."""

    run: str = Field(min_length=1)
    """The run root, runs/NAMESPACE: the folder that holds the ledger, the receipts and what the phases made."""

    def resolve(self, root: Path, name: str) -> Path:
        """A path parameter: absolute as it is, relative from the run root."""
        return root / name


class CaptureParams(PhaseParams):
    """capture: make the assembly. `profile` is validated by the lab (see CaptureProfile)."""

    once = True
    profile: dict[str, Any]


class AssemblyParams(PhaseParams):
    """What every phase takes that works on the assembly and its live trajectories."""

    assembly: str = "assembly"
    k2: dict[Split, str] = Field(default_factory=dict)
    """Split → K2 file, all three, where they lie elsewhere than in the assembly; empty: the assembly's own."""

    @field_validator("k2")
    @classmethod
    def _whole(cls, value: dict[Split, str]) -> dict[Split, str]:
        if value and set(value) != set(get_args(Split)):
            raise ValueError(f"a file for each of {', '.join(get_args(Split))}, or none")
        return value


class G1Params(AssemblyParams):
    """g1: integrity of every split, exact replay of dev, K2 coverage, parity with the live drafts."""

    threads: int = Field(default=2, ge=1)
    device: str = "cpu"
    """What drafts again; the replay is the CPU's, whose bits are stored."""


class PilotParams(AssemblyParams):
    """pilot: matched FAST and REF arms on the same blocks, judged on the frozen sample."""

    g1: str = "g1/g1.json"
    objective: Literal["KL", "TVD", "LR", "ACE"]
    learning_rate: float = Field(ge=0)
    """The rate that this pilot qualifies; it stands in the pilot's receipt and full training takes it from there."""
    epochs: int = Field(default=3, ge=1)
    """Epochs of the full training that this pilot qualifies; the pilot itself presents `presented_blocks`."""
    presented_blocks: int = Field(default=20_352, ge=1)
    sample_size: int = Field(default=1000, ge=1)
    threads: int = Field(default=2, ge=1)
    precision: Literal["fp32", "bf16"] = "fp32"
    """Of the FAST arm's large products. Full training has to have the pilot's precision, device, torch and threads."""
    device: str = "cpu"


class CostSheetParams(PhaseParams):
    """cost_sheet: measured inputs in, cost and scope out. Without `pilot` every rate is historical."""

    inputs: dict[str, Any]
    pilot: str | None = None
    """Folder of the pilot whose measured rates replace the historical ones."""
    assembly: str | None = None
    """The assembly whose counts are used."""


class PilotDemands(Record):
    """What a profile asks of its pilot. Admission compares the pilot with this, not with what the pilot says of itself.

    sequences: split → its requests, all four splits.
    """

    presented_blocks: int = Field(ge=1)
    """Each arm presents so many, rounded up to whole updates."""
    sample_size: int = Field(ge=1)
    """Rounds of each sampled split."""
    sequences: dict[Literal["train", Split], int]

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if set(self.sequences) != {"train", *get_args(Split)}:
            raise ValueError(f"sequences must name train, {', '.join(get_args(Split))}")
        return self


class AdmissionParams(AssemblyParams):
    """admission: every check again, on the CPU, before anything long starts."""

    g1: str = "g1/g1.json"
    pilot: str = "pilot"
    pilot_source: str | None = None
    """The pilot's own source tree; by default PILOT/repo."""
    demands: PilotDemands
    """What the profile asked of the pilot, which the pilot is compared with."""
    rescored_rounds: int = Field(default=RESCORED_ROUNDS, ge=1)
    """Rounds of the frozen sample that are drawn and scored again. The default finds a score that was invented in 1% of
    the rounds with 99%; where a drafter is too large for that, the receipt says what fewer find."""
    parity_rounds: int = Field(default=100, ge=1)
    """Rounds of each live trajectory that are drawn and drafted again."""
    replayed_sequences: int = Field(default=3, ge=0)
    """Sequences of dev that are drawn and go through the target again; 0 where the target cannot run here."""
    pins: str | None = None
    """YAML of what is known of the inputs from outside of them (see d2lib.train.pins)."""
    policy: str | None = None
    """YAML that says whose signatures the receipts of capture, g1 and pilot need; without it none."""


class StageParams(PhaseParams):
    """stage: the reviewed commit into a new snapshot. Outside the engine it only shows what would be staged."""

    source: str
    """The reviewed checkout, clean."""
    commit: str
    """Its commit, 40 hex digits."""
    snapshot: str
    """New folder, named like the run root, PILOT-NAMESPACE-full."""
    assembly: str
    pilot_source: str
    pilot_receipt: str
    g1: str
    k2_dev: str
    k2_legal: str
    k2_general: str


class TrainParams(AssemblyParams):
    """train: the full run that the admitted pilot qualified."""

    once = True
    output: str = "full"
    resume: bool = False
    save_every: float = Field(default=300.0, gt=0)
    """Seconds between immutable checkpoints."""
    threads: int = Field(default=2, ge=1)
    precision: Literal["fp32", "bf16"] = "fp32"
    device: str = "cpu"
    pins: str | None = None
    """YAML of what is known of the run from outside of its inputs (see d2lib.train.pins)."""
    policy: str | None = None
    """YAML that says whose signatures the admission needs; without it none."""


class G2Params(AssemblyParams):
    """g2: one split's full population, baseline and candidate, in reference arithmetic."""

    once = True
    split: Split
    output: str = "full"
    threads: int = Field(default=2, ge=1)
    device: str = "cpu"
    policy: str | None = None
    """YAML that says whose signatures admission and training need; without it none."""


class FinishParams(PhaseParams):
    """finish: bind the three parts and give the verdict."""

    once = True
    output: str = "full"
    policy: str | None = None
    """YAML that says whose signatures admission, training and the three parts need; without it none."""


class BenchmarkParams(PhaseParams):
    """benchmark: speed and memory as ratios, both sides in one run."""

    scale: Literal["tiny", "full"] = "full"
    repeats: int = Field(default=5, ge=1)
    threads: int = Field(default=2, ge=1)
    device: Literal["cpu", "cuda"] | None = None
    """By default a GPU where there is one."""
    precision: Literal["fp32", "bf16"] | None = None
    """Of FAST's large products; by default bf16 on a GPU."""
    speculators_python: str | None = None
    """Interpreter of an environment that has speculators 0.9, to compare the dense training step with its own."""


class CalibrationParams(PhaseParams):
    """gate_calibration: what the gates do on this run's own request structure."""

    output: str = "full"
    simulations: int = Field(default=1000, ge=10)
    seed: int = 23


class LiveParams(PhaseParams):
    """live: greedy speculative decoding with the adapted drafter against the target alone."""

    split: Split = "heldout_legal"
    requests: int = Field(default=6, ge=1)
    """The first so many of the split."""
    rows: int | None = Field(default=None, ge=1)
    """Rows of a decoded sequence, context included; by default as many as the captured one has."""
    assembly: str = "assembly"
    output: str = "full"
    threads: int = Field(default=2, ge=1)


SCHEMAS: dict[str, type[PhaseParams]] = {
    "capture": CaptureParams,
    "g1": G1Params,
    "pilot": PilotParams,
    "cost_sheet": CostSheetParams,
    "admission": AdmissionParams,
    "stage": StageParams,
    "train": TrainParams,
    "g2": G2Params,
    "finish": FinishParams,
    "benchmark": BenchmarkParams,
    "gate_calibration": CalibrationParams,
    "live": LiveParams,
}
"""Phase → schema of its parameters. A new phase is one class and one line here."""
