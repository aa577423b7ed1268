"""Capture: an assembly made on the spot, from a target and prompts to the live drafter's trajectories.

The target is trained here on the text of the installation (a byte LM), or is a causal LM that `transformers` loads
from a local folder or package, with prompts from data files. Or target, drafter and conversations are all given (see
`GivenProfile`): then the native drafter is the one that is given, and prompts have any length. Every file is written
once, complete or not at all. provenance.json stands first and says what the case is made from; a capture that was
interrupted goes on in the same folder from the files that are finished, and only with the same sources and parameters.
"""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Self, TypeAlias

import numpy as np
import torch
from pydantic import Discriminator, Field, Tag, model_validator
from safetensors import safe_open

from d2lib.data.assembly import K2_NAMES, SCORED, ScoredSplit
from d2lib.data.blocks import D2Blocks
from d2lib.data.k2 import K2File, K2Header, K2Round, write_k2
from d2lib.data.manifest import FileEntry, Manifest, SequenceEntry, Split
from d2lib.data.sidecar import Sidecar, write_sidecar
from d2lib.data.traffic import Traffic
from d2lib.drafter.config import AnyDrafterConfig, DrafterConfig
from d2lib.drafter.family import Stored
from d2lib.drafter.weights import Weights, initialize, load_weights, save_weights, write_tensors
from d2lib.errors import Interrupted, Refused
from d2lib.files import Record, sha256_file, write_json
from d2lib.lab.corpus import Corpus, Kind, SourceFile, read_corpus
from d2lib.lab.decode import Stream, decode_live
from d2lib.lab.given import DrafterFolder, open_drafter
from d2lib.lab.hf_target import (
    HuggingFaceTarget,
    Opened,
    describe_huggingface,
    open_huggingface,
    source_file,
    source_files,
    write_huggingface,
)
from d2lib.lab.model import LanguageModel, load_model
from d2lib.lab.pretrain import PretrainingConfig, pretrain
from d2lib.lab.prompt_files import draw_prompt_files, prompt_sources
from d2lib.lab.prompts import PRETRAINING, Group, Prompt, draw_prompts
from d2lib.lab.replay import canonical_rows
from d2lib.lab.sampling import derive_seed, ended_rows, sample
from d2lib.lab.target import Target, TargetConfig
from d2lib.lab.traffic_prompts import Dealt, deal_traffic, draw_traffic
from d2lib.lab.training import TargetTraining, train_target
from d2lib.progress import bar as progress_bar


def _kind(value: Any) -> str:
    """Which kind of target is described; without a `kind` it is the byte LM."""
    kind = value.get("kind", "bytes") if isinstance(value, dict) else getattr(value, "kind", "bytes")
    return str(kind)


class _Profile(Record):
    """What every capture has."""

    namespace: str = Field(min_length=1)
    seed: int = 23
    threads: int = Field(default=2, ge=1)
    temperature: float = Field(gt=0)


class GivenProfile(_Profile):
    """A case of a target, a drafter and conversations that are all given."""

    target: HuggingFaceTarget
    """In a folder; its tap_layers may be left out: they are the drafter's."""
    drafter: DrafterFolder
    traffic: Traffic
    sampling_tile: int = Field(default=1, gt=0)
    """Prompts of one length that are answered together."""

    @property
    def span(self) -> tuple[int, int]:
        """Tokens of an answer, at least and at most."""
        return self.traffic.least_answer, self.traffic.longest_answer

    @model_validator(mode="after")
    def _in_folder(self) -> Self:
        if self.target.folder is None or self.target.gguf_file is not None:
            raise ValueError("a given drafter shares its target's stored tensors: name the target's folder")
        return self

    def inputs(self) -> dict[str, Path]:
        """See CaptureProfile."""
        files = {f"traffic-{number}": Path(file.path) for number, file in enumerate(self.traffic.files, 1)}
        return {"target": self.target.source(), "drafter": Path(self.drafter.folder), **files}


