"""Prompts of any length from recorded conversations, by the target's own chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from d2lib.data.manifest import Split
from d2lib.data.traffic import (
    Message,
    Request,
    Traffic,
    fit_prompt,
    read_requests,
    refuse_duplicates,
    split_requests,
)
from d2lib.errors import Refused
from d2lib.lab.corpus import Kind
from d2lib.lab.prompts import Group, Prompt


@dataclass(frozen=True)
class Dealt:
    """Split → its requests, and how many repeat another of their split."""

    splits: dict[Split, list[Request]]
    repeats: int


def deal_traffic(traffic: Traffic, paths: Sequence[Path], seed: int) -> Dealt:
    """The requests of every split.

    Args:
        traffic: the profile's.
        paths: where its files lie, in their order.
        seed: of the order in which groups are dealt out.

    Raises:
        Refused: as `read_requests`, `split_requests` and `refuse_duplicates`.
    """
    read = [(file, read_requests(path, traffic.group)) for file, path in zip(traffic.files, paths, strict=True)]
    splits = split_requests(read, seed)
    return Dealt(splits, refuse_duplicates(splits, traffic.similar))


def draw_traffic(dealt: Dealt, traffic: Traffic, tokenizer: Any) -> tuple[dict[Group, list[Prompt]], dict[str, Any]]:
    """Every request's prompt, and what a receipt says of them.

    Raises:
        Refused: the tokenizer has no chat template, or a template that refuses a conversation; a prompt is too long.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise Refused(
            "the tokenizer has no chat template",
            expected="a target that was trained on conversations",
            where="target",
            remedy="put the chat template that the service uses beside the tokenizer (chat_template.jinja)",
        )
    prompts: dict[Group, list[Prompt]] = {}
    summary: dict[str, Any] = {"repeats within a split": dealt.repeats, "splits": {}}
    for split, requests in dealt.splits.items():
        prompts[split] = []
        dropped = 0
        for place, request in enumerate(requests):
            tokens, less = fit_prompt(request, _encoder(tokenizer, traffic, request), traffic.longest_prompt)
            dropped += less > 0
            kind: Kind = "general" if split == "heldout_general" else "legal"
            prompts[split].append(Prompt(f"{split}-{place:05d}", split, kind, request.group, torch.tensor(tokens)))
        lengths = [len(prompt.tokens) for prompt in prompts[split]]
        summary["splits"][split] = {
            "requests": len(requests),
            "groups": len({request.group for request in requests}),
            "prompts cut at longest_prompt": dropped,
            "prompt tokens": {"least": min(lengths), "most": max(lengths), "sum": sum(lengths)},
        }
    return prompts, summary


def _encoder(tokenizer: Any, traffic: Traffic, request: Request) -> Any:
    options: Mapping[str, Any] = {} if traffic.thinking is None else {"enable_thinking": traffic.thinking}

    def encode(messages: Sequence[Message]) -> list[int]:
        try:
            text = tokenizer.apply_chat_template(
                [message.as_dict() for message in messages], tokenize=False, add_generation_prompt=True, **options
            )
        except Exception as error:  # a template raises its own errors, of any kind
            raise Refused(
                "the chat template does not take this conversation", found=str(error)[:200], where=request.where
            ) from None
        return list(map(int, tokenizer(text, add_special_tokens=False)["input_ids"]))

    return encode
