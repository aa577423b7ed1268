"""The reviewed commit: its tree from git, and whether a folder holds exactly that.

Identity is the commit's tree and blob hashes. Archive bytes are none: export-ignore, export-subst, filters and line
endings change what `git archive` writes, so every staged file is hashed again and compared with its blob.
"""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from d2lib.coordinator.children import clean_environment, last_line, run
from d2lib.coordinator.contract import Paths, git_commands
from d2lib.errors import Refused
from d2lib.files import inside, walk

_KINDS = {"120000": "a symbolic link", "160000": "a submodule"}
CAUSES = "export-ignore, export-subst, filters and line-ending attributes change what git archive writes"


@dataclass(frozen=True)
class Blob:
    """One file of a commit: git's hash of its bytes, and whether it is executable."""

    sha1: str
    executable: bool


Tree = dict[str, Blob]
"""POSIX path → file of a commit."""


def _git(paths: Paths, what: str) -> bytes:
    result = run(git_commands(paths)[what])
    if result.returncode:
        raise Refused(
            f"git cannot answer about the source ({what})",
            expected=f"a git checkout that has {paths.commit}",
            found=last_line(result.stderr),
            where=paths.source,
        )
    return result.stdout


def read_tree(paths: Paths) -> Tree:
    """Every file of the commit, from git.

    Raises:
        Refused: --commit is a tag or another object, or the commit holds a link, a submodule or a name that is not
            UTF-8.
    """
    kind = _git(paths, "type").decode().strip()
    if kind != "commit":
        raise Refused("--commit is not a commit", expected="a commit's id", found=f"a {kind}", where=paths.commit)
    tree: Tree = {}
    for line in _git(paths, "tree").split(b"\0"):
        if not line:
            continue
        head, _, raw = line.partition(b"\t")
        mode, _, sha1 = head.decode().split(" ")
        try:
            name = raw.decode("utf-8")
        except UnicodeDecodeError:
            raise Refused("a file's name in the commit is not UTF-8", found=raw, where=paths.commit) from None
        if mode not in ("100644", "100755"):
            raise Refused(
                "the commit holds something else than a file",
                expected="regular files only",
                found=_KINDS.get(mode, f"mode {mode}"),
                where=name,
            )
        tree[name] = Blob(sha1, mode == "100755")
    if not tree:
        raise Refused("the commit has no files", where=paths.commit)
    return tree


def check_checkout(paths: Paths, tree: Tree) -> None:
    """The source is the top of a checkout that is at the commit and clean, ignored files apart.

    The files are hashed here as well, because git can be told not to notice a change (assume-unchanged).

    Raises:
        Refused: another commit is checked out, or a file differs, is missing or is not part of the commit.
    """
    top = os.path.realpath(_git(paths, "top").decode().rstrip("\n"))
    if top != os.path.realpath(paths.source):
        raise Refused("--source is not the top of a checkout", expected=top, found=paths.source)
    head = _git(paths, "head").decode().strip()
    if head != paths.commit:
        raise Refused(
            "another commit is checked out in the source",
            expected=paths.commit,
            found=head,
            where=paths.source,
            remedy="check the reviewed commit out",
        )
    for entry in _git(paths, "status").split(b"\0"):
        if entry:
            name = entry[3:].decode("utf-8", "replace")
            found = "a file that is not part of the commit" if entry.startswith(b"??") else "a change"
            raise Refused("the source is not clean", expected=f"exactly {paths.commit}", found=found, where=name)
    differences = compare(tree, paths.source, {name: paths.source / name for name in tree})
    if differences:
        raise Refused("the source is not clean", expected=f"exactly {paths.commit}", found=differences[0])


