"""The card of a release's drafter: its index and the headers of the shards that hold `mtp.*`, embedding and head."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from d2lib.drafter.config import DrafterConfig
from d2lib.drafter.deepseek.release import FORMS, Form, is_unknown, scale_name, scale_shape, stored_name
from d2lib.drafter.deepseek.release_config import known_form, read_config
from d2lib.drafter.headers import INDEX, StoredTensor, read_header, weight_map
from d2lib.drafter.weights import expected_shapes
from d2lib.drafter.weights_card import (
    CONFIG,
    Finding,
    Question,
    WeightsCard,
    extra_finding,
    file_card,
    ordered,
    plain_findings,
    shape_findings,
)
from d2lib.errors import Refused
from d2lib.files import inside, read_json


def inspect(question: Question) -> WeightsCard | None:
    """The card of a release, or of a file of ours beside a release's config.json; None for anything else.

    Raises:
        Refused: `mtp.*` tensors without a model family, a damaged header, or a wrong configuration.
    """
    path, config = question.path, question.config
    beside = (path if path.is_dir() else path.parent) / CONFIG
    config = config or (beside if beside.is_file() else None)
    form = None if question.form is None else known_form(question.form)
    if form is None and config is not None and not _is_release(config):
        config = None
    if form is None and config is None:
        if path.is_dir() and not beside.is_file() and (path / INDEX).is_file() and _has_stages(path):
            raise Refused(
                "the release does not say its model family",
                expected=f"{CONFIG} with a model_type",
                where=path,
                remedy=f"name it: --form {' or --form '.join(FORMS)}",
            )
        return None
    found, sizes = (form, None) if config is None else read_config(config, form)
    if not path.is_dir():
        return file_card(path, sizes)
    return None if found is None else _release_card(path, found, sizes)


def _is_release(config: Path) -> bool:
    fields = read_json(config)
    return isinstance(fields, dict) and fields.get("model_type") in FORMS


def _has_stages(folder: Path) -> bool:
    return any(name.startswith("mtp.") for name in weight_map(folder / INDEX))


def _release_card(folder: Path, form: Form, config: DrafterConfig | None) -> WeightsCard:
    placed = weight_map(folder / INDEX)
    expected = {} if config is None else expected_shapes(config)
    ours = {stored_name(name, form): shape for name, shape in expected.items()}
    names = {name for name in placed if name.startswith("mtp.") or name in ("embed.weight", "head.weight")}
    stored: dict[str, StoredTensor] = {}
    findings: list[Finding] = []
    for shard in sorted({placed[name] for name in names}):
        held = sorted(name for name in names if placed[name] == shard)
        if not inside(folder, shard).is_file():
            findings.append(Finding("shard", shard, "a shard with drafter tensors", f"no file; {len(held)} tensors"))
            continue
        header = read_header(inside(folder, shard))
        stored |= {name: header[name] for name in held if name in header}
        findings += [
            Finding("missing", name, f"in {shard}", "only in the index") for name in held if name not in header
        ]
    used = set(ours)
    for name, shape in ours.items():
        if name in stored:
            findings += [
                finding
                for finding in _release_findings(stored, name, shape, form, used)
                if finding.kind != "missing" or finding.name not in placed
            ]
        elif name not in placed:
            findings.append(Finding("missing", name, str(list(shape)), "nothing"))
        else:  # its shard is absent, which has been said, or lacks it, which has been said too
            used.add(scale_name(name))
    rest = sorted(stored.keys() - used) if config is not None else []
    findings += [extra_finding(stored[name]) for name in rest if is_unknown(name)]
    return WeightsCard(
        path=folder,
        form=form,
        config=config,
        tensors=tuple(stored[name] for name in sorted(stored)),
        findings=ordered(findings),
        unused=tuple(name for name in rest if not is_unknown(name)),
        others=len(placed) - len(names),
    )


def _release_findings(
    stored: Mapping[str, StoredTensor], name: str, shape: tuple[int, ...], form: Form, used: set[str]
) -> list[Finding]:
    """What is wrong with one expected tensor and its scale; `used` takes the scale's name."""
    tensor = stored[name]
    fp4 = tensor.dtype in ("I8", "U8")
    if len(shape) != 2 or (tensor.dtype != "F8_E4M3" and not fp4):
        return plain_findings(tensor, shape)
    scale, blocks = scale_name(name), scale_shape(shape, form, fp4=fp4)
    used.add(scale)
    findings = shape_findings(tensor, (shape[0], shape[1] // 2) if fp4 else shape)
    if scale not in stored:
        return [*findings, Finding("missing", scale, f"F8_E8M0 {list(blocks)}", "nothing")]
    if stored[scale].dtype not in ("F8_E8M0", "U8"):
        findings.append(Finding("type", scale, "F8_E8M0", stored[scale].dtype))
    return findings + shape_findings(stored[scale], blocks)
