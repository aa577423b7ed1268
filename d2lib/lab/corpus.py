"""Text that every installation of this project carries: library sources, and the licences of what it depends on.

General text is the standard library's sources with their docstrings; a family is a top-level package or module. Legal
text is the licence files of the installed distributions that the project needs; near-identical licences, however often
and in whatever bundle they stand, are one family, so that held-out families are texts that training never showed.
"""

from __future__ import annotations

import hashlib
import re
import sysconfig
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from d2lib.errors import Refused
from d2lib.files import Record

Kind = Literal["general", "legal"]

SIMILAR = 0.25
"""Two passages belong to one family when so large a share of the smaller one's shingles stands in the other."""
_SHINGLE = 6
_SHORTEST_PASSAGE = 60
"""Words; shorter pieces of a licence file (headings, lists of names) are left out."""
_NOVEL = 0.5
"""A passage whose shingles are mostly in its family already is not kept again."""

_LICENCE_FILE = re.compile(r"(?i)^(licen[cs]e|copying|notice|copyright|third.?party)[^/]*$")
_OTHER_SUFFIX = (".py", ".pyc", ".json", ".js", ".css", ".html")
_ACCELERATOR = ("nvidia", "cuda", "triton")
"""Left out of the licences: which of them are installed depends on the build of torch, and the case must not."""
_NOT_TEXT = {"test", "idlelib", "lib2to3", "encodings", "pydoc_data", "site-packages", "dist-packages", "turtledemo"}
"""Top-level names of the standard library that are tests, tables or not its own."""

_RULE = r"^[ \t#/*]*([-=_*~+#])\1{9,}.*$"
_TITLE = r"(?-i:[A-Z])[^\n.:;]{0,40}\blicen[cs]e\b[^\n:;]{0,24}\n[ \t]*(?:\n|version)"
_OPENING = (
    r"(?<=\n\n)(?=[ \t#/*]*(?:copyright[ :(]|permission is hereby granted|permission to use|redistribution and use"
    rf"|this software is provided|licen[cs]e:|name:|files?:|creative commons|{_TITLE}))"
)
_BOUNDARY = re.compile(rf"{_RULE}|\f|{_OPENING}", re.MULTILINE | re.IGNORECASE)
"""Where one licence of a bundle may end and the next begin: a rule of dashes, a form feed, an opening paragraph."""


class SourceFile(Record):
    """A file that was read: what it is, its name under its distribution, library or folder, its bytes."""

    kind: Kind | Literal["prompts", "target", "drafter", "traffic"]
    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Corpus:
    """Family → its passages (bytes, UTF-8), for each kind of text, and the files that they come from."""

    general: Mapping[str, Sequence[bytes]]
    legal: Mapping[str, Sequence[bytes]]
    sources: Sequence[SourceFile]

    def size(self, kind: Kind) -> int:
        """Bytes of one kind of text."""
        return sum(map(family_size, getattr(self, kind).values()))


def family_size(passages: Iterable[bytes]) -> int:
    """Bytes of a family."""
    return sum(map(len, passages))


def read_corpus(distributions: Sequence[str], *, least_general: int, least_legal: int) -> Corpus:
    """Collect the text; a function of the installation alone.

    Args:
        distributions: whose licences: these installed distributions and all that they require, without extras.
        least_general, least_legal: bytes; with less there is no case to make.

    Raises:
        Refused: a distribution is not installed, or there is too little text; says how much there is and what to do.
    """
    general, general_sources = _general_families()
    legal, legal_sources = _legal_families(distributions)
    corpus = Corpus(general, legal, [*general_sources, *legal_sources])
    for kind, least, remedy in (
        ("general", least_general, "use a Python whose standard library is installed as source files"),
        ("legal", least_legal, "install the project's dependencies from wheels, which carry their licence files"),
    ):
        found = family_size(p for passages in getattr(corpus, kind).values() for p in passages)
        if found < least:
            raise Refused(
                f"this installation carries too little {kind} text",
                expected=f"at least {least:,} bytes",
                found=f"{found:,} bytes in {len(getattr(corpus, kind))} families",
                remedy=remedy,
            )
    return corpus


def split_families(families: Mapping[str, Sequence[bytes]], shares: Mapping[str, float]) -> dict[str, list[str]]:
    """Give every family to one split so that the splits' bytes come close to their shares.

    The largest family goes first, each to the split that lacks the most; no chance is involved.

    Args:
        shares: split → its share; only their ratios matter.

    Raises:
        Refused: a split would stay empty.
    """
    total, weight = sum(map(family_size, families.values())), sum(shares.values())
    lacking = {split: total * share / weight for split, share in shares.items()}
    given: dict[str, list[str]] = {split: [] for split in shares}
    for name in sorted(families, key=lambda name: (-family_size(families[name]), name)):
        split = max(lacking, key=lambda split: lacking[split])
        given[split].append(name)
        lacking[split] -= family_size(families[name])
    empty = [split for split, names in given.items() if not names]
    if empty:
        raise Refused("there are too few families of text", expected=f"one for {empty[0]}", found=len(families))
    return given


def words(text: str) -> list[str]:
    """A text's words, lower case, without digits and punctuation: what is compared when texts are."""
    return re.findall(r"[a-z]+", text.lower())


