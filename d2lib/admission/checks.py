"""The checks of admission: one small function each, and one table of them.

A check returns what it found, in words, when it holds, and raises Refused when it does not. A new check is one function
and one line of the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from d2lib.admission.case import AdmissionInputs, Case
from d2lib.admission.records import SCORED, parse_record
from d2lib.admission.source import check_numerical
from d2lib.data.assembly import K2_NAMES
from d2lib.data.blocks import D2Blocks
from d2lib.data.check import thousands
from d2lib.data.integrity import integrity_rows
from d2lib.data.sample import SAMPLED
from d2lib.drafter.family import reference_drafter
from d2lib.drafter.lora import adapter_rank, initialization_sha256, initialize_adapter, load_adapter
from d2lib.errors import Refused
from d2lib.evidence.sign import read_policy, require_signatures
from d2lib.files import canonical_json, inside, read_json, sha256_file, walk
from d2lib.gates.journal import ScoredSplit
from d2lib.gates.pilot import PilotVerdict, judge_pilot


@dataclass(frozen=True)
class Check:
    """A named check: what must be so, where it looks, and the function that looks."""

    name: str
    expected: str
    where: Callable[[AdmissionInputs], Path]
    run: Callable[[Case], str]


def check_assembly(case: Case) -> str:
    """The assembly's folder holds the files that it must, no links, and they fit together."""
    count = sum(1 for _ in walk(case.inputs.assembly))
    for name in ("MANIFEST.json", "drafter.json", "native.safetensors", "provenance.json"):
        if not inside(case.inputs.assembly, name).is_file():
            raise Refused("a file of the assembly is missing", expected=name, where=case.inputs.assembly)
    config = case.config
    sequences = len(case.assembly.manifest.sequences)
    return f"{thousands(count, 'file')}, {thousands(sequences, 'sequence')}, K = {config.block_size}"


def check_provenance(case: Case) -> str:
    """The assembly says where it comes from, that it is not synthetic, and that nothing of it is withdrawn."""
    path = inside(case.inputs.assembly, "provenance.json")
    value = read_json(path)
    if not isinstance(value, dict):
        raise Refused("not a provenance record", expected="a JSON object", where=path)
    _refuse_synthetic(value.get("synthetic"), path)
    namespace = case.assembly.manifest.namespace
    if value.get("namespace") != namespace:
        raise Refused(
            "the provenance is of another assembly", expected=namespace, found=value.get("namespace"), where=path
        )
    sources = value.get("sources")
    if not isinstance(sources, list | dict) or not sources:
        raise Refused("the provenance names no sources", expected="sources", found=sources, where=path)
    if b'"WITHDRAWN"' in canonical_json(sources):
        raise Refused("a source is withdrawn", expected="none", where=path)
    return f"not synthetic, {thousands(len(sources), 'source')}, namespace {namespace}"


def check_integrity(case: Case) -> str:
    """G1(a), computed again from the files."""
    rows = integrity_rows(case.assembly.manifest, case.inputs.assembly, case.head, head_rows=case.inputs.head_rows)
    failed = [row for row in rows if not row.holds]
    if failed:
        raise Refused(
            f"{len(failed)} of {len(rows)} checks do not hold",
            expected=f"{failed[0].name}: {failed[0].expected}",
            found=failed[0].found,
            where=case.inputs.assembly,
        )
    return f"all {len(rows)} checks hold"


def check_g1_receipt(case: Case) -> str:
    """The G1 receipt is genuine, is of this manifest and these K2 files, and every one of its rows holds."""
    g1, where = case.g1, case.inputs.g1
    _refuse_synthetic(g1.synthetic, where)
    manifest = case.inputs.assembly / "MANIFEST.json"
    _same("the manifest", g1.manifest_sha256, str(sha256_file(manifest)), where)
    _same("the namespace", case.assembly.manifest.namespace, g1.namespace, where)
    for split in SCORED:
        _same(f"K2 of {split}", g1.k2.get(split), str(sha256_file(case.inputs.k2_path(split))), where)
    failed = [row for row in g1.rows if not row.holds]
    if failed:
        raise Refused("a row of the G1 receipt does not hold", expected=failed[0].expected, found=failed[0].found)
    return f"genuine, {thousands(len(g1.rows), 'row')}, all hold"


