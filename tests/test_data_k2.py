"""Committed-K2 trajectories: one clear refusal for everything that can be wrong, and the population that they give."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from data_case import GEN_START, LENGTHS, write_dataset, write_trajectory
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_config

from d2lib.data.k2 import K2File, K2Header, K2Round, complete, leading_matches, write_k2
from d2lib.data.manifest import Manifest
from d2lib.errors import Refused
from d2lib.files import sha256_file

Lines = list[dict[str, Any]]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest, Path]:
    folder, config = tmp_path_factory.mktemp("k2"), tiny_config()
    manifest = write_dataset(folder, config)
    return folder, manifest, write_trajectory(folder, manifest, "dev", folder / "k2/dev.jsonl", block_size=5)


def test_a_trajectory_comes_back(live: tuple[Path, Manifest, Path]) -> None:
    folder, manifest, path = live
    found = K2File.load(path, manifest, folder)
    assert found.sha256 == sha256_file(path)
    assert found.header.split == "dev"
    assert list(found.rounds) == ["dev-00", "dev-01"]
    assert found.coverage_problems(manifest) == []
    assert {count.accepted for rounds in found.rounds.values() for count in rounds} == {0, 1, 2}
    population = found.population(manifest, "dev")
    for request, rows in zip(population, LENGTHS["dev"], strict=True):
        anchors = [found.anchor for found in found.rounds[request]]
        assert population[request] == [anchor for anchor in anchors if anchor + 5 <= rows - 1]
        assert anchors[0] == GEN_START
        assert len(population[request]) < len(anchors)  # the tail is in the file and not in the population


@settings(max_examples=50, deadline=None)
@given(anchor=st.integers(0, 40), rows=st.integers(2, 40), slots=st.integers(1, 9))
def test_a_round_is_complete_when_all_its_targets_exist(anchor: int, rows: int, slots: int) -> None:
    exists = set(range(rows))
    assert complete(anchor, rows, slots) == all(anchor + 1 + i in exists for i in range(slots))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=2, max_size=6), st.integers(0, 5), st.tuples(*[st.integers(0, 2)] * 2))
def test_leading_matches_stop_at_the_first_difference(tokens: list[int], anchor: int, drafts: tuple[int, int]) -> None:
    after = tokens[anchor + 1 :]
    wanted = max(n for n in range(3) if list(drafts[:n]) == after[:n])
    assert leading_matches(drafts, tokens, anchor) == wanted


def set_field(line: int, **fields: Any) -> Callable[[Lines], None]:
    return lambda lines: lines[line].update(fields)


def drop_field(line: int, name: str) -> Callable[[Lines], None]:
    return lambda lines: lines[line].pop(name)


def repeat(line: int) -> Callable[[Lines], None]:
    return lambda lines: lines.insert(line, lines[line])


def accept_one_more(lines: Lines) -> None:
    """A round that claims one more than the committed tokens have, in an otherwise consistent chain's last round."""
    at = max(i for i, line in enumerate(lines) if i and line["request"] == "dev-01" and line["accepted"] < 2)
    del lines[at + 1 :]
    lines[at]["accepted"] += 1
    lines[at]["next_anchor"] += 1


def past_the_end(lines: Lines) -> None:
    lines[-1].update(accepted=2, next_anchor=lines[-1]["anchor"] + 3)


# spoiled lines (the header is number 0), what is said, the line that is named
WRONG: dict[str, tuple[Callable[[Lines], Any], str, int]] = {
    "no header": (lambda lines: lines.pop(0), "a K2 line is malformed", 1),
    "another namespace": (set_field(0, namespace="x"), "of another namespace", 1),
    "another kind of file": (set_field(0, kind="k5"), "kind", 1),
    "an unknown header field": (set_field(0, rounds=3), "rounds", 1),
    "a request of another split": (set_field(1, request="train-00"), "request is not in the split", 2),
    "an unknown request": (set_field(3, request="dev-77"), "request is not in the split", 4),
    "a late first anchor": (set_field(1, anchor=GEN_START + 1), r"an anchor does not follow.*\(gen_start\)", 2),
    "a gap": (lambda lines: lines.pop(2), "an anchor does not follow", 3),
    "a round twice": (repeat(2), "an anchor does not follow", 4),
    "a next anchor that is too far": (
        lambda lines: lines[1].update(next_anchor=lines[1]["next_anchor"] + 1),
        "a next anchor contradicts its round",
        2,
    ),
    "three accepted": (set_field(1, accepted=3), "accepted", 2),
    "minus one accepted": (set_field(1, accepted=-1), "accepted", 2),
    "a fraction accepted": (set_field(1, accepted=0.5), "accepted", 2),
    "a truth value accepted": (set_field(1, accepted=True), "accepted", 2),
    "one draft": (set_field(1, drafts=[1]), "drafts", 2),
    "three drafts": (set_field(1, drafts=[1, 2, 3]), "drafts", 2),
    "a draft outside the vocabulary": (set_field(1, drafts=[1, 53]), "not in the vocabulary", 2),
    "a draft below zero": (set_field(1, drafts=[-1, 3]), "not in the vocabulary", 2),
    "a field missing": (drop_field(1, "accepted"), "accepted", 2),
    "an unknown field": (set_field(1, time=1), "time", 2),
}


