"""The training loop: progress, checkpoints every few minutes, stop on request, resume with the same bits."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from d2lib.drafter.batch import BlockBatch
from d2lib.drafter.batched import BatchedReference
from d2lib.drafter.config import DrafterConfig
from d2lib.drafter.fast import FastDrafter
from d2lib.drafter.head_loss import HeadLoss, fused_head_loss
from d2lib.drafter.lora import Adapter, adapter_rank, initialization_sha256, initialize_adapter
from d2lib.drafter.objectives import OBJECTIVES
from d2lib.errors import Interrupted, Refused, Unexpected
from d2lib.files import Hashed
from d2lib.train import checkpoint
from d2lib.train.recipe import Recipe
from d2lib.train.schedule import learning_rate, total_updates

METRICS = ("loss_sum", "blocks", "lr", "grad_norm", "accepted")
"""Per update: loss summed over blocks, blocks, rate, gradient norm before clipping, expected accepted draft tokens
summed over blocks. Sums and counts, so that any mean of them is exact."""

LOG_SECONDS = 30.0


class Blocks(Protocol):
    """What the loop needs of a dataset (see D2Blocks)."""

    def __len__(self) -> int: ...
    def batch(self, indices: Tensor) -> BlockBatch: ...
    def epoch_order(self, seed: int, epoch: int) -> Tensor: ...


class Arm(Protocol):
    """One way to compute a batch's loss."""

    def loss(self, batch: BlockBatch) -> HeadLoss: ...


@dataclass(frozen=True)
class TrainResult:
    """A finished run: the adapter, its file, updates, seconds over all attempts, and the metrics by column."""

    adapter: Adapter
    path: Path
    updates: int
    seconds: float
    seconds_per_update: float
    metrics: Mapping[str, Tensor]
    initialization: Hashed


class ReferenceArm:
    """REF as a training path: the reference's own forward pass (in its batched form, with the same bits)."""

    def __init__(self, config: DrafterConfig, weights: Mapping[str, Tensor], adapter: Adapter, objective: str) -> None:
        self.drafter = BatchedReference(config, weights, adapter)
        self.objective = OBJECTIVES[objective]

    def loss(self, batch: BlockBatch) -> HeadLoss:
        """The loss from the reference's hidden states; head and loss are the same piece for both arms."""
        reference = self.drafter.reference
        hidden = torch.cat([part for _, part in self.drafter.hidden_parts(batch)])
        return fused_head_loss(
            reference._norm(hidden, f"{reference.last}.norm"),
            reference.weights["head.weight"],
            reference._markov_embed(batch.previous),
            reference.weights[f"{reference.last}.markov_head.head.weight"],
            batch.teacher_hidden[batch.teacher],
            batch.target,
            batch.valid,
            self.objective,
        )


