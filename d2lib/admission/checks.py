"""The checks of admission: one small function each, and one table of them.

A check returns what it found, in words, when it holds, and raises Refused when it does not. A new check is one function
and one line of the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from d2lib.admission.again import check_parity, check_replay, check_rescored
from d2lib.admission.case import AdmissionInputs, Case
from d2lib.admission.data_checks import (
    check_assembly,
    check_blocks,
    check_coverage,
    check_g1_receipt,
    check_integrity,
    check_live_sources,
    check_provenance,
)
from d2lib.admission.pilot_checks import (
    check_checkpoints,
    check_extent,
    check_initialization,
    check_numerical_files,
    check_pilot_receipt,
    check_recipe,
    check_sample,
    check_scores,
    check_source_map,
    check_training,
    check_verdict_original,
    check_verdict_today,
)
from d2lib.admission.records import SCORED
from d2lib.data.assembly import K2_NAMES
from d2lib.evidence.sign import signatures_in_words
from d2lib.files import sha256_file
from d2lib.train.pins import UNPINNED, source_commit


@dataclass(frozen=True)
class Check:
    """A named check: what must be so, where it looks, and the function that looks."""

    name: str
    expected: str
    where: Callable[[AdmissionInputs], Path]
    run: Callable[[Case], str]


def check_pins(case: Case) -> str:
    """What is known from outside of the inputs, where it is given: the pilot's source, data, recipe and extent."""
    path, pins = case.inputs.pins, case.pins
    if pins is None or path is None:
        return UNPINNED
    manifest = case.assembly.manifest
    pins.compare(
        path,
        assembly=case.inputs.assembly.name,
        manifest=str(sha256_file(case.inputs.assembly / "MANIFEST.json")),
        namespace=case.pilot.namespace,
        sample_size=case.pilot.sample.size,
        source_commit=source_commit(case.inputs.source),
    )
    if pins.source_map is not None:
        pins.compare(path, source_map=case.pilot.source_map_sha256)
    pins.compare_data(path, manifest, case.recipe)
    known = "its file map" if pins.source_map is not None else "its commit alone, no digest of its file map"
    return f"all as pinned; of the pilot's source {known} is known"


def check_signatures(case: Case) -> str:
    """Where a policy is given, the receipts before admission are signed as it asks."""
    return signatures_in_words(case.inputs.pilot.absolute().parent, case.inputs.policy, ("capture", "g1", "pilot"))


CHECKS: tuple[Check, ...] = (
    Check("assembly", "complete, consistent, no links", lambda i: i.assembly, check_assembly),
    Check("provenance", "has sources, none withdrawn", lambda i: i.assembly / "provenance.json", check_provenance),
    Check("G1(a)", "every check holds when computed again", lambda i: i.assembly, check_integrity),
    *(
        Check(
            f"K2 {split}",
            "valid, every request to its end",
            lambda i, split=split: i.k2.get(split, i.assembly / K2_NAMES[split]),  # type: ignore[misc]
            partial(check_coverage, split=split),
        )
        for split in SCORED
    ),
    Check("G1 receipt", "of these inputs, every row holds", lambda i: i.g1, check_g1_receipt),
    Check("G1(b)", "dev replayed exactly, a drawn part again", lambda i: i.g1, check_replay),
    Check("live sources", "VALID, bound by digests and by the live run", lambda i: i.g1, check_live_sources),
    Check("parity", "the reference drafter is the live one", lambda i: i.g1, check_parity),
    Check("pilot receipt", "a PASS of these inputs", lambda i: i.receipt, check_pilot_receipt),
    Check("recipe", "complete, from the pilot's receipt", lambda i: i.receipt, check_recipe),
    Check("pilot extent", "as the profile asks", lambda i: i.receipt, check_extent),
    Check("pilot scores", "recorded bytes, of this pilot", lambda i: i.pilot, check_scores),
    Check("pilot checkpoints", "recorded bytes, scored, whole", lambda i: i.pilot, check_checkpoints),
    Check("pilot training", "complete, of this recipe and data, as exported", lambda i: i.pilot, check_training),
    Check("pilot scores, again", "drawn rounds accept what is recorded", lambda i: i.pilot, check_rescored),
    Check("pilot source", "exactly its pinned file map", lambda i: i.source, check_source_map),
    Check("numerical files", "byte-identical to the pilot's", lambda i: i.source, check_numerical_files),
    Check("verdict, original source", "the recorded PASS again", lambda i: i.source, check_verdict_original),
    Check("verdict, today's source", "the recorded PASS again", lambda i: i.pilot, check_verdict_today),
    Check("frozen sample", "drawn again, the one that was scored", lambda i: i.receipt, check_sample),
    Check("training blocks", "as counted, in the actual sidecars", lambda i: i.assembly, check_blocks),
    Check("initialization", "the pilot's", lambda i: i.receipt, check_initialization),
    Check("pins", "as pinned, where pins are given", lambda i: i.pins or i.pilot, check_pins),
    Check("signatures", "as the policy asks", lambda i: i.policy or i.pilot, check_signatures),
)
"""Every check, in the order of the receipt's table."""
