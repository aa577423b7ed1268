"""Everything in a stored dense drafter that would mean another arithmetic: each alone, named, with what to do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from dense_case import DIM, VOCAB, edit, rename, stored
from torch import Tensor

from d2lib.cli import main
from d2lib.drafter.dense.checkpoint import read_dense, write_dense
from d2lib.drafter.dense.refusals import refusals
from d2lib.drafter.dense.source import Store, open_source
from d2lib.errors import Refused
from d2lib.files import read_json

Fields = dict[str, Any]
Tensors = dict[str, Tensor]


def put(**values: Any) -> Callable[[Fields], None]:
    """Set fields; a name with `__` for a dot lies one object deeper, and None removes."""

    def change(fields: Fields) -> None:
        for name, value in values.items():
            *parents, last = name.split("__")
            place = fields
            for parent in parents:
                place = place[parent]
            if value is None:
                del place[last]
            else:
                place[last] = value

    return change


SLIDING: Fields = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}
TLC = "transformer_layer_config"

CONFIGURATIONS: list[tuple[str, Store, Fields, Callable[[Fields], None], str, str]] = [
    # what, layout, how the drafter is made, what is changed, the field that is named, the reason
    ("draft vocabulary", "speculators", {}, put(draft_vocab_size=30), "draft_vocab_size", "another vocabulary"),
    ("draft vocabulary not said", "speculators", {}, put(draft_vocab_size=None), "draft_vocab_size", "another vocab"),
    ("target's width", "speculators", {}, put(target_hidden_size=16), "target_hidden_size", "another width"),
    ("MLA", "deepspec", {}, put(attention_mode="mla"), "attention_mode", "latent attention"),
    (
        "MLA in the layers",
        "speculators",
        {},
        put(**{f"{TLC}__attention_mode": "mla"}),
        f"{TLC}.attention_mode",
        "laten",
    ),
    ("Gemma's layers", "deepspec", {}, put(model_type="gemma4"), "model_type", "not Qwen3's"),
    ("Llama's layers", "speculators", {}, put(**{f"{TLC}__model_type": "llama"}), f"{TLC}.model_type", "not Qwen3's"),
    ("unnamed layers", "specforge", {}, put(model_type=None), "model_type", "not Qwen3's"),
    ("DFlash 2", "speculators", {}, put(speculators_model_type="dflash2"), "speculators_model_type", "not Qwen3's"),
    ("dynamic rope", "deepspec", {}, put(rope_parameters__rope_type="dynamic"), "rope_parameters.rope_type", "rotary"),
    ("no type", "deepspec", {}, put(rope_parameters__rope_type=["yarn"]), "rope_parameters.rope_type", "rotary"),
    (
        "mrope",
        "speculators",
        {},
        put(**{f"{TLC}__rope_parameters__mrope_section": [1, 1, 1]}),
        f"{TLC}.rope_parameters.mrope_section",
        "rotary",
    ),
    (
        "a rope for each kind of layer",
        "specforge",
        {},
        put(rope_parameters__full_attention={"rope_type": "default"}),
        "rope_parameters.full_attention",
        "one rope for all layers",
    ),
    ("partial rotary", "deepspec", {}, put(partial_rotary_factor=0.5), "partial_rotary_factor", "rotary"),
    ("partial inside", "deepspec", {}, put(rope_parameters__partial_rotary_factor=0.5), "partial_rotary", "rotary"),
    ("rope_dim", "deepspec", {}, put(rope_dim=4), "rope_dim", "rotary"),
    ("interleaved", "deepspec", {}, put(is_neox_style=False), "is_neox_style", "rotary"),
    (
        "no base",
        "deepspec",
        {},
        put(rope_theta=None, rope_parameters__rope_theta=None),
        "rope_parameters.rope_theta",
        "rotary base is missing",
    ),
    ("two bases", "deepspec", {}, put(rope_theta=1e6), "rope_theta", "say different things"),
    (
        "two ropes",
        "deepspec",
        {},
        put(rope_scaling={"type": "linear", "factor": 2.0}),
        "rope_scaling",
        "different things",
    ),
    (
        "no factor",
        "deepspec",
        {},
        put(rope_parameters__rope_type="linear"),
        "rope_parameters",
        "linear needs its factor",
    ),
    (
        "llama3 without its positions",
        "deepspec",
        {},
        put(rope_parameters={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
        "rope_parameters",
        "needs its original_max_position_embeddings",
    ),
    ("no rope's object", "deepspec", {}, put(rope_parameters=[]), "rope_parameters", "an object of the rope's"),
    (
        "causal by half",
        "speculators",
        SLIDING,
        put(sliding_window_non_causal="no"),
        "sliding_window_non_causal",
        "field is wrong",
    ),
    ("causal by number", "specforge", {}, put(dflash_config__causal=0.5), "dflash_config.causal", "field is wrong"),
    ("quantized", "deepspec", {}, put(quantization_config={"bits": 4}), "quantization_config", "packed weights"),
    (
        "domino",
        "specforge",
        {},
        put(dflash_config__projector_type="domino"),
        "dflash_config.projector_type",
        "another projector",
    ),
    ("convolution", "specforge", {}, put(dflash_config__conv_kernel_size=2), "conv_kernel_size", "another projector"),
    ("selector", "speculators", {}, put(selector_rank=256), "selector_rank", "another projector"),
    ("top-k drafts", "deepspec", {}, put(dspark_draft_topk=64), "dspark_draft_topk", "changes the forward"),
    ("sinks", "deepspec", {}, put(attention_sink_bias=True), "attention_sink_bias", "changes the forward"),
    ("scaled values", "deepspec", {}, put(attention_value_scale=0.5), "attention_value_scale", "changes the forward"),
    ("swa", "deepspec", {}, put(use_swa=True), "use_swa", "changes the forward"),
    ("swa's window", "deepspec", {}, put(swa_window_size=64), "swa_window_size", "changes the forward"),
    ("Gemma's norm", "deepspec", {}, put(use_gemma_norm=True), "use_gemma_norm", "changes the forward"),
    ("no taps", "deepspec", {}, put(use_aux_hidden_state=False), "use_aux_hidden_state", "changes the forward"),
    ("own embedding", "deepspec", {}, put(has_embed_tokens=True), "has_embed_tokens", "changes the forward"),
    ("scaled logits", "deepspec", {}, put(logit_scale=0.25), "logit_scale", "changes the forward"),
    ("capped logits", "specforge", {}, put(final_logit_softcapping=30.0), "final_logit_softcapping", "the forward"),
    ("multiplier", "deepspec", {}, put(output_multiplier=2.0), "output_multiplier", "changes the forward"),
    ("mup", "deepspec", {}, put(logits_mup=True), "logits_mup", "changes the forward"),
    ("GELU", "deepspec", {}, put(hidden_act="gelu"), "hidden_act", "other than SiLU"),
    ("heads that do not divide", "deepspec", {}, put(num_key_value_heads=3), "num_attention_heads", "multiple"),
    ("an odd head", "deepspec", {}, put(head_dim=7), "head_dim", "must be even"),
    ("unknown Markov head", "deepspec", {}, put(markov_head_type="lstm"), "markov_head_type", "field is wrong"),
    (
        "confidence without Markov",
        "speculators",
        {},
        put(markov_rank=0),
        "confidence_head_with_markov",
        "needs a confidence head and markov_rank",
    ),
    ("mask beyond", "deepspec", {}, put(mask_token_id=VOCAB), "mask_token_id", "not in the vocabulary"),
    ("negative mask", "specforge", {}, put(dflash_config__mask_token_id=-1), "dflash_config.mask_token_id", "is wrong"),
    ("too few layer types", "deepspec", {}, put(layer_types=["full_attention"]), "layer_types", "one layer_types for"),
    ("unknown layer", "deepspec", {}, put(layer_types=["full_attention", "chunked"]), "layer_types.1", "is wrong"),
    ("no window", "speculators", SLIDING, put(**{f"{TLC}__sliding_window": None}), f"{TLC}.sliding_window", "a window"),
    ("narrow window", "deepspec", SLIDING, put(sliding_window=3), "sliding_window", "must hold a block's 4"),
    ("window not in use", "specforge", SLIDING, put(use_sliding_window=False), "use_sliding_window", "not in use"),
    ("layers not named", "deepspec", SLIDING, put(layer_types=None), "layer_types", "a field is missing"),
    ("taps that fall", "deepspec", {}, put(target_layer_ids=[4, 2, 0]), "target_layer_ids", "rise strictly"),
    ("a tap twice", "speculators", {}, put(aux_hidden_state_layer_ids=[1, 1, 5]), "aux_hidden_state_layer_ids", "rise"),
    (
        "tap below",
        "speculators",
        {},
        put(aux_hidden_state_layer_ids=[-1, 1, 5]),
        "aux_hidden_state_layer_ids",
        "layers 0 … 5",
    ),
    (
        "tap at the top",
        "speculators",
        {},
        put(aux_hidden_state_layer_ids=[1, 3, 6]),
        "aux_hidden_state_layer_ids",
        "layers 0 … 5",
    ),
    ("tap at the top", "deepspec", {}, put(target_layer_ids=[0, 2, 5]), "target_layer_ids", "layers 0 … 5"),
    (
        "1+N with rnn",
        "speculators",
        {"markov_head_type": "rnn"},
        put(sample_from_anchor=False, speculators_config=None),
        "markov_head_type",
        "rnn Markov head cannot go with layout one_plus_n",
    ),
    ("no layout", "speculators", {}, put(sample_from_anchor=None), "sample_from_anchor", "a field is missing"),
    ("layout of no kind", "deepspec", {}, put(sample_from_anchor="yes"), "sample_from_anchor", "is not certain"),
    (
        "DSpark without its projector",
        "specforge",
        {},
        put(dflash_config__projector_type=None),
        "architectures",
        "is not certain",
    ),
    (
        "projector against flag",
        "specforge",
        {},
        put(sample_from_anchor=False),
        "sample_from_anchor",
        "is not certain",
    ),
    (
        "K counted twice",
        "speculators",
        {},
        put(block_size=5),
        "speculators_config.proposal_methods.0.speculative_tokens",
        "count the drafted tokens differently",
    ),
    ("no block", "deepspec", {}, put(block_size=None), "block_size", "a field is missing"),
    ("no head_dim", "deepspec", {}, put(head_dim=None), "head_dim", "128 in Qwen3's class"),
    ("no mask", "speculators", {}, put(mask_token_id=None), "mask_token_id", "a field is missing"),
    (
        "no taps named",
        "specforge",
        {},
        put(dflash_config__target_layer_ids=None),
        "dflash_config.target_layer_ids",
        "a field is missing",
    ),
    ("no Markov type", "deepspec", {}, put(markov_head_type=None), "markov_head_type", "vanilla, gated or rnn"),
    ("no confidence input", "deepspec", {}, put(confidence_head_with_markov=None), "with_markov", "true or false"),
    ("no rank", "speculators", {}, put(markov_rank=None), "markov_rank", "a field is missing"),
    ("rank in two places", "specforge", {}, put(markov_rank=4), "dflash_config.markov_rank", "say different things"),
    ("target's depth", "deepspec", {}, put(num_target_layers=8), "num_target_layers", "say different things"),
    ("text for a number", "deepspec", {}, put(hidden_size="8"), "hidden_size", "field is wrong"),
    ("K of nothing", "deepspec", {}, put(block_size=0), "block_size", "greater than 0"),
    ("sizes that do not multiply", "deepspec", {}, put(intermediate_size=13), "mlp", "wrong shape"),
]


@pytest.mark.parametrize(
    ("what", "store", "made", "change", "field", "reason"), CONFIGURATIONS, ids=[row[0] for row in CONFIGURATIONS]
)
def test_a_configuration_is_refused_for_that_alone(
    what: str, store: Store, made: Fields, change: Callable[[Fields], None], field: str, reason: str, tmp_path: Path
) -> None:
    """One change, one reason (or one for each tensor that it misshapes): the field, what stands there, what to do."""
    stored(tmp_path, store, **made)
    read_dense(tmp_path / "draft", tmp_path / "target")
    edit(tmp_path / "draft", change)
    _, reasons = refusals(open_source(tmp_path / "draft", tmp_path / "target"))
    assert len({one.why for one in reasons}) == 1, reasons
    assert field in reasons[0].field
    with pytest.raises(Refused) as caught:
        read_dense(tmp_path / "draft", tmp_path / "target")
    said = str(caught.value)
    assert reason in said
    assert all(f"; {part}: " in said for part in ("expected", "found", "where", "do"))


def dropped(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def added(name: str, value: Tensor) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: value}


WEIGHTS: list[tuple[str, Store, Callable[[Tensors], Tensors], str, str]] = [
    ("missing", "deepspec", dropped("layers.1.self_attn.k_norm.weight"), "layers.1.self_attn.k_norm.weight", "missing"),
    ("a third layer", "deepspec", added("layers.2.mlp.up_proj.weight", torch.ones(12, DIM)), "layers.2", "not this"),
    (
        "a target's copy",
        "deepspec",
        added("verifier_norm.weight", torch.ones(DIM)),
        "verifier_norm",
        "not this drafter",
    ),
    ("shape", "specforge", added("norm.weight", torch.ones(DIM + 1)), "norm.weight", "wrong shape"),
    ("taps", "deepspec", added("fc.weight", torch.ones(DIM, 2 * DIM)), "fc.weight", "another width"),
    ("bits", "deepspec", added("norm.weight", torch.ones(DIM, dtype=torch.uint8)), "norm.weight", "packed weights"),
    ("fp8", "deepspec", added("norm.weight", torch.ones(DIM).to(torch.float8_e4m3fn)), "norm.weight", "packed weights"),
    ("map", "speculators", added("d2t", torch.zeros(30, dtype=torch.int64)), "d2t", "another vocabulary"),
    ("mask", "speculators", added("t2d", torch.ones(30, dtype=torch.bool)), "t2d", "another vocabulary"),
    ("own mask", "specforge", added("mask_embedding", torch.ones(DIM)), "mask_embedding", "changes the forward"),
    ("few rows", "deepspec", added("lm_head.weight", torch.ones(VOCAB - 1, DIM)), "lm_head.weight", "wrong shape"),
    ("bias", "deepspec", added("layers.0.self_attn.q_proj.bias", torch.ones(24)), "q_proj.bias", "not this drafter"),
]


@pytest.mark.parametrize(("what", "store", "change", "field", "reason"), WEIGHTS, ids=[row[0] for row in WEIGHTS])
def test_a_tensor_is_refused_for_that_alone(
    what: str, store: Store, change: Callable[[Tensors], Tensors], field: str, reason: str, tmp_path: Path
) -> None:
    stored(tmp_path, store)
    rename(tmp_path / "draft", change)
    _, reasons = refusals(open_source(tmp_path / "draft", tmp_path / "target"))
    assert len(reasons) == 1, reasons
    assert field in reasons[0].field
    with pytest.raises(Refused, match=reason):
        read_dense(tmp_path / "draft", tmp_path / "target")


TARGETS: list[tuple[str, Callable[[Fields], None], str]] = [
    ("another vocabulary", put(vocab_size=VOCAB - 2), "vocab_size"),
    ("capped", put(final_logit_softcapping=30.0), "final_logit_softcapping"),
    ("scaled", put(logits_scaling=8.0), "logits_scaling"),
    ("multiplied", put(lm_head_multiplier=0.5), "lm_head_multiplier"),
    ("rotated", put(quarot=True), "quarot"),
    ("transformed", put(quantization_config={"transform_config": {"R1": {}}}), "transform_config"),
]


@pytest.mark.parametrize(("what", "change", "field"), TARGETS, ids=[row[0] for row in TARGETS])
def test_a_target_is_refused_for_that_alone(
    what: str, change: Callable[[Fields], None], field: str, tmp_path: Path
) -> None:
    stored(tmp_path, "specforge")
    edit(tmp_path / "target", change)
    _, reasons = refusals(open_source(tmp_path / "draft", tmp_path / "target"))
    assert [field in one.field for one in reasons] == [True], reasons


def test_a_target_of_another_width_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    stored(tmp_path / "one", "specforge")
    stored(tmp_path / "two", "specforge", dim=2 * DIM)
    _, reasons = refusals(open_source(tmp_path / "one" / "draft", tmp_path / "two" / "target"))
    assert [(one.field, one.expected) for one in reasons] == [("hidden_size", f"the target's {2 * DIM}")]


def test_a_mask_embedding_beside_the_weights_is_refused(tmp_path: Path) -> None:
    stored(tmp_path, "specforge")
    (tmp_path / "draft" / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(Refused, match=r"changes the forward pass.*mask_embedding\.pt"):
        read_dense(tmp_path / "draft", tmp_path / "target")


def test_every_reason_is_given_at_once(tmp_path: Path) -> None:
    stored(tmp_path)
    edit(tmp_path / "draft", put(hidden_act="gelu", quantization_config={"bits": 4}, num_key_value_heads=3, head_dim=7))
    _, reasons = refusals(open_source(tmp_path / "draft", tmp_path / "target"))
    assert [one.field for one in reasons] == ["quantization_config", "hidden_act", "num_attention_heads", "head_dim"]


@pytest.mark.parametrize("other", ["dflash_config", "target_layer_ids"])
def test_a_configuration_of_two_layouts_is_refused(other: str, tmp_path: Path) -> None:
    stored(tmp_path, "speculators")
    edit(tmp_path / "draft", put(**{other: {} if other == "dflash_config" else [0, 2, 4]}))
    with pytest.raises(Refused, match=f"two layouts.*expected: speculators_model_type or {other}"):
        open_source(tmp_path / "draft")


def test_a_tensor_under_two_names_is_refused(tmp_path: Path) -> None:
    stored(tmp_path)
    rename(tmp_path / "draft", lambda tensors: tensors | {"model.fc.weight": tensors["fc.weight"]})
    with pytest.raises(Refused, match=r"under two names.*found: (model\.)?fc\.weight and (model\.)?fc\.weight"):
        read_dense(tmp_path / "draft", tmp_path / "target")


def test_a_targets_folder_is_no_drafter(tmp_path: Path) -> None:
    stored(tmp_path)
    with pytest.raises(Refused, match="not a dense drafter's configuration"):
        open_source(tmp_path / "target")


INDEX = "model.safetensors.index.json"


def sharded(tmp_path: Path) -> Path:
    """A drafter in shards."""
    config, weights = stored(tmp_path)
    write_dense(tmp_path / "many", config, weights, store="deepspec", dtype="bfloat16", shard_bytes=1000)
    return tmp_path / "many"


def reindex(folder: Path, change: Callable[[Fields], None]) -> None:
    index = read_json(folder / INDEX)
    change(index["weight_map"])
    (folder / INDEX).chmod(0o644)
    (folder / INDEX).write_text(json.dumps(index))


def test_damaged_shards_and_indexes_are_refused(tmp_path: Path) -> None:
    whole = sharded(tmp_path)
    read_dense(whole, tmp_path / "target")

    def spoiled(name: str) -> Path:
        shutil.rmtree(tmp_path / name, ignore_errors=True)
        return Path(shutil.copytree(whole, tmp_path / name))

    def refused(folder: Path, message: str) -> None:
        with pytest.raises(Refused, match=message):
            read_dense(folder, tmp_path / "target")
        assert main(["weights", "inspect", str(folder)]) == 2

    first = sorted(path.name for path in whole.glob("*.safetensors"))[0]
    folder = spoiled("truncated")
    (folder / first).chmod(0o644)
    (folder / first).write_bytes((whole / first).read_bytes()[:-5])
    refused(folder, rf"not a whole safetensors file.*{first}")
    folder = spoiled("lost")
    (folder / first).unlink()
    refused(folder, rf"a shard that is not there; expected: {first}.*do: ")
    for place in ("../target/model.safetensors", "/etc/passwd"):
        folder = spoiled("escape")
        reindex(folder, put(**{"lm_head.weight": place}))
        refused(folder, "a path leaves its folder")
    folder = spoiled("misplaced")
    reindex(folder, lambda placed: placed.update({"lm_head.weight": first}))
    refused(folder, "disagree about a tensor's place")
    folder = spoiled("link")
    (folder / first).unlink()
    (folder / first).symlink_to(whole / first)
    refused(folder, "a link is not allowed")
    folder = spoiled("two")
    shutil.copy(tmp_path / "draft" / "model.safetensors", folder)
    refused(folder, "two sets of weights")
    folder = spoiled("pickled")
    for path in folder.glob("model*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    refused(folder, r"no weights that can be read.*pytorch_model\.bin")
    folder = spoiled("index")
    (folder / INDEX).chmod(0o644)
    (folder / INDEX).write_text('{"weight_map": {"fc.weight": 3}}')
    refused(folder, "not a safetensors index")


def test_nan_in_bf16_is_refused_and_named(tmp_path: Path) -> None:
    stored(tmp_path, "specforge")
    spoiled = torch.zeros(DIM, 3 * DIM)
    spoiled[2, 7] = float("nan")
    rename(tmp_path / "draft", lambda tensors: {n: t.bfloat16() for n, t in (tensors | {"fc.weight": spoiled}).items()})
    with pytest.raises(Refused, match=rf"fc\.weight is not finite.*1 of {3 * DIM * DIM} are not"):
        read_dense(tmp_path / "draft", tmp_path / "target")


def leaves(value: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The path of every field of a configuration, objects included."""
    if not isinstance(value, dict):
        return [path]
    inner = [leaf for name, part in value.items() for leaf in leaves(part, (*path, name))]
    return inner + ([path] if path else [])


