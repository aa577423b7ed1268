"""Staging: exactly the reviewed commit, complete or not at all, and checked again before anything starts."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import shutil
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from coordinator_case import Case, commit, git, make_case

from d2lib.coordinator import stage as staging
from d2lib.coordinator.admit import run_foreground
from d2lib.coordinator.children import clean_environment
from d2lib.coordinator.contract import JOBS, job_parameters
from d2lib.coordinator.source import blob_sha1, check_checkout, check_folder, check_running, extract_archive, read_tree
from d2lib.coordinator.stage import rename_new, revalidate, stage
from d2lib.errors import Refused
from d2lib.evidence.sign import make_key, sign_receipt
from d2lib.files import canonical_json, record_tree
from d2lib.train.recipe import to_qualify


def small(folder: Path) -> Case:
    """A case whose checkout has no library: git alone."""
    return make_case(folder, library=False)


def recommit(case: Case) -> Case:
    return Case(case.folder, case.source, commit(case.source), case.inputs)


def extracted(case: Case) -> Path:
    """The commit's archive, checked against its tree."""
    folder = case.folder / "extracted"
    folder.mkdir()
    paths = case.plan().paths
    extract_archive(paths, folder)
    check_folder(read_tree(paths), folder, what="the archive")
    return folder


# --- the commit and the checkout


def test_archive_of_a_plain_commit_is_its_tree(tmp_path: Path) -> None:
    case = small(tmp_path)
    (case.source / "sp ace").mkdir()
    (case.source / "sp ace" / "ünï\tcode.txt").write_bytes(bytes(range(256)))
    case = recommit(case)
    folder = extracted(case)
    assert (folder / "sp ace" / "ünï\tcode.txt").read_bytes() == bytes(range(256))
    assert stat.S_IMODE((folder / "run.sh").stat().st_mode) == 0o555
    assert stat.S_IMODE((folder / ".gitignore").stat().st_mode) == 0o444


def test_blob_hash_is_gits_own(tmp_path: Path) -> None:
    case = small(tmp_path)
    assert blob_sha1(case.source / "run.sh") == git(case.source, "rev-parse", "HEAD:run.sh")


@pytest.mark.parametrize(
    ("attributes", "name", "message"),
    [
        ("secret.txt export-ignore", "secret.txt", "secret.txt is missing"),
        ("id.txt export-subst", "id.txt", "id.txt has other bytes"),
        ("id.txt text eol=crlf", "id.txt", "id.txt has other bytes"),
        ("id.txt ident", "id.txt", "id.txt has other bytes"),
    ],
)
def test_attributes_that_change_the_archive_refuse(tmp_path: Path, attributes: str, name: str, message: str) -> None:
    case = small(tmp_path)
    (case.source / ".gitattributes").write_text(attributes + "\n")
    (case.source / name).write_text("$Format:%H$ $Id$\n")
    with pytest.raises(Refused, match=message.replace(".", r"\.")):
        extracted(recommit(case))


def test_private_attributes_of_the_checkout_refuse_too(tmp_path: Path) -> None:
    case = small(tmp_path)
    (case.source / ".git" / "info").mkdir(exist_ok=True)
    (case.source / ".git" / "info" / "attributes").write_text("run.sh export-ignore\n")
    with pytest.raises(Refused, match=r"run\.sh is missing"):
        extracted(case)


def test_links_and_submodules_refuse(tmp_path: Path) -> None:
    case = small(tmp_path)
    (case.source / "link").symlink_to("run.sh")
    with pytest.raises(Refused, match="a symbolic link; where: link"):
        read_tree(recommit(case).plan().paths)
    git(case.source, "rm", "-q", "link")
    git(case.source, "update-index", "--add", "--cacheinfo", f"160000,{case.commit},sub")
    git(case.source, "commit", "-q", "-m", "sub")
    case.commit = git(case.source, "rev-parse", "HEAD")
    with pytest.raises(Refused, match="a submodule; where: sub"):
        read_tree(case.plan().paths)


def test_a_tag_is_no_commit(tmp_path: Path) -> None:
    case = small(tmp_path)
    git(case.source, "tag", "-a", "v1", "-m", "v1")
    case.commit = git(case.source, "rev-parse", "v1")
    with pytest.raises(Refused, match=r"--commit is not a commit.*found: a tag"):
        read_tree(case.plan().paths)


