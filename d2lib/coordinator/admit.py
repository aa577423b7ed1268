"""CPU admission in the foreground: the admission notebook on the coordinator's inputs, and what it admitted.

The arithmetic is the notebook's; here it is started, and its receipt is believed only as far as its bytes are hashed
again.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from d2lib.coordinator.contract import Foreground, Plan, job_parameters, parameters_text
from d2lib.coordinator.locked import judge
from d2lib.coordinator.receipts import check_output, done_receipt, product
from d2lib.errors import ExitStatus, Refused
from d2lib.evidence.environment import child_environment, library_sha256, who_executes
from d2lib.evidence.layout import RECEIPT
from d2lib.evidence.receipts import Receipt, record_input
from d2lib.evidence.run import next_attempt
from d2lib.files import read_json, sha256_file


@dataclass(frozen=True)
class Admitted:
    """What admission let in: the file that the notebooks read, and the receipt that it comes from, by their paths from
    the run root."""

    content: Any
    path: str
    sha256: str
    receipt: str
    receipt_sha256: str


def check_namespace(plan: Plan) -> None:
    """The pilot's receipt has the namespace after which snapshot and output are named; raises Refused."""
    value = read_json(plan.paths.pilot_receipt)
    found = value.get("namespace") if isinstance(value, dict) else None
    if found != plan.paths.pilot_namespace:
        raise Refused(
            "the pilot's receipt has another namespace",
            expected=plan.paths.pilot_namespace,
            found=found,
            where=plan.paths.pilot_receipt,
            remedy="snapshot and output are named PILOT-NAMESPACE-full; another pilot is another run",
        )


def run_foreground(plan: Plan, phase: Foreground) -> ExitStatus:
    """Execute the notebook of admission or stage into its next receipt under the output, without GPU.

    SIGINT and SIGTERM reach it, and it is awaited. Returns its exit status.
    """
    plan.paths.output.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(prefix=f"d2-{phase}-") as folder:
        parameters = Path(folder, f"{phase}.yaml")
        parameters.write_text(parameters_text(job_parameters(plan, phase)), encoding="utf-8")
        receipts = plan.paths.output / phase
        attempt = next_attempt(receipts)
        command = plan.foreground(phase, attempt, parameters)
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            cwd=plan.paths.source,
            env=child_environment(
                who_executes(phase)
                | {
                    "CUDA_VISIBLE_DEVICES": "",
                    "OMP_NUM_THREADS": str(plan.profile.threads),
                    "PYTHONDONTWRITEBYTECODE": "1",
                    "PYTHONPATH": str(plan.paths.source),
                }
            ),
        )
        handlers = {
            number: signal.signal(number, lambda taken, _: os.kill(child.pid, taken))
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            status = child.wait()
        finally:
            for taken, handler in handlers.items():
                signal.signal(taken, handler)
    return judge(status, None, receipts / f"attempt-{attempt}" / RECEIPT)[0]


def try_admission(plan: Plan) -> ExitStatus:
    """Admission in a run root of its own that is removed afterwards: its refusals and its table are told, not kept."""
    with tempfile.TemporaryDirectory(prefix="d2-trial-") as folder:
        trial = replace(plan, paths=replace(plan.paths, output=Path(folder, plan.paths.namespace)))
        status = run_foreground(trial, "admission")
        found = done_receipt(trial.paths.output, "admission")
        if found is not None:
            print(f"admitted: {(found[1].result or {}).get('held')} checks hold")
        return status


def admitted(plan: Plan, inputs: Mapping[str, Any]) -> Admitted:
    """What the newest admission let in, after comparing everything that it ran with and on.

    Args:
        inputs: the inputs' records as they are now (see d2lib.coordinator.inputs).

    Raises:
        Refused: nothing is admitted, or code, parameters, an input or the admitted file changed since.
    """
    found = done_receipt(plan.paths.output, "admission")
    if found is None:
        raise Refused("the inputs are not admitted", where=plan.paths.output, remedy="run --check-inputs")
    path, receipt = found
    again = "run --check-inputs again"
    notebook = plan.paths.source / "notebooks" / "admission.ipynb"
    for what, before, now in (
        ("d2lib", receipt.d2lib_sha256, str(library_sha256())),
        ("the admission notebook", receipt.notebook.source_sha256, str(sha256_file(notebook))),
    ):
        if before != now:
            raise Refused(f"{what} changed since the admission", expected=before, found=now, remedy=again)
    for name, value in job_parameters(plan, "admission").items():
        if receipt.parameters.get(name) != value:
            raise Refused(
                f"the admission ran with another {name}",
                expected=value,
                found=receipt.parameters.get(name),
                where=path,
                remedy=again,
            )
    check_read(plan, receipt, inputs)
    made = product(receipt, "admission")
    check_output(plan.paths.output, receipt, made)
    return Admitted(
        read_json(plan.paths.output / made),
        made,
        str(sha256_file(plan.paths.output / made)),
        path.relative_to(plan.paths.output).as_posix(),
        str(sha256_file(path)),
    )


def check_read(plan: Plan, receipt: Receipt, inputs: Mapping[str, Any]) -> None:
    """Everything that the admission read (the pilot's checkpoints and scores too) still has the bytes that it read.

    Args:
        receipt: the admission's.
        inputs: records of the flags' inputs as they are now; what they cover is not hashed twice.

    Raises:
        Refused: names the input that changed.
    """
    known = {value["path"]: value["sha256"] for value in inputs.values()}
    for record in receipt.inputs:
        place = plan.paths.output / record.path
        now = known.get(str(place)) or record_input(record.label, place, record.path).sha256
        if now != record.sha256:
            raise Refused(
                f"the input {record.label} changed since the admission",
                expected=record.sha256,
                found=now,
                where=place,
                remedy="put it back, or run --check-inputs again and stage anew",
            )