JUNK = [None, True, -1, 10**30, 0.5, "x", [], [[1]], {"a": {}}]


@pytest.mark.parametrize(("role", "store"), [*(("draft", store) for store in get_args(Store)), ("target", "specforge")])
def test_junk_in_any_field_is_refused_or_read_and_never_a_traceback(role: str, store: Store, tmp_path: Path) -> None:
    """Every field, with every kind of value that JSON has: an answer, and where it is no, a reason with its field."""
    stored(tmp_path, store, layer_types=["sliding_attention", "full_attention"], sliding_window=9)
    fields = read_json(tmp_path / role / "config.json")
    (tmp_path / role / "config.json").chmod(0o644)
    answers = set()
    for path in leaves(fields):
        for value in JUNK:
            changed = json.loads(json.dumps(fields))
            place = changed
            for part in path[:-1]:
                place = place[part]
            place[path[-1]] = value
            (tmp_path / role / "config.json").write_text(json.dumps(changed))
            try:
                config, reasons = refusals(open_source(tmp_path / "draft", tmp_path / "target"))
            except Refused:
                answers.add("refused")
                continue
            assert (config is not None) or reasons, (path, value)
            assert all(reason.field and reason.remedy for reason in reasons)
            answers.add("reasons" if reasons else "read")
    assert answers >= {"read", "reasons" if role == "draft" else "refused"}
