"""The live check: speculation gives the target's tokens, its accepted lengths are the gates'; what is broken shows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hf_case import write_llama
from live_case import GEN_START, ROWS, VOCABULARY, write_byte_target, write_run

from d2lib.data.assembly import Assembly
from d2lib.drafter.lora import initialize_adapter
from d2lib.errors import Interrupted, Refused
from d2lib.files import write_json
from d2lib.lab import live
from d2lib.lab.hf_target import describe_huggingface, open_huggingface, write_huggingface
from d2lib.lab.live import (
    Difference,
    compare_tokens,
    count_accepted,
    decode_alone,
    decode_speculative,
    live_check,
    walk,
)
from d2lib.lab.model import LanguageModel


def huggingface(folder: Path) -> LanguageModel:
    write_llama(folder / "model", vocab_size=258)
    target = open_huggingface(folder / "model", (0, 2), rows=ROWS).target
    write_json(folder / "target.json", describe_huggingface(target))
    write_huggingface(folder / "target.safetensors", target)
    return target


@pytest.fixture(scope="module", params=["bytes", "huggingface"])
def assembly(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Assembly:
    folder = tmp_path_factory.mktemp(request.param)
    target = write_byte_target(folder) if request.param == "bytes" else huggingface(folder)
    return write_run(folder, target)


def check(assembly: Assembly, folder: Path, *names: str, **options: Any) -> live.LiveCheck:
    adapters = {"baseline": None, "candidate": initialize_adapter(assembly.config, 2, 23)}
    arms = {name: adapters[name] for name in names or ("candidate",)}
    return live_check(assembly, arms, "heldout_legal", folder, **({"requests": 2, "rows": ROWS} | options))


def test_tokens_are_the_targets_and_accepted_lengths_are_the_gates(assembly: Assembly, tmp_path: Path) -> None:
    found = check(assembly, tmp_path / "live", "baseline", "candidate")
    assert found.holds
    for arm in ("baseline", "candidate"):
        figures = found.figures(arm)
        assert figures["token differences"] == figures["rounds that differ"] == 0
        assert figures["live - proxy"] == 0
        assert figures["live rounds"] == figures["proxy rounds"] > 0
    assert sum(request.live_accepted for request in found.requests) > 0
    # a fresh adapter changes nothing
    both = [[r for r in found.requests if r.arm == arm] for arm in ("baseline", "candidate")]
    assert [r.live_accepted for r in both[0]] == [r.live_accepted for r in both[1]]


def test_a_verifier_that_accepts_one_draft_too_many_is_noticed(
    assembly: Assembly, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "count_accepted", lambda drafts, says: min(len(drafts), count_accepted(drafts, says) + 1))
    found = check(assembly, tmp_path / "live")
    assert not found.holds
    assert found.figures("candidate")["token differences"] > 0


def test_a_verifier_that_wastes_drafts_gives_the_right_tokens_and_is_noticed(
    assembly: Assembly, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "count_accepted", lambda drafts, says: 0)
    found = check(assembly, tmp_path / "live")
    figures = found.figures("candidate")
    assert figures["token differences"] == 0
    assert figures["live - proxy"] < 0
    assert figures["rounds that differ"] > figures["of them ties"] == 0
    assert not found.holds


class Oracle:
    """Drafts what the target says, but for one wrong token in every `period` rows."""

    config = SimpleNamespace(block_size=5, context_rows=lambda anchor: min(anchor, 7))

    def __init__(self, tokens: torch.Tensor, period: int) -> None:
        self.tokens, self.period = tokens.tolist(), period

    def draft(self, round: Any) -> torch.Tensor:
        rows = range(round.anchor + 1, round.anchor + 6)
        wanted = [self.tokens[row] if row < len(self.tokens) else 0 for row in rows]
        return torch.tensor([(t + (row % self.period == 0)) % VOCABULARY for t, row in zip(wanted, rows, strict=True)])


@pytest.mark.parametrize("period", [1, 2, 3, 7, 100])
def test_however_many_drafts_are_right_the_tokens_are_the_targets(tmp_path: Path, period: int) -> None:
    target = write_byte_target(tmp_path)
    context = torch.arange(GEN_START) % VOCABULARY
    alone = decode_alone(target, context, ROWS)
    decoded = decode_speculative(target, Oracle(alone.tokens, period), context, ROWS)  # type: ignore[arg-type]
    assert torch.equal(decoded.tokens, alone.tokens)
    for played in decoded.rounds:
        if played.anchor + 5 < ROWS:
            wrong = [row for row in range(played.anchor + 1, played.anchor + 6) if row % period == 0]
            assert played.accepted == (wrong[0] - played.anchor - 1 if wrong else 5)


def test_a_stop_token_ends_both_decodings_alike(tmp_path: Path) -> None:
    target = write_byte_target(tmp_path)
    context = torch.arange(GEN_START) % VOCABULARY
    free = decode_alone(target, context, ROWS).tokens
    ends = [int(free[GEN_START + 9])]
    alone = decode_alone(target, context, ROWS, stop_tokens=ends).tokens
    decoded = decode_speculative(target, Oracle(free, 100), context, ROWS, stop_tokens=ends)  # type: ignore[arg-type]
    assert torch.equal(decoded.tokens, alone)
    assert len(alone) < ROWS
    assert int(alone[-1]) == ends[0]


def test_a_tie_is_shown_with_its_margin_and_anything_else_is_a_difference(tmp_path: Path) -> None:
    target = write_byte_target(tmp_path)
    alone = decode_alone(target, torch.arange(GEN_START), ROWS).tokens
    other = alone.clone()
    other[20] = (other[20] + 1) % VOCABULARY
    assert compare_tokens(target, alone, alone) is None
    found = compare_tokens(target, alone, other)
    assert found is not None
    assert (found.row, found.tie) == (20, False)
    assert found.margin > 0.001
    short = compare_tokens(target, alone, alone[:-1])
    assert short is not None
    assert not short.tie

    class Tied:
        def __call__(self, tokens: torch.Tensor) -> Any:
            return SimpleNamespace(hidden=torch.zeros(1, 1, 1))

        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            return torch.tensor([2.0, 10.0, 10.0 - 2e-6, 0.0])

    tie = compare_tokens(Tied(), torch.tensor([0, 1]), torch.tensor([0, 2]))  # type: ignore[arg-type]
    assert isinstance(tie, Difference)
    assert tie.tie
    lost = compare_tokens(Tied(), torch.tensor([0, 1]), torch.tensor([0, 3]))  # type: ignore[arg-type]
    assert lost is not None
    assert not lost.tie


def test_counting_and_walking_in_closed_form() -> None:
    assert count_accepted([4, 5, 6], [4, 5, 7, 8]) == 2
    assert count_accepted([4, 5, 6], [4, 5, 6, 8]) == 3
    assert count_accepted([4], [5, 4]) == 0
    assert walk({10: 2, 11: 0, 12: 0, 13: 1, 14: 5, 15: 0}, 10) == [(10, 2), (13, 1), (15, 0)]
    assert walk({}, 10) == []


def test_stops_and_refusals(assembly: Assembly, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        check(assembly, tmp_path / "live", stop=lambda: True)
    with pytest.raises(Refused, match="not so many requests"):
        check(assembly, tmp_path / "other", requests=3)
