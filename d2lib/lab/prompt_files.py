"""Prompts from data files, made into contexts of one length by the target's own chat template.

A folder holds preamble.txt and one GROUP.yaml for each split and for `pretraining`: kind of text → family → prompts.
A family stands in one file only, and a prompt once. A kind may have an example, example-KIND.yaml: the prompt and the
answer of an exchange that stands before every prompt of that kind, as services show a model their house form.

Every context has exactly `length` tokens, so that every sequence begins alike: the template's system message is the
preamble, cut after as many tokens as are left beside example, prompt and the template's own. Prompt and example are
never cut; where they do not fit they are refused, and so is a preamble that is too short for the shortest prompt. A
tokenizer without a template (a base model) gets the cut preamble, the example, then the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import torch
from pydantic import Field, TypeAdapter, ValidationError

from d2lib.errors import Refused
from d2lib.files import Record, sha256_file
from d2lib.lab.corpus import Kind, SourceFile
from d2lib.lab.prompts import PRETRAINING, Group, Prompt
from d2lib.strict import malformed, read_text, read_yaml

PREAMBLE = "preamble.txt"
T = TypeVar("T")

Text = Annotated[str, Field(min_length=1)]


class Example(Record):
    """An exchange that stands before every prompt of its kind."""

    prompt: Text
    answer: Text


PromptFile = dict[Kind, dict[Text, list[Text]]]
_FILE = TypeAdapter(PromptFile)
_MARK = "\N{OBJECT REPLACEMENT CHARACTER}"


def read_prompts(folder: Path, counts: Mapping[Group, Mapping[Kind, int]]) -> dict[Group, PromptFile]:
    """The prompt files of these groups.

    Raises:
        Refused: a file is missing or malformed, a family stands in two groups, a prompt stands twice, or a split has
            fewer prompts than are wanted (pretraining may take its prompts again, under another seed).
    """
    files: dict[Group, PromptFile] = {}
    home: dict[str, Group] = {}
    seen: set[str] = set()
    for group, wanted in counts.items():
        path = folder / f"{group}.yaml"
        files[group] = _parse(path, _FILE.validate_python, "a prompt file")
        for families in files[group].values():
            for family, prompts in families.items():
                if home.setdefault(family, group) != group:
                    raise Refused("a family stands in two groups", found=f"{family}: {home[family]}", where=path)
                for prompt in prompts:
                    if prompt in seen:
                        raise Refused("a prompt stands twice", found=prompt[:60], where=f"{path}: {family}")
                    seen.add(prompt)
        for kind, number in wanted.items():
            there = sum(map(len, files[group].get(kind, {}).values()))
            if there < number and (group != PRETRAINING or not there):
                raise Refused(f"there are too few {kind} prompts", expected=number, found=there, where=path)
    return files


def example_file(folder: Path, kind: Kind) -> Path:
    """Where a kind's example stands, if it has one."""
    return folder / f"example-{kind}.yaml"


def read_example(folder: Path, kind: Kind) -> Example | None:
    """A kind's example, or None; raises Refused when its file is malformed."""
    path = example_file(folder, kind)
    return _parse(path, Example.model_validate, "an example") if path.exists() else None


def prompt_sources(folder: Path, counts: Mapping[Group, Mapping[Kind, int]]) -> list[SourceFile]:
    """The files that the prompts come from, for the provenance."""
    kinds = sorted({kind for wanted in counts.values() for kind in wanted})
    examples = [path.name for path in (example_file(folder, kind) for kind in kinds) if path.exists()]
    names = [PREAMBLE, *examples, *(f"{group}.yaml" for group in counts)]
    return [
        SourceFile(
            kind="prompts",
            name=f"prompts/{name}",
            size=(folder / name).stat().st_size,
            sha256=str(sha256_file(folder / name)),
        )
        for name in names
    ]


