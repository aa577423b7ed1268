"""Immutable checkpoints: complete or absent, never overwritten, bound to what they may be resumed with.

    OUT/NAME.checkpoints/step-NNNNNNNNN.pt   a boundary after that many updates
    OUT/NAME.pt                              the same, after the last one

A file holds a header (canonical JSON: position and identity, its digest beside it) and named plain tensors whose digest
stands in the header, since torch's archive does not notice a flipped bit. It is read without pickle's code. A name is
given only to a complete file, so a damaged one never comes from a crash: it is refused, not skipped. No wall time but
`seconds` enters, and NAME.pt leaves that to the boundary of the last update: two runs that agree end in equal files.
"""

from __future__ import annotations

import fcntl
import io
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, ValidationError
from torch import Tensor

from d2lib.drafter.lora import initialization_sha256 as tensors_sha256
from d2lib.errors import Refused, Unexpected
from d2lib.files import Record, canonical_json, parse_json, sha256_bytes, write_exclusive
from d2lib.strict import first_problem

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's state of every adapter tensor; its step count is the update."""

_STEP = re.compile(r"step-(\d{9})\.pt")
_UNFINISHED = re.compile(r"\.(.+)\.[0-9a-f]{12}\.part")


class Position(Record):
    """Where a run stands."""

    update: int = Field(ge=0)
    """Updates made; the schedule's place, and AdamW's step."""
    total: int = Field(ge=1)
    """Updates of the whole run; where the schedule ends."""
    epoch: int = Field(ge=0)
    place: int = Field(ge=0)
    """The next update is number `place` (from 0) of epoch number `epoch`."""
    presented: int = Field(ge=0)
    """Blocks seen, repeated epochs counted again."""
    order: str
    """Digest of that epoch's permutation."""
    lr: float = Field(ge=0)
    """Rate of the last update."""


class Header(Record):
    """What stands beside a checkpoint's tensors."""

    schema_version: Literal[1] = 1
    identity: dict[str, Any]
    position: Position
    complete: bool
    seconds: float = Field(ge=0)
    tensors: str


@dataclass(frozen=True)
class State:
    """A run after `position.update` updates.

    identity: what the run is bound to. adapter: name → tensor, fp32. moments: AdamW's state, NAME.exp_avg and
    NAME.exp_avg_sq. rng: generator states by device type. metrics: columns by update, float64 [update] or [update, K].
    seconds: wall time so far, over all attempts.
    """

    identity: Mapping[str, Any]
    position: Position
    adapter: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]
    rng: Mapping[str, Tensor]
    metrics: Mapping[str, Tensor]
    complete: bool
    seconds: float

    @property
    def update(self) -> int:
        """Updates made."""
        return self.position.update

    @property
    def total(self) -> int:
        """Updates of the whole run."""
        return self.position.total


def step_path(folder: Path, update: int) -> Path:
    """step-NNNNNNNNN.pt."""
    return folder / f"step-{update:09d}.pt"


def save(path: Path, state: State) -> None:
    """Write a checkpoint under its final name in one step, durable on return; an existing one is refused.

    Raises:
        Unexpected: the disk took it not (full, read-only); no file has appeared.
    """
    tensors = {
        f"{group}/{name}": tensor.detach().cpu().contiguous()
        for group in ("adapter", "moments", "rng", "metrics")
        for name, tensor in sorted(getattr(state, group).items())
    }
    header = canonical_json(
        Header(
            identity=dict(state.identity),
            position=state.position,
            complete=state.complete,
            seconds=state.seconds,
            tensors=str(tensors_sha256(tensors)),
        ).model_dump()
    )
    buffer = io.BytesIO()
    torch.save({"header": header.decode(), "sha256": str(sha256_bytes(header)), "tensors": tensors}, buffer)
    try:
        write_exclusive(path, buffer.getvalue())
    except OSError as error:
        raise Unexpected(
            "a checkpoint could not be written",
            found=error.strerror,
            where=path,
            remedy="see to the disk, then resume from the boundary before",
        ) from None


def load(path: Path, identity: Mapping[str, Any] | None = None) -> State:
    """A checkpoint whose every byte and field is right and, where one is given, whose identity is `identity`.

    Raises:
        Refused: missing, a link, damaged, not a checkpoint, inconsistent, or of another run; names what differs.
    """
    header, tensors = _read(path)
    state = State(
        identity=header.identity,
        position=header.position,
        complete=header.complete,
        seconds=header.seconds,
        **{group: _group(tensors, group) for group in ("adapter", "moments", "rng", "metrics")},
    )
    _check(path, state, tensors)
    if identity is not None:
        refuse_other(identity, state.identity, path)
    return state


_RESUME = "resume with what the run was begun with, or train into a new folder"


def refuse_other(
    expected: Mapping[str, Any], found: Mapping[str, Any], where: Path, remedy: str | None = _RESUME
) -> None:
    """Refuse an identity that differs in any field; names the first one."""
    wanted, there = _fields(expected), _fields(found)
    for name in sorted(wanted.keys() | there.keys()):
        if name not in wanted or name not in there or wanted[name] != there[name]:
            raise Refused(
                f"the checkpoint belongs to another run: {name} differs",
                expected=wanted.get(name, "no such field"),
                found=there.get(name, "no such field"),
                where=where,
                remedy=remedy,
            )


