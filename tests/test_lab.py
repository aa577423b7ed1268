"""The lab: the target, sampling, the canonical forward, live decoding, and a whole small capture, pilot and G1."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from gates_cases import identities
from tiny import tiny_config, tiny_weights
from torch.nn import functional as F

from d2lib.data.assembly import SCORED, Assembly
from d2lib.drafter.batched import BatchedReference
from d2lib.drafter.family import fast_drafter
from d2lib.errors import Interrupted, Refused
from d2lib.files import sha256_file, write_json
from d2lib.gates.evaluate import Evaluation, evaluate_split
from d2lib.gates.parity import compare_drafts
from d2lib.lab import capture as capturing
from d2lib.lab.capture import CaptureProfile, capture
from d2lib.lab.corpus import Corpus, group_similar, read_corpus, split_families
from d2lib.lab.decode import Stream, decode_live
from d2lib.lab.g1 import run_g1
from d2lib.lab.model import load_model
from d2lib.lab.pilot import Pilot, run_pilot
from d2lib.lab.pretrain import native_loss
from d2lib.lab.prompts import draw_prompts
from d2lib.lab.replay import canonical_rows, replay_rows
from d2lib.lab.sampling import sample
from d2lib.lab.target import KVCache, Target, TargetConfig, load_target, save_target
from d2lib.lab.training import TargetTraining, train_target, warmup_cosine
from d2lib.train.recipe import to_qualify

CONFIG = TargetConfig(vocab_size=256, dim=16, n_layers=3, n_heads=2, mlp_dim=24, tap_layers=(0, 2))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(CONFIG, generator()).requires_grad_(False)


def some_tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(256, shape, generator=generator(seed))


# --- the target


def test_the_target_in_plain_steps(target: Target) -> None:
    """The same forward with a loop over positions and pairs, nothing shared but the weights."""
    tokens = some_tokens(1, 7)
    c, w = CONFIG, {name: value.double() for name, value in target.state_dict().items()}
    x = w["embed"][tokens[0]]

    def norm(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return values / (values.square().mean(-1, keepdim=True) + c.norm_eps).sqrt() * weight

    def turn(vector: torch.Tensor, position: int) -> torch.Tensor:
        out = vector.clone()
        for pair in range(c.head_dim // 2):
            angle = torch.tensor(position * c.rope_theta ** (-2 * pair / c.head_dim), dtype=torch.float64)
            even, odd = vector[2 * pair], vector[2 * pair + 1]
            out[2 * pair] = even * angle.cos() - odd * angle.sin()
            out[2 * pair + 1] = even * angle.sin() + odd * angle.cos()
        return out

    taps = {}
    for number in range(c.n_layers):
        taps[number] = x
        h = norm(x, w[f"layers.{number}.attn_norm"])
        q, k, v = (h @ w[f"layers.{number}.qkv"].T).view(7, 3, c.n_heads, c.head_dim).unbind(1)
        mixed = torch.zeros(7, c.n_heads, c.head_dim, dtype=torch.float64)
        for row in range(7):
            for head in range(c.n_heads):
                turned = turn(q[row, head], row)
                score = torch.stack([turned @ turn(k[j, head], j) for j in range(row + 1)]) / c.head_dim**0.5
                mixed[row, head] = score.softmax(0) @ v[: row + 1, head]
        x = x + mixed.flatten(1) @ w[f"layers.{number}.out"].T
        gate, up = (norm(x, w[f"layers.{number}.mlp_norm"]) @ w[f"layers.{number}.up"].T).chunk(2, -1)
        x = x + (gate * torch.sigmoid(gate) * up) @ w[f"layers.{number}.down"].T
    found = target(tokens)
    torch.testing.assert_close(found.taps[0].double(), torch.cat([taps[0], taps[2]], -1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.hidden[0].double(), norm(x, w["norm"]), rtol=1e-4, atol=1e-4)


def test_a_cached_forward_is_the_whole_one(target: Target) -> None:
    tokens = some_tokens(2, 11)
    whole, cache = target(tokens), KVCache.empty(CONFIG, 2, 11)
    parts = [target(tokens[:, a:b], cache) for a, b in ((0, 5), (5, 6), (6, 11))]
    torch.testing.assert_close(torch.cat([part.hidden for part in parts], 1), whole.hidden, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat([part.taps for part in parts], 1), whole.taps, rtol=1e-5, atol=1e-5)


def test_a_target_on_disk_is_the_same_and_a_wrong_one_is_refused(target: Target, tmp_path: Path) -> None:
    save_target(tmp_path, target)
    again = load_target(tmp_path)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in target.state_dict().items())
    shutil.move(tmp_path / "target.json", tmp_path / "old.json")
    write_json(tmp_path / "target.json", CONFIG.model_dump(mode="json") | {"n_layers": 2, "tap_layers": [0, 1]})
    with pytest.raises(Refused, match="do not fit its sizes"):
        load_target(tmp_path)


@pytest.mark.parametrize("muon", [None, 0.01])
def test_training_learns_and_repeats_its_bits(muon: float | None) -> None:
    text = torch.tensor(list(b"the drafter drafts and the target verifies; " * 40), dtype=torch.uint8)
    config = TargetTraining(steps=25, batch=4, length=32, lr=0.01, muon_lr=muon)
    losses: list[float] = []
    first, second = (
        train_target(
            Target(CONFIG, generator()),
            [text, text],
            config,
            generator(2),
            progress=lambda _, loss: losses.append(loss),
        )
        for _ in range(2)
    )
    assert losses[24] < 0.6 * losses[0]
    assert losses[:25] == losses[25:]
    assert all(torch.equal(value, second.state_dict()[name]) for name, value in first.state_dict().items())
    assert not any(value.requires_grad for value in first.parameters())


def test_the_schedule_rises_and_falls_to_zero() -> None:
    assert [warmup_cosine(u, 10, 0.2) for u in (0, 1, 2)] == [0.5, 1.0, 1.0]
    assert warmup_cosine(6, 10, 0.2) == pytest.approx(0.5)
    assert warmup_cosine(10, 10, 0.2) == pytest.approx(0.0)


# --- sampling and replay


def test_a_sequence_does_not_depend_on_what_is_sampled_beside_it(target: Target) -> None:
    prompts, seeds = some_tokens(5, 6), [3, 1, 4, 1, 5]
    options: dict[str, Any] = {"rows": 20, "temperature": 0.7, "tile": 4}
    together = sample(target, prompts, seeds, **options)
    alone = [sample(target, prompts[n : n + 1], [seeds[n]], **options) for n in range(5)]
    assert torch.equal(together, torch.cat(alone))
    assert torch.equal(together[:, :6], prompts)


def test_samples_follow_the_targets_distribution(target: Target) -> None:
    """1,500 next tokens of one prompt against the distribution they are drawn from, at a temperature of 2."""
    prompt, count = some_tokens(1, 6), 1500
    drawn = sample(target, prompt.expand(count, -1), list(range(count)), rows=7, temperature=2.0, tile=500)[:, 6]
    expected = torch.softmax(target.logits(target(prompt).hidden[0, -1]).double() / 2.0, -1)
    frequency = torch.bincount(drawn, minlength=256).double() / count
    assert float((frequency - expected).abs().sum()) / 2 < 0.2
    top = int(expected.argmax())
    assert abs(float(frequency[top] - expected[top])) < 4 * float(expected[top] / count) ** 0.5


def test_sampling_can_be_stopped_and_refuses_nonsense(target: Target) -> None:
    with pytest.raises(Interrupted):
        sample(target, some_tokens(1, 4), [1], rows=9, temperature=1.0, tile=1, stop=lambda: True)
    for wrong in ({"rows": 4}, {"temperature": 0.0}, {"tile": 0}):
        with pytest.raises(Refused, match="cannot be continued"):
            sample(target, some_tokens(1, 4), [1], **({"rows": 9, "temperature": 1.0, "tile": 1} | wrong))


def test_canonical_rows_are_the_targets_and_their_own_teacher(target: Target) -> None:
    tokens = some_tokens(12)
    rows = canonical_rows(target, tokens)
    output = target(tokens.unsqueeze(0))
    torch.testing.assert_close(rows["taps"].float(), output.taps[0], rtol=1e-2, atol=1e-2)
    expected = torch.log_softmax(rows["hidden"].float() @ target.head.T, -1)
    top = expected.topk(20)
    torch.testing.assert_close(rows["top20_logprobs"], top.values, rtol=1e-4, atol=1e-4)
    assert (rows["top20_ids"][:, 0].long() == top.indices[:, 0]).float().mean() > 0.9


# --- text


def test_similar_passages_are_one_family_and_others_are_not() -> None:
    licence = " ".join(f"word{chr(97 + n % 26)}{chr(97 + n // 26)}" for n in range(200))
    changed = licence.replace("wordaa", "another")
    other = " ".join(f"else{chr(97 + n % 26)}{chr(97 + n // 26)}" for n in range(200))
    assert len(group_similar([licence, changed, other])) == 2


def test_families_go_to_one_split_each_in_proportion() -> None:
    families = {f"family-{n}": [b"x" * (100 + n)] for n in range(40)}
    given = split_families(families, {"train": 3.0, "dev": 1.0})
    assert sorted(name for names in given.values() for name in names) == sorted(families)
    sizes = {split: sum(len(families[name][0]) for name in names) for split, names in given.items()}
    assert sizes["train"] / sizes["dev"] == pytest.approx(3, rel=0.1)
    with pytest.raises(Refused, match="too few families"):
        split_families({"one": [b"x"]}, {"train": 1.0, "dev": 1.0})


def test_prompts_never_cross_families_or_overlap() -> None:
    text = {f"family-{n}": [bytes(range(n, n + 60)) * 4] for n in range(12)}
    corpus = Corpus(general=text, legal=text, sources=[])
    prompts = draw_prompts(corpus, {"train": {"legal": 6}, "dev": {"legal": 4, "general": 5}}, 16, 23)
    assert {group: len(found) for group, found in prompts.items()} == {"train": 6, "dev": 9}
    families = {group: {prompt.family for prompt in found} for group, found in prompts.items()}
    assert not families["train"] & families["dev"]
    with pytest.raises(Refused, match="too little legal text for train"):
        draw_prompts(corpus, {"train": {"legal": 10_000}}, 16, 23)


def test_this_installation_carries_enough_text() -> None:
    corpus = read_corpus(("d2-workbench",), least_general=1_000_000, least_legal=50_000)
    assert len(corpus.legal) > 20
    assert not any("/" in source.name[:1] for source in corpus.sources)  # names, not places on this machine
    with pytest.raises(Refused, match="too little legal text"):
        read_corpus(("d2-workbench",), least_general=0, least_legal=10**9)


# --- live decoding


@pytest.mark.parametrize("form", ["single_pass", "per_motion"])
def test_the_live_loop_drafts_what_the_reference_drafts(form: str, tmp_path: Path) -> None:
    """Two implementations without a common line: ring cache in numpy, and REF; every round of two streams."""
    config = tiny_config(hc_form=form, q_head_norm=form == "per_motion")
    weights = tiny_weights(config)
    rows = 40
    streams = [
        Stream(
            f"s{n}",
            torch.randint(config.vocab_size, (rows,), generator=generator(n)).numpy(),
            torch.randn(rows, config.n_taps * config.dim, generator=generator(9 + n)).bfloat16().float().numpy(),
            12,
        )
        for n in range(2)
    ]
    decode_live(config, weights, streams)
    from d2lib.drafter.batch import Round
    from d2lib.drafter.family import reference_drafter

    reference, compared = reference_drafter(config, weights), 0
    for stream in streams:
        tokens = torch.tensor(stream.tokens)
        anchor = 12
        for found in stream.rounds:
            assert found.anchor == anchor
            anchor = found.next_anchor
            first = max(0, found.anchor - config.window)
            ahead = (found.anchor + torch.arange(config.block_size + 1)).clamp(max=rows - 1)
            block = Round(
                taps=torch.tensor(stream.taps[first : found.anchor]).bfloat16(),
                positions=torch.arange(first, found.anchor),
                anchor=found.anchor,
                anchor_token=int(tokens[found.anchor]),
                previous=tokens[ahead[:-1]],
                target=tokens[ahead[1:]],
                valid=torch.ones(config.block_size, dtype=torch.bool),
                teacher_hidden=torch.zeros(config.block_size, config.dim),
            )
            assert tuple(reference.draft(block, 2).tolist()) == found.drafts
            compared += 1
        assert anchor >= rows - 1
    assert compared > 30


# --- a whole small case


PROFILE: dict[str, Any] = {
    "namespace": "small",
    "threads": 1,
    "target": {"dim": 16, "n_layers": 2, "n_heads": 2, "mlp_dim": 24, "tap_layers": [0, 1]},
    "target_training": {"steps": 8, "batch": 4, "length": 32, "lr": 0.01},
    "gen_start": 16,
    "rows": 48,
    "temperature": 0.5,
    "sequences": {
        "train": {"legal": 3, "general": 2},
        "dev": {"legal": 2, "general": 1},
        "heldout_legal": {"legal": 2},
        "heldout_general": {"general": 2},
    },
    "drafter": {
        **tiny_config().model_dump(mode="json"),
        "dim": 16,
        "vocab_size": 256,
        "noise_token_id": 255,
        "target_layer_ids": [0, 1],
        "kv_quant": "off",
    },
    "pretraining_sequences": 2,
    "pretraining": {"updates": 4, "streams": 2, "anchors": 4, "lr": 0.003},
}


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    """A little of the installation's text: 30 families of either kind, 1,000 bytes of each."""
    whole = read_corpus(("d2-workbench",), least_general=1_000_000, least_legal=50_000)
    general, legal = (
        {name: [passages[0][:1000]] for name, passages in list(families.items())[:30]}
        for families in (whole.general, whole.legal)
    )
    return Corpus(general, legal, whole.sources)


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory, corpus: Corpus) -> Path:
    folder = tmp_path_factory.mktemp("capture") / "assembly"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capturing, "read_corpus", lambda *_, **__: corpus)
        capture(CaptureProfile.model_validate(PROFILE), folder)
    return folder