def draw_prompt_files(
    folder: Path, counts: Mapping[Group, Mapping[Kind, int]], tokenizer: Any, length: int
) -> dict[Group, list[Prompt]]:
    """Contexts of `length` tokens for every group, prompts going round the families.

    Raises Refused as `read_prompts` and `Contexts`.
    """
    files = read_prompts(folder, counts)
    text = read_text(folder / PREAMBLE, what="a prompt file").strip()
    contexts: dict[Kind, Contexts] = {}
    prompts: dict[Group, list[Prompt]] = {group: [] for group in counts}
    for group, wanted in counts.items():
        for kind, number in wanted.items():
            families = files[group].get(kind, {})
            if kind not in contexts:
                contexts[kind] = Contexts(tokenizer, text, length, read_example(folder, kind))
            longest = max(map(len, families.values()), default=0)
            order = [
                (family, texts[turn])
                for turn in range(longest)
                for family, texts in families.items()
                if turn < len(texts)
            ]
            for place in range(number):
                family, prompt = order[place % len(order)]
                tokens = contexts[kind].tokens(prompt)
                prompts[group].append(Prompt(f"{group}-{kind}-{place:03d}", group, kind, f"{kind}/{family}", tokens))
    return prompts


def _parse(path: Path, validate: Callable[[Any], T], what: str) -> T:
    """A YAML file, validated; raises Refused when it cannot be read, is not YAML or is malformed."""
    try:
        return validate(read_yaml(path, what="a prompt file"))
    except ValidationError as error:
        raise malformed(f"{what} is malformed", error, path) from None


class Contexts:
    """Contexts of one length.

    Args:
        tokenizer: from transformers.
        preamble: the system message, cut to fit.
        length: tokens of every context.
        example: stands before every prompt.
    """

    def __init__(self, tokenizer: Any, preamble: str, length: int, example: Example | None = None) -> None:
        self.tokenizer = tokenizer
        self.length = length
        self.example = example
        self.preamble = self._ids(preamble)

    def tokens(self, prompt: str) -> torch.Tensor:
        """[length] int64; raises Refused when prompt and template need more, or the preamble has too few."""
        before, after = self._frame(prompt)
        room = self.length - len(before) - len(after)
        if not 0 <= room <= len(self.preamble):
            raise Refused(
                "a prompt does not fit its context" if room < 0 else "the preamble is too short for this prompt",
                expected=f"{self.length} tokens with the preamble cut to 0 … {len(self.preamble)} of its tokens",
                found=f"{len(before) + len(after)} without it",
                where=prompt[:60],
                remedy="shorten the prompt" if room < 0 else "lengthen the preamble",
            )
        return torch.tensor(before + self.preamble[:room] + after)

    def _frame(self, prompt: str) -> tuple[list[int], list[int]]:
        """What stands before and after the preamble: the template's own tokens, the example and the prompt."""
        said = [] if self.example is None else [self.example.prompt, self.example.answer]
        texts = [*said, prompt]
        if getattr(self.tokenizer, "chat_template", None) is None:
            start = self.tokenizer.bos_token_id
            return ([] if start is None else [start]), self._ids("".join(f"\n\n{text}" for text in texts) + "\n\n")
        turns = [{"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(texts)]
        try:
            text = self._render([{"role": "system", "content": _MARK}, *turns])
        except Exception:  # a template that knows no system message raises its own error, of any kind
            first = {"role": "user", "content": f"{_MARK}\n\n{texts[0]}"}
            text = self._render([first, *turns[1:]])
        before, mark, after = text.partition(_MARK)
        if not mark:
            raise Refused("the chat template drops what it is given", found=text[:80])
        return self._ids(before), self._ids(after)

    def _render(self, messages: list[dict[str, str]]) -> str:
        return cast(str, self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def _ids(self, text: str) -> list[int]:
        return list(map(int, self.tokenizer(text, add_special_tokens=False)["input_ids"]))
