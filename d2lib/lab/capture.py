"""Capture: an assembly made on the spot, from the text of the installation to the live drafter's trajectories.

Every file is written once, complete or not at all. provenance.json stands first and says what the case is made from; a
capture that was interrupted goes on in the same folder from the files that are finished, and only with the same text
and parameters.
"""

from __future__ import annotations

import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from pydantic import Field, model_validator

from d2lib.data.blocks import D2Blocks
from d2lib.data.k2 import K2File, K2Header, K2Round, write_k2
from d2lib.data.manifest import FileEntry, Manifest, SequenceEntry, Split
from d2lib.data.sidecar import Sidecar, write_sidecar
from d2lib.drafter.config import DrafterConfig
from d2lib.drafter.weights import initialize, load_weights, save_weights, write_tensors
from d2lib.errors import Interrupted, Refused
from d2lib.files import Record, canonical_json, sha256_file, write_json
from d2lib.lab.corpus import Corpus, Kind, read_corpus
from d2lib.lab.decode import Stream, decode_live
from d2lib.lab.pretrain import PretrainingConfig, pretrain
from d2lib.lab.prompts import Group, Prompt, draw_prompts
from d2lib.lab.replay import canonical_rows
from d2lib.lab.sampling import derive_seed, sample
from d2lib.lab.target import Target, TargetConfig, load_target
from d2lib.lab.training import TargetTraining, train_target
from d2lib.progress import bar as progress_bar

LIVE: tuple[Split, ...] = ("dev", "heldout_legal", "heldout_general")
"""The splits that the live drafter decodes."""

PRETRAINING = "pretraining"


class CaptureProfile(Record):
    """Every size of a self-made case."""

    namespace: str = Field(min_length=1)
    seed: int = 23
    threads: int = Field(default=2, ge=1)
    distributions: tuple[str, ...] = Field(default=("d2-workbench",), strict=False)
    """Whose licences, and those of what they require, are the legal text."""
    least_general: int = Field(default=1_000_000, ge=0)
    least_legal: int = Field(default=60_000, ge=0)
    """Bytes of text without which there is no case."""
    target: TargetConfig
    target_training: TargetTraining
    drafter: DrafterConfig
    pretraining: PretrainingConfig
    pretraining_sequences: int = Field(gt=0)
    """Sampled general sequences that the native drafter learns from."""
    gen_start: int = Field(default=128, gt=0)
    """Rows of context: bytes of a prompt."""
    rows: int = Field(gt=0)
    """Rows of a sequence, context included."""
    temperature: float = Field(gt=0)
    sampling_tile: int = Field(default=66, gt=0)
    sequences: dict[Split, dict[Kind, int]]
    """Split → kind of text → number of sequences."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for name in ("dim", "vocab_size"):
            if getattr(self.target, name) != getattr(self.drafter, name):
                raise ValueError(f"target and drafter must have one {name}")
        if self.target.tap_layers != self.drafter.target_layer_ids:
            raise ValueError("the drafter's target_layer_ids must be the target's tap_layers")
        if self.rows < self.gen_start + 2 or self.rows < self.gen_start + self.drafter.block_size + 1:
            raise ValueError(f"rows must be at least gen_start + block_size + 1; found {self.rows}")
        if set(self.sequences) != {"train", *LIVE}:
            raise ValueError(f"sequences must name train and {', '.join(LIVE)}")
        return self


@dataclass
class _Capture:
    """One capture at work: the profile, the folder, what stops it, and how long each step took."""

    profile: CaptureProfile
    out: Path
    progress: bool
    stop: Callable[[], bool]
    seconds: dict[str, float] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def step(self, name: str, total: int, unit: str) -> Iterator[Any]:
        """A bar for one step, whose seconds are kept; no step starts after a request to stop."""
        if self.stop():
            raise Interrupted("capture was stopped", where=name, remedy="run the phase again: it goes on from here")
        began = time.monotonic()
        with progress_bar(total, name, unit, shown=self.progress) as bar:
            yield bar
        self.seconds[name] = time.monotonic() - began

    def generator(self, *names: object) -> torch.Generator:
        """Randomness for one purpose, whatever ran before it."""
        return torch.Generator().manual_seed(derive_seed(self.profile.seed, *names))

    def once(self, name: str, value: Any) -> None:
        """A small file that is known at the start: create it, or find the same bytes in it."""
        path, data = self.out / name, canonical_json(value) + b"\n"
        if not path.exists():
            write_json(path, value)
        elif path.read_bytes() != data:
            raise Refused(
                "this folder holds another capture",
                expected="the same text, parameters and versions",
                found="others",
                where=path,
                remedy="capture into a new run",
            )


def capture(
    profile: CaptureProfile,
    out: Path,
    *,
    progress: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Make an assembly.

    Args:
        profile: the case's sizes.
        out: the assembly's folder, new or left by an interrupted capture of the same case.
        progress: show bars.
        stop: asked often; when it says yes, Interrupted is raised and the finished files stay.

    Returns: what was made, as plain data: text, counts, losses, accepted drafts of the live run, seconds of each step.

    Raises:
        Refused: too little text, or the folder holds another capture.
    """
    out.mkdir(parents=True, exist_ok=True)
    work = _Capture(profile, out, progress, stop)
    threads = torch.get_num_threads()
    torch.set_num_threads(profile.threads)
    try:
        corpus = _corpus(work)
        target = _target(work, corpus)
        counts: dict[Group, dict[Kind, int]] = {split: profile.sequences[split] for split in profile.sequences}
        counts[PRETRAINING] = {"general": profile.pretraining_sequences}
        prompts = draw_prompts(corpus, counts, profile.gen_start, profile.seed)
        manifest = _sequences(work, target, prompts)
        _native(work, target, prompts[PRETRAINING])
        live = {split: _live(work, manifest, split) for split in LIVE}
    finally:
        torch.set_num_threads(threads)
    return {
        "text": {
            kind: {"bytes": corpus.size(kind), "families": len(getattr(corpus, kind))} for kind in ("general", "legal")
        },
        "counts": manifest.counts().as_dict(),
        "losses": work.losses,
        "live": live,
        "seconds": {name: round(value, 2) for name, value in work.seconds.items()},
    }