def latest(folder: Path) -> Path | None:
    """The checkpoint with the highest step number, None where there is none; anything foreign is refused."""
    steps = _steps(folder)
    return steps[max(steps)] if steps else None


@contextmanager
def exclusive(out: Path, name: str) -> Iterator[Path]:
    """NAME.checkpoints under `out`, made where it is missing, locked against a second trainer of the same run.

    What a killed process left half written is removed; such a file never had a checkpoint's name.
    """
    folder = out / f"{name}.checkpoints"
    if folder.is_symlink():
        raise Refused("checkpoints cannot lie behind a link", expected="a folder", found="a link", where=folder)
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused("another process trains this run", where=folder, remedy="wait until it has ended") from None
        for path in (*folder.glob(".step-*.pt.*.part"), *out.glob(f".{name}.pt.*.part")):
            path.unlink()
        yield folder
    finally:
        os.close(descriptor)


def _steps(folder: Path) -> dict[int, Path]:
    steps: dict[int, Path] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        match = _STEP.fullmatch(path.name)
        if match is None and _UNFINISHED.fullmatch(path.name) is None:
            raise Refused("a file does not belong to the checkpoints", expected="step-NNNNNNNNN.pt", where=path)
        if match is not None:
            steps[int(match[1])] = path
    return steps


def _read(path: Path) -> tuple[Header, dict[str, Tensor]]:
    if path.is_symlink() or not path.is_file():
        raise Refused("a checkpoint is missing", expected="a regular file, not a link", where=path)
    try:
        value = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for damaged or unsafe files
        raise _damaged(path, "cannot be read", " ".join(str(error).split())[:160]) from None
    if (
        not isinstance(value, dict)
        or value.keys() != {"header", "sha256", "tensors"}
        or not isinstance(value["header"], str)
        or not isinstance(value["tensors"], dict)
        or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in value["tensors"].items())
    ):
        raise _damaged(path, "is not of this form", None)
    if value["sha256"] != str(sha256_bytes(value["header"].encode())):
        raise _damaged(path, "has a header that differs from its digest", None)
    try:
        header = Header.model_validate(parse_json(value["header"], where=path))
    except ValidationError as error:
        field, expected, _ = first_problem(error)
        raise _damaged(path, f"has a wrong {field}", expected) from None
    if header.tensors != str(tensors_sha256(value["tensors"])):
        raise _damaged(path, "has tensors that differ from their digest", None)
    return header, value["tensors"]


def _damaged(path: Path, what: str, found: str | None) -> Refused:
    """A refusal that says which boundary is left."""
    match = _STEP.fullmatch(path.name)
    before = [] if match is None else [step for step in _steps(path.parent) if step < int(match[1])]
    remedy = "move it to another folder, as evidence, and "
    remedy += f"resume from {step_path(path.parent, max(before)).name}" if before else "begin the run again"
    return Refused(f"a checkpoint {what}", expected="a whole checkpoint", found=found, where=path, remedy=remedy)


def _group(tensors: Mapping[str, Tensor], group: str) -> dict[str, Tensor]:
    prefix = f"{group}/"
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _check(path: Path, state: State, tensors: Mapping[str, Tensor]) -> None:
    """Refuse a file whose parts do not agree with each other."""
    position, adapter, metrics = state.position, state.adapter, state.metrics
    parts = (adapter, state.moments, state.rng, metrics)
    match = _STEP.fullmatch(path.name)
    shapes = {f"{name}.{moment}": tensor.shape for name, tensor in adapter.items() for moment in MOMENTS}
    blocks = metrics.get("blocks")
    rates = metrics.get("lr")
    agreements = {
        "the update in its name": match is None or int(match[1]) == position.update,
        "its position": position.update <= position.total and state.complete == (position.update == position.total),
        "its tensors' groups": sum(map(len, parts)) == len(tensors) and "cpu" in state.rng,
        "its optimizer state": shapes == {name: tensor.shape for name, tensor in state.moments.items()},
        "its tensors' types": all(t.dtype == torch.float32 for part in parts[:2] for t in part.values())
        and all(t.dtype == torch.float64 for t in metrics.values())
        and all(t.dtype == torch.uint8 for t in state.rng.values()),
        "finite numbers": all(bool(torch.isfinite(t).all()) for part in (*parts[:2], metrics) for t in part.values()),
        "a metric for every update": all(t.ndim and len(t) == position.update for t in metrics.values()),
        "its count of blocks": blocks is not None and float(blocks.sum()) == position.presented,
        "its rate": rates is not None and (float(rates[-1]) if len(rates) else 0.0) == position.lr,
    }
    for what, agrees in agreements.items():
        if not agrees:
            raise _damaged(path, f"does not agree with {what}", None)


def _fields(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Fields by dotted name, as they are once they have been JSON."""
    fields: dict[str, Any] = {}
    for name, value in parse_json(canonical_json(dict(identity))).items():
        if isinstance(value, dict):
            fields |= {f"{name}.{inner}": part for inner, part in value.items()}
        else:
            fields[name] = value
    return fields