class FastArm:
    """FAST as a training path."""

    def __init__(
        self,
        config: DrafterConfig,
        weights: Mapping[str, Tensor],
        adapter: Adapter,
        objective: str,
        compute_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.drafter = FastDrafter(config, weights, adapter, compute_dtype)
        self.objective = OBJECTIVES[objective]

    def loss(self, batch: BlockBatch) -> HeadLoss:
        """The batch's loss."""
        return self.drafter.loss(batch, self.objective)


def train(
    blocks: Blocks,
    config: DrafterConfig,
    weights: Mapping[str, Tensor],
    recipe: Recipe,
    out: Path,
    *,
    name: str,
    identity: Mapping[str, Any],
    backend: Literal["fast", "ref"] = "fast",
    precision: Literal["fp32", "bf16"] = "fp32",
    device: str = "cpu",
    resume: bool = False,
    save_every: float = 300.0,
    limit_updates: int | None = None,
    expected_initialization: Hashed | None = None,
    stop: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
    progress: bool = True,
) -> TrainResult:
    """Train a fresh adapter, or go on from the last checkpoint of this very run.

    Args:
        blocks: the training split.
        config, weights: the native drafter.
        recipe: what an admitted pilot qualified.
        out: folder; gets NAME.pt and NAME.checkpoints/step-NNNNNNNNN.pt.
        name: of the run, `full-fast` for full training.
        identity: what a checkpoint is bound to (run, data, base weights, pilot …); recipe, backend, precision, device,
            threads, total and initialization are added here.
        limit_updates: a pilot's number of updates; the schedule ends there.
        expected_initialization: the pilot's initialization hash; another one is refused.
        save_every: seconds between checkpoints.
        stop: asked after every update; when it says yes the boundary is saved and Interrupted raised.

    Raises:
        Refused: the run is complete, or exists and `resume` is not set, or a checkpoint is of another run.
        Interrupted: stopped on request; names the boundary.
        Unexpected: a loss or gradient that is not finite; nothing is saved.
    """
    final, folder = out / f"{name}.pt", out / f"{name}.checkpoints"
    if final.exists():
        raise Refused(f"{name} is complete and is never run again", where=final)
    adapter = initialize_adapter(config, recipe.rank, recipe.seed)
    initialization = initialization_sha256(adapter)
    if expected_initialization is not None and initialization != expected_initialization:
        raise Refused(
            "the adapter starts elsewhere than the pilot's", expected=expected_initialization, found=initialization
        )
    total = total_updates(len(blocks), recipe)
    if limit_updates is not None:
        total = min(total, limit_updates)
    bound = dict(identity) | {
        "run": name,
        "recipe": recipe.model_dump(),
        "backend": backend,
        "precision": precision,
        "device": device,
        "threads": torch.get_num_threads(),
        "blocks": len(blocks),
        "total": total,
        "initialization": str(initialization),
    }
    latest = checkpoint.latest(folder)
    if latest is not None and not resume:
        raise Refused(f"{name} was begun before", where=latest, remedy="resume it")
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint.clean(folder)

    leaves = {key: tensor.to(device).requires_grad_() for key, tensor in adapter.items()}
    optimizer = torch.optim.AdamW(
        leaves.values(),
        lr=recipe.lr,
        betas=(recipe.beta1, recipe.beta2),
        eps=recipe.eps,
        weight_decay=recipe.weight_decay,
    )
    columns: dict[str, list[float]] = {column: [] for column in METRICS}
    update, spent = 0, 0.0
    torch.manual_seed(recipe.seed)
    if latest is not None:
        state = checkpoint.load(latest, bound)
        update, spent = state.update, state.seconds
        with torch.no_grad():
            for key, leaf in leaves.items():
                leaf.copy_(state.adapter[key])
        optimizer.load_state_dict(dict(state.optimizer))
        torch.set_rng_state(state.rng)
        columns = {column: state.metrics[column].tolist() for column in METRICS}
    base = {key: tensor.to(device) for key, tensor in weights.items()}
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    arm: Arm = (
        FastArm(config, base, leaves, recipe.objective, dtype)
        if backend == "fast"
        else ReferenceArm(config, base, leaves, recipe.objective)
    )

    def state_now(complete: bool) -> checkpoint.State:
        return checkpoint.State(
            identity=bound,
            update=update,
            total=total,
            adapter={key: leaf.detach().cpu().clone() for key, leaf in leaves.items()},
            optimizer=optimizer.state_dict(),
            rng=torch.get_rng_state(),
            metrics={column: torch.tensor(values, dtype=torch.float64) for column, values in columns.items()},
            complete=complete,
            seconds=spent + clock() - began,
        )

    per_epoch = -(-len(blocks) // recipe.batch)
    began = last_save = last_log = clock()
    first, order, order_epoch = update, torch.empty(0), -1
    with tqdm(total=total, initial=update, desc=name, unit="update", disable=None if progress else True) as bar:
        while update < total:
            epoch, place = divmod(update, per_epoch)
            if epoch != order_epoch:
                order, order_epoch = blocks.epoch_order(recipe.seed, epoch), epoch
            indices = order[place * recipe.batch : (place + 1) * recipe.batch]
            rate = learning_rate(update, total, recipe)
            for group in optimizer.param_groups:
                group["lr"] = rate
            head = arm.loss(blocks.batch(indices).to(device))
            optimizer.zero_grad(set_to_none=True)
            head.loss.backward()  # type: ignore[no-untyped-call]
            norm = float(torch.nn.utils.clip_grad_norm_(list(leaves.values()), recipe.clip))
            if not (abs(head.loss_sum) < float("inf") and norm < float("inf")):
                raise Unexpected(
                    "training met a number that is not finite",
                    expected="a finite loss and gradient",
                    found=f"loss {head.loss_sum / head.blocks}, gradient norm {norm}",
                    where=f"update {update}, blocks {indices[:8].tolist()} …",
                )
            optimizer.step()
            update += 1
            for column, value in zip(
                METRICS, (head.loss_sum, float(head.blocks), rate, norm, head.accepted), strict=True
            ):
                columns[column].append(value)
            bar.update()
            now = clock()
            if now - last_log >= LOG_SECONDS or update == total:
                last_log = now
                pace = (now - began) / (update - first)
                print(
                    f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {name} update {update}/{total} "
                    f"loss {head.loss_sum / head.blocks:.4f} lr {rate:.2e} {pace:.3f} s/update "
                    f"{pace * (total - update):.0f} s left",
                    file=sys.stderr,
                    flush=True,
                )
            stopping = update < total and stop()
            if update < total and (stopping or now - last_save >= save_every):
                checkpoint.save(checkpoint.step_path(folder, update), state_now(False))
                last_save = now
            if stopping:
                raise Interrupted(
                    f"{name} stopped at update {update} of {total}",
                    where=checkpoint.step_path(folder, update),
                    remedy="resume the same job",
                )
    checkpoint.save(final, state_now(True))
    return finished(final, config)


def finished(path: Path, config: DrafterConfig) -> TrainResult:
    """The result of a completed run, from its final file; an unfinished checkpoint is refused."""
    state = checkpoint.load(path)
    if not state.complete or state.update != state.total:
        raise Refused("the run is not complete", expected=f"{state.total} updates", found=state.update, where=path)
    adapter_rank(state.adapter, config, where=path)
    return TrainResult(
        adapter=dict(state.adapter),
        path=path,
        updates=state.update,
        seconds=state.seconds,
        seconds_per_update=state.seconds / state.update if state.update else 0.0,
        metrics=state.metrics,
        initialization=Hashed.parse(state.identity["initialization"]),
    )
