"""Re-hash a run and walk its ledger: what holds, what is changed, missing, extra, or not a plain file. Reads only.

A file may grow after it was recorded (a log, a journal): what was recorded of it must then be its beginning, byte for
byte. Every regular file under the run root must be evidence (ledger, receipts, locks) or some receipt's output.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from d2lib.errors import Refused
from d2lib.evidence import notebook as notebooks
from d2lib.evidence.layout import (
    FINAL_NAMES,
    JOURNAL,
    LEDGER,
    LOCK,
    NOTEBOOK,
    OPENING,
    RECEIPT,
    SIGNATURE,
    WORKING_NAMES,
)
from d2lib.evidence.ledger import LedgerLine, check_lines, is_held
from d2lib.evidence.phase import read_journal
from d2lib.evidence.receipts import Receipt, files_of, hash_prefixes, parse_receipt
from d2lib.evidence.repair import repair
from d2lib.evidence.report import Report, Row, State
from d2lib.evidence.sign import Policy, check_envelope
from d2lib.files import canonical_json, is_unfinished, remove_abandoned, sha256_bytes
from d2lib.progress import bar


@dataclass(frozen=True)
class Claim:
    """What a receipt says of a file: its size and digest when it was recorded."""

    size: int
    sha256: str
    by: str


@dataclass
class _Run:
    """One verification in progress."""

    root: Path
    rows: list[Row] = field(default_factory=list)
    tree: dict[str, os.stat_result] = field(default_factory=dict)
    claims: dict[str, list[Claim]] = field(default_factory=dict)
    outputs: set[str] = field(default_factory=set)
    evidence: set[str] = field(default_factory=set)
    writing: list[str] = field(default_factory=list)
    """Paths that a running attempt declared as outputs."""

    def add(self, state: State, where: str, message: str, expected: object = None, found: object = None) -> None:
        row = Row(state, where, message, *(None if value is None else str(value) for value in (expected, found)))
        if row not in self.rows:
            self.rows.append(row)


def verify(root: Path, *, progress: bool = False, policy: Policy | None = None) -> Report:
    """Verify one run.

    Args:
        root: the run root, runs/NAMESPACE.
        progress: show a bar over the bytes.
        policy: who must have signed which phases' receipts; without it, signatures are compared with their receipts
            and not checked against keys.

    Raises:
        Refused: the root is not a folder (or is a link).
    """
    root = Path(os.path.abspath(root))
    if root.is_symlink() or not root.is_dir():
        raise Refused("not a run root", expected="the folder runs/NAMESPACE, not a link", where=root)
    run = _Run(root)
    _walk_tree(run, root)
    _check_leftovers(run)
    lines, head = _check_ledger(run)
    digests = {line.receipt_json_sha256: line for line in lines}
    receipts = {(line.name, line.attempt): _check_receipt(run, line, digests) for line in lines}
    for line in lines:
        _check_signature(run, line, receipts[line.name, line.attempt], policy)
    _check_unrecorded(run, set(receipts))
    size = _check_files(run, progress)
    _check_extra(run)
    for (name, attempt), receipt in receipts.items():
        where = f"{name}/attempt-{attempt}"
        if receipt is not None and all(row.holds or not row.where.startswith(f"{where}/") for row in run.rows):
            word = receipt.verdict or receipt.status
            ran = f"{receipt.cells.ran} of {receipt.cells.code} cells ran"
            run.add("holds", where, f"{word}, {ran}, {len(receipt.inputs)} inputs, {len(receipt.outputs)} outputs")
    return Report(root, tuple(run.rows), len(receipts), len(run.tree), size, head)


def _walk_tree(run: _Run, root: Path) -> None:
    """Every regular file with one name; links, hard links and devices become rows."""
    folders = [root]
    while folders:
        folder = folders.pop()
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
            found = [(entry, entry.stat(follow_symlinks=False)) for entry in entries]
        except OSError as error:
            run.add("broken", folder.relative_to(root).as_posix(), "a folder cannot be read", found=error.strerror)
            continue
        folders += [Path(entry.path) for entry, status in reversed(found) if stat.S_ISDIR(status.st_mode)]
        _note_files(run, [(entry, status) for entry, status in found if not stat.S_ISDIR(status.st_mode)])


def _note_files(run: _Run, entries: Iterable[tuple[os.DirEntry[str], os.stat_result]]) -> None:
    for entry, status in entries:
        name = Path(entry.path).relative_to(run.root).as_posix()
        if not stat.S_ISREG(status.st_mode):
            kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "a device, socket or pipe"
            run.add("link", name, "not a plain file", expected="a regular file", found=kind)
        else:
            run.tree[name] = status


def _check_leftovers(run: _Run) -> None:
    """Take what is at work out of the tree, name what dead writers left, and find hard links among the rest."""
    try:
        dead = repair(run.root, remove=False)
    except Refused:  # the ledger is not sound, as its own rows say
        dead = remove_abandoned(run.root, remove=False)
    places = {path.relative_to(run.root).as_posix() for path in dead}
    left = {name for name in run.tree if places & {name, *(str(part) for part in PurePosixPath(name).parents)}}
    names = Counter((run.tree[name].st_dev, run.tree[name].st_ino) for name in left)
    for name in sorted(places):
        run.add("leftover", name, "left by a writer that died", found="a working file; d2 repair removes it")
    for name in sorted(name for name in run.tree.keys() - left if is_unfinished(name)):
        parts = PurePosixPath(name).parts
        place = "/".join(parts[: next(number for number, part in enumerate(parts, 1) if is_unfinished(part))])
        run.add("scratch", place, "work in progress: it is no output, and a later attempt uses or removes it")
        left.add(name)
    for name in left:
        del run.tree[name]
    for name, status in run.tree.items():
        count = status.st_nlink - names[status.st_dev, status.st_ino]
        if count != 1:
            run.add("link", name, "a hard link", expected="a file with one name", found=f"{count} names")


def _read(run: _Run, name: str) -> bytes | None:
    if name not in run.tree:
        return None
    try:
        return (run.root / name).read_bytes()
    except OSError as error:
        run.add("broken", name, "cannot be read", found=error.strerror)
        return None


def _check_ledger(run: _Run) -> tuple[list[LedgerLine], str | None]:
    run.evidence |= {LEDGER}
    data = _read(run, LEDGER)
    if data is None:
        run.add("missing", LEDGER, "no ledger", expected="one line an attempt")
        return [], None
    lines, problems, torn = check_lines(data, run.root.name)
    for problem in problems:
        run.add("broken", f"{LEDGER}:{problem.line}", problem.message, problem.expected, problem.found)
    if torn:
        number = data.count(b"\n") + 1
        run.add("broken", f"{LEDGER}:{number}", "the last line is torn", "a newline", repr(torn[-40:]))
    attempts: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        following = attempts.get(line.name, 0) + 1
        if line.attempt != following:
            run.add(
                "broken",
                f"{LEDGER}:{number}",
                f"the attempts at {line.name} are not in order",
                f"attempt {following}",
                f"attempt {line.attempt}",
            )
        attempts[line.name] = line.attempt
    if not problems and not torn:
        run.add("holds", LEDGER, f"{len(lines)} lines, the chain is unbroken")
    last = data[data.rfind(b"\n", 0, -1) + 1 :]
    return lines, str(sha256_bytes(last)) if last else None


def _check_receipt(run: _Run, line: LedgerLine, digests: dict[str, LedgerLine]) -> Receipt | None:
    """Check a ledger line's two files against the line and each other; note what the receipt claims."""
    where = f"{line.name}/attempt-{line.attempt}"
    path, page = f"{where}/{RECEIPT}", f"{where}/{NOTEBOOK}"
    run.evidence |= {path, page, f"{where}/{SIGNATURE}"}
    run.claims.setdefault(page, []).append(Claim(-1, line.receipt_sha256, f"{LEDGER}:{line.seq}"))
    data = _read(run, path)
    if data is None:
        run.add("missing", path, "a receipt in the ledger is not here", line.receipt_json_sha256)
        return None
    found = str(sha256_bytes(data))
    if found != line.receipt_json_sha256:
        run.add("changed", path, "not the receipt in the ledger", line.receipt_json_sha256, found)
    receipt = _parse(run, path, data)
    if receipt is None:
        return None
    for name, value in (
        ("namespace", run.root.name),
        ("phase", line.phase),
        ("job", line.job),
        ("attempt", line.attempt),
        ("status", line.status),
        ("verdict", line.verdict),
        ("ended", line.time),
    ):
        if getattr(receipt, name) != value:
            state: State = "foreign" if name in ("namespace", "phase", "job", "attempt") else "broken"
            run.add(state, path, f"the receipt's {name} is another", value, getattr(receipt, name))
    if receipt.notebook.receipt_sha256 != line.receipt_sha256:
        run.add("broken", path, "another notebook's digest than the ledger's", line.receipt_sha256)
    for name, kept in (("parameters", receipt.parameters), ("environment", receipt.environment)):
        digest = str(sha256_bytes(canonical_json(kept)))
        if digest != getattr(receipt, f"{name}_sha256"):
            run.add("broken", path, f"the {name} have another digest", getattr(receipt, f"{name}_sha256"), digest)
    for parent in receipt.parents:
        made = digests.get(parent.receipt_json_sha256)
        if parent.namespace == run.root.name and (made is None or made.seq >= line.seq):
            name = f"{parent.phase}{'' if parent.job is None else f'-{parent.job}'} attempt {parent.attempt}"
            run.add("broken", path, f"its parent {name} is not before it in the ledger", parent.receipt_json_sha256)
    page_data = _read(run, page) if run.tree.get(page) and run.tree[page].st_size <= notebooks.MAX_BYTES else None
    if page in run.tree and page_data is None:
        run.add(
            "broken",
            page,
            "the notebook is too large",
            f"at most {notebooks.MAX_BYTES >> 20} MiB",
            f"{run.tree[page].st_size >> 20} MiB",
        )
    elif page_data is not None:
        for message, expected, got in notebooks.check(page_data, receipt):
            run.add("broken", page, message, expected, got)
    _claim(run, receipt, path)
    return receipt


