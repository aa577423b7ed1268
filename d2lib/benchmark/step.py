"""The dense family's whole training step against speculators' own class: forward, loss and backward, eager.

Each side is a process of its own that reads the same weights, rows and anchors from a file and steps when told to; the
sides take turns.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from d2lib.benchmark.cases import blocks_at, dense_config, random_weights
from d2lib.benchmark.measure import CPU, Place, Row
from d2lib.benchmark.turns import take_turns
from d2lib.drafter.dense.config import DenseConfig
from d2lib.drafter.family import fast_drafter
from d2lib.drafter.lora import initialize_adapter
from d2lib.drafter.objectives import SlotStatistics
from d2lib.errors import Refused, Unexpected
from d2lib.evidence.environment import child_environment, library_folder

_SHARED = 1e-4
"""Relative difference of the two losses up to which the sides have computed the same."""


def decayed_kl(slots: SlotStatistics, valid: Tensor) -> Tensor:
    """The peer's loss: KL of slot i times exp(-i/4), averaged over the slots of a block; [B, K] to [B]."""
    weight = torch.exp(-torch.arange(valid.shape[1], device=valid.device) / 4) * valid
    return (slots.kl * weight).sum(1) / valid.sum(1)


def write_case(path: Path, config: DenseConfig, *, rows: int, blocks: int, seed: int = 23) -> None:
    """A safetensors file of weights (`weights.NAME`), tokens [rows], anchor [blocks], taps [rows, n_taps·dim] and
    hidden [rows, dim], all fp32.

    Hidden rows have a mean square of one, so that the peer, which norms them, gets what FAST is given.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, config.dim, generator=generator)
    tensors = {f"weights.{name}": value for name, value in random_weights(config).items()}
    tensors["tokens"] = torch.randint(config.vocab_size, (rows,), generator=generator)
    tensors["taps"] = torch.randn(rows, config.n_taps * config.dim, generator=generator)
    tensors["hidden"] = hidden / hidden.square().mean(1, keepdim=True).sqrt()
    drawn = torch.randperm(rows - config.block_size - 1, generator=generator)[:blocks]
    tensors["anchor"] = 1 + drawn.sort().values
    save_file(tensors, path)


def measure_training_step(
    python: str | None, *, repeats: int, threads: int, place: Place = CPU, rows: int, blocks: int, **sizes: Any
) -> list[Row]:
    """Time and memory of FAST's step against the peer's, and what FAST takes when it too learns every weight.

    The peer has no LoRA for a drafter: its step learns all weights but embedding and LM head. What bounds FAST's time
    from below are the three products with the LM head, two thirds of its step, which both sides take.

    Args:
        python: interpreter in whose packages speculators is; None: nothing is measured.
        rows: of the sequence. blocks: anchors drawn from it. sizes: fields of `dense_config` to change.

    Raises:
        Refused: that interpreter cannot run speculators' step. Unexpected: the sides' losses differ.
    """
    if python is None:
        return []
    config = dense_config(**sizes)
    with tempfile.TemporaryDirectory() as folder:
        case = Path(folder, "case.safetensors")
        write_case(case, config, rows=rows, blocks=blocks)
        given = {"case": str(case), "sizes": config.model_dump(mode="json"), "threads": threads, "device": place.device}
        ours = [sys.executable, "-m", "d2lib.benchmark.step"]
        found = run_sides(
            {
                "adapter": [*ours, json.dumps(given | {"learns": "adapter"})],
                "weights": [*ours, json.dumps(given | {"learns": "weights"})],
                "peer": [python, "-m", "d2lib.benchmark.peer", json.dumps(given)],
            },
            repeats,
        )
    losses = {name: side.loss for name, side in found.items()}
    if max(abs(loss / losses["peer"] - 1) for loss in losses.values()) > _SHARED:
        raise Unexpected("the sides of a training step computed different losses", found=losses, where=python)
    at = (
        f"{blocks} blocks of {config.block_size} over {rows:,} rows, {config.n_layers} layers, dim {config.dim:,}, "
        f"V {config.vocab_size:,}, fp32 on {place.device}"
    )
    against, peer, measured = "speculators, eager, which learns all weights", found["peer"], []
    for name, what in (("adapter", "dense training step"), ("weights", "dense training step, all weights")):
        time, memory = found[name].seconds / peer.seconds, found[name].extra / peer.extra
        if name == "adapter":
            measured += [
                place.row(what, at, against, time, "of its time", "<=", 0.6),
                place.row(what, at, against, memory, "of its extra memory", "<=", 0.25),
            ]
        else:
            measured += [Row(what, at, against, time, "of its time")]
            measured += [Row(what, at, against, memory, "of its extra memory")]
    return measured


@dataclass(frozen=True)
class Side:
    """A side's loss, its first step's memory in MB, and the median seconds of the steps after it."""

    loss: float
    extra: float
    seconds: float


def run_sides(commands: Mapping[str, Sequence[str]], repeats: int) -> dict[str, Side]:
    """Run processes that speak as `take_turns` does; the first step of each warms it up, and then they take turns."""
    environment = child_environment({"PYTHONPATH": str(library_folder().parent), "TORCHDYNAMO_DISABLE": "1"})
    with ExitStack() as stack:
        running = {name: stack.enter_context(_Running(command, environment)) for name, command in commands.items()}
        first = {name: side.answer() for name, side in running.items()}
        seconds: dict[str, list[float]] = {name: [] for name in running}
        for _ in range(repeats):
            for name, side in running.items():
                side.go()
                seconds[name].append(side.answer()["seconds"])
    return {name: Side(answer["loss"], answer["extra"], median(seconds[name])) for name, answer in first.items()}


class _Running:
    """A side's process, ended when its context ends."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115  # closed by __exit__
        self._python = command[0]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=dict(environment),
                text=True,
            )
        except OSError as error:
            self._errors.close()
            raise Refused(
                "an interpreter does not start", expected="the path of a python", found=str(error), where=command[0]
            ) from None

    def __enter__(self) -> _Running:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def go(self) -> None:
        """Ask for one more step."""
        if self._process.stdin is not None:
            self._process.stdin.write("\n")
            self._process.stdin.flush()

    def answer(self) -> dict[str, float]:
        """The figures of the step that it is taking."""
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            self._process.wait()
            self._errors.seek(0)
            raise Refused(
                "a side of the training step does not run",
                expected="an interpreter that has torch, and speculators 0.9 where it is the peer's",
                found=self._errors.read().strip().rpartition("\n")[2] or f"exit status {self._process.returncode}",
                where=self._python,
            )
        figures: dict[str, float] = json.loads(line)
        return figures


