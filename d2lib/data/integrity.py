"""G1(a): is the captured data what its manifest says, and is it possible at all? Also the coverage of K2 files.

Every check looks at every sequence and every row, streamed, so that a table shows all that is wrong and not the first
thing only. The one exception is stated in its row: the comparison of the top 20 with the hidden states costs a product
with the LM head, and can be limited to evenly spaced rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from d2lib.data.check import CheckRow, thousands
from d2lib.data.k2 import K2File
from d2lib.data.manifest import SPLITS, Manifest, SequenceEntry, Split, file_problem
from d2lib.data.sidecar import TOP, Sidecar, TensorName
from d2lib.errors import Refused
from d2lib.files import inside, walk

TOLERANCE = 0.1
"""Nats by which a stored log-probability may differ from the one that the stored bf16 hidden state gives."""
_VALUES = 1 << 24
"""Values held at a time: 64 MiB in fp32."""


@dataclass(frozen=True)
class _Context:
    """What the checks of a sequence need beside it."""

    vocab_size: int
    head: Tensor | None
    tolerance: float
    head_rows: int | None


def integrity_rows(
    manifest: Manifest,
    folder: Path,
    head: Tensor | None,
    *,
    tolerance: float = TOLERANCE,
    head_rows: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[CheckRow]:
    """Check every split.

    Args:
        manifest: the dataset's.
        folder: the folder that its paths are relative to.
        head: [vocab_size, dim] the target's LM head. Without it the top 20 cannot be checked, and that row fails.
        tolerance: nats, see TOLERANCE.
        head_rows: at most so many evenly spaced rows of each sequence for the comparison with the head; None: all.
        progress: called with the bytes of each chunk that was hashed.
    """
    context = _Context(manifest.vocab_size, None if head is None else head.detach().float(), tolerance, head_rows)
    rows = [_families(manifest), _unlisted(manifest, folder)]
    for split in SPLITS:
        entries = manifest.split(split)
        problems: dict[str, list[str]] = {name: [] for name in ("files", "headers", *_CHECKS)}
        for entry in entries:
            if problem := file_problem(entry.file, folder, progress):
                problems["files"].append(problem)
            try:
                sidecar = Sidecar.open(folder, entry, manifest)
            except Refused as error:
                problems["headers"].append(f"{entry.id}: {error}")
                for name in _CHECKS:
                    problems[name].append(f"{entry.id}: cannot be opened")
                continue
            for name, (_, check) in _CHECKS.items():
                if problem := check(sidecar, context):
                    problems[name].append(f"{entry.id}: {problem}")
        expected = {
            "files": "recorded size and digest",
            "headers": "five tensors with their types and shapes",
            **{name: text(context) for name, (text, _) in _CHECKS.items()},
        }
        rows += [_row(split, name, expected[name], entries, found) for name, found in problems.items()]
    return rows


def coverage_rows(manifest: Manifest, folder: Path, k2: Mapping[Split, Path]) -> list[CheckRow]:
    """One row per K2 file: it is valid, agrees with the committed tokens, and covers every request to its end."""
    return [_coverage(manifest, folder, split, path) for split, path in k2.items()]


def _coverage(manifest: Manifest, folder: Path, split: Split, path: Path) -> CheckRow:
    requests = len(manifest.split(split))
    try:
        population = K2File.load(path, manifest, folder).population(manifest, split)
        found = f"{thousands(len(population), 'request')}, {sum(map(len, population.values())):,} complete rounds"
        holds = len(population) == requests > 0 and all(population.values())
    except Refused as error:
        found, holds = str(error), False
    return CheckRow(
        name=f"K2 coverage, {split}",
        expected=f"{thousands(requests, 'request')}, each with complete rounds, its chain to the end of its span",
        found=found,
        where=path.name,
        holds=holds,
    )


def _row(split: Split, name: str, expected: str, entries: list[SequenceEntry], problems: list[str]) -> CheckRow:
    count = thousands(len(entries), "sequence")
    found = f"{count}" if not problems else f"{len(problems)} of {count} are wrong; the first: {problems[0]}"
    return CheckRow(
        name=f"{name}, {split}",
        expected=f"every sequence: {expected}",
        found=found,
        where=split,
        holds=bool(entries) and not problems,
    )


def _families(manifest: Manifest) -> CheckRow:
    crossing = sorted(family for family, splits in manifest.families().items() if len(splits) > 1)
    return CheckRow(
        name="families",
        expected="each in one split",
        found=f"{len(manifest.families()):,} families"
        + (f", {len(crossing)} cross: {crossing[0]}" if crossing else ", none crosses"),
        where="MANIFEST.json",
        holds=not crossing,
    )


def _unlisted(manifest: Manifest, folder: Path) -> CheckRow:
    """Folders that hold sidecars hold nothing else."""
    listed = {entry.file.path for entry in manifest.sequences}
    try:
        places = sorted({str(Path(name).parent) for name in listed} - {"."})
        found = {path.relative_to(folder).as_posix() for place in places for path in walk(inside(folder, place))}
        extra = sorted(found - listed)
        text, holds = (f"{len(extra)}; the first: {extra[0]}" if extra else "none"), not extra
    except Refused as error:
        text, holds = str(error), False
    return CheckRow(name="unlisted files", expected="none beside the sidecars", found=text, where="shards", holds=holds)


def _stretches(sidecar: Sidecar, name: TensorName) -> Iterator[Tensor]:
    tensor = sidecar.tensor(name)
    width = tensor.shape[1] if tensor.ndim == 2 else 1
    step = max(1, _VALUES // width)
    for start in range(0, len(tensor), step):
        yield tensor[start : start + step]


def _tokens(sidecar: Sidecar, context: _Context) -> str | None:
    tokens = sidecar.tensor("tokens")
    bad = (tokens < 0) | (tokens >= context.vocab_size)
    return f"row {int(bad.nonzero()[0])} is {int(tokens[bad][0])}" if bool(bad.any()) else None


def _finite(name: TensorName) -> Callable[[Sidecar, _Context], str | None]:
    def check(sidecar: Sidecar, _: _Context) -> str | None:
        first = 0
        for values in _stretches(sidecar, name):
            finite = values.isfinite().all(-1)
            empty = (values == 0).all(-1)
            for what, bad in (("is not finite", ~finite), ("is all zero", empty)):
                if bool(bad.any()):
                    return f"row {first + int(bad.nonzero()[0])} {what}"
            first += len(values)
        return None

    return check


def _top20_form(sidecar: Sidecar, context: _Context) -> str | None:
    ids, logprobs = sidecar.tensor("top20_ids"), sidecar.tensor("top20_logprobs")
    ordered = ids.sort(-1).values
    for what, bad in (
        ("has an id outside the vocabulary", ((ids < 0) | (ids >= context.vocab_size)).any(-1)),
        ("has an id twice", (ordered[:, 1:] == ordered[:, :-1]).any(-1)),
        ("is not finite", ~logprobs.isfinite().all(-1)),
        ("rises", (logprobs[:, 1:] > logprobs[:, :-1]).any(-1)),
        ("sums to more than one", logprobs.double().logsumexp(-1) > 1e-3),
    ):
        if bool(bad.any()):
            return f"row {int(bad.nonzero()[0])} {what}"
    return None


def _top20_agrees(sidecar: Sidecar, context: _Context) -> str | None:
    """|log p - stored| <= tolerance at every stored id, and each is among the 20 likeliest.

    If every recomputed value is within the tolerance of the true one, a true member of the top 20 is recomputed at
    most twice the tolerance below the recomputed 20th.
    """
    if context.head is None:
        return "no LM head to compare with"
    rows = sidecar.entry.rows
    chosen = torch.arange(rows)
    if context.head_rows is not None and context.head_rows < rows:
        chosen = torch.linspace(0, rows - 1, context.head_rows).round().long()
    step = max(1, _VALUES // context.vocab_size)
    for start in range(0, len(chosen), step):
        part = chosen[start : start + step]
        logp = (sidecar.gather("hidden", part).float() @ context.head.T).log_softmax(-1)
        ids = sidecar.gather("top20_ids", part).long()
        found = logp.gather(-1, ids.clamp(0, context.vocab_size - 1))
        off = (found - sidecar.gather("top20_logprobs", part)).abs().amax(-1)
        below = logp.topk(TOP).values[:, -1] - found.amin(-1)
        for what, value, limit in (
            ("differs from the hidden state", off, context.tolerance),
            ("holds a token that is not among the likeliest", below, 2 * context.tolerance),
        ):
            bad = ~(value <= limit)
            if bool(bad.any()):
                worst = int(torch.where(bad, value.nan_to_num(nan=torch.inf), -1.0).argmax())
                return f"row {int(part[worst])} {what} by {float(value[worst]):.4g} nats"
    return None


def _agreement_text(context: _Context) -> str:
    rows = "every row" if context.head_rows is None else f"{context.head_rows} evenly spaced rows"
    return f"top 20 of softmax(head · hidden) within {context.tolerance} nats, {rows}"


_CHECKS: dict[str, tuple[Callable[[_Context], str], Callable[[Sidecar, _Context], str | None]]] = {
    "tokens": (lambda context: f"0 … {context.vocab_size - 1}", _tokens),
    "taps": (lambda _: "finite, no row all zero", _finite("taps")),
    "hidden": (lambda _: "finite, no row all zero", _finite("hidden")),
    "top 20": (lambda _: "distinct ids in the vocabulary, falling log-probabilities of at most one", _top20_form),
    "top 20 and hidden": (_agreement_text, _top20_agrees),
}
"""Name → what is expected, and what is wrong with a sequence, in words, or None. A new check is one line here."""
