"""The request journal: full scoring takes a day, so each finished request is a durable file of its own.

    SPLIT.requests/            0700
        contract.json          0600   what is scored, with what: canonical JSON
        REQUEST.json           0600   one per completed request, created exclusively

An interrupted run goes on where it was: completed requests are reused, the interrupted one starts again. That is sound
only while everything that a score hangs on is unchanged, so a journal opens only for a byte-identical contract.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field

from d2lib.errors import Refused
from d2lib.files import Record, canonical_json, fsync_folder, parse_json, sha256_bytes, write_json
from d2lib.gates.gate import digest_field, validated
from d2lib.gates.request import RequestScore, anchors_digest
from d2lib.strict import differences

if TYPE_CHECKING:
    from d2lib.data.k2 import K2File
    from d2lib.data.manifest import Manifest

ScoredSplit = Literal["dev", "heldout_legal", "heldout_general"]

_CONTRACT = "contract.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_WORKING = re.compile(r"\.(.+\.json)\.[0-9a-f]{12}\.part")


class Identities(Record):
    """Digests of everything that a score hangs on and that must be one and the same for all splits of a run."""

    namespace: str = Field(min_length=1)
    manifest: str = digest_field()
    native: str = digest_field()
    """The native drafter's weights: the baseline."""
    drafter: str = digest_field()
    """The drafter's configuration."""
    adapter: str = digest_field()
    """The completed adapter: the candidate."""
    pilot: str = digest_field()
    """The pilot's receipt that admitted the recipe."""
    recipe: str = digest_field()
    source: str = digest_field()
    """The d2lib that scores."""


class Computation(Record):
    """How scores were computed: what decides their last bits besides the arithmetic itself."""

    torch: str = Field(min_length=1)
    """Version with its build, e.g. 2.13.0+cpu."""
    device: str = Field(min_length=1)
    """Kind and model."""
    batched: bool
    """Whether rounds went together (see d2lib.gates.scoring.Scorer)."""


class RequestPopulation(Record):
    """One request's complete rounds: how many, and the digest of their anchors in order."""

    rounds: int = Field(gt=0)
    anchors: str = digest_field()


class Contract(Record):
    """What a journal's scores are scores of, and how they were computed. The population comes from the manifest and the
    K2 file alone. The three splits of a run may be computed differently, on two cards say; one split may not."""

    schema_version: Literal[1] = 1
    split: ScoredSplit
    block_size: int = Field(gt=0)
    k2: str = digest_field()
    identities: Identities
    computation: Computation | None = None
    """None in parts of earlier versions only."""
    population: dict[str, RequestPopulation] = Field(min_length=1)

    @classmethod
    def of(
        cls,
        split: ScoredSplit,
        block_size: int,
        k2: str,
        identities: Identities,
        population: Mapping[str, Sequence[int]],
        computation: Computation | None = None,
    ) -> Contract:
        """The contract over a population request → anchors; raises Refused for a request without complete rounds."""
        for request, anchors in population.items():
            if not anchors:
                raise Refused("a request has no complete round", expected=">= 1 round", found=0, where=request)
            if _NAME.fullmatch(request) is None or f"{request}.json" == _CONTRACT:
                raise Refused(
                    "a request's name cannot be a file's", expected=_NAME.pattern, found=repr(request), where=split
                )
        return cls(
            split=split,
            block_size=block_size,
            k2=k2,
            identities=identities,
            computation=computation,
            population={
                request: RequestPopulation(rounds=len(anchors), anchors=anchors_digest(anchors))
                for request, anchors in sorted(population.items())
            },
        )

    @classmethod
    def from_k2(
        cls,
        k2: K2File,
        manifest: Manifest,
        split: ScoredSplit,
        identities: Identities,
        computation: Computation | None = None,
    ) -> Contract:
        """The contract over a split's whole population: every request of the manifest, every complete round of the K2
        file. There is no other source of these counts. Raises Refused when the file does not cover the split."""
        population = k2.population(manifest, split)
        return cls.of(split, k2.header.block_size, str(k2.sha256), identities, population, computation)

    def check(self, score: RequestScore) -> None:
        """Refuse a score that is not of one of this population's requests, over exactly its rounds, with K slots."""
        wanted = self.population.get(score.request)
        if wanted is None:
            raise Refused("a request is not in the population", found=score.request, where=self.split)
        for field, expected, found in (
            ("rounds", wanted.rounds, score.rounds),
            ("anchors", wanted.anchors, score.anchors),
            ("slots of baseline", self.block_size, len(score.baseline.kl_sum)),
            ("slots of candidate", self.block_size, len(score.candidate.kl_sum)),
        ):
            if expected != found:
                raise Refused(
                    "a request's coverage differs from the population",
                    expected=expected,
                    found=found,
                    where=f"{self.split} {score.request}: {field}",
                )


