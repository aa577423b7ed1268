"""Recorded conversations: read from JSONL, dealt out to the splits by groups, and searched for duplicates.

A line is one conversation: OpenAI's `messages` (role, content) or ShareGPT's `conversations` (from, value), an optional
system message first, then user and assistant in turn. It gives one request: all that stands before its last answer.
Requests of one group (a customer, a document) are always in one split, and so are requests that are alike: a held-out
request whose like was trained on would measure memory.
"""

from __future__ import annotations

import math
import random
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from d2lib.data.manifest import SPLITS, Split
from d2lib.errors import Refused
from d2lib.files import Record
from d2lib.strict import decode, parse_json

_SHINGLE = 5
"""Words of a shingle; a shorter text is one shingle."""
_SHAREGPT = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}


class TrafficFile(Record):
    """A JSONL file of conversations, and where its requests go."""

    path: str = Field(min_length=1)
    """Relative to the run root."""
    role: Split | None = None
    """The split of all its requests."""
    shares: dict[Split, float] | None = None
    """Instead of a role: split → share of the requests, dealt out by whole groups."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.role is None) == (self.shares is None):
            raise ValueError("a file has a role or shares: exactly one of the two must be given")
        if self.shares is not None and not (
            all(share > 0 for share in self.shares.values()) and math.isclose(sum(self.shares.values()), 1)
        ):
            raise ValueError(f"shares must be positive and sum to 1; found {self.shares}")
        return self


class Traffic(Record):
    """Which conversations a case is made of, and how long their prompts and answers may be."""

    files: tuple[TrafficFile, ...] = Field(min_length=1, strict=False)
    group: str | None = None
    """The field of a line that names its group; without it every conversation is a group of its own."""
    similar: float = Field(default=0.7, gt=0, le=1)
    """Jaccard similarity of two requests' word shingles from which they may not stand in two splits."""
    longest_prompt: int = Field(gt=0)
    """Tokens; a longer prompt loses its oldest turns."""
    longest_answer: int = Field(gt=0)
    """Tokens."""
    least_answer: int = Field(gt=0)
    """Tokens; where an answer would end sooner, its end is not drawn. At least the drafter's block size + 1."""
    thinking: bool | None = None
    """Given to the chat template as `enable_thinking`; None: not given."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.least_answer > self.longest_answer:
            raise ValueError(f"least_answer must be at most longest_answer; found {self.least_answer}")
        paths = [file.path for file in self.files]
        if len(set(paths)) != len(paths):
            raise ValueError("a file stands twice in files")
        return self


@dataclass(frozen=True)
class Message:
    """One turn: role system, user or assistant, and its text."""

    role: str
    content: str

    def as_dict(self) -> dict[str, str]:
        """As chat templates take it."""
        return {"role": self.role, "content": self.content}


@dataclass(frozen=True)
class Request:
    """A conversation up to its last answer: messages that end with the user's. where: `FILE, line N`."""

    where: str
    group: str
    messages: tuple[Message, ...]

    @property
    def said(self) -> str:
        """What its user said, normalised: NFKC, lower case, words alone. System prompts are alike by nature."""
        text = "\n".join(message.content for message in self.messages if message.role == "user")
        return " ".join(re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold())) or text


