"""A target that `transformers` loads from a local folder, or from a GGUF file in an installed package.

The taps are the *input* residuals of chosen layers, which is what `output_hidden_states` calls hidden_states[layer];
the final hidden state is what the LM head is applied to. Nothing is fetched: folders and files are local, code from a
model's folder is never run. A capture converts the model once, to fp32 in target.safetensors, so that later phases need
neither the folder nor the `gguf` package.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional as F

from d2lib.drafter.weights import read_tensors, write_tensors
from d2lib.errors import Refused
from d2lib.files import Record, read_json, sha256_file
from d2lib.lab.corpus import SourceFile
from d2lib.lab.target import TargetOutput
from d2lib.strict import parse_json

PADDING = 1024
"""Rows of an embedding beyond its tokenizer's last id: models are padded to round sizes, never by so many."""

_PROBE = 8
_PROBE_TOLERANCE = 1e-4
_NOT_KEPT = ("quantization_config", "_name_or_path", "_model_name_or_path", "transformers_version")


class HuggingFaceTarget(Record):
    """Where a causal LM is, and which of its layers are tapped."""

    kind: Literal["huggingface"]
    folder: str | None = None
    """A local folder as `save_pretrained` writes it; relative to the run root."""
    package: str | None = None
    """Instead of a folder: an installed package that carries the model. It is found, not imported."""
    gguf_file: str | None = None
    """A GGUF file in the folder or package; it is read through the `gguf` package and dequantised to fp32."""
    tap_layers: tuple[int, ...] | None = Field(default=None, min_length=1, strict=False)
    """Layers whose input residual is tapped, from 0, in the order of concatenation; None: those of a given drafter."""

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.folder is None) == (self.package is None):
            raise ValueError("a target is in a folder or in a package: exactly one of the two must be given")
        if self.package is not None and self.gguf_file is None:
            raise ValueError("a target in a package needs gguf_file")
        if self.tap_layers is not None and len(set(self.tap_layers)) != len(self.tap_layers):
            raise ValueError(f"a layer stands twice in tap_layers; found {self.tap_layers}")
        return self

    def source(self) -> Path:
        """The folder (relative to the run root), or the GGUF file of the package; raises Refused without package."""
        if self.folder is not None:
            return Path(self.folder)
        found = importlib.util.find_spec(str(self.package))
        places = [] if found is None else list(found.submodule_search_locations or [])
        for place in places:
            if (path := Path(place) / str(self.gguf_file)).is_file():
                return path
        raise Refused(
            "the package that carries the target is not installed",
            expected=f"{self.gguf_file} in {self.package}",
            found="no such package" if not places else "no such file in it",
            remedy="make smollm2 installs it",
        )


class HuggingFaceCache:
    """transformers' own growing key-value cache."""

    def __init__(self, config: Any) -> None:
        from transformers import DynamicCache

        self.rows = DynamicCache(config=config)

    @property
    def length(self) -> int:
        """Rows that were run."""
        return int(self.rows.get_seq_length())

    def rewind(self, length: int) -> None:
        """Forget the rows from `length` on."""
        if length < self.length:
            self.rows.crop(length - self.length)