class Journal:
    """An open journal; holds the folder's lock, so that no second scorer writes into it.

    Use as a context manager. `completed` maps request → score for what is on disk.
    """

    def __init__(self, folder: Path, contract: Contract, descriptor: int) -> None:
        self.folder = folder
        self.contract = contract
        self.completed: dict[str, RequestScore] = {}
        self._descriptor = descriptor
        self._digest = str(sha256_bytes(canonical_json(contract.model_dump())))

    @classmethod
    def open(cls, folder: Path, contract: Contract) -> Journal:
        """Start a journal, or go on with one whose contract is byte-identical.

        Raises:
            Refused: the contract differs (names the fields); another process holds the journal; anything in the
                folder is truncated, malformed, foreign, extra, linked, or readable by others.
        """
        try:
            folder.mkdir(mode=0o700)
            folder.chmod(0o700)
            fsync_folder(folder.parent)
        except FileExistsError:
            pass
        except OSError as error:
            raise Refused("a journal cannot be created", found=error.strerror, where=folder) from None
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise Refused(
                "a journal cannot be opened", expected="a folder, not a link", found=error.strerror, where=folder
            ) from None
        journal = cls(folder, contract, descriptor)
        try:
            journal._lock()
            journal._load()
        except BaseException:
            journal.close()
            raise
        return journal

    @property
    def pending(self) -> list[str]:
        """Requests that are still to be scored, in order."""
        return [request for request in sorted(self.contract.population) if request not in self.completed]

    def add(self, score: RequestScore) -> None:
        """Record a completed request, durably; it is never overwritten."""
        self.contract.check(score)
        body = score.model_dump()
        write_json(
            self.folder / f"{score.request}.json",
            {"contract": self._digest, "score": body, "score_sha256": str(sha256_bytes(canonical_json(body)))},
            mode=0o600,
        )
        self.completed[score.request] = score

    def close(self) -> None:
        """Release the lock."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused(
                "another process is writing this journal", where=self.folder, remedy="wait until it has ended"
            ) from None
        status = os.fstat(self._descriptor)
        if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise Refused(
                "a journal is not private",
                expected="a folder of this user, mode 0700",
                found=f"user {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}",
                where=self.folder,
            )

    def _load(self) -> None:
        names = set(self._entries())
        requests = names - {_CONTRACT}
        if _CONTRACT not in names:
            if requests:
                raise Refused("a journal has requests but no contract", where=self.folder / _CONTRACT)
            write_json(self.folder / _CONTRACT, self.contract.model_dump(), mode=0o600)
            return
        found = self._read(_CONTRACT)
        wanted = self.contract.model_dump()
        if found != wanted:
            fields = [name for name, _, _ in differences(wanted, found)]
            raise Refused(
                "a journal was begun under another contract",
                expected="a byte-identical contract",
                found=f"{len(fields)} fields differ: {', '.join(fields[:5])}",
                where=self.folder / _CONTRACT,
                remedy="keep this journal as it is and score into a new output folder",
            )
        for name in sorted(requests):
            self._resume(name)

    def _resume(self, name: str) -> None:
        where = self.folder / name
        entry = self._read(name)
        if not isinstance(entry, dict) or set(entry) != {"contract", "score", "score_sha256"}:
            raise Refused("not a request's journal entry", where=where)
        if entry["contract"] != self._digest:
            raise Refused("a request was scored under another contract", found=entry["contract"], where=where)
        if entry["score_sha256"] != str(sha256_bytes(canonical_json(entry["score"]))):
            raise Refused("a request's score differs from its digest", where=where)
        score = validated(RequestScore, entry["score"], where)
        if f"{score.request}.json" != name:
            raise Refused(
                "a request's file has another name", expected=f"{score.request}.json", found=name, where=where
            )
        self.contract.check(score)
        self.completed[score.request] = score

    def _entries(self) -> Iterator[str]:
        """Names of the journal's files, after the removal of what a killed process left half written."""
        expected = {_CONTRACT, *(f"{request}.json" for request in self.contract.population)}
        for name in os.listdir(self._descriptor):
            working = _WORKING.fullmatch(name)
            status = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
            if working is not None and working[1] in expected and stat.S_ISREG(status.st_mode):
                os.unlink(name, dir_fd=self._descriptor)
        for name in sorted(os.listdir(self._descriptor)):
            status = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
            if name not in expected:
                raise Refused("a journal holds a file that is not its own", found=name, where=self.folder)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1 or stat.S_IMODE(status.st_mode) & 0o077:
                raise Refused(
                    "a journal's file is not a private file with one name",
                    expected="a regular file, one link, mode 0600",
                    found=f"{stat.filemode(status.st_mode)}, {status.st_nlink} links",
                    where=self.folder / name,
                )
            yield name

    def _read(self, name: str) -> Any:
        path = self.folder / name
        data = path.read_bytes()
        value = parse_json(data, where=path)
        if data != canonical_json(value) + b"\n":
            raise Refused("a journal's file is not canonical", where=path)
        return value