class CaptureProfile(_Profile):
    """Every size of a case: of a byte LM that is trained here, or of a Hugging Face target with prompt files."""

    distributions: tuple[str, ...] = Field(default=("d2-workbench",), strict=False)
    """Whose licences, and those of what they require, are the legal text."""
    least_general: int = Field(default=1_000_000, ge=0)
    least_legal: int = Field(default=60_000, ge=0)
    """Bytes of text without which there is no case."""
    target: Annotated[
        Annotated[TargetConfig, Tag("bytes")] | Annotated[HuggingFaceTarget, Tag("huggingface")], Discriminator(_kind)
    ]
    target_training: TargetTraining | None = None
    """Of the byte LM."""
    prompts: str | None = None
    """Folder of prompt files for a Hugging Face target (see d2lib.lab.prompt_files); relative to the run root."""
    least_rows: int | None = None
    """Rows of a Hugging Face target's sequence at least; where the answer ends sooner, its end is not drawn."""
    drafter: AnyDrafterConfig
    pretraining: PretrainingConfig
    pretraining_sequences: int = Field(gt=0)
    """Sampled general sequences that the native drafter learns from."""
    gen_start: int = Field(default=128, gt=0)
    """Rows of context: tokens (bytes) of a prompt."""
    rows: int = Field(gt=0)
    """Rows of a sequence, context included; at most so many where an answer can end."""
    sampling_tile: int = Field(default=66, gt=0)
    sequences: dict[Split, dict[Kind, int]]
    """Split → kind of text → number of sequences."""

    @property
    def span(self) -> tuple[int, int]:
        """Generated tokens of a sequence, at least (before gen_start: any) and at most."""
        return (self.least_rows or 0) - self.gen_start, self.rows - self.gen_start

    @model_validator(mode="after")
    def _fits(self) -> Self:
        bytes_ = isinstance(self.target, TargetConfig)
        for name, wanted in (("target_training", bytes_), ("prompts", not bytes_), ("least_rows", not bytes_)):
            if (getattr(self, name) is not None) != wanted:
                raise ValueError(f"{name} must {'' if wanted else 'not '}be given for this kind of target")
        for name in ("dim", "vocab_size"):
            if bytes_ and getattr(self.target, name) != getattr(self.drafter, name):
                raise ValueError(f"target and drafter must have one {name}")
        if self.target.tap_layers != self.drafter.target_layer_ids:
            raise ValueError("the drafter's target_layer_ids must be the target's tap_layers")
        least = self.rows if self.least_rows is None else self.least_rows
        if not self.gen_start + max(2, self.drafter.block_size + 1) <= least <= self.rows:
            raise ValueError(f"rows must be at least gen_start + block_size + 1; found {least}")
        if set(self.sequences) != {"train", *SCORED}:
            raise ValueError(f"sequences must name train and {', '.join(SCORED)}")
        return self

    def inputs(self) -> dict[str, Path]:
        """Label → what the case is made from besides the installation, relative to the run root: to be declared.

        Raises Refused when the package of the target is not installed.
        """
        if isinstance(self.target, TargetConfig):
            return {}
        return {"target": self.target.source(), "prompts": Path(str(self.prompts))}


AnyProfile: TypeAlias = CaptureProfile | GivenProfile


def parse_profile(value: Any) -> AnyProfile:
    """A capture profile of either kind: with `traffic`, all is given; raises Refused and names the wrong field."""
    kind = GivenProfile if isinstance(value, dict) and "traffic" in value else CaptureProfile
    return kind.parse(value, "profile", message="the capture profile is wrong")


@dataclass
class _Capture:
    """One capture at work: profile, drafter, folder, what stops it, and how long each step took."""

    profile: AnyProfile
    drafter: DrafterConfig
    out: Path
    progress: bool
    stop: Callable[[], bool]
    inputs: Mapping[str, Path]
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
        try:
            write_json(self.out / name, value, once=True)
        except Refused:
            raise Refused(
                "this folder holds another capture",
                expected="the same text, parameters and versions",
                found="others",
                where=self.out / name,
                remedy="capture into a new run",
            ) from None


def capture(
    profile: AnyProfile,
    out: Path,
    *,
    progress: bool = False,
    stop: Callable[[], bool] = lambda: False,
    inputs: Mapping[str, Path] | None = None,
) -> dict[str, Any]:
    """Make an assembly.

    Args:
        profile: the case's sizes.
        out: the assembly's folder, new or left by an interrupted capture of the same case.
        progress: show bars.
        stop: asked often; when it says yes, Interrupted is raised and the finished files stay.
        inputs: where the profile's `inputs` are, if they are not where it says.

    Returns: what was made, as plain data: sources, counts, losses, accepted drafts of the live run, seconds of each
        step.

    Raises:
        Refused: too little text, a target that does not fit, or the folder holds another capture.
    """
    inputs = profile.inputs() if inputs is None else inputs
    given = None
    if isinstance(profile, GivenProfile):  # what does not fit is refused before anything is made
        given = _open_given(profile, inputs)
        drafter: DrafterConfig = given.drafter.config
    else:
        drafter = profile.drafter
    out.mkdir(parents=True, exist_ok=True)
    work = _Capture(profile, drafter, out, progress, stop, inputs)
    threads = torch.get_num_threads()
    torch.set_num_threads(profile.threads)
    try:
        case = _begin(work, given)
        manifest = _sequences(work, case)
        _native(work, case)
        live = {split: _live(work, manifest, split) for split in SCORED}
    finally:
        torch.set_num_threads(threads)
    return {
        "traffic" if given else "text": case.text,
        "counts": manifest.counts().as_dict(),
        "losses": work.losses,
        "live": live,
        "seconds": {name: round(value, 2) for name, value in work.seconds.items()},
    }


