"""Staging: the reviewed commit into a new snapshot, and the same checks again before every later phase.

SNAPSHOT/repo/           the commit's files, read-only, hashed against the commit's tree
SNAPSHOT/parameters/     one YAML a job and kind of start
SNAPSHOT/SOURCE_COMMIT   the commit's id
SNAPSHOT/STAGED.json     inputs, admitted recipe, commands, files
SNAPSHOT/logs/, NAME.sh  made by the starts
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from d2lib.coordinator.admit import admitted, check_namespace, check_read
from d2lib.coordinator.contract import INPUTS, PROFILE, Paths, Plan, absolute, job_parameters
from d2lib.coordinator.inputs import check_inputs_unchanged, record_inputs
from d2lib.coordinator.profile import load_profile
from d2lib.coordinator.receipts import check_output, done_receipt, product
from d2lib.coordinator.source import (
    CAUSES,
    Tree,
    check_checkout,
    check_folder,
    check_running,
    extract_archive,
    read_tree,
)
from d2lib.errors import Refused
from d2lib.evidence.environment import library_folder
from d2lib.evidence.receipts import read_receipt
from d2lib.evidence.sign import signatures_in_words
from d2lib.files import (
    canonical_json,
    fsync_folder,
    parse_json,
    read_json,
    record_file,
    sha256_bytes,
    sha256_file,
    write_exclusive,
    write_json,
)
from d2lib.strict import differences

if TYPE_CHECKING:
    from d2lib.params import StageParams

SCHEMA_VERSION = 1
_RENAME_NOREPLACE = 1
_AT_FDCWD = -100


def reviewed_tree(plan: Plan) -> Tree:
    """The commit's files, after the checkout, the profile and the running code proved to be the commit's."""
    tree = read_tree(plan.paths)
    check_checkout(plan.paths, tree)
    check_running(tree, library_folder())
    if plan.profile_name not in tree:
        raise Refused("the profile is not part of the commit", found=plan.profile_name, where=plan.paths.commit)
    return tree


def stage(plan: Plan) -> str:
    """Make the snapshot, complete or not at all; returns the digest of STAGED.json.

    A snapshot that an earlier attempt made, which ended before its receipt, is taken as it is when everything in it is
    what would be staged now.

    Raises:
        Refused: the snapshot exists, the source is not the clean reviewed commit, the inputs are not admitted or
            changed since, or the archive differs from the commit.
    """
    snapshot = plan.paths.snapshot
    if left_whole(plan):
        revalidate(plan)
        return str(sha256_file(plan.staged))
    refuse_existing(snapshot)
    if not snapshot.parent.is_dir():
        raise Refused("the snapshot's parent folder is missing", where=snapshot.parent, remedy="make it")
    tree = reviewed_tree(plan)
    check_namespace(plan)
    inputs = record_inputs(plan.paths.inputs)
    admission = admitted(plan, inputs)
    check_known(plan, admission.content)
    working = snapshot.with_name(f".{snapshot.name}.{secrets.token_hex(6)}.part")
    try:
        working.mkdir(mode=0o700)
        (working / "repo").mkdir(mode=0o700)
        extract_archive(plan.paths, working / "repo")
        check_folder(tree, working / "repo", what="the archive", remedy=CAUSES)
        for name, text in plan.parameter_files().items():
            (working / name).parent.mkdir(exist_ok=True, mode=0o700)
            write_exclusive(working / name, text.encode(), mode=0o400)
        (working / "logs").mkdir(mode=0o700)
        write_exclusive(working / "SOURCE_COMMIT", f"{plan.paths.commit}\n".encode())
        files = {}
        for name, blob in sorted(tree.items()):
            record = record_file(working / "repo" / name)
            files[name] = {
                "blob": f"sha1:{blob.sha1}",
                "executable": blob.executable,
                "sha256": str(record.sha256),
                "size": record.size,
            }
        staged = {
            "schema_version": SCHEMA_VERSION,
            "namespace": plan.paths.namespace,
            "contract": plan.contract(),
            "inputs": inputs,
            "admitted": {
                "content": admission.content,
                "path": admission.path,
                "sha256": admission.sha256,
                "receipt": admission.receipt,
                "receipt_sha256": admission.receipt_sha256,
            },
            "source": files,
        }
        digest = write_json(working / "STAGED.json", staged)
        rename_new(working, snapshot)
    finally:
        shutil.rmtree(working, ignore_errors=True)
    return str(digest)


def left_whole(plan: Plan) -> bool:
    """Whether a snapshot is there with its STAGED.json, which is written last, and no receipt says who made it."""
    return plan.staged.is_file() and done_receipt(plan.paths.output, "stage") is None


def check_known(plan: Plan, content: Any) -> None:
    """What was admitted is as the source's pins say, its receipt is signed as the source's policy asks, and training
    will have the pilot's device and threads; training itself compares torch and precision too.

    Args:
        content: of admitted.json.

    Raises:
        Refused: names the pin or the part of the arithmetic that differs, or the signature that is missing.
    """
    from d2lib.train.pins import read_pins, source_commit  # when it is needed: the coordinator knows no arithmetic
    from d2lib.train.recipe import from_receipt

    known = plan.known(plan.paths.source)
    if "pins" in known:
        pins, where = read_pins(Path(known["pins"])), Path(known["pins"])
        identities = content.get("identities", {})
        pins.compare(
            where,
            assembly=plan.paths.assembly.name,
            namespace=plan.paths.pilot_namespace,
            manifest=identities.get("manifest"),
            source_commit=source_commit(plan.paths.pilot_source),
        )
        pins.compare_recipe(where, from_receipt(content, where=where))
    pilot, training = content.get("arithmetic") or {}, job_parameters(plan, "full-fast")
    for name in ("device", "threads"):
        if name in pilot and pilot[name] != training[name]:
            raise Refused(
                f"full training would compute with another {name} than its pilot",
                expected=pilot[name],
                found=training[name],
                where=PROFILE,
                remedy="correct the profile in a commit that is reviewed, and stage that",
            )
    policy = Path(known["policy"]) if "policy" in known else None
    signatures_in_words(plan.paths.output, policy, ("admission",))


def plan_of(params: StageParams, output: Path) -> Plan:
    """The plan that a stage notebook's parameters describe.

    Args:
        params: paths and commit; the profile is the source's own.
        output: the run root of the full run.
    """
    places = {name: absolute(getattr(params, name)) for name in ("source", "snapshot", *INPUTS)}
    paths = Paths(commit=params.commit, output=output, **places)
    return Plan(paths, load_profile(paths.source / PROFILE), PROFILE)


def check_recorded(plan: Plan) -> str:
    """STAGED.json is the one that the stage's receipt recorded; returns its digest, raises Refused."""
    found = done_receipt(plan.paths.output, "stage")
    if found is None:
        raise Refused(
            "no receipt says that the snapshot was staged",
            expected="a receipt of stage with status done",
            where=plan.paths.output,
            remedy="--execute --phase stage: it takes the snapshot that is there once it is checked",
        )
    path, receipt = found
    digest, recorded = str(sha256_file(plan.staged)), (receipt.result or {}).get("staged")
    if digest != recorded:
        raise Refused("STAGED.json is not what was staged", expected=recorded, found=digest, where=path)
    return digest


