"""A layout's configuration fields as a DenseConfig, and a DenseConfig as a layout's fields.

Reading believes nothing that a trainer leaves to a default on which sources disagree: such a field is missing then, and
`DenseConfig` refuses it. What a file says twice must agree; `d2lib.drafter.dense.refusals` sees to that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from d2lib.drafter.dense.config import DenseConfig, Rope
from d2lib.drafter.dense.source import DRAFT_OF_SPECFORGE, SIZES_OF_SPECULATORS, Source, Store
from d2lib.errors import Refused

SIZES = {
    "dim": "hidden_size",
    "vocab_size": "vocab_size",
    "n_layers": "num_hidden_layers",
    "inter_dim": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "norm_eps": "rms_norm_eps",
    "attention_bias": "attention_bias",
    "max_position_embeddings": "max_position_embeddings",
}
"""DenseConfig's field → its name among the fields of the layers."""

OWN = {
    "block_size": "block_size",
    "mask_token_id": "mask_token_id",
    "markov_rank": "markov_rank",
    "markov_head_type": "markov_head_type",
    "confidence": "enable_confidence_head",
    "confidence_with_markov": "confidence_head_with_markov",
    "n_target_layers": "num_target_layers",
}
"""DenseConfig's field → its name among the drafter's own fields."""

MAX_POSITIONS = 32768
"""max_position_embeddings where a file has none: Qwen3Config's. Yarn, whose frequencies need it, asks for it."""

_CAUSAL = {"specforge": f"{DRAFT_OF_SPECFORGE}.causal", "speculators": "sliding_window_non_causal"}

ROPE = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "attention_factor",
        "truncate",
    ),
}
"""Rope type → the fields that it reads."""


def taps_name(store: Store) -> str:
    """The layout's field of tapped layers."""
    return "aux_hidden_state_layer_ids" if store == "speculators" else "target_layer_ids"


def tap_offset(store: Store) -> int:
    """What to add to a stored number of a tap: speculators counts a layer's input, the others its output."""
    return 0 if store == "speculators" else 1


def place_of(source: Source, field: str) -> str:
    """Where the layout has a field of DenseConfig, for people."""
    if field in SIZES or field in ("layer_types", "sliding_window"):
        return source.size_place(SIZES.get(field, field))
    if field == "rope":
        return rope_place(source)
    if field == "causal":
        explicit = source.places("is_causal") or source.store == "deepspec"
        return "is_causal" if explicit else _CAUSAL[source.store]
    if field == "layout":
        return f"{DRAFT_OF_SPECFORGE}.projector_type" if source.store == "specforge" else "sample_from_anchor"
    name = taps_name(source.store) if field == "target_layer_ids" else OWN.get(field, field)
    places = [place for place, _ in source.places(name)]
    if places or source.store != "specforge" or name in ("block_size", "num_target_layers"):
        return places[0] if places else name
    return f"{DRAFT_OF_SPECFORGE}.{name}"


def read_fields(source: Source) -> dict[str, Any]:
    """DenseConfig's fields as far as the file has them, unchecked; what is not there is left out."""
    ours: dict[str, Any] = {field: source.sizes.get(name) for field, name in SIZES.items()}
    ours |= {field: source.own(name) for field, name in OWN.items()}
    ours["rope"] = _rope(source)
    if ours["max_position_embeddings"] is None and ours["rope"].get("type") != "yarn":
        ours["max_position_embeddings"] = MAX_POSITIONS
    ours["layer_types"] = _layer_types(source)
    if isinstance(ours["layer_types"], list) and "sliding_attention" in ours["layer_types"]:
        ours["sliding_window"] = source.sizes.get("sliding_window")
    ours["causal"] = _causal(source, ours["layer_types"])
    ours["layout"] = _layout(source)
    if ours["layout"] == "one_plus_n" and type(ours["block_size"]) is int:
        ours["block_size"] -= 1
    ours["target_layer_ids"] = _taps(source)
    if ours["n_target_layers"] is None:
        ours["n_target_layers"] = _depth(source, ours["target_layer_ids"])
    ours |= _heads(source)
    return {field: value for field, value in ours.items() if value is not None}


def rope_fields(source: Source) -> Mapping[str, Any]:
    """The rope's own fields: `rope_parameters`, or the older `rope_scaling`."""
    value = source.sizes.get(_rope_name(source))
    return value if isinstance(value, dict) else {}


