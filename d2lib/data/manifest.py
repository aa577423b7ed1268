"""MANIFEST.json: every captured sequence with its split, family, length and file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, model_validator

from d2lib.errors import Refused
from d2lib.files import FileRecord, Hashed, Record, inside, read_json, record_file, write_json
from d2lib.strict import DIGEST_PATTERN

Split = Literal["train", "dev", "heldout_legal", "heldout_general"]
SPLITS: tuple[Split, ...] = get_args(Split)

Digest = Annotated[str, Field(pattern=DIGEST_PATTERN)]
"""`sha256:` and 64 lower-case hex digits."""


class FileEntry(Record):
    """A file by its path relative to the manifest's folder, its size in bytes and its digest."""

    path: str = Field(min_length=1)
    size: int = Field(gt=0)
    sha256: Digest

    @classmethod
    def of(cls, folder: Path, path: str) -> Self:
        """Record a file that exists under `folder`."""
        record = record_file(inside(folder, path))
        return cls(path=path, size=record.size, sha256=str(record.sha256))

    @property
    def record(self) -> FileRecord:
        """Size and digest alone."""
        return FileRecord(self.size, Hashed.parse(self.sha256))

    @model_validator(mode="after")
    def _relative(self) -> Self:
        path = PurePosixPath(self.path)
        if path.is_absolute() or ".." in path.parts or str(path) != self.path:
            raise ValueError(f"a path must be plain and relative to the manifest's folder; found {self.path!r}")
        return self


class SequenceEntry(Record):
    """One captured sequence of `rows` rows L; rows gen_start … L-1 are the generated span."""

    id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$")
    """Also the name of the request, and of files that are made for it."""
    split: Split
    family: str = Field(min_length=1)
    """Sequences that share a source; a family never crosses splits."""
    rows: int
    gen_start: int = Field(gt=0)
    file: FileEntry

    @property
    def span_positions(self) -> int:
        """L - gen_start, the rows of the generated span."""
        return self.rows - self.gen_start

    @property
    def blocks(self) -> int:
        """L - gen_start - 1, one block per anchor gen_start … L-2."""
        return self.rows - self.gen_start - 1

    @model_validator(mode="after")
    def _has_a_block(self) -> Self:
        if self.blocks < 1:
            raise ValueError(f"rows must be at least gen_start + 2 = {self.gen_start + 2}; found {self.rows}")
        return self


@dataclass(frozen=True)
class SplitCounts:
    """What a split holds. Blocks overlap: they are anchors, not disjoint stretches."""

    sequences: int
    rows: int
    span_positions: int
    blocks: int


