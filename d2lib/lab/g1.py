"""G1: the captured data are what they say they are, and the reference drafter is the one that drafted live."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from d2lib.admission.records import G1Receipt, LiveSource, Replay
from d2lib.admission.records import Parity as ParityRecord
from d2lib.data.assembly import K2_NAMES, SCORED, Assembly, ScoredSplit
from d2lib.data.check import CheckRow
from d2lib.data.integrity import coverage_rows, integrity_rows
from d2lib.drafter.batched import BatchedReference
from d2lib.files import sha256_file
from d2lib.gates.parity import Parity, compare_drafts
from d2lib.lab.model import WEIGHTS, load_model, target_folder
from d2lib.lab.replay import replay_rows

TOLERANCE = 5e-3
"""A near tie in logits, for those who draft single rounds again."""


@dataclass(frozen=True)
class G1:
    """All rows for a table, the parity of each split, and the record that later phases read."""

    rows: list[CheckRow]
    parities: list[Parity]
    receipt: G1Receipt

    @property
    def holds(self) -> bool:
        """Whether every check holds."""
        return all(row.holds for row in self.rows)


def run_g1(assembly: Assembly, *, device: str = "cpu", progress: Callable[[str], object] = lambda _: None) -> G1:
    """Integrity of every split (a), exact replay of dev (b), K2 coverage, parity with the live drafts.

    Args:
        assembly: what capture made.
        device: what drafts again for the parity; the replay is the CPU's, whose bits are stored.
        progress: called with each part's name before it starts.
    """
    folder, manifest = assembly.folder, assembly.manifest
    target = load_model(folder)
    progress("G1(a): integrity of every split")
    rows = integrity_rows(manifest, folder, target.head)
    progress("G1(b): exact replay of dev")
    replay = replay_rows(target, manifest, folder, "dev")
    progress("K2 coverage")
    rows += replay + coverage_rows(manifest, folder, {split: assembly.k2_path(split) for split in SCORED})
    drafter = BatchedReference(assembly.config, assembly.load_weights(device))
    parities = []
    for split in SCORED:
        progress(f"parity on {split}")
        parities.append(compare_drafts(drafter, assembly.blocks(split), assembly.k2(split)))
    rows += [parity.row() for parity in parities]
    entries = manifest.split("dev")
    digests = assembly.identities
    weights = target_folder(folder) / WEIGHTS
    live = {WEIGHTS: weights, "native.safetensors": folder / "native.safetensors"}
    valid = {name: all(_names(assembly, split, path) for split in SCORED) for name, path in live.items()}
    live |= {K2_NAMES[split]: assembly.k2_path(split) for split in SCORED}
    valid |= {K2_NAMES[split]: parity.row().holds for split, parity in zip(SCORED, parities, strict=True)}
    receipt = G1Receipt(
        namespace=manifest.namespace,
        manifest_sha256=digests["manifest"],
        k2={split: digests[f"k2_{split}"] for split in SCORED},
        rows=rows,
        replay=Replay(
            exact=all(row.holds for row in replay),
            positions=sum(entry.span_positions for entry in entries),
            sequences={entry.id: entry.file.sha256 for entry in entries},
            target=str(sha256_file(weights)),
        ),
        parity={
            split: ParityRecord(
                k2=digests[f"k2_{split}"],
                native=digests["native"],
                rounds=parity.rounds,
                drafts=2 * parity.rounds,
                differing=len(parity.differences),
                near_ties=len(parity.near_ties),
                tolerance=TOLERANCE,
            )
            for split, parity in zip(SCORED, parities, strict=True)
        },
        live_sources=[
            LiveSource(name=name, status="VALID" if valid[name] else "WITHDRAWN", sha256=str(sha256_file(path)))
            for name, path in live.items()
        ],
    )
    return G1(rows, parities, receipt)


def _names(assembly: Assembly, split: ScoredSplit, path: Path) -> bool:
    """Whether a split's trajectory says, in the header that the live run wrote, that it used these bytes."""
    return str(sha256_file(path)) in assembly.k2(split).header.live.values()
