"""The journal: any interruption ends in the same bytes, and nothing foreign is ever read as a score."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gates_cases import COMPUTATION, K, anchors, contract, digest, identities, names, scored, scores
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import d2lib.files
from d2lib.errors import Refused
from d2lib.files import canonical_json, write_json
from d2lib.gates.g2 import build_part
from d2lib.gates.journal import Contract, Journal

SPLIT = "heldout_general"
CONTRACT = contract(SPLIT)
SCORES = {score.request: score for score in scores(SPLIT)}
WHOLE = canonical_json(build_part(CONTRACT, SCORES.values()).model_dump())


class Killed(BaseException):
    """Stands for a kill: nothing may catch it."""


def work(folder: Path, scored_now: list[str] | None = None) -> bytes:
    """Score what is pending; returns SPLIT.json's bytes."""
    with Journal.open(folder, CONTRACT) as journal:
        for request in journal.pending:
            journal.add(SCORES[request])
            if scored_now is not None:
                scored_now.append(request)
        return canonical_json(build_part(CONTRACT, journal.completed.values()).model_dump())


def test_uninterrupted(tmp_path: Path) -> None:
    assert work(tmp_path / "j") == WHOLE
    assert (tmp_path / "j").stat().st_mode & 0o777 == 0o700
    files = sorted((tmp_path / "j").iterdir())
    assert [file.name for file in files] == ["contract.json", *(f"{name}.json" for name in names(SPLIT))]
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    again: list[str] = []
    assert work(tmp_path / "j", again) == WHOLE
    assert again == []


@pytest.mark.parametrize("mask", [0o000, 0o077, 0o277])
def test_modes_do_not_hang_on_the_umask(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        with Journal.open(tmp_path / "j", CONTRACT) as journal:
            journal.add(SCORES[names(SPLIT)[0]])
    finally:
        os.umask(before)
    assert (tmp_path / "j").stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "j").iterdir()} == {0o600}


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stops=st.lists(st.integers(0, 40), max_size=4))
def test_any_interruption_then_resume_gives_the_same_bytes(
    stops: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Die at the n-th system call that makes or names a file, as often as the list says, then finish."""
    folder = tmp_path_factory.mktemp("j") / "j"
    real: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in ("link", "unlink", "fsync", "mkdir")}
    for stop in stops:
        left = [stop]

        def dying(call: Callable[..., Any], left: list[int] = left) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                left[0] -= 1
                if left[0] < 0:
                    raise Killed
                return call(*args, **kwargs)

            return run

        with pytest.MonkeyPatch.context() as patch:
            for name, call in real.items():
                patch.setattr(d2lib.files.os, name, dying(call))
            with contextlib.suppress(Killed):
                assert work(folder) == WHOLE
    assert work(folder) == WHOLE
    assert sorted(path.name for path in folder.iterdir()) == ["contract.json", *(f"{n}.json" for n in names(SPLIT))]


KILL = """
import os, signal, sys
from pathlib import Path
import d2lib.files
sys.path.insert(0, {tests!r})
import test_gates_journal as case
left = [int(sys.argv[2])]
def dying(call):
    def run(*args, **kwargs):
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)
    return run
for name in ("link", "unlink", "fsync"):
    setattr(d2lib.files.os, name, dying(getattr(os, name)))