def files(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): str(sha256_file(path))
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_a_capture_that_was_stopped_again_and_again_ends_with_the_same_bytes(
    captured: Path, tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capturing, "read_corpus", lambda *_, **__: corpus)
    profile, stops, asked = CaptureProfile.model_validate(PROFILE), 0, 0
    patience = [3]

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked > patience[0]

    while True:
        asked = 0
        try:
            capture(profile, tmp_path / "assembly", stop=stop)
            break
        except Interrupted:
            stops += 1
            patience[0] = patience[0] * 2 + 7
    assert stops >= 3
    assert files(tmp_path / "assembly") == files(captured)


def test_another_capture_in_the_same_folder_is_refused(
    captured: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capturing, "read_corpus", lambda *_, **__: corpus)
    before = files(captured)
    with pytest.raises(Refused, match="holds another capture"):
        capture(CaptureProfile.model_validate(PROFILE | {"seed": 24}), captured)
    assert files(captured) == before


def test_a_profile_that_does_not_fit_together_is_refused() -> None:
    for wrong in (
        {"rows": 17},
        {"sequences": {"train": {"legal": 1}}},
        {"drafter": PROFILE["drafter"] | {"dim": 24}},
        {"drafter": PROFILE["drafter"] | {"target_layer_ids": [0]}},
        {"surprise": 1},
    ):
        with pytest.raises(ValueError, match=r"validation error"):
            CaptureProfile.model_validate(PROFILE | wrong)


