"""CPU admission: every check, always all of them, and what they let in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from d2lib.admission.case import AdmissionInputs, Case, ReplaySequences
from d2lib.admission.checks import CHECKS, Check
from d2lib.admission.recompute import recompute_verdict
from d2lib.admission.records import Arithmetic
from d2lib.data.check import CheckRow
from d2lib.errors import ExitStatus, Refused
from d2lib.files import sha256_file
from d2lib.train.recipe import Recipe


@dataclass(frozen=True)
class Admission:
    """The table of checks and, when every one holds, what full training and G2 may use.

    identities: name → digest (`namespace`: the pilot's name); empty when refused. seed: of what was drawn and computed
    again. arithmetic: the pilot's, which full training has to have.
    """

    rows: tuple[CheckRow, ...]
    recipe: Recipe | None
    identities: dict[str, str]
    seed: str
    arithmetic: Arithmetic | None = None

    @property
    def admitted(self) -> bool:
        """Whether every check holds."""
        return all(row.holds for row in self.rows)

    @property
    def exit_status(self) -> ExitStatus:
        """0 when admitted, 2 when refused."""
        return ExitStatus.DONE if self.admitted else ExitStatus.REFUSED

    @property
    def refusals(self) -> list[str]:
        """One line per failed check."""
        return [
            f"{row.name}: {row.found} (expected: {row.expected}; where: {row.where})"
            for row in self.rows
            if not row.holds
        ]

    def as_dict(self) -> dict[str, Any]:
        """Plain data: what the admission phase records and, when admitted, publishes as admitted.json."""
        return {
            "schema_version": 1,
            "admitted": self.admitted,
            "recipe": None if self.recipe is None else self.recipe.model_dump(mode="json"),
            "arithmetic": None if self.arithmetic is None else self.arithmetic.model_dump(mode="json"),
            "identities": self.identities,
            "seed": self.seed,
            "rows": [row.model_dump(mode="json") for row in self.rows],
        }

    def require(self) -> Recipe:
        """The admitted recipe; raises Refused with one line per failed check."""
        if self.recipe is None or not self.admitted:
            raise Refused(
                f"{len(self.refusals)} of {len(self.rows)} admission checks do not hold",
                found="".join(f"\n  {line}" for line in self.refusals),
            )
        return self.recipe


def run_admission(
    inputs: AdmissionInputs,
    *,
    checks: tuple[Check, ...] = CHECKS,
    recompute: Callable[[Path, Path], Any] = recompute_verdict,
    replay: ReplaySequences | None = None,
    seed: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Admission:
    """Run every check, also after one that does not hold.

    Args:
        inputs: where everything is.
        checks: the table.
        recompute: how the pilot's own source is run (see d2lib.admission.recompute).
        replay: how sequences go through the target again (see d2lib.lab.replay.replay_again).
        seed: of what is drawn, to repeat an admission of which it is known; by default a fresh one.
        progress: called with each check's name before it runs.
    """
    case = Case(inputs, recompute, replay, seed)
    rows = []
    for check in checks:
        if progress is not None:
            progress(check.name)
        rows.append(_row(check, case))
    if not all(row.holds for row in rows):
        return Admission(tuple(rows), None, {}, case.seed)
    return Admission(tuple(rows), case.recipe, _identities(case), case.seed, case.pilot.arithmetic)


def _row(check: Check, case: Case) -> CheckRow:
    expected, where = check.expected, str(check.where(case.inputs))
    try:
        return CheckRow(name=check.name, expected=expected, found=check.run(case), where=where, holds=True)
    except Refused as error:
        if error.expected is not None:
            expected = str(error.expected)
        if error.where is not None:
            where = str(error.where)
        found = error.message if error.found is None else f"{error.message}: {error.found}"
    except OSError as error:
        found = f"cannot be read: {error.strerror or error}"
    return CheckRow(name=check.name, expected=expected, found=found, where=where, holds=False)


def _identities(case: Case) -> dict[str, str]:
    """Digests of everything that the following phases must find unchanged."""
    pilot = case.pilot
    return {
        **case.assembly.identities,
        "namespace": pilot.namespace,
        "g1": pilot.g1_sha256,
        "pilot": str(sha256_file(case.inputs.receipt)),
        "recipe": str(case.recipe.sha256),
        "initialization": pilot.initialization_sha256,
        "sample": pilot.sample.identity,
        "source_map": pilot.source_map_sha256,
        "scores": pilot.scores.sha256,
        "pilot_fast": pilot.arms.fast.sha256,
        "pilot_ref": pilot.arms.ref.sha256,
    }
