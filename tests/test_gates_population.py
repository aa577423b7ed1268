"""From files to a part: manifest, sidecars and K2 trajectory in, SPLIT.json out, every count checked by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gates_cases import identities
from tiny import tiny_adapter, tiny_config, tiny_weights

from d2lib.data.blocks import D2Blocks
from d2lib.data.k2 import K2File, K2Header, K2Round, leading_matches, write_k2
from d2lib.data.manifest import FileEntry, Manifest, SequenceEntry
from d2lib.data.sample import frozen_sample
from d2lib.data.sidecar import TOP, write_sidecar
from d2lib.drafter.family import reference_drafter
from d2lib.errors import Refused
from d2lib.files import sha256_file
from d2lib.gates.g2 import build_part
from d2lib.gates.journal import Contract, Journal
from d2lib.gates.scoring import Scorer, score_population, score_sample

CONFIG = tiny_config(n_stages=1, head_dim=16, q_lora_rank=16, o_lora_rank=8, moe_inter_dim=24)
WEIGHTS = tiny_weights(CONFIG)
ARMS = {
    "baseline": reference_drafter(CONFIG, WEIGHTS),
    "candidate": reference_drafter(CONFIG, WEIGHTS, tiny_adapter(CONFIG, rank=8)),
}
GEN_START = 8
SPLIT = "heldout_general"


def trajectory(request: str, tokens: list[int], generator: torch.Generator) -> list[K2Round]:
    """A live run that guesses the committed tokens about half of the time."""
    rounds, anchor = [], GEN_START
    while anchor <= len(tokens) - 2:
        guess = torch.rand(2, generator=generator)
        following = [*tokens[anchor + 1 : anchor + 3], 0, 0]
        drafts = tuple(t if g < 0.5 else (t + 1) % CONFIG.vocab_size for t, g in zip(following, guess, strict=False))
        accepted = leading_matches(drafts, tokens, anchor)
        following_anchor = anchor + accepted + 1
        rounds.append(
            K2Round(request=request, anchor=anchor, drafts=drafts, accepted=accepted, next_anchor=following_anchor)
        )
        anchor = following_anchor
    return rounds


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten sequences of unequal length, with their trajectory."""
    root = tmp_path_factory.mktemp("assembly")
    generator = torch.Generator().manual_seed(2)
    entries, rounds = [], []
    for number in range(10):
        rows, name = 18 + number, f"general-{number:03}"
        tokens = torch.randint(CONFIG.vocab_size, (rows,), generator=generator)
        write_sidecar(
            root / f"{name}.safetensors",
            tokens=tokens,
            taps=torch.randn(rows, CONFIG.n_taps * CONFIG.dim, generator=generator),
            hidden=torch.randn(rows, CONFIG.dim, generator=generator),
            top20_ids=torch.zeros(rows, TOP),
            top20_logprobs=torch.zeros(rows, TOP),
        )
        file = FileEntry.of(root, f"{name}.safetensors")
        entries.append(SequenceEntry(id=name, split=SPLIT, family=name, rows=rows, gen_start=GEN_START, file=file))
        rounds += trajectory(name, tokens.tolist(), generator)
    Manifest(
        namespace="demo",
        dim=CONFIG.dim,
        vocab_size=CONFIG.vocab_size,
        n_taps=CONFIG.n_taps,
        target={},
        sequences=tuple(entries),
    ).write(root / "MANIFEST.json")
    write_k2(root / "k2.jsonl", header(), rounds)
    return root


def header() -> K2Header:
    return K2Header(namespace="demo", split=SPLIT, block_size=CONFIG.block_size, live={})


def test_part_counts_every_complete_round_once(folder: Path, tmp_path: Path) -> None:
    manifest = Manifest.load(folder / "MANIFEST.json")
    blocks = D2Blocks(manifest, folder, SPLIT, CONFIG)
    k2 = K2File.load(folder / "k2.jsonl", manifest, folder)
    population = k2.population(manifest, SPLIT)
    contract = Contract.from_k2(k2, manifest, SPLIT, identities())
    probe = blocks.rounds_batch("general-009", population["general-009"][:3])
    scorer = Scorer(ARMS, probe)
    with Journal.open(tmp_path / "general.requests", contract) as journal:
        part = build_part(contract, score_population(scorer, blocks, population, journal, batch=5))

    assert contract.k2 == str(sha256_file(folder / "k2.jsonl"))
    assert [score.request for score in part.requests] == [entry.id for entry in manifest.split(SPLIT)]
    for score, entry in zip(part.requests, manifest.split(SPLIT), strict=True):
        wanted = [r.anchor for r in k2.rounds[entry.id] if r.anchor + CONFIG.block_size <= entry.rows - 1]
        assert population[entry.id] == wanted
        assert score.rounds == len(wanted) > 0
        if entry.id > "general-004":
            continue
        rounds = [blocks.rounds_batch(entry.id, [anchor]).round(0) for anchor in wanted]
        for name, arm in ARMS.items():
            accepted = [
                leading_matches(tuple(arm.draft(r).tolist()), [r.anchor_token, *r.target.tolist()], 0) for r in rounds
            ]
            assert getattr(score, name).accepted_sum == sum(accepted)
    assert part.judgement.totals["rounds"] == sum(map(len, population.values()))


def test_sample_is_drawn_and_scored_from_the_same_files(folder: Path) -> None:
    manifest = Manifest.load(folder / "MANIFEST.json")
    blocks = D2Blocks(manifest, folder, SPLIT, CONFIG)
    k2 = K2File.load(folder / "k2.jsonl", manifest)
    population = k2.population(manifest, SPLIT)
    sample = frozen_sample("demo", {SPLIT: (k2.sha256, population)}, size=12)
    arms = {"baseline": ARMS["baseline"], "fast": ARMS["candidate"], "ref": ARMS["candidate"]}
    scored = score_sample(Scorer(arms, blocks.rounds_batch("general-009", [8, 9])), blocks, sample.rounds[SPLIT])
    assert [(request, anchor) for request, value in scored.items() for anchor in value["anchors"]] == sample.rounds[
        SPLIT
    ]


def test_trajectory_that_leaves_a_request_out_gives_no_contract(folder: Path, tmp_path: Path) -> None:
    manifest = Manifest.load(folder / "MANIFEST.json")
    rounds = K2File.load(folder / "k2.jsonl", manifest).rounds
    write_k2(
        tmp_path / "k2.jsonl", header(), [r for name, chain in rounds.items() if name != "general-004" for r in chain]
    )
    with pytest.raises(Refused, match="general-004"):
        Contract.from_k2(K2File.load(tmp_path / "k2.jsonl", manifest), manifest, SPLIT, identities())
    with pytest.raises(Refused, match="another split"):
        Contract.from_k2(K2File.load(folder / "k2.jsonl", manifest), manifest, "dev", identities())
