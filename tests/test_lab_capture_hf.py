"""Capture from a Hugging Face folder: a whole assembly, resumed to the same bytes; answers that end; refusals."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hf_case import write_llama

from d2lib.data.assembly import Assembly
from d2lib.data.integrity import integrity_rows
from d2lib.errors import Interrupted, Refused
from d2lib.files import read_json, record_tree
from d2lib.lab.capture import CaptureProfile, capture
from d2lib.lab.g1 import run_g1
from d2lib.lab.model import load_model
from d2lib.lab.replay import likeliest
from d2lib.lab.sampling import ended_rows, sample

GROUPS = {"train": "legal", "dev": "legal", "heldout_legal": "legal", "heldout_general": "general"}


def profile(folder: Path, **changes: Any) -> CaptureProfile:
    drafter = {
        "dim": 32,
        "vocab_size": 258,
        "n_stages": 1,
        "block_size": 3,
        "noise_token_id": 257,
        "target_layer_ids": [0, 2],
        "window": 16,
        "n_heads": 2,
        "head_dim": 8,
        "rope_head_dim": 4,
        "q_lora_rank": 8,
        "o_lora_rank": 4,
        "o_groups": 1,
        "n_routed_experts": 2,
        "n_activated": 1,
        "moe_inter_dim": 8,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 2,
        "markov_rank": 4,
    }
    values: dict[str, Any] = {
        "namespace": "hf",
        "threads": 1,
        "target": {"kind": "huggingface", "folder": str(folder / "model"), "tap_layers": [0, 2]},
        "prompts": str(folder / "prompts"),
        "gen_start": 48,
        "rows": 64,
        "least_rows": 56,
        "temperature": 1.0,
        "sampling_tile": 2,
        "sequences": {split: {kind: 3} for split, kind in GROUPS.items()},
        "drafter": drafter | changes.pop("drafter", {}),
        "pretraining_sequences": 3,
        "pretraining": {"updates": 6, "streams": 2, "anchors": 2, "lr": 0.01},
    }
    return CaptureProfile.model_validate(values | changes)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    write_llama(folder / "model")
    (folder / "prompts").mkdir()
    (folder / "prompts" / "preamble.txt").write_text("abc " * 20)
    for group, kind in {**GROUPS, "pretraining": "general"}.items():
        families = {f"{group}-a": [f"{group} 1", f"{group} 2"], f"{group}-b": [f"{group} 3"]}
        (folder / "prompts" / f"{group}.yaml").write_text(yaml.safe_dump({kind: families}))
    return folder


@pytest.fixture(scope="module")
def captured(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("captured")
    capture(profile(sources), out)
    return out


def test_the_assembly_passes_g1_and_needs_its_sources_no_more(captured: Path) -> None:
    found = run_g1(Assembly(captured))
    assert found.holds, [row for row in found.rows if not row.holds]
    manifest = Assembly(captured).manifest
    assert manifest.target["name"] == "LlamaForCausalLM"
    assert all(56 <= entry.rows <= 64 for entry in manifest.sequences)
    assert all(row.holds for row in integrity_rows(manifest, captured, load_model(captured).head))
    assert not (captured / "pretraining").exists()
    names = [source["name"] for source in read_json(captured / "provenance.json")["sources"]]
    assert {"prompts/dev.yaml", "prompts/preamble.txt", "target/model.safetensors"} <= set(names)


@pytest.mark.parametrize("stops", [(5, 40), (146, 4), (151,), (170, 3)])
def test_an_interrupted_capture_goes_on_to_the_same_bytes(
    sources: Path, captured: Path, tmp_path: Path, stops: tuple[int, ...]
) -> None:
    for limit in stops:
        asked = itertools.count()
        try:
            capture(profile(sources), tmp_path, stop=lambda limit=limit, asked=asked: next(asked) >= limit)  # type: ignore[misc]
        except Interrupted:
            continue
    capture(profile(sources), tmp_path)
    assert record_tree(tmp_path) == record_tree(captured)


def test_other_prompts_are_another_capture(sources: Path, captured: Path, tmp_path: Path) -> None:
    other = profile(sources, temperature=0.5)
    with pytest.raises(Refused, match="another capture"):
        capture(other, captured)


def test_a_drafter_of_other_sizes_is_refused(sources: Path, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"one dim.*32"):
        capture(profile(sources, drafter={"dim": 24}), tmp_path)


def test_a_profile_names_what_its_kind_of_target_needs(sources: Path) -> None:
    for changes in ({"prompts": None}, {"least_rows": None}, {"least_rows": 50}, {"least_rows": 65}):
        with pytest.raises(ValueError, match=r"prompts|least_rows|rows"):
            profile(sources, **changes)


def test_stop_tokens_end_a_sequence_but_not_before_its_least_rows(captured: Path) -> None:
    target = load_model(captured)
    ends = list(range(0, 258, 2))
    tokens = sample(
        target,
        torch.full((4, 5), 3),
        [1, 2, 3, 4],
        rows=40,
        temperature=1.0,
        tile=4,
        stop_tokens=ends,
        least=12,
    )
    assert bool((tokens[:, 5:11] % 2 == 1).all())
    lengths = [ended_rows(row, 5, ends) for row in tokens]
    assert all(12 <= length < 40 for length in lengths)
    for row, length in zip(tokens.tolist(), lengths, strict=True):
        assert row[length - 1] in ends
        assert not set(row[5 : length - 1]) & set(ends)
    assert ended_rows(torch.tensor([1, 2, 3]), 1, []) == 3


def test_the_likeliest_are_those_of_a_stable_sort() -> None:
    logprobs = torch.randint(12, (9, 100), generator=torch.Generator().manual_seed(2)).float()
    values, ids = likeliest(logprobs)
    expected = logprobs.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(values, expected.values[:, :20])
    assert torch.equal(ids, expected.indices[:, :20])
