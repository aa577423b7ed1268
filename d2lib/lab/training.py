"""Training the target on the corpus, and the learning-rate schedule of the lab's own trainings."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from d2lib.errors import Interrupted
from d2lib.files import Record
from d2lib.lab.target import Target


class TargetTraining(Record):
    """How the target is trained: `batch` windows of `length` bytes per step, half legal and half general.

    With `muon_lr` the layers' matrices are trained by Muon (https://kellerjordan.github.io/posts/muon/), its steps
    scaled to the size of AdamW's, which takes about half of AdamW's steps; everything else by AdamW at `lr`.
    """

    steps: int = Field(ge=0)
    batch: int = Field(gt=1)
    length: int = Field(gt=1)
    lr: float = Field(gt=0)
    muon_lr: float | None = Field(default=None, gt=0)
    warmup: float = Field(default=0.05, ge=0, le=1)
    weight_decay: float = Field(default=0.01, ge=0)
    clip: float = Field(default=1.0, gt=0)


def warmup_cosine(update: int, updates: int, warmup: float) -> float:
    """Factor of the learning rate before update number `update` (from 0): linear warm-up, then cosine to 0.

    Args:
        warmup: share of the updates that rise.
    """
    rising = math.ceil(warmup * updates)
    if update < rising:
        return (update + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (update - rising) / max(1, updates - rising)))


def train_target(
    target: Target,
    texts: Sequence[Tensor],
    config: TargetTraining,
    generator: torch.Generator,
    *,
    progress: Callable[[int, float], object] | None = None,
    stop: Callable[[], bool] | None = None,
) -> Target:
    """Train in place on next-byte prediction.

    Args:
        target: fresh.
        texts: uint8 [n] each; every batch takes the same number of windows of each, the remainder of the first.
        generator: draws the windows.
        progress: called after every step with 1 and the loss, in nats a byte.
        stop: asked before every step; when it says yes, Interrupted is raised.

    Returns: the target, without gradients.
    """
    optimizers = _optimizers(target, config)
    shares = [config.batch // len(texts)] * len(texts)
    shares[0] += config.batch - sum(shares)
    for step in range(config.steps):
        if stop is not None and stop():
            raise Interrupted("the target's training was stopped", where=f"step {step} of {config.steps}")
        for optimizer, rate in optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = rate * warmup_cosine(step, config.steps, config.warmup)
        windows = torch.cat(
            [_windows(text, count, config.length + 1, generator) for text, count in zip(texts, shares, strict=True)]
        )
        logits = target.logits(target(windows[:, :-1]).hidden)
        loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        target.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(target.parameters(), config.clip)
        for optimizer in optimizers:
            optimizer.step()
        if progress is not None:
            progress(1, loss.item())
    return target.requires_grad_(False)


def _optimizers(target: Target, config: TargetTraining) -> dict[torch.optim.Optimizer, float]:
    """Optimizer → its peak learning rate."""
    matrices, others = list[Tensor](), list[Tensor]()
    for name, value in target.named_parameters():
        (matrices if config.muon_lr and name.startswith("layers.") and value.ndim == 2 else others).append(value)
    return adamw_and_muon(others, config.lr, matrices, config.muon_lr, decay=config.weight_decay, beta2=0.95)


def adamw_and_muon(
    others: list[Tensor], lr: float, matrices: list[Tensor], muon_lr: float | None, *, decay: float, beta2: float
) -> dict[torch.optim.Optimizer, float]:
    """Optimizer → its peak learning rate: AdamW, and with `muon_lr` Muon for matrices, its steps of AdamW's size."""
    found: dict[torch.optim.Optimizer, float] = {
        torch.optim.AdamW(others, betas=(0.9, beta2), weight_decay=decay, fused=True): lr
    }
    if muon_lr:
        found[torch.optim.Muon(matrices, weight_decay=decay, adjust_lr_fn="match_rms_adamw")] = muon_lr
    return found


def _windows(text: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """[count, length] int64 windows of a text, from anywhere."""
    start = torch.randint(len(text) - length + 1, (count, 1), generator=generator)
    return text[start + torch.arange(length)].long()