def spoil(path: Path, target: Path, change: Callable[[Lines], Any]) -> Path:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines)
    target.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return target


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_line_is_named(name: str, live: tuple[Path, Manifest, Path], tmp_path: Path) -> None:
    _, manifest, path = live
    change, message, line = WRONG[name]
    bad = spoil(path, tmp_path / "bad.jsonl", change)
    with pytest.raises(Refused, match=message) as caught:
        K2File.load(bad, manifest)
    assert f"{bad}, line {line}" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cut off"),
        ("{}", "cut off"),
        ("{\n", "line 1"),
        ("\n", "line 1"),
        ('{"a":1,"a":1}\n', "a JSON key stands twice"),
        ('{"a":NaN}\n', "not finite"),
        ("[]\n", "a K2 line is malformed"),
    ],
)
def test_what_is_no_strict_json_line_is_refused(
    text: str, message: str, live: tuple[Path, Manifest, Path], tmp_path: Path
) -> None:
    (tmp_path / "bad.jsonl").write_text(text)
    with pytest.raises(Refused, match=message):
        K2File.load(tmp_path / "bad.jsonl", live[1])
    with pytest.raises(Refused, match="cannot be read"):
        K2File.load(tmp_path / "missing.jsonl", live[1])


def test_a_file_cut_in_a_line_is_refused(live: tuple[Path, Manifest, Path], tmp_path: Path) -> None:
    _, manifest, path = live
    (tmp_path / "bad.jsonl").write_bytes(path.read_bytes()[:-1])
    with pytest.raises(Refused, match="cut off"):
        K2File.load(tmp_path / "bad.jsonl", manifest)


def test_acceptance_is_checked_against_the_committed_tokens(live: tuple[Path, Manifest, Path], tmp_path: Path) -> None:
    folder, manifest, path = live
    bad = spoil(path, tmp_path / "bad.jsonl", accept_one_more)
    K2File.load(bad, manifest)  # consistent by itself
    with pytest.raises(Refused, match="contradicts the committed tokens") as caught:
        K2File.load(bad, manifest, folder)
    assert f"line {len(bad.read_text().splitlines())}: accepted" in str(caught.value)


def test_nothing_is_accepted_past_the_end(live: tuple[Path, Manifest, Path], tmp_path: Path) -> None:
    _, manifest, path = live
    header = json.loads(path.read_text().splitlines()[0])
    rows = LENGTHS["dev"][0]
    chain = [
        {"request": "dev-00", "anchor": a, "drafts": [0, 0], "accepted": 0, "next_anchor": a + 1}
        for a in range(GEN_START, rows - 1)
    ]
    for accepted, good in ((0, True), (1, True), (2, False)):
        chain[-1] |= {"accepted": accepted, "next_anchor": rows - 1 + accepted}
        target = tmp_path / f"{accepted}.jsonl"
        target.write_text("".join(json.dumps(line) + "\n" for line in [header, *chain]))
        if good:
            assert len(K2File.load(target, manifest).rounds["dev-00"]) == len(chain)
        else:
            with pytest.raises(Refused, match="past the sequence's end"):
                K2File.load(target, manifest)
    chain.append({"request": "dev-00", "anchor": rows - 1, "drafts": [0, 0], "accepted": 0, "next_anchor": rows})
    chain[-2] |= {"accepted": 0, "next_anchor": rows - 1}
    (tmp_path / "more.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [header, *chain]))
    with pytest.raises(Refused, match="no token after it"):
        K2File.load(tmp_path / "more.jsonl", manifest)


def test_a_missing_request_or_tail_is_no_population(live: tuple[Path, Manifest, Path], tmp_path: Path) -> None:
    _, manifest, path = live

    def without(lines: Lines) -> None:
        lines[:] = [line for line in lines if line.get("request") != "dev-00"]

    missing = K2File.load(spoil(path, tmp_path / "missing.jsonl", without), manifest)
    assert missing.coverage_problems(manifest) == ["dev-00: no round"]
    short = K2File.load(spoil(path, tmp_path / "short.jsonl", lambda lines: lines.pop()), manifest)
    assert len(short.coverage_problems(manifest)) == 1
    for bad, first in ((missing, "dev-00: no round"), (short, "dev-01: ends at row")):
        with pytest.raises(Refused, match=f"does not cover its split.*{first}"):
            bad.population(manifest, "dev")
    with pytest.raises(Refused, match="of another split"):
        K2File.load(path, manifest).population(manifest, "heldout_legal")


def test_a_trajectory_is_never_overwritten(tmp_path: Path) -> None:
    header = K2Header(namespace="n", split="dev", block_size=5, live={})
    round_ = K2Round(request="r", anchor=3, drafts=(1, 2), accepted=0, next_anchor=4)
    digest = write_k2(tmp_path / "k2.jsonl", header, [round_])
    assert digest == sha256_file(tmp_path / "k2.jsonl")
    with pytest.raises(Refused, match="never overwritten"):
        write_k2(tmp_path / "k2.jsonl", header, [])