def revalidate(plan: Plan) -> dict[str, Any]:
    """Everything that was staged is as it was: source, file set, command contract, inputs, admission.

    Returns: STAGED.json.
    Raises:
        Refused: names the first thing that differs.
    """
    snapshot = plan.paths.snapshot
    if not plan.staged.is_file():
        raise Refused(
            "nothing is staged here", expected="STAGED.json", where=snapshot, remedy="--execute --phase stage"
        )
    staged = read_json(plan.staged)
    if not isinstance(staged, dict) or staged.get("schema_version") != SCHEMA_VERSION:
        raise Refused("STAGED.json has another schema", expected=SCHEMA_VERSION, where=plan.staged)
    commit = (snapshot / "SOURCE_COMMIT").read_text(encoding="utf-8").strip()
    if commit != plan.paths.commit:
        raise Refused("the snapshot is of another commit", expected=plan.paths.commit, found=commit, where=snapshot)
    check_contract(plan, staged.get("contract"))
    tree = reviewed_tree(plan)
    check_folder(tree, plan.repo, what="the snapshot's source")
    _check_staged_files(tree, staged, plan)
    inputs = check_inputs_unchanged(staged["inputs"], plan.paths.inputs)
    for what, name, expected in (
        ("admitted.json", staged["admitted"]["path"], staged["admitted"]["sha256"]),
        ("the admission's receipt", staged["admitted"]["receipt"], staged["admitted"]["receipt_sha256"]),
    ):
        found = str(sha256_file(plan.paths.output / name))
        if found != expected:
            raise Refused(f"{what} is not what was staged", expected=expected, found=found, where=name)
    check_read(plan, read_receipt(plan.paths.output / staged["admitted"]["receipt"]), inputs)
    check_admitted_again(plan, staged["admitted"]["content"])
    return staged


