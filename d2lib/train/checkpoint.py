"""Immutable checkpoints: complete or absent, never overwritten, bound to what they may be resumed with."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from d2lib.errors import Refused
from d2lib.files import publish

SCHEMA_VERSION = 1
_NAME = re.compile(r"step-(\d{9})\.pt")
_FIELDS = {
    "schema_version",
    "identity",
    "update",
    "total",
    "adapter",
    "optimizer",
    "rng",
    "metrics",
    "complete",
    "seconds",
}


@dataclass(frozen=True)
class State:
    """Where a run stands after `update` of `total` updates.

    adapter: name → tensor. optimizer: AdamW's state_dict. rng: torch's CPU generator state. metrics: per update
    columns loss_sum, blocks, lr, grad_norm, accepted, each [update] float64. identity: what the run is bound to.
    seconds: wall time so far, over all attempts; the one thing here that differs from run to run.
    """

    identity: Mapping[str, Any]
    update: int
    total: int
    adapter: Mapping[str, Tensor]
    optimizer: Mapping[str, Any]
    rng: Tensor
    metrics: Mapping[str, Tensor]
    complete: bool = False
    seconds: float = 0.0


def step_path(folder: Path, update: int) -> Path:
    """step-NNNNNNNNN.pt."""
    return folder / f"step-{update:09d}.pt"


def save(path: Path, state: State) -> None:
    """Write a checkpoint under its final name in one step; an existing one is refused, not replaced."""
    working = path.with_name(f".{path.name}.{secrets.token_hex(6)}.part")
    value = {name: getattr(state, name) for name in _FIELDS - {"schema_version"}} | {"schema_version": SCHEMA_VERSION}
    try:
        torch.save(value, working)
        publish(working, path)
    finally:
        working.unlink(missing_ok=True)


def load(path: Path, identity: Mapping[str, Any] | None = None) -> State:
    """A checkpoint, loaded without pickle's code, whose identity is the one given.

    Raises:
        Refused: not a checkpoint, truncated, or of another run; names the first field that differs.
    """
    if path.is_symlink() or not path.is_file():
        raise Refused("a checkpoint is missing", expected="a regular file", where=path)
    try:
        value = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for damaged or unsafe files
        raise Refused(
            "not a checkpoint that can be read",
            found=str(error).splitlines()[0][:160],
            where=path,
            remedy="move the file away (it is kept as evidence) and resume from the step before it",
        ) from None
    if not isinstance(value, dict) or value.keys() != _FIELDS or value["schema_version"] != SCHEMA_VERSION:
        raise Refused("not a checkpoint of this version", expected=f"schema {SCHEMA_VERSION}", where=path)
    if identity is not None:
        found = value["identity"]
        for name in sorted(identity.keys() | found.keys()):
            if identity.get(name) != found.get(name):
                raise Refused(
                    f"the checkpoint belongs to another run: {name} differs",
                    expected=identity.get(name),
                    found=found.get(name),
                    where=path,
                )
    value.pop("schema_version")
    return State(**value)


def latest(folder: Path) -> Path | None:
    """The checkpoint with the highest step number; a file that is no checkpoint by name is refused."""
    if not folder.exists():
        return None
    steps: dict[int, Path] = {}
    for path in folder.iterdir():
        if path.name.startswith(".") and path.name.endswith(".part"):
            continue  # what a killed process left; never a boundary
        match = _NAME.fullmatch(path.name)
        if match is None:
            raise Refused("a file does not belong to the checkpoints", expected="step-NNNNNNNNN.pt", where=path)
        steps[int(match[1])] = path
    return steps[max(steps)] if steps else None


def clean(folder: Path) -> None:
    """Remove the unfinished files of a process that was killed while it saved."""
    for path in folder.glob(".step-*.part"):
        os.unlink(path)
