"""The card of a dense drafter: what it says, what it would refuse, and that headers are enough for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest
import torch
from dense_case import DEPTH, VOCAB, dense_config, dense_weights, edit, rename, stored, write_target

from d2lib.cli import main
from d2lib.drafter.dense.config import Rope
from d2lib.drafter.dense.source import Store
from d2lib.drafter.weights import save_weights
from d2lib.drafter.weights_card import inspect_weights
from d2lib.errors import Refused
from d2lib.files import write_json


def facts(folder: Path, **options: Path) -> dict[str, str]:
    return dict(inspect_weights(folder, **options).facts)  # type: ignore[arg-type]


@pytest.mark.parametrize("store", get_args(Store))
def test_the_card_says_what_the_drafter_is(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = {
        "layout": "one_plus_n",
        "n_layers": 3,
        "layer_types": ["full_attention", "full_attention", "sliding_attention"],
        "sliding_window": 9,
        "rope": Rope(type="linear", theta=5e5, factor=2.0),
    }
    _, weights = stored(tmp_path, store, **made)
    card = inspect_weights(tmp_path / "draft", target=tmp_path / "target")
    assert card.holds
    said = dict(card.facts)
    assert said["drafts"].startswith("K = 4 slots from 5 query rows, 1+N")
    assert "inputs of the target's layers 1, 3, 5 = outputs of layers 0, 2, 4; of 6 layers" in said["taps"]
    assert said["taps"].endswith(f"counts {'inputs' if store == 'speculators' else 'outputs'}")
    assert said["layers"] == "3: 0-1 full, not causal in the block; 2 sliding, window 9, causal in the block"
    assert said["attention"] == "4 query heads over 2 KV heads of 6 channels, no biases"
    assert said["rope"].startswith("linear, base 500000, factor 2")
    assert said["Markov head"] == "vanilla, rank 3"
    assert ("stored too" in said["target's own"]) is (store == "deepspec")
    shared = sum(weights[name].numel() for name in ("embed_tokens.weight", "lm_head.weight"))
    own = sum(value.numel() for value in weights.values()) - shared
    assert said["parameters"].startswith(f"{own:,} of its own")
    assert card.by("dtype")["F32"][1] == card.size == 4 * (own + (shared if store == "deepspec" else 0))

    assert main(["weights", "inspect", str(tmp_path / "draft")]) == 0
    assert "not compared (name its folder with --target)" in capsys.readouterr().out
    assert main(["weights", "inspect", str(tmp_path / "draft"), "--target", str(tmp_path / "target"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["config"]["target_layer_ids"] == [1, 3, 5]


def test_without_a_target_a_depth_may_be_unknown(tmp_path: Path) -> None:
    stored(tmp_path, "speculators")
    assert "of unknown depth" in facts(tmp_path / "draft")["taps"]
    assert f"of {DEPTH} layers" in facts(tmp_path / "draft", target=tmp_path / "target")["taps"]


def test_every_reason_stands_on_the_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored(tmp_path)
    edit(tmp_path / "draft", lambda fields: fields.update(hidden_act="gelu", target_layer_ids=[4, 2, 0], use_swa=True))
    assert main(["weights", "inspect", str(tmp_path / "draft")]) == 2
    out = capsys.readouterr().out
    assert "3 findings: this would be refused" in out
    for field in ("hidden_act", "target_layer_ids", "use_swa"):
        assert f"  refused  {field}: expected " in out
    assert out.count("; do: ") == 3


def test_a_target_of_other_sizes_is_seen_by_its_headers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Vocabulary, width and depth are compared; no value of the target is looked at, so NaN there goes unseen."""
    stored(tmp_path)
    other = dense_config(vocab_size=VOCAB + 3, dim=16)
    weights = {name: torch.full_like(value, float("nan")) for name, value in dense_weights(other).items()}
    write_target(tmp_path / "other", weights, num_hidden_layers=DEPTH + 1)
    assert main(["weights", "inspect", str(tmp_path / "draft"), "--target", str(tmp_path / "other")]) == 2
    out = capsys.readouterr().out
    for field in ("vocab_size", "hidden_size", "num_target_layers"):
        assert f"  refused  {field}: expected the target's " in out


@pytest.mark.parametrize(
    "change",
    [
        {"quantization_config": {"bits": 4}},
        {"model_type": "gemma4"},
        {"sample_from_anchor": "maybe"},
        {"target_layer_ids": [0, 2, 5]},
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
        {"target_layer_ids": "all", "head_dim": [], "num_hidden_layers": {}, "rope_parameters": 3, "layer_types": 5},
        {"num_hidden_layers": 10**9, "layer_types": None},
    ],
)
def test_the_command_refuses_with_its_status(
    change: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored(tmp_path)
    edit(tmp_path / "draft", lambda fields: fields.update(change))
    assert main(["weights", "inspect", str(tmp_path / "draft"), "--target", str(tmp_path / "target")]) == 2
    assert "refused" in capsys.readouterr().out


def test_damage_is_refused_before_a_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored(tmp_path)
    path = tmp_path / "draft" / "model.safetensors"
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1])
    assert main(["weights", "inspect", str(tmp_path / "draft")]) == 2
    assert "d2: refused: not a whole safetensors file" in capsys.readouterr().err


def test_a_target_and_an_empty_folder_are_no_drafters(tmp_path: Path) -> None:
    stored(tmp_path)
    (tmp_path / "empty").mkdir()
    for name in ("target", "empty"):
        with pytest.raises(Refused, match=r"no family of drafters knows.*do: name a drafter's folder"):
            inspect_weights(tmp_path / name)


def test_a_dense_file_of_ours_has_a_card(tmp_path: Path) -> None:
    config = dense_config()
    save_weights(tmp_path / "native.safetensors", dense_weights(config), config)
    write_json(tmp_path / "drafter.json", config.model_dump(mode="json"))
    card = inspect_weights(tmp_path / "native.safetensors")
    assert card.holds
    assert card.config == config


def test_the_targets_that_a_layout_drops_are_listed(tmp_path: Path) -> None:
    stored(tmp_path, "speculators")
    rename(tmp_path / "draft", lambda tensors: tensors | {"t2d": torch.ones(VOCAB, dtype=torch.bool)})
    assert inspect_weights(tmp_path / "draft").unused == ("t2d",)