def test_no_family_of_a_capture_crosses_splits(captured: Path) -> None:
    families: dict[str, str] = {}
    for entry in Assembly(captured).manifest.sequences:
        assert families.setdefault(entry.family, entry.split) == entry.split


def test_g1_holds_on_a_capture_and_not_on_a_changed_one(captured: Path, tmp_path: Path) -> None:
    found = run_g1(Assembly(captured))
    assert all(row.holds for row in found.rows), [row for row in found.rows if not row.holds]
    folder = tmp_path / "assembly"
    shutil.copytree(captured, folder)
    shard = folder / Assembly(captured).manifest.split("dev")[0].file.path
    shard.chmod(0o644)
    data = bytearray(shard.read_bytes())
    data[-100] ^= 1
    shard.write_bytes(bytes(data))
    rows = run_g1(Assembly(folder)).rows
    assert [row.name for row in rows if not row.holds]


def test_replay_says_which_row_differs(captured: Path) -> None:
    assembly = Assembly(captured)
    target = load_target(captured)
    with torch.no_grad():
        target.layers[1].down.mul_(1.5)
    rows = replay_rows(target, assembly.manifest, captured, "dev")
    assert {row.name.split()[2].rstrip(",") for row in rows if not row.holds} >= {"hidden", "top20_logprobs"}
    assert "row 0" in next(row.found for row in rows if not row.holds)


