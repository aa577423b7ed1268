"""Scoring against a loop written from the formulas, against real drafting, and through interruptions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gates_cases import digest, identities
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import random_batch, tiny_adapter, tiny_config, tiny_weights

from d2lib.drafter.batch import BlockBatch
from d2lib.drafter.batched import select_rounds
from d2lib.drafter.family import reference_drafter
from d2lib.drafter.reference import Reference
from d2lib.errors import Interrupted, Refused
from d2lib.files import canonical_json
from d2lib.gates import scoring
from d2lib.gates.g2 import build_part
from d2lib.gates.journal import Contract, Journal
from d2lib.gates.pilot import SampledRounds
from d2lib.gates.scoring import (
    Scorer,
    describe_device,
    log_softmax,
    measure,
    score_population,
    score_request,
    score_sample,
)

CONFIG = tiny_config(n_stages=1, head_dim=16, q_lora_rank=16, o_lora_rank=8, moe_inter_dim=24)
K, V = CONFIG.block_size, CONFIG.vocab_size
WEIGHTS = tiny_weights(CONFIG)
ARMS = {
    "baseline": reference_drafter(CONFIG, WEIGHTS),
    "candidate": reference_drafter(CONFIG, WEIGHTS, tiny_adapter(CONFIG, rank=8)),
}


class Rounds:
    """A split in memory: every request is one batch of complete rounds, found by anchor."""

    def __init__(self, requests: dict[str, BlockBatch]) -> None:
        self.requests = requests

    def rounds_batch(self, sequence_id: str, anchors: Sequence[int]) -> BlockBatch:
        whole = self.requests[sequence_id]
        places = [whole.anchor.tolist().index(anchor) for anchor in anchors]
        return select_rounds(whole, torch.tensor(places))

    @property
    def population(self) -> dict[str, list[int]]:
        return {name: batch.anchor.tolist() for name, batch in self.requests.items()}


pick = Rounds.rounds_batch


def make(seed: int, count: int = 24) -> BlockBatch:
    """Distinct complete rounds in order, whose committed tokens follow an arm's own drafts for 0 … K tokens."""
    batch = random_batch(CONFIG, count, seed, rows=60)
    _, first = np.unique(batch.anchor.numpy(), return_index=True)
    batch = select_rounds(batch, torch.tensor([i for i in first if batch.valid[i].all()]))
    target, previous = batch.target.clone(), batch.previous.clone()
    for i in range(len(batch)):
        length = i // 2 % (K + 1)
        drafts = ARMS["candidate" if i % 2 else "baseline"].draft(batch.round(i))
        target[i, :length] = drafts[:length]
        if length < K and target[i, length] == drafts[length]:
            target[i, length] = (drafts[length] + 1) % V
        previous[i, 1:] = target[i, :-1]
    return replace(batch, target=target, previous=previous)


BLOCKS = Rounds({f"dev-{i:03}": make(i) for i in range(3)})
FIRST = BLOCKS.requests["dev-000"]
PROBE = select_rounds(FIRST, torch.arange(4))
SCORER = Scorer(ARMS, PROBE)


def by_hand(arm: Reference, batch: BlockBatch) -> tuple[list[int], np.ndarray]:
    """One round at a time: draft, compare with what was committed, and sum the divergence in numpy."""
    accepted, divergences = [], []
    for index in range(len(batch)):
        round = batch.round(index)
        length = 0
        for draft, committed in zip(arm.draft(round).tolist(), round.target.tolist(), strict=True):
            if draft != committed:
                break
            length += 1
        accepted.append(length)
        q = arm.forward(round).logits.double().numpy()
        p = round.teacher_hidden.double().numpy() @ WEIGHTS["head.weight"].double().numpy().T
        logq = q - np.log(np.exp(q - q.max(-1, keepdims=True)).sum(-1, keepdims=True)) - q.max(-1, keepdims=True)
        logp = p - np.log(np.exp(p - p.max(-1, keepdims=True)).sum(-1, keepdims=True)) - p.max(-1, keepdims=True)
        divergences.append((np.exp(logp) * (logp - logq)).sum(-1))
    return accepted, np.array(divergences)


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("request_id", BLOCKS.requests)
def test_rounds_are_what_drafting_and_the_formula_give(arm: str, request_id: str) -> None:
    """Accepted lengths come from one teacher-forced pass; drafting token by token gives the same, every length seen."""
    found = SCORER.rounds(BLOCKS, request_id, BLOCKS.population[request_id])[arm]
    accepted, divergences = by_hand(ARMS[arm], BLOCKS.requests[request_id])
    assert found.accepted == accepted
    assert set(accepted) == set(range(K + 1))
    assert np.array(found.kl) == pytest.approx(divergences, rel=1e-4, abs=1e-5)


