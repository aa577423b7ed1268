"""SPLIT.k2_drafts.jsonl: the live run's committed-K2 trajectory, one header line and one line per round.

The live drafter proposed two tokens a round, so its rounds sit at anchors that follow each other by 1, 2 or 3. Their
complete ones, those with all K targets, are the population that scoring covers: nothing samples or limits it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from d2lib.data.manifest import Manifest, SequenceEntry, Split
from d2lib.data.sidecar import Sidecar
from d2lib.errors import Refused
from d2lib.files import Hashed, Record, canonical_json, parse_json, sha256_bytes, write_exclusive
from d2lib.strict import malformed

DRAFTS = 2


class K2Header(Record):
    """The first line: what the rounds are rounds of."""

    schema_version: Literal[1] = 1
    kind: Literal["committed-k2"] = "committed-k2"
    namespace: str = Field(min_length=1)
    """The manifest's."""
    split: Split
    block_size: int = Field(gt=0)
    """K of the drafter: a round is complete when the K tokens after its anchor exist."""
    live: dict[str, str]
    """What drafted, e.g. the digests of the native drafter and the target."""


class K2Round(Record):
    """One round of the live run.

    request: the sequence's id. anchor: a, the row of the last committed token. drafts: the two tokens proposed for
    rows a+1 and a+2. accepted: how many leading ones were committed (bonus excluded). next_anchor: a + accepted + 1.
    """

    request: str
    anchor: int = Field(ge=0)
    drafts: tuple[int, int] = Field(strict=False)
    accepted: int = Field(ge=0, le=DRAFTS)
    next_anchor: int


def complete(anchor: int, rows: int, block_size: int) -> bool:
    """Whether all K targets a+1 … a+K exist in a sequence of L rows, i.e. a+K <= L-1."""
    return anchor + block_size <= rows - 1


@dataclass(frozen=True)
class K2File:
    """A trajectory that was read and found consistent with its manifest.

    rounds: request → its rounds in order. sha256: of the bytes that were read.
    """

    path: Path
    header: K2Header
    rounds: Mapping[str, list[K2Round]]
    sha256: Hashed

    @classmethod
    def load(cls, path: Path, manifest: Manifest, folder: Path | None = None) -> K2File:
        """Read and check a trajectory.

        Args:
            path: the file.
            manifest: the dataset's.
            folder: the manifest's folder; when given, `accepted` is checked against the committed tokens.

        Raises:
            Refused: names file, line and field of the first thing that is wrong: a line that is no strict JSON, an
                unknown or missing field, a request of another split or without a manifest entry, an anchor that does
                not follow, a draft outside the vocabulary, an acceptance that the committed tokens contradict.
        """
        try:
            data = path.read_bytes()
        except OSError as error:
            raise Refused("a K2 file cannot be read", expected="JSON lines", found=error.strerror, where=path) from None
        lines = _lines(data, path)
        header = _record(K2Header, next(lines, (1, {})), path)
        if header.namespace != manifest.namespace:
            raise Refused(
                "a K2 file is of another namespace",
                expected=manifest.namespace,
                found=header.namespace,
                where=f"{path}, line 1: namespace",
            )
        entries = {entry.id: entry for entry in manifest.split(header.split)}
        tokens: dict[str, list[int]] = {}
        rounds: dict[str, list[K2Round]] = {}
        for line in lines:
            where = f"{path}, line {line[0]}"
            found = _record(K2Round, line, path)
            entry = entries.get(found.request)
            if entry is None:
                raise Refused(
                    "a round's request is not in the split",
                    expected=f"a sequence of {header.split}",
                    found=found.request,
                    where=f"{where}: request",
                )
            before = rounds.setdefault(found.request, [])
            _check_round(found, before[-1] if before else None, entry, manifest.vocab_size, where)
            if folder is not None:
                if found.request not in tokens:
                    tokens[found.request] = Sidecar.open(folder, entry, manifest).tensor("tokens").tolist()
                _check_accepted(found, tokens[found.request], where)
            before.append(found)
        return cls(path, header, rounds, sha256_bytes(data))

    def coverage_problems(self, manifest: Manifest) -> list[str]:
        """What is missing, in words: requests of the split without rounds, and chains that end before the span does."""
        problems = []
        for entry in manifest.split(self.header.split):
            rounds = self.rounds.get(entry.id)
            if not rounds:
                problems.append(f"{entry.id}: no round")
            elif rounds[-1].next_anchor < entry.rows - 1:
                problems.append(f"{entry.id}: ends at row {rounds[-1].next_anchor} of {entry.rows}")
        return problems

    def population(self, manifest: Manifest, split: Split) -> dict[str, list[int]]:
        """Request → anchors of its complete rounds, in order, for every request of the split.

        Raises:
            Refused: the file is of another split, or does not cover every request to its end.
        """
        if self.header.split != split:
            raise Refused(
                "a K2 file is of another split", expected=split, found=self.header.split, where=f"{self.path}, line 1"
            )
        problems = self.coverage_problems(manifest)
        if problems:
            raise Refused(
                "a K2 file does not cover its split",
                expected=f"every request of {split}, to its end",
                found=f"{len(problems)} that are not; the first: {problems[0]}",
                where=self.path,
            )
        return {
            entry.id: [
                found.anchor
                for found in self.rounds[entry.id]
                if complete(found.anchor, entry.rows, self.header.block_size)
            ]
            for entry in manifest.split(split)
        }


