"""Admission's checks of the pilot: its receipt, its extent, its training, its source and its verdict."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from d2lib.admission.case import ARM_NAMES, Case, same
from d2lib.admission.records import parse_record
from d2lib.admission.source import check_numerical
from d2lib.data.check import thousands
from d2lib.data.sample import SAMPLED
from d2lib.drafter.lora import adapter_rank, initialization_sha256, initialize_adapter
from d2lib.errors import Refused
from d2lib.files import canonical_json, inside, sha256_file
from d2lib.gates.pilot import PilotVerdict, judge_pilot
from d2lib.train.checkpoint import refuse_other
from d2lib.train.schedule import blocks_presented, total_updates


def check_pilot_receipt(case: Case) -> str:
    """The pilot's receipt says PASS, and is of this manifest, these K2 files and this G1 receipt."""
    pilot, where = case.pilot, case.inputs.receipt
    same("the verdict", "PASS", pilot.verdict, where)
    same("the manifest", pilot.manifest_sha256, str(sha256_file(case.inputs.assembly / "MANIFEST.json")), where)
    same("the G1 receipt", pilot.g1_sha256, str(sha256_file(case.inputs.g1)), where)
    for split in sorted({*SAMPLED, *pilot.k2}):
        same(f"K2 of {split}", pilot.k2.get(split), str(sha256_file(case.inputs.k2_path(split))), where)
    return f"PASS, namespace {pilot.namespace}"


def check_recipe(case: Case) -> str:
    """The receipt's recipe is complete and known; there is no other place that a recipe comes from."""
    recipe = case.recipe
    return f"{recipe.objective}: {canonical_json(recipe.model_dump(mode='json')).decode()}"


def check_scores(case: Case) -> str:
    """The raw scores have the recorded bytes and are of this pilot and block size."""
    scores, where = case.scores, case.scores_path
    same("the namespace", case.pilot.namespace, scores.namespace, where)
    same("the block size", case.config.block_size, scores.block_size, where)
    rounds = sum(len(found.anchors) for requests in scores.splits.values() for found in requests.values())
    return f"{thousands(rounds, 'round')}, {case.pilot.scores.sha256}"


def check_checkpoints(case: Case) -> str:
    """Both arms' adapters have the recorded bytes, are the ones that were scored, and are whole and finite."""
    for name in ARM_NAMES:
        arm = getattr(case.pilot.arms, name)
        path = inside(case.inputs.pilot, arm.checkpoint)
        same(f"the checkpoint {arm.checkpoint}", arm.sha256, str(sha256_file(path)), path)
        same(f"the scored adapter of {name}", getattr(case.scores.adapters, name), arm.sha256, case.scores_path)
        rank = adapter_rank(case.adapter(name), case.config, where=path)
        same("the adapter's rank", case.recipe.rank, rank, path)
    return f"FAST {case.pilot.arms.fast.sha256}, REF {case.pilot.arms.ref.sha256}"


def check_extent(case: Case) -> str:
    """The pilot is as large as the profile asked for: requests of every split, sampled rounds, updates of both arms."""
    demands, where = case.inputs.demands, case.inputs.receipt
    for split, count in demands.sequences.items():
        same(f"the requests of {split}", count, len(case.assembly.manifest.split(split)), case.inputs.assembly)
    same("the sample's size", demands.sample_size, case.pilot.sample.size, where)
    updates = _updates(case)
    for name in ARM_NAMES:
        same(f"the updates of {name}", updates, getattr(case.pilot.arms, name).updates, where)
    return f"{sum(demands.sequences.values())} requests, {demands.sample_size:,} rounds a split, {updates:,} updates"


def check_training(case: Case) -> str:
    """Both arms' checkpoints are complete runs of this recipe on these data, as long as the profile asked for, and
    hold the very adapters that were exported and scored."""
    recipe, total = case.recipe, _updates(case)
    blocks = case.assembly.manifest.counts().blocks
    presented = blocks_presented(total, blocks, recipe)
    for name in ARM_NAMES:
        run, path = case.trained[name], inside(case.inputs.pilot, f"{name}.pt")
        wanted = {
            **case.assembly.identities,
            "namespace": case.pilot.namespace,
            "g1": str(sha256_file(case.inputs.g1)),
            "run": name,
            "backend": name,
            "recipe": recipe.model_dump(),
            "initialization": case.pilot.initialization_sha256,
            "blocks": blocks,
            "total": total,
        }
        refuse_other(wanted, {field: run.bound.get(field) for field in wanted}, path, remedy=None)
        same(f"the blocks that {name} presented", presented, int(run.metrics["blocks"].sum()), path)
        exported = case.adapter(name)
        other = [key for key in sorted(exported | run.adapter) if not _equal(exported.get(key), run.adapter.get(key))]
        if other:
            raise Refused(
                f"the adapter of {name} is not the one that was trained",
                expected=f"the tensors of {path.name}",
                found=f"{len(other)} that differ; the first: {other[0]}",
                where=inside(case.inputs.pilot, getattr(case.pilot.arms, name).checkpoint),
            )
    return f"both arms: {total:,} updates, {presented:,} blocks presented, {recipe.objective} at {recipe.lr:g}"


def _updates(case: Case) -> int:
    """Updates of an arm, from the profile's demands: what run_pilot makes of them."""
    recipe = case.recipe
    wanted = -(-case.inputs.demands.presented_blocks // recipe.batch)
    return min(wanted, total_updates(case.assembly.manifest.counts().blocks, recipe))


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)


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
        same(f"the sample's {name}", value, getattr(recorded, name), where)
    same("the scored sample", str(sample.identity), case.scores.sample_identity, case.scores_path)
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


def check_initialization(case: Case) -> str:
    """The recipe's fresh adapter is the one that the pilot started from."""
    adapter = initialize_adapter(case.config, case.recipe.rank, case.recipe.seed)
    found = str(initialization_sha256(adapter))
    same("the initialization", case.pilot.initialization_sha256, found, case.inputs.receipt)
    return found


def _agree(case: Case, value: Any) -> str:
    """Compare a recomputed verdict with the recorded one, field by field."""
    where = case.scores_path
    verdict = parse_record(PilotVerdict, value, "the recomputed verdict").model_dump(mode="json")
    same("the recomputed verdict", "PASS", verdict["verdict"], where)
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
