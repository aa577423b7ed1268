"""Admission: a good case is admitted, and for every check there is a case in which it, alone, says no."""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from admission_case import (
    CONFIG,
    DEMANDS,
    PILOT,
    RECIPE,
    UPDATES,
    AdmittedCase,
    read,
    remembered,
    rewrite,
    small_library,
)
from safetensors.torch import load_file, save
from tiny import tiny_adapter

from d2lib.admission import pilot_checks, source
from d2lib.admission.admit import Admission, run_admission
from d2lib.admission.again import may_accept
from d2lib.admission.case import AdmissionInputs
from d2lib.admission.checks import CHECKS
from d2lib.admission.drawn import detection
from d2lib.admission.records import SCORED
from d2lib.data.assembly import Assembly
from d2lib.data.blocks import D2Blocks
from d2lib.data.check import CheckRow
from d2lib.data.k2 import K2Round
from d2lib.data.manifest import Manifest
from d2lib.drafter.lora import save_adapter
from d2lib.errors import ExitStatus, Refused
from d2lib.files import canonical_json, sha256_file, write_json
from d2lib.params import RESCORED_ROUNDS
from d2lib.train import checkpoint
from d2lib.train.full import Admitted
from d2lib.train.recipe import Recipe

NAMES = [check.name for check in CHECKS]
DIGEST = "sha256:" + "0" * 64


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdmittedCase]:
    """The good case. Today's source is a copy too, so that a file saved during the tests is no difference."""
    root = tmp_path_factory.mktemp("admission")
    today = small_library(root / "today")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "library_folder", lambda: today)
        yield AdmittedCase(root / "run").build(today)


@pytest.fixture
def case(built: AdmittedCase, tmp_path: Path) -> AdmittedCase:
    """A copy that a test may spoil."""
    shutil.copytree(built.root, tmp_path / "run")
    return AdmittedCase(tmp_path / "run")


def failing(found: Admission) -> dict[str, str]:
    """Check → what was found, of those that do not hold. Every check is reported whatever happens."""
    assert [row.name for row in found.rows] == NAMES
    return {row.name: row.found for row in found.rows if not row.holds}


def exact_replay(folder: Path, manifest: Manifest, names: Sequence[str]) -> list[CheckRow]:
    """Stands for a target whose rows are these: random rows have none."""
    return [CheckRow(name="replay", expected="the bits", found="equal", where=str(folder), holds=True)]


def consequences(found: dict[str, str], *own: str) -> set[str]:
    """Checks beside `own` that do not hold; each of them only because it cannot be made."""
    others = set(found) - set(own)
    for name in others:
        assert found[name].startswith("cannot be checked: "), (name, found[name])
    return others


def test_the_good_case_is_admitted(built: AdmittedCase) -> None:
    everything = AdmissionInputs(built.assembly, built.g1, built.pilot, DEMANDS)
    found = run_admission(everything, replay=exact_replay)  # with the real child
    assert failing(found) == {}
    assert found.admitted
    assert found.exit_status is ExitStatus.DONE
    assert found.recipe == RECIPE
    assert isinstance(found.require(), Recipe)
    assert found.identities["namespace"] == PILOT
    assert found.identities["pilot"] == built.digest("pilot/receipt.json")
    assert found.identities["manifest"] == built.digest("assembly/MANIFEST.json")
    assert all(row.expected and row.found and row.where for row in found.rows)
    assert found.as_dict()["admitted"] is True
    built.bind()
    assert failing(built.run()) == {}  # binding again is no change


def test_trajectories_and_source_are_read_where_they_are_said_to_lie(built: AdmittedCase, case: AdmittedCase) -> None:
    """As on a production host, where the K2 files lie beside G1 and the pilot's source in a snapshot of its own."""
    places = {split: case.root / "beside-g1" / f"{split}.k2_drafts.jsonl" for split in SCORED}
    for split, place in places.items():
        place.parent.mkdir(exist_ok=True)
        case.k2(split).rename(place)
    source = (case.pilot / "repo").rename(case.root / "source")
    inputs = replace(case.inputs, k2=places, pilot_source=source)
    found = run_admission(inputs)
    assert failing(found) == {}
    assert found.identities == built.run().identities
    assert all(str(places[split]) == row.where for row in found.rows for split in SCORED if row.name == f"K2 {split}")

    decoy = case.assembly / "k2"  # the assembly's own files do not count where others are named
    shutil.copytree(built.assembly / "k2", decoy, dirs_exist_ok=True)
    lines = places["dev"].read_text().splitlines()
    places["dev"].write_text("".join(f"{line}\n" for line in lines[:-1]))
    assert "K2 dev" in failing(run_admission(inputs, recompute=lambda *_: None))
    write_json(case.root / "admitted.json", found.as_dict())
    with pytest.raises(Refused, match="k2_dev differs"):
        Admitted(case.root / "admitted.json").check(Assembly(case.assembly, places))


# --- each check alone. A spoiler changes one thing and binds everything else to it.


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    value = read(path)
    change(value)
    rewrite(path, value)


def tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    value = load_file(path)
    change(value)
    path.unlink()
    path.write_bytes(save(value))


def provenance(**fields: Any) -> Callable[[AdmittedCase], Any]:
    def spoil(case: AdmittedCase) -> None:
        edit(case.assembly / "provenance.json", lambda value: value.update(fields))
        case.bind()

    return spoil