class HuggingFaceModel:
    """A causal LM as a target: a `LanguageModel` (see d2lib.lab.model).

    Args:
        model: from transformers, fp32, in evaluation mode.
        tap_layers: layers whose input is tapped.
        stop_tokens: tokens that end an answer.

    Raises:
        Refused: a layer that the model has not, or logits that are not head · hidden.
    """

    def __init__(self, model: Any, tap_layers: Sequence[int], stop_tokens: Sequence[int] = ()) -> None:
        self.model = model.eval().requires_grad_(False)
        self.stop_tokens = tuple(stop_tokens)
        self.tap_layers = tuple(tap_layers)
        self.config = model.config.get_text_config()
        layers = int(self.config.num_hidden_layers)
        if not all(0 <= layer < layers for layer in self.tap_layers):
            raise Refused(
                "the target has no such layers",
                expected=f"layers in 0 … {layers - 1}",
                found=list(self.tap_layers),
                where="tap_layers",
                remedy="name layers that the model has; a tap is the residual that enters the layer",
            )
        self._probe()

    @property
    def embed(self) -> Tensor:
        """[vocab_size, dim] the token embedding."""
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight

    @property
    def head(self) -> Tensor:
        """[vocab_size, dim] the LM head."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight

    def cache(self, batch: int, capacity: int) -> HuggingFaceCache:
        """An empty cache; it grows with what is put in."""
        return HuggingFaceCache(self.model.config)

    @torch.no_grad()
    def __call__(self, tokens: Tensor, cache: HuggingFaceCache | None = None) -> TargetOutput:
        """Taps [B, L, n·dim] and final hidden states [B, L, dim] of tokens [B, L] int64; see `LanguageModel`."""
        options = {"use_cache": False} if cache is None else {"use_cache": True, "cache": cache.rows}
        output = self.model.base_model(input_ids=tokens, output_hidden_states=True, **options)
        taps = [output.hidden_states[layer] for layer in self.tap_layers]
        return TargetOutput(torch.cat(taps, dim=-1), output.last_hidden_state)

    def logits(self, hidden: Tensor) -> Tensor:
        """head · hidden: [..., dim] to [..., vocab_size]."""
        return F.linear(hidden, self.head)

    def _probe(self) -> None:
        """Refuse a model whose distribution is not softmax(head · hidden): a bias, a scale or a cap on the logits."""
        tokens = torch.arange(_PROBE).unsqueeze(0) % self.head.shape[0]
        with torch.no_grad():
            own, ours = self.model(input_ids=tokens).logits, self.logits(self(tokens).hidden)
        error = float((own - ours).abs().max() / own.abs().max())
        capped = getattr(self.config, "final_logit_softcapping", None) is not None  # does not show in small logits
        if capped or not error <= _PROBE_TOLERANCE:
            raise Refused(
                "the target's logits are not its LM head times its final hidden state",
                expected=f"equal within {_PROBE_TOLERANCE:g} of the largest logit",
                found="a cap on the logits" if capped else f"{error:.2g} apart",
                where=type(self.model).__name__,
                remedy="take a model without a bias, a scale or a cap on its logits",
            )


@dataclass(frozen=True)
class Opened:
    """A model as it was found: the target and its tokenizer."""

    target: HuggingFaceModel
    tokenizer: Any


def open_huggingface(source: Path, tap_layers: Sequence[int], *, rows: int, gguf_file: str | None = None) -> Opened:
    """Load a causal LM and its tokenizer in fp32.

    Args:
        source: a folder, or a GGUF file.
        tap_layers: layers whose input is tapped.
        rows: of the longest sequence that is to be run.
        gguf_file: the GGUF file's name, where source is a folder that holds one.

    Raises:
        Refused: nothing that can be loaded there, layers that the model has not, a tokenizer of another model, a
            context that is too short, weights that are missing.
    """
    transformers: Any = importlib.import_module("transformers")
    if source.is_file():
        source, gguf_file = source.parent, source.name
    if not source.is_dir():
        raise Refused("there is no model", expected="a folder as save_pretrained writes it", found="none", where=source)
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    if gguf_file is not None:
        options["gguf_file"] = gguf_file
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # bars of its own that no log can hold
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                source, dtype=torch.float32, output_loading_info=True, **options
            )
            tokenizer = transformers.AutoTokenizer.from_pretrained(source, **options)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise Refused(
            "transformers cannot load this model",
            expected="a causal LM with its tokenizer",
            found=" ".join(str(error).split())[:300],
            where=source,
        ) from None
    if report["missing_keys"] or report["mismatched_keys"]:
        bad = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
        raise Refused("the model's weights are incomplete", found=f"{len(bad)}: {bad[0]}", where=source)
    target = HuggingFaceModel(model, tap_layers, _stop_tokens(model, tokenizer))
    context = getattr(target.config, "max_position_embeddings", None)
    if context is not None and context < rows:
        raise Refused(
            "the target's context is too short",
            expected=f"at least {rows} rows",
            found=f"max_position_embeddings {context}",
            where=source,
            remedy="capture shorter sequences (rows)",
        )
    _check_tokenizer(tokenizer, target, source)
    return Opened(target, tokenizer)


def _check_tokenizer(tokenizer: Any, target: HuggingFaceModel, where: Path) -> None:
    """Refuse a tokenizer that is not the model's: other ids, or other special tokens than the model's own settings."""
    size, vocabulary = max(tokenizer.get_vocab().values()) + 1, int(target.head.shape[0])
    remedy = "put the tokenizer that the model was trained with beside it"
    if not 0 <= vocabulary - size < PADDING:
        raise Refused(
            "the tokenizer differs from the model's",
            expected=f"{vocabulary} ids, or up to {PADDING - 1} fewer",
            found=f"{size} ids",
            where=where,
            remedy=remedy,
        )
    for name in ("bos_token_id", "eos_token_id"):
        own, known = getattr(tokenizer, name, None), getattr(target.config, name, None)
        known = known if isinstance(known, list) else [known]
        if own is not None and known != [None] and own not in known:
            raise Refused(
                f"the tokenizer differs from the model's: {name}",
                expected=known,
                found=own,
                where=where,
                remedy=remedy,
            )


def _stop_tokens(model: Any, tokenizer: Any) -> tuple[int, ...]:
    given = getattr(model.generation_config, "eos_token_id", None)
    found = {tokenizer.eos_token_id, *(given if isinstance(given, list) else [given])}
    return tuple(sorted(token for token in found if token is not None))


def source_files(source: Path, kind: Literal["target", "drafter"] = "target") -> list[SourceFile]:
    """The files that a model was read from, for the provenance: a GGUF file alone, or all of its folder."""
    if source.is_file():
        return [source_file(kind, f"{kind}/{source.name}", source)]
    files = sorted(path for path in source.rglob("*") if path.is_file())
    return [source_file(kind, f"{kind}/{path.relative_to(source).as_posix()}", path) for path in files]


def source_file(kind: Literal["target", "drafter", "traffic"], name: str, path: Path) -> SourceFile:
    """One file that a case is made from."""
    return SourceFile(kind=kind, name=name, size=path.stat().st_size, sha256=str(sha256_file(path)))


def describe_huggingface(target: HuggingFaceModel) -> dict[str, Any]:
    """The contents of target.json: the model's own configuration and the tapped layers."""
    config = {name: value for name, value in target.model.config.to_dict().items() if name not in _NOT_KEPT}
    return {
        "kind": "huggingface",
        "architecture": type(target.model).__name__,
        "config": json.dumps(config, default=str, sort_keys=True),  # as text: canonical JSON would make 30.0 an integer
        "tap_layers": list(target.tap_layers),
        "stop_tokens": list(target.stop_tokens),
    }


