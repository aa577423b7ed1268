"""What admission works on: paths and demands, and everything that several checks need, read once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, cast, get_args

import torch
from safetensors import SafetensorError, safe_open

from d2lib.admission.drawn import draw, fresh_seed
from d2lib.admission.recompute import recompute_verdict
from d2lib.admission.records import G1Receipt, PilotReceipt, load_record, parse_record
from d2lib.admission.source import MappedFile, check_source
from d2lib.data.assembly import Assembly, k2_file
from d2lib.data.check import CheckRow
from d2lib.data.k2 import K2File
from d2lib.data.manifest import Manifest, Split
from d2lib.data.sample import SAMPLED, FrozenSample, Population, frozen_sample
from d2lib.drafter.config import DrafterConfig
from d2lib.drafter.family import family_of
from d2lib.drafter.lora import Adapter, load_adapter
from d2lib.errors import Refused
from d2lib.files import Hashed, inside, read_json, sha256_file
from d2lib.gates.journal import ScoredSplit
from d2lib.gates.pilot import PilotScores, load_scores
from d2lib.params import RESCORED_ROUNDS, PilotDemands
from d2lib.train.loop import TrainResult, finished
from d2lib.train.pins import Pins, read_pins
from d2lib.train.recipe import Recipe, from_receipt

T = TypeVar("T")

ArmName = Literal["fast", "ref"]
ARM_NAMES: tuple[ArmName, ...] = get_args(ArmName)


@dataclass(frozen=True)
class AdmissionInputs:
    """Where everything is.

    assembly: the assembly's folder. g1: g1.json. pilot: the folder of the pilot's receipt.json, with its scores and
    checkpoints. demands: what the profile asked of the pilot. pilot_source: the pilot's source snapshot, by default
    PILOT/repo. k2: split → K2 file, by default the assembly's. head_rows: see d2lib.data.integrity.
    rescored_rounds: so many rounds of the frozen sample are scored again. parity_rounds: so many rounds of every K2
    file are drafted again. replayed_sequences: so many sequences of dev go through the target again.
    pins: what is known from outside of the inputs. policy: who must have signed the receipts of capture, g1 and pilot,
    in the run root that holds the pilot's folder.
    """

    assembly: Path
    g1: Path
    pilot: Path
    demands: PilotDemands
    pilot_source: Path | None = None
    k2: Mapping[ScoredSplit, Path] = field(default_factory=dict)
    head_rows: int | None = None
    rescored_rounds: int = RESCORED_ROUNDS
    parity_rounds: int = 100
    replayed_sequences: int = 3
    pins: Path | None = None
    policy: Path | None = None

    @property
    def source(self) -> Path:
        """The pilot's source snapshot."""
        return self.pilot / "repo" if self.pilot_source is None else self.pilot_source

    @property
    def receipt(self) -> Path:
        """The pilot's receipt."""
        return self.pilot / "receipt.json"

    def k2_path(self, split: ScoredSplit) -> Path:
        """A split's K2 file; raises Refused when it is a link."""
        return k2_file(self.assembly, split, self.k2)


class needed(Generic[T]):
    """A value that several checks need, loaded once; each of them meets the same refusal."""

    def __init__(self, load: Callable[[Case], T]) -> None:
        self.load = load
        self.__doc__ = load.__doc__

    def __get__(self, case: Case, owner: type[Case] | None = None) -> T:
        return case.once(self.load.__name__, lambda: self.load(case))


ReplaySequences = Callable[[Path, Manifest, Sequence[str]], list[CheckRow]]
"""(assembly, manifest, sequences) → one row a stored tensor; see d2lib.lab.replay.replay_again."""