case.work(Path(sys.argv[1]))
"""


@pytest.mark.parametrize("stop", [0, 3, 18])
def test_real_kill_then_resume_gives_the_same_bytes(stop: int, tmp_path: Path) -> None:
    code = textwrap.dedent(KILL).format(tests=str(Path(__file__).parent))
    command = [sys.executable, "-c", code, str(tmp_path / "j"), str(stop)]
    assert subprocess.run(command, timeout=60, check=False).returncode == -signal.SIGKILL
    kept = set((tmp_path / "j").glob("[!.]*.json")) - {tmp_path / "j" / "contract.json"}
    now: list[str] = []
    assert work(tmp_path / "j", now) == WHOLE
    assert {f"{name}.json" for name in now} == {f"{name}.json" for name in names(SPLIT)} - {p.name for p in kept}
    assert not list((tmp_path / "j").glob(".*"))


def test_second_writer_is_refused_and_the_lock_goes_with_its_holder(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "j", CONTRACT), pytest.raises(Refused, match="another process"):
        Journal.open(tmp_path / "j", CONTRACT)
    Journal.open(tmp_path / "j", CONTRACT).close()


def changed(**fields: Any) -> Contract:
    return CONTRACT.model_copy(update=fields)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        *[
            (changed(identities=identities(**{field: digest("e")})), f"identities.{field}")
            for field in ("namespace", "manifest", "native", "drafter", "adapter", "pilot", "recipe", "source")
        ],
        (changed(k2=digest("e")), "k2"),
        (changed(computation=None), "computation"),
        (changed(computation=COMPUTATION.model_copy(update={"torch": "2.13.0+cu130"})), "computation.torch"),
        (changed(computation=COMPUTATION.model_copy(update={"device": "cpu, other, AVX2"})), "computation.device"),
        (changed(computation=COMPUTATION.model_copy(update={"batched": False})), "computation.batched"),
        (changed(split="dev"), "split"),
        (changed(block_size=4), "block_size"),
        (contract(SPLIT, 11), f"population.{SPLIT}-010"),
        (
            Contract.of(SPLIT, K, digest("c"), identities(), {n: anchors(39) for n in names(SPLIT)}),
            f"population.{SPLIT}-000.anchors, population.{SPLIT}-000.rounds",
        ),
    ],
)
def test_another_contract_is_refused_and_its_field_named(other: Contract, named: str, tmp_path: Path) -> None:
    work(tmp_path / "j")
    before = {path: path.read_bytes() for path in (tmp_path / "j").iterdir()}
    with pytest.raises(Refused, match="another contract") as caught:
        Journal.open(tmp_path / "j", other)
    assert named in str(caught.value)
    assert {path: path.read_bytes() for path in (tmp_path / "j").iterdir()} == before


def rewrite(path: Path, data: bytes) -> None:
    path.unlink()
    path.write_bytes(data)
    path.chmod(0o600)


def truncate(folder: Path) -> None:
    path = folder / f"{SPLIT}-003.json"
    rewrite(path, path.read_bytes()[:-20])


def empty(folder: Path) -> None:
    rewrite(folder / f"{SPLIT}-003.json", b"")


def truncate_contract(folder: Path) -> None:
    rewrite(folder / "contract.json", (folder / "contract.json").read_bytes()[:-2])


def no_contract(folder: Path) -> None:
    (folder / "contract.json").unlink()


def pretty(folder: Path) -> None:
    path = folder / f"{SPLIT}-003.json"
    rewrite(path, json.dumps(json.loads(path.read_bytes()), indent=1).encode())


def pretty_contract(folder: Path) -> None:
    path = folder / "contract.json"
    rewrite(path, json.dumps(json.loads(path.read_bytes())).encode())


def another_request(folder: Path) -> None:
    rewrite(folder / f"{SPLIT}-003.json", (folder / f"{SPLIT}-004.json").read_bytes())


def another_contract(folder: Path) -> None:
    path = folder / f"{SPLIT}-003.json"
    rewrite(path, canonical_json({**json.loads(path.read_bytes()), "contract": digest("e")}) + b"\n")


def another_count(folder: Path) -> None:
    path = folder / f"{SPLIT}-003.json"
    entry = json.loads(path.read_bytes())
    entry["score"]["candidate"]["kl_sum"][0] = 0.0
    rewrite(path, canonical_json(entry) + b"\n")


def signed_but_short(folder: Path) -> None:
    """A score that is whole in itself and carries its digest, but over other rounds."""
    body = scored(f"{SPLIT}-003", 8, rounds=39).model_dump()
    entry = json.loads((folder / f"{SPLIT}-003.json").read_bytes())
    entry |= {"score": body, "score_sha256": str(d2lib.files.sha256_bytes(canonical_json(body)))}
    rewrite(folder / f"{SPLIT}-003.json", canonical_json(entry) + b"\n")


def no_score(folder: Path) -> None:
    rewrite(folder / f"{SPLIT}-003.json", b"[]\n")


def extra(folder: Path) -> None:
    write_json(folder / f"{SPLIT}-999.json", {}, mode=0o600)


def extra_working(folder: Path) -> None:
    (folder / ".elsewhere.json.0123456789ab.part").write_bytes(b"")


def extra_folder(folder: Path) -> None:
    (folder / "more").mkdir()


def symbolic(folder: Path) -> None:
    path = folder / f"{SPLIT}-003.json"
    path.rename(folder.parent / "away.json")
    path.symlink_to(folder.parent / "away.json")


def pipe(folder: Path) -> None:
    (folder / f"{SPLIT}-003.json").unlink()
    os.mkfifo(folder / f"{SPLIT}-003.json", 0o600)


def hard(folder: Path) -> None:
    os.link(folder / f"{SPLIT}-003.json", folder.parent / "twin.json")


def readable(folder: Path) -> None:
    (folder / f"{SPLIT}-003.json").chmod(0o644)


def open_folder(folder: Path) -> None:
    folder.chmod(0o755)


def linked_folder(folder: Path) -> None:
    folder.rename(folder.parent / "real")
    folder.symlink_to(folder.parent / "real")


def a_file(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    folder.write_bytes(b"")


DAMAGES = [truncate, empty, truncate_contract, no_contract, pretty, pretty_contract, another_request, another_contract,
           another_count, signed_but_short, no_score, extra, extra_working, extra_folder, symbolic, pipe, hard,
           readable, open_folder, linked_folder, a_file]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda function: function.__name__)
def test_a_damaged_journal_is_refused(damage: Callable[[Path], None], tmp_path: Path) -> None:
    work(tmp_path / "j")
    damage(tmp_path / "j")
    with pytest.raises(Refused):
        Journal.open(tmp_path / "j", CONTRACT)


def test_a_request_is_never_overwritten_and_must_belong(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "j", CONTRACT) as journal:
        first = names(SPLIT)[0]
        journal.add(SCORES[first])
        with pytest.raises(Refused, match="never overwritten"):
            journal.add(SCORES[first])
        with pytest.raises(Refused, match="not in the population"):
            journal.add(scored("dev-000", 1))
        with pytest.raises(Refused, match="rounds"):
            journal.add(scored(names(SPLIT)[1], 1, rounds=3))
        assert journal.pending == names(SPLIT)[1:]