@dataclass(frozen=True)
class _Case:
    """What sampling needs: the target and its name, and the prompts; `text` says what they come from.

    native: the drafter's weights, made or read.
    """

    target: LanguageModel
    name: str
    prompts: dict[Group, list[Prompt]]
    text: dict[str, Any]
    native: Callable[[_Case], Weights]


@dataclass(frozen=True)
class _Given:
    """A drafter that fits its target, and requests that fit their splits."""

    drafter: Stored
    dealt: Dealt


def _open_given(profile: GivenProfile, inputs: Mapping[str, Path]) -> _Given:
    traffic = profile.traffic
    rows = traffic.longest_prompt + traffic.longest_answer
    drafter = open_drafter(inputs["drafter"], inputs["target"], profile.target.tap_layers, rows, traffic.least_answer)
    paths = [inputs[label] for label in profile.inputs() if label.startswith("traffic-")]
    return _Given(drafter, deal_traffic(traffic, paths, profile.seed))


def _begin(work: _Capture, given: _Given | None) -> _Case:
    profile = work.profile
    if isinstance(profile, CaptureProfile):
        begin = _begin_bytes if isinstance(profile.target, TargetConfig) else _begin_huggingface
        return begin(work, profile)
    assert given is not None
    return _begin_given(work, profile, given)


def _counts(profile: CaptureProfile) -> dict[Group, dict[Kind, int]]:
    """Group → kind of text → prompts, those for the native drafter too."""
    counts: dict[Group, dict[Kind, int]] = {split: profile.sequences[split] for split in profile.sequences}
    return counts | {PRETRAINING: {"general": profile.pretraining_sequences}}


def _begin_bytes(work: _Capture, profile: CaptureProfile) -> _Case:
    with work.step("text", 1, "corpus"):
        corpus = read_corpus(
            profile.distributions, least_general=profile.least_general, least_legal=profile.least_legal
        )
        _describe(work, corpus.sources, profile.target.model_dump(mode="json"))
    _train_target(work, profile, corpus)
    prompts = draw_prompts(corpus, _counts(profile), profile.gen_start, profile.seed)
    text = {kind: {"bytes": corpus.size(kind), "families": len(getattr(corpus, kind))} for kind in ("general", "legal")}
    return _Case(load_model(work.out), "lab byte LM", prompts, text, lambda case: _pretrained(work, profile, case))


def _begin_huggingface(work: _Capture, profile: CaptureProfile) -> _Case:
    """A Hugging Face target with prompt files."""
    folder, source, counts = work.inputs["prompts"], work.inputs["target"], _counts(profile)
    assert isinstance(profile.target, HuggingFaceTarget)
    with work.step("target", 1, "model"):
        opened = open_huggingface(
            source, profile.drafter.target_layer_ids, rows=profile.rows, gguf_file=profile.target.gguf_file
        )
        _check_sizes(work, opened)
        prompts = draw_prompt_files(folder, counts, opened.tokenizer, profile.gen_start)
        target = _convert(work, opened, [*prompt_sources(folder, counts), *source_files(source)])
    families: dict[str, set[str]] = {}
    for prompt in (prompt for group in prompts.values() for prompt in group):
        families.setdefault(prompt.kind, set()).add(prompt.family)
    text = {kind: {"families": len(names)} for kind, names in families.items()}
    name = type(opened.target.model).__name__
    return _Case(target, name, prompts, text, lambda case: _pretrained(work, profile, case))


def _begin_given(work: _Capture, profile: GivenProfile, given: _Given) -> _Case:
    """A Hugging Face target with a drafter and conversations of others."""
    source, traffic = work.inputs["target"], profile.traffic
    with work.step("target", 1, "model"):
        rows = traffic.longest_prompt + traffic.longest_answer
        opened = open_huggingface(source, work.drafter.target_layer_ids, rows=rows)
        _check_sizes(work, opened)
        prompts, text = draw_traffic(given.dealt, traffic, opened.tokenizer)
        files = [path for label, path in work.inputs.items() if label.startswith("traffic-")]
        sources = [
            *(source_file("traffic", f"traffic-{number}/{path.name}", path) for number, path in enumerate(files, 1)),
            *source_files(source),
            *source_files(given.drafter.folder, "drafter"),
        ]
        target = _convert(work, opened, sources)
    return _Case(target, type(opened.target.model).__name__, prompts, text, lambda _: given.drafter.read())