def check_replay(case: Case) -> str:
    """G1(b): dev was replayed exactly, every sequence of it, on the very files that are here."""
    replay, where = case.g1.replay, case.inputs.g1
    if not replay.exact:
        raise Refused("the replay of dev was not exact", expected="exact", found="not exact", where=where)
    entries = case.assembly.manifest.split("dev")
    wanted = {entry.id: entry.file.sha256 for entry in entries}
    for name in sorted(wanted.keys() | replay.sequences.keys()):
        _same(f"the replayed sidecar of {name}", replay.sequences.get(name), wanted.get(name), where)
    positions = sum(entry.span_positions for entry in entries)
    _same("the replayed positions", positions, replay.positions, where)
    _same("the target", case.assembly.manifest.target.get("sha256"), replay.target, where)
    return f"exact, {thousands(len(wanted), 'sequence')}, {positions:,} positions, target {replay.target}"


def check_live_sources(case: Case) -> str:
    """Every file that the live run made or used is VALID and has the recorded bytes; the K2 files are among them."""
    where, seen = case.inputs.g1, set()
    trajectories = {K2_NAMES[split]: case.inputs.k2_path(split) for split in SCORED}
    for source in case.g1.live_sources:
        if source.status != "VALID":
            raise Refused("a live source is withdrawn", expected="VALID", found=source.status, where=source.name)
        path = trajectories.get(source.name) or inside(case.inputs.assembly, source.name)
        _same(f"the live source {source.name}", source.sha256, str(sha256_file(path)), where)
        seen.add(source.sha256)
    for name, path in {
        "the native drafter": case.assembly.native,
        **{f"K2 of {split}": case.inputs.k2_path(split) for split in SCORED},
    }.items():
        if str(sha256_file(path)) not in seen:
            raise Refused(f"{name} is not among the live sources", expected=path.name, where=where)
    return f"{thousands(len(case.g1.live_sources), 'source')}, all VALID with their recorded bytes"


def check_parity(case: Case) -> str:
    """The reference drafter drafts what the live one did: on all rounds by the receipt, on a few by drafting again."""
    native = str(sha256_file(case.assembly.native))
    again = 0
    for split in SCORED:
        parity, where = case.g1.parity.get(split), f"{case.inputs.g1}: {split}"
        if parity is None:
            raise Refused("parity was not measured", expected=split, where=where)
        file = case.k2(split)
        _same("K2", parity.k2, str(file.sha256), where)
        _same("the native drafter", parity.native, native, where)
        _same("the rounds", sum(map(len, file.rounds.values())), parity.rounds, where)
        if parity.differing:
            raise Refused(
                "the reference drafter differs from the live one", expected=0, found=parity.differing, where=where
            )
        again += _draft_again(case, split, parity.tolerance)
    return f"no draft differs; {thousands(again, 'round')} drafted again"


def check_coverage(case: Case, split: ScoredSplit) -> str:
    """A split's K2 file is valid, agrees with the committed tokens and covers every request to its end."""
    file, where = case.k2(split), case.inputs.k2_path(split)
    _same("the block size", case.config.block_size, file.header.block_size, where)
    population = file.population(case.assembly.manifest, split)
    empty = [request for request, anchors in population.items() if not anchors]
    if empty:
        raise Refused("a request has no complete round", expected=">= 1 in each", found=empty[0], where=where)
    return f"{thousands(len(population), 'request')}, {sum(map(len, population.values())):,} complete rounds"


def check_pilot_receipt(case: Case) -> str:
    """The pilot's receipt is genuine, says PASS, and is of this manifest, these K2 files and this G1 receipt."""
    pilot, where = case.pilot, case.inputs.receipt
    _refuse_synthetic(pilot.synthetic, where)
    _same("the verdict", "PASS", pilot.verdict, where)
    _same("the manifest", pilot.manifest_sha256, str(sha256_file(case.inputs.assembly / "MANIFEST.json")), where)
    _same("the G1 receipt", pilot.g1_sha256, str(sha256_file(case.inputs.g1)), where)
    for split in sorted({*SAMPLED, *pilot.k2}):
        _same(f"K2 of {split}", pilot.k2.get(split), str(sha256_file(case.inputs.k2_path(split))), where)
    return f"genuine, PASS, namespace {pilot.namespace}"


def check_recipe(case: Case) -> str:
    """The receipt's recipe is complete and known; there is no other place that a recipe comes from."""
    recipe = case.recipe
    return f"{recipe.objective}: {canonical_json(recipe.model_dump(mode='json')).decode()}"


def check_scores(case: Case) -> str:
    """The raw scores have the recorded bytes and are of this pilot and block size."""
    scores, where = case.scores, case.scores_path
    _same("the namespace", case.pilot.namespace, scores.namespace, where)
    _same("the block size", case.config.block_size, scores.block_size, where)
    rounds = sum(len(found.anchors) for requests in scores.splits.values() for found in requests.values())
    return f"{thousands(rounds, 'round')}, {case.pilot.scores.sha256}"