def test_many_random_rounds_accept_what_drafting_accepts() -> None:
    """No construction here: the teacher-forced argmax and the drafts agree up to their first miss on any round."""
    batch = random_batch(CONFIG, 300, seed=9, rows=80)
    logits = SCORER._many["candidate"].forward_batch(batch)[1]
    drafts = SCORER._many["candidate"].draft_batch(batch)
    hits, forced = drafts == batch.target, logits.argmax(-1) == batch.target
    assert torch.equal(hits.long().cumprod(-1), forced.long().cumprod(-1))
    assert hits.long().cumprod(-1).sum() > 0


def test_lowest_index_wins_a_tie() -> None:
    """Tokens 7 and 31 have equal logits everywhere and beat the rest: drafting, and so scoring, takes 7."""
    weights = {**WEIGHTS, "head.weight": WEIGHTS["head.weight"].clone()}
    name = f"mtp.{CONFIG.n_stages - 1}.markov_head.head.weight"
    weights[name] = torch.zeros_like(weights[name])
    weights["head.weight"][:] *= 1e-3
    weights["head.weight"][[7, 31]] = WEIGHTS["head.weight"][7] * 50
    batch = random_batch(CONFIG, 40, seed=3, rows=60)
    logits = reference_drafter(CONFIG, weights).forward(batch.round(5)).logits
    assert torch.equal(logits[:, 7], logits[:, 31])
    top = logits.argmax(-1)
    slots = (logits.amax(-1) == logits[:, 7]).nonzero().flatten()
    assert len(slots)
    assert (top[slots] == 7).all()


@pytest.mark.parametrize("batch", [1, 2, 7, 13, 256])
def test_batches_do_not_show(batch: int) -> None:
    """Sums are equal in every bit, whatever goes together."""
    request = "dev-001"
    whole = score_request(SCORER, BLOCKS, request, BLOCKS.population[request])
    assert score_request(SCORER, BLOCKS, request, BLOCKS.population[request], batch=batch) == whole


def test_fallback_gives_the_same_bits_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "self_check", lambda *_: False)
    slow = Scorer(ARMS, PROBE)
    assert (SCORER.batched, slow.batched) == (True, False)
    assert "same bits as one by one" in SCORER.note
    assert "one round at a time" in slow.note
    for many in slow._many.values():
        monkeypatch.setattr(many, "forward_batch", None)  # not to be called
    asked: list[int] = []
    monkeypatch.setattr(
        Rounds, "rounds_batch", lambda self, name, part: asked.append(len(part)) or pick(self, name, part)
    )
    request = "dev-002"
    anchors = BLOCKS.population[request]
    assert score_request(slow, BLOCKS, request, anchors) == score_request(SCORER, BLOCKS, request, anchors)
    assert asked == [1] * len(anchors) + [len(anchors)]