def shingles(found: Sequence[str]) -> frozenset[int]:
    """CRC-32 of every run of six words (Broder 1997)."""
    count = len(found) - _SHINGLE + 1
    return frozenset(zlib.crc32(" ".join(found[i : i + _SHINGLE]).encode()) for i in range(count))


def passages_of(text: str) -> list[str]:
    """Cut a licence file, which may be a bundle, into licences; very short pieces are dropped."""
    lines = (line.rstrip() for line in text.replace("\r\n", "\n").split("\n"))
    text, pieces, start = "\n".join(lines), [], 0
    for boundary in _BOUNDARY.finditer(text):
        pieces.append(text[start : boundary.start()])
        start = boundary.end()
    pieces.append(text[start:])
    return [piece.strip("\n") + "\n" for piece in pieces if len(words(piece)) >= _SHORTEST_PASSAGE]


def group_similar(passages: Iterable[str]) -> dict[str, list[bytes]]:
    """Families of near-identical passages: name → what each passage adds to the family, longest first.

    Passages are linked when `SIMILAR` of the smaller one's shingles stand in the other; a family is what is linked,
    directly or through others. So passages of two families never share that much.
    """
    found = sorted(set(passages), key=lambda text: (-len(text), text))
    marks = [shingles(words(text)) for text in found]
    order = sorted(range(len(found)), key=lambda i: (-len(marks[i]), found[i]))
    family = list(range(len(found)))

    def root(i: int) -> int:
        while family[i] != i:
            i = family[i]
        return i

    holders: dict[int, list[int]] = defaultdict(list)
    for i in order:
        shared = Counter(j for mark in marks[i] for j in holders[mark])
        for j, count in shared.items():
            if count >= SIMILAR * len(marks[i]) and root(i) != root(j):
                family[root(i)] = root(j)
        for mark in marks[i]:
            holders[mark].append(i)

    members: dict[int, list[int]] = defaultdict(list)
    for i in order:
        members[root(i)].append(i)
    grouped: dict[str, list[bytes]] = {}
    for group in members.values():
        kept: list[bytes] = []
        seen: set[int] = set()
        for i in group:
            if len(marks[i] - seen) >= _NOVEL * len(marks[i]):
                kept.append(found[i].encode())
            seen |= marks[i]
        title = "-".join(words(found[group[0]])[:5])
        grouped[f"{title}-{hashlib.sha256(kept[0]).hexdigest()[:6]}"] = kept
    return dict(sorted(grouped.items()))


def required(distributions: Sequence[str]) -> list[Distribution]:
    """These distributions and everything installed that they require without extras, by name."""
    found: dict[str, Distribution] = {}
    wanted = [(name, True) for name in distributions]
    while wanted:
        name, must = wanted.pop()
        key = canonicalize_name(name)
        if key in found or key.startswith(_ACCELERATOR):
            continue
        try:
            found[key] = distribution(name)
        except PackageNotFoundError:
            if must:
                raise Refused(
                    "a distribution is not installed", expected=name, remedy="pip install -e . in the checkout"
                ) from None
            continue
        for line in found[key].requires or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                wanted.append((requirement.name, False))
    return [found[key] for key in sorted(found)]


def _legal_families(distributions: Sequence[str]) -> tuple[dict[str, list[bytes]], list[SourceFile]]:
    passages: list[str] = []
    sources = []
    for found in required(distributions):
        for name, path in _licence_files(found):
            text, source = _read("legal", f"{found.metadata['Name']}: {name}", path)
            if text is not None and source is not None:
                passages += passages_of(text)
                sources.append(source)
    return group_similar(passages), sources


def _licence_files(found: Distribution) -> Iterator[tuple[str, Path]]:
    for file in sorted(found.files or [], key=str):
        if _LICENCE_FILE.match(file.name) and not file.name.lower().endswith(_OTHER_SUFFIX) and ".." not in file.parts:
            yield str(file), Path(str(file.locate()))


def _general_families() -> tuple[dict[str, list[bytes]], list[SourceFile]]:
    root = Path(sysconfig.get_path("stdlib"))
    families: dict[str, list[bytes]] = {}
    sources = []
    for top in sorted(root.iterdir()) if root.is_dir() else []:
        name = top.name.removesuffix(".py")
        if name in _NOT_TEXT or name.startswith(("__", "_sysconfigdata", "config-")):
            continue
        for path in sorted(top.rglob("*.py")) if top.is_dir() else [top] if top.suffix == ".py" else []:
            if {"test", "tests", "__pycache__"} & set(path.relative_to(root).parts):
                continue
            text, source = _read("general", path.relative_to(root).as_posix(), path)
            if text is not None and source is not None and len(text) > 512:
                families.setdefault(name, []).append(text.encode())
                sources.append(source)
    return families, sources


def _read(kind: Kind, name: str, path: Path) -> tuple[str | None, SourceFile | None]:
    """A file's text and record; nothing when it is missing or no UTF-8."""
    try:
        data = path.read_bytes()
        text = data.decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None, None
    return text, SourceFile(kind=kind, name=name, size=len(data), sha256=f"sha256:{hashlib.sha256(data).hexdigest()}")
