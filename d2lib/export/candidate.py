"""The candidate of a finished run: the adapter that G2 judged, and the proof that it is that one.

Nothing is believed: the ledger is walked, the receipts and every file that they name are hashed again, the verdict is
drawn again from the three splits' own requests, and the adapter's checkpoint must be bound to the admitted recipe.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from d2lib.data.assembly import SCORED
from d2lib.data.manifest import Manifest
from d2lib.drafter.config import DrafterConfig, load_config
from d2lib.drafter.lora import Adapter
from d2lib.drafter.weights import Weights, load_weights
from d2lib.errors import Refused
from d2lib.evidence.layout import NOTEBOOK, RECEIPT
from d2lib.evidence.ledger import LedgerLine, read_ledger
from d2lib.evidence.receipts import InputRecord, OutputRecord, Receipt, read_receipt
from d2lib.files import inside, read_json, sha256_file
from d2lib.gates.g2 import G2, SplitPart, bind
from d2lib.gates.gate import validated
from d2lib.gates.journal import ScoredSplit
from d2lib.strict import differences
from d2lib.train.full import NAME, Admitted
from d2lib.train.loop import finished
from d2lib.train.recipe import Recipe


@dataclass(frozen=True)
class Entry:
    """A line of the ledger with its receipt, whose files have the line's digests."""

    line: LedgerLine
    receipt: Receipt


@dataclass(frozen=True)
class Candidate:
    """What a run's G2 judged.

    run: the run root. finish, train: the receipts of the verdict and of the adapter's training. g2: the verdict.
    splits: every split's part. config: the drafter's. recipe: the admitted one. adapter: fp32.
    """

    run: Path
    finish: Entry
    train: Entry
    g2: G2
    splits: Mapping[ScoredSplit, SplitPart]
    config: DrafterConfig
    recipe: Recipe
    adapter: Adapter

    @property
    def qualified(self) -> bool:
        """Whether every gate of every split held."""
        return self.g2.verdict == "PASS"

    @property
    def rank(self) -> int:
        """The LoRA rank, and alpha."""
        return self.recipe.rank

    @property
    def target(self) -> dict[str, str]:
        """What the captured model was, from the manifest that the verdict names."""
        path = _input(self, self.train, "assembly") / "MANIFEST.json"
        _same(path, self.g2.identities.manifest, "the manifest", self.run)
        return Manifest.load(path).target

    def native(self) -> Weights:
        """The native drafter's weights, hashed again; fp32."""
        path = _input(self, self.train, "assembly") / "native.safetensors"
        _same(path, self.g2.identities.native, "the native drafter", self.run)
        return load_weights(path, self.config)


def open_candidate(run: Path, *, unqualified: bool = False) -> Candidate:
    """The candidate of a run.

    Args:
        run: the run root, e.g. runs/demo.
        unqualified: take one whose verdict is not PASS, too.

    Raises:
        Refused: no finished G2, a verdict other than PASS without `unqualified`, a receipt or file that is not the one
            in the ledger, a verdict that does not follow from its parts, or an adapter that is not the judged one.
    """
    run = Path(os.path.abspath(run))
    lines = [line for line in read_ledger(run) if line.status == "done"]
    finish = next(_entries(run, lines, "finish"), None)
    if finish is None:
        raise Refused(
            "the run has no verdict",
            expected="a receipt of finish with status done in the ledger",
            where=run,
            remedy="run its phases to the end: d2 chain PROFILE",
        )
    if finish.receipt.verdict != "PASS" and not unqualified:
        raise Refused(
            "the run's verdict is not PASS",
            expected="PASS",
            found=finish.receipt.verdict,
            where=f"{run / finish.line.name}/attempt-{finish.line.attempt}",
            remedy="--unqualified exports it all the same, and the card says so",
        )
    g2, splits = _verdict(run, finish)
    train, adapter = _training(run, lines, g2)
    admitted = _admitted(run, finish, train, g2)
    config_path = _located(run, _one(train, "assembly", train.receipt.inputs)) / "drafter.json"
    _same(config_path, g2.identities.drafter, "the drafter's configuration", run)
    config = load_config(config_path)
    bound = {**admitted.bound, "run": NAME, "backend": "fast", "recipe": admitted.recipe.model_dump()}
    trained = finished(adapter, config, bound)
    _same(adapter, g2.identities.adapter, "the adapter", run)  # once more: what was loaded is what was hashed
    return Candidate(run, finish, train, g2, splits, config, admitted.recipe, trained.adapter)