def blob_sha1(path: Path) -> str:
    """Git's hash of a file's bytes: SHA-1 over `blob SIZE\\0` and the bytes. Links are not followed."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as stream:
        digest = hashlib.sha1(b"blob %d\0" % os.fstat(descriptor).st_size, usedforsecurity=False)
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def compare(tree: Tree, root: Path, files: Mapping[str, Path]) -> list[str]:
    """How a set of files differs from a commit's; each entry names the file and what is wrong with it."""
    found = [f"{name} is missing" for name in sorted(tree.keys() - files.keys())]
    found += [f"{name} is not part of the commit" for name in sorted(files.keys() - tree.keys())]
    for name in sorted(tree.keys() & files.keys()):
        path, blob = files[name], tree[name]
        try:
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode) or any(parent.is_symlink() for parent in _below(root, path)):
                found.append(f"{name} is not a regular file")
            elif blob_sha1(path) != blob.sha1:
                found.append(f"{name} has other bytes than the commit")
            elif bool(status.st_mode & 0o100) != blob.executable:
                found.append(f"{name} is {'not ' if blob.executable else ''}executable")
        except FileNotFoundError:
            found.append(f"{name} is missing")
    return sorted(found)


def _below(root: Path, path: Path) -> list[Path]:
    return [parent for parent in path.parents if root in parent.parents]


def check_folder(tree: Tree, root: Path, *, what: str, remedy: str | None = None) -> None:
    """A folder holds the commit's files and nothing else; raises Refused with the file named."""
    files = {path.relative_to(root).as_posix(): path for path in walk(root)}
    differences = compare(tree, root, files)
    if differences:
        more = f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""
        raise Refused(f"{what} differs from the commit", found=f"{differences[0]}{more}", where=root, remedy=remedy)


def check_running(tree: Tree, package: Path) -> None:
    """The d2lib that runs this is the commit's, so that what was reviewed is what decides; raises Refused.

    Byte code may lie beside it; a source file that the commit lacks may not.
    """
    part = {name: blob for name, blob in tree.items() if name.startswith("d2lib/")}
    files = {
        f"d2lib/{path.relative_to(package).as_posix()}": path
        for path in sorted(package.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    }
    differences = compare(part, package.parent, files)
    if differences:
        raise Refused(
            "the running d2lib is not the reviewed one",
            found=differences[0],
            where=package,
            remedy="run it from the reviewed checkout: PYTHONPATH=SOURCE python -m d2lib.full_stage",
        )


def extract_archive(paths: Paths, folder: Path) -> None:
    """`git archive` of the commit into a new folder: regular files only, each created, none overwritten.

    Raises:
        Refused: git fails, the archive is not the commit's, or it holds a link, a device or a path that leaves.
    """
    refusal: Refused | None = None
    with tempfile.TemporaryFile() as said:
        git = subprocess.Popen(
            git_commands(paths)["archive"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=said,
            env=clean_environment(),
        )
        with git, cast("IO[bytes]", git.stdout) as stream:
            try:
                _extract(stream, folder, paths.commit)
            except tarfile.TarError as error:
                refusal = Refused("git archive wrote no archive", found=str(error), where=paths.source)
            except Refused as error:
                refusal = error
            while stream.read(1 << 20):  # let git end by itself
                pass
        said.seek(0)
        if git.returncode:
            raise Refused("git archive failed", found=last_line(said.read()), where=paths.source)
    if refusal is not None:
        raise refusal


def _extract(stream: IO[bytes], folder: Path, commit: str) -> None:
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            named = archive.pax_headers.get("comment")
            if named != commit:
                raise Refused("the archive is not the commit's", expected=commit, found=named)
            path = inside(folder, member.name)
            if member.isdir():
                path.mkdir(parents=True, exist_ok=True)
                continue
            data = archive.extractfile(member) if member.isreg() else None
            if data is None:
                raise Refused("the archive holds something else than files", where=member.name)
            path.parent.mkdir(parents=True, exist_ok=True)
            _copy(data, path, 0o555 if member.mode & 0o100 else 0o444)


def _copy(data: IO[bytes], path: Path, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        while chunk := data.read(1 << 20):
            stream.write(chunk)
        stream.flush()
        os.fchmod(descriptor, mode)
        os.fsync(descriptor)