def link(case: AdmittedCase) -> None:
    (case.assembly / "notes").symlink_to(case.g1)


def hard_link(case: AdmittedCase) -> None:
    (case.assembly / "copy").hardlink_to(case.g1)


def bad_token(case: AdmittedCase) -> None:
    tensors(case.assembly / "shards/train-00.safetensors", lambda value: value["tokens"].__setitem__(3, 53))
    case.bind()


def unlisted(case: AdmittedCase) -> None:
    (case.assembly / "shards/more.safetensors").write_bytes(b"x")


def k2_lines(split: str, change: Callable[[list[str]], Any]) -> Callable[[AdmittedCase], Any]:
    def spoil(case: AdmittedCase) -> None:
        lines = case.k2(split).read_text().splitlines()
        change(lines)
        case.k2(split).unlink()
        case.k2(split).write_text("".join(f"{line}\n" for line in lines))
        case.bind()

    return spoil


def shorter_blocks(lines: list[str]) -> None:
    lines[0] = lines[0].replace('"block_size":5', '"block_size":4')


def other_drafts(case: AdmittedCase) -> None:
    """The live run drafts another wrong token wherever it was wrong at once: consistent, but not this drafter."""
    tokens = {
        entry.id: load_file(case.assembly / entry.file.path)["tokens"].tolist()
        for entry in case.manifest.split("heldout_general")
    }

    def change(lines: list[str]) -> None:
        for number, line in enumerate(lines[1:], 1):
            found = K2Round.model_validate_json(line)
            if found.accepted == 0:
                taken = {found.drafts[0], tokens[found.request][found.anchor + 1]}
                other = min(set(range(CONFIG.vocab_size)) - taken)
                lines[number] = line.replace(f'"drafts":[{found.drafts[0]},', f'"drafts":[{other},')

    k2_lines("heldout_general", change)(case)


def g1(change: Callable[[dict[str, Any]], Any]) -> Callable[[AdmittedCase], Any]:
    return lambda case: case.bind(g1=change)


def receipt(change: Callable[[dict[str, Any]], Any]) -> Callable[[AdmittedCase], Any]:
    return lambda case: case.bind(receipt=change)


def scores(change: Callable[[dict[str, Any]], Any]) -> Callable[[AdmittedCase], Any]:
    return lambda case: case.bind(scores=change)


def flip(case: AdmittedCase) -> None:
    path = case.pilot / "ref.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.unlink()
    path.write_bytes(data)


def not_a_number(case: AdmittedCase) -> None:
    tensors(case.pilot / "fast.safetensors", lambda value: value["mtp.0.main_proj.lora_B"].fill_(float("nan")))
    case.bind()


def other_rank(case: AdmittedCase) -> None:
    (case.pilot / "fast.safetensors").unlink()
    save_adapter(case.pilot / "fast.safetensors", tiny_adapter(CONFIG, rank=RECIPE.rank + 1), CONFIG)
    case.bind()


def other_comment(case: AdmittedCase) -> None:
    path = case.pilot / "repo/d2lib/drafter/kernels.py"
    text = path.read_text()
    path.unlink()
    path.write_text(text + "# one more line\n")
    case.bind()


def one_numerical_file_less(case: AdmittedCase) -> None:
    (case.pilot / "repo/d2lib/drafter/deepseek/rotary.py").unlink()
    case.bind()


def one_numerical_file_more(case: AdmittedCase) -> None:
    (case.pilot / "repo/d2lib/drafter/tricks.py").write_text("")
    case.bind()


def other_live(name: str) -> Callable[[AdmittedCase], Any]:
    """The live run's own header names other bytes than those that are here; G1 and the receipts are bound to it."""

    def change(lines: list[str]) -> None:
        header = json.loads(lines[0])
        header["live"][name] = DIGEST
        lines[0] = json.dumps(header)

    return k2_lines("dev", change)


def training(arm: str, **fields: Any) -> Callable[[AdmittedCase], Any]:
    """An arm's checkpoint is bound to something else."""
    return lambda case: case.bind(training=lambda v: v["identity"].update(fields if v["arm"] == arm else {}))


def trained_less(complete: bool) -> Callable[[AdmittedCase], Any]:
    """The REF arm's checkpoint is of an update less: that of a run that was stopped, or was asked for less."""

    def spoil(case: AdmittedCase) -> None:
        path, done = case.pilot / "ref.pt", UPDATES - 1
        state = checkpoint.load(path)
        metrics = {name: column[:done] for name, column in state.metrics.items()}
        position = state.position.model_copy(
            update={
                "update": done,
                "total": done if complete else UPDATES,
                "presented": int(metrics["blocks"].sum()),
                "lr": float(metrics["lr"][-1]),
            }
        )
        identity = {**state.identity, "total": position.total}
        path.unlink()
        checkpoint.save(path, replace(state, position=position, metrics=metrics, complete=complete, identity=identity))

    return spoil


def other_training(case: AdmittedCase) -> None:
    """The checkpoint is whole and bound to everything, but the exported adapter is not its."""
    path = case.pilot / "fast.pt"
    state = checkpoint.load(path)
    adapter = {name: tensor.clone() for name, tensor in state.adapter.items()}
    next(iter(adapter.values())).view(-1)[0] += 1e-6
    path.unlink()
    checkpoint.save(path, replace(state, adapter=adapter))


