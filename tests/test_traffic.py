"""Conversations, a drafter and a target of others: read, dealt out, refused by name, captured and through G1."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_case import edit
from traffic_case import conversations, profile, write_drafter, write_jsonl, write_qwen

from d2lib.data.assembly import Assembly
from d2lib.data.manifest import SPLITS
from d2lib.data.traffic import (
    Message,
    Request,
    TrafficFile,
    fit_prompt,
    read_requests,
    refuse_duplicates,
    split_requests,
)
from d2lib.drafter.dense.checkpoint import read_dense
from d2lib.drafter.weights import read_tensors
from d2lib.errors import Interrupted, Refused
from d2lib.files import read_json, record_tree
from d2lib.lab.capture import capture, parse_profile
from d2lib.lab.g1 import run_g1

SHARES = {"train": 0.4, "dev": 0.2, "heldout_legal": 0.2, "heldout_general": 0.2}
ASKED = {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]}


def request(text: str, group: str = "", where: str = "f, line 1") -> Request:
    return Request(where, group or text, (Message("user", text),))


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("given")
    model = write_qwen(folder / "target")
    for store in ("deepspec", "specforge", "speculators"):
        write_drafter(folder / store, model, store)
    (folder / "drafter").symlink_to(folder / "deepspec")
    write_jsonl(folder / "conversations.jsonl", conversations())
    return folder


@pytest.fixture(scope="module")
def captured(given: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("captured")
    return out, capture(parse_profile(profile(given)), out)


def test_both_forms_give_the_request_before_the_last_answer(tmp_path: Path) -> None:
    said = [("system", "be brief"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    openai = {"messages": [{"role": role, "content": text} for role, text in said]}
    parts = {"messages": [*openai["messages"][:3], {"role": "user", "content": [{"type": "text", "text": "c"}]}]}
    sharegpt = {"conversations": [{"from": names[role], "value": text} for role, text in said]}
    path = write_jsonl(tmp_path / "f.jsonl", [openai, sharegpt, parts])
    found = read_requests(path, None)
    assert [[message.content for message in each.messages] for each in found] == [["be brief", "a", "b", "c"]] * 3
    assert len({each.group for each in found}) == 3


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"messages": [', "not valid JSON"),
        (json.dumps({"prompt": "x"}), "not a conversation"),
        (json.dumps({"messages": []}), "no user message"),
        (json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": " "}]}), "empty"),
        (json.dumps({"messages": [{"role": "assistant", "content": "a"}]}), "roles are out of order"),
        (json.dumps({"messages": [{"role": "user", "content": "a"}] * 2}), "roles are out of order"),
        (json.dumps({"messages": [{"role": "tool", "content": "a"}]}), "role is not known.*tool"),
        (json.dumps({"conversations": [{"from": "human"}]}), "empty"),
        (json.dumps(ASKED), "names no group"),
    ],
)
def test_a_wrong_line_is_refused_with_its_number(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "f.jsonl"
    path.write_text(json.dumps(ASKED | {"customer": 7}) + "\n\n" + line + "\n")
    with pytest.raises(Refused, match=rf"{message}.*line 3"):
        read_requests(path, "customer")


def test_groups_are_dealt_whole_by_seed_and_close_to_their_shares(tmp_path: Path) -> None:
    requests = read_requests(write_jsonl(tmp_path / "f.jsonl", conversations(400)), "customer")
    file = TrafficFile.model_validate({"path": "f", "shares": SHARES})
    found = split_requests([(file, requests)], 1)
    assert found == split_requests([(file, requests)], 1) != split_requests([(file, requests)], 2)
    assert sorted(r.where for part in found.values() for r in part) == sorted(r.where for r in requests)
    homes = [{r.group for r in part} for part in found.values()]
    assert not any(one & other for one, other in itertools.combinations(homes, 2))
    assert all(abs(len(found[split]) - SHARES[split] * 400) <= 2 for split in SPLITS)


def test_a_group_in_two_splits_and_a_split_of_nothing_are_refused() -> None:
    roles = [TrafficFile.model_validate({"path": split, "role": split}) for split in SPLITS]
    parts = [[request(f"{split} {n}") for n in range(2)] for split in SPLITS]
    whole = split_requests(list(zip(roles, parts, strict=True)), 0)
    assert [len(part) for part in whole.values()] == [2] * 4
    with pytest.raises(Refused, match=r"no requests.*heldout_general"):
        split_requests(list(zip(roles[:3], parts, strict=False)), 0)
    twice = [*parts[:3], [request("other", group="train 1")]]
    with pytest.raises(Refused, match=r"a group stands in two splits.*train 1"):
        split_requests(list(zip(roles, twice, strict=True)), 0)
    dealt = TrafficFile.model_validate({"path": "x", "shares": {"dev": 1.0}})
    with pytest.raises(Refused, match=r"a group stands in two splits.*train 1"):
        split_requests([*zip(roles, parts, strict=True), (dealt, [request("other", group="train 1")])], 0)


def test_likes_across_splits_are_found_and_within_a_split_counted() -> None:
    long = " ".join(f"word{n}" for n in range(40))
    near = long.replace("word39", "other")
    with pytest.raises(Refused, match=r"a request stands in two splits.*similarity 1\.00"):
        refuse_duplicates({"train": [request("My parcel, please!")], "dev": [request("my  PARCEL please")]}, 0.7)
    with pytest.raises(Refused, match=r"nearly the same.*similarity 0\.95"):
        refuse_duplicates({"train": [request(long)], "dev": [request(near)]}, 0.7)
    assert refuse_duplicates({"train": [request(long)], "dev": [request(near)]}, 0.96) == 0
    assert refuse_duplicates({"train": [request(long), request(long), request(near)], "dev": [request("x")]}, 0.7) == 1


@pytest.mark.parametrize("similar", [0.2, 0.5, 0.8, 1.0])
def test_the_index_misses_no_pair(similar: float) -> None:
    """Against the similarity of all pairs, on texts that differ in a few words."""
    generator = torch.Generator().manual_seed(7)
    texts = []
    for n in range(30):
        words = [f"w{i}" for i in range(24)]
        for place in torch.randint(24, (n % 6,), generator=generator).tolist():
            words[place] = f"x{n}"
        texts.append(" ".join(words[: 24 - n % 3]))

    def grams(text: str) -> set[tuple[str, ...]]:
        words = text.split()
        return {tuple(words[i : i + 5]) for i in range(len(words) - 4)}

    for one, other in itertools.combinations(texts, 2):
        a, b = grams(one), grams(other)
        alike = one == other or len(a & b) / len(a | b) >= similar
        try:
            refuse_duplicates({"train": [request(one)], "dev": [request(other)]}, similar)
            assert not alike
        except Refused:
            assert alike


def test_a_long_prompt_loses_its_oldest_turns_and_keeps_the_system_message() -> None:
    said = [("system", "s"), ("user", "aaa"), ("assistant", "bbb"), ("user", "ccc"), ("assistant", "d"), ("user", "e")]
    asked = Request("f, line 1", "g", tuple(Message(role, text) for role, text in said))

    def encode(messages: Any) -> list[int]:
        return [ord(letter) for message in messages for letter in message.content]

    assert fit_prompt(asked, encode, 12) == ([ord(letter) for letter in "saaabbbcccde"], 0)
    assert fit_prompt(asked, encode, 11) == ([ord(letter) for letter in "scccde"], 2)
    assert fit_prompt(asked, encode, 5) == ([ord(letter) for letter in "se"], 4)
    with pytest.raises(Refused, match=r"too long.*line 1"):
        fit_prompt(asked, encode, 1)


def test_a_given_case_passes_g1_with_the_drafter_as_it_was_stored(
    given: Path, captured: tuple[Path, dict[str, Any]]
) -> None:
    folder, made = captured
    found = run_g1(Assembly(folder))
    assert found.holds, [row for row in found.rows if not row.holds]
    manifest = Assembly(folder).manifest
    assert manifest.gen_start is None
    assert len({entry.gen_start for entry in manifest.sequences}) > 10
    assert all(12 <= entry.span_positions <= 24 for entry in manifest.sequences)
    assert all(entry.gen_start <= 400 for entry in manifest.sequences)
    assert sum(part["requests"] for part in made["traffic"]["splits"].values()) == 40
    assert sum(part["prompts cut at longest_prompt"] for part in made["traffic"]["splits"].values()) > 0
    native, stored = read_tensors(folder / "native.safetensors"), read_dense(given / "drafter", given / "target")
    assert native.keys() == stored.weights.keys()
    assert all(torch.equal(native[name], value) for name, value in stored.weights.items())
    names = {source["name"] for source in read_json(folder / "provenance.json")["sources"]}
    assert {"traffic-1/conversations.jsonl", "drafter/model.safetensors", "target/model.safetensors"} <= names


@pytest.mark.parametrize("store", ["specforge", "speculators"])
def test_every_layout_gives_the_same_case(
    given: Path, captured: tuple[Path, dict[str, Any]], tmp_path: Path, store: str
) -> None:
    """The same drafter in another folder, stopped once on the way: the same bytes but for what the profile says."""
    asked = itertools.count()
    values = parse_profile(profile(given, drafter={"folder": str(given / store)}))
    with pytest.raises(Interrupted):
        capture(values, tmp_path / "out", stop=lambda: next(asked) > 300)
    capture(values, tmp_path / "out")
    one, other = record_tree(tmp_path / "out"), record_tree(captured[0])
    differ = {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}
    assert differ == {"provenance.json"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 250}, "another vocabulary"),
        ({"hidden_size": 16}, "another width"),
        ({"target_layer_ids": [1, 4]}, "taps"),
        ({"mask_token_id": 259}, "not in the vocabulary"),
        ({"max_position_embeddings": 300}, "longer than the drafter's positions"),
        ({"block_size": 12}, "too short for one complete round"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused_before_anything_is_made(
    given: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    target = tmp_path / "drafter"
    target.mkdir()
    for path in (given / "deepspec").iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    edit(target, lambda fields: fields.update(change))
    with pytest.raises(Refused, match=message):
        capture(parse_profile(profile(given, drafter={"folder": str(target)})), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_other_taps_and_a_target_without_template_or_positions_are_refused(given: Path, tmp_path: Path) -> None:
    taps = {"kind": "huggingface", "folder": str(given / "target"), "tap_layers": [0, 3]}
    with pytest.raises(Refused, match="other tapped layers"):
        capture(parse_profile(profile(given, target=taps)), tmp_path / "out")
    for changes, message in (({"template": False}, "no chat template"), ({"max_position_embeddings": 300}, "context")):
        folder = tmp_path / message.split()[0]
        model = write_qwen(folder / "target", **changes)
        write_drafter(folder / "drafter", model)
        write_jsonl(folder / "conversations.jsonl", conversations())
        with pytest.raises(Refused, match=message):
            capture(parse_profile(profile(folder)), folder / "out")
        assert not list((folder / "out").iterdir())