def check_checkpoints(case: Case) -> str:
    """Both arms' adapters have the recorded bytes, are the ones that were scored, and are whole and finite."""
    for name in ("fast", "ref"):
        arm = getattr(case.pilot.arms, name)
        path = inside(case.inputs.pilot, arm.checkpoint)
        _same(f"the checkpoint {arm.checkpoint}", arm.sha256, str(sha256_file(path)), path)
        _same(f"the scored adapter of {name}", getattr(case.scores.adapters, name), arm.sha256, case.scores_path)
        rank = adapter_rank(load_adapter(path, case.config), case.config, where=path)
        _same("the adapter's rank", case.recipe.rank, rank, path)
    return f"FAST {case.pilot.arms.fast.sha256}, REF {case.pilot.arms.ref.sha256}"


def check_source_map(case: Case) -> str:
    """The pilot's source is exactly what its pinned file map says."""
    return f"{thousands(len(case.source_map), 'file')}, map {case.pilot.source_map_sha256}"


def check_numerical_files(case: Case) -> str:
    """All arithmetic and the verdict's code are byte-identical to the pilot's."""
    return f"{thousands(check_numerical(case.inputs.source), 'file')} are"


def check_verdict_original(case: Case) -> str:
    """The pilot's own source, unchanged, computes the recorded PASS again from the raw scores."""
    _ = case.source_map  # no modified source is run
    return _agree(case, case.recompute(case.inputs.source, case.scores_path))


def check_verdict_today(case: Case) -> str:
    """Today's source computes the same PASS."""
    return _agree(case, judge_pilot(case.scores).model_dump(mode="json"))


def check_sample(case: Case) -> str:
    """The frozen sample, drawn again in the pilot's namespace from both K2 files, is the one that was scored."""
    sample, recorded, where = case.sample, case.pilot.sample, case.inputs.receipt
    for name, value in sample.as_dict().items():
        _same(f"the sample's {name}", value, getattr(recorded, name), where)
    _same("the scored sample", str(sample.identity), case.scores.sample_identity, case.scores_path)
    for split in SAMPLED:
        scored = {
            (request, anchor) for request, rounds in case.scores.splits[split].items() for anchor in rounds.anchors
        }
        if scored != set(sample.rounds[split]):
            raise Refused(
                "other rounds were scored than the frozen sample's",
                expected=f"{len(sample.rounds[split])} rounds of {split}",
                found=f"{len(scored ^ set(sample.rounds[split]))} that are on one side only",
                where=case.scores_path,
            )
    counts = ", ".join(
        f"{len(pairs):,} of {sample.population_rounds[s]:,} rounds of {s}" for s, pairs in sample.rounds.items()
    )
    return f"{counts}; {sample.identity}"


def check_blocks(case: Case) -> str:
    """len(D2Blocks(train)), from the actual sidecars, is what the manifest counts."""
    manifest = case.assembly.manifest
    blocks = D2Blocks(manifest, case.inputs.assembly, "train", case.config)
    actual = sum(len(s.tensor("tokens")) - s.entry.gen_start - 1 for s in blocks.sidecars)
    _same("the training blocks", manifest.counts().blocks, actual, case.inputs.assembly)
    _same("len(D2Blocks(train))", actual, len(blocks), case.inputs.assembly)
    return f"{thousands(actual, 'block')} in {thousands(len(blocks.sidecars), 'sidecar')}"


def check_initialization(case: Case) -> str:
    """The recipe's fresh adapter is the one that the pilot started from."""
    adapter = initialize_adapter(case.config, case.recipe.rank, case.recipe.seed)
    found = str(initialization_sha256(adapter))
    _same("the initialization", case.pilot.initialization_sha256, found, case.inputs.receipt)
    return found


def check_signatures(case: Case) -> str:
    """Where a policy is given, the receipts before admission are signed as it asks."""
    path = case.inputs.policy
    if path is None:
        return "no policy is given, so none is required"
    signed = require_signatures(case.inputs.pilot.absolute().parent, read_policy(path), ("capture", "g1", "pilot"))
    text = "; ".join(f"{step} by {', '.join(key[:12] for key in keys)}" for step, keys in signed.items())
    return text or "the policy asks for none of these"


