"""What a stored dense drafter must not have: one check and one reason for each way in which it could mean otherwise.

Sources (trainers, servers) disagree on every switch that is refused here, or it is another arithmetic than ours. A
check yields what it found, where; all checks run, so that a reader of the card sees every reason at once. What fields
must hold among themselves is `DenseConfig`'s to check, and is reported in the same form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from d2lib.drafter.dense.config import DenseConfig, Inconsistent, shapes
from d2lib.drafter.dense.fields import ROPE, place_of, read_fields, rope_fields, rope_place, taps_name
from d2lib.drafter.dense.source import DRAFT_OF_SPECFORGE, VOCABULARY_MAPS, Source
from d2lib.drafter.dense.target import CONFIG, FLOATS
from d2lib.errors import Refused

SHARED = ("embed_tokens.weight", "lm_head.weight")
"""The target's tensors, which a drafter's folder may hold too."""


@dataclass(frozen=True)
class Found:
    """What a check found: the file's field or tensor, what stands there, and what would be right."""

    field: str
    found: object
    expected: object


@dataclass(frozen=True)
class Reason:
    """Why a stored drafter is refused, and what to do about it."""

    why: str
    field: str
    found: object
    expected: object
    remedy: str

    def refused(self, source: Source) -> Refused:
        """The reason as an error."""
        where = f"{source.config}: {self.field}"
        found = "nothing" if self.found is None else self.found
        return Refused(self.why, expected=self.expected, found=found, where=where, remedy=self.remedy)


Check = Callable[[Source], Iterator[Found]]


def refusals(source: Source) -> tuple[DenseConfig | None, list[Reason]]:
    """The drafter's configuration, where its fields make one, and every reason to refuse the folder."""
    reasons = [
        Reason(why, found.field, found.found, found.expected, remedy)
        for check, why, remedy in _TABLE
        for found in check(source)
    ]
    named = {reason.field for reason in reasons}
    config, wrong = _configuration(source)
    reasons += [reason for reason in wrong if not any(_same_place(reason.field, field) for field in named)]
    if config is not None:
        reasons += _tensors(source, config)
    return config, reasons


def _same_place(one: str, other: str) -> bool:
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")


def _configuration(source: Source) -> tuple[DenseConfig | None, list[Reason]]:
    fields = read_fields(source)
    fields |= dict.fromkeys(_STATED.keys() - fields.keys())  # a default of DenseConfig's must not stand in for these
    try:
        return DenseConfig.model_validate(fields), []
    except ValidationError as error:
        return None, [reason for entry in error.errors() for reason in _wrong_fields(source, entry)]


def _wrong_fields(source: Source, entry: Any) -> Iterator[Reason]:
    """One of pydantic's errors: fields that do not go together, a missing field, or a wrong value."""
    inconsistent = entry.get("ctx", {}).get("error")
    if isinstance(inconsistent, Inconsistent):
        for field, message in inconsistent.findings:
            place = place_of(source, field)
            yield Reason("fields do not go together", place, _stored(source, field), message, _TAKE_ANOTHER)
        return
    field, *rest = (str(part) for part in entry["loc"])
    names = {"type": "rope_type", "theta": "rope_theta"} if field == "rope" else {}
    place = ".".join([place_of(source, field), *(names.get(part, part) for part in rest)])
    if entry["type"] == "missing":
        expected = _MISSING.get(field, "a value")
        yield Reason(_UNSTATED, place, "nothing", expected, _WRITE_IT)
    else:
        yield Reason("a field is wrong", place, entry.get("input"), entry["msg"], _TAKE_ANOTHER)


def _stored(source: Source, field: str) -> object:
    return read_fields(source).get(field, "nothing")


_TAKE_ANOTHER = "mend the field if it was written wrongly; weights trained so cannot be taken"
_UNSTATED = "a field is missing whose default sources disagree on"
_WRITE_IT = f"add the field to {CONFIG}, as the drafter was trained"
_MISSING = {
    "head_dim": "the channels of a head: 128 in Qwen3's class, hidden_size / heads elsewhere",
    "layer_types": "one kind for each layer, or use_sliding_window false",
    "layout": "whether the anchor's row drafts slot 0: sample_from_anchor true or false",
    "mask_token_id": "the token id of the rows to be drafted",
    "target_layer_ids": "the tapped layers of the target",
    "max_position_embeddings": "the positions that yarn's frequencies were made for",
}


