"""A small case with a dense drafter: captured, its live drafts the reference's, its live rounds the gates'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_lab import PROFILE
from tiny_dense import ROPES, dense_config

from d2lib.data.assembly import Assembly
from d2lib.data.check import CheckRow
from d2lib.drafter.batched import BatchedReference
from d2lib.drafter.family import fast_drafter
from d2lib.drafter.lora import initialize_adapter
from d2lib.drafter.reference import teacher_logits
from d2lib.gates.parity import compare_drafts
from d2lib.gates.scoring import log_softmax
from d2lib.lab import capture as capturing
from d2lib.lab.capture import CaptureProfile, capture
from d2lib.lab.corpus import Corpus, read_corpus
from d2lib.lab.g1 import run_g1
from d2lib.lab.live import live_check
from d2lib.lab.pretrain import native_loss

SIZES: dict[str, Any] = {
    "dim": 16,
    "vocab_size": 256,
    "mask_token_id": 255,
    "target_layer_ids": (0, 1),
    "n_target_layers": 2,
    "block_size": 7,
}
CASES = {
    "anchor first, rnn, yarn": dense_config(**SIZES, markov_head_type="rnn", rope=ROPES["yarn"]),
    "one plus n, no markov, mixed": dense_config(
        **SIZES,
        layout="one_plus_n",
        markov_rank=0,
        confidence=False,
        layer_types=("sliding_attention", "full_attention"),
        causal=(True, False),
        sliding_window=9,
    ),
}


@pytest.fixture(scope="module", params=CASES)
def assembly(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Assembly:
    whole = read_corpus(("d2-workbench",), least_general=1_000_000, least_legal=50_000)
    general, legal = (
        {name: [passages[0][:1000]] for name, passages in list(families.items())[:30]}
        for families in (whole.general, whole.legal)
    )
    folder = tmp_path_factory.mktemp("dense") / "assembly"
    profile = PROFILE | {"drafter": CASES[request.param].model_dump(mode="json")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capturing, "read_corpus", lambda *_, **__: Corpus(general, legal, whole.sources))
        capture(CaptureProfile.model_validate(profile), folder)
    return Assembly(folder)


def test_g1_holds_and_every_live_round_is_the_references(assembly: Assembly) -> None:
    found = run_g1(assembly)
    assert found.holds, [row for row in found.rows if not row.holds]
    assert all(parity.rounds > 20 for parity in found.parities)


def test_parity_notices_another_drafter(assembly: Assembly) -> None:
    weights = dict(assembly.weights)
    weights["fc.weight"] = -weights["fc.weight"]
    row: CheckRow = compare_drafts(
        BatchedReference(assembly.config, weights), assembly.blocks("dev"), assembly.k2("dev")
    ).row()
    assert not row.holds


def test_a_live_run_is_the_targets_and_counts_what_the_gates_count(assembly: Assembly, tmp_path: Path) -> None:
    arms = {"baseline": None, "candidate": initialize_adapter(assembly.config, 2, 23)}
    found = live_check(assembly, arms, "heldout_legal", tmp_path / "live", requests=2)
    assert found.holds
    assert found.block_size == 7
    for arm in arms:
        figures = found.figures(arm)
        assert figures["token differences"] == figures["rounds that differ"] == figures["live - proxy"] == 0
        assert figures["live rounds"] == figures["proxy rounds"] > 0


def test_the_native_drafter_has_learned_and_keeps_the_targets_tensors(assembly: Assembly) -> None:
    fresh = capturing.initialize(
        assembly.config,
        assembly.weights["embed_tokens.weight"],
        assembly.weights["lm_head.weight"],
        torch.Generator().manual_seed(0),
    )
    batch = assembly.blocks("train").batch(torch.arange(0, 60, 4))
    with torch.no_grad():
        before = native_loss(fast_drafter(assembly.config, fresh), batch)
        after = native_loss(fast_drafter(assembly.config, assembly.weights), batch)
    assert float(after) < float(before)


def test_a_slots_teacher_is_the_row_of_its_previous_token(assembly: Assembly) -> None:
    """Row a+i's hidden state is the distribution of t_{a+1+i}: rows one earlier or later say it worse."""
    blocks = assembly.blocks("train")
    batch = blocks.rounds_batch(blocks.entries[0].id, range(blocks.entries[0].gen_start + 1, 39))
    told = log_softmax(teacher_logits(assembly.weights["lm_head.weight"], batch.teacher_hidden))
    inside = (batch.teacher > 0) & (batch.teacher < len(told) - 1) & batch.valid

    def surprise(shift: int) -> float:
        place = (batch.teacher + shift).clamp(0, len(told) - 1)
        return -float(told[place].gather(-1, batch.target.unsqueeze(-1)).squeeze(-1)[inside].mean())

    assert surprise(0) < min(surprise(-1), surprise(1)) - 0.05