def _check_signature(run: _Run, line: LedgerLine, receipt: Receipt | None, policy: Policy | None) -> None:
    """Check a receipt's envelope, and that whoever must sign has signed."""
    name = f"{line.name}/attempt-{line.attempt}/{SIGNATURE}"
    if receipt is None:
        return
    needed = policy.requirement(receipt) if policy is not None else None
    data = _read(run, name)
    held, unknown = set[str](), set[str]()
    if data is not None:
        try:
            held, unknown = check_envelope(data, receipt, line, policy.by_id if policy is not None else {})
        except Refused as error:
            run.add("broken", name, error.message, error.expected, error.found)
            return
        if held:
            run.add("holds", name, f"signed by {', '.join(sorted(held))}")
        if unknown:
            ids = ", ".join(sorted(unknown))
            if policy is None:
                run.add("unchecked", name, "signed; no policy says by whom", found=ids)
            else:
                run.add("unsigned", name, "signed with a key that the policy does not list", found=ids)
    if needed is not None and not needed.met(held):
        run.add(
            "unsigned",
            name,
            "not signed by whom the policy names",
            f"{needed.threshold} of {', '.join(needed.keys)}",
            ", ".join(sorted(held)) or "none of them",
        )


def _parse(run: _Run, path: str, data: bytes) -> Receipt | None:
    try:
        return parse_receipt(data)
    except Refused as error:
        run.add("broken", path, error.message, error.expected, error.found)
        return None


