"""The data card of a drafter's weights: what is stored, where and how, against what its configuration expects.

Only headers are read: a safetensors file begins with eight bytes of length and a JSON of names, types, shapes and
offsets (its format's description, https://github.com/huggingface/safetensors#format). A card of a 170 GB release takes
seconds, and says before any tensor is loaded what would be refused. Values, NaN codes among them, are not looked at.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from d2lib.drafter.config import DrafterConfig
from d2lib.drafter.deepseek.release import (
    FORMS,
    INDEX,
    Form,
    is_unknown,
    scale_name,
    scale_shape,
    stored_name,
    weight_map,
)
from d2lib.drafter.deepseek.release_config import CONFIG, read_config
from d2lib.drafter.weights import expected_shapes
from d2lib.errors import Refused
from d2lib.files import inside, parse_json

NATIVE_CONFIG = "drafter.json"

_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}
_PLAIN = ("BF16", "F16", "F32")
_LARGEST_HEADER = 100_000_000  # the format's own bound


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as a file's header states it."""

    name: str
    dtype: str
    """The format's name: F8_E4M3, BF16, I8 (two FP4 values a byte), …"""
    shape: tuple[int, ...]
    size: int
    """Bytes."""
    shard: str


@dataclass(frozen=True)
class Finding:
    """One way in which the stored tensors are not the configuration's."""

    kind: str
    """missing, extra, shape, type or shard."""
    name: str
    expected: str
    found: str


@dataclass(frozen=True)
class WeightsCard:
    """What lies at a path.

    form: the release's model family, None for a file of ours. config: None where no configuration is at hand; nothing
    is then missing or extra. tensors: the drafter's, with its embedding and head. others: the release's other tensors
    (in the index alone). unused: drafter tensors that are known and not read.
    """

    path: Path
    form: Form | None
    config: DrafterConfig | None
    tensors: tuple[StoredTensor, ...]
    findings: tuple[Finding, ...]
    unused: tuple[str, ...]
    others: int

    @property
    def holds(self) -> bool:
        """Whether the stored tensors are exactly the configuration's."""
        return not self.findings

    @property
    def size(self) -> int:
        """Bytes of all listed tensors."""
        return sum(tensor.size for tensor in self.tensors)

    def by(self, field: str) -> dict[str, tuple[int, int]]:
        """(tensors, bytes) by `dtype` or `shard`."""
        groups: dict[str, tuple[int, int]] = {}
        for tensor in sorted(self.tensors, key=lambda tensor: str(getattr(tensor, field))):
            count, size = groups.get(getattr(tensor, field), (0, 0))
            groups[getattr(tensor, field)] = (count + 1, size + tensor.size)
        return groups

    def as_dict(self) -> dict[str, Any]:
        """The card as plain data."""
        return {
            "path": str(self.path),
            "form": self.form,
            "holds": self.holds,
            "config": None if self.config is None else self.config.model_dump(mode="json"),
            "bytes": self.size,
            "dtypes": {name: {"tensors": n, "bytes": size} for name, (n, size) in self.by("dtype").items()},
            "shards": {name: {"tensors": n, "bytes": size} for name, (n, size) in self.by("shard").items()},
            "findings": [asdict(finding) for finding in self.findings],
            "unused": list(self.unused),
            "other_tensors": self.others,
            "tensors": [asdict(tensor) for tensor in self.tensors],
        }


def inspect_weights(path: Path, *, form: Form | None = None, config: Path | None = None) -> WeightsCard:
    """The card of a released checkpoint's folder, or of one safetensors file of ours.

    Args:
        path: a folder with model.safetensors.index.json, or a file.
        form: the release's model family; by default the one that config.json names.
        config: config.json or drafter.json; by default the one beside the weights, if any.

    Raises:
        Refused: the path is neither, a header is damaged, or the configuration is wrong.
    """
    folder = path if path.is_dir() else path.parent
    if config is None:
        beside = [folder / name for name in ((CONFIG,) if path.is_dir() else (NATIVE_CONFIG, CONFIG))]
        config = next((candidate for candidate in beside if candidate.is_file()), None)
    found, sizes = (form, None) if config is None else read_config(config, form)
    if not path.is_dir():
        header = read_header(path)
        expected = {} if sizes is None else expected_shapes(sizes)
        findings = [] if sizes is None else _native_findings(header, expected)
        return WeightsCard(path, None, sizes, tuple(header[name] for name in sorted(header)), tuple(findings), (), 0)
    if found is None:
        raise Refused(
            "the release does not say its model family",
            expected=f"{CONFIG} with a model_type",
            where=path,
            remedy=f"name it: --form {' or --form '.join(FORMS)}",
        )
    return _release_card(path, found, sizes)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors that a safetensors file's header states; reads nothing behind the header.

    Raises:
        Refused: missing, no safetensors file, or shorter or longer than its header says.
    """
    try:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            start = stream.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            text = stream.read(length) if 2 <= length <= min(_LARGEST_HEADER, size - 8) else b""
    except OSError as error:
        raise Refused(
            "a file cannot be read", expected="a safetensors file", found=error.strerror, where=path
        ) from None
    if not text:
        raise Refused("not a safetensors file", expected="a header", found=f"{size} bytes", where=path)
    value = parse_json(text, where=path)
    if not isinstance(value, dict):
        raise Refused("not a safetensors file", expected="a header of names", where=path)
    tensors = {name: _entry(name, entry, path) for name, entry in value.items() if name != "__metadata__"}
    end = 0
    for name, (tensor, offset) in sorted(tensors.items(), key=lambda item: (item[1][1], item[1][0].size)):
        if offset != end:
            raise Refused("a tensor does not begin where the one before ends", expected=end, found=offset, where=name)
        end += tensor.size
    if size != 8 + length + end:
        raise Refused(
            "a safetensors file has not the length that its header says",
            expected=f"{8 + length + end} bytes",
            found=f"{size} bytes",
            where=path,
        )
    return {name: tensor for name, (tensor, _) in tensors.items()}


def _entry(name: str, entry: Any, path: Path) -> tuple[StoredTensor, int]:
    """A header's entry and where its data begin."""
    where = f"{path}: {name}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise Refused("a header's entry is malformed", expected="dtype, shape, data_offsets", where=where)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    numbers = [*shape, *offsets] if isinstance(shape, list) and isinstance(offsets, list) else [None]
    if len(numbers) != len(shape) + 2 or not all(type(number) is int and number >= 0 for number in numbers):
        raise Refused("a header's entry is malformed", expected="whole numbers", found=entry, where=where)
    size = offsets[1] - offsets[0]
    if dtype not in _BYTES or size != math.prod(shape) * _BYTES[dtype]:
        raise Refused(
            "a tensor's length is not its type's and shape's",
            expected=f"{math.prod(shape) * _BYTES[dtype]} bytes" if dtype in _BYTES else ", ".join(_BYTES),
            found=f"{size} bytes of {dtype} {shape}",
            where=where,
        )
    return StoredTensor(name, str(dtype), tuple(shape), size, path.name), offsets[0]