def another_round(case: AdmittedCase) -> None:
    """One scored round is not of the sample, though it is one of the trajectory's and its score is right."""
    known = read(case.root / "scores.json")["dev"]

    def change(value: dict[str, Any]) -> None:
        for request, rounds in value["splits"]["dev"].items():
            others = [anchor for anchor in known[request] if int(anchor) > rounds["anchors"][-1]]
            if others:
                rounds["anchors"][-1] = int(others[0])
                for arm in ("baseline", "fast", "ref"):
                    rounds[arm][-1] = known[request][others[0]][arm]
                return
        raise AssertionError("every later round was sampled")

    case.bind(scores=change)


def a_round_less(value: dict[str, Any]) -> None:
    for rounds in value["splits"]["dev"].values():
        if len(rounds["anchors"]) > 1:
            for name in rounds:
                rounds[name].pop()
            return


ALONE: list[tuple[str, str, Callable[[AdmittedCase], Any]]] = [
    ("assembly", "not a regular file: a link", link),
    ("assembly", "2 names", hard_link),
    ("provenance", "synthetic", provenance(synthetic=True)),
    ("provenance", "synthetic", provenance(synthetic=None)),
    ("provenance", "synthetic", provenance(synthetic=0)),
    ("provenance", "of another assembly", provenance(namespace="other")),
    ("provenance", "names no sources", provenance(sources=[])),
    ("provenance", "a source is withdrawn", provenance(sources=[{"name": "acap", "status": "WITHDRAWN"}])),
    ("G1(a)", "train-00: row 3 is 53", bad_token),
    ("G1(a)", "more.safetensors", unlisted),
    ("K2 dev", "the block size differs", k2_lines("dev", shorter_blocks)),
    ("K2 heldout_legal", "the block size differs", k2_lines("heldout_legal", shorter_blocks)),
    ("K2 heldout_general", "ends at row", k2_lines("heldout_general", lambda lines: lines.pop())),
    ("G1 receipt", "the manifest differs", g1(lambda v: v.update(manifest_sha256=DIGEST))),
    ("G1 receipt", "K2 of heldout_general differs", g1(lambda v: v["k2"].pop("heldout_general"))),
    ("G1 receipt", "the namespace differs", g1(lambda v: v.update(namespace="other"))),
    ("G1 receipt", "a row of the G1 receipt does not hold", g1(lambda v: v["rows"][7].update(holds=False))),
    ("G1(b)", "not exact", g1(lambda v: v["replay"].update(exact=False))),
    ("G1(b)", "sidecar of dev-01 differs", g1(lambda v: v["replay"]["sequences"].pop("dev-01"))),
    ("G1(b)", "sidecar of dev-02 differs", g1(lambda v: v["replay"]["sequences"].update({"dev-02": DIGEST}))),
    ("G1(b)", "sidecar of dev-00 differs", g1(lambda v: v["replay"]["sequences"].update({"dev-00": DIGEST}))),
    ("G1(b)", "the replayed positions differs", g1(lambda v: v["replay"].update(positions=1))),
    ("G1(b)", "the target differs", g1(lambda v: v["replay"].update(target=DIGEST))),
    ("live sources", "withdrawn", g1(lambda v: v["live_sources"][1].update(status="WITHDRAWN"))),
    ("live sources", "target.safetensors differs", g1(lambda v: v["live_sources"][1].update(sha256=DIGEST))),
    ("live sources", "a path leaves its folder", g1(lambda v: v["live_sources"][1].update(name="../g1/g1.json"))),
    ("live sources", "a path leaves its folder", g1(lambda v: v["live_sources"][1].update(name="/etc/hostname"))),
    ("live sources", "a file is missing", g1(lambda v: v["live_sources"][1].update(name="none"))),
    ("live sources", "K2 of heldout_general is not among", g1(lambda v: v["live_sources"].pop())),
    ("parity", "differs from the live one: 1", g1(lambda v: v["parity"]["dev"].update(differing=1))),
    ("parity", "the rounds differs", g1(lambda v: v["parity"]["heldout_general"].update(rounds=3))),
    ("parity", "K2 differs", g1(lambda v: v["parity"]["dev"].update(k2=DIGEST))),
    ("parity", "the native drafter differs", g1(lambda v: v["parity"]["dev"].update(native=DIGEST))),
    ("parity", "parity was not measured", g1(lambda v: v["parity"].pop("heldout_legal"))),
    ("parity", "the reference drafter differs from the live one", other_drafts),
    ("pilot receipt", "the verdict differs: FAIL", receipt(lambda v: v.update(verdict="FAIL"))),
    ("pilot receipt", "the verdict differs: INCONCLUSIVE", receipt(lambda v: v.update(verdict="INCONCLUSIVE"))),
    ("pilot receipt", "the manifest differs", receipt(lambda v: v.update(manifest_sha256=DIGEST))),
    ("pilot receipt", "the G1 receipt differs", receipt(lambda v: v.update(g1_sha256=DIGEST))),
    ("pilot receipt", "K2 of dev differs", receipt(lambda v: v["k2"].update(dev=DIGEST))),
    ("pilot scores", "the namespace differs", scores(lambda v: v.update(namespace="other"))),
    ("pilot scores", "the block size differs", scores(lambda v: v.update(block_size=4))),
    ("pilot checkpoints", "adapter of ref differs", scores(lambda v: v["adapters"].update(ref=DIGEST))),
    ("numerical files", "1 that are not; the first: d2lib/drafter/kernels.py", other_comment),
    ("numerical files", "1 that are not; the first: d2lib/drafter/deepseek/rotary.py", one_numerical_file_less),
    ("numerical files", "1 that are not; the first: d2lib/drafter/tricks.py", one_numerical_file_more),
    ("frozen sample", "the sample's namespace|the sample's seed", lambda case: case.bind(sample_namespace="other")),
    ("frozen sample", "2 that are on one side only", another_round),
    ("frozen sample", "1 that are on one side only", scores(a_round_less)),
    ("frozen sample", "the scored sample differs", scores(lambda v: v.update(sample_identity=DIGEST))),
    (
        "frozen sample",
        "the sample's population_rounds differs",
        receipt(lambda v: v["sample"]["population_rounds"].update(dev=99)),
    ),
    (
        "initialization",
        "the initialization differs",
        lambda case: case.bind(
            receipt=lambda v: v.update(initialization_sha256=DIGEST),
            training=lambda v: v["identity"].update(initialization=DIGEST),
        ),
    ),
    ("live sources", "the live run of dev used another native drafter", other_live("native")),
    ("live sources", "the live run of dev used another target", other_live("target")),
    ("pilot extent", "the updates of fast differs", receipt(lambda v: v["arms"]["fast"].update(updates=1))),
    ("pilot extent", "the updates of ref differs", receipt(lambda v: v["arms"]["ref"].update(updates=UPDATES + 1))),
    ("pilot training", "namespace differs", training("ref", namespace="other")),
    ("pilot training", "manifest differs", training("fast", manifest=DIGEST)),
    ("pilot training", "native differs", training("ref", native=DIGEST)),
    ("pilot training", "k2_dev differs", training("ref", k2_dev=DIGEST)),
    ("pilot training", "g1 differs", training("fast", g1=DIGEST)),
    ("pilot training", "backend differs", training("ref", backend="fast")),
    ("pilot training", "run differs", training("fast", run="ref")),
    ("pilot training", "initialization differs", training("ref", initialization=DIGEST)),
    ("pilot training", "recipe.lr differs", training("fast", recipe=RECIPE.model_dump() | {"lr": 0.1})),
    ("pilot training", "a checkpoint is missing", lambda case: (case.pilot / "ref.pt").unlink()),
    ("pilot training", "the run is not complete: 2", trained_less(complete=False)),
    ("pilot training", "total differs: 2", trained_less(complete=True)),
    ("pilot training", "the adapter of fast is not the one that was trained", other_training),
]


