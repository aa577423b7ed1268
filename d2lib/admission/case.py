"""What admission works on: the paths, and everything that several checks need, read once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import torch
from safetensors import SafetensorError, safe_open

from d2lib.admission.recompute import recompute_verdict
from d2lib.admission.records import G1Receipt, PilotReceipt, load_record, parse_record
from d2lib.admission.source import MappedFile, check_source
from d2lib.data.assembly import Assembly, k2_file
from d2lib.data.k2 import K2File
from d2lib.data.manifest import Split
from d2lib.data.sample import SAMPLED, FrozenSample, Population, frozen_sample
from d2lib.drafter.config import DrafterConfig
from d2lib.drafter.family import family_of
from d2lib.errors import Refused
from d2lib.files import Hashed, inside, read_json, sha256_file
from d2lib.gates.journal import ScoredSplit
from d2lib.gates.pilot import PilotScores, load_scores
from d2lib.train.recipe import Recipe, from_receipt

T = TypeVar("T")


@dataclass(frozen=True)
class AdmissionInputs:
    """Where everything is.

    assembly: the assembly's folder. g1: g1.json. pilot: the folder of the pilot's receipt.json, with its scores and
    checkpoints. pilot_source: the pilot's source snapshot, by default PILOT/repo. k2: split → K2 file, by default the
    assembly's. head_rows: see d2lib.data.integrity. parity_rounds: so many rounds of every K2 file are drafted again.
    policy: who must have signed the receipts of capture, g1 and pilot, in the run root that holds the pilot's folder.
    """

    assembly: Path
    g1: Path
    pilot: Path
    pilot_source: Path | None = None
    k2: Mapping[ScoredSplit, Path] = field(default_factory=dict)
    head_rows: int | None = None
    parity_rounds: int = 4
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


class Case:
    """The inputs, opened as far as the checks ask.

    Args:
        inputs: the paths.
        recompute: how the pilot's own source is run, (source, scores) → verdict.
    """

    def __init__(self, inputs: AdmissionInputs, recompute: Callable[[Path, Path], Any] = recompute_verdict) -> None:
        self.inputs = inputs
        self.recompute = recompute
        self._found: dict[str, Any] = {}

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
    def source_map(self) -> dict[str, MappedFile]:
        """The pilot's source, compared with its file map."""
        return check_source(self.inputs.source, Hashed.parse(self.pilot.source_map_sha256))