def _native_findings(header: Mapping[str, StoredTensor], expected: Mapping[str, tuple[int, ...]]) -> list[Finding]:
    findings = [Finding("missing", name, str(list(expected[name])), "nothing") for name in expected.keys() - header]
    findings += [_extra(header[name]) for name in header.keys() - expected.keys()]
    for name in expected.keys() & header.keys():
        findings += _plain(header[name], expected[name])
    return sorted(findings, key=lambda finding: (finding.kind, finding.name))


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
    findings += [_extra(stored[name]) for name in rest if is_unknown(name)]
    return WeightsCard(
        path=folder,
        form=form,
        config=config,
        tensors=tuple(stored[name] for name in sorted(stored)),
        findings=tuple(sorted(findings, key=lambda finding: (finding.kind, finding.name))),
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
        return _plain(tensor, shape)
    scale, blocks = scale_name(name), scale_shape(shape, form, fp4=fp4)
    used.add(scale)
    findings = _shape(tensor, (shape[0], shape[1] // 2) if fp4 else shape)
    if scale not in stored:
        return [*findings, Finding("missing", scale, f"F8_E8M0 {list(blocks)}", "nothing")]
    if stored[scale].dtype not in ("F8_E8M0", "U8"):
        findings.append(Finding("type", scale, "F8_E8M0", stored[scale].dtype))
    return findings + _shape(stored[scale], blocks)


def _plain(tensor: StoredTensor, shape: tuple[int, ...]) -> list[Finding]:
    if tensor.dtype not in _PLAIN:
        return [Finding("type", tensor.name, " or ".join(_PLAIN), tensor.dtype)]
    return _shape(tensor, shape)


def _shape(tensor: StoredTensor, shape: tuple[int, ...]) -> list[Finding]:
    if tensor.shape == shape:
        return []
    return [Finding("shape", tensor.name, str(list(shape)), str(list(tensor.shape)))]


def _extra(tensor: StoredTensor) -> Finding:
    return Finding("extra", tensor.name, "no such tensor", f"{tensor.dtype} {list(tensor.shape)}")


def render_card(card: WeightsCard) -> str:
    """The card as text: the conclusion first, then sizes, findings and every tensor."""
    family = card.form or "one file of ours"
    if card.config is None:
        conclusion = "no configuration at hand, so nothing is missing or extra (name one with --config)"
    elif card.holds:
        conclusion = "every tensor of the configuration is there, and nothing else"
    else:
        conclusion = f"{len(card.findings)} findings: this would be refused"
    lines = [f"{card.path}: {family}; {conclusion}"]
    lines.append(f"{len(card.tensors):,} tensors, {card.size:,} bytes; {card.others:,} other tensors not looked at")
    for finding in card.findings:
        lines.append(f"  {finding.kind:<8} {finding.name}: expected {finding.expected}, found {finding.found}")
    for title, field in (("type", "dtype"), ("shard", "shard")):
        lines += ["", f"{title:<40} {'tensors':>8} {'bytes':>18}"]
        lines += [f"{name:<40} {count:>8,} {size:>18,}" for name, (count, size) in card.by(field).items()]
    if card.unused:
        lines += ["", f"known and not used: {', '.join(card.unused)}"]
    lines += ["", f"{'tensor':<48} {'type':<8} {'shape':<18} {'bytes':>16} shard"]
    for tensor in card.tensors:
        shape = "×".join(map(str, tensor.shape)) or "scalar"
        lines.append(f"{tensor.name:<48} {tensor.dtype:<8} {shape:<18} {tensor.size:>16,} {tensor.shard}")
    return "\n".join(lines)