def check_admitted_again(plan: Plan, staged: Any) -> None:
    """The newest admission, which the jobs' notebooks read, lets in what was staged; it may have been repeated since.

    Raises:
        Refused: its recipe or an identity is another.
    """
    found = done_receipt(plan.paths.output, "admission")
    if found is None:
        raise Refused("the staged admission is not in the ledger", where=plan.paths.output)
    made = product(found[1], "admission")
    check_output(plan.paths.output, found[1], made)
    now = read_json(plan.paths.output / made)
    for name in ("recipe", "identities"):
        for field, before, after in differences(staged.get(name), now.get(name), name):
            raise Refused(
                f"the newest admission lets in another {field}",
                expected=before,
                found=after,
                where=plan.paths.output / made,
                remedy="another admission is another run: stage it with a snapshot and output of its own",
            )


def check_contract(plan: Plan, staged: Any) -> None:
    """The commands, parameters and profile that would be used now are the staged ones; names the first that is not.

    Raises:
        Refused: with the path of the field that differs, and both values.
    """
    difference = next(differences(staged, parse_json(canonical_json(plan.contract()))), None)
    if difference is not None:
        field, before, now = difference
        raise Refused(
            "the command contract differs from the staged one",
            expected=f"{field} = {before!r}",
            found=repr(now),
            where=plan.staged,
            remedy="give the flags, the profile and the Python with which the run was staged",
        )
    for name, text in plan.parameter_files().items():
        path = plan.paths.snapshot / name
        if str(sha256_file(path)) != str(sha256_bytes(text.encode())):
            raise Refused("a staged parameter file differs", found=name, where=path)


def _check_staged_files(tree: Tree, staged: dict[str, Any], plan: Plan) -> None:
    expected = {name: (f"sha1:{blob.sha1}", blob.executable) for name, blob in tree.items()}
    found = {name: (entry["blob"], entry["executable"]) for name, entry in staged["source"].items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise Refused(
                "STAGED.json lists another file than the commit",
                expected=expected.get(name),
                found=found.get(name),
                where=name,
            )
    allowed = {"repo", "parameters", "logs", "SOURCE_COMMIT", "STAGED.json"}
    for path in sorted(plan.paths.snapshot.iterdir()):
        if path.name not in allowed and path.suffix != ".sh":
            raise Refused("the snapshot holds a file that was not staged", where=path)


def refuse_existing(snapshot: Path) -> None:
    """Nothing may be at the snapshot's place; raises Refused."""
    if os.path.lexists(snapshot):
        raise Refused(
            "the snapshot exists already and is never overwritten",
            where=snapshot,
            remedy="start its next phase; another commit needs a new place for the snapshot",
        )


def rename_new(working: Path, final: Path) -> None:
    """Give a finished folder its name in one step that cannot overwrite; durable on return.

    Raises:
        Refused: the name was taken meanwhile.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    rename = getattr(libc, "renameat2", None)
    code = errno.ENOSYS
    if rename is not None:
        done = rename(_AT_FDCWD, os.fsencode(working), _AT_FDCWD, os.fsencode(final), _RENAME_NOREPLACE)
        code = 0 if done == 0 else ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL):  # an old kernel or a file system without it: reserve the name first
        try:
            final.mkdir(mode=0o700)
        except FileExistsError:
            refuse_existing(final)
        os.rename(working, final)  # replaces nothing but an empty folder
    elif code == errno.EEXIST:
        refuse_existing(final)
    elif code:
        raise OSError(code, os.strerror(code), str(final))
    fsync_folder(final.parent)