def _corpus(work: _Capture) -> Corpus:
    profile = work.profile
    with work.step("text", 1, "corpus"):
        corpus = read_corpus(
            profile.distributions, least_general=profile.least_general, least_legal=profile.least_legal
        )
        work.once(
            "provenance.json",
            {
                "schema_version": 1,
                "synthetic": False,
                "namespace": profile.namespace,
                "profile": profile.model_dump(mode="json"),
                "versions": {
                    "python": platform.python_version(),
                    "torch": torch.__version__,
                    "numpy": np.__version__,
                    "machine": platform.machine(),
                },
                "sources": [source.model_dump(mode="json") for source in corpus.sources],
            },
        )
        work.once("target.json", profile.target.model_dump(mode="json"))
        work.once("drafter.json", profile.drafter.model_dump(mode="json"))
    return corpus


def _target(work: _Capture, corpus: Corpus) -> Target:
    """Every family of text, held-out ones too: a target knows the world, it is the drafter that is adapted."""
    path, training = work.out / "target.safetensors", work.profile.target_training
    if not path.exists():
        with work.step("target", training.steps, "step") as bar:
            target = Target(work.profile.target, work.generator("target"))
            texts = [
                torch.frombuffer(
                    bytearray(b"\n".join(b"\n".join(passages) for passages in families.values())), dtype=torch.uint8
                )
                for families in (corpus.legal, corpus.general)
            ]
            train_target(
                target,
                texts,
                training,
                work.generator("target training"),
                progress=_show(work, "target", bar),
                stop=work.stop,
            )
            write_tensors(path, target.state_dict())
    return load_target(work.out)


def _sequences(work: _Capture, target: Target, prompts: dict[Group, list[Prompt]]) -> Manifest:
    """Sample every split's sequences and store the target's canonical forward over each."""
    profile, out = work.profile, work.out
    path = out / "MANIFEST.json"
    if path.exists():
        return Manifest.load(path)
    wanted = [prompt for split in profile.sequences for prompt in prompts[split]]
    entries = _store(work, target, wanted, out, "sequences")
    manifest = Manifest(
        namespace=profile.namespace,
        dim=profile.target.dim,
        vocab_size=profile.target.vocab_size,
        n_taps=len(profile.target.tap_layers),
        target={
            "name": "lab byte LM",
            "config": str(sha256_file(out / "target.json")),
            "sha256": str(sha256_file(out / "target.safetensors")),
        },
        sequences=tuple(entries),
    )
    manifest.write(path)
    return manifest