def test_parity_notices_another_drafter(captured: Path) -> None:
    assembly = Assembly(captured)
    for scale, holds in ((1.0, True), (-1.0, False)):
        weights = dict(assembly.weights)
        weights["mtp.0.main_proj.weight"] = weights["mtp.0.main_proj.weight"] * scale
        drafter = BatchedReference(assembly.config, weights)
        parity = compare_drafts(drafter, assembly.blocks("dev"), assembly.k2("dev"))
        assert parity.row().holds is holds, parity.row()
        assert parity.rounds == sum(map(len, assembly.k2("dev").rounds.values()))


def test_the_native_loss_is_the_mixture_and_the_confidences(captured: Path) -> None:

    assembly = Assembly(captured)
    batch = assembly.blocks("train").batch(torch.tensor([0, 5, 60]))
    drafter = fast_drafter(assembly.config, assembly.weights)
    hidden = drafter.hidden(batch)
    logits, total, valid = drafter.logits(hidden, batch), 0.0, int(batch.valid.sum())
    confidences = drafter.confidence(hidden, batch.previous)
    for b in range(3):
        cost = []
        for slot in range(assembly.config.block_size):
            if batch.valid[b, slot]:
                teacher = batch.teacher_hidden[batch.teacher[b, slot]].float() @ assembly.weights["head.weight"].T
                p, q = teacher.softmax(0), logits[b, slot].softmax(0)
                tv = 0.5 * float((p - q).abs().sum())
                cost.append(-0.1 * float(q[batch.target[b, slot]].log()) + 0.9 * tv)
                chance = torch.sigmoid(confidences[b, slot])
                total += float(F.binary_cross_entropy(chance, torch.tensor(1 - tv))) / valid
        total += sum(cost) / len(cost) / 3
    assert float(native_loss(drafter, batch)) == pytest.approx(total, rel=1e-4)