def _entries(run: Path, lines: Iterable[LedgerLine], phase: str) -> Iterator[Entry]:
    """The phase's done attempts, newest first, each with its receipt re-hashed."""
    for line in sorted(lines, key=lambda line: -line.seq):
        if line.phase == phase:
            folder = inside(run, f"{line.name}/attempt-{line.attempt}")
            _same(folder / RECEIPT, line.receipt_json_sha256, "a receipt", run)
            _same(folder / NOTEBOOK, line.receipt_sha256, "a receipt's notebook", run)
            yield Entry(line, read_receipt(folder / RECEIPT))


def _verdict(run: Path, finish: Entry) -> tuple[G2, dict[ScoredSplit, SplitPart]]:
    """The verdict and its parts: the files that the receipt names, judged again."""
    path = _checked(run, _one(finish, "g2", finish.receipt.outputs))
    g2 = validated(G2, read_json(path), path)
    values: dict[str, Any] = {
        split: read_json(_checked(run, _one(finish, split, finish.receipt.inputs))) for split in SCORED
    }
    if bind(values) != g2:
        raise Refused("the verdict does not follow from its parts", expected="g2.json of these parts", where=path)
    if finish.receipt.verdict != g2.verdict:
        raise Refused(
            "the receipt's verdict is not that of g2.json",
            expected=g2.verdict,
            found=finish.receipt.verdict,
            where=f"{run / finish.line.name}/attempt-{finish.line.attempt}",
        )
    return g2, {split: validated(SplitPart, values[split], f"{split}.json") for split in SCORED}


def _training(run: Path, lines: Iterable[LedgerLine], g2: G2) -> tuple[Entry, Path]:
    """The training whose adapter was judged, and that adapter's file."""
    seen: list[str] = []
    for entry in _entries(run, lines, "train"):
        record = _one(entry, "adapter", entry.receipt.outputs)
        seen.append(record.sha256)
        if record.sha256 == g2.identities.adapter:
            return entry, _checked(run, record)
    raise Refused(
        "no training in the ledger made the adapter that was judged",
        expected=g2.identities.adapter,
        found=", ".join(seen) or "no receipt of train",
        where=run,
    )


def _admitted(run: Path, finish: Entry, train: Entry, g2: G2) -> Admitted:
    """The admission of training and verdict, which must name the same digests as the verdict."""
    path = _checked(run, _one(finish, "admission", finish.receipt.inputs))
    admitted = Admitted(path)
    trained_on = Admitted(_checked(run, _one(train, "admission", train.receipt.inputs)))
    if trained_on.identities != admitted.identities:  # admission may be repeated; what it lets in stays the same
        raise Refused(
            "training and verdict are not on the same admission",
            expected="the same recipe and identities",
            found=", ".join(field for field, *_ in differences(admitted.identities, trained_on.identities)),
            where=path,
        )
    for name in ("namespace", "manifest", "native", "drafter", "pilot", "recipe"):
        if admitted.identities.get(name) != getattr(g2.identities, name):
            raise Refused(
                f"the verdict is not on what was admitted: {name} differs",
                expected=admitted.identities.get(name),
                found=getattr(g2.identities, name),
                where=path,
            )
    return admitted


def _one(entry: Entry, label: str, records: Iterable[Any]) -> Any:
    """The receipt's input or output of that label."""
    for record in records:
        if record.label == label:
            return record
    raise Refused(
        "a receipt does not name a file",
        expected=f"an input or output labelled {label}",
        where=f"{entry.line.name}/attempt-{entry.line.attempt}/{RECEIPT}",
    )


def _input(candidate: Candidate, entry: Entry, label: str) -> Path:
    return _located(candidate.run, _one(entry, label, entry.receipt.inputs))


def _located(run: Path, record: InputRecord | OutputRecord) -> Path:
    """Where a receipt's file lies: under the run root, or where an absolute path says."""
    path = Path(record.path)
    return path if path.is_absolute() else inside(run, path)


def _checked(run: Path, record: InputRecord | OutputRecord) -> Path:
    """The path of a receipt's file, whose digest is the receipt's."""
    path = _located(run, record)
    _same(path, record.sha256, record.label, run)
    return path


def _same(path: Path, digest: str, what: str, run: Path) -> None:
    found = str(sha256_file(path))
    if found != digest:
        raise Refused(
            f"{what} is not the file that the evidence names",
            expected=digest,
            found=found,
            where=path,
            remedy=f"see d2 verify {run}",
        )
