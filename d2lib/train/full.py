"""Full training: the admitted recipe over all epochs, from a fresh adapter, and what may follow it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from d2lib.data.assembly import Assembly
from d2lib.drafter.lora import Adapter
from d2lib.errors import Refused
from d2lib.files import Hashed, canonical_json, read_json, sha256_bytes
from d2lib.train.arms import DTYPES, Precision
from d2lib.train.loop import TrainResult, arithmetic, finished, train
from d2lib.train.pins import Pins
from d2lib.train.recipe import Recipe, from_receipt
from d2lib.train.schedule import total_updates

NAME = "full-fast"


class Admitted:
    """What admission let in: the recipe and the digests that everything after it is bound to.

    Args:
        path: admitted.json, of the newest admission that is done (see d2lib.evidence.phase.Phase.product).

    Raises:
        Refused: not an admission, not admitted, or its recipe is not the one that its identities name.
    """

    def __init__(self, path: Path) -> None:
        value = read_json(path)
        if not isinstance(value, dict) or value.get("admitted") is not True:
            raise Refused("nothing was admitted here", expected="admitted.json of an admission that holds", where=path)
        self.path = path
        self.arithmetic: dict[str, Any] = dict(value.get("arithmetic") or {})
        """The pilot's precision, device, torch and threads; empty where its receipt is older than their record."""
        self.identities: dict[str, str] = dict(value["identities"])
        self.recipe: Recipe = from_receipt(value, where=path)
        digest = str(sha256_bytes(canonical_json(self.recipe.model_dump(mode="json"))))
        if digest != self.identities["recipe"]:
            raise Refused(
                "the admitted recipe is not the one that was admitted",
                expected=self.identities["recipe"],
                found=digest,
                where=path,
            )

    def check(self, assembly: Assembly) -> None:
        """Refuse an assembly that is not the admitted one; names the file that differs."""
        for name, digest in assembly.identities.items():
            if self.identities.get(name) != digest:
                raise Refused(
                    f"the assembly is not the admitted one: {name} differs",
                    expected=self.identities.get(name),
                    found=digest,
                    where=assembly.folder,
                )

    def check_arithmetic(self, precision: Precision, device: str, threads: int) -> None:
        """Refuse another precision, kind of device, torch or number of threads than the pilot's; names what differs."""
        here = arithmetic(precision, device, threads)
        for name, value in self.arithmetic.items():
            if here.get(name) != value:
                raise Refused(
                    f"full training would compute with another {name} than its pilot",
                    expected=value,
                    found=here.get(name),
                    where=self.path,
                    remedy="train as the pilot was trained; another way to compute needs a pilot of its own",
                )

    @property
    def bound(self) -> dict[str, Any]:
        """What a checkpoint of full training is bound to."""
        return dict(self.identities)


def full_training(
    assembly: Assembly,
    admitted: Admitted,
    out: Path,
    *,
    resume: bool,
    save_every: float,
    precision: Precision = "fp32",
    device: str = "cpu",
    threads: int | None = None,
    pins: Pins | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> TrainResult:
    """Train full-fast.pt; see `train` for what is saved, bound and refused. Pins, where given, are compared first.

    A run that ended between its last byte and its receipt is complete: its result is returned, once everything that it
    is bound to is compared, and nothing is trained.
    """
    admitted.check(assembly)
    admitted.check_arithmetic(precision, device, torch.get_num_threads() if threads is None else threads)
    if pins is not None:
        pins.compare(
            assembly.folder, namespace=admitted.identities["namespace"], manifest=assembly.identities["manifest"]
        )
        pins.compare_data(assembly.folder, assembly.manifest, admitted.recipe)
    if os.path.lexists(out / f"{NAME}.pt"):
        return completed(assembly, admitted, out)
    return train(
        assembly.blocks("train"),
        assembly.config,
        assembly.load_weights(device, DTYPES[precision]),
        admitted.recipe,
        out,
        name=NAME,
        identity=admitted.bound,
        backend="fast",
        precision=precision,
        device=device,
        threads=threads,
        resume=resume,
        save_every=save_every,
        expected_initialization=Hashed.parse(admitted.identities["initialization"]),
        stop=stop,
    )


def full_adapter(assembly: Assembly, admitted: Admitted, out: Path) -> Adapter:
    """The completed full run's adapter; refuses one that is unfinished, short, or bound to something else."""
    return completed(assembly, admitted, out).adapter


def completed(assembly: Assembly, admitted: Admitted, out: Path) -> TrainResult:
    """The completed full run in `out`, from its final checkpoint alone.

    Raises:
        Refused: missing, damaged, unfinished, or bound to something else than the admitted recipe, over all its epochs,
            on this assembly.
    """
    blocks = len(assembly.blocks("train"))
    return finished(
        out / f"{NAME}.pt",
        assembly.config,
        {
            **admitted.bound,
            "run": NAME,
            "backend": "fast",
            "recipe": admitted.recipe.model_dump(),
            "blocks": blocks,
            "total": total_updates(blocks, admitted.recipe),
        },
    )