def write_huggingface(path: Path, target: HuggingFaceModel) -> None:
    """Create target.safetensors: the model's tensors in fp32, tied ones once; never overwrites."""
    write_tensors(path, _distinct(target.model))


def load_huggingface(folder: Path) -> HuggingFaceModel:
    """The target that an assembly holds; refuses missing, extra or misshapen tensors."""
    transformers: Any = importlib.import_module("transformers")
    described = read_json(folder / "target.json")
    config = transformers.AutoConfig.for_model(**parse_json(described["config"], where=folder / "target.json"))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    path = folder / "target.safetensors"
    stored, expected = read_tensors(path), _distinct(model)
    wrong = sorted(stored.keys() ^ expected.keys()) or [
        name for name, value in expected.items() if stored[name].shape != value.shape
    ]
    if wrong:
        raise Refused(
            "the target's weights do not fit its sizes",
            expected=f"the {len(expected)} tensors of a {described['architecture']}",
            found=f"{len(wrong)} missing, extra or misshapen; the first: {wrong[0]}",
            where=path,
        )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(stored, strict=False)
    model.tie_weights()
    return HuggingFaceModel(model, described["tap_layers"], described["stop_tokens"])


def _distinct(model: Any) -> dict[str, Tensor]:
    """The state, without names that are tied to another."""
    tied = set(model.all_tied_weights_keys)
    return {name: value for name, value in model.state_dict().items() if name not in tied}