def read_requests(path: Path, group: str | None) -> list[Request]:
    """One request of every line; blank lines are passed over.

    Raises:
        Refused: the file is missing or no UTF-8, or a line is no JSON, no conversation, has an empty message or roles
            out of order, or lacks the group's field. The line's number is said.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise Refused("a traffic file cannot be read", found=error.strerror, where=path) from None
    requests = []
    for number, line in enumerate(decode(data, where=path).split("\n"), 1):
        if line.strip():
            where = f"{path}, line {number}"
            requests.append(_request(parse_json(line, where=where), where, group, f"{path.name}:{number}"))
    return requests


def split_requests(files: Sequence[tuple[TrafficFile, Sequence[Request]]], seed: int) -> dict[Split, list[Request]]:
    """Give every request to one split, and never a group to two.

    Files with a role come first; groups of the others are dealt out in an order drawn from the seed, each to the split
    that lacks most of its share. A group that an earlier file has given to a split stays there.

    Raises:
        Refused: a group would stand in two splits, or a split has no request.
    """
    home: dict[str, Split] = {}
    found: dict[Split, list[Request]] = {split: [] for split in SPLITS}
    for file, requests in sorted(files, key=lambda pair: pair[0].role is None):  # stable
        groups: dict[str, list[Request]] = defaultdict(list)
        for request in requests:
            groups[request.group].append(request)
        fixed = file.role
        dealt = _deal(groups, file.shares or {}, home, seed) if fixed is None else dict.fromkeys(groups, fixed)
        for name, members in groups.items():
            split = dealt[name]
            if home.setdefault(name, split) != split:
                raise Refused(
                    "a group stands in two splits",
                    expected=f"{name} in {home[name]} alone",
                    found=split,
                    where=members[0].where,
                    remedy="give both files one role, or remove the group from one of them",
                )
            found[split] += members
    for split, members in found.items():
        if not members:
            raise Refused(
                "a split has no requests",
                expected=f"at least one for {split}",
                found=0,
                remedy="give a file this role or a share for it; groups go whole, so there must be enough of them",
            )
    return found


def refuse_duplicates(splits: Mapping[Split, Sequence[Request]], similar: float) -> int:
    """Refuse requests of two splits that are the same or nearly so; returns the repeats within a split.

    Two sets with a Jaccard similarity of at least t share one of the first |s| - ceil(t |s|) + 1 shingles of either, in
    any one order of all shingles (Chaudhuri, Ganti, Kaushik 2006): only these are indexed, the rarest first.

    Args:
        similar: the least Jaccard similarity of shingles that counts as nearly the same.

    Raises:
        Refused: names the two lines.
    """
    # 1. the same words
    first: dict[str, tuple[Split, Request]] = {}
    repeats = 0
    for split, requests in splits.items():
        for request in requests:
            other_split, other = first.setdefault(request.said, (split, request))
            repeats += other is not request
            if other_split != split:
                raise _crossing("a request stands in two splits", (other_split, other), (split, request), 1.0)
    # 2. nearly the same words: candidates by their rarest shingles, then the similarity itself
    shingles = {said: _shingles(said) for said in first}
    frequency = Counter(shingle for found in shingles.values() for shingle in found)
    index: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for said, own in shingles.items():
        ordered = sorted(own, key=lambda shingle: (frequency[shingle], shingle))
        prefix = ordered[: len(own) - math.ceil(similar * len(own) - 1e-9) + 1]
        for candidate in dict.fromkeys(text for shingle in prefix for text in index[shingle]):
            if first[candidate][0] == first[said][0]:
                continue
            likeness = len(own & shingles[candidate]) / len(own | shingles[candidate])
            if likeness >= similar:
                raise _crossing(
                    "two splits hold requests that are nearly the same", first[candidate], first[said], likeness
                )
        for shingle in prefix:
            index[shingle].append(said)
    return repeats


def fit_prompt(
    request: Request, encode: Callable[[Sequence[Message]], list[int]], longest: int
) -> tuple[list[int], int]:
    """A request's tokens and how many of its messages were dropped to fit.

    The system message stays; of the rest the oldest go, so that what is left begins with the user's.

    Args:
        encode: messages to tokens, by the chat template.
        longest: tokens at most.

    Raises:
        Refused: the last message alone does not fit.
    """
    head = [message for message in request.messages[:1] if message.role == "system"]
    turns = list(request.messages[len(head) :])
    for dropped in range(0, len(turns), 2):
        tokens = encode([*head, *turns[dropped:]])
        if len(tokens) <= longest:
            return tokens, dropped
    raise Refused(
        "a prompt is too long",
        expected=f"at most {longest} tokens (longest_prompt) for the system message and the last turn",
        found=len(tokens),
        where=request.where,
        remedy="raise longest_prompt as far as the model's context goes, or remove the line",
    )


def _request(value: Any, where: str, group: str | None, name: str) -> Request:
    """The request of one parsed line."""
    there = [key for key in ("messages", "conversations") if isinstance(value, dict) and key in value]
    if len(there) != 1 or not isinstance(value[there[0]], list):
        raise Refused("not a conversation", expected="an object with a list `messages` or `conversations`", where=where)
    messages = [_message(turn, where, openai=there[0] == "messages") for turn in value[there[0]]]
    turns = messages[1:] if messages and messages[0].role == "system" else messages
    for place, message in enumerate(turns):
        if message.role != ("user", "assistant")[place % 2]:
            raise Refused(
                "roles are out of order",
                expected="an optional system message, then user and assistant in turn",
                found=", ".join(each.role for each in messages)[:100],
                where=where,
            )
    if not turns:
        raise Refused("a conversation has no user message", where=where)
    if messages[-1].role == "assistant":
        messages.pop()
    if group is not None:
        key = value.get(group)
        if type(key) not in (str, int) or key == "":
            raise Refused("a line names no group", expected=f"{group}: a text or a number", found=key, where=where)
        name = str(key)
    return Request(where, name, tuple(messages))


def _message(turn: Any, where: str, *, openai: bool) -> Message:
    role_key, text_key = ("role", "content") if openai else ("from", "value")
    role, text = (turn.get(role_key), turn.get(text_key)) if isinstance(turn, dict) else (None, None)
    if isinstance(text, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in text):
        text = "".join(str(part.get("text", "")) for part in text)
    known = {"system": "system", "user": "user", "assistant": "assistant"} if openai else _SHAREGPT
    if not isinstance(role, str) or role not in known:
        raise Refused("a role is not known", expected=", ".join(known), found=role, where=where)
    if not isinstance(text, str) or not text.strip():
        raise Refused("a message is empty, or not of text alone", expected=text_key, found=text, where=where)
    return Message(known[role], text)


def _deal(
    groups: Mapping[str, Sequence[Request]], shares: Mapping[Split, float], home: Mapping[str, Split], seed: int
) -> dict[str, Split]:
    """Group → split, so that every split comes close to its share of the requests."""
    total = sum(map(len, groups.values()))
    lacking = {split: shares[split] * total for split in SPLITS if split in shares}
    order = sorted(groups)
    random.Random(seed).shuffle(order)
    dealt: dict[str, Split] = {}
    for name in sorted(order, key=lambda name: name not in home):  # those that have a home first; stable
        neediest: Split = max(lacking, key=lacking.__getitem__)
        split = home.get(name, neediest)
        if split not in lacking:
            raise Refused(
                "a group stands in two splits",
                expected=f"{name} in {split} alone",
                found=f"a file dealt out to {', '.join(lacking)}",
                where=groups[name][0].where,
                remedy="remove the group from one of the files",
            )
        lacking[split] -= len(groups[name])
        dealt[name] = split
    return dealt


def _shingles(said: str) -> set[tuple[str, ...]]:
    words = said.split()
    return {tuple(words[start : start + _SHINGLE]) for start in range(max(1, len(words) - _SHINGLE + 1))}


def _crossing(message: str, one: tuple[Split, Request], other: tuple[Split, Request], likeness: float) -> Refused:
    return Refused(
        message,
        expected="requests that are alike in one split",
        found=f"{one[0]}: {one[1].where}; {other[0]}: {other[1].where}; similarity {likeness:.2f}",
        where=one[1].where,
        remedy="remove one of the lines, or let a group field keep both in one split",
    )
