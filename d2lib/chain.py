"""The whole chain of one profile: its phases in order, each a notebook, until one says no.

A phase that is done is not run again, so the same command goes on where it was interrupted.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from d2lib.errors import ExitStatus, Refused
from d2lib.strict import read_yaml


@dataclass(frozen=True)
class Step:
    """One phase of a chain; `judges` says that a FAIL there does not keep the next phases from reporting."""

    phase: str
    job: str | None = None
    judges: bool = False

    @property
    def name(self) -> str:
        """PHASE or PHASE-JOB: the receipt's folder and the parameter file's stem."""
        return self.phase if self.job is None else f"{self.phase}-{self.job}"


CHAIN: tuple[Step, ...] = (
    Step("capture"),
    Step("g1"),
    Step("pilot", judges=True),
    Step("cost_sheet"),
    Step("admission"),
    Step("train"),
    Step("g2", "dev", judges=True),
    Step("g2", "legal", judges=True),
    Step("g2", "general", judges=True),
    Step("finish", judges=True),
)


class RunPhase(Protocol):
    """How a chain starts one phase (see d2lib.evidence.run.run_phase)."""

    def __call__(
        self, notebook: Path, parameters: dict[str, Any], runs: Path, namespace: str, *, job: str | None
    ) -> ExitStatus: ...


def read_parameters(path: Path) -> dict[str, Any]:
    """A phase's parameter file: a YAML mapping; raises Refused on anything else."""
    value = read_yaml(path, what="a parameter file")
    if not isinstance(value, dict):
        raise Refused(
            "a parameter file is not a mapping", expected="NAME: VALUE lines", found=type(value).__name__, where=path
        )
    return value


def run_root(parameters: dict[str, Any], where: Path) -> tuple[Path, str]:
    """(runs folder, namespace) of the `run` parameter; raises Refused when it is absent."""
    run = parameters.get("run")
    if not isinstance(run, str) or not run.strip("/."):
        raise Refused("no run root", expected="run: runs/NAMESPACE", found=run, where=where)
    path = Path(run)
    return path.parent, path.name


def run_chain(
    profile: Path,
    notebooks: Path,
    run_phase: RunPhase,
    *,
    chain: Sequence[Step] = CHAIN,
    is_done: Any = None,
) -> ExitStatus:
    """Run a profile's phases in order.

    Args:
        profile: folder with one NAME.yaml per step.
        notebooks: folder with PHASE.ipynb.
        run_phase: starts one phase and returns its status.
        is_done: (runs, namespace, step name) → the earlier status when that step is done, else None.
    Returns: the last phase's status. A verdict of FAIL lets the following phases say what they find; a refusal, an
        interruption or a failure ends the chain.
    """
    files = {step.name: profile / f"{step.name}.yaml" for step in chain}
    parameters = {name: read_parameters(path) for name, path in files.items()}
    status, rows = ExitStatus.DONE, []
    for number, step in enumerate(chain, 1):
        runs, namespace = run_root(parameters[step.name], files[step.name])
        earlier = is_done(runs, namespace, step.name) if is_done is not None else None
        print(f"[{number}/{len(chain)}] {step.name}{'' if earlier is None else ': done before'}", file=sys.stderr)
        began = time.monotonic()
        status = (
            earlier
            if earlier is not None
            else run_phase(notebooks / f"{step.phase}.ipynb", parameters[step.name], runs, namespace, job=step.job)
        )
        rows.append((step.name, status, time.monotonic() - began))
        if status is not ExitStatus.DONE and not (step.judges and status is ExitStatus.VERDICT):
            break
    print(f"\n{'phase':<12} {'exit':>4}  {'seconds':>8}")
    for name, result, seconds in rows:
        print(f"{name:<12} {int(result):>4}  {seconds:>8.1f}")
    print(f"{'together':<12} {'':>4}  {sum(row[2] for row in rows):>8.1f}")
    return status
