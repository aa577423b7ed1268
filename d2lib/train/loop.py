"""The training loop: progress, checkpoints every few minutes, stop on request, resume with the same bits."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from d2lib.drafter.batch import BlockBatch
from d2lib.drafter.config import DrafterConfig
from d2lib.drafter.head_loss import HeadLoss
from d2lib.drafter.lora import Adapter, adapter_rank, initialization_sha256, initialize_adapter
from d2lib.errors import Interrupted, Refused, Unexpected
from d2lib.files import Hashed, sha256_bytes
from d2lib.progress import bar
from d2lib.train import checkpoint
from d2lib.train.arms import ARMS, Backend, Precision
from d2lib.train.determinism import reproducible
from d2lib.train.recipe import Recipe
from d2lib.train.schedule import blocks_presented, learning_rate, total_updates, updates_per_epoch

COLUMNS = ("loss_sum", "blocks", "lr", "grad_norm", "accepted")
"""Metrics, one number an update: loss summed over blocks, blocks, rate, gradient norm before clipping, expected
accepted draft tokens (Σ_k Π_{i≤k} α_i, bonus excluded) summed over blocks."""

SLOT_COLUMNS = ("kl", "tv", "ce", "count")
"""Metrics, K numbers an update: sums over the valid slots, and how many those were. Sums and counts throughout, so that
any mean over them is exact."""


class Blocks(Protocol):
    """What the loop needs of a dataset (see D2Blocks)."""

    def __len__(self) -> int: ...
    def batch(self, indices: Tensor) -> BlockBatch: ...
    def epoch_order(self, seed: int, epoch: int) -> Tensor: ...


@dataclass(frozen=True)
class TrainResult:
    """A finished run: the adapter, its file, updates, seconds, the metrics by column, and what it is bound to.

    Seconds are those of all attempts, from the boundary of the last update; 0 where that is gone.
    """

    adapter: Adapter
    path: Path
    updates: int
    seconds: float
    seconds_per_update: float
    metrics: Mapping[str, Tensor]
    initialization: Hashed
    bound: Mapping[str, Any]


def train(
    blocks: Blocks,
    config: DrafterConfig,
    weights: Mapping[str, Tensor],
    recipe: Recipe,
    out: Path,
    *,
    name: str,
    identity: Mapping[str, Any],
    backend: Backend = "fast",
    precision: Precision = "fp32",
    device: str = "cpu",
    threads: int | None = None,
    resume: bool = False,
    save_every: float = 300.0,
    limit_updates: int | None = None,
    expected_initialization: Hashed | None = None,
    stop: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
    progress: bool = True,
) -> TrainResult:
    """Train a fresh adapter, or go on from the last checkpoint of this very run, with the same bits either way.

    Args:
        blocks: the training split.
        config, weights: the native drafter.
        recipe: what an admitted pilot qualified.
        out: folder; gets NAME.pt and NAME.checkpoints/step-NNNNNNNNN.pt.
        name: of the run, `full-fast` for full training.
        identity: what a checkpoint is bound to (data, base weights, pilot …); the run's name, recipe, backend,
            precision, device, threads, torch's version, blocks, total and initialization are added here.
        threads: of torch while this runs; None leaves them. Bits depend on them.
        resume: go on from the last checkpoint where there is one.
        limit_updates: a pilot's number of updates; the schedule ends there.
        expected_initialization: the pilot's initialization hash; another one is refused.
        save_every: seconds between checkpoints.
        stop: asked after every update; when it says yes the boundary is saved and Interrupted raised.
        clock: monotonic seconds.

    Raises:
        Refused: the run is complete, or exists and `resume` is not set, or a checkpoint is damaged or of another run.
        Interrupted: stopped on request; names the boundary.
        Unexpected: a loss or gradient that is not finite; nothing is saved, the boundary before stays.
    """
    recipe = Recipe.model_validate(recipe.model_dump())  # a copy with other values would not have been validated
    adapter = initialize_adapter(config, recipe.rank, recipe.seed)
    initialization = initialization_sha256(adapter)
    if expected_initialization is not None and initialization != expected_initialization:
        raise Refused(
            "the adapter starts elsewhere than the pilot's", expected=expected_initialization, found=initialization
        )
    total = total_updates(len(blocks), recipe)
    if limit_updates is not None:
        total = min(total, limit_updates)
    final = out / f"{name}.pt"
    with reproducible(device, threads, recipe.seed), checkpoint.exclusive(out, name) as folder:
        if final.exists():
            raise Refused(f"{name} is complete and is never run again", where=final)
        run = _Run(blocks, config, adapter, recipe, total, device, clock)
        run.identity = dict(identity) | {
            "run": name,
            "recipe": recipe.model_dump(),
            "backend": backend,
            **arithmetic(precision, device, torch.get_num_threads()),
            "device": device,
            "blocks": len(blocks),
            "total": total,
            "initialization": str(initialization),
        }
        last = checkpoint.latest(folder)
        if last is not None:
            if not resume:
                raise Refused(f"{name} was begun before", where=last, remedy="resume it")
            run.restore(checkpoint.load(last, run.identity), last)
        arm = ARMS[backend](
            config, {key: tensor.to(device) for key, tensor in weights.items()}, run.leaves, recipe, precision
        )
        saved = clock()
        with bar(total, name, "update", shown=progress, initial=run.update) as shown:
            while run.update < total:
                measured, rate = run.step(arm.accumulate, last)
                shown.set_postfix_str(f"loss={measured.loss_sum / measured.blocks:.5f} lr={rate:.2e}", refresh=False)
                shown.update()
                if run.update == total:
                    break
                stopping = stop()
                if stopping or clock() - saved >= save_every:
                    last = checkpoint.step_path(folder, run.update)
                    checkpoint.save(last, run.state())
                    saved = clock()
                if stopping:
                    raise Interrupted(
                        f"{name} stopped at update {run.update} of {total}", where=last, remedy="resume the same job"
                    )
        state = run.state()
        boundary = checkpoint.step_path(folder, total)
        if not boundary.exists():  # the time that the run took stands here, so that equal runs end in equal files
            checkpoint.save(boundary, state)
        checkpoint.save(final, replace(state, seconds=0.0))
    return finished(final, config)


def arithmetic(precision: Precision, device: str, threads: int) -> dict[str, Any]:
    """What decides a training's last bits beside its code, as a pilot's receipt records it."""
    kind = torch.device(device).type
    return {"precision": precision, "device": kind, "threads": threads, "torch": str(torch.__version__)}


def finished(path: Path, config: DrafterConfig, bound: Mapping[str, Any] | None = None) -> TrainResult:
    """The result of a completed run, from its final file.

    Args:
        path: NAME.pt.
        config: the drafter's.
        bound: fields that the run's identity must have, with these values.

    Raises:
        Refused: missing, damaged, unfinished, or of another run.
    """
    state = checkpoint.load(path)
    if not state.complete:
        raise Refused("the run is not complete", expected=f"{state.total} updates", found=state.update, where=path)
    if bound is not None:
        checkpoint.refuse_other(bound, {name: state.identity.get(name) for name in bound}, path, remedy=None)
    recipe = Recipe.model_validate(state.identity["recipe"])
    expected = blocks_presented(state.total, state.identity["blocks"], recipe)
    if (state.total, state.position.presented) != (state.identity["total"], expected):
        raise Refused(
            "the run presented other blocks than its recipe says",
            expected=f"{expected} blocks in {state.identity['total']} updates",
            found=f"{state.position.presented} in {state.total}",
            where=path,
        )
    rank = adapter_rank(state.adapter, config, where=path)
    if rank != recipe.rank:
        raise Refused("the adapter has another rank than its recipe", expected=recipe.rank, found=rank, where=path)
    boundary = checkpoint.step_path(path.with_suffix(".checkpoints"), state.total)
    seconds = checkpoint.load(boundary, state.identity).seconds if boundary.exists() else 0.0
    return TrainResult(
        adapter=dict(state.adapter),
        path=path,
        updates=state.update,
        seconds=seconds,
        seconds_per_update=seconds / state.update,
        metrics=state.metrics,
        initialization=Hashed.parse(state.identity["initialization"]),
        bound=state.identity,
    )


class _Run:
    """What changes from update to update, and how it goes into a checkpoint and comes out of one."""

    def __init__(
        self,
        blocks: Blocks,
        config: DrafterConfig,
        adapter: Adapter,
        recipe: Recipe,
        total: int,
        device: str,
        clock: Callable[[], float],
    ) -> None:
        self.blocks, self.recipe, self.total, self.device = blocks, recipe, total, torch.device(device)
        self.leaves: Adapter = {}
        for key in sorted(adapter):
            leaf = adapter[key].to(device, copy=True).requires_grad_()
            leaf.grad = torch.zeros_like(leaf)
            self.leaves[key] = leaf
        self.optimizer = torch.optim.AdamW(
            self.leaves.values(),
            lr=recipe.lr,
            betas=(recipe.beta1, recipe.beta2),
            eps=recipe.eps,
            weight_decay=recipe.weight_decay,
            foreach=self.device.type != "cpu",
            fused=False,
        )
        self.metrics = {column: torch.zeros(total, dtype=torch.float64) for column in COLUMNS}
        self.metrics |= {c: torch.zeros(total, config.block_size, dtype=torch.float64) for c in SLOT_COLUMNS}
        self.identity: Mapping[str, Any] = {}
        self.update = 0
        self._order: tuple[int, Tensor] = (-1, torch.empty(0, dtype=torch.int64))
        self._clock, self._began, self._spent = clock, clock(), 0.0

    def step(self, accumulate: Callable[[BlockBatch], HeadLoss], last: Path | None) -> tuple[HeadLoss, float]:
        """Make one update; returns what it measured and the rate it was made with.

        Raises Unexpected, with the adapter as it was, when the loss or the gradient is not finite.
        """
        epoch, place = divmod(self.update, updates_per_epoch(len(self.blocks), self.recipe))
        indices = self.order(epoch)[place * self.recipe.batch : (place + 1) * self.recipe.batch]
        rate = learning_rate(self.update, self.total, self.recipe)
        self.optimizer.zero_grad(set_to_none=False)  # every tensor takes part in every update
        measured = accumulate(self.blocks.batch(indices).to(self.device))
        norm = float(torch.nn.utils.clip_grad_norm_(list(self.leaves.values()), self.recipe.clip))
        if not (math.isfinite(measured.loss_sum) and math.isfinite(norm)):
            raise Unexpected(
                "training met a number that is not finite",
                expected="a finite loss and gradient",
                found=f"loss {measured.loss_sum / measured.blocks}, gradient norm {norm}",
                where=f"update {self.update}, epoch {epoch}, blocks {indices.tolist()}",
                remedy="nothing was saved"
                + ("" if last is None else f"; the boundary before is {last.name}")
                + "; look at these blocks' rows",
            )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        for column, value in zip(
            COLUMNS, (measured.loss_sum, measured.blocks, rate, norm, measured.accepted), strict=True
        ):
            self.metrics[column][self.update] = value
        for column in SLOT_COLUMNS:
            self.metrics[column][self.update] = getattr(measured, column).detach().cpu()
        self.update += 1
        return measured, rate

    def order(self, epoch: int) -> Tensor:
        """The epoch's permutation."""
        if self._order[0] != epoch:
            self._order = epoch, self.blocks.epoch_order(self.recipe.seed, epoch)
        return self._order[1]

    def position(self) -> checkpoint.Position:
        """Where the run stands, from the update alone."""
        epoch, place = divmod(self.update, updates_per_epoch(len(self.blocks), self.recipe))
        return checkpoint.Position(
            update=self.update,
            total=self.total,
            epoch=epoch,
            place=place,
            presented=blocks_presented(self.update, len(self.blocks), self.recipe),
            order=str(sha256_bytes(self.order(epoch).numpy().tobytes())),
            lr=learning_rate(self.update - 1, self.total, self.recipe) if self.update else 0.0,
        )

    def state(self) -> checkpoint.State:
        """The run as it stands."""
        rng = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(self.device)
        return checkpoint.State(
            identity=self.identity,
            position=self.position(),
            adapter=self.leaves,
            moments={
                f"{key}.{moment}": self.optimizer.state[leaf][moment]
                for key, leaf in self.leaves.items()
                for moment in checkpoint.MOMENTS
            },
            rng=rng,
            metrics={column: values[: self.update] for column, values in self.metrics.items()},
            complete=self.update == self.total,
            seconds=self._spent + self._clock() - self._began,
        )

    @torch.no_grad()
    def restore(self, state: checkpoint.State, where: Path) -> None:
        """Go on from a checkpoint whose identity is this run's."""
        shapes = {key: leaf.shape for key, leaf in self.leaves.items()}
        if {key: tensor.shape for key, tensor in state.adapter.items()} != shapes:
            raise Refused("the checkpoint holds another adapter", expected=shapes, where=where)
        if state.metrics.keys() != self.metrics.keys():
            raise Refused("the checkpoint holds other metrics", expected=list(self.metrics), where=where)
        self.update, self._spent = state.update, state.seconds
        checkpoint.refuse_other(self.position().model_dump(), state.position.model_dump(), where)
        for key, leaf in self.leaves.items():
            leaf.copy_(state.adapter[key])
            self.optimizer.state[leaf] = {
                "step": torch.tensor(float(state.update)),
                **{m: state.moments[f"{key}.{m}"].to(leaf.device, copy=True) for m in checkpoint.MOMENTS},
            }
        for column, values in self.metrics.items():
            values[: self.update] = state.metrics[column]
        torch.set_rng_state(state.rng["cpu"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state.rng["cuda"], self.device)