@pytest.mark.parametrize("what", ["accepted", "kl"])
def test_a_platform_whose_measures_depend_on_the_batch_is_found_out(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fickle(logits: torch.Tensor, teacher: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        accepted, kl = measure(logits, teacher, target)
        if len(target) > 1 and what == "kl":
            kl[-1, -1] = torch.nextafter(kl[-1, -1], torch.tensor(torch.inf, dtype=kl.dtype))
        if len(target) > 1 and what == "accepted":
            accepted[-1] = K - accepted[-1]
        return accepted, kl

    monkeypatch.setattr(scoring, "measure", fickle)
    assert not Scorer(ARMS, PROBE).batched


@settings(max_examples=20, deadline=None)
@given(rounds=st.integers(1, 9), vocabulary=st.integers(2, 70), seed=st.integers(0, 2**16))
def test_log_softmax_is_batch_invariant_and_right(rounds: int, vocabulary: int, seed: int) -> None:
    logits = 20 * torch.randn(rounds, 3, vocabulary, generator=torch.Generator().manual_seed(seed))
    whole = log_softmax(logits)
    assert torch.allclose(whole, logits.double().log_softmax(-1), rtol=0, atol=1e-12)
    for index in range(rounds):
        assert torch.equal(log_softmax(logits[index : index + 1])[0], whole[index])


def test_divergence_in_closed_form() -> None:
    """Two tokens: KL(p || q) = p log(p/q) + (1-p) log((1-p)/(1-q)); zero where p = q."""
    p, q = torch.tensor(0.7, dtype=torch.float64), torch.tensor(0.2, dtype=torch.float64)
    teacher = torch.stack([p, 1 - p]).log().expand(1, 2, 2)
    logits = torch.stack([torch.stack([q, 1 - q]).log(), torch.stack([p, 1 - p]).log()])[None]
    accepted, kl = measure(logits, teacher, torch.tensor([[1, 1]]))
    expected = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    assert kl[0].tolist() == pytest.approx([float(expected), 0.0], abs=1e-12)
    assert accepted.tolist() == [1]


@pytest.mark.parametrize(("hits", "accepted"), [("111", 3), ("110", 2), ("101", 1), ("011", 0), ("000", 0), ("100", 1)])
def test_accepted_is_the_leading_run(hits: str, accepted: int) -> None:
    target = torch.tensor([[int(hit) for hit in hits]])
    logits = torch.tensor([0.0, 1.0]).expand(1, 3, 2)
    assert measure(logits, log_softmax(logits), target)[0].tolist() == [accepted]


# --- refusals


def changed(request: str, **fields: Any) -> Rounds:
    return Rounds({**BLOCKS.requests, request: replace(BLOCKS.requests[request], **fields)})


def test_an_incomplete_round_is_refused() -> None:
    valid = FIRST.valid.clone()
    valid[4, -1] = False
    with pytest.raises(Refused, match="incomplete"):
        SCORER.rounds(changed("dev-000", valid=valid), "dev-000", BLOCKS.population["dev-000"])


def test_rounds_other_than_those_asked_for_are_refused() -> None:
    class Shifted(Rounds):
        def rounds_batch(self, sequence_id: str, anchors: Sequence[int]) -> BlockBatch:
            return super().rounds_batch(sequence_id, list(reversed(anchors)))

    with pytest.raises(Refused, match="other rounds"):
        SCORER.rounds(Shifted(BLOCKS.requests), "dev-000", BLOCKS.population["dev-000"])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_divergence_that_is_not_finite_is_refused(value: float) -> None:
    hidden = FIRST.teacher_hidden.clone()
    hidden[int(FIRST.teacher[6, 0])] = value
    with pytest.raises(Refused, match=r"dev-000, anchor \d+, baseline"):
        SCORER.rounds(changed("dev-000", teacher_hidden=hidden), "dev-000", BLOCKS.population["dev-000"])


@pytest.mark.parametrize("other", ["head", "configuration"])
def test_drafters_of_another_target_are_refused(other: str) -> None:
    if other == "head":
        odd = reference_drafter(CONFIG, {**WEIGHTS, "head.weight": WEIGHTS["head.weight"] + 1e-3})
    else:
        odd = reference_drafter(CONFIG.model_copy(update={"rope_theta": 9999.0}), WEIGHTS)
    with pytest.raises(Refused, match="share"):
        Scorer({"baseline": ARMS["baseline"], "candidate": odd}, PROBE)


# --- progress, interruption, resume


CONTRACT = Contract.of("dev", K, digest("c"), identities(), BLOCKS.population)


def run(folder: Path, stop: Any = None, progress: Any = None) -> bytes:
    with Journal.open(folder, CONTRACT) as journal:
        scores = score_population(SCORER, BLOCKS, BLOCKS.population, journal, batch=8, stop=stop, progress=progress)
    return canonical_json(build_part(CONTRACT, scores).model_dump())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return run(tmp_path_factory.mktemp("whole") / "dev.requests")


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stops=st.lists(st.integers(0, 30), max_size=3))
def test_any_interruption_then_resume_ends_in_the_same_part(
    stops: list[int], whole: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Stop at the n-th question, between or within requests, as often as the list says; then finish."""
    folder = tmp_path_factory.mktemp("j") / "dev.requests"
    for count in stops:
        left = [count]

        def stop(left: list[int] = left) -> bool:
            left[0] -= 1
            return left[0] < 0

        before = set(folder.glob("dev-*.json"))
        try:
            assert run(folder, stop) == whole
        except Interrupted:
            assert before <= set(folder.glob("dev-*.json"))
    assert run(folder) == whole


def test_progress_counts_every_round_once(tmp_path: Path) -> None:
    done: list[int] = []
    run(tmp_path / "dev.requests", progress=done.append)
    assert sum(done) == sum(map(len, BLOCKS.population.values()))
    assert max(done) == 8
    again: list[int] = []
    run(tmp_path / "dev.requests", progress=again.append)
    assert again == []


def test_sample_is_scored_per_request_in_order() -> None:
    sample = [(request, anchor) for request, anchors in BLOCKS.population.items() for anchor in anchors[::3]]
    arms = {"baseline": ARMS["baseline"], "fast": ARMS["candidate"], "ref": ARMS["candidate"]}
    scored = score_sample(Scorer(arms, PROBE), BLOCKS, list(reversed(sample)))
    assert list(scored) == sorted(BLOCKS.population)
    for request, value in scored.items():
        record = SampledRounds.model_validate(value)
        assert record.anchors == BLOCKS.population[request][::3]
        full = SCORER.rounds(BLOCKS, request, BLOCKS.population[request])
        assert record.baseline == full["baseline"].accepted[::3]
        assert record.fast == record.ref == full["candidate"].accepted[::3]


def test_a_scorer_says_what_decides_its_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SCORER.computation
    assert (found.torch, found.batched) == (str(torch.__version__), SCORER.batched)
    assert found.device.startswith("cpu, ")
    assert found.device.endswith(torch.backends.cpu.get_cpu_capability())
    monkeypatch.setattr(SCORER, "batched", not SCORER.batched)
    assert SCORER.computation != found
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA RTX")
    assert describe_device(torch.device("cuda:1")) == "cuda, NVIDIA RTX"
