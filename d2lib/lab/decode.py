"""A live decode loop, written on its own: what an engine that serves the native drafter does, token by token.

It shares no arithmetic with the reference: numpy instead of torch, key-value rows that are kept instead of a gathered
context, rows pushed once when the target has run them instead of a look back from every anchor. If the captured taps,
positions or anchors were off by one anywhere, this loop and the reference would draft other tokens.

Several streams may be decoded side by side; they do not see each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from d2lib.data.k2 import K2Round
from d2lib.drafter.config import DrafterConfig
from d2lib.errors import Interrupted, Refused
from d2lib.lab.decode_deepseek import LiveDeepSeek
from d2lib.lab.decode_dense import LiveDense
from d2lib.lab.singles import Floats, Integers


@dataclass
class Stream:
    """One request that is being decoded.

    name: its id. tokens: [L] what the target commits. taps: [L, n_taps·dim] what it shows of each row it has run.
    anchor: row of the last committed token, which the target has not run yet. rounds: what happened so far.
    """

    name: str
    tokens: Integers
    taps: Floats
    anchor: int
    rounds: list[K2Round] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether no token is left to draft."""
        return self.anchor >= len(self.tokens) - 1


class LiveDrafter(Protocol):
    """A drafter that serves some requests side by side."""

    def push(self, stream: int, first: int, taps: Floats) -> None:
        """The target has run rows first … of a stream, whose taps are [n, n_taps·dim]."""
        ...

    def propose(self, streams: Integers, tokens: Integers, anchors: Integers) -> Integers:
        """Two drafts [n, 2] for streams [n] whose last committed tokens [n] stand at rows `anchors` [n]."""
        ...


_LIVE: dict[str, Callable[[Any, Mapping[str, Tensor], int, int], LiveDrafter]] = {
    "deepseek": LiveDeepSeek,
    "dense": LiveDense,
}
"""Family → its live drafter, made of configuration, weights, number of streams and rows of the longest."""


def decode_live(
    config: DrafterConfig,
    weights: Mapping[str, Tensor],
    streams: list[Stream],
    *,
    progress: Callable[[int], object] | None = None,
    stop: Callable[[], bool] | None = None,
) -> list[Stream]:
    """Decode requests whose committed tokens are known, two drafts a round, to the end of each.

    A round: propose two tokens after the anchor; the target commits those that are what it says, and one token of its
    own; it has now run the anchor and the accepted rows, whose taps are pushed; the bonus is the next anchor.

    Args:
        config, weights: the drafter that is served.
        streams: fresh requests, each with its prompt behind the anchor; their `rounds` are filled.
        progress: called with the rounds done since the last call.
        stop: asked before every step; when it says yes, Interrupted is raised.
    """
    if config.family not in _LIVE:
        raise Refused(
            "no live decode loop for this family of drafters", expected=" or ".join(_LIVE), found=config.family
        )
    longest = max(len(stream.tokens) for stream in streams)
    drafter = _LIVE[config.family](config, weights, len(streams), longest)
    for number, stream in enumerate(streams):
        drafter.push(number, 0, stream.taps[: stream.anchor])
    while active := [number for number, stream in enumerate(streams) if not stream.finished]:
        if stop is not None and stop():
            raise Interrupted("live decoding was stopped")
        anchors = np.array([streams[number].anchor for number in active])
        tokens = np.array([streams[number].tokens[streams[number].anchor] for number in active])
        proposed = drafter.propose(np.array(active), tokens, anchors)
        for number, drafts in zip(active, proposed.tolist(), strict=True):
            stream = streams[number]
            accepted = 0
            for draft in drafts:
                row = stream.anchor + 1 + accepted
                if row == len(stream.tokens) or stream.tokens[row] != draft:
                    break
                accepted += 1
            bonus = stream.anchor + accepted + 1
            drafter.push(number, stream.anchor, stream.taps[stream.anchor : bonus])
            stream.rounds.append(
                K2Round(
                    request=stream.name,
                    anchor=stream.anchor,
                    drafts=(drafts[0], drafts[1]),
                    accepted=accepted,
                    next_anchor=bonus,
                )
            )
            stream.anchor = bonus
        if progress is not None:
            progress(len(active))
    return streams
