"""The pilot's verdict, recomputed by the pilot's own unchanged source in a child process on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from d2lib.errors import ExitStatus, Refused
from d2lib.evidence.environment import child_environment
from d2lib.files import parse_json

MODULE = "d2lib.gates.pilot"
_SECONDS = 600.0


def recompute_verdict(source: Path, scores: Path) -> Any:
    """Run `python -m d2lib.gates.pilot SCORES` of a snapshot; returns the verdict that it prints.

    The child imports d2lib from the snapshot alone: PYTHONPATH names it, the current folder is not searched (-P), nor
    the user's packages (-s); no byte code lies in the snapshot, and none is written there. Its environment comes from
    an allowlist, without a GPU. There is no shell.

    Args:
        source: the snapshot, checked against its file map before.
        scores: the pilot's raw scores.

    Raises:
        Refused: byte code lies in the snapshot; the child refused the scores, failed, ran too long, or printed
            something else.
    """
    source, scores = Path(os.path.abspath(source)), Path(os.path.abspath(scores))
    if os.pathsep in str(source):
        raise Refused("a snapshot's path cannot be searched for modules", found=str(source), where="PYTHONPATH")
    for path in source.rglob("*.py[co]"):
        raise Refused("byte code could run in the place of the source", expected="source alone", where=path)
    with tempfile.TemporaryDirectory(prefix="d2-recompute-") as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-s", "-m", MODULE, str(scores)],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                cwd=folder,
                env=child_environment(
                    {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
                ),
                timeout=_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise Refused("the pilot's own source did not finish", expected=f"{_SECONDS:g} s", where=source) from None
    if done.returncode not in (ExitStatus.DONE, ExitStatus.VERDICT):
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise Refused(
            "the pilot's own source gave no verdict",
            expected="exit status 0 or 1",
            found=f"exit status {done.returncode}: {said[-1] if said else 'no message'}",
            where=source,
        )
    return parse_json(done.stdout, where=f"what {MODULE} of {source} printed")