def test_every_check_has_its_negative_control() -> None:
    elsewhere = {"recipe", "pilot source", "verdict, original source", "verdict, today's source", "training blocks"}
    elsewhere |= {"signatures", "pins", "pilot scores, again"}
    assert {name for name, _, _ in ALONE} | elsewhere == set(NAMES)


@pytest.mark.parametrize(("name", "text", "spoil"), ALONE, ids=[f"{name}: {text}" for name, text, _ in ALONE])
def test_one_check_alone_says_no(
    case: AdmittedCase, name: str, text: str, spoil: Callable[[AdmittedCase], Any]
) -> None:
    spoil(case)
    found = case.run() if spoil is not other_drafts else run_with_parity(case)
    refused = failing(found)
    assert set(refused) == {name}
    assert any(part in refused[name] for part in text.split("|")), refused[name]
    assert not found.admitted
    assert found.exit_status is ExitStatus.REFUSED
    assert found.recipe is None
    assert found.identities == {}
    assert len(found.refusals) == 1
    assert "\n" not in found.refusals[0]
    with pytest.raises(Refused, match=f"1 of {len(NAMES)} admission checks do not hold"):
        found.require()


def test_a_policy_whose_signatures_are_missing_refuses(case: AdmittedCase, tmp_path: Path) -> None:
    key = {"public": "03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8"}
    keyid = "63d00ee3cf4f5c61ad94efa696c68f13b608fe56ecea13fb144a6fd18e9235b9"
    policy = tmp_path / "policy.yaml"
    policy.write_bytes(canonical_json({"keys": [key], "phases": {"pilot": {"keys": [keyid]}}}))
    refused = failing(run_admission(replace(case.inputs, policy=policy), recompute=remembered))
    assert set(refused) == {"signatures"}
    assert "pilot has no receipt that could be signed" in refused["signatures"]
    policy.write_bytes(canonical_json({"keys": [key], "phases": {"finish": {"keys": [keyid]}}}))
    assert failing(run_admission(replace(case.inputs, policy=policy), recompute=remembered)) == {}


def run_with_parity(case: AdmittedCase) -> Admission:
    return run_admission(replace(case.inputs, parity_rounds=1000), recompute=remembered)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (flip, "ref.safetensors differs"),
        (not_a_number, "is not finite"),
        (other_rank, "rank differs"),
        (receipt(lambda v: v["arms"]["fast"].update(checkpoint="../pilot/fast.safetensors")), "leaves its folder"),
    ],
)
def test_an_adapter_that_is_not_the_recorded_one(
    case: AdmittedCase, spoil: Callable[[AdmittedCase], Any], text: str
) -> None:
    spoil(case)
    refused = failing(case.run())
    assert text in refused["pilot checkpoints"]
    assert set(refused) == {"pilot checkpoints", "pilot training"}  # nor is it the one that was trained