def test_the_target_may_lie_elsewhere_by_its_digests(captured: Path, tmp_path: Path) -> None:
    folder, target = tmp_path / "assembly", tmp_path / "target"
    shutil.copytree(captured, folder)
    target.mkdir()
    digests = {}
    for name in ("target.json", "target.safetensors"):
        (folder / name).rename(target / name)
        digests[name] = str(sha256_file(target / name))
    pointer = {"kind": "elsewhere", "folder": str(target)}
    pointer |= {"description": digests["target.json"], "weights": digests["target.safetensors"]}
    (folder / "target.json").write_text(json.dumps(pointer))
    found = run_g1(Assembly(folder))
    assert found.holds
    assert found.receipt.replay.target == digests["target.safetensors"]
    (target / "target.safetensors").chmod(0o600)
    with open(target / "target.safetensors", "ab") as stream:
        stream.write(b"x")
    with pytest.raises(Refused, match="the target is not the assembly's"):
        load_model(folder)
    for wrong in ({"folder": "target"}, {"weights": "x"}, {"more": 1}):
        (folder / "target.json").write_text(json.dumps(pointer | wrong))
        with pytest.raises(Refused):
            load_model(folder)


def test_a_pilot_that_was_stopped_goes_on_to_the_same_record(captured: Path, tmp_path: Path) -> None:
    assembly = Assembly(captured)
    write_json(tmp_path / "g1.json", {"any": "file"})
    options: dict[str, Any] = {
        "namespace": "small",
        "g1": tmp_path / "g1.json",
        "presented_blocks": 256,
        "sample_size": 12,
    }
    recipe = to_qualify("KL", 0.002)
    whole = run_pilot(assembly, recipe, tmp_path / "whole", **options)
    calls = iter([False, True] + [False] * 10_000)
    with pytest.raises(Interrupted):
        run_pilot(assembly, recipe, tmp_path / "halves", **options, stop=lambda: next(calls))
    halves = run_pilot(assembly, recipe, tmp_path / "halves", **options)
    assert halves.verdict == whole.verdict
    records = [json.loads((tmp_path / name / "receipt.json").read_bytes()) for name in ("whole", "halves")]
    for record in records:
        for arm in record["arms"].values():
            arm.pop("seconds")
    assert records[0] == records[1]
    assert set(SCORED) >= set(records[0]["k2"])
    assert records[0]["arithmetic"] == {
        "precision": "fp32",
        "device": "cpu",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    with pytest.raises(Refused, match="precision"):  # an arm that is finished was not computed so
        run_pilot(assembly, recipe, tmp_path / "halves", **options, precision="bf16")


def test_products_that_exist_are_taken_as_they_are_or_refused_by_name(captured: Path, tmp_path: Path) -> None:
    """What a phase finds that ended between its last product and its receipt: the same, or another's."""
    assembly = Assembly(captured)
    write_json(tmp_path / "g1.json", {"any": "file"})
    out = tmp_path / "pilot"

    def pilot(rate: float = 0.002) -> Pilot:
        return run_pilot(
            assembly,
            to_qualify("KL", rate),
            out,
            namespace="small",
            g1=tmp_path / "g1.json",
            presented_blocks=128,
            sample_size=12,
        )

    first = pilot()
    made = {path: (path.stat().st_ino, path.read_bytes()) for path in out.rglob("*") if path.is_file()}
    (out / ".repo.part").mkdir()  # of an attempt that was killed as it copied
    assert pilot().receipt == first.receipt
    assert {path: (path.stat().st_ino, path.read_bytes()) for path in made} == made
    with pytest.raises(Refused, match=r"belongs to another run: recipe\.lr differs"):
        pilot(0.001)
    for name, words in (
        ("ref.safetensors", "not its checkpoint's"),
        ("scores.json", "scores.json exists already and is not what is made now"),
        ("receipt.json", "receipt.json exists already and is not what is made now"),
        ("repo/d2lib/gates/pilot.py", "a source file is modified"),
    ):
        data = (out / name).read_bytes()
        changed = (out / "fast.safetensors").read_bytes() if name == "ref.safetensors" else data + b"\n"
        (out / name).chmod(0o600)
        (out / name).write_bytes(changed)
        with pytest.raises(Refused, match=words):
            pilot()
        (out / name).write_bytes(data)

    def split(folder: Path = tmp_path, **changed: str) -> Evaluation:
        return evaluate_split(assembly, "dev", first.arms["fast"].adapter, identities(**changed), folder)

    scored = split()
    part, journal = tmp_path / "dev.json", tmp_path / "dev.requests"
    inode = part.stat().st_ino
    again = split()
    assert (again.part, again.reused, part.stat().st_ino) == (scored.part, len(scored.part.requests), inode)
    with pytest.raises(Refused, match="begun under another contract"):
        split(adapter="sha256:" + "f" * 64)
    data = part.read_bytes()
    part.write_bytes(data.replace(b'"verdict":"', b'"verdict": "', 1))
    with pytest.raises(Refused, match=r"dev\.json exists already and is not what is made now"):
        split()
    part.write_bytes(data)
    request = next(path for path in journal.iterdir() if path.name != "contract.json")
    request.unlink()
    with pytest.raises(Refused, match=r"never scored again; .* found: 1 missing"):
        split()
    part.unlink()
    assert split().part == scored.part  # without it, the one request is scored again


def test_a_finished_capture_is_what_another_attempt_finds(
    captured: Path, tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capturing, "read_corpus", lambda *_, **__: corpus)
    folder, profile = tmp_path / "assembly", CaptureProfile.model_validate(PROFILE)
    shutil.copytree(captured, folder)
    before = {path: path.stat().st_ino for path in folder.rglob("*")}
    capture(profile, folder)
    assert {path: path.stat().st_ino for path in folder.rglob("*")} == before
    assert files(folder) == files(captured)
    manifest = folder / "MANIFEST.json"
    manifest.chmod(0o600)
    manifest.write_bytes(manifest.read_bytes().replace(b'"family":"', b'"family":"x', 1))
    with pytest.raises(Refused, match=r"MANIFEST\.json exists already and is not what is made now"):
        capture(profile, folder)