def _claim(run: _Run, receipt: Receipt, by: str) -> None:
    for output in receipt.outputs:
        run.outputs.add(output.path)
        run.claims.setdefault(output.path, []).append(Claim(output.size, output.sha256, by))
    for record in receipt.inputs:
        for name, file in files_of(record).items():
            run.claims.setdefault(name, []).append(Claim(file.size, str(file.sha256), by))


def _check_unrecorded(run: _Run, recorded: set[tuple[str, int]]) -> None:
    """Attempts on disk that have no ledger line: running, left by a kill, or brought here."""
    folders = {str(PurePosixPath(name).parent) for name in run.tree}
    for folder in sorted(folders):
        name, _, attempt = folder.rpartition("/attempt-")
        if not attempt.isdecimal() or "/" in name:
            continue
        inside = [path for path in run.tree if path.startswith(f"{folder}/")]
        if (name, int(attempt)) in recorded:
            if is_held(run.root / name / LOCK):  # it ends now
                run.evidence |= {path for path in inside if PurePosixPath(path).name in WORKING_NAMES}
            continue
        if f"{folder}/{RECEIPT}" not in run.tree and is_held(run.root / name / LOCK):
            run.add("running", folder, "an attempt is running")
            run.evidence |= {path for path in inside if PurePosixPath(path).name.lstrip(".").startswith("working.")}
            try:
                entries = read_journal(run.root / folder / JOURNAL)
                run.writing += [str(entry["output"]["path"]) for entry in entries if "output" in entry]
            except (Refused, ValueError, KeyError, TypeError) as error:
                run.add(
                    "broken", f"{folder}/{JOURNAL}", "the journal is damaged", found=f"{type(error).__name__}: {error}"
                )
            continue
        if f"{folder}/{RECEIPT}" in run.tree:
            run.add("foreign", f"{folder}/{RECEIPT}", "a receipt that is not in the ledger", f"a line in {LEDGER}")
            data = _read(run, f"{folder}/{RECEIPT}")
            receipt = None if data is None else _parse(run, f"{folder}/{RECEIPT}", data)
            if receipt is not None and receipt.namespace != run.root.name:
                message = "a receipt of another namespace"
                run.add("foreign", f"{folder}/{RECEIPT}", message, run.root.name, receipt.namespace)
        elif f"{folder}/{OPENING}" in run.tree:
            run.add("unfinished", folder, "an attempt that was killed", found="the next attempt gives it its receipt")
        run.evidence |= {path for path in inside if PurePosixPath(path).name in FINAL_NAMES}
        run.evidence |= {path for path in inside if PurePosixPath(path).name.lstrip(".").startswith("working.")}