def test_an_unknown_commit_and_a_folder_without_git_refuse(tmp_path: Path) -> None:
    case = small(tmp_path)
    case.commit = "0" * 40
    with pytest.raises(Refused, match="git cannot answer about the source"):
        read_tree(case.plan().paths)
    shutil.rmtree(case.source / ".git")
    with pytest.raises(Refused, match="git cannot answer about the source"):
        read_tree(case.plan().paths)


def test_replacement_objects_are_not_followed(tmp_path: Path) -> None:
    """`git replace` would show another tree under the reviewed id."""
    case = small(tmp_path)
    reviewed = case.commit
    (case.source / "evil.py").write_text("")
    other = commit(case.source)
    git(case.source, "reset", "-q", "--hard", reviewed)
    git(case.source, "replace", reviewed, other)
    assert "evil.py" in git(case.source, "ls-tree", "-r", "--name-only", reviewed)  # what plain git shows
    assert "evil.py" not in read_tree(case.plan().paths)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: (s / "run.sh").write_text("changed"), "a change; where: run.sh"),
        (lambda s: (s / "run.sh").unlink(), "a change; where: run.sh"),
        (lambda s: (s / "run.sh").chmod(0o644), "a change; where: run.sh"),
        (lambda s: (s / "new.py").write_text(""), "not part of the commit; where: new.py"),
        (lambda s: commit(((s / "new.py").write_text("") and s) or s), "another commit is checked out"),
    ],
    ids=["changed", "removed", "mode", "untracked", "other-commit"],
)
def test_a_checkout_that_is_not_the_clean_commit_refuses(tmp_path: Path, change: object, message: str) -> None:
    case = small(tmp_path)
    tree = read_tree(case.plan().paths)
    check_checkout(case.plan().paths, tree)
    change(case.source)  # type: ignore[operator]
    with pytest.raises(Refused, match=message):
        check_checkout(case.plan().paths, tree)


def test_a_change_that_git_was_told_not_to_see_refuses(tmp_path: Path) -> None:
    case = small(tmp_path)
    git(case.source, "update-index", "--assume-unchanged", "run.sh")
    (case.source / "run.sh").write_text("changed")
    assert git(case.source, "status", "--porcelain") == ""
    with pytest.raises(Refused, match=r"run\.sh has other bytes"):
        check_checkout(case.plan().paths, read_tree(case.plan().paths))


def test_a_folder_inside_the_checkout_is_no_source(tmp_path: Path) -> None:
    case = small(tmp_path)
    paths = dataclasses.replace(case.plan().paths, source=case.source / "params")
    with pytest.raises(Refused, match="not the top of a checkout"):
        check_checkout(paths, read_tree(paths))


def test_git_variables_do_not_reach_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIT_DIR of another repository would make git answer about that one."""
    case = small(tmp_path / "one")
    other = small(tmp_path / "two")
    (other.source / "foreign.txt").write_text("")
    other = recommit(other)
    monkeypatch.setenv("GIT_DIR", str(other.source / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other.source))
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    assert not [name for name in clean_environment() if name.startswith("GIT_")]
    tree = read_tree(case.plan().paths)
    assert "foreign.txt" not in tree
    check_checkout(case.plan().paths, tree)


def test_the_running_library_must_be_the_commits(tmp_path: Path) -> None:
    case = small(tmp_path)
    (case.source / "d2lib" / "one.py").write_text("1\n")
    case = recommit(case)
    tree, package = read_tree(case.plan().paths), case.source / "d2lib"
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "one.pyc").write_bytes(b"")
    check_running(tree, package)
    (package / "one.py").write_text("2\n")
    with pytest.raises(Refused, match=r"not the reviewed one.*d2lib/one\.py has other bytes"):
        check_running(tree, package)
    (package / "one.py").write_text("1\n")
    (package / "two.py").write_text("")
    with pytest.raises(Refused, match=r"d2lib/two\.py is not part of the commit"):
        check_running(tree, package)


# --- the snapshot


@pytest.fixture(scope="module")
def admitted(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A case whose inputs are admitted; copied for every test, because git and hashes do not care where it lies."""
    case = make_case(tmp_path_factory.mktemp("admitted"))
    with pytest.MonkeyPatch.context() as patch:
        _use(case, patch)
        assert run_foreground(case.plan(), "admission") == 0
    return case