# --- what is computed again, on a part that is drawn when admission runs


def test_the_seed_is_fresh_stands_in_the_receipt_and_draws_the_same_again(built: AdmittedCase) -> None:
    one, other = built.run(), built.run()
    assert one.seed != other.seed
    assert one.as_dict()["seed"] == one.seed
    assert len(one.seed) == 64
    assert one.identities == other.identities  # what follows hangs on the inputs, not on the draw
    inputs = replace(built.inputs, replayed_sequences=1)
    asked: list[list[str]] = []

    def note(folder: Path, manifest: Manifest, names: Sequence[str]) -> list[CheckRow]:
        asked.append(list(names))
        return []

    for seed in ("1", "1", *map(str, range(2, 20))):
        run_admission(inputs, recompute=remembered, replay=note, seed=seed)
    assert asked[0] == asked[1]
    assert {name for names in asked for name in names} == {"dev-00", "dev-01"}


@pytest.mark.parametrize("arms", [("baseline",), ("fast", "ref")])
def test_an_invented_score_is_found_by_scoring_again_alone(case: AdmittedCase, arms: tuple[str, ...]) -> None:
    """One round of dev has another score, with everything bound to it; the verdict stays PASS."""

    def invent(value: dict[str, Any]) -> None:
        for found in value["splits"]["dev"].values():
            for place in range(len(found["anchors"])):
                if all(0 < found[arm][place] < 5 for arm in arms):
                    for arm in arms:
                        found[arm][place] += 1
                    return
        raise AssertionError("no such round")

    case.bind(scores=invent)
    assert failing(case.run()) == {}  # everything else agrees with it
    found = run_admission(replace(case.inputs, rescored_rounds=459), recompute=remembered)
    assert set(failing(found)) == {"pilot scores, again"}
    assert found.rows[NAMES.index("pilot scores, again")].where.endswith(f", {arms[0]}")


def test_the_receipt_says_how_surely_an_invented_score_is_found(built: AdmittedCase) -> None:
    found = run_admission(replace(built.inputs, rescored_rounds=8), recompute=remembered)
    (row,) = (row for row in found.rows if row.name == "pilot scores, again")
    assert row.holds
    assert row.found.startswith("8 drawn rounds of 32 scored again")
    assert "1% of the rounds an invented score, this finds one with 25.0%" in row.found  # one of 32: 8/32


def test_how_many_drawn_rounds_find_how_much() -> None:
    """Against scipy's hypergeometric distribution, and the default against its definition."""
    scipy_stats = pytest.importorskip("scipy.stats")
    for population, drawn, share in ((2000, 459, 0.01), (600, 300, 0.01), (2000, 32, 0.1), (50, 7, 0.3), (10, 0, 0.1)):
        bad = math.ceil(share * population)
        expected = 1 - scipy_stats.hypergeom(population, bad, drawn).pmf(0)
        assert detection(population, drawn, share) == pytest.approx(expected, abs=1e-9)
    assert RESCORED_ROUNDS == 459
    assert all(detection(population, min(population, 459)) >= 0.99 for population in (1, 40, 459, 600, 2000, 10**7))
    assert 1 - 0.99**458 < 0.99 <= 1 - 0.99**459


def test_a_near_tie_may_go_either_way_and_nothing_else() -> None:
    class Fixed:
        def __init__(self, logits: torch.Tensor) -> None:
            self.logits = logits

        def forward(self, round: Any) -> Any:
            return self

    class Round:
        target = torch.tensor([0, 1, 2])

    clear = torch.tensor([[9.0, 1, 1], [1, 9, 1], [9, 1, 1]])  # the committed token first, first, not
    accepts = lambda logits: {n for n in range(4) if may_accept(Fixed(logits), Round(), n)}  # type: ignore[arg-type]  # noqa: E731
    assert accepts(clear) == {2}
    tie = clear.clone()
    tie[1, 0] = 9.0
    assert accepts(tie) == {1, 2}
    tie[2, 2] = 9.0 - 1e-5
    assert accepts(tie) == {1, 2, 3}
    tie[0] = torch.tensor([1.0, 9, 1])
    assert accepts(tie) == {0}


def test_a_replay_that_differs_is_seen_though_g1_says_exact(case: AdmittedCase) -> None:
    def differs(folder: Path, manifest: Manifest, names: Sequence[str]) -> list[CheckRow]:
        return [CheckRow(name="replay of taps, dev", expected="the bits", found="row 3", where="x", holds=False)]

    inputs = replace(case.inputs, replayed_sequences=2)
    assert set(failing(run_admission(inputs, recompute=remembered, replay=differs))) == {"G1(b)"}
    assert failing(run_admission(inputs, recompute=remembered, replay=exact_replay)) == {}
    row = run_admission(inputs, recompute=remembered).rows[NAMES.index("G1(b)")]
    assert row.holds
    assert "none replayed again here" in row.found