def _check_sizes(work: _Capture, opened: Opened) -> None:
    found = {"dim": opened.target.head.shape[1], "vocab_size": opened.target.head.shape[0]}
    for name, value in found.items():
        if getattr(work.drafter, name) != value:
            raise Refused(
                f"target and drafter must have one {name}",
                expected=value,
                found=getattr(work.drafter, name),
                where=f"drafter.{name}",
            )


def _convert(work: _Capture, opened: Opened, sources: Sequence[SourceFile]) -> LanguageModel:
    """Keep the model and its tokenizer in the assembly, and go on with what was kept."""
    versions = {"transformers": importlib.metadata.version("transformers")}
    _describe(work, sources, describe_huggingface(opened.target), versions)
    path, tokenizer = work.out / "target.safetensors", work.out / "tokenizer"
    if not path.exists():
        write_huggingface(path, opened.target)
    if not tokenizer.exists():
        working = work.out / ".tokenizer.part"
        opened.tokenizer.save_pretrained(working)
        working.rename(tokenizer)
    return load_model(work.out)


def _describe(
    work: _Capture, sources: Sequence[SourceFile], target: dict[str, Any], versions: Mapping[str, str] | None = None
) -> None:
    """provenance.json, target.json and drafter.json: what the case is made from."""
    profile = work.profile
    work.once(
        "provenance.json",
        {
            "schema_version": 1,
            "namespace": profile.namespace,
            "profile": profile.model_dump(mode="json", exclude_none=True),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "numpy": np.__version__,
                "machine": platform.machine(),
                **(versions or {}),
            },
            "sources": [source.model_dump(mode="json") for source in sources],
        },
    )
    work.once("target.json", target)
    work.once("drafter.json", work.drafter.model_dump(mode="json"))


def _train_target(work: _Capture, profile: CaptureProfile, corpus: Corpus) -> None:
    """Every family of text, held-out ones too: a target knows the world, it is the drafter that is adapted."""
    path, training, config = work.out / "target.safetensors", profile.target_training, profile.target
    if path.exists() or training is None or not isinstance(config, TargetConfig):
        return
    with work.step("target", training.steps, "step") as bar:
        target = Target(config, work.generator("target"))
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


def _sequences(work: _Capture, case: _Case) -> Manifest:
    """Sample every split's sequences and store the target's canonical forward over each."""
    profile, out = work.profile, work.out
    wanted = [prompt for group in case.prompts if group != PRETRAINING for prompt in case.prompts[group]]
    entries = _store(work, case, wanted, out, "sequences")
    manifest = Manifest(
        namespace=profile.namespace,
        dim=work.drafter.dim,
        vocab_size=work.drafter.vocab_size,
        n_taps=work.drafter.n_taps,
        target={
            "name": case.name,
            "config": str(sha256_file(out / "target.json")),
            "sha256": str(sha256_file(out / "target.safetensors")),
        },
        sequences=tuple(entries),
    )
    write_json(out / "MANIFEST.json", manifest.model_dump(mode="json"), once=True)
    return manifest


def _store(work: _Capture, case: _Case, prompts: list[Prompt], folder: Path, what: str) -> list[SequenceEntry]:
    """Sample and store tile by tile, so that an interrupted capture loses one tile at most."""
    profile, tile = work.profile, work.profile.sampling_tile
    least, span = profile.span
    (folder / "shards").mkdir(parents=True, exist_ok=True)
    shards = {prompt.id: f"shards/{prompt.id}.safetensors" for prompt in prompts}
    with work.step(f"{what}: sampling and taps", 2 * len(prompts) * span, "row") as bar:
        for part in _tiles(prompts, tile):
            context = len(part[0].tokens)
            if all((folder / shards[prompt.id]).exists() for prompt in part):
                bar.update(2 * len(part) * span)
                continue
            sampled = sample(
                case.target,
                torch.stack([prompt.tokens for prompt in part]),
                [derive_seed(profile.seed, "sample", prompt.id) for prompt in part],
                rows=context + span,
                temperature=profile.temperature,
                tile=tile,
                progress=bar.update,
                stop=work.stop,
                stop_tokens=case.target.stop_tokens,
                least=max(0, context + least),
            )
            for prompt, tokens in zip(part, sampled, strict=True):
                if work.stop():
                    raise Interrupted("capture was stopped", where=shards[prompt.id])
                if not (folder / shards[prompt.id]).exists():
                    rows = ended_rows(tokens, context, case.target.stop_tokens)
                    write_sidecar(folder / shards[prompt.id], **canonical_rows(case.target, tokens[:rows]))
                bar.update(span)
    return [_entry(folder, prompt, shards[prompt.id]) for prompt in prompts]