def _store(work: _Capture, target: Target, prompts: list[Prompt], folder: Path, what: str) -> list[SequenceEntry]:
    profile = work.profile
    with work.step(f"{what}: sampling", len(prompts) * (profile.rows - profile.gen_start), "token") as bar:
        sampled = sample(
            target,
            torch.stack([prompt.tokens for prompt in prompts]),
            [derive_seed(profile.seed, "sample", prompt.id) for prompt in prompts],
            rows=profile.rows,
            temperature=profile.temperature,
            tile=profile.sampling_tile,
            progress=bar.update,
            stop=work.stop,
        )
    (folder / "shards").mkdir(exist_ok=True)
    entries = []
    with work.step(f"{what}: taps", len(prompts), "sequence") as bar:
        for prompt, tokens in zip(prompts, sampled, strict=True):
            name = f"shards/{prompt.id}.safetensors"
            if not (folder / name).exists():
                if work.stop():
                    raise Interrupted("capture was stopped", where=name)
                write_sidecar(folder / name, **canonical_rows(target, tokens))
            entries.append(
                SequenceEntry(
                    id=prompt.id,
                    split="train" if prompt.group == PRETRAINING else prompt.group,  # type: ignore[arg-type]
                    family=prompt.family,
                    rows=profile.rows,
                    gen_start=profile.gen_start,
                    file=FileEntry.of(folder, name),
                )
            )
            bar.update()
    return entries


def _native(work: _Capture, target: Target, prompts: list[Prompt]) -> None:
    """Pre-train the native drafter on sequences of its own, which are not kept."""
    path, profile = work.out / "native.safetensors", work.profile
    if path.exists():
        return
    with tempfile.TemporaryDirectory(prefix="d2-pretraining-") as name:
        folder = Path(name)
        manifest = Manifest(
            namespace=PRETRAINING,
            dim=profile.target.dim,
            vocab_size=profile.target.vocab_size,
            n_taps=len(profile.target.tap_layers),
            target={},
            sequences=tuple(_store(work, target, prompts, folder, PRETRAINING)),
        )
        blocks = D2Blocks(manifest, folder, "train", profile.drafter)
        with work.step("native drafter", profile.pretraining.updates, "update") as bar:
            fresh = initialize(profile.drafter, target.embed, target.head, work.generator("native"))
            native = pretrain(
                fresh,
                blocks,
                profile.pretraining,
                work.generator("pretraining"),
                progress=_show(work, "native drafter", bar),
                stop=work.stop,
            )
    save_weights(path, native, profile.drafter)


def _live(work: _Capture, manifest: Manifest, split: Split) -> dict[str, float]:
    """Serve the native drafter over a split's committed tokens and write its trajectory."""
    path, config = work.out / f"k2/{split}.k2_drafts.jsonl", work.profile.drafter
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        streams = []
        for entry in manifest.split(split):
            sidecar = Sidecar.open(work.out, entry, manifest)
            tokens, taps = sidecar.tensor("tokens").numpy().astype(np.int64), sidecar.tensor("taps").float().numpy()
            streams.append(Stream(entry.id, tokens, taps, entry.gen_start))
        native = work.out / "native.safetensors"
        with work.step(f"live: {split}", 0, "round") as bar:
            decode_live(config, load_weights(native, config), streams, progress=bar.update, stop=work.stop)
        header = K2Header(
            namespace=manifest.namespace,
            split=split,
            block_size=config.block_size,
            live={"native": str(sha256_file(native)), "target": manifest.target["sha256"]},
        )
        write_k2(path, header, (found for stream in streams for found in stream.rounds))
    rounds = [found for lived in K2File.load(path, manifest, work.out).rounds.values() for found in lived]
    return {"rounds": len(rounds), "accepted of two drafts per round": _mean_accepted(rounds)}


def _mean_accepted(rounds: list[K2Round]) -> float:
    return sum(found.accepted for found in rounds) / len(rounds)


def _show(work: _Capture, name: str, bar: Any) -> Callable[[int, float], None]:
    def show(steps: int, loss: float) -> None:
        bar.update(steps)
        bar.set_postfix_str(f"loss={loss:.3f}", refresh=False)
        work.losses[name] = round(loss, 4)

    return show
