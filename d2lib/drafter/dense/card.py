"""The card of a dense drafter's folder: what it drafts, what it taps, how it attends; and every reason to refuse it."""

from __future__ import annotations

import math
from itertools import groupby

from d2lib.drafter.dense.config import DenseConfig, shapes
from d2lib.drafter.dense.fields import place_of, tap_offset
from d2lib.drafter.dense.refusals import SHARED, Reason, refusals
from d2lib.drafter.dense.source import KEYS, Source, Store, open_source
from d2lib.drafter.weights_card import CONFIG, Finding, Question, WeightsCard
from d2lib.files import read_json

TRAINERS: dict[Store, str] = {
    "deepspec": "DeepSpec or NeMo AutoModel, flat",
    "specforge": "SpecForge",
    "speculators": "speculators",
}


def inspect(question: Question) -> WeightsCard | None:
    """The card of a folder whose config.json is a dense drafter's; None for anything else.

    Raises:
        Refused: a folder of two layouts, or weights that are damaged or stand there twice.
    """
    config_path = question.config or question.path / CONFIG
    if question.form is not None or not question.path.is_dir() or not config_path.is_file():
        return None
    fields = read_json(config_path)
    if not isinstance(fields, dict) or not any(key in fields for key in KEYS):
        return None
    source = open_source(question.path, question.target, config_path)
    config, reasons = refusals(source)
    return WeightsCard(
        path=question.path,
        form=f"dense drafter in the layout of {TRAINERS[source.store]}",
        config=config,
        tensors=tuple(tensor for _, tensor in sorted(source.tensors.items())),
        findings=tuple(_finding(reason) for reason in reasons),
        unused=tuple(sorted(source.dropped)),
        facts=(*(_facts(source, config) if config is not None else ()), ("target", _target(source))),
    )


def _finding(reason: Reason) -> Finding:
    return Finding(
        "refused", reason.field, _said(reason.expected), _said(reason.found), why=reason.why, remedy=reason.remedy
    )


def _said(value: object) -> str:
    return "nothing" if value is None else str(value)


def _facts(source: Source, c: DenseConfig) -> list[tuple[str, str]]:
    return [
        ("drafts", _drafts(c)),
        ("taps", _taps(source, c)),
        ("layers", _layers(c)),
        ("attention", _attention(c)),
        ("rope", _rope(c)),
        ("sizes", f"dim {c.dim:,}, inner {c.inter_dim:,}, vocabulary {c.vocab_size:,}, norm epsilon {c.norm_eps:g}"),
        ("Markov head", f"{c.markov_head_type}, rank {c.markov_rank}" if c.markov_rank else "none: DFlash"),
        ("confidence", _confidence(c)),
        ("parameters", _parameters(c)),
        ("target's own", _shared(source)),
    ]


def _drafts(c: DenseConfig) -> str:
    layout = {
        "anchor_first": "anchor first: slot i is row i",
        "one_plus_n": "1+N: slot i is row i + 1, row 0 drafts nothing",
    }[c.layout]
    return f"K = {c.block_size} slots from {c.n_rows} query rows, {layout}; mask token {c.mask_token_id}"


def _taps(source: Source, c: DenseConfig) -> str:
    inputs = ", ".join(map(str, c.target_layer_ids))
    outputs = ", ".join(str(tap - 1) for tap in c.target_layer_ids)
    stored = "inputs" if tap_offset(source.store) == 0 else "outputs"
    depth = f"of {c.n_target_layers} layers" if source.target or source.own("num_target_layers") else "of unknown depth"
    return (
        f"inputs of the target's layers {inputs} = outputs of layers {outputs}; {depth}; "
        f"{place_of(source, 'target_layer_ids')} counts {stored}"
    )


def _layers(c: DenseConfig) -> str:
    """Runs of like layers."""
    kinds = [
        ("full" if kind == "full_attention" else f"sliding, window {c.sliding_window}", causal)
        for kind, causal in zip(c.layer_types, c.causal, strict=True)
    ]
    runs, start = [], 0
    for (kind, causal), group in groupby(kinds):
        end = start + len(list(group)) - 1
        runs.append(f"{start}{f'-{end}' if end > start else ''} {kind}, {'' if causal else 'not '}causal in the block")
        start = end + 1
    return f"{c.n_layers}: " + "; ".join(runs)


def _attention(c: DenseConfig) -> str:
    biases = "with biases" if c.attention_bias else "no biases"
    return f"{c.n_heads} query heads over {c.n_kv_heads} KV heads of {c.head_dim} channels, {biases}"


def _rope(c: DenseConfig) -> str:
    said = [f"{c.rope.type}, base {c.rope.theta:g}"]
    if c.rope.type != "default":
        said.append(f"factor {c.rope.factor:g} over {c.rope_original:,} positions")
    return ", ".join([*said, f"{c.max_position_embeddings:,} positions in all"])


def _confidence(c: DenseConfig) -> str:
    if not c.confidence:
        return "none"
    return "on the output and the Markov embedding" if c.confidence_with_markov else "on the output"


def _parameters(c: DenseConfig) -> str:
    counts = {"layers": 0, "taps and norms": 0, "heads": 0}
    for name, shape in shapes(c).items():
        if name not in SHARED:
            part = "layers" if name.startswith("layers.") else "heads" if "_head." in name else "taps and norms"
            counts[part] += math.prod(shape)
    parts = ", ".join(f"{part} {count:,}" for part, count in counts.items())
    return f"{sum(counts.values()):,} of its own: {parts}"


def _shared(source: Source) -> str:
    stored = [name for name in SHARED if name in source.tensors]
    return f"{' and '.join(stored)} stored too" if stored else "embedding and LM head not stored, taken from the target"


def _target(source: Source) -> str:
    if source.target is None:
        return "not compared (name its folder with --target)"
    t = source.target
    return f"{t.folder}: vocabulary {t.vocab_size:,}, dim {t.dim:,}, {t.n_layers} layers, by its headers"