def test_a_fabricated_pilot_is_refused_by_each_of_three_checks(case: AdmittedCase) -> None:
    """Random untrained adapters, invented scores, one update an arm, a few sampled rounds, two requests of dev: every
    digest bound, and its own receipt says PASS."""
    real = DEMANDS.model_copy(
        update={
            "presented_blocks": 20_352,
            "sample_size": 1000,
            "sequences": {"train": 65, "dev": 30, "heldout_legal": 24, "heldout_general": 12},
        }
    )
    for number, arm in enumerate(("fast", "ref")):
        (case.pilot / f"{arm}.safetensors").unlink()
        save_adapter(case.pilot / f"{arm}.safetensors", tiny_adapter(CONFIG, RECIPE.rank, number), CONFIG)

    def invented(value: dict[str, Any]) -> None:
        for requests in value["splits"].values():
            for rounds in requests.values():
                count = len(rounds["anchors"])
                rounds |= {"baseline": [1] * count, "fast": [2] * count, "ref": [2] * count}

    case.bind(scores=invented, receipt=lambda v: [arm.update(updates=1) for arm in v["arms"].values()])
    assert read(case.pilot / "receipt.json")["verdict"] == "PASS"
    refused = failing(run_admission(replace(case.inputs, demands=real, rescored_rounds=459), recompute=remembered))
    assert set(refused) == {"pilot extent", "pilot training", "pilot scores, again"}
    assert "the requests of train differs: 2" in refused["pilot extent"]
    assert "is not the one that was trained" in refused["pilot training"] or "total" in refused["pilot training"]
    assert "is not what the drafter does" in refused["pilot scores, again"]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"presented_blocks": 128}, "the updates of fast differs: 3"),
        ({"sample_size": 1000}, "the sample's size differs: 16"),
        (
            {"sequences": {"train": 2, "dev": 30, "heldout_legal": 2, "heldout_general": 2}},
            "the requests of dev differs: 2",
        ),
    ],
)
def test_the_pilot_is_as_large_as_the_profile_asks_and_not_as_it_says(
    case: AdmittedCase, fields: dict[str, Any], text: str
) -> None:
    refused = failing(
        run_admission(replace(case.inputs, demands=DEMANDS.model_copy(update=fields)), recompute=remembered)
    )
    assert text in refused["pilot extent"]
    assert set(refused) <= {"pilot extent", "pilot training"}  # another number of updates is another training


# --- pins


@pytest.fixture
def pinned(case: AdmittedCase) -> dict[str, Any]:
    """Pins of the good case, whose source says which commit it is of."""
    (case.pilot / "SOURCE_COMMIT").write_text("d1dd41a" + "0" * 33 + "\n")
    counts = case.manifest.counts()
    return {
        "source_commit": "d1dd41a",
        "source_map": case.digest("pilot/repo/SOURCE_MAP.json"),
        "assembly": "assembly",
        "namespace": PILOT,
        "manifest": case.digest("assembly/MANIFEST.json"),
        "sequences": {split: found.sequences for split, found in counts.splits.items()},
        "rows": {split: found.rows for split, found in counts.splits.items()},
        "blocks": counts.blocks,
        "updates": 3,
        "objective": "ACE",
        "learning_rate": RECIPE.lr,
        "epochs": 3,
        "sample_size": DEMANDS.sample_size,
    }


OTHER_PINS: dict[str, Any] = {
    "source_commit": "d1dd41b",
    "source_map": DIGEST,
    "assembly": "assembly-c2",
    "namespace": "tiny-p2",
    "manifest": DIGEST,
    "sequences": {"train": 3, "dev": 2, "heldout_legal": 2, "heldout_general": 2},
    "rows": {"train": 57, "dev": 71, "heldout_legal": 76, "heldout_general": 61},
    "blocks": 31,
    "updates": 4,
    "objective": "KL",
    "learning_rate": 2e-4,
    "epochs": 2,
    "sample_size": 17,
}


def with_pins(case: AdmittedCase, pins: dict[str, Any]) -> Admission:
    rewrite(case.root / "pins.yaml", pins)
    return run_admission(replace(case.inputs, pins=case.root / "pins.yaml"), recompute=remembered)


def test_pins_that_agree(case: AdmittedCase, pinned: dict[str, Any]) -> None:
    found = with_pins(case, pinned)
    assert failing(found) == {}
    assert found.rows[NAMES.index("pins")].found == "all as pinned; of the pilot's source its file map is known"
    assert "its commit alone" in with_pins(case, pinned | {"source_map": None}).rows[NAMES.index("pins")].found
    assert case.run().rows[NAMES.index("pins")].found.startswith("no pins: the inputs were compared with each other")


@pytest.mark.parametrize("name", OTHER_PINS)
def test_each_pin_alone_says_no(case: AdmittedCase, pinned: dict[str, Any], name: str) -> None:
    assert OTHER_PINS.keys() == pinned.keys()
    refused = failing(with_pins(case, pinned | {name: OTHER_PINS[name]}))
    assert set(refused) == {"pins"}
    assert f"{name} is not the pinned one" in refused["pins"]


def test_a_source_without_a_commit_and_malformed_pins_are_refused(case: AdmittedCase, pinned: dict[str, Any]) -> None:
    (case.pilot / "SOURCE_COMMIT").unlink()
    assert "source_commit is not the pinned one: none" in failing(with_pins(case, pinned))["pins"]
    assert "the pins are malformed" in failing(with_pins(case, pinned | {"more": 1}))["pins"]
    assert "the pins are malformed" in failing(with_pins(case, {}))["pins"]


