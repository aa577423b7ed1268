"""The native drafter: all of its weights trained from scratch on general text.

Loss: the objective on every slot, plus the binary cross-entropy of the confidence head against α = 1 - TV, which is the
chance that the slot is accepted. The objective is DeepSpec's mixture of 0.1·CE + 0.9·TV, or KL: TV's gradient vanishes
where the drafter gives a likely token next to no chance, which with a large vocabulary is where it starts.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from d2lib.data.blocks import D2Blocks
from d2lib.drafter.batch import BlockBatch
from d2lib.drafter.family import family_of, fast_drafter
from d2lib.drafter.fast import FastDrafter
from d2lib.drafter.objectives import Objective, deepspec_mixture, kl
from d2lib.drafter.weights import Weights
from d2lib.errors import Interrupted
from d2lib.files import Record
from d2lib.lab.training import adamw_and_muon, warmup_cosine

_OBJECTIVES = {"mixture": deepspec_mixture, "KL": kl}
_SAVE_SECONDS = 60.0


class PretrainingConfig(Record):
    """How the native drafter is trained. A batch is `anchors` blocks of each of `streams` sequences.

    With `muon_lr` the projections are trained by Muon, as the target's are (see TargetTraining), the rest by AdamW.
    """

    objective: Literal["mixture", "KL"] = "mixture"
    updates: int = Field(ge=0)
    streams: int = Field(gt=0)
    anchors: int = Field(gt=0)
    lr: float = Field(gt=0)
    muon_lr: float | None = Field(default=None, gt=0)
    warmup: float = Field(default=0.05, ge=0, le=1)
    weight_decay: float = Field(default=0.01, ge=0)
    clip: float = Field(default=1.0, gt=0)


def pretrain(
    weights: Weights,
    blocks: D2Blocks,
    config: PretrainingConfig,
    generator: torch.Generator,
    *,
    progress: Callable[[int, float], object] | None = None,
    stop: Callable[[], bool] | None = None,
    boundary: Path | None = None,
) -> Weights:
    """Train a drafter on a split's blocks; embedding and LM head stay the target's.

    Args:
        weights: fresh weights; they are not changed.
        blocks: of general text.
        generator: draws the sequences and anchors of every batch.
        progress: called after every update with 1 and the loss.
        stop: asked before every update; when it says yes, Interrupted is raised.
        boundary: a file in which the state is kept every `_SAVE_SECONDS` and when stopped; where it exists, training
            goes on from it, to the same bits as without the interruption.
    """
    family = family_of(blocks.config)
    frozen = (family.embed, family.head)
    trained = {name: value.clone().requires_grad_(name not in frozen) for name, value in weights.items()}
    free = [value for value in trained.values() if value.requires_grad]
    optimizers = _optimizers(trained, config, family.projections(blocks.config))
    drafter = fast_drafter(blocks.config, trained)
    first, saved = 0, time.monotonic()
    if boundary is not None and boundary.exists():
        first = _restore(boundary, trained, list(optimizers), generator)
        if progress is not None:
            progress(first, math.nan)
    for update in range(first, config.updates):
        stopping = stop is not None and stop()
        if boundary is not None and update > first and (stopping or time.monotonic() - saved > _SAVE_SECONDS):
            _keep(boundary, update, trained, list(optimizers), generator)
            saved = time.monotonic()
        if stopping:
            raise Interrupted("pre-training was stopped", where=f"update {update} of {config.updates}")
        factor = warmup_cosine(update, config.updates, config.warmup)
        for optimizer, rate in optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.zero_grad()
        loss = native_loss(drafter, blocks.batch(_draw(blocks, config, generator)), _OBJECTIVES[config.objective])
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(free, config.clip)
        for optimizer in optimizers:
            optimizer.step()
        if progress is not None:
            progress(1, loss.item())
    return {name: value.detach() for name, value in trained.items()}


def _optimizers(
    trained: Weights, config: PretrainingConfig, projections: Collection[str]
) -> dict[torch.optim.Optimizer, float]:
    """Optimizer → its peak learning rate."""
    matrices, others = list[Tensor](), list[Tensor]()
    for name, value in trained.items():
        if value.requires_grad:
            (matrices if config.muon_lr and name in projections else others).append(value)
    return adamw_and_muon(others, config.lr, matrices, config.muon_lr, decay=config.weight_decay, beta2=0.999)


def _keep(
    path: Path, update: int, trained: Weights, optimizers: Sequence[torch.optim.Optimizer], generator: torch.Generator
) -> None:
    """Replace the boundary by the state before this update, in one step."""
    state = {
        "update": update,
        "weights": {name: value.detach() for name, value in trained.items() if value.requires_grad},
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "generator": generator.get_state(),
    }
    working = path.with_name(f".{path.name}.part")
    torch.save(state, working)
    os.replace(working, path)


def _restore(
    path: Path, trained: Weights, optimizers: Sequence[torch.optim.Optimizer], generator: torch.Generator
) -> int:
    """Put a boundary's state in place; returns its update."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    with torch.no_grad():
        for name, value in state["weights"].items():
            trained[name].copy_(value)
    for optimizer, kept in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(kept)
    generator.set_state(state["generator"])
    return int(state["update"])


def native_loss(drafter: FastDrafter, batch: BlockBatch, objective: Objective = deepspec_mixture) -> Tensor:
    """Mean over blocks of the objective, plus the mean over valid slots of the confidence's cross-entropy, if any."""
    hidden = drafter.hidden(batch)
    measured = drafter.head_loss(hidden, batch, objective)
    confidence = drafter.confidence(hidden, batch.previous)
    if confidence is None:
        return measured.loss
    cost = F.binary_cross_entropy_with_logits(
        confidence,
        measured.alpha.clamp(0, 1),
        weight=batch.valid.float(),
        reduction="sum",
    )
    return measured.loss + cost / batch.valid.sum()


def _draw(blocks: D2Blocks, config: PretrainingConfig, generator: torch.Generator) -> Tensor:
    """Block numbers: few sequences and many anchors of each, so that blocks share their context rows."""
    sizes = torch.tensor([entry.blocks for entry in blocks.entries])
    first = sizes.cumsum(0) - sizes
    picked = torch.randint(len(sizes), (config.streams,), generator=generator)
    chance = torch.rand(config.streams, config.anchors, generator=generator, dtype=torch.float64)
    return (first[picked, None] + (chance * sizes[picked, None]).long()).flatten()
