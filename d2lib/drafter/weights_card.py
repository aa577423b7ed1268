"""The data card of a drafter's weights: what is stored, where and how, against what its configuration expects.

Only headers are read. A card of a 170 GB release takes seconds, and says before any tensor is loaded what would be
refused. Values, NaN codes among them, are not looked at. Each family knows its own layouts and makes their cards.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from d2lib.drafter.config import DrafterConfig, parse_config
from d2lib.drafter.family import FAMILIES, family_named
from d2lib.drafter.headers import StoredTensor, read_header
from d2lib.drafter.weights import expected_shapes
from d2lib.errors import Refused
from d2lib.files import read_json

CONFIG = "config.json"
NATIVE_CONFIG = "drafter.json"

_PLAIN = ("BF16", "F16", "F32")


@dataclass(frozen=True)
class Question:
    """What a card is asked for.

    path: a folder, or one file. form: the storage of a released model, where nothing says it. config: the configuration
    file, by default the one beside the weights. target: the folder of the target, to compare with.
    """

    path: Path
    form: str | None = None
    config: Path | None = None
    target: Path | None = None


@dataclass(frozen=True)
class Finding:
    """One way in which what is stored is not the configuration's, or not to be taken."""

    kind: str
    """missing, extra, shape, type, shard or refused."""
    name: str
    expected: str
    found: str
    why: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class WeightsCard:
    """What lies at a path.

    form: how it is stored, None for a file of ours. config: None where no configuration is at hand, or where it is
    refused; nothing is then missing or extra. tensors: the drafter's, with its embedding and head. others: a release's
    other tensors (in the index alone). unused: tensors that are known and not read. facts: what the family says of the
    drafter, label and text.
    """

    path: Path
    form: str | None
    config: DrafterConfig | None
    tensors: tuple[StoredTensor, ...]
    findings: tuple[Finding, ...]
    unused: tuple[str, ...] = ()
    others: int = 0
    facts: tuple[tuple[str, str], ...] = ()

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
            "facts": dict(self.facts),
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


def inspect_weights(
    path: Path, *, form: str | None = None, config: Path | None = None, target: Path | None = None
) -> WeightsCard:
    """The card of a drafter's folder of any family, or of one safetensors file of ours.

    Args:
        path: a folder with config.json and weights, or a file.
        form: a released model's storage; by default the one that config.json names.
        config: config.json or drafter.json; by default the one beside the weights, if any.
        target: the target's folder, to compare with what the family shares with it.

    Raises:
        Refused: no family knows what lies there, a header is damaged, or the configuration is wrong.
    """
    question = Question(path, form, config, target)
    for name in FAMILIES:
        card = family_named(name).inspect(question)
        if card is not None:
            return card
    if path.is_dir():
        raise Refused(
            "no family of drafters knows what lies here",
            expected=f"a {CONFIG} of a drafter: {', '.join(FAMILIES)}",
            where=path,
            remedy="name a drafter's folder, or a .safetensors file of ours",
        )
    beside = path.parent / NATIVE_CONFIG
    config = config or (beside if beside.is_file() else None)
    return file_card(path, None if config is None else parse_config(read_json(config), where=config))


def file_card(path: Path, config: DrafterConfig | None) -> WeightsCard:
    """The card of one file of ours, under our names."""
    header = read_header(path)
    findings: list[Finding] = []
    if config is not None:
        expected = expected_shapes(config)
        findings += [
            Finding("missing", name, str(list(expected[name])), "nothing") for name in expected.keys() - header
        ]
        findings += [extra_finding(header[name]) for name in header.keys() - expected.keys()]
        findings += [one for name in expected.keys() & header for one in plain_findings(header[name], expected[name])]
    tensors = tuple(header[name] for name in sorted(header))
    return WeightsCard(path, None, config, tensors, ordered(findings))


def ordered(findings: list[Finding]) -> tuple[Finding, ...]:
    """By kind, then by name."""
    return tuple(sorted(findings, key=lambda finding: (finding.kind, finding.name)))


def plain_findings(tensor: StoredTensor, shape: tuple[int, ...]) -> list[Finding]:
    """What is wrong with a tensor that is stored as it is used."""
    if tensor.dtype not in _PLAIN:
        return [Finding("type", tensor.name, " or ".join(_PLAIN), tensor.dtype)]
    return shape_findings(tensor, shape)


def shape_findings(tensor: StoredTensor, shape: tuple[int, ...]) -> list[Finding]:
    """A finding unless the tensor has this shape."""
    if tensor.shape == shape:
        return []
    return [Finding("shape", tensor.name, str(list(shape)), str(list(tensor.shape)))]


def extra_finding(tensor: StoredTensor) -> Finding:
    """A tensor that nothing expects."""
    return Finding("extra", tensor.name, "no such tensor", f"{tensor.dtype} {list(tensor.shape)}")


def render_card(card: WeightsCard) -> str:
    """The card as text: the conclusion first, then sizes, findings and every tensor."""
    family = card.form or "one file of ours"
    if card.config is None and card.holds:
        conclusion = "no configuration at hand, so nothing is missing or extra (name one with --config)"
    elif card.holds:
        conclusion = "every tensor of the configuration is there, and nothing else"
    else:
        conclusion = f"{len(card.findings)} findings: this would be refused"
    lines = [f"{card.path}: {family}; {conclusion}"]
    lines.append(f"{len(card.tensors):,} tensors, {card.size:,} bytes; {card.others:,} other tensors not looked at")
    for finding in card.findings:
        lines.append(f"  {finding.kind:<8} {finding.name}: expected {finding.expected}, found {finding.found}")
        if finding.why:
            lines.append(f"           {finding.why}; do: {finding.remedy}")
    if card.facts:
        lines += ["", *(f"{label:<14} {text}" for label, text in card.facts)]
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