def write_k2(path: Path, header: K2Header, rounds: Iterable[K2Round]) -> Hashed:
    """Create a trajectory file, complete or not at all; never overwrites. Returns its digest."""
    lines = [header.model_dump(mode="json"), *(found.model_dump(mode="json") for found in rounds)]
    data = b"".join(canonical_json(line) + b"\n" for line in lines)
    write_exclusive(path, data)
    return sha256_bytes(data)


def leading_matches(drafts: tuple[int, ...], tokens: list[int], anchor: int) -> int:
    """How many leading drafts equal the committed tokens after the anchor; a draft past the end matches nothing."""
    count = 0
    for row, draft in enumerate(drafts, anchor + 1):
        if row >= len(tokens) or tokens[row] != draft:
            break
        count += 1
    return count


def _check_round(found: K2Round, before: K2Round | None, entry: SequenceEntry, vocabulary: int, where: str) -> None:
    expected = entry.gen_start if before is None else before.next_anchor
    if found.anchor != expected:
        raise Refused(
            "an anchor does not follow",
            expected=f"{expected} ({'gen_start' if before is None else 'the next anchor of the round before'})",
            found=found.anchor,
            where=f"{where}: anchor",
        )
    if found.anchor > entry.rows - 2:
        raise Refused(
            "an anchor has no token after it",
            expected=f"at most {entry.rows - 2}",
            found=found.anchor,
            where=f"{where}: anchor",
        )
    if found.next_anchor != found.anchor + found.accepted + 1:
        raise Refused(
            "a next anchor contradicts its round",
            expected=f"anchor + accepted + 1 = {found.anchor + found.accepted + 1}",
            found=found.next_anchor,
            where=f"{where}: next_anchor",
        )
    if found.anchor + found.accepted > entry.rows - 1:
        raise Refused(
            "a round accepted tokens past the sequence's end",
            expected=f"at most {entry.rows - 1 - found.anchor}",
            found=found.accepted,
            where=f"{where}: accepted",
        )
    if not all(0 <= draft < vocabulary for draft in found.drafts):
        raise Refused(
            "a draft is not in the vocabulary",
            expected=f"0 … {vocabulary - 1}",
            found=found.drafts,
            where=f"{where}: drafts",
        )


def _check_accepted(found: K2Round, tokens: list[int], where: str) -> None:
    matches = leading_matches(found.drafts, tokens, found.anchor)
    if matches != found.accepted:
        raise Refused(
            "a round's acceptance contradicts the committed tokens",
            expected=f"{matches} leading drafts of {list(found.drafts)} are committed",
            found=found.accepted,
            where=f"{where}: accepted",
        )


def _lines(data: bytes, path: Path) -> Iterator[tuple[int, Any]]:
    if not data.endswith(b"\n"):
        raise Refused("a K2 file is cut off", expected="a line feed at the end", where=path)
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        yield number, parse_json(line, where=f"{path}, line {number}")


def _record(kind: type[Any], line: tuple[int, Any], path: Path) -> Any:
    try:
        return kind.model_validate(line[1])
    except ValidationError as error:
        raise malformed("a K2 line is malformed", error, f"{path}, line {line[0]}") from None
