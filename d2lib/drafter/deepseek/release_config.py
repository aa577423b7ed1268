"""A released checkpoint's config.json as a DeepseekConfig, and the model family that it says it is.

The release names its fields as the serving stacks do (`hidden_size`, `dspark_block_size`), its reference inference code
names them as DeepseekConfig does (`dim`); both are read. The drafter's own field wins over the target's: V4.1's target
has 384 routed experts, its drafter 128.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from d2lib.drafter.config import DrafterConfig, parse_config
from d2lib.drafter.deepseek.config import DeepseekConfig
from d2lib.drafter.deepseek.release import FORMS, Form
from d2lib.errors import Refused
from d2lib.files import read_json

CONFIG = "config.json"

_NAMES: dict[str, tuple[str, ...]] = {
    "dim": ("hidden_size", "dim"),
    "vocab_size": ("vocab_size",),
    "n_stages": ("n_mtp_layers", "n_stages"),
    "block_size": ("dspark_block_size", "block_size"),
    "noise_token_id": ("dspark_noise_token_id", "noise_token_id"),
    "target_layer_ids": ("dspark_target_layer_ids", "target_layer_ids"),
    "window": ("sliding_window", "window_size", "window"),
    "n_heads": ("num_attention_heads", "n_heads"),
    "head_dim": ("head_dim",),
    "rope_head_dim": ("qk_rope_head_dim", "rope_head_dim"),
    "q_lora_rank": ("q_lora_rank",),
    "o_lora_rank": ("o_lora_rank",),
    "o_groups": ("o_groups",),
    "n_routed_experts": ("dspark_n_routed_experts", "n_routed_experts"),
    "n_activated": (
        "dspark_num_experts_per_tok",
        "dspark_n_activated_experts",
        "num_experts_per_tok",
        "n_activated_experts",
        "n_activated",
    ),
    "n_shared": ("n_shared_experts", "n_shared"),
    "moe_inter_dim": ("moe_intermediate_size", "moe_inter_dim"),
    "score": ("scoring_func", "score_func", "score"),
    "norm_topk_prob": ("norm_topk_prob",),
    "routed_scaling_factor": ("routed_scaling_factor", "route_scale"),
    "swiglu_limit": ("swiglu_limit",),
    "hc_mult": ("hc_mult",),
    "hc_sinkhorn_iters": ("hc_sinkhorn_iters",),
    "hc_eps": ("hc_eps",),
    "norm_eps": ("rms_norm_eps", "norm_eps"),
    "rope_theta": ("rope_theta",),
    "markov_rank": ("dspark_markov_rank", "markov_rank"),
}
"""DeepseekConfig's field → the release's names for it, the first that is there wins."""

_OPTIONAL = frozenset({"n_shared", "score", "norm_topk_prob"})
"""What a release may leave unsaid: DeepseekConfig knows one value, or the one that all releases have."""

_FAMILY: dict[Form, dict[str, Any]] = {
    "deepseek_v41": {"hc_form": "single_pass", "q_head_norm": False},
    "deepseek_v4": {"hc_form": "per_motion", "q_head_norm": True},
}
"""What the model family decides and no field says."""


def read_config(path: Path, form: Form | None = None) -> tuple[Form | None, DrafterConfig]:
    """A drafter's configuration from a release's config.json or from a drafter.json of ours.

    Args:
        path: the file. One with a `model_type` is a release's; its fields stand under `text_config` or at the top.
        form: the model family, where the file is not to be believed or does not say.

    Returns: the model family (None for ours, unless `form` names one), and the configuration.

    Raises:
        Refused: an unknown family, a missing or wrong field, or FP8 blocks that are not the family's.
    """
    value = read_json(path)
    if not isinstance(value, dict):
        raise Refused("a configuration is not an object", expected="a JSON object", where=path)
    if "model_type" not in value and "text_config" not in value:
        return form, parse_config(value, where=path)
    found = form or known_form(value.get("model_type"), path)
    text = value.get("text_config", {})
    if not isinstance(text, dict):
        raise Refused("a configuration's text_config is not an object", expected="a JSON object", where=path)
    fields = {**value, **text}
    block = (value.get("quantization_config") or {}).get("weight_block_size")
    if block is not None and block != [FORMS[found].block] * 2:
        raise Refused(
            f"the release's FP8 blocks are not those of {found}",
            expected=[FORMS[found].block] * 2,
            found=block,
            where=f"{path}: quantization_config.weight_block_size",
        )
    return found, _config(fields, found, path)


def known_form(name: object, where: object = None) -> Form:
    """The model family of that name; raises Refused for any other."""
    for form in FORMS:
        if form == name:
            return form
    raise Refused(
        "not a model family whose storage we know",
        expected=" or ".join(FORMS),
        found=name,
        where=where,
        remedy="name the family with --form",
    )


def _config(fields: dict[str, Any], form: Form, path: Path) -> DeepseekConfig:
    ours: dict[str, Any] = dict(_FAMILY[form])
    for name, names in _NAMES.items():
        there = next((theirs for theirs in names if theirs in fields), None)
        if there is not None:
            ours[name] = fields[there]
        elif name == "n_stages":
            ours[name] = _stages(fields, path)
        elif name not in _OPTIONAL:
            raise Refused(
                "the release's configuration lacks a field of the drafter", expected=" or ".join(names), where=path
            )
    try:
        return DeepseekConfig.model_validate(ours)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        there = next((theirs for theirs in _NAMES.get(name, ()) if theirs in fields), name)
        raise Refused(
            "a field of the release's configuration is wrong",
            expected=first["msg"],
            found=first.get("input") if name else None,
            where=f"{path}: {there}" if there else path,
        ) from None


def _stages(fields: dict[str, Any], path: Path) -> int:
    """Draft stages: attention layers beyond the target's own, since V4 says 1 in `num_nextn_predict_layers` for 3."""
    ratios, layers = fields.get("compress_ratios"), fields.get("num_hidden_layers")
    if isinstance(ratios, list) and isinstance(layers, int) and len(ratios) > layers:
        return len(ratios) - layers
    stages = fields.get("num_nextn_predict_layers")
    if not isinstance(stages, int):
        raise Refused(
            "the release's configuration does not say how many draft stages it has",
            expected="n_mtp_layers, compress_ratios beyond num_hidden_layers, or num_nextn_predict_layers",
            found=stages,
            where=path,
        )
    return stages