def _tensors(source: Source, config: DenseConfig) -> list[Reason]:
    """Stored tensors against the configuration's; the target's own may be absent, or longer by padding rows."""
    reasons = []
    expected = shapes(config)
    for name in sorted(expected.keys() - source.tensors.keys() - set(SHARED)):
        reasons.append(Reason("a tensor is missing", name, "nothing", list(expected[name]), _WHOLE))
    for name in sorted(source.tensors.keys() - expected.keys()):
        stored = source.tensors[name]
        if name not in _OWN_MASK:
            reasons.append(
                Reason("a tensor is not this drafter's", stored.name, list(stored.shape), "no such tensor", _WHOLE)
            )
    for name in sorted(expected.keys() & source.tensors.keys()):
        found, shape = source.tensors[name].shape, expected[name]
        padded = name in SHARED and found[1:] == shape[1:] and found[0] > shape[0]
        if found != shape and not padded and name != "fc.weight":
            reasons.append(Reason("a tensor has a wrong shape", name, list(found), list(shape), _WHOLE))
    return reasons


_WHOLE = f"see that {CONFIG} and the weights are of one checkpoint"
_OWN_MASK = ("mask_embedding", "mask_embedding.weight")


def _vocabulary(source: Source) -> Iterator[Found]:
    size = source.sizes.get("vocab_size")
    place = source.size_place("vocab_size")
    if source.target is not None and type(size) is int and size != source.target.vocab_size:
        yield Found(place, size, f"the target's {source.target.vocab_size}")
    draft = source.own("draft_vocab_size", _SPECULATORS_VOCABULARY if source.store == "speculators" else size)
    if size is not None and draft != size:
        yield Found("draft_vocab_size", draft, f"all {size} tokens")
    for name in VOCABULARY_MAPS:
        tensor = source.dropped.get(name) or source.tensors.get(name)
        if tensor is not None and tensor.shape != (size,):
            yield Found(name, list(tensor.shape), f"one row for each of {size} tokens")


_SPECULATORS_VOCABULARY = 32000  # its class's default where the field is absent


def _width(source: Source) -> Iterator[Found]:
    dim, taps = source.sizes.get("hidden_size"), source.own(taps_name(source.store))
    stated = source.own("target_hidden_size")
    if stated is not None and stated != dim:
        yield Found("target_hidden_size", stated, dim)
    if source.target is not None and type(dim) is int and dim != source.target.dim:
        yield Found(source.size_place("hidden_size"), dim, f"the target's {source.target.dim}")
    fc = source.tensors.get("fc.weight")
    if fc is not None and type(dim) is int and isinstance(taps, list) and fc.shape != (dim, len(taps) * dim):
        yield Found("fc.weight", list(fc.shape), [dim, len(taps) * dim])


def _attention_mode(source: Source) -> Iterator[Found]:
    yield from _either(source, "attention_mode", (None, "gqa", "mha"), "gqa or mha")


def _backbone(source: Source) -> Iterator[Found]:
    kind = source.sizes.get("model_type")
    if kind != "qwen3" and not (kind is None and source.store == "speculators"):
        yield Found(source.size_place("model_type"), kind, "qwen3")
    kind = source.fields.get("speculators_model_type")
    if source.store == "speculators" and kind not in ("dspark", "dflash"):
        yield Found("speculators_model_type", kind, "dspark or dflash")


def _rope(source: Source) -> Iterator[Found]:
    rope = rope_fields(source)
    place = rope_place(source)
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(source.sizes.get(name, {}), dict | None):
            yield Found(source.size_place(name), source.sizes[name], "an object of the rope's fields")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in ROPE:
        yield Found(f"{place}.rope_type", kind, " or ".join(ROPE))
    for key in sorted(rope):
        if isinstance(rope[key], dict):
            yield Found(f"{place}.{key}", rope[key], "one rope for all layers")
        elif key not in _ROPE_KEYS and rope[key] is not None:
            yield Found(f"{place}.{key}", rope[key], "no such field")
    factor = rope.get("partial_rotary_factor", source.sizes.get("partial_rotary_factor"))
    if factor not in (None, 1):
        yield Found(f"{place}.partial_rotary_factor", factor, 1)
    for key, right in (("rope_dim", source.sizes.get("head_dim")), ("is_neox_style", True)):
        for fields, where in ((rope, f"{place}.{key}"), (source.sizes, source.size_place(key))):
            if fields.get(key) not in (None, right):
                yield Found(where, fields[key], right)
    if source.sizes.get("mrope_section") is not None:
        yield Found(source.size_place("mrope_section"), source.sizes["mrope_section"], "no such field")


_ROPE_KEYS = {name for names in ROPE.values() for name in names} | {
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "rope_dim",
    "is_neox_style",
}


def _theta(source: Source) -> Iterator[Found]:
    if rope_fields(source).get("rope_theta", source.sizes.get("rope_theta")) is None:
        yield Found(f"{rope_place(source)}.rope_theta", "nothing", "the base of the rotary frequencies")