class Case:
    """The inputs, opened as far as the checks ask.

    Args:
        inputs: the paths.
        recompute: how the pilot's own source is run, (source, scores) → verdict.
        replay: how sequences go through the target again, where the target can be run here.
        seed: of everything that is drawn; by default a fresh one.
    """

    def __init__(
        self,
        inputs: AdmissionInputs,
        recompute: Callable[[Path, Path], Any] = recompute_verdict,
        replay: ReplaySequences | None = None,
        seed: str | None = None,
    ) -> None:
        self.inputs = inputs
        self.recompute = recompute
        self.replay = replay
        self.seed = fresh_seed() if seed is None else seed
        self._found: dict[str, Any] = {}

    def draw(self, purpose: str, items: Sequence[T], count: int) -> list[T]:
        """A part of the items that nobody could foresee (see d2lib.admission.drawn)."""
        return draw(self.seed, purpose, items, count)

    def once(self, name: str, load: Callable[[], T]) -> T:
        """What `load` gives, remembered under a name; a refusal is told in full once and then referred to."""
        if name not in self._found:
            try:
                self._found[name] = load()
            except Refused as error:
                self._found[name] = error
                raise
        value = self._found[name]
        if isinstance(value, Refused):
            raise Refused(f"cannot be checked: {value.message}", found=value.found, where=value.where)
        return cast(T, value)

    def k2(self, split: ScoredSplit) -> K2File:
        """A split's K2 file, valid and in agreement with the committed tokens."""
        return self.once(
            f"k2 {split}",
            lambda: K2File.load(self.inputs.k2_path(split), self.assembly.manifest, self.inputs.assembly),
        )

    @needed
    def assembly(self) -> Assembly:
        """The opened assembly, with a valid manifest."""
        inside(self.inputs.assembly, "MANIFEST.json")
        return Assembly(self.inputs.assembly, self.inputs.k2)

    @needed
    def config(self) -> DrafterConfig:
        """The drafter's configuration."""
        return self.assembly.config

    @needed
    def head(self) -> torch.Tensor:
        """[vocab_size, dim] the target's LM head; the other weights are not read."""
        path = self.assembly.native
        try:
            with safe_open(path, framework="pt") as stored:
                return cast(torch.Tensor, stored.get_tensor(family_of(self.config).head)).float()
        except (SafetensorError, OSError) as error:
            raise Refused("the LM head cannot be read", found=str(error), where=path) from None

    @needed
    def g1(self) -> G1Receipt:
        """The G1 receipt."""
        return load_record(G1Receipt, inside(self.inputs.g1.parent, self.inputs.g1.name))

    @needed
    def pilot_json(self) -> dict[str, Any]:
        """The pilot's receipt as it stands in its file."""
        value = read_json(inside(self.inputs.pilot, "receipt.json"))
        parse_record(PilotReceipt, value, self.inputs.receipt)
        return cast(dict[str, Any], value)

    @needed
    def pilot(self) -> PilotReceipt:
        """The pilot's receipt."""
        return parse_record(PilotReceipt, self.pilot_json, self.inputs.receipt)

    @needed
    def recipe(self) -> Recipe:
        """The recipe of the pilot's receipt."""
        return from_receipt(self.pilot_json, where=self.inputs.receipt)

    @needed
    def scores_path(self) -> Path:
        """The pilot's raw scores, as recorded."""
        path = inside(self.inputs.pilot, self.pilot.scores.file)
        digest = str(sha256_file(path))
        if digest != self.pilot.scores.sha256:
            raise Refused(
                "the pilot's scores are not the recorded ones",
                expected=self.pilot.scores.sha256,
                found=digest,
                where=path,
            )
        return path

    @needed
    def scores(self) -> PilotScores:
        """The pilot's raw scores."""
        return load_scores(self.scores_path)

    @needed
    def sample(self) -> FrozenSample:
        """The pilot's sample, drawn again in its namespace."""
        populations: dict[Split, tuple[Hashed, Population]] = {}
        for split in SAMPLED:
            file = self.k2(split)
            populations[split] = (file.sha256, file.population(self.assembly.manifest, split))
        return frozen_sample(self.pilot.namespace, populations, self.pilot.sample.size)

    @needed
    def trained(self) -> dict[ArmName, TrainResult]:
        """Both arms' completed runs, from the checkpoints beside their exported adapters."""
        return {arm: finished(inside(self.inputs.pilot, f"{arm}.pt"), self.config) for arm in ARM_NAMES}

    def adapter(self, arm: ArmName) -> Adapter:
        """An arm's exported adapter, which was scored."""
        name = getattr(self.pilot.arms, arm).checkpoint
        return self.once(f"adapter {arm}", lambda: load_adapter(inside(self.inputs.pilot, name), self.config))

    @needed
    def pins(self) -> Pins | None:
        """The pins, where some are given."""
        return None if self.inputs.pins is None else read_pins(self.inputs.pins)

    @needed
    def source_map(self) -> dict[str, MappedFile]:
        """The pilot's source, compared with its file map."""
        return check_source(self.inputs.source, Hashed.parse(self.pilot.source_map_sha256))


def same(what: str, expected: object, found: object, where: object) -> None:
    """Refuse two values that are not equal and of one type."""
    if type(expected) is not type(found) or expected != found:
        raise Refused(f"{what} differs", expected=expected, found=found, where=where)