def training_step(*, case: str, sizes: dict[str, Any], threads: int, device: str, learns: str) -> None:
    """FAST's side, in a process of its own; learns: `adapter`, or `weights`, all but embedding and LM head."""
    torch.set_num_threads(threads)
    config = DenseConfig.model_validate(sizes)
    given = {name: value.clone() for name, value in load_file(case).items()}
    weights = {
        name.removeprefix("weights."): given.pop(name).to(device) for name in list(given) if name.startswith("weights.")
    }
    if learns == "adapter":
        adapter = {name: value.to(device) for name, value in initialize_adapter(config, 16, 23).items()}
        leaves = list(adapter.values())
    else:
        adapter = None
        leaves = [value for name, value in weights.items() if name not in {"embed_tokens.weight", "lm_head.weight"}]
    for leaf in leaves:
        leaf.requires_grad_()
    drafter = fast_drafter(config, weights, adapter)
    batch = blocks_at(config, *(given[name] for name in ("anchor", "tokens", "taps", "hidden"))).to(device)

    def step() -> float:
        for leaf in leaves:
            leaf.grad = None
        measured = drafter.loss(batch, decayed_kl)
        measured.loss.backward()  # type: ignore[no-untyped-call]
        return float(measured.loss.detach())

    take_turns(step, device)


if __name__ == "__main__":
    training_step(**json.loads(sys.argv[1]))