def _tiles(prompts: Sequence[Prompt], tile: int) -> Iterator[list[Prompt]]:
    """Prompts in their order, up to `tile` of one length at a time."""
    for _, alike in groupby(prompts, key=lambda prompt: len(prompt.tokens)):
        members = list(alike)
        yield from (members[start : start + tile] for start in range(0, len(members), tile))


def _entry(folder: Path, prompt: Prompt, name: str) -> SequenceEntry:
    with safe_open(folder / name, framework="pt") as stored:
        rows = stored.get_slice("tokens").get_shape()[0]
    return SequenceEntry(
        id=prompt.id,
        split="train" if prompt.group == PRETRAINING else prompt.group,  # type: ignore[arg-type]
        family=prompt.family,
        rows=rows,
        gen_start=len(prompt.tokens),
        file=FileEntry.of(folder, name),
    )


def _native(work: _Capture, case: _Case) -> None:
    """native.safetensors, from the drafter's folder or pre-trained here."""
    path = work.out / "native.safetensors"
    if path.exists():
        load_weights(path, work.drafter)
    else:
        save_weights(path, case.native(case), work.drafter)
    shutil.rmtree(_pretraining_folder(work), ignore_errors=True)


def _pretraining_folder(work: _Capture) -> Path:
    """Scratch, which is kept until the native drafter is finished."""
    return work.out / f".{PRETRAINING}.part"


def _pretrained(work: _Capture, profile: CaptureProfile, case: _Case) -> Weights:
    """Pre-train the native drafter on sequences of its own."""
    folder = _pretraining_folder(work)
    manifest = Manifest(
        namespace=PRETRAINING,
        dim=profile.drafter.dim,
        vocab_size=profile.drafter.vocab_size,
        n_taps=profile.drafter.n_taps,
        target={},
        sequences=tuple(_store(work, case, case.prompts[PRETRAINING], folder, PRETRAINING)),
    )
    blocks = D2Blocks(manifest, folder, "train", profile.drafter)
    with work.step("native drafter", profile.pretraining.updates, "update") as bar:
        fresh = initialize(profile.drafter, case.target.embed, case.target.head, work.generator("native"))
        return pretrain(
            fresh,
            blocks,
            profile.pretraining,
            work.generator("pretraining"),
            progress=_show(work, "native drafter", bar),
            stop=work.stop,
            boundary=folder / "native.pt",
        )


def _live(work: _Capture, manifest: Manifest, split: ScoredSplit) -> dict[str, float]:
    """Serve the native drafter over a split's committed tokens and write its trajectory."""
    path, config, native = work.out / K2_NAMES[split], work.drafter, work.out / "native.safetensors"
    header = K2Header(
        namespace=manifest.namespace,
        split=split,
        block_size=config.block_size,
        live={"native": str(sha256_file(native)), "target": manifest.target["sha256"]},
    )
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        streams = []
        for entry in manifest.split(split):
            sidecar = Sidecar.open(work.out, entry, manifest)
            tokens, taps = sidecar.tensor("tokens").numpy().astype(np.int64), sidecar.tensor("taps").float().numpy()
            streams.append(Stream(entry.id, tokens, taps, entry.gen_start))
        with work.step(f"live: {split}", 0, "round") as bar:
            decode_live(config, load_weights(native, config), streams, progress=bar.update, stop=work.stop)
        write_k2(path, header, (found for stream in streams for found in stream.rounds))
    lived = K2File.load(path, manifest, work.out)
    if lived.header != header:
        raise Refused("a live trajectory is of another run", expected=header.live, found=lived.header.live, where=path)
    rounds = [found for chain in lived.rounds.values() for found in chain]
    return {"rounds": len(rounds), "accepted of two drafts per round": _mean_accepted(rounds)}


def _mean_accepted(rounds: list[K2Round]) -> float:
    return sum(found.accepted for found in rounds) / len(rounds)


def _show(work: _Capture, name: str, bar: Any) -> Callable[[int, float], None]:
    def show(steps: int, loss: float) -> None:
        bar.update(steps)
        bar.set_postfix_str(f"loss={loss:.3f}", refresh=False)
        work.losses[name] = round(loss, 4)

    return show