def test_training_blocks_alone(case: AdmittedCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(D2Blocks, "__len__", lambda self: int(self._end[-1]) - 1)
    assert list(failing(case.run())) == ["training blocks"]


def test_an_original_source_that_computes_something_else(case: AdmittedCase) -> None:
    """An interval, a sample's or a unit's identity, a checkpoint's digest or the verdict: each must be the recorded."""

    def other(path: tuple[str, ...], value: Any) -> Callable[[Path, Path], Any]:
        def recompute(folder: Path, raw: Path) -> Any:
            verdict = copy.deepcopy(remembered(folder, raw))
            place = verdict
            for name in path[:-1]:
                place = place[name]
            place[path[-1]] = value
            return verdict

        return recompute

    for path, value in (
        (("verdict",), "FAIL"),
        (("intervals", "dev.fast", "lower"), 0.25),
        (("identities", "sample"), DIGEST),
        (("identities", "units_dev"), DIGEST),
        (("identities", "adapter_ref"), DIGEST),
        (("gates",), []),
    ):
        refused = failing(case.run(recompute=other(path, value)))
        assert list(refused) == ["verdict, original source"], path
    assert list(failing(case.run(recompute=lambda folder, raw: ["PASS"]))) == ["verdict, original source"]
    assert list(failing(case.run(recompute=lambda folder, raw: {}))) == ["verdict, original source"]


def test_a_source_of_today_that_computes_something_else(case: AdmittedCase, monkeypatch: pytest.MonkeyPatch) -> None:
    real = pilot_checks.judge_pilot
    monkeypatch.setattr(
        pilot_checks, "judge_pilot", lambda raw: real(raw).model_copy(update={"verdict": "INCONCLUSIVE"})
    )
    refused = failing(case.run())
    assert list(refused) == ["verdict, today's source"]


# --- several checks at once: what hangs together, and what is not there


@pytest.mark.parametrize(("fast", "verdict"), [([0, 0], "FAIL"), ([2, 0], "INCONCLUSIVE")])
def test_a_pilot_that_did_not_pass(case: AdmittedCase, fast: list[int], verdict: str) -> None:
    """Genuine and bound, but without the gain: the receipt and both recomputations say no."""

    def lose(value: dict[str, Any]) -> None:
        for requests in value["splits"].values():
            for number, rounds in enumerate(requests.values()):
                for arm in ("fast", "ref"):
                    rounds[arm] = [fast[number]] * len(rounds["anchors"])

    case.bind(scores=lose)
    assert read(case.pilot / "receipt.json")["verdict"] == verdict
    assert set(failing(case.run())) == {"pilot receipt", "verdict, original source", "verdict, today's source"}


def test_a_changed_statistic_is_seen_by_both_recomputations(case: AdmittedCase) -> None:
    case.bind(receipt=lambda value: value["statistics"]["intervals"]["dev.fast"].update(lower=0.5))
    refused = failing(case.run())
    assert set(refused) == {"verdict, original source", "verdict, today's source"}
    assert all("intervals are not the recorded ones" in text for text in refused.values())


def test_a_source_with_other_gates_is_seen_though_its_map_fits(case: AdmittedCase) -> None:
    path = case.pilot / "repo/d2lib/gates/pilot.py"
    text = path.read_text()
    path.unlink()
    path.write_text(text.replace("LEGAL_GAIN = 0.15", "LEGAL_GAIN = 0.05"))
    case.bind()
    assert set(failing(case.run())) == {"numerical files", "verdict, original source"}


def test_a_modified_source_is_not_run(case: AdmittedCase) -> None:
    case.bind()
    path = case.pilot / "repo/d2lib/plots.py"
    path.unlink()
    path.write_text("raise SystemExit")

    def forbidden(folder: Path, raw: Path) -> Any:
        raise AssertionError("a modified source was run")

    refused = failing(case.run(recompute=forbidden))
    assert refused["pilot source"] == f"a source file is modified: {sha256_file(path)}"
    assert consequences(refused, "pilot source") == {"verdict, original source"}


def cached_byte_code(case: AdmittedCase) -> None:
    folder = case.pilot / "repo/d2lib/__pycache__"
    folder.mkdir()
    (folder / "files.cpython-311.pyc").write_bytes(b"x")


def linked_source(case: AdmittedCase) -> None:
    path = case.pilot / "repo/d2lib/plots.py"
    path.rename(case.root / "plots.py")
    path.symlink_to(case.root / "plots.py")


def other_map(case: AdmittedCase) -> None:
    edit(case.pilot / "repo/SOURCE_MAP.json", lambda value: value.pop("d2lib/plots.py"))


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (cached_byte_code, "a file is not in the map"),
        (linked_source, "a link"),
        (other_map, "the file map is not the pinned one"),
        (lambda case: (case.pilot / "repo/d2lib/plots.py").unlink(), "a source file is missing"),
        (lambda case: (case.pilot / "repo/SOURCE_MAP.json").unlink(), "a file is missing"),
    ],
)
def test_the_source_is_its_map_and_nothing_else(
    case: AdmittedCase, spoil: Callable[[AdmittedCase], Any], text: str
) -> None:
    spoil(case)
    refused = failing(case.run())
    assert text in refused["pilot source"]
    assert consequences(refused, "pilot source", "numerical files") == {"verdict, original source"}