def _quantized(source: Source) -> Iterator[Found]:
    yield from _either(source, "quantization_config", (None,), "no quantization")
    for name, tensor in sorted(source.tensors.items()):
        if tensor.dtype not in FLOATS:
            yield Found(name, tensor.dtype, " or ".join(FLOATS))


def _projector(source: Source) -> Iterator[Found]:
    kind = source.draft.get("projector_type")
    if kind not in (None, "dspark", "dflash"):
        yield Found(f"{DRAFT_OF_SPECFORGE}.projector_type", kind, "dspark or dflash")
    for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
        yield from _either(source, name, (None,), "no such field")


def _forward(source: Source) -> Iterator[Found]:
    for name, neutral in _NEUTRAL.items():
        yield from _either(source, name, neutral, " or ".join("absent" if v is None else str(v) for v in neutral))
    for name in _OWN_MASK:
        if name in source.tensors:
            yield Found(
                source.tensors[name].name, list(source.tensors[name].shape), "the target's row of the mask token"
            )
    for path in sorted(source.folder.glob("mask_embedding*")):
        yield Found(path.name, "a file", "the target's row of the mask token")


_NEUTRAL: dict[str, tuple[object, ...]] = {
    "dspark_draft_topk": (None, 0),
    "attention_sink_bias": (None, False),
    "attention_value_scale": (None, 1),
    "use_swa": (None, False),
    "swa_window_size": (None,),
    "use_gemma_norm": (None, False),
    "use_aux_hidden_state": (None, True),
    "has_embed_tokens": (None, False),
    "mask_embedding": (None, False),
    "logit_scale": (None, 1),
    "logits_scaling": (None, 1),
    "output_multiplier": (None, 1),
    "output_multiplier_scale": (None, 1),
    "logits_mup": (None, False),
    "final_logit_softcapping": (None, 0),
    "logit_softcapping": (None, 0),
    "logits_soft_cap": (None, 0),
    "attn_logit_softcapping": (None, 0),
}
"""Fields that change the forward pass, with the values under which they do not."""


def _activation(source: Source) -> Iterator[Found]:
    kind = source.sizes.get("hidden_act", "silu")
    if kind != "silu":
        yield Found(source.size_place("hidden_act"), kind, "silu")


def _target_logits(source: Source) -> Iterator[Found]:
    if source.target is None:
        return
    for name in sorted(source.target.config):
        value = source.target.config[name]
        if name in _TARGET_NEUTRAL and value not in _TARGET_NEUTRAL[name]:
            yield Found(f"{source.target.folder / CONFIG}: {name}", value, "logits that are lm_head · hidden")
        elif any(word in name.lower() for word in ("quarot", "rotation")) and value:
            yield Found(f"{source.target.folder / CONFIG}: {name}", value, "a target that is not rotated")
    quantized = source.target.config.get("quantization_config")
    if isinstance(quantized, dict) and quantized.get("transform_config"):
        place = f"{source.target.folder / CONFIG}: quantization_config.transform_config"
        yield Found(place, quantized["transform_config"], "a target that is not rotated")


_TARGET_NEUTRAL = {
    name: _NEUTRAL[name]
    for name in (
        "logit_scale",
        "logits_scaling",
        "output_multiplier",
        "output_multiplier_scale",
        "logits_mup",
        "final_logit_softcapping",
        "logit_softcapping",
        "logits_soft_cap",
    )
} | {"lm_head_multiplier": (None, 1)}


def _unstated(source: Source) -> Iterator[Found]:
    for field in _STATED.keys() - read_fields(source).keys():
        yield Found(place_of(source, field), "nothing", _STATED[field])


_STATED = {
    "markov_rank": "the Markov head's inner width, or 0",
    "markov_head_type": "vanilla, gated or rnn",
    "confidence_with_markov": "whether the confidence head reads the Markov embedding: true or false",
}
"""Fields of the heads that the layouts' trainers have unlike defaults for."""


def _twice(source: Source) -> Iterator[Found]:
    names = set(source.draft) & set(source.fields)
    for name in sorted(names):
        places = source.places(name)
        if len(places) == 2 and places[0][1] != places[1][1]:
            yield Found(places[0][0], places[0][1], f"{places[1][1]}, as in {places[1][0]}")
    causal = source.draft.get("causal")
    if source.own("is_causal", causal) != causal and causal is not None:
        yield Found(f"{DRAFT_OF_SPECFORGE}.causal", causal, f"{source.own('is_causal')}, as in is_causal")
    depth = source.own("num_target_layers")
    if source.target is not None and depth not in (None, source.target.n_layers):
        yield Found("num_target_layers", depth, f"the target's {source.target.n_layers}")
    theta, inner = source.sizes.get("rope_theta"), rope_fields(source).get("rope_theta")
    if theta is not None and inner not in (None, theta):
        yield Found(source.size_place("rope_theta"), theta, f"{inner}, as in the rope's own fields")
    older, newer = source.sizes.get("rope_scaling"), source.sizes.get("rope_parameters")
    if isinstance(older, dict) and isinstance(newer, dict):
        kinds = [(rope.get("rope_type", rope.get("type", "default")), rope.get("factor")) for rope in (older, newer)]
        if kinds[0] != kinds[1]:
            yield Found(source.size_place("rope_scaling"), kinds[0], f"{kinds[1]}, as in rope_parameters")