@dataclass(frozen=True)
class Counts:
    """What a manifest holds, by split and together."""

    splits: dict[Split, SplitCounts]

    @property
    def sequences(self) -> int:
        """Captured sequences of all splits."""
        return sum(split.sequences for split in self.splits.values())

    @property
    def rows(self) -> int:
        """Captured rows of all splits, context included."""
        return sum(split.rows for split in self.splits.values())

    @property
    def span_positions(self) -> int:
        """Generated rows of all splits."""
        return sum(split.span_positions for split in self.splits.values())

    @property
    def training_positions(self) -> int:
        """Generated rows of train."""
        return self.splits["train"].span_positions

    @property
    def blocks(self) -> int:
        """Unique training blocks, len(D2Blocks(train))."""
        return self.splits["train"].blocks

    def updates(self, epochs: int, batch: int) -> int:
        """Optimizer updates of a full training; the last batch of an epoch may be short."""
        if epochs < 1 or batch < 1:
            raise Refused("not a training", expected="epochs >= 1, batch >= 1", found=f"{epochs} and {batch}")
        return epochs * -(-self.blocks // batch)

    def presented(self, epochs: int) -> int:
        """Blocks that a full training sees, repeats included."""
        return epochs * self.blocks

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for receipts."""
        return {
            "splits": {name: vars(split) | {} for name, split in self.splits.items()},
            "sequences": self.sequences,
            "rows": self.rows,
            "span_positions": self.span_positions,
            "training_positions": self.training_positions,
            "blocks": self.blocks,
        }


class Manifest(Record):
    """The dataset's table of contents; everything downstream is counted from it and never from a parameter."""

    schema_version: Literal[1] = 1
    namespace: str = Field(min_length=1)
    dim: int = Field(gt=0)
    vocab_size: int = Field(gt=1)
    n_taps: int = Field(gt=0)
    target: dict[str, str]
    """What the captured model was, e.g. its name and the digest of its weights."""
    sequences: tuple[SequenceEntry, ...] = Field(min_length=1, strict=False)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read and check a manifest.

        Raises:
            Refused: names the first field that is wrong, the sequence that stands twice, or the family that crosses.
        """
        return cls.parse(read_json(path), path, message="the manifest is wrong")

    def write(self, path: Path) -> Hashed:
        """Create MANIFEST.json, in order of splits and ids; never overwrites. Returns the file's digest."""
        return write_json(path, self.model_dump(mode="json"))

    def split(self, name: Split) -> list[SequenceEntry]:
        """A split's sequences, by id."""
        return sorted((entry for entry in self.sequences if entry.split == name), key=lambda entry: entry.id)

    def entry(self, sequence_id: str) -> SequenceEntry:
        """One sequence; raises Refused for an id that is not here."""
        for entry in self.sequences:
            if entry.id == sequence_id:
                return entry
        raise Refused("a sequence is not in the manifest", found=sequence_id, where=self.namespace)

    @property
    def gen_start(self) -> int | None:
        """Rows of every sequence's context; None where they differ."""
        found = {entry.gen_start for entry in self.sequences}
        return found.pop() if len(found) == 1 else None

    def counts(self) -> Counts:
        """Rows, positions and blocks, by split and together."""
        return Counts({name: _count(self.split(name)) for name in SPLITS})

    def verify_files(self, folder: Path, progress: Callable[[int], None] | None = None) -> None:
        """Re-hash every file; raises Refused that names the first which is missing or differs, and counts the rest."""
        problems = [problem for entry in self.sequences if (problem := file_problem(entry.file, folder, progress))]
        if problems:
            raise Refused(
                "the captured files are not those of the manifest",
                expected=f"{len(self.sequences)} files with their recorded bytes",
                found=f"{len(problems)} that differ; the first: {problems[0]}",
                where=folder,
            )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for what, names in (
            ("id", [entry.id for entry in self.sequences]),
            ("file", [entry.file.path for entry in self.sequences]),
        ):
            name, times = Counter(names).most_common(1)[0]
            if times > 1:
                raise ValueError(f"the {what} {name!r} stands {times} times")
        for family, splits in sorted(self.families().items()):
            if len(splits) > 1:
                raise ValueError(f"the family {family!r} crosses the splits {', '.join(sorted(splits))}")
        return self

    def families(self) -> dict[str, set[Split]]:
        """Family → the splits that it appears in (exactly one, or the manifest is refused)."""
        found: dict[str, set[Split]] = {}
        for entry in self.sequences:
            found.setdefault(entry.family, set()).add(entry.split)
        return found


def file_problem(entry: FileEntry, folder: Path, progress: Callable[[int], None] | None = None) -> str | None:
    """What is wrong with a recorded file, in words, or None when its bytes are the recorded ones."""
    try:
        found = record_file(inside(folder, entry.path), progress=progress)
    except Refused as error:
        return f"{entry.path}: {error.message}"
    if found == entry.record:
        return None
    if found.size != entry.size:
        return f"{entry.path}: {found.size} bytes, recorded {entry.size}"
    return f"{entry.path}: {found.sha256}, recorded {entry.sha256}"


def _count(entries: list[SequenceEntry]) -> SplitCounts:
    def total(values: Iterator[int]) -> int:
        return sum(values)

    return SplitCounts(
        sequences=len(entries),
        rows=total(entry.rows for entry in entries),
        span_positions=total(entry.span_positions for entry in entries),
        blocks=total(entry.blocks for entry in entries),
    )