def _check_files(run: _Run, progress: bool) -> int:
    """Hash every claimed file once, with the digests of its recorded beginnings; returns the bytes read."""
    inside = [name for name in sorted(run.claims) if not os.path.isabs(name)]
    outside = [name for name in sorted(run.claims) if os.path.isabs(name)]
    total = sum(run.tree[name].st_size for name in inside if name in run.tree)
    read = 0
    with bar(total, "verifying", "B", shown=progress, unit_scale=True) as shown:

        def step(size: int) -> None:
            nonlocal read
            read += size
            shown.update(size)

        for name in inside:
            if name in run.tree:
                _compare(run, name, run.root / name, step)
            elif not any(row.where == name and row.state == "link" for row in run.rows):
                run.add("missing", name, f"recorded by {run.claims[name][0].by} and not here")
        for name in outside:
            if "\0" in name:
                run.add("broken", name, "no file can have this name", found=f"an input of {run.claims[name][0].by}")
            elif os.path.lexists(name):
                _compare(run, name, Path(name), step)
            else:
                run.add("elsewhere", name, f"an input of {run.claims[name][0].by}; not on this machine")
    return read


def _compare(run: _Run, name: str, path: Path, step: Callable[[int], None]) -> None:
    claims = run.claims[name]
    try:
        if not stat.S_ISREG(path.lstat().st_mode):  # a pipe or a device could be read for ever
            run.add("changed", name, "not a plain file", expected="a regular file", found="a link, pipe or device")
            return
        size, digests = hash_prefixes(path, {claim.size for claim in claims}, step)
    except OSError as error:
        run.add("changed", name, "cannot be read", found=error.strerror)
        return
    largest = max(claim.size for claim in claims)
    for claim in claims:
        found = digests.get(size if claim.size < 0 else claim.size)
        if found is None:
            run.add("changed", name, f"shorter than {claim.by} says", f"{claim.size} bytes", f"{size} bytes")
        elif found != claim.sha256:
            run.add("changed", name, f"other bytes than {claim.by} says", claim.sha256, found)
    if 0 <= largest < size and not _is_written(run, name):
        run.add("changed", name, "longer than any receipt says", f"{largest} bytes", f"{size} bytes")


def _is_written(run: _Run, name: str) -> bool:
    return any(name == path or name.startswith(f"{path}/") for path in run.writing)


def _check_extra(run: _Run) -> None:
    phases = {PurePosixPath(name).parts[0] for name in run.evidence if "/" in name}
    locks = {LOCK} | {f"{phase}/{LOCK}" for phase in phases}
    for name, status in run.tree.items():
        if name in locks:
            if status.st_size:
                run.add("extra", name, "a lock holds bytes", "0 bytes", f"{status.st_size} bytes")
        elif name not in run.evidence and name not in run.outputs and not _is_written(run, name):
            run.add("extra", name, "no receipt lists this file", found=f"{status.st_size} bytes")