def _layout(source: Source) -> Iterator[Found]:
    flag = source.own("sample_from_anchor")
    if source.store == "specforge":
        projector = source.draft.get("projector_type", "dflash")
        names = source.fields.get("architectures")
        spark = any("dspark" in str(name).lower() for name in names) if isinstance(names, list) else False
        if flag is not None and flag != (projector == "dspark"):
            yield Found("sample_from_anchor", flag, f"what projector_type {projector} says")
        elif spark and projector == "dflash" and flag is None:
            yield Found("architectures", names, "projector_type dspark, or sample_from_anchor false")
    elif flag is not None and type(flag) is not bool:
        yield Found("sample_from_anchor", flag, "true or false")


def _drafted(source: Source) -> Iterator[Found]:
    ours = read_fields(source)
    proposals = source.fields.get("speculators_config")
    methods = proposals.get("proposal_methods") if isinstance(proposals, dict) else None
    for index, method in enumerate(methods if isinstance(methods, list) else []):
        drafted = method.get("speculative_tokens") if isinstance(method, dict) else None
        if drafted is not None and drafted != ours.get("block_size"):
            place = f"speculators_config.proposal_methods.{index}.speculative_tokens"
            yield Found(place, drafted, f"{ours.get('block_size')}, from block_size and sample_from_anchor")


def _window(source: Source) -> Iterator[Found]:
    kinds, used = source.sizes.get("layer_types"), source.sizes.get("use_sliding_window")
    if isinstance(kinds, list) and "sliding_attention" in kinds and used is not True:
        yield Found(source.size_place("use_sliding_window"), used, "true, for a layer is sliding")


def _either(source: Source, name: str, right: tuple[object, ...], expected: object) -> Iterator[Found]:
    """A field that may stand among the drafter's own or the layers', and must have one of these values."""
    places: Mapping[str, Any] = {source.size_place(name): source.sizes.get(name), **dict(source.places(name))}
    for place, value in places.items():
        if value not in right:
            yield Found(place, value, expected)


_TABLE: tuple[tuple[Check, str, str], ...] = (
    (
        _vocabulary,
        "the drafter has another vocabulary than its target: it gives no mass to the missing tokens, and the "
        "divergence from the target is infinite",
        "train a drafter on the whole vocabulary",
    ),
    (
        _width,
        "the drafter has another width than its target: its taps and the shared head would not fit",
        "name the target that it was trained for (--target), or take a drafter of the target's width",
    ),
    (_attention_mode, "latent attention (MLA) is another arithmetic", "take a drafter with attention_mode gqa"),
    (
        _backbone,
        "the drafter's layers are not Qwen3's: others scale, normalise or share what these do not",
        "take a drafter of Qwen3 layers",
    ),
    (
        _rope,
        "rotary of a form on which layouts and servers disagree",
        "take a drafter with one rope over whole heads, of type default, linear, llama3 or yarn",
    ),
    (_theta, "the rotary base is missing: readers take 10,000 or 1,000,000 for it", _WRITE_IT),
    (_quantized, "packed weights can be neither adapted nor merged", "take the drafter in bfloat16 or float"),
    (_projector, "another projector, or slots mixed by convolution or selection", "take a drafter of DSpark or DFlash"),
    (_forward, "a switch that changes the forward pass", "take a drafter that was trained without it"),
    (_activation, "an activation other than SiLU", "take a drafter with hidden_act silu"),
    (
        _target_logits,
        "the target's logits are not its head times its hidden rows, so no teacher can be made of these",
        "take a target whose logits are neither scaled nor capped nor rotated",
    ),
    (_unstated, _UNSTATED, _WRITE_IT),
    (_twice, "two fields say different things", "keep the one as the drafter was trained"),
    (
        _layout,
        "the layout of a block is not certain: whether the anchor's row drafts slot 0",
        "write sample_from_anchor, as the drafter was trained",
    ),
    (_drafted, "two fields count the drafted tokens differently", "keep the one as the drafter was trained"),
    (
        _window,
        "a sliding layer whose window is not in use: readers drop the window then",
        "set use_sliding_window, if the drafter was trained so",
    ),
)
"""Check, reason, remedy."""