def test_a_sidecar_of_another_length_is_no_training_data(case: AdmittedCase) -> None:
    path = case.assembly / "shards/train-00.safetensors"
    tensors(path, lambda value: value.update({name: tensor[:-1].contiguous() for name, tensor in value.items()}))
    case.bind()
    assert set(failing(case.run())) == {"G1(a)", "training blocks"}


RECIPE_ENDS = {"pilot checkpoints", "pilot extent", "pilot training", "initialization"}
RECEIPT_ENDS = {
    *RECIPE_ENDS,
    "pilot scores, again",
    "recipe",
    "pilot scores",
    "pilot source",
    "verdict, original source",
    "verdict, today's source",
    "frozen sample",
}


def test_without_a_known_recipe_nothing_is_taken_from_elsewhere(case: AdmittedCase) -> None:
    case.bind(receipt=lambda value: value["recipe"].pop("objective"))
    refused = failing(case.run())
    assert consequences(refused, "recipe") == RECIPE_ENDS


@pytest.mark.parametrize(
    ("spoil", "own", "wanted"),
    [
        (lambda case: (case.pilot / "receipt.json").unlink(), "pilot receipt", RECEIPT_ENDS),
        (receipt(lambda value: value.pop("statistics")), "pilot receipt", RECEIPT_ENDS),
        (receipt(lambda value: value.update(recipe_option="KL")), "pilot receipt", RECEIPT_ENDS),
        (receipt(lambda value: value.update(schema_version=2)), "pilot receipt", RECEIPT_ENDS),
        (receipt(lambda value: value.update(synthetic=True)), "pilot receipt", RECEIPT_ENDS),
        (lambda case: shutil.rmtree(case.pilot / "repo"), "numerical files", {"verdict, original source"}),
        (
            lambda case: (case.pilot / "scores.json").unlink(),
            "pilot scores",
            {
                "pilot checkpoints",
                "pilot scores, again",
                "verdict, original source",
                "verdict, today's source",
                "frozen sample",
            },
        ),
        (g1(lambda value: value.update(synthetic=True)), "G1 receipt", {"G1(b)", "live sources", "parity"}),
        (lambda case: case.g1.unlink(), "G1 receipt", {"G1(b)", "live sources", "parity"}),
    ],
)
def test_what_is_missing_or_malformed_is_said_once(
    case: AdmittedCase, spoil: Callable[[AdmittedCase], Any], own: str, wanted: set[str]
) -> None:
    spoil(case)
    refused = failing(case.run())
    also = (
        {"pilot receipt", "pilot training"}
        if own == "G1 receipt"
        else {"pilot source"}
        if own == "numerical files"
        else set()
    )
    assert own in refused
    assert consequences(refused, own, *also) == wanted


def test_an_empty_folder_gives_every_row(tmp_path: Path) -> None:
    refused = failing(AdmittedCase(tmp_path).run())
    assert set(refused) == set(NAMES) - {"signatures", "pins"}  # without them none is required
    assert not any("Traceback" in text for text in refused.values())


# --- paths that leave their folder, and links


@pytest.mark.parametrize("name", ["fast.safetensors", "scores.json", "receipt.json"])
def test_a_linked_file_of_the_pilot_is_refused(case: AdmittedCase, name: str) -> None:
    path = case.pilot / name
    path.rename(case.root / "elsewhere")
    path.symlink_to(case.root / "elsewhere")
    refused = failing(case.run())
    own = {"fast.safetensors": "pilot checkpoints", "scores.json": "pilot scores", "receipt.json": "pilot receipt"}[
        name
    ]
    assert refused[own] == "a link is not allowed here: a symbolic link"
    consequences(refused, own, *({"pilot training"} & set(refused)))  # which reads the adapter too


@pytest.mark.parametrize("file", ["../g1/g1.json", "/etc/hostname", "repo/../scores.json"])
def test_scores_outside_the_pilot_are_refused(case: AdmittedCase, file: str) -> None:
    case.bind(receipt=lambda value: value["scores"].update(file=file))
    refused = failing(case.run())
    assert refused["pilot scores"].startswith("a path leaves its folder")
    consequences(refused, "pilot scores")


def test_linked_inputs_are_refused(case: AdmittedCase) -> None:
    for path, own in ((case.g1, "G1 receipt"), (case.k2("heldout_general"), "K2 heldout_general")):
        kept = path.with_name("kept")
        path.rename(kept)
        path.symlink_to(kept)
        assert "a link is not allowed here" in failing(case.run())[own]
        path.unlink()
        kept.rename(path)
    case.assembly.rename(case.root / "real")
    case.assembly.symlink_to(case.root / "real")
    assert "not a folder" in failing(case.run())["assembly"]


def test_a_manifest_that_points_outside_is_refused(case: AdmittedCase) -> None:
    edit(case.assembly / "MANIFEST.json", lambda value: value["sequences"][0]["file"].update(path="../x"))
    found = case.run()
    (row,) = (row for row in found.rows if row.name == "assembly")
    assert "plain and relative" in row.expected
    assert row.where.endswith("MANIFEST.json: sequences.0.file")
    assert consequences(failing(found), "assembly", "G1 receipt", "pilot receipt")