def _agree(case: Case, value: Any) -> str:
    """Compare a recomputed verdict with the recorded one, field by field."""
    where = case.scores_path
    verdict = parse_record(PilotVerdict, value, "the recomputed verdict").model_dump(mode="json")
    _same("the recomputed verdict", "PASS", verdict["verdict"], where)
    recorded = case.pilot.statistics
    for name in sorted(recorded.keys() | verdict.keys()):
        if canonical_json(recorded.get(name)) != canonical_json(verdict.get(name)):
            raise Refused(
                f"the recomputed {name} are not the recorded ones",
                expected=str(recorded.get(name))[:200],
                found=str(verdict.get(name))[:200],
                where=where,
            )
    return f"PASS, {thousands(len(verdict['gates']), 'gate')}, intervals and identities as recorded"


def _draft_again(case: Case, split: ScoredSplit, tolerance: float) -> int:
    """Draft evenly spaced rounds of a K2 file with the reference; returns how many, refuses one that differs."""
    rounds = [found for chain in case.k2(split).rounds.values() for found in chain]
    count = min(case.inputs.parity_rounds, len(rounds))
    if count == 0:
        return 0
    reference = case.once("reference", lambda: reference_drafter(case.config, case.assembly.weights))
    blocks = case.assembly.blocks(split)
    for index in range(count):
        found = rounds[index * (len(rounds) - 1) // max(1, count - 1)]
        live = torch.tensor(found.drafts)
        batch = blocks.rounds_batch(found.request, [found.anchor]).round(0)
        previous = batch.previous.clone()
        previous[1 : len(live)] = live[:-1]
        with torch.no_grad():
            logits = reference.forward(replace(batch, previous=previous)).logits[: len(live)]
        below = logits.amax(-1) - logits.gather(-1, live[:, None])[:, 0]
        if not bool((below <= tolerance).all()):
            raise Refused(
                "the reference drafter differs from the live one",
                expected=f"{live.tolist()} (live; near ties within {tolerance:g} allowed)",
                found=logits.argmax(-1).tolist(),
                where=f"{split} {found.request}, anchor {found.anchor}",
            )
    return count


def _refuse_synthetic(value: object, where: object) -> None:
    if value is not False:
        raise Refused(
            "an input is synthetic or does not say that it is not",
            expected="synthetic: false",
            found=value,
            where=where,
        )


def _same(what: str, expected: object, found: object, where: object) -> None:
    if type(expected) is not type(found) or expected != found:
        raise Refused(f"{what} differs", expected=expected, found=found, where=where)


CHECKS: tuple[Check, ...] = (
    Check("assembly", "complete, consistent, no links", lambda i: i.assembly, check_assembly),
    Check("provenance", "not synthetic, nothing withdrawn", lambda i: i.assembly / "provenance.json", check_provenance),
    Check("G1(a)", "every check holds when computed again", lambda i: i.assembly, check_integrity),
    *(
        Check(
            f"K2 {split}",
            "valid, every request to its end",
            lambda i, split=split: i.k2.get(split, i.assembly / K2_NAMES[split]),  # type: ignore[misc]
            partial(check_coverage, split=split),
        )
        for split in SCORED
    ),
    Check("G1 receipt", "genuine, of these inputs, every row holds", lambda i: i.g1, check_g1_receipt),
    Check("G1(b)", "dev replayed exactly, bound by digests", lambda i: i.g1, check_replay),
    Check("live sources", "VALID, bound by digests", lambda i: i.g1, check_live_sources),
    Check("parity", "the reference drafter is the live one", lambda i: i.g1, check_parity),
    Check("pilot receipt", "a genuine PASS of these inputs", lambda i: i.receipt, check_pilot_receipt),
    Check("recipe", "complete, from the pilot's receipt", lambda i: i.receipt, check_recipe),
    Check("pilot scores", "recorded bytes, of this pilot", lambda i: i.pilot, check_scores),
    Check("pilot checkpoints", "recorded bytes, scored, whole", lambda i: i.pilot, check_checkpoints),
    Check("pilot source", "exactly its pinned file map", lambda i: i.source, check_source_map),
    Check("numerical files", "byte-identical to the pilot's", lambda i: i.source, check_numerical_files),
    Check("verdict, original source", "the recorded PASS again", lambda i: i.source, check_verdict_original),
    Check("verdict, today's source", "the recorded PASS again", lambda i: i.pilot, check_verdict_today),
    Check("frozen sample", "drawn again, the one that was scored", lambda i: i.receipt, check_sample),
    Check("training blocks", "as counted, in the actual sidecars", lambda i: i.assembly, check_blocks),
    Check("initialization", "the pilot's", lambda i: i.receipt, check_initialization),
    Check("signatures", "as the policy asks", lambda i: i.policy or i.pilot, check_signatures),
)
"""Every check, in the order of the receipt's table."""