def rope_place(source: Source) -> str:
    """Where the rope's own fields stand, or should."""
    return source.size_place(_rope_name(source))


def _rope_name(source: Source) -> str:
    older = not isinstance(source.sizes.get("rope_parameters"), dict) and isinstance(
        source.sizes.get("rope_scaling"), dict
    )
    return "rope_scaling" if older else "rope_parameters"


def _rope(source: Source) -> dict[str, Any]:
    stored = rope_fields(source)
    kind = stored.get("rope_type", stored.get("type", "default"))
    read = {name: stored.get(name) for name in _choice(ROPE, kind) or ()}
    if read.get("original_max_position_embeddings", 0) is None:
        read["original_max_position_embeddings"] = source.sizes.get("original_max_position_embeddings")
    rope = {"type": kind, "theta": stored.get("rope_theta", source.sizes.get("rope_theta")), **read}
    return {name: value for name, value in rope.items() if value is not None}


def _layer_types(source: Source) -> Any:
    """The layers' kinds; all full where the file has no list and no window is in use."""
    kinds, layers = source.sizes.get("layer_types"), source.sizes.get("num_hidden_layers")
    if kinds is not None or source.sizes.get("use_sliding_window"):
        return kinds
    if type(layers) is int and 0 < layers <= len(source.tensors):  # every layer has tensors
        return ["full_attention"] * layers
    return None


def _causal(source: Source, kinds: Any) -> list[Any] | None:
    if not isinstance(kinds, list):
        return None
    explicit = source.own("is_causal", source.draft.get("causal"))
    if explicit is not None:
        return [explicit] * len(kinds)
    flag = source.fields.get("sliding_window_non_causal", False) if source.store == "speculators" else False
    sliding = not flag if isinstance(flag, bool) or flag is None else flag  # anything else is left to be refused
    return [kind == "sliding_attention" and sliding for kind in kinds]


def _layout(source: Source) -> Any:
    if source.store == "specforge":
        return _choice({"dspark": "anchor_first", "dflash": "one_plus_n"}, source.draft.get("projector_type", "dflash"))
    absent = True if source.store == "deepspec" else None
    if source.fields.get("speculators_model_type") == "dflash":
        absent = False
    return _choice({True: "anchor_first", False: "one_plus_n"}, source.own("sample_from_anchor", absent))


def _choice(table: Mapping[Any, Any], value: object) -> Any:
    """A table's entry for a value of a file, which need not be one that a table can have."""
    return table.get(value) if isinstance(value, str | bool) else None


def _taps(source: Source) -> Any:
    taps, offset = source.own(taps_name(source.store)), tap_offset(source.store)
    if isinstance(taps, list) and all(type(tap) is int for tap in taps):
        return [tap + offset for tap in taps]
    return taps


def _depth(source: Source, taps: Any) -> int | None:
    """The target's layers; without a target at hand, as many as the taps need."""
    if source.target is not None:
        return source.target.n_layers
    whole = isinstance(taps, list) and taps and all(type(tap) is int for tap in taps)
    return max(1, *(tap + 1 for tap in taps)) if whole else None


def _heads(source: Source) -> dict[str, Any]:
    """Markov and confidence heads; the defaults are those of the layout's trainer."""
    dspark = source.fields.get("speculators_model_type") == "dspark"
    rank = source.own("markov_rank", None if dspark else 0)
    kind = source.own("markov_head_type", None if source.store == "deepspec" else "vanilla")
    confidence = source.own("enable_confidence_head", dspark)
    beside = source.own("confidence_head_with_markov", {"deepspec": None, "specforge": False}.get(source.store, True))
    return {
        "markov_rank": rank,
        "markov_head_type": "vanilla" if rank == 0 else kind,
        "confidence": confidence,
        "confidence_with_markov": beside if confidence else False,
    }


def write_fields(config: DenseConfig, store: Store, dtype: str) -> dict[str, Any]:
    """A layout's config.json.

    Args:
        config: the drafter's.
        store: the layout.
        dtype: the stored tensors' type, as torch names it: bfloat16, float16 or float32.

    Raises:
        Refused: the layout has no field for what the configuration says.
    """
    if store == "specforge":
        return _specforge(config, dtype)
    return _speculators(config, dtype) if store == "speculators" else _deepspec(config, dtype)


