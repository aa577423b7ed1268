"""Admission's checks of the data: the assembly, its trajectories, and what G1 recorded of them."""

from __future__ import annotations

from d2lib.admission.case import Case, same
from d2lib.admission.records import SCORED
from d2lib.data.assembly import K2_NAMES
from d2lib.data.blocks import D2Blocks
from d2lib.data.check import thousands
from d2lib.data.integrity import integrity_rows
from d2lib.errors import Refused
from d2lib.files import canonical_json, inside, read_json, sha256_file, walk
from d2lib.gates.journal import ScoredSplit


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
    """The assembly says where it comes from, and not that it is synthetic or that anything of it is withdrawn.

    That its rows are the target's and its drafts the drafter's is not said but shown: by G1(b) and parity.
    """
    path = inside(case.inputs.assembly, "provenance.json")
    value = read_json(path)
    if not isinstance(value, dict):
        raise Refused("not a provenance record", expected="a JSON object", where=path)
    if value.get("synthetic", False) is not False:
        raise Refused("the assembly is synthetic", expected="captured rows", found=value["synthetic"], where=path)
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
    return f"{thousands(len(sources), 'source')}, none withdrawn, namespace {namespace}"


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


def check_coverage(case: Case, split: ScoredSplit) -> str:
    """A split's K2 file is valid, agrees with the committed tokens and covers every request to its end."""
    file, where = case.k2(split), case.inputs.k2_path(split)
    same("the block size", case.config.block_size, file.header.block_size, where)
    population = file.population(case.assembly.manifest, split)
    empty = [request for request, anchors in population.items() if not anchors]
    if empty:
        raise Refused("a request has no complete round", expected=">= 1 in each", found=empty[0], where=where)
    return f"{thousands(len(population), 'request')}, {sum(map(len, population.values())):,} complete rounds"


def check_blocks(case: Case) -> str:
    """len(D2Blocks(train)), from the actual sidecars, is what the manifest counts."""
    manifest = case.assembly.manifest
    blocks = D2Blocks(manifest, case.inputs.assembly, "train", case.config)
    actual = sum(len(s.tensor("tokens")) - s.entry.gen_start - 1 for s in blocks.sidecars)
    same("the training blocks", manifest.counts().blocks, actual, case.inputs.assembly)
    same("len(D2Blocks(train))", actual, len(blocks), case.inputs.assembly)
    return f"{thousands(actual, 'block')} in {thousands(len(blocks.sidecars), 'sidecar')}"


def check_g1_receipt(case: Case) -> str:
    """The G1 receipt is of this manifest and these K2 files, and every one of its rows holds."""
    g1, where = case.g1, case.inputs.g1
    manifest = case.inputs.assembly / "MANIFEST.json"
    same("the manifest", g1.manifest_sha256, str(sha256_file(manifest)), where)
    same("the namespace", case.assembly.manifest.namespace, g1.namespace, where)
    for split in SCORED:
        same(f"K2 of {split}", g1.k2.get(split), str(sha256_file(case.inputs.k2_path(split))), where)
    failed = [row for row in g1.rows if not row.holds]
    if failed:
        raise Refused("a row of the G1 receipt does not hold", expected=failed[0].expected, found=failed[0].found)
    return f"{thousands(len(g1.rows), 'row')}, all hold"


def check_live_sources(case: Case) -> str:
    """What the live run made and used has the recorded bytes and is VALID; the trajectories' own headers, written when
    it ran, name this native drafter and this target."""
    where, seen = case.inputs.g1, set()
    trajectories = {K2_NAMES[split]: case.inputs.k2_path(split) for split in SCORED}
    for source in case.g1.live_sources:
        if source.status != "VALID":
            raise Refused("a live source is withdrawn", expected="VALID", found=source.status, where=source.name)
        path = trajectories.get(source.name) or inside(case.inputs.assembly, source.name)
        same(f"the live source {source.name}", source.sha256, str(sha256_file(path)), where)
        seen.add(source.sha256)
    for name, path in {
        "the native drafter": case.assembly.native,
        **{f"K2 of {split}": case.inputs.k2_path(split) for split in SCORED},
    }.items():
        if str(sha256_file(path)) not in seen:
            raise Refused(f"{name} is not among the live sources", expected=path.name, where=where)
    native, target = str(sha256_file(case.assembly.native)), case.assembly.manifest.target.get("sha256")
    for split in SCORED:
        for what, digest in (("native drafter", native), ("target", target)):
            if digest not in case.k2(split).header.live.values():
                raise Refused(
                    f"the live run of {split} used another {what}",
                    expected=digest,
                    found=case.k2(split).header.live,
                    where=case.inputs.k2_path(split),
                )
    return f"{thousands(len(case.g1.live_sources), 'source')}, with their recorded bytes, named by the live run"
