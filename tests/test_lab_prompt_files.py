"""Prompt files: the profile's own are sound; contexts of one length that keep the prompt; refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from hf_case import byte_tokenizer

from d2lib.data.assembly import SCORED
from d2lib.errors import Refused
from d2lib.lab.capture import PRETRAINING, CaptureProfile
from d2lib.lab.prompt_files import Contexts, Example, draw_prompt_files, prompt_sources, read_prompts

SMOLLM2 = Path(__file__).parent.parent / "params" / "smollm2"


def test_the_profiles_prompts_are_enough_and_no_family_crosses() -> None:
    given = yaml.safe_load((SMOLLM2 / "capture.yaml").read_text())["profile"]
    profile = CaptureProfile.model_validate(given)
    counts = {**profile.sequences, PRETRAINING: {"general": profile.pretraining_sequences}}
    files = read_prompts(SMOLLM2 / "prompts", counts)
    families = [family for file in files.values() for kind in file.values() for family in kind]
    assert len(families) == len(set(families))
    for split in ("train", *SCORED):
        for kind, number in profile.sequences[split].items():
            assert sum(map(len, files[split][kind].values())) == number


def test_a_context_is_the_template_with_the_preamble_cut_to_fit() -> None:
    tokenizer = byte_tokenizer()
    contexts = Contexts(tokenizer, "abcdefghij" * 20, 100)
    for prompt in ("What is a lien?", "Draft a clause."):
        tokens = contexts.tokens(prompt)
        text = tokenizer.decode(tokens)
        assert tokens.shape == (100,)
        assert tokens.dtype == torch.int64
        assert text.startswith("<s>system\nabcdefghij")
        assert text.endswith(f"</s>\n<s>user\n{prompt}</s>\n<s>assistant\n")


def test_a_model_without_a_template_gets_preamble_and_prompt() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    text = tokenizer.decode(Contexts(tokenizer, "x" * 90, 60).tokens("Why?"))
    assert text == "<s>" + "x" * 51 + "\n\nWhy?\n\n"


def test_a_prompt_is_never_cut() -> None:
    contexts = Contexts(byte_tokenizer(), "x" * 90, 60)
    with pytest.raises(Refused, match="does not fit"):
        contexts.tokens("y" * 61)
    with pytest.raises(Refused, match="preamble is too short"):
        Contexts(byte_tokenizer(), "x", 60).tokens("Why?")


def _write(folder: Path, **files: object) -> Path:
    (folder / "preamble.txt").write_text("x" * 90)
    for name, value in files.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(value))
    return folder


def test_prompts_go_round_the_families_and_pretraining_takes_them_again(tmp_path: Path) -> None:
    _write(tmp_path, train={"legal": {"a": ["1", "2"], "b": ["3"]}}, pretraining={"general": {"c": ["4"]}})
    counts = {"train": {"legal": 3}, PRETRAINING: {"general": 2}}
    drawn = draw_prompt_files(tmp_path, counts, byte_tokenizer(), 60)  # type: ignore[arg-type]
    assert [prompt.family for prompt in drawn["train"]] == ["legal/a", "legal/b", "legal/a"]
    first, second = drawn[PRETRAINING]
    assert first.id != second.id
    assert torch.equal(first.tokens, second.tokens)


def test_a_kinds_example_stands_before_its_prompts_and_is_never_cut(tmp_path: Path) -> None:
    _write(tmp_path, train={"legal": {"a": ["1"]}}, pretraining={"general": {"c": ["2"]}})
    (tmp_path / "example-legal.yaml").write_text("prompt: Why?\nanswer: |-\n  Thus.\n  Thus.\n")
    counts = {"train": {"legal": 1}, PRETRAINING: {"general": 1}}
    drawn = draw_prompt_files(tmp_path, counts, byte_tokenizer(), 110)  # type: ignore[arg-type]
    texts = {group: byte_tokenizer().decode(prompts[0].tokens) for group, prompts in drawn.items()}
    end = "<s>user\nWhy?</s>\n<s>assistant\nThus.\nThus.</s>\n<s>user\n1</s>\n<s>assistant\n"
    assert texts["train"].endswith(f"x</s>\n{end}")
    assert texts[PRETRAINING].endswith("x</s>\n<s>user\n2</s>\n<s>assistant\n")
    names = [source.name for source in prompt_sources(tmp_path, counts)]  # type: ignore[arg-type]
    assert names == [
        "prompts/preamble.txt",
        "prompts/example-legal.yaml",
        "prompts/train.yaml",
        "prompts/pretraining.yaml",
    ]
    with pytest.raises(Refused, match="does not fit"):
        draw_prompt_files(tmp_path, counts, byte_tokenizer(), 60)  # type: ignore[arg-type]
    (tmp_path / "example-legal.yaml").write_text("prompt: Why?\n")
    with pytest.raises(Refused, match=r"an example is malformed.*answer"):
        draw_prompt_files(tmp_path, counts, byte_tokenizer(), 110)  # type: ignore[arg-type]


def test_an_example_without_a_template_stands_between_preamble_and_prompt() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    contexts = Contexts(tokenizer, "x" * 90, 60, Example(prompt="Who?", answer="I."))
    assert tokenizer.decode(contexts.tokens("Why?")) == "<s>" + "x" * 41 + "\n\nWho?\n\nI.\n\nWhy?\n\n"


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"train": {"legal": {"a": ["1"]}}}, "too few legal prompts"),
        ({"train": {"legal": {"a": ["1", "1"]}}}, "stands twice"),
        ({"train": {"lawful": {"a": ["1", "2"]}}}, "malformed"),
        ({"train": {"legal": {"a": ["1", ""]}}}, "malformed"),
        ({}, "cannot be read"),
    ],
)
def test_refusals(tmp_path: Path, files: dict[str, object], says: str) -> None:
    with pytest.raises(Refused, match=says):
        read_prompts(_write(tmp_path, **files), {"train": {"legal": 2}})


def test_a_family_in_two_files_is_refused(tmp_path: Path) -> None:
    _write(tmp_path, train={"legal": {"a": ["1"]}}, dev={"legal": {"a": ["2"]}})
    with pytest.raises(Refused, match="two groups"):
        read_prompts(tmp_path, {"train": {"legal": 1}, "dev": {"legal": 1}})


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("legal: {a: [Für?]}\n".encode("latin-1"), "not UTF-8"),
        ("legal: {a: [Why?]}\n".encode("utf-16"), "byte-order mark"),
        (b"legal: {a: [x]}\nlegal: {a: [y]}\n", "stands twice"),
        (b"legal: {a: [&x Why?, *x]}\n", "an anchor"),
    ],
)
@pytest.mark.parametrize("name", ["train.yaml", "example-legal.yaml"])
def test_a_file_that_can_be_read_in_two_ways_is_refused_and_named(
    tmp_path: Path, name: str, data: bytes, says: str
) -> None:
    folder = _write(tmp_path, train={"legal": {"a": ["Why?"]}})
    (folder / "preamble.txt").write_text("x " * 90)
    (folder / name).write_bytes(data)
    with pytest.raises(Refused, match=says) as refused:
        draw_prompt_files(folder, {"train": {"legal": 1}}, byte_tokenizer(), 60)
    assert name in str(refused.value)


def test_a_preamble_in_another_encoding_is_refused(tmp_path: Path) -> None:
    folder = _write(tmp_path, train={"legal": {"a": ["Why?"]}})
    (folder / "preamble.txt").write_bytes("Für ".encode("latin-1") * 40)
    with pytest.raises(Refused, match=r"not UTF-8.*preamble\.txt"):
        draw_prompt_files(folder, {"train": {"legal": 1}}, byte_tokenizer(), 60)