def _deepspec(config: DenseConfig, dtype: str) -> dict[str, Any]:
    rows = config.n_rows
    return {
        "architectures": ["Qwen3DSparkModel"],
        "dtype": dtype,
        **_sizes(config),
        **_explicit_causal(config, "is_causal"),
        "block_size": rows,
        "mask_token_id": config.mask_token_id,
        "num_target_layers": config.n_target_layers,
        "target_layer_ids": _stored_taps(config, "deepspec"),
        "sample_from_anchor": config.layout == "anchor_first",
        **_stored_heads(config),
    }


def _specforge(config: DenseConfig, dtype: str) -> dict[str, Any]:
    anchor_first = config.layout == "anchor_first"
    return {
        "architectures": ["DSparkDraftModel" if anchor_first else "DFlashDraftModel"],
        "dtype": dtype,
        **_sizes(config),
        "block_size": config.n_rows,
        "num_target_layers": config.n_target_layers,
        DRAFT_OF_SPECFORGE: {
            "projector_type": "dspark" if anchor_first else "dflash",
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": _stored_taps(config, "specforge"),
            **_explicit_causal(config, "causal"),
            **_stored_heads(config),
        },
    }


def _speculators(config: DenseConfig, dtype: str) -> dict[str, Any]:
    """speculators has no in-block causal full layers, and one switch for all sliding ones."""
    sliding = {causal for kind, causal in zip(config.layer_types, config.causal, strict=True) if "sliding" in kind}
    if _causal_by_kind(config, sliding != {False}) != config.causal:
        raise _unsayable(config, "speculators")
    dspark = config.markov_rank > 0 or config.confidence
    kind = "dspark" if dspark else "dflash"
    return {
        "architectures": ["DSparkDraftModel" if dspark else "DFlashDraftModel"],
        "speculators_model_type": kind,
        "dtype": dtype,
        SIZES_OF_SPECULATORS: _sizes(config),
        "draft_vocab_size": config.vocab_size,
        "target_hidden_size": None,
        "block_size": config.n_rows,
        "mask_token_id": config.mask_token_id,
        "aux_hidden_state_layer_ids": _stored_taps(config, "speculators"),
        "sample_from_anchor": config.layout == "anchor_first",
        "sliding_window_non_causal": sliding == {False},
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.block_size}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": None, "architectures": []},
        },
        **(_stored_heads(config) if dspark else {}),
    }


def _sizes(config: DenseConfig) -> dict[str, Any]:
    sliding = "sliding_attention" in config.layer_types
    return {
        "model_type": "qwen3",
        **{name: getattr(config, field) for field, name in SIZES.items()},
        "hidden_act": "silu",
        "rope_theta": config.rope.theta,
        "rope_parameters": _stored_rope(config.rope),
        "layer_types": list(config.layer_types),
        "use_sliding_window": sliding,
        "sliding_window": config.sliding_window if sliding else None,
        "tie_word_embeddings": False,
    }


def _stored_rope(rope: Rope) -> dict[str, Any]:
    fields = {name: getattr(rope, name) for name in ROPE[rope.type]}
    return {
        "rope_type": rope.type,
        "rope_theta": rope.theta,
        **{name: value for name, value in fields.items() if value is not None},
    }


def _stored_taps(config: DenseConfig, store: Store) -> list[int]:
    return [tap - tap_offset(store) for tap in config.target_layer_ids]


def _stored_heads(config: DenseConfig) -> dict[str, Any]:
    return {OWN[field]: getattr(config, field) for field in OWN if field.startswith(("markov", "confidence"))}


def _explicit_causal(config: DenseConfig, name: str) -> dict[str, bool]:
    """The flag that holds for all layers, where it must be said."""
    if _causal_by_kind(config, sliding=True) == config.causal:
        return {}
    if len(set(config.causal)) > 1:
        raise _unsayable(config, name)
    return {name: config.causal[0]}


def _causal_by_kind(config: DenseConfig, sliding: bool) -> tuple[bool, ...]:
    return tuple(sliding and kind == "sliding_attention" for kind in config.layer_types)


def _unsayable(config: DenseConfig, where: str) -> Refused:
    return Refused(
        "the layout has no field for which layers are causal within a block",
        expected="full layers that are not, sliding layers that are; or one flag for all",
        found=list(zip(config.layer_types, config.causal, strict=True)),
        where=where,
    )