def _use(case: Case, patch: pytest.MonkeyPatch) -> None:
    """Let the checkout's own copy of the library be the running one."""
    for module in ("d2lib.coordinator.stage", "d2lib.evidence.environment"):
        patch.setattr(f"{module}.library_folder", lambda: case.source / "d2lib")


@pytest.fixture
def case(admitted: Case, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    """The admitted case, put back afterwards as it was."""
    _use(admitted, monkeypatch)
    kept, reviewed = admitted.folder.with_name("kept"), admitted.commit
    if not kept.exists():
        shutil.copytree(admitted.folder, kept, symlinks=True)
    yield admitted
    shutil.rmtree(admitted.folder)
    shutil.copytree(kept, admitted.folder, symlinks=True)
    admitted.commit = reviewed


def test_stage_makes_the_whole_snapshot(case: Case) -> None:
    digest = stage(case.plan())
    assert sorted(path.name for path in case.snapshot.iterdir()) == [
        "SOURCE_COMMIT",
        "STAGED.json",
        "logs",
        "parameters",
        "repo",
    ]
    assert (case.snapshot / "SOURCE_COMMIT").read_text() == case.commit + "\n"
    staged = json.loads((case.snapshot / "STAGED.json").read_bytes())
    assert digest.startswith("sha256:")
    assert staged["admitted"]["content"] == {"identities": {}, "recipe": {"objective": "ACE"}}
    assert set(staged["inputs"]) == set(case.inputs)
    assert set(staged["inputs"]["assembly"]["files"]) == {"MANIFEST.json", "shards/a.safetensors"}
    assert staged["source"]["run.sh"]["executable"] is True
    assert staged["contract"]["jobs"]["g2-dev"]["first"]["session"] == "d2full-pilot-1-full-g2-dev"
    assert "tmux" in staged["contract"]["jobs"]["full-fast"]["resume"]
    assert stat.S_IMODE(case.snapshot.stat().st_mode) == 0o700
    assert list(case.snapshot.parent.iterdir()) == [case.snapshot]
    assert revalidate(case.plan()) == staged


def test_a_snapshot_without_a_receipt_is_taken_once_it_is_checked_and_never_overwritten(case: Case) -> None:
    """What a stage leaves that ends between its last file and its receipt."""
    digest = stage(case.plan())
    before = record_tree(case.snapshot)
    assert stage(case.plan()) == digest
    assert record_tree(case.snapshot) == before
    path = case.snapshot / "repo" / "run.sh"
    path.chmod(0o755)
    path.write_text("#!/bin/sh\n# another\n")
    with pytest.raises(Refused, match=r"run\.sh has other bytes"):
        stage(case.plan())
    path.unlink()
    (case.snapshot / "STAGED.json").unlink()  # never left by a stage: it is written last
    with pytest.raises(Refused, match="the snapshot exists already"):
        stage(case.plan())


def test_a_staged_snapshot_is_never_staged_again(case: Case) -> None:
    assert run_foreground(case.plan(), "stage") == 0
    before = record_tree(case.snapshot)
    with pytest.raises(Refused, match="the snapshot exists already"):
        stage(case.plan())
    assert record_tree(case.snapshot) == before


@pytest.mark.parametrize("kind", ["folder", "file", "dangling link"])
def test_whatever_has_the_snapshots_name_refuses(case: Case, kind: str) -> None:
    if kind == "folder":
        case.snapshot.mkdir()
    elif kind == "file":
        case.snapshot.write_text("")
    else:
        case.snapshot.symlink_to("nowhere")
    with pytest.raises(Refused, match="the snapshot exists already"):
        stage(case.plan())


def test_stage_killed_in_the_middle_leaves_nothing_under_the_name(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL at the last possible moment, when every file is written and only the name is missing."""
    monkeypatch.setattr(staging, "rename_new", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    child = multiprocessing.get_context("fork").Process(target=stage, args=(case.plan(),))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert not case.snapshot.exists()
    left = list(case.snapshot.parent.iterdir())
    assert len(left) == 1
    assert left[0].name.startswith(".pilot-1-full.")
    monkeypatch.undo()
    _use(case, monkeypatch)
    stage(case.plan())  # what a kill left is in nobody's way
    assert case.snapshot.is_dir()


def test_a_failed_stage_cleans_up(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(staging, "rename_new", fail)
    with pytest.raises(OSError, match="No space"):
        stage(case.plan())
    assert list(case.snapshot.parent.iterdir()) == []


@pytest.mark.parametrize("renameat2", [True, False])
def test_renaming_cannot_overwrite(tmp_path: Path, renameat2: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not renameat2:
        monkeypatch.setattr(staging.ctypes, "CDLL", lambda *_, **__: object())
    working, final = tmp_path / "working", tmp_path / "final"
    working.mkdir()
    (working / "file").write_text("new")
    final.mkdir()
    with pytest.raises(Refused, match="never overwritten"):
        rename_new(working, final)
    assert list(final.iterdir()) == []
    final.rmdir()
    rename_new(working, final)
    assert (final / "file").read_text() == "new"
    assert not working.exists()


def test_inputs_that_are_not_admitted_refuse(case: Case) -> None:
    (case.output / "LEDGER.jsonl").unlink()
    with pytest.raises(Refused, match=r"the inputs are not admitted.*--check-inputs"):
        stage(case.plan())


def test_a_change_between_admission_and_stage_refuses(case: Case) -> None:
    (case.inputs["assembly"] / "MANIFEST.json").write_text("{ }")
    with pytest.raises(Refused, match="the input assembly changed since the admission"):
        stage(case.plan())
    (case.inputs["assembly"] / "MANIFEST.json").write_text("{}")
    path = case.output / "admission" / "attempt-1" / "admitted.json"
    path.chmod(0o644)
    path.write_text("{}")
    with pytest.raises(Refused, match=r"attempt-1/admitted\.json is not what admission made"):
        stage(case.plan())


def admit(case: Case, text: str) -> None:
    case.control("admission", files={"ATTEMPT/admitted.json": text})
    assert run_foreground(case.plan(), "admission") == 0


def test_admission_may_be_repeated_before_and_after_staging(case: Case) -> None:
    """Each attempt has its own product; the newest is staged, and a later one must let in the same."""
    same = '{"identities":{"pilot":"p"},"recipe":{"objective":"ACE"}}\n'
    admit(case, same)
    stage(case.plan())
    staged = revalidate(case.plan())
    assert staged["admitted"]["path"] == "admission/attempt-2/admitted.json"
    admit(case, '{"identities":{"pilot":"p"},"recipe":{"objective":"ACE"},"seed":"another"}\n')
    assert revalidate(case.plan()) == staged
    admit(case, '{"identities":{"pilot":"q"},"recipe":{"objective":"ACE"}}\n')
    with pytest.raises(Refused, match=r"the newest admission lets in another identities\.pilot; expected: p; found: q"):
        revalidate(case.plan())
    admit(case, same)
    assert revalidate(case.plan()) == staged
    _unlock(case.output / "admission" / "attempt-5" / "admitted.json").write_text("{}")
    with pytest.raises(Refused, match=r"attempt-5/admitted\.json is not what admission made"):
        revalidate(case.plan())


def with_known(case: Case, **names: str) -> Case:
    """The case with pins or a policy in its profile, committed and admitted again."""
    profile = yaml.safe_load(case.profile.read_text()) | names
    case.profile.write_text(yaml.safe_dump(profile))
    found = Case(case.folder, case.source, commit(case.source), case.inputs)
    recipe = to_qualify("ACE").model_dump(mode="json")
    identities = {"manifest": "sha256:" + "1" * 64}
    admit(found, json.dumps({"identities": identities, "recipe": recipe}))
    return found


PINS = {
    "source_commit": "d1dd41a",
    "source_map": None,
    "assembly": "assembly",
    "namespace": "pilot-1",
    "manifest": "sha256:" + "1" * 64,
    "sequences": {"train": 1, "dev": 1, "heldout_legal": 1, "heldout_general": 1},
    "rows": {"train": 1, "dev": 1, "heldout_legal": 1, "heldout_general": 1},
    "blocks": 1,
    "updates": 1,
    "objective": "ACE",
    "learning_rate": 2e-4,
    "epochs": 3,
    "sample_size": 10,
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (None, None),
        ("source_commit", "d1dd41b"),
        ("assembly", "assembly-c2"),
        ("namespace", "pilot-2"),
        ("manifest", "sha256:" + "2" * 64),
        ("objective", "KL"),
        ("learning_rate", 1e-4),
        ("epochs", 2),
    ],
)
def test_stage_compares_what_was_admitted_with_the_pins(case: Case, name: str | None, value: object) -> None:
    (case.inputs["pilot_source"].parent / "SOURCE_COMMIT").write_text("d1dd41a" + "0" * 33)
    (case.source / "pins.yaml").write_text(yaml.safe_dump(PINS | ({} if name is None else {name: value})))
    pinned = with_known(case, pins="pins.yaml")
    if name is None:
        stage(pinned.plan())
        parameters = yaml.safe_load((pinned.snapshot / "parameters" / "full-fast.yaml").read_text())
        assert parameters["pins"] == f"{pinned.snapshot}/repo/pins.yaml"
    else:
        with pytest.raises(Refused, match=f"{name} is not the pinned one"):
            stage(pinned.plan())


def test_the_sources_policy_reaches_every_phase_and_stage_refuses_an_unsigned_admission(case: Case) -> None:
    key = make_key(case.folder / "key.pem", case.folder / "key.json")
    (case.source / "policy.json").write_bytes(
        canonical_json({"keys": [key.model_dump(mode="json")], "phases": {"admission": {"keys": [key.keyid]}}})
    )
    policed = with_known(case, policy="policy.json")
    with pytest.raises(Refused, match="admission is not signed by whom the policy names"):
        stage(policed.plan())
    sign_receipt(policed.output / "admission" / "attempt-2", [case.folder / "key.pem"])
    stage(policed.plan())
    for job in JOBS:
        assert job_parameters(policed.plan(), job)["policy"] == str(policed.plan().repo / "policy.json")
    assert job_parameters(policed.plan(), "admission")["policy"] == str(policed.source / "policy.json")


@pytest.mark.parametrize(("name", "value"), [("threads", 77), ("device", "cuda")])
def test_a_pilot_that_computed_otherwise_is_refused_before_a_snapshot_is_made(
    case: Case, name: str, value: object
) -> None:
    admit(case, json.dumps({"identities": {}, "recipe": {"objective": "ACE"}, "arithmetic": {name: value}}))
    with pytest.raises(Refused, match=f"full training would compute with another {name} than its pilot"):
        stage(case.plan())
    assert not case.snapshot.exists()


def test_an_admission_by_another_library_refuses(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("d2lib.coordinator.admit.library_sha256", lambda: "sha256:" + "0" * 64)
    with pytest.raises(Refused, match="d2lib changed since the admission"):
        stage(case.plan())


def test_an_admission_of_other_paths_refuses(case: Case) -> None:
    moved = case.folder / "inputs" / "moved.json"
    shutil.copy(case.inputs["g1"], moved)
    other = Case(case.folder, case.source, case.commit, case.inputs | {"g1": moved})
    with pytest.raises(Refused, match="the admission ran with another g1"):
        stage(other.plan())


def test_a_pilot_of_another_namespace_refuses(case: Case) -> None:
    case.inputs["pilot_receipt"].write_text('{"namespace": "pilot-2"}')
    with pytest.raises(Refused, match="the pilot's receipt has another namespace; expected: pilot-1; found: pilot-2"):
        stage(case.plan())


def test_a_profile_that_the_commit_lacks_refuses(case: Case) -> None:
    (case.source / ".gitignore").write_text("__pycache__/\nmine.yaml\n")
    case.commit = commit(case.source)
    shutil.copy(case.profile, case.source / "mine.yaml")
    plan = case.plan()
    object.__setattr__(plan, "profile_name", "mine.yaml")
    with pytest.raises(Refused, match=r"the profile is not part of the commit; found: mine\.yaml"):
        stage(plan)


# --- before every later phase


def _unlock(path: Path) -> Path:
    path.chmod(0o644)
    return path


CHANGES = {
    "a source byte": (
        lambda c: _unlock(c.snapshot / "repo" / "notebooks" / "g2.ipynb").write_text("[]"),
        r"the snapshot's source differs.*notebooks/g2\.ipynb has other bytes",
    ),
    "a source file gone": (lambda c: (c.snapshot / "repo" / "run.sh").unlink(), r"run\.sh is missing"),
    "a source file more": (
        lambda c: (c.snapshot / "repo" / "d2lib" / "extra.py").write_text(""),
        r"d2lib/extra\.py is not part of the commit",
    ),
    "byte code beside the source": (
        lambda c: (c.snapshot / "repo" / "d2lib" / "errors.pyc").write_bytes(b""),
        r"d2lib/errors\.pyc is not part of the commit",
    ),
    "a link in the source": (lambda c: (c.snapshot / "repo" / "link").symlink_to("run.sh"), "link"),
    "an executable bit": (lambda c: (c.snapshot / "repo" / "run.sh").chmod(0o444), r"run\.sh is not executable"),
    "a file beside the source": (
        lambda c: (c.snapshot / "sitecustomize.py").write_text(""),
        r"the snapshot holds a file that was not staged; where: .*sitecustomize\.py",
    ),
    "the commit's id": (
        lambda c: _unlock(c.snapshot / "SOURCE_COMMIT").write_text("0" * 40),
        "the snapshot is of another commit",
    ),
    "a parameter file": (
        lambda c: _unlock(c.snapshot / "parameters" / "full-fast.yaml").write_text("run: elsewhere\n"),
        r"a staged parameter file differs; found: parameters/full-fast\.yaml",
    ),
    "an input's byte": (
        lambda c: (c.inputs["assembly"] / "shards" / "a.safetensors").write_bytes(b"rows of b"),
        r"the input --assembly is not what was staged.*shards/a\.safetensors has other bytes",
    ),
    "an input's file more": (
        lambda c: (c.inputs["assembly"] / "shards" / "b.safetensors").write_bytes(b""),
        r"shards/b\.safetensors is new",
    ),
    "an input's file gone": (
        lambda c: (c.inputs["pilot_source"] / "MANIFEST.json").unlink(),
        r"the input --pilot-source is not what was staged.*MANIFEST\.json is missing",
    ),
    "a pilot's checkpoint": (
        lambda c: (c.inputs["pilot_receipt"].parent / "fast.pt").write_bytes(b"other"),
        "the input pilot changed since the admission",
    ),
    "an input gone": (lambda c: c.inputs["k2_legal"].unlink(), "--k2-legal is missing"),
    "an input's link": (
        lambda c: (c.inputs["g1"].rename(c.folder / "g1.moved"), c.inputs["g1"].symlink_to(c.folder / "g1.moved")),
        "not a link",
    ),
    "what was admitted": (
        lambda c: _unlock(c.output / "admission" / "attempt-1" / "admitted.json").write_text("{}"),
        r"admitted\.json is not what was staged",
    ),
    "the checkout": (lambda c: (c.source / "run.sh").write_text("x"), "the source is not clean"),
    "no snapshot": (lambda c: (c.snapshot / "STAGED.json").unlink(), "nothing is staged here"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_every_later_phase_names_what_differs(case: Case, what: str) -> None:
    stage(case.plan())
    change, message = CHANGES[what]
    change(case)
    with pytest.raises(Refused, match=message):
        revalidate(case.plan())


def test_other_flags_than_the_staged_ones_refuse(case: Case) -> None:
    stage(case.plan())
    moved = case.folder / "inputs" / "moved.json"
    shutil.copy(case.inputs["g1"], moved)
    other = Case(case.folder, case.source, case.commit, case.inputs | {"g1": moved})
    with pytest.raises(Refused, match=r"the command contract differs.*arguments\.g1"):
        revalidate(other.plan())


def test_a_hand_edited_list_of_files_refuses(case: Case) -> None:
    stage(case.plan())
    path = case.snapshot / "STAGED.json"
    staged = json.loads(path.read_bytes())
    staged["source"]["run.sh"]["blob"] = "sha1:" + "0" * 40
    _unlock(path).write_text(json.dumps(staged))
    with pytest.raises(Refused, match=r"STAGED.json lists another file than the commit.*where: run\.sh"):
        revalidate(case.plan())
